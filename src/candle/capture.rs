//! CUDA graphs of steps in candle: a user's model, its layers and its optimizer, captured once and replayed.

use std::fmt;
use std::marker::PhantomData;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Device, Result, Tensor};

use crate::cuda::{Captured, Cuda};
use crate::error::Error;

use super::device::location;
use super::error::framework;
use super::group::DeviceGroup;
use super::optimizer::AdamW;

const CALL: &str = "candle::Capture";
/// What to write in place of what a capture cannot hold.
const HINT: &str = "in candle::Capture::run, whose first run of the calls has taken effect; what a capture holds reads \
                    nothing on the host (read after a replay) and copies nothing new from it (make tensors before, and \
                    change them in place with Tensor::slice_set)";

/// A device whose work can be captured: one of `Device::new_cuda_with_stream` on which candle does not track the uses of
/// tensors by events. An event of a tensor that was made before a capture cannot be waited for in it, so tracking is off
/// before the first tensor is made. All tensors of the device are used on its one stream, which orders them.
///
/// # Errors
/// candle's, where there is no such GPU.
pub fn device_for_capture(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    // SAFETY: candle enqueues all work on the device's tensors on its one stream, and this crate that of its other
    // streams between events of its own, so no use needs an event of candle's.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}

/// Who takes part in a capture: the device, and the groups and optimizers whose calls are in the step.
///
/// ```no_run
/// use candle_core::{DType, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use moebius::{MoeConfig, candle};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = candle::device_for_capture(0)?;
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::BF16, &device);
/// let moe = candle::moe(MoeConfig::new(2048, 768, 128, 8), vb)?;
/// let x = Tensor::zeros((16, 2048), DType::BF16, &device)?;
/// let capture = candle::Capture::new(&device)?.group(moe.group())?;
/// // SAFETY: nothing replaces x or a weight of the layer while the step lives.
/// let mut step = unsafe { capture.run(|| Ok(vec![(moe.forward(&x)? + &x)?])) }?;
/// for _token in 0..100 {
///     x.slice_set(&Tensor::arange(0f32, 32768., &device)?.sin()?.reshape((16, 2048))?.to_dtype(DType::BF16)?, 0, 0)?; // in place
///     step.replay()?;
///     println!("{}", step.outputs()[0]);
/// }
/// # Ok(()) }
/// ```
///
/// A training step is captured alike, with [`MainGradients`](super::MainGradients), whose memory stays, and [`AdamW`],
/// which counts its steps and reads its learning rates on the device; [`AdamW::write_options`] changes them between
/// replays.
///
/// A replay launches the same kernels on the same memory. So what the calls read from the host is what it was in the
/// capture: numbers in operations (candle-nn's own optimizers take a learning rate and a step count so), the step of
/// a router's jitter, the sizes of tensors, choices made in Rust. What replays draw from candle's own generator
/// (`Tensor::rand`, dropout) is not said: draw random numbers before a replay, into an input. Inputs change in
/// place, by [`Tensor::slice_set`]. Refused are a wait for the device (`to_vec`, `to_scalar`, `Lazy::get`), a copy
/// from the host of more than 4096 bytes or of others than in the first run, and an expert capacity that the host
/// plans. A module's `last_load` and `last_aux` have nothing of a captured forward.
#[derive(Debug)]
pub struct Capture {
    device: Device,
    devices: Vec<Cuda>,
}

impl Capture {
    /// A capture of candle's operations on `device`, which is one of [`device_for_capture`].
    ///
    /// # Errors
    /// Another device.
    pub fn new(device: &Device) -> Result<Self> {
        let expected = "one of candle::device_for_capture";
        let refused = |found: String| Error::invalid(CALL, "device", expected, found);
        let cuda = device.as_cuda_device().map_err(|_| refused(location(device)))?;
        if cuda.is_event_tracking() {
            return Err(refused(format!("{} with candle's event tracking on", location(device))).into());
        }
        Ok(Self { device: device.clone(), devices: vec![super::cuda(device)?] })
    }

    /// With calls of layers of `group`.
    ///
    /// # Errors
    /// A group on another device or stream.
    pub fn group(self, group: &DeviceGroup) -> Result<Self> {
        match group.on::<Cuda>() {
            Some(on) => {
                let cuda = on.lock().device().clone();
                self.with("group", cuda)
            }
            None => Err(self.elsewhere("group", location(group.device()))),
        }
    }

    /// With steps of `optimizer`.
    ///
    /// # Errors
    /// An optimizer on another device or stream.
    pub fn optimizer(self, optimizer: &AdamW) -> Result<Self> {
        match optimizer.cuda() {
            Some(cuda) => self.with("optimizer", cuda),
            None => Err(self.elsewhere("optimizer", "the CPU".to_string())),
        }
    }

    fn with(mut self, name: &str, cuda: Cuda) -> Result<Self> {
        let device = self.device.as_cuda_device()?;
        if !cuda.is_on(&device.cuda_stream()) {
            return Err(self.elsewhere(name, "another CUDA device of candle".to_string()));
        }
        self.devices.push(cuda);
        Ok(self)
    }

    fn elsewhere(&self, name: &str, found: String) -> candle_core::Error {
        Error::invalid(CALL, name, format!("one on the capture's device, {}", location(&self.device)), found).into()
    }

    /// Runs `calls` once, as any step (a training step counts), and captures them when they are called a second time;
    /// what they return is the step's output. The step keeps them, and so what they own or borrow.
    ///
    /// Until it returns, no other thread uses the device, makes another of this GPU, or waits for the GPU's context.
    ///
    /// # Safety
    /// The memory of every tensor from before that `calls` read or write stays theirs for as long as the step lives: a
    /// tensor that they reach through a cell or a lock is not replaced, and [`MainGradients`](super::MainGradients) that
    /// they write are reset by them alone.
    ///
    /// # Errors
    /// Errors of `calls`; what a capture cannot hold: a wait for the device, a larger copy from the host, outputs of
    /// other sizes in the second call, a tensor made by the calls that they leave elsewhere than among the outputs, a
    /// tensor from before that they drop. Nothing of a capture that fails has run; a tensor that its calls have left
    /// somewhere has no memory, and is to be dropped unread.
    pub unsafe fn run<F: FnMut() -> Result<Vec<Tensor>>>(self, calls: F) -> Result<CapturedStep<F>> {
        let mut calls = calls;
        let device = self.device.as_cuda_device()?.clone();
        // Numbers that candle's kernels read from the host come from a cache of this thread's, filled by the first run.
        let _cache = device.enable_cuda_graph_htod_cache();
        let first = calls()?;
        let outputs: Vec<Tensor> = first.iter().map(|t| t.detach().force_contiguous()).collect::<Result<_>>()?;
        // Once eagerly too, for the kernels that it takes.
        write(&outputs, &first)?;
        drop(first);
        let mut failed = None;
        let captured = Cuda::capture_with_framework(&self.devices, || {
            let made = calls().and_then(|made| write(&outputs, &made));
            made.map_err(|error| {
                failed = Some(error);
                Error::invalid(CALL, "calls", "a step", "an error of candle's")
            })
        });
        // candle notes down what failed in freeing a tensor, and returns it from the next call, whatever that is.
        let freed = device.cuda_stream().context().check_err();
        let graph = match (captured, failed) {
            (Err(_), Some(error)) => return Err(error.context(HINT)),
            (Err(error), None) => return Err(error.into()),
            (Ok(graph), _) => graph,
        };
        freed.map_err(|e| framework(CALL)(candle_core::Error::wrap(e)))?;
        Ok(CapturedStep { graph, outputs, _calls: calls, device, _cache: PhantomData })
    }
}

/// Writes outputs to where they stay.
fn write(outputs: &[Tensor], made: &[Tensor]) -> Result<()> {
    Error::check_shape(CALL, "outputs", &[outputs.len()], &[made.len()])?;
    for (output, made) in outputs.iter().zip(made) {
        Error::check_shape(CALL, "an output", output.dims(), made.dims())?;
        if output.elem_count() > 0 {
            output.flatten_all()?.slice_set(&made.detach().flatten_all()?.contiguous()?, 0, 0)?;
        }
    }
    Ok(())
}

/// A captured step, with its calls, which hold what it touches.
///
/// It stays on the thread that captured it: small data of the host that its kernels read are in a cache of that thread.
pub struct CapturedStep<F> {
    graph: Captured<()>,
    outputs: Vec<Tensor>,
    _calls: F,
    device: CudaDevice,
    _cache: PhantomData<*const ()>,
}

impl<F> fmt::Debug for CapturedStep<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedStep").field("device", &self.device).field("outputs", &self.outputs.len()).finish()
    }
}

impl<F> CapturedStep<F> {
    /// Enqueues the step. Collectives in it are watched, all of a replay as one, which ends within the communicator's
    /// timeout or ends the communicator.
    ///
    /// # Errors
    /// What has failed before, as [`check`](Self::check); a communicator of the step that is no more; a driver's error.
    pub fn replay(&mut self) -> Result<()> {
        Ok(self.graph.replay()?)
    }

    /// Whether something that replays depend on has failed, a peer for instance: outputs are then worth nothing. candle's
    /// own waits for the device do not say so. Waits for nothing: to be asked once a replay's outputs have been read.
    ///
    /// # Errors
    /// The first failure.
    pub fn check(&self) -> Result<()> {
        Ok(self.graph.check()?)
    }

    /// The tensors that the calls returned: each replay overwrites them.
    pub fn outputs(&self) -> &[Tensor] {
        &self.outputs
    }
}
