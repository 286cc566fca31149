//! Several GPUs over NCCL: the CPU ranks' conformance suite from the same source, the communicator's own bodies, whole
//! layers against CPU ranks and against the goldens of checkpoints, lost ranks. Each test is there for every number of
//! ranks and ignored where there are not as many GPUs; what needs no GPU (finding the library) runs everywhere.
#![allow(clippy::duplicate_mod, reason = "each shared suite brings its helpers")]

#[path = "../common/mod.rs"]
#[allow(unused_imports, reason = "a suite takes a part")]
mod common;
#[path = "../conformance/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod conformance;

mod captured;
#[path = "../etp/main.rs"]
#[allow(unused_imports, reason = "a suite has parts for the CPU alone")]
mod etp;
#[path = "../golden.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for one device alone")]
mod golden;
mod graph;
#[path = "../invariance.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for one device alone")]
mod invariance;
#[path = "../common/launched.rs"]
#[allow(dead_code, reason = "a suite takes a part")]
mod launched;
mod layer;
mod library;
#[path = "../common/limits.rs"]
mod limits;
mod lost;
mod low_latency;
mod nvlink;
mod nvlink_graphs;
mod nvlink_lost;
mod overlap;
mod overlap_waits;
mod patience;
mod processes;
mod return_format;
#[path = "../common/several.rs"]
mod several;
#[path = "../common/steps.rs"]
mod steps;
mod streams;

use std::path::PathBuf;
use std::process::ExitCode;

use moebius::config::Payload;
use moebius::cuda::Cuda;
use moebius::ep::DispatcherKind;
use moebius::quant::WeightFormat;

use conformance::{NOT_FOR_FORWARD_ALONE, ends_at_backward_as_known, later, over};
use invariance::{LayerKind, RouterKind};
use several::{Body, Case};

/// Dispatchers of whole steps, forward and backward.
const KINDS: [DispatcherKind; 4] =
    [DispatcherKind::AllToAll, DispatcherKind::Hierarchical, DispatcherKind::AllGather, DispatcherKind::NvLink];

/// Layers whose tokens keep their bits whatever else a call holds.
const INVARIANT: [(&str, LayerKind); 12] = [
    ("dense_experts", LayerKind::Dense),
    ("dense_experts_of_long_sums", LayerKind::DenseOfLongSums),
    ("nvfp4_experts", LayerKind::Quantized(WeightFormat::Nvfp4)),
    ("mxfp4_experts", LayerKind::Quantized(WeightFormat::Mxfp4)),
    ("fp8_block_experts", LayerKind::Quantized(WeightFormat::Fp8Block)),
    ("group_limited_routers", LayerKind::Routed(RouterKind::GroupLimited)),
    ("sigmoid_routers", LayerKind::Routed(RouterKind::Sigmoid)),
    ("routers_with_a_selection_bias", LayerKind::Routed(RouterKind::SelectionBias)),
    ("routers_that_choose_by_logit", LayerKind::Routed(RouterKind::ByLogit)),
    ("nvfp4_payload", LayerKind::Payload(Payload::Nvfp4)),
    ("mxfp8_payload", LayerKind::Payload(Payload::Mxfp8)),
    ("fp8_block_payload", LayerKind::Payload(Payload::Fp8Block)),
];

/// A body for any number of ranks.
type Run = fn(&Cuda, usize);
/// What makes a case's setup.
type Setup = fn(&Cuda, DispatcherKind, usize, &'static str) -> conformance::Setup<Cuda>;

/// A test that is for these dispatchers.
fn body(run: impl Fn(&Cuda) + Send + 'static) -> Body {
    Box::new(move |cuda| {
        run(cuda);
        None
    })
}

fn over_ranks(ranks: usize) -> Vec<(String, Body)> {
    let mut all: Vec<(String, Body)> = Vec::new();
    for kind in KINDS.into_iter().chain([DispatcherKind::NvLinkLowLatency]) {
        for (file, case) in conformance::cases().into_iter().filter(|(_, case)| case.is_for(kind, ranks)) {
            let low = kind == DispatcherKind::NvLinkLowLatency;
            if low && NOT_FOR_FORWARD_ALONE.contains(&case.name) {
                continue;
            }
            for (suite, setup) in [("conformance", over as Setup), ("conformance_later", later)] {
                let (name, case) = (format!("{suite}::{kind:?}::{file}::{}", case.name), case.clone());
                // Two hosts, imitated.
                let ranks_per_host = if kind == DispatcherKind::Hierarchical { ranks / 2 } else { 0 };
                let run = move |cuda: &Cuda| {
                    let setup = conformance::Setup { ranks_per_host, ..setup(cuda, kind, ranks, case.name) };
                    if low {
                        return several::ignored_at_backward(ends_at_backward_as_known(&case, &setup));
                    }
                    (case.run)(&setup);
                    None
                };
                all.push((name, Box::new(run)));
            }
        }
    }
    for kind in KINDS {
        for (name, layer) in INVARIANT {
            let over = vec![(ranks, kind); layer.rounds(false)];
            let run = move |cuda: &Cuda| invariance::hold_over(cuda, layer, &over, 4);
            all.push((format!("invariance::{kind:?}::{name}"), body(run)));
        }
    }
    all.extend(goldens(ranks));
    all.extend(nvlink_lost::cases(ranks).into_iter().map(|(name, run)| (format!("nvlink_lost::{name}"), run)));
    for own in conformance::communicator_bodies().into_iter().filter(|own| (own.ranks)(ranks)) {
        all.push((format!("communicator::{}", own.name), body(move |cuda| (own.run)(cuda, ranks))));
    }
    let files = [
        ("graph", graph::cases()),
        ("layer", layer::cases()),
        ("lost", lost::cases()),
        ("low_latency", low_latency::cases()),
        ("nvlink", nvlink::cases()),
        ("nvlink_graphs", nvlink_graphs::cases()),
        ("overlap", overlap::cases()),
        ("overlap_waits", overlap_waits::cases()),
        ("patience", patience::cases()),
        ("processes", processes::cases()),
        ("return_format", return_format::cases()),
        ("captured", captured::cases()),
        ("streams", streams::cases()),
    ];
    for (name, run) in captured::cases() {
        let run = move |cuda: &Cuda| etp::with_memory(|| run(cuda, ranks));
        all.push((format!("captured_engines::{name}"), body(run)));
    }
    for (file, cases) in files {
        for (name, run) in cases {
            all.push((format!("{file}::{name}"), body(move |cuda| run(cuda, ranks))));
        }
    }
    all
}

/// The shipped goldens, or those of `MOEBIUS_GOLDEN`, over each dispatcher: a case for each folder.
fn goldens(ranks: usize) -> Vec<(String, Body)> {
    let folders = match golden::find_folders() {
        Ok(folders) => folders,
        Err(error) => return vec![("golden::folders".into(), body(move |_| panic!("{error}")))],
    };
    let over = |kind: DispatcherKind| {
        let case = move |dir: &PathBuf| {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let dir = dir.clone();
            let run: Body = Box::new(move |cuda| golden::hold_over(cuda, &dir, ranks, kind));
            (format!("golden::{kind:?}::{name}"), run)
        };
        folders.iter().map(case).collect::<Vec<_>>()
    };
    KINDS.into_iter().flat_map(over).collect()
}

/// Sharded weights, each case over as many of its four ranks as there are GPUs, and again by copy engines.
fn sharded() -> Vec<Case> {
    let case = |(file, least, name, run): (&str, usize, &str, fn(&Cuda))| {
        let plain = move |_: &Cuda| run(&etp::gpus::first(1).1[0]);
        let engines = move |cuda: &Cuda| etp::with_memory(|| plain(cuda));
        let case = |suite, body| Case { name: format!("{suite}::{file}::{name}"), gpus: least.max(2), body };
        [case("etp", body(plain)), case("etp_engines", body(engines))]
    };
    etp::bodies().into_iter().flat_map(case).collect()
}

fn main() -> ExitCode {
    if std::env::var_os(library::CHILD).is_some() {
        library::child();
        return ExitCode::SUCCESS;
    }
    if let Ok(body) = std::env::var(launched::CHILD) {
        processes::child(&body);
        return ExitCode::SUCCESS;
    }
    let code = several::run(library::cases(), several::each(over_ranks).into_iter().chain(sharded()).collect());
    etp::gpus::close();
    golden::gpus::close();
    code
}
