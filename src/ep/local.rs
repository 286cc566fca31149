//! One rank: tokens stay where they are.

use crate::error::Result;
use crate::kernels::Kernels;

use super::dispatcher_state::DispatcherState;
use super::packing::{ReceivedRows, RowMover};
use super::row_transport::{HandleCall, ReturnRows, RowTransport};
use super::{DispatchInputs, DispatcherKind, RowOrder};

/// Dispatcher of a group of one rank. No call is a collective: the experts read the caller's tokens through a map.
#[derive(Debug)]
pub struct Local<D: Kernels> {
    pub(super) core: DispatcherState<D>,
}

impl<D: Kernels> RowTransport<D> for Local<D> {
    const KIND: DispatcherKind = DispatcherKind::Local;
    const ROW_ORDER: RowOrder = RowOrder::Local;

    fn core(&mut self) -> &mut DispatcherState<D> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<D>> {
        Ok(self.core)
    }

    fn send(&mut self, _: &HandleCall<'_, D>, _: &DispatchInputs<'_, D>) -> Result<ReceivedRows<D>> {
        Ok(ReceivedRows { rows: None, weights: None, scales: None })
    }

    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()> {
        let device = &self.core.device;
        let map = step.handle.plan.return_map.view();
        let mover = RowMover::of(device, step.handle);
        mover.reduce(back.rows, map, back.out)?;
        match (back.out_weights, back.weights) {
            (Some(out), Some(weights)) => mover.gather_elements(weights, map, out),
            (Some(out), None) => device.zero(out.into_data()),
            (None, _) => Ok(()),
        }
    }
}
