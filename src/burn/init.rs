//! Where a module's parameters come from: drawn, or a checkpoint; and the way back.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};

use crate::adapter::{self, ErasedQuantizedExperts, HostTensor, QuantizedExperts};
use crate::checkpoint::{Block, BlockParams, BlockShards, Checkpoint, LoadOptions, QuantizedBlock, ShardOptions};
use crate::comm::Op;
use crate::config::{MoeConfig, Payload};
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host_memory::reserved;
use crate::kernels::Kernels;
use crate::layer::{Layer, ParamKind, PerParam};
use crate::tensor;

use super::backend::{MoeBackend, NativeBackend, core_dtype, float};
use super::config::ExpertParallelMoEConfig;
use super::etp::ShardedParams;
use super::group::DeviceGroup;
use super::module::{ExpertParallelMoE, Experts, Router, SharedExpert};
use super::sharded_module::ShardsTo;

impl ExpertParallelMoEConfig {
    /// A module of one rank with new parameters, drawn from the back end's generator; any number of tokens a call. For
    /// several ranks, and for layers that share a workspace on a GPU, see [`init_on`](Self::init_on).
    ///
    /// A module made so has a group of its own, and so the layer number 0 unless the configuration has one: give each
    /// layer of a model its own (`with_number(Some(3))`). Jitter draws other noise for each, and errors name it.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`]; no such device.
    pub fn init<B: MoeBackend>(&self, device: &B::Device) -> Result<ExpertParallelMoE<B>> {
        self.draw("ExpertParallelMoEConfig::init", DeviceGroup::single::<B>(&self.moe, device)?, device)
    }

    /// A module of a group with new parameters. A collective of all ranks: rank 0 draws router, shared expert and all E
    /// experts from its back end's generator and sends them, so the ranks agree on what they share, and the same
    /// [`Backend::seed`] gives the same model whatever the number of ranks.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`]; another number of experts than the group's; a communicator's error.
    pub fn init_on<B: Backend>(
        &self,
        group: impl Into<DeviceGroup>,
        device: &B::Device,
    ) -> Result<ExpertParallelMoE<B>> {
        self.draw("ExpertParallelMoEConfig::init_on", group.into(), device)
    }

    /// `call` names the caller in errors.
    fn draw<B: Backend>(
        &self,
        call: &'static str,
        group: DeviceGroup,
        device: &B::Device,
    ) -> Result<ExpertParallelMoE<B>> {
        let number = group.membership().number_layer(self.number);
        let experts = group.membership().check_experts(call, self.moe.router.num_experts);
        // The other ranks are in the collectives below: they are told, and the group stays usable.
        let layer = experts
            .and_then(|()| Layer::new(self.moe.clone(), number))
            .and_then(|layer| check_memory(call, &layer, &group).map(|()| layer))
            .inspect_err(|e| group.erased().refuse(number, Op::Weights, &e.to_string()))?;
        group.erased().compare_layer(call, &layer)?;
        assemble(&mut InitialValues::<B> { call, config: self, number, group: &group, device }, layer, &group)
    }
}

/// Whether the host has memory for each of this rank's parameters: without, burn would end the process as it allocates.
fn check_memory(call: &'static str, layer: &Layer, group: &DeviceGroup) -> Result<()> {
    if group.on::<Cpu>().is_none() {
        return Ok(());
    }
    for kind in ParamKind::ALL {
        let Some(dims) = kind.dims(layer.config(), group.local_experts()) else { continue };
        let elements = dims.iter().fold(1, |elements: usize, n| elements.saturating_mul(*n));
        reserved::<f32>(call, kind.name(), elements)?;
    }
    Ok(())
}

/// How [`ExpertParallelMoE::from_checkpoint`] loads; the default: in the types that are stored.
pub type LoadAs<'a> = adapter::LoadAs<'a, DType>;

impl LoadAs<'_> {
    /// Routed experts that are quantized (NVFP4, MXFP4, fp8 in blocks) stay as they are stored, frozen; a checkpoint whose
    /// experts are not is refused then. The floating type is that of the other parameters. See
    /// [`ExpertParallelMoE::from_quantized`].
    pub fn quantized(self) -> Self {
        self.keep_quantized()
    }
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// A module with the parameters of a checkpoint's block, in their types; trainable but for the selection bias
    /// ([`no_grad`](burn::module::Module::no_grad) freezes it). `number` names the layer as
    /// [`ExpertParallelMoEConfig::number`] does.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`]; another number of experts than the group's; missing, extra or mis-shaped
    /// parameters.
    pub fn from_block(
        block: Block,
        number: impl Into<Option<u32>>,
        group: impl Into<DeviceGroup>,
        device: &B::Device,
    ) -> Result<Self> {
        Self::of_block("ExpertParallelMoE::from_block", block, number.into(), group.into(), device)
    }

    /// From a loaded block whose routed experts stay quantized; `number` as in [`from_block`](Self::from_block). The
    /// experts, their biases included, are frozen: gradients flow through them to the tokens, the router and a shared
    /// expert, which are trainable.
    ///
    /// `experts.up` and `experts.down` are placeholders `[1, 1, 1]`, frozen, that nothing reads: such experts cannot be
    /// trained, sharded or saved, and are not in a record.
    ///
    /// # Errors
    /// As [`from_block`](Self::from_block); a device's, where there is no memory.
    pub fn from_quantized(
        block: QuantizedBlock<Cpu>,
        number: impl Into<Option<u32>>,
        group: impl Into<DeviceGroup>,
        device: &B::Device,
    ) -> Result<Self> {
        Self::of_quantized("ExpertParallelMoE::from_quantized", block, number.into(), group.into(), device)
    }

    fn of_quantized(
        call: &'static str,
        block: QuantizedBlock<Cpu>,
        number: Option<u32>,
        group: DeviceGroup,
        device: &B::Device,
    ) -> Result<Self> {
        let (moe, experts) = with_placeholders(call, block, number, (&group, device))?;
        let quantized = Some(ErasedQuantizedExperts::on_device_of(group.erased(), experts)?);
        Ok(Self { quantized, ..moe })
    }

    fn of_block(
        call: &'static str,
        block: Block,
        number: Option<u32>,
        group: DeviceGroup,
        device: &B::Device,
    ) -> Result<Self> {
        let layer = group.erased().layer(call, (&block.config).into(), number)?;
        block.check(call, group.local_experts())?;
        let params = block.params.into_per_param();
        assemble(&mut BlockValues::<B> { call, params, device }, layer, &group)
    }

    /// From layer `layer` of an opened checkpoint, which is the layer's number too: reads this rank's experts only.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::tensor::{Distribution, Tensor};
    /// use moebius::burn::{DeviceGroup, ExpertParallelMoE, LoadAs};
    /// use moebius::checkpoint::Checkpoint;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe");
    /// # let out = tempfile::tempdir()?;
    /// # let out = out.path();
    /// let checkpoint = Checkpoint::open(dir)?;
    /// let (config, device) = (checkpoint.block_config(0)?, Default::default());
    /// # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
    /// let group = DeviceGroup::single::<Flex>(&config, &device)?; // one for all layers
    /// let mut modules = Vec::new();
    /// for &layer in checkpoint.moe_layers() {
    ///     let load = LoadAs::default().dtype(moebius::DType::F32);
    ///     modules.push(ExpertParallelMoE::<Flex>::from_checkpoint(&checkpoint, layer, &group, load, &device)?);
    /// }
    /// let x = Tensor::<Flex, 2>::random([5, config.hidden], Distribution::Default, &device);
    /// assert_eq!(modules[0].forward(x.clone())?.dims(), x.dims());
    /// let blocks = modules.iter().map(ExpertParallelMoE::to_block).collect::<Result<Vec<_>, _>>()?;
    /// let blocks: Vec<_> = checkpoint.moe_layers().iter().zip(&blocks).map(|(l, b)| b.params.at_layer(*l)).collect();
    /// checkpoint.save(out, &blocks)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Errors of [`Checkpoint::load_block`], or where [`LoadAs::quantized`] says so of [`Checkpoint::load_quantized`]; of
    /// [`from_block`](Self::from_block).
    pub fn from_checkpoint(
        checkpoint: &Checkpoint,
        layer: usize,
        group: impl Into<DeviceGroup>,
        load: LoadAs<'_>,
        device: &B::Device,
    ) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::from_checkpoint";
        let (group, number) = (group.into(), Some(layer as u32));
        let options = LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: load.dtype };
        if load.quantized {
            let block = load.read_quantized(checkpoint, layer, options)?;
            return Self::of_quantized(CALL, block, number, group, device);
        }
        let block = load.read(checkpoint, layer, options)?;
        Self::of_block(CALL, block, number, group, device)
    }
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// This rank's parameters on the host, as [`Checkpoint::save`] takes them; over several ranks,
    /// [`gather_blocks`](crate::checkpoint::gather_blocks) joins all ranks'.
    ///
    /// # Errors
    /// Parameters of types that the layer has not; [quantized](Self::from_quantized) experts; experts that are shards
    /// ([`ShardedParams::to_blocks`] takes them, and [`to_parts`](Self::to_parts)).
    pub fn to_block(&self) -> Result<Block> {
        const CALL: &str = "ExpertParallelMoE::to_block";
        self.check_dense(CALL)?;
        if self.sharded.is_some() {
            return Err(Error::invalid(CALL, "experts", "whole weights", "shards"));
        }
        self.block(CALL, |_| Ok(None))
    }

    /// The parameters on the host, but for those that are whole elsewhere.
    fn block(
        &self,
        call: &'static str,
        mut whole: impl FnMut(ParamKind) -> Result<Option<tensor::Tensor<Cpu>>>,
    ) -> Result<Block> {
        let own = |kind: ParamKind| -> Result<_> {
            if let Some(whole) = whole(kind)? {
                return Ok(Some(whole));
            }
            let Some(primitive) = self.param(kind) else { return Ok(None) };
            let dims = primitive.shape().to_vec();
            let flat = B::float_reshape(primitive, Shape::from(vec![dims.iter().product::<usize>()]));
            let data = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat)).into_data();
            let mut own = tensor::Tensor::empty(&Cpu::new(), core_dtype(call, kind.name(), data.dtype)?, &dims)?;
            own.as_bytes_mut().copy_from_slice(data.as_bytes());
            Ok(Some(own))
        };
        let params = BlockParams::of(call, PerParam::try_from_fn(own)?)?;
        Ok(Block { config: self.layer.config().clone(), params })
    }
}

impl<B: NativeBackend> ShardedParams<B> {
    /// The modules' parameters on the host with whole experts, in the modules' order, as
    /// [`ExpertParallelMoE::to_block`] has those of modules that are not sharded: to be saved under the published names,
    /// and loaded by any number of ranks. All sharded modules of the chain are given, between passes; a collective of the
    /// chain's ranks, of which each gets the whole.
    ///
    /// # Errors
    /// A pass that runs; modules of which [all](ExpertParallelMoE::into_all_sharded) is sharded, which
    /// [`to_parts`](ExpertParallelMoE::to_parts) saves; [quantized](Self::load_quantized) experts; what
    /// [`begin`](Self::begin) refuses of modules, which the chain's other ranks are told; parameters of types that the
    /// layer has not; the collectives'. Every rank then calls [`Chain::recover`](crate::etp::Chain::recover).
    pub fn to_blocks<'m, M: MoeBackend<Native = B>>(
        &self,
        modules: impl IntoIterator<Item = &'m ExpertParallelMoE<M>>,
    ) -> Result<Vec<Block>> {
        const CALL: &str = "ShardedParams::to_blocks";
        let (chain, modules) = (self.chain(), modules.into_iter().collect::<Vec<_>>());
        let resident = |module: &&ExpertParallelMoE<M>| {
            module.sharded.as_ref().is_some_and(|sharded| sharded.resident.present().next().is_some())
        };
        modules.iter().try_for_each(|module| module.check_dense(CALL))?;
        if modules.iter().any(resident) {
            let expected = "whole but for the experts' weights";
            return Err(Error::invalid(CALL, "parameters", expected, "shards (ExpertParallelMoE::to_parts has them)"));
        }
        if chain.in_pass() {
            return Err(Error::invalid(CALL, "pass", "none", "one that runs"));
        }
        self.update_sources(CALL, modules.iter().copied()).inspect_err(|error| chain.refuse_pass(error))?;
        let block = |module: &ExpertParallelMoE<M>| {
            module.block(CALL, |kind| {
                let id = module.sharded.as_ref().and_then(|sharded| match kind {
                    ParamKind::Up => Some(sharded.ids[0]),
                    ParamKind::Down => Some(sharded.ids[1]),
                    _ => None,
                });
                let Some(id) = id else { return Ok(None) };
                let whole = chain.whole(id)?;
                let mut own = tensor::Tensor::empty(&Cpu::new(), whole.dtype(), whole.dims())?;
                own.as_bytes_mut().copy_from_slice(&chain.device().download(whole.view())?);
                Ok(Some(own))
            })
        };
        modules.into_iter().map(block).collect()
    }
}

/// A layer of a checkpoint, whose experts a chain's ranks load as shards.
#[derive(Debug, Clone, Copy)]
pub struct ShardedLoad<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// The layer in it, and the module's number.
    pub layer: usize,
    /// Floating type of the parameters, as [`LoadOptions::dtype`] says.
    pub dtype: Option<DType>,
    /// How shards travel.
    pub payload: Payload,
}

impl<B: NativeBackend> ShardedParams<B> {
    /// [`ExpertParallelMoE::from_checkpoint`], sharded as by [`ExpertParallelMoE::into_sharded`], which reads this rank's
    /// shard of its experts' weights and nothing else of them: whole weights are nowhere. The number of ranks that share
    /// experts may be any, whatever it was when the checkpoint was saved.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::load_shard`], of [`ExpertParallelMoE::from_block`] and of
    /// [`ExpertParallelMoE::into_sharded`].
    pub fn load<M: MoeBackend<Native = B>>(
        &self,
        from: ShardedLoad<'_>,
        group: impl Into<DeviceGroup>,
        device: &M::Device,
    ) -> Result<ExpertParallelMoE<M>> {
        let to = ShardsTo { experts: self, payload: from.payload, dense: None };
        from.load("ShardedParams::load", to, group.into(), device)
    }

    /// The same, sharded as by [`ExpertParallelMoE::into_all_sharded`]: of router, shared expert and biases too this rank
    /// reads its shards alone.
    ///
    /// # Errors
    /// As [`load`](Self::load), with [`Checkpoint::load_shards`] and [`ExpertParallelMoE::into_all_sharded`].
    pub fn load_all<M: MoeBackend<Native = B>>(
        &self,
        from: ShardedLoad<'_>,
        dense: &Self,
        group: impl Into<DeviceGroup>,
        device: &M::Device,
    ) -> Result<ExpertParallelMoE<M>> {
        let to = ShardsTo { experts: self, payload: from.payload, dense: Some(dense) };
        from.load("ShardedParams::load_all", to, group.into(), device)
    }

    /// [`load`](Self::load) of a layer whose experts (NVFP4, MXFP4, fp8 in blocks) stay as they are stored: frozen shards,
    /// which travel as their codes whatever the payload. The product reads the gathered codes, and gradients pass through
    /// them to x, router and shared expert, which are parameters of type `dtype`; the experts' biases are frozen. A rank
    /// holds the block that [`Checkpoint::load_quantized`] reads until it is cut. With a chain of one rank the experts are
    /// whole.
    ///
    /// `experts.up` and `experts.down` are placeholders `[1, 1, 1]`, frozen, that nothing reads: such experts cannot be
    /// trained or saved.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::load_quantized`]; what [`ExpertParallelMoE::into_sharded`] refuses.
    pub fn load_quantized<M: MoeBackend<Native = B>>(
        &self,
        from: ShardedLoad<'_>,
        group: impl Into<DeviceGroup>,
        device: &M::Device,
    ) -> Result<ExpertParallelMoE<M>> {
        from.load_quantized("ShardedParams::load_quantized", self, group.into(), device)
    }
}

impl ShardedLoad<'_> {
    fn load<M: MoeBackend>(
        self,
        call: &'static str,
        to: ShardsTo<'_, M>,
        group: DeviceGroup,
        device: &M::Device,
    ) -> Result<ExpertParallelMoE<M>> {
        let options = LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: self.dtype };
        let cut = |shards: &ShardedParams<M::Native>| {
            let chain = shards.chain();
            ShardOptions { rank: chain.rank(), ranks: chain.ranks(), pad: chain.options().pad }
        };
        let shards = BlockShards { experts: cut(to.experts), dense: to.dense.map(cut) };
        let Block { config, params } = self.checkpoint.load_shards(self.layer, options, shards, &mut |_| {})?;
        let layer = group.erased().layer(call, config.into(), Some(self.layer as u32))?;
        // In as many dimensions as the whole parameter has.
        let shaped = |kind: ParamKind, t: Option<tensor::Tensor<Cpu>>| -> Result<_> {
            let dimensions = kind.dims(layer.config(), group.local_experts()).map_or(0, |dims| dims.len());
            let Some(t) = t else { return Ok(None) };
            let dims = match (dimensions, t.dims()) {
                (1, dims) => vec![dims.iter().product()],
                (3, &[rows, width]) => vec![1, rows, width],
                (_, dims) => dims.to_vec(),
            };
            t.reshape(&dims).map(Some)
        };
        let params = params.into_per_param().try_map(shaped)?;
        assemble(&mut BlockValues::<M> { call, params, device }, layer, &group)?.with_shards(call, to)
    }

    fn load_quantized<M: MoeBackend>(
        self,
        call: &'static str,
        shards: &ShardedParams<M::Native>,
        group: DeviceGroup,
        device: &M::Device,
    ) -> Result<ExpertParallelMoE<M>> {
        let options = LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: self.dtype };
        let block = self.checkpoint.load_quantized(self.layer, options)?;
        let (moe, experts) = with_placeholders::<M>(call, block, Some(self.layer as u32), (&group, device))?;
        moe.with_stored(call, shards, &experts.to(shards.chain().device())?)
    }
}

/// A module of a block whose routed experts stay quantized, and these. `up` and `down` are placeholders; nothing of the
/// experts tracks gradients.
fn with_placeholders<B: Backend>(
    call: &'static str,
    block: QuantizedBlock<Cpu>,
    number: Option<u32>,
    (group, device): (&DeviceGroup, &B::Device),
) -> Result<(ExpertParallelMoE<B>, QuantizedExperts<Cpu>)> {
    let layer = group.erased().layer(call, (&block.config).into(), number)?;
    let (up, down, mut params) = block.into_parts();
    let dtype = params.router.as_ref().map_or(DType::F32, tensor::Tensor::dtype);
    for (kind, weight) in [(ParamKind::Up, &up), (ParamKind::Down, &down)] {
        let expected = kind.dims(layer.config(), group.local_experts()).unwrap_or_default();
        Error::check_shape(call, kind.name(), &expected, weight.dims())?;
        params[kind] = Some(tensor::Tensor::zeros(&Cpu::new(), dtype, &[1, 1, 1])?);
    }
    let mut moe = assemble(&mut BlockValues::<B> { call, params, device }, layer, group)?;
    moe.freeze_experts();
    Ok((moe, QuantizedExperts { up, down }))
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// Has nothing of the experts track gradients.
    pub(super) fn freeze_experts(&mut self) {
        let Experts { up, up_bias, down, down_bias } = self.experts.clone();
        let frozen = |bias: Option<Param<Tensor<B, 2>>>| bias.map(|bias| bias.set_require_grad(false));
        self.experts = Experts {
            up: up.set_require_grad(false),
            up_bias: frozen(up_bias),
            down: down.set_require_grad(false),
            down_bias: frozen(down_bias),
        };
    }
}

/// Gives a parameter of known sizes.
trait ParamValues<B: Backend> {
    /// The call that asks, for errors.
    fn call(&self) -> &'static str;

    fn load(&mut self, kind: ParamKind, dims: &[usize]) -> Result<FloatTensor<B>>;
}

fn assemble<B: Backend>(
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
struct BlockValues<'a, B: Backend> {
    call: &'static str,
    params: PerParam<Option<tensor::Tensor<Cpu>>>,
    device: &'a B::Device,
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
struct InitialValues<'a, B: Backend> {
    call: &'static str,
    config: &'a ExpertParallelMoEConfig,
    number: u32,
    group: &'a DeviceGroup,
    device: &'a B::Device,
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
