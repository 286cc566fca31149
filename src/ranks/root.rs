//! Rank 0's side: waits for all ranks, then answers all of them.
//!
//! One thread looks at every connection in turn and never blocks on any of them, so a silent or slow one holds up
//! nobody. A connection that has not shown a valid hello owns 64 bytes, for five seconds at most, and there are at
//! most 64 of those: a further one replaces the oldest.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::bootstrap::Bootstrap;
use super::deadline::Deadline;
use super::message::{HELLO_BYTES, Hello, Reply, UniqueId};
use crate::error::{Error, Result};
use crate::error::{RankError, Refusal};

/// Connections without a valid hello that are kept at once.
const MAX_PENDING: usize = 64;
/// How long each is kept. A rank sends its hello as soon as it is connected.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// Pause between two looks at the connections.
const PAUSE: Duration = Duration::from_millis(2);
/// Refusals that an error tells of.
const MAX_NOTES: usize = 8;
/// Least time that answers get, even where the deadline is over.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// Rank 0's bound socket. [`Bootstrap::exchange`] makes one itself; made by hand, it may have port 0 and say which
/// port it got.
#[derive(Debug)]
pub struct Root {
    listener: TcpListener,
    address: SocketAddr,
    deadline: Deadline,
}

impl Root {
    /// Binds `host:port`, and nothing else than that address. The timeout runs from here.
    ///
    /// # Errors
    /// [`RankError::Network`]: the name has no address, or it is taken or not this host's.
    pub fn bind(address: &str, timeout: Duration) -> Result<Self> {
        let network = |operation, message: String| RankError::Network {
            rank: 0,
            operation,
            address: address.to_string(),
            message,
        };
        let mut found = address.to_socket_addrs().map_err(|error| network("resolve", error.to_string()))?;
        let found = found.next().ok_or_else(|| network("resolve", "no address".to_string()))?;
        let bound = TcpListener::bind(found).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let (address, listener) = bound.map_err(|error| network("bind", error.to_string()))?;
        Ok(Self { listener, address, deadline: Deadline::after(timeout) })
    }

    /// The address bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for all other ranks, makes the id and sends it to all. Of `job` the address is not used.
    ///
    /// # Errors
    /// As [`Bootstrap::exchange`]. The ranks that had come are told.
    pub fn serve(self, job: &Bootstrap, make: impl FnOnce() -> Result<UniqueId>) -> Result<UniqueId> {
        self.serve_connected(job, make).map(|(id, _)| id)
    }

    /// The same, and the connections to ranks 1.. of the job, which stay open.
    pub(crate) fn serve_connected(
        self,
        job: &Bootstrap,
        make: impl FnOnce() -> Result<UniqueId>,
    ) -> Result<(UniqueId, Vec<TcpStream>)> {
        job.check()?;
        if job.rank != 0 {
            return Err(Error::invalid("ranks::Root::serve", "rank", 0, job.rank));
        }
        let mut connections =
            Connections { job, pending: Vec::new(), ranks: (1..job.world).map(|_| None).collect(), notes: Vec::new() };
        let made = self.gather(&mut connections).and_then(|()| make());
        let reply = match &made {
            Ok(id) => Reply::Id(*id),
            Err(Error::Rank(RankError::Missing { missing, .. })) => Reply::gave_up(missing),
            Err(error) => Reply::failed(&error.to_string()),
        };
        let answered = connections.answer(&reply, self.deadline);
        let id = made?;
        answered.map(|streams| (id, streams)).map_err(|ranks| RankError::Left { ranks }.into())
    }

    fn gather(&self, connections: &mut Connections<'_>) -> Result<()> {
        loop {
            self.accept_pending(connections)?;
            connections.read_hellos();
            connections.free_departed();
            let missing = connections.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if self.deadline.left().is_none() {
                let refused = std::mem::take(&mut connections.notes);
                return Err(RankError::Missing { missing, timeout: connections.job.timeout, refused }.into());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes the connections that wait, no more than fit at once: those accepted are read before the next.
    fn accept_pending(&self, connections: &mut Connections<'_>) -> Result<()> {
        for _ in 0..MAX_PENDING {
            match self.listener.accept() {
                Ok((stream, peer)) => connections.add(stream, peer),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => break,
                    // The peer was gone before it was taken.
                    ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted => {}
                    _ => {
                        let (address, message) = (self.address.to_string(), error.to_string());
                        return Err(RankError::Network { rank: 0, operation: "accept at", address, message }.into());
                    }
                },
            }
        }
        Ok(())
    }
}

/// The connections to rank 0.
struct Connections<'a> {
    job: &'a Bootstrap,
    /// Those that have not shown a valid hello, oldest first.
    pending: Vec<PendingConnection>,
    /// Ranks 1.. that have come.
    ranks: Vec<Option<TcpStream>>,
    /// Reasons of refusals.
    notes: Vec<String>,
}

struct PendingConnection {
    stream: TcpStream,
    peer: SocketAddr,
    since: Instant,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
}

enum HelloProgress {
    /// Bytes of it are yet to come.
    Incomplete,
    Complete,
    Closed,
}

impl Connections<'_> {
    fn add(&mut self, stream: TcpStream, peer: SocketAddr) {
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        if self.pending.len() >= MAX_PENDING {
            let oldest = self.pending.remove(0);
            self.note(oldest.peer, "replaced by newer connections before it said who it is");
        }
        let bytes = [0; HELLO_BYTES];
        self.pending.push(PendingConnection { stream, peer, since: Instant::now(), bytes, filled: 0 });
    }

    fn read_hellos(&mut self) {
        for mut connection in std::mem::take(&mut self.pending) {
            match connection.read() {
                HelloProgress::Complete => self.check_hello(connection),
                HelloProgress::Incomplete if connection.since.elapsed() < HELLO_TIME => self.pending.push(connection),
                HelloProgress::Incomplete => self.note(connection.peer, "silent for too long"),
                // Port scanners and health checks do this; a rank comes back.
                HelloProgress::Closed => {}
            }
        }
    }

    /// Nothing is told to who does not have the token, but that it is wrong.
    fn check_hello(&mut self, connection: PendingConnection) {
        let verdict = match Hello::parse(&connection.bytes) {
            Err(_) => Err(Refusal::Malformed),
            Ok(hello) if !hello.token.matches(&self.job.token) => Err(Refusal::JobToken),
            Ok(hello) if hello.round != self.job.round => Err(Refusal::Round(self.job.round)),
            Ok(hello) if hello.world as usize != self.job.world => Err(Refusal::World(self.job.world as u32)),
            Ok(hello) if hello.rank as usize >= self.job.world => Err(Refusal::OutOfRange(hello.rank)),
            // Rank 0 is here itself.
            Ok(Hello { rank: 0, .. }) => Err(Refusal::Duplicate(0)),
            Ok(hello) if self.present(hello.rank as usize) => Err(Refusal::Duplicate(hello.rank)),
            Ok(hello) => Ok(hello.rank as usize),
        };
        match verdict {
            Ok(rank) => self.ranks[rank - 1] = Some(connection.stream),
            Err(refusal) => {
                self.note(connection.peer, refusal);
                let mut stream = connection.stream;
                // A new connection's buffer takes all of it at once; who does not read it has not been here.
                let _ = stream.write(&Reply::Refused(refusal).encode());
            }
        }
    }

    /// Frees the places of ranks that have left, so that they can come again.
    fn free_departed(&mut self) {
        for rank in 1..self.job.world {
            self.present(rank);
        }
    }

    /// Whether a rank has come and is still there; if not, its place is free.
    fn present(&mut self, rank: usize) -> bool {
        let slot = &mut self.ranks[rank - 1];
        let Some(stream) = slot else { return false };
        match stream.read(&mut [0]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return true,
            // Closed, broken, or says more than there is to say.
            _ => *slot = None,
        }
        if self.notes.len() < MAX_NOTES {
            self.notes.push(format!("rank {rank} left"));
        }
        false
    }

    fn missing(&self) -> Vec<usize> {
        (1..self.job.world).filter(|rank| self.ranks[rank - 1].is_none()).collect()
    }

    /// Answers every rank that has come, and gives their connections; those whom it did not reach are the error.
    fn answer(&mut self, reply: &Reply, deadline: Deadline) -> std::result::Result<Vec<TcpStream>, Vec<usize>> {
        let bytes = reply.encode();
        let (mut lost, mut reached) = (Vec::new(), Vec::new());
        for (place, slot) in self.ranks.iter_mut().enumerate() {
            let Some(mut stream) = slot.take() else { continue };
            let time = deadline.left().unwrap_or_default().max(ANSWER_TIME);
            let sent = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_write_timeout(Some(time)))
                .and_then(|()| stream.write_all(&bytes));
            match sent {
                Ok(()) => reached.push(stream),
                Err(_) => lost.push(place + 1),
            }
        }
        if lost.is_empty() { Ok(reached) } else { Err(lost) }
    }

    fn note(&mut self, peer: SocketAddr, why: impl std::fmt::Display) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(format!("{peer}: {why}"));
        }
    }
}

impl PendingConnection {
    fn read(&mut self) -> HelloProgress {
        while self.filled < HELLO_BYTES {
            match self.stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => return HelloProgress::Closed,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return HelloProgress::Incomplete,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return HelloProgress::Closed,
            }
        }
        HelloProgress::Complete
    }
}
