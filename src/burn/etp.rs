//! Experts that are sharded over ranks, their shards burn's parameters.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

use crate::adapter::{AnyChain, FrameworkDevice, Sharded, TypedSource};
use crate::comm::{Communicator, Op};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::BackwardFailure;
use crate::error::{Error, Result};
use crate::etp::{Chain, Payload, Phase, ShardDevice, ShardSource, WeightId, WeightSpec};
use crate::layer::ParamKind;
use crate::tensor::{TensorMut, TensorRef};

use super::backend::{CoreDevice, MoeBackend, Named, NativeBackend, NativeMemory, ResultSpec, between, core_dtype};
use super::group::DeviceGroup;
use super::module::ExpertParallelMoE;

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
    registered: Mutex<Registered<B>>,
    /// Of dense weights' backward.
    failure: Arc<BackwardFailure>,
}

/// A module whose parameters are shards: [`ExpertParallelMoE`] and [`ShardedDense`](super::ShardedDense). A list of both
/// is one of `&dyn ShardHolder<Backend = B>`.
pub trait ShardHolder {
    /// Its back end.
    type Backend: MoeBackend;

    /// Its shards; none of a module whose parameters are whole.
    #[doc(hidden)]
    fn shard_list(&self) -> Option<ShardList<'_, Self::Backend>>;
}

/// Parameters of a module that are shards of one chain.
#[doc(hidden)]
#[derive(Debug)]
pub struct ShardList<'m, M: Backend> {
    pub(super) chain: AnyChain,
    /// The module, for errors.
    pub(super) name: String,
    pub(super) params: Vec<(WeightId, &'m Param<Tensor<M, 3>>)>,
}

impl<B: MoeBackend> ShardHolder for ExpertParallelMoE<B> {
    type Backend = B;

    fn shard_list(&self) -> Option<ShardList<'_, B>> {
        let sharded = self.sharded.as_ref()?;
        let params = sharded.ids.into_iter().zip([&self.experts.up, &self.experts.down]).collect();
        Some(ShardList { chain: sharded.chain().clone(), name: format!("layer {}", self.layer.number()), params })
    }
}

/// Parameters that were added to a chain.
struct Registered<B: NativeBackend> {
    shards: Vec<(WeightId, Arc<ParamSource<B>>)>,
    /// Group and number of the first layer.
    first: Option<(DeviceGroup, u32)>,
}

impl<B: NativeBackend> fmt::Debug for ShardedParams<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedParams").field("chain", &self.chain).finish_non_exhaustive()
    }
}

/// This rank's shard of a weight, as the last [`ShardedParams::begin`] found it.
struct ParamSource<B: NativeMemory> {
    device: B::Core,
    dtype: DType,
    /// `[S, C]`.
    dims: [usize; 2],
    tensor: RwLock<B::Shared>,
}

impl<B: NativeMemory> fmt::Debug for ParamSource<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamSource{:?}", self.dims)
    }
}

impl<B: NativeMemory> ShardSource<B::Core> for ParamSource<B> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, B::Core>) -> Result<()>) -> Result<()> {
        let tensor = self.tensor.read().unwrap_or_else(PoisonError::into_inner);
        visit(B::view_shared(&self.device, &tensor)?.reshape(&self.dims)?)
    }
}

impl<B: NativeMemory> ParamSource<B> {
    /// Refuses a parameter that is not `[1, S, C]` of the shard's type.
    fn check(&self, call: &'static str, shape: &[usize], dtype: burn::tensor::DType) -> Result<()> {
        let [rows, width] = self.dims;
        Error::check_shape(call, "shard", &[1, rows, width], shape)?;
        Error::check_dtype(call, "shard", self.dtype, core_dtype(call, "shard", dtype)?)
    }

    /// Takes another tensor; gives back the one before.
    fn replace(&self, tensor: B::Shared) -> B::Shared {
        std::mem::replace(&mut *self.tensor.write().unwrap_or_else(PoisonError::into_inner), tensor)
    }
}

/// A parameter of a module with the shard that it is.
struct ShardParam<'m, M: MoeBackend> {
    id: WeightId,
    shard: Arc<ParamSource<M::Native>>,
    param: &'m Param<Tensor<M, 3>>,
}

impl<B: NativeBackend> ShardedParams<B> {
    /// Over a chain, to which [`ExpertParallelMoE::into_sharded`] adds experts, and [`linear`](Self::linear) and its like
    /// dense weights.
    pub fn new(chain: Arc<Chain<B::Core>>) -> Self {
        let registered = Mutex::new(Registered { shards: Vec::new(), first: None });
        Self { chain, registered, failure: Arc::default() }
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
            self.take(BEGIN, modules).inspect_err(|error| self.tell(error))?;
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
    /// optimizer looks for it. `modules` are those of the passes, all of them; a frozen shard has no gradient.
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
        let mut entered = false;
        let given = self.give(modules, |enqueue| {
            entered = true;
            let replicas = replicas.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<B::Core>);
            self.chain.finish(replicas, enqueue)
        });
        if let (Err(error), false) = (&given, entered) {
            self.chain.refuse_to_finish(replicas, error);
        }
        given?.into_iter().try_for_each(|output| output.register(gradients))
    }

    /// Has the modules' parameters gathered from here on: those of all weights, or none.
    pub(super) fn take<'m, T>(&self, call: &'static str, modules: impl IntoIterator<Item = &'m T>) -> Result<()>
    where
        T: ShardHolder<Backend: MoeBackend<Native = B>> + ?Sized + 'm,
    {
        let device = self.chain.device();
        let share = |ShardParam { shard, param, .. }: ShardParam<'m, T::Backend>| -> Result<_> {
            let tensor = B::contiguous(native(param));
            Ok((shard, B::share(device, Named { name: "shard", tensor: &tensor })?))
        };
        let shared = self.params(call, modules)?.into_iter().map(share).collect::<Result<Vec<_>>>()?;
        // Gathers wait for what wrote the shards; what gets the memory of those before, for what has read them.
        between::<B, _>(device, |_| (), || Ok(()))?;
        shared.into_iter().for_each(|(shard, tensor)| drop(shard.replace(tensor)));
        Ok(())
    }

    /// Tells the other ranks, which are in the pass or in the model's first layer, why this one is not.
    fn tell(&self, error: &Error) {
        self.chain.refuse_pass(error);
        let first = self.registered().first.clone();
        if let Some((group, layer)) = first.filter(|(group, _)| group.ranks() > 1) {
            group.any().refuse(layer, Op::Prepare, &error.to_string());
        }
    }

    /// Memory of burn's with the gradients of the modules' parameters that track them, which `finish` hands to its
    /// argument.
    fn give<'m, T>(
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
        let (tracked, frozen): (Vec<_>, Vec<_>) = params.into_iter().partition(|p| p.param.is_require_grad());
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
            let Some(ShardList { chain, name, params: own }) = module.shard_list() else { continue };
            if !B::Core::chain(&chain).is_some_and(|own| Arc::ptr_eq(own, &self.chain)) {
                return Err(Error::invalid(call, "module", "one of this chain", "one of another"));
            }
            for (id, param) in own {
                let shard =
                    registered.shards.iter().find(|(other, _)| *other == id).map(|(_, shard)| Arc::clone(shard));
                let other = || Error::invalid(call, "module", "one that these parameters were made with", "another");
                let shard = shard.ok_or_else(other)?;
                if params.iter().any(|other| other.id == id) {
                    let found = format!("{name} twice");
                    return Err(Error::invalid(call, "modules", "each once", found));
                }
                shard.check(call, &param.dims(), param.dtype())?;
                params.push(ShardParam { id, shard, param });
            }
        }
        match registered.shards.len() {
            all if all == params.len() => Ok(params),
            all => Err(Error::invalid(call, "weights", format!("all {all}"), params.len())),
        }
    }

    /// Holders leave it whole, so a panic elsewhere does not matter.
    fn registered(&self) -> MutexGuard<'_, Registered<B>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A shard's gradient in burn's memory.
struct ShardOutput<'m, M: MoeBackend> {
    id: WeightId,
    param: &'m Param<Tensor<M, 3>>,
    memory: <M::Native as NativeMemory>::Output,
}

impl<'m, M: MoeBackend> ShardOutput<'m, M> {
    fn new(device: &CoreDevice<M>, ShardParam { id, shard, param }: ShardParam<'m, M>) -> Result<Self> {
        let spec = ResultSpec { dtype: shard.dtype.accumulator(), dims: &param.dims() };
        Ok(Self { id, param, memory: M::Native::output(device, &native(param), spec)? })
    }

    /// Its memory, to be filled.
    fn view_mut(&mut self) -> Result<(WeightId, TensorMut<'_, CoreDevice<M>>)> {
        Ok((self.id, M::Native::view_mut(&mut self.memory)?))
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
    /// Experts that are sharded already; a group on another device than the chain's, or on a GPU on another stream, whose
    /// work would be in no order with the chain's; a chain that is in use. After an error of a pass every rank of the
    /// chain calls [`Chain::recover`].
    pub fn into_sharded(self, shards: &ShardedParams<B::Native>, payload: Payload) -> Result<Self> {
        const CALL: &str = "ExpertParallelMoE::into_sharded";
        if self.sharded.is_some() {
            return Err(Error::invalid(CALL, "experts", "whole weights", "shards"));
        }
        self.check_chain(CALL, shards)?;
        let up = Cut::new(shards, ParamKind::Up.name(), &self.experts.up)?;
        let down = Cut::new(shards, ParamKind::Down.name(), &self.experts.down)?;
        self.with_cuts(shards, payload, [up, down])
    }

    /// The same of a module whose `experts.up` and `experts.down` are this rank's shards already, `[1, S, C]`.
    pub(super) fn with_shards(self, shards: &ShardedParams<B::Native>, payload: Payload) -> Result<Self> {
        const CALL: &str = "ShardedParams::load";
        self.check_chain(CALL, shards)?;
        let cut = |kind: ParamKind, param: &Param<Tensor<B, 3>>| {
            let dims = kind.dims(self.layer.config(), self.group.local_experts()).unwrap_or_default();
            let [rows, width] = shards.chain.shards(&dims)?.shard_dims();
            Error::check_shape(CALL, kind.name(), &[1, rows, width], &param.dims())?;
            Cut::shared(shards.chain.device(), kind.name(), [rows, width], param.clone())
        };
        let cuts = [cut(ParamKind::Up, &self.experts.up)?, cut(ParamKind::Down, &self.experts.down)?];
        self.with_cuts(shards, payload, cuts)
    }

    /// Refuses a chain whose work is in no order with the group's.
    fn check_chain(&self, call: &'static str, shards: &ShardedParams<B::Native>) -> Result<()> {
        let Some(group) = self.group.on::<CoreDevice<B>>() else {
            let found = format!("one of {}", self.group.any().device());
            return Err(Error::invalid(call, "group", "one of the chain's device", found));
        };
        if CoreDevice::<B>::ENQUEUES && !shards.chain.device().shares_stream_with(group.lock().device()) {
            let expected = "one on the chain's device, stream and all (a clone of it)";
            return Err(Error::invalid(call, "group", expected, "one on another stream, or another GPU"));
        }
        Ok(())
    }

    /// Adds the experts to the chain.
    fn with_cuts(
        mut self,
        shards: &ShardedParams<B::Native>,
        payload: Payload,
        [up, down]: [Cut<B>; 2],
    ) -> Result<Self> {
        let local = self.group.local_experts();
        let sharded = Sharded::new(&shards.chain, payload, &self.layer, local, [up.shard(), down.shard()])?;
        let mut registered = shards.registered();
        registered.shards.extend(sharded.ids.into_iter().zip([up.source, down.source]));
        registered.first.get_or_insert_with(|| (self.group.clone(), self.layer.number()));
        drop(registered);
        (self.experts.up, self.experts.down) = (up.param, down.param);
        self.sharded = Some(sharded);
        Ok(self)
    }
}

/// This rank's shard of a whole weight.
pub(super) struct Cut<B: MoeBackend> {
    source: Arc<ParamSource<B::Native>>,
    param: Param<Tensor<B, 3>>,
}

impl<B: MoeBackend> Cut<B> {
    pub(super) fn new(shards: &ShardedParams<B::Native>, name: &str, param: &Param<Tensor<B, 3>>) -> Result<Self> {
        let (chain, whole) = (&shards.chain, B::Native::contiguous(native(param)));
        let device = chain.device();
        let shards = chain.shards(&param.dims())?;
        let [rows, width] = shards.shard_dims();
        let view = B::Native::view(device, Named { name, tensor: &whole })?;
        let dtype = view.dtype();
        let mut output = B::Native::output(device, &whole, ResultSpec { dtype, dims: &[1, rows, width] })?;
        let cut = || {
            let shard = shards.cut(device, view, chain.rank())?;
            device.copy(shard.view().data(), B::Native::view_mut(&mut output)?.into_data())?;
            Ok(shard)
        };
        drop(between::<B::Native, _>(device, |_| (), cut)?);
        let shard = tensor::<B>(B::Native::float(output)?).set_require_grad(param.is_require_grad());
        Self::shared(device, name, [rows, width], Param::initialized(param.id, shard))
    }

    /// Of a parameter that is the shard, of so many rows and columns.
    fn shared(device: &CoreDevice<B>, name: &str, dims: [usize; 2], param: Param<Tensor<B, 3>>) -> Result<Self> {
        let tensor = B::Native::contiguous(native(&param));
        let named = || Named { name, tensor: &tensor };
        let dtype = B::Native::view(device, named())?.dtype();
        let tensor = RwLock::new(B::Native::share(device, named())?);
        Ok(Self { source: Arc::new(ParamSource { device: device.clone(), dtype, dims, tensor }), param })
    }

    /// The shard's type.
    pub(super) fn dtype(&self) -> DType {
        self.source.dtype
    }

    /// Adds a weight of its own to the chain: its place there, and the shard as a parameter.
    pub(super) fn add(
        self,
        shards: &ShardedParams<B::Native>,
        spec: WeightSpec,
    ) -> Result<(WeightId, Param<Tensor<B, 3>>)> {
        let id = shards.chain.add(spec, Arc::clone(&self.source) as Arc<dyn ShardSource<CoreDevice<B>>>)?;
        shards.registered().shards.push((id, self.source));
        Ok((id, self.param))
    }

    fn shard(&self) -> TypedSource<CoreDevice<B>> {
        TypedSource {
            dtype: self.source.dtype,
            source: Arc::clone(&self.source) as Arc<dyn ShardSource<CoreDevice<B>>>,
        }
    }
}

fn native<B: MoeBackend>(param: &Param<Tensor<B, 3>>) -> FloatTensor<B::Native> {
    B::to_native(param.val().into_primitive().tensor())
}

fn tensor<B: MoeBackend>(native: FloatTensor<B::Native>) -> Tensor<B, 3> {
    Tensor::from_primitive(TensorPrimitive::Float(B::from_native(native)))
}
