//! Where a module's parameters come from: drawn, or a checkpoint; and the way back.

mod sharded;
mod values;

use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorMetadata, TensorPrimitive};

use crate::adapter::{self, ErasedQuantizedExperts, QuantizedExperts};
use crate::checkpoint::{Block, BlockParams, Checkpoint, LoadOptions, QuantizedBlock};
use crate::comm::Op;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host_memory::reserved;
use crate::layer::{Layer, ParamKind, PerParam};
use crate::tensor;

use super::backend::{MoeBackend, core_dtype};
use super::config::ExpertParallelMoEConfig;
use super::group::DeviceGroup;
use super::module::{ExpertParallelMoE, Experts};

use values::{BlockValues, InitialValues, assemble};

pub use sharded::ShardedLoad;

impl ExpertParallelMoEConfig {
    /// A module of one rank with new parameters, drawn from the back end's generator; any number of tokens a call. For
    /// several ranks, and for layers that share a workspace on a GPU, see [`init_on`](Self::init_on).
    ///
    /// A module made so has a group of its own, and so the layer number 0 unless the configuration has one: give each
    /// layer of a model its own (`with_number(Some(3))`). Jitter draws other noise for each, and errors name it.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`](crate::MoeConfig::validate); no such device.
    pub fn init<B: MoeBackend>(&self, device: &B::Device) -> Result<ExpertParallelMoE<B>> {
        self.draw("ExpertParallelMoEConfig::init", DeviceGroup::single::<B>(&self.moe, device)?, device)
    }

    /// A module of a group with new parameters. A collective of all ranks: rank 0 draws router, shared expert and all E
    /// experts from its back end's generator and sends them, so the ranks agree on what they share, and the same
    /// [`Backend::seed`] gives the same model whatever the number of ranks.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`](crate::MoeConfig::validate); another number of experts than the group's; a
    /// communicator's error.
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
    /// Errors of [`MoeConfig::validate`](crate::MoeConfig::validate); another number of experts than the group's;
    /// missing, extra or mis-shaped parameters.
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
    /// ([`ShardedParams::to_blocks`](super::ShardedParams::to_blocks) takes them, and [`to_parts`](Self::to_parts)).
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
    pub(in crate::burn) fn freeze_experts(&mut self) {
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
