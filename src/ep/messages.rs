//! One exchange of messages between all ranks: rows, weights and scales are gathered into a message for each rank, and those
//! that come are taken apart.

use std::ops::Range;

use crate::comm::Exchange;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use super::dispatcher_state::DispatcherState;
use super::packing::{
    MessageTypes, PeerMessage, ReceivedRows, RowMover, RowParts, entries, flat_mut, part_mut, total, unpack,
};
use super::row_transport::HandleCall;

/// What one exchange moves.
pub(super) struct Movement<'a, D: Kernels> {
    pub parts: RowParts,
    pub send: PeerCounts<'a>,
    pub recv: PeerCounts<'a>,
    pub sources: GatherSources<'a, D>,
    /// Whether it is the last of a forward or a backward: behind it nobody is told that a rank could not take its messages
    /// apart.
    pub last: bool,
}

/// Rows and weights of the message to, or from, each rank.
#[derive(Clone, Copy)]
pub(super) struct PeerCounts<'a> {
    pub rows: &'a [usize],
    /// Entries of [`RowParts::weight`] bytes.
    pub weights: &'a [usize],
}

/// Rows, weights and scales that messages are gathered from, with the maps that say which.
pub(super) struct GatherSources<'a, D: Kernels> {
    pub rows: TensorRef<'a, D>,
    pub row_map: TensorRef<'a, D>,
    /// In rows of [`RowParts::weight`] bytes; absent, but a part of the messages: zeros.
    pub weights: Option<TensorRef<'a, D>>,
    pub weight_map: TensorRef<'a, D>,
    pub scales: Option<TensorRef<'a, D>>,
}

impl<'a> PeerCounts<'a> {
    pub fn of(rows: &'a [usize], weights: &'a [usize]) -> Self {
        Self { rows, weights }
    }
}

/// Where rank p's entries lie among all ranks'.
pub(super) fn range(counts: &[usize], p: usize) -> Range<usize> {
    let start: usize = counts[..p].iter().sum();
    start..start + counts[p]
}

/// Sends each rank its message, and takes those apart that come: one collective.
///
/// # Errors
/// No memory, which the others are told; the collective's.
pub(super) fn exchange<D: Kernels>(
    core: &mut DispatcherState<D>,
    step: &HandleCall<'_, D>,
    movement: &Movement<'_, D>,
) -> Result<ReceivedRows<D>> {
    let Movement { parts, recv: received, sources, .. } = movement;
    let send = parts.messages(movement.send.rows, movement.send.weights);
    let recv = parts.messages(received.rows, received.weights);
    let dtype = sources.rows.dtype();
    let content = MessageTypes {
        dtype,
        width: parts.row / dtype.size(),
        weight_dtype: sources.weights.map_or(dtype.accumulator(), |w| w.dtype()),
    };
    let buffers = pack(&core.device, step, movement, &send).and_then(|packed| {
        let (rows, size) = match parts.rows_only() {
            true => {
                let dims = [received.rows.iter().sum(), content.width];
                (Some(Tensor::empty(&core.device, dtype, &dims)?), 0)
            }
            false => (None, total(&recv)),
        };
        Ok((packed, rows, Tensor::empty(&core.device, DType::U8, &[size])?))
    });
    let (packed, mut rows, mut buffer) = step.refuse_own_error(core, buffers)?;
    let lengths = |messages: &[PeerMessage]| -> Vec<usize> { messages.iter().map(|m| m.bytes).collect() };
    let (send_bytes, recv_bytes) = (lengths(&send), lengths(&recv));
    let exchange = Exchange {
        send: packed.view(),
        send_bytes: &send_bytes,
        recv: flat_mut(rows.as_mut().unwrap_or(&mut buffer).view_mut())?,
        recv_bytes: &recv_bytes,
        dtype,
    };
    core.comm.all_to_all_v(DispatcherState::tag(step.handle, step.op), exchange)?;
    match rows {
        Some(rows) => Ok(ReceivedRows { rows: Some(rows), weights: None, scales: None }),
        None => {
            let counts = (received.rows, received.weights);
            let unpacked = unpack(&core.device, buffer.view(), &recv, counts, *parts, content);
            if movement.last { unpacked } else { step.refuse_own_error(core, unpacked) }
        }
    }
}

fn pack<D: Kernels>(
    device: &D,
    step: &HandleCall<'_, D>,
    Movement { parts, send: counts, sources, .. }: &Movement<'_, D>,
    messages: &[PeerMessage],
) -> Result<Tensor<D>> {
    let mover = RowMover::of(device, step.handle);
    let mut buffer = Tensor::empty(device, DType::U8, &[total(messages)])?;
    if parts.rows_only() {
        let out = buffer.view_mut().reshape(&[sources.row_map.count(), parts.row])?;
        mover.gather(sources.rows, sources.row_map, out)?;
        return Ok(buffer);
    }
    for (p, m) in messages.iter().enumerate() {
        let map = entries(sources.row_map, range(counts.rows, p))?;
        mover.gather(sources.rows, map, part_mut(buffer.view_mut(), m.start, counts.rows[p], parts.row)?)?;
        if let Some(scales) = sources.scales {
            let out = part_mut(buffer.view_mut(), m.scales, counts.rows[p], parts.scale)?;
            mover.gather(scales, map, out)?;
        }
        if parts.weight > 0 {
            let out = part_mut(buffer.view_mut(), m.weights, counts.weights[p], parts.weight)?;
            match sources.weights {
                Some(w) => mover.gather(w, entries(sources.weight_map, range(counts.weights, p))?, out)?,
                None => device.zero(out.into_data())?,
            }
        }
    }
    Ok(buffer)
}
