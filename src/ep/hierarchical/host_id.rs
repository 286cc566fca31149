//! How many ranks each host has.

use std::collections::HashMap;
use std::fs;

use crate::comm::{Communicator, Op, Tag};
use crate::compare::gather_numbers;
use crate::error::{Error, Result};
use crate::fnv1a::fnv1a;
use crate::kernels::Kernels;

const TAG: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };

/// The same on all ranks of a host, and with all likelihood another on others: what `NCCL_HOSTID` says, which tells NCCL
/// the same, or else this boot's number and the host's name.
fn host_id(told: Option<String>) -> u64 {
    let file = |path| fs::read_to_string(path).unwrap_or_default();
    let told = told.filter(|told| !told.is_empty());
    let own = || [file("/proc/sys/kernel/random/boot_id"), file("/proc/sys/kernel/hostname")].concat();
    fnv1a(told.unwrap_or_else(own))
}

/// The host of each rank, by its id.
pub(super) struct Hosts(Vec<u64>);

impl Hosts {
    /// Asks all ranks for their hosts (collective).
    ///
    /// # Errors
    /// The collective's.
    pub(super) fn gather<D: Kernels>(device: &D, comm: &mut dyn Communicator<D>) -> Result<Self> {
        gather_numbers(device, comm, TAG, &[host_id(std::env::var("NCCL_HOSTID").ok())]).map(Self)
    }

    /// How many ranks each host has.
    ///
    /// # Errors
    /// They have not as many each, or not one host's behind another's.
    pub(super) fn ranks_of_each(&self, call: &'static str) -> Result<usize> {
        even(&self.0).ok_or_else(|| {
            let expected = "as many ranks on each host, one host's behind another's (or ranks_per_host)";
            Error::invalid(call, "hosts of the ranks", expected, format!("{:?}", self.numbers()))
        })
    }

    /// Whether each has so many, one host's behind another's.
    pub(super) fn have_each(&self, ranks: usize) -> bool {
        even(&self.0) == Some(ranks)
    }

    /// The hosts numbered by their first rank, as their ids say nothing.
    pub(super) fn numbers(&self) -> Vec<usize> {
        let mut names = HashMap::new();
        let number = |id: &u64| {
            let next = names.len();
            *names.entry(*id).or_insert(next)
        };
        self.0.iter().map(number).collect()
    }
}

/// Ranks of each host, where they are even and lie together.
fn even(hosts: &[u64]) -> Option<usize> {
    let runs: Vec<&[u64]> = hosts.chunk_by(|a, b| a == b).collect();
    let each = runs.first()?.len();
    let distinct: std::collections::HashSet<u64> = runs.iter().map(|run| run[0]).collect();
    (runs.iter().all(|run| run.len() == each) && distinct.len() == runs.len()).then_some(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_even_and_lie_together_or_are_refused() {
        assert_eq!([even(&[7, 7, 9, 9]), even(&[7, 7]), even(&[7, 9, 8])], [Some(2), Some(2), Some(1)]);
        assert_eq!([even(&[7, 9, 7, 9]), even(&[7, 7, 9]), even(&[])], [None; 3]);
        let told = |told: &str| host_id(Some(told.into()));
        assert_ne!(told("left"), told("right"));
        assert_eq!((told("left"), told("")), (told("left"), host_id(None)));
    }
}
