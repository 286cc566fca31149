//! Rows there and back, for low latency.

use crate::cuda::Cuda;
use crate::cuda::low_latency_sort::{self, LowLatencyReceived, SortedRows};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::packing::{RowMover, byte_rows_mut, entries};
use crate::ep::row_transport::written;
use crate::ep::{DispatchInputs, DispatchOutputs, Handle, Received};
use crate::error::{Error, Result};
use crate::nccl_ep::dispatcher::library_handle::{LibraryHandle, LowLatencyRouting};
use crate::nccl_ep::dispatcher::state::NcclEp;
use crate::nccl_ep::dispatcher::steps::{DispatcherCall, RowFormat, open, row_bytes};
use crate::nccl_ep::low_latency::{
    LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyHandle, LowLatencyReceiveArgs,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

/// The handle and what is kept beside it.
fn low_of<'r>(
    call: &'static str,
    routed: &'r mut LibraryHandle,
) -> Result<(&'r mut LowLatencyHandle, &'r mut Option<Tensor<Cuda>>)> {
    let found = match routed {
        LibraryHandle::LowLatency(LowLatencyRouting { pooled, back, .. }) => pooled.get().map(|handle| (handle, back)),
        _ => None,
    };
    found.ok_or_else(|| Error::invalid(call, "handle", "one for low latency", "another"))
}

/// Buffers of a dispatch: those sent beside the caller's rows, and those that receive.
struct LowLatencyBuffers {
    /// Weights, and behind them the token's number.
    packed: Tensor<Cuda>,
    rows: Tensor<Cuda>,
    /// Of rows from each rank.
    counts: Tensor<Cuda>,
    weights: Tensor<Cuda>,
    ids: Tensor<Cuda>,
    scales: Option<Tensor<Cuda>>,
}

impl NcclEp {
    /// Rows as they arrive, and what says which slot is whose.
    pub(in crate::nccl_ep::dispatcher) fn send_low(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        work: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> Result<Received<Cuda>> {
        let tokens = &inputs.tokens;
        let buffers = self.low_latency_buffers(handle, inputs);
        let LowLatencyBuffers { packed, mut rows, mut counts, weights: mut all, mut ids, mut scales } =
            self.refuse_own_error_of(step, handle, buffers)?;
        let moved = RowFormat { dtype: tokens.dtype(), bytes: row_bytes(inputs) };
        // Its error is told when the collective, which the others are in, has ended.
        let mut own = Ok(());
        self.collective(step, handle, moved, |routed| {
            let from = LowLatencyDispatchArgs {
                tokens: tokens.borrow(),
                weights: Some(packed.view()),
                scales: inputs.scales.as_ref().map(TensorRef::borrow),
            };
            let to = LowLatencyReceiveArgs {
                rows: rows.view_mut(),
                counts: counts.view_mut(),
                weights: Some(all.view_mut()),
                ids: Some(ids.view_mut()),
                scales: scales.as_mut().map(Tensor::view_mut),
            };
            let (library, _) = low_of(step.call, routed)?;
            match work {
                None => library.dispatch(from, to),
                Some(work) => library.dispatch_overlapped(from, to, || {
                    own = work();
                    Ok(())
                }),
            }
        })?;
        let sorted =
            own.and_then(|()| self.sorted_low(step.call, handle, inputs.weights.is_some(), [&ids, &all, &counts]));
        let (row_map, weights) = self.refuse_own_error_of(step, handle, sorted)?;
        Ok(Received { rows: Some(rows), weights, scales, map: Some(row_map) })
    }

    /// Which slot each row that came is for, and the slots' weights where they are wanted: of ids, weights and counts
    /// as they came. Keeps the way back.
    fn sorted_low(
        &self,
        call: &'static str,
        handle: &Handle<Cuda>,
        weighted: bool,
        [ids, all, counts]: [&Tensor<Cuda>; 3],
    ) -> Result<(Tensor<Cuda>, Option<Tensor<Cuda>>)> {
        let (DispatcherState { device, config, .. }, spec) = (&self.core, handle.spec());
        let arrived = LowLatencyReceived {
            ids,
            weights: all,
            counts,
            experts: config.num_experts / self.core.ranks(),
            alignment: spec.alignment,
            slots: handle.rows(),
        };
        let SortedRows { row_map, weight_map, weights, return_map } = low_latency_sort::sorted(device, &arrived)?;
        let mut of_slots = weighted.then(|| self.empty(DType::F32, &[handle.rows()])).transpose()?;
        if let Some(out) = &mut of_slots {
            let count = self.core.ranks() * self.max_tokens() * spec.top_k;
            let elements = weights.view().reshape(&[count])?;
            RowMover::of(device, handle).gather_elements(elements, weight_map.view(), out.view_mut())?;
        }
        self.set_return_map(call, handle, return_map)?;
        Ok((row_map, of_slots))
    }

    fn low_latency_buffers(
        &self,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
    ) -> Result<LowLatencyBuffers> {
        let (spec, ranks, tokens) = (handle.spec(), self.core.ranks(), &inputs.tokens);
        let (n, wide) = (ranks * self.max_tokens(), Self::wide(spec));
        let weights = inputs.weights.as_ref().map(TensorRef::borrow);
        Ok(LowLatencyBuffers {
            packed: low_latency_sort::packed_weights(&self.core.device, weights, handle.tokens(), spec.top_k)?,
            rows: self.empty(tokens.dtype(), &[n, tokens.row_bytes() / tokens.dtype().size()])?,
            counts: self.empty(DType::I32, &[ranks])?,
            weights: self.empty(DType::F32, &[n, wide])?,
            ids: self.empty(DType::I32, &[n, wide])?,
            scales: inputs.scales.as_ref().map(|s| self.empty(s.dtype(), &[n, s.row_bytes()])).transpose()?,
        })
    }

    /// The way back of what a dispatch brought.
    fn set_return_map(&self, call: &'static str, handle: &Handle<Cuda>, map: Tensor<Cuda>) -> Result<()> {
        let routing = self.routing_of(call, handle)?;
        let mut guard = open(&routing);
        let (_, back) = low_of(call, &mut guard)?;
        *back = Some(map);
        Ok(())
    }

    /// The same, into slots.
    pub(in crate::nccl_ep::dispatcher) fn send_low_into(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        let device = self.core.device.clone();
        let Received { rows, weights, scales, map } = self.send_low(step, handle, inputs, None)?;
        let Some(map) = &map else { return Ok(()) };
        let end = written(handle);
        let into_slots = || {
            for (from, to) in [(&rows, Some(outputs.tokens)), (&scales, outputs.scales)] {
                if let (Some(from), Some(to)) = (from, to) {
                    RowMover::of(&device, handle).gather(
                        from.view(),
                        entries(map.view(), 0..end)?,
                        byte_rows_mut(to, 0..end)?,
                    )?;
                }
            }
            match (&weights, outputs.weights) {
                (Some(from), Some(to)) => device.copy(from.view().data(), to.into_data()),
                _ => Ok(()),
            }
        };
        let done = into_slots();
        self.refuse_own_error_of(step, handle, done)
    }

    /// Sums of this rank's experts for each row that came, back to where it is from.
    pub(in crate::nccl_ep::dispatcher) fn return_low(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        expert_out: TensorRef<'_, Cuda>,
        mut out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        let device = self.core.device.clone();
        let n = self.core.ranks() * self.max_tokens();
        let sums = self.empty(expert_out.dtype(), &[n, expert_out.row_bytes() / expert_out.dtype().size()]);
        let mut sums = self.refuse_own_error_of(step, handle, sums)?;
        let moved = RowFormat::of(expert_out);
        let reduced = {
            let routing = self.routing_of(step.call, handle)?;
            let guard = open(&routing);
            match &*guard {
                // A handle for wider rows would be another, which has dispatched nothing.
                LibraryHandle::LowLatency(LowLatencyRouting { bytes, .. }) if *bytes < moved.bytes => Err(
                    Error::invalid(step.call, "tensor expert_out", "rows no wider than were dispatched", moved.bytes),
                ),
                LibraryHandle::LowLatency(LowLatencyRouting { back: Some(back), .. }) => {
                    RowMover::of(&device, handle).reduce(expert_out, back.view(), sums.view_mut())
                }
                _ => Err(Error::invalid(step.call, "handle", "one whose rows were dispatched", "a new one")),
            }
        };
        self.refuse_own_error_of(step, handle, reduced)?;
        self.collective(step, handle, moved, |routed| {
            let (library, _) = low_of(step.call, routed)?;
            library.combine(LowLatencyCombineArgs { rows: sums.view(), weights: None, out: out.reborrow() })
        })
    }
}
