//! Ranks that are lost.

use std::time::{Duration, Instant};

use moebius::comm::{Communicator, Op};
use moebius::cpu::{Cpu, ThreadComm};
use moebius::ep::DispatcherKind;
use moebius::{CommError, Error, Result};

use super::limits::{Countdown, in_time};
use super::support::*;

/// Where rank [`CULPRIT`] is lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    BeforeForward,
    /// Between dispatch and combine.
    InForward,
    BeforeBackward,
    /// Between combine_bwd and dispatch_bwd.
    InBackward,
}

/// Runs a step up to where the culprit is lost, by `leave` or by a panic inside; the others' error.
fn step_until(r: &mut Rank, at: At, leave: &dyn Fn()) -> Result<()> {
    let mine = r.is_culprit();
    if mine && at == At::BeforeForward {
        leave();
        return Ok(());
    }
    let own = params(r.rank, RANKS);
    let views = own.views()?;
    let mut params = views.params();
    let up = Troubled::new(own.up.view(), mine && at == At::InForward, Trouble::Panic);
    let down = Troubled::new(own.down.view(), false, Trouble::Panic);
    (params.up, params.down) = (&up, &down);
    let x = r.x();
    let (_, context) = r.forward(x.view(), &params)?;
    if mine && at == At::BeforeBackward {
        leave();
        return Ok(());
    }
    if mine {
        down.arm();
    }
    r.backward(context, &x, &params, &x).map(drop)
}

/// The call that the others wait in.
fn waiting_in(at: At) -> Op {
    match at {
        At::BeforeForward => Op::Prepare,
        At::InForward => Op::Combine,
        At::BeforeBackward => Op::CombineBwd,
        At::InBackward => Op::DispatchBwd,
    }
}

fn is_gone(r: &Rank, op: Op, result: Result<()>) {
    match result {
        Err(Error::Comm(CommError::PeerGone { tag, rank, peer, .. })) => {
            assert_eq!((tag.layer, tag.op, rank, peer), (5, op, r.rank, CULPRIT));
        }
        other => panic!("{other:?}"),
    }
}

fn survivors_are_told(places: &[At], leave: impl Fn() + Sync) {
    for kind in KINDS {
        for &at in places {
            let results = on_ranks(TIMEOUT, |comm| {
                let mut r = Rank::new(comm, kind);
                let start = Instant::now();
                let result = step_until(&mut r, at, &leave);
                if r.is_culprit() {
                    return;
                }
                is_gone(&r, waiting_in(at), result);
                // And so is every later call.
                let later = step(&mut r);
                is_gone(&r, Op::Prepare, later);
                assert!(start.elapsed() < AT_ONCE, "{kind:?}, {at:?}");
            });
            for (rank, result) in results.iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
                assert!(result.is_ok(), "{kind:?}, {at:?}: rank {rank}");
            }
        }
    }
}

fn step(r: &mut Rank) -> Result<()> {
    r.step().map(drop)
}

#[test]
fn a_rank_that_returns_early() {
    survivors_are_told(&[At::BeforeForward, At::BeforeBackward], || ());
}

#[test]
fn a_rank_that_panics() {
    let places = [At::BeforeForward, At::InForward, At::BeforeBackward, At::InBackward];
    survivors_are_told(&places, || std::panic::resume_unwind(Box::new("a rank's own trouble")));
}

/// Results of the others where the culprit never arrives; `None`: a rank that was to be there was late too.
fn waited_for(comm: ThreadComm, (kind, at): (DispatcherKind, At), limit: Duration, others: &Countdown) -> Option<()> {
    let counted = (Communicator::rank(&comm) != CULPRIT).then(|| others.counted());
    let mut r = match Rank::joined(&Cpu::poisoning(), comm, kind) {
        Ok(rank) => rank,
        Err(Error::Comm(CommError::Timeout { .. } | CommError::Poisoned { .. })) => return None,
        Err(error) => panic!("{error:?}"),
    };
    let start = Instant::now();
    // The culprit stays alive meanwhile: it is late, not gone.
    let result = step_until(&mut r, at, &|| others.wait());
    if r.is_culprit() {
        return Some(());
    }
    let took = start.elapsed();
    let later = step(&mut r);
    drop(counted);
    assert!(matches!(later, Err(Error::Comm(CommError::Poisoned { .. }))), "{later:?}");
    match result {
        Err(Error::Comm(CommError::Timeout { tag, rank, missing, timeout, .. })) => {
            assert_eq!((rank, timeout), (r.rank, limit));
            let alone = missing == [CULPRIT] && tag.op == waiting_in(at);
            (alone && took < limit + SLACK).then_some(())
        }
        // A rank that itself came after the limit.
        Err(Error::Comm(CommError::Poisoned { rank, reason, .. })) => {
            assert_eq!(rank, r.rank);
            assert!(reason.contains(&r.rank.to_string()), "{reason}");
            None
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_never_arrives() {
    for kind in KINDS {
        for at in [At::BeforeForward, At::BeforeBackward] {
            in_time(SHORT, |limit| {
                let others = Countdown::new(RANKS - 1);
                let results = on_ranks(limit, |comm| waited_for(comm, (kind, at), limit, &others));
                all_well("never arrives", results).into_iter().collect::<Option<Vec<_>>>()
            });
        }
    }
}
