//! Dense weights of a model as shards of a chain.

use burn::module::{Module, Param};
use burn::nn::{Embedding, Linear, RmsNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use crate::adapter::FrameworkDevice;
use crate::error::Result;
use crate::etp::{NO_LAYER, Shards, WeightId, WeightSpec};

use super::backend::{CoreDevice, MoeBackend, NativeBackend};
use super::dense_call::{DenseCall, DenseFunction, DenseInput, DenseWeight};
use super::etp::{Cut, ShardHolder, ShardList, ShardedParams};

const CALL: &str = "ShardedDense";

/// A linear or output layer, an embedding or a norm whose weights are shards of a [`ShardedParams`]' chain, which makes
/// it of burn's own: [`linear`](ShardedParams::linear), [`embedding`](ShardedParams::embedding),
/// [`rms_norm`](ShardedParams::rms_norm). Parameters, gradients and moments of a rank fall as 1/N; the whole weight is
/// there while it is in use. It runs within passes, as
/// [`ExpertParallelMoE::into_sharded`](super::ExpertParallelMoE::into_sharded)'s layers do, and is given to them.
#[derive(Module, Debug)]
pub struct ShardedDense<B: Backend> {
    /// This rank's shards, `[1, S, C]` each, of the weight's [lines](Shards::lines): the weight, and behind it the bias
    /// if there is one.
    pub shards: Vec<Param<Tensor<B, 3>>>,
    #[module(skip)]
    call: DenseCall,
}

/// A whole weight of a module, on its way to be cut.
struct Whole<'a, B: MoeBackend> {
    name: String,
    dims: Vec<usize>,
    /// `[1, lines, C]`.
    lines: Param<Tensor<B, 3>>,
    shards: &'a ShardedParams<B::Native>,
}

impl<'a, B: MoeBackend> Whole<'a, B> {
    fn new<const D: usize>(shards: &'a ShardedParams<B::Native>, name: String, param: &Param<Tensor<B, D>>) -> Self {
        let dims = param.dims().to_vec();
        let [lines, width] = Shards::lines(&dims);
        let whole = param.val().detach().reshape([1, lines, width]).detach().set_require_grad(param.is_require_grad());
        Self { name, dims, lines: Param::initialized(param.id, whole), shards }
    }

    /// With this rank's shard.
    fn cut(self) -> Result<(Self, Cut<B>)> {
        let cut = Cut::new(self.shards, &self.name, &self.lines)?;
        Ok((self, cut))
    }

    /// Adds it to the chain.
    fn add(self, cut: Cut<B>) -> Result<(DenseWeight, Param<Tensor<B, 3>>)> {
        let Self { name, dims, lines, shards } = self;
        let spec = WeightSpec::new(name.clone(), NO_LAYER, &lines.dims(), cut.dtype());
        let (id, param) = cut.add(shards, spec)?;
        Ok((DenseWeight { id, name, dims }, param))
    }
}

impl<B: NativeBackend> ShardedParams<B> {
    /// A linear layer as shards, `name` in errors. Its parameters keep their ids. Every rank cuts its shards from its own
    /// weights: load them, or draw them from the same [`Backend::seed`] on all ranks, replicas among them.
    ///
    /// # Errors
    /// A chain that is in use; a parameter on another device than the chain's.
    pub fn linear<M: MoeBackend<Native = B>>(&self, name: &str, linear: Linear<M>) -> Result<ShardedDense<M>> {
        let weight = Whole::new(self, format!("{name}.weight"), &linear.weight);
        let bias = linear.bias.as_ref().map(|bias| Whole::new(self, format!("{name}.bias"), bias));
        self.dense(DenseFunction::Linear, [Some(weight), bias])
    }

    /// An embedding as shards, as [`linear`](Self::linear).
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn embedding<M: MoeBackend<Native = B>>(&self, name: &str, embedding: Embedding<M>) -> Result<ShardedDense<M>> {
        let weight = Whole::new(self, format!("{name}.weight"), &embedding.weight);
        self.dense(DenseFunction::Embedding, [Some(weight), None])
    }

    /// A norm as shards, as [`linear`](Self::linear).
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    pub fn rms_norm<M: MoeBackend<Native = B>>(&self, name: &str, norm: RmsNorm<M>) -> Result<ShardedDense<M>> {
        let gamma = Whole::new(self, format!("{name}.gamma"), &norm.gamma);
        self.dense(DenseFunction::RmsNorm { epsilon: norm.epsilon }, [Some(gamma), None])
    }

    fn dense<M: MoeBackend<Native = B>>(
        &self,
        function: DenseFunction,
        weights: [Option<Whole<'_, M>>; 2],
    ) -> Result<ShardedDense<M>> {
        // All are cut before one is added: the chain keeps no weight of a module that could not be made.
        let cuts = weights.into_iter().flatten().map(Whole::cut).collect::<Result<Vec<_>>>()?;
        let added = cuts.into_iter().map(|(whole, cut)| whole.add(cut)).collect::<Result<Vec<_>>>()?;
        let (weights, shards) = added.into_iter().unzip();
        let chain = CoreDevice::<M>::any_chain(self.chain().clone());
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
        self.run(DenseInput::Rows(x.into_primitive().tensor()))
    }

    /// Rows of an embedding's weight by ids `[batch, tokens]`, as [`Embedding::forward`] has it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn embed(&self, ids: Tensor<B, 2, Int>) -> Result<Tensor<B, 3>> {
        self.run(DenseInput::Ids(ids.into_primitive()))
    }

    fn run<const D: usize>(
        &self,
        input: DenseInput<burn::tensor::ops::FloatTensor<B>, burn::tensor::ops::IntTensor<B>>,
    ) -> Result<Tensor<B, D>> {
        let shards = self.shards.iter().map(|shard| shard.val().into_primitive().tensor()).collect();
        Ok(Tensor::from_primitive(TensorPrimitive::Float(B::dense(&self.call, input, shards)?)))
    }

    /// The weights' places in the chain, in the order of [`shards`](Self::shards).
    pub fn weight_ids(&self) -> Vec<WeightId> {
        self.call.weights.iter().map(|weight| weight.id).collect()
    }
}

impl<B: MoeBackend> ShardHolder for ShardedDense<B> {
    type Backend = B;

    fn shard_list(&self) -> Option<ShardList<'_, B>> {
        let name = self.call.weights.first().map_or(CALL, |weight| weight.name.as_str());
        let params = self.call.weights.iter().map(|weight| weight.id).zip(&self.shards).collect();
        Some(ShardList { chain: self.call.chain.clone(), name: name.to_string(), params })
    }
}
