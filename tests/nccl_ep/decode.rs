//! Decoding: whole layers forward over low latency. The same as CPU ranks, the same bits in every step and replay, with
//! the shared expert beside the rows' way.

use moebius::DType;
use moebius::config::{MoeConfig, Payload, SharedConfig};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Overflow};
use moebius::layer::DispatchOptions;

use crate::graph::fixed;
use crate::layer::Problem;
use crate::steps::{Shape, Steps, each};

pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("same_as_cpu_ranks", same_as_cpu_ranks),
        ("routing_on_the_gpu_is_the_hosts", routing_on_the_gpu_is_the_hosts),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay_the_bits_of_eager_steps),
        ("tokens_that_are_sent_quantized", tokens_that_are_sent_quantized),
        ("no_room_for_the_number_is_refused", no_room_for_the_number),
    ]
}

fn shared() -> MoeConfig {
    let mut config = MoeConfig::new(512, 48, 32, 8);
    config.shared = Some(SharedConfig { intermediate: 32, gated: false, bias: false });
    config
}

fn same_as_cpu_ranks(ranks: usize) {
    let cuda: Cuda = crate::gpus::first(1).1.remove(0);
    for (name, config) in [("plain", MoeConfig::new(1024, 40, 16, 4)), ("shared expert", shared())] {
        for split in [vec![33; ranks], (0..ranks).map(|r| [70, 0, 3, 128][r % 4]).collect()] {
            for dtype in [DType::F32, DType::BF16] {
                let name = format!("{name}, {split:?}, {dtype}");
                Problem::new(&config, &split, DispatcherKind::NcclEpLowLatency, dtype).forward_as_on_cpu(&name, &cuda);
            }
        }
    }
}

/// Forward only, few tokens.
fn shape() -> Shape {
    Shape {
        kind: DispatcherKind::NcclEpLowLatency,
        config: shared(),
        tokens: 24,
        fewer: 0,
        backward: false,
        windows: 0,
        overlap: Default::default(),
    }
}

fn routing_on_the_gpu_is_the_hosts(ranks: usize) {
    crate::graph::holds(ranks, &shape(), 10);
}

fn graphs_replay_the_bits_of_eager_steps(ranks: usize) {
    let options =
        DispatchOptions { capacity: Capacity::Eager, overflow: Overflow::Error, ..DispatchOptions::default() };
    crate::graph::replays(ranks, (shape(), options));
    crate::graph::replays(ranks, (shape(), fixed(&shape(), ranks, 16)));
}

/// As on the CPU, in the first step of a group, whose rows come back wider than they went, and replayed.
fn tokens_that_are_sent_quantized(ranks: usize) {
    let cuda: Cuda = crate::gpus::first(1).1.remove(0);
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let mut shape = shape();
        shape.config.payload = payload;
        let problem = Problem::new(&shape.config, &vec![33; ranks], DispatcherKind::NcclEpLowLatency, DType::BF16);
        problem.forward_as_on_cpu(&format!("{payload:?}"), &cuda);
        crate::graph::holds(ranks, &shape, 3);
        crate::graph::replays(ranks, (shape.clone(), fixed(&shape, ranks, 16)));
    }
}

/// A choice more a token travels than the layer has: with as many choices as experts there is none left.
fn no_room_for_the_number(ranks: usize) {
    each(ranks, |comm, barrier| {
        let all = MoeConfig::new(512, 48, 4 * ranks, 4 * ranks);
        let mut steps = Steps::new(comm, (Shape { config: all, ..shape() }, DispatchOptions::default()))?;
        let refused = steps.step().map_err(|e| e.to_string());
        assert!(refused.as_ref().is_err_and(|e| e.contains("top_k")), "{refused:?}");
        barrier.wait();
        Ok(())
    });
}
