//! Groups of one rank.

use crate::comm::Solo;
#[cfg(not(feature = "nccl"))]
use crate::ep::LibraryDispatchers;
use crate::ep::{DispatcherKind, Group, GroupConfig};
#[cfg(not(feature = "nccl-ep"))]
use crate::ep::{dispatcher_state::DispatcherState, select::DispatcherOrReason};
#[cfg(not(feature = "nccl-ep"))]
use crate::error::Error;
use crate::error::Result;

use super::device::Cuda;
use super::heuristics::{ALL_GATHER_TOKENS, FEW_STATIC_ROWS, GPUS_OF_HOST};

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

/// `Auto`'s table, of whole layers' times on H200s (`docs/benchmarks-gpus.md`). With few tokens, whose time is that of
/// calls, all-gather is within 3 % of the quickest in graphs, a decoder's captured steps among them; launched one by one,
/// NVLink's kernels take 5 to 8 % less of 128 tokens on two H100s and 10 to 26 % less on two H200s, which the
/// table does not have yet. With more, NVLink's kernels are on two ranks that reach each other's memory, and all-gather where they do not, as most tokens visit both;
/// on more ranks NCCL EP, which sends each row once to the ranks that it visits. Measured were two and four ranks, 128 and
/// 4096 tokens and more; up to a host's GPUs and to [`ALL_GATHER_TOKENS`] the table goes on from these, and beyond a host
/// all-gather's rows, which grow with the ranks, leave all-to-all as what remains. Windows do not make NCCL EP quicker than
/// all-gather where it is not (two H200s, DeepSeek-V3's layer: within 2 %; qwen3's is 26 % slower there): they are room for
/// where it is taken.
pub(crate) fn preferred_dispatchers(config: &GroupConfig, ranks: usize) -> &'static [DispatcherKind] {
    use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink};
    let few_tokens = config.max_tokens_per_rank <= ALL_GATHER_TOKENS || replays_few_tokens(config);
    match ranks {
        ..=GPUS_OF_HOST if few_tokens => &[AllGather],
        ..=2 => &[NvLink, AllGather],
        3..=GPUS_OF_HOST => &[NcclEp, AllGather],
        _ => &[NcclEp, AllToAll],
    }
}

/// Whether a group has room for captured steps of few tokens alone, as decoders have, whose prompts are longer.
fn replays_few_tokens(config: &GroupConfig) -> bool {
    (1..=FEW_STATIC_ROWS).contains(&config.max_rows)
}

impl Cuda {
    /// A group of one rank on this GPU.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn group(&self, config: GroupConfig) -> Result<Group<Cuda>> {
        Group::new(self.clone(), Box::new(Solo::new(self.clone())), config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink};

    #[test]
    fn auto_takes_what_was_measured_to_be_quickest() {
        let first = |ranks, tokens| preferred_dispatchers(&GroupConfig::new(256, tokens), ranks)[0];
        assert_eq!([first(2, 128), first(2, 4096), first(2, 8192)], [AllGather, NvLink, NvLink]);
        let fixed = |max_rows| preferred_dispatchers(&GroupConfig { max_rows, ..GroupConfig::new(256, 4096) }, 2)[0];
        // A decoder of 64 sequences, and a training step of 4096 tokens whose rows all go to one rank.
        assert_eq!([fixed(1024), fixed(8192), fixed(8193), fixed(65536)], [AllGather, AllGather, NvLink, NvLink]);
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
    }
}
