//! Groups of one rank on the CPU.

use crate::comm::Solo;
use crate::ep::{EpGroup, Group, GroupConfig, LibraryDispatchers};
use crate::error::Result;

use super::Cpu;

impl LibraryDispatchers for Cpu {}

impl Group<Cpu> {
    /// A group of one rank, which takes any number of tokens, whatever
    /// [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank) says.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn single(config: GroupConfig) -> Result<Self> {
        Group::new(Cpu::new(), Box::new(Solo::new(Cpu::new())), config)
    }
}

impl EpGroup<Cpu> {
    /// A group of one rank on the CPU; of a layer's configuration, one for that layer. It takes any number of tokens,
    /// whatever [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank) says.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn single(config: impl Into<GroupConfig>) -> Result<Self> {
        Group::single(config.into()).map(Self::new)
    }
}
