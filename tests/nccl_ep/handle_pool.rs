//! Low latency whose ranks do not have the same: a handle that one of them keeps, a graph that only some could capture,
//! a GPU that is late. What one rank finds alone the others hear of where they are next, and the steps behind are as
//! before.

use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::cuda::Cuda;
use moebius::ep::{
    DispatchInputs, DispatchOutputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle, Reporting,
};
use moebius::kernels::Kernels;
use moebius::nccl::NcclComm;
use moebius::nccl_ep::NcclEpError;
use moebius::{DType, Device, Error, Result, Tensor};

use crate::launched::{AT_ONCE, start, succeed};
use crate::raw::value;
use crate::steps::each;

pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("a_rank_that_keeps_a_handle_makes_another", a_rank_that_keeps_a_handle),
        ("a_capture_without_a_free_handle_is_told", a_capture_without_a_free_handle),
        ("a_late_gpu_is_told_of", a_late_gpu_is_told_of),
    ]
}

/// Tokens T of a rank, their width H and choices K.
const T: usize = 8;
const H: usize = 512;
const K: usize = 2;

const LATE: &str = "ep_late_gpu";
/// Ranks of a child that are its threads.
const RANKS: &str = "MOEBIUS_TEST_EP_RANKS";
/// The library's timeout in the child.
const TIMEOUT_VARIABLE: &str = "NCCL_EP_TIMEOUT_MS";
const LIBRARY_TIMEOUT: Duration = Duration::from_secs(1);

/// A rank with memory for a step, which a graph needs to stay.
struct Endpoint {
    rank: usize,
    cuda: Cuda,
    group: Group<Cuda>,
    ids: Tensor<Cuda>,
    x: Tensor<Cuda>,
    y: Tensor<Cuda>,
}

impl Endpoint {
    fn new(comm: NcclComm) -> Result<Self> {
        let (cuda, rank, ranks) = (comm.cuda().clone(), comm.rank(), comm.size());
        let experts = 4 * ranks;
        let config = GroupConfig { dispatcher: DispatcherKind::NcclEpLowLatency, ..GroupConfig::new(experts, T) };
        // Each token to two ranks, and each rank to all.
        let ids = (0..T * K).map(|i| ((rank + i / K + i % K) % ranks * 4 + i / K % 4) as i32).collect::<Vec<_>>();
        let x: Vec<f64> = (0..T * H).map(|i| value(rank, i / H, i % H)).collect();
        Ok(Self {
            rank,
            ids: Tensor::from_vec(ids, &[T, K])?.to(&cuda)?,
            x: cuda.write(&x, DType::BF16, &[T, H])?,
            y: Tensor::zeros(&cuda, DType::BF16, &[T, H])?,
            group: Group::new(cuda.clone(), Box::new(comm), config)?,
            cuda,
        })
    }

    fn prepare(&mut self) -> Result<Handle<Cuda>> {
        let spec = DispatchSpec { reporting: Reporting::Deferred, ..DispatchSpec::new(0, K) };
        self.group.dispatcher().prepare(self.ids.view(), None, &spec)
    }

    /// Rows into slots.
    fn go(&mut self, handle: &Handle<Cuda>) -> Result<Tensor<Cuda>> {
        let mut rows = Tensor::empty(&self.cuda, DType::BF16, &[handle.rows(), H])?;
        let inputs = DispatchInputs { tokens: self.x.view(), weights: None, scales: None };
        let outputs = DispatchOutputs { tokens: rows.view_mut(), weights: None, scales: None };
        self.group.dispatcher().dispatch(handle, inputs, outputs)?;
        Ok(rows)
    }

    /// The same and, as they are, back.
    fn travel(&mut self, handle: &Handle<Cuda>) -> Result<()> {
        let rows = self.go(handle)?;
        self.group.dispatcher().combine(handle, rows.view(), self.y.view_mut())
    }

    /// A whole step, whose sums are checked: each row comes back from as many experts as it went to.
    fn step(&mut self) -> Result<Handle<Cuda>> {
        self.cuda.zero(self.y.view_mut().into_data())?;
        let handle = self.prepare()?;
        self.travel(&handle)?;
        for (i, found) in self.cuda.read(self.y.view())?.iter().enumerate() {
            // Twice a number of 8 bits.
            assert_eq!(*found, K as f64 * value(self.rank, i / H, i % H), "rank {}: element {i}", self.rank);
        }
        Ok(handle)
    }
}

fn a_rank_that_keeps_a_handle(ranks: usize) {
    each(ranks, |comm, barrier| {
        let mut endpoint = Endpoint::new(comm)?;
        // By records, and by loads from then on.
        endpoint.step()?;
        let kept = endpoint.step()?;
        let kept = (endpoint.rank == 0).then_some(kept);
        for _ in 0..3 {
            endpoint.step()?;
        }
        if let Some(handle) = &kept {
            assert_eq!(handle.sequence(), 2);
        }
        drop(kept);
        for number in 6..9 {
            assert_eq!(endpoint.step()?.sequence(), number);
        }
        barrier.wait();
        Ok(())
    });
}

fn a_capture_without_a_free_handle(ranks: usize) {
    each(ranks, |comm, barrier| {
        let mut endpoint = Endpoint::new(comm)?;
        endpoint.step()?;
        let kept = endpoint.step()?;
        let kept = (endpoint.rank == 0).then_some(kept);
        endpoint.cuda.check()?;
        barrier.wait();
        let began = Instant::now();
        let cuda = endpoint.cuda.clone();
        let captured = cuda.capture(|| {
            let handle = endpoint.prepare()?;
            endpoint.travel(&handle)
        });
        match (endpoint.rank, captured.map(drop)) {
            (0, Err(Error::NotCapturable { .. })) | (1.., Err(Error::Peer { peer: 0, .. })) => {}
            (rank, other) => panic!("rank {rank}: {other:?}"),
        }
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        barrier.wait();
        // Those that got one in the capture have lost it to that.
        for number in 4..7 {
            assert_eq!(endpoint.step()?.sequence(), number);
        }
        drop(kept);
        endpoint.step()?;
        barrier.wait();
        Ok(())
    });
}

/// The library reads its timeout from the environment, so in a process of its own; one without it compiles first.
fn a_late_gpu_is_told_of(ranks: usize) {
    let (ranks, timeout) = (ranks.to_string(), LIBRARY_TIMEOUT.as_millis().to_string());
    succeed(&start(LATE, 1, &[(RANKS, &ranks)]));
    succeed(&start(LATE, 1, &[(RANKS, &ranks), (TIMEOUT_VARIABLE, &timeout)]));
}

/// Work of a child; `None`: no body of this file's.
pub fn child(body: &str) -> Option<()> {
    if body != LATE {
        return None;
    }
    let ranks = std::env::var(RANKS).ok().and_then(|n| n.parse().ok()).expect("a number of ranks");
    each(ranks, |comm, barrier| {
        let mut endpoint = Endpoint::new(comm)?;
        for _ in 0..3 {
            endpoint.step()?;
        }
        barrier.wait();
        if std::env::var_os(TIMEOUT_VARIABLE).is_none() {
            return Ok(());
        }
        let late = ranks - 1;
        let handle = endpoint.prepare()?;
        let mut buffer =
            Tensor::<Cuda>::empty(&endpoint.cuda, DType::U8, &[if endpoint.rank == late { 16 << 30 } else { 0 }])?;
        endpoint.cuda.check()?;
        barrier.wait();
        if endpoint.rank == late {
            // Its host goes on to meet the others while its GPU writes 16 TB: three seconds and more, in as many calls
            // as are enqueued without a wait.
            (0..1000).try_for_each(|_| endpoint.cuda.zero(buffer.view_mut().into_data()))?;
        }
        // There only: on the way back the late rank would wait for those that have given it up, and be told of them.
        endpoint.go(&handle)?;
        endpoint.cuda.check()?;
        barrier.wait();
        match (endpoint.rank == late, endpoint.prepare().map(drop)) {
            (false, Err(Error::NcclEp(NcclEpError::Late { rank, late: ranks }))) => {
                assert_eq!((rank, ranks), (endpoint.rank, vec![late]));
            }
            (true, Err(Error::Peer { peer, .. })) => assert_ne!(peer, late),
            (_, other) => panic!("rank {}: {other:?}", endpoint.rank),
        }
        barrier.wait();
        Ok(())
    });
    crate::several::close();
    Some(())
}
