//! Rules of the library for groups of either mode, each an error of its own before the library is called.

use crate::cuda::Cuda;
use crate::error::Result;
use crate::nccl::SharedComm;

use super::NcclEpError;

/// A result of this module alone.
pub(super) type NcclEpResult<T> = std::result::Result<T, NcclEpError>;

/// Most tokens that the library's kernels are made for.
pub(super) const MOST_TOKENS: usize = 8192;
pub(super) const MOST_CHOICES: usize = 32;
/// Shared memory that a block of the GPU can have.
pub(super) const SHARED: usize = 227 << 10;

/// Most that the library's 32-bit fields hold.
pub(super) fn narrow(call: &'static str, name: &'static str, value: usize) -> NcclEpResult<u32> {
    u32::try_from(value).map_err(|_| NcclEpError::Argument {
        call,
        name,
        expected: format!("at most {}", u32::MAX),
        found: value.to_string(),
    })
}

/// The rule for tokens of a rank.
pub(super) fn check_tokens(call: &'static str, tokens: usize) -> NcclEpResult<()> {
    if tokens.is_multiple_of(4) && tokens <= MOST_TOKENS {
        return Ok(());
    }
    let (expected, found) = (format!("a multiple of 4, at most {MOST_TOKENS}"), tokens.to_string());
    Err(NcclEpError::Argument { call, name: "max_tokens", expected, found })
}

/// The rule for the SMs that the library's kernels may take; 0: its own choice.
pub(super) fn check_sms(call: &'static str, max_sms: usize, sms: usize) -> NcclEpResult<()> {
    if max_sms <= sms {
        return Ok(());
    }
    let (expected, found) = (format!("at most {sms} (the GPU's SMs), or 0"), max_sms.to_string());
    Err(NcclEpError::Argument { call, name: "max_sms", expected, found })
}

/// The rules for experts and ranks.
pub(super) fn check_experts(experts: usize, ranks: usize) -> NcclEpResult<()> {
    if ranks < 2 {
        return Err(NcclEpError::Ranks { found: ranks });
    }
    if !experts.is_multiple_of(ranks) {
        return Err(NcclEpError::Experts { experts, ranks });
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
pub(super) fn check_domain(call: &'static str, comm: &SharedComm, experts: usize) -> NcclEpResult<()> {
    let ranks = comm.size();
    let domain = comm.with(domain).ok_or(NcclEpError::Ended { call })?.unwrap_or(ranks);
    let local = experts / ranks;
    match (local * domain).is_multiple_of(4) {
        true => Ok(()),
        false => Err(NcclEpError::Fours { local, domain }),
    }
}

/// Whether this GPU will do.
pub(super) fn check_gpu(cuda: &Cuda) -> Result<()> {
    let (major, minor) = cuda.capability()?;
    match major >= 9 {
        true => Ok(()),
        false => Err(NcclEpError::Architecture { major, minor }.into()),
    }
}
