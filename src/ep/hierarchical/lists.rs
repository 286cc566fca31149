//! Which rows and choices each hop moves, as numbers that the host makes.

use std::ops::Range;

use crate::error::{Error, Result};

/// A rank's place among hosts that have as many ranks each, one after the other: rank r is rank r mod L of host r / L.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// This rank's host, and its place there.
    pub(super) host: usize,
    pub(super) local: usize,
    /// Hosts, and ranks of each, L.
    pub(super) hosts: usize,
    pub(super) ranks_per_host: usize,
}

impl Place {
    pub(super) fn of(rank: usize, ranks: usize, ranks_per_host: usize) -> Self {
        let (host, local) = (rank / ranks_per_host, rank % ranks_per_host);
        Self { host, local, hosts: ranks / ranks_per_host, ranks_per_host }
    }

    pub(super) fn ranks(&self) -> usize {
        self.hosts * self.ranks_per_host
    }

    /// The rank of another host that has this rank's place there: rows cross between these two.
    pub(super) fn counterpart(&self, host: usize) -> usize {
        host * self.ranks_per_host + self.local
    }

    /// The ranks of this rank's host.
    pub(super) fn neighbors(&self) -> Range<usize> {
        let first = self.host * self.ranks_per_host;
        first..first + self.ranks_per_host
    }

    /// A number for each rank: those of this rank's counterparts by host, 0 for all others.
    pub(super) fn across(&self, by_host: &[usize]) -> Vec<usize> {
        let mut all = vec![0; self.ranks()];
        by_host.iter().enumerate().for_each(|(host, count)| all[self.counterpart(host)] = *count);
        all
    }

    /// The same of its neighbors, by their place in the host.
    pub(super) fn within(&self, by_local: &[usize]) -> Vec<usize> {
        let mut all = vec![0; self.ranks()];
        all[self.neighbors()].copy_from_slice(by_local);
        all
    }
}

/// What the lists are made of: choices after dropping, −1 for none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choices<'a> {
    pub(super) top_k: usize,
    pub(super) experts_per_rank: usize,
    /// Those of this rank's counterparts by host, its own among them, `[T, K]` each.
    pub(super) by_host: &'a [Vec<i32>],
}

/// The lists of a rank. Rows that arrive over its first hop are numbered by (source host, token).
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HopLists {
    /// Tokens to send across, by (host, token), and how many for each host.
    pub(super) crossing_tokens: Vec<i32>,
    pub(super) crossing: Vec<usize>,
    /// Rows that arrive from each host.
    pub(super) arriving: Vec<usize>,
    /// Arrived rows to pass on, by (neighbor, row), and how many for each neighbor.
    pub(super) forwarded_rows: Vec<i32>,
    pub(super) forwarded: Vec<usize>,
    /// The choices that go along, numbered in `[rows, K]` flattened, by (neighbor, row, k), and how many for each neighbor.
    pub(super) forwarded_choices: Vec<i32>,
    pub(super) choices: Vec<usize>,
    /// For each (arrived row, k) the number of its choice among these; −1: none here.
    pub(super) choice_of: Vec<i32>,
    /// For each (token, host) the number of its row among those that crossed; −1: none.
    pub(super) row_of: Vec<i32>,
    /// For each (token, k) the number of its weight among the K of each of these rows; −1: a dropped choice.
    pub(super) weight_of: Vec<i32>,
}

impl HopLists {
    /// # Errors
    /// More choices than 32 bits count.
    pub(super) fn new(call: &'static str, place: Place, choices: Choices<'_>) -> Result<Self> {
        let Choices { top_k, experts_per_rank, by_host } = choices;
        let all = by_host.iter().fold(0, |sum: usize, ids| sum.saturating_add(ids.len()));
        let most = by_host.get(place.host).map_or(0, Vec::len).saturating_mul(place.hosts).max(all);
        if i32::try_from(most).is_err() {
            return Err(Error::invalid(call, "choices over the hosts", format!("at most {}", i32::MAX), most));
        }
        // A valid id: prepare has seen to that.
        let rank_of = |id: i32| usize::try_from(id).ok().map(|id| id / experts_per_rank);
        let mut lists = Self::default();
        if let Some(own) = by_host.get(place.host) {
            lists.list_crossing(place, top_k, own, rank_of);
        }
        lists.list_forwarded(place, top_k, by_host, rank_of);
        Ok(lists)
    }

    fn list_crossing(&mut self, place: Place, top_k: usize, own: &[i32], rank_of: impl Fn(i32) -> Option<usize>) {
        let host_of = |id: i32| rank_of(id).map(|rank| rank / place.ranks_per_host);
        let tokens = own.chunks_exact(top_k);
        self.row_of = vec![-1; tokens.len() * place.hosts];
        for host in 0..place.hosts {
            let first = self.crossing_tokens.len();
            for (token, ids) in tokens.clone().enumerate() {
                if ids.iter().any(|id| host_of(*id) == Some(host)) {
                    self.row_of[token * place.hosts + host] = self.crossing_tokens.len() as i32;
                    self.crossing_tokens.push(token as i32);
                }
            }
            self.crossing.push(self.crossing_tokens.len() - first);
        }
        let weight = |(i, id): (usize, &i32)| match host_of(*id) {
            Some(host) => self.row_of[i / top_k * place.hosts + host] * top_k as i32 + (i % top_k) as i32,
            None => -1,
        };
        self.weight_of = own.iter().enumerate().map(weight).collect();
    }

    fn list_forwarded(
        &mut self,
        place: Place,
        top_k: usize,
        by_host: &[Vec<i32>],
        rank_of: impl Fn(i32) -> Option<usize>,
    ) {
        let (neighbors, first) = (place.ranks_per_host, place.neighbors().start);
        let local_of =
            |id: i32| rank_of(id).and_then(|rank| rank.checked_sub(first)).filter(|local| *local < neighbors);
        let mut to: Vec<(Vec<i32>, Vec<i32>)> = vec![Default::default(); neighbors];
        let mut rows = 0;
        for ids in by_host {
            let before = rows;
            for ids in ids.chunks_exact(top_k) {
                let locals = || ids.iter().enumerate().filter_map(|(k, id)| Some((k, local_of(*id)?)));
                if locals().next().is_none() {
                    continue;
                }
                for (k, local) in locals() {
                    let (forwarded, choices) = &mut to[local];
                    if forwarded.last() != Some(&(rows as i32)) {
                        forwarded.push(rows as i32);
                    }
                    choices.push((rows * top_k + k) as i32);
                }
                rows += 1;
            }
            self.arriving.push(rows - before);
        }
        self.choice_of = vec![-1; rows * top_k];
        for (forwarded, choices) in to {
            for choice in &choices {
                self.choice_of[*choice as usize] = self.forwarded_choices.len() as i32;
                self.forwarded_choices.push(*choice);
            }
            self.forwarded.push(forwarded.len());
            self.choices.push(choices.len());
            self.forwarded_rows.extend(forwarded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two hosts of two ranks, one expert each; rank 2's lists by hand.
    #[test]
    fn lists_of_two_hosts() {
        let place = Place::of(2, 4, 2);
        assert_eq!(place, Place { host: 1, local: 0, hosts: 2, ranks_per_host: 2 });
        assert_eq!((place.counterpart(0), place.neighbors()), (0, 2..4));
        assert_eq!((place.across(&[5, 6]), place.within(&[7, 8])), (vec![5, 0, 6, 0], vec![0, 0, 7, 8]));
        // Rank 0's tokens choose experts 0 and 3, 2 and 3, 0 and 1; rank 2's 1 and 2, and only 3.
        let by_host = [vec![0, 3, 2, 3, 0, 1], vec![1, 2, -1, 3]];
        let choices = Choices { top_k: 2, experts_per_rank: 1, by_host: &by_host };
        let lists = HopLists::new("a test", place, choices).expect("few");
        let expected = HopLists {
            crossing_tokens: vec![0, 0, 1],
            crossing: vec![1, 2],
            // Rank 0's first two, then both of its own.
            arriving: vec![2, 2],
            forwarded_rows: vec![1, 2, 0, 1, 3],
            forwarded: vec![2, 3],
            forwarded_choices: vec![2, 5, 1, 3, 7],
            choices: vec![2, 3],
            choice_of: vec![-1, 2, 0, 3, -1, 1, -1, 4],
            row_of: vec![0, 1, -1, 2],
            weight_of: vec![0, 3, -1, 5],
        };
        assert_eq!(lists, expected);
    }
}
