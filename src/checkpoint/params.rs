//! One rank's parameters of a block by kind.

use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::layer::{ParamKind, ParamViews, PerParam};
use crate::tensor::Tensor;

use super::BlockParams;

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
