//! Failures, over a library of functions that fail as told: no GPU, no NCCL.

mod copy_engines;
mod fake;
mod sessions;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::{Op, Tag};
use crate::cuda::StuckFlag;
use crate::error::{CommError, Error};

use crate::nccl::comm::one_sided::{BlockExchange, OneSided};
use crate::nccl::control::peer_events::{CollectiveInfo, PeerEvents};
use crate::nccl::control::watchdog::{EndNotice, Watchdog};
use crate::nccl::ffi::comm_handle::{CommHandle, RankPlace, Work};
use crate::nccl::ffi::enqueue::{CommStream, PeerBuffer};
use crate::nccl::ffi::sys::{Functions, Status};
use crate::nccl::{NcclError, NcclLibrary, NcclOptions};

use fake::{Asked, Fake, comm_handle, comm_handle_at, comm_handle_of, functions, library, no_memory, old_version};

/// Work that ends when its flag is set.
struct FlaggedWork(Arc<AtomicBool>);

impl Work for FlaggedWork {
    fn ended(&self) -> Result<bool, String> {
        Ok(self.0.load(SeqCst))
    }
}

struct WatchdogFixture {
    comm_handle: Arc<CommHandle>,
    fake: &'static Fake,
    peer_events: Arc<PeerEvents>,
    watchdog: Watchdog,
    /// Collectives of which the watchdog told the other ranks.
    unfinished: Arc<Mutex<Option<(u64, u64)>>>,
}

impl WatchdogFixture {
    fn new() -> Self {
        let ((comm_handle, fake), peer_events, unfinished) =
            (comm_handle(), Arc::<PeerEvents>::default(), Arc::new(Mutex::new(None)));
        let recorded = Arc::clone(&unfinished);
        let end_notice: EndNotice = Box::new(move |_, numbers| *recorded.lock().unwrap() = Some(numbers));
        let watchdog =
            Watchdog::start(Arc::clone(&comm_handle), Arc::clone(&peer_events), end_notice).expect("a thread");
        Self { comm_handle, fake, peer_events, watchdog, unfinished }
    }

    /// Enqueues a collective that ends when the returned flag is set.
    fn enqueue(&self, number: u64, timeout: Duration) -> Arc<AtomicBool> {
        let ends = Arc::new(AtomicBool::new(false));
        self.watchdog.enter(subject(number), timeout);
        self.watchdog.entered(Some(Box::new(FlaggedWork(Arc::clone(&ends)))));
        ends
    }

    fn failure(&self) -> CommError {
        until("aborted", || self.fake.aborts.load(SeqCst) > 0);
        self.comm_handle.failure().expect("the reason is there before the abort")
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "not {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

const TIMEOUT: Duration = Duration::from_secs(20);
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(60);

fn subject(number: u64) -> CollectiveInfo {
    CollectiveInfo { rank: 0, number, operation: "all_gather", tag: Tag { layer: 1, op: Op::User, sequence: number } }
}

/// A replay of a graph, while the host is inside NCCL for a call of its own.
#[test]
fn what_is_watched_beside_calls_ends_in_time_too() {
    let fixture = WatchdogFixture::new();
    let ends = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let work = |which: usize| Box::new(FlaggedWork(Arc::clone(&ends[which])));
    fixture.watchdog.enter(subject(1), LONG);
    let replay = CollectiveInfo { operation: "replay", ..subject(2) };
    fixture.watchdog.handle().watch(replay, SHORT, work(1));
    fixture.watchdog.entered(Some(work(0)));
    ends[0].store(true, SeqCst);
    match fixture.failure() {
        CommError::Timeout { operation: "replay", tag, rank: 0, timeout, .. } => {
            assert_eq!((tag.sequence, timeout), (2, SHORT));
        }
        other => panic!("{other:?}"),
    }
    drop(fixture.watchdog);
    assert_eq!(*fixture.unfinished.lock().unwrap(), Some((2, 2)));
}

#[test]
fn a_collective_that_does_not_end_in_time() {
    let fixture = WatchdogFixture::new();
    let first = fixture.enqueue(1, LONG);
    fixture.enqueue(2, SHORT);
    thread::sleep(2 * SHORT);
    // The second is behind the first: its time has not begun.
    assert!(fixture.comm_handle.failure().is_none());
    first.store(true, SeqCst);
    match fixture.failure() {
        CommError::Timeout { operation: "all_gather", tag, rank: 0, timeout, .. } => {
            assert_eq!((tag.sequence, timeout), (2, SHORT));
        }
        other => panic!("{other:?}"),
    }
    assert!(fixture.comm_handle.with(|_, _| ()).is_none(), "nobody uses a communicator that is gone");
    drop(fixture.watchdog);
    assert_eq!(*fixture.unfinished.lock().unwrap(), Some((2, 2)));
    drop(fixture.comm_handle);
    assert_eq!((fixture.fake.aborts.load(SeqCst), fixture.fake.destroys.load(SeqCst)), (1, 0));
}

/// A collective that the rank's own thread has ended is not waited for, nor told again.
#[test]
fn a_communicator_that_its_rank_has_ended() {
    let fixture = WatchdogFixture::new();
    fixture.enqueue(1, TIMEOUT);
    let gone = CommError::PeerGone { operation: "all_gather", tag: subject(1).tag, rank: 0, peer: 1 };
    fixture.comm_handle.fail(gone);
    fixture.comm_handle.abort();
    let start = Instant::now();
    drop(fixture.watchdog);
    assert!(start.elapsed() < TIMEOUT);
    assert_eq!((*fixture.unfinished.lock().unwrap(), fixture.fake.aborts.load(SeqCst)), (None, 1));
}

/// A stream that copy engines keep waiting after its communicator's end leaves the GPUs of the world stuck: nothing
/// more of them is freed, and of a communicator that fails only kernels are ended. Where the stream ends, all is as
/// ever.
#[test]
fn what_does_not_end_with_its_communicator() {
    for ends in [false, true] {
        let gpus = [StuckFlag::default(), StuckFlag::default()];
        let [(comm_handle, fake), (other, others), (failed, failing)] = [true, false, false].map(|copy_engines| {
            comm_handle_at(RankPlace { rank: 0, size: 2, copy_engines, options: NcclOptions::default() })
        });
        for comm_handle in [&comm_handle, &other, &failed] {
            comm_handle.on(|| gpus.to_vec());
        }
        comm_handle.marked(Box::new(move || Some(Box::new(FlaggedWork(Arc::new(AtomicBool::new(ends)))))));
        comm_handle.abort();
        assert_eq!(gpus.each_ref().map(StuckFlag::is), [!ends; 2]);
        assert!(fake.revoked.load(SeqCst));
        failed.abort();
        until("stopped", || ends || failing.revoked.load(SeqCst));
        drop((comm_handle, other, failed));
        let ended = [fake, failing].map(|fake| fake.aborts.load(SeqCst));
        assert_eq!((ended, others.destroys.load(SeqCst)), ([u32::from(ends); 2], u32::from(ends)));
        // The end of this process is as ever.
        gpus.iter().for_each(|gpu| gpu.set(false));
    }
}

/// Signals that say that a rank's window may be written to, waited for before anything is put; each block to the place
/// that its receiver has for it, beginning with another peer on each rank; then what the others have put is waited for.
#[test]
fn blocks_are_put_where_and_when_they_may_be() {
    for rank in 0..3 {
        let (comm_handle, fake) = comm_handle_of(rank, 3);
        let comm_stream = CommStream { comm_handle: &comm_handle, stream: std::ptr::null_mut() };
        let blocks = BlockExchange { from: 1000, bytes: 8, window: std::ptr::null_mut(), offset: 64 };
        // SAFETY: nothing is read or written by these functions.
        unsafe { OneSided::of(comm_handle.library()).unwrap().exchange(&comm_stream, blocks) }.unwrap();
        let [one, two] = [(rank + 1) % 3, (rank + 2) % 3];
        let put = |peer: usize| {
            let place = (0..3).filter(|from| *from != peer).position(|from| from == rank).unwrap();
            Asked::Put(1000 + 8 * peer as u64, peer as i32, 64 + 8 * place)
        };
        let wait = || Asked::Wait(vec![(one as i32, 1), (two as i32, 1)]);
        let signals = [Asked::Signal(one as i32), Asked::Signal(two as i32)];
        let expected = [&signals[..], &[wait(), put(one), put(two), wait()]].concat();
        assert_eq!(*fake.steps.lock().unwrap(), expected, "rank {rank}");
    }
}

#[test]
fn what_ends_is_destroyed_in_order() {
    let fixture = WatchdogFixture::new();
    for number in 1..=3 {
        fixture.enqueue(number, LONG).store(true, SeqCst);
    }
    drop(fixture.watchdog);
    assert!(fixture.comm_handle.failure().is_none());
    drop(fixture.comm_handle);
    assert_eq!((fixture.fake.aborts.load(SeqCst), fixture.fake.destroys.load(SeqCst)), (0, 1));
    assert_eq!(*fixture.unfinished.lock().unwrap(), None);
}

#[test]
fn what_the_library_reports() {
    let fixture = WatchdogFixture::new();
    fixture.enqueue(1, LONG);
    // Not finished is no error.
    fixture.fake.asynchronous.store(Status::IN_PROGRESS.0, SeqCst);
    thread::sleep(SHORT);
    assert!(fixture.comm_handle.failure().is_none());
    fixture.fake.asynchronous.store(Status::REMOTE_ERROR.0, SeqCst);
    match fixture.failure() {
        CommError::Transport { reason, .. } => {
            assert!(reason.contains("remote error (6): it happened"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn refusals_and_departures() {
    let fixture = WatchdogFixture::new();
    let first = fixture.enqueue(7, LONG);
    // Rank 1 took part in this one before it left, and refuses a later one: this one ends by itself.
    fixture.peer_events.record_departure(1, 7);
    fixture.peer_events.refuse(1, 8, "out of memory");
    thread::sleep(SHORT);
    assert!(fixture.comm_handle.failure().is_none());
    first.store(true, SeqCst);
    fixture.enqueue(8, LONG);
    match fixture.failure() {
        CommError::Refused { peer: 1, reason, tag, .. } => {
            assert_eq!((&reason[..], tag.sequence), ("out of memory", 8))
        }
        other => panic!("{other:?}"),
    }

    let fixture = WatchdogFixture::new();
    fixture.enqueue(3, LONG);
    fixture.peer_events.record_departure(1, 2);
    assert!(matches!(fixture.failure(), CommError::PeerGone { peer: 1, .. }));
    // One's own departure is nobody's fault.
    let peer_events = PeerEvents::default();
    peer_events.record_departure(0, 1);
    assert_eq!(peer_events.fault(subject(9)), None);
}

/// The host hangs inside NCCL, where it connects to a peer that does not come: it is let out, and gets the reason.
#[test]
fn a_host_stuck_inside_the_library() {
    let fixture = WatchdogFixture::new();
    fixture.fake.stuck.store(true, SeqCst);
    let outcome = thread::scope(|scope| {
        let host = scope.spawn(|| {
            let comm_stream = CommStream { comm_handle: &fixture.comm_handle, stream: std::ptr::null_mut() };
            // SAFETY: nothing is read or written by these functions.
            unsafe { comm_stream.all_gather(0, 0, 1) }
        });
        // Its time runs from when it is inside: however slow the machine, that comes before its end.
        until("inside", || fixture.fake.inside.load(SeqCst));
        fixture.watchdog.enter(subject(1), SHORT);
        host.join().expect("no panic")
    });
    assert!(matches!(&outcome, Err(Some(NcclError::Call { code: 3, .. }))), "{outcome:?}");
    assert!(fixture.fake.revoked.load(SeqCst));
    assert!(matches!(fixture.failure(), CommError::Timeout { .. }));
}

#[test]
fn groups_are_ended_whatever_happens_in_them() {
    let (comm_handle, fake) = comm_handle();
    let comm_stream = CommStream { comm_handle: &comm_handle, stream: std::ptr::null_mut() };
    let pieces = |bytes| [PeerBuffer { peer: 1, address: 0, bytes }; 2];
    // SAFETY: nothing is read or written by these functions.
    unsafe { comm_stream.exchange(&pieces(8), &pieces(8)) }.expect("sent");
    assert_eq!(fake.groups.swap(0, SeqCst), 202);
    // SAFETY: as above.
    unsafe { comm_stream.exchange(&pieces(0), &pieces(0)) }.expect("nothing");
    assert_eq!(fake.groups.swap(0, SeqCst), 0);
    // A status that no header knows.
    fake.send.store(4711, SeqCst);
    // SAFETY: as above.
    match unsafe { comm_stream.exchange(&pieces(8), &pieces(8)) } {
        Err(Some(NcclError::Call { code: 4711, name, .. })) => assert_eq!(name, "unknown"),
        other => panic!("{other:?}"),
    }
    assert_eq!(fake.groups.load(SeqCst), 1, "nothing after the first failure");
}

#[test]
fn blocks_without_ones_own() {
    let piece = |peer, address, bytes| PeerBuffer { peer, address, bytes };
    let (sends, receives) = crate::nccl::comm::collectives::blocks(1, 4, 1000, 5000, 8);
    assert_eq!(sends, [piece(0, 1000, 8), piece(2, 1016, 8), piece(3, 1024, 8)]);
    assert_eq!(receives, [piece(0, 5000, 8), piece(2, 5008, 8), piece(3, 5016, 8)]);
    assert_eq!(crate::nccl::comm::collectives::blocks(0, 1, 1000, 5000, 8), (vec![], vec![]));
}

#[test]
fn peers_that_do_not_join() {
    let place = RankPlace { rank: 3, size: 8, copy_engines: false, options: NcclOptions::default() };
    let pending_join = CommHandle::start(&library(), [0; 128], place, || Ok(()), |_| Ok(())).expect("a thread");
    // The library's call never returns, so this has not waited for it.
    match pending_join.finish(SHORT, || None) {
        Err(Error::Nccl(NcclError::Init { rank: 3, size: 8, timeout })) => assert_eq!(timeout, SHORT),
        other => panic!("{:?}", other.map(drop)),
    }
    // Nor is one waited for that has said that it will not come.
    let pending_join = CommHandle::start(&library(), [0; 128], place, || Ok(()), |_| Ok(())).expect("a thread");
    let peer_events = PeerEvents::default();
    peer_events.refuse(1, 4, "no memory");
    match pending_join.finish(LONG, || peer_events.fault(subject(4))) {
        Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) => assert_eq!(reason, "no memory"),
        other => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn a_library_that_is_too_old() {
    let old = Functions { get_version: old_version, ..functions() };
    match NcclLibrary::of(old, "libnccl.so.2".to_string(), "a test") {
        Err(Error::Nccl(error @ NcclError::Version { .. })) => {
            let text = error.to_string();
            assert!(text.contains("is version 2.10.5; 2.18.0 or later"), "{text}");
        }
        other => panic!("{:?}", other.map(drop)),
    }
    assert_eq!(library().version(), "2.30.7");
    let poor = Functions { put_signal: None, ..functions() };
    let poor = NcclLibrary::of(poor, "a fake".to_string(), "a test").unwrap();
    assert!(OneSided::of(&poor).is_err_and(|e| e.to_string().contains("2.30.7 has no ncclPutSignal")));
}
