//! The numbers that planning leaves, and what they say.

use crate::cuda::device::Cuda;
use crate::error::Result;
use crate::lazy::Lazy;
use crate::plan::{HostCounts, Stats};
use crate::tensor::Tensor;

use super::CALL;

/// Where statistics lie among the numbers that the kernels leave.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatsLayout {
    pub(super) experts: usize,
    pub(super) locals: usize,
    pub(super) ranks: usize,
}

impl StatsLayout {
    pub(super) fn tail(self) -> usize {
        self.experts + self.locals
    }

    /// Where each rank's own begin.
    fn ranks_at(self) -> usize {
        self.tail() + 5
    }

    /// Where counts of messages begin: choices from each rank, their tokens, choices to each rank, their tokens.
    pub(super) fn messages_at(self) -> usize {
        self.ranks_at() + 3 * self.ranks
    }

    pub(super) fn count(self) -> usize {
        self.messages_at() + 4 * self.ranks
    }

    fn stats(self, values: &[usize]) -> Stats {
        Stats {
            expert_load: values[..self.experts].to_vec(),
            padded_counts: values[self.experts..self.tail()].to_vec(),
            needed_rows: values[self.tail()],
            dropped: values[self.tail() + 1],
        }
    }

    pub(super) fn messages(self, values: &[usize]) -> [Vec<usize>; 4] {
        let of = |i: usize| values[self.messages_at() + i * self.ranks..][..self.ranks].to_vec();
        [of(0), of(1), of(2), of(3)]
    }

    /// The records' counts; the number of rows stands in the statistics.
    pub(super) fn counts(self, values: &[usize]) -> HostCounts {
        let of = |i: usize| values[self.ranks_at() + i..].iter().step_by(3).take(self.ranks).copied();
        let [failed, needed, short] = [2, 3, 4].map(|i| values[self.tail() + i]);
        let ranks = |i: usize, value: usize| of(i).enumerate().filter(move |(_, v)| *v == value).map(|(r, _)| r);
        HostCounts {
            tokens: of(0).collect(),
            absent: ranks(1, 0).collect(),
            pending: ranks(2, 1).collect(),
            failed: failed != 0,
            overflow: (needed > 0).then_some((short, needed)),
        }
    }

    pub(super) fn read(self, device: &Cuda, from: &Tensor<Cuda>) -> Result<Vec<usize>> {
        let mut bytes = vec![0; self.count() * 8];
        // Not `download`: what this rank alone has met must not keep it from what all ranks do next.
        device.read_bytes(CALL, from.view().data().ptr, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| usize::try_from(i64::from_ne_bytes(*b)).unwrap_or(0)).collect())
    }
}

/// Statistics, read when they are asked for.
pub(super) fn lazy_stats(device: &Cuda, stats: Tensor<Cuda>, stats_layout: StatsLayout) -> Lazy<Stats> {
    let device = device.clone();
    Lazy::from_fn(move || {
        let values = stats_layout.read(&device, &stats)?;
        device.faults(CALL)?;
        Ok(stats_layout.stats(&values))
    })
}
