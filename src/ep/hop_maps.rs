//! The maps of a routing's two hops between hosts, which its handle holds.

use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// Who sends what in each hop. Maps are `I32 [n]`, counts are of all ranks.
#[derive(Debug)]
pub(crate) struct HopMaps<D: Kernels> {
    /// Tokens to send across, by (host, token).
    pub(super) crossing_tokens: Tensor<D>,
    pub(super) crossing: Vec<usize>,
    /// Rows that arrive so, by (source host, token), and their numbers.
    pub(super) arriving: Vec<usize>,
    pub(super) arrived_rows: Tensor<D>,
    /// Arrived rows to pass on to each neighbor, and their choices, numbered in `[rows, K]` flattened.
    pub(super) forwarded_rows: Tensor<D>,
    pub(super) forwarded: Vec<usize>,
    pub(super) forwarded_choices: Tensor<D>,
    pub(super) choices: Vec<usize>,
    /// For each (arrived row, k) its choice among these, `[rows, K]`; −1: none here.
    pub(super) choice_of: Tensor<D>,
    /// For each (token, host) its row among those that crossed, `[T, hosts]`; −1: none.
    pub(super) row_of: Tensor<D>,
    /// For each (token, k) its weight among the K of each of these rows, `[T, K]`; −1: a dropped choice.
    pub(super) weight_of: Tensor<D>,
    /// Rows and slots that come from each neighbor.
    pub(super) received: Vec<usize>,
    pub(super) slots: Vec<usize>,
    /// These slots, by (neighbor, source host, token, k).
    pub(super) return_slots: Tensor<D>,
}
