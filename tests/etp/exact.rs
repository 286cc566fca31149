//! The same bits as whole weights give, however they are cut.

use moebius::config::Activation;
use moebius::etp::{Payload, Reduction, Scale};
use moebius::{DType, MoeConfig};

use crate::world::{Outcome, Run, train};

fn assert_same(left: &[Outcome], right: &[Outcome], what: &str) {
    for (w, (a, b)) in left.iter().zip(right).enumerate() {
        assert!(!a.gradients.is_empty() && a.gradients.iter().flatten().any(|bits| *bits << 1 != 0), "{what}");
        assert_eq!(a.values, b.values, "{what}: outputs and gradients of x of rank {w}");
        assert_eq!(a.gradients, b.gradients, "{what}: gradients of rank {w}");
        assert_eq!(a.weights, b.weights, "{what}: weights of rank {w}");
    }
}

/// Whole weights, summed over the ranks as sharded ones are; and the run itself.
fn check(run: &Run, what: &str) -> Vec<Outcome> {
    let sharded = train(run, true);
    assert_same(&sharded, &train(run, false), what);
    sharded
}

#[test]
fn any_number_of_shards_gives_the_same_bits() {
    let runs: Vec<_> = [1, 2, 4].map(|n| check(&Run::new(1, n), &format!("ETP {n}"))).into();
    assert_same(&runs[0], &runs[1], "ETP 1 and 2");
    assert_same(&runs[0], &runs[2], "ETP 1 and 4");
    let first = Run::new(1, 1);
    assert_ne!(runs[0][0].weights[0], first.weight(0, 0, 0).as_bytes(), "the optimiser has moved the weights");
}

#[test]
fn with_expert_parallelism() {
    let whole = check(&Run::new(2, 1), "EP 2");
    let mesh = check(&Run::new(2, 2), "EP 2 by ETP 2");
    assert_same(&whole, &mesh, "EP 2, ETP 1 and 2");
}

#[test]
fn paddings() {
    let whole = train(&Run::new(1, 1), true);
    for pad in [0, 1, 3, 32] {
        let mut run = Run::new(1, 4);
        run.options.pad = pad;
        assert_same(&train(&run, true), &whole, &format!("pad {pad}"));
    }
}

#[test]
fn several_microbatches_a_step() {
    for n in [1, 2, 4] {
        let mut run = Run::new(1, n);
        run.microbatches = 3;
        check(&run, &format!("three microbatches, ETP {n}"));
    }
}

#[test]
fn without_prefetch() {
    let mut run = Run::new(1, 2);
    run.microbatches = 2;
    let ahead = train(&run, true);
    run.options.prefetch = false;
    assert_same(&train(&run, true), &ahead, "prefetch off");
}

#[test]
fn with_recomputation() {
    for (ep, n) in [(1, 4), (2, 2)] {
        let mut run = Run::new(ep, n);
        let kept = train(&run, true);
        run.config.recompute = true;
        let recomputed = check(&run, "recompute");
        assert_same(&recomputed, &kept, "recompute and not");
    }
}

/// Both weights of a layer have one shape, so chain neighbours would meet in one buffer.
#[test]
fn weights_of_one_shape() {
    for recompute in [false, true] {
        let mut run = Run::new(1, 4);
        run.config = MoeConfig::new(8, 8, 4, 2);
        run.config.activation = Activation::Relu2;
        run.config.recompute = recompute;
        let [up, down] = run.dims();
        assert_eq!(up, down);
        run.microbatches = 2;
        check(&run, &format!("one shape, recompute {recompute}"));
    }
}

#[test]
fn means() {
    let mut run = Run::new(1, 2);
    let sums = train(&run, true);
    run.options.scale = Scale::Mean;
    run.steps = 1;
    let means = check(&run, "mean");
    for (sum, mean) in sums[0].gradients.iter().flatten().zip(means[0].gradients.iter().flatten()) {
        assert_eq!(f32::from_bits(*sum) / 4.0, f32::from_bits(*mean), "a quarter, exactly, over four ranks");
    }
}

/// bf16 gradients summed in f32: as exact as the reference, which sums in f32 too.
#[test]
fn bf16() {
    for n in [1, 2, 4] {
        let mut run = Run::new(1, n);
        run.dtype = DType::BF16;
        run.microbatches = 2;
        check(&run, &format!("bf16, ETP {n}"));
    }
}

/// The communicator's own reduce-scatter adds in rank order and rounds the sum to bf16.
#[test]
fn native_reductions() {
    for (dtype, epsilon) in [(DType::F32, f64::from(f32::EPSILON)), (DType::BF16, 2f64.powi(-8))] {
        let mut run = Run::new(1, 4);
        (run.dtype, run.steps) = (dtype, 1);
        let exact = train(&run, true);
        run.options.reduction = Reduction::Native;
        let native = train(&run, true);
        let mut differs = false;
        for (a, b) in exact[0].gradients.iter().zip(&native[0].gradients) {
            let values = |bits: &[u32]| bits.iter().map(|v| f64::from(f32::from_bits(*v))).collect::<Vec<_>>();
            let (a, b) = (values(a), values(b));
            let largest = a.iter().fold(0f64, |m, v| m.max(v.abs()));
            for (a, b) in a.iter().zip(&b) {
                // Four terms, each below the largest sum times 4 or so, added in another order or rounded once.
                assert!((a - b).abs() <= 8.0 * epsilon * largest, "{dtype}: {a:e} and {b:e} of {largest:e}");
                differs |= a != b;
            }
        }
        assert!(differs, "{dtype}: the two reductions differ somewhere");
    }
}

/// The layer on shards that travel quantised is the layer on experts quantised whole, to the bit, in several
/// microbatches and steps; the optimiser sees the weights themselves.
#[test]
fn quantised_gathers() {
    for payload in [Payload::Nvfp4, Payload::Mxfp8] {
        for (ep, n, dtype) in [(1, 1, DType::F32), (1, 2, DType::F32), (1, 4, DType::BF16), (2, 2, DType::F32)] {
            let mut run = Run::new(ep, n);
            (run.payload, run.dtype, run.microbatches) = (payload, dtype, 2);
            // Rows of whole blocks and a part, for both forms; shards divide experts.
            run.config = MoeConfig::new(40, 24, 4, 2);
            let found = check(&run, &format!("{payload:?}, EP {ep}, ETP {n}, {dtype}"));
            run.payload = Payload::Plain;
            assert_ne!(train(&run, true)[0].values, found[0].values, "{payload:?} rounds");
        }
        let runs = [1, 2, 4].map(|n| {
            let mut run = Run::new(1, n);
            (run.payload, run.config.recompute) = (payload, true);
            check(&run, &format!("{payload:?}, recompute, ETP {n}"))
        });
        assert_same(&runs[0], &runs[1], "ETP 1 and 2");
        assert_same(&runs[0], &runs[2], "ETP 1 and 4");
    }
}
