//! Experts that are sharded over ranks, their shards burn's parameters.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;

use crate::adapter::{ErasedChain, FrameworkDevice};
use crate::comm::{Communicator, Op};
use crate::device::Device;
use crate::ep::BackwardFailure;
use crate::error::{Error, Result};
use crate::etp::{Chain, NewShard, Phase, ShardSource, WeightId, WeightSpec};
use crate::tensor::{TensorMut, TensorRef};

use super::backend::{CoreDevice, MoeBackend, Named, NativeBackend, NativeMemory, ResultSpec, between};
use super::group::DeviceGroup;
use super::shard_param::{FloatParam, ParamSource};

const BEGIN: &str = "ShardedParams::begin";
const FINISH: &str = "ShardedParams::finish";

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
/// # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
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
    registered: Mutex<ShardRegistry<B>>,
    /// Of dense weights' backward.
    failure: Arc<BackwardFailure>,
    /// Gradients keep the type of the chain's sums.
    as_summed: bool,
}

/// A module whose parameters are shards: [`ExpertParallelMoE`](super::ExpertParallelMoE) and
/// [`ShardedDense`](super::ShardedDense). A list of both is one of `&dyn ShardHolder<Backend = B>`.
pub trait ShardHolder {
    /// Its back end.
    type Backend: MoeBackend;

    /// Its shards, a list for each chain; none of a module whose parameters are whole.
    #[doc(hidden)]
    fn shard_lists(&self) -> Vec<ShardList<'_, Self::Backend>>;

    /// The parameters that are shards: their gradients come with [`ShardedParams::finish`], and
    /// [`reduce_gradients`](super::reduce_gradients) is to leave them out.
    fn shard_ids(&self) -> Vec<ParamId> {
        self.shard_lists().iter().flat_map(|list| list.params.iter().map(|(_, param)| param.id())).collect()
    }
}

/// Parameters of a module that are shards of one chain.
#[doc(hidden)]
#[derive(Debug)]
pub struct ShardList<'m, M: MoeBackend> {
    pub(super) chain: ErasedChain,
    /// The module, for errors.
    pub(super) name: String,
    pub(super) params: Vec<(WeightId, &'m dyn FloatParam<M>)>,
}

/// Parameters that were added to a chain.
struct ShardRegistry<B: NativeBackend> {
    shards: Vec<(WeightId, Arc<ParamSource<B>>)>,
    /// Where ranks wait that are told of a pass that this one cannot begin.
    first: Option<OtherRanksAt<B>>,
}

/// Where the other ranks of a model wait for one that is in no pass, beside the chain.
#[derive(Clone)]
pub(super) enum OtherRanksAt<B: NativeBackend> {
    /// In a layer of a group.
    Layer(DeviceGroup, u32),
    /// In another chain, of all ranks.
    Chain(Arc<Chain<B::Core>>),
}

impl<B: NativeBackend> fmt::Debug for ShardedParams<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedParams").field("chain", &self.chain).finish_non_exhaustive()
    }
}

/// A parameter of a module with the shard that it is.
struct ShardParam<'m, M: MoeBackend> {
    id: WeightId,
    shard: Arc<ParamSource<M::Native>>,
    param: &'m dyn FloatParam<M>,
}

impl<B: NativeBackend> ShardedParams<B> {
    /// Over a chain, to which [`ExpertParallelMoE::into_sharded`](super::ExpertParallelMoE::into_sharded) adds experts,
    /// and [`linear`](Self::linear) and its like dense weights.
    pub fn new(chain: Arc<Chain<B::Core>>) -> Self {
        let registered = Mutex::new(ShardRegistry { shards: Vec::new(), first: None });
        Self { chain, registered, failure: Arc::default(), as_summed: false }
    }

    /// Has [`finish`](Self::finish) leave gradients as the chain has added them up, in f32 for parameters of 16 bits:
    /// for [`AdamW`](super::AdamW), which takes them so. burn's own optimizers want the parameters' type.
    pub fn with_gradients_as_summed(self) -> Self {
        Self { as_summed: true, ..self }
    }

    /// The error that unwound the last failed backward of a [`ShardedDense`](super::ShardedDense), if any; forgets it.
    pub fn take_failure(&self) -> Option<Error> {
        self.failure.take()
    }

    pub(super) fn failure(&self) -> &Arc<BackwardFailure> {
        &self.failure
    }

    /// The chain.
    pub fn chain(&self) -> &Arc<Chain<B::Core>> {
        &self.chain
    }

    /// Begins a pass over modules: one forward, or one backward, of the whole model, whose sharded layers are all given,
    /// each once. A forward gathers their parameters as they are now: those of all modules, or after an error none. See
    /// [`Chain::begin`]; parameters that have changed otherwise than by a step after [`finish`](Self::finish), and are
    /// sent quantized, are told of by [`Chain::invalidate_casts`].
    ///
    /// A rank whose modules are refused tells the others, and does not wait for its chain's: the ranks of its chain where
    /// they gather the first weight, those of its group where they are in the model's first layer. Each of them gets a
    /// typed error, as this one has its own, and every rank goes on by [`Chain::recover`], which tells those that still
    /// wait for one of them.
    ///
    /// # Errors
    /// As [`Chain::begin`]; a weight of the chain that no module has, or two have; a shard of another shape or type than
    /// that which was added, of another device, or of another chain.
    pub fn begin<'m, T>(&self, phase: Phase, modules: impl IntoIterator<Item = &'m T>) -> Result<()>
    where
        T: ShardHolder<Backend: MoeBackend<Native = B>> + ?Sized + 'm,
    {
        // A pass that was not ended goes on with the parameters that it has.
        if phase == Phase::Forward && !self.chain.in_pass() {
            self.update_sources(BEGIN, modules).inspect_err(|error| self.refuse_pass(error))?;
        }
        self.chain.begin(phase)
    }

    /// [`Chain::last_backward`]: says, before its [`begin`](Self::begin), that the next backward pass is the step's last,
    /// in which sums over the replicas begin beside it.
    ///
    /// # Errors
    /// As [`Chain::last_backward`].
    pub fn last_backward(&self) -> Result<()> {
        self.chain.last_backward()
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// As [`Chain::end`].
    pub fn end(&self) -> Result<()> {
        self.chain.end()
    }

    /// [`Chain::finish`] into burn's gradients: each shard's gradient, `[1, S, C]` in its parameter's type (or that of the
    /// [sums](Self::with_gradients_as_summed)), where the optimizer looks for it. `modules` are those of the passes, all of
    /// them; a frozen shard has no gradient. `replicas` is none where the chain has a communicator of its own
    /// ([`Chain::with_replicas`]).
    ///
    /// # Errors
    /// As [`Chain::finish`]; what [`begin`](Self::begin) refuses of modules. The other ranks of the chain, and the
    /// replicas if there are any, are told of what this rank refuses, and each of them gets a typed error. All have the
    /// gradients still, and a second call of all of them gives the sums; between processes over NCCL a refusal ends the
    /// communicators.
    pub fn finish<'m, T>(
        &self,
        mut replicas: Option<&mut dyn Communicator<B::Core>>,
        modules: impl IntoIterator<Item = &'m T>,
        gradients: &mut GradientsParams,
    ) -> Result<()>
    where
        T: ShardHolder<Backend: AutodiffBackend + MoeBackend<Native = B>> + ?Sized + 'm,
    {
        // What fails before the collective is told by the chain, which has communicators of its own, and to the replicas.
        let mut entered = false;
        let filled = self.fill_gradients(modules, |enqueue| {
            entered = true;
            let replicas = replicas.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<B::Core>);
            self.chain.finish(replicas, enqueue)
        });
        if let (Err(error), false) = (&filled, entered) {
            self.chain.refuse_to_finish(replicas, error);
        }
        filled?.into_iter().try_for_each(|output| output.register(self.as_summed, gradients))
    }

    /// Has the modules' parameters gathered from here on: those of all weights, or none.
    pub(super) fn update_sources<'m, T>(
        &self,
        call: &'static str,
        modules: impl IntoIterator<Item = &'m T>,
    ) -> Result<()>
    where
        T: ShardHolder<Backend: MoeBackend<Native = B>> + ?Sized + 'm,
    {
        let device = self.chain.device();
        let share = |ShardParam { shard, param, .. }: ShardParam<'m, T::Backend>| -> Result<_> {
            let tensor = B::contiguous(param.native());
            Ok((shard, B::share(device, Named { name: "shard", tensor: &tensor })?))
        };
        let shared = self.params(call, modules)?.into_iter().map(share).collect::<Result<Vec<_>>>()?;
        // Gathers wait for what wrote the shards; what gets the memory of those before, for what has read them.
        between::<B, _>(device, |_| (), || Ok(()))?;
        shared.into_iter().for_each(|(shard, tensor)| drop(shard.replace(tensor)));
        Ok(())
    }

    /// Tells the other ranks, which are in the pass, in that of the chain of what is not expert, or in the model's first
    /// layer, why this one is not.
    fn refuse_pass(&self, error: &Error) {
        self.chain.refuse_pass(error);
        let first = self.registered().first.clone();
        match first {
            Some(OtherRanksAt::Layer(group, layer)) if group.ranks() > 1 => {
                group.erased().refuse(layer, Op::Prepare, &error.to_string());
            }
            Some(OtherRanksAt::Chain(dense)) => dense.refuse_pass(error),
            _ => {}
        }
    }

    /// Memory of burn's with the gradients of the modules' parameters that track them, which `finish` hands to its
    /// argument.
    fn fill_gradients<'m, T>(
        &self,
        modules: impl IntoIterator<Item = &'m T>,
        finish: impl FnOnce(&mut dyn FnMut(WeightId, TensorRef<'_, B::Core>) -> Result<()>) -> Result<()>,
    ) -> Result<Vec<ShardOutput<'m, T::Backend>>>
    where
        T: ShardHolder<Backend: AutodiffBackend + MoeBackend<Native = B>> + ?Sized + 'm,
    {
        let device = self.chain.device();
        // Before the chain's work is put behind burn's, as burn may have work to do on their memory first.
        let params = self.params(FINISH, modules)?;
        let (tracked, frozen): (Vec<_>, Vec<_>) = params.into_iter().partition(|p| p.param.is_tracked());
        let mut outputs = tracked.into_iter().map(|p| ShardOutput::new(device, p)).collect::<Result<Vec<_>>>()?;
        let filled = between::<B, _>(
            device,
            |_| (),
            || {
                // All of them before any sum is given: nothing of burn's fails behind it.
                let mut memory = outputs.iter_mut().map(ShardOutput::view_mut).collect::<Result<Vec<_>>>()?;
                let mut filled = Vec::new();
                finish(&mut |id, gradient| match memory.iter().position(|(own, _)| *own == id) {
                    Some(at) => {
                        filled.push(id);
                        device.copy(gradient.data(), memory.swap_remove(at).1.into_data())
                    }
                    None if frozen.iter().any(|p| p.id == id) => Ok(()),
                    None => Err(Error::invalid(FINISH, "weight of the chain", "one of a module", format!("{id:?}"))),
                })?;
                Ok(filled)
            },
        )?;
        outputs.retain(|output| filled.contains(&output.id));
        Ok(outputs)
    }

    /// The modules' parameters that are shards: those of all weights, each once.
    fn params<'m, T>(
        &self,
        call: &'static str,
        modules: impl IntoIterator<Item = &'m T>,
    ) -> Result<Vec<ShardParam<'m, T::Backend>>>
    where
        T: ShardHolder<Backend: MoeBackend<Native = B>> + ?Sized + 'm,
    {
        let registered = self.registered();
        let mut params: Vec<ShardParam<'m, T::Backend>> = Vec::new();
        for module in modules {
            let lists = module.shard_lists();
            let is_own = |list: &ShardList<'_, _>| {
                B::Core::downcast(&list.chain).is_some_and(|chain| Arc::ptr_eq(chain, &self.chain))
            };
            if !lists.is_empty() && !lists.iter().any(is_own) {
                return Err(Error::invalid(call, "module", "one of this chain", "one of another"));
            }
            for ShardList { name, params: own, .. } in lists.into_iter().filter(is_own) {
                for (id, param) in own {
                    let shard =
                        registered.shards.iter().find(|(other, _)| *other == id).map(|(_, shard)| Arc::clone(shard));
                    let other =
                        || Error::invalid(call, "module", "one that these parameters were made with", "another");
                    let shard = shard.ok_or_else(other)?;
                    if params.iter().any(|other| other.id == id) {
                        let found = format!("{name} twice");
                        return Err(Error::invalid(call, "modules", "each once", found));
                    }
                    shard.check(call, param)?;
                    params.push(ShardParam { id, shard, param });
                }
            }
        }
        match registered.shards.len() {
            all if all == params.len() => Ok(params),
            all => Err(Error::invalid(call, "weights", format!("all {all}"), params.len())),
        }
    }

    /// Whether the chain would take a weight whose shard is a parameter.
    pub(super) fn check(&self, spec: &WeightSpec, source: &Arc<ParamSource<B>>) -> Result<()> {
        let source = Arc::clone(source) as Arc<dyn ShardSource<B::Core>>;
        self.chain.check(&[NewShard::new(spec.clone(), source)])
    }

    /// Adds a weight whose shard is a parameter.
    pub(super) fn add(&self, spec: WeightSpec, source: Arc<ParamSource<B>>) -> Result<WeightId> {
        let id = self.chain.add(spec, Arc::clone(&source) as Arc<dyn ShardSource<B::Core>>)?;
        self.registered().shards.push((id, source));
        Ok(id)
    }

    /// Counts the experts of a layer, which are in the chain already; `first`: where ranks wait for one that is in no
    /// pass, if this is the model's first layer.
    pub(super) fn register(
        &self,
        experts: impl IntoIterator<Item = (WeightId, Arc<ParamSource<B>>)>,
        first: OtherRanksAt<B>,
    ) {
        let mut registered = self.registered();
        registered.shards.extend(experts);
        registered.first.get_or_insert(first);
    }

    /// Holders leave it whole, so a panic elsewhere does not matter.
    fn registered(&self) -> MutexGuard<'_, ShardRegistry<B>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A shard's gradient in burn's memory.
struct ShardOutput<'m, M: MoeBackend> {
    id: WeightId,
    param: &'m dyn FloatParam<M>,
    memory: <M::Native as NativeMemory>::Output,
}

impl<'m, M: MoeBackend> ShardOutput<'m, M> {
    fn new(device: &CoreDevice<M>, ShardParam { id, shard, param }: ShardParam<'m, M>) -> Result<Self> {
        let spec = ResultSpec { dtype: shard.dtype.accumulator(), dims: &param.dims() };
        Ok(Self { id, param, memory: M::Native::output(device, &param.native(), spec)? })
    }

    /// Its memory, to be filled.
    fn view_mut(&mut self) -> Result<(WeightId, TensorMut<'_, CoreDevice<M>>)> {
        Ok((self.id, M::Native::view_mut(&mut self.memory)?))
    }

    /// Gives it to the parameter, in the parameter's type or in its own.
    fn register(self, as_summed: bool, gradients: &mut GradientsParams) -> Result<()>
    where
        M: AutodiffBackend,
    {
        self.param.register(M::Native::float(self.memory)?, as_summed, gradients);
        Ok(())
    }
}
