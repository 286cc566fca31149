//! A value that plain operations have made outside candle's graph, and a function for its gradients.

use std::mem;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Error, InplaceOp1, Layout, Result, Shape, Tensor,
};

/// Gradients of an operation's inputs, in their order; `None` for one that is not asked for.
pub(crate) type Gradients = Vec<Option<Tensor>>;

/// `value`, a tensor whose memory no other tensor sees (no input, no view or clone of one: its memory is taken, and they
/// would be left without), as the result of an operation on one to three `inputs`. Its backward calls
/// `backward` with the inputs, the value and the value's gradient, none of them tracked, and gets the inputs' gradients.
///
/// # Errors
/// Another number of inputs; candle's.
pub(crate) fn with_backward(
    name: &'static str,
    inputs: &[&Tensor],
    value: Tensor,
    backward: impl Fn(&[Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !inputs.iter().any(|input| input.track_op()) {
        return Ok(value);
    }
    let computed = Computed { name, value: Mutex::new(Some(value)), backward };
    match inputs {
        [a] => a.apply_op1(computed),
        [a, b] => a.apply_op2(b, computed),
        [a, b, c] => a.apply_op3(b, c, computed),
        _ => Err(Error::msg(format!("{name}: expected 1 to 3 inputs, found {}", inputs.len()))),
    }
}

/// `value`, a tensor as [`with_backward`] takes it, as the result of an operation on one to three `inputs` on whose numbers
/// it does not depend. Their gradients are zeros, so that backward goes on to what they were made of; nothing computes.
///
/// # Errors
/// As [`with_backward`].
pub(crate) fn with_zero_gradients(name: &'static str, inputs: &[&Tensor], value: Tensor) -> Result<Tensor> {
    let asked: Vec<bool> = inputs.iter().map(|input| input.track_op()).collect();
    with_backward(name, inputs, value, move |inputs, _, _| {
        let gradient = |(input, asked): (&Tensor, &bool)| asked.then(|| input.zeros_like()).transpose();
        inputs.iter().zip(&asked).map(gradient).collect()
    })
}

struct Computed<F> {
    name: &'static str,
    /// Until candle's operation takes it.
    value: Mutex<Option<Tensor>>,
    backward: F,
}

/// Takes a tensor's memory, and leaves it as good as none.
#[derive(Default)]
struct Take {
    cpu: Mutex<Option<CpuStorage>>,
    cuda: Mutex<Option<CudaStorage>>,
}

fn put<T>(place: &Mutex<Option<T>>, value: T) {
    *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
}

fn take<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let empty = storage.device().zeros_impl(&Shape::from(0), storage.dtype())?;
        put(&self.cpu, mem::replace(storage, empty));
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let empty = storage.device().zeros_impl(&Shape::from(1), storage.dtype())?;
        put(&self.cuda, mem::replace(storage, empty));
        Ok(())
    }
}

impl<F: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Gradients>> Computed<F> {
    /// The value's memory, behind which nobody else may be.
    fn take(&self) -> Result<(Take, Shape)> {
        let value = take(&self.value).ok_or_else(|| Error::msg(format!("{}: ran twice", self.name)))?;
        let own = value.is_contiguous() && value.layout().start_offset() == 0;
        let value = if own { value } else { value.force_contiguous()? };
        let memory = Take::default();
        // In one dimension: behind a dimension of 0 others have strides of 0, which candle takes for repeated elements.
        value.flatten_all()?.inplace_op1(&memory)?;
        Ok((memory, value.shape().clone()))
    }

    fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        let (memory, shape) = self.take()?;
        let memory = take(&memory.cpu).ok_or_else(|| Error::msg(format!("{}: a value of a GPU", self.name)))?;
        Ok((memory, shape))
    }

    fn on_cuda(&self) -> Result<(CudaStorage, Shape)> {
        let (memory, shape) = self.take()?;
        let memory = take(&memory.cuda).ok_or_else(|| Error::msg(format!("{}: a value of the CPU", self.name)))?;
        Ok((memory, shape))
    }

    fn gradients<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        value: &Tensor,
        of: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let inputs = inputs.map(Tensor::detach);
        let gradients = (self.backward)(&inputs, &value.detach(), &of.detach())?;
        gradients.try_into().map_err(|found: Gradients| {
            Error::msg(format!("{}: expected {N} gradients, found {}", self.name, found.len()))
        })
    }
}

impl<F: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync> CustomOp1 for Computed<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda()
    }

    fn bwd(&self, a: &Tensor, value: &Tensor, of: &Tensor) -> Result<Option<Tensor>> {
        let [a] = self.gradients([a], value, of)?;
        Ok(a)
    }
}

impl<F: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync> CustomOp2 for Computed<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda()
    }

    fn bwd(&self, a: &Tensor, b: &Tensor, value: &Tensor, of: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.gradients([a, b], value, of)?;
        Ok((a, b))
    }
}

impl<F: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Gradients> + Send + Sync> CustomOp3 for Computed<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda()
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        value: &Tensor,
        of: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = self.gradients([a, b, c], value, of)?;
        Ok((a, b, c))
    }
}
