//! Shared weights beside expert parallelism: the same results whichever dispatcher moves the tokens, with the weights'
//! gathers and reductions on streams of their own beside it.

use moebius::ep::DispatcherKind;
use moebius::etp::Payload;
use moebius::{DType, MoeConfig};

use super::exact::{assert_same, check};
use super::same_ranks::{EVEN, Shape, Step, sharded_step, whole_step};
use super::test_ranks::{Chained, bodies};
use super::world::{Outcome, Run};

bodies! {
    2 every_dispatcher_beside_weights_of_one_rank,
    4 every_dispatcher_beside_weights_of_two_ranks,
    2 every_dispatcher_beside_weights_over_the_same_ranks,
}

/// Sums of a token's slots in another order, each rounded to f32, through two layers and back: some roundings of 6e-8. A row
/// that is missing, or another's, is an error of its whole share.
const NEAR: f64 = 1e-5;

/// ‖a − b‖ / ‖b‖; NaN counts as infinite.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let relative = error / norm(&mut b.iter().map(|b| f64::from(*b)));
    if relative.is_nan() { f64::INFINITY } else { relative }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

/// Outputs and gradients of the first step, before which no optimizer has made a small difference a large one.
fn first_step(run: &Run, outcome: &Outcome) -> Vec<Vec<f32>> {
    let values = outcome.values.iter().take(run.microbatches * (run.layers + 1)).map(|v| floats(v));
    let gradients = outcome.gradients.iter().take(2 * run.layers);
    values.chain(gradients.map(|bits| bits.iter().map(|v| f32::from_bits(*v)).collect())).collect()
}

/// Of each rank: tensors of one run beside those of another.
fn assert_near(found: &[Vec<Vec<f32>>], base: &[Vec<Vec<f32>>], what: &str) {
    assert_eq!(found.len(), base.len());
    for (rank, (found, base)) in found.iter().zip(base).enumerate() {
        assert!(!base.is_empty() && found.len() == base.len(), "{what}");
        for (i, (a, b)) in found.iter().zip(base).enumerate() {
            let d = distance(a, b);
            assert!(d <= NEAR, "{what}: tensor {i} of rank {rank} is off by {d:e}");
        }
    }
}

/// Dispatchers beside all-to-all, and whether each adds in the order of k, as all-to-all does.
fn others<D: Chained>() -> Vec<(DispatcherKind, bool)> {
    let plain = D::OTHER_DISPATCHERS.iter().map(|kind| (*kind, false));
    plain
        .chain(D::OTHER_DISPATCHERS.contains(&DispatcherKind::NvLink).then_some((DispatcherKind::NvLink, true)))
        .collect()
}

fn every_dispatcher_beside_weights_of_one_rank<D: Chained>(device: &D) {
    every_dispatcher(device, 1);
}

fn every_dispatcher_beside_weights_of_two_ranks<D: Chained>(device: &D) {
    every_dispatcher(device, 2);
}

/// Two ranks of other experts, whose weights `n` ranks share: over each dispatcher the bits of whole weights over the
/// same, and all-to-all's results.
fn every_dispatcher<D: Chained>(device: &D, n: usize) {
    let cases = [
        (Payload::Plain, DType::F32),
        (Payload::Plain, DType::BF16),
        (Payload::Nvfp4, DType::F32),
        (Payload::Mxfp8, DType::F32),
        (Payload::Fp8Block, DType::F32),
    ];
    for (payload, dtype) in cases {
        let run = |dispatcher, in_k_order| {
            let config = MoeConfig::new(40, 24, 8, 4);
            let changed = Run { payload, dtype, config, dispatcher, in_k_order, ..Run::new(device, 2, n) };
            Run { layers: 2, microbatches: 2, deviation: EVEN, ..changed }
        };
        let first = run(DispatcherKind::AllToAll, false);
        let base = check(device, &first, &format!("{payload:?}, {dtype}, all-to-all, ETP {n}"));
        for (kind, in_k_order) in others::<D>() {
            let what = format!("{payload:?}, {dtype}, {kind:?}, in the order of k: {in_k_order}, ETP {n}");
            let found = check(device, &run(kind, in_k_order), &what);
            if in_k_order {
                assert_same(&found, &base, &what);
            } else if dtype == DType::F32 {
                let of = |all: &[Outcome]| all.iter().map(|one| first_step(&first, one)).collect::<Vec<_>>();
                assert_near(&of(&found), &of(&base), &what);
            }
        }
    }
}

/// Outputs and whole gradients of each rank, of a step in f32.
fn in_floats(steps: &[Step]) -> Vec<Vec<Vec<f32>>> {
    let one = |step: &Step| step.values.iter().map(|v| floats(v)).chain(step.gradients.clone()).collect();
    steps.iter().map(one).collect()
}

/// All ranks have experts of their own, and each weight is the stack of all experts, of which every rank has a shard:
/// gathers and reductions are between the very ranks that exchange tokens.
fn every_dispatcher_beside_weights_over_the_same_ranks<D: Chained>(device: &D) {
    let few = Shape { config: MoeConfig::new(40, 24, 8, 4), tokens: 7, dtype: DType::F32, payload: Payload::Plain };
    // On a GPU the kernels of many rows, on more SMs.
    let many = Shape { config: MoeConfig::new(128, 64, 8, 4), tokens: 150, dtype: DType::BF16, ..few.clone() };
    let nvfp4 = Shape { payload: Payload::Nvfp4, ..few.clone() };
    let mxfp8 = Shape { payload: Payload::Mxfp8, ..few.clone() };
    let fp8_block = Shape { payload: Payload::Fp8Block, ..few.clone() };
    for shape in [few, many, nvfp4, mxfp8, fp8_block] {
        let step = |over: (DispatcherKind, bool)| {
            let (whole, sharded) = (whole_step(device, &shape, over), sharded_step(device, &shape, over));
            assert!(whole == sharded, "{shape:?}, {over:?}: shards and whole weights");
            sharded
        };
        let base = step((DispatcherKind::AllToAll, false));
        assert!(base.iter().all(|step| step.gradients.iter().flatten().any(|g| *g != 0.0)), "{shape:?}");
        for (kind, in_k_order) in others::<D>() {
            let (found, what) = (step((kind, in_k_order)), format!("{shape:?}, {kind:?}"));
            if in_k_order {
                assert!(found == base, "{what}, in the order of k");
            } else if shape.dtype == DType::F32 {
                assert_near(&in_floats(&found), &in_floats(&base), &what);
            }
        }
    }
}
