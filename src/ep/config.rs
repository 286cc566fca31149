//! The configuration of a group, which its ranks compare as they form it.

use std::fmt;
use std::str::FromStr;

use crate::config::MoeConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::plan::Capacity;

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
    /// 0: none; the library stages rows. [`DispatcherKind::Auto`] decides without them.
    ///
    /// NVLink: zones that rows arrive in and stay (0: 2); a dispatch that finds none free copies its rows.
    pub windows: usize,
    /// NCCL EP: SMs that its kernels take at most; 0: as the library chooses. More than the GPU has, or for low latency
    /// fewer than one for 14 experts, are [`NcclEpError::Argument`](crate::NcclEpError::Argument) where NCCL EP is named,
    /// and keep [`DispatcherKind::Auto`] from taking it. NVLink: blocks of its kernels at most; 0: one an SM, of
    /// prepare 64.
    pub max_sms: usize,
    /// NVLink: every slot's row returns by itself, and the token's rank adds them in the order of k. Results have the bits
    /// of [`AllToAll`](super::AllToAll), whatever the number of ranks, at the price of more bytes; otherwise each rank
    /// adds its own slots' first.
    pub in_k_order: bool,
    /// [`DispatcherKind::Auto`] times each dispatcher that every rank can have, but low latency, in steps of
    /// this shape, once, as the group is formed, and takes the quickest, the same on all ranks; `None`: it decides from
    /// its table. A dispatcher that is
    /// named, here or by `MOEBIUS_EP`, is not timed, nor is that of a rank alone. Times differ from run to run, and with
    /// the dispatcher the order of sums: a run that is to go on with the same bits stores
    /// [`Group::dispatcher_kind`](super::Group::dispatcher_kind) and names it from then on.
    pub measure: Option<DispatchShape>,
}

/// The step that dispatchers are timed in: every rank brings as many tokens, whose choices are random and even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchShape {
    /// Tokens T of each rank, at most the group's `max_tokens_per_rank`.
    pub tokens: usize,
    /// Elements H of a token.
    pub hidden: usize,
    /// Choices K of a token.
    pub top_k: usize,
    /// Type of the tokens, a floating one.
    pub dtype: DType,
    /// Rows that a rank has room for, as the layers ask for them; a static capacity has to hold random choices.
    pub capacity: Capacity,
    /// Whether the way back of the gradients counts too.
    pub backward: bool,
}

impl DispatchShape {
    /// Steps of a layer of this many tokens a rank, forward and backward, with an eager capacity.
    pub fn of(layer: &MoeConfig, tokens: usize, dtype: DType) -> Self {
        let (hidden, top_k) = (layer.hidden, layer.router.top_k);
        Self { tokens, hidden, top_k, dtype, capacity: Capacity::Eager, backward: true }
    }
}

/// How tokens travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DispatcherKind {
    /// The dispatcher that `MOEBIUS_EP` names ([`DISPATCHER_VARIABLE`](super::DISPATCHER_VARIABLE)); where that is not
    /// set, local for one rank, the quickest where [`GroupConfig::measure`] asks for it, else all-to-all between CPU
    /// ranks, and between GPUs what a table of measured times names for the number of ranks and of tokens: all-gather for
    /// few tokens, NVLink for two ranks that reach each other's memory, NCCL EP where it is built in and its checks pass on
    /// every rank, else all-gather within a host's eight GPUs, and all-to-all.
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
    /// Each (token, destination rank) once, stored by this crate's kernels into the memory of the host's other GPUs
    /// (feature `nccl`, compute capability 9.0, NCCL 2.29, up to 8 ranks): sums are made where the experts are and added
    /// per rank, as [`AllGather`](super::AllGather) adds them.
    NvLink,
}

impl DispatcherKind {
    const ALL: [Self; 7] =
        [Self::Auto, Self::Local, Self::AllToAll, Self::AllGather, Self::NcclEp, Self::NcclEpLowLatency, Self::NvLink];

    /// Lower-case name (`"all_to_all"`), which [`str::parse`] reads again.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::AllToAll => "all_to_all",
            Self::AllGather => "all_gather",
            Self::NcclEp => "nccl_ep",
            Self::NcclEpLowLatency => "nccl_ep_ll",
            Self::NvLink => "nvlink",
        }
    }

    pub(super) fn name_of(number: u64) -> String {
        Self::ALL.iter().find(|k| **k as u64 == number).map_or_else(|| number.to_string(), |k| k.name().to_string())
    }
}

impl fmt::Display for DispatcherKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Of a [`name`](DispatcherKind::name); `-` counts as `_`.
impl FromStr for DispatcherKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.replace('-', "_");
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let counts = Self::ALL.map(Self::name).join(", ");
            Error::invalid("DispatcherKind::from_str", "dispatcher", format!("one of {counts}"), text)
        })
    }
}

impl GroupConfig {
    /// Eager calls of up to `max_tokens_per_rank` tokens over `num_experts` experts.
    pub fn new(num_experts: usize, max_tokens_per_rank: usize) -> Self {
        let dispatcher = DispatcherKind::Auto;
        Self {
            num_experts,
            max_tokens_per_rank,
            max_rows: 0,
            dispatcher,
            windows: 0,
            max_sms: 0,
            in_k_order: false,
            measure: None,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kinds_name_is_read_again() {
        for kind in DispatcherKind::ALL {
            assert_eq!(kind.name().parse::<DispatcherKind>().ok(), Some(kind));
            assert_eq!(kind.to_string().replace('_', "-").parse::<DispatcherKind>().ok(), Some(kind));
            assert_eq!(DispatcherKind::name_of(kind as u64), kind.name());
        }
        let error = "ncclep".parse::<DispatcherKind>().expect_err("no kind").to_string();
        assert!(error.contains("ncclep") && error.contains("nccl_ep_ll"), "{error}");
    }
}
