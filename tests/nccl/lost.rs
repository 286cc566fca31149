//! Ranks that are lost inside a collective, and what the others get: a typed error in time, from every later call and
//! from every wait of the GPU, and a new world afterwards.

use std::ffi::c_void;
use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::{Communicator, Op, SymmetricMemory, Tag};
use moebius::config::RouterConfig;
use moebius::cuda::Cuda;
use moebius::ep::Reporting;
use moebius::kernels::{Kernels, Origin, Route};
use moebius::nccl::sys::{DataType, Status, WaitSignal};
use moebius::nccl::{CommParts, NcclComm};
use moebius::{CommError, DType, Error, Result, Tensor};

use crate::Run;
use crate::conformance::gpus;
use crate::launched::{start, succeed};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("never_enters", never_enters),
        ("never_gathers_by_copy_engines", |_, ranks| in_a_process("never_gathers", ranks)),
        ("never_puts_by_copy_engines", |_, ranks| in_a_process("never_puts", ranks)),
        ("copy_engines_exchange", copy_engines_exchange),
        ("fails_inside", fails_inside),
        ("panics_inside", panics_inside),
        ("faults_behind_a_lost_rank", faults_behind_a_lost_rank),
        ("splits", splits),
        ("windows", windows),
    ]
}

const LIMIT: Duration = Duration::from_secs(2);
/// Limit well within which failures are known that are told at once.
const TIMEOUT: Duration = Duration::from_secs(30);

fn tag(sequence: u64) -> Tag {
    Tag { layer: 0, op: Op::User, sequence }
}

/// Every rank's body on a thread; results in rank order, `None` where it panicked.
fn each<T: Send>(comms: Vec<NcclComm>, body: impl Fn(NcclComm) -> T + Sync) -> Vec<Option<T>> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

/// An all-gather of one word, that the culprit meets the others for and then does something else.
fn half_entered(comm: &mut NcclComm, culprit: impl Fn() -> Result<()>) -> Result<Tensor<Cuda>> {
    let cuda = comm.cuda().clone();
    let ranks = comm.size();
    let send = Tensor::zeros(&cuda, DType::F32, &[1])?;
    let mut recv = Tensor::empty(&cuda, DType::F32, &[ranks])?;
    let last = comm.rank() + 1 == ranks;
    let (from, to) = (send.view().data().address(), recv.view_mut().into_data().address());
    comm.collective_raw("test", tag(1), |raw| {
        if last {
            return culprit();
        }
        // SAFETY: both tensors live until the stream has been waited for or the communicator aborted.
        let status = unsafe {
            let (from, to) = (from as *const c_void, to as *mut c_void);
            (raw.functions.all_gather)(from, to, 4, DataType::U8, raw.comm, raw.stream)
        };
        assert_eq!(status.0, 0);
        Ok(())
    })?;
    Ok(recv)
}

fn afterwards(ranks: usize) {
    let sums = each(gpus::communicators(ranks, TIMEOUT), |mut comm| {
        let cuda = comm.cuda().clone();
        let mut value = Tensor::from_value(&cuda, comm.rank() as f64);
        comm.all_reduce(tag(9), moebius::comm::ReduceOp::Sum, value.view_mut()).expect("a new world");
        cuda.read(value.view()).expect("a sum")[0]
    });
    let expected = (ranks * (ranks - 1) / 2) as f64;
    assert!(sums.iter().all(|sum| *sum == Some(expected)), "{sums:?}");
}

trait FromValue {
    fn from_value(cuda: &Cuda, value: f64) -> Self;
}

impl FromValue for Tensor<Cuda> {
    fn from_value(cuda: &Cuda, value: f64) -> Self {
        cuda.write(&[value], DType::F32, &[1]).expect("a tensor")
    }
}

/// Results of the others where a last rank meets them and never enqueues its part: they time out inside the driver, not
/// after it.
fn times_out(comms: Vec<NcclComm>, enter: impl Fn(&mut NcclComm) -> Result<Tensor<Cuda>> + Sync) {
    let (ranks, done) = (comms.len(), std::sync::Barrier::new(comms.len()));
    let results = each(comms, |mut comm| {
        let start = Instant::now();
        let recv = enter(&mut comm);
        let last = comm.rank() + 1 == comm.size();
        if last {
            done.wait();
            return;
        }
        let cuda = comm.cuda().clone();
        let waited = recv.and_then(|recv| cuda.read(recv.view()));
        let timeout = |e: &Error| matches!(e, Error::Comm(CommError::Timeout { .. }));
        assert!(waited.as_ref().is_err_and(timeout), "{waited:?}");
        let later = comm.barrier(tag(2));
        assert!(later.as_ref().is_err_and(timeout), "{later:?}");
        assert!(cuda.check().as_ref().is_err_and(timeout), "waits fail while the communicator lives");
        assert!(start.elapsed() < LIMIT + Duration::from_secs(5));
        done.wait();
        drop(comm);
    });
    assert!(results.iter().all(Option::is_some));
    afterwards(ranks);
}

fn never_enters(_: &Cuda, ranks: usize) {
    times_out(gpus::communicators(ranks, LIMIT), |comm| half_entered(comm, || Ok(())));
}

fn with_copy_engines(ranks: usize, limit: Duration) -> Vec<NcclComm> {
    gpus::for_purpose(&(0..ranks).collect::<Vec<_>>(), ("lost", true), limit)
}

/// The first call that the last rank leaves out, of memory that copy engines move.
fn half_moved(comm: &mut NcclComm, call: impl FnOnce(CommParts<'_>, u64) -> Status) -> Result<Tensor<Cuda>> {
    let last = comm.rank() + 1 == comm.size();
    let mut all = comm.memory(tag(0), DType::F32, &[comm.size()])?.expect("memory of its own");
    let address = all.view_mut().into_data().address();
    comm.collective_raw("test", tag(1), |raw| {
        if !last {
            assert_eq!(call(raw, address).0, 0);
        }
        Ok(())
    })?;
    Ok(all)
}

/// How many ranks a child has, as threads.
const RANKS: &str = "MOEBIUS_TEST_RANKS";

/// In a process of its own, which has to end as well: what copy engines wait for leaves the GPU stuck.
fn in_a_process(body: &str, ranks: usize) {
    succeed(&start(body, 1, &[(RANKS, &ranks.to_string())]));
}

/// Work of such a child.
pub fn child(body: &str) {
    let ranks = std::env::var(RANKS).ok().and_then(|ranks| ranks.parse().ok()).expect("a number of ranks");
    match body {
        "never_gathers" => never_gathers(ranks),
        "never_puts" => never_puts(ranks),
        other => panic!("no body {other}"),
    }
    println!("as expected");
    gpus::close();
    println!("closed");
}

fn never_gathers(ranks: usize) {
    times_out(with_copy_engines(ranks, LIMIT), |comm| {
        let rank = comm.rank() as u64;
        half_moved(comm, |raw, all| {
            let (from, to) = ((all + 4 * rank) as *const c_void, all as *mut c_void);
            // SAFETY: the memory is a window's, which stays as long as the communicator.
            unsafe { (raw.functions.all_gather)(from, to, 4, DataType::U8, raw.comm, raw.stream) }
        })
    });
}

fn never_puts(ranks: usize) {
    times_out(with_copy_engines(ranks, LIMIT), |comm| {
        half_moved(comm, |raw, _| {
            let mut last = WaitSignal { count: 1, peer: ranks as i32 - 1, index: 0, context: 0 };
            let wait = raw.functions.wait_signal.expect("ncclWaitSignal");
            // SAFETY: nothing but NCCL's own memory is read.
            unsafe { wait(1, &raw mut last, raw.comm, raw.stream) }
        })
    });
}

/// Blocks from window to window, of any size, one exchange right behind another.
fn copy_engines_exchange(_: &Cuda, ranks: usize) {
    let results = each(with_copy_engines(ranks, TIMEOUT), |mut comm| {
        let (rank, cuda) = (comm.rank(), comm.cuda().clone());
        let memory = |comm: &mut NcclComm, dims: &[usize]| comm.memory(tag(0), DType::F32, dims).expect("memory");
        for (number, width) in [1, 3, 1000, 1 << 20].into_iter().enumerate() {
            let mut send = memory(&mut comm, &[ranks, width]).expect("of its own");
            let mut recv = memory(&mut comm, &[ranks - 1, width]).expect("of its own");
            let mut kept = [0, 1, 2, 3].map(|_| Tensor::zeros(&cuda, DType::F32, &[ranks - 1, width]).expect("room"));
            // Into the same memory, and out of it before the next.
            for (round, kept) in kept.iter_mut().enumerate() {
                let value = |to: usize| (64 * round + 8 * rank + to) as f32;
                let values: Vec<f32> = (0..ranks).flat_map(|to| vec![value(to); width]).collect();
                let bytes = bytemuck::cast_slice(&values);
                cuda.upload(bytes, send.view_mut()).expect("an upload");
                comm.exchange_blocks(tag(1 + number as u64), send.view(), recv.view_mut()).expect("exchanged");
                let bytes = cuda.download(recv.view()).expect("a read");
                cuda.upload(&bytes, kept.view_mut()).expect("kept");
            }
            for (round, recv) in kept.iter().enumerate() {
                let value = |from: usize| vec![(64 * round + 8 * from + rank) as f64; width];
                let expected: Vec<f64> = (0..ranks).filter(|from| *from != rank).flat_map(value).collect();
                assert_eq!(cuda.read(recv.view()).expect("a read"), expected, "{width}");
            }
        }
        // Its one signal is the exchanges'.
        let refused = SymmetricMemory::signal(&mut comm, tag(9), (rank + 1) % ranks).unwrap_err().to_string();
        assert!(refused.contains("need no signals"), "{refused}");
    });
    assert!(results.iter().all(Option::is_some));
}

fn told_at_once(ranks: usize, culprit: fn() -> Result<()>, is: fn(&Error) -> bool) {
    let results = each(gpus::communicators(ranks, TIMEOUT), |mut comm| {
        let start = Instant::now();
        let last = comm.rank() + 1 == comm.size();
        let recv = half_entered(&mut comm, culprit);
        if last {
            assert!(recv.is_err());
            return;
        }
        let cuda = comm.cuda().clone();
        let waited = recv.and_then(|recv| cuda.read(recv.view()));
        assert!(waited.as_ref().is_err_and(is), "{waited:?}");
        assert!(comm.barrier(tag(2)).as_ref().is_err_and(is));
        assert!(start.elapsed() < TIMEOUT / 3, "told at once");
    });
    assert!(results.iter().take(ranks - 1).all(Option::is_some));
    afterwards(ranks);
}

fn fails_inside(_: &Cuda, ranks: usize) {
    let own = || Err(Error::Device { call: "test", operation: "fail".into(), message: "trouble of its own".into() });
    told_at_once(ranks, own, |e| match e {
        Error::Comm(CommError::Refused { reason, .. }) => reason.contains("trouble of its own"),
        _ => false,
    });
}

fn panics_inside(_: &Cuda, ranks: usize) {
    // Unwinds without the hook's noise.
    let panic = || -> Result<()> { std::panic::resume_unwind(Box::new("a rank's own trouble")) };
    told_at_once(ranks, panic, |e| matches!(e, Error::Comm(CommError::PeerGone { .. })));
}

/// What kernels find before a failed communicator goes may come of what nobody has written, and is told to nobody; what work
/// enqueued behind it finds is told, though nobody has waited in between.
fn faults_behind_a_lost_rank(_: &Cuda, ranks: usize) {
    let gone = || Err(Error::Device { call: "test", operation: "fail".into(), message: "trouble of its own".into() });
    for behind in [None, Some(3)] {
        // Of their own, which nothing holds behind them.
        let (library, cudas) = gpus::first(ranks);
        let results = each(NcclComm::threads(&library, &cudas, TIMEOUT).expect("communicators"), |mut comm| {
            let cuda = comm.cuda().clone();
            let last = comm.rank() + 1 == comm.size();
            let [before, later] = [0, 3].map(|token| NanLogits::new(&cuda, token));
            let recv = half_entered(&mut comm, gone);
            if last {
                return;
            }
            let waited = recv.and_then(|recv| cuda.read(recv.view()));
            assert!(waited.as_ref().is_err_and(|e| matches!(e, Error::Comm(_))), "{waited:?}");
            before.route(&cuda, 7);
            drop(comm);
            if behind.is_some() {
                later.route(&cuda, 9);
            }
            match (cuda.check(), behind) {
                (Ok(()), None) => {}
                (Err(Error::NanLogits { layer: 9, token, .. }), Some(expected)) if token == expected => {}
                (told, _) => panic!("{told:?}, with a NaN of token {behind:?}"),
            }
            assert!(cuda.check().is_ok(), "told once");
        });
        assert!(results.iter().take(ranks - 1).all(Option::is_some));
    }
}

/// Logits of four tokens and two experts, one of which is no number.
struct NanLogits(Tensor<Cuda>);

impl NanLogits {
    fn new(cuda: &Cuda, token: usize) -> Self {
        let logits: Vec<f64> = (0..8).map(|i| if i == 2 * token { f64::NAN } else { f64::from(i as u8) }).collect();
        Self(cuda.write(&logits, DType::F32, &[4, 2]).expect("logits"))
    }

    /// Has a kernel find it, without waiting.
    fn route(&self, cuda: &Cuda, layer: u32) {
        let mut ids = Tensor::empty(cuda, DType::I32, &[4, 1]).expect("room");
        let mut weights = Tensor::empty(cuda, DType::F32, &[4, 1]).expect("room");
        let route = Route {
            config: &RouterConfig::new(2, 1),
            logits: self.0.view(),
            selection_bias: None,
            jitter: None,
            origin: Origin { rank: 0, layer },
            reporting: Reporting::Deferred,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
        };
        cuda.route(route).expect("a launch");
    }
}

/// Parts of a world: even and odd ranks, in falling order.
fn splits(_: &Cuda, ranks: usize) {
    let results = each(gpus::communicators(ranks, TIMEOUT), |mut comm| {
        let (rank, cuda) = (comm.rank(), comm.cuda().clone());
        let part = comm.split(tag(0), Some(rank % 2), ranks - rank).expect("a split");
        let mut part = part.expect("a part for each");
        let members: Vec<usize> = (0..ranks).rev().filter(|r| r % 2 == rank % 2).collect();
        assert_eq!((part.size(), members[part.rank()]), (members.len(), rank));
        let own = Tensor::from_value(&cuda, rank as f64);
        let mut all = Tensor::empty(&cuda, DType::F32, &[members.len()]).expect("room");
        part.all_gather(tag(1), own.view(), all.view_mut()).expect("inside the part");
        let found = cuda.read(all.view()).expect("a read");
        assert_eq!(found, members.iter().map(|r| *r as f64).collect::<Vec<_>>());
        // The same on a stream of its own.
        let beside = cuda.with_new_stream().expect("a stream");
        let apart = comm.split_on(tag(4), Some(rank % 2), ranks - rank, &beside).expect("a split");
        let mut apart = apart.expect("a part for each");
        let own = Tensor::from_value(&beside, rank as f64 + 1.0);
        let mut all = Tensor::empty(&beside, DType::F32, &[members.len()]).expect("room");
        apart.all_gather(tag(5), own.view(), all.view_mut()).expect("inside the part");
        let found = beside.read(all.view()).expect("a read");
        assert_eq!(found, members.iter().map(|r| *r as f64 + 1.0).collect::<Vec<_>>());
        drop(apart);
        // And by copy engines, in memory of the part.
        let engines = comm.split_with_copy_engines(tag(6), Some(0), ranks - rank, &beside).expect("a split");
        let mut engines = engines.expect("a part for each");
        assert!(engines.uses_copy_engines());
        let mut all = engines.memory(tag(7), DType::F32, &[ranks]).expect("memory").expect("of its own");
        engines.all_gather(tag(8), own.view(), all.view_mut()).expect("inside the part");
        let found = beside.read(all.view()).expect("a read");
        assert_eq!(found, (0..ranks).rev().map(|r| r as f64 + 1.0).collect::<Vec<_>>());
        drop((all, engines));
        // Without a color there is no part, and the whole works on.
        let none = comm.split(tag(2), (rank == 0).then_some(0), 0).expect("a split");
        assert_eq!(none.is_some(), rank == 0);
        drop((part, none));
        comm.barrier(tag(3)).expect("the whole");
    });
    assert!(results.iter().all(Option::is_some));
}

/// Symmetric memory over NCCL's windows.
fn windows(_: &Cuda, ranks: usize) {
    let results = each(gpus::communicators(ranks, TIMEOUT), |comm| {
        let cuda = comm.cuda().clone();
        crate::conformance::windows(comm, &cuda);
    });
    assert!(results.iter().all(Option::is_some));
}
