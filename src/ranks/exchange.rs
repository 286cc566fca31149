//! The way of an id from rank 0 to all others.

use std::net::TcpStream;

use super::bootstrap::Bootstrap;
use super::join::join;
use super::message::UniqueId;
use super::root::Root;
use crate::error::Result;

impl Bootstrap {
    /// Hands out the id that `make` returns on rank 0 (there only it is called, once all ranks are there). Every rank
    /// returns the same id, or an error.
    ///
    /// # Errors
    /// [`RankError`](crate::error::RankError): ranks missing after the timeout (named), this rank refused, rank 0
    /// unreachable or failed.
    pub fn exchange(&self, make: impl FnOnce() -> Result<UniqueId>) -> Result<UniqueId> {
        self.check()?;
        if self.world == 1 {
            return make();
        }
        match self.rank {
            0 => Root::bind(&self.address, self.timeout)?.serve(self, make),
            _ => Ok(join(self)?.0),
        }
    }

    /// The same, and the connections between rank 0 and the others, which stay open for short messages.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn connect(&self, make: impl FnOnce() -> Result<UniqueId>) -> Result<(UniqueId, Vec<TcpStream>)> {
        self.check()?;
        if self.world == 1 {
            return Ok((make()?, Vec::new()));
        }
        match self.rank {
            0 => Root::bind(&self.address, self.timeout)?.serve_connected(self, make),
            _ => join(self).map(|(id, stream)| (id, vec![stream])).map_err(Into::into),
        }
    }
}
