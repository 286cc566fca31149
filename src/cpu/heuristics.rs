//! Numbers that were measured or weighed, and that nothing else determines: how work is cut into tasks. None changes
//! what is computed, but the order of a weight gradient's sums with [`WGRAD_SLOTS`].

/// Rows of a product that one task computes. Large enough that packing the weight is a small part of a task, small
/// enough that a few hot experts still fill all cores.
pub(super) const ROW_TILE: usize = 256;

/// Slots that one step of a weight gradient reads: bounds the memory of gathered rows.
pub(super) const WGRAD_SLOTS: usize = 2048;

/// Rows of a weight gradient that one task computes.
pub(super) const WGRAD_ROWS: usize = 256;

/// Bytes of rows moved or added below which a parallel loop costs more than it saves.
pub(super) const PARALLEL_BYTES: usize = 1 << 18;

/// Bytes of one task of such a loop.
pub(super) const TASK_BYTES: usize = 1 << 16;

/// Tokens of one task of the router: enough to hide the cost of a task, few enough to share a small batch.
pub(super) const TASK_TOKENS: usize = 64;

/// Elements of one task of a loop over elements, of an optimizer or a codec.
pub(super) const TASK_ELEMENTS: usize = 1 << 14;

/// Leaves of a tree of sums that one task of an optimizer adds.
pub(super) const TASK_LEAVES: usize = 8;
