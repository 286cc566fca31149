//! CUDA graphs: a sequence of calls, captured once and replayed without the host.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::device::CaptureHook;
use crate::error::{Error, Result};

use super::capture_state::CaptureState;
use super::device::Cuda;
use super::driver::driver;
use super::failure::{FailureSource, Gates};
use super::memory::{Arena, ArenaKind};

const CALL: &str = "Cuda::capture";

/// A captured sequence of calls with everything that it touches: the memory that it allocated, and a hold on every
/// tensor of its [`Cuda`] that was alive when it was captured, so that none of that memory is given to anything else
/// while the graph lives. `T` is what the calls returned.
///
/// Tensors read by the graph may be written between replays (with [`Kernels::upload`](crate::kernels::Kernels::upload),
/// say): the next replay computes with what they hold then. Numbers that were arguments stay as they were captured.
pub struct Captured<T> {
    exec: sys::CUgraphExec,
    output: T,
    cuda: Cuda,
    /// Blocks of the graph itself, for each device that took part; tensors in `output` are among them.
    arenas: Vec<Arc<Arena>>,
    _retained: Vec<RetainedBlocks>,
    /// What the calls need beside memory of their devices.
    _held: Vec<Arc<dyn Send + Sync>>,
    /// Every device that took part: its kernels and the words that they report in are the graph's.
    devices: Vec<Cuda>,
    /// What its replays pass.
    gates: Gates,
    /// What may fail in a replay and tells of it itself.
    sources: Vec<Arc<dyn FailureSource>>,
}

impl<T: fmt::Debug> fmt::Debug for Captured<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Captured").field("output", &self.output).field("cuda", &self.cuda).finish_non_exhaustive()
    }
}

/// Keeps the blocks that were in use in an arena when it was made from changing hands.
#[derive(Debug)]
struct RetainedBlocks {
    arena: Arc<Arena>,
    id: u64,
}

impl RetainedBlocks {
    fn new(arena: &Arc<Arena>) -> Self {
        Self { arena: Arc::clone(arena), id: arena.retain_blocks() }
    }
}

impl Drop for RetainedBlocks {
    fn drop(&mut self) {
        self.arena.release_blocks(self.id);
    }
}

/// A device in a capture: until this is dropped its memory comes from an arena of the graph's.
struct CapturedStream {
    cuda: Cuda,
    /// The workspace.
    shared: Arc<Arena>,
    arena: Arc<Arena>,
}

impl CapturedStream {
    /// Enters the capture; what is in use in the workspace from here on is held.
    fn enter(cuda: &Cuda, kind: ArenaKind) -> Result<(Self, RetainedBlocks)> {
        if !cuda.inner.capture_state.begin() {
            return Err(Error::invalid(CALL, "device", "no capture under way", "one"));
        }
        let shared = cuda.inner.arena();
        // From here on, so that what the calls themselves free stays as it is too.
        let blocks = RetainedBlocks::new(&shared);
        let arena = shared.private(kind);
        cuda.inner.exchange_arena(Arc::clone(&arena));
        cuda.inner.capture_state.count();
        Ok((Self { cuda: cuda.clone(), shared, arena }, blocks))
    }
}

impl Drop for CapturedStream {
    fn drop(&mut self) {
        self.cuda.inner.exchange_arena(Arc::clone(&self.shared));
        // Of a capture that failed.
        drop(self.cuda.inner.capture_state.take_held());
        drop(self.cuda.inner.capture_state.take_sources());
        self.cuda.inner.capture_state.end();
    }
}

/// A capture under way. However it ends, the stream is out of it afterwards, and the devices have their memory again.
struct ActiveCapture {
    /// The first device's stream is the one that is captured.
    members: Vec<CapturedStream>,
    /// Begun on the stream and not ended.
    open: bool,
}

impl ActiveCapture {
    fn stream(&self) -> sys::CUstream {
        self.members[0].cuda.inner.stream.cu_stream()
    }

    fn run<T>(&mut self, calls: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.stream(), mode) }.map_err(driver(CALL, "begin capture"))?;
        self.open = true;
        let output = calls();
        let graph = self.end(output.is_err());
        // Why there is none, before what has become of it.
        let output = output?;
        Ok((graph?, output))
    }

    fn end(&mut self, failed: bool) -> Result<Graph> {
        self.open = false;
        let hooks = self.members.iter().flat_map(|member| member.cuda.inner.capture_state.hooks());
        let whole = hooks.map(|ending| ending(failed)).fold(Ok(()), Result::and);
        self.members.iter().for_each(|member| member.arena.end_capture());
        // SAFETY: capture was begun on this stream, and not ended.
        let graph = unsafe { result::stream::end_capture(self.stream()) };
        let graph = graph.map(Graph).map_err(driver(CALL, "end capture"));
        whole.and(graph)
    }
}

impl Drop for ActiveCapture {
    fn drop(&mut self) {
        if self.open {
            // The calls panicked.
            let _ = self.end(true);
        }
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

    /// Refuses a graph that leaves memory allocated, frees what it has not allocated, or copies between the GPU and the
    /// host, whose memory it does not hold.
    fn check_self_contained(&self) -> Result<()> {
        let ask = || driver(CALL, "list the graph's nodes");
        let mut count = 0;
        // SAFETY: the graph is alive; without room for nodes the driver gives their number.
        unsafe { sys::cuGraphGetNodes(self.0, std::ptr::null_mut(), &raw mut count) }.result().map_err(ask())?;
        let mut nodes: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
        // SAFETY: as above; there is room for `count` nodes.
        unsafe { sys::cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &raw mut count) }.result().map_err(ask())?;
        nodes.truncate(count);
        let mut left = 0_isize;
        for node in nodes {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            // SAFETY: the node is the graph's.
            unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result().map_err(ask())?;
            match kind {
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => left += 1,
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE => left -= 1,
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => check_copy(node)?,
                _ => {}
            }
        }
        if left != 0 {
            let expected = "calls that free all memory that they take, but for what they return";
            let found = "a tensor made in the capture that outlives it, or one from before it that was dropped in it";
            return Err(Error::invalid(CALL, "calls", expected, found));
        }
        Ok(())
    }
}

/// Refuses a copy from or to the host's memory.
fn check_copy(node: sys::CUgraphNode) -> Result<()> {
    let mut copy: std::mem::MaybeUninit<sys::CUDA_MEMCPY3D> = std::mem::MaybeUninit::zeroed();
    // SAFETY: the node is one of copies, of a graph that is alive.
    unsafe { sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()) }
        .result()
        .map_err(driver(CALL, "read a copy of the graph"))?;
    // SAFETY: the driver has written it.
    let copy = unsafe { copy.assume_init() };
    if [copy.srcMemoryType, copy.dstMemoryType].contains(&sys::CUmemorytype::CU_MEMORYTYPE_HOST) {
        let found = "a copy between the GPU and the host, which may be another thread's";
        return Err(Error::invalid(CALL, "calls", "calls on the GPU's memory alone", found));
    }
    Ok(())
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
        Captured::of(std::slice::from_ref(self), ArenaKind::BesideGraph, calls)
    }

    /// As [`capture`](Self::capture), of calls that the host framework enqueues too, on the stream that all of `devices`
    /// are on. Their memory comes from the graph's own, as the framework's does, and may go to the framework.
    ///
    /// # Errors
    /// As [`capture`](Self::capture); devices on several streams; memory that the calls took and did not free.
    #[cfg(feature = "candle")]
    pub(crate) fn capture_with_framework(devices: &[Self], calls: impl FnOnce() -> Result<()>) -> Result<Captured<()>> {
        Captured::of(devices, ArenaKind::InGraph, calls)
    }

    /// Whether what the host framework enqueues may be captured with this device's calls.
    #[cfg(feature = "candle")]
    pub(crate) fn captures_with_framework(&self) -> bool {
        self.inner.capture_state.is_under_way() && self.inner.arena().kind() == ArenaKind::InGraph
    }

    /// Number of the capture under way.
    pub(super) fn capture_number(&self) -> Option<u64> {
        self.inner.capture_state.number()
    }

    /// Has every capture call this before it ends.
    pub(super) fn add_capture_hook(&self, hook: &Arc<CaptureHook>) {
        self.inner.capture_state.add_hook(hook);
    }

    /// Has the graph under way hold this.
    #[cfg(feature = "nccl")]
    pub(crate) fn hold_in_graph(&self, held: Arc<dyn Send + Sync>) {
        match self.inner.capture_state.is_under_way() {
            true => self.inner.capture_state.hold(held),
            // Another's capture: nobody says when its graph ends.
            false => std::mem::forget(held),
        }
    }

    /// Has the graph under way, which holds it, ask this whether its replays have failed.
    #[cfg(feature = "nccl")]
    pub(crate) fn ask_in_replays(&self, source: Arc<dyn FailureSource>) {
        if self.inner.capture_state.is_under_way() {
            self.inner.capture_state.add_source(source);
        }
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
            true => Err(Error::not_capturable(call, operation)),
        }
    }
}

impl<T> Captured<T> {
    /// Captures what `calls` enqueue on the stream of all `devices`, of which there is one at least.
    fn of(devices: &[Cuda], kind: ArenaKind, calls: impl FnOnce() -> Result<T>) -> Result<Self> {
        let Some(cuda) = devices.first() else { return Err(Error::invalid(CALL, "devices", "one or more", "none")) };
        cuda.bind(CALL)?;
        let mut capture = ActiveCapture { members: Vec::new(), open: false };
        let (mut retained, mut arenas) = (Vec::new(), Vec::new());
        for device in devices {
            if !device.is_on(&cuda.inner.stream) {
                return Err(Error::invalid(CALL, "devices", "devices on one stream", "another stream's"));
            }
            if capture.members.iter().any(|member| Arc::ptr_eq(&member.cuda.inner, &device.inner)) {
                continue;
            }
            let (member, blocks) = CapturedStream::enter(device, kind)?;
            arenas.push(Arc::clone(&member.arena));
            capture.members.push(member);
            retained.push(blocks);
        }
        let (graph, output) = capture.run(calls)?;
        let states = || capture.members.iter().map(|member| &member.cuda.inner.capture_state);
        let gates = Gates::new(states().flat_map(CaptureState::take_gates));
        let held = states().flat_map(CaptureState::take_held).collect();
        let sources = states().flat_map(CaptureState::take_sources).collect();
        drop(capture);
        if kind == ArenaKind::InGraph {
            graph.check_self_contained()?;
        }
        let exec = graph.executable()?;
        let (cuda, devices) = (cuda.clone(), devices.to_vec());
        Ok(Self { exec, output, cuda, arenas, _retained: retained, _held: held, devices, gates, sources })
    }

    /// Enqueues the captured calls. Collectives among them are watched, all of a replay as one: one that takes longer
    /// than the communicator's timeout and one second ends the communicator.
    ///
    /// # Errors
    /// What has failed before, as [`check`](Self::check); a communicator of the calls that is no more; a driver's error;
    /// [`Error::Invalid`] where calls of a group were captured that has ended.
    pub fn replay(&mut self) -> Result<()> {
        const CALL: &str = "Captured::replay";
        self.check()?;
        let entered = self.gates.enter().ok_or_else(|| {
            Error::invalid(CALL, "graph", "the communicators of its collectives alive", "one dropped")
        })?;
        self.cuda.bind(CALL)?;
        entered.pass(&mut || {
            // SAFETY: the graph is executable, what it touches is held by `self`, and what its collectives go through by
            // the gates.
            unsafe { result::graph::launch(self.exec, self.cuda.inner.stream.cu_stream()) }
                .map_err(driver(CALL, "launch the graph"))
        })
    }

    /// Whether something that replays depend on has failed, a peer for instance: what they have computed since is worth
    /// nothing. Waits for nothing: to be asked once a replay's results are there.
    ///
    /// # Errors
    /// The first failure, as every wait of the [`Cuda`] returns it; [`Error::LatePeer`] where a replay has waited for a rank
    /// over NVLink in vain, from then on for as long as the graph lives.
    pub fn check(&self) -> Result<()> {
        self.devices.iter().try_for_each(|device| device.inner.failure_sources.check())?;
        self.sources.iter().find_map(|source| source.failure()).map_or(Ok(()), Err)
    }

    /// Result of the captured calls: tensors in it hold the results of the last replay.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Bytes that the graph has taken for itself, and all other memory of its device.
    pub fn memory(&self) -> super::Memory {
        self.arenas[0].memory()
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
