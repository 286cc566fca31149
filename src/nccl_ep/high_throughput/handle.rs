//! Routing of one step, as the library keeps it in memory of ours.

use std::fmt;

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::nccl_ep::raw_handle::{HandleSizes, RawHandle, check_ids};
use crate::nccl_ep::result::blank;
use crate::nccl_ep::tensor::{TensorDescriptor, as_moved, check, check_scales, pointer};
use crate::nccl_ep::{NcclEpError, result, sys};
use crate::tensor::TensorRef;

use super::rows::pass;
use super::{CombineArgs, DispatchArgs, HighThroughputGroup, PassDirection, UpdateCounters};

/// Options of a handle; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleOptions {
    /// Choices of a token.
    pub top_k: usize,
    /// Segments begin at multiples of this power of two.
    pub alignment: usize,
}

/// A handle of a group. Its memory is this crate's; it keeps the group.
pub struct HighThroughputHandle {
    raw_handle: RawHandle,
    group: HighThroughputGroup,
    options: HandleOptions,
    /// Tokens of the last update.
    tokens: Option<usize>,
}

impl fmt::Debug for HighThroughputHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes();
        write!(f, "HighThroughputHandle {{ options: {:?}, tokens: {:?}, bytes: {bytes} }}", self.options, self.tokens)
    }
}

impl HighThroughputHandle {
    /// A handle that waits for its first update.
    ///
    /// # Errors
    /// [`NcclEpError`] names what the options break.
    pub fn new(group: &HighThroughputGroup, options: HandleOptions) -> Result<Self> {
        const CALL: &str = "HighThroughputHandle::new";
        let most = group.options().max_top_k;
        if !(1..=most).contains(&options.top_k) {
            let expected = format!("1..={most} (the group's max_top_k)");
            let found = options.top_k.to_string();
            return Err(NcclEpError::Argument { call: CALL, name: "top_k", expected, found }.into());
        }
        if !options.alignment.is_power_of_two() {
            return Err(NcclEpError::Alignment { found: options.alignment }.into());
        }
        let layout = sys::ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR;
        let raw_handle = RawHandle::new(
            CALL,
            group.raw_group(),
            HandleSizes { layout, alignment: options.alignment, top_k: options.top_k },
        )?;
        Ok(Self { raw_handle, group: group.clone(), options, tokens: None })
    }

    /// Options that the handle was made with.
    pub fn options(&self) -> &HandleOptions {
        &self.options
    }

    /// Its group.
    pub fn group(&self) -> &HighThroughputGroup {
        &self.group
    }

    /// The handle as the library has it, for callers that go beyond this crate's functions.
    pub fn raw(&self) -> sys::ncclEpHandle_t {
        self.raw_handle.raw()
    }

    /// Bytes of its memory on the GPU.
    pub fn bytes(&self) -> usize {
        self.raw_handle.bytes()
    }

    /// New routing (collective): `ids [T, K]`, I32 or I64, each −1 or an expert, no expert twice in a token. The
    /// library checks none of that; who calls has.
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn update(&mut self, ids: TensorRef<'_, Cuda>, counters: UpdateCounters<'_>) -> Result<()> {
        const CALL: &str = "HighThroughputHandle::update";
        let tokens = check_ids(CALL, ids, (self.options.top_k, self.group.options().max_tokens))?;
        let (local, dtype) = (self.group.local_experts(), counters.counts.dtype());
        if !matches!(dtype, DType::I32 | DType::I64) {
            return Err(Error::invalid(CALL, "tensor counts", "i32 or i64", dtype));
        }
        for (name, t, size) in
            [("counts", &counters.counts, local), ("offsets", &counters.offsets, local), ("total", &counters.total, 1)]
        {
            Error::check_shape(CALL, name, &[size], t.dims())?;
            Error::check_dtype(CALL, name, dtype, t.dtype())?;
        }
        let mut ids = TensorDescriptor::of(CALL, ids)?;
        let mut counts = TensorDescriptor::of_mut(CALL, counters.counts)?;
        let mut offsets = TensorDescriptor::of_mut(CALL, counters.offsets)?;
        let mut total = TensorDescriptor::of_mut(CALL, counters.total)?;
        let mut info: sys::ncclEpLayoutInfo_t = blank();
        info.expert_counters = counts.pointer();
        info.expert_offsets = offsets.pointer();
        info.recv_total_counter = total.pointer();
        let (ids, info) = (ids.pointer().cast_const(), &raw const info);
        // SAFETY: the handle lives; shapes were checked; the tensors' memory is given back in the order of the stream.
        let update = |library: &_, raw, stream| unsafe { result::update_handle(library, raw, ids, info, stream) };
        self.raw_handle.with(CALL, update)?;
        self.tokens = Some(tokens);
        Ok(())
    }

    /// Tokens of the last update, which every call must have.
    fn updated(&self, call: &'static str) -> Result<usize> {
        self.tokens.ok_or_else(|| Error::invalid(call, "handle", "one that has been updated", "a new one"))
    }

    /// Checks rows on both sides of a call.
    fn check_rows(&self, call: &'static str, near: (DType, &[usize]), far: (DType, &[usize])) -> Result<()> {
        let tokens = self.updated(call)?;
        let width = near.1.get(1).copied().unwrap_or(0);
        Error::check_shape(call, "tokens", &[tokens, width], near.1)?;
        let rows = far.1.first().copied().unwrap_or(0);
        Error::check_shape(call, "rows", &[rows, width], far.1)?;
        Error::check_dtype(call, "rows", near.0, far.0)?;
        match self.group.options().capacity {
            Some(capacity) if rows < capacity => {
                Err(Error::invalid(call, "rows", format!("at least {capacity} (the group's capacity)"), rows))
            }
            _ => Ok(()),
        }
    }

    fn check_bytes(&self, row: usize, scale: usize) -> Result<()> {
        for (what, bytes) in [("a row", row), ("a row of scales", scale)] {
            if !bytes.is_multiple_of(16) {
                return Err(NcclEpError::RowBytes { what, bytes }.into());
            }
        }
        let most = self.group.options().max_row_bytes;
        if row == 0 || row + scale > most {
            let (expected, found) =
                (format!("1..={most} bytes (the group's max_row_bytes)"), (row + scale).to_string());
            return Err(NcclEpError::Argument { call: "dispatch", name: "row", expected, found }.into());
        }
        Ok(())
    }

    /// Sends tokens to the experts of the last update (collective).
    ///
    /// # Errors
    /// Shapes and types; without a capacity, rows too few for the step, or a graph being captured.
    pub fn dispatch(&mut self, direction: PassDirection, rows: DispatchArgs<'_>) -> Result<()> {
        const CALL: &str = "HighThroughputHandle::dispatch";
        let DispatchArgs { tokens, weights, scales, out, out_weights, out_scales } = rows;
        self.check_rows(CALL, (tokens.dtype(), tokens.dims()), (out.dtype(), out.dims()))?;
        let scale_bytes = scales.as_ref().map_or(0, TensorRef::row_bytes);
        self.check_bytes(tokens.row_bytes(), scale_bytes)?;
        if self.group.options().capacity.is_none() {
            self.group.cuda().not_captured(CALL, "dispatch without a capacity")?;
        }
        let (t, n, k) = (tokens.rows(), out.dims()[0], self.options.top_k);
        let forward = direction == PassDirection::Forward;
        let given = |name: &str, present: bool| match present == forward {
            true => Ok(()),
            false if forward => Err(Error::invalid(CALL, format!("tensor {name}"), "weights", "none")),
            false => Err(Error::invalid(CALL, format!("tensor {name}"), "none (backward)", "weights")),
        };
        given("weights", weights.is_some())?;
        given("out_weights", out_weights.is_some())?;
        if let Some(w) = &weights {
            check(CALL, "weights", (DType::F32, &[t, k]), (w.dtype(), w.dims()))?;
        }
        if let Some(w) = &out_weights {
            check(CALL, "out_weights", (DType::F32, &[n]), (w.dtype(), w.dims()))?;
        }
        check_scales(CALL, tokens.dtype(), &scales, t, &out_scales, n)?;

        let row_format = (tokens.dtype(), tokens.row_bytes(), scale_bytes);
        let mut tokens = as_moved(TensorDescriptor::of(CALL, tokens)?, row_format);
        let mut out =
            as_moved(TensorDescriptor::of_mut(CALL, out)?, row_format).in_window(CALL, self.group.places())?;
        let mut weights = weights.map(|w| TensorDescriptor::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|w| TensorDescriptor::of_mut(CALL, w)).transpose()?;
        let mut scales = scales.map(|s| TensorDescriptor::of(CALL, s)).transpose()?;
        let in_window = |s| TensorDescriptor::of_mut(CALL, s)?.in_window(CALL, self.group.places());
        let mut out_scales = out_scales.map(in_window).transpose()?;
        let mut call = result::Dispatch { inputs: blank(), outputs: blank(), info: std::ptr::null(), config: blank() };
        call.inputs.tokens = tokens.pointer();
        call.inputs.topk_weights = pointer(&mut weights);
        call.inputs.scales = pointer(&mut scales);
        call.outputs.tokens = out.pointer();
        call.outputs.topk_weights = pointer(&mut out_weights);
        call.outputs.scales = pointer(&mut out_scales);
        call.config.pass_direction = pass(direction);
        if scale_bytes > 0 {
            call.config.quant_recipe = sys::ncclEpDispQuant_t::NCCL_EP_DISP_QUANT_FWD;
        }
        // SAFETY: the handle lives and was updated; shapes were checked; the tensors' memory is given back in the order
        // of the stream.
        self.raw_handle.with(CALL, |library, raw, stream| unsafe { result::dispatch(library, raw, &call, stream) })
    }

    /// Sums the experts' rows of each token (collective).
    ///
    /// # Errors
    /// Shapes and types.
    pub fn combine(&mut self, direction: PassDirection, rows: CombineArgs<'_>) -> Result<()> {
        const CALL: &str = "HighThroughputHandle::combine";
        let CombineArgs { rows, weights, out, out_weights } = rows;
        self.check_rows(CALL, (out.dtype(), out.dims()), (rows.dtype(), rows.dims()))?;
        self.check_bytes(rows.row_bytes(), 0)?;
        if !matches!(rows.dtype(), DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::invalid(CALL, "tensor rows", "bf16, f16 or f32", rows.dtype()));
        }
        let width = out.dims()[1];
        if !width.is_multiple_of(8) {
            return Err(NcclEpError::Width { width }.into());
        }
        let (t, n, k) = (out.dims()[0], rows.rows(), self.options.top_k);
        let backward = direction == PassDirection::Backward;
        for (name, present) in [("weights", weights.is_some()), ("out_weights", out_weights.is_some())] {
            if present != backward {
                let (expected, found) = if backward { ("weights", "none") } else { ("none (forward)", "weights") };
                return Err(Error::invalid(CALL, format!("tensor {name}"), expected, found));
            }
        }
        if let Some(w) = &weights {
            check(CALL, "weights", (DType::F32, &[n]), (w.dtype(), w.dims()))?;
        }
        if let Some(w) = &out_weights {
            check(CALL, "out_weights", (DType::F32, &[t, k]), (w.dtype(), w.dims()))?;
        }
        let mut rows = TensorDescriptor::of(CALL, rows)?.in_window(CALL, self.group.places())?;
        let mut out = TensorDescriptor::of_mut(CALL, out)?;
        let mut weights = weights.map(|w| TensorDescriptor::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|w| TensorDescriptor::of_mut(CALL, w)).transpose()?;
        let mut call = result::Combine { inputs: blank(), outputs: blank(), config: blank() };
        call.inputs.tokens = rows.pointer();
        call.inputs.topk_weights = pointer(&mut weights);
        call.outputs.tokens = out.pointer();
        call.outputs.topk_weights = pointer(&mut out_weights);
        call.config.pass_direction = pass(direction);
        // SAFETY: as for dispatch.
        self.raw_handle.with(CALL, |library, raw, stream| unsafe { result::combine(library, raw, &call, stream) })
    }
}
