//! Decoding and prefill of a whole model with random weights, which are made on the device layer by layer. One JSON line
//! a measurement: medians of several, warm. A CPU does the `tiny` shape.
//!
//! ```text
//! cargo bench -p moebius-models --features cuda --bench decode -- [--shape qwen3-30b-a3b] [--phase decode-1 …] [--layers 4]
//! ```
//!
//! | phase | what is timed |
//! |---|---|
//! | `decode-1` | a step of one sequence with `--past` tokens in a static cache, from its id to the likeliest next one; on a GPU replayed from a graph |
//! | `decode-64` | the same of 64 sequences |
//! | `eager-1`, `eager-64` | the same with a cache that grows, one operation after another; not done unless asked for |
//! | `prefill` | hidden states of `--prefill` tokens, and the logits of the last |
//!
//! With `--experts-on-host` experts stay in page-locked memory of the host and come a layer ahead (no graph then). A line
//! behind loading has the link's speed, measured by plain copies of a layer's experts from such memory; a phase's
//! `link_tokens_per_s` is what that allows where all layers' experts come once a forward.
//!
//! `weights_gib`: bytes by which loading has the GPU's free memory fall. `peak_gib`: the same of loading and the phase's
//! work, asked for while the work is queued, as the driver's pool gives memory back when the host waits.

#[path = "support/link.rs"]
mod link;
#[path = "../../examples/support/output.rs"]
mod output;
#[path = "support/checkpoint.rs"]
#[allow(dead_code, reason = "weights are made elsewhere")]
mod shape;

use std::error::Error;
use std::time::Instant;

use candle_core::{D, DType, Device, Tensor};
use clap::{Parser, ValueEnum};
use moebius_models::{ExpertWeights, LoadOptions, Model};
use output::say;
use shape::{QWEN3, Sizes};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Measures a decoder with random weights.
#[derive(Debug, Parser)]
struct Options {
    /// The model's sizes; without it the published ones on a GPU, and tiny ones on a CPU
    #[arg(long, value_enum)]
    shape: Option<Shape>,
    /// In which form the experts are held
    #[arg(long, value_enum, default_value_t = Experts::Bf16)]
    experts: Experts,
    /// Experts stay in memory of the host and come a layer ahead
    #[arg(long)]
    experts_on_host: bool,
    /// Layers, where not all
    #[arg(long)]
    layers: Option<usize>,
    /// Phases to measure; all without it
    #[arg(long, value_enum)]
    phase: Vec<Phase>,
    /// Tokens in the cache before a step
    #[arg(long)]
    past: Option<usize>,
    /// Tokens of the prefill
    #[arg(long)]
    prefill: Option<usize>,
    /// Sequences of `decode-64`, if not 64
    #[arg(long)]
    sequences: Option<usize>,
    /// Of the weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Steps that count
    #[arg(long)]
    steps: Option<usize>,
    /// On the CPU, where there is a GPU too
    #[arg(long)]
    cpu: bool,
    /// An option that `cargo bench` gives
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shape {
    #[value(name = "qwen3-30b-a3b")]
    Qwen3,
    Tiny,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Experts {
    /// As all other weights (in f32 on a CPU)
    Bf16,
    Nvfp4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Phase {
    #[value(name = "decode-1")]
    One,
    #[value(name = "decode-64")]
    Many,
    #[value(name = "eager-1")]
    EagerOne,
    #[value(name = "eager-64")]
    EagerMany,
    Prefill,
}

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
    /// Free memory before anything was loaded, and after.
    free: [usize; 2],
    /// Milliseconds in which the host link brings all experts, where they are on the host.
    link_ms: Option<f64>,
}

impl Bench {
    fn new(options: Options) -> Result<Self> {
        let device = device(options.cpu);
        let tiny = options.shape.map_or(device.is_cpu(), |shape| shape == Shape::Tiny);
        let (shape, mut sizes) = if tiny { ("tiny", TINY) } else { ("qwen3-30b-a3b", QWEN3) };
        sizes.layers = options.layers.unwrap_or(sizes.layers);
        let dtype = if tiny && device.is_cpu() { DType::F32 } else { DType::BF16 };
        let free = [free_memory(&device)?; 2];
        Ok(Self { options, shape, sizes, device, dtype, free, link_ms: None })
    }

    fn is_small(&self) -> bool {
        self.shape == "tiny"
    }

    fn load(&mut self) -> Result<Model> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("config.json"), self.sizes.config(self.dtype).to_string())?;
        let start = Instant::now();
        let experts = match self.options.experts {
            Experts::Bf16 => ExpertWeights::Dequantized,
            Experts::Nvfp4 => ExpertWeights::Nvfp4,
        };
        let (random, experts_on_host) = (Some(self.options.seed), self.options.experts_on_host);
        let options = LoadOptions { random, experts, experts_on_host, ..LoadOptions::default() };
        let model = Model::load(dir.path(), &self.device, options)?;
        self.device.synchronize()?;
        self.free[1] = free_memory(&self.device)?;
        say(format_args!(
            "{{\"model\":\"{}\",\"experts\":\"{}\",\"layers\":{},\"seed\":{},\"load_s\":{:.1},\"weights_gib\":{}}}",
            self.shape,
            self.experts(),
            self.sizes.layers,
            self.options.seed,
            start.elapsed().as_secs_f64(),
            self.gib(self.free[1]),
        ));
        self.measure_link(&model)?;
        Ok(model)
    }

    /// The host link's speed for a layer's experts, where they are on the host.
    fn measure_link(&mut self, model: &Model) -> Result<()> {
        let (Some(host), Some(moe)) = (model.host_experts(), model.moe(0)) else { return Ok(()) };
        let speed = link::bytes_per_second(moe.group(), host.bytes() / self.sizes.layers)?;
        self.link_ms = Some(host.bytes() as f64 / speed * 1e3);
        say(format_args!(
            "{{\"model\":\"{}\",\"experts\":\"{}\",\"layers\":{},\"experts_gib\":{:.2},\"link_gb_per_s\":{:.2}}}",
            self.shape,
            self.experts(),
            self.sizes.layers,
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

    fn report(&self, phase: &str, tokens: usize, times: &mut [f64], least: usize) {
        times.sort_by(f64::total_cmp);
        let ms = times[times.len() / 2];
        say(format_args!(
            "{{\"model\":\"{}\",\"experts\":\"{}\",\"layers\":{},\"phase\":\"{phase}\",\"ms\":{ms:.4},\"tokens_per_s\":{:.1},\"min_ms\":{:.4},\
             \"max_ms\":{:.4},\"n\":{},\"peak_gib\":{}{}}}",
            self.shape,
            self.experts(),
            self.sizes.layers,
            tokens as f64 / ms * 1e3,
            times[0],
            times[times.len() - 1],
            times.len(),
            self.gib(least),
            self.link_ms.map_or(String::new(), |ms| format!(",\"link_tokens_per_s\":{:.1}", tokens as f64 / ms * 1e3)),
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
        let tokens = self.options.prefill.unwrap_or(if self.is_small() { 256 } else { 8192 });
        let ids = self.ids(1, tokens)?;
        let (mut times, least) = self.time((2, self.options.steps.unwrap_or(5)), || {
            let hidden = model.hidden(&ids)?;
            model.logits(&hidden.narrow(1, tokens - 1, 1)?)?;
            Ok(())
        })?;
        self.report(&format!("prefill {tokens}"), tokens, &mut times, least);
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
        let (past, (warm_up, steps)) = (self.past(), self.steps());
        let mut stepper = model.stepper(sequences, past + warm_up + steps)?;
        for ids in self.prompts(sequences)? {
            stepper.feed(&ids)?;
        }
        let (mut times, least) = self.time((warm_up, steps), || Ok(stepper.step().map(drop)?))?;
        let how = if stepper.is_captured() { "graph" } else { "static cache" };
        self.report(&format!("decode {sequences} x {past}, {how}"), sequences, &mut times, least);
        Ok(())
    }

    fn eager(&self, model: &Model, sequences: usize) -> Result<()> {
        let past = self.past();
        let mut cache = model.cache();
        for ids in self.prompts(sequences)? {
            model.decode_hidden(&ids, &mut cache)?;
        }
        let mut next = self.ids(sequences, 1)?;
        let (mut times, least) = self.time(self.steps(), || {
            let logits = model.decode(&next, &mut cache)?;
            next = logits.argmax(D::Minus1)?;
            Ok(())
        })?;
        self.report(&format!("decode {sequences} x {past}, eager"), sequences, &mut times, least);
        Ok(())
    }
}

fn device(cpu: bool) -> Device {
    #[cfg(feature = "cuda")]
    if !cpu {
        match moebius::candle::device_for_capture(0) {
            Ok(device) => return device,
            Err(e) => output::complain(format_args!("no GPU ({})", e.to_string().lines().next().unwrap_or_default())),
        }
    }
    let _ = cpu;
    Device::Cpu
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

fn main() -> Result<()> {
    let mut bench = Bench::new(Options::parse())?;
    let model = bench.load()?;
    if bench.asked(Phase::One) {
        bench.decode(&model, 1)?;
    }
    if bench.asked(Phase::Many) {
        bench.decode(&model, bench.options.sequences.unwrap_or(64))?;
    }
    if bench.asked(Phase::EagerOne) {
        bench.eager(&model, 1)?;
    }
    if bench.asked(Phase::EagerMany) {
        bench.eager(&model, bench.options.sequences.unwrap_or(64))?;
    }
    if bench.asked(Phase::Prefill) {
        bench.prefill(&model)?;
    }
    Ok(())
}
