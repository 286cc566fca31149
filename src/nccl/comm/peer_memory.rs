//! Memory that the kernels of all ranks reach, by plain loads and stores.

use std::sync::Arc;

use crate::comm::{Communicator, SymmetricMemory, Tag};
use crate::cuda::{Cuda, DeviceMut};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

use crate::nccl::NcclComm;
use crate::nccl::comm::symmetric::Registering;
use crate::nccl::ffi::windows::{EngineMemory, RegisteredWindow};

const CALL: &str = "peer_memory";

/// A window's memory on every rank, as this rank's GPU addresses it. The window stays until the communicator ends.
#[derive(Debug, Clone)]
pub(crate) struct PeerMemory {
    /// Where each rank's begins.
    addresses: Vec<u64>,
    /// Bytes of each.
    bytes: usize,
    own: Arc<EngineMemory>,
    cuda: Cuda,
}

impl PeerMemory {
    /// Where each rank's memory begins.
    pub(crate) fn addresses(&self) -> &[u64] {
        &self.addresses
    }

    /// Part of this rank's memory as a tensor, which `lease` counts.
    ///
    /// # Safety
    /// Until the lease ends, this rank's tensor alone is written there, and by peers only in calls that this rank makes
    /// on its stream too.
    pub(crate) unsafe fn tensor(
        &self,
        offset: usize,
        dtype: DType,
        dims: &[usize],
        lease: Arc<dyn Send + Sync>,
    ) -> Result<Tensor<Cuda>> {
        let bytes = dims.iter().product::<usize>() * dtype.size();
        crate::comm::Span { offset, bytes }.check(CALL, "tensor", self.bytes)?;
        let address = self.own.address + offset as u64;
        // SAFETY: the memory has those bytes, and the owner keeps it; the rest is the caller's promise.
        let buffer = unsafe { self.cuda.external(address, bytes, Arc::new((Arc::clone(&self.own), lease))) };
        Tensor::from_buffer(buffer, dtype, dims)
    }
}

impl NcclComm {
    /// Whether the library has such memory.
    ///
    /// # Errors
    /// [`NcclError`](crate::nccl::NcclError): an older one.
    pub(crate) fn check_peer_memory(&self) -> Result<()> {
        let library = self.library();
        library.newer("ncclGetPeerDevicePointer", library.functions().get_peer_pointer)?;
        Registering::of(library).map(drop)
    }

    /// Memory of all ranks that each reaches, of zeros (collective).
    ///
    /// # Errors
    /// As [`SymmetricMemory::allocate`]; a peer whose memory this GPU does not reach, which the others are told.
    pub(crate) fn peer_memory(&mut self, tag: Tag, bytes: usize) -> Result<PeerMemory> {
        let window = self.allocate(tag, bytes)?;
        let (library, cuda, address) = (self.library().clone(), self.cuda.clone(), window.base());
        let reached = |peer| {
            let missing = || Error::invalid(CALL, "peer", "one whose memory this GPU reaches", format!("rank {peer}"));
            self.address(&window, peer)?.ok_or_else(missing)
        };
        let addresses = (0..self.size()).map(reached).collect::<Result<Vec<u64>>>();
        let own = Arc::new(EngineMemory { library, cuda: cuda.clone(), address });
        self.session.comm_handle.retain_window(RegisteredWindow { window, block: Arc::clone(&own) });
        // SAFETY: the memory has those bytes, and no rank writes it before all have passed the barrier.
        let zeroed = cuda.zero(unsafe { DeviceMut::from_raw(address, bytes) });
        let addresses = self.check(tag, zeroed.and(addresses))?;
        self.barrier(tag)?;
        Ok(PeerMemory { addresses, bytes, own, cuda })
    }
}
