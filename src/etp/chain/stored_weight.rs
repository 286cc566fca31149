//! Frozen weights that are shards as they are stored: codes, scales and factors behind one another are one run of bytes,
//! which is cut, gathered in one collective, and read by the product where it lies. Nothing is de-quantized before.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::chain::Chain;
use crate::etp::chain::add::NewShard;
use crate::etp::chain::gather::ShardedWeight;
use crate::etp::shards::source::Shard;
use crate::etp::{ShardDevice, Shards, WeightId, WeightSpec};
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

#[cfg(any(feature = "candle", feature = "burn"))]
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

/// Where a rank keeps its shard of a frozen weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardPlace {
    /// In the device's memory.
    Device,
    /// In page-locked memory of the host.
    Host,
}

/// A weight that stays quantized, before it has a shard; as in [`WeightSpec`].
#[derive(Debug)]
pub(crate) struct StoredSpec {
    pub(crate) name: String,
    pub(crate) layer: u32,
    pub(crate) recompute: bool,
}

impl StoredSpec {
    /// The weight with its shard.
    fn with<D: ShardDevice>(self, (cut, layout): (Shards, StoredLayout), shard: Shard<D>) -> NewQuantized<D> {
        let mut spec = WeightSpec::new(self.name, self.layer, cut.dims(), DType::F32);
        spec.recompute = self.recompute;
        NewQuantized { shard: NewShard::new(spec, Arc::new(shard)), layout }
    }
}

impl StoredLayout {
    /// Of a weight, and the lines that its bytes are: words of 32 bits, as scales and factors may be, which nobody reads
    /// as numbers on the way.
    fn new<D: Device>(weight: &QuantizedRef<'_, D>) -> (Self, [usize; 2]) {
        let parts = [Some(weight.codes), Some(weight.scales), weight.factors];
        let (places, bytes) = places(parts.map(|part| part.map_or(0, |part| D::len(part.data()))));
        let QuantizedRef { format, dims, parts, .. } = *weight;
        (Self { format, dims, parts, places }, [bytes / LINE, LINE / DType::F32.size()])
    }

    /// The weight, once a chain has it.
    fn of(self, id: WeightId) -> QuantizedWeight {
        QuantizedWeight { id, layout: self }
    }
}

#[cfg(any(feature = "candle", feature = "burn"))]
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
        let of = StoredSpec { name: name.into(), layer, recompute };
        self.add_stored(self.cut_quantized(of, weight, ShardPlace::Device)?)
    }

    /// The same with the shard in page-locked memory of the host, in a chain of one rank.
    ///
    /// # Errors
    /// As [`add`](Self::add) and [`ShardDevice::page_locked`].
    pub fn add_quantized_on_host(
        &self,
        name: impl Into<String>,
        layer: u32,
        recompute: bool,
        weight: &Quantized<D>,
    ) -> Result<QuantizedWeight> {
        let of = StoredSpec { name: name.into(), layer, recompute };
        self.add_stored(self.cut_quantized(of, weight, ShardPlace::Host)?)
    }

    fn add_stored(&self, NewQuantized { shard, layout }: NewQuantized<D>) -> Result<QuantizedWeight> {
        Ok(layout.of(self.add(shard.spec, shard.source)?))
    }

    /// This rank's shard of such a weight, which the chain has not got yet.
    ///
    /// # Errors
    /// Where there is no memory.
    pub(crate) fn cut_quantized(
        &self,
        of: StoredSpec,
        weight: &Quantized<D>,
        place: ShardPlace,
    ) -> Result<NewQuantized<D>> {
        let weight = weight.view();
        let (layout, lines) = StoredLayout::new(&weight);
        let cut = self.shards(&lines)?;
        let own = cut.rows_of(self.rank());
        let own = own.start * LINE..own.end * LINE;
        let (device, dims) = (self.device(), cut.shard_dims());
        let mut shard = match place {
            ShardPlace::Device => Tensor::zeros(device, DType::F32, &dims)?,
            ShardPlace::Host => device.page_locked(DType::F32, &dims, &mut |_| {})?,
        };
        let sources = [Some(weight.codes), Some(weight.scales), weight.factors];
        for (part, place) in sources.iter().zip(&layout.places) {
            let (Some(part), wanted) = (part, place.start.max(own.start)..place.end.min(own.end)) else { continue };
            if wanted.is_empty() {
                continue;
            }
            let from = D::slice(part.data(), wanted.start - place.start..wanted.end - place.start);
            let to = D::slice_mut(shard.view_mut().into_data(), wanted.start - own.start..wanted.end - own.start);
            device.copy(from, to)?;
        }
        let shard = match place {
            ShardPlace::Device => Shard::new(shard),
            ShardPlace::Host => Shard::page_locked(shard),
        };
        Ok(of.with((cut, layout), shard))
    }

    /// The shard, in page-locked memory of the host, of a weight whose parts are the host's too: they do not pass through
    /// the device.
    ///
    /// # Errors
    /// A chain of several ranks; as [`ShardDevice::page_locked`].
    #[cfg(feature = "candle")]
    pub(crate) fn host_quantized<H>(&self, of: StoredSpec, weight: &Quantized<H>) -> Result<NewQuantized<D>>
    where
        H: for<'b> Device<Ref<'b> = &'b [u8]>,
    {
        let weight = weight.view();
        let (layout, lines) = StoredLayout::new(&weight);
        let cut = self.shards(&lines)?;
        let parts = [Some(weight.codes), Some(weight.scales), weight.factors];
        let mut fill = |to: &mut [u8]| {
            for (part, place) in parts.iter().zip(&layout.places) {
                if let Some(part) = part {
                    to[place.clone()].copy_from_slice(part.data());
                }
            }
        };
        // Of all rows: adding it tells a chain of several ranks that it cannot be.
        let shard = self.device().page_locked(DType::F32, &lines, &mut fill)?;
        Ok(of.with((cut, layout), Shard::page_locked(shard)))
    }

    /// Such a weight as a layer takes it.
    ///
    /// # Errors
    /// A weight that there is not.
    pub fn quantized_source(&self, weight: &QuantizedWeight) -> Result<ShardedQuantized<'_, D>> {
        Ok(ShardedQuantized { bytes: self.source(weight.id)?, weight: weight.clone() })
    }
}
