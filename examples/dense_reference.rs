//! The crate's main job, checked: one Mixture-of-Experts block of a checkpoint over several ranks, forward and
//! backward through a framework's autograd, against a dense reference and the checkpoint's golden.
//!
//! ```text
//! cargo run --release --example dense_reference
//! cargo run --release --example dense_reference -- --checkpoint tests/golden/gpt_oss --ranks 8
//! cargo run --release --features cuda --example dense_reference -- --device cuda
//! cargo run --release --features nccl --example dense_reference -- --device cuda --ranks 2
//! ```

mod support;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use candle_core::{Device, Tensor, Var};
use clap::{Parser, ValueEnum};
use moebius::MoeConfig;
use moebius::checkpoint::{Checkpoint, OpenOptions, printable};
use moebius::etp::Payload;
use support::compare::{Difference, difference};
use support::dense::{Dense, DenseOutput, Params, choice_scores, choose};
use support::device::Place;
use support::folder::{Folder, tokens};
use support::job::{AnyError, Clock, Job, Outcome, uneven, whole_block};
use support::names;
use support::output::{Usage, conclude, say};
use support::processes::Process;
use support::quantized_payload::{TOKENS, through};
use support::random::Random;
use support::stages::Stages;
use support::table::{Row, natural, print_load, print_rows};

/// Runs one Mixture-of-Experts block of a checkpoint folder over R ranks of this process, one thread a rank, forward
/// and backward through the framework's autograd, and compares the results with
///
///   (a) a dense reference that runs every expert on every token with plain candle operations in f64, and
///
///   (b) the folder's golden.safetensors, where there is one.
///
/// Prints, for the output and for the gradients of input, router and every expert weight, the largest absolute error
/// and the relative error ‖a−b‖/‖b‖; then tokens per expert and the time of each stage. Gradients of parameters that
/// every rank has are summed over the ranks, those of experts are put side by side.
///
/// Exit code: 0 where everything is within tolerance, 1 where something is not or the run failed, 2 for a wrong command
/// line.
#[derive(Debug, Parser)]
#[command(verbatim_doc_comment)]
struct Args {
    /// Checkpoint folder: config.json and safetensors files, in any of the families that the crate loads.
    #[arg(long, value_name = "DIR", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe"))]
    checkpoint: PathBuf,
    /// Let the checkpoint's files be links out of its folder (the Hugging Face cache is made of such).
    #[arg(long)]
    follow_links: bool,
    /// Ranks that share the experts; must divide their number. Tokens are split unevenly. 4 if absent; 1 on a GPU.
    #[arg(long, value_name = "R")]
    ranks: Option<usize>,
    /// Where the layer runs; the references run on the CPU.
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Whose module and autograd run the layer.
    #[arg(long, value_enum, default_value_t = Framework::Candle)]
    framework: Framework,
    /// Layer of the checkpoint; the first with a Mixture-of-Experts block if absent.
    #[arg(long, value_name = "L")]
    layer: Option<usize>,
    /// Random tokens instead of the golden's; 64 where the folder has no golden for the layer.
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: Option<u32>,
    /// Seed of random tokens and of a random gradient of the output.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Rows of the table for weights; past it, only those with the largest errors are shown.
    #[arg(long, value_name = "N", default_value_t = 64)]
    rows: usize,
    /// In what form tokens travel to their experts, which read what it stands for, as the dense reference's do; the
    /// golden's results are then not compared.
    #[arg(long, value_enum, default_value_t = Form::Plain)]
    token_payload: Form,
    /// Be one rank of several that a launcher has started as processes, one GPU each (docs/ranks.md); rank 0 compares.
    #[arg(long)]
    processes: bool,
    /// Longest wait of a rank for another, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Framework {
    /// moebius::candle
    Candle,
    /// moebius::burn (a build with --features burn)
    Burn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// As they are
    Plain,
    /// Quantized, 0.565 bytes an element
    Nvfp4,
    /// Quantized, 1.031 bytes an element
    Mxfp8,
    /// Quantized in blocks of 128, 1.031 bytes an element
    Fp8Block,
}

impl From<Form> for Payload {
    fn from(form: Form) -> Self {
        match form {
            Form::Plain => Payload::Plain,
            Form::Nvfp4 => Payload::Nvfp4,
            Form::Mxfp8 => Payload::Mxfp8,
            Form::Fp8Block => Payload::Fp8Block,
        }
    }
}

fn main() -> ExitCode {
    conclude(compare(&Args::parse()))
}

impl Args {
    fn open(&self) -> OpenOptions {
        let mut open = OpenOptions::default();
        open.follow_links = self.follow_links;
        open
    }
}

/// Runs the layer and its references; true where all results agree.
fn compare(args: &Args) -> Result<bool, AnyError> {
    if !args.checkpoint.join("config.json").is_file() {
        let dir = printable(&args.checkpoint.display().to_string());
        return Err(format!("{dir}: no checkpoint folder (no config.json); name one with --checkpoint DIR").into());
    }
    check_framework(args)?;
    let process = args.processes.then(|| process(args)).transpose()?;
    let default = if args.device == Place::Cpu { 4 } else { 1 };
    let ranks = process.as_ref().map(|process| process.world).or(args.ranks).unwrap_or(default);
    let folder = Folder::open(&args.checkpoint)?;
    let checkpoint = Checkpoint::open_with(&args.checkpoint, args.open())?;
    let first = checkpoint.moe_layers().first().copied();
    let layer = args.layer.or(first).ok_or("the checkpoint has no Mixture-of-Experts layer")?;
    if !checkpoint.moe_layers().contains(&layer) {
        let layers = checkpoint.moe_layers();
        return Err(
            Usage(format!("--layer {layer}: expected a layer with a Mixture-of-Experts block, {layers:?}")).into()
        );
    }
    let config = checkpoint.block_config(layer)?;
    let golden = folder.golden.as_ref().filter(|_| args.tokens.is_none() && Some(layer) == first);
    let experts = config.router.num_experts;
    if ranks == 0 || !experts.is_multiple_of(ranks) {
        return Err(Usage(format!("--ranks: expected a divisor of {experts} experts, found {ranks}")).into());
    }
    let job = job(args, (&folder, ranks), layer, config.hidden, golden)?;
    let devices = match (args.framework, &process) {
        (Framework::Candle, None) => args.device.open(ranks)?,
        _ => Vec::new(),
    };
    if process.as_ref().is_none_or(|process| process.rank == 0) {
        print_header(&folder, &config, &job);
    }

    let stages = Stages::default();
    tracing::subscriber::set_global_default(stages.clone())?;
    let found = match process {
        #[cfg(feature = "candle")]
        Some(process) => match support::run_candle::run_process(&job, process)? {
            Some(found) => found,
            // Rank 0 compares.
            None => return Ok(true),
        },
        #[cfg(not(feature = "candle"))]
        Some(_) => return Ok(false),
        None => run(args, &job, &devices)?,
    };
    let mut clock = Clock::start();
    let reference = Reference::run(&job, &found)?;
    clock.lap("dense reference");

    let golden = golden.filter(|_| job.token_payload == Payload::Plain);
    let rows = rows(&folder, &config, golden, &found, &reference)?;
    print_rows(&rows, args.rows, ALWAYS_SHOWN);
    if reference.near_ties > 0 {
        say(format_args!(
            "{} tokens' routing is tied within {NEAR_TIE:.0e}: the reference follows the layer",
            reference.near_ties
        ));
    }
    say("\ntokens per expert");
    print_load(&found.tokens_per_expert);
    say("\ntime (slowest rank)");
    for (stage, time) in found.times.iter().chain(&clock.laps) {
        say(format_args!("  {stage:20} {:>10.3} ms", time.as_secs_f64() * 1e3));
    }
    say("of forward and backward, waiting for other ranks included");
    for (stage, time) in stages.slowest() {
        say(format_args!("  {stage:20} {:>10.3} ms", time.as_secs_f64() * 1e3));
    }
    let failed = rows.iter().filter(|r| !r.ok()).count();
    match failed {
        0 => say(format_args!("\nall {} results within tolerance", rows.len())),
        _ => say(format_args!("\n{failed} of {} results over tolerance", rows.len())),
    }
    Ok(failed == 0)
}

/// This process's place among those that a launcher has started.
fn process(args: &Args) -> Result<Process, AnyError> {
    if args.framework != Framework::Candle || args.device != Place::Cuda {
        return Err(Usage::from("--processes: give --framework candle and --device cuda").into());
    }
    let process = Process::join(Duration::from_secs(args.timeout))?;
    match args.ranks {
        Some(ranks) if ranks != process.world => {
            Err(Usage(format!("--ranks {ranks}: the launcher has started {}", process.world)).into())
        }
        _ => Ok(process),
    }
}

/// Refuses what this build has not.
fn check_framework(args: &Args) -> Result<(), Usage> {
    let missing = match (args.framework, args.device) {
        (Framework::Candle, _) => (!cfg!(feature = "candle")).then_some("candle"),
        (Framework::Burn, Place::Cpu) => (!cfg!(feature = "burn")).then_some("burn"),
        (Framework::Burn, Place::Cuda) => (!cfg!(feature = "burn-cuda")).then_some("burn-cuda"),
    };
    let device = if args.device == Place::Cuda { " --device cuda" } else { "" };
    let framework = format!("{:?}", args.framework).to_lowercase();
    match missing {
        Some(feature) => Err(format!("--framework {framework}{device}: build with --features {feature}").into()),
        None => Ok(()),
    }
}

/// The layer, through the framework that was asked for.
#[cfg_attr(
    not(feature = "candle"),
    allow(unused_variables, reason = "devices are candle's, and no framework may be built in")
)]
fn run(args: &Args, job: &Job, devices: &[Device]) -> Result<Outcome, AnyError> {
    match args.framework {
        #[cfg(feature = "candle")]
        Framework::Candle => support::run_candle::run_on(job, devices),
        #[cfg(feature = "burn")]
        Framework::Burn if args.device == Place::Cpu => support::run_burn::run(job),
        #[cfg(feature = "burn-cuda")]
        Framework::Burn => support::run_burn::run_on_gpu(job),
        #[allow(unreachable_patterns, reason = "reachable where a framework is not built in")]
        other => Err(format!("{other:?} is not in this build").into()),
    }
}

/// Tokens and the gradient of the output: the golden's where it has them, else random.
fn job(
    args: &Args,
    (folder, ranks): (&Folder, usize),
    layer: usize,
    hidden: usize,
    golden: Option<&Params>,
) -> Result<Job, AnyError> {
    let mut random = Random::new(args.seed);
    let x = match golden.and_then(|g| g.get("moe_input")) {
        Some(x) => tokens(x)?,
        None => random.tensor(&[args.tokens.map_or(64, |tokens| tokens as usize), hidden], 1.0)?,
    };
    let dy = match golden.and_then(|g| g.get("grad_moe_output")) {
        Some(dy) => tokens(dy)?,
        None => random.tensor(x.dims(), 1.0)?,
    };
    // Rounded once, so that the reference sees the very numbers that the layer gets.
    let rounded = |t: Tensor| t.to_dtype(support::job::candle_dtype(folder.dtype)?)?.to_dtype(candle_core::DType::F64);
    Ok(Job {
        dir: args.checkpoint.clone(),
        open: args.open(),
        layer,
        dtype: folder.dtype,
        token_payload: args.token_payload.into(),
        split: uneven(x.dim(0)?, ranks),
        x: rounded(x)?,
        dy: rounded(dy)?,
        timeout: Duration::from_secs(args.timeout),
    })
}

fn print_header(folder: &Folder, config: &MoeConfig, job: &Job) {
    let r = &config.router;
    let shared = config.shared.map_or(String::new(), |s| {
        format!(", shared expert {}{}", s.intermediate, if s.gated { " (gated)" } else { "" })
    });
    let dir = printable(&job.dir.display().to_string());
    say(format_args!("{dir} ({}), layer {}, {}", folder.model_type, job.layer, folder.dtype));
    say(format_args!(
        "hidden {}, {} experts of {}, top {}{shared}",
        config.hidden, r.num_experts, config.intermediate, r.top_k
    ));
    say(format_args!("routing {:?}, activation {:?}", r.score, config.activation));
    let form = if job.token_payload == Payload::Plain { String::new() } else { format!(" in {:?}", job.token_payload) };
    say(format_args!("{} ranks, tokens {:?}{form}\n", job.split.len(), job.split));
}

/// Output, gradient of the input and of the router's weight.
const ALWAYS_SHOWN: usize = 3;

/// Scores closer than this decide nothing: f32 logits differ from f64 ones by some 1e-7.
const NEAR_TIE: f64 = 1e-5;

/// The dense reference's results.
struct Reference {
    output: DenseOutput,
    dx: Tensor,
    grads: Params,
    near_ties: usize,
}

impl Reference {
    fn run(job: &Job, found: &Outcome) -> Result<Self, AnyError> {
        let (config, params) = whole_block(job, true)?;
        let dense = Dense { config: &config, params: &params };
        let x = Var::from_tensor(&job.x)?;
        let (ids, near_ties) = agree_on_ties(&config, &params, &x, &found.ids)?;
        let output = dense.forward_reading((&x, &read(job, &x)?), Some(&ids))?;
        let grads = (&output.y * &job.dy)?.sum_all()?.backward()?;
        let gradient = |t: &Tensor| grads.get(t).cloned().map_or_else(|| t.zeros_like(), Ok);
        Ok(Self {
            dx: gradient(&x)?,
            grads: params.iter().map(|(n, t)| Ok((n.clone(), gradient(t)?))).collect::<candle_core::Result<_>>()?,
            output,
            near_ties,
        })
    }
}

/// Tokens as the experts read them, after dispatch. Gradients pass straight through.
fn read(job: &Job, x: &Tensor) -> Result<Tensor, AnyError> {
    if job.token_payload == Payload::Plain {
        return Ok(x.clone());
    }
    let values = x.flatten_all()?.to_vec1::<f64>()?;
    let back = through((job.token_payload, TOKENS), (job.dtype, &values), x.dims2()?.into())?;
    Ok((x + (Tensor::from_vec(back, x.shape(), x.device())? - x)?.detach())?)
}

/// The reference's own choice of experts, but the layer's where the two differ by a near tie; and how many those are.
fn agree_on_ties(
    config: &MoeConfig,
    params: &Params,
    x: &Tensor,
    found: &[Vec<usize>],
) -> Result<(Vec<Vec<usize>>, usize), AnyError> {
    let bias = params.get("router.selection_bias").map(|b| b.to_vec1::<f64>()).transpose()?;
    let mut logits = x.matmul(&params["router.weight"].t()?)?;
    if let Some(b) = params.get("router.bias") {
        logits = logits.broadcast_add(b)?;
    }
    let (mut ids, mut ties) = (Vec::new(), 0);
    for (row, found) in logits.detach().to_vec2::<f64>()?.iter().zip(found) {
        let own = choose(&config.router, row, bias.as_deref());
        let scores = choice_scores(&config.router, row, bias.as_deref());
        let only = |a: &[usize], b: &[usize]| -> Vec<f64> {
            a.iter().filter(|e| !b.contains(e)).map(|&e| scores[e]).collect()
        };
        let least = only(&own, found).into_iter().fold(f64::INFINITY, f64::min);
        let most = only(found, &own).into_iter().fold(f64::NEG_INFINITY, f64::max);
        let tie = least.is_finite() && least - most <= NEAR_TIE;
        ties += usize::from(tie);
        ids.push(if tie { found.clone() } else { own });
    }
    Ok((ids, ties))
}

/// Every result against its references.
fn rows(
    folder: &Folder,
    config: &MoeConfig,
    golden: Option<&Params>,
    found: &Outcome,
    reference: &Reference,
) -> Result<Vec<Row>, AnyError> {
    let (forward, backward) = (folder.forward_tolerance(), folder.backward_tolerance());
    let of_golden = |name: &str, found: &Tensor| -> Result<Option<Difference>, AnyError> {
        Ok(match golden.and_then(|g| g.get(name)) {
            Some(g) => Some(difference(found, &g.reshape(found.dims())?)?),
            None => None,
        })
    };
    let mut rows = Vec::new();
    let mut push = |name: &str, dense: Difference, golden: Option<Difference>, tolerance: f64| {
        rows.push(Row { name: name.to_string(), dense: Some(dense), golden, tolerance });
    };
    let y = &found.y;
    push("output", difference(y, &reference.output.y)?, of_golden("moe_output", y)?, forward);
    push("d input", difference(&found.dx, &reference.dx)?, of_golden("grad_moe_input", &found.dx)?, backward);

    let mut on_disk: Vec<&String> = golden.iter().flat_map(|g| g.keys()).filter(|n| n.starts_with("grad.")).collect();
    on_disk.sort_by_key(|n| (!names::is_router(n), natural(n)));
    for name in on_disk.iter().map(|n| &n["grad.".len()..]) {
        let part = |block: &Params| -> Result<Tensor, AnyError> {
            names::on_disk(name, &folder.model_type, block)?
                .ok_or_else(|| format!("golden.safetensors: {name} is no tensor of the block").into())
        };
        let own = part(&found.grads)?;
        let golden = of_golden(&format!("grad.{name}"), &own)?;
        push(&label(name), difference(&own, &part(&reference.grads)?)?, golden, backward);
    }
    if on_disk.is_empty() {
        for name in names::pieces(config) {
            let (own, dense) = (names::piece(&name, &found.grads)?, names::piece(&name, &reference.grads)?);
            push(&format!("d {name}"), difference(&own, &dense)?, None, backward);
        }
    }
    Ok(rows)
}

/// The name on disk without its layer; a router's weight is called that too, families name it differently.
fn label(name: &str) -> String {
    let short = name.split('.').skip_while(|p| p.parse::<usize>().is_err()).skip(1).collect::<Vec<_>>().join(".");
    let short = if short.is_empty() { name } else { &short };
    if names::is_router(name) { format!("d router ({short})") } else { format!("d {short}") }
}

#[cfg(all(test, feature = "candle"))]
mod tests {
    use super::*;

    /// Results over tolerance, where the layer has one payload and the reference another.
    fn failed(golden: &str, layer: Form, reference: Form) -> usize {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/").to_string() + golden;
        let args = Args::parse_from(["dense_reference", "--checkpoint", &dir]);
        let folder = Folder::open(&args.checkpoint).unwrap();
        let checkpoint = Checkpoint::open(&args.checkpoint).unwrap();
        let number = checkpoint.moe_layers()[0];
        let config = checkpoint.block_config(number).unwrap();
        let job = job(&args, (&folder, 4), number, config.hidden, folder.golden.as_ref()).unwrap();
        let devices = args.device.open(4).unwrap();
        let found = run(&args, &Job { token_payload: layer.into(), ..job.clone() }, &devices).unwrap();
        let reference = Reference::run(&Job { token_payload: reference.into(), ..job }, &found).unwrap();
        let rows = rows(&folder, &config, None, &found, &reference).unwrap();
        assert!(rows.len() > 4);
        rows.iter().filter(|row| !row.ok()).count()
    }

    /// The layer's results are the reference's with the tokens' own form, within the tolerances that whole tokens have;
    /// a reference that reads another finds them wrong.
    #[test]
    fn tokens_that_are_sent_quantized() {
        for golden in ["qwen3_moe", "gpt_oss", "llama4"] {
            for form in [Form::Nvfp4, Form::Mxfp8, Form::Fp8Block] {
                assert_eq!(failed(golden, form, form), 0, "{golden}, {form:?}");
                assert!(failed(golden, form, Form::Plain) > 0, "{golden}, {form:?}");
            }
        }
    }
}
