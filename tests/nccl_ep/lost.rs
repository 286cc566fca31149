//! A rank that is lost to a collective of NCCL EP: its kernels wait for it on the GPU and nothing ends them, yet every
//! wait of the others returns a typed error in time. Between threads the ranks' meeting tells
//! (`rank_that_never_arrives` of the conformance suite); here ranks are processes, which do not meet.

use std::io::Write;
use std::time::{Duration, Instant};

use moebius::ep::{DispatchInputs, DispatchSpec, DispatcherKind, Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::{CommError, DType, Error, Result, Tensor};

use crate::launched::{join_within, start};

pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![("never_enters", never_enters), ("dies", dies)]
}

/// Room for the first dispatch, which compiles.
const LIMIT: Duration = Duration::from_secs(15);
/// After the limit: what is told of a rank that is only late.
const SLACK: Duration = Duration::from_secs(5);
const TOLD: &str = "told in time:";

fn never_enters(ranks: usize) {
    survivors_are_told("ep_never_enters", ranks);
}

fn dies(ranks: usize) {
    survivors_are_told("ep_dies", ranks);
}

fn survivors_are_told(body: &str, ranks: usize) {
    for (rank, one) in start(body, ranks, &[]).iter().enumerate().take(ranks - 1) {
        assert!(one.text.contains(TOLD), "rank {rank}: {}", one.text);
    }
}

/// Work of a child; `None`: no body of this file's.
pub fn child(body: &str) -> Option<()> {
    let last: fn() = match body {
        // It stays meanwhile: late, not gone.
        "ep_never_enters" => || std::thread::sleep(LIMIT + SLACK),
        "ep_dies" => || (),
        _ => return None,
    };
    let is_it: fn(&Error) -> bool = match body {
        "ep_dies" => |e| matches!(e, Error::Comm(CommError::PeerGone { .. })),
        _ => |e| matches!(e, Error::Comm(CommError::Timeout { .. })),
    };
    lost(last, is_it).expect("a step");
    Some(())
}

fn lost(last: fn(), is_it: fn(&Error) -> bool) -> Result<()> {
    let comm = join_within(0, LIMIT);
    let cuda = comm.cuda().clone();
    let (rank, ranks) = (moebius::comm::Communicator::rank(&comm), moebius::comm::Communicator::size(&comm));
    let config = GroupConfig { dispatcher: DispatcherKind::NcclEp, ..GroupConfig::new(4 * ranks, 8) };
    let mut group = Group::new(cuda.clone(), Box::new(comm), config)?;
    let ids = Tensor::from_vec((0..8).map(|t| t % (4 * ranks as i32)).collect::<Vec<_>>(), &[8, 1])?.to(&cuda)?;
    let handle = group.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(0, 1))?;
    let x = cuda.write(&[1.0; 8 * 64], DType::BF16, &[8, 64])?;
    let inputs = || DispatchInputs { tokens: x.view(), weights: None, scales: None };
    group.dispatcher().dispatch_rows(&handle, inputs())?;
    cuda.check()?;
    if rank + 1 == ranks {
        last();
        // What it holds of the others' work is not to be put in order.
        std::process::abort();
    }
    let start = Instant::now();
    let waited = group.dispatcher().dispatch_rows(&handle, inputs()).and_then(|_| cuda.check());
    let took = start.elapsed();
    let later = group.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(0, 1)).map(drop);
    match waited {
        Err(e) if is_it(&e) && took < LIMIT + SLACK && later.as_ref().is_err_and(is_it) => println!("{TOLD} {e}"),
        other => println!("after {took:?}: {other:?}; later: {later:?}"),
    }
    let _ = std::io::stdout().flush();
    // The GPU still waits for the rank: only the process's end ends that.
    std::process::abort();
}
