//! Times of the layer and its grouped GEMMs on one GPU: CUDA events, warm, median, random data, several input sets in
//! turn. One JSON line a measurement; `benches/peers/run` runs the peers beside it and makes a table of both.
//!
//! ```text
//! cargo bench -p moebius --no-default-features --features cuda --bench cuda --
//!     [--portable] [--quant] [--dequantized] [--adamw] [--workloads] [WORKLOAD …]
//! ```
//!
//! `--quant` measures quantization and products with quantized weights, and nothing else.
//! `--dequantized` measures products that de-quantize their weights first, beside those with bf16 weights, and nothing
//! else.
//! `--adamw` measures an optimizer's steps, and nothing else.
//! `--workloads` prints the workloads, for the peers, and measures nothing.

mod adamw;
mod data;
mod dequantized;
mod gemms;
mod layer;
#[path = "../../examples/support/output.rs"]
mod output;
mod quant;
mod report;
mod routed;

use moebius::cuda::Cuda;
use moebius::{DType, Device, Result, Tensor};

use output::{complain, say};
use report::Report;

/// Sizes of a layer and of its input.
#[derive(Debug, Clone, Copy)]
struct Workload {
    name: &'static str,
    tokens: usize,
    hidden: usize,
    inner: usize,
    experts: usize,
    top_k: usize,
}

impl Workload {
    const fn new(name: &'static str, [tokens, hidden, inner, experts, top_k]: [usize; 5]) -> Self {
        Self { name, tokens, hidden, inner, experts, top_k }
    }

    /// Rows of the experts' buffers.
    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Floating-point operations of down; up has twice as many.
    fn flop_down(&self) -> f64 {
        2.0 * self.slots() as f64 * self.hidden as f64 * self.inner as f64
    }

    /// Of a forward.
    fn flop(&self) -> f64 {
        3.0 * self.flop_down()
    }

    fn json(&self) -> String {
        let Self { name, tokens, hidden, inner, experts, top_k } = self;
        format!(
            "{{\"workload\":\"{name}\",\"tokens\":{tokens},\"hidden\":{hidden},\"inner\":{inner},\
             \"experts\":{experts},\"top_k\":{top_k}}}"
        )
    }
}

/// The sizes of tokens, hidden, inner, experts, top-k.
const WORKLOADS: [Workload; 5] = [
    Workload::new("qwen3-30b-a3b", [16384, 2048, 768, 128, 8]),
    Workload::new("olmoe-7b", [16384, 2048, 1024, 64, 8]),
    Workload::new("mixtral-8x7b", [8192, 4096, 14336, 8, 2]),
    Workload::new("dsv3-ep8-rank", [4096, 7168, 2048, 32, 8]),
    Workload::new("decode-qwen3", [64, 2048, 768, 128, 8]),
];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let asked = |flag: &str| arguments.iter().any(|a| a == flag);
    let wanted = |w: &Workload| {
        let mut names = arguments.iter().filter(|a| !a.starts_with("--")).peekable();
        names.peek().is_none() || names.any(|name| name == w.name)
    };
    let workloads = WORKLOADS.into_iter().filter(wanted);
    if asked("--workloads") {
        workloads.for_each(|w| say(format_args!("{}", w.json())));
        return Ok(());
    }
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(e) => {
            complain(format_args!("skipped: no GPU ({e})"));
            return Ok(());
        }
    };
    let cuda = if asked("--portable") { cuda.portable() } else { cuda };
    let report = Report::new(&cuda)?;
    copy_rate(&cuda, &report)?;
    if asked("--adamw") {
        return adamw::run(&cuda, &report);
    }
    if asked("--quant") {
        quant::codec(&cuda, &report)?;
    }
    for workload in workloads {
        if asked("--quant") {
            quant::products(&cuda, &report, &workload)?;
            cuda.trim();
            continue;
        }
        if asked("--dequantized") {
            dequantized::run(&cuda, &report, &workload)?;
            cuda.trim();
            continue;
        }
        gemms::run(&cuda, &report, &workload)?;
        layer::run(&cuda, &report, &workload)?;
        cuda.trim();
    }
    Ok(())
}

/// Bytes read and written a second by a copy that no cache holds.
fn copy_rate(cuda: &Cuda, report: &Report) -> Result<()> {
    const BYTES: usize = 1 << 30;
    let from = Tensor::zeros(cuda, DType::U8, &[1, BYTES])?;
    let mut to = Tensor::empty(cuda, DType::U8, &[1, BYTES])?;
    let ms = report.time(|_| cuda.copy(from.view().data(), to.view_mut().into_data()))?;
    report.copy(ms, 2 * BYTES);
    Ok(())
}
