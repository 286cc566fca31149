//! Arguments of the calls of a handle for low latency.

use crate::cuda::Cuda;
use crate::tensor::{TensorMut, TensorRef};

/// Where rows arrive. Their order inside a segment or a rank's part is the library's, and not the same in every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LowLatencyLayout {
    /// Each (token, expert): expert e's rows begin at row e · R · M of `[L · R · M, H]`. Weights are applied by
    /// combine.
    ExpertMajor,
    /// Each (token, rank): rank r's rows begin at row r · M of `[R · M, H]`, with all choices of the token beside them.
    /// Who has the row adds its experts' outputs, weights included; combine adds those of the ranks.
    RankMajor,
}

/// Arguments of a dispatch.
#[derive(Debug)]
pub struct LowLatencyDispatchArgs<'a> {
    /// `[T, H]`; U8 for opaque rows.
    pub tokens: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed by rank, refused by expert.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `U8 [T, bytes]`, beside opaque rows only.
    pub scales: Option<TensorRef<'a, Cuda>>,
}

/// Where a dispatch leaves it.
#[derive(Debug)]
pub struct LowLatencyReceiveArgs<'a> {
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
pub struct LowLatencyCombineArgs<'a> {
    /// `[N, H]`; rows that nobody sent are not read.
    pub rows: TensorRef<'a, Cuda>,
    /// `F32 [T, K]`; needed by expert, refused by rank.
    pub weights: Option<TensorRef<'a, Cuda>>,
    /// `[T, H]`.
    pub out: TensorMut<'a, Cuda>,
}
