//! One thread a rank, whatever the host framework, and the dense reference model on the calling thread.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use moebius::comm::{Op, ReduceOp, Tag};
use moebius::cpu::Cpu;
use moebius::ep::{DispatchShape, EpGroup, GroupConfig};
use moebius::optim::{AdamWOptions, GroupOptions, LossScaling};
use moebius::{DType, MoeConfig, TensorMut};

use crate::Failure;
use crate::corpus::Corpus;
use crate::lm::{Param, Scale, Settings, Step};
use crate::sharded::Cost;
use crate::state;
use crate::twin::Twin;

/// How long a rank waits for its peers.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A rank's model and optimizer.
pub trait Worker {
    /// Trains on `rows` sequences of context + 1 bytes; with `check`, tells the twin what it needs.
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure>;

    /// Leaves the state after so many steps in a folder; every rank calls it.
    fn save(&mut self, dir: &Path, steps: usize) -> Result<(), Failure>;
}

/// A worker that reaches the others' processes.
pub trait Peer: Worker {
    /// Bytes that every rank tells, in rank order.
    fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure>;
}

/// Report of a rank on a step.
pub struct Report {
    /// This rank's share of the mean cross-entropy.
    pub loss: f64,
    /// Tokens per expert over the ranks of its EP group, by layer.
    pub load: Vec<Vec<usize>>,
    /// Norm of all ranks' gradients, where they are clipped.
    pub norm: Option<f64>,
    /// Where the loss is scaled.
    pub scale: Option<Scale>,
    /// Where experts are sharded.
    pub cost: Option<Cost>,
    pub check: Option<Check>,
}

/// Tensors of a rank that the twin needs.
pub struct Check {
    /// By name, before the optimizer's step; gradients of parameters that all ranks hold are summed over the ranks.
    pub params: BTreeMap<String, Values>,
    /// This rank's choices by layer and token.
    pub ids: Vec<Vec<Vec<u32>>>,
    /// Where tokens travel quantized: this rank's, as its layers were given them, by layer.
    pub tokens: Vec<Vec<f32>>,
}

/// A parameter and its gradient.
pub struct Values {
    pub weight: Vec<f32>,
    pub gradient: Vec<f32>,
}

/// Configuration that an EP group agrees on.
pub fn group_config(settings: &Settings) -> GroupConfig {
    let config = GroupConfig::new(settings.experts, settings.rows_of(0).1 * settings.context);
    // One rank has nothing to choose.
    let dispatcher = settings.dispatcher.filter(|_| settings.mesh.ep > 1).unwrap_or_default();
    let dtype = match settings.layer_dtype {
        candle_core::DType::BF16 => DType::BF16,
        candle_core::DType::F16 => DType::F16,
        _ => DType::F32,
    };
    let shape = || DispatchShape::of(&moe_config(settings), settings.most_tokens(), dtype);
    GroupConfig { dispatcher, measure: settings.measure_dispatcher.then(shape), ..config }
}

/// The expert layers' configuration.
pub fn moe_config(settings: &Settings) -> MoeConfig {
    let mut moe = MoeConfig::new(settings.hidden, settings.intermediate, settings.experts, settings.top_k);
    // The mean over the EP groups.
    moe.aux.balance = settings.balance / settings.mesh.groups() as f64;
    moe.aux.over_ranks = true;
    moe.payload = settings.token_payload;
    moe
}

/// The optimizer's options, of one group.
pub fn optimizer_options(settings: &Settings) -> AdamWOptions {
    let group = GroupOptions { lr: settings.learning_rate, ..Default::default() };
    // Gradients of f16 would vanish.
    let loss_scaling = (settings.layer_dtype == candle_core::DType::F16).then(LossScaling::default);
    AdamWOptions { group, max_norm: settings.clip, loss_scaling, ..Default::default() }
}

/// Tag of the sum of replicated parameters' gradients.
pub fn gradients(step: usize) -> Tag {
    Tag { layer: 0, op: Op::GradReduce, sequence: step as u64 }
}

/// Sums `values` over the ranks, in rank order, so that all ranks get the same bits.
pub fn sum_over_ranks(group: &EpGroup<Cpu>, step: usize, values: &mut [f32]) -> Result<(), Failure> {
    let tag = gradients(step);
    let dims = [values.len()];
    let buffer = TensorMut::new(bytemuck::cast_slice_mut(values), DType::F32, &dims)?;
    group.lock().dispatcher().communicator().all_reduce(tag, ReduceOp::Sum, buffer)?;
    Ok(())
}

/// Trains, and calls `on_step` after each step. `make` builds a rank's worker from its endpoint, on its thread. Every
/// `check_every` steps the twin computes the same step from the same weights.
pub fn train<S: Send, W: Worker>(
    settings: &Settings,
    (endpoints, check_every): (Vec<S>, usize),
    corpus: &Corpus,
    make: impl Fn(&[Param], S, usize) -> Result<W, Failure> + Sync,
    mut on_step: impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let params = state::params(settings)?;
    let twin = Twin::new(settings, &params)?;
    thread::scope(|scope| {
        let (mut reports, mut threads) = (Vec::new(), Vec::new());
        for (rank, endpoint) in endpoints.into_iter().enumerate() {
            // A rank may run ahead of the twin by one step.
            let (sender, receiver) = sync_channel(1);
            reports.push(receiver);
            let (params, make) = (&params, &make);
            threads.push(scope.spawn(move || {
                let mut worker = make(params, endpoint, rank)?;
                work(&mut worker, settings, check_every, corpus, rank, &sender)
            }));
        }
        let result = follow(settings, corpus, &twin, &reports, &mut on_step);
        // Ranks that still run stop at their next report.
        drop(reports);
        let mut failures = Vec::new();
        for (rank, thread) in threads.into_iter().enumerate() {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => failures.push(format!("rank {rank}: {e}")),
                Err(_) => failures.push(format!("rank {rank} panicked")),
            }
        }
        match result {
            Err(e) if e.is::<RankEnded>() => Err(failures.join("; ").into()),
            // Behind the last report, as the state is saved.
            Ok(()) if !failures.is_empty() => Err(failures.join("; ").into()),
            other => other,
        }
    })
}

fn work(
    worker: &mut impl Worker,
    settings: &Settings,
    check_every: usize,
    corpus: &Corpus,
    rank: usize,
    reports: &SyncSender<Report>,
) -> Result<(), Failure> {
    for step in settings.range.clone() {
        let report = own_step(worker, settings, (corpus, check_every), rank, step)?;
        if reports.send(report).is_err() {
            // Nobody listens any more.
            return Ok(());
        }
    }
    match &settings.save {
        Some(dir) => worker.save(dir, settings.range.end),
        None => Ok(()),
    }
}

/// A step of this rank's part of the batch.
pub fn own_step(
    worker: &mut impl Worker,
    settings: &Settings,
    (corpus, check_every): (&Corpus, usize),
    rank: usize,
    step: usize,
) -> Result<Report, Failure> {
    let length = settings.context + 1;
    let (first, rows) = settings.rows_of(rank);
    let bytes = corpus.batch(settings.seed, step, settings.batch, length)?;
    // The twin computes in f32.
    let check = settings.layer_dtype == candle_core::DType::F32 && step.is_multiple_of(check_every);
    worker.step(step, &bytes[first * length..(first + rows) * length], rows, check)
}

/// Joins the ranks' reports of each step.
fn follow(
    settings: &Settings,
    corpus: &Corpus,
    twin: &Twin,
    reports: &[Receiver<Report>],
    on_step: &mut impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for step in settings.range.clone() {
        let mut of_step = Vec::new();
        for receiver in reports {
            of_step.push(receiver.recv().map_err(|_| RankEnded)?);
        }
        on_step(joined(settings, corpus, twin, (step, of_step))?)?;
    }
    Ok(())
}

/// A step of all ranks, from their reports, and the twin's where they tell what it needs.
pub fn joined(
    settings: &Settings,
    corpus: &Corpus,
    twin: &Twin,
    (step, of_step): (usize, Vec<Report>),
) -> Result<Step, Failure> {
    let loss = of_step.iter().map(|r| r.loss).sum();
    let groups: Vec<&Report> = of_step.iter().step_by(settings.mesh.ep).collect();
    let sum = |layer: usize, expert: usize| groups.iter().map(|r| r.load[layer][expert]).sum();
    let load = (0..settings.layers).map(|l| (0..settings.experts).map(|e| sum(l, e)).collect()).collect();
    let norm = of_step.first().and_then(|r| r.norm);
    let scale = of_step.first().and_then(|r| r.scale);
    let costs = of_step.iter().filter_map(|r| r.cost).collect();
    let checks: Option<Vec<Check>> = of_step.into_iter().map(|r| r.check).collect();
    let bytes = corpus.batch(settings.seed, step, settings.batch, settings.context + 1)?;
    let twin = checks.map(|c| twin.compare(&bytes, &c)).transpose()?;
    Ok(Step { step, loss, load, norm, scale, costs, twin })
}

/// A rank's thread ended early; its own error says why.
#[derive(Debug)]
struct RankEnded;

impl fmt::Display for RankEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a rank ended")
    }
}
impl Error for RankEnded {}
