//! Lost ranks: the others' errors, in time, and never a hang.

use std::time::{Duration, Instant};

use moebius::ep::{GroupConfig, Handle};
use moebius::{CommError, Error, Result};

use super::faults::{AT_ONCE, H, T};
use super::harness::*;
use super::limits::{Countdown, in_time};

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(early_return, 2),
        case!(panic_of_a_rank, 2),
        case!(rank_that_never_arrives, 2),
        case!(backward_that_never_comes, 2),
    ]
}

/// Errors of the survivors of a rank 0 that leaves after prepare, now and later.
fn survivors_of<D: Target>(s: &Setup<D>, leave: impl Fn() + Sync) {
    let results = s.on_threads(TIMEOUT, |endpoint| {
        let config = GroupConfig { dispatcher: s.kind, ..GroupConfig::new(s.experts(2), T) };
        let mut r = s.rank(endpoint, config).expect("group");
        let h = r.prepare(&[0; T], &training(0, 1)).expect("prepare");
        if r.rank == 0 {
            return leave();
        }
        let start = Instant::now();
        for _ in 0..2 {
            let error = r.dispatch(&h, F32(H), &[0.0; T * H], None);
            assert!(matches!(error, Err(Error::Comm(CommError::PeerGone { peer: 0, .. }))), "{error:?}");
        }
        assert!(start.elapsed() < AT_ONCE);
    });
    assert!(results.iter().skip(1).all(|r| r.is_ok()), "{}", s.name);
}

fn early_return<D: Target>(s: &Setup<D>) {
    survivors_of(s, || ());
}

fn panic_of_a_rank<D: Target>(s: &Setup<D>) {
    // Unwinds without the hook's noise.
    survivors_of(s, || std::panic::resume_unwind(Box::new("a rank's own trouble")));
}

/// Says that a call ended without this rank, and without it alone; `None`: others were late too.
fn is_lost(result: Result<()>, lost: usize, late: bool) -> Option<()> {
    match result {
        Err(Error::Comm(CommError::Timeout { missing, .. })) if !late => {
            assert!(missing.contains(&lost), "{missing:?}");
            (missing.len() == 1).then_some(())
        }
        Err(Error::Comm(CommError::Poisoned { reason, .. })) if late => {
            let alone = reason.contains(&format!("[{lost}]"));
            assert!(alone || [format!("[{lost},"), format!(" {lost}]")].iter().any(|l| reason.contains(l)), "{reason}");
            alone.then_some(())
        }
        other => too_late(other),
    }
}

/// Nothing where a rank came after the others had given it up; any other outcome is wrong.
fn too_late<T, U: std::fmt::Debug>(outcome: Result<U>) -> Option<T> {
    match outcome {
        Err(Error::Comm(CommError::Timeout { .. } | CommError::Poisoned { .. })) => None,
        other => panic!("{other:?}"),
    }
}

/// Time that a rank that never comes costs each of the two cases below.
const LIMIT: Duration = Duration::from_millis(1500);

/// A group and a handle on every rank, or nothing: collectives fail on all ranks or on none.
fn prepared<D: Target>(s: &Setup<D>, endpoint: Endpoint<D>) -> Option<(Rank<D>, Handle<D>)> {
    let config = GroupConfig { dispatcher: s.kind, ..GroupConfig::new(s.experts(2), T) };
    let ready = s.rank(endpoint, config).and_then(|mut r| {
        let h = r.prepare(&[0; T], &training(0, 1))?;
        Ok((r, h))
    });
    ready.map_or_else(|error| too_late(Err::<(), _>(error)), Some)
}

/// Runs `body` on every rank until all are in time but those that are not to be.
fn within_limit<D: Target>(s: &Setup<D>, body: impl Fn(Endpoint<D>, &Countdown) -> Option<()> + Sync) {
    in_time(LIMIT, |limit| {
        let others = Countdown::new(s.ranks - 1);
        let found = s.on_threads(limit, |endpoint| body(endpoint, &others));
        let name = s.name;
        found.into_iter().map(|r| r.unwrap_or_else(|_| panic!("case {name}, {s:?}: a rank panicked"))).collect()
    })
}

/// Rank 0 comes too late: the others time out, it and every later call find the communicator unusable.
fn rank_that_never_arrives<D: Target>(s: &Setup<D>) {
    within_limit(s, |endpoint, others| {
        let counted = (endpoint.comm.rank() != 0).then(|| others.counted());
        let (mut r, h) = prepared(s, endpoint)?;
        if r.rank == 0 {
            others.wait();
        }
        let first = r.dispatch(&h, F32(H), &[0.0; T * H], None).map(drop);
        drop(counted);
        others.wait();
        let later = r.prepare(&[0; T], &training(0, 1)).map(drop);
        is_lost(first, 0, r.rank == 0)?;
        is_lost(later, 0, true)
    });
}

/// All agreed on backward, but the last rank's never comes.
fn backward_that_never_comes<D: Target>(s: &Setup<D>) {
    let lost = s.ranks - 1;
    within_limit(s, |endpoint, others| {
        let counted = (endpoint.comm.rank() != lost).then(|| others.counted());
        let (mut r, h) = prepared(s, endpoint)?;
        let outcome = (r.rank != lost).then(|| r.combine_bwd(&h, F32(H), &[0.0; T * H]).map(drop));
        drop(counted);
        // The last rank stays alive meanwhile: it is late, not gone.
        others.wait();
        outcome.map_or(Some(()), |outcome| is_lost(outcome, lost, false))
    });
}
