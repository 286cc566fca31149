//! Trains a small byte-level Mixture-of-Experts language model over the ranks of one process, beside a twin that
//! computes every expert on every token on one rank, and sets their gradients against each other.
//!
//! Attention, embeddings and router are replicated and see the rank's own sequences; their gradients are summed over
//! the ranks. Experts live on one rank each, and their gradients are whole where they are; or, with `--etp`, each
//! expert weight is cut over ranks that gather it for each use, and its gradient is summed over all that hold it.

mod args;
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
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use args::{Args, Framework, MAX_LOSS, MAX_LOSS_STEPS};
use corpus::Corpus;
use device::Place;
use lm::{Scale, Settings, Step, fingerprint, shares};
use moebius::checkpoint::printable;
use moebius::etp::Payload;
use output::{Usage, say};

/// Least share of the choices that any expert may get at the end.
const LEAST_SHARE: f64 = 0.01;
/// Steps at the end over which loss and shares are taken.
const TAIL: usize = 20;
/// Files written to `--out`.
const PLOTS: [&str; 2] = ["loss.png", "expert-load.png"];
type Failure = Box<dyn Error + Send + Sync>;

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
