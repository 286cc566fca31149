//! Text from a published folder.
//!
//! ```text
//! cargo run --release -p moebius-models --example generate -- FOLDER --chat "Name a prime."
//! cargo run --release -p moebius-models --example generate -- FOLDER --prompts-file prompts.txt --ranks 2
//! cargo run --release -p moebius-models --example generate -- tests/golden/qwen3_moe --prompt-ids 5,17,3
//! ```

use std::error::Error;
use std::fmt;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use clap::{Args, Parser, ValueEnum};
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius_models::generate::{
    self, Chat, ChatTemplate, Decoder, Finish, Generator, Output, OverRanks, Request, Sampling, Stats, Tokenizer,
    eos_ids,
};
use moebius_models::{LoadOptions, Model};

type AnyError = Box<dyn Error + Send + Sync>;

/// Continues prompts with the model of a published folder. One prompt's text appears as it comes, several prompts' when
/// all have ended; without tokenizer.json prompts and output are ids. Counts and speeds go to standard error.
///
/// Options that are not given are the folder's own (generation_config.json): a model that samples by its publisher's
/// advice does so here.
#[derive(Debug, Parser)]
struct Options {
    /// Folder with config.json and safetensors files
    folder: PathBuf,
    #[command(flatten)]
    prompts: Prompts,
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Most tokens to generate for a prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// A text that ends a generation and is no part of it; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after the tokens that end a text
    #[arg(long)]
    ignore_eos: bool,
    /// Ranks that share the experts, each a thread of this process with a part of the prompts
    #[arg(long, value_name = "R", default_value_t = 1)]
    ranks: usize,
    /// Where the model runs
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Convert weights to this type; as stored if absent
    #[arg(long, value_enum)]
    dtype: Option<Type>,
    /// Longest wait of a rank for another, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Prompts {
    /// A text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A user's message, answered through the folder's chat template
    #[arg(long, value_name = "TEXT")]
    chat: Option<String>,
    /// A prompt a line; of a file whose name ends in .jsonl, a conversation a line: a list of messages, or an object
    /// with "messages" and the template's other variables ("tools", "enable_thinking", ...)
    #[arg(long, value_name = "FILE")]
    prompts_file: Option<PathBuf>,
    /// Ids of a prompt, with commas between them; may be given several times
    #[arg(long, value_name = "IDS")]
    prompt_ids: Vec<String>,
}

#[derive(Debug, Args)]
struct SamplingOptions {
    /// 0: greedy
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Draw from the K largest logits; 0: from all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draw from the fewest tokens with this probability together
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draw from tokens with this share of the largest probability
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Above 1: tokens that are there already become less probable
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// The same seed gives the same text. Every prompt draws all of its numbers, whatever the others
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Place {
    /// The CPU
    Cpu,
    /// One NVIDIA GPU (a build with --features cuda)
    Cuda,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Type {
    /// 64 bits
    F64,
    /// 32 bits
    F32,
    /// 16 bits, 8 of them the exponent
    Bf16,
    /// 16 bits, 5 of them the exponent
    F16,
}

/// A command line that cannot be: what clap cannot know of it.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

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
    let folder = &options.folder;
    if !folder.join("config.json").is_file() {
        return Err(format!("{}: no checkpoint folder (no config.json)", folder.display()).into());
    }
    let tokenizer = match folder.join("tokenizer.json").is_file() {
        true => Some(Tokenizer::from_folder(folder)?),
        false => None,
    };
    let requests = requests(options, tokenizer.as_ref())?;
    let checkpoint = Checkpoint::open(folder)?;
    if tokenizer.is_none() && !options.stop.is_empty() {
        return Err(Usage("--stop: expected none for a folder without tokenizer.json".into()).into());
    }
    let job = Job { options, checkpoint: &checkpoint, tokenizer: tokenizer.as_ref(), requests: &requests };
    let (sender, receiver) = channel();
    let outcome = thread::scope(|scope| {
        let work = scope.spawn(|| job.over_ranks(sender));
        let shown = show(&receiver, requests.len() == 1, tokenizer.is_some());
        // Where nobody reads the output, ranks end with their next token.
        drop(receiver);
        let outcome = work.join().unwrap_or_else(|_| Err("a rank panicked".into()));
        shown.map_err(AnyError::from).and(outcome)
    })?;
    print(&outcome.outputs, tokenizer.is_some())?;
    report(&outcome);
    Ok(())
}

/// What is asked for of each prompt.
fn requests(options: &Options, tokenizer: Option<&Tokenizer>) -> Result<Vec<Request>, AnyError> {
    let (folder, given) = (&options.folder, &options.sampling);
    let own = Sampling::from_folder(folder)?;
    let sampling = Sampling {
        temperature: given.temperature.unwrap_or(own.temperature),
        top_k: given.top_k.unwrap_or(own.top_k),
        top_p: given.top_p.unwrap_or(own.top_p),
        min_p: given.min_p.unwrap_or(own.min_p),
        repetition_penalty: given.repetition_penalty.unwrap_or(own.repetition_penalty),
        seed: given.seed,
    };
    let stop_tokens = match tokenizer {
        _ if options.ignore_eos => Vec::new(),
        Some(tokenizer) => tokenizer.eos().to_vec(),
        None => eos_ids(folder)?,
    };
    let prompts = prompts(&options.prompts, folder, tokenizer)?;
    let request = |prompt| Request {
        sampling,
        stop_tokens: stop_tokens.clone(),
        stop_strings: options.stop.clone(),
        ..Request::new(prompt, options.max_tokens)
    };
    Ok(prompts.into_iter().map(request).collect())
}

fn prompts(prompts: &Prompts, folder: &Path, tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<u32>>, AnyError> {
    if !prompts.prompt_ids.is_empty() {
        return prompts.prompt_ids.iter().map(|ids| parse_ids(ids)).collect();
    }
    let missing = || Usage(format!("{}: no tokenizer.json; give prompts as --prompt-ids", folder.display()));
    let tokenizer = tokenizer.ok_or_else(missing)?;
    let answer = |template: &ChatTemplate, chat: Chat| tokenizer.encode_chat(template, &chat.generation_prompt(true));
    if let Some(prompt) = &prompts.prompt {
        return Ok(vec![tokenizer.encode_prompt(prompt)?]);
    }
    if let Some(message) = &prompts.chat {
        return Ok(vec![answer(&ChatTemplate::from_folder(folder)?, Chat::new().say("user", message))?]);
    }
    let path = prompts.prompts_file.as_deref().unwrap_or(Path::new(""));
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let ids: Result<Vec<_>, _> = match path.extension().is_some_and(|extension| extension == "jsonl") {
        true => {
            let template = ChatTemplate::from_folder(folder)?;
            lines.map(|line| answer(&template, Chat::from_json(line)?)).collect()
        }
        false => lines.map(|line| tokenizer.encode_prompt(line)).collect(),
    };
    match ids? {
        ids if ids.is_empty() => Err(format!("{}: no prompt", path.display()).into()),
        ids => Ok(ids),
    }
}

fn parse_ids(text: &str) -> Result<Vec<u32>, AnyError> {
    let id = |part: &str| part.trim().parse().map_err(|e| Usage(format!("--prompt-ids: {part:?}: {e}")).into());
    text.split(',').map(id).collect()
}

/// A piece of a request's output.
struct Piece {
    token: u32,
    text: String,
}

/// What all ranks have to run.
struct Job<'a> {
    options: &'a Options,
    checkpoint: &'a Checkpoint,
    tokenizer: Option<&'a Tokenizer>,
    requests: &'a [Request],
}

/// What came of it.
struct Outcome {
    /// In the requests' order.
    outputs: Vec<Output>,
    /// Tokens of all ranks, times of the slowest.
    stats: Stats,
    /// Time until the last rank had its part of the model.
    loading: Duration,
}

/// What a rank has to say.
type RankOutcome = Result<(Vec<Output>, Stats, Duration), AnyError>;

impl Job<'_> {
    fn over_ranks(&self, sender: Sender<Piece>) -> Result<Outcome, AnyError> {
        let ranks = self.options.ranks;
        let experts = self.experts()?;
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            return Err(Usage(format!("--ranks: expected a divisor of {experts} experts, found {ranks}")).into());
        }
        if self.options.device == Place::Cuda {
            if ranks > 1 {
                return Err(Usage("--ranks: expected 1 with --device cuda".into()).into());
            }
            let group = DeviceGroup::single(self.group_config(experts), &Device::new_cuda_with_stream(0)?)?;
            return gather(vec![self.rank(0, &group, |model| model, sender)], self.requests.len());
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
                        self.rank(rank, &group, |model| OverRanks::new(model, Box::new(steps_world)), sender)
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

    /// Loads this rank's part and runs every R-th request.
    fn rank<D: Decoder>(
        &self,
        rank: usize,
        group: &DeviceGroup,
        wrap: impl FnOnce(Model) -> D,
        sender: Sender<Piece>,
    ) -> RankOutcome {
        let start = Instant::now();
        let dtype = self.options.dtype.map(|dtype| match dtype {
            Type::F64 => DType::F64,
            Type::F32 => DType::F32,
            Type::Bf16 => DType::BF16,
            Type::F16 => DType::F16,
        });
        let model = Model::load_on(self.checkpoint, group.clone(), LoadOptions { dtype, ..LoadOptions::default() })?;
        // Every rank sees all of it, so that none waits for another that cannot begin.
        if let Some(tokenizer) = self.tokenizer {
            tokenizer.check_embedding(model.vocabulary())?;
        }
        for (i, request) in self.requests.iter().enumerate() {
            request.check(i, model.vocabulary(), model.context())?;
        }
        let generator = Generator::new(wrap(model), self.tokenizer)?;
        let loading = start.elapsed();
        let own: Vec<Request> = self.requests.iter().skip(rank).step_by(self.options.ranks).cloned().collect();
        let (outputs, stats) = generator.run(&own, |event| {
            // Nobody listens any more where the output is closed.
            match sender.send(Piece { token: event.token, text: event.text.into() }) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        Ok((outputs, stats, loading))
    }
}

/// Ranks' results as one; where some failed, the error of the first of them, which names the cause as the others' do.
fn gather(outcomes: Vec<RankOutcome>, requests: usize) -> Result<Outcome, AnyError> {
    let ranks = outcomes.len();
    let mut places: Vec<Option<Output>> = vec![None; requests];
    let (mut stats, mut loading) = (Stats::default(), Duration::ZERO);
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let (outputs, own, time) =
            outcome.map_err(|e| if ranks > 1 { format!("rank {rank}: {e}").into() } else { e })?;
        for (i, output) in outputs.into_iter().enumerate() {
            places[rank + i * ranks] = Some(output);
        }
        stats.prompt_tokens += own.prompt_tokens;
        stats.generated_tokens += own.generated_tokens;
        stats.prefill_tokens += own.prefill_tokens;
        stats.decode_tokens += own.decode_tokens;
        stats.decode_steps = stats.decode_steps.max(own.decode_steps);
        stats.prefill = stats.prefill.max(own.prefill);
        stats.decode = stats.decode.max(own.decode);
        loading = loading.max(time);
    }
    Ok(Outcome { outputs: places.into_iter().flatten().collect(), stats, loading })
}

/// Writes one prompt's text as it comes, or its ids where there is no text; of several prompts, nothing.
fn show(pieces: &Receiver<Piece>, one: bool, has_text: bool) -> std::io::Result<()> {
    for piece in pieces {
        match (one, has_text) {
            (true, true) => put(&piece.text)?,
            (true, false) => put(&format!("{} ", piece.token))?,
            (false, _) => {}
        }
    }
    Ok(())
}

fn put(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Several prompts' texts, or ids, with a line before each; what is left to write of one.
fn print(outputs: &[Output], has_text: bool) -> std::io::Result<()> {
    if let [_] = outputs {
        return put("\n");
    }
    for (i, output) in outputs.iter().enumerate() {
        let ids = || output.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let text = if has_text { output.text.clone() } else { ids() };
        put(&format!("== {i}\n{text}\n"))?;
    }
    Ok(())
}

/// Counts and speeds.
fn report(outcome: &Outcome) {
    let stats = &outcome.stats;
    let mut lines = String::new();
    for (i, output) in outcome.outputs.iter().enumerate() {
        let why = match &output.finish {
            Finish::Token(id) => format!("token {id}"),
            Finish::Text(text) => format!("stop text {text:?}"),
            Finish::MaxTokens => "max tokens".into(),
            Finish::Context => "context full".into(),
            Finish::Caller => "output closed".into(),
        };
        let cut = if output.incomplete { ", inside a character" } else { "" };
        lines += &format!("prompt {i}: {} tokens, ended by {why}{cut}\n", output.tokens.len());
    }
    lines += &format!("load: {:.2} s\n", outcome.loading.as_secs_f64());
    let seconds = stats.prefill.as_secs_f64();
    lines +=
        &format!("prefill: {} tokens, {seconds:.3} s, {:.1} tokens/s\n", stats.prefill_tokens, stats.prefill_rate());
    let seconds = stats.decode.as_secs_f64();
    lines += &format!("decode: {} tokens, {seconds:.3} s, {:.1} tokens/s\n", stats.decode_tokens, stats.decode_rate());
    let _ = std::io::stderr().write_all(lines.as_bytes());
}
