//! Text from a published folder, or from the small model of this repository.
//!
//! ```text
//! cargo run --release -p moebius-models --example generate
//! cargo run --release -p moebius-models --example generate -- FOLDER --chat "Name a prime."
//! cargo run --release -p moebius-models --example generate -- FOLDER --prompts-file prompts.txt --ranks 2
//! cargo run --release -p moebius-models --example generate -- tests/golden/qwen3_moe --prompt-ids 5,17,3
//! ```

mod options;
mod output;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use clap::Parser;
use indicatif::ProgressBar;
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::checkpoint::Checkpoint;
use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::metrics::Load;
use moebius_models::generate::{self, CountChoices, Decoder, Generator, Output, OverRanks, Request, Stats, Tokenizer};
use moebius_models::{ExpertWeights, LoadOptions, Model};

use options::{Options, Place, Type, Usage};

type AnyError = Box<dyn Error + Send + Sync>;

/// Status 0 where all is well, 2 where the command line cannot be, 1 for other errors; where nobody reads the output any
/// more (`| head`), that of a program which SIGPIPE ends, without a word.
fn main() -> ExitCode {
    let Err(error) = run(&Options::parse()) else { return ExitCode::SUCCESS };
    if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
        return ExitCode::from(128 + 13);
    }
    let _ = writeln!(std::io::stderr(), "error: {error}");
    let is_parameter = matches!(error.downcast_ref(), Some(generate::Error::Parameter { .. }));
    ExitCode::from(if is_parameter || error.is::<Usage>() { 2 } else { 1 })
}

fn run(options: &Options) -> Result<(), AnyError> {
    let folder = options.folder();
    if !folder.is_dir() {
        return Err(format!("{}: no checkpoint folder", folder.display()).into());
    }
    let tokenizer = match folder.join("tokenizer.json").is_file() {
        true => Some(Tokenizer::from_folder(folder)?),
        false => None,
    };
    let requests = options::requests(options, tokenizer.as_ref())?;
    let checkpoint = Checkpoint::open(folder)?;
    if tokenizer.is_none() && !options.stop.is_empty() {
        return Err(Usage("--stop: expected none for a folder without tokenizer.json".into()).into());
    }
    let job = Job { options, checkpoint: &checkpoint, tokenizer: tokenizer.as_ref(), requests: &requests };
    job.check()?;
    let (sender, receiver) = channel();
    let outcome = thread::scope(|scope| {
        let work = scope.spawn(|| job.over_ranks(sender));
        let beginning = output::put(options.beginning().unwrap_or(""));
        let shown = beginning.and_then(|()| output::show(&receiver, requests.len() == 1, tokenizer.is_some()));
        // Where nobody reads the output, ranks end with their next token.
        drop(receiver);
        let outcome = work.join().unwrap_or_else(|_| Err("a rank panicked".into()));
        shown.map_err(AnyError::from).and(outcome)
    })?;
    output::print(&outcome.outputs, tokenizer.is_some())?;
    output::report(&outcome);
    Ok(())
}

/// A piece of a request's output.
struct Piece {
    token: u32,
    text: String,
}

/// The job of all ranks.
struct Job<'a> {
    options: &'a Options,
    checkpoint: &'a Checkpoint,
    tokenizer: Option<&'a Tokenizer>,
    requests: &'a [Request],
}

/// Its outcome.
struct Outcome {
    /// In the requests' order.
    outputs: Vec<Output>,
    /// Tokens of all ranks, times of the slowest.
    stats: Stats,
    /// Time until the last rank had its part of the model.
    loading: Duration,
    /// How often each layer's experts were chosen, by the tokens of all ranks; none where nobody asked.
    loads: BTreeMap<usize, Load>,
}

/// A rank's outcome: as for all, of its own requests.
type RankOutcome = Result<Outcome, AnyError>;

impl Job<'_> {
    /// Refuses numbers of ranks that cannot be, before anything is written.
    fn check(&self) -> Result<(), AnyError> {
        let (ranks, experts) = (self.options.ranks, self.experts()?);
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            return Err(Usage(format!("--ranks: expected a divisor of {experts} experts, found {ranks}")).into());
        }
        if self.options.device == Place::Cuda && ranks > 1 {
            return Err(Usage("--ranks: expected 1 with --device cuda".into()).into());
        }
        Ok(())
    }

    fn over_ranks(&self, sender: Sender<Piece>) -> Result<Outcome, AnyError> {
        let (ranks, experts) = (self.options.ranks, self.experts()?);
        if self.options.device == Place::Cuda {
            let group = DeviceGroup::single(self.group_config(experts), &Device::new_cuda_with_stream(0)?)?;
            return gather(vec![self.rank(0, &group, None, sender)], self.requests.len());
        }
        let timeout = Duration::from_secs(self.options.timeout);
        let worlds = ThreadWorld::create(ranks, timeout).into_iter().zip(ThreadWorld::create(ranks, timeout));
        let outcomes = thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .enumerate()
                .map(|(rank, (experts_world, steps_world))| {
                    let sender = sender.clone();
                    scope.spawn(move || {
                        let group = Group::new(Cpu::new(), Box::new(experts_world), self.group_config(experts))?;
                        let group = EpGroup::new(group).into();
                        self.rank(rank, &group, Some(Box::new(steps_world)), sender)
                    })
                })
                .collect();
            drop(sender);
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
        });
        gather(outcomes, self.requests.len())
    }

    fn experts(&self) -> Result<usize, AnyError> {
        let layer = self.checkpoint.moe_layers().first().ok_or("the checkpoint has no Mixture-of-Experts layer")?;
        Ok(self.checkpoint.block_config(*layer)?.router.num_experts)
    }

    /// No step has more tokens than all prompts have together, or a row a prompt.
    fn group_config(&self, experts: usize) -> GroupConfig {
        let tokens: usize = self.requests.iter().map(|request| request.prompt.len()).sum();
        GroupConfig::new(experts, tokens.max(self.requests.len()).max(1))
    }

    /// Loads this rank's part and runs every R-th request. `steps` connects the ranks, where there are several.
    fn rank(
        &self,
        rank: usize,
        group: &DeviceGroup,
        steps: Option<Box<dyn Communicator<Cpu>>>,
        sender: Sender<Piece>,
    ) -> RankOutcome {
        let start = Instant::now();
        let dtype = self.options.dtype.map(|dtype| match dtype {
            Type::F64 => DType::F64,
            Type::F32 => DType::F32,
            Type::Bf16 => DType::BF16,
            Type::F16 => DType::F16,
        });
        let experts_on_host = self.options.experts_on_host;
        let experts = if experts_on_host { ExpertWeights::AsStored } else { ExpertWeights::default() };
        let options = LoadOptions { dtype, experts, experts_on_host, ..LoadOptions::default() };
        // Seen where standard error is a terminal.
        let bar = if rank == 0 { output::loading() } else { ProgressBar::hidden() };
        let model = Model::load_with_progress(self.checkpoint, group.clone(), options, &mut |progress| {
            bar.set_length(progress.layers as u64);
            bar.set_position(progress.loaded as u64);
        })?;
        bar.finish_and_clear();
        // Every rank sees all of it, so that none waits for another that cannot begin.
        if let Some(tokenizer) = self.tokenizer {
            tokenizer.check_embedding(model.vocabulary())?;
        }
        for (i, request) in self.requests.iter().enumerate() {
            request.check(i, model.vocabulary(), model.context())?;
        }
        let loading = start.elapsed();
        let own: Vec<Request> = self.requests.iter().skip(rank).step_by(self.options.ranks).cloned().collect();
        let counter = self.options.expert_load.then(|| CountChoices::new(&model));
        let (outputs, stats) = match (&counter, steps) {
            (Some(counter), Some(steps)) => self.generate(OverRanks::new(counter, steps), &own, sender)?,
            (Some(counter), None) => self.generate(counter, &own, sender)?,
            (None, Some(steps)) => self.generate(OverRanks::new(&model, steps), &own, sender)?,
            (None, None) => self.generate(&model, &own, sender)?,
        };
        let loads = counter.map(CountChoices::into_loads).unwrap_or_default();
        Ok(Outcome { outputs, stats, loading, loads })
    }

    fn generate<D: Decoder>(
        &self,
        decoder: D,
        requests: &[Request],
        sender: Sender<Piece>,
    ) -> Result<(Vec<Output>, Stats), AnyError> {
        let generated = Generator::new(decoder, self.tokenizer)?.run(requests, |event| {
            // Nobody listens any more where the output is closed.
            match sender.send(Piece { token: event.token, text: event.text.into() }) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        Ok(generated)
    }
}

/// Ranks' results as one; where some failed, the error of the first of them, which names the cause as the others' do.
fn gather(outcomes: Vec<RankOutcome>, requests: usize) -> Result<Outcome, AnyError> {
    let ranks = outcomes.len();
    let mut places: Vec<Option<Output>> = vec![None; requests];
    let (mut stats, mut loading, mut loads) = (Stats::default(), Duration::ZERO, BTreeMap::<usize, Load>::new());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let outcome = outcome.map_err(|e| if ranks > 1 { format!("rank {rank}: {e}").into() } else { e })?;
        let own = outcome.stats;
        for (i, output) in outcome.outputs.into_iter().enumerate() {
            places[rank + i * ranks] = Some(output);
        }
        stats.prompt_tokens += own.prompt_tokens;
        stats.generated_tokens += own.generated_tokens;
        stats.prefill_tokens += own.prefill_tokens;
        stats.decode_tokens += own.decode_tokens;
        stats.decode_steps = stats.decode_steps.max(own.decode_steps);
        stats.prefill = stats.prefill.max(own.prefill);
        stats.decode = stats.decode.max(own.decode);
        loading = loading.max(outcome.loading);
        for (layer, load) in outcome.loads {
            match loads.get_mut(&layer) {
                Some(sum) => {
                    sum.tokens_per_expert.iter_mut().zip(load.tokens_per_expert).for_each(|(a, b)| *a += b);
                    sum.dropped += load.dropped;
                }
                None => drop(loads.insert(layer, load)),
            }
        }
    }
    Ok(Outcome { outputs: places.into_iter().flatten().collect(), stats, loading, loads })
}
