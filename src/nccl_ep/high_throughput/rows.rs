//! Arguments of the calls of a handle for high throughput.

use crate::cuda::Cuda;
use crate::nccl_ep::sys;
use crate::tensor::{TensorMut, TensorRef};

/// Where [`HighThroughputHandle::update`](super::HighThroughputHandle::update) leaves its counts: all of one type, I32 or I64.
#[derive(Debug)]
pub struct UpdateCounters<'a> {
    /// Padded rows of each local expert, `[L]`.
    pub counts: TensorMut<'a, Cuda>,
    /// First row of each local expert, `[L]`.
    pub offsets: TensorMut<'a, Cuda>,
    /// Padded rows of this rank with nothing dropped, `[1]`.
    pub total: TensorMut<'a, Cuda>,
}

/// Which way a call goes through the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassDirection {
    /// Forward: dispatch brings weights, combine does not.
    Forward,
    /// Backward: dispatch of the output's gradient brings no weights, combine of the rows' gradient does.
    Backward,
}

/// Rows from tokens to experts.
#[derive(Debug)]
pub struct DispatchArgs<'a> {
    /// `[T, H]`; U8 for opaque rows.
    pub tokens: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed forward, refused backward.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `U8 [T, bytes]`, beside opaque rows only.
    pub scales: Option<TensorRef<'a, Cuda>>,
    /// `[N, H]`, N the group's capacity or what the step needs, or more; pads are zeroed, rows past the segments stay.
    pub out: TensorMut<'a, Cuda>,
    /// `F32 [N]`.
    pub out_weights: Option<TensorMut<'a, Cuda>>,
    /// `U8 [N, bytes]`.
    pub out_scales: Option<TensorMut<'a, Cuda>>,
}

/// Rows from experts back to tokens.
#[derive(Debug)]
pub struct CombineArgs<'a> {
    /// `[N, H]`; pads are not read.
    pub rows: TensorRef<'a, Cuda>,
    /// `F32 [N]`; needed backward, refused forward.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `[T, H]`: sums, without weights.
    pub out: TensorMut<'a, Cuda>,
    /// `F32 [T, K]`: each choice's own, 0 where dropped.
    pub out_weights: Option<TensorMut<'a, Cuda>>,
}

/// The library's word for it.
pub(in crate::nccl_ep) fn pass(direction: PassDirection) -> sys::ncclEpPassDir_t {
    match direction {
        PassDirection::Forward => sys::ncclEpPassDir_t::NCCL_EP_FWD_PASS,
        PassDirection::Backward => sys::ncclEpPassDir_t::NCCL_EP_BWD_PASS,
    }
}
