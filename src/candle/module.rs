//! The module itself.

use std::path::Path;

use candle_core::{Device, Result, Tensor, Var};

use crate::checkpoint::{Block, Checkpoint, LoadOptions};
use crate::cpu::Cpu;
use crate::layer::{Layer, Mode, Role};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::group::DeviceGroup;
use super::host::into_candle;
use super::run::Call;

/// A Mixture-of-Experts layer over the ranks of a group, as a candle module. See the [module](super) for use.
#[derive(Debug, Clone)]
pub struct ExpertParallelMoE {
    layer: Layer,
    group: DeviceGroup,
    params: Vec<(Role, Tensor)>,
}

/// What a forward gives.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// Same shape and dtype as the input.
    pub y: Tensor,
    /// Auxiliary losses' sum, a scalar (f64 for f64 tokens, else f32) that carries gradients: add it to the loss.
    pub aux: Tensor,
    /// Router logits `[T, E]`, detached.
    pub logits: Tensor,
    /// Chosen experts `[T, K]`, I32, detached.
    pub ids: Tensor,
    /// Routing weights `[T, K]`, detached.
    pub weights: Tensor,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

impl ExpertParallelMoE {
    /// From variables named as [`Role::name`] says (`router.weight`, `experts.up`, …), with this rank's experts only.
    /// Missing ones are initialised: weights uniform in ±1/√fan-in, biases zero.
    ///
    /// Over several ranks this is a collective: the parameters that all ranks hold (router, shared expert) become
    /// rank 0's, so that every rank starts from the same router.
    ///
    /// # Errors
    /// A variable of another shape; a collective's error.
    pub fn new(layer: Layer, group: impl Into<DeviceGroup>, vb: candle_nn::VarBuilder<'_>) -> Result<Self> {
        let group = group.into();
        let params = Role::ALL
            .into_iter()
            .filter_map(|role| {
                let dims = role.dims(layer.config(), group.local_experts())?;
                let init = match role.fan_in(layer.config()) {
                    Some(n) => {
                        let bound = 1.0 / (n as f64).sqrt();
                        candle_nn::Init::Uniform { lo: -bound, up: bound }
                    }
                    None => candle_nn::Init::Const(0.0),
                };
                Some(vb.get_with_hints(dims, role.name(), init).map(|t| (role, t)))
            })
            .collect::<Result<_>>();
        let params = params.inspect_err(|e| {
            // The other ranks are in the collectives below: they are told, and the group stays usable.
            group.member().refuse(&layer, &e.to_string());
        })?;
        let moe = Self { layer, group, params };
        if moe.group.ranks() > 1 {
            // All ranks take part, whatever their parameters are.
            for (_, t) in moe.params.iter().filter(|(role, _)| role.is_replicated()) {
                moe.group.member().replicate(&moe.layer, t)?;
            }
        }
        Ok(moe)
    }

    /// From a loaded block. `number` names the layer in tags and errors. Tensors become variables if `trainable`
    /// (the selection bias does not: it has no gradient).
    ///
    /// # Errors
    /// A configuration that does not hold together.
    pub fn from_block(block: Block, number: u32, group: impl Into<DeviceGroup>, trainable: bool) -> Result<Self> {
        let (layer, group) = (Layer::new(block.config, number)?, group.into());
        let of = |(role, t): (Role, crate::Tensor<Cpu>)| {
            let dims = t.dims().to_vec();
            let t = into_candle(t, &dims, &Device::Cpu)?.to_device(group.device())?;
            match trainable && role != Role::SelectionBias {
                true => Ok((role, Var::from_tensor(&t)?.into_inner())),
                false => Ok((role, t)),
            }
        };
        let params = block.params.into_roles().map(of).collect::<Result<_>>()?;
        Ok(Self { layer, group, params })
    }

    /// From layer `layer` of a checkpoint folder: reads this rank's experts only.
    ///
    /// # Errors
    /// What [`Checkpoint::open`] and [`Checkpoint::load_block`] find.
    pub fn from_checkpoint(
        dir: impl AsRef<Path>,
        layer: usize,
        group: impl Into<DeviceGroup>,
        trainable: bool,
    ) -> Result<Self> {
        let group = group.into();
        let options = LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: None };
        let block = Checkpoint::open(dir).and_then(|c| c.load_block(layer, options))?;
        Self::from_block(block, layer as u32, group, trainable)
    }

    /// The layer with other dispatch options, auxiliary losses or the like.
    pub fn with_layer(mut self, layer: Layer) -> Self {
        self.layer = layer;
        self
    }

    /// The layer.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The group.
    pub fn group(&self) -> &DeviceGroup {
        &self.group
    }

    /// Parameters with their names.
    pub fn params(&self) -> Vec<(&'static str, &Tensor)> {
        self.params.iter().map(|(role, t)| (role.name(), t)).collect()
    }

    /// One parameter.
    pub fn param(&self, role: Role) -> Option<&Tensor> {
        self.params.iter().find(|(r, _)| *r == role).map(|(_, t)| t)
    }

    /// Trainable parameters, for an optimiser.
    pub fn vars(&self) -> Vec<Var> {
        let trainable = self.params.iter().filter(|(role, t)| t.is_variable() && *role != Role::SelectionBias);
        trainable.filter_map(|(_, t)| Var::from_tensor(t).ok()).collect()
    }

    /// Forward over `[T, H]` or `[…, H]`. `mode.backward` is set here, from whether x or a parameter tracks gradients;
    /// where none does, nothing is kept.
    ///
    /// # Errors
    /// What [`Layer::forward`] finds, with its text.
    pub fn forward_full(&self, x: &Tensor, mode: Mode) -> Result<MoeOutput> {
        let hidden = self.layer.config().hidden;
        let flat = match x.dims() {
            [.., h] if *h == hidden => x.reshape((x.elem_count() / hidden, hidden))?.contiguous()?,
            // The layer refuses it, on every rank.
            _ => x.contiguous()?,
        };
        let tracks = x.track_op() || self.params.iter().any(|(_, t)| t.track_op());
        let call = Call { layer: &self.layer, params: &self.params, flat: &flat, shape: x.shape() };
        self.group.member().forward(&call, Mode { backward: tracks, ..mode })
    }
}

impl candle_core::Module for ExpertParallelMoE {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_full(x, Mode::default())?.y)
    }
}
