//! NCCL EP on several GPUs: the conformance suite and whole layers from the sources of the other dispatchers, and what
//! is its own: routing on the GPU, opaque rows, refusals. Ignored where there are not as many GPUs; what needs no GPU
//! (finding the library) runs everywhere. `bench`: times as JSON lines instead, of the steps that words behind it choose.
#![allow(clippy::type_complexity, reason = "names and functions, no more")]
#![allow(clippy::duplicate_mod, reason = "each shared suite brings its helpers")]

#[path = "../common/mod.rs"]
#[allow(unused_imports, reason = "a suite takes a part")]
mod common;
#[path = "../conformance/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod conformance;
#[path = "../nccl/layer.rs"]
#[allow(dead_code, reason = "a part is for ranks that are processes")]
mod layer;

#[path = "../common/launched.rs"]
#[allow(dead_code, reason = "a suite takes a part")]
mod launched;

mod bench;
mod decode;
mod flat;
mod flat_checks;
mod graph;
mod handle_pool;
#[path = "../invariance.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for one device alone")]
mod invariance;
mod library;
mod lost;
mod low_latency;
mod raw;
#[path = "../common/several.rs"]
mod several;
#[path = "../common/steps.rs"]
#[allow(dead_code, reason = "a suite takes a part")]
mod steps;
mod windows;

use std::process::ExitCode;

use moebius::config::Payload;
use moebius::cuda::Cuda;
use moebius::ep::DispatcherKind;

use conformance::{ends_at_backward_as_known, gpus, over};
use invariance::LayerKind;
use several::Body;

const KINDS: [DispatcherKind; 1] = [DispatcherKind::NcclEp];
/// The suite's dispatchers, as the cases' names have them.
const MODES: [(&str, DispatcherKind); 2] =
    [("conformance", DispatcherKind::NcclEp), ("conformance_ll", DispatcherKind::NcclEpLowLatency)];
/// Cases that low latency has no say in: about backward, which it refuses in prepare, and about a combine of rows that
/// were never dispatched, which it refuses before the ranks meet.
const NOT_FOR_LOW_LATENCY: [&str; 4] =
    ["backward_that_was_not_agreed", "backward_that_never_comes", "handle_of_another_group", "tags_that_differ"];
/// Rules of the library that cases of the shared suites break, as its errors say them and as `expect` shows them.
const RULES: [&str; 9] = [
    "NcclEp(LowLatency",
    "name: \"top_k\"",
    "must be a multiple of 4, found",
    "expected a multiple of 16 bytes",
    "expected a multiple of 8 numbers",
    "NcclEp(Fours",
    "NcclEp(RowBytes",
    "NcclEp(Width",
    "NcclEp(Capacity",
];

/// Cases that are made to keep the rules.
const KEEPS_THE_RULES: &str = "random_steps";

/// Layers whose tokens keep their bits whatever else a call holds.
const INVARIANT: [(&str, LayerKind); 4] = [
    ("dense_experts", LayerKind::Dense),
    ("nvfp4_payload", LayerKind::Payload(Payload::Nvfp4)),
    ("mxfp8_payload", LayerKind::Payload(Payload::Mxfp8)),
    ("fp8_block_payload", LayerKind::Payload(Payload::Fp8Block)),
];
/// Of the batches of invariance, one in so many: each makes a group, and NCCL EP's take long to make.
const INVARIANCE_SHARE: usize = 16;

/// A shared test over some ranks, given the first GPU.
type Run = fn(&Cuda, usize);

/// A shared case: one that breaks a rule of the library says so and no more.
fn shared(run: impl Fn(&Cuda) + Send + 'static) -> Body {
    several::unless_against(&RULES, move |cuda| {
        run(cuda);
        None
    })
}

fn over_ranks(ranks: usize) -> Vec<(String, Body)> {
    let mut all: Vec<(String, Body)> = Vec::new();
    for (mode, kind) in MODES {
        let low = kind == DispatcherKind::NcclEpLowLatency;
        for (file, case) in conformance::cases().into_iter().filter(|(_, case)| case.is_for(kind, ranks)) {
            if low && NOT_FOR_LOW_LATENCY.contains(&case.name) {
                continue;
            }
            let name = format!("{mode}::{file}::{}", case.name);
            let keeps = case.name == KEEPS_THE_RULES;
            let run = move |cuda: &Cuda| {
                let setup = over(cuda, kind, ranks, case.name);
                if low {
                    return several::ignored_at_backward(ends_at_backward_as_known(&case, &setup));
                }
                (case.run)(&setup);
                None
            };
            let body: Body = if keeps { Box::new(run) } else { several::unless_against(&RULES, run) };
            all.push((name, body));
        }
    }
    for (name, layer) in INVARIANT {
        let run = move |cuda: &Cuda| {
            invariance::hold_over(cuda, layer, &[(ranks, DispatcherKind::NcclEp)], INVARIANCE_SHARE);
        };
        all.push((format!("invariance::{name}"), shared(run)));
    }
    for (name, run) in layer::cases() {
        all.push((format!("layer::{name}"), shared(move |cuda| run(cuda, ranks))));
    }
    let own = [
        ("decode", decode::cases()),
        ("raw", raw::cases()),
        ("graph", graph::cases()),
        ("low_latency", low_latency::cases()),
        ("handle_pool", handle_pool::cases()),
        ("lost", lost::cases()),
        ("windows", windows::cases()),
    ];
    for (file, (name, run)) in own.into_iter().flat_map(|(file, cases)| cases.into_iter().map(move |c| (file, c))) {
        all.push((
            format!("{file}::{name}"),
            Box::new(move |_| {
                run(ranks);
                None
            }),
        ));
    }
    all
}

fn main() -> ExitCode {
    if std::env::var_os(library::CHILD).is_some() {
        library::child();
        return ExitCode::SUCCESS;
    }
    if let Ok(body) = std::env::var(launched::CHILD) {
        handle_pool::child(&body).or_else(|| lost::child(&body)).expect("a body");
        return ExitCode::SUCCESS;
    }
    if std::env::args().nth(1).as_deref() == Some("bench") {
        let words: Vec<String> = std::env::args().skip(2).collect();
        let done = bench::run(several::available().unwrap_or(0), &words);
        several::close();
        return done.map_or_else(
            |problem| {
                eprintln!("{problem}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    several::run(library::cases(), several::each(over_ranks))
}
