//! A device's gradients of the whole layer: against central finite differences of the CPU's forward in f64, and against
//! candle's autograd over a dense reference, for every activation, score, place of the weight and loss; on the CPU over
//! one rank and several.

mod case;
#[path = "../common/mod.rs"]
mod common;

use candle_core::Tensor;
use common::devices::{Target, cases};
use common::support::compare::{Difference, difference, values};
use common::support::job::uneven;
use common::support::random::Random;
use moebius::config::{
    Activation, BalanceKind, CapacityOrder, ExpertCapacity, GroupLimit, GroupScore, MoeConfig, Renorm, Score,
    SharedConfig, WeightAt,
};
use moebius::cpu::Cpu;
use moebius::ep::{Capacity, Overflow};
use moebius::layer::{DispatchOptions, Noise};

use case::{Case, DENSE_TOLERANCE, EXPERTS, HIDDEN, INNER, ONE, STEP, TOKENS, agree, dot, norm, unit};

cases!(
    activations_and_places_of_the_weight_with_biases,
    shared_experts,
    scores,
    groups_of_experts,
    auxiliary_losses,
    drops_noise_and_static_capacity,
    recomputing_changes_no_bit,
    every_entry,
);

fn config() -> MoeConfig {
    MoeConfig::new(HIDDEN, INNER, EXPERTS, 3)
}

fn with(change: impl FnOnce(&mut MoeConfig)) -> MoeConfig {
    let mut config = config();
    change(&mut config);
    config
}

/// Splits of the tokens over 1, 2 and 4 ranks; at 2 and at 4, a rank without tokens. A GPU is one rank.
fn splits<D: Target>() -> Vec<Vec<usize>> {
    match D::has_f64() {
        true => vec![ONE.to_vec(), vec![4, 5], vec![TOKENS, 0], uneven(TOKENS, 4)],
        false => vec![ONE.to_vec()],
    }
}

/// Differences at every split, the dense reference too, and the same output whatever the split.
fn check<D: Target>(device: &D, name: &str, config: &MoeConfig) {
    let mut first: Option<Tensor> = None;
    for split in splits::<D>() {
        let case = Case::new(name, config, &split);
        case.check_differences(device, 2);
        case.check_dense(device);
        let y = case.run(&case.params, &case.x).y;
        let d = first.as_ref().map_or(Difference::NONE, |first| difference(&y, first).unwrap());
        assert!(d.within(DENSE_TOLERANCE), "{}: differs from one rank: {d:?}", case.name);
        first.get_or_insert(y);
    }
}

const ACTIVATIONS: [(&str, Activation); 4] = [
    ("silu", Activation::SiluGlu),
    ("gelu", Activation::GeluGlu),
    // A limit that half of the values meet.
    ("clamped", Activation::ClampedGlu { alpha: 1.702, limit: 0.6 }),
    ("relu2", Activation::Relu2),
];

fn activations_and_places_of_the_weight_with_biases<D: Target>(device: &D) {
    for (name, activation) in ACTIVATIONS {
        for at in [WeightAt::Activation, WeightAt::Output, WeightAt::Input] {
            for bias in [false, true] {
                let config = with(|c| {
                    c.activation = activation;
                    c.weight_at = at;
                    c.expert_bias = bias;
                });
                check(device, &format!("{name} {at:?} bias {bias}"), &config);
            }
        }
    }
}

fn shared_experts<D: Target>(device: &D) {
    for (name, activation) in ACTIVATIONS {
        for (gated, bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let config = with(|c| {
                c.activation = activation;
                c.shared = Some(SharedConfig { intermediate: 7, gated, bias });
            });
            check(device, &format!("shared {name} gated {gated} bias {bias}"), &config);
        }
    }
}

fn scores<D: Target>(device: &D) {
    let renorm = |p, epsilon, floor| Some(Renorm { p, epsilon, floor });
    for (name, score, k) in [
        ("softmax", Score::Softmax, 3),
        ("sigmoid", Score::Sigmoid, 3),
        ("topk softmax", Score::TopkSoftmax, 3),
        ("topk sigmoid", Score::TopkSigmoid, 3),
        // Wide enough that several experts are within reach of each choice.
        ("sparsemixer", Score::SparseMixer { epsilon: 0.4 }, 2),
    ] {
        let base = with(|c| {
            c.router.score = score;
            c.router.top_k = k;
            c.router.renorm = None;
        });
        check(device, name, &base);
        let mut config = base.clone();
        config.router.logit_bias = true;
        config.router.scale = 2.5;
        check(device, &format!("{name}, bias and scale"), &config);
        if matches!(score, Score::SparseMixer { .. }) {
            continue;
        }
        for (label, renorm) in [
            ("sum", renorm(1.0, 0.0, 0.0)),
            ("sum and epsilon", renorm(1.0, 0.1, 0.0)),
            ("2-norm", renorm(2.0, 0.0, 0.0)),
            // Larger than any norm here, so that it divides every token.
            ("floor", renorm(1.0, 0.0, 5.0)),
        ] {
            config.router.renorm = renorm;
            config.router.selection_bias = matches!(score, Score::Softmax | Score::Sigmoid);
            check(device, &format!("{name}, {label}"), &config);
        }
    }
}

fn groups_of_experts<D: Target>(device: &D) {
    for (score, rank_by) in [(Score::Softmax, GroupScore::Max), (Score::Sigmoid, GroupScore::Top2Sum)] {
        let config = with(|c| {
            c.router.score = score;
            c.router.groups = Some(GroupLimit { groups: 4, keep: 2, rank_by });
            c.router.selection_bias = rank_by == GroupScore::Top2Sum;
            c.router.scale = 1.5;
        });
        check(device, &format!("groups by {rank_by:?}"), &config);
    }
}

fn auxiliary_losses<D: Target>(device: &D) {
    let kinds = [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 4 }];
    for score in [Score::Softmax, Score::Sigmoid, Score::TopkSoftmax, Score::TopkSigmoid] {
        for (kind, (balance, z), over_ranks) in kinds
            .into_iter()
            .flat_map(|k| [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)].map(|c| (k, c)))
            .flat_map(|(k, c)| [true, false].map(|o| (k, c, o)))
        {
            let config = with(|c| {
                c.router.score = score;
                c.aux.balance = balance;
                c.aux.balance_kind = kind;
                c.aux.z = z;
                c.aux.over_ranks = over_ranks;
            });
            for split in splits::<D>() {
                let name = format!("{score:?} {kind:?} balance {balance} z {z} over ranks {over_ranks}");
                let mut case = Case::new(&name, &config, &split);
                case.check_differences(device, 1);
                let sequences = matches!(kind, BalanceKind::Sequence { .. });
                if case.ranks() == 1 || (over_ranks && !sequences) {
                    case.check_dense(device);
                    // The loss alone: y has no cotangent.
                    case.c = None;
                    case.check_dense(device);
                    case.check_differences(device, 1);
                }
            }
        }
    }
}

/// Cases that the dense reference cannot do: dropped tokens, noise, static capacities. Differences only.
fn drops_noise_and_static_capacity<D: Target>(device: &D) {
    let noise = Some(Noise { seed: 3, step: 5 });
    for split in splits::<D>() {
        for order in [CapacityOrder::Position, CapacityOrder::Probability] {
            for renormalize in [false, true] {
                let config = with(|c| {
                    c.router.expert_capacity = Some(ExpertCapacity { factor: 0.7, order, renormalize });
                });
                let case = Case::new(&format!("expert capacity {order:?} renormalize {renormalize}"), &config, &split);
                case.check_differences(device, 2);
                let whole = Case::new(&case.name, &self::config(), &split);
                assert!(
                    !difference(&case.run(&whole.params, &whole.x).y, &whole.run(&whole.params, &whole.x).y)
                        .unwrap()
                        .within(1e-3),
                    "{}: nothing was dropped",
                    case.name
                );
            }
        }
        let mut case = Case::new("noise", &with(|c| c.router.jitter = 0.3), &split);
        let quiet = case.run(&case.params, &case.x).y;
        case.setup.noise = noise;
        assert!(!difference(&case.run(&case.params, &case.x).y, &quiet).unwrap().within(1e-3), "no noise");
        case.check_differences(device, 2);

        // Alignment 4 over 8 experts needs 32 rows or more on one rank; fewer are there, and the rest is dropped.
        let mut case = Case::new("static capacity", &config(), &split);
        let rows = match case.ranks() {
            1 => 24,
            2 => 16,
            _ => 6,
        };
        let (capacity, overflow) = (Capacity::Static(rows), Overflow::Drop);
        case.setup.dispatch = DispatchOptions { capacity, overflow, alignment: 4, ..Default::default() };
        case.check_differences(device, 2);
        case.setup.dispatch = DispatchOptions { alignment: 16, ..DispatchOptions::default() };
        case.check_differences(device, 1);
        case.check_dense(device);
    }
}

fn recomputing_changes_no_bit<D: Target>(device: &D) {
    for (name, activation) in ACTIVATIONS {
        for split in splits::<D>() {
            let mut case = Case::new(
                name,
                &with(|c| {
                    c.activation = activation;
                    c.expert_bias = true;
                    c.shared = Some(SharedConfig { intermediate: 7, gated: true, bias: true });
                }),
                &split,
            );
            let kept = case.step(device);
            case.setup.config.recompute = true;
            assert_eq!(kept.bits(), case.step(device).bits(), "{}", case.name);
            case.check_differences(device, 1);
        }
    }
}

/// Entry by entry, on one configuration.
fn every_entry<D: Target>(device: &D) {
    for split in splits::<D>().into_iter().take(2) {
        let config = with(|c| {
            c.expert_bias = true;
            c.shared = Some(SharedConfig { intermediate: 3, gated: true, bias: true });
        });
        let case = Case::new("every entry", &config, &split);
        let base = case.step(device);
        for (name, gradient) in base.grads.iter().filter(|(n, _)| !matches!(n.as_str(), "logits" | "weights")) {
            for i in 0..gradient.elem_count() {
                let mut direction = vec![0.0; gradient.elem_count()];
                direction[i] = 1.0;
                let direction = Tensor::from_vec(direction, gradient.dims(), gradient.device()).unwrap();
                assert!(case.check_direction::<D>(name, &direction, &base), "{}: {name}[{i}]: no step", case.name);
            }
        }
    }
}

/// The check can fail: a gradient with one entry a thousandth of its norm off does not pass.
#[test]
fn a_wrong_gradient_is_found() {
    let case = Case::new("a wrong gradient", &config(), &[4, 5]);
    let base = case.step(&Cpu::poisoning());
    let mut random = Random::new(common::devices::seed::seed(11));
    for name in ["x", "router.weight", "experts.up", "experts.down"] {
        let gradient = &base.grads[name];
        let mut wrong = values(gradient).unwrap();
        wrong[3] += 1e-3 * norm(gradient);
        let wrong = Tensor::from_vec(wrong, gradient.dims(), gradient.device()).unwrap();
        let caught = (0..4).any(|_| {
            let direction = unit(&random.tensor(gradient.dims(), 1.0).unwrap());
            let found = case.difference(name, &direction, STEP, &base);
            found.is_some_and(|found| !agree::<Cpu>(found, dot(&wrong, &direction), gradient))
        });
        assert!(caught, "a wrong gradient of {name} passed");
    }
}
