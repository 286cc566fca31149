//! Refusals: what fails on one rank is reported to the others, which wait for it in a collective.

use crate::comm::{Op, Tag};
use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;

use super::definition::Layer;

/// Passes `result` on. An error is first reported to the other ranks, which are in the collective `op` or on their way to
/// it: they get its text at once.
pub(super) fn refuse_on_error<D: Kernels, T>(
    layer: &Layer,
    group: &mut Group<D>,
    op: Op,
    result: Result<T>,
) -> Result<T> {
    result.map_err(|error| refuse(layer, group, op, error))
}

fn refuse<D: Kernels>(layer: &Layer, group: &mut Group<D>, op: Op, error: Error) -> Error {
    let tag = Tag { layer: layer.number, op, sequence: 0 };
    group.refuse(tag, &error);
    error
}

impl Layer {
    /// Meets the other ranks' [`forward`](Self::forward) as a failure: for an adapter that cannot call it. They get
    /// this error's text at once; between threads the group stays usable. Returns the error.
    pub fn refuse_forward<D: Kernels>(&self, group: &mut Group<D>, error: Error) -> Error {
        refuse(self, group, Op::Prepare, error)
    }

    /// [`refuse_forward`](Self::refuse_forward), for [`backward`](Self::backward).
    pub fn refuse_backward<D: Kernels>(&self, group: &mut Group<D>, error: Error) -> Error {
        refuse(self, group, Op::CombineBwd, error)
    }

    /// The same for a [combine](Self::combine_into) by itself.
    #[cfg(feature = "candle")]
    pub(crate) fn refuse_combine<D: Kernels>(&self, group: &mut Group<D>, error: Error) -> Error {
        refuse(self, group, Op::Combine, error)
    }
}

/// A call of a layer that an adapter is about to make, and that the other ranks may be in already: what fails before
/// the layer is [entered](Self::enter), which tells its own errors, is told to them.
#[cfg(any(feature = "candle", feature = "burn"))]
#[derive(Debug)]
pub(crate) struct RefusalGuard<'a, D: Kernels> {
    layer: &'a Layer,
    group: &'a mut Group<D>,
    op: Op,
    entered: bool,
}

#[cfg(any(feature = "candle", feature = "burn"))]
impl<'a, D: Kernels> RefusalGuard<'a, D> {
    /// Of [`Layer::forward`].
    pub(crate) fn forward(layer: &'a Layer, group: &'a mut Group<D>) -> Self {
        Self { layer, group, op: Op::Prepare, entered: false }
    }

    /// Of [`Layer::backward`].
    pub(crate) fn backward(layer: &'a Layer, group: &'a mut Group<D>) -> Self {
        Self { layer, group, op: Op::CombineBwd, entered: false }
    }

    /// Of a part of the layer that begins with the collective `op`.
    pub(crate) fn of(layer: &'a Layer, group: &'a mut Group<D>, op: Op) -> Self {
        Self { layer, group, op, entered: false }
    }

    /// Runs the adapter's work before, around and after the layer's call.
    ///
    /// # Errors
    /// The work's, which the other ranks are told where the layer was not entered.
    pub(crate) fn run<T>(mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let result = work(&mut self);
        if self.entered { result } else { refuse_on_error(self.layer, self.group, self.op, result) }
    }

    /// The group's device.
    #[cfg_attr(not(feature = "candle"), allow(dead_code, reason = "candle's backward alone asks for it"))]
    pub(crate) fn device(&self) -> &D {
        self.group.device()
    }

    /// The group, for the layer's call.
    pub(crate) fn enter(&mut self) -> &mut Group<D> {
        self.entered = true;
        self.group
    }
}
