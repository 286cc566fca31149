//! Output of the examples and benches, and how they end.
#![allow(dead_code, reason = "every user takes a part")]

use std::error::Error;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

use moebius::checkpoint::{printable, printable_lines};

/// The status of a program that SIGPIPE ends, as a shell reports it.
const UNREAD: i32 = 128 + 13;

/// A line of the output. Whoever has read enough of it and closes it (`| head`) ends the program, without a word.
pub fn say(line: impl Display) {
    match writeln!(std::io::stdout(), "{line}") {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(UNREAD),
        Err(error) => {
            complain(format_args!("error: standard output: {error}"));
            std::process::exit(1);
        }
    }
}

/// A line on standard error; unlike `eprintln!` without a panic where nobody reads it.
pub fn complain(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A command line that cannot be: what clap cannot know of it.
#[derive(Debug)]
pub struct Usage(pub String);

impl Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// Refuses a folder to write that holds something, unless that was asked for.
pub fn refuse_full_folder(out: &Path, force: bool) -> Result<(), Usage> {
    let holds_something = std::fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    match holds_something && !force {
        true => {
            let out = printable(&out.display().to_string());
            Err(Usage(format!("{out}: holds files; expected a folder that is new or empty, or --force")))
        }
        false => Ok(()),
    }
}

impl From<String> for Usage {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Usage {
    fn from(text: &str) -> Self {
        Self(text.to_string())
    }
}

/// A program's status, and its error where it has one: 0 where all is well; 1 where a check fails (`Ok(false)`) or
/// something else does; 2 where the command line cannot be, as clap has it.
pub fn conclude(outcome: Result<bool, Box<dyn Error + Send + Sync>>) -> ExitCode {
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // It may quote names and texts of others.
            complain(format_args!("error: {}", printable_lines(&error.to_string())));
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}
