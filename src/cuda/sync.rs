//! Waits of the host for a GPU.

#[cfg(feature = "nccl")]
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use crate::error::{Error, Result};

use super::device::Cuda;
use super::driver::driver;
#[cfg(feature = "nccl")]
use super::failure::{FailureSource, StuckFlag};

/// How long a wait for the GPU keeps its core to itself; then it looks now and then.
const SPIN: Duration = Duration::from_millis(2);
/// How long after a failure a stream is given to end: an abort ends what waits inside NCCL.
const ABORTING: Duration = Duration::from_secs(1);
/// The same for any stream of a GPU that is stuck: it may be one of those behind the one that is, or a long one.
const STUCK: Duration = Duration::from_secs(30);

/// Of a stream that does not end.
fn stuck_stream_error() -> Error {
    let message = "it waits for a rank that is lost".to_string();
    Error::Device { call: "wait", operation: "wait for the stream".to_string(), message }
}

impl Cuda {
    /// Copies to the host and waits for the stream.
    pub(super) fn read_bytes(&self, call: &'static str, from: CUdeviceptr, to: &mut [u8]) -> Result<()> {
        self.not_captured(call, "wait for the device")?;
        self.bind(call)?;
        let stream = self.inner.stream.cu_stream();
        // SAFETY: the stream lives as long as `self`.
        let wait = || unsafe { result::stream::synchronize(stream) }.map_err(driver(call, "wait for the stream"));
        if !self.inner.failure_sources.is_empty() {
            // A copy to pageable memory waits for the stream inside the driver, under a lock that the thread which
            // would abort what the stream hangs in needs; this wait does not. Why it came to an end matters more than
            // how.
            let waited = self.wait_guarded();
            self.check_failure_sources()?;
            waited?;
        }
        if to.is_empty() {
            return wait();
        }
        // SAFETY: callers give a pointer of at least `to.len()` bytes; `to` lives past the wait below.
        unsafe { result::memcpy_dtoh_async(to, from, stream) }.map_err(driver(call, "copy from the GPU"))?;
        wait()
    }

    /// Waits until the stream has done what was enqueued, or a guard has failed and the stream does not end: another
    /// library's kernel may wait for a rank that is gone, whatever becomes of the communicator.
    fn wait_guarded(&self) -> Result<()> {
        let (end, began) = (self.record()?, Instant::now());
        let mut failed: Option<Instant> = None;
        while !end.is_done()? {
            let waited = began.elapsed();
            if waited < SPIN {
                std::hint::spin_loop();
                continue;
            }
            match failed {
                None if self.check_failure_sources().is_err() => failed = Some(Instant::now()),
                Some(since) if since.elapsed() > ABORTING => return Err(stuck_stream_error()),
                _ if waited > STUCK && self.inner.functions.stuck.is() => return Err(stuck_stream_error()),
                _ => {}
            }
            std::thread::sleep(if waited < SPIN * 10 { SPIN / 20 } else { SPIN / 2 });
        }
        Ok(())
    }

    /// Waits for the stream.
    #[cfg(feature = "nccl")]
    pub(crate) fn finish(&self, call: &'static str) -> Result<()> {
        self.read_bytes(call, 0, &mut [])
    }

    /// Waits until the GPU has done what any stream of the context was given.
    #[cfg(feature = "nccl")]
    pub(crate) fn finish_all(&self, call: &'static str) -> Result<()> {
        self.not_captured(call, "wait for the device")?;
        if self.inner.functions.stuck.is() {
            let message = "one of its streams waits for a rank that is lost".to_string();
            return Err(Error::Device { call, operation: "wait for the device".to_string(), message });
        }
        self.bind(call)?;
        result::ctx::synchronize().map_err(driver(call, "wait for the device"))
    }

    /// Whether a stream of the context is stuck, now and later.
    #[cfg(feature = "nccl")]
    pub(crate) fn stuck(&self) -> StuckFlag {
        self.inner.functions.stuck.clone()
    }

    /// Has every wait return what this finds, for as long as it lives.
    #[cfg(feature = "nccl")]
    pub(crate) fn add_failure_source(&self, source: &Arc<dyn FailureSource>) {
        self.inner.failure_sources.add(source);
    }

    /// Has replays of the graph that is being captured pass this.
    #[cfg(feature = "nccl")]
    pub(crate) fn gate_replays(&self, gate: std::sync::Weak<dyn super::failure::ReplayGate>) {
        if self.inner.capture_state.is_under_way() {
            self.inner.capture_state.add_gate(gate);
        }
    }

    /// Has this device's waits return what another's would find.
    pub(super) fn adopt_failure_sources(&self, other: &Cuda) {
        self.inner.failure_sources.adopt(&other.inner.failure_sources);
    }

    pub(super) fn check_failure_sources(&self) -> Result<()> {
        self.inner.failure_sources.check()
    }
}
