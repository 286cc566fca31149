//! A rank's membership in a group of ranks that share experts.

use crate::comm::Communicator;
use crate::config::MAX_EXPERTS;
use crate::error::{Error, Result};
use crate::kernels::Kernels;

use super::TokenDispatcher;

/// What all ranks of a group must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// Experts E over all ranks; a multiple of the number of ranks.
    pub num_experts: usize,
    /// Most tokens that one rank may bring to a call.
    pub max_tokens_per_rank: usize,
    /// Largest static capacity in rows; 0: eager calls only.
    pub max_rows: usize,
    /// How tokens travel.
    pub dispatcher: DispatcherKind,
}

/// How tokens travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DispatcherKind {
    /// Local for one rank, else all-to-all.
    #[default]
    Auto,
    /// One rank: tokens stay where they are.
    Local,
    /// Each (token, destination rank) travels once.
    AllToAll,
    /// Every rank gets all tokens, and sums are reduce-scattered.
    AllGather,
}

impl GroupConfig {
    /// Eager calls of up to `max_tokens_per_rank` tokens over `num_experts` experts.
    pub fn new(num_experts: usize, max_tokens_per_rank: usize) -> Self {
        Self { num_experts, max_tokens_per_rank, max_rows: 0, dispatcher: DispatcherKind::Auto }
    }
}

/// A rank's membership in a group. Serves any number of layers, one call at a time; owns the dispatcher and through
/// it the communicator.
#[derive(Debug)]
pub struct Group<D: Kernels> {
    config: GroupConfig,
    device: D,
    stream: D::Stream,
    rank: usize,
    ranks: usize,
    dispatcher: Box<dyn TokenDispatcher<D>>,
}

impl<D: Kernels> Group<D> {
    /// Joins the group (collective): compares configurations over the ranks first.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on every rank, naming the field; E not divisible by R; a communicator's error.
    pub fn new(device: D, stream: D::Stream, comm: Box<dyn Communicator<D>>, config: GroupConfig) -> Result<Self> {
        let _ = (&device, &stream, &comm, MAX_EXPERTS, Error::check_dtype);
        let _ = config;
        todo!()
    }

    /// What was agreed on.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The stream that the group's work is ordered on.
    pub fn stream(&self) -> &D::Stream {
        &self.stream
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks R.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.config.num_experts / self.ranks
    }

    /// The dispatcher.
    pub fn dispatcher(&mut self) -> &mut dyn TokenDispatcher<D> {
        &mut *self.dispatcher
    }
}

impl Group<crate::cpu::Cpu> {
    /// A group of one rank on the CPU.
    pub fn single(config: GroupConfig) -> Result<Self> {
        let comm = crate::comm::ThreadWorld::create(1, std::time::Duration::from_secs(60)).remove(0);
        Self::new(crate::cpu::Cpu::new(), (), Box::new(comm), config)
    }
}
