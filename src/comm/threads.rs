//! Ranks as threads of one process.

use std::time::Duration;

/// Factory of the communicators of a group of threads.
#[derive(Debug)]
pub struct ThreadWorld;

impl ThreadWorld {
    /// Communicators of `ranks` ranks, in rank order, to be moved to one thread each; every collective ends within
    /// `timeout`.
    pub fn create(ranks: usize, timeout: Duration) -> Vec<ThreadComm> {
        let _ = (ranks, timeout);
        todo!()
    }
}

/// One rank's communicator between threads.
#[derive(Debug)]
pub struct ThreadComm;
