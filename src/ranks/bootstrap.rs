//! The facts that a rank needs to get a group's id.

use std::time::Duration;

use super::MAX_WORLD;
use super::env::Identity;
use super::token::JobToken;
use crate::error::{Error, RankError, Result};

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
    pub token: JobToken,
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
        let token = if me.world == 1 { JobToken::random()? } else { JobToken::from_env()? };
        Self::new(&me, token, timeout)
    }

    /// Round 0 for an identity at hand.
    ///
    /// # Errors
    /// [`RankError::NoAddress`] where there is more than one rank and no address.
    pub fn new(me: &Identity, token: JobToken, timeout: Duration) -> Result<Self> {
        let address = match &me.address {
            Some(address) => address.clone(),
            None if me.world == 1 => String::new(),
            None => return Err(RankError::NoAddress { launcher: me.launcher }.into()),
        };
        Ok(Self { rank: me.rank, world: me.world, address, token, timeout, round: 0 })
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
