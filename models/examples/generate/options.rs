//! The command line, and what is asked for by it.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, ValueEnum};
use moebius::checkpoint::printable;
use moebius_models::ExpertWeights;
use moebius_models::generate::{CacheKind, Channels, Chat, ChatTemplate, Request, Sampling, Tokenizer, eos_ids};

use crate::AnyError;

/// The small model of this repository, which `examples/train_small` trained.
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/small");
/// The prompt where none is given.
const BEGINNING: &str = "A rank that fails";

/// Continues prompts with the model of a published folder. One prompt's text appears as it comes, of several prompts each
/// text once it and those before it have ended (of ranks that are processes all but the first prompt's once all have);
/// without tokenizer.json prompts and output are ids. Counts and speeds go to standard error.
///
/// Options that are not given are the folder's own (generation_config.json): a model that samples by its publisher's
/// advice does so here.
#[derive(Debug, Parser)]
#[command(allow_negative_numbers = true)]
pub struct Options {
    /// Folder with config.json and safetensors files; without one, the small model of this repository, which continues a
    /// text of its own where no prompt is given
    folder: Option<PathBuf>,
    #[command(flatten)]
    pub prompts: Prompts,
    #[command(flatten)]
    pub sampling: SamplingOptions,
    /// Most tokens to generate for a prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,
    /// A text that ends a generation and is no part of it, or the text of a special token; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Id of a token that ends a generation, beside the folder's; may be given several times
    #[arg(long, value_name = "ID")]
    pub stop_token: Vec<u32>,
    /// Which messages of an answer are shown, of models that write some in channels of their own (gpt-oss)
    #[arg(long, value_enum, default_value_t = ShownChannels::Final)]
    pub channels: ShownChannels,
    /// Go on after the tokens that end a text
    #[arg(long)]
    pub ignore_eos: bool,
    /// Ranks that share the experts, each a thread of this process with a part of the prompts [default: 1; as a process
    /// that a launcher such as moebius-run has started, the launcher's]
    #[arg(long, value_name = "R")]
    pub ranks: Option<usize>,
    /// Where the model runs [default: cpu; as one process of several, cuda, a GPU each]
    #[arg(long, value_enum)]
    pub device: Option<Place>,
    /// Most sequences of a rank that are decoded together; more prompts come in batches, one behind another
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Most tokens by which prompts of a batch differ in length; others come in batches of their own. Of longer prompts
    /// what is behind the shortest one's length is read a token a step
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub spread: usize,
    /// Keys and values in memory that stays, so that GPUs replay steps from a graph, or in memory that grows
    #[arg(long, value_enum, default_value_t = Cache::Static)]
    pub cache: Cache,
    /// Convert weights to this type; as stored if absent
    #[arg(long, value_enum)]
    pub dtype: Option<Type>,
    /// The form of the routed experts' weights
    #[arg(long, value_enum, default_value_t = ExpertForm::AsStored)]
    pub experts: ExpertForm,
    /// Keep experts in memory of the host, and bring them a layer ahead: for a model larger than the GPU
    #[arg(long)]
    pub experts_on_host: bool,
    /// Count how often each layer's experts are chosen, and write the most and the least of each layer
    #[arg(long)]
    pub expert_load: bool,
    /// Longest wait of a rank for another, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct Prompts {
    /// A text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// A user's message, answered through the folder's chat template
    #[arg(long, value_name = "TEXT")]
    pub chat: Option<String>,
    /// A prompt a line; of a file whose name ends in .jsonl, a conversation a line: a list of messages, or an object
    /// with "messages" and the template's other variables ("tools", "enable_thinking", ...). An answer begins behind
    /// each, unless it has "add_generation_prompt": false
    #[arg(long, value_name = "FILE")]
    pub prompts_file: Option<PathBuf>,
    /// Ids of a prompt, with commas between them; may be given several times
    #[arg(long, value_name = "IDS")]
    pub prompt_ids: Vec<String>,
}

#[derive(Debug, Args)]
pub struct SamplingOptions {
    /// 0: greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Draw from the K largest logits; 0: from all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw from the fewest tokens with this probability together
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Draw from tokens with this share of the largest probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Above 1: tokens that are there already become less probable
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// The same seed gives the same text. Every prompt draws all of its numbers, whatever the others [default: 0]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
}

impl SamplingOptions {
    /// Options that only count where tokens are drawn.
    pub fn of_draws(&self) -> Vec<&'static str> {
        let given = [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--seed", self.seed.is_some()),
        ];
        given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// The CPU
    Cpu,
    /// One NVIDIA GPU (a build with --features cuda); several: a process each, over NCCL (--features nccl)
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// Allocated ahead; for models whose rotations change with the length, and with --expert-load, it grows all the same
    Static,
    /// Grows with the tokens
    Growing,
}

impl From<Cache> for CacheKind {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Static => CacheKind::Static,
            Cache::Growing => CacheKind::Growing,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShownChannels {
    /// The final one alone
    Final,
    /// All: reasoning and calls of tools too, each behind a line with its channel
    All,
    /// The text of all tokens, not divided
    Raw,
}

impl From<ShownChannels> for Channels {
    fn from(shown: ShownChannels) -> Self {
        match shown {
            ShownChannels::Final => Channels::Final,
            ShownChannels::All => Channels::All,
            ShownChannels::Raw => Channels::Raw,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExpertForm {
    /// NVFP4, MXFP4 and fp8 blocks as they are stored, and multiplied so; others in the type of all weights, which other
    /// quantized forms are brought to
    AsStored,
    /// In NVFP4, quantized as they are loaded
    Nvfp4,
    /// In the type of all weights
    Dequantized,
}

impl From<ExpertForm> for ExpertWeights {
    fn from(form: ExpertForm) -> Self {
        match form {
            ExpertForm::AsStored => ExpertWeights::AsStored,
            ExpertForm::Nvfp4 => ExpertWeights::Nvfp4,
            ExpertForm::Dequantized => ExpertWeights::Dequantized,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Type {
    /// 64 bits
    F64,
    /// 32 bits
    F32,
    /// 16 bits, 8 of them the exponent
    Bf16,
    /// 16 bits, 5 of them the exponent
    F16,
}

impl Options {
    /// The folder to read.
    pub fn folder(&self) -> &Path {
        self.folder.as_deref().unwrap_or(Path::new(SMALL))
    }

    /// The text that is continued, and printed before what continues it, where the command line has neither a folder nor
    /// a prompt.
    pub fn beginning(&self) -> Option<&'static str> {
        (self.folder.is_none() && !self.prompts.is_given()).then_some(BEGINNING)
    }
}

impl Prompts {
    fn is_given(&self) -> bool {
        !self.prompt_ids.is_empty()
            || [&self.prompt, &self.chat].into_iter().any(Option::is_some)
            || self.prompts_file.is_some()
    }
}

/// A command line that cannot be: what clap cannot know of it.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// The request of each prompt.
pub fn requests(options: &Options, tokenizer: Option<&Tokenizer>) -> Result<Vec<Request>, AnyError> {
    let (folder, given) = (options.folder(), &options.sampling);
    // Where the command line draws, the folder's advice counts whether or not it says that it samples.
    let draws = given.temperature.is_some_and(|temperature| temperature > 0.0);
    let own = if draws { Sampling::drawing_from_folder(folder)? } else { Sampling::from_folder(folder)? };
    let sampling = Sampling {
        temperature: given.temperature.unwrap_or(own.temperature),
        top_k: given.top_k.unwrap_or(own.top_k),
        top_p: given.top_p.unwrap_or(own.top_p),
        min_p: given.min_p.unwrap_or(own.min_p),
        repetition_penalty: given.repetition_penalty.unwrap_or(own.repetition_penalty),
        seed: given.seed.unwrap_or(0),
    };
    let mut stop_tokens = match tokenizer {
        _ if options.ignore_eos => Vec::new(),
        Some(tokenizer) => tokenizer.eos().to_vec(),
        None => eos_ids(folder)?,
    };
    stop_tokens.extend(&options.stop_token);
    let prompts = prompts(options, tokenizer)?;
    let request = |prompt| Request {
        sampling,
        stop_tokens: stop_tokens.clone(),
        stop_strings: options.stop.clone(),
        ..Request::new(prompt, options.max_tokens)
    };
    Ok(prompts.into_iter().map(request).collect())
}

fn prompts(options: &Options, tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<u32>>, AnyError> {
    let (prompts, folder) = (&options.prompts, options.folder());
    if !prompts.is_given() && options.beginning().is_none() {
        return Err(
            Usage("expected one of --prompt, --chat, --prompts-file, --prompt-ids beside a folder".into()).into()
        );
    }
    if !prompts.prompt_ids.is_empty() {
        return prompts.prompt_ids.iter().map(|ids| parse_ids(ids)).collect();
    }
    let shown = |path: &Path| printable(&path.display().to_string());
    let missing = || Usage(format!("{}: no tokenizer.json; give prompts as --prompt-ids", shown(folder)));
    let tokenizer = tokenizer.ok_or_else(missing)?;
    let answer = |template: &ChatTemplate, chat: Chat| tokenizer.encode_chat(template, &chat.generation_prompt(true));
    if let Some(prompt) = prompts.prompt.as_deref().or(options.beginning()) {
        return Ok(vec![tokenizer.encode_prompt(prompt)?]);
    }
    if let Some(message) = &prompts.chat {
        return Ok(vec![answer(&ChatTemplate::from_folder(folder)?, Chat::new().say("user", message))?]);
    }
    let path = prompts.prompts_file.as_deref().unwrap_or(Path::new(""));
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", shown(path)))?;
    // A byte order mark is no part of the first prompt.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let lines = bytes.split(|byte| *byte == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    let of_line = |line: &[u8], ids: &dyn Fn(&str) -> Result<Vec<u32>, AnyError>| -> Result<Vec<u32>, AnyError> {
        let text = std::str::from_utf8(line)?;
        ids(text.strip_suffix('\r').unwrap_or(text))
    };
    let template = match path.extension().is_some_and(|extension| extension == "jsonl") {
        true => Some(ChatTemplate::from_folder(folder)?),
        false => None,
    };
    let prompt = |(number, line): (usize, &[u8])| {
        let ids = of_line(line, &|text| match &template {
            Some(template) => {
                let chat = Chat::from_json(text)?;
                Ok(match says_generation_prompt(text) {
                    true => tokenizer.encode_chat(template, &chat)?,
                    false => answer(template, chat)?,
                })
            }
            None => Ok(tokenizer.encode_prompt(text)?),
        });
        ids.map_err(|e| format!("{}: line {}: {e}", shown(path), number + 1).into())
    };
    match lines.map(prompt).collect::<Result<Vec<_>, AnyError>>()? {
        ids if ids.is_empty() => Err(format!("{}: no prompt", shown(path)).into()),
        ids => Ok(ids),
    }
}

/// Rows of the embedding and most tokens of a sequence, as far as a `config.json` says them in so many words; else more
/// than anything has. A scaled rotation may go further than `max_position_embeddings`.
pub fn sizes(config: &serde_json::Value) -> (usize, usize) {
    let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let size = |name: &str| text[name].as_u64().and_then(|size| usize::try_from(size).ok()).unwrap_or(usize::MAX);
    let is_plain = |field: &str| {
        let of_layers = |fields: &serde_json::Map<_, _>| fields.values().any(serde_json::Value::is_object);
        let kind = ["rope_type", "type"].into_iter().find_map(|name| text[field][name].as_str());
        text[field].as_object().is_none_or(|fields| kind.is_none_or(|kind| kind == "default") && !of_layers(fields))
    };
    let context = if is_plain("rope_scaling") && is_plain("rope_parameters") { "max_position_embeddings" } else { "" };
    (size("vocab_size"), size(context))
}

/// Whether a conversation says by itself if the answer's beginning ends its text.
fn says_generation_prompt(conversation: &str) -> bool {
    let object: Option<serde_json::Value> = serde_json::from_str(conversation).ok();
    object.is_some_and(|object| object.get("add_generation_prompt").is_some())
}

fn parse_ids(text: &str) -> Result<Vec<u32>, AnyError> {
    if text.trim().is_empty() {
        return Err(Usage(format!("--prompt-ids: expected ids with commas between them, found {text:?}")).into());
    }
    let id = |part: &str| part.trim().parse().map_err(|e| Usage(format!("--prompt-ids: {part:?}: {e}")).into());
    text.split(',').map(id).collect()
}
