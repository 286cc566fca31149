//! Routing of one step, as the library keeps it in memory of ours.

use std::ffi::c_int;
use std::fmt;

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::tensor::{Described, pointer};
use super::{EpError, Group, result, sys};

/// What a handle is made for; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleOptions {
    /// Choices of a token.
    pub top_k: usize,
    /// Zones begin at multiples of this power of two.
    pub alignment: usize,
}

/// Where [`Handle::update`] leaves its counts: all of one type, I32 or I64.
#[derive(Debug)]
pub struct Counters<'a> {
    /// Padded rows of each local expert, `[L]`.
    pub counts: TensorMut<'a, Cuda>,
    /// First row of each local expert, `[L]`.
    pub offsets: TensorMut<'a, Cuda>,
    /// Padded rows of this rank with nothing dropped, `[1]`.
    pub total: TensorMut<'a, Cuda>,
}

/// Which way a call goes through the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Forward: dispatch brings weights, combine does not.
    Forward,
    /// Backward: dispatch of the output's gradient brings no weights, combine of the rows' gradient does.
    Backward,
}

/// Rows from tokens to experts.
#[derive(Debug)]
pub struct RowsOut<'a> {
    /// `[T, H]`; U8 for opaque rows.
    pub tokens: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed forward, refused backward.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `U8 [T, bytes]`, beside opaque rows only.
    pub scales: Option<TensorRef<'a, Cuda>>,
    /// `[N, H]`, N the group's capacity or what the step needs, or more; pads are zeroed, rows past the zones stay.
    pub out: TensorMut<'a, Cuda>,
    /// `F32 [N]`.
    pub out_weights: Option<TensorMut<'a, Cuda>>,
    /// `U8 [N, bytes]`.
    pub out_scales: Option<TensorMut<'a, Cuda>>,
}

/// Rows from experts back to tokens.
#[derive(Debug)]
pub struct RowsBack<'a> {
    /// `[N, H]`; pads are not read.
    pub rows: TensorRef<'a, Cuda>,
    /// `F32 [N]`; needed backward, refused forward.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `[T, H]`: sums, without weights.
    pub out: TensorMut<'a, Cuda>,
    /// `F32 [T, K]`: each choice's own, 0 where dropped.
    pub out_weights: Option<TensorMut<'a, Cuda>>,
}

/// A handle of a group. Its memory is this crate's; it keeps the group.
pub struct Handle {
    group: Group,
    options: HandleOptions,
    raw: sys::ncclEpHandle_t,
    /// Tokens of the last update.
    tokens: Option<usize>,
    // Freed in the order of the stream, so behind what the library still does with it.
    memory: Tensor<Cuda>,
}

// SAFETY: the library lets any thread use a handle, one at a time, which `&mut self` sees to.
unsafe impl Send for Handle {}
// SAFETY: nothing is called through a shared reference.
unsafe impl Sync for Handle {}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.memory.view().count();
        write!(f, "Handle {{ options: {:?}, tokens: {:?}, bytes: {bytes} }}", self.options, self.tokens)
    }
}

/// Zeros with the two numbers that every struct of the interface begins with.
pub(super) fn blank<T>() -> T {
    // SAFETY: used for this module's config structs only: integers and pointers, for which the interface asks for zeros.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: size and magic are the first two u32 of each.
    unsafe { (&raw mut value).cast::<[u32; 2]>().write([size_of::<T>() as u32, sys::NCCL_EP_MAGIC]) };
    value
}

impl Handle {
    /// A handle that waits for its first update.
    ///
    /// # Errors
    /// [`EpError`] names what the options break.
    pub fn new(group: &Group, options: HandleOptions) -> Result<Self> {
        const CALL: &str = "Handle::new";
        let most = group.options().max_top_k;
        if !(1..=most).contains(&options.top_k) {
            let expected = format!("1..={most} (the group's max_top_k)");
            let found = options.top_k.to_string();
            return Err(EpError::Argument { call: CALL, name: "top_k", expected, found }.into());
        }
        if !options.alignment.is_power_of_two() {
            return Err(EpError::Alignment { found: options.alignment }.into());
        }
        let mut config: sys::ncclEpHandleConfig_t = blank();
        config.dispatch_output_per_expert_alignment = options.alignment;
        let layout = sys::ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR;
        let shape = result::Shape { layout, config: &config, top_k: options.top_k as c_int };
        // SAFETY: the group lives; the shape was checked.
        let bytes = group.with(CALL, |library, _| unsafe { result::handle_mem_size(library, group.raw(), shape) })?;
        let mut memory = Tensor::empty(group.cuda(), DType::U8, &[bytes])?;
        let mut described = Described::of_mut(CALL, memory.view_mut())?;
        // SAFETY: as above; the memory has the size asked for and goes after the handle.
        let raw = group.with(CALL, |library, _| unsafe {
            result::init_handle(library, group.raw(), shape, described.pointer())
        })?;
        Ok(Self { group: group.clone(), options, raw, tokens: None, memory })
    }

    /// What the handle was made for.
    pub fn options(&self) -> &HandleOptions {
        &self.options
    }

    /// Its group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The handle as the library has it, for callers that go beyond this crate's functions.
    pub fn raw(&self) -> sys::ncclEpHandle_t {
        self.raw
    }

    /// Bytes of its memory on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory.view().count()
    }

    /// New routing (collective): `ids [T, K]`, I32 or I64, each −1 or an expert, no expert twice in a token. The library
    /// checks none of that; who calls has.
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn update(&mut self, ids: TensorRef<'_, Cuda>, counters: Counters<'_>) -> Result<()> {
        const CALL: &str = "Handle::update";
        let tokens = ids.rows();
        Error::check_shape(CALL, "ids", &[tokens, self.options.top_k], ids.dims())?;
        if !matches!(ids.dtype(), DType::I32 | DType::I64) {
            return Err(Error::invalid(CALL, "tensor ids", "i32 or i64", ids.dtype()));
        }
        let most = self.group.options().max_tokens;
        if tokens > most {
            return Err(Error::invalid(CALL, "tensor ids", format!("at most {most} tokens"), tokens));
        }
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
        let mut ids = Described::of(CALL, ids)?;
        let mut counts = Described::of_mut(CALL, counters.counts)?;
        let mut offsets = Described::of_mut(CALL, counters.offsets)?;
        let mut total = Described::of_mut(CALL, counters.total)?;
        let mut info: sys::ncclEpLayoutInfo_t = blank();
        info.expert_counters = counts.pointer();
        info.expert_offsets = offsets.pointer();
        info.recv_total_counter = total.pointer();
        let (raw, ids) = (self.raw, ids.pointer());
        let told = (ids.cast_const(), &raw const info);
        // SAFETY: the handle lives; shapes were checked; the tensors' memory is given back in the order of the stream.
        self.group.with(CALL, |library, stream| unsafe { result::update_handle(library, raw, told, stream) })?;
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
                return Err(EpError::RowBytes { what, bytes }.into());
            }
        }
        let most = self.group.options().max_row_bytes;
        if row == 0 || row + scale > most {
            let (expected, found) =
                (format!("1..={most} bytes (the group's max_row_bytes)"), (row + scale).to_string());
            return Err(EpError::Argument { call: "dispatch", name: "row", expected, found }.into());
        }
        Ok(())
    }

    /// Sends tokens to the experts of the last update (collective).
    ///
    /// # Errors
    /// Shapes and types; without a capacity, rows too few for the step, or a graph being recorded.
    pub fn dispatch(&mut self, direction: Direction, rows: RowsOut<'_>) -> Result<()> {
        const CALL: &str = "Handle::dispatch";
        let RowsOut { tokens, weights, scales, out, out_weights, out_scales } = rows;
        self.check_rows(CALL, (tokens.dtype(), tokens.dims()), (out.dtype(), out.dims()))?;
        let scale_bytes = scales.as_ref().map_or(0, TensorRef::row_bytes);
        self.check_bytes(tokens.row_bytes(), scale_bytes)?;
        if self.group.options().capacity.is_none() {
            self.group.cuda().not_captured(CALL, "dispatch without a capacity")?;
        }
        let (t, n, k) = (tokens.rows(), out.dims()[0], self.options.top_k);
        let forward = direction == Direction::Forward;
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
        check_scales(CALL, tokens.dtype(), (&scales, t), (&out_scales, n))?;

        let wire = (tokens.dtype(), tokens.row_bytes(), scale_bytes);
        let mut tokens = on_wire(Described::of(CALL, tokens)?, wire);
        let mut out = on_wire(Described::of_mut(CALL, out)?, wire).in_window(CALL, self.group.places())?;
        let mut weights = weights.map(|w| Described::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|w| Described::of_mut(CALL, w)).transpose()?;
        let mut scales = scales.map(|s| Described::of(CALL, s)).transpose()?;
        let in_window = |s| Described::of_mut(CALL, s)?.in_window(CALL, self.group.places());
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
        self.group.with(CALL, |library, stream| unsafe { result::dispatch(library, self.raw, &call, stream) })
    }

    /// Sums the experts' rows of each token (collective).
    ///
    /// # Errors
    /// Shapes and types.
    pub fn combine(&mut self, direction: Direction, rows: RowsBack<'_>) -> Result<()> {
        const CALL: &str = "Handle::combine";
        let RowsBack { rows, weights, out, out_weights } = rows;
        self.check_rows(CALL, (out.dtype(), out.dims()), (rows.dtype(), rows.dims()))?;
        self.check_bytes(rows.row_bytes(), 0)?;
        if !matches!(rows.dtype(), DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::invalid(CALL, "tensor rows", "bf16, f16 or f32", rows.dtype()));
        }
        let width = out.dims()[1];
        if !width.is_multiple_of(8) {
            return Err(EpError::Width { width }.into());
        }
        let (t, n, k) = (out.dims()[0], rows.rows(), self.options.top_k);
        let backward = direction == Direction::Backward;
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
        let mut rows = Described::of(CALL, rows)?.in_window(CALL, self.group.places())?;
        let mut out = Described::of_mut(CALL, out)?;
        let mut weights = weights.map(|w| Described::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|w| Described::of_mut(CALL, w)).transpose()?;
        let mut call = result::Combine { inputs: blank(), outputs: blank(), config: blank() };
        call.inputs.tokens = rows.pointer();
        call.inputs.topk_weights = pointer(&mut weights);
        call.outputs.tokens = out.pointer();
        call.outputs.topk_weights = pointer(&mut out_weights);
        call.config.pass_direction = pass(direction);
        // SAFETY: as for dispatch.
        self.group.with(CALL, |library, stream| unsafe { result::combine(library, self.raw, &call, stream) })
    }
}

fn pass(direction: Direction) -> sys::ncclEpPassDir_t {
    match direction {
        Direction::Forward => sys::ncclEpPassDir_t::NCCL_EP_FWD_PASS,
        Direction::Backward => sys::ncclEpPassDir_t::NCCL_EP_BWD_PASS,
    }
}

/// Rows as the library moves them: bytes with scales are what it calls fp8, without it moves them as 16-bit elements.
pub(super) fn on_wire<'a>(t: Described<'a>, (dtype, bytes, scale): (DType, usize, usize)) -> Described<'a> {
    match (dtype, scale) {
        (DType::U8, 0) => t.retyped(sys::ncclDataType_t::ncclBfloat16, bytes / 2),
        (DType::U8, _) => t.retyped(sys::ncclDataType_t::ncclFloat8e4m3, bytes),
        _ => t,
    }
}

/// Scales travel beside opaque rows, from so many rows to so many.
pub(super) fn check_scales(
    call: &'static str,
    rows: DType,
    (from, t): (&Option<TensorRef<'_, Cuda>>, usize),
    (to, n): (&Option<TensorMut<'_, Cuda>>, usize),
) -> Result<()> {
    match (from, to) {
        (None, None) => Ok(()),
        (Some(from), Some(to)) => {
            let bytes = from.row_bytes();
            Error::check_dtype(call, "tokens beside scales", DType::U8, rows)?;
            check(call, "scales", (DType::U8, &[t, bytes]), (from.dtype(), from.dims()))?;
            check(call, "out_scales", (DType::U8, &[n, bytes]), (to.dtype(), to.dims()))
        }
        _ => Err(Error::invalid(call, "scales", "on both sides or on none", "on one")),
    }
}

pub(super) fn check(
    call: &'static str,
    name: &str,
    expected: (DType, &[usize]),
    found: (DType, &[usize]),
) -> Result<()> {
    Error::check_dtype(call, name, expected.0, found.0)?;
    Error::check_shape(call, name, expected.1, found.1)
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nothing can be reported from here. A handle of a communicator that is gone is only memory.
        // SAFETY: the handle lives and is not used again.
        let _ = self.group.with("Handle::drop", |library, _| unsafe { result::handle_destroy(library, self.raw) });
    }
}
