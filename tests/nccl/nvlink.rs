//! The crate's own dispatcher over NVLink: bits in the order of k, what ranks compare, who has which memory and for how
//! long, and ranks that do not come, leave or fail while kernels wait for them.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::{Op, Tag};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchInputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle};
use moebius::kernels::Kernels;
use moebius::nccl::{CommParts, NcclComm, NcclWorld};
use moebius::{CommError, DType, Error, Result, Tensor};

use crate::Run;
use crate::conformance::{gpus, later, over};
use crate::several::numbers;

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("in_the_order_of_k_the_bits_are_those_of_all_to_all", same_bits),
        ("kernels_of_few_blocks_do_the_same", few_blocks),
        ("a_group_of_one", |_, _| a_group_of_one()),
        ("weights_of_some_ranks_alone_are_refused", weights_differ),
        ("zones_have_room_for_any_step", larger_steps),
        ("a_zone_comes_back_with_its_graph", zones_of_graphs),
        ("a_graph_without_its_group_is_refused", graph_without_group),
        ("groups_formed_anew_take_no_more_memory", formed_anew),
        ("an_end_while_a_kernel_waits", end_while_waiting),
    ]
}

/// Choices of 5 experts' distance, some dropped.
pub fn choices(rank: usize, tokens: usize, k: usize, experts: usize) -> Vec<i64> {
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

/// Kernels that may take an SM, or three, do what those do that may take all: a plan of one block or three, and with many
/// choices for one block the plan by kernels of their own, behind the exchange of records.
fn few_blocks(cuda: &Cuda, ranks: usize) {
    const K: usize = 4;
    const HIDDEN: usize = 8;
    let rows = crate::conformance::rows(DType::BF16, HIDDEN);
    // The last are more choices than one block has room for: 8 bytes each, and 8 a token, of 200 KiB.
    for (tokens, capacity) in
        [(700, Capacity::Eager), (700, Capacity::Static(ranks * 700 * K)), (4400, Capacity::Eager)]
    {
        let step = |max_sms: usize| {
            let config = GroupConfig { max_sms, max_rows: ranks * 700 * K, ..GroupConfig::new(8 * ranks, tokens) };
            later(cuda, DispatcherKind::NvLink, ranks, "nvlink").run(config, |r| {
                let tokens = tokens - 9 * r.rank;
                let spec = DispatchSpec { backward: true, alignment: 8, capacity, ..DispatchSpec::new(3, K) };
                let handle = r.prepare(&choices(r.rank, tokens, K, 8 * ranks), &spec).expect("prepare");
                let stats = handle.stats().expect("statistics").clone();
                let x = numbers(r.rank as u64, tokens * HIDDEN, 8.0);
                let slots = r.dispatch(&handle, rows, &x, None).expect("dispatch");
                let outputs = numbers(r.rank as u64 + 1, handle.rows() * HIDDEN, 8.0);
                let y = r.combine(&handle, rows, &outputs).expect("combine");
                (stats.expert_load, stats.padded_counts, handle.rows(), slots.rows, y)
            })
        };
        let all = step(0);
        for max_sms in [1, 3] {
            assert!(step(max_sms) == all, "{tokens} tokens, {capacity:?}, {max_sms} SMs");
        }
    }
}

pub const MINUTE: Duration = Duration::from_secs(60);
/// Most tokens of a rank, and elements of a row.
pub const MOST: usize = 16;
pub const HIDDEN: usize = 64;

/// A handle of so many tokens of two choices.
fn prepared(group: &mut Group<Cuda>, cuda: &Cuda, tokens: usize) -> Result<Handle<Cuda>> {
    let experts = 4 * group.ranks();
    let ids: Vec<i64> = (0..2 * tokens).map(|i| (i * 3 % experts) as i64).collect();
    let ids = Tensor::from_vec(ids, &[tokens, 2])?.to(cuda)?;
    group.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(5, 2))
}

pub fn tokens(cuda: &Cuda, count: usize) -> Result<Tensor<Cuda>> {
    cuda.write(&numbers(count as u64, count * HIDDEN, 4.0), DType::BF16, &[count, HIDDEN])
}

/// The rows that arrive of a handle's tokens.
fn rows_of(group: &mut Group<Cuda>, handle: &Handle<Cuda>, x: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    let inputs = DispatchInputs { tokens: x.view(), weights: None, scales: None };
    Ok(group.dispatcher().dispatch_rows(handle, inputs)?.rows.expect("rows that arrived"))
}

/// The group of these tests.
pub fn config(ranks: usize) -> GroupConfig {
    let new = GroupConfig::new(4 * ranks, MOST);
    GroupConfig { dispatcher: DispatcherKind::NvLink, windows: 1, max_rows: 4 * ranks * MOST, ..new }
}

/// Every rank's body on a thread; results in rank order.
fn on<T: Send>(comms: Vec<NcclComm>, body: impl Fn(Group<Cuda>, &Cuda, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    let config = config(comms.len());
    in_groups(comms, &config, body)
}

/// The same in groups of this configuration.
pub fn in_groups<T: Send>(
    comms: Vec<NcclComm>,
    config: &GroupConfig,
    body: impl Fn(Group<Cuda>, &Cuda, &Barrier) -> Result<T> + Sync,
) -> Vec<T> {
    let (together, body) = (&Barrier::new(comms.len()), &body);
    thread::scope(|scope| {
        let spawn = |comm: NcclComm| {
            scope.spawn(move || {
                let cuda = comm.cuda().clone();
                body(Group::new(cuda.clone(), Box::new(comm), config.clone())?, &cuda, together)
            })
        };
        let threads: Vec<_> = comms.into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join().expect("no panic").expect("no error")).collect()
    })
}

/// The same over the communicators of all tests.
pub fn each(ranks: usize, limit: Duration, body: impl Fn(Group<Cuda>, &Cuda, &Barrier) -> Result<()> + Sync) {
    on(gpus::communicators(ranks, limit), body);
}

/// A rank alone stores to itself.
fn a_group_of_one() {
    each(1, MINUTE, |mut group, cuda, _| {
        let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        let rows = cuda.read(rows_of(&mut group, &handle, &x)?.view())?;
        assert!(rows[..MOST * HIDDEN] == cuda.read(x.view())?);
        let outputs = cuda.write(&vec![1.5; handle.rows() * HIDDEN], DType::BF16, &[handle.rows(), HIDDEN])?;
        let mut y: Tensor<Cuda> = Tensor::empty(cuda, DType::BF16, &[MOST, HIDDEN])?;
        group.dispatcher().combine(&handle, outputs.view(), y.view_mut())?;
        assert!(cuda.read(y.view())?.iter().all(|sum| *sum == 3.0), "two choices of each token");
        group.dispatcher().check()
    });
}

/// What travels beside rows is compared before anything does.
fn weights_differ(_: &Cuda, ranks: usize) {
    each(ranks, MINUTE, |mut group, cuda, _| {
        let handle = prepared(&mut group, cuda, MOST)?;
        let (x, weights) = (tokens(cuda, MOST)?, Tensor::zeros(cuda, DType::F32, &[MOST, 2])?);
        let own = (group.rank() == 0).then(|| weights.view());
        let inputs = DispatchInputs { tokens: x.view(), weights: own, scales: None };
        match group.dispatcher().dispatch_rows(&handle, inputs) {
            Err(Error::Comm(CommError::ArgumentMismatch { value, peer_value, .. })) => assert_ne!(value, peer_value),
            other => panic!("{other:?}"),
        }
        rows_of(&mut group, &handle, &x)?;
        group.dispatcher().check()
    });
}

/// A first step of few tokens makes zones that the largest fits in: a capture could make none.
fn larger_steps(_: &Cuda, ranks: usize) {
    each(ranks, MINUTE, |mut group, cuda, _| {
        let few = prepared(&mut group, cuda, 1)?;
        rows_of(&mut group, &few, &tokens(cuda, 1)?)?;
        let (most, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        let eager = cuda.read(rows_of(&mut group, &most, &x)?.view())?;
        let mut graph = cuda.capture(|| rows_of(&mut group, &most, &x))?;
        graph.replay()?;
        // Rows that nobody sent are whatever lay there.
        let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
        assert!(cuda.read(graph.output().view())?.iter().zip(&eager).filter(|(_, b)| !b.is_nan()).all(same));
        drop(graph);
        group.dispatcher().check()
    });
}

/// A zone that a graph writes to is nobody else's, and free again when the graph is gone.
fn zones_of_graphs(_: &Cuda, ranks: usize) {
    each(ranks, MINUTE, |mut group, cuda, together| {
        let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        let at = |rows: &Tensor<Cuda>| rows.view().data().address();
        let zone = at(&rows_of(&mut group, &handle, &x)?);
        let mut graph = cuda.capture(|| rows_of(&mut group, &handle, &x).map(|rows| at(&rows)))?;
        assert_eq!(*graph.output(), zone, "the only zone");
        let kept = rows_of(&mut group, &handle, &x)?;
        assert_ne!(at(&kept), zone, "the graph's");
        let before = cuda.read(kept.view())?;
        graph.replay()?;
        let after = cuda.read(kept.view())?;
        assert!(before.iter().zip(&after).all(|(a, b)| a.to_bits() == b.to_bits()));
        together.wait();
        drop((graph, kept));
        assert_eq!(at(&rows_of(&mut group, &handle, &x)?), zone, "free again");
        group.dispatcher().check()
    });
}

/// A graph without its group is refused, instead of writing to memory that is nobody's, while the next group over the same
/// communicator works.
fn graph_without_group(_: &Cuda, ranks: usize) {
    let (library, gpus) = gpus::first(ranks);
    let world = NcclWorld::new(&library, &gpus, MINUTE).expect("a world");
    let mut graphs = on(world.communicators(MINUTE).expect("communicators"), |mut group, cuda, _| {
        let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        let eager = cuda.read(rows_of(&mut group, &handle, &x)?.view())?;
        let mut graph = cuda.capture(|| rows_of(&mut group, &handle, &x))?;
        graph.replay()?;
        let replayed = cuda.read(graph.output().view())?;
        // Rows that nobody sent are NaN.
        assert!(replayed.iter().zip(&eager).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()));
        group.dispatcher().check()?;
        Ok((graph, x))
    });
    on(world.communicators(MINUTE).expect("communicators"), |mut group, cuda, _| {
        let handle = prepared(&mut group, cuda, MOST)?;
        drop(rows_of(&mut group, &handle, &tokens(cuda, MOST)?)?);
        group.dispatcher().check()
    });
    for ((graph, _), gpu) in graphs.iter_mut().zip(&gpus) {
        match graph.replay() {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, "graph"),
            other => panic!("{other:?}"),
        }
        gpu.check().expect("nothing has run");
    }
    drop(world);
}

/// A group takes what one before it over the same communicator has left.
fn formed_anew(_: &Cuda, ranks: usize) {
    let (library, gpus) = gpus::first(ranks);
    let world = NcclWorld::new(&library, &gpus, MINUTE).expect("a world");
    let at = || {
        on(world.communicators(MINUTE).expect("communicators"), |mut group, cuda, _| {
            let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
            let rows = rows_of(&mut group, &handle, &x)?;
            group.dispatcher().check()?;
            Ok(rows.view().data().address())
        })
    };
    assert_eq!(at(), at());
}

/// Ends the first rank's communicator by a failure of its part in a collective, which the others pass.
pub fn end_on_first(group: &mut Group<Cuda>) {
    let first = group.rank() == 0;
    let tag = Tag { layer: 0, op: Op::User, sequence: 1 };
    let failing = |_: CommParts<'_>| match first {
        true => Err(Error::Device { call: "test", operation: "take part".into(), message: "a failure".into() }),
        false => Ok(()),
    };
    let comm = group.dispatcher().communicator().native().expect("NCCL's");
    let failed = comm.collective_raw("test", tag, failing);
    assert_eq!(failed.is_err(), first, "{failed:?}");
}

/// The first rank's communicator is ended while a kernel of its waits for a peer, and with it the peers' memory goes: the
/// kernel is out of the way before, though its own patience is far longer, and the GPU works on.
fn end_while_waiting(_: &Cuda, ranks: usize) {
    const PATIENCE: Duration = Duration::from_secs(60);
    let (library, gpus) = gpus::first(ranks);
    let world = NcclWorld::new(&library, &gpus, MINUTE).expect("a world");
    on(world.communicators(PATIENCE).expect("communicators"), |mut group, cuda, together| {
        let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        rows_of(&mut group, &handle, &x)?;
        let mut graph = cuda.capture(|| rows_of(&mut group, &handle, &x).map(drop))?;
        graph.replay()?;
        cuda.check()?;
        together.wait();
        let (start, first) = (Instant::now(), group.rank() == 0);
        if first {
            graph.replay()?;
        }
        end_on_first(&mut group);
        if first {
            assert!(matches!(cuda.check(), Err(Error::Comm(_))), "as long as the communicator lives");
            assert!(graph.replay().is_err(), "nothing runs over memory that is gone");
        }
        drop((graph, group));
        assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
        together.wait();
        Ok(())
    });
    drop(world);
    gpus.iter().for_each(|gpu| gpu.check().expect("the GPU works on"));
    each(ranks, MINUTE, |mut group, cuda, _| {
        let (handle, x) = (prepared(&mut group, cuda, MOST)?, tokens(cuda, MOST)?);
        rows_of(&mut group, &handle, &x)?;
        group.dispatcher().check()
    });
}
