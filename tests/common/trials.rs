//! Trials by name. What needs a GPU is ignored where there is none, and says so: the standard harness would count it as
//! passed.

use std::error::Error;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

#[path = "seed.rs"]
pub mod seed;

/// Numbers of GPUs that a suite's tests are over: each is there, and ignored where there are not as many.
#[allow(dead_code, reason = "not every suite has such tests")]
pub const GPUS: [usize; 3] = [2, 4, 8];

/// Result of a test.
pub trait Outcome {
    fn result(self) -> Result<(), String>;
}

impl Outcome for () {
    fn result(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> Outcome for Result<(), E> {
    fn result(self) -> Result<(), String> {
        self.map_err(|e| format!("{}\nrandom data of {}={}", e.into(), seed::VARIABLE, seed::shift()))
    }
}

/// A suite's trials.
pub struct Trials {
    gpu: Result<(), String>,
    all: Vec<Trial>,
}

impl Trials {
    /// `gpu`: why there is none, if so.
    pub fn new<E: ToString>(gpu: Result<(), E>) -> Self {
        let gpu = gpu.map_err(|e| e.to_string());
        // A machine with a GPU on which nothing can start must not look like one without.
        if let (Err(e), Some(_)) = (&gpu, std::env::var_os("MOEBIUS_NEEDS_GPU")) {
            panic!("{e}");
        }
        Self { gpu, all: Vec::new() }
    }

    /// Adds a test for any machine.
    pub fn add<O: Outcome>(&mut self, name: String, body: impl FnOnce() -> O + Send + 'static) {
        self.all.push(Trial::test(name, || Ok(body().result()?)));
    }

    /// Adds a test for a GPU.
    #[allow(dead_code, reason = "not every build has one")]
    pub fn add_gpu<O: Outcome>(&mut self, name: String, body: impl FnOnce() -> O + Send + 'static) {
        let there = self.gpu.is_ok();
        self.all.push(Trial::ignorable_test(name, move || {
            if !there {
                return Ok(Completion::ignored_with("skipped: no GPU"));
            }
            body().result()?;
            Ok(Completion::Completed)
        }));
    }

    /// Adds a test for so many GPUs, of which there are `found`.
    #[allow(dead_code, reason = "not every suite has one")]
    pub fn add_gpus<O: Outcome>(
        &mut self,
        name: String,
        (least, found): (usize, usize),
        body: impl FnOnce() -> O + Send + 'static,
    ) {
        self.all.push(Trial::ignorable_test(name, move || {
            if found < least {
                return Ok(Completion::ignored_with(format!("skipped: {found} GPUs")));
            }
            body().result()?;
            Ok(Completion::Completed)
        }));
    }

    /// Adds a test that another one runs, in a process of its own.
    #[allow(dead_code, reason = "not every suite has one")]
    pub fn add_inner<O: Outcome>(&mut self, name: String, body: impl FnOnce() -> O + Send + 'static) {
        self.all.push(Trial::test(name, || Ok(body().result()?)).with_ignored_flag(true));
    }

    pub fn run(self) -> ExitCode {
        let conclusion = libtest_mimic::run(&Arguments::from_args(), self.all);
        if let Err(reason) = &self.gpu {
            println!("the GPU's tests skipped: no GPU ({reason})");
        }
        conclusion.exit_code()
    }
}

/// Lists a file's tests: functions of one type.
macro_rules! tests {
    ($type:ty; $($(#[$attribute:meta])* $name:ident),+ $(,)?) => {
        /// The tests by name.
        pub fn cases() -> Vec<(&'static str, $type)> {
            Vec::from([$($(#[$attribute])* (stringify!($name), $name as $type)),+])
        }
    };
}
pub(crate) use tests;
