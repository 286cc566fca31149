//! One rank: tokens stay where they are.

use crate::error::Result;
use crate::kernels::Kernels;

use super::carrier::{Back, Carrier, Step};
use super::core::Core;
use super::view::{Arrived, gather_elements, reduce};
use super::{DispatchInputs, Transport};

/// Dispatcher of a group of one rank. No call is a collective: the experts read the caller's tokens through a map.
#[derive(Debug)]
pub struct Local<D: Kernels> {
    pub(super) core: Core<D>,
}

impl<D: Kernels> Carrier<D> for Local<D> {
    const NAME: &'static str = "local";
    const TRANSPORT: Transport = Transport::Local;

    fn core(&mut self) -> &mut Core<D> {
        &mut self.core
    }

    fn out(&mut self, _: &Step<'_, D>, _: &DispatchInputs<'_, D>) -> Result<Arrived<D>> {
        Ok(Arrived { rows: None, weights: None, scales: None })
    }

    fn back(&mut self, step: &Step<'_, D>, back: Back<'_, D>) -> Result<()> {
        let Core { device, stream, .. } = &self.core;
        let map = step.handle.plan.return_map.view();
        reduce(device, stream, back.rows, map, back.out)?;
        match (back.out_weights, back.weights) {
            (Some(out), Some(weights)) => gather_elements(device, stream, weights, map, out),
            (Some(out), None) => device.zero(out.into_data()),
            (None, _) => Ok(()),
        }
    }
}
