//! Each token travels once to every rank that has an expert of its; experts' outputs travel back one a choice.

use std::ops::Range;

use crate::comm::{Exchange, Op};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use super::dispatcher_state::DispatcherState;
use super::packing::{
    MessageTypes, PeerMessage, ReceivedRows, RowMover, RowParts, elements, entries, flat_mut, part_mut, total, unpack,
};
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

/// Rows, weights and scales that messages are gathered from, with the maps that say which.
struct GatherSources<'a, D: Kernels> {
    rows: TensorRef<'a, D>,
    row_map: TensorRef<'a, D>,
    weights: Option<TensorRef<'a, D>>,
    weight_map: TensorRef<'a, D>,
    scales: Option<TensorRef<'a, D>>,
}

/// Counts of rows and choices to and from each rank.
struct PeerCounts<'a> {
    send: (&'a [usize], &'a [usize]),
    recv: (&'a [usize], &'a [usize]),
}

/// Where rank p's entries lie among all ranks'.
fn range(counts: &[usize], p: usize) -> Range<usize> {
    let start: usize = counts[..p].iter().sum();
    start..start + counts[p]
}

impl<D: Kernels> AllToAll<D> {
    fn exchange(
        &mut self,
        step: &HandleCall<'_, D>,
        parts: RowParts,
        traffic: &PeerCounts<'_>,
        sources: &GatherSources<'_, D>,
    ) -> Result<ReceivedRows<D>> {
        let send = parts.messages(traffic.send.0, traffic.send.1);
        let recv = parts.messages(traffic.recv.0, traffic.recv.1);
        let dtype = sources.rows.dtype();
        let content = MessageTypes {
            dtype,
            width: parts.row / dtype.size(),
            weight_dtype: sources.weights.map_or(dtype.accumulator(), |w| w.dtype()),
        };
        let buffers = self.pack(step, parts, traffic.send, &send, sources).and_then(|packed| {
            let device = &self.core.device;
            let (rows, size) = match parts.rows_only() {
                true => (Some(Tensor::empty(device, dtype, &[traffic.recv.0.iter().sum(), content.width])?), 0),
                false => (None, total(&recv)),
            };
            Ok((packed, rows, Tensor::empty(device, DType::U8, &[size])?))
        });
        let (packed, mut rows, mut buffer) = step.refuse_own_error(&mut self.core, buffers)?;
        let lengths = |messages: &[PeerMessage]| -> Vec<usize> { messages.iter().map(|m| m.bytes).collect() };
        let (send_bytes, recv_bytes) = (lengths(&send), lengths(&recv));
        let exchange = Exchange {
            send: packed.view(),
            send_bytes: &send_bytes,
            recv: flat_mut(rows.as_mut().unwrap_or(&mut buffer).view_mut())?,
            recv_bytes: &recv_bytes,
            dtype,
        };
        self.core.comm.all_to_all_v(DispatcherState::tag(step.handle, step.op), exchange)?;
        match rows {
            Some(rows) => Ok(ReceivedRows { rows: Some(rows), weights: None, scales: None }),
            None => {
                let unpacked = unpack(&self.core.device, buffer.view(), &recv, traffic.recv, parts, content);
                match step.op {
                    // The last movement of a forward or a backward.
                    Op::Combine | Op::DispatchBwd => unpacked,
                    _ => step.refuse_own_error(&mut self.core, unpacked),
                }
            }
        }
    }

    fn pack(
        &self,
        step: &HandleCall<'_, D>,
        parts: RowParts,
        (rows, choices): (&[usize], &[usize]),
        messages: &[PeerMessage],
        sources: &GatherSources<'_, D>,
    ) -> Result<Tensor<D>> {
        let device = &self.core.device;
        let mover = RowMover::of(device, step.handle);
        let mut buffer = Tensor::empty(device, DType::U8, &[total(messages)])?;
        if parts.rows_only() {
            let out = buffer.view_mut().reshape(&[sources.row_map.count(), parts.row])?;
            mover.gather(sources.rows, sources.row_map, out)?;
            return Ok(buffer);
        }
        for (p, m) in messages.iter().enumerate() {
            let map = entries(sources.row_map, range(rows, p))?;
            mover.gather(sources.rows, map, part_mut(buffer.view_mut(), m.start, rows[p], parts.row)?)?;
            if let Some(scales) = sources.scales {
                let out = part_mut(buffer.view_mut(), m.scales, rows[p], parts.scale)?;
                mover.gather(scales, map, out)?;
            }
            if parts.weight > 0 {
                let out = part_mut(buffer.view_mut(), m.weights, choices[p], parts.weight)?;
                match sources.weights {
                    Some(w) => mover.gather(w, entries(sources.weight_map, range(choices, p))?, out)?,
                    None => device.zero(out.into_data())?,
                }
            }
        }
        Ok(buffer)
    }
}

/// The message maps that plans for this transport have.
fn messages<D: Kernels>(plan: &Plan<D>) -> Result<&MessageMaps<D>> {
    let missing = || Error::invalid("all_to_all", "plan.messages", "those of RowOrder::UniqueRows", "none");
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
        let m = messages(&step.handle.plan)?;
        let traffic = PeerCounts { send: (&m.send_rows, &m.slots_at), recv: (&m.recv_rows, &m.slots_from) };
        let sources = GatherSources {
            rows: inputs.tokens.borrow(),
            row_map: m.send_tokens.view(),
            weights: inputs.weights.as_ref().map(|w| elements(w.borrow())).transpose()?,
            weight_map: m.send_choices.view(),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
        };
        self.exchange(step, RowParts::of(inputs), &traffic, &sources)
    }

    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()> {
        let plan: &Plan<D> = &step.handle.plan;
        let m = messages(plan)?;
        let acc = back.rows.dtype().accumulator();
        let weight = if back.with_weights { acc.size() } else { 0 };
        let parts = RowParts { row: back.rows.row_bytes(), weight, scale: 0 };
        let traffic = PeerCounts { send: (&m.slots_from, &m.slots_from), recv: (&m.slots_at, &m.slots_at) };
        let slots = m.return_slots.view();
        let sources = GatherSources {
            rows: back.rows.borrow(),
            row_map: slots,
            weights: back.weights.as_ref().map(TensorRef::borrow),
            weight_map: slots,
            scales: None,
        };
        let received = self.exchange(step, parts, &traffic, &sources)?;
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
