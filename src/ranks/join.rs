//! The other ranks' side: connect, say who, wait for the answer. Tries again while rank 0 is not there yet.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::mpsc;
use std::time::Duration;

use super::bootstrap::Bootstrap;
use super::deadline::Deadline;
use super::message::{HELLO_BYTES, Hello, REPLY_BYTES, Reply, UniqueId};
use crate::error::RankError;

/// Pause after the first failed attempt; doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// Longest wait for one address to take a connection: another of the same name may work.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// How much longer than rank 0 a rank waits, once connected: rank 0 then says who was missing.
const EXTRA_WAIT: Duration = Duration::from_secs(2);

enum Attempt {
    Done(UniqueId, TcpStream),
    /// No use trying again.
    Failed(RankError),
    /// Rank 0 may not be there yet.
    Again(String),
    /// The same, where the end of the time may have been the cause: says less than an earlier attempt's reason.
    Late(String),
}

/// The id, and the connection to rank 0, which may stay open.
pub(super) fn join(job: &Bootstrap) -> Result<(UniqueId, TcpStream), RankError> {
    let deadline = Deadline::after(job.timeout);
    let mut pause = FIRST_PAUSE;
    let mut last = None;
    while let Some(left) = deadline.left() {
        match attempt(job, deadline) {
            Attempt::Done(id, stream) => return Ok((id, stream)),
            Attempt::Failed(error) => return Err(error),
            Attempt::Again(why) => last = Some(why),
            Attempt::Late(why) => last = last.or(Some(why)),
        }
        std::thread::sleep(pause.min(left));
        pause = (2 * pause).min(LAST_PAUSE);
    }
    let (address, last) = (job.address.clone(), last.unwrap_or_else(|| "no attempt".to_string()));
    Err(RankError::Unreachable { rank: job.rank, address, timeout: job.timeout, last })
}

fn attempt(job: &Bootstrap, deadline: Deadline) -> Attempt {
    match connect(&job.address, deadline) {
        Ok(stream) => talk(job, stream, deadline.extended(EXTRA_WAIT)),
        Err(why) if deadline.left().is_none() => Attempt::Late(why),
        Err(why) => Attempt::Again(why),
    }
}

fn talk(job: &Bootstrap, mut stream: TcpStream, deadline: Deadline) -> Attempt {
    let (round, world, rank) = (job.round, job.world as u32, job.rank as u32);
    let hello: [u8; HELLO_BYTES] = Hello { token: job.token.clone(), round, world, rank }.encode();
    let sent = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_write_timeout(deadline.left()))
        .and_then(|()| stream.write_all(&hello));
    if let Err(error) = sent {
        return Attempt::Again(format!("send: {error}"));
    }
    let mut bytes = [0; REPLY_BYTES];
    match receive(&mut stream, &mut bytes, deadline) {
        Ok(()) => {}
        Err(why) => return Attempt::Again(why),
    }
    let (rank, address) = (job.rank, job.address.clone());
    match Reply::parse(&bytes) {
        Ok(Reply::Id(id)) => Attempt::Done(id, stream),
        Ok(Reply::Refused(reason)) => Attempt::Failed(RankError::Refused { rank, address, reason }),
        Ok(Reply::GaveUp { count, missing }) => {
            Attempt::Failed(RankError::GaveUp { rank, count: count as usize, missing: Reply::ranks(&missing) })
        }
        Ok(Reply::Failed(reason)) => Attempt::Failed(RankError::RootFailed { rank, reason }),
        Err(problem) => Attempt::Failed(RankError::Message { rank, address, problem }),
    }
}

/// Fills `bytes`, however slowly they come, until the deadline.
fn receive(stream: &mut TcpStream, bytes: &mut [u8], deadline: Deadline) -> Result<(), String> {
    let mut filled = 0;
    while filled < bytes.len() {
        let Some(left) = deadline.left() else { return Err("connected, but not answered".to_string()) };
        stream.set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err("connected, but closed without an answer".to_string()),
            Ok(count) => filled += count,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return Err(format!("receive: {error}")),
            },
        }
    }
    Ok(())
}

fn connect(address: &str, deadline: Deadline) -> Result<TcpStream, String> {
    let mut last = "no address".to_string();
    for candidate in resolve(address, deadline)? {
        let Some(left) = deadline.left() else { break };
        match TcpStream::connect_timeout(&candidate, left.min(CONNECT_TIME)) {
            // Nobody listens, and the system chose that very port for this end: TCP then connects it to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => last = "connected to itself".into(),
            Ok(stream) => return Ok(stream),
            Err(error) => last = format!("connect to {candidate}: {error}"),
        }
    }
    Err(last)
}

/// Addresses of `host:port`. A name is looked up by a thread of its own, since the system's resolver has no timeout;
/// one that hangs is left behind.
fn resolve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = SocketAddr::from_str(address) {
        return Ok(vec![address]);
    }
    let (send, found) = mpsc::channel();
    let name = address.to_string();
    std::thread::Builder::new()
        .name("moebius-resolve".to_string())
        .spawn(move || send.send(name.to_socket_addrs().map(Vec::from_iter)))
        .map_err(|error| format!("resolve: {error}"))?;
    match found.recv_timeout(deadline.left().unwrap_or_default()) {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(format!("resolve {address}: {error}")),
        Err(_) => Err(format!("resolve {address}: no answer")),
    }
}
