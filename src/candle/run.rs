//! A layer's forward on one device, and its outputs' place in candle's graph.

use std::sync::{Arc, Mutex};

use candle_core::{Result, Shape, Tensor};

use crate::layer::{Forward, Layer, Mode, ParamKind};

use super::group::{On, contiguous};
use super::host::{Host, copy_of, into_candle, with_views};
use super::module::MoeOutput;
use super::op::{Emit, Join, Output, State, Step, named, views_of};
use super::sharded::{ExpertWeights, Sharded, with_sources};

const CALL: &str = "ExpertParallelMoE::forward";

/// What a forward is of.
pub(super) struct Call<'a> {
    pub(super) layer: &'a Layer,
    pub(super) params: &'a [(ParamKind, Tensor)],
    /// Where `up` and `down` are gathered from, if their parameters are shards.
    pub(super) sharded: Option<&'a Sharded>,
    /// x as `[T, H]`, contiguous.
    pub(super) flat: &'a Tensor,
    /// x's own shape.
    pub(super) shape: &'a Shape,
}

pub(super) fn forward<D: Host>(on: &On<D>, call: &Call<'_>, mode: Mode) -> Result<MoeOutput> {
    let experts = call.sharded.map(|sharded| sharded.experts::<D>(CALL)).transpose();
    let experts = experts.map_err(|e| call.layer.refuse_forward(&mut on.group.lock(), e))?;
    let Forward { y, aux, routing, context } = layer(on, (call, experts.as_deref()), mode)?;
    let device = on.group.lock().device().clone();
    let losses = aux.value().clone();
    let aux = {
        let mut total = crate::Tensor::empty(&device, y.dtype().accumulator(), &[])?;
        aux.write(total.view_mut())?;
        total
    };
    let (y, aux) = match context {
        None => (into_candle(y, call.shape.dims(), &on.device)?, into_candle(aux, &[], &on.device)?),
        Some(context) => {
            let step = Arc::new(Step {
                layer: call.layer.clone(),
                group: on.group.clone(),
                device: on.device.clone(),
                x: call.flat.clone(),
                params: call.params.to_vec(),
                experts,
                state: Mutex::new(State::Ready { context: Box::new(context), d_y: None, d_aux: None }),
            });
            let mut token = Tensor::zeros((), candle_core::DType::F32, &on.device)?;
            token = token.apply_op2(call.flat, Join { step: step.clone(), input: None })?;
            // The selection bias has no gradient: with one of zeros an optimizer's weight decay would move it.
            let joined = call.params.iter().enumerate().filter(|(_, (role, _))| *role != ParamKind::SelectionBias);
            for (i, (_, t)) in joined {
                token = token.apply_op2(t, Join { step: step.clone(), input: Some(i) })?;
            }
            let emit = |output, value: crate::Tensor<D>, shape: &Shape| {
                let value = Mutex::new(Some((D::storage(value, &on.device)?, shape.clone())));
                token.apply_op1(Emit { step: step.clone(), output, value })
            };
            (emit(Output::Y, y, call.shape)?, emit(Output::Aux, aux, &Shape::from(()))?)
        }
    };
    // The context may hold the routing too; what nobody else holds moves over.
    let data = |t: Arc<crate::Tensor<D>>| {
        let dims = t.dims().to_vec();
        let own = Arc::try_unwrap(t).or_else(|shared| copy_of(&device, shared.view()))?;
        into_candle(own, &dims, &on.device)
    };
    Ok(MoeOutput {
        y,
        aux,
        losses,
        logits: data(routing.logits)?,
        ids: data(routing.ids)?,
        weights: data(routing.weights)?,
        load: routing.load,
    })
}

fn layer<D: Host>(
    on: &On<D>,
    (call, experts): (&Call<'_>, Option<&dyn ExpertWeights<D>>),
    mode: Mode,
) -> crate::Result<Forward<D>> {
    let mut group = on.group.lock();
    let device = group.device().clone();
    let params = contiguous(CALL, call.params)?;
    let mut called = false;
    let result = with_views(&device, CALL, &named(call.flat, &params), |views| {
        let weights = views_of(&params, &views[1..])?;
        let sources = experts.map(|experts| experts.sources()).transpose()?;
        called = true;
        let params = with_sources(&weights, sources.as_ref());
        call.layer.forward(&mut group, mode, views[0].borrow(), &params)
    });
    // What candle's tensors alone make impossible is told to the other ranks, which are in forward.
    result.map_err(|e| if called { e } else { call.layer.refuse_forward(&mut group, e) })
}
