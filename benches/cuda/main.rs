//! Times of the layer and its grouped GEMMs on one GPU: CUDA events, warm, median, random data, several input sets in
//! turn. One JSON line a measurement; `benches/peers/run` runs the peers beside it and makes a table of both.
//!
//! ```text
//! cargo bench -p moebius --no-default-features --features cuda --bench cuda --
//!     [--portable] [--energy] [--shapes] [--reserved-sms=0,8,16] [--quant] [--dequantized] [--adamw] [--workloads]
//!     [WORKLOAD …]
//! ```
//!
//! `--energy` repeats each phase for a second or more and adds that loop's milliseconds and millijoules a call (NVML).
//! `--shapes` measures the products alone, of other routings, numbers of tokens and sizes.
//! `--reserved-sms` measures the products, and the layer unless `--shapes`, once for each of these numbers of SMs left to
//! others; 0 unless told, and for all that is not products or the layer.
//! `--quant` measures quantization and products with quantized weights, and nothing else.
//! `--dequantized` measures products that de-quantize their weights first, beside those with bf16 weights, and nothing
//! else.
//! `--adamw` measures an optimizer's steps, and nothing else.
//! `--workloads` prints the workloads, for the peers, and measures nothing.

mod adamw;
mod data;
mod dequantized;
mod energy;
mod gemms;
mod layer;
#[path = "../../examples/support/output.rs"]
mod output;
mod quant;
mod report;
mod routed;

use moebius::cuda::Cuda;
use moebius::{DType, Device, Result, Tensor};

use data::Routing;
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
    routing: Routing,
}

impl Workload {
    const fn new(name: &'static str, sizes: [usize; 5]) -> Self {
        Self::routed(name, sizes, Routing::Uniform)
    }

    const fn routed(name: &'static str, sizes: [usize; 5], routing: Routing) -> Self {
        let [tokens, hidden, inner, experts, top_k] = sizes;
        Self { name, tokens, hidden, inner, experts, top_k, routing }
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
        let Self { name, tokens, hidden, inner, experts, top_k, routing } = self;
        let routing = routing.name();
        format!(
            "{{\"workload\":\"{name}\",\"tokens\":{tokens},\"hidden\":{hidden},\"inner\":{inner},\
             \"experts\":{experts},\"top_k\":{top_k},\"routing\":\"{routing}\"}}"
        )
    }
}

/// The sizes of tokens, hidden, inner, experts, top-k.
const WORKLOADS: [Workload; 7] = [
    Workload::new("qwen3-30b-a3b", [16384, 2048, 768, 128, 8]),
    Workload::new("olmoe-7b", [16384, 2048, 1024, 64, 8]),
    Workload::new("mixtral-8x7b", [8192, 4096, 14336, 8, 2]),
    Workload::new("dsv3-ep8-rank", [4096, 7168, 2048, 32, 8]),
    Workload::new("decode-qwen3", [64, 2048, 768, 128, 8]),
    Workload::new("decode-qwen3-8", [8, 2048, 768, 128, 8]),
    Workload::new("decode-qwen3-1", [1, 2048, 768, 128, 8]),
];

/// Other routings, other numbers of tokens, and published sizes. 2880 is no multiple of tiles of 128 and 256, 5120 of those
/// of 192; 6144 and 1536 are multiples of all.
const SHAPES: [Workload; 9] = [
    Workload::routed("qwen3-zipf", [16384, 2048, 768, 128, 8], Routing::Zipf),
    Workload::routed("qwen3-one-hot", [16384, 2048, 768, 128, 8], Routing::OneHot),
    Workload::routed("qwen3-half-empty", [16384, 2048, 768, 128, 8], Routing::HalfEmpty),
    Workload::new("qwen3-2048", [2048, 2048, 768, 128, 8]),
    Workload::new("qwen3-8192", [8192, 2048, 768, 128, 8]),
    Workload::new("qwen3-65536", [65536, 2048, 768, 128, 8]),
    Workload::new("2880x2880", [8192, 2880, 2880, 32, 4]),
    Workload::new("5120x1536", [4096, 5120, 1536, 40, 6]),
    Workload::new("6144x1536", [4096, 6144, 1536, 40, 8]),
];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let asked = |flag: &str| arguments.iter().any(|a| a == flag);
    let wanted = |w: &Workload| {
        let mut names = arguments.iter().filter(|a| !a.starts_with("--")).peekable();
        names.peek().is_none() || names.any(|name| name == w.name)
    };
    let all: &[Workload] = if asked("--shapes") { &SHAPES } else { &WORKLOADS };
    let workloads = all.iter().copied().filter(wanted);
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
    let reserved = arguments.iter().find_map(|a| a.strip_prefix("--reserved-sms=")).unwrap_or("0");
    let Ok(reserved) = reserved.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>() else {
        complain(format_args!("--reserved-sms={reserved}: numbers with commas between them, as 0,8,16"));
        std::process::exit(2);
    };
    let report = Report::new(&cuda, asked("--energy"))?;
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
        for &sms in &reserved {
            let cuda = cuda.reserving_sms(sms);
            report.reserving(sms);
            gemms::run(&cuda, &report, &workload)?;
            if !asked("--shapes") {
                layer::run(&cuda, &report, &workload)?;
            }
            cuda.trim();
        }
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
