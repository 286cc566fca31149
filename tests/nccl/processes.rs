//! Ranks that are processes, one a GPU: this program starts itself once a rank.

use std::sync::Arc;
use std::time::Instant;

use moebius::comm::{Communicator, ReduceOp};
use moebius::config::MoeConfig;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchSpec, DispatcherKind, Group, GroupConfig, Reporting};
use moebius::etp::{Chain, Comms, EtpOptions, Phase, Shard, WeightSpec};
use moebius::kernels::Kernels;
use moebius::nccl::{NcclComm, NcclLibrary, NcclOptions};
use moebius::optim::{AdamW, AdamWOptions, ParamShard, ParamSpec};
use moebius::ranks::{Axis, Bootstrap, Identity, JobToken, Mesh};
use moebius::weights::WeightSource;
use moebius::{CommError, DType, Error, Tensor};

use crate::launched::{AT_ONCE, join, start, succeed, tag, word};
use crate::layer::Problem;
use crate::{KINDS, Run, lost, nvlink_graphs, nvlink_lost, patience};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("layers", |_, ranks| succeed(&start("layers", ranks, &[]))),
        ("two_hosts_imitated", |_, ranks| succeed(&start("layers", ranks, &IMITATED))),
        ("killed_before_a_collective", |_, ranks| lose_the_last(ranks, "killed_before")),
        ("killed_while_collectives_run", |_, ranks| lose_the_last(ranks, "killed_in")),
        ("killed_after_a_collective", |_, ranks| lose_the_last(ranks, "killed_after")),
        ("another_configuration", |_, ranks| succeed(&start("configuration", ranks, &[]))),
        ("refused_and_joined_again", |_, ranks| succeed(&start("refused", ranks, &[]))),
        ("meshes", |_, ranks| succeed(&start("meshes", ranks, &[]))),
        ("prepares_of_different_layers", |_, ranks| succeed(&start("different_layers", ranks, &[]))),
        ("calls_compared", |_, ranks| succeed(&start("compared", ranks, &COMPARED))),
        ("layers_with_calls_compared", |_, ranks| succeed(&start("layers", ranks, &COMPARED))),
        ("another_number_of_microbatches", |_, ranks| succeed(&start("microbatches", ranks, &[]))),
        ("steps_that_all_ranks_refuse", |_, ranks| refuse_steps(ranks)),
        ("bounds_of_a_part", |_, ranks| succeed(&start("bounds", ranks, &[]))),
        ("calls_compared_by_one_rank", |_, ranks| succeed(&start("compared_by_one", ranks, &[]))),
    ]
}

const COMPARED: [(&str, &str); 1] = [("MOEBIUS_CHECKED", "1")];

/// Sockets on loopback between ranks that think that they are on two hosts.
const IMITATED: [(&str, &str); 4] =
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "lo"), ("HALVES", "1")];

/// All but the last end well.
fn lose_the_last(ranks: usize, body: &str) {
    let said = start(body, ranks, &[]);
    succeed(&said[..ranks - 1]);
    assert!(!said[ranks - 1].ok, "the last was to die");
}

/// A sum over the ranks that must come out right.
fn works(comm: &mut NcclComm) {
    let (cuda, n) = (comm.cuda().clone(), comm.size());
    let mut value = word(&cuda, comm.rank() as f64);
    comm.all_reduce(tag(1), ReduceOp::Sum, value.view_mut()).expect("a sum");
    assert_eq!(cuda.read(value.view()).expect("a read"), [(n * (n - 1) / 2) as f64]);
}

/// Work of a child.
pub fn child(body: &str) {
    match body {
        "layers" => layers(),
        "killed_before" => killed(join(0), |_| ()),
        "killed_after" => killed(join(0), works),
        "killed_in" => killed(join(0), |comm| {
            works(comm);
            let cuda = comm.cuda().clone();
            let ranks = comm.size();
            let send = Tensor::zeros(&cuda, DType::U8, &[1 << 26]).expect("room");
            let mut recv = Tensor::zeros(&cuda, DType::U8, &[ranks << 26]).expect("room");
            for _ in 0..64 {
                comm.all_gather(tag(2), send.view(), recv.view_mut()).expect("enqueued");
            }
        }),
        "configuration" => configuration(),
        "refused" => refused(),
        "meshes" => meshes(),
        "different_layers" => different_layers(),
        "compared" => compared(),
        "compared_by_one" => compared_by_one(),
        "microbatches" => microbatches(),
        "bounds" => bounds(),
        "refused_steps" => refused_steps(),
        "killed_in_steps" => patience::killed(false),
        "killed_in_replays" => patience::killed(true),
        "not_replayed" => nvlink_graphs::not_replayed(),
        "dies_at_a_call" => nvlink_lost::dies_at_a_call(),
        "dies_at_the_start" => nvlink_lost::dies_at_the_start(),
        other => lost::child(other),
    }
}

fn layers() {
    let config = MoeConfig::new(64, 40, 16, 4);
    let mut round = 0;
    // Between hosts there is no NVLink.
    let apart = std::env::var_os("NCCL_HOSTID").is_some();
    for kind in KINDS.into_iter().filter(|kind| !apart || *kind != DispatcherKind::NvLink) {
        for dtype in [DType::F32, DType::BF16] {
            let comm = join(round);
            round += 1;
            let split: Vec<usize> = (0..comm.size()).map(|r| [70, 0, 3, 128][r % 4]).collect();
            Problem::new(&config, &split, kind, dtype).as_one_rank(&format!("{kind:?}, {dtype}"), comm);
        }
    }
    // Ranks find how many each host has.
    let comm = join(round);
    let (cuda, ranks) = (comm.cuda().clone(), comm.size());
    let config = GroupConfig { dispatcher: DispatcherKind::Hierarchical, ..GroupConfig::of(&config, 128) };
    let group = Group::new(cuda, Box::new(comm), config).expect("a group");
    let each = format!("ranks_per_host: {}", if apart { ranks / 2 } else { ranks });
    // The configuration has 0.
    assert!(format!("{group:?}").contains(&each), "{group:?}");
}

/// The last rank dies; the others hear of it at once, from every call and every wait.
fn killed(mut comm: NcclComm, before: impl Fn(&mut NcclComm)) {
    before(&mut comm);
    if comm.rank() + 1 == comm.size() {
        std::process::abort();
    }
    let (cuda, start) = (comm.cuda().clone(), Instant::now());
    let gone = |e: &Error| matches!(e, Error::Comm(CommError::PeerGone { .. }));
    let mut value = word(&cuda, 1.0);
    let first = comm.all_reduce(tag(7), ReduceOp::Sum, value.view_mut());
    let first = first.and_then(|()| cuda.read(value.view()).map(drop));
    assert!(first.as_ref().is_err_and(gone), "{first:?}");
    let later = comm.barrier(tag(8));
    assert!(later.as_ref().is_err_and(gone), "{later:?}");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    drop(comm);
    cuda.check().expect("without the communicator the GPU works");
}

fn configuration() {
    let comm = join(0);
    let (rank, ranks, cuda) = (comm.rank(), comm.size(), comm.cuda().clone());
    let config = GroupConfig::new(if rank == 0 { 8 * ranks } else { 4 * ranks }, 16);
    match Group::new(cuda.clone(), Box::new(comm), config) {
        Err(Error::ConfigMismatch { field, rank: own, .. }) => assert_eq!((&field[..], own), ("num_experts", rank)),
        other => panic!("{other:?}"),
    }
}

/// A refusal costs the communicator; the same processes make another.
fn refused() {
    let mut comm = join(0);
    works(&mut comm);
    let start = Instant::now();
    if comm.rank() == 0 {
        comm.refuse(tag(2), "no room for this").expect("told");
    } else {
        let cuda = comm.cuda().clone();
        let mut value = word(&cuda, 1.0);
        let error = comm.all_reduce(tag(2), ReduceOp::Sum, value.view_mut());
        let error = error.and_then(|()| cuda.read(value.view()).map(drop));
        let is = |e: &Error| match e {
            Error::Comm(CommError::Refused { peer: 0, reason, .. }) => reason == "no room for this",
            _ => false,
        };
        assert!(error.as_ref().is_err_and(is), "{error:?}");
    }
    assert!(comm.barrier(tag(3)).is_err(), "the communicator has ended");
    assert!(start.elapsed() < AT_ONCE);
    drop(comm);
    works(&mut join(1));
}

/// Groups of both axes of a mesh; a refusal in one leaves the others.
fn meshes() {
    let mut world = join(0);
    let ranks = world.size();
    let mesh = Mesh::new(ranks, &[Axis::Data.of_size(2), Axis::Expert.of_size(ranks / 2)]).expect("a mesh");
    let mut data = world.group(tag(1), &mesh, Axis::Data).expect("a data group");
    let mut experts = world.group(tag(2), &mesh, Axis::Expert).expect("an expert group");
    assert_eq!((data.size(), experts.size()), (2, ranks / 2));
    works(&mut data);
    works(&mut experts);
    if world.rank() == 0 {
        data.refuse(tag(3), "enough").expect("told");
    } else if data.rank() == 1 && world.rank() == ranks / 2 {
        let error = data.barrier(tag(3));
        assert!(matches!(error, Err(Error::Comm(CommError::Refused { peer: 0, .. }))), "{error:?}");
    }
    drop(data);
    works(&mut experts);
    works(&mut world);
}

/// Prepare's records have the layer in them, so that no rank gets a plan of another's.
fn different_layers() {
    let comm = join(0);
    let (rank, ranks, cuda) = (comm.rank(), comm.size(), comm.cuda().clone());
    let config = GroupConfig { dispatcher: DispatcherKind::AllGather, max_rows: 64, ..GroupConfig::new(4 * ranks, 16) };
    let mut group = Group::new(cuda.clone(), Box::new(comm), config).expect("a group");
    let host = Tensor::from_vec(vec![0i32, 1, 1, 0], &[2, 2]).expect("ids");
    let ids = host.to(&cuda).expect("on the GPU");
    let last = ranks - 1;
    let spec = |layer, reporting| DispatchSpec { reporting, ..DispatchSpec::new(layer, 2) };
    let differs = |error: Option<Error>| match error {
        Some(Error::ConfigMismatch { call, field, rank: own, peer, value, peer_value }) => {
            assert_eq!(
                (call, &field[..], own, peer),
                ("prepare", "spec.layer", rank, if rank == last { 0 } else { last })
            );
            assert_eq!([value, peer_value], if rank == last { ["6", "5"] } else { ["5", "6"] });
        }
        other => panic!("{other:?}"),
    };
    let layer = if rank == last { 6 } else { 5 };
    differs(group.dispatcher().prepare(ids.view(), None, &spec(layer, Reporting::Immediate)).err());
    // Told later, where the GPUs plan and no host waits.
    let fixed = DispatchSpec { capacity: Capacity::Static(64), ..spec(layer, Reporting::Deferred) };
    group.dispatcher().prepare(ids.view(), None, &spec(5, Reporting::Deferred)).expect("one layer");
    let planned = group.dispatcher().prepare(ids.view(), None, &fixed);
    differs(planned.err().or(group.dispatcher().check().err()));
    group.dispatcher().prepare(ids.view(), None, &spec(5, Reporting::Immediate)).expect("one layer again");
}

/// Ranks that compare: a disagreement or a refusal is told on each, nothing is exchanged, and they go on.
fn compared() {
    let mut comm = join(0);
    let (rank, cuda) = (comm.rank(), comm.cuda().clone());
    works(&mut comm);
    let mut value = word(&cuda, 5.0);
    match comm.all_reduce(tag(2 + u64::from(rank == 0)), ReduceOp::Sum, value.view_mut()) {
        Err(Error::Comm(CommError::TagMismatch { tag, peer_tag, peer, .. })) => {
            assert_eq!((tag.sequence, peer_tag.sequence), if rank == 0 { (3, 2) } else { (2, 3) });
            assert_eq!(peer, usize::from(rank == 0));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(cuda.read(value.view()).expect("a read"), [5.0], "nothing was exchanged");
    works(&mut comm);
    if rank == 0 {
        comm.refuse(tag(4), "no room for this").expect("told");
    } else {
        let error = comm.barrier(tag(4));
        assert!(matches!(error, Err(Error::Comm(CommError::Refused { peer: 0, .. }))), "{error:?}");
    }
    works(&mut comm);
    let mut part = comm.split(tag(5), Some(0), rank).expect("a part").expect("of all");
    works(&mut part);
    assert!(matches!(part.barrier(tag(rank as u64)), Err(Error::Comm(CommError::TagMismatch { .. }))));
    works(&mut part);
    works(&mut comm);
}

/// The last rank begins one more pass, and the others end the step: each has a typed error at once, although they compare
/// no calls.
fn microbatches() {
    let mut comm = join(0);
    let (cuda, rank, last) = (comm.cuda().clone(), comm.rank(), comm.size() - 1);
    let mut beside = |sequence| -> Box<dyn Communicator<Cuda>> {
        let own = cuda.with_new_stream().expect("a stream");
        Box::new(comm.split_on(tag(sequence), Some(0), rank, &own).expect("a part").expect("of all"))
    };
    let comms = Comms { gather: beside(1), reduce: beside(2) };
    let chain = Chain::new(cuda.clone(), comms, EtpOptions::default()).expect("a chain");
    let dims = [3, 4, 2];
    let shard = Tensor::zeros(&cuda, DType::F32, &chain.shards(&dims).expect("a cut").shard_dims()).expect("room");
    let spec = WeightSpec::new("w", 0, &dims, DType::F32);
    let id = chain.add(spec, Arc::new(Shard::new(shard))).expect("a weight");
    let used = |phase| -> moebius::Result<()> {
        chain.begin(phase)?;
        drop(chain.source(id)?.acquire()?);
        if phase == Phase::Backward {
            let mut buffer = chain.gradient_buffer(id)?;
            cuda.upload(&[0; 4 * 3 * 4 * 2], buffer.view_mut()?)?;
            chain.submit(buffer)?;
        }
        chain.end()
    };
    let microbatch = || used(Phase::Forward).and_then(|()| used(Phase::Backward));
    // A step of two, of which all are done.
    microbatch().expect("a microbatch");
    microbatch().expect("a microbatch");
    chain.finish(None, |_, _| Ok(())).expect("the step's end");
    microbatch().expect("a microbatch");
    let start = Instant::now();
    let error = match rank == last {
        false => chain.finish(None, |_, _| Ok(())).expect_err("another number"),
        true => {
            let value = word(&cuda, 1.0);
            let more = microbatch().and_then(|()| cuda.read(value.view()).map(drop));
            more.and_then(|()| chain.finish(None, |_, _| Ok(()))).expect_err("another number")
        }
    };
    assert!(start.elapsed() < AT_ONCE, "{error}");
    let as_meant = match &error {
        Error::Invalid { name, .. } => name == "microbatches",
        Error::Comm(CommError::TagMismatch { .. }) => rank == last,
        _ => false,
    };
    assert!(as_meant, "rank {rank}: {error:?}");
}

/// A folder for the state of the children's optimizer.
const STATE: &str = "MOEBIUS_TEST_STATE";

fn refuse_steps(ranks: usize) {
    let dir = tempfile::tempdir().expect("a folder");
    succeed(&start("refused_steps", ranks, &[(STATE, dir.path().to_str().expect("a path in UTF-8"))]));
}

/// What each rank finds to be wrong by itself ends no communicator, although the ranks compare no calls: a state that one
/// of them looks for in another folder, a save over another checkpoint, and sums behind another number of microbatches.
fn refused_steps() {
    let comm = join(0);
    let (cuda, is_last) = (comm.cuda().clone(), comm.rank() + 1 == comm.size());
    let (options, spec) = (AdamWOptions { max_norm: Some(1.0), ..Default::default() }, ParamShard::whole(&[4]));
    let spec = ParamSpec { name: "w".into(), shard: spec, dtype: DType::F32, group: 0 };
    let mut adam = AdamW::new(&cuda, options, &[], vec![spec], Some(Box::new(comm))).expect("an optimizer");
    let all = std::path::PathBuf::from(std::env::var_os(STATE).expect("a folder"));
    let (own, other) = (all.join("own"), all.join("other"));
    adam.save(&own).expect("a save");
    let error = adam.load(if is_last { &other } else { &own }).expect_err("no state");
    match &error {
        Error::Checkpoint(_) => assert!(is_last, "{error}"),
        Error::Comm(CommError::Refused { .. }) => assert!(!is_last, "{error}"),
        _ => panic!("{error:?}"),
    }
    adam.load(&own).expect("the state");
    if is_last {
        std::fs::create_dir(&other).expect("a folder");
        std::fs::write(other.join("model.safetensors"), "weights").expect("a file");
    }
    // A load meets the other ranks: the file is there.
    adam.load(&own).expect("the state");
    adam.save(&other).expect_err("a folder of weights");
    drop(adam);
    #[cfg(feature = "candle")]
    sums(join(1)).expect("sums");
}

/// The last rank has one microbatch more than the others, whose missing one follows.
#[cfg(feature = "candle")]
fn sums(comm: NcclComm) -> candle_core::Result<()> {
    use candle_core::{DType, Device, Var};
    use moebius::candle::{GradientReducer, MainGradients, ReduceComms, cuda, error_of};

    let (rank, ranks) = (comm.rank(), comm.size());
    let device = Device::new_cuda_with_stream(Identity::from_env().expect("an identity").local_rank)?;
    let var = Var::zeros(3, DType::F32, &device)?;
    let comms = ReduceComms { group: Box::new(comm), replicas: None };
    let reducer = GradientReducer::new(&cuda(&device)?, comms)?.with_vars(std::slice::from_ref(&var));
    let mut main = MainGradients::new();
    let loss = || var.affine(2.0, 0.0)?.sum_all();
    main.backward(&loss()?)?;
    if rank + 1 == ranks {
        main.backward(&loss()?)?;
    }
    let error = main.reduce(&reducer).expect_err("another number");
    assert!(matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "microbatches"), "{error:?}");
    if rank + 1 < ranks {
        main.backward(&loss()?)?;
    }
    main.reduce(&reducer)?;
    assert_eq!(main.get(&var)?.to_vec1::<f32>()?, [4.0 * ranks as f32; 3]);
    Ok(())
}

/// A part of all ranks with bounds of its own; others on another rank are an error on each.
fn bounds() {
    let mut comm = join(0);
    works(&mut comm);
    let of = |max_ctas| NcclOptions { max_ctas, ..NcclOptions::default() };
    let mut part = comm.with_bounds(tag(3), of(2)).expect("a part");
    works(&mut part);
    let differing = comm.with_bounds(tag(4), of(2 + comm.rank()));
    assert!(matches!(&differing, Err(Error::ConfigMismatch { field, .. }) if field == "max_ctas"), "{differing:?}");
    works(&mut part);
    works(&mut comm);
    drop(part);
    works(&mut comm);
}

fn compared_by_one() {
    let me = Identity::from_env().expect("an identity");
    let job = Bootstrap::new(&me, JobToken::from_env().expect("a token"), AT_ONCE).expect("a job");
    let (cuda, library) = (Cuda::new(me.local_rank).expect("a GPU"), NcclLibrary::open().expect("NCCL"));
    let comm = if me.rank == 0 { NcclComm::join_checked } else { NcclComm::join };
    let mut comm = comm(&library, &job, &cuda).expect("a communicator");
    let start = Instant::now();
    let error = loop {
        match comm.barrier(tag(1)) {
            Ok(()) => assert!(me.rank != 0 && start.elapsed() < AT_ONCE),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("MOEBIUS_CHECKED"), "{error}");
}
