//! The module's gradients against central finite differences of its forward in f64, and from a given gradient.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::backward_with;

use super::support::*;
use crate::trials::tests;

/// Step of the differences. The loss is of order 10, so that 10 · 2⁻⁵² / 1e-6 ≈ 2e-9 is what rounding makes of them, and
/// its third derivative times 1e-12 what is cut off.
const STEP: f64 = 1e-6;

/// A direction in a parameter's space, the same on all ranks for what all hold.
fn direction(path: &str, rank: usize, count: usize) -> Vec<f32> {
    let own = if path.starts_with("experts") { rank as u64 + 1 } else { 0 };
    let seed = path.bytes().fold(own, |seed, byte| seed.wrapping_mul(257).wrapping_add(u64::from(byte)));
    values(seed, count, 1.0)
}

fn direction_of_x(rank: usize) -> Vec<f32> {
    values(400 + rank as u64, TOKENS[rank] * H, 1.0)
}

/// Moves every parameter along its direction, in f64.
struct Move {
    path: Vec<String>,
    rank: usize,
    step: f64,
}

impl<B: Backend> ModuleMapper<B> for Move {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (dims, data) = (param.dims(), param.val().into_data());
        let along = direction(&self.path.join("."), self.rank, data.num_elements());
        let moved =
            data.iter::<f64>().zip(along).map(|(v, along)| v + self.step * f64::from(along)).collect::<Vec<_>>();
        let device = param.device();
        Param::initialized(param.id, Tensor::from_data(TensorData::new(moved, dims), (&device, DType::F64)))
    }
}

/// Loss of all ranks, moved by so much.
fn loss(ranks: usize, step: f64) -> f64 {
    let config = config();
    let losses = on_ranks(ranks, LONG, |rank, group| {
        let model = module::<Flex>(&config, &group).map(&mut Move { path: vec![], rank, step });
        let double = |values: Vec<f32>, along: Option<Vec<f32>>| {
            let along = along.unwrap_or_else(|| vec![0.0; values.len()]);
            let moved = values.iter().zip(along).map(|(v, along)| f64::from(*v) + step * f64::from(along));
            let data = TensorData::new(moved.collect::<Vec<f64>>(), [TOKENS[rank], H]);
            Tensor::<Flex, 2>::from_data(data, (&device(), DType::F64))
        };
        let (x, c) = inputs(rank);
        let out = model.forward_full(double(x, Some(direction_of_x(rank))), None).unwrap();
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
    sum: Slope,
}

/// A derivative along a direction, and the squares of the gradient's norm and of the direction's.
#[derive(Default, Clone, Copy)]
struct Slope {
    along: f64,
    gradient: f64,
    direction: f64,
}

impl Slope {
    fn add(&mut self, gradient: &[f32], direction: &[f32]) {
        for (g, d) in gradient.iter().zip(direction) {
            let (g, d) = (f64::from(*g), f64::from(*d));
            self.along += g * d;
            self.gradient += g * g;
            self.direction += d * d;
        }
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
        self.sum.add(&gradient, &direction(&self.path.join("."), self.rank, gradient.len()));
    }
}

/// Of the gradients of a back end in f32, the derivative of all ranks' loss along one direction in all parameters and
/// tokens.
pub fn finite_differences<S: Subject>(ranks: usize) {
    let config = config();
    let slopes = S::on_ranks(ranks, |rank, group| {
        let model = module::<Autodiff<S>>(&config, &group);
        let (x, c) = inputs(rank);
        let x = tensor::<Autodiff<S>, 2>(x, [TOKENS[rank], H]).require_grad();
        let out = model.forward_full(x.clone(), None).unwrap();
        let gradients = ((out.y * tensor(c, [TOKENS[rank], H])).sum() + out.aux).backward();
        let mut sum = Slope::default();
        sum.add(&floats(x.grad(&gradients).unwrap()), &direction_of_x(rank));
        let mut slopes = Slopes::<Autodiff<S>> { gradients: &gradients, path: vec![], rank, sum };
        model.visit(&mut slopes);
        slopes.sum
    });
    let total = |of: fn(&Slope) -> f64| slopes.iter().map(of).sum::<f64>();
    let (found, norms) = (total(|s| s.along), (total(|s| s.gradient) * total(|s| s.direction)).sqrt());
    let expected = (loss(ranks, STEP) - loss(ranks, -STEP)) / (2.0 * STEP);
    // Gradients in f32 are off by `BACKWARD` of their norm: by so much times the direction's along it.
    let error = (found - expected).abs();
    assert!(error <= BACKWARD * norms, "{ranks} ranks: {found} for {expected}, off by {error:e} of {norms:e}");
    assert!(expected.abs() > 1e-3 * norms, "{expected} beside {norms}");
}

fn gradients_are_those_of_finite_differences() {
    for ranks in RANKS {
        finite_differences::<Flex>(ranks);
    }
}

pub fn given<S: Subject>() {
    let model = module::<Autodiff<S>>(&config(), S::alone());
    let (x, c) = inputs(0);
    let dims = [TOKENS[0], H];
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

fn a_given_gradient_is_a_products() {
    given::<Flex>();
}

tests! {
    fn();
    gradients_are_those_of_finite_differences,
    a_given_gradient_is_a_products,
}
