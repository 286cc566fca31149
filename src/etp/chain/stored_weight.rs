//! Frozen weights that are shards as they are stored: codes, scales and factors behind one another are one run of bytes,
//! which is cut, gathered in one collective, and read by the product where it lies. Nothing is de-quantized before.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::chain::Chain;
use crate::etp::chain::add::NewShard;
use crate::etp::chain::gather::ShardedWeight;
use crate::etp::shards::source::Shard;
use crate::etp::{ShardDevice, WeightId, WeightSpec};
use crate::quant::{Quantized, QuantizedRef, WeightFormat};
use crate::tensor::{Tensor, TensorRef};
use crate::weights::{AcquiredWeight, Weight, WeightGuard, WeightSource};

/// Bytes that each part begins at a multiple of, and that are a line of the cut.
const LINE: usize = 256;

/// A weight of a chain that stays quantized, and where its parts lie among its bytes.
#[derive(Debug, Clone)]
pub struct QuantizedWeight {
    id: WeightId,
    layout: StoredLayout,
}

/// The parts of a weight that stays quantized, and where they lie among its bytes.
#[derive(Debug, Clone)]
struct StoredLayout {
    format: WeightFormat,
    dims: [usize; 3],
    parts: usize,
    /// Of codes, scales and factors.
    places: Places,
}

#[cfg(feature = "candle")]
impl QuantizedWeight {
    pub(crate) fn id(&self) -> WeightId {
        self.id
    }
}

/// A weight that stays quantized, on its way to a chain.
pub(crate) struct NewQuantized<D: ShardDevice> {
    /// This rank's part of its bytes.
    shard: NewShard<D>,
    layout: StoredLayout,
}

impl StoredLayout {
    /// The weight, once a chain has it.
    fn of(self, id: WeightId) -> QuantizedWeight {
        QuantizedWeight { id, layout: self }
    }
}

#[cfg(feature = "candle")]
impl<D: ShardDevice> NewQuantized<D> {
    /// Gives both to a chain, or after an error neither.
    ///
    /// # Errors
    /// As [`Chain::add_all`].
    pub(crate) fn add_both(chain: &Chain<D>, [one, other]: [Self; 2]) -> Result<[QuantizedWeight; 2]> {
        let [first, second] = chain.add_all([one.shard, other.shard])?;
        Ok([one.layout.of(first), other.layout.of(second)])
    }
}

type Places = [Range<usize>; 3];

/// The places of parts of these sizes, and the bytes of all.
fn places(bytes: [usize; 3]) -> (Places, usize) {
    let mut end = 0;
    let places = bytes.map(|bytes| {
        let first = end;
        end = (first + bytes).next_multiple_of(LINE);
        first..first + bytes
    });
    (places, end)
}

/// Such a weight as a layer takes it.
pub struct ShardedQuantized<'a, D: ShardDevice> {
    bytes: ShardedWeight<'a, D>,
    weight: QuantizedWeight,
}

impl<D: ShardDevice> ShardedQuantized<'_, D> {
    /// As [`ShardedWeight::without_backward`].
    pub fn without_backward(self) -> Self {
        self.with_backward(false)
    }

    pub(crate) fn with_backward(self, backward: bool) -> Self {
        Self { bytes: self.bytes.with_backward(backward), ..self }
    }
}

impl<D: ShardDevice> fmt::Debug for ShardedQuantized<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardedQuantized<{:?} {:?}>", self.weight.layout.format, self.weight.layout.dims)
    }
}

impl<D: ShardDevice> WeightSource<D> for ShardedQuantized<'_, D> {
    fn dims(&self) -> &[usize] {
        &self.weight.layout.dims
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        let mut bytes = self.bytes.acquire()?;
        let ready = bytes.ready.take();
        Ok(WeightGuard::acquired(Box::new(GatheredBytes { bytes, weight: &self.weight }), ready))
    }

    fn frozen(&self) -> bool {
        true
    }
}

/// Gathered bytes in use.
#[derive(Debug)]
struct GatheredBytes<'a, D: ShardDevice> {
    bytes: WeightGuard<'a, D>,
    weight: &'a QuantizedWeight,
}

impl<D: ShardDevice> AcquiredWeight<D> for GatheredBytes<'_, D> {
    fn tensor(&self) -> Result<TensorRef<'_, D>> {
        let found = format!("one in {:?}", self.weight.layout.format);
        Err(Error::invalid("WeightGuard::tensor", "weight", "one of floating type", found))
    }

    fn weight(&self) -> Result<Weight<'_, D>> {
        let bytes = self.bytes.tensor()?;
        let StoredLayout { format, dims, parts, places: [codes, scales, factors] } = &self.weight.layout;
        let part = |place: &Range<usize>, dtype, dims: &[usize]| {
            TensorRef::new(D::slice(bytes.data(), place.clone()), dtype, dims)
        };
        let (dtype, scale_dims) = format.scales(*dims, *parts);
        Ok(Weight::Quantized(QuantizedRef {
            format: *format,
            dims: *dims,
            parts: *parts,
            codes: part(codes, DType::U8, &format.code_dims(*dims))?,
            scales: part(scales, dtype, &scale_dims)?,
            factors: match factors.is_empty() {
                true => None,
                false => Some(part(factors, DType::F32, &[dims[0], *parts])?),
            },
        }))
    }
}

impl<D: ShardDevice> Chain<D> {
    /// Adds a frozen weight that stays quantized, before the first forward: of `weight`, which all ranks have alike, it
    /// keeps this rank's shard. `layer` and `recompute` as in [`WeightSpec`]. It has no gradient; gradients pass through
    /// it to the rows.
    ///
    /// # Errors
    /// As [`add`](Self::add); where there is no memory.
    pub fn add_quantized(
        &self,
        name: impl Into<String>,
        layer: u32,
        recompute: bool,
        weight: &Quantized<D>,
    ) -> Result<QuantizedWeight> {
        let NewQuantized { shard, layout } = self.cut_quantized(name, layer, recompute, weight)?;
        Ok(layout.of(self.add(shard.spec, shard.source)?))
    }

    /// This rank's shard of such a weight, which the chain has not got yet.
    ///
    /// # Errors
    /// Where there is no memory.
    pub(crate) fn cut_quantized(
        &self,
        name: impl Into<String>,
        layer: u32,
        recompute: bool,
        weight: &Quantized<D>,
    ) -> Result<NewQuantized<D>> {
        let QuantizedRef { format, dims, parts, codes, scales, factors } = weight.view();
        let sources = [Some(codes), Some(scales), factors];
        let (places, bytes) = places([0, 1, 2].map(|i| sources[i].as_ref().map_or(0, |part| D::len(part.data()))));
        // Words of 32 bits, as scales and factors may be, which nobody reads as numbers on the way.
        let word = DType::F32.size();
        let cut = self.shards(&[bytes / LINE, LINE / word])?;
        let own = cut.rows_of(self.rank());
        let own = own.start * LINE..own.end * LINE;
        let mut shard = Tensor::zeros(self.device(), DType::F32, &cut.shard_dims())?;
        for (part, place) in sources.iter().zip(&places) {
            let (Some(part), wanted) = (part, place.start.max(own.start)..place.end.min(own.end)) else { continue };
            if wanted.is_empty() {
                continue;
            }
            let from = D::slice(part.data(), wanted.start - place.start..wanted.end - place.start);
            let to = D::slice_mut(shard.view_mut().into_data(), wanted.start - own.start..wanted.end - own.start);
            self.device().copy(from, to)?;
        }
        let mut spec = WeightSpec::new(name, layer, cut.dims(), DType::F32);
        spec.recompute = recompute;
        let shard = NewShard::new(spec, Arc::new(Shard::new(shard)));
        Ok(NewQuantized { shard, layout: StoredLayout { format, dims, parts, places } })
    }

    /// Such a weight as a layer takes it.
    ///
    /// # Errors
    /// A weight that there is not.
    pub fn quantized_source(&self, weight: &QuantizedWeight) -> Result<ShardedQuantized<'_, D>> {
        Ok(ShardedQuantized { bytes: self.source(weight.id)?, weight: weight.clone() })
    }
}
