//! The module itself.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};

use crate::adapter::{ErasedLayerShards, ErasedQuantizedExperts, TrainingState, param_shard};
#[cfg(doc)]
use crate::checkpoint::Checkpoint;
use crate::checkpoint::{Block, BlockParams, RankBlock, RankPart, RankTensor};
use crate::comm::Op;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::layer::{Layer, Mode, Noise, ParamKind, PerParam};
use crate::optim::ParamShard;

use super::device::{copy_of, dtype_of, with_views};
use super::error::{framework, refusal_reason};
use super::etp::WeightVar;
use super::group::DeviceGroup;
use super::run::{self, ForwardInputs, MoeOutput};

/// A Mixture-of-Experts layer over the ranks of a group, as a candle module. See the [module](super) for use.
#[derive(Debug, Clone)]
pub struct ExpertParallelMoE {
    pub(super) layer: Layer,
    pub(super) group: DeviceGroup,
    /// Those that the configuration has.
    pub(super) params: PerParam<Option<Tensor>>,
    /// The experts' chain, where their parameters are shards.
    pub(super) sharded: Option<ErasedLayerShards>,
    /// The experts' weights, where they are quantized and so no parameters.
    pub(super) quantized: Option<ErasedQuantizedExperts>,
    pub(super) training: Arc<TrainingState>,
}

impl ExpertParallelMoE {
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
        self.params.present().map(|(kind, t)| (kind.name(), t)).collect()
    }

    /// One parameter.
    pub fn param(&self, kind: ParamKind) -> Option<&Tensor> {
        self.params.get(kind)
    }

    /// Trainable parameters, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.trainable().filter(|(_, t)| t.is_variable()).filter_map(|(_, t)| Var::from_tensor(t).ok()).collect()
    }

    /// Parameters that gradients are tracked of. The selection bias has none.
    pub(super) fn trainable(&self) -> impl Iterator<Item = (ParamKind, &Tensor)> {
        self.params.present().filter(|(kind, t)| t.track_op() && *kind != ParamKind::SelectionBias)
    }

    /// Whether a parameter is this rank's shard.
    pub(super) fn is_shard(&self, kind: ParamKind) -> bool {
        self.sharded.as_ref().is_some_and(|sharded| sharded.has(kind))
    }

    /// This rank's shard of a parameter.
    pub(super) fn param_shard(&self, kind: ParamKind) -> crate::Result<ParamShard> {
        param_shard(&self.layer, self.group.membership(), self.sharded.as_ref(), kind)
    }

    /// This rank's parts of the layer, for [`Checkpoint::save_parts`]: nothing is copied before it is written.
    ///
    /// # Errors
    /// Experts that are quantized, which are no parameters.
    pub fn to_parts(&self) -> Result<RankBlock<'static>> {
        self.check_dense("ExpertParallelMoE::to_parts")?;
        let params = self.params.as_ref().try_map(|kind, t| -> Result<_> {
            let Some(t) = t else { return Ok(None) };
            Ok(Some(part_of(kind.name(), t, self.param_shard(kind)?)?))
        })?;
        Ok(RankBlock { layer: self.layer.number() as usize, params })
    }

    /// The same module without gradients of its parameters, for evaluation: it shares them, sees what an optimizer makes
    /// of them, and keeps nothing for a backward of an x that is outside of a graph (`x.detach()`). Where there are several
    /// ranks, all of them evaluate, or none.
    pub fn detached(&self) -> Self {
        let params = self.params.as_ref().map(|_, t| t.as_ref().map(Tensor::detach));
        Self { params, training: Arc::new(self.training.settings()), ..self.clone() }
    }

    /// This rank's parameters on the host, as [`Checkpoint::save`] takes them; over several ranks,
    /// [`gather_blocks`](crate::checkpoint::gather_blocks) joins all ranks'. Of shards there is
    /// [`to_parts`](Self::to_parts).
    ///
    /// # Errors
    /// Experts that are shards or quantized; a device's error.
    pub fn to_block(&self) -> Result<Block> {
        self.check_dense("ExpertParallelMoE::to_block")?;
        if self.sharded.is_some() {
            return Err(Error::invalid("ExpertParallelMoE::to_block", "experts", "whole weights", "shards").into());
        }
        Ok(Block { config: self.layer.config().clone(), params: on_host(&self.params)? })
    }

    fn check_dense(&self, call: &'static str) -> crate::Result<()> {
        let found = match &self.quantized {
            Some(experts) => format!("some in {:?}", experts.format()),
            None if self.param(ParamKind::Up).is_none() => "shards that are quantized, or on the host".to_string(),
            None => return Ok(()),
        };
        Err(Error::invalid(call, "experts", "weights of floating type", found))
    }

    /// The variables that are shards of the experts' chain, with their weights there, as
    /// [`finish_sharded`](super::finish_sharded) takes them; none where experts are whole. Router and shared expert of
    /// [`all_sharded`](Self::all_sharded) are among [`ShardedWeights::shards`](super::ShardedWeights::shards).
    pub fn shards(&self) -> Vec<WeightVar> {
        let Some(sharded) = &self.sharded else { return Vec::new() };
        let biases = [ParamKind::UpBias, ParamKind::DownBias].into_iter();
        let biases = biases.filter_map(|kind| Some((kind, sharded.resident.get(kind)?.id)));
        let weights = [ParamKind::Up, ParamKind::Down].into_iter().zip(sharded.ids);
        let shard = |(kind, id)| {
            let t = self.param(kind).filter(|t| t.is_variable())?;
            Some(WeightVar { id, var: Var::from_tensor(t).ok()? })
        };
        weights.chain(biases).filter_map(shard).collect()
    }

    /// Meets the other ranks' forward of this layer as a failure: for a model that fails before it, where they would
    /// wait. They get the reason at once; between threads the group stays usable.
    pub fn refuse_forward(&self, reason: &str) {
        self.refuse(Op::Prepare, reason);
    }

    /// The same for the other ranks' backward of this layer: for a model that fails behind its forward, before or in a
    /// backward that has not come to it. [`refuse_backward`](super::refuse_backward) finds the layers of a loss by
    /// itself.
    pub fn refuse_backward(&self, reason: &str) {
        self.refuse(Op::CombineBwd, reason);
    }

    pub(super) fn refuse(&self, op: Op, reason: &str) {
        self.group.erased().refuse(self.layer.number(), op, reason);
    }

    /// Forward over `[T, H]` or `[…, H]`, with everything that the layer knows; `noise`: seed and step of the router's
    /// jitter, where it is to be applied. A backward can follow where x or a parameter tracks gradients; where none
    /// does, nothing is kept.
    ///
    /// # Errors
    /// Errors of [`Layer::forward`], with their text.
    pub fn forward_full(&self, x: &Tensor, noise: Option<Noise>) -> Result<MoeOutput> {
        self.pass(x, noise, None)
    }

    /// [`forward`](candle_core::Module::forward) into memory of yours, of x's shape and type: for a step that is
    /// captured, whose results would be allocated, copied and released in each replay. Of a
    /// [detached](Self::detached) module, on tokens without a graph.
    ///
    /// # Errors
    /// As [`forward`](candle_core::Module::forward), of `y` too: another shape, type or device, not contiguous, memory of x or
    /// of a parameter. A module that tracks gradients, or tokens that do.
    pub fn forward_into(&self, x: &Tensor, y: &Tensor) -> Result<()> {
        const CALL: &str = "ExpertParallelMoE::forward_into";
        if x.track_op() || self.trainable().next().is_some() {
            let (expected, found) = ("a `detached()` module and tokens without a graph", "what tracks gradients");
            let error = Error::invalid(CALL, "module and x", expected, found);
            self.refuse_forward(&error.to_string());
            return Err(error.into());
        }
        let flat = self.flat_tokens(x)?;
        let last = run::forward_into(&self.group, &self.forward_inputs(x, &flat, None), y)?;
        self.store_figures(last);
        Ok(())
    }

    /// x as `[T, H]`, contiguous.
    fn flat_tokens(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.layer.config().hidden;
        let flat = match x.dims() {
            [.., h] if *h == hidden => x.reshape((x.elem_count() / hidden, hidden)).and_then(|x| x.contiguous()),
            // The layer refuses it, on every rank.
            _ => x.contiguous(),
        };
        flat.inspect_err(|e| self.refuse_forward(&refusal_reason(e)))
    }

    /// A forward's inputs; x in its own shape, and as rows.
    fn forward_inputs<'a>(&'a self, x: &'a Tensor, flat: &'a Tensor, aux_scale: Option<f64>) -> ForwardInputs<'a> {
        let (sharded, quantized) = (self.sharded.as_ref(), self.quantized.as_ref());
        ForwardInputs { layer: &self.layer, params: &self.params, sharded, quantized, x, flat, aux_scale }
    }

    /// A forward; `aux_scale`: the auxiliary losses' gradient comes with y's, multiplied by it.
    pub(super) fn pass(&self, x: &Tensor, noise: Option<Noise>, aux_scale: Option<f64>) -> Result<MoeOutput> {
        let flat = self.flat_tokens(x)?;
        let tracks = x.track_op() || self.trainable().next().is_some();
        run::forward(&self.group, &self.forward_inputs(x, &flat, aux_scale), Mode { backward: tracks, noise })
    }
}

/// A parameter outside the MoE layers, which every rank holds whole, as [`Checkpoint::save_parts`] takes it: `name` is that
/// on disk. The save copies it to the host piece by piece.
///
/// # Errors
/// A type that checkpoints do not have.
pub fn whole_tensor(name: &str, t: &Tensor) -> Result<RankTensor<'static>> {
    let part = part_of(name, t, ParamShard::whole(t.dims()))?;
    Ok(RankTensor { name: name.to_string(), dims: t.dims().to_vec(), part })
}

/// A tensor that a save reads piece by piece.
pub(super) fn part_of(name: &str, t: &Tensor, shard: ParamShard) -> crate::Result<RankPart<'static>> {
    const CALL: &str = "Checkpoint::save_parts";
    let dtype = dtype_of(CALL, name, t.dtype())?;
    let (name, t) = (name.to_string(), t.detach());
    let read = move |range: std::ops::Range<usize>| {
        let piece = t.flatten_all().and_then(|t| t.narrow(0, range.start, range.len()));
        let piece = piece.and_then(|t| t.contiguous()?.to_device(&Device::Cpu)).map_err(framework(CALL))?;
        with_views(&Cpu::new(), CALL, &[(&name, &piece)], |views| Ok(views[0].data().to_vec()))
    };
    Ok(RankPart::new(dtype, shard, read))
}

/// Copies of parameters.
fn on_host(params: &PerParam<Option<Tensor>>) -> Result<BlockParams> {
    const CALL: &str = "ExpertParallelMoE::to_block";
    let tensors = params.as_ref().try_map(|kind, t| t.as_ref().map(|t| host_copy(CALL, kind, t)).transpose())?;
    Ok(BlockParams::of(CALL, tensors)?)
}

/// A copy of a parameter.
pub(super) fn host_copy(call: &'static str, kind: ParamKind, t: &Tensor) -> Result<crate::Tensor<Cpu>> {
    let (cpu, t) = (Cpu::new(), t.to_device(&Device::Cpu)?.contiguous()?);
    Ok(with_views(&cpu, call, &[(kind.name(), &t)], |views| copy_of(&cpu, views[0]))?)
}
