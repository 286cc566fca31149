//! What comes of a job: each rank's part, and all of them as one.

use std::collections::BTreeMap;
use std::time::Duration;

use moebius::CommError;
use moebius::candle::error_of;
use moebius::comm::{Communicator, Op, Tag};
use moebius::kernels::Kernels;
use moebius::metrics::Load;
use moebius_models::Error as ModelError;
use moebius_models::generate::{Error as TextError, Output, Stats};
use serde::{Deserialize, Serialize};

use crate::AnyError;
use crate::gather::gather_over;

/// What came of requests: a rank's, or all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// In the requests' order.
    pub outputs: Vec<Output>,
    /// Tokens of all ranks, times of the slowest.
    pub stats: Stats,
    /// Time until the last rank had its part of the model.
    pub loading: Duration,
    /// How often each layer's experts were chosen, by the tokens of all ranks; none where nobody asked.
    pub loads: BTreeMap<usize, ExpertChoices>,
    /// Most memory that a process has had on the host, in bytes, where that is known.
    pub host_memory: Option<u64>,
    /// The same of a GPU.
    pub gpu_memory: Option<u64>,
    /// Number of processes.
    pub processes: usize,
}

/// How often a layer's experts were chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertChoices {
    /// Of each expert.
    pub tokens: Vec<usize>,
    /// Choices that a capacity dropped.
    pub dropped: usize,
}

impl From<Load> for ExpertChoices {
    fn from(load: Load) -> Self {
        Self { tokens: load.tokens_per_expert, dropped: load.dropped }
    }
}

/// Ranks' results as one; where some failed, the error of the first of them. One that says no more than that another rank is
/// gone comes last, as that rank's own has the cause.
pub fn merge(outcomes: Vec<Result<Outcome, AnyError>>, requests: usize) -> Result<Outcome, AnyError> {
    let ranks = outcomes.len();
    let failed =
        |(_, outcome): &(usize, Result<Outcome, AnyError>)| outcome.as_ref().is_err_and(|e| !tells_of_one_gone(e));
    let mut outcomes: Vec<_> = outcomes.into_iter().enumerate().collect();
    if let Some(first) = outcomes.iter().position(failed) {
        outcomes.swap(0, first);
    }
    let mut places: Vec<Option<Output>> = vec![None; requests];
    let mut all = Outcome {
        outputs: Vec::new(),
        stats: Stats::default(),
        loading: Duration::ZERO,
        loads: BTreeMap::new(),
        host_memory: None,
        gpu_memory: None,
        processes: 1,
    };
    for (rank, outcome) in outcomes {
        let own = outcome.map_err(|e| if ranks > 1 { format!("rank {rank}: {e}").into() } else { e })?;
        for (i, output) in own.outputs.into_iter().enumerate() {
            let place = places.get_mut(rank + i * ranks).ok_or("more outputs than requests")?;
            *place = Some(output);
        }
        add(&mut all.stats, &own.stats);
        all.loading = all.loading.max(own.loading);
        all.host_memory = all.host_memory.max(own.host_memory);
        all.gpu_memory = all.gpu_memory.max(own.gpu_memory);
        all.processes = all.processes.max(own.processes);
        for (layer, choices) in own.loads {
            match all.loads.get_mut(&layer) {
                Some(sum) => {
                    sum.tokens.iter_mut().zip(choices.tokens).for_each(|(a, b)| *a += b);
                    sum.dropped += choices.dropped;
                }
                None => drop(all.loads.insert(layer, choices)),
            }
        }
    }
    all.outputs = places.into_iter().flatten().collect();
    Ok(all)
}

/// Whether an error is that another rank has left.
fn tells_of_one_gone(error: &AnyError) -> bool {
    let error: &(dyn std::error::Error + 'static) = &**error;
    let of_model: Option<&ModelError> = match error.downcast_ref() {
        Some(TextError::Model(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    // Where a model's error is the layer's or candle's it names no source of its own.
    let of_layer = match of_model {
        Some(ModelError::Moebius(error)) => Some(error),
        Some(ModelError::Candle(error)) => error_of(error),
        _ => error_of(error),
    };
    matches!(of_layer, Some(moebius::Error::Comm(CommError::PeerGone { .. })))
}

fn add(all: &mut Stats, own: &Stats) {
    all.prompt_tokens += own.prompt_tokens;
    all.generated_tokens += own.generated_tokens;
    all.prefill_tokens += own.prefill_tokens;
    all.decode_tokens += own.decode_tokens;
    all.decode_steps = all.decode_steps.max(own.decode_steps);
    all.prefill = all.prefill.max(own.prefill);
    all.decode = all.decode.max(own.decode);
    all.capture_steps = all.capture_steps.max(own.capture_steps);
    all.capture = all.capture.max(own.capture);
}

/// All ranks' results on every rank, in rank order. Collective.
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "ranks that are threads need none of it"))]
pub fn exchange<K: Kernels>(
    device: &K,
    comm: &mut dyn Communicator<K>,
    own: &Outcome,
) -> Result<Vec<Outcome>, AnyError> {
    // No call of the generator's has this layer.
    let tag = Tag { layer: u32::MAX, op: Op::User, sequence: 0 };
    let all = gather_over(device, comm, tag, &serde_json::to_vec(own)?)?;
    let ranks = all.len();
    let outcomes = all.iter().map(|bytes| serde_json::from_slice(bytes));
    let mut outcomes = outcomes.collect::<Result<Vec<Outcome>, _>>()?;
    outcomes.iter_mut().for_each(|outcome| outcome.processes = ranks);
    Ok(outcomes)
}
