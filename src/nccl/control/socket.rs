//! Messages between processes: the bootstrap's connections, kept open. Rank 0 passes on what a rank says to all others;
//! a connection that ends without a word means that its process has died.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::Result;

use crate::nccl::control::message::{BYTES, ControlMessage, MessageKind};
use crate::nccl::control::peer_events::PeerEvents;

/// Pause between two looks at the connections.
const PAUSE: Duration = Duration::from_millis(5);
/// A rank that does not take a message for so long is as good as gone; its own timeout is told by others.
const WRITE_TIME: Duration = Duration::from_secs(1);

/// One process's end.
pub(in crate::nccl) struct ControlSocket {
    shared: Arc<SocketShared>,
    thread: Option<JoinHandle<()>>,
}

struct SocketShared {
    rank: usize,
    /// Whether this rank compares its collectives with the others'.
    checked: bool,
    connections: Mutex<Vec<PeerConnection>>,
    subscriptions: Mutex<Subscriptions>,
}

/// A connection to a rank; `stream` is `None` once it has ended.
struct PeerConnection {
    rank: usize,
    stream: Option<TcpStream>,
    bytes: [u8; BYTES],
    filled: usize,
    /// It has said that it will end.
    bye: bool,
}

/// Who is to hear what.
#[derive(Default)]
struct Subscriptions {
    communicators: Vec<Subscriber>,
    /// Messages that came before a communicator was known here, whoever is lost, and who compares its calls.
    retained: Vec<ControlMessage>,
    closed: bool,
}

struct Subscriber {
    id: u64,
    /// Its ranks, as the world numbers them.
    ranks: Vec<usize>,
    peer_events: Weak<PeerEvents>,
}

impl fmt::Debug for ControlSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlSocket {{ rank: {} }}", self.shared.rank)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ControlSocket {
    /// Rank 0 has a connection to each other rank, in their order; every other rank has one to rank 0.
    pub(in crate::nccl) fn new(rank: usize, streams: Vec<TcpStream>, checked: bool) -> Result<Arc<Self>> {
        let mut connections = Vec::new();
        for (i, stream) in streams.into_iter().enumerate() {
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            ready.map_err(|e| crate::nccl::system("configure a connection", e))?;
            let peer = if rank == 0 { i + 1 } else { 0 };
            connections.push(PeerConnection {
                rank: peer,
                stream: Some(stream),
                bytes: [0; BYTES],
                filled: 0,
                bye: false,
            });
        }
        let shared = Arc::new(SocketShared {
            rank,
            checked,
            connections: Mutex::new(connections),
            subscriptions: Mutex::default(),
        });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("nccl-control socket-{rank}")).spawn(move || own.run());
        let socket = Self { shared, thread: Some(thread.map_err(|e| crate::nccl::system("start a thread", e))?) };
        socket.post(MessageKind::Checked(checked));
        Ok(Arc::new(socket))
    }

    /// Whether this rank compares its collectives with the others'.
    pub(in crate::nccl) fn checked(&self) -> bool {
        self.shared.checked
    }

    /// Messages of a communicator go here from now on.
    pub(in crate::nccl) fn register(&self, id: u64, ranks: Vec<usize>, peer_events: &Arc<PeerEvents>) {
        let mut subscriptions = lock(&self.shared.subscriptions);
        let peer_events = Arc::downgrade(peer_events);
        subscriptions.communicators.retain(|c| c.peer_events.strong_count() > 0);
        subscriptions.communicators.push(Subscriber { id, ranks, peer_events });
        let retained = subscriptions.retained.clone();
        for message in &retained {
            subscriptions.deliver(message);
        }
    }

    /// Tells all other ranks.
    pub(in crate::nccl) fn post(&self, kind: MessageKind) {
        let message = ControlMessage { rank: self.shared.rank as u32, kind };
        self.shared.send(&message, self.shared.rank);
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.post(MessageKind::Bye);
        lock(&self.shared.subscriptions).closed = true;
        if let Some(thread) = self.thread.take() {
            // A panic of it has been reported; nothing can be done about it here.
            let _ = thread.join();
        }
        for line in lock(&self.shared.connections).iter() {
            let _ = line.stream.as_ref().map(|stream| stream.shutdown(Shutdown::Write));
        }
    }
}

impl SocketShared {
    fn run(&self) {
        while !lock(&self.subscriptions).closed {
            let received = self.poll();
            for message in received {
                // Rank 0 passes on; what it hears at its end it has seen itself.
                if self.rank == 0 && message.kind != MessageKind::Bye {
                    self.send(&message, message.rank as usize);
                }
                lock(&self.subscriptions).handle(message);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Messages that have come on all lines.
    fn poll(&self) -> Vec<ControlMessage> {
        let mut received = Vec::new();
        for line in lock(&self.connections).iter_mut() {
            line.poll(self.rank == 0, &mut received);
        }
        received
    }

    /// To everyone at the other ends but one.
    fn send(&self, message: &ControlMessage, except: usize) {
        let bytes = message.encode();
        for line in lock(&self.connections).iter_mut().filter(|line| line.rank != except) {
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

impl PeerConnection {
    /// `hub`: this line's rank may speak for itself only.
    fn poll(&mut self, hub: bool, received: &mut Vec<ControlMessage>) {
        while let Some(stream) = &mut self.stream {
            let ended = match stream.read(&mut self.bytes[self.filled..]) {
                Ok(0) => true,
                Ok(count) => {
                    self.filled += count;
                    if self.filled < BYTES {
                        continue;
                    }
                    self.filled = 0;
                    match ControlMessage::parse(&self.bytes).filter(|n| !hub || n.rank as usize == self.rank) {
                        Some(message) => {
                            self.bye |= message.kind == MessageKind::Bye && message.rank as usize == self.rank;
                            received.push(message);
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
                    received.push(ControlMessage { rank: self.rank as u32, kind: MessageKind::Lost });
                }
            }
        }
    }
}

impl Subscriptions {
    fn handle(&mut self, message: ControlMessage) {
        let known = self.deliver(&message);
        let of_all = matches!(message.kind, MessageKind::Lost | MessageKind::Checked(_));
        if of_all || !known {
            self.retained.push(message);
        }
    }

    /// Whether a communicator was there to hear it.
    fn deliver(&mut self, message: &ControlMessage) -> bool {
        let rank = message.rank as usize;
        let mut known = false;
        for c in &self.communicators {
            let (Some(peer_events), Some(place)) = (c.peer_events.upgrade(), c.ranks.iter().position(|r| *r == rank))
            else {
                continue;
            };
            match &message.kind {
                MessageKind::Refused(of, reason) if of.communicator == c.id => {
                    peer_events.refuse(place, of.number, reason)
                }
                MessageKind::Left(of) if of.communicator == c.id => peer_events.record_departure(place, of.number),
                MessageKind::Aborted(of) if of.communicator == c.id => {
                    peer_events.abort(place);
                    peer_events.record_departure(place, of.number);
                }
                MessageKind::Call(of, call) if of.communicator == c.id => {
                    peer_events.call(place, of.number, call.clone())
                }
                MessageKind::Lost => peer_events.lose(place),
                MessageKind::Checked(checked) => peer_events.compares(place, *checked),
                _ => continue,
            }
            known = true;
        }
        known || message.kind == MessageKind::Bye
    }
}

#[cfg(test)]
pub(in crate::nccl) mod tests {
    use super::*;
    use crate::comm::{Op, Tag};
    use crate::error::CommError;
    use crate::nccl::control::message::CollectiveId;
    use crate::nccl::control::peer_events::CollectiveInfo;
    use crate::ranks::{Bootstrap, JobToken, Root};
    use std::time::Instant;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// Three processes' ends, each with the messages of communicator 0.
    fn three() -> Vec<(Arc<ControlSocket>, Arc<PeerEvents>)> {
        let sockets = sockets([false; 3]).into_iter();
        let end = |socket: Arc<ControlSocket>| {
            let peer_events = Arc::<PeerEvents>::default();
            socket.register(0, vec![0, 1, 2], &peer_events);
            (socket, peer_events)
        };
        sockets.map(end).collect()
    }

    /// Three processes' ends, of which some compare their calls.
    pub(in crate::nccl) fn sockets(checked: [bool; 3]) -> Vec<Arc<ControlSocket>> {
        let root = Root::bind("127.0.0.1:0", TIMEOUT).unwrap();
        let address = root.address().to_string();
        let token = JobToken::random().unwrap();
        let job = |rank| Bootstrap {
            rank,
            world: 3,
            address: address.clone(),
            token: token.clone(),
            timeout: TIMEOUT,
            round: 0,
        };
        thread::scope(|scope| {
            let mut root = Some(root);
            let join = |rank| {
                let (job, root) = (job(rank), root.take());
                scope.spawn(move || {
                    let id = || Ok([0; 128]);
                    let joined = root.map_or_else(|| job.connect(id), |root| root.serve_connected(&job, id));
                    ControlSocket::new(rank, joined.unwrap().1, checked[rank]).unwrap()
                })
            };
            let ranks: Vec<_> = (0..3).map(join).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    fn failure(peer_events: &PeerEvents, rank: usize, number: u64) -> Option<CommError> {
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
        peer_events.fault(CollectiveInfo { rank, number, operation: "test", tag })
    }

    fn wait_for_failure(peer_events: &PeerEvents, rank: usize, number: u64) -> CommError {
        let start = Instant::now();
        loop {
            if let Some(failure) = failure(peer_events, rank, number) {
                return failure;
            }
            assert!(start.elapsed() < TIMEOUT, "rank {rank} was not told");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn of(communicator: u64, number: u64) -> CollectiveId {
        CollectiveId { communicator, number }
    }

    #[test]
    fn refusals_reach_all_others() {
        let ends = three();
        // From a rank that rank 0 passes it on for, and from rank 0.
        for (culprit, number) in [(2, 5), (0, 3)] {
            ends[culprit].0.post(MessageKind::Refused(of(0, number), format!("rank {culprit} has no room")));
            for (rank, (_, peer_events)) in ends.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
                match wait_for_failure(peer_events, rank, number) {
                    CommError::Refused { peer, reason, .. } => {
                        assert_eq!((peer, reason), (culprit, format!("rank {culprit} has no room")));
                    }
                    other => panic!("{other:?}"),
                }
                assert_eq!(failure(peer_events, rank, number - 1), None, "what was before goes on");
            }
        }
    }

    #[test]
    fn a_process_that_dies_is_missed_and_one_that_ends_is_not() {
        let mut ends = three();
        // Rank 1 ends in order, after four collectives.
        let (socket, peer_events) = ends.remove(1);
        socket.post(MessageKind::Left(of(0, 4)));
        drop((socket, peer_events));
        assert!(matches!(wait_for_failure(&ends[0].1, 0, 5), CommError::PeerGone { peer: 1, .. }));
        assert!(matches!(wait_for_failure(&ends[1].1, 2, 5), CommError::PeerGone { peer: 1, .. }));
        thread::sleep(Duration::from_millis(400));
        assert_eq!(failure(&ends[0].1, 0, 4), None, "it took part in this one");
        assert_eq!(failure(&ends[1].1, 2, 4), None, "it took part in this one");
        // Rank 2 dies.
        for line in lock(&ends[1].0.shared.connections).iter() {
            line.stream.as_ref().unwrap().shutdown(Shutdown::Both).unwrap();
        }
        assert!(matches!(wait_for_failure(&ends[0].1, 0, 1), CommError::PeerGone { peer: 2, .. }));
    }

    #[test]
    fn rank_zero_dies() {
        let ends = three();
        for line in lock(&ends[0].0.shared.connections).iter() {
            line.stream.as_ref().unwrap().shutdown(Shutdown::Both).unwrap();
        }
        for rank in [1, 2] {
            assert!(matches!(wait_for_failure(&ends[rank].1, rank, 1), CommError::PeerGone { peer: 0, .. }));
        }
    }

    #[test]
    fn messages_wait_for_their_communicator() {
        let ends = three();
        // Rank 2 refuses in a part of ranks 1 and 2 before rank 1 has made it.
        ends[2].0.post(MessageKind::Refused(of(77, 1), "early".into()));
        let start = Instant::now();
        while lock(&ends[1].0.shared.subscriptions).retained.is_empty() {
            assert!(start.elapsed() < TIMEOUT, "nothing came");
            thread::sleep(Duration::from_millis(1));
        }
        let part = Arc::<PeerEvents>::default();
        ends[1].0.register(77, vec![2, 1], &part);
        assert!(
            matches!(wait_for_failure(&part, 1, 1), CommError::Refused { peer: 0, .. }),
            "rank 2 is the part's first"
        );
        assert_eq!(failure(&ends[1].1, 1, 9), None, "the whole goes on");
    }

    #[test]
    fn a_rank_speaks_for_itself_only() {
        let ends = three();
        let forged = ControlMessage { rank: 0, kind: MessageKind::Refused(of(0, 1), "forged".into()) };
        ends[2].0.shared.send(&forged, 2);
        // Its line is closed, as one that does not keep to the protocol.
        assert!(matches!(wait_for_failure(&ends[1].1, 1, 1), CommError::PeerGone { peer: 2, .. }));
    }
}
