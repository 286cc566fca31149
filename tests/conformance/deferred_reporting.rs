//! Prepare that does not wait: the same plan and the same bits as one that does, and the same errors, asked for later.

use moebius::config::{CapacityOrder, ExpertCapacity};
use moebius::ep::{Capacity, DispatchSpec, DispatcherKind, GroupConfig, Handle, Overflow, Reporting, Stats};
use moebius::{DType, Error, IdProblem, Result};

use super::devices::seed;
use super::harness::*;

/// The crate's own: other libraries have an order of slots, and ways to tell, of theirs.
const OWN: &[DispatcherKind] = &[
    DispatcherKind::Local,
    DispatcherKind::AllToAll,
    DispatcherKind::Hierarchical,
    DispatcherKind::AllGather,
    DispatcherKind::NvLink,
];
/// Whose prepare waits for nothing where the capacity is static.
const WAITS_FOR_NOTHING: &[DispatcherKind] = &[DispatcherKind::AllGather, DispatcherKind::NvLink];

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(a_step_is_the_same, 1, OWN),
        case!(a_spec_that_differs_is_told_everywhere, 2, WAITS_FOR_NOTHING),
        case!(a_bad_id_is_told_everywhere, 1, WAITS_FOR_NOTHING),
        case!(a_bad_id_is_one_error, 1, WAITS_FOR_NOTHING),
        case!(a_capacity_too_small_is_told_everywhere, 1, WAITS_FOR_NOTHING),
        case!(the_first_error_is_kept, 1, WAITS_FOR_NOTHING),
        case!(an_error_that_another_rank_still_holds_is_told, 2, WAITS_FOR_NOTHING),
        case!(what_was_masked_is_told_by_a_prepare_that_waits, 1, OWN),
        case!(a_rank_that_cannot_take_part_says_so, 2, WAITS_FOR_NOTHING),
    ]
}

const T: usize = 6;
const H: usize = 3;
const K: usize = 3;

fn later(spec: DispatchSpec) -> DispatchSpec {
    DispatchSpec { reporting: Reporting::Deferred, ..spec }
}

/// Seeded choices, distinct in a token, some of none.
fn choices(own: u64, tokens: usize, experts: usize) -> Vec<i64> {
    let mut state = seed::seed(own).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % n
    };
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut own: Vec<i64> = Vec::new();
        while own.len() < K {
            let e = next(experts) as i64;
            match next(8) {
                0 => own.push(-1),
                _ if !own.contains(&e) => own.push(e),
                _ => {}
            }
        }
        ids.extend(own);
    }
    ids
}

/// All that can be seen of a step: counts, maps, and the bits of every movement's results.
#[derive(Debug, PartialEq)]
struct Seen {
    segments: Vec<(usize, usize)>,
    rows: usize,
    kept: Vec<i64>,
    stats: Stats,
    recv: Slots,
    out: Vec<f64>,
    d_slots: Vec<f64>,
    grads: TokenGrads,
}

fn step<D: Target>(r: &mut Rank<D>, ids: &[i64], spec: &DispatchSpec) -> Result<Seen> {
    let tokens = ids.len() / K;
    let h = r.prepare(ids, spec)?;
    let x: Vec<f64> = x(r.rank, tokens, H).iter().map(|v| v * 1.37).collect();
    let weights: Vec<f64> = (0..tokens * K).map(|i| 0.1 + i as f64 / 7.0).collect();
    let rows = F32(H);
    // Nothing has been asked of the plan yet.
    let mut recv = r.dispatch_rows(&h, rows, &x, Some(&weights))?;
    let mut outputs: Vec<f64> = recv.rows.iter().enumerate().map(|(i, v)| v * (1.0 + i as f64 / 64.0)).collect();
    r.poison_padding(&h, H, &mut outputs);
    let out = r.combine(&h, rows, &outputs)?;
    let mut d_slots = r.combine_bwd_rows(&h, rows, &out)?;
    r.poison_padding(&h, H, &mut d_slots);
    let mut slot_weights = recv.weights.clone();
    r.poison_padding(&h, 1, &mut slot_weights);
    let grads = r.dispatch_bwd(&h, rows, &d_slots, Some(&slot_weights))?;
    // Padding is anything.
    for (values, width) in [(&mut recv.rows, H), (&mut recv.weights, 1), (&mut d_slots, H)] {
        let filled = r.filled(&h);
        for (slot, row) in values.chunks_mut(width).enumerate().filter(|(slot, _)| !filled.contains(slot)) {
            let _ = slot;
            row.fill(0.0);
        }
    }
    let stats = h.stats()?.clone();
    Ok(Seen { segments: r.segments(&h), rows: h.rows(), kept: r.kept(&h), stats, recv, out, d_slots, grads })
}

fn a_step_is_the_same<D: Target>(s: &Setup<D>) {
    let experts = s.experts(3);
    let plain = training(0, K);
    let limit = |factor| Some(ExpertCapacity { factor, order: CapacityOrder::Position, renormalize: false });
    let enough = (s.ranks * T * K).next_multiple_of(8) + 64;
    let specs = [
        plain,
        DispatchSpec { alignment: 8, ..plain },
        DispatchSpec { expert_capacity: limit(0.7), alignment: 2, ..plain },
        DispatchSpec { capacity: Capacity::Static(enough), ..plain },
        DispatchSpec { capacity: Capacity::Static(enough), alignment: 8, ..plain },
        DispatchSpec { capacity: Capacity::Static(enough), expert_capacity: limit(0.9), ..plain },
        DispatchSpec { capacity: Capacity::Static(T), overflow: Overflow::Drop, ..plain },
        DispatchSpec { capacity: Capacity::Static(T + 1), overflow: Overflow::Drop, alignment: 4, ..plain },
        DispatchSpec { capacity: Capacity::Static(T), overflow: Overflow::Drop, expert_capacity: limit(0.6), ..plain },
    ];
    // More tokens reserved than any rank has, or none to spare; ranks with few or no tokens.
    for (most, split) in [(T, [T; 8]), (T + 5, [T, 0, 3, T, 1, 0, 2, 5]), (T, [0, T, 2, 0, 0, 0, 6, 1])] {
        let config = GroupConfig { max_rows: enough, ..GroupConfig::new(experts, most) };
        s.run(config, |r| {
            let tokens = split[r.rank];
            for (i, spec) in specs.iter().enumerate() {
                let ids = choices((100 * i + 10 * r.rank + most) as u64, tokens, experts);
                let at_once = {
                    let asked = std::mem::replace(&mut r.later, false);
                    let seen = step(r, &ids, spec).expect("at once");
                    r.later = asked;
                    seen
                };
                let seen = step(r, &ids, &later(*spec)).expect("later");
                // A rank alone gets as many rows as it may need.
                let rows = seen.rows;
                let shorter = Seen { rows: at_once.rows, ..seen };
                let (mut a, mut b) = (shorter, at_once);
                if rows != b.rows {
                    assert_eq!(s.ranks, 1);
                    for seen in [&mut a, &mut b] {
                        let end = seen.stats.segment_end();
                        seen.recv.rows.truncate(end * H);
                        seen.recv.weights.truncate(end);
                        seen.d_slots.truncate(end * H);
                    }
                }
                assert_eq!(a, b, "{spec:?}");
                r.group.dispatcher().check().expect("nothing to tell");
            }
        });
    }
}

/// Calls that a handle of a spec takes whatever is wrong: all go through it together.
fn through<D: Target>(r: &mut Rank<D>, h: &Handle<D>) {
    let x = vec![1.0; h.tokens() * H];
    let recv = r.dispatch_rows(h, F32(H), &x, None);
    // Ranks that disagree have been told so, and what they get is worth nothing.
    if let Ok(recv) = recv {
        let _ = r.combine(h, F32(H), &recv.rows);
    }
}

fn a_spec_that_differs_is_told_everywhere<D: Target>(s: &Setup<D>) {
    let good = later(DispatchSpec { capacity: Capacity::Static(64), ..training(0, 2) });
    let limit = Some(ExpertCapacity { factor: 1.0, order: CapacityOrder::Position, renormalize: false });
    let specs = [
        ("spec.alignment", DispatchSpec { alignment: 2, ..good }),
        ("spec.capacity", DispatchSpec { capacity: Capacity::Static(63), ..good }),
        ("spec.overflow", DispatchSpec { overflow: Overflow::Drop, ..good }),
        // Its plan leaves out what the others' keep.
        ("spec.capacity", DispatchSpec { capacity: Capacity::Static(2), overflow: Overflow::Drop, ..good }),
        ("spec.expert_capacity.factor", DispatchSpec { expert_capacity: limit, ..good }),
        ("spec.formula", DispatchSpec { formula: 7.into(), ..good }),
    ];
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        for (name, spec) in &specs {
            let odd = s.ranks - 1;
            let spec = if r.rank == odd { *spec } else { good };
            let h = r.prepare(&round_robin(0, 2, 2, s.experts(2)), &spec).expect("told later");
            // Before any read: a device behind the host tells whoever waits for it first.
            match r.group.dispatcher().check() {
                Err(Error::ConfigMismatch { call, field, rank, peer, value, peer_value }) => {
                    assert_eq!((call, &field[..], rank), ("prepare", *name, r.rank));
                    assert_eq!(peer, if r.rank == odd { 0 } else { odd });
                    assert_ne!(value, peer_value);
                }
                other => panic!("{name}: {other:?}"),
            }
            through(r, &h);
            r.group.dispatcher().check().expect("told once");
            r.works();
        }
    });
}

fn a_bad_id_is_told_everywhere<D: Target>(s: &Setup<D>) {
    let experts = s.experts(4);
    let culprit = s.ranks - 1;
    let spec = later(DispatchSpec { capacity: Capacity::Static(256), ..training(0, K) });
    for (id, first) in [(experts as i64, None), (-2, None), (i64::MIN, None), (i64::MAX, None), (1, Some(0))] {
        let config = GroupConfig { max_rows: 256, ..GroupConfig::new(experts, T) };
        s.run(config, |r| {
            let mut ids = [1, 2, 3].repeat(4);
            if r.rank == culprit {
                (ids[2 * K + 2], ids[3 * K + 1]) = (id, experts as i64 + 7);
            }
            let h = r.prepare(&ids, &spec).expect("masked");
            match r.group.dispatcher().check() {
                Err(Error::ExpertId { call, rank, layer, token, k, id: found, problem }) => {
                    assert_eq!(call, "prepare");
                    assert_eq!((rank, layer, token, k, found), (culprit, spec.layer, 2, 2, id));
                    let expected = match first {
                        Some(first) => IdProblem::Duplicate { first },
                        None => IdProblem::OutOfRange { num_experts: experts },
                    };
                    assert_eq!(problem, expected);
                }
                other => panic!("{other:?}"),
            }
            through(r, &h);
            r.group.dispatcher().check().expect("told once");
            let kept = if r.rank == culprit { [1, 2, -1, 1, -1, 3] } else { [1, 2, 3, 1, 2, 3] };
            assert_eq!(r.kept(&h)[2 * K..], kept);
            r.works();
        });
    }
}

/// A device that is waited for without the group tells it too, as the same error.
fn a_bad_id_is_one_error<D: Target>(s: &Setup<D>) {
    let experts = s.experts(4);
    let (culprit, id) = (s.ranks - 1, experts as i64);
    let spec = later(DispatchSpec { capacity: Capacity::Static(256), ..training(0, K) });
    s.run(GroupConfig { max_rows: 256, ..GroupConfig::new(experts, T) }, |r| {
        let mut ids = [1, 2, 3].repeat(T);
        if r.rank == culprit {
            ids[2 * K + 2] = id;
        }
        let h = r.prepare(&ids, &spec).expect("masked");
        let problem = IdProblem::OutOfRange { num_experts: experts };
        let (call, rank, layer) = ("prepare", culprit, spec.layer);
        let expected = Error::ExpertId { call, rank, layer, token: 2, k: 2, id, problem }.to_string();
        // Only kernels tell a device; the CPU's prepare tells the group alone.
        if let Err(error) = r.group.device().check() {
            assert_eq!(error.to_string(), expected);
        }
        let error = r.group.dispatcher().check().expect_err("a bad id");
        assert_eq!(error.to_string(), expected);
        through(r, &h);
        r.group.dispatcher().check().expect("told once");
        r.works();
    });
}

fn a_capacity_too_small_is_told_everywhere<D: Target>(s: &Setup<D>) {
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        // All choose an expert of the last rank.
        let (full, rows) = (s.experts(2) - 1, s.ranks * T - 1);
        let spec = later(DispatchSpec { capacity: Capacity::Static(rows), ..training(6, 1) });
        let h = r.prepare(&[full as i64; T], &spec).expect("told later");
        match r.group.dispatcher().check() {
            Err(Error::Capacity { rank, layer: 6, needed, capacity }) => {
                assert_eq!((rank, needed, capacity), (s.ranks - 1, s.ranks * T, rows));
            }
            other => panic!("{other:?}"),
        }
        let recv = r.dispatch_rows(&h, F32(1), &[1.0; T], None).expect("dispatch");
        let out = r.combine(&h, F32(1), &recv.rows).expect("combine");
        // The last rank's last token found no room.
        let last = r.rank == s.ranks - 1;
        assert_eq!(out, [1.0, 1.0, 1.0, 1.0, 1.0, if last { 0.0 } else { 1.0 }]);
        r.group.dispatcher().check().expect("told once");
        r.works();
    });
}

/// Whatever the later prepare is for, and once.
fn what_was_masked_is_told_by_a_prepare_that_waits<D: Target>(s: &Setup<D>) {
    let experts = s.experts(4);
    s.run(GroupConfig::new(experts, T), |r| {
        let asked = std::mem::replace(&mut r.later, false);
        let mut ids = [1, 2, 3].repeat(T);
        if r.rank == 0 {
            ids[K + 1] = experts as i64;
        }
        r.prepare(&ids, &later(training(0, K))).expect("masked");
        match r.prepare(&[1, 2, 3].repeat(T), &training(0, K)) {
            Err(Error::ExpertId { rank, token, k, .. }) => assert_eq!((rank, token, k), (0, 1, 1)),
            other => panic!("{:?}", other.map(drop)),
        }
        r.group.dispatcher().check().expect("told once");
        r.prepare(&[1, 2, 3].repeat(T), &training(0, K)).expect("nothing to tell");
        r.later = asked;
        r.works();
    });
}

/// Prepares go on while nobody asks; the first error stays.
fn the_first_error_is_kept<D: Target>(s: &Setup<D>) {
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        let spec = later(DispatchSpec { capacity: Capacity::Static(8), ..training(0, 1) });
        for id in [0, 1000, 2000, 1] {
            let id = if r.rank == 0 { id } else { 0 };
            r.prepare(&[id], &spec).expect("told later");
        }
        let error = r.group.dispatcher().check();
        assert!(matches!(error, Err(Error::ExpertId { rank: 0, id: 1000, .. })), "{error:?}");
        r.group.dispatcher().check().expect("told once");
        r.works();
    });
}

/// A rank that has asked hears, in a prepare that waits, whose error keeps the others from going on; once.
fn an_error_that_another_rank_still_holds_is_told<D: Target>(s: &Setup<D>) {
    let experts = s.experts(4);
    let config = GroupConfig { max_rows: 256, ..GroupConfig::new(experts, T) };
    s.run(config, |r| {
        let open = later(training(0, K));
        let mut ids = [1, 2, 3].repeat(T);
        if r.rank == 0 {
            ids[K + 1] = experts as i64;
        }
        r.prepare(&ids, &DispatchSpec { capacity: Capacity::Static(256), ..open }).expect("masked");
        if r.rank == 0 {
            let error = r.group.dispatcher().check();
            assert!(matches!(error, Err(Error::ExpertId { rank: 0, token: 1, k: 1, .. })), "{error:?}");
        }
        let found = r.prepare(&[1, 2, 3].repeat(T), &open);
        match (r.rank, found) {
            (0, found) => assert_peer(found, 1, "holds an error of an earlier call"),
            (_, Err(Error::ExpertId { rank: 0, token: 1, k: 1, .. })) => {}
            (_, found) => panic!("{found:?}"),
        }
        r.group.dispatcher().check().expect("told once");
        r.prepare(&[1, 2, 3].repeat(T), &open).expect("nothing to tell");
        r.works();
    });
}

/// Where nobody reads records, a rank that has none meets the others as a failure.
fn a_rank_that_cannot_take_part_says_so<D: Target>(s: &Setup<D>) {
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        let good = later(DispatchSpec { capacity: Capacity::Static(64), ..training(0, 1) });
        let tokens = if r.rank == 0 { T + 1 } else { T };
        let error = r.prepare(&vec![0; tokens], &good);
        match (r.rank, error) {
            (0, Ok(handle)) => assert!(s.kind == DispatcherKind::Local && handle.tokens() == T + 1, "{handle:?}"),
            (0, Err(Error::Invalid { expected, .. })) => assert!(expected.contains("max_tokens_per_rank")),
            (0, other) => panic!("{other:?}"),
            (_, other) => assert_peer(other, 0, "max_tokens_per_rank"),
        }
        let spec = if r.rank == 0 { DispatchSpec { alignment: 3, ..good } } else { good };
        match (r.rank, r.prepare(&[0; T], &spec)) {
            (0, Err(Error::Invalid { name, .. })) => assert_eq!(name, "spec.alignment"),
            (0, other) => panic!("{other:?}"),
            (_, other) => assert_peer(other, 0, "spec.alignment"),
        }
        let floats = r.put(DType::F32, &[0.0; T], &[T, 1]);
        let error = r.group.dispatcher().prepare(floats.view(), None, &good);
        assert!(matches!(error, Err(Error::Invalid { name, .. }) if name == "tensor topk_ids"));
        r.works();
    });
}
