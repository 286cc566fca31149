//! The tag of a collective: layer, step and sequence number. Every collective carries one.

use std::fmt;

/// Layer, step and sequence number of a collective. [`moebius::comm`](crate::comm) says when ranks compare it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The layer, as the caller numbers its layers.
    pub layer: u32,
    /// The step of the layer.
    pub op: Op,
    /// Which prepare of the group this belongs to (its handle's number); 0 outside handles.
    pub sequence: u64,
}

impl Tag {
    /// Number of the collectives in which the ranks of a chain compare their backward passes. No other has it.
    pub(crate) const PASSES: u64 = u64::MAX - 1;

    /// The pass of a chain that a collective with this number belongs to, from 1: the number's upper half. 0 for others.
    pub(crate) fn pass(&self) -> u64 {
        match self.sequence >> 32 {
            // Numbers that stand for no pass.
            pass if pass == u64::from(u32::MAX) => 0,
            pass => pass,
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            u32::MAX => f.write_str("no layer")?,
            layer => write!(f, "layer {layer}")?,
        }
        write!(f, ", {}, ", self.op.name())?;
        match (self.pass(), self.sequence) {
            (_, u64::MAX) => f.write_str("the end"),
            (_, Self::PASSES) => f.write_str("the comparison of passes"),
            (0, sequence) => write!(f, "sequence {sequence}"),
            (pass, sequence) => write!(f, "pass {pass}, sequence {}", sequence as u32),
        }
    }
}

/// Step of a layer that a collective belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// Comparison of configurations when a group is built.
    Init,
    /// Token counts before the router, where jitter needs global token numbers.
    Count,
    /// Exchange of the routing.
    Prepare,
    /// Rows to their experts.
    Dispatch,
    /// Rows back to their tokens.
    Combine,
    /// Gradient of combine.
    CombineBwd,
    /// Gradient of dispatch.
    DispatchBwd,
    /// Sums of auxiliary losses over the ranks.
    Aux,
    /// Sum of replicated parameters' gradients.
    GradReduce,
    /// Sums of squares of gradients, for their norm.
    GradNorm,
    /// Gathering weights, e.g. to save a checkpoint.
    Weights,
    /// The caller's own use.
    User,
}

impl Op {
    /// Whether it is one of those in which a layer's rows travel, or say where to.
    pub(crate) const fn moves_rows(self) -> bool {
        matches!(self, Op::Prepare | Op::Dispatch | Op::Combine | Op::CombineBwd | Op::DispatchBwd)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Init => "init",
            Op::Count => "count",
            Op::Prepare => "prepare",
            Op::Dispatch => "dispatch",
            Op::Combine => "combine",
            Op::CombineBwd => "combine_bwd",
            Op::DispatchBwd => "dispatch_bwd",
            Op::Aux => "aux",
            Op::GradReduce => "grad_reduce",
            Op::GradNorm => "grad_norm",
            Op::Weights => "weights",
            Op::User => "user",
        }
    }
}
