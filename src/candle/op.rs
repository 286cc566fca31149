//! The layer's place in candle's autograd graph.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Storage, Tensor};

use crate::ep::{EpGroup, Group};
use crate::error::Error;
use crate::kernels::Scalar;
use crate::layer::{Context, Cotangents, Gradients, Inputs, Layer, ParamKind, ParamViews, Wanted};
use crate::tensor::TensorRef;

use super::error::framework;
use super::group::contiguous;
use super::host::{Host, into_candle, with_views};
use super::sharded::{Backward, ExpertWeights};

const CALL: &str = "ExpertParallelMoE::backward";

/// One forward of a layer, until its backward.
pub(super) struct Step<D: Host> {
    pub(super) layer: Layer,
    pub(super) group: EpGroup<D>,
    pub(super) device: Device,
    /// x as `[T, H]`, contiguous.
    pub(super) x: Tensor,
    pub(super) params: Vec<(ParamKind, Tensor)>,
    /// Where `up` and `down` are gathered from, if their parameters are shards.
    pub(super) experts: Option<Arc<dyn ExpertWeights<D>>>,
    pub(super) state: Mutex<State<D>>,
}

/// What a step still has.
pub(super) enum State<D: Host> {
    /// Forward is done; cotangents arrive.
    Ready { context: Box<Context<D>>, d_y: Option<Tensor>, d_aux: Option<Tensor> },
    /// Backward is done: gradients of x and the parameters wait to be handed out.
    Done { x: Option<Tensor>, params: Vec<Option<Tensor>> },
    /// Backward failed, or is running.
    Consumed,
}

/// Which output of the layer a cotangent belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Output {
    Y,
    Aux,
}

impl<D: Host> Step<D> {
    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn consumed(&self) -> Error {
        Error::ContextConsumed { call: CALL, rank: self.group.rank() }
    }

    fn keep(&self, output: Output, gradient: &Tensor) -> Result<()> {
        match (&mut *self.state(), output) {
            (State::Ready { d_y, .. }, Output::Y) => *d_y = Some(gradient.clone()),
            (State::Ready { d_aux, .. }, Output::Aux) => *d_aux = Some(gradient.clone()),
            _ => return Err(self.consumed().into()),
        }
        Ok(())
    }

    /// Runs backward if it has not run.
    fn run(&self) -> crate::Result<()> {
        let mut state = self.state();
        if matches!(*state, State::Done { .. }) {
            return Ok(());
        }
        let State::Ready { context, d_y, d_aux } = std::mem::replace(&mut *state, State::Consumed) else {
            return Err(self.consumed());
        };
        context.handle().check_backward(CALL)?;
        let mut group = self.group.lock();
        let mut called = false;
        let made = self.gradients(&mut group, (*context, d_y, d_aux), &mut called);
        // What candle's tensors alone make impossible is told to the other ranks, which are in backward.
        let mut gradients = made.map_err(|e| if called { e } else { self.layer.refuse_backward(&mut group, e) })?;
        let own = |g, like: &Tensor| into_candle(g, like.dims(), &self.device);
        let x = gradients.x.take().map(|g| own(g, &self.x)).transpose()?;
        let of = |(role, t): &(ParamKind, Tensor)| gradients.take(*role).map(|g| own(g, t)).transpose();
        let params = self.params.iter().map(of).collect::<crate::Result<_>>()?;
        *state = State::Done { x, params };
        Ok(())
    }

    /// The layer's backward; `called` once it is up to that to tell the other ranks of an error.
    fn gradients(
        &self,
        group: &mut Group<D>,
        (context, d_y, d_aux): (Context<D>, Option<Tensor>, Option<Tensor>),
        called: &mut bool,
    ) -> crate::Result<Gradients<D>> {
        let d_y = d_y.map(|d| d.reshape(self.x.shape())?.contiguous()).transpose().map_err(framework(CALL))?;
        let d_aux = d_aux.filter(|_| !self.layer.config().aux.is_off());
        let tracks = |roles: &[ParamKind]| self.params.iter().any(|(r, t)| roles.contains(r) && t.track_op());
        let wanted = Wanted {
            x: self.x.track_op(),
            router: tracks(&[ParamKind::Router, ParamKind::RouterBias]),
            experts: tracks(&[ParamKind::Up, ParamKind::UpBias, ParamKind::Down, ParamKind::DownBias]),
            shared: tracks(&[ParamKind::SharedUp, ParamKind::SharedDown, ParamKind::SharedGate]),
        };
        let params = contiguous(CALL, &self.params)?;
        let device = group.device().clone();
        let mut tensors = named(&self.x, &params);
        tensors.extend(d_y.as_ref().map(|d| ("gradient of y", d)));
        tensors.extend(d_aux.as_ref().map(|d| ("gradient of aux", d)));
        with_views(&device, CALL, &tensors, |views| {
            let weights = views_of(&params, &views[1..])?;
            let mut left = views[1 + params.len()..].iter().copied();
            let y = d_y.as_ref().and_then(|_| left.next());
            let aux = left.next().map_or(Scalar::Host(0.0), Scalar::Device);
            let cotangents = Cotangents { y, aux };
            *called = true;
            let Some(experts) = &self.experts else {
                let weights = weights.params();
                let inputs = Inputs { x: views[0].borrow(), params: &weights };
                return self.layer.backward(group, context, inputs, cotangents, wanted);
            };
            let submit = [ParamKind::Up, ParamKind::Down].map(|role| tracks(&[role]));
            let call = Backward { layer: &self.layer, group, context, wanted, submit };
            call.run(&**experts, (views[0].borrow(), &weights), cotangents)
        })
    }

    /// Hands out one gradient: of x for `None`, of a parameter by its place. Those of shards go another way.
    fn gradient(&self, input: Option<usize>, like: &Tensor) -> Result<Option<Tensor>> {
        self.run()?;
        let taken = match (&mut *self.state(), input) {
            (State::Done { x, .. }, None) => x.take(),
            (State::Done { params, .. }, Some(i)) => params[i].take(),
            _ => None,
        };
        let role = input.map(|i| self.params[i].0);
        match taken {
            None if self.experts.is_some() && matches!(role, Some(ParamKind::Up | ParamKind::Down)) => Ok(None),
            // candle wants a gradient of whatever it tracks.
            None => like.zeros_like().map(Some),
            some => Ok(some),
        }
    }
}

/// x and the parameters, with their names.
pub(super) fn named<'a>(x: &'a Tensor, params: &'a [(ParamKind, Tensor)]) -> Vec<(&'static str, &'a Tensor)> {
    std::iter::once(("x", x)).chain(params.iter().map(|(role, t)| (role.name(), t))).collect()
}

/// Views of parameters by role, given in the parameters' order.
pub(super) fn views_of<'a, D: Host>(
    params: &[(ParamKind, Tensor)],
    views: &[TensorRef<'a, D>],
) -> crate::Result<ParamViews<'a, D>> {
    ParamViews::collect(|role| Ok(params.iter().position(|(r, _)| *r == role).map(|i| views[i])))
}

/// Joins one more input to the token: the first link of the chain that candle runs backwards last.
pub(super) struct Join<D: Host> {
    pub(super) step: Arc<Step<D>>,
    /// `None`: x; else a parameter's place.
    pub(super) input: Option<usize>,
}

impl<D: Host> CustomOp2 for Join<D> {
    fn name(&self) -> &'static str {
        "moebius-join"
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
pub(super) struct Emit<D: Host> {
    pub(super) step: Arc<Step<D>>,
    pub(super) output: Output,
    pub(super) value: Mutex<Option<(Storage, Shape)>>,
}

impl<D: Host> Emit<D> {
    fn take(&self) -> Option<(Storage, Shape)> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

const TWICE: &str = "moebius-emit ran twice";

impl<D: Host> CustomOp1 for Emit<D> {
    fn name(&self) -> &'static str {
        "moebius-emit"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.take() {
            Some((Storage::Cpu(value), shape)) => Ok((value, shape)),
            _ => Err(candle_core::Error::msg(TWICE)),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.take() {
            Some((Storage::Cuda(value), shape)) => Ok((value, shape)),
            _ => Err(candle_core::Error::msg(TWICE)),
        }
    }

    fn bwd(&self, token: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.step.keep(self.output, gradient)?;
        Ok(Some(token.zeros_like()?))
    }
}
