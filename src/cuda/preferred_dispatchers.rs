//! Which dispatchers a group of GPUs takes where none is named, and those that a build does not have.

#[cfg(not(feature = "nccl"))]
use crate::ep::LibraryDispatchers;
use crate::ep::{DispatcherKind, GroupConfig};
#[cfg(not(feature = "nccl-ep"))]
use crate::ep::{dispatcher_state::DispatcherState, select::DispatcherOrReason};
#[cfg(not(feature = "nccl-ep"))]
use crate::error::{Error, Result};

#[cfg(not(feature = "nccl-ep"))]
use super::device::Cuda;
use super::heuristics::{ALL_GATHER_TOKENS, FEW_STATIC_ROWS, GPUS_OF_HOST, LOW_LATENCY_TOKENS};

#[cfg(not(feature = "nccl"))]
impl LibraryDispatchers for Cuda {
    fn preferred_dispatchers(config: &GroupConfig, ranks: usize) -> &'static [DispatcherKind] {
        preferred_dispatchers(config, ranks)
    }

    fn library_dispatcher(
        kind: DispatcherKind,
        core: DispatcherState<Self>,
        source: &'static str,
    ) -> Result<DispatcherOrReason<Self>> {
        dispatcher_not_built(kind, core, source)
    }
}

/// The answer where a dispatcher is named that this build does not have.
#[cfg(not(feature = "nccl-ep"))]
pub(crate) fn dispatcher_not_built(
    kind: DispatcherKind,
    core: DispatcherState<Cuda>,
    source: &'static str,
) -> Result<DispatcherOrReason<Cuda>> {
    let found = match kind {
        DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency => "NvLink (feature nccl)",
        _ => "NcclEp (feature nccl-ep)",
    };
    Ok(Err(Box::new((core, Error::invalid("Group::new", source, "one that this build has", found)))))
}

/// `Auto`'s table, from whole layers' and decoders' times on H200s, two and four ranks, 1, 128, 512, 4096 tokens and more
/// (`docs/benchmarks-gpus.md`); it goes on from these.
///
/// - NVLink with low latency: few tokens on two ranks that reach each other's memory, where nothing has a backward. A
///   decoder's captured step takes 0.91 of all-gather's time for one sequence and 0.97 for 64; its prompts of thousands of
///   tokens take 1.1, which some 24 steps make up for.
/// - NVLink: two such ranks otherwise. It is the quickest at every number of tokens that was measured, or within 1 % of it:
///   at 128 tokens 0.71 to 0.87 of all-gather's time launched one by one, 0.98 to 1.00 in a graph (1.05 on two H100s).
///   Where ranks do not reach each other's memory, all-gather, as most tokens visit both.
/// - All-gather: few tokens on more ranks, whose time is that of calls. It is within 3 % of the quickest in graphs.
/// - NCCL EP: more tokens on more ranks, as it sends each row once to the ranks that it visits. Windows are room for where
///   it is taken and change nothing here: with them it is no quicker than all-gather on two H200s (DeepSeek-V3's layer
///   within 2 %, qwen3's 26 % slower).
/// - All-to-all: what remains beyond a host, where all-gather's rows grow with the ranks.
pub(crate) fn preferred_dispatchers(config: &GroupConfig, ranks: usize) -> &'static [DispatcherKind] {
    use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink, NvLinkLowLatency};
    // Low latency has neither a backward nor the order of k.
    let low_latency = has_few_tokens(config, LOW_LATENCY_TOKENS) && config.forward_only && !config.in_k_order;
    match ranks {
        ..=2 if low_latency => &[NvLinkLowLatency, NvLink, AllGather],
        ..=2 => &[NvLink, AllGather],
        3..=GPUS_OF_HOST if has_few_tokens(config, ALL_GATHER_TOKENS) => &[AllGather],
        3..=GPUS_OF_HOST => &[NcclEp, AllGather],
        _ => &[NcclEp, AllToAll],
    }
}

/// Whether a group has room for at most so many tokens a rank, or for captured steps of few tokens alone, as decoders have,
/// whose prompts are longer.
fn has_few_tokens(config: &GroupConfig, most: usize) -> bool {
    config.max_tokens_per_rank <= most || (1..=FEW_STATIC_ROWS).contains(&config.max_rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink};

    #[test]
    fn auto_takes_what_was_measured_to_be_quickest() {
        let first = |ranks, tokens| preferred_dispatchers(&GroupConfig::new(256, tokens), ranks)[0];
        assert_eq!([first(2, 1), first(2, 128), first(2, 4096), first(2, 8192)], [NvLink; 4]);
        let fixed = |max_rows| preferred_dispatchers(&GroupConfig { max_rows, ..GroupConfig::new(256, 4096) }, 2)[0];
        // A decoder of 64 sequences, and a training step of 4096 tokens whose rows all go to one rank.
        assert_eq!([fixed(1024), fixed(8192), fixed(8193), fixed(65536)], [NvLink; 4]);
        assert_eq!([first(4, 128), first(4, 4096), first(4, 8192)], [AllGather, NcclEp, NcclEp]);
        // A decoder's steps are captured over all-gather on more GPUs, too.
        let decoder = GroupConfig { max_rows: 1024, ..GroupConfig::new(256, 4096) };
        assert_eq!(preferred_dispatchers(&decoder, 4), [AllGather]);
        assert_eq!([first(16, 128), first(64, 4096)], [NcclEp; 2]);
        for ranks in 2..100 {
            for tokens in [128, 4096] {
                let (plain, table) = (GroupConfig::new(256, tokens), preferred_dispatchers);
                let windows = GroupConfig { windows: 3, ..plain.clone() };
                assert_eq!(table(&windows, ranks), table(&plain, ranks), "{ranks} ranks, {tokens} tokens");
                // What every rank can have.
                assert!(matches!(table(&plain, ranks).last(), Some(AllGather | AllToAll)));
            }
        }
        assert_eq!(preferred_dispatchers(&GroupConfig::new(256, 4096), 16), [NcclEp, AllToAll]);
        let forward = |ranks, max_tokens_per_rank, max_rows, in_k_order| {
            let config =
                GroupConfig { forward_only: true, max_rows, in_k_order, ..GroupConfig::new(256, max_tokens_per_rank) };
            preferred_dispatchers(&config, ranks)
        };
        // What has no backward may be of low latency, where its tokens are few or a decoder's steps are captured.
        let low_latency = [DispatcherKind::NvLinkLowLatency, NvLink, AllGather];
        assert_eq!([forward(2, 128, 0, false), forward(2, 4096, 1024, false)], [low_latency; 2]);
        assert_eq!([forward(2, 129, 0, false), forward(2, 128, 0, true)], [[NvLink, AllGather]; 2]);
        assert_eq!([forward(4, 128, 0, false)[0], forward(4, 4096, 0, false)[0]], [AllGather, NcclEp]);
    }
}
