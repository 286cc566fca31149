//! Experts that are sharded over ranks, their shards burn's parameters.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive};

use crate::adapter::{Shard, Sharded};
use crate::comm::Communicator;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::{Chain, Payload, Phase, ShardSource, WeightId};
use crate::layer::ParamKind;
use crate::tensor::TensorRef;

use super::backend::{CoreDevice, MoeBackend, Named, NativeBackend, NativeMemory, ResultSpec, core_dtype};
use super::module::ExpertParallelMoE;

/// A [`Chain`] whose shards are parameters of burn modules, of a back end without autodiff.
///
/// burn's optimizers make new modules of new tensors, so a pass is told of the modules that it runs: what
/// [`begin`](Self::begin) is given is what the pass gathers.
///
/// ```
/// use std::sync::Arc;
/// use burn::backend::{Autodiff, Flex};
/// use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
/// use burn::tensor::{Distribution, Tensor};
/// use moebius::MoeConfig;
/// use moebius::burn::{ExpertParallelMoEConfig, ShardedParams};
/// use moebius::comm::Solo;
/// use moebius::cpu::Cpu;
/// use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase};
///
/// # fn main() -> moebius::Result<()> {
/// // One rank here; over several, communicators of the ranks that hold the same experts.
/// let comms = Comms::<Cpu> { gather: Box::new(Solo::new(Cpu::new())), reduce: Box::new(Solo::new(Cpu::new())) };
/// let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
/// let shards = ShardedParams::<Flex>::new(chain);
/// let (config, device) = (MoeConfig::new(64, 32, 8, 2), Default::default());
/// let moe = ExpertParallelMoEConfig::new(config).init::<Autodiff<Flex>>(&device)?;
/// let mut moe = moe.into_sharded(&shards, Payload::Plain)?;
/// let mut adam = AdamWConfig::new().init();
/// for _step in 0..2 {
///     let x = Tensor::<Autodiff<Flex>, 2>::random([5, 64], Distribution::Default, &device);
///     shards.begin(Phase::Forward, [&moe])?;
///     let loss = moe.forward(x)?.powi_scalar(2).mean();
///     shards.end()?;
///     shards.begin(Phase::Backward, [&moe])?;
///     let mut gradients = GradientsParams::from_grads(loss.backward(), &moe);
///     shards.end()?;
///     moe.reduce_gradients(&mut gradients)?;
///     shards.finish(None, [&moe], &mut gradients)?;
///     moe = adam.step(1e-3, moe, gradients);
/// }
/// # Ok(()) }
/// ```
pub struct ShardedParams<B: NativeBackend> {
    chain: Arc<Chain<B::Core>>,
    shards: Mutex<Vec<(WeightId, Arc<ParamShard<B>>)>>,
}

impl<B: NativeBackend> fmt::Debug for ShardedParams<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedParams").field("chain", &self.chain).finish_non_exhaustive()
    }
}

/// This rank's shard of a weight, as the last [`ShardedParams::begin`] found it.
struct ParamShard<B: NativeMemory> {
    device: B::Core,
    /// `[S, C]`.
    dims: [usize; 2],
    tensor: RwLock<B::Shared>,
}

impl<B: NativeMemory> fmt::Debug for ParamShard<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamShard{:?}", self.dims)
    }
}

impl<B: NativeMemory> ShardSource<B::Core> for ParamShard<B> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, B::Core>) -> Result<()>) -> Result<()> {
        let tensor = self.tensor.read().unwrap_or_else(PoisonError::into_inner);
        visit(B::view_shared(&self.device, &tensor)?.reshape(&self.dims)?)
    }
}

impl<B: NativeMemory> ParamShard<B> {
    /// Takes another tensor of `[1, S, C]`; gives back the one before.
    fn replace(&self, tensor: FloatTensor<B>) -> Result<B::Shared> {
        let [rows, width] = self.dims;
        Error::check_shape("ShardedParams::begin", "shard", &[1, rows, width], &tensor.shape())?;
        let tensor = B::contiguous(tensor);
        let shared = B::share(&self.device, Named { name: "shard", tensor: &tensor })?;
        Ok(std::mem::replace(&mut *self.tensor.write().unwrap_or_else(PoisonError::into_inner), shared))
    }
}

impl<B: NativeBackend> ShardedParams<B> {
    /// Over a chain, to which [`ExpertParallelMoE::into_sharded`] adds experts.
    pub fn new(chain: Arc<Chain<B::Core>>) -> Self {
        Self { chain, shards: Mutex::default() }
    }

    /// The chain.
    pub fn chain(&self) -> &Arc<Chain<B::Core>> {
        &self.chain
    }

    /// Begins a pass over modules: one forward, or one backward, of the whole model, whose sharded layers are all given.
    /// A forward gathers their parameters as they are now. See [`Chain::begin`]; parameters that have changed otherwise
    /// than by a step after [`finish`](Self::finish), and are sent quantized, are told of by
    /// [`Chain::invalidate_casts`].
    ///
    /// # Errors
    /// As [`Chain::begin`]; a weight of the chain that no module has; a shard of another shape than that which was added,
    /// of another device, or of another chain.
    pub fn begin<'m, M: MoeBackend<Native = B>>(
        &self,
        phase: Phase,
        modules: impl IntoIterator<Item = &'m ExpertParallelMoE<M>>,
    ) -> Result<()> {
        if phase == Phase::Forward {
            let mut given = Vec::new();
            for (id, param) in modules.into_iter().flat_map(weights) {
                given.push((self.shard(id)?, native(param)));
            }
            let all = self.shards().iter().all(|(_, shard)| given.iter().any(|(other, _)| Arc::ptr_eq(shard, other)));
            if !all {
                let (expected, found) = (self.shards().len(), given.len());
                return Err(Error::invalid("ShardedParams::begin", "weights", format!("all {expected}"), found));
            }
            let before = given.into_iter().map(|(shard, tensor)| shard.replace(tensor)).collect::<Result<Vec<_>>>()?;
            // Gathers wait for what wrote the shards; what gets the memory of those before, for what has read them.
            B::begin(self.chain.device())?;
            B::end(self.chain.device())?;
            drop(before);
        }
        self.chain.begin(phase)
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// As [`Chain::end`].
    pub fn end(&self) -> Result<()> {
        self.chain.end()
    }

    /// [`Chain::finish`] into burn's gradients: each shard's gradient, `[1, S, C]` in its parameter's type, where the
    /// optimizer looks for it. `modules` are those of the passes; a frozen shard has none.
    ///
    /// # Errors
    /// As [`Chain::finish`].
    pub fn finish<'m, M: AutodiffBackend + MoeBackend<Native = B>>(
        &self,
        replicas: Option<&mut dyn Communicator<B::Core>>,
        modules: impl IntoIterator<Item = &'m ExpertParallelMoE<M>>,
        gradients: &mut GradientsParams,
    ) -> Result<()> {
        let device = self.chain.device();
        // Before the chain's work is put behind burn's, as burn may have work to do on their memory first.
        let outputs = modules.into_iter().flat_map(weights).filter(|(_, param)| param.is_require_grad());
        let mut outputs = outputs.map(|(id, param)| ShardOutput::new(device, id, param)).collect::<Result<Vec<_>>>()?;
        B::begin(device)?;
        let finished = self.chain.finish(replicas, |id, gradient| {
            let Some(output) = outputs.iter_mut().find(|output| output.id == id) else { return Ok(()) };
            output.fill(device, gradient)
        });
        // Also behind a failure: what was enqueued may still use burn's memory.
        B::end(device)?;
        finished?;
        outputs.into_iter().filter(|output| output.filled).try_for_each(|output| output.register(gradients))
    }

    fn shards(&self) -> MutexGuard<'_, Vec<(WeightId, Arc<ParamShard<B>>)>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shard(&self, id: WeightId) -> Result<Arc<ParamShard<B>>> {
        let found = self.shards().iter().find(|(other, _)| *other == id).map(|(_, shard)| Arc::clone(shard));
        found.ok_or_else(|| Error::invalid("ShardedParams::begin", "module", "one of this chain", "one of another"))
    }
}

/// A shard's gradient in burn's memory.
struct ShardOutput<'m, M: MoeBackend> {
    id: WeightId,
    param: &'m Param<Tensor<M, 3>>,
    memory: <M::Native as NativeMemory>::Output,
    filled: bool,
}

impl<'m, M: MoeBackend> ShardOutput<'m, M> {
    fn new(device: &CoreDevice<M>, id: WeightId, param: &'m Param<Tensor<M, 3>>) -> Result<Self> {
        let dtype = core_dtype("ShardedParams::finish", "shard", param.dtype())?.accumulator();
        let spec = ResultSpec { dtype, dims: &param.dims() };
        let memory = M::Native::output(device, &native(param), spec)?;
        Ok(Self { id, param, memory, filled: false })
    }

    fn fill(&mut self, device: &CoreDevice<M>, gradient: TensorRef<'_, CoreDevice<M>>) -> Result<()> {
        let [_, rows, width] = self.param.dims();
        Error::check_shape("ShardedParams::finish", "shard", gradient.dims(), &[rows, width])?;
        device.copy(gradient.data(), M::Native::view_mut(&mut self.memory)?.into_data())?;
        self.filled = true;
        Ok(())
    }

    /// Gives it to the parameter, in the parameter's type.
    fn register(self, gradients: &mut GradientsParams) -> Result<()>
    where
        M: AutodiffBackend,
    {
        let gradient = tensor::<M>(M::Native::float(self.memory)?).inner();
        let dtype = self.param.dtype();
        let gradient = if gradient.dtype() == dtype { gradient } else { gradient.cast(dtype) };
        gradients.register::<M::InnerBackend, 3>(self.param.id, gradient);
        Ok(())
    }
}

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// The module with `experts.up` and `experts.down` sharded over the ranks of a chain, to which they are added: their
    /// parameters become this rank's shards, `[1, S, C]` as [`Chain::shards`] cuts `[L, G·I, H]` and `[L, H, I]`, under
    /// the same ids; the [`Payload`] says how they travel. The ranks of the chain hold the same experts, and this rank's
    /// shard is cut from its own. Whole weights are there one layer at a time, if each is sharded as soon as it is made
    /// or loaded.
    ///
    /// A forward runs in a [`Phase::Forward`] of [`ShardedParams`], a backward in a [`Phase::Backward`]; the shards'
    /// gradients are not among backward's, but come with [`ShardedParams::finish`].
    ///
    /// # Errors
    /// Experts that are sharded already; a group on another device than the chain's; a chain that is in use. After an
    /// error of a pass every rank of the chain calls [`Chain::recover`].
    pub fn into_sharded(mut self, shards: &ShardedParams<B::Native>, payload: Payload) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::into_sharded";
        if self.sharded.is_some() {
            return Err(Error::invalid(CALL, "experts", "whole weights", "shards"));
        }
        if self.group.on::<CoreDevice<B>>().is_none() {
            let found = format!("one of {}", self.group.any().device());
            return Err(Error::invalid(CALL, "group", "one of the chain's device", found));
        }
        let up = Cut::new(shards, ParamKind::Up, &self.experts.up)?;
        let down = Cut::new(shards, ParamKind::Down, &self.experts.down)?;
        let local = self.group.local_experts();
        let sharded = Sharded::new(&shards.chain, payload, &self.layer, local, [up.shard(), down.shard()])?;
        shards.shards().extend(sharded.ids.into_iter().zip([up.source, down.source]));
        (self.experts.up, self.experts.down) = (up.param, down.param);
        self.sharded = Some(sharded);
        Ok(self)
    }
}

/// This rank's shard of a whole weight.
struct Cut<B: MoeBackend> {
    dtype: DType,
    source: Arc<ParamShard<B::Native>>,
    param: Param<Tensor<B, 3>>,
}

impl<B: MoeBackend> Cut<B> {
    fn new(shards: &ShardedParams<B::Native>, kind: ParamKind, param: &Param<Tensor<B, 3>>) -> Result<Self> {
        let (chain, whole) = (&shards.chain, B::Native::contiguous(native(param)));
        let device = chain.device();
        let shards = chain.shards(&param.dims())?;
        let [rows, width] = shards.shard_dims();
        let view = B::Native::view(device, Named { name: kind.name(), tensor: &whole })?;
        let dtype = view.dtype();
        let mut output = B::Native::output(device, &whole, ResultSpec { dtype, dims: &[1, rows, width] })?;
        B::Native::begin(device)?;
        let shard = shards.cut(device, view, chain.rank());
        let copied = shard.and_then(|shard| {
            device.copy(shard.view().data(), B::Native::view_mut(&mut output)?.into_data())?;
            Ok(shard)
        });
        // Also behind a failure: what was enqueued may still use burn's memory.
        B::Native::end(device)?;
        drop(copied?);
        let shard = B::Native::float(output)?;
        let shared = B::Native::share(device, Named { name: kind.name(), tensor: &shard })?;
        let source = ParamShard { device: device.clone(), dims: [rows, width], tensor: RwLock::new(shared) };
        let tensor = tensor::<B>(shard).set_require_grad(param.is_require_grad());
        Ok(Self { dtype, source: Arc::new(source), param: Param::initialized(param.id, tensor) })
    }

    fn shard(&self) -> Shard<CoreDevice<B>> {
        Shard { dtype: self.dtype, source: Arc::clone(&self.source) as Arc<dyn ShardSource<CoreDevice<B>>> }
    }
}

/// The shards of a module, with their weights in the chain.
fn weights<B: Backend>(module: &ExpertParallelMoE<B>) -> Vec<(WeightId, &Param<Tensor<B, 3>>)> {
    let Some(sharded) = &module.sharded else { return Vec::new() };
    sharded.ids.into_iter().zip([&module.experts.up, &module.experts.down]).collect()
}

fn native<B: MoeBackend>(param: &Param<Tensor<B, 3>>) -> FloatTensor<B::Native> {
    B::to_native(param.val().into_primitive().tensor())
}

fn tensor<B: MoeBackend>(native: FloatTensor<B::Native>) -> Tensor<B, 3> {
    Tensor::from_primitive(TensorPrimitive::Float(B::from_native(native)))
}
