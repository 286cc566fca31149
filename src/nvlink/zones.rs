//! Memory that rows arrive in. Each rank says in each call where in its memory the peers are to write, so ranks need not
//! agree on which of their zones are free.

use std::sync::Arc;

use crate::cuda::nvlink::ZoneLayout;
use crate::cuda::{Cuda, DeviceMut};
use crate::dtype::DType;
use crate::ep::packing::ReceivedRows;
use crate::error::Result;
use crate::nccl::PeerMemory;
use crate::tensor::Tensor;

/// A zone that rows may stay in after their call.
#[derive(Debug, Default)]
struct KeptZone {
    /// Shared with the tensors that lie there.
    lease: Arc<()>,
    /// Shared with the graphs that write there in each of their replays: while there are any, calls outside graphs keep
    /// away. Graphs may share a zone, since each has read it by its end, or else the tensor that it returns has the lease.
    graphs: Arc<()>,
}

/// Zones of one size: the first for rows that no call leaves there, and others that tensors keep.
#[derive(Debug)]
pub(super) struct Zones {
    memory: PeerMemory,
    bytes: usize,
    kept: Vec<KeptZone>,
}

/// A zone of a call.
#[derive(Debug, Clone)]
pub(super) struct ZonePlace {
    /// Where it begins.
    pub(super) offset: usize,
    /// What the rows' tensors hold; `None`: the next call writes there.
    lease: Option<Arc<()>>,
    /// What a graph holds.
    graphs: Option<Arc<()>>,
}

impl Zones {
    /// Memory for one zone and `kept` others.
    pub(super) fn bytes_of(bytes: usize, kept: usize) -> usize {
        bytes.saturating_mul(kept + 1)
    }

    /// Zones of so many bytes each in memory that has room for them.
    pub(super) fn new(memory: PeerMemory, bytes: usize, kept: usize) -> Self {
        Self { memory, bytes, kept: (0..kept).map(|_| KeptZone::default()).collect() }
    }

    /// Bytes of a zone.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where each rank's memory begins.
    pub(super) fn addresses(&self) -> &[u64] {
        self.memory.addresses()
    }

    pub(super) fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    pub(super) fn into_memory(self) -> PeerMemory {
        self.memory
    }

    /// The zone for rows that leave it within their call.
    pub(super) fn passing(&self) -> ZonePlace {
        ZonePlace { offset: 0, lease: None, graphs: None }
    }

    /// A zone that nobody has; where there is none, that for passing rows.
    pub(super) fn free(&self, capturing: bool) -> ZonePlace {
        let alone = |shared: &Arc<()>| Arc::strong_count(shared) == 1;
        let fits = |zone: &KeptZone| alone(&zone.lease) && (capturing || alone(&zone.graphs));
        let Some(i) = self.kept.iter().position(fits) else { return self.passing() };
        let KeptZone { lease, graphs } = &self.kept[i];
        let (lease, graphs) = (Some(Arc::clone(lease)), Some(Arc::clone(graphs)));
        ZonePlace { offset: (i + 1) * self.bytes, lease, graphs }
    }

    /// Bytes of a zone that a call is to write to.
    pub(super) fn part(&mut self, place: &ZonePlace, bytes: usize) -> Result<DeviceMut<'_>> {
        self.memory.part(place.offset, bytes)
    }

    /// Part of a zone as a tensor, which keeps the zone.
    pub(super) fn tensor(&self, place: &ZonePlace, at: usize, dtype: DType, dims: &[usize]) -> Result<Tensor<Cuda>> {
        let lease = place.lease.clone().unwrap_or_default();
        // SAFETY: peers write to a zone only in a call for which this rank has named it, on its stream, and it names none
        // that a tensor keeps; rows of the passing zone are copied before the next call.
        unsafe { self.memory.tensor(place.offset + at, dtype, dims, lease) }
    }
}

impl ZonePlace {
    /// Whether rows may stay there.
    pub(super) fn keeps(&self) -> bool {
        self.lease.is_some()
    }

    /// What a graph holds that writes there.
    pub(super) fn graph_lease(&self) -> Option<Arc<()>> {
        self.graphs.clone()
    }
}

/// Sizes of what arrives.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReceivedSizes {
    pub(super) rows: usize,
    pub(super) dtype: DType,
    pub(super) width: usize,
    /// Weights of a row, and their type.
    pub(super) weights: Option<(usize, DType)>,
    /// Bytes of a row's scales.
    pub(super) scales: Option<usize>,
}

impl ReceivedSizes {
    /// Bytes of a row's weights.
    pub(super) fn weight_bytes(&self) -> usize {
        self.weights.map_or(0, |(count, dtype)| count * dtype.size())
    }

    pub(super) fn layout(&self) -> ZoneLayout {
        let (weights, scales) = (self.weight_bytes(), self.scales.unwrap_or(0));
        ZoneLayout::new(self.rows * self.width * self.dtype.size(), self.rows * weights, self.rows * scales)
    }

    /// As tensors that `make` gives, from where each begins, its type and its shape.
    pub(super) fn tensors(
        &self,
        make: impl Fn(usize, DType, &[usize]) -> Result<Tensor<Cuda>>,
    ) -> Result<ReceivedRows<Cuda>> {
        let layout = self.layout();
        let weights = |(count, dtype)| make(layout.weights, dtype, &[self.rows * count]);
        let scales = |bytes| make(layout.scales, DType::U8, &[self.rows, bytes]);
        Ok(ReceivedRows {
            rows: Some(make(0, self.dtype, &[self.rows, self.width])?),
            weights: self.weights.map(weights).transpose()?,
            scales: self.scales.map(scales).transpose()?,
        })
    }
}
