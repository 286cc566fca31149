//! The crate's own dispatcher over NVLink for few tokens: the bits of the other one, whole layers as on CPU ranks, graphs,
//! and what it refuses.

use std::time::Duration;

use moebius::comm::Communicator;
use moebius::config::{MoeConfig, SharedConfig};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchSpec, DispatcherKind, Group, GroupConfig, Overflow, Reporting};
use moebius::layer::DispatchOptions;
use moebius::{DType, Error};

use crate::Run;
use crate::conformance::{gpus, later, over};
use crate::layer::Problem;
use crate::nvlink::MINUTE;
use crate::several::numbers;
use crate::steps::{Shape, Steps, each};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("bits_are_those_of_nvlink", same_bits),
        ("random_routings_have_the_bits_of_nvlink", random_routings),
        ("layers_are_the_same_as_on_cpu_ranks", |cuda, ranks| layers(cuda, ranks)),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay),
        ("few_blocks_change_no_bits", few_blocks),
        ("what_it_does_not_do_is_refused", refused),
        ("two_ranks_without_backward_take_it", taken_without_backward),
        ("tags_that_come_again_are_not_those_of_before", tags_come_again),
    ]
}

const LOW_LATENCY: DispatcherKind = DispatcherKind::NvLinkLowLatency;
const KINDS: [DispatcherKind; 2] = [LOW_LATENCY, DispatcherKind::NvLink];

/// Rows of whole packets and of others, aligned to words and not.
fn same_bits(cuda: &Cuda, ranks: usize) {
    const TOKENS: usize = 40;
    const K: usize = 4;
    let sizes = [
        (DType::BF16, 64),
        (DType::BF16, 7168),
        (DType::BF16, 15),
        (DType::F32, 9),
        (DType::F16, 1032),
        (DType::F32, 512),
    ];
    for (dtype, hidden) in sizes {
        let [low, high] = KINDS.map(|kind| {
            over(cuda, kind, ranks, "low latency").run(GroupConfig::new(8 * ranks, TOKENS), |r| {
                let tokens = TOKENS - 7 * r.rank;
                let rows = crate::conformance::rows(dtype, hidden);
                let spec = DispatchSpec { alignment: 8, ..DispatchSpec::new(3, K) };
                let ids = crate::nvlink::choices(r.rank, tokens, K, 8 * ranks);
                let handle = r.prepare(&ids, &spec).expect("prepare");
                let seed = 10 * r.rank as u64;
                let (x, weights) = (numbers(seed, tokens * hidden, 8.0), numbers(seed + 1, tokens * K, 1.0));
                let slots = r.dispatch(&handle, rows, &x, Some(&weights)).expect("dispatch");
                let outputs = numbers(seed + 2, handle.rows() * hidden, 8.0);
                let y = r.combine(&handle, rows, &outputs).expect("combine");
                (slots.rows, slots.weights, y)
            })
        });
        assert!(low == high, "{dtype}, {hidden}");
    }
}

/// Steps of other routings and numbers of tokens in one group: none, all to one rank, some dropped. Their calls pass the
/// end of the tags, where a device of tests begins.
fn random_routings(cuda: &Cuda, ranks: usize) {
    const STEPS: u64 = 1000;
    const TOKENS: usize = 12;
    const K: usize = 4;
    const HIDDEN: usize = 40;
    let rows = crate::conformance::rows(DType::BF16, HIDDEN);
    let experts = 8 * ranks;
    let [low, high] = KINDS.map(|kind| {
        later(cuda, kind, ranks, "low latency").run(GroupConfig::new(experts, TOKENS), |r| {
            let step = |step: u64| {
                let seed = 100 * step + r.rank as u64;
                let dice = numbers(seed, 2 + TOKENS * K, 0.5);
                let below = |value: f64, end: usize| ((value + 0.5) * end as f64) as usize % end;
                let tokens = below(dice[0], TOKENS + 1);
                let narrow = below(dice[1], 4) == 0;
                let choice = |i: usize| match below(dice[2 + i], 9) {
                    0 => -1,
                    _ if narrow => (step as usize % ranks * 8 + (i % K + step as usize) % 8) as i64,
                    n => ((i % K * (experts / K) + n + i / K) % (experts / K) + i % K * (experts / K)) as i64,
                };
                let ids: Vec<i64> = (0..tokens * K).map(choice).collect();
                let spec = DispatchSpec { alignment: 4, ..DispatchSpec::new(step as u32 % 3, K) };
                let handle = r.prepare(&ids, &spec).expect("prepare");
                let x = numbers(seed + 1, tokens * HIDDEN, 8.0);
                let slots = r.dispatch(&handle, rows, &x, None).expect("dispatch");
                let outputs = numbers(seed + 2, handle.rows() * HIDDEN, 8.0);
                (slots.rows, r.combine(&handle, rows, &outputs).expect("combine"))
            };
            (0..STEPS).map(step).collect::<Vec<_>>()
        })
    });
    for (rank, (low, high)) in low.iter().zip(&high).enumerate() {
        for (step, (low, high)) in low.iter().zip(high).enumerate() {
            assert!(low == high, "rank {rank}, step {step}");
        }
    }
}

fn shared() -> MoeConfig {
    let mut config = MoeConfig::new(512, 48, 32, 8);
    config.shared = Some(SharedConfig { intermediate: 32, gated: false, bias: false });
    config
}

fn layers(cuda: &Cuda, ranks: usize) {
    for (name, config) in [("plain", MoeConfig::new(1024, 40, 16, 4)), ("shared expert", shared())] {
        for split in [vec![33; ranks], (0..ranks).map(|r| [70, 0, 3, 128][r % 4]).collect()] {
            for dtype in [DType::F32, DType::BF16] {
                let name = format!("{name}, {split:?}, {dtype}");
                Problem::new(&config, &split, LOW_LATENCY, dtype).forward_as_on_cpu(&name, cuda);
            }
        }
    }
}

/// Forward alone, few tokens, a capacity that is enough for all.
pub fn captured(ranks: usize) -> (Shape, DispatchOptions) {
    const TOKENS: usize = 24;
    let shape = Shape {
        kind: LOW_LATENCY,
        config: shared(),
        tokens: TOKENS,
        fewer: 5,
        backward: false,
        windows: 0,
        overlap: Default::default(),
    };
    let rows = ranks * TOKENS * shape.config.router.top_k + 16 * shape.config.router.num_experts;
    let options = DispatchOptions {
        capacity: Capacity::Static(rows),
        overflow: Overflow::Error,
        alignment: 16,
        reporting: Some(Reporting::Deferred),
        ..Default::default()
    };
    (shape, options)
}

/// Also with other inputs, and so another routing, in each of 10,000 replays.
fn graphs_replay(_: &Cuda, ranks: usize) {
    const REPLAYS: usize = 10_000;
    each(ranks, |comm, barrier| {
        let mut steps = Steps::new(comm, captured(ranks))?;
        let (mut graph, eager) = steps.replays()?;
        for i in 0..REPLAYS {
            let input = i % eager.len();
            steps.set_x(input as u64)?;
            graph.replay()?;
            if i % 101 == 0 {
                assert!(steps.results()? == eager[input], "replay {i}");
            }
        }
        steps.group.dispatcher().check()?;
        // Before the group that it calls.
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

/// Calls that may take a block or a few, where they would take seven, have the bits of those that may take all: of groups
/// that bound their SMs, and on devices that reserve all but two; eager and replayed, with patience and without.
fn few_blocks(_: &Cuda, ranks: usize) {
    /// So long that no rank is late, whatever keeps it.
    const PATIENCE: Duration = Duration::from_secs(20);
    let run = |max_sms: usize, reserved: usize, patience: Option<Duration>| {
        each(ranks, |comm, barrier| {
            let cuda = comm.cuda().reserving_sms(reserved);
            let change = |config| GroupConfig { max_sms, patience, ..config };
            let mut steps = Steps::on(cuda, comm, captured(ranks), change)?;
            let (graph, eager) = steps.replays()?;
            steps.group.dispatcher().check()?;
            // Before the group that it calls.
            drop(graph);
            barrier.wait();
            Ok(eager)
        })
    };
    let all = run(0, 0, None);
    for patience in [None, Some(PATIENCE)] {
        for (max_sms, reserved) in [(1, 0), (2, 0), (3, 0), (5, 0), (0, usize::MAX), (3, usize::MAX)] {
            assert!(run(max_sms, reserved, patience) == all, "{max_sms} SMs, {reserved} reserved, {patience:?}");
        }
    }
}

fn refused(cuda: &Cuda, ranks: usize) {
    over(cuda, LOW_LATENCY, ranks, "low latency").run(GroupConfig::new(8 * ranks, 4), |r| {
        r.forward_only = false;
        let spec = DispatchSpec { backward: true, ..DispatchSpec::new(0, 1) };
        match r.prepare(&[0, 1], &spec) {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, "spec.backward"),
            other => panic!("{other:?}"),
        }
        r.forward_only = true;
        r.works();
    });
    let config = GroupConfig { dispatcher: LOW_LATENCY, in_k_order: true, ..GroupConfig::new(8 * ranks, 4) };
    std::thread::scope(|threads| {
        for comm in gpus::communicators(ranks, MINUTE) {
            let config = config.clone();
            threads.spawn(move || match Group::new(comm.cuda().clone(), Box::new(comm), config) {
                Err(Error::Invalid { name, .. }) => assert_eq!(name, "in_k_order"),
                other => panic!("{:?}", other.map(|_| "a group")),
            });
        }
    });
}

/// Nobody has named it: two ranks take it where the group is forward only, and NVLink where it is not.
fn taken_without_backward(_: &Cuda, ranks: usize) {
    for (forward_only, low_latency) in [(true, LOW_LATENCY), (false, DispatcherKind::NvLink)] {
        std::thread::scope(|threads| {
            for comm in gpus::communicators(ranks, MINUTE) {
                threads.spawn(move || {
                    let config = GroupConfig { forward_only, ..GroupConfig::new(8 * ranks, 4) };
                    let group = Group::new(comm.cuda().clone(), Box::new(comm), config).expect("a group");
                    let expected = if ranks == 2 { low_latency } else { DispatcherKind::AllGather };
                    assert_eq!(group.dispatcher_kind(), expected);
                });
            }
        });
    }
}

/// Packets of a step lie in a bank, of rows that no step has for some calls: as many as there are tags, and 256, whose tags
/// end alike. Then calls bring other rows there, and a rank comes late to them: the others do not take what lies there for
/// those.
fn tags_come_again(_: &Cuda, ranks: usize) {
    /// Steps of two calls until their tags come again: 0 and 1 are none.
    const STEPS: usize = 65_534 / 2;
    const LATE: Duration = Duration::from_millis(100);
    each(ranks, |comm, barrier| {
        let (rank, last) = (comm.rank(), ranks - 1);
        let mut steps = Steps::new(comm, captured(ranks))?;
        let whole = steps.over(5..6)?.swap_remove(0);
        let router = steps.router()?;
        let mut graph = steps.cuda.clone().capture(|| steps.step())?;
        for between in [128, STEPS] {
            // What lies in the banks.
            steps.set_x(4)?;
            graph.replay()?;
            let before = steps.results()?;
            assert!(before != whole, "other rows");
            // All rows go to the first rank, and their sums from there.
            steps.choose_the_first_four()?;
            for _ in 1..between {
                graph.replay()?;
            }
            steps.results()?;
            steps.set_router(&router)?;
            steps.set_x(5)?;
            barrier.wait();
            if rank == last {
                std::thread::sleep(LATE);
            }
            graph.replay()?;
            assert!(steps.results()? == whole, "rank {rank}, {between} steps behind");
            steps.group.dispatcher().check()?;
            barrier.wait();
        }
        // Before the group that it calls.
        drop(graph);
        barrier.wait();
        Ok(())
    });
}
