//! Slots for every choice of every rank, as one rank needs them.

use std::sync::Arc;

use crate::device::Device;
use crate::lazy::Lazy;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::{Capacity, DispatchSpec, Segments, Stats};

/// A rank's choices, to be written as what it tells the others in prepare: a record of a size that all ranks know
/// (`src/plan/routing_record.rs` has its layout).
#[derive(Debug)]
pub struct RecordIds<'a, D: Device> {
    /// This rank.
    pub rank: usize,
    /// Experts E.
    pub num_experts: usize,
    /// Tokens that a record has room for.
    pub max_tokens: usize,
    /// Specification of the choices.
    pub spec: &'a DispatchSpec,
    /// `[T, K]`, I32 or I64, not checked: bad ids count as −1, and the record tells of the first.
    pub ids: TensorRef<'a, D>,
    /// Errors that earlier calls have found (`src/plan/deferred_errors.rs`).
    pub errors: TensorMut<'a, D>,
    /// The record, U8.
    pub out: TensorMut<'a, D>,
}

/// For which rank a plan is, and of what.
#[derive(Debug, Clone, Copy)]
pub struct PlanFor<'a> {
    /// The rank that the plan is for.
    pub rank: usize,
    /// Ranks R.
    pub ranks: usize,
    /// Experts E.
    pub num_experts: usize,
    /// Tokens that a record has room for.
    pub max_tokens: usize,
    /// Tokens of the rank.
    pub tokens: usize,
    /// Alignment, capacities, overflow.
    pub spec: &'a DispatchSpec,
    /// [`RowOrder::AllRows`], [`RowOrder::UniqueRows`] or [`RowOrder::Zones`].
    pub row_order: RowOrder,
}

impl PlanFor<'_> {
    /// Whether the host has to know what the plan needs: the number of rows, or the sizes of messages.
    pub fn waits(&self) -> bool {
        waits(self.row_order, self.spec)
    }
}

/// A rank's choices, for a transport that plans as it exchanges all ranks'.
#[derive(Debug)]
pub struct PlanIds<'a, D: Device> {
    /// The plan.
    pub of: PlanFor<'a>,
    /// As [`RecordIds::ids`].
    pub ids: TensorRef<'a, D>,
    /// As [`PlanRecords::errors`].
    pub errors: TensorMut<'a, D>,
}

/// All ranks' records, to be planned for one rank. For [`RowOrder::AllRows`] and [`RowOrder::Zones`], each rank's tokens
/// are padded to the same number of rows.
#[derive(Debug)]
pub struct PlanRecords<'a, D: Device> {
    /// The plan.
    pub of: PlanFor<'a>,
    /// `U8 [R, size]`.
    pub records: TensorRef<'a, D>,
    /// Where what is wrong with them is kept until somebody asks; what is there stays.
    pub errors: TensorMut<'a, D>,
}

/// As [`PlanFor::waits`].
pub(crate) fn waits(row_order: RowOrder, spec: &DispatchSpec) -> bool {
    !matches!(row_order, RowOrder::AllRows | RowOrder::Zones) || spec.capacity == Capacity::Eager
}

/// A plan made of records.
#[derive(Debug)]
pub struct DevicePlan<D: Device> {
    /// The plan.
    pub plan: Plan<D>,
    /// Rows of each rank among those that arrive where all do: token t of rank r is row r·padded_tokens + t. Of zones:
    /// rows of each.
    pub padded_tokens: usize,
    /// Counts from the records, where the host had to wait ([`PlanFor::waits`]).
    pub counts: Option<HostCounts>,
}

/// Counts of all ranks that the host knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCounts {
    /// Tokens of each rank.
    pub tokens: Vec<usize>,
    /// Ranks that will not call backward.
    pub absent: Vec<usize>,
    /// Ranks that hold an error of an earlier call.
    pub pending: Vec<usize>,
    /// A rank has failed, or they disagree: the records say more, and the plan is worth nothing.
    pub failed: bool,
    /// A rank that has too few rows, where that is an error, and how many it needs.
    pub overflow: Option<(usize, usize)>,
}

/// All ranks' choices, which the host has, and for whom the plan is.
#[derive(Debug, Clone, Copy)]
pub struct HostPlanRequest<'a> {
    /// The rank that the plan is for.
    pub rank: usize,
    /// Ranks R.
    pub ranks: usize,
    /// Experts E.
    pub num_experts: usize,
    /// Valid ids of all ranks in rank order, `[Σ T, K]`; −1 = dropped.
    pub ids: &'a [i32],
    /// Weights in the same order, where an expert capacity keeps by probability.
    pub weights: Option<&'a [f64]>,
    /// Tokens of each rank.
    pub tokens: &'a [usize],
    /// Alignment, capacities, overflow.
    pub spec: &'a DispatchSpec,
    /// Transport that will carry rows: decides what `row_map` indexes.
    pub row_order: RowOrder,
}

/// The same of choices that a device has.
#[derive(Debug)]
pub struct PlanRequest<'a, D: Device> {
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
    pub row_order: RowOrder,
}

/// How rows reach a rank, and so in what order they lie there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// They are the rank's own tokens (R = 1): row t is token t.
    Local,
    /// Each (token, destination rank) once, in order (source rank, token).
    UniqueRows,
    /// All ranks' tokens, in rank order.
    AllRows,
    /// A copy for each slot, in slots.
    Slots,
    /// Each (token, destination rank) once, in a zone for each source rank with room for as many tokens as any may bring,
    /// in the order of tokens.
    Zones,
}

/// Who sends what where. All maps are `I32`; −1 means none.
#[derive(Debug)]
pub struct Plan<D: Device> {
    /// Tokens of this rank.
    pub tokens: usize,
    /// Tokens of all ranks.
    pub total_tokens: usize,
    /// Number of this rank's first token among all ranks'.
    pub first_token: usize,
    /// The local experts' layout.
    pub segments: Arc<Segments<D>>,
    /// Counts, as data.
    pub stats: Lazy<Stats>,
    /// This rank's ids after dropping, `[T, K]`.
    pub kept_ids: Tensor<D>,
    /// Row in the transport's order for each slot, `[N]`.
    pub row_map: Tensor<D>,
    /// For each slot, its weight's number among the weights that the transport brings, `[N]`. Local, AllRows: all
    /// tokens' `[Σ T, K]` flattened. UniqueRows: those of [`MessageMaps::return_slots`]. Slots: its own. Zones: K for
    /// each row of the zones.
    pub weight_map: Tensor<D>,
    /// Local, AllRows: slot here of each (token, k) of all tokens in transport order, `[Σ T, K]` (own tokens only
    /// for Local). UniqueRows: for each of this rank's (token, k), the row among all rows returned to it by combine,
    /// `[T, K]`. Slots, Zones: `[0, K]`, since the transport finds its own way back.
    pub return_map: Tensor<D>,
    /// Maps that [`RowOrder::UniqueRows`] needs beside; `None` for the others.
    pub messages: Option<MessageMaps<D>>,
    /// Maps that [`RowOrder::Zones`] needs beside; `None` for the others.
    pub zones: Option<ZoneMaps<D>>,
}

/// Who sends which rows into which zones, and how they return. Z is the number of rows of a zone; −1 means none.
#[derive(Debug)]
pub struct ZoneMaps<D: Device> {
    /// For each of this rank's tokens its row in the zone at each rank, `I32 [T, R]`.
    pub token_rows: Tensor<D>,
    /// Slots here of the choices of each row that arrives, `I32 [R, Z, K]`; rows past those that arrive are not written.
    pub row_slots: Tensor<D>,
    /// Its token at its rank, `I32 [R, Z]`; likewise.
    pub row_tokens: Tensor<D>,
    /// Rows that arrive from each rank, `I64 [R]`.
    pub arrived: Tensor<D>,
    /// Z.
    pub zone_rows: usize,
}

/// Which rows and choices make up the messages between two ranks. All maps are `I32 [n]`.
#[derive(Debug)]
pub struct MessageMaps<D: Device> {
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
