//! Groups of one rank on the CPU.

use crate::comm::Solo;
use crate::ep::{Group, GroupConfig};
use crate::error::Result;

use super::Cpu;

impl Group<Cpu> {
    /// A group of one rank.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn single(config: GroupConfig) -> Result<Self> {
        Group::new(Cpu::new(), Box::new(Solo::new(Cpu::new())), config)
    }
}
