//! Suites over several GPUs: each test is there for every number of ranks, and ignored where there are not as many GPUs.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};
use moebius::cuda::Cuda;

use super::conformance::gpus;

/// Numbers of ranks.
pub const RANKS: [usize; 2] = [2, 4];

/// A test over some ranks, given the first GPU. Returns why it is not for what the suite is about, if it is not.
pub type Body = Box<dyn Fn(&Cuda) -> Option<String> + Send>;
/// A test that needs no GPU, by name.
pub type Here = (&'static str, fn());

/// Seeded numbers around zero.
pub fn numbers(seed: u64, count: usize, scale: f64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    (0..count).map(|_| next() * scale).collect()
}

/// The GPUs that tests may use, or why there is none.
pub fn available() -> Result<usize, String> {
    let available = gpus::available();
    // A machine with GPUs on which nothing can start must not look like one without.
    if let (Err(e), Some(_)) = (&available, std::env::var_os("MOEBIUS_NEEDS_GPU")) {
        panic!("{e}");
    }
    available
}

fn trials(available: &Result<usize, String>, here: Vec<Here>, over: fn(usize) -> Vec<(String, Body)>) -> Vec<Trial> {
    let anywhere = |(name, run): Here| {
        Trial::test(format!("library::{name}"), move || {
            run();
            Ok(())
        })
    };
    let mut trials: Vec<Trial> = here.into_iter().map(anywhere).collect();
    for ranks in RANKS {
        for (name, body) in over(ranks) {
            let found = available.clone();
            trials.push(Trial::ignorable_test(format!("r{ranks}::{name}"), move || match found {
                Ok(found) if found >= ranks => {
                    let (_, gpus) = gpus::first(1);
                    Ok(body(&gpus[0]).map_or(Completion::Completed, Completion::ignored_with))
                }
                Ok(found) => Ok(Completion::ignored_with(format!("skipped: {found} GPU"))),
                Err(_) => Ok(Completion::ignored_with("skipped: no GPU")),
            }));
        }
    }
    trials
}

/// Runs a suite: what needs no GPU, and what is there for each number of ranks.
pub fn run(here: Vec<Here>, over: fn(usize) -> Vec<(String, Body)>) -> ExitCode {
    let available = available();
    let mut arguments = Arguments::from_args();
    // The GPUs are all tests'.
    arguments.test_threads = Some(1);
    let conclusion = libtest_mimic::run(&arguments, trials(&available, here, over));
    match &available {
        Err(reason) => println!("{} tests skipped: no GPU ({reason})", conclusion.num_ignored),
        Ok(found) => println!("{} tests skipped or not for this suite: {found} GPUs", conclusion.num_ignored),
    }
    close();
    conclusion.exit_code()
}

/// Ends the connections before the process does.
pub fn close() {
    gpus::close();
    super::common::target::gpus::close();
}
