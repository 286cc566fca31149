//! Experts' gradients that the layer's kernels add up in place, in f32 beside parameters of 16 bits, and AdamW with main
//! weights over burn's modules: against burn's own gradients, against candle's adapter, over ranks, and where a backward
//! fails.

pub mod backward;
pub mod optimizer;

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::{AdamW, AdamWParam, CoreDevice, DeviceGroup, ExpertParallelMoE, GradientReducer, MoeBackend};
use moebius::cpu::Cpu;
use moebius::layer::ParamKind;
use moebius::optim::{AdamWOptions, GroupOptions, LossScaling};
use moebius::{CheckpointError, Error, MoeConfig};

use super::reducer::{Doing, Model, Place, places, tokens};
use super::support::*;
use crate::trials::tests;

const MICROBATCHES: usize = 3;

/// Parameters by path, with their ids.
type Values = Vec<(String, ParamId, Vec<f32>)>;

/// A module with parameters of another type.
pub fn cast<S: Subject, M: Module<Autodiff<S>>>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl<S: Subject> ModuleMapper<Autodiff<S>> for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Autodiff<S>, D>>) -> Param<Tensor<Autodiff<S>, D>> {
            let tracked = param.is_require_grad();
            let value = param.val().detach().cast(self.0).detach().set_require_grad(tracked);
            Param::initialized(param.id, value)
        }
    }
    module.map(&mut Cast(dtype))
}

/// Values of a module's gradients by path, with their types.
pub type Found = Vec<(String, DType, Vec<f32>)>;

struct Read<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: Found,
}

impl<S: Subject> ModuleVisitor<Autodiff<S>> for Read<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<S>, D>>) {
        if let Some(gradient) = self.gradients.get::<S, D>(param.id) {
            assert_eq!(gradient.dims(), param.dims());
            self.found.push((self.path.join("."), gradient.dtype(), floats(gradient)));
        }
    }
}

pub fn read<S: Subject>(moe: &impl Module<Autodiff<S>>, gradients: &GradientsParams) -> Found {
    let mut read = Read { gradients, path: Vec::new(), found: Vec::new() };
    moe.visit(&mut read);
    read.found
}

fn loss<S: Subject>(moe: &ExpertParallelMoE<Autodiff<S>>, microbatch: usize, dtype: DType) -> Tensor<Autodiff<S>, 1> {
    let (x, c) = inputs(microbatch % 2);
    let dims = [token_counts()[microbatch % 2], H];
    let scale = 1.0 + microbatch as f32;
    let x = tensor::<Autodiff<S>, 2>(x, dims).mul_scalar(scale).cast(dtype);
    let c = tensor::<Autodiff<S>, 2>(c, dims).cast(dtype);
    (moe.forward(x).unwrap() * c).cast(DType::F32).sum()
}

/// The core's device of a group.
fn core<S: Subject + MoeBackend<Native = S>>(group: &DeviceGroup) -> CoreDevice<S> {
    group.on::<CoreDevice<S>>().expect("a group of the back end's").lock().device().clone()
}

/// The tests by name.
pub fn cases() -> Vec<(&'static str, fn())> {
    [backward::cases(), optimizer::cases()].concat()
}
