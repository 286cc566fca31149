//! Results into memory of the caller's.

use std::cell::RefCell;
use std::collections::VecDeque;

use candle_core::Tensor;

use crate::adapter::{FrameworkTensors, ResultSpec};
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::device::{CandleDevice, CandleTensors, storage_place};
use super::views_mut::with_views_mut;

/// candle's tensors, with the caller's memory for a call's results, in the order in which the call asks for them.
#[derive(Debug)]
pub(super) struct GivenOutputs<'a, D: CandleDevice> {
    call: &'static str,
    left: RefCell<VecDeque<(&'static str, TensorMut<'a, D>)>>,
}

impl<'a, D: CandleDevice> FrameworkTensors<D> for GivenOutputs<'a, D> {
    type Float = Tensor;
    type Ids = Tensor;
    type Output = TensorMut<'a, D>;

    fn with_views<R>(
        &self,
        device: &D,
        call: &'static str,
        floats: &[(&'static str, &Tensor)],
        ids: Option<&Tensor>,
        work: impl FnOnce(&[TensorRef<'_, D>]) -> Result<R>,
    ) -> Result<R> {
        CandleTensors.with_views(device, call, floats, ids, work)
    }

    fn output(&self, _: &D, spec: ResultSpec<'_>) -> Result<TensorMut<'a, D>> {
        let next = self.left.borrow_mut().pop_front();
        let (name, given) = next.ok_or_else(|| Error::invalid(self.call, "outputs", "one more", "none"))?;
        Error::check_shape(self.call, name, spec.dims, given.dims())?;
        Error::check_dtype(self.call, name, spec.dtype, given.dtype())?;
        Ok(given)
    }

    fn view_mut<'b>(output: &'b mut TensorMut<'a, D>) -> Result<TensorMut<'b, D>> {
        Ok(output.reborrow())
    }

    fn ordered<R>(&self, _: &D, work: impl FnOnce() -> Result<R>) -> Result<R> {
        work()
    }
}

/// Runs `work` with memory of `outputs`, named in errors, for its results; `inputs` are what it reads.
///
/// # Errors
/// Those of `work`. Before it, told to the other ranks by `refuse`: outputs that are not contiguous, are on another device,
/// or share their memory with an input or with each other.
pub(super) fn with_outputs<D: CandleDevice, R>(
    device: &D,
    call: &'static str,
    outputs: &[(&'static str, &Tensor)],
    inputs: &[&Tensor],
    refuse: impl FnOnce(Error) -> Error,
    work: impl FnOnce(&GivenOutputs<'_, D>) -> Result<R>,
) -> Result<R> {
    let mut entered = false;
    let done = check_apart(call, outputs, inputs).and_then(|()| {
        with_views_mut(device, call, outputs, |views| {
            entered = true;
            let left = outputs.iter().map(|(name, _)| *name).zip(views).collect();
            work(&GivenOutputs { call, left: RefCell::new(left) })
        })
    });
    done.map_err(|error| if entered { error } else { refuse(error) })
}

/// Refuses an output whose memory the call uses already: candle's lock would wait for itself.
pub(super) fn check_apart(call: &'static str, outputs: &[(&'static str, &Tensor)], inputs: &[&Tensor]) -> Result<()> {
    let mut places: Vec<usize> = inputs.iter().map(|t| storage_place(t)).collect();
    for (name, output) in outputs {
        let place = storage_place(output);
        if places.contains(&place) {
            let expected = "memory of its own, that is no part of another tensor of the call";
            return Err(Error::invalid(call, *name, expected, "memory that the call uses already"));
        }
        places.push(place);
    }
    Ok(())
}
