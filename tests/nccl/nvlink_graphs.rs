//! Graphs over NVLink: ten thousand replays whose choices and rows change, and ranks that do not come to one.

use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::cuda::{Captured, Cuda};
use moebius::ep::{Capacity, DispatchInputs, DispatchOutputs, DispatchSpec, Group, GroupConfig, Reporting};
use moebius::kernels::Kernels;
use moebius::{DType, Device, Error, Result, Tensor};

use crate::Run;
use crate::conformance::gpus;
use crate::launched::{join_within, start, succeed, tag};
use crate::nvlink::{HIDDEN, MINUTE, MOST, config, each, in_groups, tokens};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("ten_thousand_replays_with_other_choices", ten_thousand_replays),
        ("a_rank_that_is_late_to_a_replay_is_waited_for", late_to_a_replay),
        ("a_rank_that_does_not_replay_is_told", |_, ranks| lost_in_a_replay(ranks, false)),
        ("a_process_that_does_not_replay_is_told", |_, ranks| succeed(&start("not_replayed", ranks, &[]))),
        ("a_rank_that_does_not_replay_a_prepare_is_told", |_, ranks| lost_in_a_replay(ranks, true)),
        ("no_record_of_before_is_taken_for_that_of_a_lost_rank", |_, ranks| lost_before_its_record(&config(ranks))),
        ("nor_where_other_kernels_plan", |_, ranks| {
            // More choices than one block has room for.
            lost_before_its_record(&GroupConfig { max_sms: 1, max_tokens_per_rank: 16384, ..config(ranks) })
        }),
    ]
}

/// Choices of a token.
pub const K: usize = 2;
/// Kinds of choices.
pub const KINDS: usize = 5;

/// Choices of one of these kinds: spread, one expert's, one rank's, none, some.
pub fn choices(kind: usize, rank: usize, ranks: usize) -> Vec<i64> {
    let experts = 4 * ranks;
    let choice = |i: usize| {
        let (token, k) = (i / K, i % K);
        let id = match kind {
            0 => (token * 3 + k * 5 + rank) % experts,
            1 if k == 0 => 1,
            2 => 4 * (ranks - 1) + (token + k) % 4,
            4 if !(i * 7 + rank).is_multiple_of(3) => (token + k * 3) % experts,
            _ => return -1,
        };
        id as i64
    };
    (0..MOST * K).map(choice).collect()
}

/// The rows in slots, and their sums: what a step of prepare, dispatch and combine comes to.
pub fn step(
    group: &mut Group<Cuda>,
    cuda: &Cuda,
    (ids, x): (&Tensor<Cuda>, &Tensor<Cuda>),
    reporting: Reporting,
) -> Result<[Tensor<Cuda>; 2]> {
    let slots = group.ranks() * MOST * K + 4 * 8;
    let spec = DispatchSpec { capacity: Capacity::Static(slots), alignment: 8, reporting, ..DispatchSpec::new(5, K) };
    let handle = group.dispatcher().prepare(ids.view(), None, &spec)?;
    // Zeros: rows behind the last segment are zeroed only where the host does not know its end.
    let mut rows = Tensor::zeros(cuda, DType::BF16, &[handle.rows(), HIDDEN])?;
    let inputs = DispatchInputs { tokens: x.view(), weights: None, scales: None };
    let outputs = DispatchOutputs { tokens: rows.view_mut(), weights: None, scales: None };
    group.dispatcher().dispatch(&handle, inputs, outputs)?;
    let mut y = Tensor::empty(cuda, DType::BF16, &[MOST, HIDDEN])?;
    group.dispatcher().combine(&handle, rows.view(), y.view_mut())?;
    Ok([rows, y])
}

/// Choices and rows lie in the same memory in each replay, and change there. What the host plans and what the GPUs plan
/// come to the same bits, in a graph too, with steps outside of it in between.
fn ten_thousand_replays(_: &Cuda, ranks: usize) {
    const REPLAYS: usize = 10_000;
    each(ranks, MINUTE, |mut group, cuda, _| {
        let rank = group.rank();
        let ids = |kind| Tensor::from_vec(choices(kind, rank, ranks), &[MOST, K])?.to(cuda);
        let all_ids: Vec<Tensor<Cuda>> = (0..KINDS).map(ids).collect::<Result<_>>()?;
        let xs = [tokens(cuda, MOST)?, cuda.write(&vec![3.0; MOST * HIDDEN], DType::BF16, &[MOST, HIDDEN])?];
        let mut expected = Vec::new();
        for at in 0..KINDS * xs.len() {
            let [rows, y] = step(&mut group, cuda, (&all_ids[at % KINDS], &xs[at / KINDS]), Reporting::Immediate)?;
            expected.push((cuda.download(rows.view())?, cuda.download(y.view())?));
        }
        let (mut own_ids, mut own_x) = (ids(0)?, tokens(cuda, MOST)?);
        // What a first step makes cannot be captured.
        step(&mut group, cuda, (&own_ids, &own_x), Reporting::Deferred)?;
        let mut graph = cuda.capture(|| step(&mut group, cuda, (&own_ids, &own_x), Reporting::Deferred))?;
        for replay in 0..REPLAYS {
            let at = (replay * 7 + replay / 3) % expected.len();
            cuda.copy(all_ids[at % KINDS].view().data(), own_ids.view_mut().into_data())?;
            cuda.copy(xs[at / KINDS].view().data(), own_x.view_mut().into_data())?;
            graph.replay()?;
            if replay % 100 == 50 {
                step(&mut group, cuda, (&all_ids[1], &xs[0]), Reporting::Deferred)?;
            }
            // Most follow each other without the hosts.
            if replay % 16 == 0 || replay + 1 == REPLAYS {
                let [rows, y] = graph.output();
                let met = (cuda.download(rows.view())?, cuda.download(y.view())?);
                assert!(met == expected[at], "replay {replay}, choices {}, rank {rank}", at % KINDS);
            }
        }
        group.dispatcher().check()
    });
}

/// Graphs run without their hosts: nobody but the kernels themselves can end a wait.
fn lost_in_a_replay(ranks: usize, prepares: bool) {
    const LIMIT: Duration = Duration::from_secs(2);
    each(ranks, LIMIT, |mut group, cuda, together| {
        let rank = group.rank();
        let (ids, x) = (Tensor::from_vec(choices(0, rank, ranks), &[MOST, K])?.to(cuda)?, tokens(cuda, MOST)?);
        step(&mut group, cuda, (&ids, &x), Reporting::Deferred)?;
        let handle = group.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(5, K))?;
        let rows = cuda.write(&vec![1.0; handle.rows() * HIDDEN], DType::BF16, &[handle.rows(), HIDDEN])?;
        let mut y: Tensor<Cuda> = Tensor::empty(cuda, DType::BF16, &[MOST, HIDDEN])?;
        let mut graph = cuda.capture(|| match prepares {
            true => step(&mut group, cuda, (&ids, &x), Reporting::Deferred).map(drop),
            false => group.dispatcher().combine(&handle, rows.view(), y.view_mut()),
        })?;
        graph.replay()?;
        cuda.check()?;
        together.wait();
        // The last does not come. Of several that wait for it the first gives up, and the others hear that it has.
        if rank + 1 < ranks {
            thread::sleep(Duration::from_millis(300) * rank as u32);
            let start = Instant::now();
            graph.replay()?;
            match cuda.check() {
                Err(Error::LatePeer { rank: own, layer: 5, peer, .. }) => {
                    // Who has waited itself names whom it has waited for.
                    assert!(own == rank && (rank > 0 || peer + 1 == ranks), "{own}, {peer}");
                }
                other => panic!("{other:?}"),
            }
            assert!(start.elapsed() < LIMIT + Duration::from_secs(3));
        }
        together.wait();
        told_of_the_lost(&mut graph, cuda, (rank, ranks), 5);
        cuda.check()?;
        together.wait();
        drop(graph);
        Ok(())
    });
}

/// The same between processes: work of a child.
pub fn not_replayed() {
    const LIMIT: Duration = Duration::from_secs(8);
    let comm = join_within(0, LIMIT);
    let (rank, ranks, cuda) = (comm.rank(), comm.size(), comm.cuda().clone());
    let mut group = Group::new(cuda.clone(), Box::new(comm), config(ranks)).expect("a group");
    let (ids, x) = (Tensor::from_vec(choices(0, rank, ranks), &[MOST, K]), tokens(&cuda, MOST).expect("tokens"));
    let ids = ids.and_then(|ids| ids.to(&cuda)).expect("ids");
    step(&mut group, &cuda, (&ids, &x), Reporting::Deferred).expect("a step");
    let graph = cuda.capture(|| step(&mut group, &cuda, (&ids, &x), Reporting::Deferred));
    let mut graph = graph.expect("a graph");
    graph.replay().expect("a replay");
    cuda.check().expect("a replay of all");
    let start = Instant::now();
    match rank + 1 == ranks {
        true => thread::sleep(LIMIT + Duration::from_secs(2)),
        false => {
            graph.replay().expect("it is enqueued");
            let told = cuda.check();
            assert!(matches!(told, Err(Error::LatePeer { layer: 5, .. })), "{told:?}");
            assert!(start.elapsed() < LIMIT + Duration::from_secs(3));
        }
    }
    told_of_the_lost(&mut graph, &cuda, (rank, ranks), 5);
    // The communicator is as it was.
    group.dispatcher().communicator().barrier(tag(1)).expect("a barrier");
    drop(graph);
}

/// Behind a replay that was given up, where the last rank had not come: that one is told of it as it comes, at once; no
/// rank replays any more, whatever has asked before, and the graph goes on telling why. The GPU works on.
pub fn told_of_the_lost<T>(graph: &mut Captured<T>, cuda: &Cuda, (rank, ranks): (usize, usize), of: u32) {
    let is_late = |told: Result<()>| match told {
        Err(Error::LatePeer { layer, rank: own, .. }) => assert_eq!((layer, own), (of, rank)),
        other => panic!("{other:?}"),
    };
    if rank + 1 == ranks {
        let start = Instant::now();
        graph.replay().expect("nothing has been seen yet");
        is_late(cuda.check());
        assert!(start.elapsed() < Duration::from_secs(2));
    }
    cuda.check().expect("it was told once");
    for _again in 0..2 {
        match graph.check() {
            Err(Error::LatePeer { call: "Captured::replay", layer, rank: own, peer, .. }) => {
                assert_eq!((layer, own, peer < ranks), (of, rank, true));
            }
            other => panic!("{other:?}"),
        }
        is_late(graph.replay());
    }
    let numbers: Tensor<Cuda> = Tensor::from_vec(vec![1_i64, 2], &[2]).and_then(|t| t.to(cuda)).expect("a tensor");
    assert_eq!(cuda.download(numbers.view()).map(|bytes| bytes.len()).ok(), Some(16));
}

/// A rank that comes late to a replay, but within the timeout, is waited for: the results are those of an eager step, and
/// nothing has failed.
fn late_to_a_replay(_: &Cuda, ranks: usize) {
    each(ranks, MINUTE, |mut group, cuda, together| {
        let rank = group.rank();
        let (ids, x) = (Tensor::from_vec(choices(0, rank, ranks), &[MOST, K])?.to(cuda)?, tokens(cuda, MOST)?);
        let [_, y] = step(&mut group, cuda, (&ids, &x), Reporting::Deferred)?;
        let expected = cuda.download(y.view())?;
        let mut graph = cuda.capture(|| step(&mut group, cuda, (&ids, &x), Reporting::Deferred))?;
        together.wait();
        if rank + 1 == ranks {
            thread::sleep(Duration::from_millis(500));
        }
        for _replay in 0..2 {
            graph.replay()?;
        }
        assert!(cuda.download(graph.output()[1].view())? == expected);
        graph.check()
    });
}

/// A rank does not come to a prepare whose spec is another than that of the records that lie in both banks. The others are
/// told that it was late, and nothing of a spec that differs.
fn lost_before_its_record(config: &GroupConfig) {
    const LIMIT: Duration = Duration::from_secs(2);
    let ranks = config.num_experts / 4;
    in_groups(gpus::communicators(ranks, LIMIT), config, |mut group, cuda, together| {
        let rank = group.rank();
        let ids = Tensor::from_vec(choices(0, rank, ranks), &[MOST, K])?.to(cuda)?;
        let slots = Capacity::Static(ranks * MOST * K + 4 * 8);
        let reporting = Reporting::Deferred;
        let spec =
            |layer, alignment| DispatchSpec { capacity: slots, alignment, reporting, ..DispatchSpec::new(layer, K) };
        for _ in 0..2 {
            group.dispatcher().prepare(ids.view(), None, &spec(5, 4))?;
        }
        let mut graph = cuda.capture(|| group.dispatcher().prepare(ids.view(), None, &spec(6, 8)))?;
        group.dispatcher().check()?;
        let is_late = |told: Result<()>| match told {
            Err(Error::LatePeer { layer: 6, rank: own, .. }) => assert_eq!(own, rank),
            other => panic!("{other:?}"),
        };
        together.wait();
        if rank + 1 < ranks {
            graph.replay()?;
            is_late(group.dispatcher().check());
        }
        together.wait();
        told_of_the_lost(&mut graph, cuda, (rank, ranks), 6);
        group.dispatcher().check()?;
        together.wait();
        drop(graph);
        Ok(())
    });
}
