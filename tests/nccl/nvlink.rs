//! The crate's own dispatcher over NVLink: bits in the order of k, and a rank that does not come to a call that no host
//! meets before.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use moebius::cuda::Cuda;
use moebius::ep::{DispatchSpec, DispatcherKind, Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::{DType, Error, Result, Tensor};

use crate::Run;
use crate::conformance::{gpus, over};
use crate::several::numbers;

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("in_the_order_of_k_the_bits_are_those_of_all_to_all", same_bits),
        ("a_rank_that_does_not_replay_is_told", lost_in_a_replay),
    ]
}

/// Choices of 5 experts' distance, some dropped.
fn choices(rank: usize, tokens: usize, k: usize, experts: usize) -> Vec<i64> {
    let choice = |i: usize| match (i * 7 + rank) % 11 {
        0 => -1,
        _ => ((i / k * 3 + i % k * 5 + rank) % experts) as i64,
    };
    (0..tokens * k).map(choice).collect()
}

fn same_bits(cuda: &Cuda, ranks: usize) {
    const TOKENS: usize = 50;
    const K: usize = 4;
    for (dtype, hidden) in [(DType::BF16, 64), (DType::F32, 9), (DType::F16, 1032)] {
        let step = |kind: DispatcherKind, in_k_order: bool| {
            let config = GroupConfig { in_k_order, ..GroupConfig::new(8 * ranks, TOKENS) };
            over(cuda, kind, ranks, "nvlink").run(config, |r| {
                // A rank brings fewer tokens than the one before it.
                let tokens = TOKENS - 9 * r.rank;
                let rows = crate::conformance::rows(dtype, hidden);
                let spec = DispatchSpec { backward: true, alignment: 8, ..DispatchSpec::new(3, K) };
                let handle = r.prepare(&choices(r.rank, tokens, K, 8 * ranks), &spec).expect("prepare");
                let seed = 10 * r.rank as u64;
                let (x, weights) = (numbers(seed, tokens * hidden, 8.0), numbers(seed + 1, tokens * K, 1.0));
                let slots = r.dispatch(&handle, rows, &x, Some(&weights)).expect("dispatch");
                let outputs = numbers(seed + 2, handle.rows() * hidden, 8.0);
                let y = r.combine(&handle, rows, &outputs).expect("combine");
                let back = r.combine_bwd(&handle, rows, &x).expect("combine_bwd");
                let grads = r.dispatch_bwd(&handle, rows, &outputs, Some(&slots.weights)).expect("dispatch_bwd");
                (slots.rows, slots.weights, y, back, grads.tokens, grads.weights)
            })
        };
        assert!(step(DispatcherKind::NvLink, true) == step(DispatcherKind::AllToAll, false), "{dtype}, {hidden}");
    }
}

/// Every rank's body on a thread.
fn each(ranks: usize, limit: Duration, body: impl Fn(Group<Cuda>, &Cuda, &Barrier) -> Result<()> + Sync) {
    let (together, body) = (&Barrier::new(ranks), &body);
    thread::scope(|scope| {
        let spawn = |comm: moebius::nccl::NcclComm| {
            scope.spawn(move || {
                let cuda = comm.cuda().clone();
                let config = GroupConfig { dispatcher: DispatcherKind::NvLink, ..GroupConfig::new(4 * ranks, 16) };
                body(Group::new(cuda.clone(), Box::new(comm), config)?, &cuda, together)
            })
        };
        let threads: Vec<_> = gpus::communicators(ranks, limit).into_iter().map(spawn).collect();
        threads.into_iter().for_each(|t| t.join().expect("no panic").expect("no error"));
    });
}

/// Graphs run without their hosts: nobody but the kernels themselves can end a wait.
fn lost_in_a_replay(_: &Cuda, ranks: usize) {
    const LIMIT: Duration = Duration::from_secs(2);
    each(ranks, LIMIT, |mut group, cuda, together| {
        let rank = group.rank();
        let ids = Tensor::from_vec((0..32).map(|i| (i % (4 * ranks)) as i64).collect(), &[16, 2])?.to(cuda)?;
        let handle = group.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(5, 2))?;
        let rows = cuda.write(&vec![1.0; handle.rows() * 64], DType::BF16, &[handle.rows(), 64])?;
        let mut out: Tensor<Cuda> = Tensor::empty(cuda, DType::BF16, &[16, 64])?;
        group.dispatcher().combine(&handle, rows.view(), out.view_mut())?;
        let mut graph = cuda.capture(|| group.dispatcher().combine(&handle, rows.view(), out.view_mut()))?;
        graph.replay()?;
        cuda.check()?;
        together.wait();
        if rank == 0 {
            let start = Instant::now();
            graph.replay()?;
            match cuda.check() {
                Err(Error::LatePeer { rank: 0, layer: 5, peer: 1.., .. }) => {}
                other => panic!("{other:?}"),
            }
            assert!(start.elapsed() < LIMIT + Duration::from_secs(3));
        }
        together.wait();
        // Those that come now are told too, at once, and the GPU works on.
        let start = Instant::now();
        graph.replay()?;
        match cuda.check() {
            Err(Error::LatePeer { layer: 5, peer: 0, .. }) => {}
            other => panic!("{other:?}"),
        }
        assert!(start.elapsed() < LIMIT);
        cuda.check()?;
        together.wait();
        drop(graph);
        Ok(())
    });
}
