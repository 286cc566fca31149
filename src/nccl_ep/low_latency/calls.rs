//! Rows there and back. A call can be taken apart, so that other work runs while rows travel.

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::nccl_ep::result::blank;
use crate::nccl_ep::tensor::{TensorDescriptor, as_moved, check, check_scales, pointer};
use crate::nccl_ep::{result, sys};
use crate::tensor::{TensorMut, TensorRef};

use super::{LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyHandle, LowLatencyLayout, LowLatencyReceiveArgs};

impl LowLatencyHandle {
    /// Sends tokens to the experts of the last update (collective).
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn dispatch(&mut self, from: LowLatencyDispatchArgs<'_>, to: LowLatencyReceiveArgs<'_>) -> Result<()> {
        self.dispatch_with(from, to, None)
    }

    /// The same in two parts: what `work` enqueues runs while rows travel. It must not touch the tensors of this
    /// call, nor begin another of the group.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); what `work` returns, after the call has been ended.
    pub fn dispatch_overlapped<T>(
        &mut self,
        from: LowLatencyDispatchArgs<'_>,
        to: LowLatencyReceiveArgs<'_>,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        once(work, |work| self.dispatch_with(from, to, Some(work)))
    }

    fn dispatch_with(
        &mut self,
        from: LowLatencyDispatchArgs<'_>,
        to: LowLatencyReceiveArgs<'_>,
        work: OverlapWork<'_>,
    ) -> Result<()> {
        const CALL: &str = "LowLatencyHandle::dispatch";
        let LowLatencyDispatchArgs { tokens, weights, scales } = from;
        let LowLatencyReceiveArgs { rows, counts, weights: out_weights, ids: out_ids, scales: out_scales } = to;
        self.check_rows(CALL, (tokens.dtype(), tokens.dims()), (rows.dtype(), rows.dims()))?;
        let (t, n, k, width) = (tokens.rows(), self.rows(), self.top_k, tokens.dims()[1]);
        let scale_bytes = scales.as_ref().map_or(0, TensorRef::row_bytes);
        self.group.options().check_sent((tokens.dtype(), tokens.row_bytes()), scale_bytes)?;
        for (name, there) in
            [("weights", weights.is_some()), ("out_weights", out_weights.is_some()), ("out_ids", out_ids.is_some())]
        {
            self.given(CALL, name, there, LowLatencyLayout::RankMajor)?;
        }
        let entries = match self.layout {
            LowLatencyLayout::ExpertMajor => self.group.local_experts(),
            LowLatencyLayout::RankMajor => self.group.ranks(),
        };
        check(CALL, "counts", (DType::I32, &[entries]), (counts.dtype(), counts.dims()))?;
        if let Some(w) = &weights {
            check(CALL, "weights", (DType::F32, &[t, k]), (w.dtype(), w.dims()))?;
        }
        if let Some(w) = &out_weights {
            check(CALL, "out_weights", (DType::F32, &[n, k]), (w.dtype(), w.dims()))?;
        }
        if let Some(ids) = &out_ids {
            check(CALL, "out_ids", (DType::I32, &[n, k]), (ids.dtype(), ids.dims()))?;
        }
        check_scales(CALL, tokens.dtype(), &scales, t, &out_scales, n)?;

        let row_format = (tokens.dtype(), tokens.row_bytes(), scale_bytes);
        let mut tokens = as_moved(TensorDescriptor::of(CALL, tokens)?, row_format);
        let mut rows = as_moved(self.tensor_descriptor(CALL, rows, width)?, row_format);
        let mut counts = TensorDescriptor::of_mut(CALL, counts)?;
        let mut weights = weights.map(|w| TensorDescriptor::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|t| self.tensor_descriptor(CALL, t, k)).transpose()?;
        let mut out_ids = out_ids.map(|t| self.tensor_descriptor(CALL, t, k)).transpose()?;
        let mut scales = scales.map(|s| TensorDescriptor::of(CALL, s)).transpose()?;
        let mut out_scales = out_scales.map(|t| self.tensor_descriptor(CALL, t, scale_bytes)).transpose()?;
        let mut info: sys::ncclEpLayoutInfo_t = blank();
        match self.layout {
            LowLatencyLayout::ExpertMajor => info.expert_counters = counts.pointer(),
            LowLatencyLayout::RankMajor => info.src_rank_counters = counts.pointer(),
        }
        info.recv_topk_idx_kind = sys::ncclEpExpertIdKind_t::NCCL_EP_EXPERT_ID_LOCAL;
        let mut call = result::Dispatch { inputs: blank(), outputs: blank(), info: &raw const info, config: blank() };
        call.inputs.tokens = tokens.pointer();
        call.inputs.topk_weights = pointer(&mut weights);
        call.inputs.scales = pointer(&mut scales);
        call.outputs.tokens = rows.pointer();
        call.outputs.topk_weights = pointer(&mut out_weights);
        call.outputs.topk_idx = pointer(&mut out_ids);
        call.outputs.scales = pointer(&mut out_scales);
        call.config.send_only = u32::from(work.is_some());
        if scale_bytes > 0 {
            call.config.quant_recipe = sys::ncclEpDispQuant_t::NCCL_EP_DISP_QUANT_FWD;
        }
        // SAFETY: the handle lives and was updated; shapes were checked; the tensors' memory is given back in the order
        // of the stream, and `run_and_complete` ends the call before they can be.
        self.raw_handle.with(CALL, |library, raw, stream| unsafe { result::dispatch(library, raw, &call, stream) })?;
        self.run_and_complete(CALL, work)
    }

    /// Adds the rows of each token (collective): by expert with the weights given, by rank as they are.
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn combine(&mut self, back: LowLatencyCombineArgs<'_>) -> Result<()> {
        self.combine_with(back, None)
    }

    /// The same in two parts, as [`dispatch_overlapped`](Self::dispatch_overlapped).
    ///
    /// # Errors
    /// As [`combine`](Self::combine); what `work` returns, after the call has been ended.
    pub fn combine_overlapped<T>(
        &mut self,
        back: LowLatencyCombineArgs<'_>,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        once(work, |work| self.combine_with(back, Some(work)))
    }

    fn combine_with(&mut self, back: LowLatencyCombineArgs<'_>, work: OverlapWork<'_>) -> Result<()> {
        const CALL: &str = "LowLatencyHandle::combine";
        let LowLatencyCombineArgs { rows, weights, out } = back;
        self.check_rows(CALL, (out.dtype(), out.dims()), (rows.dtype(), rows.dims()))?;
        let width = out.dims()[1];
        if !matches!(rows.dtype(), DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::invalid(CALL, "tensor rows", "bf16, f16 or f32", rows.dtype()));
        }
        self.group.options().check_added(rows.dtype(), width, self.group.sms())?;
        self.given(CALL, "weights", weights.is_some(), LowLatencyLayout::ExpertMajor)?;
        if let Some(w) = &weights {
            check(CALL, "weights", (DType::F32, &[out.dims()[0], self.top_k]), (w.dtype(), w.dims()))?;
        }
        let mut rows = TensorDescriptor::of(CALL, rows.reshape(&self.cube(width))?)?;
        let mut out = TensorDescriptor::of_mut(CALL, out)?;
        let mut weights = weights.map(|w| TensorDescriptor::of(CALL, w)).transpose()?;
        let mut call = result::Combine { inputs: blank(), outputs: blank(), config: blank() };
        call.inputs.tokens = rows.pointer();
        call.outputs.tokens = out.pointer();
        call.outputs.topk_weights = pointer(&mut weights);
        call.config.send_only = u32::from(work.is_some());
        // SAFETY: as for dispatch.
        self.raw_handle.with(CALL, |library, raw, stream| unsafe { result::combine(library, raw, &call, stream) })?;
        self.run_and_complete(CALL, work)
    }

    /// The layout's three dimensions.
    fn cube(&self, width: usize) -> [usize; 3] {
        let (o, ranks) = (self.group.options(), self.group.ranks());
        match self.layout {
            LowLatencyLayout::ExpertMajor => [self.group.local_experts(), ranks * o.max_tokens, width],
            LowLatencyLayout::RankMajor => [ranks, o.max_tokens, width],
        }
    }

    fn tensor_descriptor<'t>(
        &self,
        call: &'static str,
        t: TensorMut<'t, Cuda>,
        width: usize,
    ) -> Result<TensorDescriptor<'t>> {
        TensorDescriptor::of_mut(call, t.reshape(&self.cube(width))?)
    }

    /// Runs the work beside a call, and the call's end, which comes whatever that returns.
    fn run_and_complete(&mut self, call: &'static str, work: OverlapWork<'_>) -> Result<()> {
        let Some(work) = work else { return Ok(()) };
        self.incomplete = true;
        let done = work();
        let config = blank();
        // SAFETY: the call's tensors and structs are the caller's, which waits for this.
        let ended = self
            .raw_handle
            .with(call, |library, raw, stream| unsafe { result::complete(library, raw, &config, stream) });
        self.incomplete = ended.is_err();
        done.and(ended)
    }
}

/// Work beside a call.
type OverlapWork<'a> = Option<&'a mut dyn FnMut() -> Result<()>>;

/// A closure that runs once, as one that returns nothing, and its value.
fn once<T>(
    work: impl FnOnce() -> Result<T>,
    call: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<()>,
) -> Result<T> {
    let (mut work, mut value) = (Some(work), None);
    call(&mut || {
        value = work.take().map(|run| run()).transpose()?;
        Ok(())
    })?;
    value.ok_or_else(|| Error::invalid("LowLatencyHandle", "work", "a value", "none"))
}
