//! The module's gradients against central finite differences of its forward in f64, and from a given gradient.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::backward_with;
use moebius::layer::ParamKind;

use super::support::*;
use crate::trials::tests;

/// Step of the differences: what is cut off is the third derivative times 1e-12.
const STEP: f64 = 1e-6;
/// The tolerance, from rounding: the loss is a sum of order 10 of a few hundred terms in f64, of which the roundings add
/// up to 100 · 10 · 2⁻⁵³ at most, divided by the step.
const FLOOR: f64 = 1e-7;

/// A direction in a parameter's space, the same on all ranks for what all hold.
fn direction(path: &str, rank: usize, count: usize) -> Vec<f32> {
    let own = if path.starts_with("experts") { rank as u64 + 1 } else { 0 };
    let seed = path.bytes().fold(own, |seed, byte| seed.wrapping_mul(257).wrapping_add(u64::from(byte)));
    values(seed, count, 1.0)
}

/// The tokens' name among the parameters' paths.
const TOKENS_NAME: &str = "x";

fn direction_of_x(rank: usize) -> Vec<f32> {
    values(400 + rank as u64, token_counts()[rank] * H, 1.0)
}

/// Takes every parameter to f64, and moves one of them along its direction.
struct Move<'a> {
    path: Vec<String>,
    moved: &'a str,
    rank: usize,
    step: f64,
}

impl<B: Backend> ModuleMapper<B> for Move<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (path, dims, data) = (self.path.join("."), param.dims(), param.val().into_data());
        let step = if path == self.moved { self.step } else { 0.0 };
        let along = direction(&path, self.rank, data.num_elements());
        let moved = data.iter::<f64>().zip(along).map(|(v, along)| v + step * f64::from(along)).collect::<Vec<_>>();
        let device = param.device();
        Param::initialized(param.id, Tensor::from_data(TensorData::new(moved, dims), (&device, DType::F64)))
    }
}

/// Loss of all ranks, of which one parameter, or the tokens, are moved by so much.
fn loss(ranks: usize, moved: &str, step: f64) -> f64 {
    let config = config();
    let losses = on_ranks(ranks, LONG, |rank, group| {
        let model = module::<Flex>(&config, &group).map(&mut Move { path: vec![], moved, rank, step });
        let double = |values: Vec<f32>, along: Option<Vec<f32>>| {
            let along = along.unwrap_or_else(|| vec![0.0; values.len()]);
            let moved = values.iter().zip(along).map(|(v, along)| f64::from(*v) + step * f64::from(along));
            let data = TensorData::new(moved.collect::<Vec<f64>>(), [token_counts()[rank], H]);
            Tensor::<Flex, 2>::from_data(data, (&device(), DType::F64))
        };
        let (x, c) = inputs(rank);
        let along = (moved == TOKENS_NAME).then(|| direction_of_x(rank));
        let out = model.forward_full(double(x, along), None).unwrap();
        let number = |t: Tensor<Flex, 1>| t.into_data().iter::<f64>().sum::<f64>();
        number((out.y * double(c, None)).sum()) + number(out.aux)
    });
    losses.iter().sum()
}

/// Products of gradients with their directions, and both's norms.
struct Slopes<'a, A: AutodiffBackend> {
    gradients: &'a A::Gradients,
    path: Vec<String>,
    rank: usize,
    found: Vec<(String, Slope)>,
}

/// A derivative along a direction, and the squares of the gradient's norm and of the direction's.
#[derive(Default, Clone, Copy)]
struct Slope {
    along: f64,
    gradient: f64,
    direction: f64,
}

impl Slope {
    fn new(gradient: &[f32], direction: &[f32]) -> Self {
        assert_eq!(gradient.len(), direction.len());
        let pairs = gradient.iter().zip(direction).map(|(g, d)| (f64::from(*g), f64::from(*d)));
        pairs.fold(Self::default(), |Self { along, gradient, direction }, (g, d)| Self {
            along: along + g * d,
            gradient: gradient + g * g,
            direction: direction + d * d,
        })
    }
}

impl<A: AutodiffBackend> ModuleVisitor<A> for Slopes<'_, A> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let gradient = floats(param.grad(self.gradients).unwrap());
        let path = self.path.join(".");
        let slope = Slope::new(&gradient, &direction(&path, self.rank, gradient.len()));
        self.found.push((path, slope));
    }
}

/// Of the gradients of a back end in f32, the derivative of all ranks' loss along one direction in each parameter, and
/// one in the tokens.
pub fn finite_differences<S: Subject>(ranks: usize) {
    let config = config();
    let slopes = S::on_ranks(ranks, |rank, group| {
        let model = module::<Autodiff<S>>(&config, &group);
        let (x, c) = inputs(rank);
        let x = tensor::<Autodiff<S>, 2>(x, [token_counts()[rank], H]).require_grad();
        let out = model.forward_full(x.clone(), None).unwrap();
        let gradients = ((out.y * tensor(c, [token_counts()[rank], H])).sum() + out.aux).backward();
        let of_x = Slope::new(&floats(x.grad(&gradients).unwrap()), &direction_of_x(rank));
        let found = vec![(TOKENS_NAME.to_string(), of_x)];
        let mut slopes = Slopes::<Autodiff<S>> { gradients: &gradients, path: vec![], rank, found };
        model.visit(&mut slopes);
        slopes.found
    });
    // Tokens and every parameter but the selection bias, which this configuration has not.
    assert_eq!(slopes[0].len(), ParamKind::ALL.len());
    for (at, (name, _)) in slopes[0].iter().enumerate() {
        let total = |of: fn(&Slope) -> f64| slopes.iter().map(|found| of(&found[at].1)).sum::<f64>();
        let (found, norms) = (total(|s| s.along), (total(|s| s.gradient) * total(|s| s.direction)).sqrt());
        let expected = (loss(ranks, name, STEP) - loss(ranks, name, -STEP)) / (2.0 * STEP);
        // Gradients in f32 are off by `BACKWARD` of their norm: by so much times the direction's along it.
        let error = (found - expected).abs();
        let allowed = BACKWARD * norms + FLOOR;
        assert!(error <= allowed, "{name}, {ranks} ranks: {found} for {expected}, off by {error:e} of {norms:e}");
        // A direction says something of a gradient that is more than what the differences are off by.
        assert!(norms > 1e4 * FLOOR, "{name}, {ranks} ranks: {norms:e}");
    }
}

fn gradients_are_those_of_finite_differences() {
    for ranks in RANKS {
        finite_differences::<Flex>(ranks);
    }
}

pub fn given<S: Subject>() {
    let model = module::<Autodiff<S>>(&config(), S::alone());
    let (x, c) = inputs(0);
    let dims = [token_counts()[0], H];
    let gradients = |given: bool| {
        let leaf = tensor::<Autodiff<S>, 2>(x.clone(), dims).require_grad();
        let y = model.forward(leaf.clone() * 2.0).unwrap();
        let gradients = match given {
            true => backward_with(y, tensor::<S, 2>(c.clone(), dims)).unwrap(),
            false => (y * tensor(c.clone(), dims)).sum().backward(),
        };
        (floats(leaf.grad(&gradients).unwrap()), gradients_of(&model, &gradients))
    };
    assert_eq!(gradients(true), gradients(false));
    let y = || model.forward(tensor::<Autodiff<S>, 2>(x.clone(), dims).require_grad()).unwrap();
    let error = backward_with(y(), tensor::<S, 2>(vec![1.0; H], [1, H])).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("gradient of y") && e.contains("[1, 12]")), "{error:?}");
    let half = tensor::<S, 2>(c.clone(), dims).cast(DType::BF16);
    let error = backward_with(y(), half).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("BF16")), "{error:?}");
}

/// Biases of experts and of the shared one train beside weights that are frozen: their gradients, and all others, are
/// those beside weights that train.
pub fn beside_frozen_weights<S: Subject>(ranks: usize) {
    let run = |frozen: bool| {
        S::on_ranks(ranks, |rank, group| {
            let mut model = module::<Autodiff<S>>(&config(), &group);
            if frozen {
                let (experts, shared) = (&mut model.experts, model.shared.as_mut().unwrap());
                for weight in [&mut experts.up, &mut experts.down] {
                    *weight = weight.clone().set_require_grad(false);
                }
                for weight in [&mut shared.up, &mut shared.down] {
                    *weight = weight.clone().set_require_grad(false);
                }
            }
            run_rank::<S>(&model, rank)
        })
    };
    let weights = [ParamKind::Up, ParamKind::Down, ParamKind::SharedUp, ParamKind::SharedDown].map(ParamKind::name);
    for (found, mut expected) in run(true).into_iter().zip(run(false)) {
        let all = expected.params.len();
        expected.params.retain(|(name, _)| !weights.contains(&name.as_str()));
        assert_eq!(expected.params.len(), all - weights.len());
        assert_eq!(found, expected);
    }
}

fn biases_train_beside_frozen_weights() {
    for ranks in RANKS {
        beside_frozen_weights::<Flex>(ranks);
    }
}

/// A tensor that nothing tracks has no backward: burn would panic.
fn a_given_gradient_of_a_constant_is_a_typed_error() {
    let dims = [token_counts()[0], H];
    let ones = || tensor::<Flex, 2>(vec![1.0; token_counts()[0] * H], dims);
    let frozen = module::<B>(&config(), single()).no_grad();
    let constant = tensor::<B, 2>(inputs(0).0, dims);
    for y in [frozen.forward(constant.clone()).unwrap(), constant.clone(), constant.clone() * 2.0] {
        let error = backward_with(y, ones()).err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains("y") && e.contains("tracks gradients")), "{error:?}");
    }
    let leaf = constant.require_grad();
    let gradients = backward_with(leaf.clone(), ones()).unwrap();
    assert_eq!(floats(leaf.grad(&gradients).unwrap()), vec![1.0; token_counts()[0] * H]);
}

fn a_given_gradient_is_a_products() {
    given::<Flex>();
}

tests! {
    fn();
    gradients_are_those_of_finite_differences,
    a_given_gradient_is_a_products,
    biases_train_beside_frozen_weights,
    a_given_gradient_of_a_constant_is_a_typed_error,
}
