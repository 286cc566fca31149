//! Prints what a checkpoint folder holds: family, routing formula, shapes, and bytes per rank.
//!
//! ```text
//! cargo run --release --example inspect -- tests/golden/deepseek_v3 --ranks 4
//! ```

#[path = "support/output.rs"]
mod output;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use moebius::checkpoint::{BlockBytes, Checkpoint, Form, LoadOptions, OpenOptions, printable};
use moebius::config::{Activation, GroupScore, MoeConfig, RouterConfig, Score, WeightAt};
use moebius::ep::DispatcherKind;
use moebius::layer::StepSizes;
use moebius::{DType, Result};

use output::{Usage, conclude, say};

/// Prints a checkpoint's family, routing formula and shapes, and what each rank would load.
///
/// Reads config.json and the headers of the safetensors files only, so it is quick on a checkpoint of any size. Every
/// tensor of every Mixture-of-Experts block is checked by name, shape and type; what does not fit is an error.
///
/// Exit code: 0, 1 for an error, 2 for a wrong command line.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder with config.json and model.safetensors, or model.safetensors.index.json and its shards.
    #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe"))]
    checkpoint: PathBuf,
    /// Ranks that share the experts of each block; must divide their number.
    #[arg(short, long, default_value_t = 1, value_name = "R", value_parser = ranks)]
    ranks: usize,
    /// Floating type to load as; by default as stored (bf16 or f32 for quantized weights).
    #[arg(short, long, value_name = "TYPE", value_parser = ["f64", "f32", "f16", "bf16"])]
    dtype: Option<String>,
    /// Also plan the memory of a step with so many tokens on each rank.
    #[arg(short, long, value_name = "T", value_parser = clap::value_parser!(u32).range(..1 << 31))]
    tokens: Option<u32>,
    /// How tokens travel in that step.
    #[arg(long, value_enum, default_value_t = Dispatcher::AllToAll)]
    dispatcher: Dispatcher,
    /// List the tensors of this layer's block.
    #[arg(short, long, value_name = "L")]
    layer: Option<usize>,
    /// Let the checkpoint's files be links out of the folder (the Hugging Face cache is made of such).
    #[arg(long)]
    follow_links: bool,
}

/// Names as `MOEBIUS_EP` has them; the other spelling is taken too.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Dispatcher {
    /// Each (token, destination rank) travels once
    #[value(alias = "all-to-all")]
    AllToAll,
    /// Every rank gets all tokens
    #[value(alias = "all-gather")]
    AllGather,
}

fn ranks(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|ranks| *ranks > 0).ok_or_else(|| "expected a number of at least 1".to_string())
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()).map(|()| true))
}

type AnyError = Box<dyn Error + Send + Sync>;

/// Refuses, before anything is printed, a command line that asks for something that this checkpoint has not.
fn check(arguments: &Arguments, checkpoint: &Checkpoint) -> std::result::Result<(), AnyError> {
    let layers = checkpoint.moe_layers();
    if let Some(layer) = arguments.layer.filter(|layer| !layers.contains(layer)) {
        let text = format!("--layer {layer}: expected a layer with a Mixture-of-Experts block, {}", ranges(layers));
        return Err(Usage(text).into());
    }
    for &layer in layers {
        let experts = checkpoint.block_config(layer)?.router.num_experts;
        if !experts.is_multiple_of(arguments.ranks) {
            let text = format!("--ranks {}: expected a divisor of {experts} experts (layer {layer})", arguments.ranks);
            return Err(Usage(text).into());
        }
    }
    Ok(())
}

fn run(arguments: &Arguments) -> std::result::Result<(), AnyError> {
    if arguments.checkpoint.is_file() {
        let file = arguments.checkpoint.display();
        return Err(
            format!("{file}: expected a checkpoint's folder, found a file; name the folder that it is in").into()
        );
    }
    let mut open = OpenOptions::default();
    open.follow_links = arguments.follow_links;
    let checkpoint = Checkpoint::open_with(&arguments.checkpoint, open)?;
    check(arguments, &checkpoint)?;
    let dtype = arguments.dtype.as_deref().map(|name| match name {
        "f64" => DType::F64,
        "f32" => DType::F32,
        "f16" => DType::F16,
        _ => DType::BF16,
    });
    let line = |name: &str, value: String| say(format_args!("{name:<12} {value}"));
    line("folder", printable(&checkpoint.dir().display().to_string()));
    line("family", checkpoint.family().to_string());
    line("model type", checkpoint.model_dtype().map_or("not stated".to_string(), |dtype| dtype.to_string()));
    line("tensors", checkpoint.names().count().to_string());
    let layers = checkpoint.moe_layers();
    line("layers", format!("{}, {} with a block: {}", checkpoint.num_layers(), layers.len(), ranges(layers)));
    let options = LoadOptions { rank: 0, ranks: arguments.ranks, dtype };
    let mut previous = None;
    let (mut total, mut of_form) = (BlockBytes { experts: 0, replicated: 0, disk: 0 }, Vec::<(Form, usize)>::new());
    for &layer in layers {
        let config = checkpoint.block_config(layer)?;
        if previous.as_ref() != Some(&config) {
            say(format_args!("\nblock from layer {layer} on ({}*)", checkpoint.block_prefix(layer)?));
            describe(&config);
            previous = Some(config);
        }
        let bytes = checkpoint.block_bytes(layer, options)?;
        total.experts += bytes.experts;
        total.replicated += bytes.replicated;
        total.disk += bytes.disk;
        let form = checkpoint.block_form(layer)?;
        match of_form.iter_mut().find(|(known, _)| *known == form) {
            Some((_, count)) => *count += 1,
            None => of_form.push((form, 1)),
        }
    }
    say("");
    for (form, count) in of_form {
        line("stored as", format!("{} ({count} of the blocks)", name_of(form)));
    }
    let Some(config) = previous else { return Ok(()) };
    let local = config.router.num_experts / arguments.ranks;
    line(
        "per rank",
        format!("{local} of {} experts a block, on each of {} ranks", config.router.num_experts, arguments.ranks),
    );
    line("  experts", format!("{} in memory", size(total.experts)));
    line("  replicated", format!("{} in memory (router, shared expert)", size(total.replicated)));
    line("  read", format!("{} of the files", size(total.disk)));
    if let Some(tokens) = arguments.tokens {
        let dtype = dtype.or(checkpoint.model_dtype()).unwrap_or(DType::BF16);
        plan(arguments, tokens as usize, &config, dtype, layers.len());
    }
    Ok(arguments.layer.map_or(Ok(()), |layer| list(&checkpoint, layer))?)
}

/// Memory of a step, evenly routed and at worst.
fn plan(arguments: &Arguments, tokens: usize, config: &MoeConfig, dtype: DType, layers: usize) {
    let kind = match arguments.dispatcher {
        Dispatcher::AllGather => DispatcherKind::AllGather,
        Dispatcher::AllToAll => DispatcherKind::AllToAll,
    };
    let shape = (tokens, arguments.ranks);
    let cases = [
        ("even routing", StepSizes::even(config, shape.0, shape.1, dtype, kind)),
        ("all choices here", StepSizes::worst(config, shape.0, shape.1, dtype, kind)),
    ];
    say(format_args!("\na step of {tokens} {dtype} tokens a rank, on one rank"));
    say(format_args!(
        "  {:<18} {:>10} {:>10} {:>18} {:>10} {:>10}",
        "", "slots", "rows", "saved a layer", "transient", "routing"
    ));
    for (name, sizes) in cases {
        let of = sizes.memory(config);
        say(format_args!(
            "  {name:<18} {:>10} {:>10} {:>18} {:>10} {:>10}",
            sizes.slots,
            sizes.rows,
            format!("{} x {layers}", size(of.saved as u64)),
            size(of.transient as u64),
            size(of.routing as u64)
        ));
    }
    say(format_args!(
        "  slots: rows of this rank's experts (a static capacity is a bound on them); rows: those that travel here;"
    ));
    say(format_args!("  saved: from forward to backward; transient: at once beside that, for all layers together"));
}

fn describe(config: &MoeConfig) {
    let line = |name: &str, value: String| say(format_args!("  {name:<10} {value}"));
    let router = &config.router;
    line("experts", format!("E = {}, K = {} a token", router.num_experts, router.top_k));
    line("sizes", format!("H = {} hidden, I = {} inner", config.hidden, config.intermediate));
    line("routing", routing(router));
    let activation = match config.activation {
        Activation::SiluGlu => "silu(gate)·up".to_string(),
        Activation::GeluGlu => "gelu(gate)·up".to_string(),
        Activation::ClampedGlu { alpha, limit } => {
            format!("(u + 1)·g·sigmoid({alpha}·g), g = min(gate, {limit}), u = clamp(up, ±{limit})")
        }
        Activation::Relu2 => "relu(up)²".to_string(),
        other => format!("{other:?}"),
    };
    line("activation", activation + if config.expert_bias { ", with biases" } else { "" });
    let place = match config.weight_at {
        WeightAt::Input => "experts' input",
        WeightAt::Activation => "experts' activation",
        WeightAt::Output => "experts' output",
        _ => "experts",
    };
    line("weights", format!("multiply the {place}"));
    if let Some(shared) = &config.shared {
        let gated = if shared.gated { ", times sigmoid(x·gate)" } else { "" };
        let biases = if shared.bias { ", with biases" } else { "" };
        line("shared", format!("S = {} inner{biases}{gated}", shared.intermediate));
    }
}

/// The formula in one line, in its order.
fn routing(router: &RouterConfig) -> String {
    let mut steps = Vec::new();
    let bias = if router.logit_bias { " + b" } else { "" };
    let logits = format!("l = xWᵀ{bias}");
    let chosen = |score: &str| match router.selection_bias {
        true => format!("choose top {} of {score} + selection bias", router.top_k),
        false => format!("choose top {} of {score}", router.top_k),
    };
    let groups = router.groups.map(|g| {
        let rank = match g.rank_by {
            GroupScore::Max => "maximum",
            _ => "two best",
        };
        format!("keep {} of {} groups by their {rank}", g.keep, g.groups)
    });
    match router.score {
        Score::TopkSoftmax => steps.extend([logits, chosen("l"), "w = softmax of the chosen".to_string()]),
        Score::TopkSigmoid => steps.extend([logits, chosen("l"), "w = sigmoid of the chosen".to_string()]),
        Score::SparseMixer { epsilon } => {
            steps.extend([logits, format!("SparseMixer top 2, masked below 2·{epsilon} of the maximum")]);
        }
        score => {
            let name = if score == Score::Sigmoid { "sigmoid" } else { "softmax" };
            steps.extend([logits, format!("s = {name}(l)")]);
            steps.extend(groups);
            steps.extend([chosen("s"), "w = s of the chosen".to_string()]);
        }
    }
    if let Some(n) = &router.renorm {
        let norm = if n.p == 1.0 { "Σw".to_string() } else { format!("|w|_{}", n.p) };
        let epsilon = if n.epsilon > 0.0 { format!(" + {:e}", n.epsilon) } else { String::new() };
        let floor = if n.floor > 0.0 { format!(", at least {:e}", n.floor) } else { String::new() };
        steps.push(format!("w /= {norm}{epsilon}{floor}"));
    }
    if router.scale != 1.0 {
        steps.push(format!("w *= {}", router.scale));
    }
    steps.join("; ")
}

fn name_of(form: Form) -> String {
    match form {
        Form::Plain(dtype) => dtype.to_string(),
        Form::Fp8Block => "fp8: E4M3 with a scale a block".to_string(),
        Form::Fp8Scaled => "fp8: E4M3 with a scale a tensor or row".to_string(),
        Form::Mxfp4 => "MXFP4: E2M1, blocks of 32, E8M0 scales".to_string(),
        Form::Mxfp4CompressedTensors => "MXFP4 (compressed-tensors): E2M1, blocks of 32, E8M0 scales".to_string(),
        Form::Nvfp4ModelOpt => "NVFP4 (ModelOpt): E2M1, blocks of 16, E4M3 scales".to_string(),
        Form::Nvfp4CompressedTensors => "NVFP4 (compressed-tensors): E2M1, blocks of 16, E4M3 scales".to_string(),
        other => format!("{other:?}"),
    }
}

fn list(checkpoint: &Checkpoint, layer: usize) -> Result<()> {
    let prefix = checkpoint.block_prefix(layer)?;
    say(format_args!("\ntensors of layer {layer}"));
    for name in checkpoint.names().filter(|name| name.starts_with(&prefix)) {
        say(format_args!("  {}", printable(name)));
    }
    Ok(())
}

/// `[0, 1, 2, 5]` as `0-2, 5`.
fn ranges(layers: &[usize]) -> String {
    let mut text = Vec::new();
    for run in layers.chunk_by(|a, b| a + 1 == *b) {
        match run {
            [one] => text.push(one.to_string()),
            [first, .., last] => text.push(format!("{first}-{last}")),
            [] => {}
        }
    }
    if text.is_empty() { "none".to_string() } else { text.join(", ") }
}

fn size(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}
