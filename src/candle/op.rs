//! The layer's place in candle's autograd graph.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Tensor, TensorId};

use crate::adapter::{
    LayerOutput, LayerShards, OutputCotangents, QuantizedExperts, ResidentGradients, acquire_resident,
    resident_sources, with_sources,
};
use crate::ep::EpGroup;
use crate::error::Error;
use crate::kernels::Scalar;
use crate::layer::{
    BackwardProgress, Context, Cotangents, GradientMask, GradientRequest, Gradients, GradientsMut, Inputs, Layer,
    ParamKind, PerParam, RefusalGuard,
};
use crate::tensor::TensorRef;

use super::device::{CandleDevice, into_candle, with_views};
use super::error::framework;
use super::gradient_hook::run_hook;
use super::main_gradients::{EXPERTS, expert_gradients, writes_experts};
use super::params::{contiguous, named, views_of};
use super::pending::{BackwardStage, OutputGradient, PendingCollectives};
use super::precomputed::Precomputed;
use super::quantized_params::params_of;
use super::views_mut::with_views_mut;

const CALL: &str = "ExpertParallelMoE::backward";

/// One forward of a layer, until its backward.
pub(super) struct PendingBackward<D: CandleDevice> {
    pub(super) layer: Layer,
    pub(super) group: EpGroup<D>,
    pub(super) device: Device,
    /// x as `[T, H]`, contiguous.
    pub(super) x: Tensor,
    /// Whether x's gradient is asked for.
    pub(super) tracks_x: bool,
    pub(super) params: PerParam<Option<Tensor>>,
    /// Where `up` and `down` are gathered from, if their parameters are shards.
    pub(super) experts: Option<LayerShards<D>>,
    /// `up` and `down`, where they are quantized and so no parameters.
    pub(super) quantized: Option<Arc<QuantizedExperts<D>>>,
    /// Gradient of the auxiliary losses that comes with y's.
    pub(super) aux_scale: f64,
    pub(super) progress: Arc<BackwardProgress>,
    pub(super) state: Mutex<BackwardState<D>>,
}

/// State of a step between forward and its gradients.
pub(super) enum BackwardState<D: CandleDevice> {
    /// Forward is done; cotangents arrive.
    Ready { context: Box<Context<D>>, arrived: OutputCotangents<Tensor> },
    /// Backward is done: gradients of x and the parameters wait to be handed out, but for those that were written
    /// elsewhere: experts' into [`MainGradients`](super::MainGradients), shards' into their chain.
    Done { x: Option<Tensor>, params: PerParam<Option<Tensor>>, elsewhere: PerParam<bool> },
    /// Backward failed, or is running.
    Consumed,
}

impl<D: CandleDevice> PendingBackward<D> {
    fn state(&self) -> MutexGuard<'_, BackwardState<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn consumed(&self) -> Error {
        Error::ContextConsumed { call: CALL, rank: self.group.rank() }
    }

    fn set_cotangent(&self, output: LayerOutput, gradient: &Tensor) -> Result<()> {
        match &mut *self.state() {
            BackwardState::Ready { arrived, .. } => arrived.set(output, gradient.clone()),
            _ => return Err(self.consumed().into()),
        }
        Ok(())
    }

    /// Runs backward if it has not run.
    fn run(&self) -> crate::Result<()> {
        let mut state = self.state();
        if matches!(*state, BackwardState::Done { .. }) {
            return Ok(());
        }
        let BackwardState::Ready { context, arrived } = std::mem::replace(&mut *state, BackwardState::Consumed) else {
            return Err(self.consumed());
        };
        context.handle().check_backward(CALL)?;
        let mut group = self.group.lock();
        // Errors of candle's tensors are this rank's alone; the other ranks, which are in backward, are told.
        let made =
            RefusalGuard::backward(&self.layer, &mut group).run(|entry| self.gradients(entry, *context, arrived));
        let (mut gradients, elsewhere) = made?;
        let own = |g, like: &Tensor| into_candle(g, like.dims(), &self.device);
        let x = gradients.x.take().map(|g| own(g, &self.x)).transpose()?;
        let mut params = self.params.as_ref().try_map(|kind, t| {
            let of = t.as_ref().and_then(|t| Some(own(gradients.take(kind)?, t)));
            of.transpose()
        })?;
        let left = run_hook(self.layer.number(), &self.params, &mut params)?;
        let elsewhere = PerParam::from_fn(|kind| elsewhere[kind] || left[kind]);
        *state = BackwardState::Done { x, params, elsewhere };
        Ok(())
    }

    /// The layer's backward; also says which parameters' gradients it left elsewhere.
    fn gradients(
        &self,
        entry: &mut RefusalGuard<'_, D>,
        context: Context<D>,
        OutputCotangents { d_y, d_aux }: OutputCotangents<Tensor>,
    ) -> crate::Result<(Gradients<D>, PerParam<bool>)> {
        let d_y = d_y.map(|d| d.reshape(self.x.shape())?.contiguous()).transpose().map_err(framework(CALL))?;
        let d_aux = d_aux.filter(|_| !self.layer.config().aux.is_off());
        let tracks = |kind: ParamKind| self.params.get(kind).is_some_and(Tensor::track_op);
        let any = |kinds: &[ParamKind]| kinds.iter().any(|kind| tracks(*kind));
        let device = entry.device().clone();
        let main = match &self.experts {
            None => expert_gradients(&device, &self.device, &self.params)?,
            Some(_) => None,
        };
        let stored = self.experts.as_ref().is_some_and(LayerShards::is_stored);
        let wanted = GradientMask {
            x: self.tracks_x,
            router: any(&[ParamKind::Router, ParamKind::RouterBias]),
            experts: main.is_none() && !stored && any(&EXPERTS),
            shared: any(&[
                ParamKind::SharedUp,
                ParamKind::SharedUpBias,
                ParamKind::SharedDown,
                ParamKind::SharedDownBias,
                ParamKind::SharedGate,
            ]),
        };
        let params = contiguous(CALL, &self.params)?;
        let mut tensors = named(&self.x, &params);
        let first = tensors.len();
        tensors.extend(d_y.as_ref().map(|d| ("gradient of y", d)));
        tensors.extend(d_aux.as_ref().map(|d| ("gradient of aux", d)));
        with_views(&device, CALL, &tensors, |views| {
            if let Some(experts) = &self.quantized {
                let cotangents = cotangents(&views[first..], d_y.is_some(), self.aux_scale);
                let params = params_of(&params, &views[1..first], experts)?;
                let inputs = Inputs { x: views[0].borrow(), params: &params };
                let gradients = self.layer.backward(entry.enter(), context, inputs, cotangents, wanted)?;
                return Ok((gradients, PerParam::from_fn(|_| false)));
            }
            let resident = self.experts.as_ref().map(|experts| &experts.resident);
            let sources = resident.map(|resident| resident_sources(resident, true)).transpose()?;
            let guards = sources.as_ref().map(|sources| acquire_resident(&device, sources)).transpose()?;
            let weights = views_of(&params, &views[1..first], resident.zip(guards.as_ref()))?;
            let cotangents = cotangents(&views[first..], d_y.is_some(), self.aux_scale);
            if let Some(experts) = &self.experts {
                let sources = experts.sources(true)?;
                let mut shards = if wanted.experts { Some(experts.gradients(&context)?) } else { None };
                let mut others = ResidentGradients::new(&experts.resident, tracks)?;
                let mut given = GradientsMut::none();
                if let Some(shards) = &mut shards {
                    shards.view_in(&mut given)?;
                }
                others.view_in(&mut given)?;
                let params = with_sources(&weights, Some(&sources));
                let inputs = Inputs { x: views[0].borrow(), params: &params };
                let gradients = self.layer.backward_with(
                    entry.enter(),
                    context,
                    inputs,
                    cotangents,
                    GradientRequest { wanted, given },
                )?;
                if let Some(shards) = shards {
                    shards.submit(&self.layer, entry, [ParamKind::Up, ParamKind::Down].map(tracks))?;
                }
                others.submit((&self.layer, &self.progress), entry, tracks)?;
                return Ok((gradients, PerParam::from_fn(|kind| experts.has(kind))));
            }
            let weights = weights.params();
            let inputs = Inputs { x: views[0].borrow(), params: &weights };
            let Some(main) = &main else {
                let gradients = self.layer.backward(entry.enter(), context, inputs, cotangents, wanted)?;
                return Ok((gradients, PerParam::from_fn(|_| false)));
            };
            let (kinds, tensors): (Vec<_>, Vec<_>) = main.tensors.present().unzip();
            let named: Vec<_> = kinds.iter().map(|kind| kind.name()).zip(tensors).collect();
            let gradients = with_views_mut(&device, CALL, &named, |memory| {
                let mut given = GradientsMut { accumulate: main.accumulate, ..GradientsMut::none() };
                kinds.iter().zip(memory).for_each(|(kind, memory)| given.set(*kind, memory));
                self.layer.backward_with(entry.enter(), context, inputs, cotangents, GradientRequest { wanted, given })
            });
            if self.progress.has_rows() {
                writes_experts();
            }
            Ok((gradients?, PerParam::from_fn(|kind| kinds.contains(&kind))))
        })
    }

    /// Hands out one gradient: of x for `None`, else of a parameter; none of what went elsewhere.
    fn gradient(&self, input: Option<ParamKind>, like: &Tensor) -> Result<Option<Tensor>> {
        self.run()?;
        let taken = match (&mut *self.state(), input) {
            (BackwardState::Done { elsewhere, .. }, Some(kind)) if elsewhere[kind] => return Ok(None),
            (BackwardState::Done { x, .. }, None) => x.take().map(|x| x.reshape(like.shape())).transpose()?,
            (BackwardState::Done { params, .. }, Some(kind)) => params[kind].take(),
            _ => None,
        };
        match taken {
            // candle wants a gradient of whatever it tracks.
            None => like.zeros_like().map(Some),
            some => Ok(some),
        }
    }
}

impl<D: CandleDevice> PendingCollectives for PendingBackward<D> {
    fn stage(&self) -> BackwardStage {
        match *self.state() {
            BackwardState::Ready { .. } => BackwardStage::Waiting,
            BackwardState::Done { .. } => BackwardStage::Over,
            BackwardState::Consumed if self.progress.has_exchanged_all() => BackwardStage::Over,
            BackwardState::Consumed => BackwardStage::Reported,
        }
    }

    fn group(&self) -> usize {
        self.group.address()
    }

    fn layer_vars(&self) -> Vec<TensorId> {
        let is_shard = |kind| self.experts.as_ref().is_some_and(|experts| experts.has(kind));
        let trained = self.params.present().filter(|(kind, t)| t.is_variable() && !is_shard(*kind));
        trained.filter(|(kind, _)| *kind != ParamKind::SelectionBias).map(|(_, t)| t.id()).collect()
    }

    fn refuse(&self, reason: &str) {
        let reason = Error::Framework { call: CALL, framework: "candle", message: reason.to_string() };
        self.layer.refuse_backward(&mut self.group.lock(), reason);
    }
}

impl<D: CandleDevice> OutputGradient for PendingBackward<D> {
    fn set_y_cotangent(&self, d_y: &Tensor) -> Result<()> {
        self.set_cotangent(LayerOutput::Y, d_y)
    }
}

/// Gradients of a forward's outputs, that of the auxiliary losses on host or device.
type OwnCotangents<'a, D> = Cotangents<'a, D, Scalar<'a, D>>;

/// The gradients that a backward is given: of y, if it has one, then of the auxiliary losses.
fn cotangents<'a, D: CandleDevice>(views: &[TensorRef<'a, D>], has_y: bool, aux_scale: f64) -> OwnCotangents<'a, D> {
    let mut left = views.iter().copied();
    let y = if has_y { left.next() } else { None };
    let aux = left.next().map_or(Scalar::Host(aux_scale), Scalar::Device);
    Cotangents { y, aux }
}

/// Joins one more input to the token: the first link of the chain that candle runs backwards last.
pub(super) struct InputOp<D: CandleDevice> {
    pub(super) step: Arc<PendingBackward<D>>,
    /// `None`: x; else a parameter.
    pub(super) input: Option<ParamKind>,
}

impl<D: CandleDevice> CustomOp2 for InputOp<D> {
    fn name(&self) -> &'static str {
        "moebius-input"
    }

    fn cpu_fwd(&self, token: &CpuStorage, at: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((token.try_clone(at)?, Shape::from(())))
    }

    fn cuda_fwd(&self, token: &CudaStorage, at: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((token.try_clone(at)?, Shape::from(())))
    }

    fn bwd(&self, token: &Tensor, input: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        // Taken whether wanted or not: the first link that candle meets runs the layer's backward.
        let gradient = self.step.gradient(self.input, input)?;
        let token = token.track_op().then(|| token.zeros_like()).transpose()?;
        Ok((token, gradient.filter(|_| input.track_op())))
    }
}

/// Gives an output of the layer, computed before, a place in the graph.
pub(super) struct OutputOp<D: CandleDevice> {
    pub(super) step: Arc<PendingBackward<D>>,
    pub(super) output: LayerOutput,
    pub(super) value: Precomputed,
}

impl<D: CandleDevice> CustomOp1 for OutputOp<D> {
    fn name(&self) -> &'static str {
        "moebius-output"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.step.set_cotangent(self.output, gradient)?;
        Ok(Some(token.zeros_like()?))
    }
}
