//! Routing and calls for low latency. A call can be taken apart, so that other work runs while rows travel.

use std::ffi::c_int;
use std::fmt;

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::handle::{blank, check, check_scales, on_wire};
use super::tensor::{Described, pointer};
use super::{LowLatencyGroup, result, sys};

/// Where rows arrive. Their order inside a zone or a rank's part is the library's, and not the same in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Each (token, expert): expert e's rows begin at row e · R · M of `[L · R · M, H]`. Weights are applied by combine.
    ExpertMajor,
    /// Each (token, rank): rank r's rows begin at row r · M of `[R · M, H]`, with all choices of the token beside them.
    /// Who has the row adds its experts' outputs, weights included; combine adds those of the ranks.
    RankMajor,
}

/// What a dispatch sends.
#[derive(Debug)]
pub struct Departure<'a> {
    /// `[T, H]`; U8 for opaque rows.
    pub tokens: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed by rank, refused by expert.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `U8 [T, bytes]`, beside opaque rows only.
    pub scales: Option<TensorRef<'a, Cuda>>,
}

/// Where a dispatch leaves it.
#[derive(Debug)]
pub struct Arrival<'a> {
    /// `[N, H]`, N as the layout says; rows that nobody sent stay as they are.
    pub rows: TensorMut<'a, Cuda>,
    /// Rows that arrived: `I32 [L]` by expert, `I32 [R]` by rank.
    pub counts: TensorMut<'a, Cuda>,
    /// `F32 [N, K]`; needed by rank, refused by expert. Of rows that arrived.
    pub weights: Option<TensorMut<'a, Cuda>>,
    /// `I32 [N, K]`: local experts, −1 for those of other ranks and in rows that nobody sent; as `weights`.
    pub ids: Option<TensorMut<'a, Cuda>>,
    /// `U8 [N, bytes]`.
    pub scales: Option<TensorMut<'a, Cuda>>,
}

/// Rows back to their tokens.
#[derive(Debug)]
pub struct SentBack<'a> {
    /// `[N, H]`; rows that nobody sent are not read.
    pub rows: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed by expert, refused by rank.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `[T, H]`.
    pub out: TensorMut<'a, Cuda>,
}

/// A handle of a group for low latency. Its memory is this crate's; it keeps the group.
pub struct LowLatencyHandle {
    group: LowLatencyGroup,
    layout: Layout,
    top_k: usize,
    raw: sys::ncclEpHandle_t,
    /// The last update's, at which the library looks in every call.
    ids: Option<Tensor<Cuda>>,
    /// A call was begun and, by a panic of what ran beside it, never ended.
    torn: bool,
    // Freed in the order of the stream, so behind what the library still does with it.
    memory: Tensor<Cuda>,
}

// SAFETY: the library lets any thread use a handle, one at a time, which `&mut self` sees to.
unsafe impl Send for LowLatencyHandle {}
// SAFETY: nothing is called through a shared reference.
unsafe impl Sync for LowLatencyHandle {}

impl fmt::Debug for LowLatencyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LowLatencyHandle {{ {:?}, top_k: {}, ids: {:?} }}",
            self.layout,
            self.top_k,
            self.ids.as_ref().map(Tensor::dims)
        )
    }
}

impl LowLatencyHandle {
    /// A handle that waits for its first update. Collective, while no rank has calls of the group under way (a barrier
    /// before sees to that): the library may make its buffers now, which graphs that were captured before do not outlive.
    ///
    /// # Errors
    /// [`EpError`](super::EpError) names what `top_k` breaks; a graph being recorded.
    pub fn new(group: &LowLatencyGroup, layout: Layout, top_k: usize) -> Result<Self> {
        const CALL: &str = "LowLatencyHandle::new";
        group.options().check_top_k(top_k, group.processors())?;
        group.cuda().not_captured(CALL, "create an EP handle")?;
        let config: sys::ncclEpHandleConfig_t = blank();
        let order = match layout {
            Layout::ExpertMajor => sys::ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR,
            Layout::RankMajor => sys::ncclEpLayout_t::NCCL_EP_LAYOUT_RANK_MAJOR,
        };
        let shape = result::Shape { layout: order, config: &config, top_k: top_k as c_int };
        // SAFETY: the group lives; the shape was checked.
        let bytes = group.with(CALL, |library, _| unsafe { result::handle_mem_size(library, group.raw(), shape) })?;
        let mut memory = Tensor::empty(group.cuda(), DType::U8, &[bytes])?;
        let mut described = Described::of_mut(CALL, memory.view_mut())?;
        // SAFETY: as above; the memory has the size asked for and goes after the handle.
        let raw = group.with(CALL, |library, _| unsafe {
            result::init_handle(library, group.raw(), shape, described.pointer())
        })?;
        Ok(Self { group: group.clone(), layout, top_k, raw, ids: None, torn: false, memory })
    }

    /// Its group.
    pub fn group(&self) -> &LowLatencyGroup {
        &self.group
    }

    /// Whether a call has not come to its end.
    pub(super) fn is_torn(&self) -> bool {
        self.torn
    }

    /// Choices of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Bytes of its memory on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory.view().count()
    }

    /// Rows N of arrivals.
    pub fn rows(&self) -> usize {
        let (o, ranks) = (self.group.options(), self.group.ranks());
        match self.layout {
            Layout::ExpertMajor => self.group.local_experts() * ranks * o.max_tokens,
            Layout::RankMajor => ranks * o.max_tokens,
        }
    }

    /// New routing: `ids [T, K]`, I32 or I64, each −1 or an expert, no expert twice in a token. The library checks none
    /// of that; who calls has.
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn update(&mut self, ids: Tensor<Cuda>) -> Result<()> {
        const CALL: &str = "LowLatencyHandle::update";
        self.whole(CALL)?;
        let tokens = ids.view().rows();
        Error::check_shape(CALL, "ids", &[tokens, self.top_k], ids.dims())?;
        if !matches!(ids.dtype(), DType::I32 | DType::I64) {
            return Err(Error::invalid(CALL, "tensor ids", "i32 or i64", ids.dtype()));
        }
        let most = self.group.options().max_tokens;
        if tokens > most {
            return Err(Error::invalid(CALL, "tensor ids", format!("at most {most} tokens"), tokens));
        }
        let mut described = Described::of(CALL, ids.view())?;
        let told = (described.pointer().cast_const(), std::ptr::null());
        let raw = self.raw;
        // SAFETY: the handle lives; shapes were checked; the tensor stays until the next update, and its memory is given
        // back in the order of the stream.
        let done =
            self.group.with(CALL, |library, stream| unsafe { result::update_handle(library, raw, told, stream) });
        self.ids = Some(ids).filter(|_| done.is_ok());
        done
    }

    /// Refuses a handle whose last call never ended.
    fn whole(&self, call: &'static str) -> Result<()> {
        match self.torn {
            false => Ok(()),
            true => Err(Error::invalid(call, "handle", "one whose calls have ended", "one torn by a panic")),
        }
    }

    /// Checks rows on both sides of a call.
    fn check_rows(&self, call: &'static str, near: (DType, &[usize]), far: (DType, &[usize])) -> Result<()> {
        self.whole(call)?;
        let new = || Error::invalid(call, "handle", "one that was updated", "a new one");
        let tokens = self.ids.as_ref().ok_or_else(new)?.dims()[0];
        let width = near.1.get(1).copied().unwrap_or(0);
        check(call, "tokens", (near.0, &[tokens, width]), near)?;
        check(call, "rows", (near.0, &[self.rows(), width]), far)
    }

    /// Whether a tensor is there where the layout has it.
    fn given(&self, call: &'static str, name: &str, present: bool, needed: Layout) -> Result<()> {
        match (present, self.layout == needed) {
            (true, true) | (false, false) => Ok(()),
            (false, true) => Err(Error::invalid(call, format!("tensor {name}"), "one, for this layout", "none")),
            (true, false) => Err(Error::invalid(call, format!("tensor {name}"), "none, for this layout", "one")),
        }
    }

    /// Sends tokens to the experts of the last update (collective).
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn dispatch(&mut self, from: Departure<'_>, to: Arrival<'_>) -> Result<()> {
        self.dispatch_beside(from, to, None)
    }

    /// The same in two parts: what `beside` enqueues runs while rows travel. It must not touch the tensors of this call,
    /// nor begin another of the group.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); what `beside` returns, after the call has been ended.
    pub fn dispatch_while<T>(
        &mut self,
        from: Departure<'_>,
        to: Arrival<'_>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        once(beside, |beside| self.dispatch_beside(from, to, Some(beside)))
    }

    fn dispatch_beside(&mut self, from: Departure<'_>, to: Arrival<'_>, beside: Beside<'_>) -> Result<()> {
        const CALL: &str = "LowLatencyHandle::dispatch";
        let Departure { tokens, weights, scales } = from;
        let Arrival { rows, counts, weights: out_weights, ids: out_ids, scales: out_scales } = to;
        self.check_rows(CALL, (tokens.dtype(), tokens.dims()), (rows.dtype(), rows.dims()))?;
        let (t, n, k, width) = (tokens.rows(), self.rows(), self.top_k, tokens.dims()[1]);
        let scale_bytes = scales.as_ref().map_or(0, TensorRef::row_bytes);
        self.group.options().check_sent((tokens.dtype(), tokens.row_bytes()), scale_bytes)?;
        for (name, there) in
            [("weights", weights.is_some()), ("out_weights", out_weights.is_some()), ("out_ids", out_ids.is_some())]
        {
            self.given(CALL, name, there, Layout::RankMajor)?;
        }
        let entries = match self.layout {
            Layout::ExpertMajor => self.group.local_experts(),
            Layout::RankMajor => self.group.ranks(),
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
        check_scales(CALL, tokens.dtype(), (&scales, t), (&out_scales, n))?;

        let wire = (tokens.dtype(), tokens.row_bytes(), scale_bytes);
        let mut tokens = on_wire(Described::of(CALL, tokens)?, wire);
        let mut rows = on_wire(self.described(CALL, rows, width)?, wire);
        let mut counts = Described::of_mut(CALL, counts)?;
        let mut weights = weights.map(|w| Described::of(CALL, w)).transpose()?;
        let mut out_weights = out_weights.map(|t| self.described(CALL, t, k)).transpose()?;
        let mut out_ids = out_ids.map(|t| self.described(CALL, t, k)).transpose()?;
        let mut scales = scales.map(|s| Described::of(CALL, s)).transpose()?;
        let mut out_scales = out_scales.map(|t| self.described(CALL, t, scale_bytes)).transpose()?;
        let mut info: sys::ncclEpLayoutInfo_t = blank();
        match self.layout {
            Layout::ExpertMajor => info.expert_counters = counts.pointer(),
            Layout::RankMajor => info.src_rank_counters = counts.pointer(),
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
        call.config.send_only = u32::from(beside.is_some());
        if scale_bytes > 0 {
            call.config.quant_recipe = sys::ncclEpDispQuant_t::NCCL_EP_DISP_QUANT_FWD;
        }
        let raw = self.raw;
        // SAFETY: the handle lives and was updated; shapes were checked; the tensors' memory is given back in the order
        // of the stream, and `staged` ends the call before they can be.
        self.group.with(CALL, |library, stream| unsafe { result::dispatch(library, raw, &call, stream) })?;
        self.staged(CALL, beside)
    }

    /// Adds the rows of each token (collective): by expert with the weights given, by rank as they are.
    ///
    /// # Errors
    /// Shapes and types; a call of the library that failed.
    pub fn combine(&mut self, back: SentBack<'_>) -> Result<()> {
        self.combine_beside(back, None)
    }

    /// The same in two parts, as [`dispatch_while`](Self::dispatch_while).
    ///
    /// # Errors
    /// As [`combine`](Self::combine); what `beside` returns, after the call has been ended.
    pub fn combine_while<T>(&mut self, back: SentBack<'_>, beside: impl FnOnce() -> Result<T>) -> Result<T> {
        once(beside, |beside| self.combine_beside(back, Some(beside)))
    }

    fn combine_beside(&mut self, back: SentBack<'_>, beside: Beside<'_>) -> Result<()> {
        const CALL: &str = "LowLatencyHandle::combine";
        let SentBack { rows, weights, out } = back;
        self.check_rows(CALL, (out.dtype(), out.dims()), (rows.dtype(), rows.dims()))?;
        let width = out.dims()[1];
        if !matches!(rows.dtype(), DType::BF16 | DType::F16 | DType::F32) {
            return Err(Error::invalid(CALL, "tensor rows", "bf16, f16 or f32", rows.dtype()));
        }
        self.group.options().check_added(rows.dtype(), width, self.group.processors())?;
        self.given(CALL, "weights", weights.is_some(), Layout::ExpertMajor)?;
        if let Some(w) = &weights {
            check(CALL, "weights", (DType::F32, &[out.dims()[0], self.top_k]), (w.dtype(), w.dims()))?;
        }
        let mut rows = Described::of(CALL, rows.reshape(&self.cube(width))?)?;
        let mut out = Described::of_mut(CALL, out)?;
        let mut weights = weights.map(|w| Described::of(CALL, w)).transpose()?;
        let mut call = result::Combine { inputs: blank(), outputs: blank(), config: blank() };
        call.inputs.tokens = rows.pointer();
        call.outputs.tokens = out.pointer();
        call.outputs.topk_weights = pointer(&mut weights);
        call.config.send_only = u32::from(beside.is_some());
        let raw = self.raw;
        // SAFETY: as for dispatch.
        self.group.with(CALL, |library, stream| unsafe { result::combine(library, raw, &call, stream) })?;
        self.staged(CALL, beside)
    }

    /// The layout's three dimensions.
    fn cube(&self, width: usize) -> [usize; 3] {
        let (o, ranks) = (self.group.options(), self.group.ranks());
        match self.layout {
            Layout::ExpertMajor => [self.group.local_experts(), ranks * o.max_tokens, width],
            Layout::RankMajor => [ranks, o.max_tokens, width],
        }
    }

    fn described<'t>(&self, call: &'static str, t: TensorMut<'t, Cuda>, width: usize) -> Result<Described<'t>> {
        Described::of_mut(call, t.reshape(&self.cube(width))?)
    }

    /// What runs beside a call, and the call's end, which comes whatever that returns.
    fn staged(&mut self, call: &'static str, beside: Beside<'_>) -> Result<()> {
        let Some(beside) = beside else { return Ok(()) };
        self.torn = true;
        let done = beside();
        let (raw, config) = (self.raw, blank());
        // SAFETY: the call's tensors and structs are the caller's, which waits for this.
        let ended = self.group.with(call, |library, stream| unsafe { result::complete(library, raw, &config, stream) });
        self.torn = ended.is_err();
        done.and(ended)
    }
}

/// Work beside a call.
type Beside<'a> = Option<&'a mut dyn FnMut() -> Result<()>>;

/// A closure that runs once, as one that returns nothing, and its value.
fn once<T>(
    beside: impl FnOnce() -> Result<T>,
    call: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<()>,
) -> Result<T> {
    let (mut beside, mut value) = (Some(beside), None);
    call(&mut || {
        value = beside.take().map(|run| run()).transpose()?;
        Ok(())
    })?;
    value.ok_or_else(|| Error::invalid("LowLatencyHandle", "beside", "a value", "none"))
}

impl Drop for LowLatencyHandle {
    fn drop(&mut self) {
        // Nothing can be reported from here. A handle of a communicator that is gone is only memory.
        // SAFETY: the handle lives and is not used again.
        let _ = self
            .group
            .with("LowLatencyHandle::drop", |library, _| unsafe { result::handle_destroy(library, self.raw) });
    }
}
