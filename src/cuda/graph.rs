//! CUDA graphs: a sequence of calls, captured once and replayed without the host.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::device::CaptureHook;
use crate::error::{Error, Result};

use super::device::Cuda;
use super::driver::driver;
use super::memory::Arena;

const CALL: &str = "Cuda::capture";

/// A captured sequence of calls with everything that it touches: the memory that it allocated, and a hold on every
/// tensor of its [`Cuda`] that was alive when it was captured, so that none of that memory is given to anything else
/// while the graph lives. `T` is what the calls returned.
///
/// Tensors read by the graph may be written between replays (with [`Kernels::upload`](crate::kernels::Kernels::upload),
/// say): the next replay computes with what they hold then. Numbers that were arguments stay as they were captured.
#[derive(Debug)]
pub struct Captured<T> {
    exec: sys::CUgraphExec,
    output: T,
    cuda: Cuda,
    /// Blocks of the graph itself; tensors in `output` are among them.
    arena: Arc<Arena>,
    _hold: ArenaHold,
}

/// Keeps the blocks that were in use in an arena when it was made from changing hands.
#[derive(Debug)]
struct ArenaHold {
    arena: Arc<Arena>,
    id: u64,
}

impl ArenaHold {
    fn new(arena: &Arc<Arena>) -> Self {
        Self { arena: Arc::clone(arena), id: arena.hold() }
    }
}

impl Drop for ArenaHold {
    fn drop(&mut self) {
        self.arena.release(self.id);
    }
}

/// A capture under way. However it ends, the stream is out of it afterwards, and the device has its memory again.
struct ActiveCapture<'a> {
    cuda: &'a Cuda,
    shared: Arc<Arena>,
    /// Begun on the stream and not ended.
    open: bool,
}

impl ActiveCapture<'_> {
    fn run<T>(&mut self, calls: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.cuda.inner.stream.cu_stream(), mode) }
            .map_err(driver(CALL, "begin capture"))?;
        self.open = true;
        let output = calls();
        let graph = self.end(output.is_err());
        // Why there is none, before what has become of it.
        let output = output?;
        Ok((graph?, output))
    }

    fn end(&mut self, failed: bool) -> Result<Graph> {
        self.open = false;
        let inner = &self.cuda.inner;
        let whole = inner.capture_state.hooks().iter().map(|ending| ending(failed)).fold(Ok(()), Result::and);
        // SAFETY: capture was begun on this stream, and not ended.
        let graph = unsafe { result::stream::end_capture(inner.stream.cu_stream()) };
        let graph = graph.map(Graph).map_err(driver(CALL, "end capture"));
        whole.and(graph)
    }
}

impl Drop for ActiveCapture<'_> {
    fn drop(&mut self) {
        if self.open {
            // The calls panicked.
            let _ = self.end(true);
        }
        self.cuda.inner.exchange_arena(Arc::clone(&self.shared));
        self.cuda.inner.capture_state.end();
    }
}

/// A captured graph.
struct Graph(sys::CUgraph);

impl Graph {
    fn executable(&self) -> Result<sys::CUgraphExec> {
        // SAFETY: the graph is alive.
        unsafe { result::graph::instantiate(self.0, sys::CUgraphInstantiate_flags(0)) }
            .map_err(driver(CALL, "make the graph executable"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, by the end of a capture; an executable one that was made of it does not need it.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

// SAFETY: an executable graph is a handle that any thread may use, one at a time: `replay` and `drop` take `&mut self`.
unsafe impl<T: Send> Send for Captured<T> {}
// SAFETY: as above; `&self` gives the output alone.
unsafe impl<T: Sync> Sync for Captured<T> {}

impl Cuda {
    /// Captures what `calls` enqueues, without running it. Run them once before, so that what happens at a first use is
    /// behind.
    ///
    /// Until it returns, nothing else may use this device's stream. Where `calls` fail, what they have captured is
    /// given up: nothing of it runs.
    ///
    /// # Errors
    /// Errors of `calls`; [`Error::NotCapturable`] where one of them waits for the device or copies from the host, or
    /// where they end within a pass of a chain; a driver's error.
    pub fn capture<T>(&self, calls: impl FnOnce() -> Result<T>) -> Result<Captured<T>> {
        self.bind(CALL)?;
        if !self.inner.capture_state.begin() {
            return Err(Error::invalid(CALL, "device", "no capture under way", "one"));
        }
        let shared = self.inner.arena();
        // From here on, so that what the calls themselves free stays as it is too.
        let hold = ArenaHold::new(&shared);
        let arena = shared.private();
        self.inner.exchange_arena(Arc::clone(&arena));
        self.inner.capture_state.count();
        let (graph, output) = ActiveCapture { cuda: self, shared, open: false }.run(calls)?;
        let exec = graph.executable()?;
        Ok(Captured { exec, output, cuda: self.clone(), arena, _hold: hold })
    }

    /// Number of the capture under way.
    pub(super) fn capture_number(&self) -> Option<u64> {
        self.inner.capture_state.number()
    }

    /// Has every capture call this before it ends.
    pub(super) fn add_capture_hook(&self, hook: &Arc<CaptureHook>) {
        self.inner.capture_state.add_hook(hook);
    }

    /// Whether a graph is being captured on the stream, by this crate or the host framework.
    ///
    /// # Errors
    /// A driver's error.
    pub fn is_capturing(&self) -> Result<bool> {
        // SAFETY: the stream is alive.
        let status = unsafe { result::stream::is_capturing(self.inner.stream.cu_stream()) };
        let status = status.map_err(driver("Cuda::is_capturing", "ask the stream"))?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Refuses what cannot be captured.
    pub(crate) fn not_captured(&self, call: &'static str, operation: &str) -> Result<()> {
        match self.inner.capture_state.is_under_way() {
            false => Ok(()),
            true => Err(Error::NotCapturable { call, operation: operation.to_string() }),
        }
    }
}

impl<T> Captured<T> {
    /// Enqueues the captured calls.
    ///
    /// # Errors
    /// A driver's error.
    pub fn replay(&mut self) -> Result<()> {
        const CALL: &str = "Captured::replay";
        self.cuda.bind(CALL)?;
        // SAFETY: the graph is executable and what it touches is held by `self`.
        unsafe { result::graph::launch(self.exec, self.cuda.inner.stream.cu_stream()) }
            .map_err(driver(CALL, "launch the graph"))
    }

    /// Result of the captured calls: tensors in it hold the results of the last replay.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Bytes that the graph has taken for itself, and all other memory of its device.
    pub fn memory(&self) -> super::Memory {
        self.arena.memory()
    }
}

impl<T> Drop for Captured<T> {
    fn drop(&mut self) {
        // Nothing can be reported from here.
        if self.cuda.bind("Captured::drop").is_ok() {
            // SAFETY: made once by `capture`. The driver lets a replay that is under way finish first.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}
