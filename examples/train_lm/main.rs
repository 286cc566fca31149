//! Trains a small byte-level Mixture-of-Experts language model over the ranks of one process, beside a twin that
//! computes every expert on every token on one rank, and sets their gradients against each other.
//!
//! Attention, embeddings and router are replicated and see the rank's own sequences; their gradients are summed over
//! the ranks. Experts live on one rank each, and their gradients are whole where they are; or, with `--etp`, each
//! expert weight is cut over ranks that gather it for each use, and its gradient is summed over all that hold it.

#[cfg(feature = "burn")]
mod burn;
mod candle;
mod corpus;
mod dense;
#[path = "../support/device.rs"]
mod device;
mod lm;
mod mesh;
mod options;
#[path = "../support/output.rs"]
mod output;
mod plot;
mod process;
#[path = "../support/processes.rs"]
mod processes;
#[path = "../support/quantized_payload.rs"]
mod quantized_payload;
#[path = "../support/rank_results.rs"]
mod rank_results;
mod ranks;
mod save;
mod sharded;
mod state;
#[cfg(test)]
mod tests;
mod twin;
mod world;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use candle_core::DType;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

use corpus::Corpus;
use device::Place;
use lm::{Scale, Settings, Step, Tolerances, fingerprint, shares};
use mesh::Mesh;
use moebius::checkpoint::printable;
use moebius::ep::DispatcherKind;
use moebius::etp::Payload;
use output::{Usage, say};

/// Least share of the choices that any expert may get at the end.
const LEAST_SHARE: f64 = 0.01;
/// Steps at the end over which loss and shares are taken.
const TAIL: usize = 20;
/// Bound that the loss is below after so many steps, with every other option at its default.
const MAX_LOSS: f64 = 2.4;
const MAX_LOSS_STEPS: usize = 500;
/// Files written to `--out`.
const PLOTS: [&str; 2] = ["loss.png", "expert-load.png"];
/// More would take gigabytes.
const MOST_EXPERTS: usize = 1024;

/// Trains a small byte-level Mixture-of-Experts language model over ranks in one process.
///
/// Fails where a gradient differs from the dense reference model's by more than 1e-5 (burn on CUDA, whose products round
/// to TF32: 5e-3), the loss does not fall below
/// --max-loss, or an expert ends with less than 1 % of the load.
///
/// Exit code: 0 where all of that holds, 1 where something does not or the run failed, 2 for a wrong command line.
#[derive(Debug, Clone, Parser)]
#[command(allow_negative_numbers = true)]
struct Args {
    /// Host framework.
    #[arg(long, value_enum, default_value = "candle")]
    framework: Framework,
    /// Ranks, one thread each; without --etp a divisor of --experts [default: 2, or 4 with --etp; on GPUs 1, or as many
    /// as --etp and --ep need].
    #[arg(long)]
    ranks: Option<usize>,
    /// Ranks that share the shards of each expert weight; ranks with the same shard are replicas. Losses and weights
    /// are the same to the bit for each of 1, 2, 4 with one microbatch a step.
    #[arg(long)]
    etp: Option<usize>,
    /// Ranks among which the experts are divided [default: 1 with --etp, else --ranks].
    #[arg(long, requires = "etp")]
    ep: Option<usize>,
    /// In what form shards travel; weights that the layers see are then what it stands for, in the dense reference model
    /// too.
    #[arg(long, value_enum, default_value = "plain", requires = "etp")]
    shard_payload: Form,
    /// The GPUs' copy engines carry shards and their gradients, over NCCL 2.29 or later: with --device cuda, and --etp
    /// above 1.
    #[arg(long, requires = "etp")]
    copy_engines: bool,
    /// In what form tokens travel to their experts, which read what it stands for, in the dense reference model too.
    #[arg(long, value_enum, default_value = "plain")]
    token_payload: Form,
    /// Forwards and backwards a step; a rank's sequences are divided among them.
    #[arg(long, default_value_t = 1)]
    microbatches: usize,
    /// Largest norm of the gradients of all parameters of all ranks [default: no clipping].
    #[arg(long)]
    clip: Option<f64>,
    /// Be one rank of several that a launcher has started as processes, one GPU each (docs/ranks.md); rank 0 speaks.
    #[arg(long)]
    processes: bool,
    /// Where the ranks train; the dense reference model stays on the CPU.
    #[arg(long, value_enum, default_value = "cpu")]
    device: Place,
    /// Training steps.
    #[arg(long, default_value_t = MAX_LOSS_STEPS)]
    steps: usize,
    /// Folder of a run's state (--save) to go on from, with other numbers of ranks if need be, and from the other
    /// framework's.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Folder to leave the run's state in, when it ends.
    #[arg(long)]
    save: Option<PathBuf>,
    /// How tokens travel between ranks: all_to_all, all_gather, nccl_ep, or auto, what the crate's table says or
    /// MOEBIUS_EP [default: that of the state that the run goes on from, where this or --measure-dispatcher was given to
    /// it; else auto].
    #[arg(long, conflicts_with = "measure_dispatcher")]
    dispatcher: Option<DispatcherKind>,
    /// Time each dispatcher in steps of the layers' sizes before the first, and take the quickest; --save stores it. A
    /// run that goes on from there keeps it and times nothing. Not with --etp, where each group of ranks that share the
    /// experts would choose for itself.
    #[arg(long, conflicts_with = "etp")]
    measure_dispatcher: bool,
    /// End after so many of the --steps, those of the resumed run counted: learning rates are those of --steps.
    #[arg(long)]
    until: Option<usize>,
    /// Type of router and experts, whose optimizer has main weights in f32; f16 has its loss scaled. Not compared with
    /// the dense reference model but in f32.
    #[arg(long, value_enum, default_value = "f32")]
    layer_dtype: LayerType,
    /// File for the losses, one line a step, to the last bit.
    #[arg(long)]
    losses: Option<PathBuf>,
    /// Text to train on [default: this crate's own sources].
    #[arg(long)]
    text: Option<PathBuf>,
    /// Folder for loss.png and expert-load.png.
    #[arg(long, default_value = "target/train_lm")]
    out: PathBuf,
    /// Seed of the first weights and of the batches.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The mean loss of the last 20 steps must be below this (nats per byte; a uniform guess has 5.55) [default: 2.4
    /// from 500 steps on; a shorter run's loss is not checked].
    #[arg(long)]
    max_loss: Option<f64>,
    /// Steps from one comparison with the dense reference model to the next.
    #[arg(long, default_value_t = 1)]
    check_every: usize,
    /// Experts of each layer, over all ranks.
    #[arg(long, default_value_t = 8)]
    experts: usize,
    /// Sequences of a step, over all ranks.
    #[arg(long, default_value_t = 8)]
    batch: usize,
}

type Failure = Box<dyn Error + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Framework {
    /// candle
    Candle,
    /// burn (a build with --features burn; on a GPU burn-cuda); the dense reference model stays in candle
    Burn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// as they are
    Plain,
    /// quantized, 0.5625 bytes an element
    Nvfp4,
    /// quantized, 1.03125 bytes an element
    Mxfp8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayerType {
    F32,
    Bf16,
    F16,
}

impl LayerType {
    fn dtype(self) -> DType {
        match self {
            LayerType::F32 => DType::F32,
            LayerType::Bf16 => DType::BF16,
            LayerType::F16 => DType::F16,
        }
    }
}

impl Form {
    fn payload(self) -> Payload {
        match self {
            Form::Plain => Payload::Plain,
            Form::Nvfp4 => Payload::Nvfp4,
            Form::Mxfp8 => Payload::Mxfp8,
        }
    }
}

impl Args {
    /// Bound that the loss must be below at the end, where that can be asked of a run of this length.
    fn loss_bound(&self) -> Option<f64> {
        let ends = self.until.is_none_or(|until| until >= self.steps);
        self.max_loss.or((self.steps >= MAX_LOSS_STEPS && ends).then_some(MAX_LOSS))
    }

    fn mesh(&self) -> Result<Mesh, Usage> {
        let default = match (self.device, self.etp) {
            (Place::Cpu, None) => 2,
            (Place::Cpu, Some(_)) => 4,
            (_, Some(etp)) => etp.max(1).saturating_mul(self.ep.unwrap_or(1)),
            _ => 1,
        };
        let ranks = self.ranks.unwrap_or(default);
        let ep = self.ep.unwrap_or(if self.etp.is_some() { 1 } else { ranks });
        for (name, value) in [("--ranks", ranks), ("--ep", ep), ("--etp", self.etp.unwrap_or(1))] {
            if value == 0 {
                return Err(format!("{name}: expected at least 1, found 0").into());
            }
        }
        let given = match self.ranks {
            Some(_) if self.processes => format!("the {ranks} ranks that the launcher has started"),
            Some(_) => format!("--ranks {ranks}"),
            None => format!("the {ranks} ranks that are the default (give --ranks)"),
        };
        if !self.experts.is_multiple_of(ep) {
            // Without --etp all ranks share the experts.
            let parts = if self.ep.is_some() { format!("--ep {ep}") } else { given };
            return Err(format!("--experts {}: expected a multiple of {parts}", self.experts).into());
        }
        let etp = self.etp.unwrap_or(1);
        if !ep.checked_mul(etp).is_some_and(|each| ranks.is_multiple_of(each)) {
            let each = if self.ep.is_some() { format!("--ep {ep} times --etp {etp}") } else { format!("--etp {etp}") };
            return Err(format!("{each} does not divide {given}").into());
        }
        Ok(Mesh { ranks, ep, etp: self.etp, engines: self.copy_engines })
    }

    fn settings(&self) -> Result<Settings, Usage> {
        let mesh = self.mesh()?;
        if self.microbatches == 0 {
            return Err("--microbatches: expected at least 1, found 0".into());
        }
        if self.batch / mesh.ranks < self.microbatches {
            let least = mesh.ranks.saturating_mul(self.microbatches);
            let each = format!("one for each of {} ranks and {} microbatches", mesh.ranks, self.microbatches);
            return Err(format!("--batch {}: expected at least {least} sequences, {each}", self.batch).into());
        }
        if self.until.is_some_and(|until| !(1..=self.steps).contains(&until)) {
            return Err(format!("--until: expected a step in 1..={}", self.steps).into());
        }
        if self.framework == Framework::Burn {
            let (on_gpu, ranks) = (self.device == Place::Cuda, mesh.ranks);
            match (cfg!(feature = "burn"), cfg!(feature = "burn-cuda")) {
                (false, _) => return Err("--framework burn: build with --features burn".into()),
                (_, false) if on_gpu => {
                    return Err("--framework burn --device cuda: build with --features burn-cuda".into());
                }
                _ if on_gpu && ranks != 1 && !cfg!(feature = "nccl") => {
                    let text = "--framework burn --device cuda: several GPUs want a build with --features nccl";
                    return Err(format!("{text}, or give --ranks 1 instead of {ranks}").into());
                }
                _ => {}
            }
        }
        if self.etp.is_some() && self.device != Place::Cpu && !cfg!(feature = "nccl") {
            return Err("--etp: give --device cpu, or build with --features nccl".into());
        }
        if self.copy_engines && (self.device == Place::Cpu || !cfg!(feature = "nccl")) {
            return Err("--copy-engines: give --device cuda, in a build with --features nccl".into());
        }
        if self.copy_engines && mesh.shards() < 2 {
            return Err("--copy-engines: a rank alone gathers nothing; give --etp 2 or more".into());
        }
        if self.clip.is_some_and(|norm| norm.is_nan() || norm <= 0.0) {
            return Err("--clip must be above 0".into());
        }
        if !(2..=MOST_EXPERTS).contains(&self.experts) || self.check_every == 0 || self.steps == 0 {
            let experts = format!("--experts must be in 2..={MOST_EXPERTS}");
            return Err(format!("{experts}, --check-every and --steps at least 1").into());
        }
        Ok(Settings {
            mesh,
            shard_payload: self.shard_payload.payload(),
            token_payload: self.token_payload.payload(),
            microbatches: self.microbatches,
            clip: self.clip,
            steps: self.steps,
            range: 0..self.until.unwrap_or(self.steps),
            resume: self.resume.clone(),
            save: self.save.clone(),
            dispatcher: self.dispatcher,
            measure_dispatcher: self.measure_dispatcher,
            layer_dtype: self.layer_dtype.dtype(),
            seed: self.seed,
            text: 0,
            batch: self.batch,
            context: 64,
            hidden: 64,
            heads: 4,
            layers: 2,
            experts: self.experts,
            top_k: 2,
            intermediate: 64,
            balance: 0.01,
            learning_rate: 4e-3,
            // burn's own products in f32 are tensor cores' on CUDA.
            tolerances: match (self.framework, self.device) {
                (Framework::Burn, Place::Cuda) => Tolerances::TF32,
                _ => Tolerances::F32,
            },
        })
    }
}

/// Lets each of candle's matrix products run on the thread that asks for it. They are small here, and the ranks
/// already fill the cores: threads that help would spin for each other most of the time. This crate's kernels share
/// rayon's pool as ever.
fn limit_threads() {
    if std::env::var_os("RAYON_NUM_THREADS").is_some() {
        return;
    }
    // SAFETY: this is the process's only thread so far.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", "1") };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // It fails where there is a pool already, which is as good.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(cores).build_global();
}

fn main() -> ExitCode {
    limit_threads();
    output::conclude(run(&Args::parse()))
}

fn run(args: &Args) -> Result<bool, Failure> {
    if args.processes {
        return run_process(args);
    }
    let settings = args.settings()?;
    let corpus = Corpus::load(args.text.as_deref())?;
    let settings = resumed(Settings { text: corpus.fingerprint(), ..settings })?;
    check_out(&args.out)?;
    let devices = match args.framework {
        Framework::Candle => args.device.open(settings.mesh.ranks)?,
        Framework::Burn => Vec::new(),
    };
    print_header(&settings, &corpus);
    let mut progress = Progress::start(&settings)?;
    let on_step = |step| {
        progress.push(step);
        Ok(())
    };
    match args.framework {
        Framework::Candle => {
            let places = mesh::places(settings.mesh, &devices, ranks::TIMEOUT)?;
            let make = |params: &[_], place, rank| candle::Rank::new(&settings, params, (place, rank));
            ranks::train(&settings, (places, args.check_every), &corpus, make, on_step)?;
        }
        #[cfg(feature = "burn")]
        Framework::Burn => burn::train(&settings, (args.device, args.check_every), &corpus, on_step)?,
        #[cfg(not(feature = "burn"))]
        Framework::Burn => return Err("this build has no burn".into()),
    }
    conclude(args, &settings, progress)
}

/// The same as one rank of several processes.
fn run_process(args: &Args) -> Result<bool, Failure> {
    if args.device != Place::Cuda {
        return Err(Usage::from("--processes: give --device cuda").into());
    }
    match args.framework {
        Framework::Candle => {
            let mut process = processes::Process::join(ranks::TIMEOUT)?;
            let of = (process.rank, process.world);
            run_rank(args, of, |settings, params| {
                options::compare(settings, (args.framework, args.check_every), |tag, own| process.gather(tag, own))?;
                let place = mesh::of_process(settings.mesh, process.rank, process.endpoint)?;
                candle::Rank::new(settings, params, (place, process.rank))
            })
        }
        #[cfg(all(feature = "burn-cuda", feature = "nccl"))]
        Framework::Burn => {
            let mut process = burn::communicators::Process::join()?;
            let of = (process.rank(), process.world());
            run_rank(args, of, |settings, params| {
                options::compare(settings, (args.framework, args.check_every), |tag, own| process.gather(tag, own))?;
                let (device, comms) = process.comms(settings.mesh)?;
                burn::Rank::<burn::communicators::Gpu>::new(settings, params, (comms, &device), of.0)
            })
        }
        #[cfg(not(all(feature = "burn-cuda", feature = "nccl")))]
        Framework::Burn => {
            Err(Usage::from("--framework burn --processes: build with --features burn-cuda,nccl").into())
        }
    }
}

/// Trains as rank `rank` of `world` processes.
fn run_rank<W: ranks::Peer>(
    args: &Args,
    (rank, world): (usize, usize),
    make: impl FnOnce(&Settings, &[lm::Param]) -> Result<W, Failure>,
) -> Result<bool, Failure> {
    if let Some(ranks) = args.ranks.filter(|ranks| *ranks != world) {
        return Err(format!("--ranks {ranks}: the launcher has started {world}").into());
    }
    let settings = Args { ranks: Some(world), ..args.clone() }.settings()?;
    let corpus = Corpus::load(args.text.as_deref())?;
    let settings = resumed(Settings { text: corpus.fingerprint(), ..settings })?;
    let params = state::params(&settings)?;
    let speaks = rank == 0;
    if speaks {
        check_out(&args.out)?;
        print_header(&settings, &corpus);
    }
    let mut progress = Progress::start(&settings)?;
    let on_step = |step| {
        progress.push(step);
        Ok(())
    };
    let worker = make(&settings, &params)?;
    process::train(&settings, (worker, rank), (&corpus, args.check_every), &params, on_step)?;
    if speaks { conclude(args, &settings, progress) } else { Ok(true) }
}

/// The settings of a run that goes on where a saved one ended.
fn resumed(settings: Settings) -> Result<Settings, Failure> {
    let Some(dir) = &settings.resume else { return Ok(settings) };
    let saved = state::saved(dir, &settings)?;
    let (first, end) = (saved.steps, settings.range.end);
    if first >= end {
        let text = format!("--resume {}: {first} steps are made; give --until or --steps above that", dir.display());
        return Err(Usage::from(text).into());
    }
    let dispatcher = settings.dispatcher.or(saved.dispatcher);
    let measure_dispatcher = settings.measure_dispatcher && dispatcher.is_none();
    Ok(Settings { range: first..end, dispatcher, measure_dispatcher, ..settings })
}

/// Whether the plots can be written, before there is anything to plot.
fn check_out(out: &Path) -> Result<(), Failure> {
    let refused = |path: &Path, e: std::io::Error| Failure::from(format!("--out: {}: {e}", path.display()));
    std::fs::create_dir_all(out).map_err(|e| refused(out, e))?;
    for plot in PLOTS.map(|name| out.join(name)) {
        match std::fs::OpenOptions::new().write(true).open(&plot) {
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                tempfile::tempfile_in(out).map(drop).map_err(|e| refused(out, e))?;
            }
            Err(e) => return Err(refused(&plot, e)),
        }
    }
    Ok(())
}

fn print_header(settings: &Settings, corpus: &Corpus) {
    let mesh = settings.mesh;
    say(format_args!(
        "{} bytes of text; {} layers, hidden {}, {} experts top-{}, {} ranks, {} sequences of {} bytes a step",
        corpus.len(),
        settings.layers,
        settings.hidden,
        settings.experts,
        settings.top_k,
        mesh.ranks,
        settings.batch,
        settings.context
    ));
    if mesh.etp.is_some() {
        let engines = if mesh.engines { ", shards and their gradients by copy engines" } else { "" };
        say(format_args!("EP {} x ETP {} x {} replicas{engines}", mesh.ep, mesh.shards(), mesh.replicas()));
    }
    if settings.token_payload != Payload::Plain {
        say(format_args!("tokens travel in {:?}", settings.token_payload));
    }
}

/// The steps so far, and a bar of them.
struct Progress {
    bar: ProgressBar,
    started: Instant,
    steps: Vec<Step>,
}

impl Progress {
    fn start(settings: &Settings) -> Result<Self, Failure> {
        let bar = ProgressBar::new(settings.range.len() as u64)
            .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {msg}")?);
        Ok(Self { bar, started: Instant::now(), steps: Vec::new() })
    }

    fn push(&mut self, step: Step) {
        let error = step.twin.as_ref().map_or(String::new(), |t| format!(", gradients within {:.1e}", t.error));
        self.bar.set_message(format!("loss {:.3}{error}", step.loss));
        self.bar.inc(1);
        self.steps.push(step);
    }
}

/// Plots and judges what was trained.
fn conclude(args: &Args, settings: &Settings, progress: Progress) -> Result<bool, Failure> {
    let Progress { bar, started, steps } = progress;
    bar.finish_and_clear();
    say(format_args!("{} steps in {:.1} s", steps.len(), started.elapsed().as_secs_f64()));
    if let Some(path) = &args.losses {
        let lines: String = steps.iter().map(|step| format!("{} {:?}\n", step.step, step.loss)).collect();
        std::fs::write(path, lines).map_err(|e| format!("--losses: {}: {e}", path.display()))?;
    }
    let [loss, load] = PLOTS.map(|name| args.out.join(name));
    plot::loss(&loss, &steps, args.loss_bound())?;
    plot::expert_load(&load, &steps, LEAST_SHARE)?;
    let out = printable(&args.out.display().to_string());
    say(format_args!("plots: {out}/loss.png, {out}/expert-load.png"));
    if let Some(last) = steps.last().filter(|last| !last.costs.is_empty()) {
        sharded::print(&last.costs);
    }
    Ok(verdict(args, settings, &steps))
}

/// Prints each demand with what was found; true if all are met.
fn verdict(args: &Args, settings: &Settings, steps: &[Step]) -> bool {
    let tail = &steps[steps.len().saturating_sub(TAIL)..];
    let mut good = true;
    let mut line = |met: bool, text: String| {
        good &= met;
        say(format_args!("{} {text}", if met { "ok    " } else { "FAILED" }));
    };
    let checks = || steps.iter().filter_map(|s| Some((s.step, s.twin.as_ref()?)));
    let worst = checks().max_by(|a, b| a.1.error.total_cmp(&b.1.error));
    if let Some((step, worst)) = worst {
        let text = format!(
            "gradients equal the dense reference model's within {:e} in {} comparisons: worst {:.2e} ({}, step \
             {step})",
            settings.tolerances.gradient,
            checks().count(),
            worst.error,
            worst.worst
        );
        line(worst.error <= settings.tolerances.gradient, text);
    }
    let losses = fingerprint(steps.iter().map(|s| s.loss.to_bits()));
    let weights =
        checks().next_back().map(|(step, twin)| format!(", of the weights before step {step} {:016x}", twin.weights));
    say(format_args!("       fingerprint of the losses {losses:016x}{}", weights.unwrap_or_default()));
    if let Some(most) = settings.clip {
        let norms = || steps.iter().filter_map(|s| s.norm);
        let clipped = norms().filter(|norm| *norm > most).count();
        say(format_args!("       gradients clipped to a norm of {most} in {clipped} steps of {}", norms().count()));
    }
    let loss = tail.iter().map(|s| s.loss).sum::<f64>() / tail.len().max(1) as f64;
    let first = steps.first().map_or(f64::NAN, |s| s.loss);
    if let Some(scale) = steps.last().and_then(|s| s.scale) {
        let Scale { factor, skipped } = scale;
        say(format_args!("       the loss is scaled by {factor}; {skipped} steps were skipped"));
    }
    let text = format!("loss went from {first:.3} to {loss:.3}");
    match args.loss_bound() {
        Some(bound) => line(loss < bound, format!("{text}; bound {bound}")),
        None => say(format_args!(
            "       {text}: not checked, as the bound of {MAX_LOSS} is one for {MAX_LOSS_STEPS} steps (--max-loss gives another)"
        )),
    }
    for layer in 0..settings.layers {
        let shares = shares(tail, layer);
        let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
        let listed: Vec<String> = shares.iter().map(|s| format!("{:.1}", s * 100.0)).collect();
        line(least >= LEAST_SHARE, format!("layer {layer}: load of the experts in %: {}", listed.join(" ")));
    }
    good
}
