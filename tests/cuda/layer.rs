//! Parity with the CPU: sizes, routing, formulas.

use moebius::DType;
use moebius::config::*;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, Overflow};
use moebius::layer::{DispatchOptions, Noise};

use crate::harness::{Case, Random, compare, tests};

tests!(
    many_tiles_a_block,
    few_tokens,
    multiples_of_8_but_not_of_a_tile,
    sizes_without_alignment,
    random_sizes,
    one_hot_expert_and_empty_ones,
    activations,
    weights_biases_and_recomputation,
    shared_experts,
    routing_formulas,
    many_experts,
    jitter,
    auxiliary_losses,
    capacities,
    payloads,
);

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn all_types(cuda: &Cuda, name: &str, case: &Case) {
    for dtype in TYPES {
        compare(name, &Case { dtype, ..case.clone() }, cuda);
    }
}

fn few_tokens(cuda: &Cuda) {
    for tokens in [0, 1, 7] {
        all_types(cuda, &format!("{tokens} tokens"), &Case::new(MoeConfig::new(72, 40, 16, 4), tokens, DType::F32));
    }
}

fn multiples_of_8_but_not_of_a_tile(cuda: &Cuda) {
    for (h, i, e, k, t) in [(136, 200, 8, 2, 300), (264, 104, 5, 3, 129), (64, 64, 3, 1, 640)] {
        all_types(
            cuda,
            &format!("H {h} I {i} E {e} K {k} T {t}"),
            &Case::new(MoeConfig::new(h, i, e, k), t, DType::F32),
        );
    }
}

fn sizes_without_alignment(cuda: &Cuda) {
    for (h, i) in [(20, 12), (33, 17), (1, 1), (130, 65)] {
        all_types(cuda, &format!("H {h} I {i}"), &Case::new(MoeConfig::new(h, i, 4, 2), 50, DType::F32));
    }
}

fn random_sizes(cuda: &Cuda) {
    let mut random = Random::new(11);
    let mut up_to = |n: u64| (random.next() % n) as usize;
    for _ in 0..8 {
        let e = 1 + up_to(40);
        let k = 1 + up_to(e.min(6) as u64);
        let (h, i, t) = (8 * (1 + up_to(40)), 8 * (1 + up_to(40)), up_to(400));
        all_types(
            cuda,
            &format!("H {h} I {i} E {e} K {k} T {t}"),
            &Case::new(MoeConfig::new(h, i, e, k), t, DType::F32),
        );
    }
}

fn one_hot_expert_and_empty_ones(cuda: &Cuda) {
    let mut config = MoeConfig::new(128, 96, 64, 2);
    config.router.logit_bias = true;
    all_types(cuda, "hot expert", &Case { hot: 30.0, ..Case::new(config.clone(), 500, DType::F32) });
    all_types(cuda, "empty experts", &Case::new(config, 9, DType::F32));
}

fn many_tiles_a_block(cuda: &Cuda) {
    // More row tiles than blocks, each of a few steps: blocks walk through several, and share some across experts.
    compare("256 experts", &Case::new(MoeConfig::new(200, 264, 256, 4), 300, DType::BF16), cuda);
}

fn activations(cuda: &Cuda) {
    for activation in [Activation::GeluGlu, Activation::ClampedGlu { alpha: 1.702, limit: 0.5 }, Activation::Relu2] {
        let mut config = MoeConfig::new(96, 72, 6, 2);
        config.activation = activation;
        all_types(cuda, &format!("{activation:?}"), &Case::new(config, 100, DType::F32));
    }
}

fn weights_biases_and_recomputation(cuda: &Cuda) {
    for weight_at in [WeightAt::Activation, WeightAt::Output, WeightAt::Input] {
        for (expert_bias, recompute) in [(false, true), (true, false), (true, true)] {
            let mut config = MoeConfig::new(96, 72, 6, 2);
            (config.weight_at, config.expert_bias, config.recompute) = (weight_at, expert_bias, recompute);
            let name = format!("weight at {weight_at:?}, bias {expert_bias}, recompute {recompute}");
            all_types(cuda, &name, &Case::new(config, 150, DType::F32));
        }
    }
}

/// Codes are the same on both, so tolerances are those of any layer.
fn payloads(cuda: &Cuda) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        // Scales that are filled up and, of 512 but in NVFP4, that are not.
        for (hidden, tokens) in [(32, 0), (96, 150), (512, 65)] {
            let mut config = MoeConfig::new(hidden, 72, 6, 2);
            (config.payload, config.recompute) = (payload, hidden == 96);
            config.shared = Some(SharedConfig { intermediate: 24, gated: false, bias: false });
            all_types(cuda, &format!("{payload:?}, H {hidden}"), &Case::new(config, tokens, DType::F32));
        }
    }
}

fn shared_experts(cuda: &Cuda) {
    for (gated, bias) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut config = MoeConfig::new(96, 72, 6, 2);
        config.shared = Some(SharedConfig { intermediate: 104, gated, bias });
        all_types(cuda, &format!("shared, gated {gated}, bias {bias}"), &Case::new(config, 150, DType::F32));
    }
}

/// Routers of the families, by name.
fn routers() -> Vec<(&'static str, RouterConfig)> {
    let with = |f: &dyn Fn(&mut RouterConfig)| {
        let mut config = RouterConfig::new(16, 4);
        f(&mut config);
        config
    };
    let groups = |groups, keep, rank_by| Some(GroupLimit { groups, keep, rank_by });
    vec![
        ("softmax, not renormalized", with(&|r| r.renorm = None)),
        ("norm of power 2", with(&|r| r.renorm = Some(Renorm { p: 2.0, epsilon: 1e-3, floor: 0.0 }))),
        ("norm with a floor", with(&|r| r.renorm = Some(Renorm { p: 1.0, epsilon: 0.0, floor: 0.9 }))),
        ("deepseek v2", with(&|r| (r.groups, r.renorm, r.scale) = (groups(4, 2, GroupScore::Max), None, 16.0))),
        (
            "deepseek v3",
            with(&|r| {
                (r.score, r.selection_bias, r.scale) = (Score::Sigmoid, true, 2.5);
                r.groups = groups(4, 2, GroupScore::Top2Sum);
            }),
        ),
        ("gpt-oss", with(&|r| (r.score, r.logit_bias, r.renorm) = (Score::TopkSoftmax, true, None))),
        ("llama 4", with(&|r| (r.score, r.renorm) = (Score::TopkSigmoid, None))),
        ("phi", with(&|r| (r.score, r.top_k, r.renorm) = (Score::SparseMixer { epsilon: 0.01 }, 2, None))),
        ("all experts", with(&|r| r.top_k = 16)),
    ]
}

fn routing_formulas(cuda: &Cuda) {
    for (name, router) in routers() {
        let mut config = MoeConfig::new(64, 40, router.num_experts, router.top_k);
        config.router = router;
        all_types(cuda, name, &Case::new(config, 200, DType::F32));
    }
}

fn many_experts(cuda: &Cuda) {
    // More than fit a block's shared memory.
    let mut config = MoeConfig::new(16, 8, 4096, 3);
    (config.aux.balance, config.aux.z) = (0.1, 0.01);
    compare("4096 experts", &Case::new(config, 90, DType::F32), cuda);
}

fn jitter(cuda: &Cuda) {
    let mut config = MoeConfig::new(64, 40, 16, 4);
    config.router.jitter = 0.1;
    let noise = Some(Noise { seed: 5, step: 17 });
    all_types(cuda, "jitter", &Case { noise, ..Case::new(config, 200, DType::F32) });
}

fn auxiliary_losses(cuda: &Cuda) {
    let kinds = [
        BalanceKind::Switch,
        BalanceKind::HuggingFace,
        BalanceKind::Sequence { length: 50 },
        BalanceKind::Sequence { length: 1000 },
        BalanceKind::Sequence { length: 130 },
    ];
    for balance_kind in kinds {
        for score in [Score::Softmax, Score::Sigmoid] {
            let mut config = MoeConfig::new(64, 40, 16, 4);
            config.router.score = score;
            (config.aux.balance, config.aux.balance_kind, config.aux.z) = (3.0, balance_kind, 0.2);
            config.aux.over_ranks = true;
            all_types(cuda, &format!("{balance_kind:?} {score:?}"), &Case::new(config, 220, DType::F32));
        }
    }
}

fn capacities(cuda: &Cuda) {
    for order in [CapacityOrder::Position, CapacityOrder::Probability] {
        for renormalize in [false, true] {
            let mut config = MoeConfig::new(64, 40, 8, 2);
            config.router.expert_capacity = Some(ExpertCapacity { factor: 0.8, order, renormalize });
            all_types(cuda, &format!("{order:?}, renormalize {renormalize}"), &Case::new(config, 200, DType::F32));
        }
    }
    let dispatch = DispatchOptions {
        capacity: Capacity::Static(250),
        overflow: Overflow::Drop,
        alignment: 16,
        ..Default::default()
    };
    all_types(cuda, "static", &Case { dispatch, ..Case::new(MoeConfig::new(64, 40, 8, 2), 200, DType::F32) });
}
