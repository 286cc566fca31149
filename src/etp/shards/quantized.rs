//! Shards that are sent quantized: cast once after each change, gathered as codes and scales, and de-quantized on every
//! rank when they are used. Casts and de-quantizing are the computation's work, in its order: kernels of that size
//! beside those that fill a GPU would wait for them.
//!
//! A rank sends its rows' codes and behind them their scales in one piece, so a gather is one collective; what arrives
//! is interleaved by rank, and is read so. Blocks run along rows, which a cut never divides, so that the values are
//! those of each expert quantized whole. In NVFP4 each expert has an amax over all its rows: the ranks' are joined in
//! one all-reduce for all experts of all weights of the chain ([`JoinedAmaxes`]).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Tag};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{
    Amax, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Direction, Fp8BlockMut, Matrix, Mxfp8, Mxfp8Mut, Nvfp4,
    Nvfp4Mut, Quantize, QuantizeFp8Block, QuantizeMxfp8, fp8_block_scale_dims,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::etp::buffers::stream_pair::StreamPair;
use crate::etp::shards::in_place;
use crate::etp::shards::source::ShardSource;
use crate::etp::{Payload, ShardDevice, Shards, WeightSpec};

const NVFP4: Nvfp4 = Nvfp4::TE;
const MXFP8: Mxfp8 = Mxfp8::TE;

/// A weight that is sent quantized.
#[derive(Debug)]
pub(in crate::etp) struct QuantizedShard<D: ShardDevice> {
    payload: Payload,
    shards: Arc<Shards>,
    rank: usize,
    /// Bytes of a row's codes and of its scales.
    row: [usize; 2],
    /// Its experts' places among all whose amaxes are joined.
    amaxes: Range<usize>,
    cast: RwLock<ShardCodes<D>>,
    casts: AtomicU64,
}

/// A rank's shard as it is sent.
#[derive(Debug)]
struct ShardCodes<D: ShardDevice> {
    /// Of which state of the shard; none while it is made.
    epoch: Option<u64>,
    /// Allocated once: by the time that it is made anew, the computation has waited for all gathers of it.
    bytes: Option<Tensor<D>>,
    streams: Arc<StreamPair<D>>,
}

impl<D: ShardDevice> Drop for ShardCodes<D> {
    /// A gather that nobody waited for may still read it.
    fn drop(&mut self) {
        if let (Some(bytes), Err(_)) = (self.bytes.take(), self.streams.rejoin()) {
            std::mem::forget(bytes);
        }
    }
}

/// How a rank's shard of a weight is sent.
#[derive(Debug)]
pub struct ShardForm {
    payload: Payload,
    /// How the weight is divided among the ranks.
    pub shards: Arc<Shards>,
    /// Whose shard it is.
    rank: usize,
    /// Bytes of a row's codes and of its scales; none of a weight that is sent as it is.
    row: Option<[usize; 2]>,
}

impl ShardForm {
    /// The form of `rank`'s shard of a weight.
    ///
    /// # Errors
    /// [`Error::Shard`]: a type, or rows, that the payload cannot send.
    pub fn new(call: &'static str, rank: usize, spec: &WeightSpec, shards: Shards) -> Result<Self> {
        let WeightSpec { payload, dtype, .. } = *spec;
        let refused = |expected: &str, found: String| Error::Shard {
            call,
            rank,
            weight: spec.name.clone(),
            expected: expected.to_string(),
            found,
        };
        if !dtype.is_float() {
            return Err(refused("a floating type", dtype.to_string()));
        }
        let [_, width] = shards.shard_dims();
        let row = match payload {
            Payload::Plain => None,
            _ if !payload.takes(dtype) => {
                return Err(refused("f32, bf16 or f16, to be sent quantized", dtype.to_string()));
            }
            // Two codes are a byte.
            Payload::Nvfp4 if !width.is_multiple_of(2) => {
                let expected = "rows of an even number of elements, to be sent in NVFP4";
                return Err(refused(expected, format!("{width} elements")));
            }
            Payload::Nvfp4 => {
                let sizes = NVFP4.sizes([1, width], Direction::Rows)?;
                Some([sizes.codes[1], sizes.scales[1]])
            }
            Payload::Mxfp8 => Some([width, Mxfp8::scale_dims([1, width], Direction::Rows)[1]]),
            Payload::Fp8Block => Some([width, fp8_block_scale_dims([1, width])[1]]),
        };
        Ok(Self { payload, shards: Arc::new(shards), rank, row })
    }
}

/// The shards that a gather has brought.
#[derive(Debug)]
pub struct GatheredShards<'a, D: Device> {
    /// Codes and scales of every rank's rows, rank after rank.
    pub bytes: TensorRef<'a, D>,
    /// All ranks' amaxes, where the payload has any.
    pub amaxes: Option<TensorRef<'a, D>>,
}

/// Rows of one expert in a rank's shard.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ExpertRows {
    expert: usize,
    /// In the shard.
    rows: Range<usize>,
}

/// The pieces of `rank`'s rows that belong to each expert of `each` rows; padding to none.
fn pieces(shards: &Shards, each: usize, rank: usize) -> Vec<ExpertRows> {
    let [first, all] = [rank * shards.shard_dims()[0], shards.rows_of(rank).end];
    let mut pieces = Vec::new();
    let mut at = first;
    while at < all {
        let expert = at / each;
        let end = all.min((expert + 1) * each);
        pieces.push(ExpertRows { expert, rows: at - first..end - first });
        at = end;
    }
    pieces
}

impl<D: ShardDevice> QuantizedShard<D> {
    /// None of a weight that is sent as it is. `joined` experts' amaxes are joined beside its own.
    pub fn new(streams: &Arc<StreamPair<D>>, form: ShardForm, joined: usize) -> Option<Self> {
        let ShardForm { payload, shards, rank, row } = form;
        let row = row?;
        let dims = shards.dims();
        let experts: usize = dims[..dims.len() - 2].iter().product();
        let own = match payload {
            Payload::Nvfp4 => experts,
            Payload::Plain | Payload::Mxfp8 | Payload::Fp8Block => 0,
        };
        let amaxes = joined..joined + own;
        let cast = RwLock::new(ShardCodes { epoch: None, bytes: None, streams: Arc::clone(streams) });
        Some(Self { payload, shards, rank, row, amaxes, cast, casts: AtomicU64::new(0) })
    }

    fn without_amaxes(&self) -> Error {
        let found = format!("{:?} without amaxes", self.payload);
        Error::invalid("etp gather", "payload", "NVFP4 with amaxes, MXFP8 or fp8 blocks", found)
    }

    /// Bytes of a shard as it is sent: up to 15 at its tail keep each rank's codes where kernels read words of them.
    fn shard_bytes(&self) -> usize {
        (self.shards.shard_dims()[0] * (self.row[0] + self.row[1])).next_multiple_of(16)
    }

    /// Bytes of what a gather brings.
    pub fn bytes(&self) -> usize {
        self.shard_bytes() * self.shards.ranks()
    }

    /// Bytes that are kept from one gather to the next.
    pub fn kept(&self) -> usize {
        self.read_cast().bytes.as_ref().map_or(0, Tensor::bytes)
    }

    /// Casts so far.
    pub fn casts(&self) -> u64 {
        self.casts.load(Ordering::Relaxed)
    }

    /// Experts whose amaxes are joined: all of them, or none.
    pub fn joined(&self) -> usize {
        self.amaxes.len()
    }

    fn pieces(&self, rank: usize) -> Vec<ExpertRows> {
        let dims = self.shards.dims();
        pieces(&self.shards, dims[dims.len() - 2], rank)
    }

    /// Where rows' codes, or scales, are in a rank's bytes.
    fn place(&self, which: usize, rows: &Range<usize>) -> Range<usize> {
        let first = if which == 0 { 0 } else { self.shards.shard_dims()[0] * self.row[0] };
        first + rows.start * self.row[which]..first + rows.end * self.row[which]
    }

    /// A panic while it is made leaves it without an epoch.
    fn read_cast(&self) -> RwLockReadGuard<'_, ShardCodes<D>> {
        self.cast.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_cast(&self) -> RwLockWriteGuard<'_, ShardCodes<D>> {
        self.cast.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is cast as it was in that state.
    pub fn is_of(&self, epoch: u64) -> bool {
        self.read_cast().epoch == Some(epoch)
    }

    /// Copies this rank's codes and scales to their place in what is gathered.
    pub fn put(&self, device: &D, into: TensorMut<'_, D>) -> Result<()> {
        let cast = self.read_cast();
        match (&cast.bytes, cast.epoch) {
            (Some(bytes), Some(_)) => in_place::place(device, self.rank, bytes.view(), into),
            _ => Err(Error::invalid("etp gather", "shard", "to be cast", "nothing")),
        }
    }

    /// Gathers codes and scales into `into`.
    pub fn gather(&self, comm: &mut dyn Communicator<D>, tag: Tag, into: TensorMut<'_, D>) -> Result<()> {
        let cast = self.read_cast();
        match (&cast.bytes, cast.epoch) {
            (Some(bytes), Some(_)) => comm.all_gather(tag, bytes.view(), into),
            _ => {
                let error = Error::invalid("etp gather", "shard", "to be cast", "nothing");
                refuse_on_error(comm, tag, Err(error))
            }
        }
    }

    /// Quantizes the shard's state of that number. `amaxes` are all ranks'.
    pub fn cast(
        &self,
        device: &D,
        epoch: u64,
        source: &dyn ShardSource<D>,
        amaxes: Option<TensorMut<'_, D>>,
    ) -> Result<()> {
        let mut cast = self.write_cast();
        cast.epoch = None;
        let bytes = match &mut cast.bytes {
            Some(bytes) => bytes,
            // Padding is never written.
            empty => empty.insert(Tensor::zeros(device, DType::U8, &[self.shard_bytes()])?),
        };
        self.quantize(device, source, bytes, amaxes)?;
        cast.epoch = Some(epoch);
        self.casts.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Calls `f` with the shard, once it is known to have the weight's sizes.
    fn read<R>(&self, source: &dyn ShardSource<D>, mut f: impl FnMut(TensorRef<'_, D>) -> Result<R>) -> Result<R> {
        let mut result = None;
        source.read(&mut |shard| {
            Error::check_shape("etp gather", "shard", &self.shards.shard_dims(), shard.dims())?;
            result = Some(f(shard)?);
            Ok(())
        })?;
        result.ok_or_else(|| Error::invalid("etp gather", "shard", "to be read", "nothing"))
    }

    /// This rank's amaxes, each to its place in `all`, which holds zeros.
    pub fn own_amaxes(&self, device: &D, source: &dyn ShardSource<D>, mut all: TensorMut<'_, D>) -> Result<()> {
        let pieces = self.pieces(self.rank);
        self.read(source, |shard| {
            let mut calls = Vec::with_capacity(pieces.len());
            let mut rest = all.reborrow().into_data();
            let mut at = 0;
            for ExpertRows { expert, rows } in &pieces {
                let matrix = Matrix::new(part(&shard, rows)?)?;
                // Experts come in order, none twice.
                let place = (self.amaxes.start + expert) * 4 - at;
                let (slot, behind) = D::split_mut(rest, place + 4);
                (rest, at) = (behind, at + place + 4);
                let amax = TensorMut::new(D::slice_mut(slot, place..place + 4), DType::F32, &[1])?;
                calls.push(Amax { format: &NVFP4, matrix, rows: Some(amax), columns: None });
            }
            device.multi_compute_amax(calls)
        })
    }

    /// Codes and scales of this rank's rows, to their places in what is sent.
    fn quantize(
        &self,
        device: &D,
        source: &dyn ShardSource<D>,
        bytes: &mut Tensor<D>,
        mut amaxes: Option<TensorMut<'_, D>>,
    ) -> Result<()> {
        let pieces = self.pieces(self.rank);
        // Codes of all rows come before all scales.
        let first_scale = self.place(1, &(0..0)).start;
        self.read(source, |shard| {
            for ExpertRows { expert, rows } in &pieces {
                let matrix = Matrix::new(part(&shard, rows)?)?;
                let (codes, scales) = D::split_mut(bytes.view_mut().into_data(), first_scale);
                let [at, behind] = [self.place(0, rows), self.place(1, rows)];
                let codes = TensorMut::new(D::slice_mut(codes, at), DType::U8, &[rows.len(), self.row[0]])?;
                let behind = behind.start - first_scale..behind.end - first_scale;
                let scales = TensorMut::new(D::slice_mut(scales, behind), DType::U8, &[rows.len(), self.row[1]])?;
                match (self.payload, &mut amaxes) {
                    (Payload::Nvfp4, Some(amaxes)) => {
                        let at = (self.amaxes.start + expert) * 4;
                        let slot = D::slice_mut(amaxes.reborrow().into_data(), at..at + 4);
                        let amax = TensorMut::new(slot, DType::F32, &[1])?;
                        let rows = Some(Nvfp4Mut { codes, scales, amax });
                        let call = Quantize { format: &NVFP4, matrix, rows, columns: None };
                        device.quantize_cast_only(call)?;
                    }
                    (Payload::Nvfp4, None) | (Payload::Plain, _) => return Err(self.without_amaxes()),
                    (Payload::Mxfp8, _) => {
                        let rows = Some(Mxfp8Mut { codes, scales });
                        let call = QuantizeMxfp8 { format: MXFP8, matrix, rows, columns: None };
                        device.quantize_mxfp8(call)?;
                    }
                    (Payload::Fp8Block, _) => {
                        let rows = Fp8BlockMut { codes, scales };
                        device.quantize_fp8_block(QuantizeFp8Block { matrix, rows })?;
                    }
                }
            }
            Ok(())
        })
    }

    /// Dequantizes every rank's rows to their place in the gathered weight, in one call; its padding stays as
    /// it was.
    pub fn dequantize(
        &self,
        device: &D,
        GatheredShards { bytes, amaxes }: GatheredShards<'_, D>,
        mut into: TensorMut<'_, D>,
    ) -> Result<()> {
        let ([shard_rows, width], dtype) = (self.shards.shard_dims(), into.dtype());
        let row_bytes = into.row_bytes();
        let (mut nvfp4, mut mxfp8, mut fp8_block) = (Vec::new(), Vec::new(), Vec::new());
        let mut rest = into.reborrow().into_data();
        let mut at = 0;
        for rank in 0..self.shards.ranks() {
            let first = rank * self.shard_bytes();
            for ExpertRows { expert, rows } in self.pieces(rank) {
                let side = |which: usize| {
                    let Range { start, end } = self.place(which, &rows);
                    let bytes = D::slice(D::shorten(bytes.data()), first + start..first + end);
                    TensorRef::new(bytes, DType::U8, &[rows.len(), self.row[which]])
                };
                let (codes, scales) = (side(0)?, side(1)?);
                // Ranks and their pieces come in order; between them may be padding.
                let start = (rank * shard_rows + rows.start) * row_bytes - at;
                let end = start + rows.len() * row_bytes;
                let (to, behind) = D::split_mut(rest, end);
                (rest, at) = (behind, at + end);
                let out = TensorMut::new(D::slice_mut(to, start..end), dtype, &[rows.len(), width])?;
                match (self.payload, &amaxes) {
                    (Payload::Nvfp4, Some(amaxes)) => {
                        let at = (self.amaxes.start + expert) * 4;
                        let slot = D::slice(D::shorten(amaxes.data()), at..at + 4);
                        let amax = TensorRef::new(slot, DType::F32, &[1])?;
                        nvfp4.push(Dequantize { format: &NVFP4, codes, scales, amax, out });
                    }
                    (Payload::Nvfp4, None) | (Payload::Plain, _) => return Err(self.without_amaxes()),
                    (Payload::Mxfp8, _) => {
                        mxfp8.push(DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out });
                    }
                    (Payload::Fp8Block, _) => fp8_block.push(DequantizeFp8Block { codes, scales, out }),
                }
            }
        }
        match self.payload {
            Payload::Mxfp8 => device.multi_dequantize_mxfp8(mxfp8),
            Payload::Fp8Block => device.multi_dequantize_fp8_block(fp8_block),
            Payload::Nvfp4 | Payload::Plain => device.multi_dequantize(nvfp4),
        }
    }
}

/// Rows of a matrix.
fn part<'a, D: Device>(of: &'a TensorRef<'_, D>, rows: &Range<usize>) -> Result<TensorRef<'a, D>> {
    let row = of.row_bytes();
    let data = D::slice(D::shorten(of.data()), rows.start * row..rows.end * row);
    TensorRef::new(data, of.dtype(), &[rows.len(), of.dims()[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_experts_in_shards() {
        // 3 experts of 5 rows over shards of 6: 0‥5 and a row; four rows and two; three rows and padding.
        let shards = Shards::new(&[3, 5, 2], 3, 6).unwrap();
        assert_eq!((shards.shard_dims(), shards.padding()), ([6, 2], 3));
        let piece = |expert, rows| ExpertRows { expert, rows };
        assert_eq!(pieces(&shards, 5, 0), [piece(0, 0..5), piece(1, 5..6)]);
        assert_eq!(pieces(&shards, 5, 1), [piece(1, 0..4), piece(2, 4..6)]);
        assert_eq!(pieces(&shards, 5, 2), [piece(2, 0..3)]);
        // A rank of nothing but padding.
        let shards = Shards::new(&[1, 15, 2], 2, 16).unwrap();
        assert_eq!((pieces(&shards, 15, 0), pieces(&shards, 15, 1)), (vec![piece(0, 0..15)], vec![]));
    }
}
