//! Ranks that are processes: who this one is, how a group's id reaches all of them, and how a world divides.
//!
//! * [`Identity`]: rank, world, local rank and rendezvous address, from `moebius-run`, torchrun, mpirun or Slurm.
//! * [`Bootstrap`]: carries the 128 bytes with which a communicator is made from rank 0 to all others, over TCP.
//! * [`Mesh`]: the groups of a world: experts, sliced experts, data, tensor.
//!
//! # What is trusted
//! The bootstrap is for that one id and never for payload. Rank 0 answers a connection only if it shows the job's
//! [`Token`], which keeps out strangers and other jobs that can connect; it travels in the clear and does not keep out
//! whoever can read the network. NCCL itself, which takes over from there, authenticates nobody: its ports must be
//! reachable by the job's own machines only.

mod deadline;
mod env;
#[doc(hidden)]
pub mod fuzzing;
mod join;
mod mesh;
mod message;
mod nodes;
mod root;
mod token;

#[cfg(feature = "nccl")]
use std::net::TcpStream;
use std::time::Duration;

use crate::error::{Error, Result};

pub use crate::error::{Launcher, RankError, Refusal};
pub use env::{Identity, VARIABLES};
pub use mesh::{Axis, Member, Mesh};
pub use message::UniqueId;
pub use root::Root;
pub use token::Token;

/// The page's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/ranks.md")]
struct RanksPage;

/// More ranks than any job has; keeps what a wrong number can reserve small.
pub(crate) const MAX_WORLD: usize = 1 << 16;

/// One rank's part in handing out an id. All ranks need the same world, address, token and round.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    /// This rank, `0..world`.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// `host:port` that rank 0 binds and the others connect to.
    pub address: String,
    /// The job's secret.
    pub token: Token,
    /// Rank 0 waits this long for the others; they wait two seconds longer for its answer, to hear who was missing.
    pub timeout: Duration,
    /// Counts the groups that the world makes one after another: a latecomer of an earlier one is refused.
    pub round: u32,
}

impl Bootstrap {
    /// Round 0 for a rank that was launched: its identity and `MOEBIUS_TOKEN` from the environment.
    ///
    /// # Errors
    /// [`RankError`]: variables are missing, damaged or contradict each other; more than one rank and no address.
    pub fn from_env(timeout: Duration) -> Result<Self> {
        let me = Identity::from_env()?;
        // One rank has nobody to prove itself to.
        let token = if me.world == 1 { Token::random()? } else { Token::from_env()? };
        Self::new(&me, token, timeout)
    }

    /// Round 0 for an identity at hand.
    ///
    /// # Errors
    /// [`RankError::NoAddress`] where there is more than one rank and no address.
    pub fn new(me: &Identity, token: Token, timeout: Duration) -> Result<Self> {
        let address = match &me.address {
            Some(address) => address.clone(),
            None if me.world == 1 => String::new(),
            None => return Err(RankError::NoAddress { launcher: me.launcher }.into()),
        };
        Ok(Self { rank: me.rank, world: me.world, address, token, timeout, round: 0 })
    }

    /// Hands out the id that `make` returns on rank 0 (there only it is called, once all ranks are there). Every rank
    /// returns the same id, or an error.
    ///
    /// # Errors
    /// [`RankError`]: ranks missing after the timeout (named), this rank refused, rank 0 unreachable or failed.
    pub fn exchange(&self, make: impl FnOnce() -> Result<UniqueId>) -> Result<UniqueId> {
        self.check()?;
        if self.world == 1 {
            return make();
        }
        match self.rank {
            0 => Root::bind(&self.address, self.timeout)?.serve(self, make),
            _ => Ok(join::join(self)?.0),
        }
    }

    /// The same, and the connections between rank 0 and the others, which stay open for short messages.
    #[cfg(feature = "nccl")]
    pub(crate) fn connect(&self, make: impl FnOnce() -> Result<UniqueId>) -> Result<(UniqueId, Vec<TcpStream>)> {
        self.check()?;
        if self.world == 1 {
            return Ok((make()?, Vec::new()));
        }
        match self.rank {
            0 => Root::bind(&self.address, self.timeout)?.keep(self, make),
            _ => join::join(self).map(|(id, stream)| (id, vec![stream])).map_err(Into::into),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        const CALL: &str = "ranks::Bootstrap";
        if self.world == 0 || self.world > MAX_WORLD {
            return Err(Error::invalid(CALL, "world", format!("1..={MAX_WORLD}"), self.world));
        }
        if self.rank >= self.world {
            return Err(Error::invalid(CALL, "rank", format!("0..{}", self.world), self.rank));
        }
        Ok(())
    }
}
