//! Random cases against the straight-line reference. Values are small integers, so that every sum is exact in every
//! dtype and comparisons need no tolerance: |x| <= 4, w <= 2, experts' factors <= 2, K <= 8 give sums of at most 2⁷,
//! and bf16 holds integers up to 2⁸. So is every partial sum, where ranks add their own experts' first: a part of those
//! terms.

use moebius::DType;
use moebius::config::{CapacityOrder, ExpertCapacity};
use moebius::ep::{Capacity, DispatchSpec, DispatcherKind, GroupConfig, Overflow};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::devices::seed;
use super::harness::*;
use super::over;
use super::reference::Problem;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![case!(random_steps)]
}

/// Cases per dispatcher and number of ranks.
const CASES_EACH: u32 = 48;
/// Most rows of a capacity.
const MAX_ROWS: usize = 64;

#[derive(Debug, Clone)]
struct Scenario {
    problem: Problem,
    dtype: DType,
    hidden: usize,
    rows_api: bool,
}

fn ids(tokens: usize, k: usize, experts: usize, skew: u32, absent: f64) -> impl Strategy<Value = Vec<i64>> {
    // A random order of experts, pulled to the front by skew; the first K are the token's.
    let token = prop::collection::vec(any::<u32>(), experts).prop_map(move |keys| {
        let weight = |e: usize| u64::from(keys[e] >> 8) * (1 + u64::from(skew) * e as u64);
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by_key(|e| (weight(*e), *e));
        order.into_iter().take(k).map(|e| e as i64).collect::<Vec<_>>()
    });
    let kept = prop::collection::vec(prop::bool::weighted(1.0 - absent), tokens * k);
    (prop::collection::vec(token, tokens), kept).prop_map(|(tokens, kept)| {
        let all = tokens.concat();
        all.into_iter().zip(kept).map(|(id, kept)| if kept { id } else { -1 }).collect()
    })
}

/// Limits of the scenarios for a dispatcher.
#[derive(Debug, Clone)]
struct Limits {
    ranks: usize,
    floats: &'static [DType],
    /// Experts of a rank.
    locals: Vec<usize>,
    /// Experts that are more than a token's choices, at least.
    spare: usize,
    /// Capacities are multiples of the alignment.
    whole: bool,
    /// A token's choices, where there are experts for them.
    choices: Vec<usize>,
    /// Longest row.
    hidden: usize,
    cases: u32,
}

impl Limits {
    fn of<D: Target>(s: &Setup<D>) -> Self {
        let (ranks, locals) = (s.ranks, (1..=4).collect());
        let all = Self {
            ranks,
            floats: D::FLOATS,
            locals,
            spare: 0,
            whole: false,
            choices: (1..=8).collect(),
            hidden: 9,
            cases: CASES_EACH,
        };
        // One width of rows, as the harness pads them, and few kinds of anything else: the library compiles kernels, a
        // second or more each, for every combination that it meets.
        let library = |of: Self| {
            let (floats, choices) = (&[DType::F32, DType::BF16][..], vec![1, 3]);
            Self { floats, choices, hidden: 8, cases: CASES_EACH / 6, ..of }
        };
        match s.kind {
            // Experts of an NVLink domain, here of all ranks, come in fours.
            DispatcherKind::NcclEp => {
                let fours = (1..).filter(|local: &usize| (local * ranks).is_multiple_of(4));
                library(Self { locals: fours.take(2).collect(), whole: true, ..all })
            }
            // One choice more than a token has travels, and there are no more of them than experts.
            DispatcherKind::NcclEpLowLatency => library(Self { locals: vec![2, 4], spare: 1, ..all }),
            _ => all,
        }
    }
}

fn scenarios(limits: Limits) -> impl Strategy<Value = Scenario> {
    let Limits { ranks, floats, locals, spare, whole, choices, hidden, .. } = limits;
    let sizes = (
        prop::sample::select(locals),
        prop::collection::vec(0..=7usize, ranks),
        0..=4u32,
        prop::sample::select(vec![0.0, 0.3, 1.0]),
    );
    let spec = (
        prop::sample::select(vec![1, 2, 8, 16]),
        prop::option::of(0..=40usize),
        prop::option::of((0.3..2.0f64, any::<bool>())),
    );
    let dtypes = prop::sample::select(floats);
    (sizes, spec, dtypes, 1..=hidden, any::<bool>(), prop::sample::select(choices)).prop_flat_map(
        move |((local, tokens, skew, absent), (alignment, capacity, limit), dtype, hidden, rows_api, k)| {
            let experts = local * ranks;
            let k = k.min(experts - spare);
            let capacity = capacity.map(|rows| if whole { rows.next_multiple_of(alignment) } else { rows });
            let all: Vec<_> = tokens.iter().map(|t| ids(*t, k, experts, skew, absent)).collect();
            let weights: Vec<_> = tokens.iter().map(|t| prop::collection::vec(1..=2u8, t * k)).collect();
            (all, weights).prop_map(move |(ids, weights)| {
                let expert_capacity = limit.map(|(factor, by_weight)| ExpertCapacity {
                    factor,
                    order: if by_weight { CapacityOrder::Probability } else { CapacityOrder::Position },
                    renormalize: false,
                });
                let weights = weights.iter().map(|w| w.iter().map(|v| f64::from(*v)).collect()).collect();
                let problem = Problem { experts, k, alignment, capacity, expert_capacity, ids, weights };
                Scenario { problem, dtype, hidden, rows_api }
            })
        },
    )
}

/// The steps of a library's dispatcher are made of parts that keep its rules, which only a GPU would see otherwise.
#[cfg(test)]
pub fn keep_the_rules<D: Target>(device: &D) {
    for (kind, ranks) in
        [DispatcherKind::NcclEp, DispatcherKind::NcclEpLowLatency].into_iter().flat_map(|k| [2, 4, 8].map(|r| (k, r)))
    {
        let setup = over(device, kind, ranks, "rules");
        let limits = Limits::of(&setup);
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed::bytes(9));
        let mut runner =
            TestRunner::new_with_rng(Config { cases: 200, failure_persistence: None, ..Config::default() }, rng);
        let kept = runner.run(&scenarios(limits), |scenario| {
            let Problem { experts, k, alignment, capacity, .. } = scenario.problem;
            assert!(experts.is_multiple_of(ranks) && k >= 1 && scenario.hidden <= 8);
            match kind {
                DispatcherKind::NcclEp => {
                    assert!(experts.is_multiple_of(4) && k <= experts);
                    assert!(capacity.is_none_or(|rows| rows.is_multiple_of(alignment) && rows <= MAX_ROWS));
                }
                _ => assert!(k < experts),
            }
            Ok(())
        });
        kept.expect("every scenario");
    }
}

/// Token r, t at column h.
fn value(r: usize, t: usize, h: usize) -> f64 {
    ((r * 31 + t * 7 + h * 3) % 9) as f64 - 4.0
}

/// The expert's factor.
fn factor(expert: i64) -> f64 {
    (expert % 2 + 1) as f64
}

fn random_steps<D: Target>(s: &Setup<D>) {
    // A given seed: a failure can be met again.
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed::bytes(s.ranks as u64 + 1));
    let limits = Limits::of(s);
    // A rank that waits for a time costs that time in every attempt to make a failure smaller.
    let max_shrink_iters = if s.is_nccl_ep() { 0 } else { u32::MAX };
    let config = Config { cases: limits.cases, failure_persistence: None, max_shrink_iters, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&scenarios(limits), |scenario| {
        check(s, &scenario);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{s:?}: {error}");
    }
}

fn check<D: Target>(s: &Setup<D>, scenario: &Scenario) {
    let p = &scenario.problem;
    let expected = p.solve();
    let (k, hidden) = (p.k, scenario.hidden);
    let rows = Rows { dtype: scenario.dtype, hidden };
    let spec = DispatchSpec {
        alignment: p.alignment,
        capacity: p.capacity.map_or(Capacity::Eager, Capacity::Static),
        overflow: Overflow::Drop,
        expert_capacity: p.expert_capacity,
        ..training(3, k)
    };
    let weight = |r: usize, t: usize, j: usize| p.weights[r][t * k + j];
    let expert = |r: usize, t: usize, j: usize| factor(p.ids[r][t * k + j]);
    let config = GroupConfig { max_rows: MAX_ROWS, ..GroupConfig::new(p.experts, 7) };
    s.run(config, |rank| {
        let me = rank.rank;
        let tokens = p.tokens(me);
        let x: Vec<f64> = (0..tokens * hidden).map(|i| value(me, i / hidden, i % hidden)).collect();
        let h = rank.prepare_weighted(&p.ids[me], &p.weights[me], &spec).expect("prepare");
        assert_eq!(rank.kept(&h), expected.kept[me]);
        assert_eq!(h.stats().expect("stats").expert_load, expected.load);
        assert_eq!(
            (h.stats().expect("stats").dropped, h.stats().expect("stats").needed_rows),
            (expected.dropped[me], expected.needed[me])
        );
        assert_eq!(h.stats().expect("stats").segment_end(), expected.slots[me].len());
        assert_eq!(h.rows(), p.capacity.unwrap_or(expected.needed[me]));
        let full: Vec<usize> =
            (0..h.stats().expect("stats").segment_end()).filter(|i| expected.slots[me][*i].is_some()).collect();
        assert_eq!(rank.filled(&h), full);

        // Rows to experts. From the last segment's end on nothing may be written.
        let sent = expected.scattered(me, hidden, |r, t, _, h| value(r, t, h));
        let sent_weights = expected.scattered(me, 1, |r, t, j, _| weight(r, t, j));
        let (end, tail) = (h.stats().expect("stats").segment_end(), h.rows() - h.stats().expect("stats").segment_end());
        let recv = match scenario.rows_api {
            true => rank.dispatch_rows(&h, rows, &x, Some(&p.weights[me])).expect("dispatch_rows"),
            false => rank.dispatch(&h, rows, &x, Some(&p.weights[me])).expect("dispatch"),
        };
        let rest = if scenario.rows_api { 0.0 } else { CANARY };
        assert_eq!(recv.rows, [sent, vec![rest; tail * hidden]].concat());
        let same = |slot: usize| recv.weights[slot] == sent_weights[slot];
        assert!(full.iter().all(|slot| same(*slot)));
        assert!(scenario.rows_api || (0..end).all(same));

        // Expert outputs back: w·f·x, with NaN wherever nobody may read.
        let output = |r: usize, t: usize, j: usize, h: usize| weight(r, t, j) * expert(r, t, j) * value(r, t, h);
        let with_tail = |rank: &Rank<D>, mut rows: Vec<f64>, width: usize| {
            rows.resize(h.rows() * width, f64::NAN);
            rank.poison_padding(&h, width, &mut rows);
            rows
        };
        let eo = with_tail(rank, expected.scattered(me, hidden, output), hidden);
        let out = rank.combine(&h, rows, &eo).expect("combine");
        assert_eq!(out, expected.summed(me, tokens, hidden, output));
        if rank.forward_only {
            return;
        }

        // Gradients of the outputs to the experts.
        let grad: Vec<f64> = x.iter().map(|v| -v).collect();
        let sent = expected.scattered(me, hidden, |r, t, _, h| -value(r, t, h));
        let d_eo = match scenario.rows_api {
            true => rank.combine_bwd_rows(&h, rows, &grad).expect("combine_bwd_rows"),
            false => rank.combine_bwd(&h, rows, &grad).expect("combine_bwd"),
        };
        assert_eq!(d_eo, [sent, vec![rest; tail * hidden]].concat());

        // Gradients back to tokens and weights.
        let d_row = |r: usize, t: usize, j: usize, h: usize| -output(r, t, j, h);
        let d_weight = |r: usize, t: usize, j: usize| (r * 50 + t * 8 + j + 1) as f64;
        let g_rows = with_tail(rank, expected.scattered(me, hidden, d_row), hidden);
        let g_weights = with_tail(rank, expected.scattered(me, 1, |r, t, j, _| d_weight(r, t, j)), 1);
        let d = rank.dispatch_bwd(&h, rows, &g_rows, Some(&g_weights)).expect("dispatch_bwd");
        assert_eq!(d.tokens, expected.summed(me, tokens, hidden, d_row));
        let kept_one = |i: usize| expected.kept[me][i] >= 0;
        let d_w: Vec<f64> =
            (0..tokens * k).map(|i| if kept_one(i) { d_weight(me, i / k, i % k) } else { 0.0 }).collect();
        assert_eq!(d.weights, d_w);
    });
}
