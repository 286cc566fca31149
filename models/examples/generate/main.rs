//! Text from a published folder, or from the small model of this repository.
//!
//! ```text
//! cargo run --release -p moebius-models --example generate
//! cargo run --release -p moebius-models --example generate -- FOLDER --chat "Name a prime."
//! cargo run --release -p moebius-models --example generate -- FOLDER --prompts-file prompts.txt --ranks 2
//! cargo run --release -p moebius-models --example generate -- tests/golden/qwen3_moe --prompt-ids 5,17,3
//! moebius-run -n 2 target/release/examples/generate FOLDER --prompts-file prompts.txt     # --features nccl: a GPU a rank
//! ```

#[path = "../support/gather.rs"]
mod gather;
mod launch;
mod options;
mod output;
mod process;
#[path = "../support/ranks.rs"]
mod ranks;
mod results;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::DType;
use clap::Parser;
use indicatif::ProgressBar;
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::checkpoint::{Checkpoint, OpenOptions, printable, printable_lines};
use moebius::comm::{Communicator, Solo};
use moebius::config::RouterConfig;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::ranks::Identity;
use moebius_models::generate::{
    self, CountChoices, Decoder, EndOf, Event, Generator, Output, OverRanks, PREFILL_TOKENS, Request, Stats, Tokenizer,
};
use moebius_models::{LoadOptions, Model};

use options::{Options, Place, ShownChannels, Type, Usage};
use output::Answers;
use results::{ExpertChoices, Outcome, merge};

type AnyError = Box<dyn Error + Send + Sync>;

/// Status 0 where all is well, 2 where the command line cannot be, 1 for other errors; where nobody reads the output any
/// more (`| head`), that of a program which SIGPIPE ends, without a word.
fn main() -> ExitCode {
    let (options, launched) = (Options::parse(), ranks::identity());
    let named = launched.as_ref().ok().and_then(Option::as_ref);
    let rank = named.map_or(String::new(), |me| format!("rank {} of {}: ", me.rank, me.world));
    let Err(error) = launched.and_then(|me| run(&options, me.as_ref())) else { return ExitCode::SUCCESS };
    if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
        return ExitCode::from(128 + 13);
    }
    // It may quote names and texts of others: of files, of a template.
    let _ = writeln!(std::io::stderr(), "error: {rank}{}", printable_lines(&error.to_string()));
    let is_parameter = matches!(error.downcast_ref(), Some(generate::Error::Parameter { .. }));
    ExitCode::from(if is_parameter || error.is::<Usage>() { 2 } else { 1 })
}

/// `me`: where this process is one rank of several. Rank 0 speaks for all.
fn run(options: &Options, me: Option<&Identity>) -> Result<(), AnyError> {
    let folder = options.folder();
    if !folder.is_dir() {
        return Err(format!("{}: no checkpoint folder", printable(&folder.display().to_string())).into());
    }
    // Of a link that leads nowhere too: a folder without a tokenizer has no such name.
    let tokenizer = match folder.join("tokenizer.json").symlink_metadata().is_ok() {
        true => Some(Tokenizer::from_folder(folder)?),
        false => None,
    };
    let requests = options::requests(options, tokenizer.as_ref())?;
    // The user has named the folder; those of a hub's cache are links to files elsewhere.
    let mut follow = OpenOptions::default();
    follow.follow_links = true;
    // Loading takes minutes, where there is anything to load.
    let config = Checkpoint::read_config(folder, follow)?.unwrap_or_default();
    let (vocabulary, context) = options::sizes(&config);
    if let Some(tokenizer) = &tokenizer {
        tokenizer.check_embedding(vocabulary)?;
    }
    for (i, request) in requests.iter().enumerate() {
        request.check(i, vocabulary, context)?;
    }
    let checkpoint = Checkpoint::open_with(folder, follow)?;
    if options.stop.iter().any(String::is_empty) {
        return Err(Usage("--stop: expected a text, found an empty one".into()).into());
    }
    if tokenizer.is_none() && !options.stop.is_empty() {
        return Err(Usage("--stop: expected none for a folder without tokenizer.json".into()).into());
    }
    let job = Job { options, checkpoint: &checkpoint, tokenizer: tokenizer.as_ref(), requests: &requests };
    job.check(me)?;
    let speaks = me.is_none_or(|me| me.rank == 0);
    if speaks && requests.iter().all(|request| request.sampling.temperature == 0.0) {
        output::report_unused_sampling(&options.sampling.of_draws());
    }
    let (sender, receiver) = channel();
    let outcome = thread::scope(|scope| {
        let work = scope.spawn(|| match me {
            Some(me) => process::run(&job, me, sender),
            None => job.over_ranks(sender).map(Some),
        });
        let beginning = (requests.len() == 1).then_some(options.beginning().unwrap_or(""));
        let shown = match speaks {
            true => output::show(&receiver, beginning, tokenizer.is_some()),
            false => {
                receiver.iter().for_each(drop);
                Ok(Answers::new(false))
            }
        };
        // Where nobody reads the output, ranks end with their next token.
        drop(receiver);
        let outcome = work.join().unwrap_or_else(|_| Err("a rank panicked".into()));
        let answers = shown?;
        if outcome.is_err() {
            output::put(&answers.ended())?;
        }
        Ok::<_, AnyError>((answers.written, outcome?))
    })?;
    let (written, Some(outcome)) = outcome else { return Ok(()) };
    output::print(&outcome.outputs, written, tokenizer.is_some())?;
    let hides =
        matches!(options.channels, ShownChannels::Final) && tokenizer.as_ref().is_some_and(Tokenizer::has_channels);
    output::report(&outcome, hides);
    // Of a text that no reader may take for whole.
    outcome.outputs.iter().enumerate().try_for_each(|(i, output)| output.complete_text(i).map(drop))?;
    Ok(())
}

/// A piece of a request's output.
struct Piece {
    /// Index among all prompts.
    request: usize,
    token: u32,
    text: String,
    is_last: bool,
}

/// The job of all ranks.
struct Job<'a> {
    options: &'a Options,
    checkpoint: &'a Checkpoint,
    tokenizer: Option<&'a Tokenizer>,
    requests: &'a [Request],
}

/// A rank, and how it reaches the others.
struct Member<K: Kernels> {
    rank: usize,
    ranks: usize,
    /// That shares the experts.
    group: DeviceGroup,
    device: K,
    /// Of the same ranks, for what they ask each other between the decoder's steps.
    between: Box<dyn Communicator<K>>,
}

impl Job<'_> {
    /// Most sequences of a rank in a batch.
    fn max_sequences(&self) -> usize {
        self.options.batch as usize
    }

    /// Refuses numbers of ranks that cannot be, before anything is written.
    fn check(&self, me: Option<&Identity>) -> Result<(), AnyError> {
        let experts = self.router()?.num_experts;
        let (given, device) = (self.options.ranks, self.options.device);
        if let Some(me) = me {
            if given.is_some_and(|ranks| ranks != me.world) {
                return Err(Usage(format!("--ranks: the launcher has started {}", me.world)).into());
            }
            if device == Some(Place::Cpu) {
                let text = "--device cpu: ranks that are processes have a GPU each; start one process with --ranks";
                return Err(Usage(text.into()).into());
            }
        }
        if self.options.dtype == Some(Type::F64) && (device == Some(Place::Cuda) || me.is_some()) {
            return Err(Usage("--dtype f64: a GPU has f32, bf16 and f16".into()).into());
        }
        let ranks = me.map_or(given.unwrap_or(1), |me| me.world);
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            return Err(Usage(format!("--ranks: expected a divisor of {experts} experts, found {ranks}")).into());
        }
        if device == Some(Place::Cuda) && ranks > 1 && me.is_none() {
            let build = if cfg!(feature = "nccl") { "" } else { " (in a build with --features nccl)" };
            let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
            let command = launch::command(ranks, arguments);
            return Err(Usage(format!("--ranks: a process has one GPU; for {ranks}{build}: {command}")).into());
        }
        Ok(())
    }

    fn over_ranks(&self, sender: Sender<Piece>) -> Result<Outcome, AnyError> {
        let ranks = self.options.ranks.unwrap_or(1);
        let config = self.group_config(ranks)?;
        if self.options.device == Some(Place::Cuda) {
            let group = DeviceGroup::single(config, &ranks::gpu(0)?)?;
            let between = Box::new(Solo::new(Cpu::new()));
            let alone = Member { rank: 0, ranks: 1, group, device: Cpu::new(), between };
            return merge(vec![self.rank(alone, sender).map(|(outcome, _)| outcome)], self.requests.len());
        }
        let timeout = Duration::from_secs(self.options.timeout);
        let worlds = ThreadWorld::create(ranks, timeout).into_iter().zip(ThreadWorld::create(ranks, timeout));
        let outcomes = thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .enumerate()
                .map(|(rank, (experts_world, between))| {
                    let (sender, config) = (sender.clone(), config.clone());
                    scope.spawn(move || {
                        let group = Group::new(Cpu::new(), Box::new(experts_world), config)?;
                        let (group, between) = (EpGroup::new(group).into(), Box::new(between));
                        let member = Member { rank, ranks, group, device: Cpu::new(), between };
                        self.rank(member, sender).map(|(outcome, _)| outcome)
                    })
                })
                .collect();
            drop(sender);
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
        });
        merge(outcomes, self.requests.len())
    }

    fn router(&self) -> Result<RouterConfig, AnyError> {
        let layer = self.checkpoint.moe_layers().first().ok_or("the checkpoint has no Mixture-of-Experts layer")?;
        Ok(self.checkpoint.block_config(*layer)?.router)
    }

    /// No step has more tokens than [`PREFILL_TOKENS`], or than the longest prompts of a batch have together, but for one of
    /// each sequence. In steps of one token a sequence there is room for any choices.
    fn group_config(&self, ranks: usize) -> Result<GroupConfig, AnyError> {
        let router = self.router()?;
        let mut lengths: Vec<usize> = self.requests.iter().map(|request| request.prompt.len().max(1)).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        let tokens: usize = lengths.iter().take(self.max_sequences()).sum();
        let sequences = self.requests.len().div_ceil(ranks).clamp(1, self.max_sequences());
        let tokens = tokens.min(PREFILL_TOKENS).max(sequences);
        let max_rows = ranks * sequences * router.top_k;
        Ok(GroupConfig { max_rows, forward_only: true, ..GroupConfig::new(router.num_experts, tokens.max(1)) })
    }

    /// Loads this rank's part and runs every R-th request; gives the communicator back beside what came of them.
    fn rank<K: Kernels>(
        &self,
        member: Member<K>,
        sender: Sender<Piece>,
    ) -> Result<(Outcome, Box<dyn Communicator<K>>), AnyError> {
        let Member { rank, ranks, group, device, between } = member;
        let start = Instant::now();
        let dtype = self.options.dtype.map(|dtype| match dtype {
            Type::F64 => DType::F64,
            Type::F32 => DType::F32,
            Type::Bf16 => DType::BF16,
            Type::F16 => DType::F16,
        });
        let (experts, experts_on_host) = (self.options.experts.into(), self.options.experts_on_host);
        let options = LoadOptions { dtype, experts, experts_on_host, ..LoadOptions::default() };
        // Seen where standard error is a terminal.
        let bar = if rank == 0 { output::loading() } else { ProgressBar::hidden() };
        let model = Model::load_with_progress(self.checkpoint, group.clone(), options, &mut |progress| {
            bar.set_length(progress.layers as u64);
            bar.set_position(progress.loaded as u64);
        })?;
        bar.finish_and_clear();
        if rank == 0 {
            output::tell_of_dequantized(model.dequantized_experts());
        }
        // Every rank sees all of it, so that none waits for another that cannot begin.
        if let Some(tokenizer) = self.tokenizer {
            tokenizer.check_embedding(model.vocabulary())?;
        }
        for (i, request) in self.requests.iter().enumerate() {
            request.check(i, model.vocabulary(), model.context())?;
        }
        let loading = start.elapsed();
        let own: Vec<Request> = self.requests.iter().skip(rank).step_by(ranks).cloned().collect();
        let send = |event: Event<'_>| {
            let (request, is_last) = (rank + event.request * ranks, event.finish.is_some());
            // Nobody listens any more where the output is closed.
            match sender.send(Piece { request, token: event.token, text: event.text.into(), is_last }) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(EndOf::Run),
            }
        };
        let counter = self.options.expert_load.then(|| CountChoices::new(&model));
        let ((outputs, stats), between) = match &counter {
            Some(counter) => {
                let decoder = OverRanks::on(counter, device, between);
                (self.generate(&decoder, &own, send)?, decoder.into_communicator())
            }
            None => {
                let decoder = OverRanks::on(&model, device, between);
                (self.generate(&decoder, &own, send)?, decoder.into_communicator())
            }
        };
        let loads = counter.map(CountChoices::into_loads).unwrap_or_default();
        let loads = loads.into_iter().map(|(layer, load)| (layer, ExpertChoices::from(load))).collect();
        let (host_memory, gpu_memory) = (output::host_memory(), output::gpu_memory(&group));
        Ok((Outcome { outputs, stats, loading, loads, host_memory, gpu_memory, processes: 1 }, between))
    }

    fn generate<D: Decoder>(
        &self,
        decoder: D,
        requests: &[Request],
        send: impl FnMut(Event<'_>) -> ControlFlow<EndOf>,
    ) -> Result<(Vec<Output>, Stats), AnyError> {
        let generator = Generator::new(decoder, self.tokenizer)?;
        let generator = generator
            .max_sequences(self.max_sequences())
            .spread(self.options.spread)
            .cache(self.options.cache.into())
            .channels(self.options.channels.into());
        Ok(generator.run(requests, send)?)
    }
}
