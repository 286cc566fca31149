//! One job: start, wait, end.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use moebius::ranks::{Identity, JobToken, VARIABLES};

use super::args::Options;
use super::group::{Ended, RankGroup};
use super::output::OutputForwarder;
use super::say;
use super::signals::{ENDS, Signals, WakeReason};

/// Longest time between two looks at the ranks: SIGCHLD tells sooner.
const LOOK: Duration = Duration::from_millis(200);
/// How a program ends whose output nobody reads.
const UNREAD: Ended = Ended::Signal(libc::SIGPIPE);
/// Least time that the last lines have to be written, where the job was asked to end.
const LEAST_FLUSH: Duration = Duration::from_secs(1);
/// Ports to choose from: below those that Linux gives to connections, which could take one before rank 0 does.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Rank(#[from] moebius::Error),
    #[error("start {program:?}: {error}")]
    Start { program: String, error: std::io::Error },
    #[error("{operation}: {error}")]
    System { operation: &'static str, error: std::io::Error },
    #[error("no free port in {PORTS:?} on 127.0.0.1; give --address")]
    NoPort,
}

impl RunError {
    pub fn status(&self) -> u8 {
        match self {
            RunError::Start { error, .. } if error.kind() == std::io::ErrorKind::NotFound => 127,
            RunError::Start { .. } => 126,
            _ => 1,
        }
    }
}

/// Runs the job and returns its status.
pub fn run(options: &Options) -> Result<u8, RunError> {
    // Before any thread, so that all of them have the signals blocked.
    let signals = Signals::block().map_err(|error| RunError::System { operation: "block signals", error })?;
    // Several hosts share one from outside; a host of its own needs nobody else's.
    let token = if options.world.is_some() { JobToken::from_env()? } else { JobToken::random()? };
    let address = match &options.address {
        Some(address) => address.clone(),
        None => free_address(&token)?,
    };
    let world = options.world.unwrap_or(options.ranks);
    // The ranks would refuse a bad address too, each with a message of its own.
    Identity::new(options.first, world, 0, Some(&address))?;
    let mut group = RankGroup::start(options.first, options.ranks, signals.before(), |rank| {
        let mut command = Command::new(&options.program);
        command.args(&options.args);
        for name in VARIABLES {
            command.env_remove(name);
        }
        command
            .env("MOEBIUS_RANK", rank.to_string())
            .env("MOEBIUS_WORLD", world.to_string())
            .env("MOEBIUS_LOCAL_RANK", (rank - options.first).to_string())
            .env("MOEBIUS_ADDRESS", &address)
            .env("MOEBIUS_TOKEN", token.to_hex());
        command
    })
    .map_err(|error| RunError::Start { program: options.program.to_string_lossy().into_owned(), error })?;
    let output = match OutputForwarder::of(&mut group) {
        Ok(output) => output,
        Err(error) => {
            group.finish();
            return Err(RunError::System { operation: "start a thread", error });
        }
    };
    let (status, asked) = watch(&mut group, &signals, &output, options);
    group.finish();
    // A program that its user ends waits for no reader for ever.
    let unread = output.finish(asked.then(|| options.grace.max(LEAST_FLUSH)));
    Ok(if status == 0 && unread { UNREAD.status() } else { status })
}

/// Waits until all ranks have ended; the status is the first failed one's, and whether the end was asked for. From the
/// first reason to end the job on (a rank that failed, unless the others are to keep going; a signal of the user's; output
/// that nobody reads) the ranks have the grace period; what is left then is killed.
fn watch(group: &mut RankGroup, signals: &Signals, output: &OutputForwarder, options: &Options) -> (u8, bool) {
    let grace = options.grace;
    let mut status = 0;
    let mut kill_at = None;
    let (mut unread, mut asked) = (false, false);
    loop {
        for (rank, ended) in group.newly_ended() {
            if ended.status() == 0 || status != 0 && !options.keep_going {
                continue;
            }
            status = if status == 0 { ended.status() } else { status };
            if options.keep_going {
                let others = if group.all_ended() { "" } else { "; the others keep going" };
                say(&format!("rank {rank} {ended}{others}"));
                continue;
            }
            kill_at.get_or_insert_with(|| Instant::now() + grace);
            let others = if group.all_ended() { "" } else { "; ending the others" };
            say(&format!("rank {rank} {ended}{others}"));
            group.signal(libc::SIGTERM);
        }
        if group.all_ended() {
            return (status, asked);
        }
        if output.unread() && !unread {
            (unread, asked) = (true, true);
            // As of a program that SIGPIPE ends; the ranks' own come after it.
            status = if status == 0 { UNREAD.status() } else { status };
            kill_at.get_or_insert_with(|| Instant::now() + grace);
            group.signal(libc::SIGTERM);
        }
        let mut wait = LOOK;
        if let Some(at) = kill_at {
            wait = wait.min(at.saturating_duration_since(Instant::now()));
            if wait.is_zero() {
                group.signal(libc::SIGKILL);
                kill_at = None;
                wait = LOOK;
            }
        }
        if let WakeReason::Signal(signal) = signals.next(wait) {
            group.signal(signal);
            if ENDS.contains(&signal) {
                asked = true;
                kill_at.get_or_insert_with(|| Instant::now() + grace);
            }
        }
    }
}

/// A free port on loopback. Rank 0 binds it a moment later; should another process be faster, it fails and says so.
fn free_address(token: &JobToken) -> Result<String, RunError> {
    let random = token.to_hex().bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let count = u32::from(PORTS.end - PORTS.start);
    (0..count)
        .map(|i| PORTS.start + (random.wrapping_add(i) % count) as u16)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .map(|port| format!("127.0.0.1:{port}"))
        .ok_or(RunError::NoPort)
}
