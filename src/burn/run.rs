//! Forward and backward of the core on a back end's memory.

use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensor;

use crate::adapter::OutputCotangents;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Scalar;
use crate::layer::{Context, Cotangents, GradientsMut, Inputs, Mode, ParamKind, ParamViews, PerParam, RefusalGuard};
use crate::tensor::TensorRef;

use super::backend::{LayerCall, Named, NativeMemory, Operands, Outputs, ResultSpec, RoutingData, core_dtype};

const FORWARD: &str = "ExpertParallelMoE::forward";
const BACKWARD: &str = "ExpertParallelMoE::backward";

/// Outputs of a forward, in the back end's memory.
struct Results<B: NativeMemory> {
    y: B::Output,
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
        Ok(Self {
            y: of(dtype, &shape)?,
            logits: of(dtype.accumulator(), &[tokens, router.num_experts])?,
            ids: of(DType::I32, &[tokens, router.top_k])?,
            weights: of(dtype.accumulator(), &[tokens, router.top_k])?,
            aux: of(dtype.accumulator(), &[1])?,
        })
    }
}

/// Runs the core's work between the back end's: what it reads was enqueued before, what reads its results comes behind.
pub(super) fn ordered<B: NativeMemory, R>(
    call: &LayerCall,
    core: &B::Core,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    call.group.count(B::begin(core)?);
    let done = work();
    // Also behind a failure: what it enqueued may still use the back end's memory.
    call.group.count(B::end(core)?);
    done
}

/// Outputs, and what backward needs where it will follow.
type Forwarded<B> = (Outputs<B>, Option<Context<<B as NativeMemory>::Core>>);

/// Forward through the core over contiguous operands; with a context if `backward` will follow.
pub(super) fn run_forward<B: NativeMemory>(
    call: &LayerCall,
    operands: &Operands<FloatTensor<B>>,
    backward: bool,
) -> Result<Forwarded<B>> {
    let device = B::float_device(&operands.x);
    let mut group = call.group.expect::<B, B::Core>(FORWARD, &device)?.lock();
    let core = group.device().clone();
    let mode = Mode { backward, noise: call.noise };
    let done = RefusalGuard::forward(&call.layer, &mut group).run(|entry| {
        let views = Views::<B>::new(&core, operands)?;
        let mut results = Results::<B>::allocate(call, &core, &operands.x)?;
        let made = ordered::<B, _>(call, &core, || {
            // Before the call: nothing of the back end's fails behind it.
            let y = B::view_mut(&mut results.y)?;
            let [logits, ids, weights] = [&mut results.logits, &mut results.ids, &mut results.weights].map(B::view_mut);
            let (logits, ids, weights, aux) = (logits?, ids?, weights?, B::view_mut(&mut results.aux)?);
            let params = views.params.params();
            let inputs = Inputs { x: views.x.borrow(), params: &params };
            let made = call.layer.forward_into(entry.enter(), mode, inputs, y)?;
            for (from, to) in
                [(&made.routing.logits, logits), (&made.routing.ids, ids), (&made.routing.weights, weights)]
            {
                core.copy(from.view().data(), to.into_data())?;
            }
            made.aux.write(aux)?;
            Ok(made)
        })?;
        Ok((results, made))
    });
    let (results, made) = done?;
    let outputs = Outputs {
        y: B::float(results.y)?,
        aux: B::float(results.aux)?,
        losses: made.aux.value().clone(),
        routing: RoutingData {
            logits: B::float(results.logits)?,
            ids: B::int(results.ids)?,
            weights: B::float(results.weights)?,
            load: made.routing.load,
        },
    };
    Ok((outputs, made.context))
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
    tracked: Tracked,
) -> Result<TensorGradients<FloatTensor<B>>> {
    let device = B::float_device(&operands.x);
    context.handle().check_backward(BACKWARD)?;
    let mut group = call.group.expect::<B, B::Core>(BACKWARD, &device)?.lock();
    let core = group.device().clone();
    let made = RefusalGuard::backward(&call.layer, &mut group).run(|entry| {
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
        for kind in ParamKind::ALL.into_iter().filter(|&kind| tracked.makes(kind)) {
            made.params[kind] = views.params.get(kind).map(like).transpose()?;
        }
        let cotangents = Cotangents { y, aux: aux.map_or(Scalar::Host(0.0), Scalar::Device) };
        ordered::<B, _>(call, &core, || {
            let mut into = GradientsMut::none();
            into.x = made.x.as_mut().map(B::view_mut).transpose()?;
            for (kind, output) in made.params.as_mut() {
                if let Some(output) = output {
                    into.set(kind, B::view_mut(output)?);
                }
            }
            let params = views.params.params();
            let inputs = Inputs { x: views.x.borrow(), params: &params };
            call.layer.backward_into(entry.enter(), context, inputs, cotangents, into)
        })?;
        Ok(made)
    });
    made?.try_map(B::float)
}

/// Views of one call's tensors.
struct Views<'a, B: NativeMemory> {
    x: TensorRef<'a, B::Core>,
    params: ParamViews<'a, B::Core>,
}

impl<'a, B: NativeMemory> Views<'a, B> {
    fn new(core: &B::Core, operands: &'a Operands<FloatTensor<B>>) -> Result<Self> {
        let view = |name, tensor| B::view(core, Named { name, tensor });
        Ok(Self {
            x: view("x", &operands.x)?,
            params: ParamViews::collect(|kind| operands.params.get(kind).map(|t| view(kind.name(), t)).transpose())?,
        })
    }
}
