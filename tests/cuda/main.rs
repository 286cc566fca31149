//! The GPU suite: the CPU suites' own bodies, the layer against the CPU's from the same inputs, and what only a GPU can
//! get wrong. Without a GPU every test is ignored, and none passes. `large::` in a name: seconds and gigabytes;
//! `small::`: for sanitizers (`scripts/sanitize-gpu`).
#![allow(clippy::duplicate_mod, reason = "each shared suite brings its helpers")]
#![allow(clippy::type_complexity, reason = "names and functions, no more")]

// Finite differences and rank threads of the shared files stay the CPU's.
#[path = "../conformance/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod conformance;
#[path = "../faults/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod faults;
#[path = "../golden.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod golden;
#[path = "../gradients/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod gradients;
#[path = "../invariance.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod invariance;
#[path = "../kernels.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod kernels;
#[path = "../optimizer.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod optimizer;
#[path = "../quant/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod quant;
#[path = "../quantized.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod quantized;
#[path = "../router/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod router;

mod adamw;
mod decode;
mod deferred;
mod dequantized;
mod down_bwd;
mod few_sms;
#[path = "../common/gathered_rows.rs"]
mod gathered_rows;
mod harness;
mod large;
mod layer;
mod linear_bwd;
mod memory;
mod page_locked;
mod refused;
mod repeat;
mod route_plan;
mod small;
#[path = "../common/stacks.rs"]
mod stacks;
mod wgrad;
mod wide;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};
use moebius::cuda::Cuda;
use moebius::ep::DispatcherKind;

use harness::Test;

/// Every test, by name.
fn tests() -> Vec<(String, Test)> {
    let mut all = Vec::new();
    let mut shared = |suite: &str, cases: Vec<(&'static str, fn(&Cuda))>| {
        all.extend(cases.into_iter().map(|(name, body)| (format!("{suite}::{name}"), Box::new(body) as Test)));
    };
    shared("kernels", kernels::cases());
    shared("optimizer", optimizer::cases());
    shared("quant", quant::cases());
    shared("quantized", quantized::cases());
    shared("router", router::cases());
    shared("gradients", gradients::cases());
    shared("golden", golden::cases());
    shared("invariance", invariance::cases());
    shared("small", small::cases());
    shared("layer", layer::cases());
    shared("decode", decode::cases());
    shared("down_bwd", down_bwd::cases());
    shared("few_sms", few_sms::cases());
    shared("linear_bwd", linear_bwd::cases());
    shared("deferred", deferred::cases());
    shared("dequantized", dequantized::cases());
    shared("refused", refused::cases());
    shared("faults", faults::cases());
    shared("large::memory", memory::cases());
    shared("page_locked", page_locked::cases());
    shared("wgrad", wgrad::cases());
    shared("wide", wide::cases());
    shared("adamw", adamw::cases());
    shared("repeat", repeat::cases());
    shared("route_plan", route_plan::cases());
    shared("large", large::cases());
    all.extend(conformance::cases().into_iter().filter(|(_, case)| case.is_for(DispatcherKind::Local, 1)).map(
        |(file, case)| {
            let body = move |cuda: &Cuda| (case.run)(&conformance::alone(cuda, case.name));
            (format!("conformance::{file}::{}", case.name), Box::new(body) as Test)
        },
    ));
    // The kernels of other GPUs, on the one at hand.
    all.extend(invariance::cases().into_iter().map(|(name, body): (_, fn(&Cuda))| {
        let body = move |cuda: &Cuda| body(&cuda.portable());
        (format!("invariance_portable::{name}"), Box::new(body) as Test)
    }));
    all
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One device, whose fault word the tests share.
    arguments.test_threads = Some(1);
    let gpu = harness::gpu();
    let trials = tests().into_iter().map(|(name, body)| {
        let gpu = gpu.clone();
        Trial::ignorable_test(name, move || {
            let Ok(cuda) = gpu else { return Ok(Completion::ignored_with("skipped: no GPU")) };
            // What an earlier test left is not this one's.
            let _ = cuda.check();
            body(&cuda);
            cuda.check().map_err(|e| format!("a kernel's fault was left: {e}"))?;
            Ok(Completion::Completed)
        })
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if let Err(reason) = &gpu {
        println!("{} tests skipped: no GPU ({reason})", conclusion.num_ignored);
    }
    conclusion.exit_code()
}
