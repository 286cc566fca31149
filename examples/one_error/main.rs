//! Follows an error of rank 3 to the other three ranks: prints what each of them is told, and that the group goes on.
//! `docs/errors.md` explains the run; its text is this program's output.
//!
//! ```text
//! cargo run --release --example one_error
//! ```

#[path = "../support/output.rs"]
mod output;
mod run;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use output::{conclude, say};

/// Follows an error of rank 3 to the other ranks, and prints what each of them is told.
#[derive(Parser)]
#[command(version)]
struct Arguments {}

fn main() -> ExitCode {
    let Arguments {} = Arguments::parse();
    conclude(follow().map(|()| true))
}

fn follow() -> Result<(), Box<dyn Error + Send + Sync>> {
    let ranks = run::run()?;
    for (at, stage) in run::STAGES.into_iter().enumerate() {
        say(stage.title());
        for (rank, said) in ranks.iter().enumerate() {
            if let Some(line) = said.get(at) {
                say(format_args!("  rank {rank}: {line}"));
            }
        }
    }
    Ok(())
}
