//! The maps of a routing's two hops between hosts, which its handle holds: the lists of `hierarchical/lists.rs` on the device.

use std::ops::Range;

use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// Who sends what in each hop. Numbers of rows and choices are of messages to or from each rank.
#[derive(Debug)]
pub(crate) struct HopMaps<D: Kernels> {
    /// All lists, `I32`, behind each other: one copy from the host.
    pub(super) lists: Tensor<D>,
    /// Tokens to send across, by (host, token).
    pub(super) crossing_tokens: Range<usize>,
    pub(super) crossing: Vec<usize>,
    /// The numbers 0, 1, … of the rows that arrive so, by (source host, token): messages are gathered by a map.
    pub(super) arrived_rows: Range<usize>,
    pub(super) arriving: Vec<usize>,
    /// Arrived rows to pass on, by (rank of this host, row).
    pub(super) forwarded_rows: Range<usize>,
    pub(super) forwarded: Vec<usize>,
    /// Their choices, numbered in `[rows, K]` flattened, by (rank of this host, row, k).
    pub(super) forwarded_choices: Range<usize>,
    pub(super) choices: Vec<usize>,
    /// For each (arrived row, k) its choice among these; −1: none here.
    pub(super) choice_of: Range<usize>,
    /// For each (token, host) its row among those that crossed; −1: none.
    pub(super) row_of: Range<usize>,
    /// For each (token, k) its weight among the K of each of these rows; −1: a dropped choice.
    pub(super) weight_of: Range<usize>,
    /// Slots to return, by (rank of this host that passes them on, source host, token, k).
    pub(super) return_slots: Tensor<D>,
    pub(super) slots: Vec<usize>,
    /// Rows that come from each rank of this host.
    pub(super) received: Vec<usize>,
}
