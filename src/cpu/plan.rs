//! Slots for all ranks' choices.
//!
//! Every rank walks all choices in order (source rank, token, k) and so knows, without asking, what every other rank
//! keeps and drops.

use std::sync::Arc;

use crate::config::CapacityOrder;
use crate::error::{Error, Result};
use crate::host_memory;
use crate::lazy::Lazy;
use crate::plan::{
    Capacity, HostPlanRequest, MessageMaps, Origin, Overflow, Plan, RowOrder, Segments, Stats, ZoneMaps,
};
use crate::tensor::Tensor;

use super::Cpu;

const CALL: &str = "prepare";

pub(super) fn plan(call: HostPlanRequest<'_>) -> Result<Plan<Cpu>> {
    let choices = call.ids.len();
    plan_of(call, choices).map(|(plan, _)| plan)
}

/// The plan, and padded rows that each rank needs. `choices`: how many there are, but for those of padding.
pub(super) fn plan_of(call: HostPlanRequest<'_>, choices: usize) -> Result<(Plan<Cpu>, Vec<usize>)> {
    let total: usize = call.tokens.iter().sum();
    let k = call.spec.top_k;
    check(&call, total)?;
    let mut ids = host_memory::copied(CALL, "ids of all ranks", call.ids)?;
    let expert_load = loads(&ids, call.num_experts);
    let mut counts = expert_load.clone();
    if let Some(limit) = &call.spec.expert_capacity {
        let capacity = limit.limit(choices, call.num_experts);
        limit_experts(&mut ids, &expert_load, capacity, limit.order, call.weights);
        counts = loads(&ids, call.num_experts);
    }
    let layout = RankSegments::new(&call, &counts)?;
    let slots = layout.slots(&mut ids)?;

    let first_token: usize = call.tokens[..call.rank].iter().sum();
    let tokens = call.tokens[call.rank];
    let own = first_token * k..(first_token + tokens) * k;
    let before = &call.ids[own.clone()];
    let dropped = before.iter().zip(&ids[own.clone()]).filter(|(before, after)| **before >= 0 && **after < 0).count();
    // An entry for "none", and one for each expert: a division a choice would take most of the time.
    let ranks = std::iter::once(NOWHERE).chain((0..call.num_experts).map(|e| e / layout.local_experts)).collect();
    let builder = MapBuilder { call: &call, layout: &layout, ids: &ids, slots: &slots, first_token, ranks };
    let maps = match call.row_order {
        RowOrder::Local | RowOrder::AllRows => builder.all_rows()?,
        RowOrder::UniqueRows => builder.unique_rows()?,
        RowOrder::Slots => builder.slots_only()?,
        RowOrder::Zones => builder.zones()?,
    };
    let (segments, padded_counts) = layout.segments(call.rank)?;
    let plan = Plan {
        tokens,
        total_tokens: total,
        first_token,
        segments: Arc::new(segments),
        stats: Lazy::ready(Stats { padded_counts, needed_rows: layout.needed[call.rank], expert_load, dropped }),
        kept_ids: Tensor::from_vec(host_memory::copied(CALL, "ids", &ids[own])?, &[tokens, k])?,
        row_map: maps.row_map,
        weight_map: maps.weight_map,
        return_map: maps.return_map,
        messages: maps.messages,
        zones: maps.zones,
    };
    Ok((plan, layout.needed))
}

/// Checks what the maps below index by.
fn check(call: &HostPlanRequest<'_>, total: usize) -> Result<()> {
    let (ranks, experts, k) = (call.ranks, call.num_experts, call.spec.top_k);
    Error::check_shape(CALL, "tokens of each rank", &[ranks], &[call.tokens.len()])?;
    if call.rank >= ranks {
        return Err(Error::invalid(CALL, "rank", format!("a rank below {ranks}"), call.rank));
    }
    if experts == 0 || !experts.is_multiple_of(ranks) {
        return Err(Error::invalid(CALL, "num_experts", format!("a multiple of the {ranks} ranks"), experts));
    }
    if k == 0 || (call.row_order == RowOrder::Local && ranks != 1) {
        let found = format!("{k}, {:?} of {ranks} ranks", call.row_order);
        return Err(Error::invalid(CALL, "top_k, transport", "at least 1, Local for one rank only", found));
    }
    Error::check_shape(CALL, "ids of all ranks", &[total * k], &[call.ids.len()])?;
    if let Some(weights) = &call.weights {
        Error::check_shape(CALL, "weights of all ranks", &[total * k], &[weights.len()])?;
    }
    // −1 is the largest number of all without a sign.
    let most = i32::try_from(experts).unwrap_or(i32::MAX);
    let absent = |id: &&i32| **id < -1 || **id >= most;
    let ids = call.ids;
    // Whether, before which: that can look at many at once.
    let any = ids.iter().fold(false, |any, id| any | absent(&id));
    match any.then(|| ids.iter().find(absent)).flatten() {
        Some(id) => Err(Error::invalid(CALL, "ids of all ranks", format!("-1 or below {experts}"), id)),
        None => Ok(()),
    }
}

/// Choices of each expert.
fn loads(ids: &[i32], experts: usize) -> Vec<usize> {
    // Behind the experts one for "none", so that no choice is a branch.
    let mut loads = vec![0; experts + 1];
    ids.iter().for_each(|id| loads[usize::try_from(*id).unwrap_or(experts)] += 1);
    loads.truncate(experts);
    loads
}

/// Drops choices past the limit of each expert.
fn limit_experts(ids: &mut [i32], loads: &[usize], capacity: usize, order: CapacityOrder, weights: Option<&[f64]>) {
    let mut of_expert: Vec<Vec<usize>> =
        loads.iter().map(|n| Vec::with_capacity(if *n > capacity { *n } else { 0 })).collect();
    for (i, id) in ids.iter().enumerate() {
        if let Ok(e) = usize::try_from(*id)
            && loads[e] > capacity
        {
            of_expert[e].push(i);
        }
    }
    for mut candidates in of_expert.into_iter().filter(|c| !c.is_empty()) {
        if let (CapacityOrder::Probability, Some(w)) = (order, weights) {
            // A NaN is nobody's favorite, on any rank. The sort is stable: ties stay in order of position.
            let key = |i: &usize| if w[*i].is_nan() { f64::NEG_INFINITY } else { w[*i] };
            candidates.sort_by(|a, b| key(b).total_cmp(&key(a)));
        }
        candidates[capacity..].iter().for_each(|i| ids[*i] = -1);
    }
}

/// Segments of every rank.
struct RankSegments {
    local_experts: usize,
    /// Rows past which a slot is dropped; `usize::MAX` where nothing is.
    limit: usize,
    /// First slot of each expert on its rank.
    offsets: Vec<usize>,
    /// Choices of each expert, expert capacity applied.
    counts: Vec<usize>,
    /// Padded rows of each rank.
    needed: Vec<usize>,
    capacity: Capacity,
    /// The layer, for errors.
    layer: u32,
}

impl RankSegments {
    fn new(call: &HostPlanRequest<'_>, counts: &[usize]) -> Result<Self> {
        let local_experts = call.num_experts / call.ranks;
        let mut offsets = Vec::with_capacity(call.num_experts);
        let mut needed = Vec::with_capacity(call.ranks);
        for of_rank in counts.chunks(local_experts) {
            let mut end = 0usize;
            for count in of_rank {
                offsets.push(end);
                let padded = count.checked_next_multiple_of(call.spec.alignment).unwrap_or(usize::MAX);
                end = end.saturating_add(padded);
            }
            needed.push(end);
        }
        let widest = needed.iter().copied().max().unwrap_or(0).max(call.ids.len());
        if widest > i32::MAX as usize {
            return Err(Error::invalid(CALL, "rows", format!("at most {}", i32::MAX), widest));
        }
        let limit = match (call.spec.capacity, call.spec.overflow) {
            (Capacity::Eager, _) => usize::MAX,
            (Capacity::Static(rows), Overflow::Drop) => rows,
            (Capacity::Static(capacity), Overflow::Error) => match needed.iter().position(|n| *n > capacity) {
                Some(rank) => {
                    let layer = call.spec.layer;
                    return Err(Error::Capacity { rank, layer, needed: needed[rank], capacity });
                }
                None => usize::MAX,
            },
        };
        let (capacity, layer) = (call.spec.capacity, call.spec.layer);
        Ok(Self { local_experts, limit, offsets, counts: counts.to_vec(), needed, capacity, layer })
    }

    /// Slot of each choice on its expert's rank, −1 where dropped; drops in `ids` too.
    fn slots(&self, ids: &mut [i32]) -> Result<Vec<i32>> {
        // No slot is past an i32, as `new` has seen to.
        let mut next: Vec<i32> = self.offsets.iter().map(|o| *o as i32).collect();
        let limit = i32::try_from(self.limit).unwrap_or(i32::MAX);
        let slot_of = |id: &mut i32| {
            let Some(next) = usize::try_from(*id).ok().and_then(|e| next.get_mut(e)) else { return -1 };
            let slot = *next;
            *next += 1;
            if slot >= limit {
                *id = -1;
                return -1;
            }
            slot
        };
        let mut slots = host_memory::reserved(CALL, "slots of all choices", ids.len())?;
        slots.extend(ids.iter_mut().map(slot_of));
        Ok(slots)
    }

    /// Rows N of a rank's buffers.
    fn rows(&self, rank: usize) -> usize {
        match self.capacity {
            Capacity::Eager => self.needed[rank],
            Capacity::Static(rows) => rows,
        }
    }

    /// The rank's segments and their padded sizes, cut at the capacity.
    fn segments(&self, rank: usize) -> Result<(Segments<Cpu>, Vec<usize>)> {
        let rows = self.rows(rank);
        let experts = rank * self.local_experts..(rank + 1) * self.local_experts;
        let starts: Vec<usize> = self.offsets[experts.clone()].iter().map(|o| *o.min(&rows)).collect();
        let ends = starts.iter().skip(1).copied().chain([self.needed[rank].min(rows)]);
        let padded: Vec<usize> = starts.iter().zip(ends).map(|(start, end)| end - start).collect();
        let counts = self.counts[experts].iter().zip(&starts).map(|(c, start)| *c.min(&(rows - start)) as i64);
        let list = |values: Vec<i64>| Tensor::from_vec(values, &[self.local_experts]);
        let offsets = list(starts.iter().map(|s| *s as i64).collect())?;
        let segments = Segments::new(offsets, list(counts.collect())?, rows);
        Ok((segments.with_origin(Origin { rank, layer: self.layer }), padded))
    }
}

/// Name of a map in the error where there is no memory for it.
const MAP: &str = "a map of rows";

/// A map of which every entry says "none".
fn no_rows(count: usize) -> Result<Vec<i32>> {
    host_memory::filled(CALL, MAP, -1, count)
}

/// The maps of a [`Plan`].
struct Maps {
    row_map: Tensor<Cpu>,
    weight_map: Tensor<Cpu>,
    return_map: Tensor<Cpu>,
    messages: Option<MessageMaps<Cpu>>,
    zones: Option<ZoneMaps<Cpu>>,
}

struct MapBuilder<'a, 'r> {
    call: &'a HostPlanRequest<'r>,
    layout: &'a RankSegments,
    ids: &'a [i32],
    slots: &'a [i32],
    first_token: usize,
    /// Rank of each expert, behind an entry for "none".
    ranks: Vec<usize>,
}

/// The rank of no expert.
const NOWHERE: usize = usize::MAX;

impl MapBuilder<'_, '_> {
    /// Rank that a choice is kept at.
    fn rank_of(&self, id: i32) -> usize {
        self.ranks[(id + 1) as usize]
    }

    fn all_rows(&self) -> Result<Maps> {
        let (rows, k) = (self.layout.rows(self.call.rank), self.call.spec.top_k);
        let mut row_map = no_rows(rows)?;
        let mut weight_map = no_rows(rows)?;
        let mut return_map = no_rows(self.ids.len())?;
        for (token, (ids, slots)) in self.ids.chunks_exact(k).zip(self.slots.chunks_exact(k)).enumerate() {
            for (j, (id, slot)) in ids.iter().zip(slots).enumerate() {
                if self.rank_of(*id) == self.call.rank {
                    let (i, at) = (token * k + j, *slot as usize);
                    row_map[at] = token as i32;
                    weight_map[at] = i as i32;
                    return_map[i] = *slot;
                }
            }
        }
        Ok(Maps {
            row_map: Tensor::from_vec(row_map, &[rows])?,
            weight_map: Tensor::from_vec(weight_map, &[rows])?,
            return_map: Tensor::from_vec(return_map, &[self.call.tokens.iter().sum(), k])?,
            messages: None,
            zones: None,
        })
    }

    fn slots_only(&self) -> Result<Maps> {
        let rows = self.layout.rows(self.call.rank);
        let mut row_map = no_rows(rows)?;
        for (_, slot) in self.ids.iter().zip(self.slots).filter(|(id, _)| self.rank_of(**id) == self.call.rank) {
            row_map[*slot as usize] = *slot;
        }
        Ok(Maps {
            weight_map: Tensor::from_vec(host_memory::copied(CALL, MAP, &row_map)?, &[rows])?,
            row_map: Tensor::from_vec(row_map, &[rows])?,
            return_map: Tensor::from_vec(Vec::<i32>::new(), &[0, self.call.spec.top_k])?,
            messages: None,
            zones: None,
        })
    }

    fn unique_rows(&self) -> Result<Maps> {
        let (rank, ranks, k) = (self.call.rank, self.call.ranks, self.call.spec.top_k);
        let rows = self.layout.rows(rank);
        let mut row_map = no_rows(rows)?;
        let mut weight_map = no_rows(rows)?;
        let mut return_slots = Vec::new();
        let (mut recv_rows, mut slots_from) = (vec![0; ranks], vec![0; ranks]);
        let (mut received, mut choice) = (0i32, 0);
        for (source, &tokens) in self.call.tokens.iter().enumerate() {
            let range = choice..choice + tokens * k;
            choice = range.end;
            let (rows_before, slots_before) = (received, return_slots.len());
            for (ids, slots) in self.ids[range.clone()].chunks_exact(k).zip(self.slots[range].chunks_exact(k)) {
                let mut wanted = false;
                for (id, slot) in ids.iter().zip(slots) {
                    if self.rank_of(*id) == rank {
                        wanted = true;
                        row_map[*slot as usize] = received;
                        weight_map[*slot as usize] = return_slots.len() as i32;
                        return_slots.push(*slot);
                    }
                }
                received += i32::from(wanted);
            }
            recv_rows[source] = (received - rows_before) as usize;
            slots_from[source] = return_slots.len() - slots_before;
        }

        let tokens = self.call.tokens[rank];
        let own = &self.ids[self.first_token * k..(self.first_token + tokens) * k];
        let mut sent_tokens = vec![Vec::new(); ranks];
        let mut sent_choices = vec![Vec::new(); ranks];
        for (t, ids) in own.chunks_exact(k).enumerate() {
            for (j, id) in ids.iter().enumerate() {
                let to = self.rank_of(*id);
                if to == NOWHERE {
                    continue;
                }
                if sent_tokens[to].last() != Some(&(t as i32)) {
                    sent_tokens[to].push(t as i32);
                }
                sent_choices[to].push((t * k + j) as i32);
            }
        }
        let (send_rows, slots_at) = (lengths(&sent_tokens), lengths(&sent_choices));
        let send_choices = sent_choices.concat();
        let mut return_map = no_rows(tokens * k)?;
        send_choices.iter().enumerate().for_each(|(i, j)| return_map[*j as usize] = i as i32);
        Ok(Maps {
            row_map: Tensor::from_vec(row_map, &[rows])?,
            weight_map: Tensor::from_vec(weight_map, &[rows])?,
            return_map: Tensor::from_vec(return_map, &[tokens, k])?,
            messages: Some(MessageMaps {
                send_tokens: list(sent_tokens.concat())?,
                send_choices: list(send_choices)?,
                return_slots: list(return_slots)?,
                send_rows,
                recv_rows,
                slots_from,
                slots_at,
            }),
            zones: None,
        })
    }

    fn zones(&self) -> Result<Maps> {
        let (rank, ranks, k) = (self.call.rank, self.call.ranks, self.call.spec.top_k);
        let rows = self.layout.rows(rank);
        let zone_rows = self.call.tokens.iter().copied().max().unwrap_or(0);
        let (mut row_map, mut weight_map) = (no_rows(rows)?, no_rows(rows)?);
        let (mut row_slots, mut row_tokens) = (no_rows(ranks * zone_rows * k)?, no_rows(ranks * zone_rows)?);
        let mut arrived = vec![0i64; ranks];
        let mut first = 0;
        for (source, &tokens) in self.call.tokens.iter().enumerate() {
            for token in 0..tokens {
                let choices = (first + token) * k..(first + token + 1) * k;
                let row = source * zone_rows + arrived[source] as usize;
                let mut wanted = false;
                for (j, (id, slot)) in self.ids[choices.clone()].iter().zip(&self.slots[choices]).enumerate() {
                    if self.rank_of(*id) == rank {
                        wanted = true;
                        row_map[*slot as usize] = row as i32;
                        weight_map[*slot as usize] = (row * k + j) as i32;
                        row_slots[row * k + j] = *slot;
                    }
                }
                if wanted {
                    row_tokens[row] = token as i32;
                    arrived[source] += 1;
                }
            }
            first += tokens;
        }
        let token_rows = self.token_rows()?;
        Ok(Maps {
            row_map: Tensor::from_vec(row_map, &[rows])?,
            weight_map: Tensor::from_vec(weight_map, &[rows])?,
            return_map: Tensor::from_vec(Vec::<i32>::new(), &[0, k])?,
            messages: None,
            zones: Some(ZoneMaps {
                token_rows: Tensor::from_vec(token_rows, &[self.call.tokens[rank], ranks])?,
                row_slots: Tensor::from_vec(row_slots, &[ranks, zone_rows, k])?,
                row_tokens: Tensor::from_vec(row_tokens, &[ranks, zone_rows])?,
                arrived: Tensor::from_vec(arrived, &[ranks])?,
                zone_rows,
            }),
        })
    }

    /// For each own token its row in the message to each rank.
    fn token_rows(&self) -> Result<Vec<i32>> {
        let (tokens, ranks, k) = (self.call.tokens[self.call.rank], self.call.ranks, self.call.spec.top_k);
        let own = &self.ids[self.first_token * k..(self.first_token + tokens) * k];
        let mut rows = no_rows(tokens * ranks)?;
        let mut sent = vec![0; ranks];
        for (ids, rows) in own.chunks_exact(k).zip(rows.chunks_exact_mut(ranks)) {
            for to in ids.iter().map(|id| self.rank_of(*id)).filter(|to| *to != NOWHERE) {
                if rows[to] < 0 {
                    rows[to] = sent[to];
                    sent[to] += 1;
                }
            }
        }
        Ok(rows)
    }
}

fn lengths(lists: &[Vec<i32>]) -> Vec<usize> {
    lists.iter().map(Vec::len).collect()
}

fn list(values: Vec<i32>) -> Result<Tensor<Cpu>> {
    let n = values.len();
    Tensor::from_vec(values, &[n])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DispatchSpec;

    #[test]
    fn a_transport_into_slots_maps_filled_slots_to_themselves() -> Result<()> {
        let spec = DispatchSpec { alignment: 4, ..DispatchSpec::new(0, 2) };
        let call = HostPlanRequest {
            rank: 1,
            ranks: 2,
            num_experts: 4,
            ids: &[2, 3, 2, -1, 0, 2],
            weights: None,
            tokens: &[2, 1],
            spec: &spec,
            row_order: RowOrder::Slots,
        };
        let plan = plan(call)?;
        // Expert 2 has three rows and a pad, expert 3 one and three.
        assert_eq!(plan.row_map.view().as_slice::<i32>()?, [0, 1, 2, -1, 4, -1, -1, -1]);
        assert_eq!(plan.weight_map.view().as_slice::<i32>()?, plan.row_map.view().as_slice::<i32>()?);
        assert_eq!(plan.return_map.dims(), [0, 2]);
        Ok(())
    }

    #[test]
    fn zones_have_room_for_all_tokens_of_each_rank() -> Result<()> {
        let spec = DispatchSpec { alignment: 4, ..DispatchSpec::new(0, 2) };
        let ids = &[2, 3, 2, -1, 0, 1, 0, 2];
        let (ranks, num_experts, tokens, row_order) = (2, 4, &[3, 1][..], RowOrder::Zones);
        let of = |rank| {
            plan(HostPlanRequest { rank, ranks, num_experts, ids, weights: None, tokens, spec: &spec, row_order })
        };
        let (first, second) = (of(0)?, of(1)?);
        let missing = || Error::invalid("test", "zones", "some", "none");
        let (at_first, at_second) = (first.zones.ok_or_else(missing)?, second.zones.ok_or_else(missing)?);
        assert_eq!((at_first.zone_rows, at_second.zone_rows), (3, 3));
        assert_eq!(at_first.token_rows.view().as_slice::<i32>()?, [-1, 0, -1, 1, 0, -1]);
        assert_eq!(at_second.token_rows.view().as_slice::<i32>()?, [0, 0]);
        assert_eq!(at_second.arrived.view().as_slice::<i64>()?, [2, 1]);
        assert_eq!(at_second.row_tokens.view().as_slice::<i32>()?, [0, 1, -1, 0, -1, -1]);
        // Expert 2 has three rows and a pad, expert 3 one and three.
        assert_eq!(second.row_map.view().as_slice::<i32>()?, [0, 1, 3, -1, 0, -1, -1, -1]);
        assert_eq!(second.weight_map.view().as_slice::<i32>()?, [0, 2, 7, -1, 1, -1, -1, -1]);
        assert_eq!(at_second.row_slots.view().as_slice::<i32>()?, [0, 4, 1, -1, -1, -1, -1, 2, -1, -1, -1, -1]);
        assert_eq!(first.row_map.view().as_slice::<i32>()?, [0, 3, -1, -1, 0, -1, -1, -1]);
        Ok(())
    }
}
