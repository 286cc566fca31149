//! Low latency over NVLink with patience: steps that go on without a rank, be it late, gone, or dead, and what of them needs
//! all ranks.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::cuda::{Captured, Cuda};
use moebius::ep::GroupConfig;
use moebius::kernels::Kernels;
use moebius::layer::DispatchOptions;
use moebius::{CommError, Error, Result};

use crate::Run;
use crate::launched::{AT_ONCE, join, start, succeed, tag};
use crate::low_latency::captured;
use crate::nvlink::MINUTE;
use crate::steps::{Bits, Steps, each, each_apart};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("changes_no_bits", changes_no_bits),
        ("a_late_rank_is_skipped_and_taken_in_again", |_, ranks| late(ranks, Away::Stays, false)),
        ("a_late_rank_of_replayed_steps_is_skipped_and_taken_in_again", |_, ranks| late(ranks, Away::Stays, true)),
        ("a_rank_whose_own_call_is_refused_is_late", |_, ranks| late(ranks, Away::Refuses, false)),
        ("a_rank_that_leaves_is_gone_on_without", |_, ranks| leaves(ranks, false)),
        ("a_rank_that_leaves_replayed_steps_is_gone_on_without", |_, ranks| leaves(ranks, true)),
        ("a_process_that_is_killed_is_gone_on_without", |_, ranks| lose_the_last(ranks, "killed_in_steps")),
        ("a_process_that_is_killed_in_replays_is_gone_on_without", |_, ranks| {
            lose_the_last(ranks, "killed_in_replays");
        }),
        ("a_replay_behind_the_group_is_refused", behind_the_group),
        ("a_rank_is_back_behind_a_round_of_tags", back_behind_a_round),
        ("losses_over_the_ranks_are_refused", losses_are_refused),
    ]
}

/// How long steps wait for a rank.
const PATIENCE: Duration = Duration::from_millis(1500);

fn patient(config: GroupConfig) -> GroupConfig {
    GroupConfig { patience: Some(PATIENCE), ..config }
}

/// Where all ranks come in time.
fn changes_no_bits(_: &Cuda, ranks: usize) {
    let (shape, fixed) = captured(ranks);
    for options in [fixed, DispatchOptions::default()] {
        let run = |change: fn(GroupConfig) -> GroupConfig| {
            each(ranks, |comm, _| {
                let mut steps = Steps::in_group(comm, (shape.clone(), options), change)?;
                let all = steps.over(0..6)?;
                steps.group.dispatcher().check().map(|()| all)
            })
        };
        assert!(run(patient) == run(|config| config), "{options:?}");
    }
}

/// A step, or its replay: its results.
fn step(steps: &mut Steps, graph: &mut Option<Captured<()>>) -> Result<Bits> {
    match graph {
        Some(graph) => graph.replay()?,
        None => steps.step()?,
    }
    steps.results()
}

fn graph_of(steps: &mut Steps, replayed: bool) -> Result<Option<Captured<()>>> {
    let cuda = steps.cuda.clone();
    Ok(if replayed { Some(cuda.capture(|| steps.step())?) } else { None })
}

/// Kernels have told, on this rank, that they have gone on without the last.
fn is_told(steps: &mut Steps, rank: usize, last: usize) {
    match steps.group.dispatcher().check() {
        Err(Error::LateRanks { rank: own, late, .. }) => assert_eq!((own, late), (rank, vec![last])),
        other => panic!("{other:?}"),
    }
}

/// Steps until each rank has had a whole step, which it counts in `back`; nobody knows when that will be.
fn until_all_are_back(back: &AtomicUsize, ranks: usize, mut is_whole: impl FnMut() -> Result<bool>) -> Result<()> {
    let (began, mut is_back) = (Instant::now(), false);
    while back.load(Ordering::SeqCst) < ranks {
        assert!(began.elapsed() < MINUTE, "a rank is not back");
        if is_whole()? && !is_back {
            is_back = true;
            back.fetch_add(1, Ordering::SeqCst);
        }
    }
    Ok(())
}

/// What the last rank does while the others step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Away {
    Stays,
    /// It makes a call that is refused on it alone.
    Refuses,
}

/// The last rank stays away for some steps of a layer: the others go on without its experts' share, waiting once, are told,
/// and have whole results again when it is back.
fn late(ranks: usize, away: Away, replayed: bool) {
    each(ranks, |comm, barrier| {
        let (rank, last) = (comm.rank(), ranks - 1);
        let mut steps = Steps::in_group(comm, captured(ranks), patient)?;
        let whole = steps.over(1..4)?.swap_remove(0);
        steps.set_x(1)?;
        barrier.wait();
        let mut graph = graph_of(&mut steps, replayed)?;
        barrier.wait();
        for _ in 0..3 {
            assert!(step(&mut steps, &mut graph)? == whole, "all are there");
        }
        steps.group.dispatcher().check()?;
        barrier.wait();
        if rank == last && away == Away::Refuses {
            let refused = steps.step_of_wider_tokens();
            assert!(matches!(&refused, Err(Error::Invalid { name, .. }) if name == "tensor x"), "{refused:?}");
        }
        if rank != last {
            let began = Instant::now();
            let without = step(&mut steps, &mut graph)?;
            let took = began.elapsed();
            assert!(took >= PATIENCE / 2 && took < 4 * PATIENCE, "{took:?}");
            assert!(without != whole, "the last rank has experts");
            is_told(&mut steps, rank, last);
            // Now nobody waits.
            let began = Instant::now();
            for _ in 0..20 {
                assert!(step(&mut steps, &mut graph)? == without, "the same share is missing");
            }
            assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
            steps.group.dispatcher().check()?;
        }
        barrier.wait();
        static BACK: AtomicUsize = AtomicUsize::new(0);
        if rank == 0 {
            BACK.store(0, Ordering::SeqCst);
        }
        barrier.wait();
        until_all_are_back(&BACK, ranks, || Ok(step(&mut steps, &mut graph)? == whole))?;
        // Before the group that it calls.
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

/// The last rank stays away until the tags of the packets that it has in its memory, and that the others have of it, come
/// again: they are not taken for those of the step that it returns in.
fn back_behind_a_round(_: &Cuda, ranks: usize) {
    /// Of three calls, of which 65,534 have other tags: those of the last whole step are those of the last of these.
    const STEPS: usize = 65_534;
    static BACK: AtomicUsize = AtomicUsize::new(0);
    // From some steps before on, as a rank that has come waits for the next step of the others.
    for steps_away in [STEPS - 2, STEPS - 1, 7 * STEPS / 8] {
        BACK.store(0, Ordering::SeqCst);
        each(ranks, |comm, barrier| {
            let (rank, last) = (comm.rank(), ranks - 1);
            let mut steps = Steps::in_group(comm, captured(ranks), patient)?;
            let whole = steps.over(1..4)?.swap_remove(0);
            steps.set_x(2)?;
            barrier.wait();
            let mut graph = graph_of(&mut steps, true)?;
            barrier.wait();
            // What lies in the banks is of other inputs.
            for _ in 0..2 {
                step(&mut steps, &mut graph)?;
            }
            steps.set_x(1)?;
            barrier.wait();
            let mut without = whole.clone();
            if rank != last {
                without = step(&mut steps, &mut graph)?;
                assert!(without != whole, "the last rank has experts");
                is_told(&mut steps, rank, last);
                let replays = graph.as_mut().expect("a graph");
                (1..steps_away).try_for_each(|_| replays.replay())?;
                assert!(steps.results()? == without, "the same share is missing");
            }
            barrier.wait();
            until_all_are_back(&BACK, ranks, || {
                let made = step(&mut steps, &mut graph)?;
                // The rank that was the last to be back has gone on meanwhile, and may be missing from this step.
                let over = BACK.load(Ordering::SeqCst) >= ranks;
                let known = over || made == whole || rank == last || made == without;
                assert!(known, "neither whole nor without the last, {steps_away} steps on");
                Ok(made == whole)
            })?;
            // Before the group that it calls.
            drop(graph);
            barrier.wait();
            Ok(())
        });
    }
}

/// A layer whose losses are summed over the ranks needs all of them in each step: refused on each rank, before anything that
/// would wait for another.
fn losses_are_refused(_: &Cuda, ranks: usize) {
    each(ranks, |comm, barrier| {
        let (mut shape, options) = captured(ranks);
        shape.config.aux.balance = 0.01;
        shape.config.aux.over_ranks = true;
        let mut steps = Steps::in_group(comm, (shape, options), patient)?;
        if steps.group.rank() == 0 {
            let refused = steps.step();
            assert!(matches!(&refused, Err(Error::Invalid { name, .. }) if name == "aux.over_ranks"), "{refused:?}");
            let refused = steps.cuda.clone().capture(|| steps.step()).err();
            assert!(matches!(&refused, Some(Error::Invalid { name, .. }) if name == "aux.over_ranks"), "{refused:?}");
        }
        barrier.wait();
        Ok(())
    });
}

/// A collective, to which all ranks would have to come, says which one does not; the communicator is none the worse for it.
fn needs_all(steps: &mut Steps, last: usize) {
    let met = steps.group.dispatcher().communicator().barrier(tag(1));
    assert!(matches!(met, Err(Error::Comm(CommError::PeerGone { peer, .. })) if peer == last), "{met:?}");
    assert!(!steps.group.dispatcher().communicator().ended());
}

/// The last rank drops its group and its communicator, while the others step: they go on without it for good. What it had of
/// memory that they write to is freed by then, and is there for them as long as they have it mapped.
fn leaves(ranks: usize, replayed: bool) {
    each_apart(ranks, |comm, barrier| {
        let (rank, last) = (comm.rank(), ranks - 1);
        let mut steps = Steps::in_group(comm, captured(ranks), patient)?;
        let whole = steps.over(1..4)?.swap_remove(0);
        steps.set_x(1)?;
        barrier.wait();
        let mut graph = graph_of(&mut steps, replayed)?;
        barrier.wait();
        for _ in 0..3 {
            assert!(step(&mut steps, &mut graph)? == whole, "all are there");
        }
        barrier.wait();
        if rank == last {
            drop((graph, steps));
            barrier.wait();
            barrier.wait();
            return Ok(());
        }
        let without = step(&mut steps, &mut graph)?;
        assert!(without != whole, "the last rank has experts");
        is_told(&mut steps, rank, last);
        barrier.wait();
        for round in 0..3 {
            for _ in 0..20 {
                assert!(step(&mut steps, &mut graph)? == without, "the same share is missing");
            }
            needs_all(&mut steps, last);
            if round == 1 {
                // A step that the host plans.
                assert!(steps.over(7..9)?.len() == 2);
                steps.set_x(1)?;
            }
        }
        steps.group.dispatcher().check()?;
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

/// All but the last end well.
fn lose_the_last(ranks: usize, body: &str) {
    let said = start(body, ranks, &[]);
    succeed(&said[..ranks - 1]);
    let last = &said[ranks - 1];
    assert!(last.killed, "the last was to be killed: {}", last.text);
}

/// The last rank's process is killed by SIGKILL in the midst of steps, with kernels of all ranks under way. Its experts have
/// added nothing, so that whole steps and steps without it have the same bits: all of them are right, but for one in which
/// some rows of its had not come.
pub fn killed(replayed: bool) {
    /// Steps of the others from when they are told on.
    const MORE: usize = 200;
    let comm = join(0);
    let (rank, ranks) = (comm.rank(), comm.size());
    let last = ranks - 1;
    let run = || -> Result<()> {
        let mut steps = Steps::in_group(comm, captured(ranks), patient)?;
        if rank == last {
            steps.zero_experts()?;
        }
        let whole = steps.over(1..4)?.swap_remove(0);
        steps.set_x(1)?;
        let mut graph = graph_of(&mut steps, replayed)?;
        steps.group.dispatcher().check()?;
        let stepped = AtomicBool::new(false);
        thread::scope(|scope| {
            if rank == last {
                scope.spawn(|| {
                    while !stepped.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                    thread::sleep(Duration::from_millis(50));
                    let own = std::process::id().to_string();
                    let killed = Command::new("kill").args(["-KILL", &own]).status();
                    panic!("not killed: {killed:?}");
                });
            }
            let began = Instant::now();
            if rank == last {
                loop {
                    step(&mut steps, &mut graph)?;
                    stepped.store(true, Ordering::SeqCst);
                }
            }
            let mut other = 0;
            loop {
                assert!(began.elapsed() < AT_ONCE + 4 * PATIENCE, "the last rank is not missed");
                other += usize::from(step(&mut steps, &mut graph)? != whole);
                match steps.group.dispatcher().check() {
                    Ok(()) => assert_eq!(other, 0, "all are there"),
                    // Of more than two, one that has waited for the last in a call before may be late itself.
                    Err(Error::LateRanks { late, .. }) => {
                        break assert!(late.contains(&last) && (ranks > 2 || late.len() == 1), "{late:?}");
                    }
                    Err(error) => return Err(error),
                }
            }
            assert!(other <= 1);
            if ranks > 2 {
                // They have met again by the second step behind.
                step(&mut steps, &mut graph)?;
                step(&mut steps, &mut graph)?;
            }
            // Until the hosts have heard of it too, and behind that.
            let began = Instant::now();
            for i in 0.. {
                assert!(step(&mut steps, &mut graph)? == whole, "its experts add nothing");
                if i > MORE && began.elapsed() > Duration::from_secs(1) {
                    break;
                }
            }
            needs_all(&mut steps, last);
            for _ in 0..MORE {
                assert!(step(&mut steps, &mut graph)? == whole, "behind a collective that was refused");
            }
            if ranks == 2 {
                steps.group.dispatcher().check()?;
            }
            drop(graph.take());
            Ok(())
        })?;
        let cuda = steps.cuda.clone();
        drop(steps);
        cuda.check()
    };
    run().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
}

/// A graph of a group that is dropped: its replay is refused, with patience and without, and moves nothing.
fn behind_the_group(_: &Cuda, ranks: usize) {
    for change in [patient, |config| config] {
        each(ranks, |comm, barrier| {
            let mut steps = Steps::in_group(comm, captured(ranks), change)?;
            steps.over(0..2)?;
            barrier.wait();
            let mut graph = steps.cuda.clone().capture(|| steps.step())?;
            barrier.wait();
            graph.replay()?;
            let (cuda, before) = (steps.cuda.clone(), steps.results()?);
            barrier.wait();
            let kept = steps.without_group();
            for _ in 0..2 {
                match graph.replay() {
                    Err(Error::Invalid { call: "Captured::replay", name, .. }) => assert_eq!(name, "graph"),
                    other => panic!("{other:?}"),
                }
            }
            let after: Result<Bits> = kept.iter().map(|t| cuda.download(t.view())).collect();
            assert!(after? == before);
            barrier.wait();
            Ok(())
        });
    }
}
