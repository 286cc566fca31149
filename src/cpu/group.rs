//! Groups of one rank on the CPU.

use std::time::Duration;

use crate::comm::ThreadWorld;
use crate::ep::{Group, GroupConfig};
use crate::error::{Error, Result};

use super::Cpu;

impl Group<Cpu> {
    /// A group of one rank.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn single(config: GroupConfig) -> Result<Self> {
        // Nobody else is waited for, so the time limit is never met.
        let comm = ThreadWorld::create(1, Duration::MAX).pop();
        let comm = comm.ok_or_else(|| Error::invalid("Group::single", "world", "one rank", "none"))?;
        Group::new(Cpu::new(), (), Box::new(comm), config)
    }
}
