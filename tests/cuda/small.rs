//! The layer at sizes small enough for any sanitizer: between them these reach most kernels, on both paths, in every
//! type, and on Hopper every shape of its tiles.

use moebius::DType;
use moebius::config::*;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, Overflow};
use moebius::layer::{DispatchOptions, Noise};

use crate::adamw::gives_the_cpus_bits;
use crate::harness::{Case, compare, tests};

tests!(
    plain,
    everything,
    square_tiles,
    long_inner_sums,
    long_hidden_sums,
    dropped_and_recomputed,
    input_weights_and_groups,
    payloads,
    optimizer_steps,
);

fn all_types(cuda: &Cuda, name: &str, case: &Case) {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        compare(name, &Case { dtype, ..case.clone() }, cuda);
    }
}

/// More than a tile in every direction, and not a multiple of one.
fn plain(cuda: &Cuda) {
    all_types(cuda, "plain", &Case::new(MoeConfig::new(136, 72, 5, 2), 150, DType::F32));
}

fn everything(cuda: &Cuda) {
    let mut config = MoeConfig::new(72, 40, 6, 3);
    config.shared = Some(SharedConfig { intermediate: 24, gated: true, bias: false });
    (config.expert_bias, config.router.logit_bias, config.router.jitter) = (true, true, 0.1);
    (config.aux.balance, config.aux.z) = (0.1, 0.01);
    let noise = Some(Noise { seed: 5, step: 17 });
    all_types(cuda, "everything", &Case { noise, hot: 3.0, ..Case::new(config, 40, DType::F32) });
}

/// The types of Hopper's kernels, which alone have tiles of several shapes.
fn half_types(cuda: &Cuda, name: &str, case: &Case) {
    for dtype in [DType::BF16, DType::F16] {
        compare(name, &Case { dtype, ..case.clone() }, cuda);
    }
}

/// Square tiles of 128 columns make 256 of these 200, the usual ones 320: more than an eighth is saved, so that down's
/// gradient has them on every GPU (`Product::shape` in `src/cuda/sm90_grouped_gemm.rs`).
fn square_tiles(cuda: &Cuda) {
    half_types(cuda, "square tiles", &Case::new(MoeConfig::new(72, 200, 3, 2), 100, DType::F32));
}

/// Down and the rows' gradient are sums of 8192 and more, which have wide tiles (`WIDE_SUM` in
/// `src/cuda/heuristics.rs`); of as many columns, up, down's gradient and the weights' bring mapped rows into order
/// first. `wide.rs` has the same with more columns.
fn long_inner_sums(cuda: &Cuda) {
    half_types(cuda, "inner 8200", &Case::new(MoeConfig::new(16, 8200, 3, 2), 40, DType::F32));
}

/// Sums of down's gradient over 4096 and more: its tiles are the usual ones, on a GPU of a small L2 too (`SQUARE_SUM`),
/// and its producers bring four steps of a mapped row at a time (`LONG_SUM` in `kernels/sm90/grouped_gemm_kernel.cuh`).
/// The portable kernels cut logits into parts (`SPLIT_PARTS`).
fn long_hidden_sums(cuda: &Cuda) {
    half_types(cuda, "hidden 4104", &Case::new(MoeConfig::new(4104, 24, 3, 2), 40, DType::F32));
}

fn payloads(cuda: &Cuda) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let mut config = MoeConfig::new(96, 24, 4, 2);
        config.payload = payload;
        all_types(cuda, &format!("{payload:?}"), &Case::new(config, 30, DType::F32));
    }
}

fn dropped_and_recomputed(cuda: &Cuda) {
    let mut config = MoeConfig::new(40, 24, 4, 2);
    (config.activation, config.weight_at, config.recompute) = (Activation::Relu2, WeightAt::Output, true);
    let order = CapacityOrder::Probability;
    config.router.expert_capacity = Some(ExpertCapacity { factor: 0.8, order, renormalize: true });
    config.aux.balance = 0.1;
    config.aux.balance_kind = BalanceKind::Sequence { length: 16 };
    let dispatch = DispatchOptions {
        capacity: Capacity::Static(64),
        overflow: Overflow::Drop,
        alignment: 8,
        ..Default::default()
    };
    all_types(cuda, "dropped", &Case { dispatch, ..Case::new(config, 50, DType::F32) });
}

fn input_weights_and_groups(cuda: &Cuda) {
    let mut config = MoeConfig::new(33, 20, 8, 2);
    (config.activation, config.weight_at) = (Activation::GeluGlu, WeightAt::Input);
    (config.router.score, config.router.selection_bias, config.router.scale) = (Score::Sigmoid, true, 2.5);
    config.router.groups = Some(GroupLimit { groups: 4, keep: 2, rank_by: GroupScore::Top2Sum });
    all_types(cuda, "groups", &Case::new(config, 20, DType::F32));
}

/// A leaf, a part of one, and trees of several nodes.
fn optimizer_steps(cuda: &Cuda) {
    [0, 1].into_iter().for_each(|shift| gives_the_cpus_bits(cuda, &[1, 130, 4096, 8193, 40_000], shift));
}
