//! Times of the layer as a framework's module on one GPU, warm, median, random data, which candle's module and the layer
//! share. One JSON line a measurement, keys as `benches/cuda`.
//!
//! `fwd` and `fwd+bwd`: wall clock from an idle GPU to an idle GPU with the loss Σ y ∘ c, which both frameworks' programs
//! share. `fwd+bwd-stored`: steps queued one behind the other, timed by events, with the gradient of y given and no loss,
//! gradients in the weights' type; `-f32-add` adds the experts' in f32. These the layer itself (`moebius`) does
//! as well, and `fwd-graph`, replays of a captured forward into memory that stays (candle's; `fwd-graph-returned`:
//! its result in candle's memory); with experts that stay quantized, of the workloads named `decode`, `fwd-graph-nvfp4`,
//! `-mxfp4` and `-fp8`. `-plain`: with the loss Σ y ∘ c, queued. By name alone, one workload and process each:
//! `memory-plain`, `memory-stored`, `memory-f32-add`, the bytes that a first step takes of the GPU's free memory, with
//! candle's gradients and with main gradients as above, whose memory is part of them.
//!
//! The workload `256Mi` is of an optimizer: `adamw-…`, queued steps of the core's AdamW and of the framework's, beside
//! the copy rate.
//!
//! ```text
//! cargo bench -p moebius --no-default-features --features candle,cuda --bench adapters -- [--phase=PHASE …] [WORKLOAD …]
//! cargo bench --no-default-features --features burn-cuda --bench adapters -- [--phase=PHASE …] [WORKLOAD …]
//! ```

#![cfg_attr(
    not(any(feature = "candle", feature = "burn-cuda")),
    allow(dead_code, unused_variables, reason = "built for neither framework")
)]

mod adamw;
#[cfg(feature = "burn-cuda")]
mod burn;
#[cfg(feature = "candle")]
mod candle;
mod core;
#[path = "../cuda/data.rs"]
#[allow(dead_code, reason = "the part of it that makes tensors")]
mod data;
#[path = "../../examples/support/output.rs"]
mod output;
#[cfg(feature = "candle")]
mod quantized;

use std::error::Error;
use std::time::Instant;

use moebius::cuda::Cuda;

use output::say;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Shape of a layer and its batch.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    name: &'static str,
    tokens: usize,
    hidden: usize,
    inner: usize,
    experts: usize,
    top_k: usize,
    routing: data::Routing,
}

const fn workload(name: &'static str, [tokens, hidden, inner, experts, top_k]: [usize; 5]) -> Workload {
    Workload { name, tokens, hidden, inner, experts, top_k, routing: data::Routing::Uniform }
}

const WORKLOADS: [Workload; 7] = [
    workload("qwen3-30b-a3b", [16384, 2048, 768, 128, 8]),
    workload("olmoe-7b", [16384, 2048, 1024, 64, 8]),
    workload("mixtral-8x7b", [8192, 4096, 14336, 8, 2]),
    workload("dsv3-ep8-rank", [4096, 7168, 2048, 32, 8]),
    workload("decode-qwen3", [64, 2048, 768, 128, 8]),
    workload("decode-qwen3-8", [8, 2048, 768, 128, 8]),
    workload("decode-qwen3-1", [1, 2048, 768, 128, 8]),
];
const WARM_UP: usize = 3;
const REPEATS: usize = 15;

/// Median milliseconds of a call between two waits for the GPU.
fn time(sync: impl Fn() -> Result<()>, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(REPEATS);
    for repeat in 0..WARM_UP + REPEATS {
        sync()?;
        let start = Instant::now();
        call()?;
        sync()?;
        if repeat >= WARM_UP {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Whether a phase is to be timed: all, or those named.
fn asked(phase: &str) -> bool {
    let named = || std::env::args().filter_map(|a| Some(a.strip_prefix("--phase=")?.to_string()));
    named().next().is_none() || named().any(|name| name == phase)
}

impl Workload {
    /// Rows of the experts' buffers.
    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    fn report(&self, who: &str, phase: &str, ms: f64, gpu: &str) {
        let Self { name, tokens, hidden, inner, top_k, .. } = *self;
        let passes = if phase.starts_with("fwd+bwd") { 3.0 } else { 1.0 };
        let flop = passes * 6.0 * (tokens * top_k) as f64 * hidden as f64 * inner as f64;
        say(format_args!(
            "{{\"impl\":\"{who}\",\"workload\":\"{name}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},\"tflops\":{:.1},\
             \"gpu\":\"{gpu}\"}}",
            flop / ms / 1e9,
        ));
    }

    #[cfg(feature = "candle")]
    fn report_memory(&self, who: &str, way: &str, bytes: usize, gpu: &str) {
        let name = self.name;
        say(format_args!(
            "{{\"impl\":\"{who}\",\"workload\":\"{name}\",\"phase\":\"memory\",\"way\":\"{way}\",\"bytes\":{bytes},\
             \"gpu\":\"{gpu}\"}}"
        ));
    }
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let (cuda, gpu) = match Cuda::new(0).and_then(|cuda| Ok((cuda.clone(), cuda.name()?))) {
        Ok(found) => found,
        Err(e) => {
            say(format_args!("skipped: no GPU ({e})"));
            return Ok(());
        }
    };
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    for workload in WORKLOADS {
        if is_wanted(workload.name) {
            core::run(&cuda, &workload, &gpu)?;
            cuda.trim();
            #[cfg(feature = "candle")]
            candle::run(&workload, &gpu)?;
            #[cfg(feature = "candle")]
            if workload.name.starts_with("decode") {
                quantized::run(&cuda, &workload, &gpu)?;
            }
            // Memory's phases are candle's.
            #[cfg(feature = "burn-cuda")]
            if !std::env::args().any(|a| a.starts_with("--phase=memory-")) {
                burn::run(&workload, &gpu)?;
            }
        }
    }
    if is_wanted(adamw::WORKLOAD) {
        adamw::run(&cuda, &gpu)?;
        #[cfg(feature = "candle")]
        candle::run_adamw(&gpu)?;
        #[cfg(feature = "burn-cuda")]
        burn::run_adamw(&gpu)?;
    }
    Ok(())
}
