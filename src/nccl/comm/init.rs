//! How communicators come about.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use crate::comm::{Communicator, Tag};
use crate::compare::{ComparedField, compare_fields};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::kernels::Kernels;
use crate::ranks::{Axis, Bootstrap, Mesh, UniqueId};
use crate::tensor::Tensor;

use crate::nccl::comm::copy_engines::probe;
use crate::nccl::comm::one_sided::OneSided;
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::control::plane::{ControlPlane, ProcessControl, ThreadRendezvous};
use crate::nccl::control::socket::ControlSocket;
use crate::nccl::ffi::comm_handle::{CommHandle, PendingJoin, RankPlace};
use crate::nccl::ffi::enqueue::{CommStream, EnqueueError, PeerBuffer};
use crate::nccl::ffi::sys::RedOp;
use crate::nccl::{NcclComm, NcclError, NcclLibrary, NcclOptions};

fn joined(pending_join: PendingJoin, timeout: Duration) -> Result<Arc<CommHandle>> {
    let comm_handle = pending_join.finish(timeout, || None)?;
    comm_handle.map(Arc::new).ok_or_else(|| Error::invalid("NcclComm", "library", "a communicator", "none"))
}

/// Variable with which ranks that are processes compare every collective: `1`, else `0`.
const CHECKED: &str = "MOEBIUS_CHECKED";

/// Value of the variable.
pub(in crate::nccl) fn checked(value: Option<OsString>) -> Result<bool> {
    match value.as_ref().map(|v| v.as_encoded_bytes()) {
        None | Some(b"0") => Ok(false),
        Some(b"1") => Ok(true),
        Some(other) => Err(Error::invalid("NcclComm::join", CHECKED, "0 or 1", String::from_utf8_lossy(other))),
    }
}

/// Ranks that are threads of this process, one a GPU.
///
/// Making it is what takes time; the communicators between its ranks may come and go.
#[derive(Debug)]
pub struct NcclWorld {
    sessions: Vec<(Arc<CommHandle>, Cuda)>,
}

/// Begins to join, and to make the connections that this crate's collectives use: NCCL makes each at the first use,
/// where the host waits for the peers.
fn start(library: &NcclLibrary, id: UniqueId, place: RankPlace, cuda: &Cuda) -> Result<PendingJoin> {
    let (bound, cuda) = (cuda.clone(), cuda.clone());
    CommHandle::start(library, id, place, move || bound.bind("NcclComm"), move |comm_handle| ready(comm_handle, &cuda))
}

/// The first use of a communicator: its connections, and its copy engines where it is to have them.
fn ready(comm_handle: &CommHandle, cuda: &Cuda) -> Result<()> {
    connect(comm_handle, cuda)?;
    if comm_handle.copy_engines { probe(comm_handle, cuda) } else { Ok(()) }
}

/// That the library moves windows by copy engines: it has what came with that.
fn check_copy_engines(library: &NcclLibrary) -> Result<()> {
    OneSided::of(library).map(drop)
}

fn connect(comm_handle: &CommHandle, cuda: &Cuda) -> Result<()> {
    const CALL: &str = "NcclComm";
    let (rank, size) = (comm_handle.rank, comm_handle.size);
    let fields = comm_handle.options.fields();
    let values: Vec<u8> = fields.iter().flat_map(|field| field.value.to_le_bytes()).collect();
    let bytes = values.len();
    let (mut own, mut all) =
        (Tensor::zeros(cuda, DType::U8, &[bytes])?, Tensor::zeros(cuda, DType::U8, &[size, bytes])?);
    cuda.upload(&values, own.view_mut())?;
    let (from, to) = (own.view().data().address(), all.view_mut().into_data().address());
    let comm_stream = CommStream { comm_handle, stream: cuda.stream().cu_stream().cast() };
    let peers = || (0..size).filter(|peer| *peer != rank);
    let sends: Vec<PeerBuffer> = peers().map(|peer| PeerBuffer { peer, address: from, bytes }).collect();
    let place = |peer| to + (peer * bytes) as u64;
    let receives: Vec<PeerBuffer> = peers().map(|peer| PeerBuffer { peer, address: place(peer), bytes }).collect();
    let finished = |done: std::result::Result<(), EnqueueError>| match done {
        Ok(()) => cuda.finish(CALL),
        Err(Some(error)) => Err(error.into()),
        Err(None) => Err(Error::invalid(CALL, "communicator", "one in use", "one that has ended")),
    };
    // What the first of them brings are the ranks' options.
    // SAFETY: both tensors have those bytes and live until the stream has been waited for.
    finished(unsafe { comm_stream.all_gather(from, to, bytes) })?;
    let gathered = cuda.download(all.view())?;
    let gathered: Vec<u64> = gathered.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    compare_fields(CALL, rank, &fields, &gathered)?;
    // SAFETY: as above.
    finished(unsafe {
        comm_stream
            .exchange(&sends, &receives)
            .and_then(|()| comm_stream.all_reduce(to, bytes, DType::U8, RedOp::SUM))
            .and_then(|()| comm_stream.broadcast(to, bytes, 0))
    })
}

impl NcclWorld {
    /// Connects one rank a GPU, in this order; ends within `timeout`.
    ///
    /// # Errors
    /// [`NcclError`](crate::nccl::NcclError); the same GPU twice.
    pub fn new(library: &NcclLibrary, gpus: &[Cuda], timeout: Duration) -> Result<Self> {
        Self::with_options(library, gpus, NcclOptions::default(), timeout)
    }

    /// The same with what the collectives may take of the GPUs.
    ///
    /// # Errors
    /// As [`NcclWorld::new`]; options out of bounds.
    pub fn with_options(library: &NcclLibrary, gpus: &[Cuda], options: NcclOptions, timeout: Duration) -> Result<Self> {
        options.check("NcclWorld::with_options")?;
        let place = RankPlace { rank: 0, size: gpus.len(), copy_engines: false, options };
        Self::connected(library, gpus, timeout, place)
    }

    /// The same for communicators whose collectives over [`Communicator::memory`] are the GPUs' copy engines', and so
    /// run beside kernels that take every SM: for the collective threads of a [`Chain`](crate::etp::Chain), between
    /// GPUs that reach each other's memory. NCCL 2.29 or later. That memory stays as long as the world, whose
    /// communicators may come and go; after a failure the process keeps it. Where a rank is lost inside such a
    /// collective, or fails in it, the streams of the others stay stuck, and those behind them: they have their errors,
    /// streams that do not wait for these work on, and new worlds can be made, but what these GPUs have is kept to the
    /// end of the process. The driver is of CUDA 12.5 or later.
    ///
    /// # Errors
    /// As [`NcclWorld::new`]; an older library; [`NcclError::Engines`](crate::nccl::NcclError::Engines): a rank whose
    /// memory cannot be moved that way, which is tried here.
    pub fn with_copy_engines(library: &NcclLibrary, gpus: &[Cuda], timeout: Duration) -> Result<Self> {
        check_copy_engines(library)?;
        let options = NcclOptions::default();
        Self::connected(library, gpus, timeout, RankPlace { rank: 0, size: gpus.len(), copy_engines: true, options })
    }

    /// `place`: that of the first rank.
    fn connected(library: &NcclLibrary, gpus: &[Cuda], timeout: Duration, place: RankPlace) -> Result<Self> {
        for (i, gpu) in gpus.iter().enumerate() {
            if gpus[..i].iter().any(|other| other.ordinal() == gpu.ordinal()) {
                return Err(Error::invalid(
                    "NcclWorld::new",
                    "gpus",
                    "each GPU once",
                    format!("GPU {} twice", gpu.ordinal()),
                ));
            }
        }
        let id = library.unique_id()?;
        let begin = |(rank, cuda)| start(library, id, RankPlace { rank, ..place }, cuda);
        let pending_join = gpus.iter().enumerate().map(begin).collect::<Result<Vec<_>>>()?;
        let comm_handles: Result<Vec<_>> = pending_join.into_iter().map(|j| joined(j, timeout)).collect();
        if place.copy_engines && matches!(comm_handles, Err(Error::Nccl(NcclError::Init { .. }))) {
            // A rank may be inside the attempt, and wait there for another's flag.
            gpus.iter().for_each(|gpu| gpu.stuck().set(true));
        }
        let comm_handles = comm_handles?;
        for comm_handle in &comm_handles {
            comm_handle.on(|| gpus.iter().map(Cuda::stuck).collect());
        }
        Ok(Self { sessions: comm_handles.into_iter().zip(gpus.iter().cloned()).collect() })
    }

    /// The ranks' communicators, in rank order, to be moved to one thread each; every collective ends within `timeout`.
    /// Once those of an earlier call are dropped, and if none of them failed, they can be had again.
    ///
    /// # Errors
    /// Some are in use; the failure that ended the world.
    pub fn communicators(&self, timeout: Duration) -> Result<Vec<NcclComm>> {
        for (rank, (comm_handle, _)) in self.sessions.iter().enumerate() {
            if let Some(failure) = comm_handle.failure() {
                return Err(failure.into());
            }
            if Arc::strong_count(comm_handle) > 1 {
                let found = format!("rank {rank}'s in use");
                return Err(Error::invalid("NcclWorld::communicators", "earlier communicators", "dropped", found));
            }
        }
        let rendezvous = ThreadRendezvous::new(self.sessions.len());
        let make = |(comm_handle, cuda): &(Arc<CommHandle>, Cuda)| {
            NcclComm::new(
                Arc::clone(comm_handle),
                cuda,
                ControlPlane::ThreadRendezvous(Arc::clone(&rendezvous)),
                timeout,
            )
        };
        self.sessions.iter().map(make).collect()
    }
}

impl Drop for NcclWorld {
    fn drop(&mut self) {
        // A communicator that one rank has aborted the others must abort too: their peers' part of an orderly end will
        // not come.
        if let Some(failure) = self.sessions.iter().find_map(|(comm_handle, _)| comm_handle.failure()) {
            self.sessions.iter().for_each(|(comm_handle, _)| drop(comm_handle.fail(failure.clone())));
        }
    }
}

/// What a part of a communicator is made with.
struct Part<'a> {
    cuda: &'a Cuda,
    copy_engines: bool,
    options: NcclOptions,
}

/// Numbers that a rank tells of its part: color, key, and the bounds.
const PART_NUMBERS: usize = 4;

impl NcclComm {
    /// Communicators of ranks that are threads of this process, one a GPU, in rank order, to be moved to one thread
    /// each. Every collective, and their making, ends within `timeout`.
    ///
    /// # Errors
    /// As [`NcclWorld::new`].
    pub fn threads(library: &NcclLibrary, gpus: &[Cuda], timeout: Duration) -> Result<Vec<Self>> {
        NcclWorld::new(library, gpus, timeout)?.communicators(timeout)
    }

    /// Joins the communicator of a job's ranks, on this GPU. The id travels through the bootstrap, whose timeout is the
    /// collectives' too, and whose connections stay open: a process that dies, or refuses, is heard of at once. With
    /// `MOEBIUS_CHECKED=1`, as [`NcclComm::join_checked`].
    ///
    /// # Errors
    /// [`NcclError`](crate::nccl::NcclError); [`RankError`](crate::ranks::RankError) where the ranks do not find each
    /// other; another value of that variable.
    pub fn join(library: &NcclLibrary, job: &Bootstrap, cuda: &Cuda) -> Result<Self> {
        Self::join_with(library, job, cuda, NcclOptions::default())
    }

    /// The same with what the collectives of it and of its parts may take of the GPU.
    ///
    /// # Errors
    /// As [`NcclComm::join`]; options out of bounds; options in which the ranks differ: [`Error::ConfigMismatch`] on every
    /// rank, or [`NcclError::Init`] where NCCL, which does not compare them, has waited for them in vain.
    pub fn join_with(library: &NcclLibrary, job: &Bootstrap, cuda: &Cuda, options: NcclOptions) -> Result<Self> {
        Self::join_as(library, job, cuda, options, checked(std::env::var_os(CHECKED))?)
    }

    /// The same with every collective of it and of its parts compared over the ranks before anything is enqueued, as
    /// between threads: the call, its [`Tag`], dtype and arguments, and sizes that are the same on all ranks. A
    /// disagreement or a refusal is an error on every rank, no data is exchanged, and the communicator goes on. For
    /// finding mistakes: each collective's host waits for all others', about ten milliseconds. All ranks do so or none;
    /// one that does not is an error on all.
    ///
    /// # Errors
    /// As [`NcclComm::join`].
    pub fn join_checked(library: &NcclLibrary, job: &Bootstrap, cuda: &Cuda) -> Result<Self> {
        Self::join_as(library, job, cuda, NcclOptions::default(), true)
    }

    fn join_as(
        library: &NcclLibrary,
        job: &Bootstrap,
        cuda: &Cuda,
        options: NcclOptions,
        checked: bool,
    ) -> Result<Self> {
        options.check("NcclComm::join_with")?;
        let (id, streams) = job.connect(|| library.unique_id())?;
        let socket = ControlSocket::new(job.rank, streams, checked)?;
        let control = ProcessControl::new(&socket, 0, (0..job.world).collect());
        let place = RankPlace { rank: job.rank, size: job.world, copy_engines: false, options };
        let comm_handle = joined(start(library, id, place, cuda)?, job.timeout)?;
        Self::new(comm_handle, cuda, ControlPlane::ProcessControl(control), job.timeout)
    }

    /// Divides the ranks (collective): those of one color become a communicator, in the order of their keys, then
    /// ranks; one without a color gets none. On the same stream, with the same timeout.
    ///
    /// # Errors
    /// A collective's; [`NcclError`](crate::nccl::NcclError).
    pub fn split(&mut self, tag: Tag, color: Option<usize>, key: usize) -> Result<Option<Self>> {
        let cuda = self.cuda.clone();
        self.split_on(tag, color, key, &cuda)
    }

    /// The same for work on another stream of this GPU, such as [`Cuda::with_new_stream`]'s.
    ///
    /// # Errors
    /// As [`NcclComm::split`]; another GPU, which the other ranks are told.
    pub fn split_on(&mut self, tag: Tag, color: Option<usize>, key: usize, cuda: &Cuda) -> Result<Option<Self>> {
        let options = self.session.comm_handle.options;
        self.divide(tag, (color, key), Part { cuda, copy_engines: false, options })
    }

    /// A communicator of the same ranks with bounds of its own on what its collectives take of a GPU, on this one's
    /// stream: for a group that is to have other bounds than what this communicator was made with (collective).
    ///
    /// # Errors
    /// As [`NcclComm::split`]; bounds out of range, which the other ranks are told; [`Error::ConfigMismatch`] on every
    /// rank where they differ, after which this communicator works on.
    pub fn with_bounds(&mut self, tag: Tag, options: NcclOptions) -> Result<Self> {
        const CALL: &str = "NcclComm::with_bounds";
        self.check(tag, options.check(CALL))?;
        let (cuda, rank) = (self.cuda.clone(), self.session.comm_handle.rank);
        let part = self.divide(tag, (Some(0), rank), Part { cuda: &cuda, copy_engines: false, options })?;
        part.ok_or_else(|| Error::invalid(CALL, "communicator", "one of all ranks", "none"))
    }

    /// The same for a communicator whose collectives over [`Communicator::memory`] are the GPU's copy engines', as
    /// [`NcclWorld::with_copy_engines`] has them.
    ///
    /// # Errors
    /// As [`NcclComm::split_on`]; a library older than 2.29, which the other ranks are told;
    /// [`NcclError::Engines`] on every rank of a part, where it cannot be done on one: this communicator works on.
    pub fn split_with_copy_engines(
        &mut self,
        tag: Tag,
        color: Option<usize>,
        key: usize,
        cuda: &Cuda,
    ) -> Result<Option<Self>> {
        let had = check_copy_engines(self.library());
        self.check(tag, had)?;
        let options = self.session.comm_handle.options;
        self.divide(tag, (color, key), Part { cuda, copy_engines: true, options })
    }

    fn divide(
        &mut self,
        tag: Tag,
        (color, key): (Option<usize>, usize),
        Part { cuda, copy_engines, options }: Part<'_>,
    ) -> Result<Option<Self>> {
        const CALL: &str = "split";
        let own = color.map_or(-1, |c| i64::try_from(c).unwrap_or(i64::MAX));
        let fits = |number: i64| i32::try_from(number).is_ok();
        let checked = if cuda.ordinal() != self.cuda.ordinal() {
            Err(Error::invalid(CALL, "cuda", format!("GPU {}", self.cuda.ordinal()), cuda.ordinal()))
        } else if !fits(own) || !i64::try_from(key).is_ok_and(fits) {
            Err(Error::invalid(CALL, "color, key", format!("at most {}", i32::MAX), format!("{color:?}, {key}")))
        } else {
            Ok(())
        };
        self.check(tag, checked)?;
        let (of, size) = (self.cuda.clone(), self.session.comm_handle.size);
        let fields = options.fields();
        let bounds = ComparedField::values(&fields);
        let numbers = [own, key as i64].into_iter().chain(bounds.iter().map(|v| *v as i64));
        let bytes: Vec<u8> = numbers.flat_map(i64::to_le_bytes).collect();
        let buffers = Tensor::empty(&of, DType::I64, &[PART_NUMBERS]).and_then(|mut send| {
            of.upload(&bytes, send.view_mut())?;
            Ok((send, Tensor::empty(&of, DType::I64, &[size, PART_NUMBERS])?))
        });
        let (send, mut recv) = self.check(tag, buffers)?;
        self.all_gather(tag, send.view(), recv.view_mut())?;
        let all = of.download(recv.view());
        // The others go on to NCCL's own call, which has no end without this rank, and hear of it there.
        let subject = CollectiveInfo {
            rank: self.session.comm_handle.rank,
            number: self.session.count.calls(),
            operation: CALL,
            tag,
        };
        let all = self.session.check_begun(subject, all)?;
        let all: Vec<i64> = all.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        // On all ranks alike, before NCCL is called: it compares none of them.
        let bounds: Vec<u64> = all.chunks_exact(PART_NUMBERS).flat_map(|n| [n[2] as u64, n[3] as u64]).collect();
        compare_fields(CALL, self.session.comm_handle.rank, &fields, &bounds)?;
        let of_color = |(rank, of): (usize, &[i64])| (of[0] == own).then_some((of[1], rank));
        let mut members: Vec<(i64, usize)> = all.chunks_exact(PART_NUMBERS).enumerate().filter_map(of_color).collect();
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == self.session.comm_handle.rank).unwrap_or(0);
        let place = RankPlace { rank, size: members.len(), copy_engines, options };
        let (bound, working) = (cuda.clone(), cuda.clone());
        let place_of = (own as i32, key as i32);
        let ready = move |comm_handle: &CommHandle| ready(comm_handle, &working);
        let pending_join = self.session.comm_handle.split(place, place_of, move || bound.bind(CALL), ready);
        let pending_join = self.session.check_begun(subject, pending_join)?;
        let peer_events = self.session.control.peer_events();
        let comm_handle = match pending_join.finish(self.session.timeout, || peer_events.fault(subject)) {
            Ok(comm_handle) => comm_handle,
            // All ranks of the part have it, and none waits for another.
            Err(error @ Error::Nccl(NcclError::Engines { .. })) => return Err(error),
            // The error that another rank has reported of itself is the one to return.
            Err(Error::Comm(fault)) => return Err(self.session.end(fault)),
            Err(error) => {
                if copy_engines {
                    cuda.stuck().set(true);
                }
                let (rank, reason) = (self.session.comm_handle.rank, error.to_string());
                return Err(self.session.end(CommError::Transport { operation: CALL, tag, rank, reason }));
            }
        };
        let (Some(comm_handle), Some(color)) = (comm_handle, color) else { return Ok(None) };
        comm_handle.on(|| self.session.comm_handle.gpus().iter().cloned().chain([cuda.stuck()]).collect());
        let ranks: Vec<usize> = members.iter().map(|(_, rank)| *rank).collect();
        let control = self.session.control.part((self.session.count.calls(), color), &ranks);
        Self::new(Arc::new(comm_handle), cuda, control, self.session.timeout).map(Some)
    }

    /// This rank's group on an axis of a mesh of all ranks (collective).
    ///
    /// # Errors
    /// As [`NcclComm::split`]; a mesh of another number of ranks.
    pub fn group(&mut self, tag: Tag, mesh: &Mesh, axis: Axis) -> Result<Self> {
        const CALL: &str = "NcclComm::group";
        if mesh.world() != self.session.comm_handle.size {
            return Err(Error::invalid(CALL, "mesh", format!("{} ranks", self.session.comm_handle.size), mesh.world()));
        }
        let member = mesh.member(axis, self.session.comm_handle.rank)?;
        let part = self.split(tag, Some(member.group), member.rank)?;
        part.ok_or_else(|| Error::invalid(CALL, "mesh", "a group for each rank", "none"))
    }
}
