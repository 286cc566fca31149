//! Whole layers over NCCL EP with nothing waiting for the GPU: the routing that the library makes gives what the host's
//! plan gives, errors are told later, and forward and backward, prepare included, replay to the bit.

use moebius::Error;
use moebius::config::{MoeConfig, Payload};
use moebius::ep::{Capacity, DispatcherKind, Overflow, Reporting};
use moebius::layer::DispatchOptions;

use crate::steps::{Shape, Steps, each};

#[allow(clippy::type_complexity, reason = "names and functions, no more")]
pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("routing_on_the_gpu_is_the_hosts", routing_on_the_gpu_is_the_hosts),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay_the_bits_of_eager_steps),
        ("tokens_that_are_sent_quantized", tokens_that_are_sent_quantized),
        ("what_the_gpu_finds_is_told_later", what_the_gpu_finds_is_told_later),
    ]
}

const T: usize = 96;

fn shape() -> Shape {
    Shape {
        kind: DispatcherKind::NcclEp,
        config: config(),
        tokens: T,
        fewer: 0,
        backward: true,
        windows: 0,
        overlap: Default::default(),
    }
}

fn config() -> MoeConfig {
    MoeConfig::new(128, 64, 16, 4)
}

pub fn fixed(shape: &Shape, ranks: usize, alignment: usize) -> DispatchOptions {
    let local = shape.config.router.num_experts / ranks;
    let rows =
        ranks * shape.tokens * shape.config.router.top_k + if alignment > 1 { local * (alignment - 1) } else { 0 };
    let rows = rows.next_multiple_of(16);
    DispatchOptions { capacity: Capacity::Static(rows), overflow: Overflow::Error, alignment, ..Default::default() }
}

fn routing_on_the_gpu_is_the_hosts(ranks: usize) {
    holds(ranks, &shape(), 3);
}

fn tokens_that_are_sent_quantized(ranks: usize) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let mut shape = shape();
        shape.config.payload = payload;
        holds(ranks, &shape, 3);
        replays(ranks, (shape.clone(), fixed(&shape, ranks, 16)));
    }
}

/// The first step's routing is the host's plan, the later ones' the library's: the same rows go through the same sums.
pub fn holds(ranks: usize, shape: &Shape, more: usize) {
    let open = DispatchOptions { alignment: 16, ..DispatchOptions::default() };
    for options in [DispatchOptions::default(), open, fixed(shape, ranks, 1), fixed(shape, ranks, 16)] {
        each(ranks, |comm, _| {
            let mut steps = Steps::new(comm, (shape.clone(), options))?;
            steps.step()?;
            let first = steps.results()?;
            for _ in 0..more {
                steps.step()?;
                assert!(steps.results()? == first, "{options:?}: a later step differs");
            }
            steps.cuda.check()
        });
        println!("{options:?}: holds");
    }
}

fn graphs_replay_the_bits_of_eager_steps(ranks: usize) {
    replays(ranks, (shape(), fixed(&shape(), ranks, 16)));
}

/// A captured step, over and over with other inputs.
pub fn replays(ranks: usize, what: (Shape, DispatchOptions)) {
    each(ranks, |comm, barrier| {
        let mut steps = Steps::new(comm, what.clone())?;
        let (graph, _) = steps.replays()?;
        steps.cuda.check()?;
        // Before the group that it calls.
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

fn what_the_gpu_finds_is_told_later(ranks: usize) {
    each(ranks, |comm, barrier| {
        let rank = moebius::comm::Communicator::rank(&comm);
        let options = DispatchOptions { reporting: Some(Reporting::Deferred), ..fixed(&shape(), ranks, 1) };
        // Room for what a step needs at first, and no more.
        let options = DispatchOptions { capacity: Capacity::Static(T * 4 + 64 * ranks), ..options };
        let mut steps = Steps::new(comm, (shape(), options))?;
        steps.step()?;
        steps.group.dispatcher().check()?;
        // They are the first rank's.
        steps.choose_the_first_four()?;
        steps.step()?;
        let (found, needed) = (steps.group.dispatcher().check(), ranks * T * 4);
        match (rank, found) {
            (0, Err(Error::Capacity { needed: n, .. })) if n == needed => {}
            (1.., Ok(())) => {}
            (_, found) => panic!("rank {rank}: {found:?}"),
        }
        barrier.wait();
        Ok(())
    });
}
