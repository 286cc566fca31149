//! The request for one routing's plan: sizes, capacities, and when errors are reported.

use crate::config::{ExpertCapacity, Fingerprint};
use crate::dtype::DType;

/// The rank and layer that a call is made for, as errors name them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Rank in the group.
    pub rank: usize,
    /// The layer's number.
    pub layer: u32,
}

/// Sizes, capacities and options of one handle; may differ between handles of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DispatchSpec {
    /// The layer's number, in tags and messages.
    pub layer: u32,
    /// Choices per token K.
    pub top_k: usize,
    /// Segments are padded to a multiple of this power of two (1: no padding).
    pub alignment: usize,
    /// Rows that the receiver has room for.
    pub capacity: Capacity,
    /// Most tokens that a rank brings to the call, the same on all ranks; `None`: the group's `max_tokens_per_rank`. What
    /// ranks exchange to plan has room for so many, and where nothing waits for their number so many rows travel of each
    /// rank: a step of few tokens in a group that is there for many.
    pub max_tokens: Option<usize>,
    /// Treatment of rows past the capacity.
    pub overflow: Overflow,
    /// Limit per expert.
    pub expert_capacity: Option<ExpertCapacity>,
    /// Fingerprint of the layer's configuration, on which all ranks must agree too.
    pub formula: Fingerprint,
    /// Type and width of the rows that return, where dispatch sends others (opaque ones), for transports that make
    /// their buffers for them, and that refuse here what they could not add.
    pub returns: Option<(DType, usize)>,
    /// This rank will call backward.
    pub backward: bool,
    /// When what only the device sees is reported.
    pub reporting: Reporting,
}

impl DispatchSpec {
    /// Eager, unpadded, with errors at once, for inference.
    pub fn new(layer: u32, top_k: usize) -> Self {
        Self {
            layer,
            top_k,
            alignment: 1,
            capacity: Capacity::Eager,
            max_tokens: None,
            overflow: Overflow::Error,
            expert_capacity: None,
            formula: Fingerprint::default(),
            returns: None,
            backward: false,
            reporting: Reporting::Immediate,
        }
    }

    /// Bytes of a row that returns; 0 where it is as wide as one that dispatch sends.
    pub fn returning_bytes(&self) -> usize {
        self.returns.map_or(0, |(dtype, width)| width * dtype.size())
    }
}

/// Rows of the receive layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// As many as this step needs, known to the host after prepare, which waits for that number where the device makes
    /// the plan; with one rank and [`Reporting::Deferred`] as many as it may need at most, without waiting.
    Eager,
    /// A fixed number per call, at most the group's reserved maximum. With [`Reporting::Deferred`], the prepare of
    /// [`AllGather`](crate::ep::AllGather) does not wait for the device; each rank's tokens then travel as
    /// [`max_tokens`](DispatchSpec::max_tokens) rows.
    Static(usize),
}

/// Treatment of rows past a static capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// Prepare fails on every rank with [`Error::Capacity`](crate::Error::Capacity).
    Error,
    /// Rows whose slot is past the capacity are dropped: they contribute nothing, their gradients are zero.
    Drop,
}

/// When what only the device sees is reported: an id that is out of range or doubled, a NaN logit, rows past a static
/// capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reporting {
    /// The call fails, on every rank. A device that runs behind the host is waited for.
    Immediate,
    /// A bad id is treated as −1, a row past the capacity as dropped, and a NaN is computed with. The first error is
    /// kept and returned by [`TokenDispatcher::check`](crate::ep::TokenDispatcher::check), or by a later prepare. With
    /// one rank nothing waits for the device.
    ///
    /// All ranks get the same error. Where prepare waits for numbers of rows ([`AllToAll`](crate::ep::AllToAll) and
    /// [`Hierarchical`](crate::ep::Hierarchical) always, others as [`Capacity`] says), prepare itself returns an error for
    /// a capacity that is too small and for ranks that disagree or fail. Where prepare waits for nothing, these errors are kept too, and only
    /// [`TokenDispatcher::check`](crate::ep::TokenDispatcher::check) returns them: at a later prepare the hosts of some
    /// ranks might know of them and others not yet. One disagreement is not found where prepare waits for nothing: that
    /// only some ranks will call backward. Those ranks then wait in backward for the others.
    Deferred,
}
