//! Training in candle: one thread a rank, and the dense twin on the calling thread.

use std::error::Error;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::{EpGroup, ExpertParallelMoE};
use moebius::comm::{Op, ReduceOp, Tag, ThreadComm, ThreadWorld};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, Mode};
use moebius::{MoeConfig, TensorMut};

use crate::corpus::Corpus;
use crate::lm::{Param, Settings, Step, TwinCheck, initial};
use crate::lm_candle::{DenseExperts, Loss, Model};

type Failure = Box<dyn Error + Send + Sync>;

/// What a rank tells of a step.
struct Report {
    /// This rank's share of the mean cross-entropy.
    loss: f64,
    /// Tokens per expert over all ranks, by layer.
    load: Vec<Vec<usize>>,
    check: Option<Check>,
}

/// What the twin needs of a rank, before the optimiser's step.
struct Check {
    /// Weights and gradients in the order of the model's parameters; gradients of replicated ones summed over ranks.
    params: Vec<(Tensor, Tensor)>,
    /// This rank's choices by layer and token.
    ids: Vec<Vec<Vec<u32>>>,
}

/// Trains, and calls `on_step` after each step. Every `check_every` steps the twin computes the same step from the
/// same weights.
pub fn train(
    settings: &Settings,
    check_every: usize,
    corpus: &Corpus,
    mut on_step: impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let params = initial(settings);
    let twin = Model::new(settings, &params, 0, 1)?;
    let comms = ThreadWorld::create(settings.ranks, Duration::from_secs(60));
    thread::scope(|scope| {
        let (mut reports, mut threads) = (Vec::new(), Vec::new());
        for (rank, comm) in comms.into_iter().enumerate() {
            // A rank may run ahead of the twin by one step.
            let (sender, receiver) = sync_channel(1);
            reports.push(receiver);
            let params = &params;
            threads.push(scope.spawn(move || {
                let mut rank = Rank::new(settings, params, rank, comm)?;
                rank.train(check_every, corpus, sender)
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
            other => other,
        }
    })
}

/// A rank's thread ended early; its own error says why.
#[derive(Debug)]
struct RankEnded;

impl std::fmt::Display for RankEnded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a rank ended")
    }
}
impl Error for RankEnded {}

/// Joins the ranks' reports of each step, and runs the twin.
fn follow(
    settings: &Settings,
    corpus: &Corpus,
    twin: &Model,
    reports: &[Receiver<Report>],
    on_step: &mut impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for step in 0..settings.steps {
        let mut of_step = Vec::new();
        for receiver in reports {
            of_step.push(receiver.recv().map_err(|_| RankEnded)?);
        }
        let loss = of_step.iter().map(|r| r.loss).sum();
        let load = of_step.first().map(|r| r.load.clone()).unwrap_or_default();
        let checks: Option<Vec<Check>> = of_step.into_iter().map(|r| r.check).collect();
        let bytes = corpus.batch(settings.seed, step, settings.batch, settings.context + 1)?;
        let twin = checks.map(|c| compare(settings, twin, &bytes, &c)).transpose()?;
        on_step(Step { step, loss, load, twin })?;
    }
    Ok(())
}

/// Computes the whole batch densely from the ranks' weights, and compares the gradients.
fn compare(settings: &Settings, twin: &Model, bytes: &[u8], ranks: &[Check]) -> Result<TwinCheck, Failure> {
    let is_share = |name: &str| name.contains(".experts.");
    let whole = |name: &str, at: usize, pick: fn(&(Tensor, Tensor)) -> &Tensor| {
        if is_share(name) {
            Tensor::cat(&ranks.iter().map(|r| pick(&r.params[at])).collect::<Vec<_>>(), 0)
        } else {
            Ok(pick(&ranks[0].params[at]).clone())
        }
    };
    for (at, (name, var)) in twin.vars().iter().enumerate() {
        if !is_share(name) && ranks.iter().any(|r| !same_bits(&r.params[at].0, &ranks[0].params[at].0)) {
            return Err(format!("{name} is not the same on all ranks").into());
        }
        var.set(&whole(name, at, |p| &p.0)?)?;
    }
    let Loss { sum, aux } = twin.loss(bytes, settings.batch, |layer, x| {
        let get = |part: &str| twin.get(&format!("layers.{layer}.moe.{part}"));
        let experts = DenseExperts {
            router: get("router.weight")?,
            up: get("experts.up")?,
            down: get("experts.down")?,
            balance: settings.balance,
        };
        let ids: Vec<Vec<u32>> = ranks.iter().flat_map(|r| r.ids[layer].iter().cloned()).collect();
        experts.forward(x, &ids)
    })?;
    let mean = (sum / (settings.batch * settings.context) as f64)?;
    let grads = (&mean + aux)?.backward()?;
    let mut result = TwinCheck { loss: f64::from(mean.to_scalar::<f32>()?), error: 0.0, worst: String::new() };
    for (at, (name, var)) in twin.vars().iter().enumerate() {
        let expected = grads.get(var).ok_or_else(|| format!("the twin has no gradient of {name}"))?;
        let error = relative_error(&whole(name, at, |p| &p.1)?, expected)?;
        // Not `>`: a NaN is the worst of all.
        if !(error <= result.error) {
            (result.error, result.worst) = (error, name.clone());
        }
    }
    Ok(result)
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bits = |t: &Tensor| -> candle_core::Result<Vec<u32>> {
        Ok(t.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    matches!((bits(a), bits(b)), (Ok(a), Ok(b)) if a == b)
}

/// ‖a − b‖ / ‖b‖ in f64.
fn relative_error(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let norm = |t: &Tensor| t.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt);
    let (a, b) = (a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?);
    Ok(norm(&(a - &b)?)? / norm(&b)?)
}

/// One rank: its model, its membership in the group, its optimiser.
struct Rank<'a> {
    settings: &'a Settings,
    rank: usize,
    group: EpGroup,
    model: Model,
    layers: Vec<ExpertParallelMoE>,
    optimiser: AdamW,
}

impl<'a> Rank<'a> {
    fn new(settings: &'a Settings, params: &[Param], rank: usize, comm: ThreadComm) -> Result<Self, Failure> {
        let tokens = settings.rows_of(0).1 * settings.context;
        let config = GroupConfig::new(settings.experts, tokens);
        let group = EpGroup::new(Group::new(Cpu::new(), (), Box::new(comm), config)?);
        let model = Model::new(settings, params, rank, settings.ranks)?;
        // The layers find their parameters under their own names, and share them with the model.
        let map = VarMap::new();
        map.data().lock().map_err(|e| e.to_string())?.extend(model.vars().clone());
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        let mut layers = Vec::new();
        for number in 0..settings.layers {
            let mut moe = MoeConfig::new(settings.hidden, settings.intermediate, settings.experts, settings.top_k);
            moe.aux.balance = settings.balance;
            moe.aux.over_ranks = true;
            let layer = Layer::new(moe, number as u32)?;
            let vb = vb.pp(format!("layers.{number}.moe"));
            layers.push(ExpertParallelMoE::new(layer, group.clone(), vb)?);
        }
        let vars = model.vars().values().cloned().collect();
        let optimiser = AdamW::new(vars, ParamsAdamW { lr: settings.learning_rate, ..ParamsAdamW::default() })?;
        Ok(Self { settings, rank, group, model, layers, optimiser })
    }

    fn train(&mut self, check_every: usize, corpus: &Corpus, reports: SyncSender<Report>) -> Result<(), Failure> {
        let length = self.settings.context + 1;
        let (first, rows) = self.settings.rows_of(self.rank);
        for step in 0..self.settings.steps {
            let bytes = corpus.batch(self.settings.seed, step, self.settings.batch, length)?;
            let own = &bytes[first * length..(first + rows) * length];
            let report = self.step(step, own, rows, step.is_multiple_of(check_every))?;
            if reports.send(report).is_err() {
                // Nobody listens any more.
                return Ok(());
            }
        }
        Ok(())
    }

    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let (mut load, mut ids) = (Vec::new(), Vec::new());
        let Loss { sum, aux } = self.model.loss(bytes, rows, |layer, x| {
            let out = self.layers[layer].forward_full(x, Mode::default())?;
            load.push(out.load.tokens_per_expert);
            if check {
                ids.push(out.ids.to_dtype(DType::U32)?.to_vec2::<u32>()?);
            }
            Ok((out.y, out.aux))
        })?;
        // The mean is over all ranks' tokens, and so is the balance loss: backward gives this rank's part of the
        // gradient of both.
        let mean = (sum / (self.settings.batch * self.settings.context) as f64)?;
        let mut grads = (&mean + aux)?.backward()?;
        self.reduce(step, &mut grads)?;
        let check = if check { Some(self.snapshot(&grads, ids)?) } else { None };
        self.optimiser.set_learning_rate(self.settings.learning_rate_at(step));
        self.optimiser.step(&grads)?;
        Ok(Report { loss: f64::from(mean.to_scalar::<f32>()?), load, check })
    }

    /// Sums the replicated parameters' gradients over the ranks, in rank order, in one collective.
    fn reduce(&self, step: usize, grads: &mut GradStore) -> Result<(), Failure> {
        let replicated = || self.model.vars().iter().filter(|(name, _)| !name.contains(".experts."));
        let mut flat = Vec::new();
        for (_, var) in replicated() {
            match grads.get(var) {
                Some(grad) => flat.extend(grad.flatten_all()?.to_vec1::<f32>()?),
                None => flat.resize(flat.len() + var.elem_count(), 0.0),
            }
        }
        let tag = Tag { layer: 0, op: Op::GradReduce, sequence: step as u64 };
        let count = flat.len();
        let buffer = TensorMut::new(bytemuck::cast_slice_mut(&mut flat), moebius::DType::F32, &[count])?;
        self.group.lock().dispatcher().communicator().all_reduce(tag, ReduceOp::Sum, buffer)?;
        let mut rest = &flat[..];
        for (_, var) in replicated() {
            let (own, others) = rest.split_at(var.elem_count());
            grads.insert(var, Tensor::from_slice(own, var.shape(), var.device())?);
            rest = others;
        }
        Ok(())
    }

    fn snapshot(&self, grads: &GradStore, ids: Vec<Vec<Vec<u32>>>) -> Result<Check, Failure> {
        let mut params = Vec::new();
        for (name, var) in self.model.vars() {
            let grad = grads.get(var).ok_or_else(|| format!("no gradient of {name}"))?;
            params.push((var.as_tensor().copy()?.detach(), grad.clone()));
        }
        Ok(Check { params, ids })
    }
}
