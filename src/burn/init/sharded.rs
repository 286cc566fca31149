//! Modules whose parameters are shards: loaded as such, and saved whole.

use crate::checkpoint::{Block, BlockShards, Checkpoint, LoadOptions, ShardOptions};
use crate::config::Payload;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::layer::ParamKind;
use crate::tensor;

use crate::burn::backend::{MoeBackend, NativeBackend};
use crate::burn::etp::ShardedParams;
use crate::burn::group::DeviceGroup;
use crate::burn::module::ExpertParallelMoE;
use crate::burn::sharded_module::ShardsTo;

use super::values::{BlockValues, assemble};
use super::with_placeholders;

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
