//! The same bits as whole weights give, however they are cut.

use std::sync::Arc;

use moebius::config::Activation;
use moebius::etp::{EtpOptions, Payload, Phase, Reduction, Scale, Shard, WeightSpec};
use moebius::weights::WeightSource;
use moebius::{DType, MoeConfig, TensorRef};

use super::random::Random;
use super::test_ranks::{Chained, MINUTE, ON, bodies, ranks};
use super::world::{Outcome, Run, of_type, train, tree};

bodies! {
    2 any_number_of_shards_gives_the_same_bits,
    2 with_expert_parallelism,
    2 paddings,
    2 several_microbatches_a_step,
    2 prefetch_or_not,
    2 two_collective_threads_or_one,
    2 with_recomputation,
    2 weights_of_one_shape,
    2 means,
    2 bf16,
    2 native_reductions,
    2 quantized_gathers,
    2 sums_in_pairs,
}

/// Numbers of ranks to share a weight.
fn sizes<D: Chained>(device: &D) -> Vec<usize> {
    [1, 2, 4].into_iter().filter(|n| *n <= device.most()).collect()
}

pub fn assert_same(left: &[Outcome], right: &[Outcome], what: &str) {
    for (w, (a, b)) in left.iter().zip(right).enumerate() {
        assert!(!a.gradients.is_empty() && a.gradients.iter().flatten().any(|bits| *bits << 1 != 0), "{what}");
        assert_eq!(a.values, b.values, "{what}: outputs and gradients of x of rank {w}");
        assert_eq!(a.gradients, b.gradients, "{what}: gradients of rank {w}");
        assert_eq!(a.weights, b.weights, "{what}: weights of rank {w}");
    }
}

/// Whole weights, summed over the ranks as sharded ones are; and the run itself.
pub fn check<D: Chained>(device: &D, run: &Run, what: &str) -> Vec<Outcome> {
    let sharded = train(device, run, true);
    assert_same(&sharded, &train(device, run, false), what);
    sharded
}

fn any_number_of_shards_gives_the_same_bits<D: Chained>(device: &D) {
    let sizes = sizes(device);
    let runs: Vec<_> = sizes.iter().map(|n| check(device, &Run::new(device, 1, *n), &format!("ETP {n}"))).collect();
    for (n, run) in sizes.iter().zip(&runs).skip(1) {
        assert_same(&runs[0], run, &format!("ETP 1 and {n}"));
    }
    let first = Run::new(device, 1, 1);
    assert_ne!(runs[0][0].weights[0], first.weight(0, 0, 0).as_bytes(), "the optimizer has moved the weights");
}

fn with_expert_parallelism<D: Chained>(device: &D) {
    let whole = check(device, &Run::new(device, 2, 1), "EP 2");
    if device.most() >= 4 {
        let mesh = check(device, &Run::new(device, 2, 2), "EP 2 by ETP 2");
        assert_same(&whole, &mesh, "EP 2, ETP 1 and 2");
    }
}

fn paddings<D: Chained>(device: &D) {
    let whole = train(device, &Run::new(device, 1, 1), true);
    for pad in [0, 1, 3, 32] {
        let mut run = Run::new(device, 1, device.up_to(4));
        run.options.pad = pad;
        assert_same(&train(device, &run, true), &whole, &format!("pad {pad}"));
    }
}

fn several_microbatches_a_step<D: Chained>(device: &D) {
    for n in sizes(device) {
        let mut run = Run::new(device, 1, n);
        run.microbatches = 3;
        check(device, &run, &format!("three microbatches, ETP {n}"));
    }
}

fn prefetch_or_not<D: Chained>(device: &D) {
    let mut run = Run::new(device, 1, 2);
    run.microbatches = 2;
    let ahead = train(device, &run, true);
    for steps in [2, 3] {
        run.options.ahead = steps;
        assert_same(&train(device, &run, true), &ahead, &format!("{steps} steps ahead"));
    }
    run.options.prefetch = false;
    assert_same(&train(device, &run, true), &ahead, "prefetch off");
    run.options.in_turn = true;
    assert_same(&train(device, &run, true), &ahead, "prefetch off, in turn");
}

/// One collective thread for gathers and reductions.
fn two_collective_threads_or_one<D: Chained>(device: &D) {
    for (ep, n) in [(1, 2), (1, 4), (2, 2)].into_iter().filter(|(ep, n)| ep * n <= device.most()) {
        let mut run = Run::new(device, ep, n);
        run.microbatches = 2;
        let apart = train(device, &run, true);
        run.options.in_turn = true;
        for (steps, recompute) in [(1, false), (2, false), (3, false), (1, true)] {
            run.options.ahead = steps;
            run.config.recompute = recompute;
            assert_same(&train(device, &run, true), &apart, &format!("in turn, {steps} ahead, {recompute}"));
        }
    }
}

fn with_recomputation<D: Chained>(device: &D) {
    for (ep, n) in [(1, 2), (1, 4), (2, 2)].into_iter().filter(|(ep, n)| ep * n <= device.most()) {
        let mut run = Run::new(device, ep, n);
        let kept = train(device, &run, true);
        run.config.recompute = true;
        let recomputed = check(device, &run, "recompute");
        assert_same(&recomputed, &kept, "recompute and not");
    }
}

/// Both weights of a layer have one shape, so chain neighbors would meet in one buffer.
fn weights_of_one_shape<D: Chained>(device: &D) {
    for recompute in [false, true] {
        let mut run = Run::new(device, 1, device.up_to(4));
        run.config = MoeConfig::new(8, 8, 4, 2);
        run.config.activation = Activation::Relu2;
        run.config.recompute = recompute;
        let [up, down] = run.dims();
        assert_eq!(up, down);
        run.microbatches = 2;
        check(device, &run, &format!("one shape, recompute {recompute}"));
    }
}

fn means<D: Chained>(device: &D) {
    let mut run = Run::new(device, 1, 2);
    let sums = train(device, &run, true);
    run.options.scale = Scale::Mean;
    run.steps = 1;
    let means = check(device, &run, "mean");
    for (sum, mean) in sums[0].gradients.iter().flatten().zip(means[0].gradients.iter().flatten()) {
        // A half or a quarter, exactly.
        assert_eq!(f32::from_bits(*sum) / run.world as f32, f32::from_bits(*mean), "over {} ranks", run.world);
    }
}

/// bf16 gradients summed in f32: as exact as the reference, which sums in f32 too.
fn bf16<D: Chained>(device: &D) {
    for n in sizes(device) {
        let mut run = Run::new(device, 1, n);
        run.dtype = DType::BF16;
        run.microbatches = 2;
        check(device, &run, &format!("bf16, ETP {n}"));
    }
}

/// The communicator's own reduce-scatter adds in rank order and rounds the sum to bf16.
fn native_reductions<D: Chained>(device: &D) {
    for (dtype, epsilon) in [(DType::F32, f64::from(f32::EPSILON)), (DType::BF16, 2f64.powi(-8))] {
        let mut run = Run::new(device, 1, device.up_to(4));
        (run.dtype, run.steps) = (dtype, 1);
        let exact = train(device, &run, true);
        run.options.reduction = Reduction::Native;
        let native = train(device, &run, true);
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
        // Of two terms there is one order, and in f32 one rounding.
        assert_eq!(differs, dtype == DType::BF16 || run.world > 2, "{dtype}: the two reductions");
    }
}

/// Sums that arrive in a main gradient, of numbers without a pattern: the bits of sums in pairs, each rounded to f32.
fn sums_in_pairs<D: Chained>(device: &D) {
    const DIMS: [usize; 3] = [2, 16, 24];
    const COUNT: usize = 2 * 16 * 24;
    let numbers = |rank: usize, dtype| {
        let mut random = Random::new(super::devices::seed::seed(77 + rank as u64));
        of_type(dtype, (0..COUNT).map(|_| (random.normal() * 3.0) as f32).collect(), &DIMS)
    };
    for dtype in [DType::F32, DType::BF16] {
        let n = device.up_to(4);
        ranks(device, n, MINUTE, |rank, place| {
            let own = place.device.clone();
            let options = EtpOptions { pad: 0, scale: Scale::Mean, ..ON };
            let chain = place.chain(options).unwrap();
            let cut = chain.shards(&DIMS).unwrap();
            let shard = Shard::new(moebius::Tensor::zeros(&own, dtype, &cut.shard_dims()).unwrap());
            let id = chain.add(WeightSpec::new("w", 0, &DIMS, dtype), Arc::new(shard)).unwrap();
            chain.begin(Phase::Forward).unwrap();
            drop(chain.source(id).unwrap().acquire().unwrap());
            chain.end().unwrap();
            for _ in 0..2 {
                let mut buffer = chain.gradient_buffer(id).unwrap();
                let values = numbers(rank, dtype);
                own.upload(values.as_bytes(), buffer.view_mut().unwrap()).unwrap();
                chain.submit(buffer).unwrap();
            }
            let of: Vec<Vec<f64>> = (0..n).map(|rank| numbers(rank, dtype).to_f64()).collect();
            let sum = |at: usize| {
                let each = tree(&of.iter().map(|v| v[at] as f32).collect::<Vec<_>>()) * (1.0 / n as f32);
                (0.0 + each + each).to_bits()
            };
            let expected: Vec<u32> = (rank * COUNT / n..(rank + 1) * COUNT / n).map(sum).collect();
            let check = |_, gradient: TensorRef<'_, D>| {
                let found: Vec<u32> = own.floats(gradient).iter().map(|v| v.to_bits()).collect();
                assert!(found == expected, "{dtype}, rank {rank}");
                Ok(())
            };
            chain.finish(None, check).unwrap();
        });
    }
}

/// The layer on shards that are sent quantized is the layer on experts quantized whole, to the bit, in several
/// microbatches and steps; the optimizer sees the weights themselves.
fn quantized_gathers<D: Chained>(device: &D) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let cases =
            [(1, 1, DType::F32), (1, 2, DType::F32), (1, 2, DType::BF16), (1, 4, DType::BF16), (2, 2, DType::F32)];
        for (ep, n, dtype) in cases.into_iter().filter(|(ep, n, _)| ep * n <= device.most()) {
            let mut run = Run::new(device, ep, n);
            (run.payload, run.dtype, run.microbatches) = (payload, dtype, 2);
            // Rows of whole blocks and a part, for both forms; shards divide experts.
            run.config = MoeConfig::new(40, 24, 4, 2);
            let found = check(device, &run, &format!("{payload:?}, EP {ep}, ETP {n}, {dtype}"));
            run.payload = Payload::Plain;
            assert_ne!(train(device, &run, true)[0].values, found[0].values, "{payload:?} rounds");
        }
        let run = |n| {
            let mut run = Run::new(device, 1, n);
            (run.payload, run.config.recompute) = (payload, true);
            check(device, &run, &format!("{payload:?}, recompute, ETP {n}"))
        };
        let one = run(1);
        for n in sizes(device).split_off(1) {
            assert_same(&one, &run(n), &format!("ETP 1 and {n}"));
        }
    }
}
