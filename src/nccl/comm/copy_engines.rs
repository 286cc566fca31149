//! Memory whose collectives are the copy engines': they need no SM, and so run beside kernels that take
//! all of them.
//!
//! NCCL gathers windows that way for communicators made with its policy `NCCL_CTA_POLICY_ZERO` (2.28), and writes into
//! peers' windows so for any (2.29; [`puts`](crate::nccl::comm::one_sided)). A window is registered by all ranks
//! together, and stays until the communicator ends. Whether that works is tried when a communicator is made
//! ([`probe`]), so that all ranks hear alike of one where it does not, before anything is under way.
//!
//! A rank that is lost meanwhile leaves the others' streams waiting for its flags in memory. They have their errors in
//! time, but no abort ends such a wait (NCCL 2.30.7): what belongs to those GPUs is left as it is until the process
//! ends ([`CommHandle::abort`]).

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use crate::comm::{SymmetricMemory, Tag};
use crate::cuda::{Cuda, DeviceMut, DeviceRef};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Shape, Tensor, TensorMut, TensorRef};

use crate::nccl::comm::one_sided::{BlockExchange, OneSided};
use crate::nccl::comm::symmetric::Registering;
use crate::nccl::ffi::comm_handle::CommHandle;
use crate::nccl::ffi::enqueue::CommStream;
use crate::nccl::ffi::windows::{EngineMemory, RegisteredWindow};
use crate::nccl::{NcclComm, NcclError, NcclWindow};

/// Runs steps that the ranks try together: `gather_errors` brings every rank's trouble with a step, in rank order,
/// empty where there is none. No rank goes on where one cannot, and all return the same rank's trouble.
pub(in crate::nccl) fn run_in_lockstep(
    rank: usize,
    steps: &mut [&mut dyn FnMut() -> Result<()>],
    mut gather_errors: impl FnMut(&str) -> Result<Vec<String>>,
) -> Result<()> {
    for step in steps {
        let trouble = step().err().map_or(String::new(), |error| error.to_string());
        let all = gather_errors(&trouble)?;
        if let Some((peer, reason)) = all.into_iter().enumerate().find(|(_, trouble)| !trouble.is_empty()) {
            return Err(NcclError::Engines { rank, peer, reason }.into());
        }
    }
    Ok(())
}

/// Bytes of a rank's trouble as it is told: the first of them.
const ERROR_BYTES: usize = 256;
/// Bytes of a block of the attempt.
const TRIAL_BYTES: usize = 16;

/// Calls of the attempt on a rank's GPU, and to all ranks over plain memory.
pub(in crate::nccl) trait ProbeDevice {
    /// Takes over memory of `ncclMemAlloc` on this GPU, of that many bytes.
    fn adopt_memory(&self, address: u64, bytes: usize);
    /// Takes over the window of the memory that it holds.
    fn adopt_window(&self, window: NcclWindow) -> Result<()>;
    /// Writes the start of the memory.
    fn write(&self, bytes: &[u8]) -> Result<()>;
    /// Reads the start of the memory, once the stream has passed.
    fn read(&self, bytes: usize) -> Result<Vec<u8>>;
    /// Brings every rank's trouble (collective).
    fn gather_errors(&self, trouble: &str) -> Result<Vec<String>>;
}

struct GpuProbe<'a> {
    comm_stream: &'a CommStream<'a>,
    cuda: &'a Cuda,
    memory: RefCell<Option<(Arc<EngineMemory>, usize)>>,
}

impl GpuProbe<'_> {
    /// The memory, of which that many bytes are asked for.
    fn memory(&self, bytes: usize) -> Result<Arc<EngineMemory>> {
        match &*self.memory.borrow() {
            Some((block, all)) if bytes <= *all => Ok(Arc::clone(block)),
            _ => Err(Error::invalid("NcclComm", "memory", format!("{bytes} bytes"), "less")),
        }
    }
}

impl ProbeDevice for GpuProbe<'_> {
    fn adopt_memory(&self, address: u64, bytes: usize) {
        let (library, cuda) = (self.comm_stream.comm_handle.library().clone(), self.cuda.clone());
        *self.memory.borrow_mut() = Some((Arc::new(EngineMemory { library, cuda, address }), bytes));
    }

    fn adopt_window(&self, window: NcclWindow) -> Result<()> {
        let block = self.memory(window.bytes())?;
        self.comm_stream.comm_handle.retain_window(RegisteredWindow { window, block, shared: false });
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        let block = self.memory(bytes.len())?;
        // SAFETY: the memory has as many bytes, and nothing else writes them.
        let mut to = unsafe { DeviceMut::from_raw(block.address, bytes.len()) };
        let to = TensorMut::new(Cuda::reborrow(&mut to), DType::U8, &[bytes.len()])?;
        self.cuda.upload(bytes, to)
    }

    fn read(&self, bytes: usize) -> Result<Vec<u8>> {
        let block = self.memory(bytes)?;
        // SAFETY: as in `write`; what the stream does before has written them.
        let from = unsafe { DeviceRef::from_raw(block.address, bytes) };
        self.cuda.download(TensorRef::new(from, DType::U8, &[bytes])?)
    }

    fn gather_errors(&self, trouble: &str) -> Result<Vec<String>> {
        gather_errors(self.comm_stream, self.cuda, trouble)
    }
}

/// Makes a first window and has both of a chain's collectives move it, as the communicator's first user. Its first
/// collectives over windows make NCCL's own windows too, and leave no flag there that those of a captured graph, which
/// all have the same number, could take for theirs.
pub(in crate::nccl) fn probe(comm_handle: &CommHandle, cuda: &Cuda) -> Result<()> {
    let comm_stream = &CommStream { comm_handle, stream: cuda.stream().cu_stream().cast() };
    probe_on(comm_stream, &GpuProbe { comm_stream, cuda, memory: RefCell::default() })
}

/// Tries copy engines. A rank's own work is a step of its own, before the collective that needs it: one that cannot
/// tells the others, which would wait for it there.
pub(in crate::nccl) fn probe_on(comm_stream: &CommStream<'_>, probe_device: &impl ProbeDevice) -> Result<()> {
    let comm_handle = comm_stream.comm_handle;
    let (library, rank, ranks) = (comm_handle.library(), comm_handle.rank, comm_handle.size);
    let part = ranks * TRIAL_BYTES;
    let (base, window, puts) = (Cell::new(0), Cell::new(None), Cell::new(None));
    let mut allocate = || {
        let address = Registering::of(library)?.allocate(2 * part)?;
        probe_device.adopt_memory(address, 2 * part);
        base.set(address);
        Ok(())
    };
    let mut register = || {
        let registering = Registering::of(library)?;
        let made = comm_handle.with(|_, comm| registering.register(comm, base.get(), 2 * part)).ok_or_else(ended)??;
        window.set(Some(made.raw()));
        probe_device.adopt_window(made)
    };
    let mut fill = || {
        puts.set(Some(OneSided::of(library)?));
        let own = |at: usize| if at / TRIAL_BYTES == rank { (at as u8).wrapping_add(1) } else { 0 };
        probe_device.write(&(0..part).map(own).collect::<Vec<u8>>())
    };
    // To all ranks' blocks, and from there to each rank a block of every other.
    let mut moves = || {
        let (from, Some(puts), Some(window)) = (base.get(), puts.get(), window.get()) else { return Err(ended()) };
        let (own, blocks) =
            (from + (rank * TRIAL_BYTES) as u64, BlockExchange { from, bytes: TRIAL_BYTES, window, offset: part });
        // SAFETY: all in the window, which is kept as long as the communicator; its halves have a block for each rank.
        let moved =
            unsafe { comm_stream.all_gather(own, from, TRIAL_BYTES).and_then(|()| puts.exchange(comm_stream, blocks)) };
        moved.map_err(|refused| refused.map_or_else(ended, Error::from))?;
        check_moved(rank, &probe_device.read(2 * part)?)
    };
    let steps: &mut [&mut dyn FnMut() -> Result<()>] = &mut [&mut allocate, &mut register, &mut fill, &mut moves];
    // One that is alone moves nothing.
    let steps = if ranks > 1 { steps } else { &mut steps[..2] };
    run_in_lockstep(rank, steps, |trouble| probe_device.gather_errors(trouble))
}

/// Block r of the first half is rank r's; the second has this rank's block of every other's first half, and room.
pub(in crate::nccl) fn check_moved(rank: usize, found: &[u8]) -> Result<()> {
    let (first, second) = found.split_at(found.len() / 2);
    let second = &second[..second.len().saturating_sub(TRIAL_BYTES)];
    let gathered = first.iter().enumerate().all(|(at, byte)| *byte == (at as u8).wrapping_add(1));
    let own = &first[rank * TRIAL_BYTES..(rank + 1) * TRIAL_BYTES];
    match gathered && second.chunks(TRIAL_BYTES).all(|block| block == own) {
        true => Ok(()),
        false => Err(Error::invalid("NcclComm", "window", "all ranks' blocks", format!("{found:?}"))),
    }
}

fn ended() -> Error {
    Error::invalid("NcclComm", "communicator", "one in use", "one that has ended")
}

/// Every rank's trouble, by a collective over plain memory.
fn gather_errors(comm_stream: &CommStream<'_>, cuda: &Cuda, trouble: &str) -> Result<Vec<String>> {
    let ranks = comm_stream.comm_handle.size;
    let mut own = trouble.as_bytes()[..trouble.len().min(ERROR_BYTES)].to_vec();
    own.resize(ERROR_BYTES, 0);
    let (mut send, mut recv) =
        (Tensor::empty(cuda, DType::U8, &[ERROR_BYTES])?, Tensor::empty(cuda, DType::U8, &[ranks, ERROR_BYTES])?);
    cuda.upload(&own, send.view_mut())?;
    let (from, to) = (send.view().data().address(), recv.view_mut().into_data().address());
    // SAFETY: both tensors have those bytes and live until the stream has been waited for.
    let gathered = unsafe { comm_stream.all_gather(from, to, ERROR_BYTES) };
    gathered.map_err(|refused| refused.map_or_else(ended, Error::from))?;
    let all = cuda.download(recv.view())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
    Ok(all.chunks_exact(ERROR_BYTES).map(text).collect())
}

impl NcclComm {
    /// Memory of all ranks that this communicator's collectives move by copy engines (collective).
    pub(in crate::nccl) fn window_memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Tensor<Cuda>> {
        let shape = Shape::new(dims);
        let bytes = self.check(tag, shape)?.count() * dtype.size();
        let window = self.allocate(tag, bytes)?;
        let (library, cuda, address) = (self.library().clone(), self.cuda.clone(), window.base());
        let block = Arc::new(EngineMemory { library, cuda, address });
        self.session.comm_handle.retain_window(RegisteredWindow { window, block: Arc::clone(&block), shared: false });
        // SAFETY: the memory has that many bytes and lives as long as the block; the tensor alone writes it, and peers
        // where collectives that are given it let them.
        let buffer = unsafe { self.cuda.external(address, bytes, block) };
        Tensor::from_buffer(buffer, dtype, dims)
    }
}
