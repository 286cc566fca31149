//! `moebius-run -n 8 PROGRAM ARGS`: starts ranks on this host, tells each who it is, and ends all when one dies.

#[cfg(target_os = "linux")]
mod args;
#[cfg(target_os = "linux")]
mod group;
#[cfg(target_os = "linux")]
mod guard;
#[cfg(target_os = "linux")]
mod output;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod signals;

use std::io::Write;
use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    match args::parse(std::env::args_os().skip(1)) {
        Ok(args::Request::Run(options)) => match run::run(&options) {
            Ok(status) => ExitCode::from(status),
            Err(error) => {
                say(&error.to_string());
                ExitCode::from(error.status())
            }
        },
        Ok(args::Request::Help) => print(args::HELP),
        Ok(args::Request::PrintToken) => match moebius::ranks::JobToken::random() {
            Ok(token) => print(&format!("{}\n", token.to_hex())),
            Err(error) => {
                say(&error.to_string());
                ExitCode::FAILURE
            }
        },
        Err(problem) => {
            say(&format!("{problem}; --help lists the options"));
            ExitCode::from(2)
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    say("runs on Linux only");
    ExitCode::FAILURE
}

#[cfg(target_os = "linux")]
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// A line on standard error; unlike `eprintln!` without a panic where nobody reads it.
fn say(text: &str) {
    let _ = std::io::stderr().write_all(format!("moebius-run: {text}\n").as_bytes());
}
