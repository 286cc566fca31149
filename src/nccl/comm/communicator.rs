//! One rank's communicator between GPUs.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::{Op, Tag};
use crate::cuda::{Cuda, ReplayGate};
use crate::dtype::DType;
use crate::error::{CommError, Result};
use crate::tensor::Tensor;

use crate::nccl::comm::replays::{Replays, work_so_far};
use crate::nccl::comm::session::Session;
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::control::plane::ControlPlane;
use crate::nccl::control::watchdog::KERNEL_MARGIN;
use crate::nccl::ffi::comm_handle::CommHandle;
use crate::nccl::ffi::enqueue::{CommStream, EnqueueError};
use crate::nccl::ffi::sys::{CommPtr, Functions, StreamPtr};
use crate::nccl::{NcclLibrary, NcclOptions};

/// A rank's communicator between GPUs, on the stream of its [`Cuda`].
///
/// Collectives are enqueued; the host waits for a GPU only in [`barrier`](crate::comm::Communicator::barrier) and for
/// what is summed on the host (see [`all_reduce`](crate::comm::Communicator::all_reduce) below). A failure is kept:
/// every later call returns it, and so does every wait of the [`Cuda`] while this communicator lives. Then the
/// communicator has been aborted, and what its collectives wrote is worth nothing. What kernels found in it is told to nobody;
/// what those of its stream find that are enqueued once it is dropped is told by the next wait. Other streams that take its
/// results, those of a chain of sharded weights, cannot tell both apart: what their kernels find before their first wait
/// behind the drop is told to nobody, and what they find later is told.
///
/// Sums keep the trait's promise: in rank order, in f32, the same bits on every rank and in every run. `F32`, `F16` and
/// `BF16` are exchanged piece by piece and added by this crate's kernel, which moves as many bytes as NCCL's own ring;
/// integers are NCCL's to add; `F64`, and the maximum of floating types, where a NaN must win, pass through the host.
///
/// Dropping it tells the peers that the rank has left, and waits until its collectives have ended, or it has failed; those of
/// a graph that another thread replays at the time too, whose next replay is an error.
#[derive(Debug)]
pub struct NcclComm {
    pub(in crate::nccl) cuda: Cuda,
    pub(in crate::nccl) sums: RankReduce,
    pub(in crate::nccl) session: Session,
    /// Of graphs that hold its collectives.
    replays: Arc<Replays>,
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        // Before anything else of it goes; the communicator is the last.
        self.replays.close();
        if self.session.outlives_ranks() {
            // Kernels that nobody has watched end by themselves, and may be storing into memory that goes. Nothing can be
            // reported from here.
            let _ = self.cuda.finish("NcclComm");
        }
        self.session.close();
        if self.failure().is_some() {
            self.cuda.forget_faults_of_failed_source("NcclComm");
        }
    }
}

/// A row that travels, and what does beside it, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TravelingRow {
    pub(crate) dtype: DType,
    pub(crate) bytes: usize,
    pub(crate) weights: usize,
    pub(crate) scales: usize,
}

/// Handles of a communicator that other libraries that build on NCCL need.
#[derive(Debug, Clone, Copy)]
pub struct CommParts<'a> {
    /// NCCL's functions.
    pub functions: &'a Functions,
    /// The communicator.
    pub comm: CommPtr,
    /// The stream of all its work.
    pub stream: StreamPtr,
}

/// For a number of rows, the map that names each row of every rank's part.
#[derive(Debug, Default)]
pub(in crate::nccl) struct RankReduce {
    pub(in crate::nccl) maps: HashMap<usize, Tensor<Cuda>>,
}

/// Who makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Callers {
    /// Every rank: it is in their common count.
    AllRanks,
    SomeRanks,
}

/// What has come of calls of NCCL. `None`: the communicator has ended.
fn enqueued(done: std::result::Result<(), EnqueueError>) -> Option<Result<()>> {
    match done {
        Ok(()) => Some(Ok(())),
        Err(refused) => refused.map(|error| Err(error.into())),
    }
}

/// Of a call that is no collective.
const NO_TAG: Tag = Tag { layer: 0, op: Op::User, sequence: 0 };

impl NcclComm {
    pub(in crate::nccl) fn new(
        comm_handle: Arc<CommHandle>,
        cuda: &Cuda,
        control: ControlPlane,
        timeout: Duration,
    ) -> Result<Self> {
        const CALL: &str = "NcclComm::new";
        comm_handle.on(|| vec![cuda.stuck()]);
        let own = cuda.clone();
        comm_handle.marked(Box::new(move || work_so_far(&own).ok().flatten()));
        let session = Session::new(comm_handle, control, timeout)?;
        let guard: Arc<dyn crate::cuda::FailureSource> = session.comm_handle.clone();
        cuda.add_failure_source(&guard);
        let replays = Replays::of(&session, cuda).ok_or_else(|| session.ended(CALL, NO_TAG))?;
        Ok(Self { cuda: cuda.clone(), sums: RankReduce::default(), session, replays: Arc::new(replays) })
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The library.
    pub fn library(&self) -> &NcclLibrary {
        self.session.comm_handle.library()
    }

    /// Within which every collective ends.
    pub fn timeout(&self) -> Duration {
        self.session.timeout
    }

    /// What its collectives may take of the GPU.
    pub fn options(&self) -> NcclOptions {
        self.session.comm_handle.options
    }

    /// Why the communicator has ended, if it has.
    pub fn failure(&self) -> Option<CommError> {
        self.session.comm_handle.failure()
    }

    /// Runs calls of NCCL, or of a library that takes its communicators, while nobody frees the communicator. Not
    /// watched: for what ends without the peers.
    ///
    /// # Errors
    /// Errors of `calls`; the failure that ended the communicator.
    pub fn with_raw<T>(&self, calls: impl FnOnce(CommParts<'_>) -> Result<T>) -> Result<T> {
        self.cuda.bind("NcclComm::with_raw")?;
        let stream = self.stream();
        match self.session.comm_handle.with(|functions, comm| calls(CommParts { functions, comm, stream })) {
            Some(result) => result,
            None => Err(self.session.ended("with_raw", NO_TAG)),
        }
    }

    /// The same for what all ranks call together: counted, compared over the ranks where they are threads, and watched.
    ///
    /// # Errors
    /// Errors of `calls`, which end the communicator on all ranks; a collective's own errors.
    pub fn collective_raw<T>(
        &mut self,
        operation: &'static str,
        tag: Tag,
        calls: impl FnOnce(CommParts<'_>) -> Result<T>,
    ) -> Result<T> {
        self.together(CollectiveCall { operation, tag, dtype: DType::U8, detail: Detail::Plain, bytes: 0 }, calls)
    }

    /// A collective that is not NCCL's, of rows of `bytes`: counted, compared over the ranks where they are threads,
    /// and watched. As [`NcclComm::collective_raw`], for calls that need nothing of NCCL's or reach the
    /// communicator themselves.
    #[cfg(feature = "nccl-ep")]
    pub(crate) fn around<T>(
        &mut self,
        (operation, dtype, bytes): (&'static str, DType, usize),
        tag: Tag,
        calls: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let subject = self.session.begin(CollectiveCall { operation, tag, dtype, detail: Detail::Plain, bytes })?;
        self.run_watched(subject, |_| Some(calls()))
    }

    /// The same of a kernel that itself waits no longer than the timeout, and tells for whom: the watchdog leaves it the
    /// time to. What travels beside a row is compared as well.
    pub(crate) fn around_kernel<T>(
        &mut self,
        operation: &'static str,
        tag: Tag,
        rows: TravelingRow,
        calls: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let TravelingRow { dtype, bytes, weights, scales } = rows;
        let detail = Detail::Beside((weights as u64) << 32 | scales as u64);
        let subject = self.session.begin(CollectiveCall { operation, tag, dtype, detail, bytes })?;
        let timeout = self.session.timeout;
        self.session.timeout = timeout.saturating_add(KERNEL_MARGIN);
        let done = self.run_watched(subject, |_| Some(calls()));
        self.session.timeout = timeout;
        done
    }

    /// Whether a rank that is gone leaves this communicator to the others for what needs no collective: their
    /// [uncounted kernels](Self::around_uncounted_kernel). Collectives then are errors that name the rank, and replays of
    /// graphs are not counted.
    pub(crate) fn outlive_ranks(&mut self, outlives: bool) {
        self.session.outlive_ranks(outlives);
        self.replays.count_replays(!outlives);
    }

    /// A kernel of this crate's own between ranks that go on without each other: no host waits for another's, and nobody
    /// watches it. For a communicator that outlives ranks, whose replays pass it as others do.
    ///
    /// # Errors
    /// The communicator has ended, and nothing was enqueued; those of `calls`.
    pub(crate) fn around_uncounted_kernel(&mut self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.cuda.is_capturing()? {
            let gate: Weak<Replays> = Arc::downgrade(&self.replays);
            self.cuda.gate_replays(gate);
            return calls();
        }
        let mut calls = Some(calls);
        self.replays.pass(&mut || calls.take().map_or(Ok(()), |calls| calls()))
    }

    pub(in crate::nccl) fn together<T>(
        &mut self,
        call: CollectiveCall,
        calls: impl FnOnce(CommParts<'_>) -> Result<T>,
    ) -> Result<T> {
        let subject = self.session.begin(call)?;
        self.run_watched(subject, |CommStream { comm_handle, stream }| {
            comm_handle.with(|functions, comm| calls(CommParts { functions, comm, stream: *stream }))
        })
    }

    pub(in crate::nccl) fn stream(&self) -> StreamPtr {
        self.cuda.stream().cu_stream().cast()
    }

    /// Runs a collective's calls with the watchdog looking on, then has it watch what they enqueued. `None` from them:
    /// the communicator has ended.
    pub(in crate::nccl) fn run_watched<T>(
        &mut self,
        subject: CollectiveInfo,
        calls: impl FnOnce(&CommStream<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        self.run_by(Callers::AllRanks, subject, calls)
    }

    fn run_by<T>(
        &mut self,
        callers: Callers,
        subject: CollectiveInfo,
        calls: impl FnOnce(&CommStream<'_>) -> Option<Result<T>>,
    ) -> Result<T> {
        let bound = self.cuda.bind(subject.operation);
        self.session.check_begun(subject, bound)?;
        let (stream, cuda, replays) = (self.stream(), &self.cuda, &self.replays);
        let work = || {
            let work = work_so_far(cuda)?;
            // A replay is counted as one of the ranks' common calls, so it must hold one.
            if work.is_none() && callers == Callers::AllRanks {
                let gate: Weak<Replays> = Arc::downgrade(replays);
                cuda.gate_replays(gate);
            }
            Ok(work)
        };
        self.session.run(subject, |comm_handle| calls(&CommStream { comm_handle, stream }), work)
    }

    /// The same for calls of NCCL alone.
    pub(in crate::nccl) fn enqueue(
        &mut self,
        subject: CollectiveInfo,
        calls: impl FnOnce(&CommStream<'_>) -> std::result::Result<(), EnqueueError>,
    ) -> Result<()> {
        self.run_watched(subject, |comm_stream| enqueued(calls(comm_stream)))
    }

    /// The same for calls between some of the ranks only.
    pub(in crate::nccl) fn enqueue_aside(
        &mut self,
        subject: CollectiveInfo,
        calls: impl FnOnce(&CommStream<'_>) -> std::result::Result<(), EnqueueError>,
    ) -> Result<()> {
        self.run_by(Callers::SomeRanks, subject, |comm_stream| enqueued(calls(comm_stream)))
    }
}
