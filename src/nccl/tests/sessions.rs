//! Messages between ranks' hosts: between threads, and between processes, whose ends are joined here by TCP.

use super::*;
use crate::comm::ReduceOp;
use crate::comm::agree::{CollectiveCall, Detail};
use crate::dtype::DType;
use crate::nccl::comm::init::checked;
use crate::nccl::comm::session::Session;
use crate::nccl::control::peer_events::REPLAY;
use crate::nccl::control::plane::{CompareError, ControlPlane, ProcessControl, ThreadRendezvous};
use crate::nccl::control::socket::{ControlSocket, tests::sockets};

fn call(operation: &'static str, layer: u32, detail: Detail) -> CollectiveCall {
    CollectiveCall {
        operation,
        tag: Tag { layer, op: Op::Dispatch, sequence: 4 },
        dtype: DType::F32,
        detail,
        bytes: 64,
    }
}

fn same() -> CollectiveCall {
    call("all_gather", 1, Detail::Plain)
}

fn controls(sockets: &[Arc<ControlSocket>], ranks: &[usize], id: u64) -> Vec<ControlPlane> {
    ranks.iter().map(|r| ControlPlane::ProcessControl(ProcessControl::new(&sockets[*r], id, ranks.to_vec()))).collect()
}

/// Every rank's outcome of its collective of this number.
fn compare_call(
    controls: &[ControlPlane],
    number: u64,
    calls: impl Fn(usize) -> CollectiveCall + Sync,
) -> Vec<Result<(), CompareError>> {
    thread::scope(|scope| {
        let calls = &calls;
        let each = |(rank, control): (usize, &ControlPlane)| {
            let (control, call) = (control.clone(), calls(rank));
            scope.spawn(move || {
                let subject = CollectiveInfo { rank, number, operation: call.operation, tag: call.tag };
                control.compare_call(subject, call, TIMEOUT)
            })
        };
        let ranks: Vec<_> = controls.iter().enumerate().map(each).collect();
        ranks.into_iter().map(|r| r.join().expect("no panic")).collect()
    })
}

fn differences(met: Vec<Result<(), CompareError>>) -> Vec<CommError> {
    let error = |met| match met {
        Err(CompareError::Differ(error)) => error,
        other => panic!("{other:?}"),
    };
    met.into_iter().map(error).collect()
}

#[test]
fn processes_that_compare_go_on_after_a_disagreement() {
    let sockets = sockets([true; 3]);
    let all = controls(&sockets, &[0, 1, 2], 0);
    assert_eq!(compare_call(&all, 1, |_| same()), [Ok(()), Ok(()), Ok(())]);

    // The tag alone: rank 2 is a layer ahead.
    for (rank, error) in differences(compare_call(&all, 2, |r| call("all_gather", 1 + (r == 2) as u32, Detail::Plain)))
        .into_iter()
        .enumerate()
    {
        match error {
            CommError::TagMismatch { rank: own, peer, tag, peer_tag, peer_operation: "all_gather", .. } => {
                assert_eq!((own, peer), (rank, if rank == 2 { 0 } else { 2 }));
                assert_eq!((tag.layer, peer_tag.layer), if rank == 2 { (2, 1) } else { (1, 2) });
            }
            other => panic!("{other:?}"),
        }
    }
    // The call alone, of a name that nobody knows.
    let odd = |r| call(if r == 0 { "a library's own" } else { "broadcast" }, 1, Detail::Plain);
    let named = |error: CommError| match error {
        CommError::TagMismatch { operation, peer_operation, .. } => (operation, peer_operation),
        other => panic!("{other:?}"),
    };
    let named: Vec<_> = differences(compare_call(&all, 3, odd)).into_iter().map(named).collect();
    let other = ("broadcast", "another call");
    assert_eq!(named, [("a library's own", "broadcast"), other, other]);

    // Arguments and sizes.
    let reduce = |r| call("all_reduce", 1, Detail::Reduce(if r == 1 { ReduceOp::Max } else { ReduceOp::Sum }));
    for error in differences(compare_call(&all, 4, reduce)) {
        assert!(matches!(error, CommError::ArgumentMismatch { .. }), "{error:?}");
    }
    let short = |r| CollectiveCall { bytes: if r == 1 { 60 } else { 64 }, ..same() };
    for error in differences(compare_call(&all, 5, short)) {
        assert!(matches!(error, CommError::SizeMismatch { .. }), "{error:?}");
    }
    // Sizes of pieces are each rank's own affair.
    let pieces = |r| call("all_to_all_v", 1, Detail::Pieces { send: vec![r; 3], recv: vec![0; 3] });
    assert_eq!(compare_call(&all, 6, pieces), [Ok(()), Ok(()), Ok(())]);

    // A rank that fails where the others expect it.
    let refusing = |r| if r == 1 { call("refuse", 1, Detail::Refusal("no memory".into())) } else { same() };
    for error in differences(compare_call(&all, 7, refusing)) {
        let CommError::Refused { peer: 1, reason, .. } = error else { panic!("{error:?}") };
        assert_eq!(reason, "no memory");
    }
    assert_eq!(compare_call(&all, 8, |_| same()), [Ok(()), Ok(()), Ok(())]);

    // Ranks 2 and 1 among themselves, in that order.
    let part = controls(&sockets, &[2, 1], 77);
    assert_eq!(compare_call(&part, 1, |_| same()), [Ok(()), Ok(())]);
}

#[test]
fn processes_that_compare_hear_of_those_that_do_not_come() {
    let sockets = sockets([true; 3]);
    let all = controls(&sockets, &[0, 1, 2], 0);
    let subject = |rank, number| CollectiveInfo { rank, number, operation: "all_gather", tag: same().tag };
    match all[0].compare_call(subject(0, 1), same(), SHORT) {
        Err(CompareError::Over(CommError::Timeout { missing, rank: 0, .. })) => assert_eq!(missing, [1, 2]),
        other => panic!("{other:?}"),
    }
    all[2].announce_departure(2, 0);
    match all[1].compare_call(subject(1, 1), same(), TIMEOUT) {
        Err(CompareError::Over(CommError::PeerGone { peer: 2, rank: 1, .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_processes_compare_or_none() {
    let sockets = sockets([true, true, false]);
    let all = controls(&sockets, &[0, 1, 2], 0);
    for (rank, control) in all.iter().enumerate() {
        let subject = CollectiveInfo { rank, number: 1, operation: "all_gather", tag: same().tag };
        // The one that does not compare goes on until it hears of it.
        let start = Instant::now();
        let error = loop {
            match control.compare_call(subject, same(), TIMEOUT) {
                Err(CompareError::Over(error)) => break error,
                other => assert!(rank == 2 && start.elapsed() < TIMEOUT, "{other:?}"),
            }
        };
        let text = error.to_string();
        let (own, other) = if rank == 2 { (0, 1) } else { (1, 0) };
        assert!(text.contains(&format!("asks for MOEBIUS_CHECKED={own}")), "{text}");
        assert!(text.contains(&format!("for MOEBIUS_CHECKED={other}")), "{text}");
    }
}

/// Ranks that have made other numbers of passes: one compares them, another begins one more. Each hears of it, and nobody
/// has waited for the others before.
#[test]
fn processes_that_do_not_compare_announce_passes() {
    let sockets = sockets([false; 3]);
    let all = controls(&sockets, &[0, 1, 2], 0);
    let of = |sequence| CollectiveCall { tag: Tag { layer: 0, op: Op::Weights, sequence }, ..same() };
    assert_eq!([4, (5 << 32) + 1, Tag::PASSES, u64::MAX, u64::MAX - 2].map(|n| of(n).tag.pass()), [0, 5, 0, 0, 0]);
    // A forward's first weight is the chain's first, a backward's another.
    for number in 1..=200 {
        assert_eq!(compare_call(&all, number, |_| of(number << 32 | (number % 2 * 7))), [Ok(()), Ok(()), Ok(())]);
    }
    let call = |rank| of(if rank == 2 { 201 << 32 | 7 } else { Tag::PASSES });
    let found = compare_call(&all, 201, call);
    let start = Instant::now();
    for (rank, (control, found)) in all.iter().zip(found).enumerate() {
        let subject = CollectiveInfo { rank, number: 201, operation: "all_gather", tag: call(rank).tag };
        let error = match found {
            Err(CompareError::Over(error)) => error,
            Ok(()) => loop {
                assert!(start.elapsed() < TIMEOUT);
                if let Some(error) = control.peer_events().fault(subject) {
                    break error;
                }
            },
            other => panic!("{other:?}"),
        };
        match error {
            CommError::TagMismatch { rank: own, peer, tag, peer_tag, .. } => {
                // The last may have heard of either first.
                assert!(own == rank && (peer == 2) == (rank != 2), "{own}, {peer}");
                assert_eq!((tag, peer_tag), (call(rank).tag, call(peer).tag));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_the_variable_says() {
    let of = |value: Option<&str>| checked(value.map(Into::into));
    assert_eq!((of(None).ok(), of(Some("0")).ok(), of(Some("1")).ok()), (Some(false), Some(false), Some(true)));
    let error = of(Some("yes")).expect_err("another value").to_string();
    assert!(error.contains("MOEBIUS_CHECKED") && error.contains("0 or 1") && error.contains("yes"), "{error}");
}

/// Two ranks' sessions over each way that hosts have.
fn sessions(controls: [ControlPlane; 2]) -> [(Session, &'static Fake); 2] {
    let mut rank = 0;
    controls.map(|control| {
        let (comm_handle, fake) = comm_handle_of(rank, 2);
        rank += 1;
        (Session::new(comm_handle, control, LONG).expect("a thread"), fake)
    })
}

/// A rank fails between two calls of one collective: the other, which waits in the second, is told at once, not at
/// the end of its timeout.
#[test]
fn a_failure_in_the_middle_of_a_collective() {
    let rendezvous = ThreadRendezvous::new(2);
    let ends = sockets([false; 3]);
    let control = |rank: usize| ControlPlane::ProcessControl(ProcessControl::new(&ends[rank], 0, vec![0, 1]));
    for controls in [
        [ControlPlane::ThreadRendezvous(Arc::clone(&rendezvous)), ControlPlane::ThreadRendezvous(rendezvous)],
        [control(0), control(1)],
    ] {
        let [(mut failing, fake), (mut waiting, other)] = sessions(controls);
        let start = Instant::now();
        let begun = thread::scope(|scope| {
            let peer = scope.spawn(|| waiting.begin(same()).expect("the same call"));
            let begun = failing.begin(same()).expect("the same call");
            (begun, peer.join().expect("no panic"))
        });
        // The other is in the second call, which does not end without the first rank.
        let never: Option<Box<dyn Work>> = Some(Box::new(FlaggedWork(Arc::default())));
        waiting.run(begun.1, |_| Some(Ok(())), || Ok(never)).expect("enqueued");
        let lost: Result<(), Error> =
            failing.check_begun(begun.0, Err(Error::invalid("add", "memory", "some", "none")));
        assert!(matches!(lost, Err(Error::Invalid { .. })), "its own error: {lost:?}");
        until("aborted", || other.aborts.load(SeqCst) > 0 && fake.aborts.load(SeqCst) > 0);
        assert!(start.elapsed() < TIMEOUT);
        match waiting.comm_handle.failure() {
            Some(CommError::Refused { rank: 1, peer: 0, operation: "all_gather", reason, .. }) => {
                assert!(reason.contains("memory"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        // And so does every later call.
        assert!(matches!(waiting.begin(same()), Err(Error::Comm(CommError::Refused { .. }))));
        assert!(matches!(failing.begin(same()), Err(Error::Comm(CommError::Transport { .. }))));
    }
}

/// A refusal between processes ends the communicator, but where they compare: there it goes on, as between threads.
#[test]
fn refusals_end_what_does_not_compare() {
    for (compare, outlives) in [(false, false), (true, true)] {
        let ends = sockets([compare; 3]);
        let control = |rank: usize| ControlPlane::ProcessControl(ProcessControl::new(&ends[rank], 0, vec![0, 1]));
        let [(mut first, _), (mut second, _)] = sessions([control(0), control(1)]);
        let met = thread::scope(|scope| {
            let tag = same().tag;
            scope.spawn(move || first.refuse(tag, "no room").and_then(|()| first.begin(same()).map(drop)));
            let start = Instant::now();
            loop {
                match second.begin(same()) {
                    // It has not heard of it.
                    Ok(_) => assert!(!compare && start.elapsed() < TIMEOUT),
                    Err(Error::Comm(CommError::Refused { peer: 0, reason, .. })) => {
                        assert_eq!(reason, "no room");
                        break second.begin(same()).is_ok();
                    }
                    Err(other) => panic!("{other}"),
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(met, outlives);
    }
}

/// A rank leaves, or its process dies. A communicator that outlives ranks has an error from each collective that names it,
/// and goes on; another ends, but between threads, whose meeting it is that fails.
#[test]
fn a_rank_that_is_gone_leaves_what_needs_no_collective() {
    let (compared, uncompared) = (sockets([true; 3]), sockets([false; 3]));
    for (communicator, outlives, dies) in [(1, true, false), (2, true, true), (3, false, false), (4, false, true)] {
        let processes = |ends: &[Arc<ControlSocket>]| {
            [0, 1].map(|r| ControlPlane::ProcessControl(ProcessControl::new(&ends[r], communicator, vec![0, 1])))
        };
        let rendezvous = ThreadRendezvous::new(2);
        let threads = [0, 1].map(|_| ControlPlane::ThreadRendezvous(Arc::clone(&rendezvous)));
        for (controls, ends) in [(threads, false), (processes(&compared), true), (processes(&uncompared), true)] {
            if dies && !ends {
                continue;
            }
            let [(gone, _), (mut left, fake)] = sessions(controls);
            left.outlive_ranks(outlives);
            match dies {
                true => left.control.peer_events().lose(0),
                false => drop(gone),
            }
            let start = Instant::now();
            for _call in 0..3 {
                let error = loop {
                    match left.begin(same()) {
                        // It has not heard of it.
                        Ok(_) => assert!(start.elapsed() < TIMEOUT),
                        Err(error) => break error,
                    }
                    thread::sleep(Duration::from_millis(1));
                };
                assert!(matches!(error, Error::Comm(CommError::PeerGone { peer: 0, rank: 1, .. })), "{error:?}");
            }
            let ended = left.comm_handle.failure().is_some();
            assert_eq!((ended, fake.aborts.load(SeqCst) > 0), (ends && !outlives, ends && !outlives));
        }
    }
}

/// The first to give up on a collective aborts only when the other, which would have waited longer, has ended too: an
/// abort lets the other's kernel go on with whatever lies in its memory.
#[test]
fn nobody_aborts_before_the_others_know() {
    let rendezvous = ThreadRendezvous::new(2);
    let ends = sockets([false; 3]);
    let control = |rank: usize| ControlPlane::ProcessControl(ProcessControl::new(&ends[rank], 0, vec![0, 1]));
    for controls in [
        [ControlPlane::ThreadRendezvous(Arc::clone(&rendezvous)), ControlPlane::ThreadRendezvous(rendezvous)],
        [control(0), control(1)],
    ] {
        let [(mut hasty, fake), (mut patient, _)] = sessions(controls);
        thread::scope(|scope| {
            for (session, timeout) in [(&mut hasty, SHORT), (&mut patient, LONG)] {
                scope.spawn(move || {
                    let subject = session.begin(same()).expect("the same call");
                    session.timeout = timeout;
                    let never: Option<Box<dyn Work>> = Some(Box::new(FlaggedWork(Arc::default())));
                    session.run(subject, |_| Some(Ok(())), || Ok(never)).expect("enqueued");
                });
            }
        });
        until("aborted", || fake.aborts.load(SeqCst) > 0);
        let [own, other] = [&hasty, &patient].map(|session| session.comm_handle.failure());
        assert!(matches!(own, Some(CommError::Timeout { .. })), "{own:?}");
        assert!(matches!(other, Some(CommError::PeerGone { rank: 1, peer: 0, .. })), "{other:?}");
    }
}

/// A rank that replays a graph comes to no meeting: it hears of a refusal there by its watchdog, and the communicator ends
/// on both, whether the meeting is one of threads or of processes. Where all come, it goes on.
#[test]
fn a_refusal_reaches_a_rank_in_a_replay() {
    let rendezvous = ThreadRendezvous::new(2);
    let ends = sockets([true; 3]);
    let control = |rank: usize| ControlPlane::ProcessControl(ProcessControl::new(&ends[rank], 0, vec![0, 1]));
    let threads = [0, 1].map(|_| ControlPlane::ThreadRendezvous(Arc::clone(&rendezvous)));
    for controls in [threads, [control(0), control(1)]] {
        let [(mut refusing, fake), (mut other, theirs)] = sessions(controls);
        // All come: both have their error, and nothing is left of it for the calls behind.
        thread::scope(|scope| {
            let peer = scope.spawn(|| other.begin(same()));
            refusing.refuse(same().tag, "no memory").expect("its own refusal");
            assert!(matches!(peer.join().expect("no panic"), Err(Error::Comm(CommError::Refused { peer: 0, .. }))));
        });
        let replay = |session: &Session| {
            let number = session.count.call();
            session.count.enqueued(number);
            let subject = CollectiveInfo { rank: session.comm_handle.rank, number, operation: REPLAY, tag: same().tag };
            let ends = Arc::new(AtomicBool::new(false));
            let watch = session.watch().expect("a watchdog");
            watch.watch(subject, LONG, Box::new(FlaggedWork(Arc::clone(&ends))));
            ends
        };
        for ends in [replay(&refusing), replay(&other)] {
            ends.store(true, SeqCst);
        }
        let start = Instant::now();
        let _never = replay(&other);
        assert!(refusing.refuse(same().tag, "no room").is_err(), "nobody came");
        until("aborted", || fake.aborts.load(SeqCst) > 0 && theirs.aborts.load(SeqCst) > 0);
        assert!(start.elapsed() < TIMEOUT);
        match other.comm_handle.failure() {
            Some(CommError::Refused { operation: REPLAY, rank: 1, peer: 0, reason, .. }) => {
                assert_eq!(reason, "no room");
            }
            other => panic!("{other:?}"),
        }
    }
}
