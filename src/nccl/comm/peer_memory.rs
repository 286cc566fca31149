//! Memory that the kernels of all ranks reach, by plain loads and stores.

use std::sync::Arc;

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::{Communicator, SymmetricMemory, Tag};
use crate::compare::gather_numbers;
use crate::cuda::peers::HostWords;
use crate::cuda::{Cuda, DeviceMut};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

use crate::nccl::comm::symmetric::Registering;
use crate::nccl::ffi::sys::{Properties, UNDEFINED};
use crate::nccl::ffi::windows::{EngineMemory, RegisteredWindow};
use crate::nccl::{NcclComm, NcclWindow};

const CALL: &str = "peer_memory";

/// A window's memory on every rank, as this rank's GPU addresses it. The window stays until it is released, or the
/// communicator ends.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    /// Where each rank's begins; none where this GPU does not reach all.
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

    /// Bytes of this rank's memory, to be written before the others may write there.
    pub(crate) fn part(&mut self, offset: usize, bytes: usize) -> Result<DeviceMut<'_>> {
        crate::comm::Span { offset, bytes }.check(CALL, "part", self.bytes)?;
        // SAFETY: the memory has those bytes; whoever has a tensor there holds its lease, and asks for none.
        Ok(unsafe { DeviceMut::from_raw(self.own.address + offset as u64, bytes) })
    }

    /// Bytes of this rank's memory that kernels alone write, for between them.
    pub(crate) fn shared_part(&self, offset: usize, bytes: usize) -> Result<DeviceMut<'_>> {
        crate::comm::Span { offset, bytes }.check(CALL, "part", self.bytes)?;
        // SAFETY: the memory has those bytes; nobody has a tensor where words lie.
        Ok(unsafe { DeviceMut::from_raw(self.own.address + offset as u64, bytes) })
    }

    /// What a graph or a tensor holds of it.
    pub(crate) fn hold(&self) -> Arc<dyn Send + Sync> {
        Arc::clone(&self.own) as Arc<dyn Send + Sync>
    }

    /// Whether a tensor or a graph holds it; the communicator does in any case.
    pub(crate) fn is_held(&self) -> bool {
        Arc::strong_count(&self.own) > 2
    }
}

impl Properties {
    /// Whether kernels of all ranks reach the memory of all. A library that does not say how many sets of ranks do is
    /// asked for addresses instead, once there is memory.
    fn reach(&self, ranks: usize) -> Result<()> {
        let expected = "ranks whose GPUs reach each other's memory through NCCL's windows";
        match (self.device_api, self.load_store_teams) {
            (0, _) => Err(Error::invalid(CALL, "communicator", expected, "one without symmetric memory")),
            (_, UNDEFINED | 1) => Ok(()),
            (_, teams) => Err(Error::invalid(CALL, "communicator", expected, format!("{ranks} ranks in {teams} sets"))),
        }
    }
}

impl NcclComm {
    /// Whether the library has such memory, and can make it of these ranks.
    ///
    /// # Errors
    /// [`NcclError`](crate::nccl::NcclError): an older one; ranks of several hosts, or GPUs without symmetric memory.
    pub(crate) fn check_peer_memory(&self) -> Result<()> {
        const FUNCTION: &str = "ncclCommQueryProperties";
        let library = self.library();
        library.newer("ncclGetPeerDevicePointer", library.functions().get_peer_pointer)?;
        Registering::of(library).map(drop)?;
        let query = library.newer(FUNCTION, library.functions().query_properties)?;
        let properties = self.with_raw(|raw| {
            let mut properties = Properties::of(library.version_code());
            // SAFETY: the communicator lives during the call; the result is a local of the size that it names.
            let status = unsafe { query(raw.comm, &raw mut properties) };
            library.check(FUNCTION, raw.comm, status)?;
            Ok(properties)
        })?;
        properties.reach(self.size())
    }

    /// What ends the waits of kernels before peers' memory is taken from under them.
    pub(crate) fn stop_kernels_by(&self, words: &Arc<HostWords>) {
        self.session.comm_handle.stop_by(words);
    }

    /// Memory of all ranks, of zeros (collective), and whether this GPU reaches all of it: the ranks have yet to agree on
    /// that, and to pass a collective before they write there. Memory that an earlier group has left on all ranks is used
    /// again.
    ///
    /// # Errors
    /// As [`SymmetricMemory::allocate`].
    pub(crate) fn peer_memory_found(&mut self, tag: Tag, bytes: usize) -> Result<(PeerMemory, Result<()>)> {
        let cuda = self.cuda.clone();
        let free = self.session.comm_handle.free_windows(bytes);
        // Behind this collective nothing that the ranks' streams were given before runs any more.
        let free = gather_numbers(&cuda, self, tag, &[free])?.into_iter().fold(u64::MAX, |all, rank| all & rank);
        let left = match free {
            0 => None,
            free => self.session.comm_handle.window(free.trailing_zeros() as usize),
        };
        let (window, own) = match left {
            Some(left) => {
                // In place of the meeting that a new one takes.
                self.barrier(tag)?;
                left
            }
            None => {
                let window = self.allocate(tag, bytes)?;
                let again = NcclWindow::new(window.base(), window.bytes(), window.raw());
                let own = EngineMemory { library: self.library().clone(), cuda: cuda.clone(), address: window.base() };
                let own = Arc::new(own);
                let kept = RegisteredWindow { window, block: Arc::clone(&own), shared: true };
                self.session.comm_handle.retain_window(kept);
                (again, own)
            }
        };
        let reached = |peer| {
            let missing = || Error::invalid(CALL, "peer", "one whose memory this GPU reaches", format!("rank {peer}"));
            self.address(&window, peer)?.ok_or_else(missing)
        };
        let addresses = (0..self.size()).map(reached).collect::<Result<Vec<u64>>>();
        // SAFETY: the memory has those bytes, and no rank writes it yet.
        let zeroed = cuda.zero(unsafe { DeviceMut::from_raw(own.address, bytes) });
        let (addresses, found) = match zeroed.and(addresses) {
            Ok(addresses) => (addresses, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        Ok((PeerMemory { addresses, bytes, own, cuda }, found))
    }

    /// Memory of all ranks that each reaches, of zeros (collective).
    ///
    /// # Errors
    /// As [`SymmetricMemory::allocate`]; a peer whose memory this GPU does not reach, which the others are told.
    pub(crate) fn peer_memory(&mut self, tag: Tag, bytes: usize) -> Result<PeerMemory> {
        let (memory, found) = self.peer_memory_found(tag, bytes)?;
        self.check(tag, found)?;
        self.barrier(tag)?;
        Ok(memory)
    }

    /// Gives memory back (collective): behind all that the ranks' streams have been given, and where nothing of it is held
    /// any more, as the ranks have agreed.
    ///
    /// # Errors
    /// A collective's own.
    pub(crate) fn release_peer_memory(&mut self, tag: Tag, memory: PeerMemory) -> Result<()> {
        const CALL: &str = "release";
        let library = self.library().clone();
        let deregister = library.newer("ncclCommWindowDeregister", library.functions().window_deregister)?;
        self.barrier(tag)?;
        let Some(kept) = self.session.comm_handle.take_window(memory.own.address) else { return Ok(()) };
        let call =
            CollectiveCall { operation: CALL, tag, dtype: DType::U8, detail: Detail::Plain, bytes: memory.bytes };
        let released = self.together(call, |raw| {
            // SAFETY: the window is this communicator's and nobody uses it any more.
            let status = unsafe { deregister(raw.comm, kept.window.raw()) };
            Ok(library.check("ncclCommWindowDeregister", raw.comm, status)?)
        });
        if released.is_err() {
            // Still a window, and peers may reach it: it stays as those of a communicator that has failed do.
            self.session.comm_handle.retain_window(kept);
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks of several hosts and machines without symmetric memory are refused before there is any memory.
    #[test]
    fn ranks_that_do_not_reach_each_other_are_refused() {
        let reach = |device_api, load_store_teams| {
            let mut properties = Properties::of(23007);
            (properties.device_api, properties.load_store_teams) = (device_api, load_store_teams);
            properties.reach(16).map_err(|error| error.to_string())
        };
        assert_eq!([reach(1, 1), reach(1, UNDEFINED)], [Ok(()), Ok(())]);
        assert!(reach(1, 2).is_err_and(|text| text.contains("16 ranks in 2 sets")));
        assert!(reach(0, 1).is_err_and(|text| text.contains("without symmetric memory")));
    }
}
