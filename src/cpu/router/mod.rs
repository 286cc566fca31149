//! Routing on the CPU: rows of logits to expert ids and weights, and back. Every token is independent of the others,
//! so rayon's threads take blocks of `TASK_TOKENS` tokens; no result depends on how many threads there are.
//!
//! Per-expert scores are in the accumulator type of the logits, as the formulas ask; sums are kept in `f64`, which
//! costs nothing beside the exponentials.

mod aux_losses;
mod backward;
mod choose;
pub(crate) mod jitter;
mod renormalize;
mod score;
mod weights;

use rayon::prelude::*;

use crate::config::RouterConfig;
use crate::dtype::DType;
use crate::error::{Error, IdProblem, Result};
use crate::kernels::{Origin, Route};
use crate::tensor::TensorRef;

use super::Cpu;
use super::element::{Acc, to_f64, with_acc};
use super::heuristics::TASK_TOKENS;
use choose::Chooser;
use jitter::JitterNoise;

pub(super) use aux_losses::{aux_sums, aux_total};
pub(super) use backward::route_bwd;
pub(super) use renormalize::renormalize_kept;

pub(super) fn route(call: Route<'_, Cpu>) -> Result<()> {
    with_acc!("route", "tensor logits", call.logits.dtype(), A => route_as::<A>(call))
}

fn route_as<A: Acc>(call: Route<'_, Cpu>) -> Result<()> {
    const CALL: &str = "route";
    let config = call.config;
    config.validate()?;
    let (e, k) = (config.num_experts, config.top_k);
    let t = check_logits(CALL, config, call.logits)?;
    check(CALL, "ids", DType::I32, &[t, k], call.ids.dtype(), call.ids.dims())?;
    check(CALL, "weights", A::DTYPE, &[t, k], call.weights.dtype(), call.weights.dims())?;
    let bias = selection_bias::<A>(CALL, config, call.selection_bias)?;
    let logits = call.logits.as_slice::<A>()?;
    let (ids, weights) = (call.ids.into_slice::<i32>()?, call.weights.into_slice::<A>()?);
    if let Some(at) = logits.par_iter().with_min_len(4096).position_first(|l| l.is_nan()) {
        let Origin { rank, layer } = call.origin;
        return Err(Error::NanLogits { call: CALL, rank, layer, token: at / e, expert: at % e });
    }

    let noise = JitterNoise::new(config, call.jitter);
    let block = |b: usize, logits: &[A], ids: &mut [i32], weights: &mut [A]| {
        let mut chooser = Chooser::new(config, bias.as_deref());
        let rows = logits.chunks_exact(e).zip(ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k)));
        for (i, (logits, (ids, weights))) in rows.enumerate() {
            chooser.load(logits, noise.as_ref().map(|n| n.token(b * TASK_TOKENS + i)));
            chooser.choose();
            for (id, &chosen) in ids.iter_mut().zip(&chooser.order) {
                *id = chosen as i32;
            }
            weights::write(config, &mut chooser, weights);
        }
    };
    if t <= TASK_TOKENS {
        block(0, logits, ids, weights);
    } else {
        logits
            .par_chunks(TASK_TOKENS * e)
            .zip(ids.par_chunks_mut(TASK_TOKENS * k).zip(weights.par_chunks_mut(TASK_TOKENS * k)))
            .enumerate()
            .for_each(|(b, (logits, (ids, weights)))| block(b, logits, ids, weights));
    }
    Ok(())
}

/// T of logits `[T, E]`.
fn check_logits(call: &'static str, config: &RouterConfig, logits: TensorRef<'_, Cpu>) -> Result<usize> {
    match logits.dims() {
        [t, e] if *e == config.num_experts => Ok(*t),
        dims => Err(Error::invalid(
            call,
            "tensor logits",
            format!("shape [T, {}] (num_experts)", config.num_experts),
            format!("{dims:?}"),
        )),
    }
}

fn check(
    call: &'static str,
    tensor: &str,
    dtype: DType,
    shape: &[usize],
    found_dtype: DType,
    found_shape: &[usize],
) -> Result<()> {
    Error::check_dtype(call, tensor, dtype, found_dtype)?;
    Error::check_shape(call, tensor, shape, found_shape)
}

/// Ids `[T, K]`, each checked to name an expert: those of a backward come from the caller.
fn check_ids<'a>(
    call: &'static str,
    config: &RouterConfig,
    tokens: usize,
    origin: Origin,
    ids: TensorRef<'a, Cpu>,
) -> Result<&'a [i32]> {
    let (num_experts, k) = (config.num_experts, config.top_k);
    check(call, "ids", DType::I32, &[tokens, k], ids.dtype(), ids.dims())?;
    let ids = ids.as_slice::<i32>()?;
    let Some(at) = ids.iter().position(|&id| id < 0 || id as usize >= num_experts) else { return Ok(ids) };
    let (Origin { rank, layer }, problem) = (origin, IdProblem::NotRouted { num_experts });
    Err(Error::ExpertId { call, rank, layer, token: at / k, k: at % k, id: ids[at].into(), problem })
}

fn selection_bias<A: Acc>(
    call: &'static str,
    config: &RouterConfig,
    bias: Option<TensorRef<'_, Cpu>>,
) -> Result<Option<Vec<A>>> {
    let bias = match (config.selection_bias, bias) {
        (false, None) => return Ok(None),
        (true, Some(bias)) => bias,
        (true, None) => {
            return Err(Error::invalid(call, "tensor selection_bias", "a tensor (the formula has it)", "none"));
        }
        (false, Some(_)) => {
            return Err(Error::invalid(call, "tensor selection_bias", "none (the formula has none)", "a tensor"));
        }
    };
    if !bias.dtype().is_float() {
        return Err(Error::invalid(call, "tensor selection_bias", "a floating-point dtype", bias.dtype()));
    }
    Error::check_shape(call, "selection_bias", &[config.num_experts], bias.dims())?;
    let values = to_f64(bias);
    if let Some(expert) = values.iter().position(|v| v.is_nan()) {
        return Err(Error::invalid(call, format!("tensor selection_bias[{expert}]"), "a number", "NaN"));
    }
    Ok(Some(values.into_iter().map(A::of).collect()))
}
