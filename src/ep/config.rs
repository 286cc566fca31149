//! The configuration of a group, which its ranks compare as they form it.

use crate::config::MoeConfig;

/// A group's configuration, the same on all of its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// Experts E over all ranks; a multiple of the number of ranks.
    pub num_experts: usize,
    /// Most tokens that one rank may bring to a call, where tokens travel: [`DispatcherKind::Local`] asks for none of
    /// this, so that one rank alone may bring any number. Reserve no more than needed: prepare ships this many rows of K
    /// ids whatever a step has, 4 bytes an id (12 where an expert capacity keeps by probability), to every rank.
    pub max_tokens_per_rank: usize,
    /// Largest static capacity in rows; 0: eager calls only.
    pub max_rows: usize,
    /// How tokens travel.
    pub dispatcher: DispatcherKind,
    /// NCCL EP, high throughput, static capacities: windows that rows arrive in, which peers write directly; one for each
    /// dispatch whose rows are kept, forward and backward, and one more (at least 2). Each has room for a capacity's rows.
    /// 0: none; the library stages rows.
    pub windows: usize,
}

/// How tokens travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DispatcherKind {
    /// The dispatcher that `MOEBIUS_EP` names ([`DISPATCHER_VARIABLE`](super::DISPATCHER_VARIABLE)); where that is not
    /// set, local for one rank, all-to-all between CPU ranks, and between GPUs what a table of measured times names for
    /// the number of ranks and of tokens: all-gather for two ranks and for few tokens, NCCL EP where it is built in and
    /// its checks pass on every rank, else all-gather within a host's eight GPUs, and all-to-all.
    #[default]
    Auto,
    /// One rank: tokens stay where they are.
    Local,
    /// Each (token, destination rank) travels once.
    AllToAll,
    /// Every rank gets all tokens, and sums are reduce-scattered.
    AllGather,
    /// NVIDIA's NCCL EP, high throughput (feature `nccl-ep`): each (token, destination rank) travels once, and rows
    /// arrive in the order of experts.
    NcclEp,
    /// NVIDIA's NCCL EP, low latency (feature `nccl-ep`), for decoding: few tokens a rank, forward only. Never taken by
    /// `Auto`.
    NcclEpLowLatency,
}

impl DispatcherKind {
    pub(super) fn name_of(number: u64) -> String {
        let kinds = [Self::Auto, Self::Local, Self::AllToAll, Self::AllGather, Self::NcclEp, Self::NcclEpLowLatency];
        kinds.iter().find(|k| **k as u64 == number).map_or_else(|| number.to_string(), |k| format!("{k:?}"))
    }
}

impl GroupConfig {
    /// Eager calls of up to `max_tokens_per_rank` tokens over `num_experts` experts.
    pub fn new(num_experts: usize, max_tokens_per_rank: usize) -> Self {
        Self { num_experts, max_tokens_per_rank, max_rows: 0, dispatcher: DispatcherKind::Auto, windows: 0 }
    }
    /// The group of a layer: its experts, and up to `max_tokens_per_rank` tokens a call.
    pub fn of(layer: &MoeConfig, max_tokens_per_rank: usize) -> Self {
        Self::new(layer.router.num_experts, max_tokens_per_rank)
    }

    /// A group of one rank, whose tokens stay where they are and may be any number.
    pub fn one_rank(num_experts: usize) -> Self {
        Self { dispatcher: DispatcherKind::Local, ..Self::new(num_experts, i32::MAX as usize) }
    }
}

/// [`GroupConfig::one_rank`] with the layer's experts.
impl From<&MoeConfig> for GroupConfig {
    fn from(layer: &MoeConfig) -> Self {
        Self::one_rank(layer.router.num_experts)
    }
}
