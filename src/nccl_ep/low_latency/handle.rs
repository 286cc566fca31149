//! Routing for low latency, as the library keeps it in memory of ours.

use std::fmt;

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::nccl_ep::raw_handle::{HandleSizes, RawHandle, check_ids};
use crate::nccl_ep::tensor::{TensorDescriptor, check};
use crate::nccl_ep::{result, sys};
use crate::tensor::Tensor;

use super::{LowLatencyGroup, LowLatencyLayout};

/// A handle of a group for low latency. Its memory is this crate's; it keeps the group.
pub struct LowLatencyHandle {
    pub(super) raw_handle: RawHandle,
    pub(super) group: LowLatencyGroup,
    pub(super) layout: LowLatencyLayout,
    pub(super) top_k: usize,
    /// The last update's, at which the library looks in every call.
    ids: Option<Tensor<Cuda>>,
    /// A call was begun and, by a panic of what ran beside it, never ended.
    pub(super) incomplete: bool,
}

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
    /// A handle that waits for its first update. Collective where `top_k` is larger than in any handle of the group
    /// before, or the layout has not been met: the library makes its buffers now, so no rank may have calls of the
    /// group under way (a barrier before sees to that), and graphs that were captured before do not outlive it.
    /// Otherwise it is each rank's own affair. Both as of NCCL EP 0.2.0.
    ///
    /// # Errors
    /// [`NcclEpError`](crate::nccl_ep::NcclEpError) names what `top_k` breaks; a graph being captured.
    pub fn new(group: &LowLatencyGroup, layout: LowLatencyLayout, top_k: usize) -> Result<Self> {
        const CALL: &str = "LowLatencyHandle::new";
        group.options().check_top_k(top_k, group.sms())?;
        group.cuda().not_captured(CALL, "create an EP handle")?;
        let order = match layout {
            LowLatencyLayout::ExpertMajor => sys::ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR,
            LowLatencyLayout::RankMajor => sys::ncclEpLayout_t::NCCL_EP_LAYOUT_RANK_MAJOR,
        };
        let raw_handle = RawHandle::new(CALL, group.raw_group(), HandleSizes { layout: order, alignment: 0, top_k })?;
        Ok(Self { raw_handle, group: group.clone(), layout, top_k, ids: None, incomplete: false })
    }

    /// Its group.
    pub fn group(&self) -> &LowLatencyGroup {
        &self.group
    }

    /// Whether a call has not come to its end.
    pub(in crate::nccl_ep) fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    /// Choices of a token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Bytes of its memory on the GPU.
    pub fn bytes(&self) -> usize {
        self.raw_handle.bytes()
    }

    /// Rows N of arrivals.
    pub fn rows(&self) -> usize {
        let (o, ranks) = (self.group.options(), self.group.ranks());
        match self.layout {
            LowLatencyLayout::ExpertMajor => self.group.local_experts() * ranks * o.max_tokens,
            LowLatencyLayout::RankMajor => ranks * o.max_tokens,
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
        check_ids(CALL, ids.view(), (self.top_k, self.group.options().max_tokens))?;
        let mut tensor_descriptor = TensorDescriptor::of(CALL, ids.view())?;
        let (routed, info) = (tensor_descriptor.pointer().cast_const(), std::ptr::null());
        // SAFETY: the handle lives; shapes were checked; the tensor stays until the next update, and its memory is
        // given back in the order of the stream.
        let done = self
            .raw_handle
            .with(CALL, |library, raw, stream| unsafe { result::update_handle(library, raw, routed, info, stream) });
        self.ids = Some(ids).filter(|_| done.is_ok());
        done
    }

    /// Refuses a handle whose last call never ended.
    fn whole(&self, call: &'static str) -> Result<()> {
        match self.incomplete {
            false => Ok(()),
            true => Err(Error::invalid(call, "handle", "one whose calls have ended", "one torn by a panic")),
        }
    }

    /// Checks rows on both sides of a call.
    pub(super) fn check_rows(&self, call: &'static str, near: (DType, &[usize]), far: (DType, &[usize])) -> Result<()> {
        self.whole(call)?;
        let new = || Error::invalid(call, "handle", "one that was updated", "a new one");
        let tokens = self.ids.as_ref().ok_or_else(new)?.dims()[0];
        let width = near.1.get(1).copied().unwrap_or(0);
        check(call, "tokens", (near.0, &[tokens, width]), near)?;
        check(call, "rows", (near.0, &[self.rows(), width]), far)
    }

    /// Whether a tensor is there where the layout has it.
    pub(super) fn given(&self, call: &'static str, name: &str, present: bool, needed: LowLatencyLayout) -> Result<()> {
        match (present, self.layout == needed) {
            (true, true) | (false, false) => Ok(()),
            (false, true) => Err(Error::invalid(call, format!("tensor {name}"), "one, for this layout", "none")),
            (true, false) => Err(Error::invalid(call, format!("tensor {name}"), "none, for this layout", "one")),
        }
    }
}
