//! A rank's EP group: the library's buffers for one number of experts, tokens and bytes.

use std::fmt;
use std::sync::Arc;

use crate::cuda::Cuda;
use crate::error::Result;
use crate::nccl::{NcclComm, Shared};

use super::tensor::Places;
use super::{EpError, EpLibrary, result, sys};

const CALL: &str = "Group::new";

/// A result of this module alone.
pub(super) type Checked<T> = std::result::Result<T, EpError>;

/// What the library's kernels are made for.
pub(super) const MOST_TOKENS: usize = 8192;
pub(super) const MOST_CHOICES: usize = 32;
/// Rows that its kernels keep in shared memory, unless a variable says otherwise, and what a block of the GPU can have.
const STAGES: usize = 12;
const STAGE_VARIABLES: [&str; 2] = ["NCCL_EP_DISPATCH_NUM_STAGES", "NCCL_EP_COMBINE_NUM_STAGES_G2S"];
pub(super) const SHARED: usize = 227 << 10;

/// What a group is made for; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOptions {
    /// Experts E over all ranks.
    pub num_experts: usize,
    /// Most tokens of a rank in a call; a multiple of 4, at most 8192.
    pub max_tokens: usize,
    /// Rows that every receive buffer has, for calls that wait for nothing and can be recorded; `None`: as many as the
    /// step needs, which dispatch waits for.
    pub capacity: Option<usize>,
    /// Most bytes of a row, with its scales; a multiple of 16.
    pub max_row_bytes: usize,
    /// Most choices of a token, at most 32.
    pub max_top_k: usize,
    /// A row past the capacity ends the process with a message, instead of being dropped.
    pub trap: bool,
}

/// A rank's membership in an EP group. Cheap to clone; destroyed with its last clone and handle, when all ranks must be
/// done with it: a peer may still read what this rank has finished with.
#[derive(Clone)]
pub struct Group {
    member: Arc<Member>,
    options: GroupOptions,
    /// Where rows must lie; `None`: anywhere.
    places: Option<Places>,
}

/// What the library made for a group of either mode, and what that needs.
pub(super) struct Member {
    pub(super) library: EpLibrary,
    pub(super) cuda: Cuda,
    comm: Shared,
    pub(super) ranks: usize,
    pub(super) raw: sys::ncclEpGroup_t,
}

// SAFETY: the library lets any thread use a group, one at a time; every call passes the communicator's gate.
unsafe impl Send for Member {}
// SAFETY: as above.
unsafe impl Sync for Member {}

impl Member {
    /// Joins (collective), with a configuration that was checked.
    pub(super) fn join(
        library: &EpLibrary,
        (cuda, comm): (Cuda, Shared),
        mut config: sys::ncclEpGroupConfig_t,
    ) -> Result<Arc<Self>> {
        cuda.not_captured(CALL, "create an EP group")?;
        cuda.bind(CALL)?;
        config.size = size_of::<sys::ncclEpGroupConfig_t>() as u32;
        config.magic = sys::NCCL_EP_MAGIC;
        config.version = sys::NCCL_EP_API_VERSION;
        let made = comm.with(|comm| {
            // SAFETY: the communicator lives while `with` runs; its GPU was bound above; the options were checked.
            unsafe { result::create_group(library.functions(), comm.cast(), &config) }
        });
        let raw = made.ok_or(EpError::Ended { call: CALL })??;
        let (library, ranks) = (library.clone(), comm.size());
        Ok(Arc::new(Self { library, cuda, comm, ranks, raw }))
    }

    /// Runs calls while nobody frees the communicator, with its GPU bound.
    pub(super) fn with<T>(
        &self,
        call: &'static str,
        calls: impl FnOnce(&sys::Library, sys::cudaStream_t) -> Checked<T>,
    ) -> Result<T> {
        self.cuda.bind(call)?;
        let stream: sys::cudaStream_t = self.cuda.stream().raw().cu_stream().cast();
        match self.comm.with(|_| calls(self.library.functions(), stream)) {
            Some(done) => Ok(done?),
            None => Err(EpError::Ended { call }.into()),
        }
    }
}

/// A group's configuration before anything is filled in.
pub(super) fn blank_config() -> sys::ncclEpGroupConfig_t {
    // SAFETY: a plain C struct of integers and pointers, for which the interface asks for zeros.
    unsafe { std::mem::zeroed() }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group {{ options: {:?}, ranks: {} }}", self.options, self.member.ranks)
    }
}

/// Most that the library's 32-bit fields hold.
pub(super) fn narrow(name: &'static str, value: usize) -> Checked<u32> {
    u32::try_from(value).map_err(|_| EpError::Argument {
        call: CALL,
        name,
        expected: format!("at most {}", u32::MAX),
        found: value.to_string(),
    })
}

impl GroupOptions {
    /// Whether the rows that a block has in flight fit its shared memory; `set` reads a variable.
    fn check_shared(&self, set: impl Fn(&str) -> Option<usize>) -> Checked<()> {
        let stages = STAGE_VARIABLES.map(|name| set(name).unwrap_or(STAGES)).into_iter().max().unwrap_or(STAGES);
        match stages.saturating_mul(self.max_row_bytes) <= SHARED {
            true => Ok(()),
            false => Err(EpError::Shared { stages, bytes: self.max_row_bytes, limit: SHARED }),
        }
    }

    /// What the library would end the process for, or find out too late.
    pub(super) fn check(&self, ranks: usize) -> Checked<()> {
        let positive = [
            ("num_experts", self.num_experts),
            ("max_tokens", self.max_tokens),
            ("max_row_bytes", self.max_row_bytes),
            ("max_top_k", self.max_top_k),
        ];
        if let Some((name, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            let (expected, found) = ("at least 1".to_string(), "0".to_string());
            return Err(EpError::Argument { call: CALL, name, expected, found });
        }
        check_experts(self.num_experts, ranks)?;
        if self.max_top_k > self.num_experts {
            let (expected, found) = (format!("at most {} (num_experts)", self.num_experts), self.max_top_k.to_string());
            return Err(EpError::Argument { call: CALL, name: "max_top_k", expected, found });
        }
        if !self.max_row_bytes.is_multiple_of(16) {
            return Err(EpError::RowBytes { what: "max_row_bytes", bytes: self.max_row_bytes });
        }
        check_tokens(self.max_tokens)?;
        if self.max_top_k > MOST_CHOICES {
            let (expected, found) = (format!("at most {MOST_CHOICES}"), self.max_top_k.to_string());
            return Err(EpError::Argument { call: CALL, name: "max_top_k", expected, found });
        }
        self.check_shared(|name| std::env::var(name).ok().and_then(|v| v.trim().parse().ok()))?;
        match self.capacity {
            Some(found) if found < self.max_tokens => {
                let expected = format!("at least {} rows (max_tokens)", self.max_tokens);
                Err(EpError::Capacity { expected, found })
            }
            _ => Ok(()),
        }
    }
}

/// The rule for tokens of a rank.
pub(super) fn check_tokens(tokens: usize) -> Checked<()> {
    if tokens.is_multiple_of(4) && tokens <= MOST_TOKENS {
        return Ok(());
    }
    let (expected, found) = (format!("a multiple of 4, at most {MOST_TOKENS}"), tokens.to_string());
    Err(EpError::Argument { call: CALL, name: "max_tokens", expected, found })
}

/// The rules for experts and ranks.
pub(super) fn check_experts(experts: usize, ranks: usize) -> Checked<()> {
    if ranks < 2 {
        return Err(EpError::Ranks { found: ranks });
    }
    if !experts.is_multiple_of(ranks) {
        return Err(EpError::Experts { experts, ranks });
    }
    Ok(())
}

/// A team of ranks, as NCCL returns it.
#[repr(C)]
struct Team {
    ranks: i32,
    rank: i32,
    stride: i32,
}

/// Ranks that reach each other's memory directly. `None` where NCCL does not say.
fn domain(comm: crate::nccl::sys::CommPtr) -> Option<usize> {
    type Lsa = unsafe extern "C" fn(crate::nccl::sys::CommPtr) -> Team;
    let process = libloading::os::unix::Library::this();
    // SAFETY: NCCL was loaded for all to see; the function is its own, of this type since 2.28.
    let team = unsafe {
        let lsa = process.get::<Lsa>(b"ncclTeamLsa\0").ok()?;
        lsa(comm)
    };
    usize::try_from(team.ranks).ok().filter(|n| *n > 0)
}

/// The rule for experts of a domain.
pub(super) fn check_domain(comm: &Shared, experts: usize) -> Checked<()> {
    let ranks = comm.size();
    let domain = comm.with(domain).ok_or(EpError::Ended { call: CALL })?.unwrap_or(ranks);
    let local = experts / ranks;
    match (local * domain).is_multiple_of(4) {
        true => Ok(()),
        false => Err(EpError::Fours { local, domain }),
    }
}

/// Whether this GPU will do.
pub(super) fn check_gpu(cuda: &Cuda) -> Result<()> {
    let (major, minor) = cuda.capability()?;
    match major >= 9 {
        true => Ok(()),
        false => Err(EpError::Architecture { major, minor }.into()),
    }
}

impl Group {
    /// Joins a group (collective).
    ///
    /// # Errors
    /// [`EpError`] names the rule that the options, the GPU or the ranks break, before the library is called.
    pub fn new(library: &EpLibrary, comm: &NcclComm, options: GroupOptions) -> Result<Self> {
        Self::on(library, (comm.cuda().clone(), comm.shared()), (options, None))
    }

    pub(super) fn on(
        library: &EpLibrary,
        (cuda, shared): (Cuda, Shared),
        (options, places): (GroupOptions, Option<Places>),
    ) -> Result<Self> {
        options.check(shared.size())?;
        check_gpu(&cuda)?;
        let mut config = blank_config();
        config.algorithm = sys::ncclEpAlgorithm_t::NCCL_EP_ALGO_HIGH_THROUGHPUT;
        config.num_experts = narrow("num_experts", options.num_experts)?;
        config.max_dispatch_tokens_per_rank = narrow("max_tokens", options.max_tokens)?;
        config.max_recv_tokens_per_rank = narrow("capacity", options.capacity.unwrap_or(0))?;
        config.max_token_bytes = narrow("max_row_bytes", options.max_row_bytes)?;
        config.num_topk = narrow("max_top_k", options.max_top_k)?;
        config.overflow_policy = match (options.capacity, options.trap) {
            (Some(_), false) => sys::ncclEpOverflowPolicy_t::NCCL_EP_OVERFLOW_DROP,
            _ => sys::ncclEpOverflowPolicy_t::NCCL_EP_OVERFLOW_TRAP,
        };
        if places.is_some() {
            config.zero_copy = sys::ncclEpZeroCopyMode_t::NCCL_EP_ZERO_COPY_ON;
        }
        check_domain(&shared, options.num_experts)?;
        Ok(Self { places, member: Member::join(library, (cuda, shared), config)?, options })
    }

    /// What the group was made for.
    pub fn options(&self) -> &GroupOptions {
        &self.options
    }

    /// Ranks R.
    pub fn ranks(&self) -> usize {
        self.member.ranks
    }

    /// Experts of a rank.
    pub fn local_experts(&self) -> usize {
        self.options.num_experts / self.member.ranks
    }

    pub(super) fn places(&self) -> Option<&Places> {
        self.places.as_ref()
    }

    /// The GPU and its stream.
    pub fn cuda(&self) -> &Cuda {
        &self.member.cuda
    }

    /// The group as the library has it, for callers that go beyond this crate's functions.
    pub fn raw(&self) -> sys::ncclEpGroup_t {
        self.member.raw
    }

    /// The library.
    pub fn library(&self) -> &EpLibrary {
        &self.member.library
    }

    /// As [`Member::with`].
    pub(super) fn with<T>(
        &self,
        call: &'static str,
        calls: impl FnOnce(&sys::Library, sys::cudaStream_t) -> Checked<T>,
    ) -> Result<T> {
        self.member.with(call, calls)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Nothing can be reported from here. Where the communicator is gone, so are the group's peers: what it holds
        // stays until the process ends.
        if self.cuda.bind("Group::drop").is_err() {
            return;
        }
        // SAFETY: handles keep the group, so there are none; the communicator lives while `with` runs.
        let ended = self.comm.with(|_| unsafe { result::group_destroy(self.library.functions(), self.raw) });
        if let Some(Err(error)) = ended {
            tracing::warn!(%error, "an EP group was not destroyed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> GroupOptions {
        GroupOptions {
            num_experts: 8,
            max_tokens: 32,
            capacity: Some(64),
            max_row_bytes: 14_336,
            max_top_k: 2,
            trap: false,
        }
    }

    #[test]
    fn each_rule_has_its_own_error() {
        assert_eq!(good().check(2), Ok(()));
        assert_eq!(good().check(1), Err(EpError::Ranks { found: 1 }));
        assert_eq!(good().check(3), Err(EpError::Experts { experts: 8, ranks: 3 }));
        let bytes = EpError::RowBytes { what: "max_row_bytes", bytes: 24 };
        assert_eq!(GroupOptions { max_row_bytes: 24, ..good() }.check(2), Err(bytes));
        let named = |options: GroupOptions| match options.check(2) {
            Err(EpError::Argument { name, .. }) => name,
            other => panic!("{options:?}: {other:?}"),
        };
        assert_eq!(named(GroupOptions { max_tokens: 30, ..good() }), "max_tokens");
        assert_eq!(named(GroupOptions { max_tokens: 8196, capacity: None, ..good() }), "max_tokens");
        assert_eq!(named(GroupOptions { max_tokens: 0, ..good() }), "max_tokens");
        assert_eq!(named(GroupOptions { max_top_k: 9, ..good() }), "max_top_k");
        assert_eq!(named(GroupOptions { num_experts: 64, max_top_k: 33, ..good() }), "max_top_k");
        let small = EpError::Capacity { expected: "at least 32 rows (max_tokens)".into(), found: 28 };
        assert_eq!(GroupOptions { capacity: Some(28), ..good() }.check(2), Err(small));
    }

    #[test]
    fn rows_in_flight_must_fit_unless_a_variable_lowers_their_number() {
        let long = GroupOptions { max_row_bytes: 28_672, ..good() };
        let error = EpError::Shared { stages: 12, bytes: 28_672, limit: SHARED };
        assert_eq!(long.check_shared(|_| None), Err(error));
        assert_eq!(long.check_shared(|_| Some(6)), Ok(()));
        // One of the two kernels still has too many.
        let one = |name: &str| (name == STAGE_VARIABLES[0]).then_some(6);
        assert!(long.check_shared(one).is_err());
    }
}
