//! Ranks that are lost.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use moebius::comm::Op;
use moebius::{CommError, Error, Result};

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
            let results = on_ranks(PATIENCE, |comm| {
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

/// The limit, and what a loaded machine may add until a thread runs again.
const LIMIT: Duration = Duration::from_millis(300);
const SLACK: Duration = Duration::from_secs(5);

#[test]
fn a_rank_that_never_arrives() {
    for kind in KINDS {
        for at in [At::BeforeForward, At::BeforeBackward] {
            let over = Barrier::new(RANKS);
            let results = on_ranks(LIMIT, |comm| {
                let mut r = Rank::new(comm, kind);
                let start = Instant::now();
                // The culprit stays alive meanwhile: it is late, not gone.
                let result = step_until(&mut r, at, &|| {
                    over.wait();
                });
                if r.is_culprit() {
                    return false;
                }
                let took = start.elapsed();
                let later = step(&mut r);
                over.wait();
                assert!(took < LIMIT + SLACK, "{kind:?}, {at:?}: {took:?}");
                assert!(matches!(later, Err(Error::Comm(CommError::Poisoned { .. }))), "{later:?}");
                match result {
                    Err(Error::Comm(CommError::Timeout { tag, rank, missing, timeout, .. })) => {
                        assert_eq!((tag.op, rank, timeout), (waiting_in(at), r.rank, LIMIT));
                        assert!(missing.contains(&CULPRIT), "{missing:?}");
                        true
                    }
                    // A rank that itself came after the limit.
                    Err(Error::Comm(CommError::Poisoned { tag, rank, reason, .. })) => {
                        assert_eq!((tag.op, rank), (waiting_in(at), r.rank));
                        assert!(reason.contains(&CULPRIT.to_string()), "{reason}");
                        false
                    }
                    other => panic!("{other:?}"),
                }
            });
            let timed_out = all_well("never arrives", results);
            assert!(timed_out.contains(&true), "somebody met the limit");
        }
    }
}
