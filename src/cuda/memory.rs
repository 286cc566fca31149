//! Memory of a GPU: blocks that are asked of the driver once and then change hands in the order of one stream.
//!
//! A freed block may be written again by whatever is enqueued next, since everything runs on the same stream; so a
//! step whose sizes were seen before asks the driver for nothing. All layers on a [`Cuda`](super::Cuda) share these
//! blocks: together they are the workspace. A captured graph has blocks of its own ([`Arena::private`]), and keeps
//! those that were in use when it was captured from changing hands ([`Arena::hold`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use crate::error::Result;

use super::driver::driver;
use super::failure::StuckFlag;
use super::heuristics::{AHEAD_BLOCKS, AHEAD_BYTES, BLOCK_BYTES, BLOCK_SLACK};
use super::page_locked::PageLockedBlock;

/// Memory that a [`Cuda`](super::Cuda) has taken, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Taken from the driver: the size of the workspace.
    pub reserved: usize,
    /// In tensors that are alive.
    pub in_use: usize,
    /// Most that was ever in tensors, since [`Cuda::reset_peak`](super::Cuda::reset_peak).
    pub peak: usize,
    /// Requests to the driver so far.
    pub allocations: usize,
    /// Of the host, page-locked ([`ShardDevice::page_locked`](crate::etp::ShardDevice::page_locked)): in tensors that are
    /// alive. In none of the others.
    pub page_locked: usize,
}

/// The driver's pool, and the count of what was taken from it.
struct Pool {
    handle: sys::CUmemoryPool,
    stream: Arc<CudaStream>,
    /// Where blocks for a graph are asked for: a request on the stream that is being captured would become part of it.
    side: Arc<CudaStream>,
    context: Arc<CudaContext>,
    memory: Mutex<Memory>,
    /// Some of its memory is the host framework's now.
    given_away: AtomicBool,
    stuck: StuckFlag,
}

// SAFETY: the pool is a handle that the driver lets any thread use; the context is bound before each use.
unsafe impl Send for Pool {}
// SAFETY: as above; counts are behind a lock.
unsafe impl Sync for Pool {}

impl Drop for Pool {
    fn drop(&mut self) {
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if !self.stuck.is() && self.context.bind_to_thread().is_ok() {
            // SAFETY: every arena, and so every block, holds an `Arc` of this: all have been freed on the stream, but
            // for those that were given away.
            unsafe {
                let _ = result::stream::synchronize(self.stream.cu_stream());
                if self.given_away.load(Ordering::Relaxed) {
                    // The driver may be told to destroy it before the last of its memory is freed, and then releases it
                    // behind the back of a `cuCtxSynchronize` on another thread, which crashes (driver 580). So it
                    // stays, a handle without memory: what is freed from here on goes back to the system at the next
                    // wait.
                    let _ = set_release_threshold(self.handle, 0);
                    let _ = result::mem_pool::trim_to(self.handle, 0);
                } else {
                    let _ = result::mem_pool::destroy(self.handle);
                }
            }
        }
    }
}

/// Sets how many free bytes a pool keeps when a stream is waited for.
///
/// # Safety
/// The pool is alive.
unsafe fn set_release_threshold(pool: sys::CUmemoryPool, mut bytes: u64) -> std::result::Result<(), DriverError> {
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the attribute is a u64, which `bytes` is; the caller vouches for the pool.
    unsafe { result::mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast()) }
}

/// Where a block lies, and which hand-out of its arena it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryBlock {
    pub(super) ptr: CUdeviceptr,
    size: usize,
    serial: u64,
}

/// Whose an arena's blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArenaKind {
    /// The workspace's.
    Workspace,
    /// A graph's, which lie beside it: it uses them in every replay.
    BesideGraph,
    /// A graph's, which it allocates and frees itself, as it does what the host framework takes in a capture: blocks
    /// may go from one to the other.
    #[cfg_attr(not(feature = "candle"), allow(dead_code, reason = "candle alone captures with us"))]
    InGraph,
}

/// Blocks that change hands among the tensors of one stream.
pub(super) struct Arena {
    pool: Arc<Pool>,
    kind: ArenaKind,
    state: Mutex<ArenaState>,
}

#[derive(Default)]
struct ArenaState {
    free: BTreeSet<(usize, CUdeviceptr)>,
    /// Freed while a graph that may touch them was alive.
    limbo: Vec<MemoryBlock>,
    /// For each graph alive, the first serial number that it does not know.
    retained: BTreeMap<u64, u64>,
    next: u64,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.counts().fmt(f)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    fn counts(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    fn take(&self, size: usize, kind: ArenaKind) -> std::result::Result<CUdeviceptr, DriverError> {
        let beside = kind == ArenaKind::BesideGraph;
        let stream = if beside { self.side.cu_stream() } else { self.stream.cu_stream() };
        // SAFETY: pool and streams are alive.
        let ptr = unsafe { result::mem_pool::alloc_async(self.handle, size, stream) }?;
        if beside {
            // SAFETY: as above. What runs on the other stream may use the block from here on.
            unsafe { result::stream::synchronize(stream) }?;
        }
        let mut memory = self.counts();
        memory.reserved += size;
        memory.allocations += 1;
        Ok(ptr)
    }

    /// Highest marks of what the driver has had reserved for this pool, the device's own and graphs, added up.
    fn highest_reserved(&self) -> std::result::Result<u64, DriverError> {
        let device = self.context.cu_device();
        let mark = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
        let graphs = sys::CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
        let (mut own, mut shared, mut of_graphs) = (0u64, 0u64, 0u64);
        // SAFETY: both pools and the device are alive, and each attribute is a u64.
        unsafe {
            let default = result::device::get_default_mem_pool(device)?;
            result::mem_pool::get_attribute(self.handle, mark, (&raw mut own).cast())?;
            result::mem_pool::get_attribute(default, mark, (&raw mut shared).cast())?;
            sys::cuDeviceGetGraphMemAttribute(device, graphs, (&raw mut of_graphs).cast()).result()?;
        }
        Ok(own + shared + of_graphs)
    }

    fn give_back(&self, blocks: impl Iterator<Item = (usize, CUdeviceptr)>) {
        // Also called from `drop`: a context that is gone has freed everything itself.
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for (size, ptr) in blocks {
            // SAFETY: the block came from the pool and is freed once; what uses it is earlier on the stream.
            let _ = unsafe { result::free_async(ptr, self.stream.cu_stream()) };
            self.counts().reserved -= size;
        }
    }
}

impl Arena {
    /// An arena over a pool of its own: one that keeps freed memory, which the context's default pool does not, and
    /// whose setting is the host framework's.
    pub(super) fn new(stream: &Arc<CudaStream>, stuck: &StuckFlag) -> Result<Arc<Self>> {
        const CALL: &str = "Cuda::on";
        let context = Arc::clone(stream.context());
        let side = context.new_stream().map_err(driver(CALL, "create a stream"))?;
        let handle = create_pool(&context)?;
        let (stream, stuck) = (Arc::clone(stream), stuck.clone());
        let pool = Pool { handle, stream, side, context, memory: Mutex::default(), given_away: false.into(), stuck };
        Ok(Arc::new(Self { pool: Arc::new(pool), kind: ArenaKind::Workspace, state: Mutex::default() }))
    }

    /// An arena for one graph, over the same pool.
    pub(super) fn private(&self, kind: ArenaKind) -> Arc<Self> {
        Arc::new(Self { pool: Arc::clone(&self.pool), kind, state: Mutex::default() })
    }

    #[cfg(feature = "candle")]
    pub(super) fn kind(&self) -> ArenaKind {
        self.kind
    }

    /// As the pool's.
    pub(super) fn highest_reserved(&self) -> std::result::Result<u64, DriverError> {
        self.pool.highest_reserved()
    }

    /// Before a capture ends: has the graph free what it allocated for this arena.
    pub(super) fn end_capture(&self) {
        if self.kind == ArenaKind::InGraph {
            self.pool.give_back(std::mem::take(&mut lock(&self.state).free).into_iter());
        }
    }

    pub(super) fn memory(&self) -> Memory {
        *self.pool.counts()
    }

    pub(super) fn reset_peak(&self) {
        let mut memory = self.pool.counts();
        memory.peak = memory.in_use;
    }

    /// Gives free blocks back to the driver; not those of a graph, which uses them in every replay.
    pub(super) fn trim(&self) {
        self.give_back(&mut lock(&self.state));
    }

    fn give_back(&self, state: &mut ArenaState) {
        if self.kind == ArenaKind::Workspace {
            self.pool.give_back(std::mem::take(&mut state.free).into_iter());
        }
    }

    /// Takes more blocks of a small size of a graph's own, which is then likely to ask for as many: each is a node of the
    /// graph, and two kernels with one between them do not overlap.
    fn take_ahead(&self, state: &mut ArenaState, size: usize) {
        if self.kind != ArenaKind::InGraph || size > AHEAD_BYTES {
            return;
        }
        let blocks = (0..AHEAD_BLOCKS).map_while(|_| self.pool.take(size, self.kind).ok());
        state.free.extend(blocks.map(|ptr| (size, ptr)));
    }

    pub(super) fn alloc(&self, call: &'static str, bytes: usize) -> Result<MemoryBlock> {
        let size = bytes.max(1).checked_next_multiple_of(BLOCK_BYTES).unwrap_or(bytes);
        let mut state = lock(&self.state);
        let most = size.saturating_add(size / BLOCK_SLACK);
        let found = state.free.range((size, 0)..=(most, CUdeviceptr::MAX)).next().copied();
        let (size, ptr) = match found {
            Some(block) => {
                state.free.remove(&block);
                block
            }
            None => match self.pool.take(size, self.kind) {
                Ok(ptr) => {
                    self.take_ahead(&mut state, size);
                    (size, ptr)
                }
                Err(_) => {
                    // Free blocks of other sizes may hold the memory that is missing.
                    self.give_back(&mut state);
                    let again = self.pool.take(size, self.kind);
                    (size, again.map_err(driver(call, &format!("allocate {bytes} bytes")))?)
                }
            },
        };
        state.next += 1;
        let mut memory = self.pool.counts();
        memory.in_use += size;
        memory.peak = memory.peak.max(memory.in_use);
        Ok(MemoryBlock { ptr, size, serial: state.next })
    }

    #[cfg(feature = "candle")]
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.pool.stream
    }

    /// Leaves a block to somebody else, who gives it back to the driver.
    #[cfg(feature = "candle")]
    pub(super) fn give_away(&self, block: &mut MemoryBlock) -> CUdeviceptr {
        self.pool.given_away.store(true, Ordering::Relaxed);
        let mut memory = self.pool.counts();
        memory.in_use -= block.size;
        memory.reserved -= std::mem::take(&mut block.size);
        block.ptr
    }

    pub(super) fn free(&self, block: MemoryBlock) {
        if block.size == 0 {
            return; // given away
        }
        let mut state = lock(&self.state);
        self.pool.counts().in_use -= block.size;
        match state.retained.values().any(|end| block.serial < *end) {
            true => state.limbo.push(block),
            false => drop(state.free.insert((block.size, block.ptr))),
        }
    }

    /// Keeps every block that is in use now from being written by anything else, until
    /// [`release_blocks`](Self::release_blocks).
    pub(super) fn retain_blocks(&self) -> u64 {
        let mut state = lock(&self.state);
        state.next += 1;
        let id = state.next;
        state.retained.insert(id, id);
        id
    }

    pub(super) fn release_blocks(&self, id: u64) {
        let mut state = lock(&self.state);
        state.retained.remove(&id);
        let ArenaState { limbo, retained, free, .. } = &mut *state;
        limbo.retain(|block| {
            let is_retained = retained.values().any(|end| block.serial < *end);
            if !is_retained {
                free.insert((block.size, block.ptr));
            }
            is_retained
        });
    }
}

impl Arena {
    /// Page-locked memory of the host, zeros.
    ///
    /// # Errors
    /// `Error::OutOfMemory`: the host has no memory, or may lock no more; a driver's.
    pub(super) fn alloc_page_locked(&self, call: &'static str, bytes: usize) -> Result<PageLockedBlock> {
        let block = PageLockedBlock::new(call, bytes)?;
        self.pool.counts().page_locked += bytes;
        Ok(block)
    }

    /// Gives it back to the host behind all that the GPU has been given, on whatever stream: work on another stream than
    /// this arena's may read it. Where that work may never end, it stays.
    pub(super) fn free_page_locked(&self, block: &PageLockedBlock) {
        self.pool.counts().page_locked -= block.bytes();
        // Nothing can be reported from here; a context that is gone has freed everything itself.
        if self.pool.stuck.is() || self.pool.context.bind_to_thread().is_err() {
            return;
        }
        // A capture would end with this wait, and its graph may read the memory later.
        let free = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive.
        let status = unsafe { result::stream::is_capturing(self.pool.stream.cu_stream()) };
        if status.is_ok_and(|status| status == free) && result::ctx::synchronize().is_ok() {
            // SAFETY: the block is freed once, as its buffer is dropped, and nothing reads or writes it any more.
            unsafe { block.free() };
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let state = std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        let limbo = state.limbo.into_iter().map(|b| (b.size, b.ptr));
        let blocks = state.free.into_iter().chain(limbo);
        if self.kind == ArenaKind::InGraph {
            // The capture failed, and these were never allocated.
            self.pool.counts().reserved -= blocks.map(|(size, _)| size).sum::<usize>();
        } else if !self.pool.stuck.is() {
            // A stuck stream takes only so much that it does not come to, and then has the caller wait.
            self.pool.give_back(blocks);
        }
    }
}

fn create_pool(context: &CudaContext) -> Result<sys::CUmemoryPool> {
    const CALL: &str = "Cuda::on";
    // SAFETY: a plain C struct of integers, enums with a zero value and a pointer; its reserved bytes must be zero.
    let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    let location = [sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32, context.cu_device()];
    // SAFETY: a location is the type and then the device's number, two ints, in every version of CUDA; newer bindings
    // wrap the second in a union, which is why it is not set by name.
    unsafe { (&raw mut props.location).cast::<[i32; 2]>().write(location) };
    // SAFETY: `props` is initialized as the driver documents it.
    let pool = unsafe { result::mem_pool::create(&props) }.map_err(driver(CALL, "create a memory pool"))?;
    // SAFETY: the pool was just made.
    let configured = unsafe { set_release_threshold(pool, u64::MAX) };
    if configured.is_err() {
        // SAFETY: as above; nothing is in it.
        let _ = unsafe { result::mem_pool::destroy(pool) };
    }
    configured.map_err(driver(CALL, "configure the memory pool"))?;
    Ok(pool)
}
