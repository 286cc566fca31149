//! Decoding and prefill of a whole model with random weights, which are made on the device layer by layer. One JSON line
//! a measurement: medians of several, warm. A CPU does the `tiny` shape.
//!
//! ```text
//! cargo bench -p moebius-models --features cuda --bench decode -- [--shape qwen3-30b-a3b] [--phase decode-1 …] [--layers 4]
//! moebius-run -n 2 cargo bench -p moebius-models --features nccl --bench decode
//! ```
//!
//! | phase | what is timed |
//! |---|---|
//! | `decode-1` | a step of one sequence with `--past` tokens in a static cache, from its id to the likeliest next one; on a GPU replayed from a graph |
//! | `decode-64` | the same of 64 sequences |
//! | `eager-1`, `eager-64` | the same with a cache that grows, one operation after another; not done unless asked for |
//! | `prefill` | hidden states of `--prefill` tokens, and the logits of the last |
//! | `candle-1`, `candle-64`, `candle-prefill` | `eager-1`, `eager-64` and `prefill` with candle-transformers' decoder of the same shape and number of layers, in the place of ours, which has left the GPU; not done unless asked for. With `--features fused` its fused kernels, else its loop over the experts. A prefill that it has no memory for, as its attention has all scores at once, is a row that says so |
//!
//! Several ranks share the experts: processes that a launcher has started, a GPU each, or `--ranks` threads (on GPUs
//! with `--features nccl`; on one machine's cores with `--cpu`). Sequences are dealt to the ranks in turn, a rank without
//! any steps with the others, and a prefill is one of so many tokens on each rank. Each rank prints its own rows, with
//! its number, its own memory and its own number of sequences; tokens a second are all ranks' together. Steps of several
//! ranks are replayed from a graph where tokens travel over NVLink, as they do between two GPUs, or by all-gather.
//!
//! With `--experts-on-host` experts stay in page-locked memory of the host and come a layer ahead (no graph then). A line
//! behind loading has the link's speed, measured by plain copies of a layer's experts from such memory; a phase's
//! `link_tokens_per_s` is what that allows where all layers' experts come once a forward.
//!
//! Every line names the card and the commit: `--commit`, or what git says of the sources. Dispatchers are chosen by
//! `MOEBIUS_EP`; a line's `dispatcher` is what served.
//!
//! `weights_gib`: bytes by which loading has the GPU's free memory fall. `peak_gib`: the same of loading and the phase's
//! work, asked for while the work is queued, as the driver's pool gives memory back when the host waits. Of
//! candle-transformers' loop over experts, which waits in every layer, it is what is there at a call's end.

#[path = "support/host_link.rs"]
mod host_link;
#[path = "support/decode_options.rs"]
mod options;
#[path = "../examples/support/output.rs"]
mod output;
#[path = "support/places.rs"]
mod places;
#[path = "../examples/support/ranks.rs"]
mod ranks;
#[path = "support/checkpoint.rs"]
#[allow(dead_code, reason = "weights are made elsewhere")]
mod shape;
#[path = "support/theirs.rs"]
mod theirs;

use std::error::Error;
use std::process::Command;
use std::thread;
use std::time::Instant;

use candle_core::{D, DType, Device, Tensor};
use clap::Parser;
use moebius::checkpoint::Checkpoint;
use moebius::ep::GroupConfig;
use moebius_models::{ExpertWeights, LoadOptions, Model};
use options::{Experts, Options, Phase, Shape};
use output::say;
use places::{Endpoint, Place, place_of, places};
use shape::{QWEN3, Sizes};
use theirs::Theirs;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TINY: Sizes = Sizes {
    layers: 2,
    hidden: 64,
    inner: 32,
    experts: 8,
    top_k: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocabulary: 512,
    positions: 4096,
};

/// A measurement and its place.
struct Bench {
    options: Options,
    shape: &'static str,
    sizes: Sizes,
    device: Device,
    dtype: DType,
    rank: usize,
    ranks: usize,
    /// Free memory before anything was loaded, and after.
    free: [usize; 2],
    /// What lines begin with: the card, the commit.
    run: String,
    /// Of the experts' group, once it is there.
    dispatcher: &'static str,
    /// Milliseconds in which the host link brings all experts, where they are on the host.
    link_ms: Option<f64>,
}

impl Bench {
    fn new(options: Options, place: &Place) -> Result<Self> {
        let (device, rank, ranks) = (place.device.clone(), place.rank, place.ranks);
        let tiny = options.shape.map_or(device.is_cpu(), |shape| shape == Shape::Tiny);
        let (shape, mut sizes) = if tiny { ("tiny", TINY) } else { ("qwen3-30b-a3b", QWEN3) };
        sizes.layers = options.layers.unwrap_or(sizes.layers);
        let dtype = if tiny && device.is_cpu() { DType::F32 } else { DType::BF16 };
        let free = [free_memory(&device)?; 2];
        let run = format!("\"card\":\"{}\",\"commit\":\"{}\"", card(&device)?, commit(&options));
        let dispatcher = "none";
        Ok(Self { options, shape, sizes, device, dtype, rank, ranks, free, run, dispatcher, link_ms: None })
    }

    /// The model, its decoder and its place, as rows begin.
    fn row(&self, decoder: &str) -> String {
        let Self { run, shape, rank, ranks, dispatcher, .. } = self;
        format!(
            "{run},\"model\":\"{shape}\",\"decoder\":\"{decoder}\",\"experts\":\"{}\",\"layers\":{},\"ranks\":{ranks},\
             \"rank\":{rank},\"dispatcher\":\"{dispatcher}\"",
            self.experts(),
            self.sizes.layers,
        )
    }

    /// Sequences of this rank, of so many of all.
    fn share(&self, sequences: usize) -> usize {
        sequences / self.ranks + usize::from(self.rank < sequences % self.ranks)
    }

    fn many(&self) -> usize {
        self.options.sequences.unwrap_or(64)
    }

    fn prefill_tokens(&self) -> usize {
        self.options.prefill.unwrap_or(if self.is_small() { 256 } else { 8192 })
    }

    fn load(&mut self, endpoint: Endpoint) -> Result<Model> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("config.json"), self.sizes.config(self.dtype).to_string())?;
        let start = Instant::now();
        let experts = match self.options.experts {
            Experts::Bf16 => ExpertWeights::Dequantized,
            Experts::Nvfp4 => ExpertWeights::Nvfp4,
        };
        let (random, experts_on_host) = (Some(self.options.seed), self.options.experts_on_host);
        let options = LoadOptions { random, experts, experts_on_host, ..LoadOptions::default() };
        let prompts = self.many().div_ceil(self.ranks) * self.past().div_ceil(8);
        let most = prompts.max(self.past()).max(self.prefill_tokens());
        let max_rows = self.ranks * self.many().div_ceil(self.ranks) * self.sizes.top_k;
        let config = GroupConfig { max_rows, forward_only: true, ..GroupConfig::new(self.sizes.experts, most) };
        let group = endpoint.group(config, &self.device)?;
        self.dispatcher = group.dispatcher_kind().name();
        let model = Model::load_on(&Checkpoint::open_config(dir.path())?, group, options)?;
        self.loaded("moebius", start)?;
        self.measure_link(&model)?;
        Ok(model)
    }

    fn load_theirs(&mut self) -> Result<Theirs> {
        // Ours has left; what it took is the driver's again once the device is idle.
        self.device.synchronize()?;
        self.dispatcher = "none";
        self.free = [free_memory(&self.device)?; 2];
        let start = Instant::now();
        let theirs = Theirs::new(&self.sizes, self.dtype, &self.device).map_err(|e| e.to_string())?;
        self.loaded(theirs::NAME, start)?;
        Ok(theirs)
    }

    fn loaded(&mut self, decoder: &str, start: Instant) -> Result<()> {
        self.device.synchronize()?;
        self.free[1] = free_memory(&self.device)?;
        say(format_args!(
            "{{{},\"seed\":{},\"load_s\":{:.1},\"weights_gib\":{}}}",
            self.row(decoder),
            self.options.seed,
            start.elapsed().as_secs_f64(),
            self.gib(self.free[1]),
        ));
        Ok(())
    }

    fn is_small(&self) -> bool {
        self.shape == "tiny"
    }

    /// The host link's speed for a layer's experts, where they are on the host.
    fn measure_link(&mut self, model: &Model) -> Result<()> {
        let (Some(host), Some(moe)) = (model.host_experts(), model.moe(0)) else { return Ok(()) };
        let speed = host_link::bytes_per_second(moe.group(), host.bytes() / self.sizes.layers)?;
        self.link_ms = Some(host.bytes() as f64 / speed * 1e3);
        say(format_args!(
            "{{{},\"experts_gib\":{:.2},\"link_gb_per_s\":{:.2}}}",
            self.row("moebius"),
            host.bytes() as f64 / f64::from(1 << 30),
            speed / 1e9,
        ));
        Ok(())
    }

    /// Memory taken of the GPU with so much of it free.
    fn gib(&self, free: usize) -> String {
        match self.device.is_cpu() {
            true => "null".to_string(),
            false => format!("{:.2}", self.free[0].saturating_sub(free) as f64 / f64::from(1 << 30)),
        }
    }

    fn experts(&self) -> String {
        match self.options.experts {
            Experts::Bf16 => format!("{:?}", self.dtype).to_lowercase(),
            Experts::Nvfp4 => "nvfp4".to_string(),
        }
    }

    fn asked(&self, phase: Phase) -> bool {
        let always = [Phase::One, Phase::Many, Phase::Prefill].contains(&phase);
        self.options.phase.is_empty() && always || self.options.phase.contains(&phase)
    }

    fn ids(&self, sequences: usize, tokens: usize) -> Result<Tensor> {
        let id = |i: u32| i.wrapping_mul(2_654_435_761) % self.sizes.vocabulary as u32;
        let ids: Vec<u32> = (0..(sequences * tokens) as u32).map(id).collect();
        Ok(Tensor::from_vec(ids, (sequences, tokens), &self.device)?)
    }

    fn report(&self, decoder: &str, phase: &Measured<'_>, (times, least): (Vec<f64>, usize)) {
        let mut times = times;
        times.sort_by(f64::total_cmp);
        let ms = times[times.len() / 2];
        say(format_args!(
            "{{{},\"phase\":\"{}\",\"own_sequences\":{},\"ms\":{ms:.4},\"tokens_per_s\":{:.1},\"min_ms\":{:.4},\
             \"max_ms\":{:.4},\"n\":{},\"peak_gib\":{}{}}}",
            self.row(decoder),
            phase.name,
            phase.own,
            phase.tokens as f64 / ms * 1e3,
            times[0],
            times[times.len() - 1],
            times.len(),
            self.gib(least),
            self.link_ms
                .map_or(String::new(), |ms| format!(",\"link_tokens_per_s\":{:.1}", phase.tokens as f64 / ms * 1e3)),
        ));
    }

    /// Times of calls from an idle device to an idle one, and the least memory that was free.
    fn time(
        &self,
        (warm_up, steps): (usize, usize),
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<(Vec<f64>, usize)> {
        let (mut times, mut least) = (Vec::new(), self.free[1]);
        for step in 0..warm_up + steps {
            self.device.synchronize()?;
            let start = Instant::now();
            call()?;
            if step < warm_up {
                least = least.min(free_memory(&self.device)?);
            }
            self.device.synchronize()?;
            if step >= warm_up {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok((times, least))
    }

    fn prefill(&self, model: &Model) -> Result<()> {
        let tokens = self.prefill_tokens();
        let ids = self.ids(1, tokens)?;
        let measured = self.time((2, self.options.steps.unwrap_or(5)), || {
            let hidden = model.hidden(&ids)?;
            model.logits(&hidden.narrow(1, tokens - 1, 1)?)?;
            Ok(())
        })?;
        let name = format!("prefill {tokens}{}", if self.ranks > 1 { " a rank" } else { "" });
        self.report("moebius", &Measured { name: &name, own: 1, tokens: tokens * self.ranks }, measured);
        Ok(())
    }

    fn past(&self) -> usize {
        self.options.past.unwrap_or(if self.is_small() { 32 } else { 1024 })
    }

    fn steps(&self) -> (usize, usize) {
        (5, self.options.steps.unwrap_or(50))
    }

    /// Prompts of the sequences, in pieces: of 64 of 1024 tokens, all at once would be a larger prefill than is asked for.
    fn prompts(&self, sequences: usize) -> Result<Vec<Tensor>> {
        let pieces = self.ids(sequences, self.past())?.chunk(if sequences > 1 { 8 } else { 1 }, 1)?;
        Ok(pieces.iter().map(Tensor::contiguous).collect::<candle_core::Result<_>>()?)
    }

    fn decode(&self, model: &Model, sequences: usize) -> Result<()> {
        let (past, (warm_up, steps), own) = (self.past(), self.steps(), self.share(sequences));
        let mut stepper = model.stepper(own, past + warm_up + steps)?;
        for ids in self.prompts(sequences)? {
            stepper.feed(&own_ids(&ids, own)?)?;
        }
        stepper.capture_over_ranks(sequences.div_ceil(self.ranks))?;
        let measured = self.time((warm_up, steps), || Ok(stepper.step().map(drop)?))?;
        let how = if stepper.is_captured() { "graph" } else { "static cache" };
        let name = format!("decode {sequences} x {past}, {how}");
        self.report("moebius", &Measured { name: &name, own, tokens: sequences }, measured);
        Ok(())
    }

    fn eager(&self, model: &Model, sequences: usize, how: &str) -> Result<()> {
        let (past, own) = (self.past(), self.share(sequences));
        let mut cache = model.cache();
        for ids in self.prompts(sequences)? {
            model.decode_hidden(&own_ids(&ids, own)?, &mut cache)?;
        }
        let mut next = own_ids(&self.ids(own.max(1), 1)?, own)?;
        let measured = self.time(self.steps(), || {
            let hidden = model.decode_hidden(&next, &mut cache)?;
            if own > 0 {
                next = model.logits(&hidden)?.argmax(D::Minus1)?;
            }
            Ok(())
        })?;
        let name = format!("decode {sequences} x {past}, {how}");
        self.report("moebius", &Measured { name: &name, own, tokens: sequences }, measured);
        Ok(())
    }

    fn theirs(&self, theirs: &mut Theirs, sequences: usize) -> Result<()> {
        let past = self.past();
        theirs.start(&self.ids(sequences, past)?)?;
        let measured = self.time(self.steps(), || Ok(theirs.step()?))?;
        let name = format!("decode {sequences} x {past}, eager");
        self.report(theirs::NAME, &Measured { name: &name, own: sequences, tokens: sequences }, measured);
        Ok(())
    }

    /// Prefill by candle-transformers' decoder, where there is memory for its scores.
    fn their_prefill(&self, theirs: &mut Theirs) -> Result<()> {
        let tokens = self.prefill_tokens();
        let ids = self.ids(1, tokens)?;
        let name = format!("prefill {tokens}");
        match self.time((2, self.options.steps.unwrap_or(5)), || Ok(theirs.start(&ids)?)) {
            Ok(measured) => self.report(theirs::NAME, &Measured { name: &name, own: 1, tokens }, measured),
            Err(e) if e.to_string().to_uppercase().contains("OUT_OF_MEMORY") => say(format_args!(
                "{{{},\"phase\":\"{name}\",\"fits\":false,\"weights_gib\":{}}}",
                self.row(theirs::NAME),
                self.gib(self.free[1]),
            )),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// All phases that are asked for.
    fn run(mut self, endpoint: Endpoint) -> Result<()> {
        let candle = [Phase::CandleOne, Phase::CandleMany, Phase::CandlePrefill];
        let [candle_one, candle_many, candle_prefill] = candle.map(|phase| self.asked(phase));
        let candle = candle_one || candle_many || candle_prefill;
        if candle && self.ranks > 1 {
            return Err("candle-1, candle-64, candle-prefill: candle-transformers' decoder runs on one rank".into());
        }
        let ours = [Phase::One, Phase::Many, Phase::EagerOne, Phase::EagerMany, Phase::Prefill];
        if ours.into_iter().any(|phase| self.asked(phase)) {
            let model = self.load(endpoint)?;
            for (phase, sequences) in [(Phase::One, 1), (Phase::Many, self.many())] {
                if self.asked(phase) {
                    self.decode(&model, sequences)?;
                }
            }
            for (phase, sequences) in [(Phase::EagerOne, 1), (Phase::EagerMany, self.many())] {
                if self.asked(phase) {
                    self.eager(&model, sequences, "eager")?;
                }
            }
            if self.asked(Phase::Prefill) {
                self.prefill(&model)?;
            }
        }
        if candle {
            let mut theirs = self.load_theirs()?;
            for (asked, sequences) in [(candle_one, 1), (candle_many, self.many())] {
                if asked {
                    self.theirs(&mut theirs, sequences)?;
                }
            }
            if candle_prefill {
                self.their_prefill(&mut theirs)?;
            }
        }
        Ok(())
    }
}

/// Those of a rank's sequences; none on the CPU, as a GPU has no memory of no bytes.
fn own_ids(ids: &Tensor, own: usize) -> Result<Tensor> {
    Ok(if own == 0 { Tensor::zeros((0, 1), DType::U32, &Device::Cpu)? } else { ids.narrow(0, 0, own)?.contiguous()? })
}

/// The GPU's name, or that it is none.
fn card(device: &Device) -> Result<String> {
    #[cfg(feature = "cuda")]
    if !device.is_cpu() {
        return Ok(moebius::candle::cuda(device)?.name()?);
    }
    let _ = device;
    Ok("CPU".to_string())
}

/// The commit that was asked for, or that of the sources.
fn commit(options: &Options) -> String {
    let asked = || {
        let folder = env!("CARGO_MANIFEST_DIR");
        let git =
            Command::new("git").args(["-C", folder, "describe", "--always", "--dirty", "--abbrev=12"]).output().ok()?;
        git.status.success().then(|| String::from_utf8_lossy(&git.stdout).trim().to_string())
    };
    options.commit.clone().or_else(asked).unwrap_or_else(|| "unknown".to_string())
}

/// What was timed.
struct Measured<'a> {
    name: &'a str,
    /// Sequences of this rank.
    own: usize,
    /// Tokens of all ranks.
    tokens: usize,
}

/// Bytes of the GPU that are free; 0 of a CPU.
fn free_memory(device: &Device) -> Result<usize> {
    #[cfg(feature = "cuda")]
    if !device.is_cpu() {
        return Ok(moebius::candle::cuda(device)?.free_memory()?);
    }
    let _ = device;
    Ok(0)
}

fn run(options: &Options, place: Place) -> Result<()> {
    let bench = Bench::new(options.clone(), &place)?;
    bench.run(place.endpoint)
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(me) = ranks::identity()? {
        return run(&options, place_of(&me)?);
    }
    let places = places(options.ranks, options.cpu)?;
    thread::scope(|scope| {
        let threads: Vec<_> = places.into_iter().map(|place| scope.spawn(|| run(&options, place))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a rank panicked".into())))
    })
}
