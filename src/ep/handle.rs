//! Routing of one prepare, owned by its caller.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernels::{Kernels, Origin, Segments};
use crate::lazy::Lazy;
use crate::metrics::Load;
#[cfg(feature = "nccl")]
use crate::plan::ZoneMaps;
use crate::plan::{DispatchSpec, Plan, Stats};
use crate::tensor::{Tensor, TensorRef};

use super::hop_maps::HopMaps;

/// Routing that prepare made: an owned value that backward needs again. Several may be in flight.
#[derive(Debug)]
pub struct Handle<D: Kernels> {
    pub(super) spec: DispatchSpec,
    pub(super) rank: usize,
    /// Number of the prepare that made it, the same on all ranks.
    pub(super) sequence: u64,
    pub(super) agreement: Agreement,
    pub(super) plan: Plan<D>,
    /// The group that prepared it.
    pub(super) group: Arc<()>,
    /// Tokens of each rank; where all are gathered and a device made the plan, with their padding.
    pub(super) tokens: Vec<usize>,
    /// Received rows lie in slots.
    pub(crate) in_slots: bool,
    /// Maps of the two hops that rows take between hosts.
    pub(super) hops: Option<HopMaps<D>>,
    /// What the dispatcher keeps of this routing, and finds again by `sequence`.
    pub(super) _kept_routing: Option<KeptRouting>,
}

/// Shared ownership of what a library's dispatcher keeps of a routing. The handle only lets it go.
pub(crate) type KeptRouting = Arc<dyn fmt::Debug + Send + Sync>;

/// Which ranks asked for backward in prepare. Backward runs its collectives only if all did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// Ranks that did not ask.
    pub absent: Vec<usize>,
}

impl<D: Kernels> Handle<D> {
    /// The specification that the handle was made for.
    pub fn spec(&self) -> &DispatchSpec {
        &self.spec
    }

    /// The rank and layer that it is of, for errors.
    pub fn origin(&self) -> Origin {
        Origin { rank: self.rank, layer: self.spec.layer }
    }

    /// Number of this prepare among its group's.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Tokens T of this rank.
    pub fn tokens(&self) -> usize {
        self.plan.tokens
    }

    /// Tokens of all ranks; of this one alone where prepare did not wait (NCCL EP, or all-gather with a static
    /// capacity; [`Reporting::Deferred`]).
    ///
    /// [`Reporting::Deferred`]: super::Reporting::Deferred
    pub fn total_tokens(&self) -> usize {
        self.plan.total_tokens
    }

    /// Number of this rank's first token among all ranks' tokens; 0 where prepare did not wait, as above.
    pub fn first_token(&self) -> usize {
        self.plan.first_token
    }

    /// Where the local experts' rows lie.
    pub fn segments(&self) -> &Arc<Segments<D>> {
        &self.plan.segments
    }

    /// Rows N of expert-major buffers: the static capacity, or what this step needs (at most, see
    /// [`Capacity::Eager`](super::Capacity::Eager)).
    pub fn rows(&self) -> usize {
        self.plan.segments.rows
    }

    /// Counts, as data. Waits for the device where it made the plan itself.
    ///
    /// # Errors
    /// As [`Lazy::get`].
    pub fn stats(&self) -> Result<&Stats> {
        self.plan.stats.get()
    }

    /// Load of the experts over all ranks, to be read later.
    pub(crate) fn load(&self) -> Lazy<Load> {
        let stats = self.plan.stats.clone();
        Lazy::from_fn(move || stats.get().map(|s| Load::new(s.expert_load.clone(), s.dropped)))
    }

    /// This rank's ids after dropping, `I32 [T, K]`; −1 where dropped.
    pub fn kept_ids(&self) -> TensorRef<'_, D> {
        self.plan.kept_ids.view()
    }

    /// Row of a [`Received`](super::Received) for each slot, `I32 [N]`.
    pub fn row_map(&self) -> TensorRef<'_, D> {
        self.plan.row_map.view()
    }

    /// Maps of rows that travel into zones.
    #[cfg(feature = "nccl")]
    pub(crate) fn zones(&self, call: &'static str) -> Result<&ZoneMaps<D>> {
        let missing = || Error::invalid(call, "plan.zones", "those of RowOrder::Zones", "none");
        self.plan.zones.as_ref().ok_or_else(missing)
    }

    /// Whether all ranks asked for backward; where prepare did not wait, this one alone.
    pub fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// Refuses backward where not all ranks asked for it, before any collective.
    ///
    /// # Errors
    /// [`Error::BackwardNotAgreed`] with the ranks that did not ask for it.
    pub(crate) fn check_backward(&self, call: &'static str) -> Result<()> {
        if self.agreement.absent.is_empty() {
            return Ok(());
        }
        Err(Error::BackwardNotAgreed { call, rank: self.rank, absent: self.agreement.absent.clone() })
    }

    /// Has what the dispatcher keeps of this routing live as long as the handle.
    #[cfg(feature = "nccl-ep")]
    pub(crate) fn keep_alive(&mut self, routing: KeptRouting) {
        self._kept_routing = Some(routing);
    }

    pub(crate) fn slot_tensor(&self, device: &D, dtype: crate::DType, width: usize) -> Result<Tensor<D>> {
        Tensor::empty(device, dtype, &[self.rows(), width])
    }
}
