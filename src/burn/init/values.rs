//! Where a module's parameters come from, and the module that they make up.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorData, TensorPrimitive};

use crate::adapter::HostTensor;
use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::layer::{Layer, ParamKind, PerParam};
use crate::tensor;

use crate::burn::backend::{core_dtype, float};
use crate::burn::config::ExpertParallelMoEConfig;
use crate::burn::group::DeviceGroup;
use crate::burn::module::{ExpertParallelMoE, Experts, Router, SharedExpert};

/// Gives a parameter of known sizes.
pub(super) trait ParamValues<B: Backend> {
    /// The call that asks, for errors.
    fn call(&self) -> &'static str;

    fn load(&mut self, kind: ParamKind, dims: &[usize]) -> Result<FloatTensor<B>>;
}

pub(super) fn assemble<B: Backend>(
    source: &mut impl ParamValues<B>,
    layer: Layer,
    group: &DeviceGroup,
) -> Result<ExpertParallelMoE<B>> {
    let mut params =
        ParamLoader { source, config: layer.config(), local: group.local_experts(), backend: Default::default() };
    let router = Router {
        weight: params.required(ParamKind::Router)?,
        bias: params.get(ParamKind::RouterBias)?,
        selection_bias: params.get(ParamKind::SelectionBias)?,
    };
    let experts = Experts {
        up: params.required(ParamKind::Up)?,
        up_bias: params.get(ParamKind::UpBias)?,
        down: params.required(ParamKind::Down)?,
        down_bias: params.get(ParamKind::DownBias)?,
    };
    let shared = match layer.config().shared {
        None => None,
        Some(_) => Some(SharedExpert {
            up: params.required(ParamKind::SharedUp)?,
            up_bias: params.get(ParamKind::SharedUpBias)?,
            down: params.required(ParamKind::SharedDown)?,
            down_bias: params.get(ParamKind::SharedDownBias)?,
            gate: params.get(ParamKind::SharedGate)?,
        }),
    };
    let (layer, group) = (Arc::new(layer), group.clone());
    let (training, calls) = (Arc::default(), Arc::default());
    Ok(ExpertParallelMoE { router, experts, shared, layer, group, sharded: None, quantized: None, training, calls })
}

/// Parameters as the module holds them.
struct ParamLoader<'a, B, S> {
    source: &'a mut S,
    config: &'a MoeConfig,
    local: usize,
    backend: std::marker::PhantomData<B>,
}

impl<B: Backend, S: ParamValues<B>> ParamLoader<'_, B, S> {
    fn get<const D: usize>(&mut self, kind: ParamKind) -> Result<Option<Param<Tensor<B, D>>>> {
        let Some(dims) = kind.dims(self.config, self.local) else { return Ok(None) };
        let tensor = Tensor::from_primitive(TensorPrimitive::Float(self.source.load(kind, &dims)?));
        Ok(Some(match kind {
            // Has no gradient, so optimizers shall not see it.
            ParamKind::SelectionBias => Param::initialized(ParamId::new(), tensor),
            _ => Param::from_tensor(tensor),
        }))
    }

    fn required<const D: usize>(&mut self, kind: ParamKind) -> Result<Param<Tensor<B, D>>> {
        let found = self.get(kind)?;
        let call = self.source.call();
        found.ok_or_else(|| Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none"))
    }
}

/// Parameters of a block.
pub(super) struct BlockValues<'a, B: Backend> {
    pub(super) call: &'static str,
    pub(super) params: PerParam<Option<tensor::Tensor<Cpu>>>,
    pub(super) device: &'a B::Device,
}

impl<B: Backend> ParamValues<B> for BlockValues<'_, B> {
    fn call(&self) -> &'static str {
        self.call
    }

    fn load(&mut self, kind: ParamKind, dims: &[usize]) -> Result<FloatTensor<B>> {
        let Some(tensor) = self.params[kind].take() else {
            return Err(Error::invalid(self.call, format!("tensor {}", kind.name()), format!("{dims:?}"), "none"));
        };
        float::<B>(tensor, self.device)
    }
}

/// Weights that rank 0 draws and sends to the others; biases of zero.
pub(super) struct InitialValues<'a, B: Backend> {
    pub(super) call: &'static str,
    pub(super) config: &'a ExpertParallelMoEConfig,
    pub(super) number: u32,
    pub(super) group: &'a DeviceGroup,
    pub(super) device: &'a B::Device,
}

impl<B: Backend> ParamValues<B> for InitialValues<'_, B> {
    fn call(&self) -> &'static str {
        self.call
    }

    fn load(&mut self, kind: ParamKind, dims: &[usize]) -> Result<FloatTensor<B>> {
        let tensor = match *dims {
            [rows, columns] if kind.is_replicated() => self.matrix([rows, columns])?.into_primitive(),
            [local, rows, columns] => {
                let first = self.group.rank() * local;
                let mut own = Vec::with_capacity(local);
                // One expert travels at a time, so that no rank holds them all.
                for expert in 0..self.config.moe.router.num_experts {
                    let weight = self.matrix([rows, columns])?;
                    if (first..first + local).contains(&expert) {
                        own.push(weight);
                    }
                }
                Tensor::stack::<3>(own, 0).into_primitive()
            }
            _ => Tensor::<B, 1>::zeros([dims.iter().product::<usize>()], self.device).into_primitive(),
        };
        Ok(B::float_reshape(tensor.tensor(), Shape::from(dims.to_vec())))
    }
}

impl<B: Backend> InitialValues<'_, B> {
    fn matrix(&self, [rows, columns]: [usize; 2]) -> Result<Tensor<B, 2>> {
        let weight = match self.group.rank() {
            0 => {
                let initializer = &self.config.initializer;
                initializer.init_with::<B, 2, _>([rows, columns], Some(columns), Some(rows), self.device).into_value()
            }
            _ => Tensor::zeros([rows, columns], self.device),
        };
        if self.group.ranks() == 1 {
            // burn's initializers track what they draw; a parameter must be a leaf.
            return Ok(weight.set_require_grad(false));
        }
        let mut data: TensorData = weight.into_data();
        let dtype = core_dtype(self.call, "weight", data.dtype)?;
        let on = HostTensor { bytes: &mut data.bytes[..], dtype, dims: &[rows, columns] };
        on.broadcast(self.group.erased(), self.number)?;
        let dtype = data.dtype;
        Ok(Tensor::from_data(data, (self.device, dtype)))
    }
}
