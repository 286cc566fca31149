//! Dense weights of a model as shards of a chain.

use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use crate::adapter::FrameworkDevice;
use crate::checkpoint::{Checkpoint, RankTensor, ShardOptions};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::{Chain, NO_LAYER, Shards, WeightId, WeightSpec};
use crate::optim::ParamShard;

use super::adamw_param::AdamWParam;
use super::backend::{CoreDevice, LayerBackend, MoeBackend, NativeBackend, NativeMemory, float};
use super::dense_call::{DenseCall, DenseFunction, DenseInput, DenseWeight};
use super::etp::{ShardHolder, ShardList, ShardedParams};
use super::shard_param::{FloatParam, ParamSource, cut, part_of};

const CALL: &str = "ShardedDense";

/// A linear or output layer, an embedding or a norm whose weights are shards of a [`ShardedParams`]' chain, which makes
/// it of burn's own: [`linear`](ShardedParams::linear), [`embedding`](ShardedParams::embedding),
/// [`rms_norm`](ShardedParams::rms_norm). Parameters, gradients and moments of a rank fall as 1/N; the whole weight is
/// there while it is in use. It runs within passes, as
/// [`ExpertParallelMoE::into_sharded`](super::ExpertParallelMoE::into_sharded)'s layers do, and is given to them.
#[derive(Module, Debug)]
pub struct ShardedDense<B: Backend> {
    /// This rank's shards, `[1, S, C]` each, of the weight's [lines](Shards::lines): the weight, of a linear layer
    /// `[output, input]`, and behind it the bias if there is one.
    pub shards: Vec<Param<Tensor<B, 3>>>,
    #[module(skip)]
    call: DenseCall,
}

/// A weight of a dense module, whole or this rank's shard, on its way to a chain.
struct NamedParam<B: MoeBackend> {
    name: String,
    /// Sizes of the whole.
    dims: Vec<usize>,
    /// `[1, lines, C]`, or `[1, S, C]`.
    param: Param<Tensor<B, 3>>,
}

impl<B: MoeBackend> NamedParam<B> {
    /// A whole weight, under its parameter's id.
    fn whole<const D: usize>(name: String, weight: Tensor<B, D>, (id, tracked): (ParamId, bool)) -> Self {
        let dims = weight.dims().to_vec();
        let [lines, width] = Shards::lines(&dims);
        let whole = weight.detach().reshape([1, lines, width]).detach().set_require_grad(tracked);
        Self { name, dims, param: Param::initialized(id, whole) }
    }

    /// The same of a parameter.
    fn of<const D: usize>(name: String, param: &Param<Tensor<B, D>>) -> Self {
        Self::whole(name, param.val(), (param.id, param.is_require_grad()))
    }

    /// Makes it this rank's shard.
    fn cut(mut self, chain: &Chain<CoreDevice<B>>) -> Result<SourceOf<B>> {
        let source = cut(chain, &self.name, &mut self.param, &Shards::lines(&self.dims))?;
        Ok((self, source))
    }

    /// It is this rank's shard.
    fn read_as_shard(self, chain: &Chain<CoreDevice<B>>) -> Result<SourceOf<B>> {
        let shard = chain.shards(&Shards::lines(&self.dims))?.shard_dims();
        let source = ParamSource::of(chain.device(), &self.name, &self.param, shard)?;
        Ok((self, source))
    }
}

/// A weight with what its chain reads of it.
type SourceOf<B> = (NamedParam<B>, Arc<ParamSource<<B as LayerBackend>::Native>>);

/// Weights of a checkpoint that a chain's ranks load as shards of a [`ShardedDense`].
#[derive(Debug, Clone, Copy)]
pub struct DenseLoad<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// The module in it (`model.layers.0.self_attn.q_proj`): its tensors are `{name}.weight` and `{name}.bias`.
    pub name: &'a str,
    /// Floating type of the parameters; `None`: as stored.
    pub dtype: Option<DType>,
}

impl DenseLoad<'_> {
    /// This rank's shard of a tensor.
    fn shard<B: MoeBackend>(
        &self,
        chain: &Chain<CoreDevice<B>>,
        tensor: &str,
        device: &B::Device,
    ) -> Result<NamedParam<B>> {
        let name = format!("{}.{tensor}", self.name);
        let dims = self.checkpoint.tensor_dims(&name)?;
        let cut = ShardOptions { rank: chain.rank(), ranks: chain.ranks(), pad: chain.options().pad };
        let shard = self.checkpoint.tensor_shard(&name, self.dtype, cut)?;
        let cubed = [&[1], shard.dims()].concat();
        let shard = Tensor::from_primitive(TensorPrimitive::Float(float::<B>(shard.reshape(&cubed)?, device)?));
        Ok(NamedParam { name, dims, param: Param::from_tensor(shard) })
    }

    fn has(&self, tensor: &str) -> bool {
        self.checkpoint.has(&format!("{}.{tensor}", self.name))
    }
}

impl<B: NativeBackend> ShardedParams<B> {
    /// A linear layer as shards, whose weights are `{name}.weight`, `[output, input]` as published, and `{name}.bias`.
    /// Its parameters keep their ids. Every rank cuts its shards from its own weights: load them, or draw them from the
    /// same [`Backend::seed`] on all ranks, replicas among them.
    ///
    /// # Errors
    /// A chain that is in use; a parameter on another device than the chain's.
    pub fn linear<M: MoeBackend<Native = B>>(&self, name: &str, linear: Linear<M>) -> Result<ShardedDense<M>> {
        let Linear { weight, bias } = linear;
        let (id, tracked) = (weight.id, weight.is_require_grad());
        let weight = NamedParam::whole(format!("{name}.weight"), weight.val().detach().transpose(), (id, tracked));
        let bias = bias.as_ref().map(|bias| NamedParam::of(format!("{name}.bias"), bias));
        self.dense(DenseFunction::Linear, [Some(weight), bias])
    }

    /// An embedding as shards, as [`linear`](Self::linear); its weight is `{name}.weight`.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn embedding<M: MoeBackend<Native = B>>(&self, name: &str, embedding: Embedding<M>) -> Result<ShardedDense<M>> {
        self.dense(DenseFunction::Embedding, [Some(NamedParam::of(format!("{name}.weight"), &embedding.weight)), None])
    }

    /// A norm as shards, as [`linear`](Self::linear); its γ is `{name}.weight`.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn rms_norm<M: MoeBackend<Native = B>>(&self, name: &str, norm: RmsNorm<M>) -> Result<ShardedDense<M>> {
        let gamma = NamedParam::of(format!("{name}.weight"), &norm.gamma);
        self.dense(DenseFunction::RmsNorm { epsilon: norm.epsilon }, [Some(gamma), None])
    }

    /// A linear layer of a checkpoint, with its bias if it has one, of which this rank reads its shards alone, at whatever
    /// number of ranks the checkpoint was saved. [`ShardedDense::to_parts`] is the way back.
    ///
    /// # Errors
    /// A tensor that is not there, or cannot be converted; a weight that is no matrix; as [`linear`](Self::linear).
    pub fn load_linear<M: MoeBackend<Native = B>>(
        &self,
        from: DenseLoad<'_>,
        device: &M::Device,
    ) -> Result<ShardedDense<M>> {
        let weight = from.shard(self.chain(), "weight", device)?;
        let bias = if from.has("bias") { Some(from.shard(self.chain(), "bias", device)?) } else { None };
        let output = weight.dims.first().copied().unwrap_or(0);
        if let Some(bias) = &bias {
            Error::check_shape("ShardedParams::load_linear", &bias.name, &[output], &bias.dims)?;
        }
        self.loaded(DenseFunction::Linear, 2, [Some(weight), bias])
    }

    /// An embedding of a checkpoint, as [`load_linear`](Self::load_linear).
    ///
    /// # Errors
    /// As [`load_linear`](Self::load_linear).
    pub fn load_embedding<M: MoeBackend<Native = B>>(
        &self,
        from: DenseLoad<'_>,
        device: &M::Device,
    ) -> Result<ShardedDense<M>> {
        self.loaded(DenseFunction::Embedding, 2, [Some(from.shard(self.chain(), "weight", device)?), None])
    }

    /// A norm of a checkpoint with this ε, as [`load_linear`](Self::load_linear).
    ///
    /// # Errors
    /// As [`load_linear`](Self::load_linear); a weight that is no vector.
    pub fn load_rms_norm<M: MoeBackend<Native = B>>(
        &self,
        from: DenseLoad<'_>,
        epsilon: f64,
        device: &M::Device,
    ) -> Result<ShardedDense<M>> {
        let gamma = from.shard(self.chain(), "weight", device)?;
        self.loaded(DenseFunction::RmsNorm { epsilon }, 1, [Some(gamma), None])
    }

    fn dense<M: MoeBackend<Native = B>>(
        &self,
        function: DenseFunction,
        weights: [Option<NamedParam<M>>; 2],
    ) -> Result<ShardedDense<M>> {
        // All are cut before one is added: the chain keeps no weight of a module that could not be made.
        let cuts = weights.into_iter().flatten().map(|weight| weight.cut(self.chain()));
        self.add_dense(function, cuts.collect::<Result<Vec<_>>>()?)
    }

    /// The same of shards; the first weight has so many dimensions.
    fn loaded<M: MoeBackend<Native = B>>(
        &self,
        function: DenseFunction,
        dimensions: usize,
        weights: [Option<NamedParam<M>>; 2],
    ) -> Result<ShardedDense<M>> {
        if let Some(weight) = weights.iter().flatten().next().filter(|weight| weight.dims.len() != dimensions) {
            let expected = format!("{dimensions} dimensions");
            return Err(Error::invalid("ShardedParams::load", &weight.name, expected, format!("{:?}", weight.dims)));
        }
        let cuts = weights.into_iter().flatten().map(|weight| weight.read_as_shard(self.chain()));
        self.add_dense(function, cuts.collect::<Result<Vec<_>>>()?)
    }

    fn add_dense<M: MoeBackend<Native = B>>(
        &self,
        function: DenseFunction,
        cuts: Vec<SourceOf<M>>,
    ) -> Result<ShardedDense<M>> {
        let new = |(weight, source): SourceOf<M>| -> Result<_> {
            let spec = WeightSpec::new(&*weight.name, NO_LAYER, &Shards::lines(&weight.dims), source.dtype);
            self.check(&spec, &source)?;
            Ok((weight, spec, source))
        };
        // The chain would take all of them: nothing is added before this is known.
        let cuts = cuts.into_iter().map(new).collect::<Result<Vec<_>>>()?;
        let add = |(NamedParam { name, dims, param }, spec, source)| -> Result<_> {
            Ok((DenseWeight { id: self.add(spec, source)?, name, dims }, param))
        };
        let added = cuts.into_iter().map(add).collect::<Result<Vec<_>>>()?;
        let (weights, shards) = added.into_iter().unzip();
        let chain = CoreDevice::<M>::erase(self.chain().clone());
        Ok(ShardedDense { shards, call: DenseCall { chain, weights, function, failure: self.failure().clone() } })
    }
}

impl<B: MoeBackend> ShardedDense<B> {
    /// y of x, `[…, width]`; not of an embedding.
    ///
    /// # Errors
    /// Rows of another width; no pass, or another order than the first forward's; the gather's. Every rank then calls
    /// [`Chain::recover`](crate::etp::Chain::recover).
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Result<Tensor<B, D>> {
        self.run(&self.call, DenseInput::Rows(x.into_primitive().tensor()))
    }

    /// Rows of an embedding's weight by ids `[batch, tokens]`, as [`Embedding::forward`] has it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn embed(&self, ids: Tensor<B, 2, Int>) -> Result<Tensor<B, 3>> {
        self.run(&self.call, DenseInput::Ids(ids.into_primitive()))
    }

    /// The output layer that shares an embedding's weight: y = x·Wᵀ, `[…, n]` of x `[…, width]`. The weight is gathered
    /// once more for it, and its gradient is the sum of both uses': each use's is added over the ranks first.
    ///
    /// # Errors
    /// A module that is no embedding; as [`forward`](Self::forward).
    pub fn tied_output<const D: usize>(&self, x: Tensor<B, D>) -> Result<Tensor<B, D>> {
        let function = self.call.function;
        if function != DenseFunction::Embedding {
            let found = format!("{function:?}");
            return Err(Error::invalid("ShardedDense::tied_output", "module", "an embedding", found));
        }
        let call = DenseCall { function: DenseFunction::Linear, ..self.call.clone() };
        self.run(&call, DenseInput::Rows(x.into_primitive().tensor()))
    }

    fn run<const D: usize>(
        &self,
        call: &DenseCall,
        input: DenseInput<burn::tensor::ops::FloatTensor<B>, burn::tensor::ops::IntTensor<B>>,
    ) -> Result<Tensor<B, D>> {
        let shards = self.shards.iter().map(|shard| shard.val().into_primitive().tensor()).collect();
        Ok(Tensor::from_primitive(TensorPrimitive::Float(B::dense(call, input, shards)?)))
    }

    /// This rank's parts of the weights, for [`Checkpoint::save_parts`]: nothing is copied before it is written.
    ///
    /// # Errors
    /// None for weights that were made.
    pub fn to_parts(&self) -> Result<Vec<RankTensor<'static>>> {
        let part = |(weight, param): (&DenseWeight, &Param<Tensor<B, 3>>)| {
            let (cut, rank) = self.call.chain.cut(&Shards::lines(&weight.dims))?;
            let shard = ParamShard::whole(cut.dims()).shard(&cut, rank)?;
            let tensor = B::Native::contiguous(param.native());
            let part = part_of::<B::Native>(&weight.name, tensor, shard)?;
            Ok(RankTensor { name: weight.name.clone(), dims: weight.dims.clone(), part })
        };
        self.call.weights.iter().zip(&self.shards).map(part).collect()
    }

    /// Says of the weights' shards among these which parts they are, for [`AdamW`](super::AdamW).
    ///
    /// # Errors
    /// None for weights that were made.
    pub fn place_shards(&self, params: &mut [AdamWParam]) -> Result<()> {
        for (weight, shard) in self.call.weights.iter().zip(&self.shards) {
            let (cut, rank) = self.call.chain.cut(&Shards::lines(&weight.dims))?;
            if let Some(param) = params.iter_mut().find(|param| param.id() == shard.id) {
                param.set_shard(ParamShard::whole(cut.dims()).shard(&cut, rank)?);
            }
        }
        Ok(())
    }

    /// The weights' places in the chain, in the order of [`shards`](Self::shards).
    pub fn weight_ids(&self) -> Vec<WeightId> {
        self.call.weights.iter().map(|weight| weight.id).collect()
    }
}

impl<B: MoeBackend> ShardHolder for ShardedDense<B> {
    type Backend = B;

    fn shard_lists(&self) -> Vec<ShardList<'_, B>> {
        let name = self.call.weights.first().map_or(CALL, |weight| weight.name.as_str());
        let params = self.shards.iter().map(|shard| shard as &dyn FloatParam<B>);
        let params = self.call.weights.iter().map(|weight| weight.id).zip(params).collect();
        vec![ShardList { chain: self.call.chain.clone(), name: name.to_string(), params }]
    }
}
