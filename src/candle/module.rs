//! The module itself.

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};

use crate::checkpoint::{Block, BlockParams, Checkpoint, LoadOptions, assemble};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::etp::{Chain, Payload, ShardDevice, WeightId};
use crate::layer::{AuxValue, Layer, Mode, ParamKind};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::group::{DeviceGroup, prepare, weights};
use super::host::{Host, copy_of, into_candle, location, with_views};
use super::run::Call;
use super::sharded::Sharded;

/// A Mixture-of-Experts layer over the ranks of a group, as a candle module. See the [module](super) for use.
#[derive(Debug, Clone)]
pub struct ExpertParallelMoE {
    layer: Layer,
    group: DeviceGroup,
    params: Parameters,
    /// The experts' chain, where their parameters are shards.
    sharded: Option<Sharded>,
}

/// Those that the configuration has, in the order of [`ParamKind::ALL`].
type Parameters = Vec<(ParamKind, Tensor)>;

/// What a forward gives.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// Same shape and dtype as the input.
    pub y: Tensor,
    /// Auxiliary losses' sum, a scalar (f64 for f64 tokens, else f32) that carries gradients: add it to the loss.
    pub aux: Tensor,
    /// The losses apart, for the host.
    pub losses: Lazy<AuxValue>,
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
    /// From variables named as [`ParamKind::name`] says (`router.weight`, `experts.up`, …), with this rank's experts only.
    /// Missing ones are initialized: weights uniform in ±1/√fan-in, biases zero.
    ///
    /// Over several ranks this is a collective: the parameters that all ranks hold (router, shared expert) become
    /// rank 0's, so that every rank starts from the same router.
    ///
    /// # Errors
    /// Another number of experts than the group's; a variable of another shape; a collective's error.
    pub fn new(layer: Layer, group: impl Into<DeviceGroup>, vb: candle_nn::VarBuilder<'_>) -> Result<Self> {
        Self::build::<Cpu>((layer, group.into()), vb, None)
    }

    /// [`new`](Self::new) with `experts.up` and `experts.down` sharded over the ranks of `chain`, to which they are
    /// added: their variables are this rank's shards, `[S, C]` as [`Chain::shards`] cuts `[L, G·I, H]` and
    /// `[L, H, I]`; the [`Payload`] says how they travel. A forward runs in a [`Phase::Forward`](crate::etp::Phase) of the chain, a backward in a
    /// [`Phase::Backward`](crate::etp::Phase); the shards' gradients are not among backward's, but come with
    /// [`finish_sharded`](super::finish_sharded). A pass is one forward, or one backward, of the whole model: the chain
    /// has learned the order of the layers in the first.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use moebius::candle::{EpGroup, ExpertParallelMoE, finish_sharded};
    /// use moebius::comm::Solo;
    /// use moebius::cpu::Cpu;
    /// use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase};
    /// use moebius::layer::{Layer, Mode};
    /// use moebius::{MoeConfig, ep::GroupConfig};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // One rank here; over several, communicators of the ranks that hold the same experts.
    /// let comms = Comms::<Cpu> { gather: Box::new(Solo::new(Cpu::new())), reduce: Box::new(Solo::new(Cpu::new())) };
    /// let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let layer = Layer::new(MoeConfig::new(64, 32, 8, 2), 0)?;
    /// let group = EpGroup::single(GroupConfig::new(8, 4096))?;
    /// let moe = ExpertParallelMoE::sharded(layer, group, vb, (&chain, Payload::Plain))?;
    /// let mut adam = AdamW::new(moe.vars(), ParamsAdamW::default())?;
    /// for _microbatch_and_step in 0..2 {
    ///     let x = Tensor::randn(0f32, 1., (5, 64), &Device::Cpu)?;
    ///     chain.begin(Phase::Forward)?;
    ///     let loss = moe.forward_full(&x, Mode::default())?.y.sqr()?.mean_all()?;
    ///     chain.end()?;
    ///     chain.begin(Phase::Backward)?;
    ///     let mut gradients = loss.backward()?;
    ///     chain.end()?;
    ///     finish_sharded(&chain, None, &moe.shards(), &mut gradients)?;
    ///     adam.step(&gradients)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); a group on another device than the chain's; a chain that is in use. After an error of a
    /// pass every rank of the chain calls [`Chain::recover`].
    pub fn sharded<D: Host + ShardDevice>(
        layer: Layer,
        group: impl Into<DeviceGroup>,
        vb: candle_nn::VarBuilder<'_>,
        (chain, payload): (&Arc<Chain<D>>, Payload),
    ) -> Result<Self> {
        Self::build((layer, group.into()), vb, Some((chain, payload)))
    }

    fn build<D: Host + ShardDevice>(
        (layer, group): (Layer, DeviceGroup),
        vb: candle_nn::VarBuilder<'_>,
        chain: Option<(&Arc<Chain<D>>, Payload)>,
    ) -> Result<Self> {
        let (params, sharded) = variables((&layer, &group), vb, chain).inspect_err(|e| {
            // The other ranks are in the collectives below: they are told, and the group stays usable.
            group.member().refuse(weights(&layer), &e.to_string());
        })?;
        let moe = Self { layer, group, params, sharded };
        if moe.group.ranks() > 1 {
            // All ranks take part, whatever their parameters are.
            for (_, t) in moe.params.iter().filter(|(role, _)| role.is_replicated()) {
                moe.group.member().replicate(&moe.layer, t)?;
            }
        }
        Ok(moe)
    }

    /// From a loaded block. `number` names the layer in tags and errors. Tensors become variables if `trainable`; the
    /// selection bias then is one for [`update_selection_bias`](Self::update_selection_bias) alone, as it has no gradient.
    ///
    /// # Errors
    /// A configuration that does not hold together; another number of experts than the group's; missing, extra or
    /// mis-shaped parameters.
    pub fn from_block(block: Block, number: u32, group: impl Into<DeviceGroup>, trainable: bool) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::from_block";
        let (layer, group) = (Layer::new(block.config.clone(), number)?, group.into());
        group.member().check_experts(CALL, &layer)?;
        block.check(CALL, group.local_experts())?;
        let of = |(role, t): (ParamKind, crate::Tensor<Cpu>)| {
            let dims = t.dims().to_vec();
            let t = into_candle(t, &dims, &Device::Cpu)?.to_device(group.device())?;
            Ok((role, if trainable { Var::from_tensor(&t)?.into_inner() } else { t }))
        };
        let params = block.params.into_params().map(of).collect::<Result<_>>()?;
        Ok(Self { layer, group, params, sharded: None })
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

    /// Parameters with their names; experts that are sharded as this rank's shards.
    pub fn params(&self) -> Vec<(&'static str, &Tensor)> {
        self.params.iter().map(|(role, t)| (role.name(), t)).collect()
    }

    /// One parameter.
    pub fn param(&self, role: ParamKind) -> Option<&Tensor> {
        self.params.iter().find(|(r, _)| *r == role).map(|(_, t)| t)
    }

    /// Trainable parameters, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.trainable().filter(|t| t.is_variable()).filter_map(|t| Var::from_tensor(t).ok()).collect()
    }

    /// Parameters that gradients are tracked of. The selection bias has none.
    fn trainable(&self) -> impl Iterator<Item = &Tensor> {
        self.params.iter().filter(|(role, t)| t.track_op() && *role != ParamKind::SelectionBias).map(|(_, t)| t)
    }

    /// The same module without gradients, for evaluation: it shares the parameters, sees what an optimizer makes of
    /// them, and keeps nothing for a backward. Where there are several ranks, all of them evaluate, or none.
    pub fn detached(&self) -> Self {
        let params = self.params.iter().map(|(role, t)| (*role, t.detach())).collect();
        Self { params, ..self.clone() }
    }

    /// Moves the selection bias towards an even load, in place:
    /// [`update_selection_bias`](crate::balance::update_selection_bias) with the load of all ranks
    /// ([`MoeOutput::load`]) and a step `u`. Call it after each training step, on every rank.
    ///
    /// # Errors
    /// A router without a selection bias, or one that is no variable; what the formula refuses.
    pub fn update_selection_bias(&self, load: &Load, u: f32) -> Result<()> {
        const CALL: &str = "ExpertParallelMoE::update_selection_bias";
        let named = |expected, found| Error::invalid(CALL, ParamKind::SelectionBias.name(), expected, found);
        let Some(bias) = self.param(ParamKind::SelectionBias) else { return Err(named("a tensor", "none").into()) };
        if !bias.is_variable() {
            return Err(named("a variable", "a constant").into());
        }
        let mut values = bias.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
        crate::balance::update_selection_bias(&mut values, &load.tokens_per_expert, u)?;
        let values = Tensor::from_vec(values, bias.dims(), bias.device())?.to_dtype(bias.dtype())?;
        Var::from_tensor(bias)?.set(&values)
    }

    /// This rank's parameters on the host, as [`Checkpoint::save`] takes them; over several ranks,
    /// [`gather_blocks`](crate::checkpoint::gather_blocks) joins all ranks'.
    ///
    /// # Errors
    /// Experts that are shards; a device's error.
    pub fn to_block(&self) -> Result<Block> {
        if self.sharded.is_some() {
            return Err(Error::invalid("ExpertParallelMoE::to_block", "experts", "whole weights", "shards").into());
        }
        Ok(Block { config: self.layer.config().clone(), params: on_host(&self.params)? })
    }

    /// The variables that are shards, with their weights in the chain, as [`finish_sharded`](super::finish_sharded)
    /// takes them; none where experts are whole.
    pub fn shards(&self) -> Vec<(WeightId, Var)> {
        let Some(sharded) = &self.sharded else { return Vec::new() };
        let shard = |(role, id)| {
            let t = self.param(role).filter(|t| t.is_variable())?;
            Some((id, Var::from_tensor(t).ok()?))
        };
        [ParamKind::Up, ParamKind::Down].into_iter().zip(sharded.ids).filter_map(shard).collect()
    }

    /// Meets the other ranks' forward of this layer as a failure: for a model that fails before it, where they would wait.
    /// They get the reason at once, and the group stays usable.
    pub fn refuse_forward(&self, reason: &str) {
        self.group.member().refuse(prepare(&self.layer), reason);
    }

    /// Forward over `[T, H]` or `[…, H]`. `mode.backward` is set here, from whether x or a parameter tracks gradients;
    /// where none does, nothing is kept.
    ///
    /// # Errors
    /// What [`Layer::forward`] finds, with its text.
    pub fn forward_full(&self, x: &Tensor, mode: Mode) -> Result<MoeOutput> {
        let hidden = self.layer.config().hidden;
        let flat = match x.dims() {
            [.., h] if *h == hidden => x.reshape((x.elem_count() / hidden, hidden)).and_then(|x| x.contiguous()),
            // The layer refuses it, on every rank.
            _ => x.contiguous(),
        };
        let flat = flat.inspect_err(|e| self.refuse_forward(&e.to_string()))?;
        let tracks = x.track_op() || self.trainable().next().is_some();
        let sharded = self.sharded.as_ref();
        let call = Call { layer: &self.layer, params: &self.params, sharded, flat: &flat, shape: x.shape() };
        self.group.member().forward(&call, Mode { backward: tracks, ..mode })
    }
}

impl candle_core::Module for ExpertParallelMoE {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_full(x, Mode::default())?.y)
    }
}

/// Variables of a module, and their place in a chain if there is one.
fn variables<D: Host + ShardDevice>(
    (layer, group): (&Layer, &DeviceGroup),
    vb: candle_nn::VarBuilder<'_>,
    chain: Option<(&Arc<Chain<D>>, Payload)>,
) -> Result<(Parameters, Option<Sharded>)> {
    group.member().check_experts("ExpertParallelMoE::new", layer)?;
    let (config, local) = (layer.config(), group.local_experts());
    let mut params = Vec::new();
    for role in ParamKind::ALL {
        let Some(mut dims) = role.dims(config, local) else { continue };
        if let Some((chain, _)) = chain.filter(|_| matches!(role, ParamKind::Up | ParamKind::Down)) {
            dims = chain.shards(&dims)?.shard_dims().to_vec();
        }
        let init = match role.fan_in(config) {
            Some(n) => {
                let bound = 1.0 / (n as f64).sqrt();
                candle_nn::Init::Uniform { lo: -bound, up: bound }
            }
            None => candle_nn::Init::Const(0.0),
        };
        params.push((role, vb.get_with_hints(dims, role.name(), init)?));
    }
    let Some(chain) = chain else { return Ok((params, None)) };
    if !chain.0.device().is(group.device()) {
        let found = location(group.device());
        return Err(Error::invalid("ExpertParallelMoE::sharded", "group", "the chain's device", found).into());
    }
    let shard = |role| params.iter().find(|(r, _)| *r == role).map(|(r, t)| (*r, t));
    let sharded = match (shard(ParamKind::Up), shard(ParamKind::Down)) {
        (Some(up), Some(down)) => Some(Sharded::new(chain, layer, local, [up, down])?),
        _ => None,
    };
    Ok((params, sharded))
}

/// Copies of parameters.
fn on_host(params: &[(ParamKind, Tensor)]) -> Result<BlockParams> {
    const CALL: &str = "ExpertParallelMoE::to_block";
    let cpu = Cpu::new();
    let own = |(role, t): &(ParamKind, Tensor)| -> Result<_> {
        let t = t.to_device(&Device::Cpu)?.contiguous()?;
        Ok((*role, with_views(&cpu, CALL, &[(role.name(), &t)], |views| copy_of(&cpu, views[0]))?))
    };
    let tensors = params.iter().map(own).collect::<Result<_>>()?;
    Ok(assemble(CALL, tensors)?)
}
