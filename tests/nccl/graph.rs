//! Steps of whole layers over several GPUs in which nothing waits: the same bits as those that do, nothing asked of the
//! driver, errors told later, and forward and backward, prepare included, replayed from a graph.

use std::sync::mpsc;
use std::thread;

use moebius::config::{CapacityOrder, ExpertCapacity, MoeConfig, Payload};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Overflow, Overlap, Reporting};
use moebius::layer::DispatchOptions;
use moebius::nccl::NcclComm;
use moebius::{CommError, Error, Result};

use crate::steps::{Shape, Steps, each, each_apart};
use crate::{KINDS, Run};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("a_plan_that_waits_for_nothing_gives_the_same_bits", same_bits),
        ("a_seen_step_asks_the_driver_for_nothing", asks_for_nothing),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay),
        ("a_graph_tells_what_is_wrong_later", graphs_tell),
        ("a_group_may_be_dropped_beside_a_replay", dropped_beside_replays),
        ("what_cannot_be_captured_says_so", not_capturable),
    ]
}

/// Tokens that a rank may have.
const MOST: usize = 96;

/// Tokens that a rank has fewer than the one before it.
const FEWER: usize = 17;

/// Configurations with what only they have.
fn configs() -> Vec<MoeConfig> {
    let plain = MoeConfig::new(128, 64, 16, 4);
    let mut aux = MoeConfig::new(64, 40, 8, 2);
    (aux.aux.balance, aux.aux.z, aux.aux.over_ranks) = (0.1, 0.01, true);
    let mut limited = plain.clone();
    limited.router.expert_capacity =
        Some(ExpertCapacity { factor: 0.9, order: CapacityOrder::Position, renormalize: true });
    let quantized = |hidden, payload| {
        let mut config = MoeConfig::new(hidden, 64, 16, 4);
        config.payload = payload;
        config
    };
    vec![
        plain,
        aux,
        limited,
        quantized(128, Payload::Nvfp4),
        quantized(512, Payload::Mxfp8),
        quantized(512, Payload::Fp8Block),
    ]
}

fn steps(comm: NcclComm, config: &MoeConfig, kind: DispatcherKind, options: DispatchOptions) -> Result<Steps> {
    let overlap = Overlap::Sms(4);
    let shape = Shape { kind, config: config.clone(), tokens: MOST, fewer: FEWER, backward: true, windows: 0, overlap };
    Steps::new(comm, (shape, options))
}

/// Rows that are enough for all tokens of all ranks.
fn fixed(ranks: usize, reporting: Reporting) -> DispatchOptions {
    let rows = ranks * MOST * 4 + 16 * 16;
    DispatchOptions {
        capacity: Capacity::Static(rows),
        overflow: Overflow::Error,
        alignment: 16,
        reporting: Some(reporting),
        ..Default::default()
    }
}

const GATHER: DispatcherKind = DispatcherKind::AllGather;
/// Whose steps wait for nothing where the capacity is static.
const CAPTURABLE: [DispatcherKind; 2] = [GATHER, DispatcherKind::NvLink];

fn capturable() -> impl Iterator<Item = (DispatcherKind, MoeConfig)> {
    CAPTURABLE.into_iter().flat_map(|kind| configs().into_iter().map(move |config| (kind, config)))
}

fn same_bits(_: &Cuda, ranks: usize) {
    for (kind, config) in KINDS.into_iter().flat_map(|kind| configs().into_iter().map(move |c| (kind, c))) {
        let results = |options: DispatchOptions| each(ranks, |comm, _| steps(comm, &config, kind, options)?.over(0..3));
        let drops = DispatchOptions {
            capacity: Capacity::Static(MOST * config.router.top_k / 2),
            overflow: Overflow::Drop,
            alignment: 4,
            reporting: None,
            ..Default::default()
        };
        for options in [fixed(ranks, Reporting::Immediate), drops, DispatchOptions::default()] {
            let later = results(DispatchOptions { reporting: Some(Reporting::Deferred), ..options });
            let at_once = results(DispatchOptions { reporting: Some(Reporting::Immediate), ..options });
            assert!(at_once[0].windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
            assert!(later == at_once, "{kind:?}, {options:?}");
        }
    }
}

fn asks_for_nothing(_: &Cuda, ranks: usize) {
    for (kind, config) in capturable() {
        each(ranks, |comm, _| {
            let mut steps = steps(comm, &config, kind, fixed(ranks, Reporting::Deferred))?;
            steps.over(0..2)?;
            let before = steps.cuda.memory();
            for _ in 0..5 {
                steps.step()?;
            }
            assert_eq!(steps.cuda.memory(), before);
            steps.group.dispatcher().check()
        });
    }
}

fn graphs_replay(_: &Cuda, ranks: usize) {
    for (kind, config) in capturable() {
        each(ranks, |comm, barrier| {
            let mut steps = steps(comm, &config, kind, fixed(ranks, Reporting::Deferred))?;
            let (mut graph, eager) = steps.replays()?;
            // An eager step between replays.
            assert!(steps.over(1..2)?[0] == eager[1]);
            steps.set_x(2)?;
            graph.replay()?;
            assert!(steps.results()? == eager[2]);
            steps.group.dispatcher().check()?;
            // Before the group that it calls.
            drop(graph);
            barrier.wait();
            Ok(())
        });
    }
}

/// All tokens choose the first experts, which the first rank has no room for.
fn graphs_tell(_: &Cuda, ranks: usize) {
    let config = configs().swap_remove(0);
    for kind in CAPTURABLE {
        each(ranks, |comm, barrier| {
            let fits = MOST * 4 + 64 * ranks;
            let options = DispatchOptions { capacity: Capacity::Static(fits), ..fixed(ranks, Reporting::Deferred) };
            let mut steps = steps(comm, &config, kind, DispatchOptions { alignment: 1, ..options })?;
            steps.over(0..1)?;
            let cuda = steps.cuda.clone();
            let mut graph = cuda.capture(|| steps.step())?;
            graph.replay()?;
            steps.group.dispatcher().check()?;
            steps.choose_the_first_four()?;
            for _ in 0..3 {
                graph.replay()?;
            }
            let all = (0..ranks).map(|r| (MOST - FEWER * r) * 4).sum::<usize>();
            match steps.group.dispatcher().check() {
                Err(Error::Capacity { rank: 0, needed, capacity, .. }) if fits < all => {
                    assert_eq!((needed, capacity), (all, fits));
                }
                other => panic!("{other:?}"),
            }
            steps.group.dispatcher().check()?;
            drop(graph);
            barrier.wait();
            Ok(())
        });
    }
}

/// A rank's group goes while another thread of it replays, on each rank at a time of its own: replays end with an error, in
/// time, and the GPU works on. What such a replay has computed, a plan's faults say, is told to nobody.
fn dropped_beside_replays(_: &Cuda, ranks: usize) {
    let config = configs().swap_remove(0);
    each_apart(ranks, |comm, barrier| {
        let mut steps = steps(comm, &config, GATHER, fixed(ranks, Reporting::Deferred))?;
        steps.over(0..1)?;
        let cuda = steps.cuda.clone();
        let mut graph = cuda.capture(|| steps.step())?;
        barrier.wait();
        let (send, replayed) = mpsc::channel();
        let refused = thread::scope(|scope| {
            let replaying = scope.spawn(move || {
                loop {
                    match graph.replay() {
                        Ok(()) => send.send(()).expect("a listener"),
                        Err(error) => return error,
                    }
                }
            });
            replayed.iter().take(3).for_each(drop);
            drop(steps);
            replaying.join().expect("no panic")
        });
        let dropped = matches!(&refused, Error::Invalid { name, .. } if name == "graph");
        assert!(dropped || matches!(refused, Error::Comm(CommError::PeerGone { .. })), "{refused:?}");
        barrier.wait();
        cuda.check()
    });
}

fn not_capturable(_: &Cuda, ranks: usize) {
    let config = configs().swap_remove(0);
    let fixed = fixed(ranks, Reporting::Deferred);
    let waits = DispatchOptions { reporting: Some(Reporting::Immediate), ..fixed };
    let open = DispatchOptions { capacity: Capacity::Eager, ..fixed };
    let nvlink = DispatcherKind::NvLink;
    let waiting = [DispatcherKind::AllToAll, DispatcherKind::Hierarchical].map(|kind| (kind, fixed));
    for (kind, options) in waiting.into_iter().chain([(GATHER, waits), (GATHER, open), (nvlink, waits), (nvlink, open)])
    {
        each(ranks, |comm, barrier| {
            let mut steps = steps(comm, &config, kind, options)?;
            let eager = steps.over(0..1)?;
            let cuda = steps.cuda.clone();
            let error = cuda.capture(|| steps.step()).err();
            // A router that reports at once waits first.
            let call = if options.reporting == Some(Reporting::Immediate) { "route" } else { "prepare" };
            let refused = matches!(error, Some(Error::NotCapturable { call: found, .. }) if found == call);
            assert!(refused, "{kind:?}: {error:?}");
            barrier.wait();
            // And goes on.
            assert!(steps.over(0..1)? == eager);
            barrier.wait();
            Ok(())
        });
    }
}
