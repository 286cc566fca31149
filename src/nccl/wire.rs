//! Notices between processes: the bootstrap's connections, kept open. Rank 0 passes on what a rank says to all others;
//! a connection that ends without a word means that its process has died.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::Result;

use super::message::{BYTES, Kind, Notice};
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
    /// Whether this rank compares its collectives with the others'.
    checked: bool,
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
    /// What came before a communicator was known here, whoever is lost, and who compares its calls.
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
    pub(super) fn new(rank: usize, streams: Vec<TcpStream>, checked: bool) -> Result<Arc<Self>> {
        let mut lines = Vec::new();
        for (i, stream) in streams.into_iter().enumerate() {
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            ready.map_err(|e| super::system("configure a connection", e))?;
            let peer = if rank == 0 { i + 1 } else { 0 };
            lines.push(Line { rank: peer, stream: Some(stream), bytes: [0; BYTES], filled: 0, bye: false });
        }
        let shared = Arc::new(Shared { rank, checked, lines: Mutex::new(lines), desk: Mutex::default() });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("nccl-wire-{rank}")).spawn(move || own.run());
        let wire = Self { shared, thread: Some(thread.map_err(|e| super::system("start a thread", e))?) };
        wire.post(Kind::Checked(checked));
        Ok(Arc::new(wire))
    }

    /// Whether this rank compares its collectives with the others'.
    pub(super) fn checked(&self) -> bool {
        self.shared.checked
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
        let of_all = matches!(notice.kind, Kind::Lost | Kind::Checked(_));
        if of_all || !known {
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
                Kind::Call(of, call) if of.communicator == c.id => notices.call(place, of.number, call.clone()),
                Kind::Lost => notices.lose(place),
                Kind::Checked(checked) => notices.compares(place, *checked),
                _ => continue,
            }
            known = true;
        }
        known || notice.kind == Kind::Bye
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::comm::{Op, Tag};
    use crate::error::CommError;
    use crate::nccl::message::Of;
    use crate::nccl::notices::Subject;
    use crate::ranks::{Bootstrap, Root, Token};
    use std::time::Instant;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Three processes' ends, each with the notices of communicator 0.
    fn three() -> Vec<(Arc<Wire>, Arc<Notices>)> {
        let wires = wires([false; 3]).into_iter();
        let end = |wire: Arc<Wire>| {
            let notices = Arc::<Notices>::default();
            wire.register(0, vec![0, 1, 2], &notices);
            (wire, notices)
        };
        wires.map(end).collect()
    }

    /// Three processes' ends, of which some compare their calls.
    pub(in crate::nccl) fn wires(checked: [bool; 3]) -> Vec<Arc<Wire>> {
        let root = Root::bind("127.0.0.1:0", PATIENCE).unwrap();
        let address = root.address().to_string();
        let token = Token::random().unwrap();
        let job = |rank| Bootstrap {
            rank,
            world: 3,
            address: address.clone(),
            token: token.clone(),
            timeout: PATIENCE,
            round: 0,
        };
        thread::scope(|scope| {
            let mut root = Some(root);
            let join = |rank| {
                let (job, root) = (job(rank), root.take());
                scope.spawn(move || {
                    let id = || Ok([0; 128]);
                    let joined = root.map_or_else(|| job.connect(id), |root| root.keep(&job, id));
                    Wire::new(rank, joined.unwrap().1, checked[rank]).unwrap()
                })
            };
            let ranks: Vec<_> = (0..3).map(join).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    fn fault(notices: &Notices, rank: usize, number: u64) -> Option<CommError> {
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
        notices.fault(Subject { rank, number, operation: "test", tag })
    }

    fn told(notices: &Notices, rank: usize, number: u64) -> CommError {
        let start = Instant::now();
        loop {
            if let Some(fault) = fault(notices, rank, number) {
                return fault;
            }
            assert!(start.elapsed() < PATIENCE, "rank {rank} was not told");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn of(communicator: u64, number: u64) -> Of {
        Of { communicator, number }
    }

    #[test]
    fn refusals_reach_all_others() {
        let ends = three();
        // From a rank that rank 0 passes it on for, and from rank 0.
        for (culprit, number) in [(2, 5), (0, 3)] {
            ends[culprit].0.post(Kind::Refused(of(0, number), format!("rank {culprit} has no room")));
            for (rank, (_, notices)) in ends.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
                match told(notices, rank, number) {
                    CommError::Refused { peer, reason, .. } => {
                        assert_eq!((peer, reason), (culprit, format!("rank {culprit} has no room")));
                    }
                    other => panic!("{other:?}"),
                }
                assert_eq!(fault(notices, rank, number - 1), None, "what was before goes on");
            }
        }
    }

    #[test]
    fn a_process_that_dies_is_missed_and_one_that_ends_is_not() {
        let mut ends = three();
        // Rank 1 ends in order, after four collectives.
        let (wire, notices) = ends.remove(1);
        wire.post(Kind::Left(of(0, 4)));
        drop((wire, notices));
        assert!(matches!(told(&ends[0].1, 0, 5), CommError::PeerGone { peer: 1, .. }));
        assert!(matches!(told(&ends[1].1, 2, 5), CommError::PeerGone { peer: 1, .. }));
        thread::sleep(Duration::from_millis(400));
        assert_eq!(fault(&ends[0].1, 0, 4), None, "it took part in this one");
        assert_eq!(fault(&ends[1].1, 2, 4), None, "it took part in this one");
        // Rank 2 dies.
        for line in lock(&ends[1].0.shared.lines).iter() {
            line.stream.as_ref().unwrap().shutdown(Shutdown::Both).unwrap();
        }
        assert!(matches!(told(&ends[0].1, 0, 1), CommError::PeerGone { peer: 2, .. }));
    }

    #[test]
    fn rank_zero_dies() {
        let ends = three();
        for line in lock(&ends[0].0.shared.lines).iter() {
            line.stream.as_ref().unwrap().shutdown(Shutdown::Both).unwrap();
        }
        for rank in [1, 2] {
            assert!(matches!(told(&ends[rank].1, rank, 1), CommError::PeerGone { peer: 0, .. }));
        }
    }

    #[test]
    fn notices_wait_for_their_communicator() {
        let ends = three();
        // Rank 2 refuses in a part of ranks 1 and 2 before rank 1 has made it.
        ends[2].0.post(Kind::Refused(of(77, 1), "early".into()));
        let start = Instant::now();
        while lock(&ends[1].0.shared.desk).kept.is_empty() {
            assert!(start.elapsed() < PATIENCE, "nothing came");
            thread::sleep(Duration::from_millis(1));
        }
        let part = Arc::<Notices>::default();
        ends[1].0.register(77, vec![2, 1], &part);
        assert!(matches!(told(&part, 1, 1), CommError::Refused { peer: 0, .. }), "rank 2 is the part's first");
        assert_eq!(fault(&ends[1].1, 1, 9), None, "the whole goes on");
    }

    #[test]
    fn a_rank_speaks_for_itself_only() {
        let ends = three();
        let forged = Notice { rank: 0, kind: Kind::Refused(of(0, 1), "forged".into()) };
        ends[2].0.shared.send(&forged, 2);
        // Its line is closed, as one that does not keep to the protocol.
        assert!(matches!(told(&ends[1].1, 1, 1), CommError::PeerGone { peer: 2, .. }));
    }
}
