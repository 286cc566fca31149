//! A device's gradients of the whole layer: against central finite differences of the CPU's forward in f64, and against
//! candle's autograd over a dense reference, for every activation, score, place of the weight and loss; on the CPU over
//! one rank and several.

mod common;

use candle_core::{Tensor, Var};
use common::devices::{Target, cases};
use common::support::compare::{Difference, difference, values};
use common::support::dense::{Dense, Params};
use common::support::job::uneven;
use common::support::random::Random;
use common::{Cotangent, Outcome, Setup};
use moebius::config::{
    Activation, BalanceKind, CapacityOrder, ExpertCapacity, GroupLimit, GroupScore, MoeConfig, Renorm, Score,
    SharedConfig, WeightAt,
};
use moebius::cpu::Cpu;
use moebius::ep::{Capacity, Overflow};
use moebius::layer::{DispatchOptions, Noise};

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

const HIDDEN: usize = 6;
const INNER: usize = 5;
const EXPERTS: usize = 8;
const TOKENS: usize = 9;

/// Step of the differences, along a direction of length 1. Its square bounds the truncation (1e-10 times a third
/// derivative of order 1 to 100), 2⁻⁵²·|loss| over it the rounding (1e-11 for losses of order 1): 1e-7 has a margin of
/// ten over their sum and is far below what a wrong term would add.
const STEP: f64 = 1e-5;
/// Shorter ones for data near a tie of the routing or a kink. The rounding of the shortest (1e-9) is far below the
/// tolerance still.
const STEPS: [f64; 3] = [STEP, STEP / 10.0, STEP / 100.0];
const TOLERANCE: f64 = 1e-7;
/// Same formulas, other order of sums: some hundred roundings of 2⁻⁵³ at most.
const DENSE_TOLERANCE: f64 = 1e-12;
/// Without f64: a chain of some ten products and sums of up to 15 terms, each a rounding of 2⁻²⁴ of values that
/// gradients, at most, cancel to a tenth: 10·15·6e-8/√(10·15)·10 ≈ 7e-6.
const F32_TOLERANCE: f64 = 1e-5;

/// A layer, its parameters and a loss `Σ y·c + a·aux`.
struct Case {
    name: String,
    setup: Setup,
    params: Params,
    x: Tensor,
    /// c; `None`: the loss does not see y.
    c: Option<Tensor>,
    a: f64,
    seed: u64,
}

impl Case {
    fn new(name: &str, config: &MoeConfig, split: &[usize]) -> Self {
        config.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
        // Seeds differ between cases, so that a kink which one meets does not hide in all.
        let seed = name.bytes().fold(7, |s: u64, b| s.wrapping_mul(31).wrapping_add(b.into()));
        let mut random = Random::new(common::devices::seed::seed(seed));
        let mut drawn = || {
            let params = parameters(config, &mut random);
            let x = random.tensor(&[TOKENS, HIDDEN], 1.0).unwrap();
            let c = random.tensor(&[TOKENS, HIDDEN], 1.0).unwrap();
            // One rank, whose routing is that of several.
            let (setup, name) = (Setup::new(config, &ONE), name.to_string());
            Self { name, setup, params, x, c: Some(c), a: 0.7, seed }
        };
        // Where two experts are as good as equal, every step along the router's weight changes the routing.
        let still = |case: &Self| {
            let base = case.run(&case.params, &case.x);
            let mut random = Random::new(common::devices::seed::seed(seed ^ 0x7135));
            (0..3).all(|_| {
                let direction = unit(&random.tensor(case.params["router.weight"].dims(), 1.0).unwrap());
                case.difference("router.weight", &direction, STEP, &base).is_some()
            })
        };
        let case = (0..20).map(|_| drawn()).find(still).unwrap_or_else(|| panic!("{name}: near ties in every draw"));
        Self { name: format!("{name}, tokens {split:?}"), setup: Setup::new(config, split), ..case }
    }

    fn ranks(&self) -> usize {
        self.setup.split.len()
    }

    fn run_on<D: Target>(&self, device: &D, params: &Params, x: &Tensor, backward: bool) -> Outcome {
        let dtype = D::wide();
        let shares: Vec<_> = (0..self.ranks()).map(|rank| common::shard(params, rank, self.ranks(), dtype)).collect();
        let cotangent = backward.then_some(Cotangent { y: self.c.as_ref(), aux: self.a });
        common::run_on(device, &self.setup, &shares, x, dtype, cotangent)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// Forward in f64, for the differences.
    fn run(&self, params: &Params, x: &Tensor) -> Outcome {
        self.run_on(&Cpu::poisoning(), params, x, false)
    }

    /// Results of the device.
    fn step<D: Target>(&self, device: &D) -> Outcome {
        self.run_on(device, &self.params, &self.x, true)
    }

    fn loss(&self, out: &Outcome) -> f64 {
        let seen = match &self.c {
            Some(c) => values(&out.y).unwrap().iter().zip(values(c).unwrap()).map(|(y, c)| y * c).sum(),
            None => 0.0,
        };
        // Over all ranks, every rank has the same loss, which counts once.
        let aux = if self.setup.config.aux.over_ranks { out.aux[0] } else { out.aux.iter().sum() };
        seen + self.a * aux
    }

    /// Derivative of the loss along `direction` of the tensor `name`, from two steps of length `step`; `None` where one
    /// changes an expert.
    fn difference(&self, name: &str, direction: &Tensor, step: f64, base: &Outcome) -> Option<f64> {
        let at = |h: f64| {
            let step = (direction * h).unwrap();
            let (mut params, mut x) = (self.params.clone(), self.x.clone());
            match name {
                "x" => x = (x + step).unwrap(),
                _ => params.insert(name.to_string(), (&self.params[name] + step).unwrap()).map(drop).unwrap(),
            }
            let out = self.run(&params, &x);
            (out.ids == base.ids).then(|| self.loss(&out))
        };
        Some((at(step)? - at(-step)?) / (2.0 * step))
    }

    /// Whether a kink (a clamp's limit, a rectifier's zero) lies between the two ends of `step` along `direction`,
    /// where differences are no derivative. Told from differences alone, so that a wrong gradient is not taken for one:
    /// where the loss is smooth, half the step gives the same difference within the tolerance.
    fn kink(&self, name: &str, direction: &Tensor, step: f64, base: &Outcome) -> bool {
        let at = |step| self.difference(name, direction, step, base);
        match (at(step), at(step / 2.0)) {
            (Some(whole), Some(half)) => (whole - half).abs() > TOLERANCE * (1.0 + norm(&base.grads[name])),
            _ => true,
        }
    }

    /// Checks the gradient of the tensor `name` along `direction`, with the longest step between whose ends there is no
    /// kink and no change of an expert; `false` where there is none.
    fn check_direction<D: Target>(&self, name: &str, direction: &Tensor, base: &Outcome) -> bool {
        let gradient = &base.grads[name];
        let expected = dot(gradient, direction);
        STEPS.into_iter().any(|step| {
            let Some(found) = self.difference(name, direction, step, base) else { return false };
            let agrees = agree::<D>(found, expected, gradient);
            if !agrees && self.kink(name, direction, step, base) {
                return false;
            }
            assert!(agrees, "{}: d {name}: differences give {found:e}, backward {expected:e}", self.name);
            true
        })
    }

    /// Checks every gradient along `count` random directions of each tensor.
    fn check_differences<D: Target>(&self, device: &D, count: usize) {
        let base = self.step(device);
        let mut random = Random::new(common::devices::seed::seed(self.seed ^ 0xd1ff));
        for (name, gradient) in base.grads.iter().filter(|(n, _)| !matches!(n.as_str(), "logits" | "weights")) {
            let directions = (0..4 * count).map(|_| unit(&random.tensor(gradient.dims(), 1.0).unwrap()));
            let checked = directions.filter(|direction| self.check_direction::<D>(name, direction, &base)).take(count);
            assert_eq!(checked.count(), count, "{}: the steps of {name} change the routing or meet a kink", self.name);
        }
        let trainable = self.params.keys().filter(|n| *n != "router.selection_bias").count();
        // And x, logits and weights.
        assert_eq!(base.grads.len(), trainable + 3, "{}: gradients {:?}", self.name, base.grads.keys());
    }

    /// Compares output, loss and gradients with the dense reference's.
    fn check_dense<D: Target>(&self, device: &D) {
        let base = self.step(device);
        let var = |t: &Tensor| Var::from_tensor(t).unwrap().into_inner();
        let params: Params = self.params.iter().map(|(n, t)| (n.clone(), var(t))).collect();
        let x = var(&self.x);
        let dense = Dense { config: &self.setup.config, params: &params };
        let out = dense.forward(&x, None).unwrap();
        let aux = dense.aux(&out).unwrap();
        let seen = match &self.c {
            Some(c) => (&out.y * c).unwrap().sum_all().unwrap(),
            None => (out.y.sum_all().unwrap() * 0.0).unwrap(),
        };
        let grads = (seen + (&aux * self.a).unwrap()).unwrap().backward().unwrap();
        let check = |name: &str, found: &Tensor, reference: &Tensor| {
            let d = difference(found, reference).unwrap_or_else(|e| panic!("{}: {name}: {e}", self.name));
            // A gradient that is zero but for rounding has no relative error.
            let (tolerance, zero) = (D::bound(DENSE_TOLERANCE, F32_TOLERANCE), D::bound(1e-15, 1e-6));
            assert!(d.within(tolerance) || d.max_abs < zero, "{}: {name}: {d:?}", self.name);
        };
        assert_eq!(base.ids, out.ids, "{}: experts", self.name);
        check("y", &base.y, &out.y);
        check("logits", &base.logits, &out.logits);
        for found in &base.aux {
            let reference: f64 = aux.to_scalar().unwrap();
            let error = (found - reference).abs();
            assert!(
                error <= D::bound(1e-13, 1e-6) * reference.abs(),
                "{}: aux {found} instead of {reference}",
                self.name
            );
        }
        for (name, found) in base.grads.iter().filter(|(n, _)| !matches!(n.as_str(), "logits" | "weights")) {
            let of = if name == "x" { &x } else { &params[name] };
            let reference = grads.get(of).cloned().unwrap_or_else(|| of.zeros_like().unwrap());
            check(name, found, &reference);
        }
    }
}

fn agree<D: Target>(found: f64, expected: f64, gradient: &Tensor) -> bool {
    (found - expected).abs() <= D::bound(TOLERANCE, F32_TOLERANCE) * (1.0 + norm(gradient))
}

fn norm(t: &Tensor) -> f64 {
    values(t).unwrap().iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn unit(t: &Tensor) -> Tensor {
    (t / norm(t)).unwrap()
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    values(a).unwrap().iter().zip(values(b).unwrap()).map(|(a, b)| a * b).sum()
}

/// Random parameters of a whole block.
fn parameters(config: &MoeConfig, random: &mut Random) -> Params {
    let (e, h, i) = (config.router.num_experts, config.hidden, config.intermediate);
    let mut params = Params::new();
    let mut add = |wanted: bool, name: &str, dims: &[usize], std: f64| {
        if wanted {
            params.insert(name.to_string(), random.tensor(dims, std).unwrap());
        }
    };
    add(true, "router.weight", &[e, h], 0.6);
    add(config.router.logit_bias, "router.bias", &[e], 0.3);
    add(config.router.selection_bias, "router.selection_bias", &[e], 0.2);
    add(true, "experts.up", &[e, config.up_rows(), h], 0.5);
    add(config.expert_bias, "experts.up_bias", &[e, config.up_rows()], 0.3);
    add(true, "experts.down", &[e, h, i], 0.5);
    add(config.expert_bias, "experts.down_bias", &[e, h], 0.3);
    if let Some(shared) = config.shared {
        let s = shared.intermediate;
        add(true, "shared.up", &[config.activation.gate_factor() * s, h], 0.5);
        add(shared.bias, "shared.up_bias", &[config.activation.gate_factor() * s], 0.3);
        add(true, "shared.down", &[h, s], 0.5);
        add(shared.bias, "shared.down_bias", &[h], 0.3);
        add(shared.gated, "shared.gate", &[1, h], 0.5);
    }
    params
}

fn config() -> MoeConfig {
    MoeConfig::new(HIDDEN, INNER, EXPERTS, 3)
}

fn with(change: impl FnOnce(&mut MoeConfig)) -> MoeConfig {
    let mut config = config();
    change(&mut config);
    config
}

const ONE: [usize; 1] = [TOKENS];

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
