//! Several GPUs over NCCL: the CPU ranks' conformance suite from the same source, the communicator's own bodies, whole
//! layers against CPU ranks, lost ranks. Each test is there for every number of ranks and ignored where there are not as many
//! GPUs; what needs no GPU (finding the library) runs everywhere.
#![allow(clippy::duplicate_mod, reason = "each shared suite brings its helpers")]

#[path = "../common/mod.rs"]
#[allow(unused_imports, reason = "a suite takes a part")]
mod common;
#[path = "../conformance/main.rs"]
#[allow(dead_code, unused_imports, reason = "a suite has parts for the CPU alone")]
mod conformance;

#[path = "../common/launched.rs"]
#[allow(dead_code, reason = "a suite takes a part")]
mod launched;
mod layer;
mod library;
mod lost;
mod processes;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};
use moebius::cuda::Cuda;
use moebius::ep::DispatcherKind;

use conformance::{gpus, over};

/// Numbers of ranks.
const RANKS: [usize; 2] = [2, 4];
const KINDS: [DispatcherKind; 2] = [DispatcherKind::AllToAll, DispatcherKind::AllGather];

/// A body for any number of ranks.
type Run = fn(&Cuda, usize);

/// A test over some ranks, given the first GPU.
type Body = Box<dyn Fn(&Cuda) + Send>;

fn over_ranks(ranks: usize) -> Vec<(String, Body)> {
    let mut all: Vec<(String, Body)> = Vec::new();
    for kind in KINDS {
        for (file, case) in conformance::cases().into_iter().filter(|(_, case)| case.min_ranks <= ranks) {
            let name = format!("conformance::{kind:?}::{file}::{}", case.name);
            let body = move |cuda: &Cuda| (case.run)(&over(cuda, kind, ranks, case.name));
            all.push((name, Box::new(body)));
        }
    }
    for body in conformance::communicator_bodies().into_iter().filter(|body| (body.ranks)(ranks)) {
        all.push((format!("communicator::{}", body.name), Box::new(move |cuda: &Cuda| (body.run)(cuda, ranks))));
    }
    for (file, cases) in [("layer", layer::cases()), ("lost", lost::cases()), ("processes", processes::cases())] {
        for (name, run) in cases {
            all.push((format!("{file}::{name}"), Box::new(move |cuda: &Cuda| run(cuda, ranks))));
        }
    }
    all
}

fn trials(available: &Result<usize, String>) -> Vec<Trial> {
    let mut trials: Vec<Trial> = library::cases()
        .into_iter()
        .map(|(name, run)| {
            Trial::test(format!("library::{name}"), move || {
                run();
                Ok(())
            })
        })
        .collect();
    for ranks in RANKS {
        for (name, body) in over_ranks(ranks) {
            let found = available.clone();
            trials.push(Trial::ignorable_test(format!("r{ranks}::{name}"), move || match found {
                Ok(found) if found >= ranks => {
                    let (_, gpus) = gpus::first(1);
                    body(&gpus[0]);
                    Ok(Completion::Completed)
                }
                Ok(found) => Ok(Completion::ignored_with(format!("skipped: {found} GPU"))),
                Err(_) => Ok(Completion::ignored_with("skipped: no GPU")),
            }));
        }
    }
    trials
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
    let mut arguments = Arguments::from_args();
    // The GPUs are all tests'.
    arguments.test_threads = Some(1);
    let available = gpus::available();
    if let (Err(e), Some(_)) = (&available, std::env::var_os("MOEBIUS_NEEDS_GPU")) {
        panic!("{e}");
    }
    let conclusion = libtest_mimic::run(&arguments, trials(&available));
    match &available {
        Err(reason) => println!("{} tests skipped: no GPU ({reason})", conclusion.num_ignored),
        Ok(found) => println!("{} tests skipped: {found} GPUs", conclusion.num_ignored),
    }
    gpus::close();
    common::target::gpus::close();
    conclusion.exit_code()
}
