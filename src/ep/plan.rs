//! Slots for every choice of every rank, as one rank needs them.

use std::sync::Arc;

use crate::kernels::{Kernels, Zones};
use crate::lazy::Lazy;
use crate::tensor::{Tensor, TensorRef};

use super::{DispatchSpec, Stats};

/// All ranks' choices, and for whom the plan is.
#[derive(Debug)]
pub struct PlanRequest<'a, D: Kernels> {
    /// The rank that the plan is for.
    pub rank: usize,
    /// Ranks R.
    pub ranks: usize,
    /// Experts E.
    pub num_experts: usize,
    /// Valid ids of all ranks in rank order, `I32 [Σ T, K]`; −1 = dropped.
    pub ids: TensorRef<'a, D>,
    /// Weights in the same order, any floating type, where an expert capacity keeps by probability.
    pub weights: Option<TensorRef<'a, D>>,
    /// Tokens of each rank.
    pub tokens: &'a [usize],
    /// Alignment, capacities, overflow.
    pub spec: &'a DispatchSpec,
    /// Transport that will carry rows: decides what `row_map` indexes.
    pub transport: Transport,
}

/// How rows reach a rank, and so in what order they lie there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// They are the rank's own tokens (R = 1): row t is token t.
    Local,
    /// Each (token, destination rank) once, in order (source rank, token).
    UniqueRows,
    /// All ranks' tokens, in rank order.
    AllRows,
    /// A copy for each slot, in slots.
    Slots,
}

/// Who sends what where. All maps are `I32`; −1 means none.
#[derive(Debug)]
pub struct Plan<D: Kernels> {
    /// Tokens of this rank.
    pub tokens: usize,
    /// Tokens of all ranks.
    pub total_tokens: usize,
    /// Number of this rank's first token among all ranks'.
    pub first_token: usize,
    /// The local experts' layout.
    pub zones: Arc<Zones<D>>,
    /// Counts, as data.
    pub stats: Lazy<Stats>,
    /// This rank's ids after dropping, `[T, K]`.
    pub kept_ids: Tensor<D>,
    /// Row in the transport's order for each slot, `[N]`.
    pub row_map: Tensor<D>,
    /// For each slot, its weight's number among the weights that the transport brings, `[N]`. Local, AllRows: all
    /// tokens' `[Σ T, K]` flattened. UniqueRows: those of [`Messages::return_slots`]. Slots: its own.
    pub weight_map: Tensor<D>,
    /// Local, AllRows: slot here of each (token, k) of all tokens in transport order, `[Σ T, K]` (own tokens only
    /// for Local). UniqueRows: for each of this rank's (token, k), the row among all rows returned to it by combine,
    /// `[T, K]`. Slots: `[0, K]`, since the transport finds its own way back.
    pub return_map: Tensor<D>,
    /// What [`Transport::UniqueRows`] needs beside; `None` for the others.
    pub messages: Option<Messages<D>>,
}

/// Which rows and choices make up the messages between two ranks. All maps are `I32 [n]`.
#[derive(Debug)]
pub struct Messages<D: Kernels> {
    /// Tokens to send, by (destination, token).
    pub send_tokens: Tensor<D>,
    /// Kept choices, numbered in `[T, K]` flattened, by (destination, token, k).
    pub send_choices: Tensor<D>,
    /// Slots to return in combine, by (source rank, token, k).
    pub return_slots: Tensor<D>,
    /// Rows sent to each rank in dispatch.
    pub send_rows: Vec<usize>,
    /// Rows received from each rank in dispatch.
    pub recv_rows: Vec<usize>,
    /// Filled slots of each source rank here (rows returned to it in combine).
    pub slots_from: Vec<usize>,
    /// Choices of this rank kept at each rank (rows that come back from it in combine).
    pub slots_at: Vec<usize>,
}
