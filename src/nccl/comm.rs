//! One rank's communicator between GPUs.

use std::sync::Arc;
use std::time::Duration;

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::ranks::{Bootstrap, UniqueId};

use super::link::{Joining, Link, Place};
use super::sys::{CommPtr, Functions, StreamPtr};
use super::{NcclError, NcclLibrary};

/// A rank's communicator between GPUs, on the stream of its [`Cuda`].
#[derive(Debug)]
pub struct NcclComm {
    link: Arc<Link>,
    cuda: Cuda,
    timeout: Duration,
}

/// What other libraries that build on NCCL need of a communicator.
#[derive(Debug, Clone, Copy)]
pub struct Raw<'a> {
    /// NCCL's functions.
    pub functions: &'a Functions,
    /// The communicator.
    pub comm: CommPtr,
    /// The stream of all its work.
    pub stream: StreamPtr,
}

/// A communicator that is shared with what is built on it: freed with its last user.
#[derive(Debug, Clone)]
#[cfg(feature = "nccl-ep")]
pub(crate) struct Shared(Arc<Link>);

#[cfg(feature = "nccl-ep")]
impl Shared {
    /// Ranks.
    pub(crate) fn size(&self) -> usize {
        self.0.size
    }

    /// Runs calls while nobody frees the communicator. `None`: it has been freed.
    pub(crate) fn with<T>(&self, calls: impl FnOnce(CommPtr) -> T) -> Option<T> {
        self.0.with(|_, comm| calls(comm))
    }
}

fn start(library: &NcclLibrary, id: UniqueId, place: Place, cuda: &Cuda) -> Result<Joining> {
    let cuda = cuda.clone();
    Link::start(library, id, place, move || cuda.bind("NcclComm::join"))
}

impl NcclComm {
    /// Communicators of ranks that are threads of this process, one a GPU, in rank order, to be moved to one thread
    /// each. Every collective ends within `timeout`.
    ///
    /// # Errors
    /// [`NcclError`].
    pub fn threads(library: &NcclLibrary, gpus: &[Cuda], timeout: Duration) -> Result<Vec<Self>> {
        let id = library.unique_id()?;
        let begin = |(rank, cuda)| start(library, id, Place { rank, size: gpus.len() }, cuda);
        let joining = gpus.iter().enumerate().map(begin).collect::<Result<Vec<_>>>()?;
        let made = joining.into_iter().zip(gpus);
        made.map(|(j, cuda)| Ok(Self { link: Arc::new(j.finish(timeout)?), cuda: cuda.clone(), timeout })).collect()
    }

    /// Joins the communicator of a job's ranks, on this GPU. The id travels through the bootstrap.
    ///
    /// # Errors
    /// [`NcclError`]; [`RankError`](crate::ranks::RankError) where the ranks do not find each other.
    pub fn join(library: &NcclLibrary, job: &Bootstrap, cuda: &Cuda) -> Result<Self> {
        let id = job.exchange(|| library.unique_id())?;
        Self::from_id(library, (id, job.rank, job.world), cuda, job.timeout)
    }

    /// Joins a communicator whose id has reached every rank by other ways: `(id, rank, ranks)`.
    ///
    /// # Errors
    /// [`NcclError`].
    pub fn from_id(
        library: &NcclLibrary,
        (id, rank, size): (UniqueId, usize, usize),
        cuda: &Cuda,
        timeout: Duration,
    ) -> Result<Self> {
        let joining = start(library, id, Place { rank, size }, cuda)?;
        Ok(Self { link: Arc::new(joining.finish(timeout)?), cuda: cuda.clone(), timeout })
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The library.
    pub fn library(&self) -> &NcclLibrary {
        self.link.library()
    }

    /// Within which every collective ends.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Runs calls of NCCL, or of a library that takes its communicators, while nobody frees the communicator. Not
    /// watched: for what ends without the peers.
    ///
    /// # Errors
    /// What `calls` returns; the failure that ended the communicator.
    pub fn with_raw<T>(&self, calls: impl FnOnce(Raw<'_>) -> Result<T>) -> Result<T> {
        self.cuda.bind("NcclComm::with_raw")?;
        let stream: StreamPtr = self.cuda.stream().raw().cu_stream().cast();
        match self.link.with(|functions, comm| calls(Raw { functions, comm, stream })) {
            Some(result) => result,
            None => Err(self.ended()),
        }
    }

    /// The communicator, for what is built on it.
    #[cfg(feature = "nccl-ep")]
    pub(crate) fn shared(&self) -> Shared {
        Shared(Arc::clone(&self.link))
    }

    fn ended(&self) -> Error {
        match self.link.failure() {
            Some(failure) => failure.into(),
            None => NcclError::Missing { function: "a communicator", found: self.library().version() }.into(),
        }
    }
}
