//! Ranks that are processes, one a GPU: this program starts itself once a rank.

use std::time::Instant;

use moebius::comm::{Communicator, ReduceOp};
use moebius::config::MoeConfig;
use moebius::ep::{Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::nccl::NcclComm;
use moebius::ranks::{Axis, Mesh};
use moebius::{CommError, DType, Error, Tensor};

use crate::launched::{AT_ONCE, join, start, succeed, tag, word};
use crate::layer::Problem;
use crate::{KINDS, Run};

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
    ]
}

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
    assert_eq!(cuda.read(&cuda.stream(), value.view()).expect("a read"), [(n * (n - 1) / 2) as f64]);
}

/// What a child does.
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
        other => panic!("no body {other}"),
    }
}

fn layers() {
    let config = MoeConfig::new(64, 40, 16, 4);
    let mut round = 0;
    for kind in KINDS {
        for dtype in [DType::F32, DType::BF16] {
            let comm = join(round);
            round += 1;
            let split: Vec<usize> = (0..comm.size()).map(|r| [70, 0, 3, 128][r % 4]).collect();
            Problem::new(&config, &split, kind, dtype).as_one_rank(&format!("{kind:?}, {dtype}"), comm);
        }
    }
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
    let first = first.and_then(|()| cuda.read(&cuda.stream(), value.view()).map(drop));
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
    match Group::new(cuda.clone(), cuda.stream(), Box::new(comm), config) {
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
        let error = error.and_then(|()| cuda.read(&cuda.stream(), value.view()).map(drop));
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
    let mesh = Mesh::new(ranks, &[(Axis::Data, 2), (Axis::Expert, ranks / 2)]).expect("a mesh");
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
