//! A block, and one rank's parameters of it by kind.

use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::layer::{ParamKind, ParamViews, PerParam};
use crate::tensor::Tensor;

/// One rank's parameters of one block; fields as in [`Params`](crate::layer::Params).
#[derive(Debug)]
pub struct BlockParams {
    /// `[E, H]`.
    pub router: Tensor<Cpu>,
    /// `[E]`, added to the logits.
    pub router_bias: Option<Tensor<Cpu>>,
    /// `[E]`, added to the scores for choosing only.
    pub selection_bias: Option<Tensor<Cpu>>,
    /// `[L, G·I, H]`, gate rows first.
    pub up: Tensor<Cpu>,
    /// `[L, G·I]`.
    pub up_bias: Option<Tensor<Cpu>>,
    /// `[L, H, I]`.
    pub down: Tensor<Cpu>,
    /// `[L, H]`.
    pub down_bias: Option<Tensor<Cpu>>,
    /// `[G·S, H]`, S the shared expert's inner size.
    pub shared_up: Option<Tensor<Cpu>>,
    /// `[H, S]`.
    pub shared_down: Option<Tensor<Cpu>>,
    /// `[1, H]`.
    pub shared_gate: Option<Tensor<Cpu>>,
}

/// A block's parameters and its layer, as [`Checkpoint::save`](super::Checkpoint::save) takes them:
/// [`BlockParams::at_layer`].
#[derive(Debug, Clone, Copy)]
pub struct LayerBlock<'a> {
    /// The layer.
    pub layer: usize,
    /// Its parameters, or a rank's share of them.
    pub params: &'a BlockParams,
}

impl BlockParams {
    /// As the parameters of a layer, to be saved.
    pub fn at_layer(&self, layer: usize) -> LayerBlock<'_> {
        LayerBlock { layer, params: self }
    }
}

/// One rank's share of one Mixture-of-Experts block.
#[derive(Debug)]
pub struct Block {
    /// Sizes and formulas, of all ranks.
    pub config: MoeConfig,
    /// This rank's parameters.
    pub params: BlockParams,
}

impl Block {
    /// Refuses a block whose parameters are not those of its configuration, with `local` experts on this rank.
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Invalid`] with the name of a parameter that is missing.
    pub fn check(&self, call: &'static str, local: usize) -> Result<()> {
        self.params.check(call, &self.config, local)?;
        let absent = |kind: &ParamKind| kind.dims(&self.config, local).is_some() && self.params.get(*kind).is_none();
        match ParamKind::ALL.into_iter().find(absent) {
            None => Ok(()),
            Some(kind) => Err(Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none")),
        }
    }
}

impl BlockParams {
    /// Parameters from their tensors; errors name `call`.
    pub(crate) fn of(call: &'static str, tensors: PerParam<Option<Tensor<Cpu>>>) -> Result<Self> {
        let required = |tensor: Option<Tensor<Cpu>>, name: &str| {
            tensor.ok_or_else(|| Error::invalid(call, name, "a tensor", "nothing"))
        };
        Ok(Self {
            router: required(tensors.router, "router")?,
            router_bias: tensors.router_bias,
            selection_bias: tensors.selection_bias,
            up: required(tensors.up, "up")?,
            up_bias: tensors.up_bias,
            down: required(tensors.down, "down")?,
            down_bias: tensors.down_bias,
            shared_up: tensors.shared_up,
            shared_down: tensors.shared_down,
            shared_gate: tensors.shared_gate,
        })
    }

    /// The parameters that are there, by kind.
    pub fn per_param(&self) -> PerParam<Option<&Tensor<Cpu>>> {
        PerParam {
            router: Some(&self.router),
            router_bias: self.router_bias.as_ref(),
            selection_bias: self.selection_bias.as_ref(),
            up: Some(&self.up),
            up_bias: self.up_bias.as_ref(),
            down: Some(&self.down),
            down_bias: self.down_bias.as_ref(),
            shared_up: self.shared_up.as_ref(),
            shared_down: self.shared_down.as_ref(),
            shared_gate: self.shared_gate.as_ref(),
        }
    }

    /// The same by value.
    pub fn into_per_param(self) -> PerParam<Option<Tensor<Cpu>>> {
        PerParam {
            router: Some(self.router),
            router_bias: self.router_bias,
            selection_bias: self.selection_bias,
            up: Some(self.up),
            up_bias: self.up_bias,
            down: Some(self.down),
            down_bias: self.down_bias,
            shared_up: self.shared_up,
            shared_down: self.shared_down,
            shared_gate: self.shared_gate,
        }
    }

    /// One parameter.
    pub fn get(&self, kind: ParamKind) -> Option<&Tensor<Cpu>> {
        self.per_param()[kind]
    }

    /// The parameters that are there, one behind the other.
    pub fn into_params(self) -> impl Iterator<Item = (ParamKind, Tensor<Cpu>)> {
        self.into_per_param().into_present()
    }

    /// Views for a layer.
    ///
    /// # Errors
    /// None.
    pub fn views(&self) -> Result<ParamViews<'_, Cpu>> {
        ParamViews::collect(|kind| Ok(self.get(kind).map(Tensor::view)))
    }
}

impl BlockParams {
    /// Refuses tensors that the configuration has not, with `local` experts on this rank, or has otherwise. Absent ones
    /// may be.
    pub(super) fn check(&self, call: &'static str, config: &MoeConfig, local: usize) -> Result<()> {
        for kind in ParamKind::ALL {
            let (name, Some(tensor)) = (kind.name(), self.get(kind)) else { continue };
            let Some(dims) = kind.dims(config, local) else {
                return Err(Error::invalid(call, name, "none, by the configuration", format!("{:?}", tensor.dims())));
            };
            Error::check_shape(call, name, &dims, tensor.dims())?;
            if !tensor.dtype().is_float() {
                return Err(Error::invalid(call, format!("tensor {name}"), "a floating-point type", tensor.dtype()));
            }
        }
        Ok(())
    }
}
