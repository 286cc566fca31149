//! Where rows lie: the expert-major layout, and what GEMMs read and write of it.

use crate::config::WeightAt;
use crate::device::Device;
use crate::tensor::{TensorMut, TensorRef};

/// Where a GEMM reads its rows: slot s is row `map[s]` of `base`, or row s without a map.
#[derive(Debug)]
pub struct RowSource<'a, D: Device> {
    /// The rows.
    pub base: TensorRef<'a, D>,
    /// Row of `base` for each slot, `I32 [N]`; negative at padding.
    pub map: Option<TensorRef<'a, D>>,
    /// Where rows are still coming, from the kernel that was enqueued last; `None`: all are there.
    pub arrivals: Option<Arrivals<'a, D>>,
}

/// Rows that come while a product of them runs, those of the first experts first. Transports of this crate alone make them:
/// a product waits for rows without an end of its own, and the kernel that brings them, which gives up in time, ends that
/// wait too.
#[derive(Debug)]
pub struct Arrivals<'a, D: Device> {
    /// Groups of experts whose rows have come, `I64 [1]`, which the transport writes.
    pub(crate) groups: TensorRef<'a, D>,
    /// Experts of a group.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "rows come so between GPUs alone"))]
    pub(crate) experts: usize,
    /// SMs of the kernel that brings them.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "as above"))]
    pub(crate) movement_sms: usize,
}

impl<'a, D: Device> Arrivals<'a, D> {
    /// Shorter borrow.
    pub fn borrow(&self) -> Arrivals<'_, D> {
        Arrivals { groups: self.groups.borrow(), ..*self }
    }

    /// Tests: with another count of groups that have come. One that never reaches them all is waited for without end.
    #[doc(hidden)]
    pub fn with_groups(self, groups: TensorRef<'a, D>) -> Self {
        Self { groups, ..self }
    }
}

impl<D: Device> Clone for Arrivals<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for Arrivals<'_, D> {}

impl<D: Device> Clone for RowSource<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for RowSource<'_, D> {}

impl<'a, D: Device> RowSource<'a, D> {
    /// Rows in slot order.
    pub fn direct(base: TensorRef<'a, D>) -> Self {
        Self { base, map: None, arrivals: None }
    }

    /// Shorter borrow, to join sources of different lifetimes in one description.
    pub fn borrow(&self) -> RowSource<'_, D> {
        RowSource {
            base: self.base.borrow(),
            map: self.map.as_ref().map(TensorRef::borrow),
            arrivals: self.arrivals.as_ref().map(Arrivals::borrow),
        }
    }

    /// Rows behind a map.
    pub fn mapped(base: TensorRef<'a, D>, map: TensorRef<'a, D>) -> Self {
        Self { base, map: Some(map), arrivals: None }
    }
}

/// Where a GEMM writes its rows, in slot order.
#[derive(Debug)]
pub struct RowDest<'a, D: Device> {
    /// The rows `[N, …]`; local memory, or a peer's where the device maps it.
    pub base: TensorMut<'a, D>,
    /// Add to what `base` holds instead of overwriting it.
    pub accumulate: bool,
}

impl<'a, D: Device> RowDest<'a, D> {
    /// Overwrites rows.
    pub fn direct(base: TensorMut<'a, D>) -> Self {
        Self { base, accumulate: false }
    }

    /// Shorter borrow.
    pub fn reborrow(&mut self) -> RowDest<'_, D> {
        RowDest { base: self.base.reborrow(), accumulate: self.accumulate }
    }

    /// Adds to rows.
    pub fn adding(base: TensorMut<'a, D>) -> Self {
        Self { base, accumulate: true }
    }
}

/// Routing weight of each slot and where it applies.
#[derive(Debug)]
pub struct SlotWeights<'a, D: Device> {
    /// Accumulator type, `[N]`; any number of them with a map.
    pub values: TensorRef<'a, D>,
    /// Value for each slot, `I32 [N]`, which [`Up`](super::Up) alone follows, at
    /// [`WeightAt::Activation`]; negative at padding.
    pub map: Option<TensorRef<'a, D>>,
    /// Where it meets the expert.
    pub at: WeightAt,
}

impl<D: Device> Clone for SlotWeights<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for SlotWeights<'_, D> {}

impl<D: Device> SlotWeights<'_, D> {
    /// Shorter borrow, to join weights and outputs in one description.
    pub fn borrow(&self) -> SlotWeights<'_, D> {
        SlotWeights { values: self.values.borrow(), map: self.map.as_ref().map(TensorRef::borrow), at: self.at }
    }
}
