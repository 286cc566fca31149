//! Forward and backward of the core on a back end's memory.

use std::sync::Arc;

use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensor;

use crate::adapter::{
    GatheredWeights, LayerShards, OutputCotangents, QuantizedExperts, ResidentGradients, acquire_resident,
    resident_sources, resident_view, with_sources,
};
use crate::comm::Op;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{Kernels, Scalar};
use crate::layer::{
    Context, Cotangents, ForwardInfo, GradientsMut, Inputs, Mode, ParamKind, ParamViews, Params, PerParam, RefusalGuard,
};
use crate::tensor::{TensorMut, TensorRef};

use super::backend::{Details, LayerCall, Named, NativeMemory, Operands, Outputs, ResultSpec, between, core_dtype};
use super::expert_sums::LentExpertSums;
use super::group::DeviceGroup;

const FORWARD: &str = "ExpertParallelMoE::forward";
const BACKWARD: &str = "ExpertParallelMoE::backward";

/// Outputs of a forward, in the back end's memory.
struct Results<B: NativeMemory> {
    y: B::Output,
    details: Option<DetailResults<B>>,
}

struct DetailResults<B: NativeMemory> {
    logits: B::Output,
    ids: B::Output,
    weights: B::Output,
    aux: B::Output,
}

impl<B: NativeMemory> Results<B> {
    fn allocate(call: &LayerCall, core: &B::Core, x: &FloatTensor<B>) -> Result<Self> {
        let dtype = core_dtype(FORWARD, "x", x.dtype())?;
        let shape = x.shape();
        let (tokens, router) = (shape.first().copied().unwrap_or(0), &call.layer.config().router);
        let of = |dtype: DType, dims: &[usize]| B::output(core, x, ResultSpec { dtype, dims });
        let details = || -> Result<_> {
            Ok(DetailResults {
                logits: of(dtype.accumulator(), &[tokens, router.num_experts])?,
                ids: of(DType::I32, &[tokens, router.top_k])?,
                weights: of(dtype.accumulator(), &[tokens, router.top_k])?,
                aux: of(dtype.accumulator(), &[1])?,
            })
        };
        Ok(Self { y: of(dtype, &shape)?, details: call.details.then(details).transpose()? })
    }
}

/// The same, to be filled.
struct DetailsMut<'a, D: Device> {
    logits: TensorMut<'a, D>,
    ids: TensorMut<'a, D>,
    weights: TensorMut<'a, D>,
    aux: TensorMut<'a, D>,
}

impl<B: NativeMemory> DetailResults<B> {
    fn view_mut(&mut self) -> Result<DetailsMut<'_, B::Core>> {
        Ok(DetailsMut {
            logits: B::view_mut(&mut self.logits)?,
            ids: B::view_mut(&mut self.ids)?,
            weights: B::view_mut(&mut self.weights)?,
            aux: B::view_mut(&mut self.aux)?,
        })
    }
}

impl<D: Kernels> DetailsMut<'_, D> {
    fn fill(self, core: &D, made: &ForwardInfo<D>) -> Result<()> {
        let Self { logits, ids, weights, aux } = self;
        let routing = &made.routing;
        for (from, to) in [(&routing.logits, logits), (&routing.ids, ids), (&routing.weights, weights)] {
            core.copy(from.view().data(), to.into_data())?;
        }
        made.aux.write(aux)
    }
}

/// [`between`] of a call, whose waits its group counts.
pub(super) fn ordered<B: NativeMemory, R>(
    group: &DeviceGroup,
    core: &B::Core,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    between::<B, R>(core, |waited| group.count(waited), work)
}

/// The experts, where they are gathered.
fn experts<B: NativeMemory>(call: &LayerCall, name: &'static str) -> Result<Option<LayerShards<B::Core>>> {
    call.experts.as_ref().map(|sharded| sharded.experts(name)).transpose()
}

/// The experts, where they stay quantized.
fn quantized<B: NativeMemory>(call: &LayerCall, name: &'static str) -> Result<Option<Arc<QuantizedExperts<B::Core>>>> {
    call.quantized.as_ref().map(|quantized| quantized.experts(name)).transpose()
}

/// Parameters of a layer, whose experts are `quantized` where there are such.
fn with_quantized<'a, D: Kernels>(params: Params<'a, D>, quantized: Option<&'a QuantizedExperts<D>>) -> Params<'a, D> {
    match quantized {
        Some(quantized) => quantized.in_params(params),
        None => params,
    }
}

/// Outputs, and what backward needs where it will follow.
type Forwarded<B> = (Outputs<B>, Option<Context<<B as NativeMemory>::Core>>);

/// Forward through the core over contiguous operands; with a context if `backward` will follow.
pub(super) fn run_forward<B: NativeMemory>(
    call: &LayerCall,
    operands: &Operands<FloatTensor<B>>,
    backward: bool,
) -> Result<Forwarded<B>> {
    let mut group = call.group_of::<B>((FORWARD, Op::Prepare), &operands.x)?.lock();
    let core = group.device().clone();
    let mode = Mode { backward, noise: call.noise };
    let done = RefusalGuard::forward(&call.layer, &mut group).run(|entry| {
        let experts = experts::<B>(call, FORWARD)?;
        let quantized = quantized::<B>(call, FORWARD)?;
        let (views, mut results) = B::together(&operands.x, || {
            Ok((Views::<B>::new(&core, operands)?, Results::<B>::allocate(call, &core, &operands.x)?))
        })?;
        let made = ordered::<B, _>(&call.group, &core, || {
            // Before the call: nothing of the back end's fails behind it.
            let y = B::view_mut(&mut results.y)?;
            let details = results.details.as_mut().map(DetailResults::view_mut).transpose()?;
            let resident = experts.as_ref().map(|experts| resident_sources(&experts.resident, backward)).transpose()?;
            let guards = resident.as_ref().map(|resident| acquire_resident(&core, resident)).transpose()?;
            let weights = views.gathered(experts.as_ref().map(|experts| &experts.resident).zip(guards.as_ref()))?;
            let sources = experts.as_ref().map(|experts| experts.sources(backward)).transpose()?;
            let params = with_quantized(with_sources(&weights, sources.as_ref()), quantized.as_deref());
            let inputs = Inputs { x: views.x.borrow(), params: &params };
            let made = call.layer.forward_into(entry.enter(), mode, inputs, y)?;
            if let Some(details) = details {
                details.fill(&core, &made)?;
            }
            Ok(made)
        })?;
        Ok((results, made))
    });
    let (results, made) = done?;
    let routed = |DetailResults { logits, ids, weights, aux }: DetailResults<B>| -> Result<_> {
        let (logits, ids, weights) = (B::float(logits)?, B::int(ids)?, B::float(weights)?);
        Ok(Details { aux: B::float(aux)?, logits, ids, weights })
    };
    let details = results.details.map(routed).transpose()?;
    let (losses, load) = (made.aux.value().clone(), made.routing.load.clone());
    Ok((Outputs { y: B::float(results.y)?, losses, load, details }, made.context))
}

/// Gradients of one backward.
pub(super) struct TensorGradients<T> {
    pub(super) x: Option<T>,
    pub(super) params: PerParam<Option<T>>,
}

impl<T> TensorGradients<T> {
    fn try_map<U>(self, mut f: impl FnMut(T) -> Result<U>) -> Result<TensorGradients<U>> {
        Ok(TensorGradients {
            x: self.x.map(&mut f).transpose()?,
            params: self.params.try_map(|_, t| t.map(&mut f).transpose())?,
        })
    }
}

/// Gradients that a backward makes, and the memory that is lent for experts'.
pub(super) struct Wanted<'a, B: NativeMemory> {
    pub(super) tracked: Tracked,
    pub(super) sums: Option<&'a mut LentExpertSums<B::Output>>,
}

/// Gradients that somebody tracks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracked {
    pub(super) x: bool,
    pub(super) params: PerParam<bool>,
}

impl Tracked {
    /// Whether the core shall make a parameter's gradient: a bias's comes beside its weight's only, the selection bias
    /// has none, also where somebody tracks it.
    fn makes(&self, kind: ParamKind) -> bool {
        let tracked = |kind: ParamKind| self.params[kind];
        match kind {
            ParamKind::SelectionBias => false,
            ParamKind::Up => tracked(kind) || tracked(ParamKind::UpBias),
            ParamKind::Down => tracked(kind) || tracked(ParamKind::DownBias),
            ParamKind::SharedUp => tracked(kind) || tracked(ParamKind::SharedUpBias),
            ParamKind::SharedDown => tracked(kind) || tracked(ParamKind::SharedDownBias),
            _ => tracked(kind),
        }
    }
}

/// Backward through the core over contiguous operands and cotangents.
pub(super) fn run_backward<B: NativeMemory>(
    call: &LayerCall,
    operands: &Operands<FloatTensor<B>>,
    context: Context<B::Core>,
    OutputCotangents { d_y, d_aux }: OutputCotangents<FloatTensor<B>>,
    Wanted { tracked, mut sums }: Wanted<'_, B>,
) -> Result<TensorGradients<FloatTensor<B>>> {
    context.handle().check_backward(BACKWARD)?;
    let mut group = call.group_of::<B>((BACKWARD, Op::CombineBwd), &operands.x)?.lock();
    let core = group.device().clone();
    let made = RefusalGuard::backward(&call.layer, &mut group).run(|entry| {
        let experts = experts::<B>(call, BACKWARD)?;
        let quantized = quantized::<B>(call, BACKWARD)?;
        // Experts as they are stored are frozen, with their biases, whatever their module's placeholders are.
        let stored = quantized.is_some() || experts.as_ref().is_some_and(LayerShards::is_stored);
        let tracked = Tracked {
            params: PerParam::from_fn(|kind| tracked.params[kind] && (!stored || kind.is_replicated())),
            ..tracked
        };
        // The gradients of shards come from their chain.
        let lent = PerParam::from_fn(|kind| sums.as_ref().is_some_and(|sums| sums.has(kind)));
        let of_chain = |kind: ParamKind| experts.as_ref().is_some_and(|experts| experts.has(kind));
        let elsewhere = |kind: ParamKind| of_chain(kind) || lent[kind];
        let (views, y, aux, mut made) = B::together(&operands.x, || {
            let views = Views::<B>::new(&core, operands)?;
            let view = |name, tensor| B::view(&core, Named { name, tensor });
            let y = d_y.as_ref().map(|tensor| view("gradient of y", tensor)).transpose()?;
            let aux = d_aux.as_ref().map(|tensor| view("gradient of aux", tensor)).transpose()?;
            let like = |tensor: TensorRef<'_, B::Core>| {
                B::output(&core, &operands.x, ResultSpec { dtype: tensor.dtype(), dims: tensor.dims() })
            };
            let mut made = TensorGradients { x: None, params: PerParam::none() };
            if tracked.x {
                made.x = Some(like(views.x)?);
            }
            for kind in ParamKind::ALL.into_iter().filter(|&kind| tracked.makes(kind) && !elsewhere(kind)) {
                made.params[kind] = views.params[kind].map(like).transpose()?;
            }
            if let Some(sums) = &mut sums {
                let of = |kind: ParamKind| views.params.get(kind).map(TensorRef::dtype);
                sums.allocate(of, |kind, dtype| {
                    let Some(tensor) = views.params.get(kind) else { return Ok(None) };
                    B::output(&core, &operands.x, ResultSpec { dtype, dims: tensor.dims() }).map(Some)
                })?;
            }
            Ok((views, y, aux, made))
        })?;
        let cotangents = Cotangents { y, aux: aux.map_or(Scalar::Host(call.aux_scale), Scalar::Device) };
        let trained = tracked.makes(ParamKind::Up) || tracked.makes(ParamKind::Down);
        let progress = context.progress();
        ordered::<B, _>(&call.group, &core, || {
            let resident = experts.as_ref().map(|experts| &experts.resident);
            let gathers = resident.map(|resident| resident_sources(resident, true)).transpose()?;
            let guards = gathers.as_ref().map(|gathers| acquire_resident(&core, gathers)).transpose()?;
            let weights = views.gathered(resident.zip(guards.as_ref()))?;
            let sources = experts.as_ref().map(|experts| experts.sources(true)).transpose()?;
            let mut shards =
                experts.as_ref().filter(|_| trained).map(|experts| experts.gradients(&context)).transpose()?;
            let others = resident.map(|resident| ResidentGradients::new(resident, |kind| tracked.makes(kind)));
            let mut others = others.transpose()?;
            let mut into = GradientsMut::none();
            into.x = made.x.as_mut().map(B::view_mut).transpose()?;
            for (kind, output) in made.params.as_mut() {
                if let Some(output) = output {
                    into.set(kind, B::view_mut(output)?);
                }
            }
            if let Some(sums) = sums {
                sums.view_in::<B>(&mut into)?;
            }
            if let Some(shards) = &mut shards {
                shards.view_in(&mut into)?;
            }
            if let Some(others) = &mut others {
                others.view_in(&mut into)?;
            }
            let params = with_quantized(with_sources(&weights, sources.as_ref()), quantized.as_deref());
            let inputs = Inputs { x: views.x.borrow(), params: &params };
            call.layer.backward_into(entry.enter(), context, inputs, cotangents, into)?;
            if let Some(shards) = shards {
                shards.submit(&call.layer, entry, [tracked.params.up, tracked.params.down])?;
            }
            others.map_or(Ok(()), |others| others.submit((&call.layer, &progress), entry, |kind| tracked.params[kind]))
        })?;
        Ok(made)
    });
    made?.try_map(B::float)
}

/// Views of one call's tensors.
struct Views<'a, B: NativeMemory> {
    x: TensorRef<'a, B::Core>,
    params: PerParam<Option<TensorRef<'a, B::Core>>>,
}

impl<'a, B: NativeMemory> Views<'a, B> {
    fn new(core: &B::Core, operands: &'a Operands<FloatTensor<B>>) -> Result<Self> {
        let view = |name, tensor| B::view(core, Named { name, tensor });
        Ok(Self {
            x: view("x", &operands.x)?,
            params: operands.params.as_ref().try_map(|kind, t| t.as_ref().map(|t| view(kind.name(), t)).transpose())?,
        })
    }

    /// The parameters, of those that are gathered the whole weights.
    fn gathered<'g>(&'g self, gathered: Option<GatheredWeights<'g, '_, B::Core>>) -> Result<ParamViews<'g, B::Core>> {
        ParamViews::collect(|kind| {
            let resident = gathered.and_then(|(resident, guards)| resident.get(kind).zip(guards.get(kind)));
            match resident {
                Some((resident, guard)) => resident_view(resident, guard).map(Some),
                None => Ok(self.params.get(kind).map(TensorRef::borrow)),
            }
        })
    }
}
