//! One step of one block over rank threads of this process, whatever the framework.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, Var};
use moebius::DType as MoebiusDType;
use moebius::checkpoint::{Block, Checkpoint, LoadOptions, OpenOptions};
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::etp::Payload;

use super::dense::Params;

/// Any error, from any thread.
pub type AnyError = Box<dyn StdError + Send + Sync>;

/// One forward and backward of one block.
#[derive(Debug, Clone)]
pub struct Job {
    /// The checkpoint folder.
    pub dir: PathBuf,
    /// How it is opened.
    pub open: OpenOptions,
    /// Which of its layers.
    pub layer: usize,
    /// Convert weights and tokens to this type.
    pub dtype: MoebiusDType,
    /// In what form tokens travel to their experts.
    pub token_payload: Payload,
    /// Tokens of each rank; their number is the number of ranks.
    pub split: Vec<usize>,
    /// Tokens of all ranks `[T, H]`, F64.
    pub x: Tensor,
    /// Gradient of the output `[T, H]`, F64.
    pub dy: Tensor,
    /// Longest wait for another rank.
    pub timeout: Duration,
}

impl Job {
    /// A rank's share of the block.
    ///
    /// # Errors
    /// Errors of loading.
    pub fn load(&self, rank: usize, ranks: usize) -> Result<Block, AnyError> {
        let options = LoadOptions { rank, ranks, dtype: Some(self.dtype) };
        let mut block = Checkpoint::open_with(&self.dir, self.open)?.load_block(self.layer, options)?;
        block.config.payload = self.token_payload;
        Ok(block)
    }
}

/// Results of a job, over all ranks; tensors are F64.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// `[T, H]`.
    pub y: Tensor,
    /// `[T, H]`.
    pub dx: Tensor,
    /// Gradients of the whole block's parameters: replicated ones summed over the ranks, experts of all ranks.
    pub grads: Params,
    /// Chosen experts of each token.
    pub ids: Vec<Vec<usize>>,
    /// Tokens that chose each expert.
    pub tokens_per_expert: Vec<usize>,
    /// Longest time that a rank took, stage by stage.
    pub times: Vec<(&'static str, Duration)>,
}

/// One rank's part of an [`Outcome`].
#[derive(Debug)]
pub struct RankOutcome {
    /// `[T, H]` of this rank.
    pub y: Tensor,
    /// `[T, H]` of this rank.
    pub dx: Tensor,
    /// Gradients of this rank's parameters.
    pub grads: Params,
    /// Chosen experts.
    pub ids: Vec<Vec<usize>>,
    /// Over all ranks.
    pub tokens_per_expert: Vec<usize>,
    /// Stage by stage.
    pub times: Vec<(&'static str, Duration)>,
}

/// Runs `one_rank(job, rank, communicator)` on a thread a rank and joins the parts.
///
/// # Errors
/// The first rank's error, a panic of a rank as an error.
pub fn on_threads(
    job: &Job,
    one_rank: fn(&Job, usize, ThreadComm) -> Result<RankOutcome, AnyError>,
) -> Result<Outcome, AnyError> {
    let comms = ThreadWorld::create(job.split.len(), job.timeout);
    join(on_ranks(comms, |rank, comm| one_rank(job, rank, comm))?)
}

/// Runs `one_rank(rank, endpoint)` on a thread a rank.
///
/// # Errors
/// The first rank's error, a panic of a rank as an error.
pub fn on_ranks<S: Send>(
    endpoints: Vec<S>,
    one_rank: impl Fn(usize, S) -> Result<RankOutcome, AnyError> + Sync,
) -> Result<Vec<RankOutcome>, AnyError> {
    let one_rank = &one_rank;
    let ranks: Vec<Result<RankOutcome, AnyError>> = thread::scope(|scope| {
        let spawn = |(rank, endpoint)| scope.spawn(move || one_rank(rank, endpoint));
        let threads: Vec<_> = endpoints.into_iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a rank's thread panicked".into()))).collect()
    });
    ranks.into_iter().collect()
}

/// Rank `rank`'s rows of a tensor of all ranks' rows.
pub fn share(t: &Tensor, split: &[usize], rank: usize, dtype: DType) -> candle_core::Result<Tensor> {
    t.narrow(0, split[..rank].iter().sum(), split[rank])?.to_dtype(dtype)?.contiguous()
}

/// Joins the ranks' parts.
///
/// # Errors
/// Tensors that do not fit together.
pub fn join(ranks: Vec<RankOutcome>) -> Result<Outcome, AnyError> {
    let rows = |f: fn(&RankOutcome) -> &Tensor| {
        let parts: Vec<&Tensor> = ranks.iter().map(f).filter(|t| t.dims()[0] > 0).collect();
        Tensor::cat(&parts, 0)
    };
    let mut times: Vec<(&'static str, Duration)> = Vec::new();
    for (i, &(stage, time)) in ranks.iter().flat_map(|r| r.times.iter().enumerate()) {
        match times.get_mut(i) {
            Some(longest) => longest.1 = longest.1.max(time),
            None => times.push((stage, time)),
        }
    }
    Ok(Outcome {
        y: rows(|r| &r.y)?,
        dx: rows(|r| &r.dx)?,
        grads: join_params(&ranks.iter().map(|r| &r.grads).collect::<Vec<_>>())?,
        ids: ranks.iter().flat_map(|r| r.ids.clone()).collect(),
        tokens_per_expert: ranks.first().map(|r| r.tokens_per_expert.clone()).unwrap_or_default(),
        times,
    })
}

/// Gradients of the whole block: experts' concatenated in rank order, replicated parameters' summed.
pub fn join_params(ranks: &[&Params]) -> candle_core::Result<Params> {
    let mut joined = BTreeMap::new();
    for name in ranks.first().map(|r| r.keys()).into_iter().flatten() {
        let parts: Vec<&Tensor> = ranks.iter().filter_map(|r| r.get(name)).collect();
        let whole = if name.starts_with("experts.") {
            Tensor::cat(&parts, 0)?
        } else {
            parts[1..].iter().try_fold(parts[0].clone(), |sum, part| sum + *part)?
        };
        joined.insert(name.clone(), whole);
    }
    Ok(joined)
}

/// The whole block's parameters in F64, for the dense reference. Each is a variable if `track`.
///
/// # Errors
/// Whatever reading the checkpoint can meet.
pub fn whole_block(job: &Job, track: bool) -> Result<(moebius::MoeConfig, Params), AnyError> {
    let block = job.load(0, 1)?;
    let mut params = Params::new();
    for (kind, tensor) in block.params.per_param().into_present() {
        let tensor = Tensor::from_vec(tensor.to_f64(), tensor.dims(), &Device::Cpu)?;
        let tensor = if track { Var::from_tensor(&tensor)?.into_inner() } else { tensor };
        params.insert(kind.name().to_string(), tensor);
    }
    Ok((block.config, params))
}

/// Laps of a stop watch.
#[derive(Debug)]
pub struct Clock {
    last: Instant,
    /// Named laps so far.
    pub laps: Vec<(&'static str, Duration)>,
}

impl Clock {
    /// Starts now.
    pub fn start() -> Self {
        Self { last: Instant::now(), laps: Vec::new() }
    }

    /// Ends a lap.
    pub fn lap(&mut self, name: &'static str) {
        let now = Instant::now();
        self.laps.push((name, now - self.last));
        self.last = now;
    }
}

/// `tokens` over `ranks`, growing with the rank: uneven, and none at rank 0 where there are many ranks.
pub fn uneven(tokens: usize, ranks: usize) -> Vec<usize> {
    let cut = |r: usize| tokens * r * (r + 1) / (ranks * (ranks + 1));
    (0..ranks).map(|r| cut(r + 1) - cut(r)).collect()
}

/// candle's name of a floating type.
///
/// # Errors
/// An integer type.
pub fn candle_dtype(dtype: MoebiusDType) -> candle_core::Result<DType> {
    Ok(match dtype {
        MoebiusDType::F64 => DType::F64,
        MoebiusDType::F32 => DType::F32,
        MoebiusDType::BF16 => DType::BF16,
        MoebiusDType::F16 => DType::F16,
        other => candle_core::bail!("{other} is no floating type"),
    })
}

/// A rank's share of the job's block, and its place in the group.
///
/// # Errors
/// Errors of loading or joining.
pub fn enter(job: &Job, rank: usize, comm: ThreadComm, clock: &mut Clock) -> Result<(Block, Group<Cpu>), AnyError> {
    let block = job.load(rank, job.split.len())?;
    clock.lap("load");
    let most = job.split.iter().copied().max().unwrap_or(0);
    let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(block.config.router.num_experts, most))?;
    Ok((block, group))
}
