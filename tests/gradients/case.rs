//! A case: a layer, its parameters and a loss, and the checks of its gradients.

use candle_core::{Tensor, Var};
use moebius::config::MoeConfig;
use moebius::cpu::Cpu;

use super::common::devices::Target;
use super::common::support::compare::{difference, values};
use super::common::support::dense::{Dense, Params};
use super::common::support::random::Random;
use super::common::{self, Cotangent, Outcome, Setup};

pub(super) const HIDDEN: usize = 6;
pub(super) const INNER: usize = 5;
pub(super) const EXPERTS: usize = 8;
pub(super) const TOKENS: usize = 9;

/// Step of the differences, along a direction of length 1. Its square bounds the truncation (1e-10 times a third
/// derivative of order 1 to 100), 2⁻⁵²·|loss| over it the rounding (1e-11 for losses of order 1): 1e-7 has a margin of
/// ten over their sum and is far below what a wrong term would add.
pub(super) const STEP: f64 = 1e-5;
/// Shorter ones for data near a tie of the routing or a kink. The rounding of the shortest (1e-9) is far below the
/// tolerance still.
const STEPS: [f64; 3] = [STEP, STEP / 10.0, STEP / 100.0];
const TOLERANCE: f64 = 1e-7;
/// Same formulas, other order of sums: some hundred roundings of 2⁻⁵³ at most.
pub(super) const DENSE_TOLERANCE: f64 = 1e-12;
/// Without f64: a chain of some ten products and sums of up to 15 terms, each a rounding of 2⁻²⁴ of values that
/// gradients, at most, cancel to a tenth: 10·15·6e-8/√(10·15)·10 ≈ 7e-6.
const F32_TOLERANCE: f64 = 1e-5;

/// A layer, its parameters and a loss `Σ y·c + a·aux`.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) setup: Setup,
    pub(super) params: Params,
    pub(super) x: Tensor,
    /// c; `None`: the loss does not see y.
    pub(super) c: Option<Tensor>,
    a: f64,
    seed: u64,
}

impl Case {
    pub(super) fn new(name: &str, config: &MoeConfig, split: &[usize]) -> Self {
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

    pub(super) fn ranks(&self) -> usize {
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
    pub(super) fn run(&self, params: &Params, x: &Tensor) -> Outcome {
        self.run_on(&Cpu::poisoning(), params, x, false)
    }

    /// Results of the device.
    pub(super) fn step<D: Target>(&self, device: &D) -> Outcome {
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
    pub(super) fn difference(&self, name: &str, direction: &Tensor, step: f64, base: &Outcome) -> Option<f64> {
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
    pub(super) fn check_direction<D: Target>(&self, name: &str, direction: &Tensor, base: &Outcome) -> bool {
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
    pub(super) fn check_differences<D: Target>(&self, device: &D, count: usize) {
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
    pub(super) fn check_dense<D: Target>(&self, device: &D) {
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

pub(super) fn agree<D: Target>(found: f64, expected: f64, gradient: &Tensor) -> bool {
    (found - expected).abs() <= D::bound(TOLERANCE, F32_TOLERANCE) * (1.0 + norm(gradient))
}

pub(super) fn norm(t: &Tensor) -> f64 {
    values(t).unwrap().iter().map(|v| v * v).sum::<f64>().sqrt()
}

pub(super) fn unit(t: &Tensor) -> Tensor {
    (t / norm(t)).unwrap()
}

pub(super) fn dot(a: &Tensor, b: &Tensor) -> f64 {
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

pub(super) const ONE: [usize; 1] = [TOKENS];
