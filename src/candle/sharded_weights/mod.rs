//! A model's dense weights as shards of a chain: gathered for the computation that uses them, and again for its
//! backward.

mod module;
mod tensor;

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use crate::checkpoint::{Checkpoint, RankTensor, ShardOptions};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::etp::Chain;

use super::device::{CandleDevice, dtype_of};
use super::etp::WeightVar;
use super::initial::{ShardInit, full_name, uniform};
use super::module::part_of;
use super::optimizer::AdamWParam;
use super::options::{Parameters, place_in, tensor};
use super::sharded_functions::{EmbeddingFunction, LinearFunction, ShardedFunction};

use tensor::{ALONE, CALL};

pub use module::ShardedModule;
pub(super) use tensor::{LayerPlace, NewShardedTensor, ShardedTensor, check_shard};

/// A weight that [`ShardedWeights::function`] makes or finds.
#[derive(Debug, Clone, Copy)]
pub struct NewWeight<'a> {
    /// Its name behind the builder's prefix.
    pub name: &'a str,
    /// Sizes of the whole.
    pub dims: &'a [usize],
    /// Values of a variable that is new.
    pub init: Init,
}

impl<'a> NewWeight<'a> {
    /// From its parts.
    pub fn new(name: &'a str, dims: &'a [usize], init: Init) -> Self {
        Self { name, dims, init }
    }
}

/// Makes the dense weights of a model shards of a chain: linear and output layers, embeddings, norms, and whatever a
/// [`ShardedFunction`] computes. Parameters, gradients and an optimizer's moments of a rank fall as 1/N; the whole
/// weight is there while it is in use.
///
/// Variables are named as those of candle-nn's layers, and hold this rank's shard, `[S, C]` of the weight's
/// [lines](crate::etp::Shards::lines). New ones have the initial values of their names and places, under
/// [`EtpOptions::seed`](crate::etp::EtpOptions::seed). Modules run within the chain's passes, in backward in reverse;
/// of operands of one operation the left one comes first. Their gradients come with
/// [`finish_sharded`](super::finish_sharded).
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{Optimizer, VarBuilder, VarMap};
/// use moebius::candle::{AdamW, GradientType, ShardedWeights, finish_sharded};
/// use moebius::comm::Solo;
/// use moebius::cpu::Cpu;
/// use moebius::etp::{Chain, Comms, EtpOptions, Phase};
/// use moebius::optim::AdamWOptions;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // One rank here; over several, communicators of all ranks.
/// let comms = Comms::<Cpu> { gather: Box::new(Solo::new(Cpu::new())), reduce: Box::new(Solo::new(Cpu::new())) };
/// let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
/// let vars = VarMap::new();
/// let weights = ShardedWeights::new(&chain, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu));
/// let embedding = weights.pp("embed").embedding(100, 16)?;
/// let linear = weights.pp("proj").linear(16, 16)?;
/// let output = embedding.tied_output();
/// let mut adam = AdamW::with_groups(weights.optimizer_params(), AdamWOptions::default(), &[Default::default()])?;
/// let ids = Tensor::new(&[1u32, 5, 7], &Device::Cpu)?;
/// chain.begin(Phase::Forward)?;
/// let logits = output.forward(&linear.forward(&embedding.forward(&ids)?)?.silu()?)?;
/// let loss = candle_nn::loss::cross_entropy(&logits, &Tensor::new(&[5u32, 7, 2], &Device::Cpu)?)?;
/// chain.end()?;
/// chain.begin(Phase::Backward)?;
/// let mut gradients = loss.backward()?;
/// chain.end()?;
/// finish_sharded(&chain, None, &weights.shards(), &mut gradients, GradientType::AsSummed)?;
/// adam.step(&gradients)?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ShardedWeights<'a, D: CandleDevice = Cpu> {
    chain: Arc<Chain<D>>,
    vb: VarBuilder<'a>,
    /// All weights made so far, by this and by those that [`pp`](Self::pp) makes.
    all: Arc<Mutex<Vec<Arc<ShardedTensor<D>>>>>,
}

impl<D: CandleDevice> Debug for ShardedWeights<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardedWeights<{} in {:?}>", self.vb.prefix(), self.chain)
    }
}

impl<'a, D: CandleDevice> ShardedWeights<'a, D> {
    /// Weights whose shards come from `vb`, on the chain's device.
    pub fn new(chain: &Arc<Chain<D>>, vb: VarBuilder<'a>) -> Self {
        Self { chain: Arc::clone(chain), vb, all: Arc::default() }
    }

    /// Weights whose shards are read of a checkpoint, where they have the same names, on `device`, the chain's; `dtype` as
    /// [`LoadOptions::dtype`](crate::checkpoint::LoadOptions::dtype).
    ///
    /// # Errors
    /// Another type than f64, f32, f16 or bf16. What cannot be read is found when a weight is made.
    pub fn from_checkpoint(
        chain: &Arc<Chain<D>>,
        checkpoint: &'a Checkpoint,
        device: &Device,
        params: Parameters,
        dtype: Option<DType>,
    ) -> Result<Self> {
        let as_dtype = dtype.map(|dtype| dtype_of(CALL, "dtype", dtype)).transpose()?;
        let stored = StoredShards { checkpoint, cut: place_in(chain), params, dtype: as_dtype };
        let vb = VarBuilder::from_backend(Box::new(stored), dtype.unwrap_or(DType::F32), device.clone());
        Ok(Self::new(chain, vb))
    }

    /// The same with a name before those of the weights.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { chain: Arc::clone(&self.chain), vb: self.vb.pp(name), all: Arc::clone(&self.all) }
    }

    /// y = x·Wᵀ + b, of `weight` `[output, input]` and `bias` `[output]`.
    ///
    /// # Errors
    /// As [`function`](Self::function).
    pub fn linear(&self, input: usize, output: usize) -> Result<ShardedModule<D>> {
        let uniform = uniform(input);
        let new = |name, dims| NewWeight { name, dims, init: uniform };
        self.function(&[new("weight", &[output, input]), new("bias", &[output])], LinearFunction)
    }

    /// y = x·Wᵀ, of `weight` `[output, input]`.
    ///
    /// # Errors
    /// As [`function`](Self::function).
    pub fn linear_no_bias(&self, input: usize, output: usize) -> Result<ShardedModule<D>> {
        self.function(&[NewWeight::new("weight", &[output, input], uniform(input))], LinearFunction)
    }

    /// Rows of `weight` `[vocabulary, hidden]` by ids, as [`candle_nn::Embedding`] has it.
    ///
    /// # Errors
    /// As [`function`](Self::function).
    pub fn embedding(&self, vocabulary: usize, hidden: usize) -> Result<ShardedModule<D>> {
        let normal = Init::Randn { mean: 0.0, stdev: 1.0 };
        self.function(&[NewWeight::new("weight", &[vocabulary, hidden], normal)], EmbeddingFunction)
    }

    /// A computation with weights of these names, sizes and initial values, which are gathered in this order. The chain
    /// gets all of them, or after an error none.
    ///
    /// # Errors
    /// A shard of another size, a computed one, or one on another device; a chain that is in use.
    pub fn function(
        &self,
        weights: &[NewWeight<'_>],
        function: impl ShardedFunction + 'static,
    ) -> Result<ShardedModule<D>> {
        // All are known to be sound before any is added.
        let new = weights.iter().map(|new| self.weight(new.name, new.dims, new.init)).collect::<Result<Vec<_>>>()?;
        let weights = new.into_iter().map(|new| Ok(self.register(new.add()?))).collect::<Result<Vec<_>>>()?;
        Ok(ShardedModule { weights: Arc::new(weights), function: Arc::new(function) })
    }

    fn weight(&self, name: &str, dims: &[usize], init: Init) -> Result<NewShardedTensor<D>> {
        let cut = ShardedTensor::cut(&self.chain, dims)?;
        let shard = ShardInit {
            name,
            full_name: self.full_name(name),
            dims,
            rank: self.chain.rank(),
            shape: cut.shard_dims().to_vec(),
            cut,
            before: 0,
            init,
            dtype: self.vb.dtype(),
            seed: self.chain.options().seed,
        };
        let shard = shard.tensor(&self.vb)?;
        Ok(NewShardedTensor::new(&self.chain, self.full_name(name), dims, shard, ALONE)?)
    }

    /// A weight's name behind those before it.
    pub(super) fn full_name(&self, name: &str) -> String {
        full_name(&self.vb, name)
    }

    /// Where variables come from.
    pub(super) fn builder(&self) -> &VarBuilder<'a> {
        &self.vb
    }

    /// Counts a weight among those of this builder.
    pub(super) fn register(&self, weight: ShardedTensor<D>) -> Arc<ShardedTensor<D>> {
        let weight = Arc::new(weight);
        self.all().push(Arc::clone(&weight));
        weight
    }

    fn all(&self) -> std::sync::MutexGuard<'_, Vec<Arc<ShardedTensor<D>>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The chain.
    pub fn chain(&self) -> &Arc<Chain<D>> {
        &self.chain
    }

    /// The variables of all weights that were made of this builder, or of one that it was made of, with their places in
    /// the chain, as [`finish_sharded`](super::finish_sharded) takes them.
    pub fn shards(&self) -> Vec<WeightVar> {
        self.all().iter().filter_map(|weight| Some(WeightVar { id: weight.id, var: weight.var()? })).collect()
    }

    /// This rank's parts of the weights, but for those of [`ExpertParallelMoE`](super::ExpertParallelMoE)s
    /// ([`to_parts`](super::ExpertParallelMoE::to_parts) has these), for [`Checkpoint::save_parts`].
    ///
    /// # Errors
    /// None for weights that were made.
    pub fn to_parts(&self) -> Result<Vec<RankTensor<'static>>> {
        let all = self.all();
        let alone = all.iter().filter(|weight| !weight.resident);
        let part = |weight: &Arc<ShardedTensor<D>>| {
            let (name, dims) = (weight.name.clone(), weight.dims.clone());
            let part = part_of(&name, &weight.shard, weight.part.clone())?;
            Ok(RankTensor { name, dims, part })
        };
        alone.map(part).collect()
    }

    /// The same variables by their full names, with what this rank holds of each, for
    /// [`AdamW::over_ranks`](super::AdamW::over_ranks).
    pub fn optimizer_params(&self) -> Vec<AdamWParam> {
        self.all().iter().filter_map(|weight| weight.optimizer_param(weight.name.clone())).collect()
    }
}

/// Shards of a checkpoint's tensors.
struct StoredShards<'a> {
    checkpoint: &'a Checkpoint,
    cut: ShardOptions,
    params: Parameters,
    dtype: Option<crate::DType>,
}

impl SimpleBackend for StoredShards<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let shard = self.get_unchecked(name, dtype, device)?;
        Error::check_shape("ShardedWeights::from_checkpoint", name, shape.dims(), shard.dims())?;
        Ok(shard)
    }

    fn get_unchecked(&self, name: &str, _: DType, device: &Device) -> Result<Tensor> {
        tensor(self.checkpoint.tensor_shard(name, self.dtype, self.cut)?, device, self.params)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.has(name)
    }
}
