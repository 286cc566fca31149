//! Sizing, capacities and drops.

use moebius::config::{CapacityOrder, ExpertCapacity};
use moebius::ep::{Capacity, DispatchSpec, GroupConfig, Overflow, Reporting};
use moebius::{DType, Error};

use super::devices::seed;
use super::harness::*;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(eager_sizes),
        case!(overflow_is_an_error_on_every_rank),
        case!(overflow_drops_and_counts),
        case!(aligned_drop_leaves_canaries),
        case!(capacity_is_per_call),
        case!(a_bound_on_tokens_is_per_call, 2),
        case!(expert_capacity_by_position),
        case!(expert_capacity_by_probability),
        case!(i32_and_i64_ids),
        case!(minus_one),
        case!(all_to_one_expert),
        case!(ranks_that_receive_nothing, 2),
        case!(every_kind_of_routing),
    ]
}

const T: usize = 8;

fn eager_sizes<D: Target>(s: &Setup<D>) {
    let k = 2;
    for alignment in [1, 4, 16] {
        let filled = s.run(GroupConfig::new(s.experts(2), T), |r| {
            let spec = DispatchSpec { alignment, ..DispatchSpec::new(0, k) };
            let h = r.prepare(&round_robin(r.rank, T, k, s.experts(2)), &spec).expect("prepare");
            let (segments, padded) = (r.segments(&h), h.stats().expect("stats").padded_counts.clone());
            assert_eq!(h.rows(), padded.iter().sum::<usize>());
            assert_eq!(
                (h.rows(), h.stats().expect("stats").needed_rows),
                (h.stats().expect("stats").segment_end(), h.stats().expect("stats").segment_end())
            );
            for ((first, count), padded) in segments.iter().zip(&padded) {
                assert_eq!(first % alignment, 0);
                assert_eq!(*padded, count.next_multiple_of(alignment));
            }
            assert_eq!((h.tokens(), h.total_tokens(), h.first_token()), (T, T * s.ranks, T * r.rank));
            assert_eq!(h.stats().expect("stats").expert_load, vec![T * k / 2; s.experts(2)]);
            segments.iter().map(|(_, count)| count).sum::<usize>()
        });
        assert_eq!(filled.iter().sum::<usize>(), s.ranks * T * k);
    }
}

/// Every rank's choices go to expert 0 first, to expert 1 next.
fn to_first(tokens: usize, k: usize) -> Vec<i64> {
    (0..tokens * k).map(|i| (i % k) as i64).collect()
}

fn overflow_is_an_error_on_every_rank<D: Target>(s: &Setup<D>) {
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        let capacity = s.ranks * T - 1;
        let spec = DispatchSpec { capacity: Capacity::Static(capacity), ..DispatchSpec::new(6, 1) };
        match r.prepare(&to_first(T, 1), &spec) {
            Err(Error::Capacity { rank: 0, layer: 6, needed, capacity: c }) => {
                assert_eq!((needed, c), (s.ranks * T, capacity));
            }
            other => panic!("{other:?}"),
        }
        let spec = DispatchSpec { capacity: Capacity::Static(capacity + 1), ..spec };
        assert_eq!(r.prepare(&to_first(T, 1), &spec).expect("fits").rows(), capacity + 1);
        r.works();
    });
}

/// Half of what arrives fits: slots are kept in order (source rank, token, k), the rest counted and without effect.
fn overflow_drops_and_counts<D: Target>(s: &Setup<D>) {
    let needed = s.ranks * T;
    let capacity = needed / 2;
    let config = GroupConfig { max_rows: needed, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        let spec = DispatchSpec { capacity: Capacity::Static(capacity), overflow: Overflow::Drop, ..training(0, 1) };
        let h = r.prepare(&to_first(T, 1), &spec).expect("prepare");
        let here = if r.rank == 0 { (needed, capacity) } else { (0, 0) };
        assert_eq!((h.stats().expect("stats").needed_rows, r.segments(&h)[0].1), here);
        assert_eq!((h.rows(), h.stats().expect("stats").expert_load[0]), (capacity, needed));
        let me = r.rank;
        let kept_here = |t: usize| me * T + t < capacity;
        let expected: Vec<i64> = (0..T).map(|t| if kept_here(t) { 0 } else { -1 }).collect();
        assert_eq!(r.kept(&h), expected);
        assert_eq!(h.stats().expect("stats").dropped, expected.iter().filter(|id| **id < 0).count());

        let x = x(r.rank, T, 2);
        let mut recv = r.dispatch(&h, F32(2), &x, Some(&[2.0; T])).expect("dispatch");
        r.poison_padding(&h, 2, &mut recv.rows);
        let expected: Vec<f64> = x
            .chunks(2)
            .enumerate()
            .flat_map(|(t, row)| row.iter().map(move |v| if kept_here(t) { *v } else { 0.0 }))
            .collect();
        assert_eq!(r.combine(&h, F32(2), &recv.rows).expect("combine"), expected);
        let d = r.dispatch_bwd(&h, F32(2), &recv.rows, Some(&recv.weights)).expect("dispatch_bwd");
        assert_eq!(d.tokens, expected);
        assert_eq!(d.weights, (0..T).map(|t| if kept_here(t) { 2.0 } else { 0.0 }).collect::<Vec<_>>());
    });
}

/// Drop with alignment writes segments and their padding, nothing past them and nothing past the capacity.
fn aligned_drop_leaves_canaries<D: Target>(s: &Setup<D>) {
    // (capacity, alignment): room to spare, none, and a capacity that cuts a segment's padding.
    for (capacity, alignment) in [(16 + 64, 16), (16, 16), (8, 4), (10, 4), (3, 8)] {
        let config = GroupConfig { max_rows: capacity, ..GroupConfig::new(s.experts(2), T) };
        s.run(config, |r| {
            let spec = DispatchSpec {
                capacity: Capacity::Static(capacity),
                overflow: Overflow::Drop,
                alignment,
                ..training(0, 2)
            };
            // Rank 0 brings all of its five tokens to experts 0 and 1.
            let tokens = if r.rank == 0 { 5 } else { 0 };
            let h = r.prepare(&to_first(tokens, 2), &spec).expect("prepare");
            // Where the host does not know the end, the rest is zeroed.
            h.stats().expect("stats");
            let x = x(r.rank, tokens, 2);
            let recv = r.dispatch(&h, F32(2), &x, Some(&vec![1.0; tokens * 2])).expect("dispatch");
            let d_eo = r.combine_bwd(&h, F32(2), &x).expect("combine_bwd");
            let (filled, end) = (r.filled(&h), h.stats().expect("stats").segment_end());
            assert!(end <= capacity);
            if r.rank == 0 {
                assert_eq!(h.stats().expect("stats").needed_rows, 2 * 5usize.next_multiple_of(alignment));
                assert_eq!(h.stats().expect("stats").dropped, 10 - filled.len());
                assert_eq!(end, capacity.min(h.stats().expect("stats").needed_rows));
            }
            for slot in 0..capacity {
                let row = (&recv.rows[slot * 2..slot * 2 + 2], recv.weights[slot], &d_eo[slot * 2..slot * 2 + 2]);
                match (slot < end, filled.contains(&slot)) {
                    (true, true) => assert!(row.0 == row.2 && row.1 == 1.0),
                    (true, false) => assert_eq!(row, (&[0.0; 2][..], 0.0, &[0.0; 2][..])),
                    (false, _) => assert_eq!(row, (&[CANARY; 2][..], CANARY, &[CANARY; 2][..])),
                }
            }
        });
    }
}

fn capacity_is_per_call<D: Target>(s: &Setup<D>) {
    let most = s.ranks * T;
    let config = GroupConfig { max_rows: most, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        let ids = round_robin(r.rank, T, 1, s.experts(2));
        for capacity in [Capacity::Static(most), Capacity::Eager, Capacity::Static(T), Capacity::Static(most)] {
            let h = r.prepare(&ids, &DispatchSpec { capacity, ..DispatchSpec::new(0, 1) }).expect("prepare");
            assert_eq!(h.rows(), if let Capacity::Static(n) = capacity { n } else { T });
            let x = x(r.rank, T, 1);
            let recv = r.dispatch(&h, F32(1), &x, None).expect("dispatch");
            assert_eq!(r.combine(&h, F32(1), &recv.rows).expect("combine"), x);
        }
        let spec = DispatchSpec { capacity: Capacity::Static(most + 1), ..DispatchSpec::new(0, 1) };
        match r.prepare(&ids, &spec) {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, "spec.capacity"),
            other => panic!("{other:?}"),
        }
        r.works();
    });
}

/// A bound on a call's tokens, that of the ranks' most or a higher one, changes nothing that comes out, with any capacity;
/// one above the group's is refused.
fn a_bound_on_tokens_is_per_call<D: Target>(s: &Setup<D>) {
    const MOST: usize = 2 * T;
    let rows = s.ranks * MOST * 2;
    s.run(GroupConfig { max_rows: rows, ..GroupConfig::new(s.experts(2), MOST) }, |r| {
        let tokens = T - r.rank % 3;
        let (ids, x) = (round_robin(r.rank, tokens, 2, s.experts(2)), x(r.rank, tokens, 2));
        for capacity in [Capacity::Eager, Capacity::Static(rows)] {
            for reporting in [Reporting::Immediate, Reporting::Deferred] {
                let mut of = |max_tokens: Option<usize>| {
                    let spec = DispatchSpec { max_tokens, capacity, reporting, ..training(0, 2) };
                    // A second one, where the host of a device has no part in it.
                    drop(r.prepare(&ids, &spec).expect("prepare"));
                    let h = r.prepare(&ids, &spec).expect("prepare");
                    let mut recv = r.dispatch(&h, F32(2), &x, Some(&vec![0.5; tokens * 2])).expect("dispatch");
                    r.poison_padding(&h, 2, &mut recv.rows);
                    let y = r.combine(&h, F32(2), &recv.rows).expect("combine");
                    let d = r.dispatch_bwd(&h, F32(2), &recv.rows, Some(&recv.weights)).expect("dispatch_bwd");
                    (y, d.tokens, d.weights)
                };
                let expected = of(None);
                assert_eq!(of(Some(T)), expected, "{capacity:?}, {reporting:?}");
                assert_eq!(of(Some(MOST)), expected, "{capacity:?}, {reporting:?}");
            }
        }
        for max_tokens in [0, MOST + 1] {
            match r.prepare(&ids, &DispatchSpec { max_tokens: Some(max_tokens), ..training(0, 2) }) {
                Err(Error::Invalid { name, .. }) => assert_eq!(name, "spec.max_tokens"),
                other => panic!("{other:?}"),
            }
        }
        r.works();
    });
}

fn limited(order: CapacityOrder, factor: f64) -> DispatchSpec {
    let expert_capacity = Some(ExpertCapacity { factor, order, renormalize: false });
    DispatchSpec { expert_capacity, ..training(0, 1) }
}

/// Three quarters of all tokens choose expert 0; C = ceil(f·T·K/E) of them stay, the first ones of the group.
fn expert_capacity_by_position<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let last = s.experts(2) as i64 - 1;
        let ids: Vec<i64> = (0..T as i64).map(|t| if t % 4 == 3 { last } else { 0 }).collect();
        let h = r.prepare(&ids, &limited(CapacityOrder::Position, 1.0)).expect("prepare");
        let c = (s.ranks * T).div_ceil(s.experts(2));
        assert_eq!(h.stats().expect("stats").expert_load[0], s.ranks * T * 3 / 4);
        let mut before = r.rank * T * 3 / 4;
        let mut before_last = r.rank * T / 4;
        let mut expected = Vec::new();
        for id in &ids {
            let seen = if *id == 0 { &mut before } else { &mut before_last };
            expected.push(if *seen < c { *id } else { -1 });
            *seen += 1;
        }
        assert_eq!(r.kept(&h), expected);
        assert_eq!(h.stats().expect("stats").dropped, expected.iter().filter(|id| **id < 0).count());
    });
}

/// Weights rise with the token and fall with the rank; equal weights stay in order of position.
fn expert_capacity_by_probability<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        // C = ceil(0.5·T·R / (2·R)) = 2: of all tokens, expert 0 keeps the two with the largest weights.
        let weights: Vec<f64> = (0..T).map(|t| (t / 2) as f64 - r.rank as f64).collect();
        let spec = limited(CapacityOrder::Probability, 0.5);
        let h = r.prepare_weighted(&[0; T], &weights, &spec).expect("prepare");
        let mut expected = [-1; T];
        if r.rank == 0 {
            expected[T - 2..].fill(0);
        }
        assert_eq!(r.kept(&h), expected);
        // All weights equal: the first two by position.
        let h = r.prepare_weighted(&[0; T], &[0.5; T], &spec).expect("prepare");
        let mut expected = [-1; T];
        if r.rank == 0 {
            expected[..2].fill(0);
        }
        assert_eq!(r.kept(&h), expected);
        match r.prepare(&[0; T], &spec) {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, "tensor topk_weights"),
            other => panic!("{other:?}"),
        }
        r.works();
    });
}

fn i32_and_i64_ids<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let mut wide = round_robin(r.rank, T, 2, s.experts(2));
        wide[3] = -1;
        let narrow: Vec<f64> = wide.iter().map(|id| *id as f64).collect();
        let narrow = r.put(DType::I32, &narrow, &[T, 2]);
        let spec = DispatchSpec::new(0, 2);
        let a = r.prepare(&wide, &spec).expect("i64");
        let b = r.prepare_with(&narrow, None, &spec).expect("i32");
        assert_eq!((r.kept(&a), r.values(a.row_map())), (r.kept(&b), r.values(b.row_map())));
        assert_eq!(r.segments(&a), r.segments(&b));
        let floats = r.put(DType::F32, &[0.0; T * 2], &[T, 2]);
        let error = r.prepare_with(&floats, None, &spec);
        assert!(matches!(error, Err(Error::Invalid { name, .. }) if name == "tensor topk_ids"));
        r.works();
    });
}

/// −1 has no slot, adds nothing, and its weight gradient is 0; a token of nothing else gets zeros.
fn minus_one<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let ids: Vec<i64> =
            (0..T as i64).flat_map(|t| [if t % 2 == 0 { 1 } else { -1 }, if t % 4 == 3 { -1 } else { 0 }]).collect();
        let h = r.prepare(&ids, &training(0, 2)).expect("prepare");
        assert_eq!(h.stats().expect("stats").dropped, 0, "-1 is no drop");
        assert_eq!(
            h.stats().expect("stats").expert_load.iter().sum::<usize>(),
            s.ranks * ids.iter().filter(|id| **id >= 0).count()
        );
        let recv = r.dispatch(&h, F32(1), &[1.0; T], Some(&[1.0; T * 2])).expect("dispatch");
        let expected: Vec<f64> = ids.chunks(2).map(|t| t.iter().filter(|id| **id >= 0).count() as f64).collect();
        assert_eq!(r.combine(&h, F32(1), &recv.rows).expect("combine"), expected);
        let d = r.dispatch_bwd(&h, F32(1), &recv.rows, Some(&recv.weights)).expect("dispatch_bwd");
        assert_eq!(d.tokens, expected);
        assert_eq!(d.weights, ids.iter().map(|id| if *id >= 0 { 1.0 } else { 0.0 }).collect::<Vec<_>>());
    });
}

fn all_to_one_expert<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let target = s.experts(2) - 1;
        let h = r.prepare(&[target as i64; T], &training(0, 1)).expect("prepare");
        assert_eq!(h.rows(), if r.rank == s.ranks - 1 { s.ranks * T } else { 0 });
        let x = x(r.rank, T, 4);
        let recv = r.dispatch(&h, F32(4), &x, None).expect("dispatch");
        assert_eq!(r.combine(&h, F32(4), &recv.rows).expect("combine"), x);
        // Slot order: source rank, then token.
        if r.rank == s.ranks - 1 {
            let all: Vec<f64> = (0..s.ranks).flat_map(|rank| super::harness::x(rank, T, 4)).collect();
            assert_eq!(recv.rows, all);
        }
    });
}

fn ranks_that_receive_nothing<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let h = r.prepare(&to_first(T, 2), &training(0, 2)).expect("prepare");
        assert_eq!(h.rows(), if r.rank == 0 { s.ranks * T * 2 } else { 0 });
        let x = x(r.rank, T, 4);
        let recv = r.dispatch(&h, F32(4), &x, Some(&[0.5; T * 2])).expect("dispatch");
        let halves: Vec<f64> = recv.rows.iter().map(|v| v / 2.0).collect();
        assert_eq!(r.combine(&h, F32(4), &halves).expect("combine"), x);
        let d_eo = r.combine_bwd(&h, F32(4), &x).expect("combine_bwd");
        let halves: Vec<f64> = d_eo.iter().map(|v| v / 2.0).collect();
        assert_eq!(r.dispatch_bwd(&h, F32(4), &halves, None).expect("dispatch_bwd").tokens, x);
    });
}

/// How tokens choose.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Choosing {
    Uniform,
    /// Expert e in proportion to 1 / (e + 1).
    Zipf,
    /// One expert is every token's first.
    Hot,
    RoundRobin,
}

/// Choice `i` of so many: a number in [0, 1).
fn fraction(rank: usize, i: usize) -> f64 {
    let mixed = seed::seed((rank * 65_537 + i + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11) as f64 / (1u64 << 53) as f64
}

impl Choosing {
    /// K different experts for each of T tokens.
    fn ids(self, rank: usize, [tokens, k, experts]: [usize; 3]) -> Vec<i64> {
        if self == Self::RoundRobin {
            return round_robin(rank, tokens, k, experts);
        }
        let weight = |e: usize| if self == Self::Zipf { 1.0 / (e + 1) as f64 } else { 1.0 };
        let one = |chosen: &[i64], i: usize| {
            if self == Self::Hot && chosen.is_empty() {
                return (experts - 1) as i64;
            }
            let left: Vec<usize> = (0..experts).filter(|e| !chosen.contains(&(*e as i64))).collect();
            let mut at = fraction(rank, i) * left.iter().map(|e| weight(*e)).sum::<f64>();
            let found = left.iter().find(|e| {
                at -= weight(**e);
                at < 0.0
            });
            *found.unwrap_or(&left[left.len() - 1]) as i64
        };
        let token = |t: usize| {
            (0..k).fold(Vec::new(), |mut chosen, j| {
                chosen.push(one(&chosen, t * k + j));
                chosen
            })
        };
        (0..tokens).flat_map(token).collect()
    }
}

/// Loads are the choices counted; experts that return what they get give K times the token, and so does the way back.
/// Sums of 2 integers below 2⁶: exact in f32.
fn every_kind_of_routing<D: Target>(s: &Setup<D>) {
    let (tokens, k, experts) = (24, 2, s.experts(4));
    let all = [Choosing::Uniform, Choosing::Zipf, Choosing::Hot, Choosing::RoundRobin];
    let chosen = all.map(|how| (0..s.ranks).map(|r| how.ids(r, [tokens, k, experts])).collect::<Vec<_>>());
    let loads = chosen.clone().map(|ranks| {
        let count = |e: usize| ranks.iter().flatten().filter(|id| **id == e as i64).count();
        (0..experts).map(count).collect::<Vec<_>>()
    });
    // The sizes that the test is for.
    assert_eq!(loads[2][experts - 1], s.ranks * tokens);
    // Of 2400 tokens, as few have any load by chance: with 4 experts the first is among 79 in 100 tokens' two, the last
    // among 28, and the difference of the loads in question is 11 standard deviations.
    let many = Choosing::Zipf.ids(0, [2400, k, experts]);
    let load = |e: usize| many.iter().filter(|id| **id == e as i64).count();
    assert!(load(0) > 2 * load(experts - 1), "{} and {}", load(0), load(experts - 1));
    assert!(loads[3].iter().all(|load| *load == s.ranks * tokens * k / experts));
    s.run(GroupConfig::new(experts, tokens), |r| {
        let (me, local) = (r.rank, experts / s.ranks);
        let x: Vec<f64> = (0..tokens * 2).map(|i| ((me * 31 + i * 7) % 61) as f64 - 30.0).collect();
        let twice: Vec<f64> = x.iter().map(|v| k as f64 * v).collect();
        for (of, how) in all.iter().enumerate() {
            let h = r.prepare(&chosen[of][me], &training(0, k)).expect("prepare");
            assert_eq!(h.stats().expect("stats").expert_load, loads[of], "{how:?}");
            let counts: Vec<usize> = r.segments(&h).iter().map(|(_, count)| *count).collect();
            assert_eq!(counts, loads[of][me * local..(me + 1) * local], "{how:?}");
            let recv = r.dispatch(&h, F32(2), &x, Some(&vec![0.5; tokens * k])).expect("dispatch");
            assert!(r.filled(&h).iter().all(|slot| recv.weights[*slot] == 0.5), "{how:?}");
            assert_eq!(r.combine(&h, F32(2), &recv.rows).expect("combine"), twice, "{how:?}");
            if r.forward_only {
                continue;
            }
            let grad = r.combine_bwd(&h, F32(2), &x).expect("combine_bwd");
            let d = r.dispatch_bwd(&h, F32(2), &grad, Some(&recv.weights)).expect("dispatch_bwd");
            assert_eq!((d.tokens, d.weights), (twice.clone(), vec![0.5; tokens * k]), "{how:?}");
        }
    });
}
