//! Groups of one rank.

use crate::comm::Solo;
use crate::ep::{Group, GroupConfig};
use crate::error::Result;

use super::device::Cuda;

impl Cuda {
    /// A group of one rank on this GPU.
    ///
    /// # Errors
    /// As [`Group::new`].
    pub fn group(&self, config: GroupConfig) -> Result<Group<Cuda>> {
        Group::new(self.clone(), Box::new(Solo::new(self.clone())), config)
    }
}
