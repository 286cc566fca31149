//! A model's dense weights as shards of a chain: gathered for the computation that uses them, and again for its
//! backward.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Device, Layout, Module, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use crate::checkpoint::{Checkpoint, RankTensor, ShardOptions};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::etp::{Chain, NO_LAYER, NewShard, Shards, WeightId, WeightSpec};
use crate::optim::ParamShard;
use crate::weights::{Weight, WeightSource};

use super::device::{CandleDevice, copy_of, dtype_of, into_candle, with_views};
use super::error::framework;
use super::etp::{VarShard, WeightVar};
use super::initial::{ShardInit, full_name};
use super::module::part_of;
use super::optimizer::AdamWParam;
use super::options::{Parameters, place_in, tensor};
use super::precomputed::Precomputed;
use super::sharded_functions::{EmbeddingFunction, LinearFunction, ShardedFunction};

const CALL: &str = "sharded weights";

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

/// A weight of a chain, and this rank's shard of it.
#[derive(Debug)]
pub(super) struct ShardedTensor<D: CandleDevice> {
    pub(super) chain: Arc<Chain<D>>,
    pub(super) id: WeightId,
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) shard: Tensor,
    /// A layer's.
    resident: bool,
    /// This rank's part.
    pub(super) part: ParamShard,
}

/// Refuses a shard that is computed: the chain keeps the gradient, so there is none for the variables that it is
/// computed from.
pub(super) fn check_shard(name: &str, shard: &Tensor) -> crate::Result<()> {
    if shard.track_op() && !shard.is_variable() {
        return Err(Error::invalid(CALL, name, "a variable, or a constant", "a computed shard"));
    }
    Ok(())
}

/// How a weight is used.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerPlace {
    /// Number of the layer that it belongs to.
    pub(super) layer: u32,
    /// It is in use while the layer's other weights are.
    pub(super) resident: bool,
}

/// By itself.
const ALONE: LayerPlace = LayerPlace { layer: NO_LAYER, resident: false };

/// A weight that its chain would take, and has not got yet.
pub(super) struct NewShardedTensor<D: CandleDevice> {
    chain: Arc<Chain<D>>,
    new: NewShard<D>,
    dims: Vec<usize>,
    shard: Tensor,
    part: ParamShard,
}

impl<D: CandleDevice> NewShardedTensor<D> {
    /// Asks the chain.
    pub(super) fn new(
        chain: &Arc<Chain<D>>,
        name: String,
        dims: &[usize],
        shard: Tensor,
        of: LayerPlace,
    ) -> crate::Result<Self> {
        if !chain.device().is(shard.device()) {
            let found = D::other(shard.device());
            return Err(Error::invalid(CALL, name, "a tensor on the chain's device", found));
        }
        check_shard(&name, &shard)?;
        let cut = ShardedTensor::cut(chain, dims)?;
        let part = ParamShard::whole(cut.dims()).shard(&cut, chain.rank())?;
        let dtype = dtype_of(CALL, &name, shard.dtype())?;
        let mut spec = WeightSpec::new(name, of.layer, cut.dims(), dtype);
        spec.resident = of.resident;
        let new = NewShard::new(spec, Arc::new(VarShard::on(chain.device(), &shard)));
        chain.check(std::slice::from_ref(&new))?;
        Ok(Self { chain: Arc::clone(chain), new, dims: dims.to_vec(), shard, part })
    }

    /// Adds it to the chain.
    pub(super) fn add(self) -> crate::Result<ShardedTensor<D>> {
        let Self { chain, new: NewShard { spec, source }, dims, shard, part } = self;
        let (name, resident) = (spec.name.clone(), spec.resident);
        let id = chain.add(spec, source)?;
        Ok(ShardedTensor { chain, id, name, dims, shard, resident, part })
    }
}

impl<D: CandleDevice> ShardedTensor<D> {
    /// The cut of a weight of sizes `dims`.
    pub(super) fn cut(chain: &Chain<D>, dims: &[usize]) -> crate::Result<Shards> {
        chain.shards(&Shards::lines(dims))
    }

    /// The whole weight, in memory of candle's (collective); `backward`: a backward gathers it again.
    fn gather(&self, backward: bool) -> crate::Result<Tensor> {
        let (device, source) = (self.chain.device(), self.chain.source(self.id)?.with_backward(backward));
        let guard = source.acquire()?;
        device.wait(guard.ready.as_ref())?;
        let Weight::Dense(whole) = guard.weight()? else {
            return Err(Error::invalid(CALL, &self.name, "a dense weight", "a quantized one"));
        };
        into_candle(copy_of(device, whole)?, &self.dims, self.shard.device())
    }

    /// Hands the whole weight's gradient in.
    fn submit(&self, gradient: &Tensor) -> crate::Result<()> {
        Error::check_shape(CALL, &self.name, &self.dims, gradient.dims())?;
        let gradient = gradient.contiguous().map_err(framework(CALL))?;
        let device = self.chain.device();
        let mut buffer = self.chain.gradient_buffer(self.id)?;
        with_views(device, CALL, &[(&self.name, &gradient)], |views| {
            let into = buffer.view_mut()?;
            Error::check_dtype(CALL, &self.name, into.dtype(), views[0].dtype())?;
            device.copy(views[0].data(), into.into_data())
        })?;
        self.chain.submit(buffer)
    }

    /// The variable, if the weight is trained.
    pub(super) fn var(&self) -> Option<Var> {
        self.shard.is_variable().then(|| Var::from_tensor(&self.shard).ok()).flatten()
    }

    /// The variable as an optimizer is told of it.
    pub(super) fn optimizer_param(&self, name: String) -> Option<AdamWParam> {
        Some(AdamWParam::new(name, &self.var()?).with_shard(self.part.clone()))
    }
}

/// Makes the dense weights of a model shards of a chain: linear and output layers, embeddings, norms, and whatever a
/// [`ShardedFunction`] computes. Parameters, gradients and an optimizer's moments of a rank fall as 1/N; the whole
/// weight is there while it is in use.
///
/// Variables are named as those of candle-nn's layers, and hold this rank's shard, `[S, C]` of the weight's
/// [lines](Shards::lines). New ones have the initial values of their names and places, under
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

/// As candle-nn initializes a linear layer's bias.
fn uniform(input: usize) -> Init {
    let bound = 1.0 / (input as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A computation with weights that are sharded, as a candle module: [`ShardedWeights`] makes it.
#[derive(Clone)]
pub struct ShardedModule<D: CandleDevice = Cpu> {
    weights: Arc<Vec<Arc<ShardedTensor<D>>>>,
    function: Arc<dyn ShardedFunction>,
}

impl<D: CandleDevice> Debug for ShardedModule<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.weights.iter().map(|weight| weight.name.as_str()).collect();
        write!(f, "ShardedModule{names:?}")
    }
}

impl<D: CandleDevice> ShardedModule<D> {
    /// Another computation with the same weights, which are gathered once more for it.
    pub fn with(&self, function: impl ShardedFunction + 'static) -> Self {
        Self { weights: Arc::clone(&self.weights), function: Arc::new(function) }
    }

    /// The output layer that shares an embedding's weight: y = x·Wᵀ.
    pub fn tied_output(&self) -> Self {
        self.with(LinearFunction)
    }

    /// The whole weights of a backward: the chain goes back the way that forward came.
    fn gather_back(&self) -> crate::Result<Vec<Tensor>> {
        let whole = self.weights.iter().rev().map(|weight| weight.gather(true));
        let mut whole = whole.collect::<crate::Result<Vec<_>>>()?;
        whole.reverse();
        Ok(whole)
    }

    fn gradient(&self, x: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let whole = self.gather_back()?;
        let gradient = gradient.contiguous()?;
        let (d_x, of_weights) = self.function.backward(&x.detach(), &whole, &gradient, x.track_op())?;
        drop(whole);
        if of_weights.len() != self.weights.len() {
            let expected = format!("one of each of {} weights", self.weights.len());
            return Err(Error::invalid("ShardedFunction::backward", "gradients", expected, of_weights.len()).into());
        }
        match &d_x {
            Some(d_x) => Error::check_shape("ShardedFunction::backward", "gradient of x", x.dims(), d_x.dims())?,
            None if x.track_op() => {
                let expected = "one, as x tracks gradients";
                return Err(Error::invalid("ShardedFunction::backward", "gradient of x", expected, "none").into());
            }
            None => {}
        }
        for (weight, gradient) in self.weights.iter().zip(of_weights).rev() {
            if weight.shard.is_variable() {
                weight.submit(&gradient)?;
            }
        }
        Ok(d_x)
    }
}

impl<D: CandleDevice> Module for ShardedModule<D> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let trained = self.weights.iter().find(|weight| weight.shard.is_variable());
        let backward = trained.is_some() || x.track_op();
        let whole = self.weights.iter().map(|weight| weight.gather(backward)).collect::<crate::Result<Vec<_>>>()?;
        let y = self.function.forward(&x.detach(), &whole)?;
        drop(whole);
        if y.track_op() {
            let expected = "one of x and the weights alone";
            let found = "one that another variable's gradient would have to go through";
            return Err(Error::invalid("ShardedModule::forward", "function", expected, found).into());
        }
        let y = y.detach();
        // candle tracks what hangs from a variable.
        let from = match trained {
            Some(weight) => &weight.shard,
            None if x.track_op() => x,
            None => return Ok(y),
        };
        x.apply_op2(from, ShardedFunctionOp { module: self.clone(), value: Precomputed::copy_of(&y)? })
    }
}

/// The computation's place in candle's graph: its inputs are x and a variable that makes candle track it.
struct ShardedFunctionOp<D: CandleDevice> {
    module: ShardedModule<D>,
    value: Precomputed,
}

impl<D: CandleDevice> CustomOp2 for ShardedFunctionOp<D> {
    fn name(&self) -> &'static str {
        "moebius-sharded"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.module.gradient(x, gradient)?.filter(|_| x.track_op()), None))
    }
}
