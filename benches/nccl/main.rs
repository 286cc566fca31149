//! Times of expert parallelism over several GPUs, ranks as threads: prepare, dispatch, combine and their backwards for
//! every dispatcher, the whole layer with the share of its time that is communication, and weights that are sharded.
//! One JSON line a measurement: the slowest rank of each repeat, median and 99th percentile.
//!
//! ```text
//! cargo bench -p moebius --no-default-features --features nccl --bench nccl --
//!     [--ranks N] [--tokens 128,4096] [--routing uniform] [--mode "ht windows,nvlink"] [--workload dsv3]
//!     [--token-payload nvfp4] [--shard-payload nvfp4] [--ahead 0,2] [--reserved-sms 0,16] [--collective-threads 2,1]
//!     [--copy-engines 0,1] [--max-sms 32] [--shared 2048] [calls] [layer] [etp]
//! ```
//!
//! `--token-payload` and `--shard-payload` name forms, `plain`, `nvfp4`, `mxfp8` and `fp8-block`: those in which a layer's tokens
//! travel (`plain` unless told), and those in which shards do (`plain` and `nvfp4`).
//!
//! `--mode "nvlink,nvlink mxfp8"` times combine with sums that return in the tokens' type and quantized, in one run.
//!
//! `--shared` is the inner size of a shared expert of the layer; none unless told.
//!
//! `--max-sms` is how many SMs this crate's kernels that move rows may take; all unless told.
//!
//! `--mode "auto measured"` and `--mode "auto measured static"` are groups that time their dispatchers and take the
//! quickest, which they say on stderr.
//!
//! A call is timed from when all ranks stand before it with idle GPUs until its last work on the GPU is done, so what
//! the host does in between counts.

mod calls;
#[path = "../cuda/data.rs"]
#[allow(dead_code, reason = "the part of it that makes tensors")]
mod data;
mod etp;
mod layer;
#[path = "../../examples/support/output.rs"]
mod output;
mod report;
mod routing;
mod timed;
mod wrapped;

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::comm::{Communicator, Solo};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchShape, DispatcherKind, Group, GroupConfig, Overlap, ReturnFormat};
use moebius::etp::Payload;
use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};
use moebius::{DType, Error, Result};

use output::complain;
use report::Report;
use timed::Timed;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Sizes of a layer and of each rank's input.
#[derive(Debug, Clone, Copy)]
struct Workload {
    name: &'static str,
    tokens: usize,
    hidden: usize,
    inner: usize,
    experts: usize,
    top_k: usize,
    routing: data::Routing,
    /// Inner size of a shared expert; 0: none.
    shared: usize,
}

impl Workload {
    fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Rows of a rank that hold every routing.
    fn most_rows(&self, ranks: usize) -> usize {
        ranks * self.slots()
    }
}

/// DeepSeek-V3's sizes, of which the calls' times need no inner one.
const DSV3: Workload = Workload {
    name: "dsv3",
    tokens: 4096,
    hidden: 7168,
    inner: 2048,
    experts: 256,
    top_k: 8,
    routing: UNIFORM,
    shared: 0,
};
const QWEN3: Workload = Workload {
    name: "qwen3-30b-a3b",
    tokens: 4096,
    hidden: 2048,
    inner: 768,
    experts: 128,
    top_k: 8,
    routing: UNIFORM,
    shared: 0,
};
const UNIFORM: data::Routing = data::Routing::Uniform;

/// How tokens travel, by its name in the lines.
#[derive(Clone, Copy)]
struct Dispatcher {
    name: &'static str,
    mode: &'static str,
    kind: DispatcherKind,
    /// A static capacity, and nothing waits for the GPU.
    fixed: bool,
    /// Windows that rows arrive in.
    windows: usize,
    /// No backward, and no more tokens than this.
    decodes: Option<usize>,
    /// Times the dispatchers, and takes the quickest.
    measured: bool,
    overlap: Overlap,
    return_format: ReturnFormat,
    /// SMs of the kernels that move rows; 0: all.
    max_sms: usize,
    /// A rank that does not come is left out.
    patience: Option<Duration>,
}

impl Dispatcher {
    const fn new(name: &'static str, mode: &'static str, kind: DispatcherKind) -> Self {
        Self {
            name,
            mode,
            kind,
            fixed: false,
            windows: 0,
            decodes: None,
            measured: false,
            overlap: Overlap::Auto,
            return_format: ReturnFormat::Tokens,
            max_sms: 0,
            patience: None,
        }
    }

    fn make(&self, comm: Timed, w: &Workload) -> Result<Group<Cuda>> {
        let (cuda, rank) = (comm.cuda().clone(), comm.inner.rank());
        let Workload { tokens, hidden, top_k, .. } = *w;
        // What a static capacity is in a layer: half as many rows again as there are on average.
        let capacity = if self.fixed { Capacity::Static(w.slots() * 3 / 2) } else { Capacity::Eager };
        let shape = DispatchShape { tokens, hidden, top_k, dtype: DType::BF16, capacity, backward: true };
        let config = GroupConfig {
            dispatcher: self.kind,
            max_rows: w.most_rows(comm.inner.size()),
            windows: self.windows,
            measure: self.measured.then_some(shape),
            overlap: self.overlap,
            // Two hosts, imitated; read by dispatchers between hosts alone.
            ranks_per_host: comm.inner.size() / 2,
            return_format: self.return_format,
            max_sms: self.max_sms,
            patience: self.patience,
            ..GroupConfig::new(w.experts, w.tokens)
        };
        if self.kind == DispatcherKind::Local {
            return Group::new(
                cuda.clone(),
                Box::new(Solo::new(cuda)),
                GroupConfig { dispatcher: self.kind, ..config },
            );
        }
        let group = Group::new(cuda, Box::new(comm), config)?;
        if self.measured && rank == 0 {
            complain(format_args!("{}, {tokens} tokens, {}: {}", w.name, self.mode, group.dispatcher_kind()));
        }
        Ok(group)
    }

    fn serves(&self, w: &Workload) -> bool {
        self.decodes.is_none_or(|most| w.tokens <= most)
    }

    /// For calls by themselves.
    fn capacity(&self, w: &Workload, ranks: usize) -> Capacity {
        if self.fixed { Capacity::Static(w.most_rows(ranks)) } else { Capacity::Eager }
    }
}

const fn quantized(mode: &'static str, fixed: bool) -> Dispatcher {
    let nvlink = Dispatcher::new("nvlink", mode, DispatcherKind::NvLink);
    Dispatcher { fixed, return_format: ReturnFormat::Mxfp8, ..nvlink }
}

const fn overlapped(mode: &'static str, overlap: Overlap) -> Dispatcher {
    Dispatcher { fixed: true, overlap, ..Dispatcher::new("nvlink", mode, DispatcherKind::NvLink) }
}

/// Every dispatcher that is measured.
const DISPATCHERS: &[Dispatcher] = &[
    Dispatcher::new("auto", "auto", DispatcherKind::Auto),
    Dispatcher { fixed: true, ..Dispatcher::new("auto", "auto static", DispatcherKind::Auto) },
    Dispatcher { measured: true, ..Dispatcher::new("auto", "auto measured", DispatcherKind::Auto) },
    Dispatcher { measured: true, fixed: true, ..Dispatcher::new("auto", "auto measured static", DispatcherKind::Auto) },
    Dispatcher::new("all_to_all", "nccl", DispatcherKind::AllToAll),
    Dispatcher::new("hierarchical", "two hosts", DispatcherKind::Hierarchical),
    Dispatcher::new("all_gather", "nccl", DispatcherKind::AllGather),
    Dispatcher::new("nvlink", "nvlink", DispatcherKind::NvLink),
    Dispatcher { fixed: true, ..Dispatcher::new("nvlink", "nvlink static", DispatcherKind::NvLink) },
    quantized("nvlink mxfp8", false),
    quantized("nvlink static mxfp8", true),
    Dispatcher { fixed: true, ..Dispatcher::new("local", "compute alone", DispatcherKind::Local) },
    Dispatcher {
        decodes: Some(256),
        fixed: true,
        ..Dispatcher::new("nvlink", "nvlink ll", DispatcherKind::NvLinkLowLatency)
    },
    Dispatcher {
        decodes: Some(256),
        fixed: true,
        patience: Some(Duration::from_millis(100)),
        ..Dispatcher::new("nvlink", "nvlink ll patience", DispatcherKind::NvLinkLowLatency)
    },
    overlapped("nvlink static serial", Overlap::Off),
    overlapped("nvlink static 16 SMs", Overlap::Sms(16)),
    overlapped("nvlink static 8 SMs", Overlap::Sms(8)),
    #[cfg(feature = "nccl-ep")]
    Dispatcher::new("nccl_ep", "ht", DispatcherKind::NcclEp),
    #[cfg(feature = "nccl-ep")]
    Dispatcher { fixed: true, ..Dispatcher::new("nccl_ep", "ht static", DispatcherKind::NcclEp) },
    #[cfg(feature = "nccl-ep")]
    Dispatcher { fixed: true, windows: 3, ..Dispatcher::new("nccl_ep", "ht windows", DispatcherKind::NcclEp) },
    #[cfg(feature = "nccl-ep")]
    Dispatcher { decodes: Some(256), ..Dispatcher::new("nccl_ep", "ll", DispatcherKind::NcclEpLowLatency) },
];

/// One rank's thread.
struct Rank<'a> {
    cuda: Cuda,
    rank: usize,
    ranks: usize,
    together: &'a Barrier,
}

impl Rank<'_> {
    /// Waits until all ranks are here with idle GPUs.
    pub fn meet(&self) -> Result<()> {
        let idle = self.cuda.check();
        self.together.wait();
        idle
    }
}

/// Runs `body` on every rank's thread; results in rank order.
fn on_ranks<T: Send>(world: &NcclWorld, body: impl Fn(&Rank<'_>, NcclComm) -> Result<T> + Sync) -> Result<Vec<T>> {
    let comms = world.communicators(TIMEOUT)?;
    let (together, body) = (&Barrier::new(comms.len()), &body);
    let ranks = comms.len();
    thread::scope(|scope| {
        let spawn = |(rank, comm): (usize, NcclComm)| {
            scope.spawn(move || {
                let cuda = comm.cuda().clone();
                body(&Rank { cuda, rank, ranks, together }, comm)
            })
        };
        let threads: Vec<_> = comms.into_iter().enumerate().map(spawn).collect();
        let lost = |_| Err(Error::Device { call: "bench", operation: "run a rank".into(), message: "panicked".into() });
        threads.into_iter().map(|t| t.join().unwrap_or_else(lost)).collect()
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let value = |flag: &str| arguments.iter().position(|a| a == flag).and_then(|at| arguments.get(at + 1));
    let numbers = |flag: &str| -> Option<Vec<usize>> {
        value(flag).map(|text| text.split(',').filter_map(|n| n.parse().ok()).collect())
    };
    let asked = |name: &str| {
        let named = |a: &&String| ["calls", "layer", "etp"].contains(&a.as_str());
        arguments.iter().find(named).is_none() || arguments.iter().any(|a| a == name)
    };
    let gpus: Vec<Cuda> = (0..).map_while(|ordinal| Cuda::new(ordinal).ok()).collect();
    let ranks = numbers("--ranks").and_then(|n| n.first().copied()).unwrap_or(gpus.len());
    if gpus.len() < ranks.max(2) {
        complain(format_args!("skipped: {} GPUs, {} wanted", gpus.len(), ranks.max(2)));
        return Ok(());
    }
    let library = NcclLibrary::open()?;
    let free = |gpu: &Cuda| gpu.free_memory();
    let before = free(&gpus[0])?;
    let world = NcclWorld::new(&library, &gpus[..ranks], TIMEOUT)?;
    let report = Report::new(&gpus[0], ranks, &library)?;
    report.memory("nccl", before.saturating_sub(free(&gpus[0])?));
    let shared = numbers("--shared").and_then(|n| n.first().copied()).unwrap_or(0);
    let tokens = numbers("--tokens").unwrap_or_else(|| vec![128, 2048, 4096, 8192]);
    let only = |flag: &str, name: &str| value(flag).is_none_or(|only| only.split(',').any(|one| one == name));
    let mut workloads = Vec::new();
    for workload in [DSV3, QWEN3].into_iter().filter(|w| only("--workload", w.name)) {
        workloads.extend(tokens.iter().map(|&tokens| Workload { tokens, shared, ..workload }));
    }
    let forms = [
        ("plain", Payload::Plain),
        ("nvfp4", Payload::Nvfp4),
        ("mxfp8", Payload::Mxfp8),
        ("fp8-block", Payload::Fp8Block),
    ];
    let payloads = |flag: &str, default: &str| -> Vec<Payload> {
        let names: Vec<&str> = value(flag).map_or(default, String::as_str).split(',').collect();
        forms.into_iter().filter(|(name, _)| names.contains(name)).map(|(_, payload)| payload).collect()
    };
    let max_sms = numbers("--max-sms").and_then(|n| n.first().copied()).unwrap_or(0);
    let named = DISPATCHERS.iter().filter(|d| only("--mode", d.mode));
    let dispatchers: Vec<Dispatcher> = named.map(|&d| Dispatcher { max_sms, ..d }).collect();
    for workload in workloads {
        let serving: Vec<Dispatcher> = dispatchers.iter().copied().filter(|d| d.serves(&workload)).collect();
        if asked("calls") {
            // One rank alone has none.
            let between: Vec<_> = serving.iter().copied().filter(|d| d.kind != DispatcherKind::Local).collect();
            calls::run(&world, &report, (workload, &between), value("--routing"))?;
        }
        if asked("layer") {
            for payload in payloads("--token-payload", "plain") {
                layer::run(&world, &report, (workload, &serving, payload))?;
            }
        }
    }
    if asked("etp") {
        let asked = etp::Asked {
            payloads: payloads("--shard-payload", "plain,nvfp4"),
            ahead: numbers("--ahead").unwrap_or_else(|| vec![0, 1, 2]),
            reserved_sms: numbers("--reserved-sms").unwrap_or_else(|| vec![0, 16]),
            collective_threads: numbers("--collective-threads").unwrap_or_else(|| vec![2]),
            copy_engines: numbers("--copy-engines").unwrap_or_else(|| vec![0]),
        };
        etp::run(&library, &world, &report, (&gpus[..ranks], &asked))?;
    }
    Ok(())
}
