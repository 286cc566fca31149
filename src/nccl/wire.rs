//! Notices between processes: the bootstrap's connections, kept open. Rank 0 passes on what a rank says to all others;
//! a connection that ends without a word means that its process has died.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::Result;

use super::notice::{BYTES, Kind, Notice};
use super::notices::Notices;

/// Pause between two looks at the connections.
const PAUSE: Duration = Duration::from_millis(5);
/// A rank that does not take a message for so long is as good as gone; its own timeout is told by others.
const WRITE_TIME: Duration = Duration::from_secs(1);

/// One process's end.
pub(super) struct Wire {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    rank: usize,
    lines: Mutex<Vec<Line>>,
    desk: Mutex<Desk>,
}

/// A connection to a rank; `stream` is `None` once it has ended.
struct Line {
    rank: usize,
    stream: Option<TcpStream>,
    bytes: [u8; BYTES],
    filled: usize,
    /// It has said that it will end.
    bye: bool,
}

/// Who is to hear what.
#[derive(Default)]
struct Desk {
    communicators: Vec<Communicator>,
    /// What came before a communicator was known here, and whoever is lost.
    kept: Vec<Notice>,
    closed: bool,
}

struct Communicator {
    id: u64,
    /// Its ranks, as the world numbers them.
    ranks: Vec<usize>,
    notices: Weak<Notices>,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wire {{ rank: {} }}", self.shared.rank)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// Rank 0 has a connection to each other rank, in their order; every other rank has one to rank 0.
    pub(super) fn new(rank: usize, streams: Vec<TcpStream>) -> Result<Arc<Self>> {
        let mut lines = Vec::new();
        for (i, stream) in streams.into_iter().enumerate() {
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            ready.map_err(|e| super::system("configure a connection", e))?;
            let peer = if rank == 0 { i + 1 } else { 0 };
            lines.push(Line { rank: peer, stream: Some(stream), bytes: [0; BYTES], filled: 0, bye: false });
        }
        let shared = Arc::new(Shared { rank, lines: Mutex::new(lines), desk: Mutex::default() });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("nccl-wire-{rank}")).spawn(move || own.run());
        Ok(Arc::new(Self { shared, thread: Some(thread.map_err(|e| super::system("start a thread", e))?) }))
    }

    /// Notices of a communicator go here from now on.
    pub(super) fn register(&self, id: u64, ranks: Vec<usize>, notices: &Arc<Notices>) {
        let mut desk = lock(&self.shared.desk);
        let notices = Arc::downgrade(notices);
        desk.communicators.retain(|c| c.notices.strong_count() > 0);
        desk.communicators.push(Communicator { id, ranks, notices });
        let kept = desk.kept.clone();
        for notice in &kept {
            desk.deliver(notice);
        }
    }

    /// Tells all other ranks.
    pub(super) fn post(&self, kind: Kind) {
        let notice = Notice { rank: self.shared.rank as u32, kind };
        self.shared.send(&notice, self.shared.rank);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.post(Kind::Bye);
        lock(&self.shared.desk).closed = true;
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported; nothing can be done about it here.
            let _ = thread.join();
        }
        for line in lock(&self.shared.lines).iter() {
            let _ = line.stream.as_ref().map(|stream| stream.shutdown(Shutdown::Write));
        }
    }
}

impl Shared {
    fn run(&self) {
        while !lock(&self.desk).closed {
            let heard = self.listen();
            for notice in heard {
                // Rank 0 passes on; what it hears at its end it has seen itself.
                if self.rank == 0 && notice.kind != Kind::Bye {
                    self.send(&notice, notice.rank as usize);
                }
                lock(&self.desk).hear(notice);
            }
            thread::sleep(PAUSE);
        }
    }

    /// What has come on all lines.
    fn listen(&self) -> Vec<Notice> {
        let mut heard = Vec::new();
        for line in lock(&self.lines).iter_mut() {
            line.listen(self.rank == 0, &mut heard);
        }
        heard
    }

    /// To everyone at the other ends but one.
    fn send(&self, notice: &Notice, except: usize) {
        let bytes = notice.encode();
        for line in lock(&self.lines).iter_mut().filter(|line| line.rank != except) {
            let Some(stream) = &mut line.stream else { continue };
            let sent = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_write_timeout(Some(WRITE_TIME)))
                .and_then(|()| stream.write_all(&bytes))
                .and_then(|()| stream.set_nonblocking(true));
            if sent.is_err() {
                // Reading will find that it has ended.
                let _ = stream.shutdown(Shutdown::Both);
                let _ = stream.set_nonblocking(true);
            }
        }
    }
}

impl Line {
    /// `hub`: this line's rank may speak for itself only.
    fn listen(&mut self, hub: bool, heard: &mut Vec<Notice>) {
        while let Some(stream) = &mut self.stream {
            let ended = match stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => true,
                Ok(count) => {
                    self.filled += count;
                    if self.filled < BYTES {
                        continue;
                    }
                    self.filled = 0;
                    match Notice::parse(&self.bytes).filter(|n| !hub || n.rank as usize == self.rank) {
                        Some(notice) => {
                            self.bye |= notice.kind == Kind::Bye && notice.rank as usize == self.rank;
                            heard.push(notice);
                            continue;
                        }
                        // Not of this protocol.
                        None => true,
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => true,
            };
            if ended {
                self.stream = None;
                if !self.bye {
                    heard.push(Notice { rank: self.rank as u32, kind: Kind::Lost });
                }
            }
        }
    }
}

impl Desk {
    fn hear(&mut self, notice: Notice) {
        let known = self.deliver(&notice);
        if notice.kind == Kind::Lost || !known {
            self.kept.push(notice);
        }
    }

    /// Whether a communicator was there to hear it.
    fn deliver(&mut self, notice: &Notice) -> bool {
        let rank = notice.rank as usize;
        let mut known = false;
        for c in &self.communicators {
            let (Some(notices), Some(place)) = (c.notices.upgrade(), c.ranks.iter().position(|r| *r == rank)) else {
                continue;
            };
            match &notice.kind {
                Kind::Refused(of, reason) if of.communicator == c.id => notices.refuse(place, of.number, reason),
                Kind::Left(of) if of.communicator == c.id => notices.leave(place, of.number),
                Kind::Aborted(of) if of.communicator == c.id => {
                    notices.abort(place);
                    notices.leave(place, of.number);
                }
                Kind::Lost => notices.lose(place),
                _ => continue,
            }
            known = true;
        }
        known || notice.kind == Kind::Bye
    }
}
