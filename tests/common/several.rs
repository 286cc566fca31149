//! Suites over several GPUs: each test is there for every number of ranks, and ignored where there are not as many
//! GPUs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use libtest_mimic::{Arguments, Completion, Trial};
use moebius::cuda::Cuda;

use super::conformance::{gpus, seed};

/// Numbers of ranks: each as far as there are GPUs.
pub const RANKS: [usize; 3] = [2, 4, 8];

/// A test over some ranks, given the first GPU. Returns why it is not for what the suite is about, if it is not.
pub type Body = Box<dyn Fn(&Cuda) -> Option<String> + Send>;
/// A test that needs no GPU, by name.
pub type Here = (&'static str, fn());

/// Seeded numbers around zero.
pub fn numbers(own: u64, count: usize, scale: f64) -> Vec<f64> {
    let mut state = seed::seed(own).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    };
    (0..count).map(|_| next() * scale).collect()
}

/// A case of a shared suite: one that breaks a rule of the suite's dispatcher, as its panic shows it, says so and no more.
#[allow(dead_code, reason = "for dispatchers that have rules of their own")]
pub fn unless_against(rules: &'static [&'static str], run: impl Fn(&Cuda) -> Option<String> + Send + 'static) -> Body {
    Box::new(move |cuda| {
        let said = Arc::new(Mutex::new(String::new()));
        let (keep, before) = (Arc::clone(&said), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            if let Ok(mut said) = keep.lock() {
                said.push_str(&format!("{info}\n"));
            }
        }));
        let result = catch_unwind(AssertUnwindSafe(|| run(cuda)));
        std::panic::set_hook(before);
        let said = said.lock().map(|s| s.clone()).unwrap_or_default();
        match result {
            Ok(reason) => reason,
            Err(panic) => match rules.iter().find(|rule| said.contains(**rule)) {
                Some(rule) => Some(format!("breaks a rule of the library: {rule}")),
                None => {
                    println!("{said}");
                    resume_unwind(panic)
                }
            },
        }
    })
}

/// What is said of a case that has come to backward over a dispatcher that has none.
#[allow(dead_code, reason = "for dispatchers for forward alone")]
pub fn ignored_at_backward(ended: bool) -> Option<String> {
    ended.then(|| "came to backward, which every rank was refused".into())
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

/// A test for at least so many GPUs.
pub struct Case {
    pub name: String,
    pub gpus: usize,
    pub body: Body,
}

/// Tests that are there for every number of ranks.
pub fn each(over: fn(usize) -> Vec<(String, Body)>) -> Vec<Case> {
    let of =
        |gpus| over(gpus).into_iter().map(move |(name, body)| Case { name: format!("r{gpus}::{name}"), gpus, body });
    RANKS.into_iter().flat_map(of).collect()
}

fn trials(available: &Result<usize, String>, here: Vec<Here>, cases: Vec<Case>) -> Vec<Trial> {
    // Before a test puts a hook of its own in the place of this one, which names the seed.
    seed::shift();
    let anywhere = |(name, run): Here| {
        Trial::test(format!("library::{name}"), move || {
            run();
            Ok(())
        })
    };
    let on_gpus = |Case { name, gpus: least, body }| {
        let found = available.clone();
        Trial::ignorable_test(name, move || match found {
            Ok(found) if found >= least => {
                let (_, gpus) = gpus::first(1);
                Ok(body(&gpus[0]).map_or(Completion::Completed, Completion::ignored_with))
            }
            Ok(found) => Ok(Completion::ignored_with(format!("skipped: {found} GPU"))),
            Err(_) => Ok(Completion::ignored_with("skipped: no GPU")),
        })
    };
    here.into_iter().map(anywhere).chain(cases.into_iter().map(on_gpus)).collect()
}

/// Runs a suite: what needs no GPU, and what needs some.
pub fn run(here: Vec<Here>, cases: Vec<Case>) -> ExitCode {
    let available = available();
    let mut arguments = Arguments::from_args();
    // The GPUs are all tests'.
    arguments.test_threads = Some(1);
    let conclusion = libtest_mimic::run(&arguments, trials(&available, here, cases));
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
    super::common::devices::gpus::close();
}
