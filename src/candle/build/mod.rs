//! Where a module's parameters come from: variables, a chain's shards, or a checkpoint.

mod variables;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};

use crate::adapter::{ErasedLayerShards, StoredExperts};
use crate::checkpoint::{Block, BlockParams, BlockShards, Checkpoint};
use crate::comm::Op;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::etp::{Chain, Payload, ShardPlace};
use crate::layer::{Layer, LayerSpec, ParamKind, PerParam};

use super::device::CandleDevice;
use super::error::refusal_reason;
use super::group::DeviceGroup;
use super::module::ExpertParallelMoE;
use super::options::{LoadAs, Parameters, place_in, tensor};
use super::quantized::unpack;
use super::sharded_weights::ShardedWeights;

use variables::{NewLayerShards, missing_experts, redraw_experts, variables};

pub use variables::ShardedIn;
pub(super) use variables::is_expert_weight;

/// A layer of one rank, on the device and in the type of `vb`, of any number of tokens a call: the common case. For
/// several ranks, and for layers that share a workspace on a GPU, see [`ExpertParallelMoE::new`].
///
/// A configuration gets the last number in the path of `vb` as its layer number: 3 from `model.layers.3.mlp`, and 0
/// where there is none. Jitter draws other noise for each number, and errors name it.
///
/// # Errors
/// As [`ExpertParallelMoE::new`]; on a GPU, [`Error::Invalid`] for a device of `Device::new_cuda`, whose stream is
/// another one on every thread: make it with `Device::new_cuda_with_stream`.
pub fn moe(config: impl Into<LayerSpec>, vb: candle_nn::VarBuilder<'_>) -> Result<ExpertParallelMoE> {
    let spec = config.into();
    let group = DeviceGroup::single(spec.config(), vb.device())?;
    let number = spec.number().unwrap_or_else(|| number_in(&vb.prefix()));
    ExpertParallelMoE::build::<Cpu>("candle::moe", spec.layer(number)?.into(), group, vb, None)
}

/// The last number of a variable's path; 0 where there is none.
fn number_in(path: &str) -> u32 {
    path.rsplit('.').find_map(|part| part.parse().ok()).unwrap_or(0)
}

impl ExpertParallelMoE {
    /// From variables named as [`ParamKind::name`] says (`router.weight`, `experts.up`, …), with this rank's experts
    /// only. Missing ones are initialized: weights uniform in ±1/√fan-in, biases zero, in the type of `vb`, but for a
    /// selection bias, which is in f32 beside 16-bit weights. A configuration gets the group's
    /// next layer number, a [`Layer`] has its own.
    ///
    /// Over several ranks this is a collective: the parameters that all ranks hold (router, shared expert) become
    /// rank 0's, so that every rank starts from the same router, and new experts are drawn by the router's values, their
    /// name and their place among all ranks' experts. Replicas, ranks of other groups that hold the same experts, are for
    /// the caller to make alike.
    ///
    /// # Errors
    /// Another number of experts than the group's; a variable of another shape; a collective's error.
    pub fn new(
        layer: impl Into<LayerSpec>,
        group: impl Into<DeviceGroup>,
        vb: candle_nn::VarBuilder<'_>,
    ) -> Result<Self> {
        Self::build::<Cpu>("ExpertParallelMoE::new", layer.into(), group.into(), vb, None)
    }

    /// [`new`](Self::new) with `experts.up` and `experts.down` sharded over the ranks of `chain`, to which they are
    /// added: their variables are this rank's shards, `[S, C]` as [`Chain::shards`] cuts `[L, G·I, H]` and
    /// `[L, H, I]`; the [`Payload`] says how they travel. A forward runs in a [`Phase::Forward`](crate::etp::Phase) of
    /// the chain, a backward in a [`Phase::Backward`](crate::etp::Phase); the shards' gradients are not among
    /// backward's, but come with [`finish_sharded`](super::finish_sharded). A pass is one forward, or one backward, of
    /// the whole model: the chain has learned the order of the layers in the first.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use moebius::candle::{EpGroup, ExpertParallelMoE, GradientType, finish_sharded};
    /// use moebius::comm::Solo;
    /// use moebius::cpu::Cpu;
    /// use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase};
    /// use moebius::MoeConfig;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // One rank here; over several, communicators of the ranks that hold the same experts.
    /// let comms = Comms::<Cpu> { gather: Box::new(Solo::new(Cpu::new())), reduce: Box::new(Solo::new(Cpu::new())) };
    /// let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
    /// let vars = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// let config = MoeConfig::new(64, 32, 8, 2);
    /// let group = EpGroup::single(&config)?;
    /// let moe = ExpertParallelMoE::sharded(config, group, &chain, Payload::Plain, vb)?;
    /// let mut adam = AdamW::new(moe.vars(), ParamsAdamW::default())?;
    /// for _microbatch_and_step in 0..2 {
    ///     let x = Tensor::arange(0f32, 320., &Device::Cpu)?.sin()?.reshape((5, 64))?;
    ///     chain.begin(Phase::Forward)?;
    ///     let loss = moe.forward(&x)?.sqr()?.mean_all()?;
    ///     chain.end()?;
    ///     chain.begin(Phase::Backward)?;
    ///     let mut gradients = loss.backward()?;
    ///     chain.end()?;
    ///     finish_sharded(&chain, None, &moe.shards(), &mut gradients, GradientType::InVariableType)?;
    ///     adam.step(&gradients)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); a group on another device than the chain's; a chain that is in use. After an error of a
    /// pass every rank of the chain calls [`Chain::recover`].
    pub fn sharded<D: CandleDevice>(
        layer: impl Into<LayerSpec>,
        group: impl Into<DeviceGroup>,
        chain: &Arc<Chain<D>>,
        payload: Payload,
        vb: candle_nn::VarBuilder<'_>,
    ) -> Result<Self> {
        let shards = ShardedIn { chain, payload, weights: None };
        Self::build("ExpertParallelMoE::sharded", layer.into(), group.into(), vb, Some(shards))
    }

    /// [`sharded`](Self::sharded) with all else sharded too: the experts' biases in the experts' chain, and router and
    /// shared expert, which all ranks hold, as weights of `weights`, whose chain is one of all ranks. With one rank a
    /// group the two chains are one. Variables are those of `weights`' builder: of what is not an expert's weight this
    /// rank's shard of its [lines](crate::etp::Shards::lines). The selection bias has no gradient and stays whole.
    ///
    /// Gradients come with [`finish_sharded`](super::finish_sharded), the experts' with [`shards`](Self::shards), and
    /// those of router and shared expert with [`ShardedWeights::shards`].
    ///
    /// # Errors
    /// As [`sharded`](Self::sharded).
    pub fn all_sharded<D: CandleDevice>(
        layer: impl Into<LayerSpec>,
        group: impl Into<DeviceGroup>,
        chain: &Arc<Chain<D>>,
        payload: Payload,
        weights: &ShardedWeights<'_, D>,
    ) -> Result<Self> {
        let (vb, shards) = (weights.builder().clone(), ShardedIn { chain, payload, weights: Some(weights) });
        Self::build("ExpertParallelMoE::all_sharded", layer.into(), group.into(), vb, Some(shards))
    }

    /// `call` names the caller in errors.
    fn build<D: CandleDevice>(
        call: &'static str,
        spec: LayerSpec,
        group: DeviceGroup,
        vb: candle_nn::VarBuilder<'_>,
        chain: Option<ShardedIn<'_, D>>,
    ) -> Result<Self> {
        let number = group.membership().number_layer(spec.number());
        let made = spec.layer(number).map_err(Into::into).and_then(|layer| {
            let missing = missing_experts(&vb);
            let (params, shards) = variables(call, &layer, &group, vb.clone(), chain)?;
            Ok((Self::of(layer, group.clone(), params), shards, missing))
        });
        // The other ranks are in the collectives below: they are told, and the group stays usable.
        let (mut moe, shards, missing) =
            made.inspect_err(|e: &candle_core::Error| group.erased().refuse(number, Op::Weights, &refusal_reason(e)))?;
        group.erased().compare_layer(call, &moe.layer)?;
        if group.ranks() > 1 {
            // All ranks take part, whatever their parameters are.
            let whole = |kind: &ParamKind| shards.as_ref().is_none_or(|shards| shards.resident.get(*kind).is_none());
            for kind in ParamKind::ALL.into_iter().filter(|kind| kind.is_replicated()).filter(whole) {
                let Some(t) = &mut moe.params[kind] else { continue };
                let first = group.broadcast(number, t)?;
                match t.is_variable() {
                    true => {
                        let set = Var::from_tensor(t).and_then(|var| var.set(&first));
                        set.inspect_err(|e| group.erased().refuse(number, Op::Weights, &refusal_reason(e)))?;
                    }
                    // Tensors computed from variables stay so: the variables are the caller's.
                    false if t.track_op() => {}
                    false => *t = first,
                }
            }
            if shards.is_none() {
                let drawn = redraw_experts(&moe.layer, &group, &vb, (&moe.params, &missing));
                drawn.inspect_err(|e| group.erased().refuse(number, Op::Weights, &refusal_reason(e)))?;
            }
        }
        // Behind the collectives: where one rank of the group has refused, no rank's chain has the layer.
        moe.sharded = shards.map(NewLayerShards::add).transpose()?;
        Ok(moe)
    }

    /// From a loaded block. `number` names the layer in tags and errors; `None`: the group's next. A selection bias
    /// that is [trainable](Parameters::Trainable) is one for [`update_selection_bias`](Self::update_selection_bias)
    /// alone, as it has no gradient.
    ///
    /// # Errors
    /// A configuration that does not hold together; another number of experts than the group's; missing, extra or
    /// mis-shaped parameters.
    pub fn from_block(
        block: Block,
        number: impl Into<Option<u32>>,
        group: impl Into<DeviceGroup>,
        params: Parameters,
    ) -> Result<Self> {
        Self::of_block("ExpertParallelMoE::from_block", block, number.into(), group.into(), params)
    }

    fn of_block(
        call: &'static str,
        block: Block,
        number: Option<u32>,
        group: DeviceGroup,
        params: Parameters,
    ) -> Result<Self> {
        let layer = group.erased().layer(call, (&block.config).into(), number)?;
        block.check(call, group.local_experts())?;
        let params = tensors(block.params, group.device(), params)?;
        Ok(Self::of(layer, group, params))
    }

    /// From layer `layer` of an opened checkpoint, which is the layer's number too: reads this rank's experts only.
    /// [`Parameters`] say enough of how; [`LoadAs`] has a type and progress as well.
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use moebius::candle::{DeviceGroup, ExpertParallelMoE, LoadAs, Parameters};
    /// use moebius::checkpoint::Checkpoint;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (dir, out) = (concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe"), tempfile::tempdir()?);
    /// # let out = out.path();
    /// let checkpoint = Checkpoint::open(dir)?; // once for all layers
    /// let config = checkpoint.block_config(0)?;
    /// let group = DeviceGroup::single(&config, &Device::Cpu)?; // one for all layers
    /// let mut modules = Vec::new();
    /// for &layer in checkpoint.moe_layers() {
    ///     let load = LoadAs::new(Parameters::Trainable).dtype(DType::F32);
    ///     modules.push(ExpertParallelMoE::from_checkpoint(&checkpoint, layer, &group, load)?);
    /// }
    /// let x = Tensor::arange(0f32, (5 * config.hidden) as f32, &Device::Cpu)?.sin()?.reshape((5, config.hidden))?;
    /// let y = modules[0].detached().forward(&x)?; // keeps nothing for a backward
    /// assert_eq!(y.dims(), x.dims());
    /// let blocks = modules.iter().map(ExpertParallelMoE::to_block).collect::<Result<Vec<_>, _>>()?;
    /// let blocks: Vec<_> = checkpoint.moe_layers().iter().zip(&blocks).map(|(l, b)| b.params.at_layer(*l)).collect();
    /// checkpoint.save(out, &blocks)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Errors of [`Checkpoint::load_block`]; as [`from_block`](Self::from_block).
    pub fn from_checkpoint<'a>(
        checkpoint: &Checkpoint,
        layer: usize,
        group: impl Into<DeviceGroup>,
        load: impl Into<LoadAs<'a>>,
    ) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::from_checkpoint";
        let (group, load) = (group.into(), load.into());
        let (params, options, number) = (load.params, load.options(&group)?, Some(layer as u32));
        if load.on_host {
            return Err(Error::invalid(CALL, "experts_on_host", "a chain (from_checkpoint_sharded)", "none").into());
        }
        if load.quantized {
            let block = load.read_quantized(checkpoint, layer, options)?;
            return Self::of_quantized(CALL, block, number, group, params);
        }
        Self::of_block(CALL, load.read(checkpoint, layer, options)?, number, group, params)
    }

    /// As [`from_checkpoint`](Self::from_checkpoint), of the module of [`sharded`](Self::sharded), or, where there are
    /// `weights`, of [`all_sharded`](Self::all_sharded): reads this rank's shards only, at whatever number of ranks the
    /// checkpoint was saved ([`Checkpoint::load_shards`] says which rows). [`to_parts`](Self::to_parts) is the way back.
    ///
    /// Where [`LoadAs`] says `quantized`, the experts (NVFP4, MXFP4, fp8 in blocks) stay as they are stored: frozen
    /// shards, which travel as their codes whatever the payload. The product reads the gathered codes, and gradients pass
    /// through them to x and router. [`Parameters`] are those of router and shared expert then; the experts' biases are
    /// frozen with them. A rank holds the block that [`Checkpoint::load_quantized`] reads until it is cut. What the module
    /// has of its experts cannot be saved, trained or read: it has no tensors of them.
    ///
    /// Where [`LoadAs`] says `experts_on_host`, the experts, quantized or of floating type, are frozen shards in page-locked
    /// memory of the host ([`ShardDevice::page_locked`](crate::etp::ShardDevice::page_locked)), in a chain of this rank
    /// alone. Those of floating type are for [`Parameters::Frozen`]; the module has no tensors of them either.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::load_shards`] and [`Checkpoint::load_quantized`]; as [`sharded`](Self::sharded);
    /// `weights` beside experts that stay quantized or are on the host; experts on the host that would be trained, or whose
    /// chain has several ranks.
    pub fn from_checkpoint_sharded<'a, D: CandleDevice>(
        checkpoint: &Checkpoint,
        layer: usize,
        group: impl Into<DeviceGroup>,
        shards: ShardedIn<'_, D>,
        load: impl Into<LoadAs<'a>>,
    ) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::from_checkpoint_sharded";
        let (group, load) = (group.into(), load.into());
        let (params, options, number) = (load.params, load.options(&group)?, Some(layer as u32));
        let on_host = load.on_host;
        shards.check_device(CALL, &group)?;
        if (load.quantized || on_host) && shards.weights.is_some() {
            let expected = match load.quantized {
                true => "none beside experts that stay quantized",
                false => "none beside experts on the host",
            };
            return Err(Error::invalid(CALL, "weights", expected, "some").into());
        }
        if load.quantized {
            let block = load.read_quantized(checkpoint, layer, options)?;
            let layer = group.erased().layer(CALL, (&block.config).into(), number)?;
            let (experts, params) = unpack(CALL, block, &group, params)?;
            let sharded = match on_host {
                true => ErasedLayerShards::stored(shards.chain, &layer, StoredExperts::OnHost(&experts))?,
                false => {
                    let experts = experts.to(shards.chain.device())?;
                    let experts = StoredExperts::Device(&experts, ShardPlace::Device);
                    ErasedLayerShards::stored(shards.chain, &layer, experts)?
                }
            };
            return Ok(Self { sharded: Some(sharded), ..Self::of(layer, group, params) });
        }
        if on_host {
            if params == Parameters::Trainable {
                let expected = "Parameters::Frozen beside experts of floating type on the host";
                return Err(Error::invalid(CALL, "parameters", expected, format!("{params:?}")).into());
            }
            let block = load.read(checkpoint, layer, options)?;
            let layer = group.erased().layer(CALL, (&block.config).into(), number)?;
            block.check(CALL, group.local_experts())?;
            return Self::dense_on_host(shards.chain, layer, block.params, group);
        }
        let cut = BlockShards {
            experts: place_in(shards.chain),
            dense: shards.weights.map(|weights| place_in(weights.chain())),
        };
        let block = load.read_shards(checkpoint, layer, options, cut)?;
        let layer = group.erased().layer(CALL, block.config.into(), number)?;
        let params = tensors(block.params, group.device(), params)?;
        let new = shards.check(&layer, group.local_experts(), &params)?;
        let sharded = new.map(NewLayerShards::add).transpose()?;
        Ok(Self { sharded, ..Self::of(layer, group, params) })
    }

    /// A module whose experts are frozen shards of a chain, on the host, as is the block.
    fn dense_on_host<D: CandleDevice>(
        chain: &Arc<Chain<D>>,
        layer: Layer,
        block: BlockParams,
        group: DeviceGroup,
    ) -> Result<Self> {
        let of = (&layer, group.local_experts());
        let sharded = Some(ErasedLayerShards::dense_on_host(chain, of, [&block.up, &block.down])?);
        let others = block.into_per_param().map(|kind, t| t.filter(|_| !is_expert_weight(kind)));
        let params = others.try_map(|_, t| t.map(|t| tensor(t, group.device(), Parameters::Frozen)).transpose())?;
        Ok(Self { sharded, ..Self::of(layer, group, params) })
    }

    /// A module whose parameters are all there is of it.
    pub(super) fn of(layer: Layer, group: DeviceGroup, params: PerParam<Option<Tensor>>) -> Self {
        Self { layer, group, params, sharded: None, quantized: None, training: Arc::default() }
    }
}

/// Parameters as candle's tensors.
fn tensors(block: BlockParams, device: &Device, params: Parameters) -> Result<PerParam<Option<Tensor>>> {
    block.into_per_param().try_map(|_, t| t.map(|t| tensor(t, device, params)).transpose())
}
