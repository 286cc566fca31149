//! What kernels that wait for other GPUs share with the host: words that end their waits and tell of those given up; and
//! whom this GPU reaches.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, result, sys};

use crate::error::{Error, Result};

use super::device::Cuda;
use super::driver::driver;
use super::failure::FailureSource;
use super::page_locked::PageLockedBlock;

/// A GPU's identity, the same in every process.
pub(crate) type GpuId = [u64; 2];

/// Words of the host's, of eight bytes, that it shares with the kernels of a group which wait for peers.
const WORDS: usize = 2;
/// Once it is raised they wait no more: what they write to may be taken away from under them.
const STOP: usize = 0;
/// The first fault that they have raised (`fault_word` of `kernels/common/common.cuh`); 0: none.
const FAULT: usize = 1;
/// Who asks for a fault: replays, for which nobody else does.
const CALL: &str = "Captured::replay";

/// Page-locked words by which the host ends the waits of kernels for peers, and learns without a wait of its own that they
/// have given up. They are the group's: once a fault is there it stays, as the group's calls move nothing any more.
#[derive(Debug)]
pub(crate) struct HostWords {
    /// There until it is dropped, with the context that it ends with, which may be another GPU's.
    block: Option<(PageLockedBlock, Arc<CudaContext>)>,
    cuda: Cuda,
}

impl HostWords {
    /// # Errors
    /// No page-locked memory.
    pub(crate) fn new(cuda: &Cuda, call: &'static str) -> Result<Self> {
        cuda.bind(call)?;
        let (block, context) = match free_block() {
            Some(free) => free,
            None => (PageLockedBlock::new(call, WORDS * 8)?, Arc::clone(&cuda.inner.context)),
        };
        (0..WORDS).for_each(|i| block.word(i).store(0, Ordering::SeqCst));
        Ok(Self { block: Some((block, context)), cuda: cuda.clone() })
    }

    /// Has every wait end. Calls nothing of the driver's, which may be waiting itself.
    pub(crate) fn stop(&self) {
        self.block.iter().for_each(|(block, _)| block.word(STOP).store(1, Ordering::SeqCst));
    }

    /// Where kernels find them.
    pub(crate) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |(block, _)| block.address())
    }
}

impl FailureSource for HostWords {
    fn failure(&self) -> Option<Error> {
        let fault = self.block.as_ref()?.0.word(FAULT).load(Ordering::SeqCst);
        if fault == 0 { None } else { self.cuda.error_of(CALL, fault) }
    }
}

/// Words that no kernel looks at any more, for the next: to free page-locked memory is to wait for every GPU of the process,
/// one of which may be waiting for this thread's rank. The driver frees them with the context that they were made in.
static FREE: Mutex<Vec<(PageLockedBlock, Weak<CudaContext>)>> = Mutex::new(Vec::new());

/// One of them whose context is still there, which stays as long as it is used.
fn free_block() -> Option<(PageLockedBlock, Arc<CudaContext>)> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    while let Some((block, context)) = free.pop() {
        if let Some(context) = context.upgrade() {
            return Some((block, context));
        }
    }
    None
}

impl Drop for HostWords {
    fn drop(&mut self) {
        // Those that some kernel may still look at stay as they are.
        if self.cuda.finish_all("HostWords").is_ok()
            && let Some((block, context)) = self.block.take()
        {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push((block, Arc::downgrade(&context)));
        }
    }
}

impl Cuda {
    /// The GPU's identity.
    ///
    /// # Errors
    /// A driver's error.
    pub(crate) fn gpu_id(&self, call: &'static str) -> Result<GpuId> {
        self.bind(call)?;
        let device = self.inner.context.cu_device();
        id_of(call, device)
    }

    /// Whether this GPU reaches another's memory over NVLink, which PCIe's ways there lack atomic operations of; `None`: this
    /// process does not see the other.
    ///
    /// # Errors
    /// A driver's error.
    pub(crate) fn reaches(&self, call: &'static str, peer: GpuId) -> Result<Option<bool>> {
        let own = self.inner.context.cu_device();
        let count = result::device::get_count().map_err(driver(call, "count the GPUs"))?;
        for ordinal in 0..count {
            let other = result::device::get(ordinal).map_err(driver(call, "ask for a GPU"))?;
            if id_of(call, other)? != peer {
                continue;
            }
            if other == own {
                return Ok(Some(true));
            }
            let mut reached = 0;
            // SAFETY: both are devices of the driver's; the result is a local.
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut reached, own, other) }
                .result()
                .map_err(driver(call, "ask whether a GPU reaches another"))?;
            let (mut atomic, asked) = (0, sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
            // SAFETY: as above.
            unsafe { sys::cuDeviceGetP2PAttribute(&raw mut atomic, asked, own, other) }
                .result()
                .map_err(driver(call, "ask how a GPU reaches another"))?;
            return Ok(Some(reached != 0 && atomic != 0));
        }
        Ok(None)
    }
}

fn id_of(call: &'static str, device: sys::CUdevice) -> Result<GpuId> {
    let id = result::device::get_uuid(device).map_err(driver(call, "ask for a GPU's identity"))?;
    let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| id.bytes[at + i] as u8));
    Ok([half(0), half(8)])
}
