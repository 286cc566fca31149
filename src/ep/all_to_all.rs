//! Each token travels once to every rank that has an expert of its; experts' outputs travel back one a choice.

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::TensorRef;

use super::dispatcher_state::DispatcherState;
use super::messages::{GatherSources, Movement, PeerCounts, exchange};
use super::packing::{ReceivedRows, RowMover, RowParts, elements};
use super::row_transport::{HandleCall, ReturnRows, RowTransport};
use super::{DispatchInputs, DispatcherKind, MessageMaps, Plan, RowOrder};

/// Dispatcher over any communicator. Every call is one all-to-all.
///
/// Out, a message is `rows ++ weights ++ scales`: each (token, destination) once, the weights one a choice. Back, one
/// row a kept choice, which the token's owner adds in the order of k: the sum has the same bits for any number of
/// ranks, at the price of more bytes than sums made at the sender.
#[derive(Debug)]
pub struct AllToAll<D: Kernels> {
    pub(super) core: DispatcherState<D>,
}

/// The message maps that plans for this transport have.
pub(super) fn message_maps<D: Kernels>(plan: &Plan<D>) -> Result<&MessageMaps<D>> {
    let missing = || Error::invalid("token dispatcher", "plan.messages", "those of RowOrder::UniqueRows", "none");
    plan.messages.as_ref().ok_or_else(missing)
}

impl<D: Kernels> RowTransport<D> for AllToAll<D> {
    const KIND: DispatcherKind = DispatcherKind::AllToAll;
    const ROW_ORDER: RowOrder = RowOrder::UniqueRows;

    fn core(&mut self) -> &mut DispatcherState<D> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<D>> {
        Ok(self.core)
    }

    fn send(&mut self, step: &HandleCall<'_, D>, inputs: &DispatchInputs<'_, D>) -> Result<ReceivedRows<D>> {
        let m = message_maps(&step.handle.plan)?;
        let sources = GatherSources {
            rows: inputs.tokens.borrow(),
            row_map: m.send_tokens.view(),
            weights: inputs.weights.as_ref().map(|w| elements(w.borrow())).transpose()?,
            weight_map: m.send_choices.view(),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
        };
        let movement = Movement {
            parts: RowParts::of(inputs),
            send: PeerCounts::of(&m.send_rows, &m.slots_at),
            recv: PeerCounts::of(&m.recv_rows, &m.slots_from),
            sources,
            last: false,
        };
        exchange(&mut self.core, step, &movement)
    }

    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()> {
        let plan: &Plan<D> = &step.handle.plan;
        let m = message_maps(plan)?;
        let acc = back.rows.dtype().accumulator();
        let weight = if back.with_weights { acc.size() } else { 0 };
        let parts = RowParts { row: back.rows.row_bytes(), weight, scale: 0 };
        let slots = m.return_slots.view();
        let sources = GatherSources {
            rows: back.rows.borrow(),
            row_map: slots,
            weights: back.weights.as_ref().map(TensorRef::borrow),
            weight_map: slots,
            scales: None,
        };
        let send = PeerCounts::of(&m.slots_from, &m.slots_from);
        let recv = PeerCounts::of(&m.slots_at, &m.slots_at);
        let received = exchange(&mut self.core, step, &Movement { parts, send, recv, sources, last: true })?;
        let mover = RowMover::of(&self.core.device, step.handle);
        let map = plan.return_map.view();
        if let Some(rows) = &received.rows {
            mover.reduce(rows.view(), map, back.out)?;
        }
        if let (Some(out), Some(weights)) = (back.out_weights, &received.weights) {
            mover.gather_elements(weights.view(), map, out)?;
        }
        Ok(())
    }
}
