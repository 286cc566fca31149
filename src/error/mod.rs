//! Typed errors. Each names the call, the tensor or field, what was expected and what was found; collective errors
//! name ranks too.

mod checkpoint;
mod comm;
mod nccl;
mod nccl_ep;
mod ranks;
mod text;

use crate::dtype::DType;

pub use checkpoint::CheckpointError;
pub(crate) use checkpoint::CheckpointResult;
pub use comm::CommError;
pub use nccl::NcclError;
pub use nccl_ep::NcclEpError;
pub use ranks::{Launcher, RankError, Refusal};
pub use text::{printable, printable_lines};

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument, field or tensor is not what the call needs.
    #[error("{call}: {}: expected {}, found {}", printable(.name), printable_lines(.expected), printable_lines(.found))]
    Invalid {
        /// The call that refused.
        call: &'static str,
        /// Tensor, argument or configuration field.
        name: String,
        /// Requirement of the call.
        expected: String,
        /// Value that it was given.
        found: String,
    },
    /// A tensor has the wrong shape.
    #[error("{call}: tensor {}: expected shape {expected:?}, found {found:?}", printable(.tensor))]
    Shape {
        /// The call that refused.
        call: &'static str,
        /// Name of the tensor.
        tensor: String,
        /// Sizes the call needs.
        expected: Vec<usize>,
        /// Sizes it was given.
        found: Vec<usize>,
    },
    /// A tensor has the wrong element type.
    #[error("{call}: tensor {}: expected {expected}, found {found}", printable(.tensor))]
    DType {
        /// The call that refused.
        call: &'static str,
        /// Name of the tensor.
        tensor: String,
        /// Element type the call needs.
        expected: DType,
        /// Element type it was given.
        found: DType,
    },
    /// An expert id is out of range, or twice in one token.
    #[error("{call} on rank {rank}, layer {layer}: topk_ids[{token}, {k}] = {}: {problem}", text::id(*id))]
    ExpertId {
        /// The call that refused.
        call: &'static str,
        /// Rank whose ids these are.
        rank: usize,
        /// The layer that they were chosen in.
        layer: u32,
        /// Row of the entry.
        token: usize,
        /// Column of the entry.
        k: usize,
        /// The id found; one of U32 above `i32::MAX` as the I32 of the same bits.
        id: i64,
        /// The problem with it.
        problem: IdProblem,
    },
    /// Routing logits hold a NaN.
    #[error(
        "{call} on rank {rank}, layer {layer}: router logits of token {token} hold a NaN (first at expert {expert})"
    )]
    NanLogits {
        /// The call that refused.
        call: &'static str,
        /// Rank whose logits these are.
        rank: usize,
        /// The router's layer.
        layer: u32,
        /// First token affected.
        token: usize,
        /// First expert affected in that token.
        expert: usize,
    },
    /// The sums of auxiliary losses that a backward was given are over no tokens, or, of a loss over sequences, over no
    /// sequences, and this rank has tokens.
    #[error(
        "{call} on rank {rank}, layer {layer}: tensor aux.sums: expected the sums of at least this rank's tokens and sequences, found none"
    )]
    EmptySums {
        /// The call that refused.
        call: &'static str,
        /// Rank whose backward it is.
        rank: usize,
        /// The router's layer.
        layer: u32,
    },
    /// More rows arrive at a rank than its capacity.
    #[error(
        "prepare of layer {layer}: rank {rank} would receive {needed} rows, its capacity is {capacity}; raise the capacity to at least {needed} or choose Overflow::Drop"
    )]
    Capacity {
        /// The rank whose buffer is too small.
        rank: usize,
        /// The layer whose rows these are.
        layer: u32,
        /// Rows that its segments need, padding included.
        needed: usize,
        /// Rows reserved.
        capacity: usize,
    },
    /// An entry of a map names no row of the tensor that is read or written through it.
    #[error(
        "{call} on rank {rank}, layer {layer}: {map}[{entry}]: expected a row of its tensor, found {}",
        text::found(found)
    )]
    RowMap {
        /// The call that followed the map.
        call: &'static str,
        /// Rank that it was made on.
        rank: usize,
        /// The layer that it was made for.
        layer: u32,
        /// Name of the map among the call's arguments.
        map: String,
        /// The first such entry.
        entry: usize,
        /// Its value; `None` where kernels of several calls have met different ones there before anybody asked.
        found: Option<i64>,
    },
    /// A segment lies outside its expert-major layout, or in the segment before.
    #[error(
        "{call} on rank {rank}, layer {layer}: segment {segment}: expected slots within the layout, behind the segment before, found {}",
        text::slots(found)
    )]
    Segment {
        /// The call that was given the layout.
        call: &'static str,
        /// Rank that it was made on.
        rank: usize,
        /// The layer that it was made for.
        layer: u32,
        /// Number of the first such segment: the local expert's.
        segment: usize,
        /// Its first slot, and how many; `None` where kernels of several calls have met different ones there before anybody
        /// asked.
        found: Option<(i64, i64)>,
    },
    /// The host has no memory of the size that a call needs.
    #[error("{call}: {}: no memory for {bytes} bytes", printable(.name))]
    OutOfMemory {
        /// The call.
        call: &'static str,
        /// Purpose of the memory.
        name: String,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A device has found a spec that is another than this rank's, in a prepare that the host did not wait for, and a
    /// wait that knows nothing of the group has met that; where other ranks' ids are bad too, or one has failed, `peer`
    /// may be such a rank. The field and both values are in what the group has kept: `TokenDispatcher::check` returns
    /// them.
    #[error(
        "{call} on rank {rank}, layer {layer}: record of rank {peer}: expected a spec like this rank's, found another (seen by a kernel; \
         TokenDispatcher::check names the field)"
    )]
    OddRecord {
        /// The call that was told.
        call: &'static str,
        /// Rank that found it.
        rank: usize,
        /// Layer of the prepare.
        layer: u32,
        /// The first rank that sent such a record.
        peer: usize,
    },
    /// A kernel has waited for a rank in vain, or a rank had given up before (seen by a kernel). The group's calls over
    /// NVLink move nothing any more: it has to be formed anew.
    #[error(
        "{call} on rank {rank}, layer {layer}: rank {peer} {problem} (seen by a kernel); the group moves nothing any more: form it anew"
    )]
    LatePeer {
        /// The call that was told.
        call: &'static str,
        /// Rank that found it.
        rank: usize,
        /// Layer of the call that it was found in.
        layer: u32,
        /// The rank.
        peer: usize,
        /// What it did not do.
        problem: &'static str,
    },
    /// Kernels have gone on without ranks that did not come within the group's patience, and without their experts' share
    /// (seen by a kernel). The group goes on, and takes them in again when they come.
    #[error("{call} on rank {rank}: went on without ranks {late:?} and their experts' share (seen by a kernel)")]
    LateRanks {
        /// The call that was told.
        call: &'static str,
        /// Rank that found it.
        rank: usize,
        /// The ranks.
        late: Vec<usize>,
    },
    /// A kernel has raised a fault that the host does not know.
    #[error("{call}: a kernel has raised fault {code} (detail {detail}), which is none of this crate's")]
    UnknownFault {
        /// The call that was told.
        call: &'static str,
        /// The fault's code.
        code: u64,
        /// Detail that was raised with it.
        detail: u64,
    },
    /// Another rank refused the call that this rank was part of.
    #[error("{call} on rank {rank}: rank {peer} failed: {}", printable_lines(.reason))]
    Peer {
        /// The call.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// The rank that failed.
        peer: usize,
        /// Its error, as text.
        reason: String,
    },
    /// Two ranks were built with different configurations, or make a call with different options.
    #[error(
        "{call}: configuration field {} differs: rank {rank} has {}, rank {peer} has {}",
        printable(.field), printable(.value), printable(.peer_value)
    )]
    ConfigMismatch {
        /// The call that compares them.
        call: &'static str,
        /// Name of the first differing field.
        field: String,
        /// This rank.
        rank: usize,
        /// This rank's value.
        value: String,
        /// The other rank.
        peer: usize,
        /// Its value.
        peer_value: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A process does not know its rank, or the ranks did not find each other.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// Backward was called where prepare had agreed on none.
    #[error("{call} on rank {rank}: backward was not agreed in prepare: ranks {absent:?} do not track gradients")]
    BackwardNotAgreed {
        /// The call.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// Ranks that asked for no backward.
        absent: Vec<usize>,
    },
    /// A context was used twice, or was never made.
    #[error(
        "{call} on rank {rank}: the context was consumed by an earlier backward; add losses that share an output, and \
         call backward once"
    )]
    ContextConsumed {
        /// The call.
        call: &'static str,
        /// This rank.
        rank: usize,
    },
    /// A sharded weight was used out of turn, or read when its memory no longer held it.
    #[error("{call}: weight {weight}: expected {expected}, found {found}")]
    WeightState {
        /// The call that refused.
        call: &'static str,
        /// Name of the weight.
        weight: String,
        /// Requirement of the call.
        expected: String,
        /// How things stand.
        found: String,
    },
    /// A weight's shards cannot be sent as a chain was asked to send them; it has taken none of the weights that were
    /// given with it.
    #[error("{call} on rank {rank}: weight {weight}: expected {expected}, found {found}")]
    Shard {
        /// The call that refused.
        call: &'static str,
        /// This rank's place in the chain.
        rank: usize,
        /// Name of the weight.
        weight: String,
        /// Requirement of the form that shards are sent in.
        expected: String,
        /// The weight's state.
        found: String,
    },
    /// A checkpoint is damaged, hostile or not what its config says.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// NCCL is not there, is not usable, or refused a call.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// NCCL EP is not there, is not usable for what was asked, or refused a call.
    #[error(transparent)]
    NcclEp(#[from] NcclEpError),
    /// This build's kernels lack one that it launches.
    #[error("Cuda::on: {cubin} has no kernel {kernel}")]
    MissingKernel {
        /// Name of the kernel.
        kernel: &'static str,
        /// File and architecture that it is looked for in.
        cubin: String,
    },
    /// A driver call failed, or this machine or build has nothing to run on.
    #[error("{call}: {operation}: {message}")]
    Device {
        /// The call.
        call: &'static str,
        /// The operation asked of the driver.
        operation: String,
        /// Its message.
        message: String,
    },
    /// A graph was being captured (`Cuda::capture`), and this cannot be part of one.
    #[error("{call}: {operation}: cannot be captured into a graph (Cuda::capture)")]
    NotCapturable {
        /// The call.
        call: &'static str,
        /// The operation that a graph cannot do.
        operation: String,
    },
    /// The host framework failed.
    #[error("{call}: {framework}: {message}")]
    Framework {
        /// The call.
        call: &'static str,
        /// `"candle"` or `"burn"`.
        framework: &'static str,
        /// Its message.
        message: String,
    },
}

impl Error {
    /// [`Error::Invalid`] from anything printable.
    pub(crate) fn invalid(
        call: &'static str,
        name: impl ToString,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Error::Invalid { call, name: name.to_string(), expected: expected.to_string(), found: found.to_string() }
    }

    /// As an error of `call` on `rank`: another rank's refusal names what that rank has failed in, and not the collective
    /// that it met.
    pub(crate) fn of_call(self, call: &'static str, rank: usize) -> Self {
        match self {
            Error::Comm(CommError::Refused { peer, reason, .. }) => Error::Peer { call, rank, peer, reason },
            other => other,
        }
    }

    /// [`Error::NotCapturable`] of what a call would do.
    pub(crate) fn not_capturable(call: &'static str, operation: impl ToString) -> Self {
        Error::NotCapturable { call, operation: operation.to_string() }
    }

    /// [`Error::Shape`] if the sizes differ.
    pub(crate) fn check_shape(call: &'static str, tensor: &str, expected: &[usize], found: &[usize]) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape { call, tensor: tensor.to_string(), expected: expected.to_vec(), found: found.to_vec() })
    }

    /// [`Error::DType`] if the types differ.
    pub(crate) fn check_dtype(call: &'static str, tensor: &str, expected: DType, found: DType) -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(Error::DType { call, tensor: tensor.to_string(), expected, found })
    }
}

/// Problem with an expert id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdProblem {
    /// Neither −1 nor in `0..num_experts`.
    #[error("expected -1 (dropped) or an expert in 0..{num_experts}")]
    OutOfRange {
        /// Number of experts.
        num_experts: usize,
    },
    /// No expert, among the ids that a backward was given.
    #[error("expected an expert in 0..{num_experts}, as `route` gave it")]
    NotRouted {
        /// Number of experts.
        num_experts: usize,
    },
    /// The same expert at two places of one token.
    #[error("the token already chose this expert at k = {first}")]
    Duplicate {
        /// First column with this id.
        first: usize,
    },
}
