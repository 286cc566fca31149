//! Which rows and choices each hop moves, as numbers that the host makes.

use std::ops::Range;

/// A rank's place among hosts that have as many ranks each, one after the other: rank r is rank r mod L of host r / L.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostPlace {
    /// This rank's host, and its place there.
    pub(super) host: usize,
    pub(super) local: usize,
    /// Hosts, and ranks of each, L.
    pub(super) hosts: usize,
    pub(super) ranks_per_host: usize,
}

impl HostPlace {
    pub(super) fn of(rank: usize, ranks: usize, ranks_per_host: usize) -> Self {
        let (host, local) = (rank / ranks_per_host, rank % ranks_per_host);
        Self { host, local, hosts: ranks / ranks_per_host, ranks_per_host }
    }

    pub(super) fn ranks(&self) -> usize {
        self.hosts * self.ranks_per_host
    }

    /// The rank that has this one's place in a host: rows cross between these, and stay at the one of its own host.
    pub(super) fn counterpart(&self, host: usize) -> usize {
        host * self.ranks_per_host + self.local
    }

    /// The ranks of this rank's host, itself among them.
    pub(super) fn within_host(&self) -> Range<usize> {
        let first = self.host * self.ranks_per_host;
        first..first + self.ranks_per_host
    }

    /// A number for each rank: those of this rank's counterparts by host, 0 for all others.
    pub(super) fn across(&self, by_host: &[usize]) -> Vec<usize> {
        let mut all = vec![0; self.ranks()];
        by_host.iter().enumerate().for_each(|(host, count)| all[self.counterpart(host)] = *count);
        all
    }

    /// The same of the ranks of its host, by their place there.
    pub(super) fn within(&self, by_local: &[usize]) -> Vec<usize> {
        let mut all = vec![0; self.ranks()];
        all[self.within_host()].copy_from_slice(by_local);
        all
    }
}

/// What the lists are made of: valid choices after dropping, −1 for none. Prepare has bounded their number over all ranks by
/// what 32 bits count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choices<'a> {
    pub(super) top_k: usize,
    pub(super) experts_per_rank: usize,
    /// Those of this rank's counterparts by host, its own among them, `[T, K]` each.
    pub(super) by_host: &'a [Vec<i32>],
}

/// The lists of a rank, as [`HopMaps`](crate::ep::hop_maps::HopMaps) describes them, and numbers by host or by place in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HopLists {
    pub(super) crossing_tokens: Vec<i32>,
    pub(super) crossing: Vec<usize>,
    pub(super) arriving: Vec<usize>,
    pub(super) forwarded_rows: Vec<i32>,
    pub(super) forwarded: Vec<usize>,
    pub(super) forwarded_choices: Vec<i32>,
    pub(super) choices: Vec<usize>,
    pub(super) choice_of: Vec<i32>,
    pub(super) row_of: Vec<i32>,
    pub(super) weight_of: Vec<i32>,
}

impl HopLists {
    pub(super) fn new(place: HostPlace, choices: Choices<'_>) -> Self {
        let Choices { top_k, experts_per_rank, by_host } = choices;
        // By expert: a division for each choice would take most of the time.
        let ranks: Vec<usize> = (0..place.ranks() * experts_per_rank).map(|expert| expert / experts_per_rank).collect();
        let hosts: Vec<usize> = ranks.iter().map(|rank| rank / place.ranks_per_host).collect();
        let first = place.within_host().start;
        let locals: Vec<Option<usize>> =
            ranks.iter().map(|rank| rank.checked_sub(first).filter(|local| *local < place.ranks_per_host)).collect();
        let mut lists = Self::default();
        if let Some(own) = by_host.get(place.host) {
            lists.list_crossing((place.hosts, top_k), own, &hosts);
        }
        lists.list_forwarded((place.ranks_per_host, top_k), by_host, &locals);
        lists
    }

    /// `hosts`: of each expert.
    fn list_crossing(&mut self, (count, top_k): (usize, usize), own: &[i32], hosts: &[usize]) {
        let host_of = |id: &i32| usize::try_from(*id).ok().and_then(|expert| hosts.get(expert).copied());
        let tokens = own.len() / top_k;
        self.row_of = vec![-1; tokens * count];
        let mut to: Vec<Vec<i32>> = vec![Vec::new(); count];
        for (token, ids) in own.chunks_exact(top_k).enumerate() {
            for host in ids.iter().filter_map(host_of) {
                if to[host].last() != Some(&(token as i32)) {
                    to[host].push(token as i32);
                }
            }
        }
        for (host, tokens) in to.into_iter().enumerate() {
            for token in &tokens {
                self.row_of[*token as usize * count + host] = self.crossing_tokens.len() as i32;
                self.crossing_tokens.push(*token);
            }
            self.crossing.push(tokens.len());
        }
        self.weight_of.reserve(own.len());
        for (token, ids) in own.chunks_exact(top_k).enumerate() {
            let rows = &self.row_of[token * count..(token + 1) * count];
            let weight = |(k, id)| host_of(id).map_or(-1, |host| rows[host] * top_k as i32 + k as i32);
            self.weight_of.extend(ids.iter().enumerate().map(weight));
        }
    }

    /// `locals`: the place in this host of each expert's rank.
    fn list_forwarded(&mut self, (count, top_k): (usize, usize), by_host: &[Vec<i32>], locals: &[Option<usize>]) {
        let local_of = |id: &i32| usize::try_from(*id).ok().and_then(|expert| locals.get(expert).copied().flatten());
        let mut to: Vec<(Vec<i32>, Vec<i32>)> = vec![Default::default(); count];
        let mut rows = 0;
        for ids in by_host {
            let before = rows;
            for ids in ids.chunks_exact(top_k) {
                let mut arrives = false;
                for (k, local) in ids.iter().enumerate().filter_map(|(k, id)| Some((k, local_of(id)?))) {
                    arrives = true;
                    let (forwarded, choices) = &mut to[local];
                    if forwarded.last() != Some(&(rows as i32)) {
                        forwarded.push(rows as i32);
                    }
                    choices.push((rows * top_k + k) as i32);
                }
                rows += usize::from(arrives);
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
        let place = HostPlace::of(2, 4, 2);
        assert_eq!(place, HostPlace { host: 1, local: 0, hosts: 2, ranks_per_host: 2 });
        assert_eq!((place.counterpart(0), place.within_host()), (0, 2..4));
        assert_eq!((place.across(&[5, 6]), place.within(&[7, 8])), (vec![5, 0, 6, 0], vec![0, 0, 7, 8]));
        // Rank 0's tokens choose experts 0 and 3, 2 and 3, 0 and 1; rank 2's 1 and 2, and only 3.
        let by_host = [vec![0, 3, 2, 3, 0, 1], vec![1, 2, -1, 3]];
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
        assert_eq!(HopLists::new(place, Choices { top_k: 2, experts_per_rank: 1, by_host: &by_host }), expected);
    }
}
