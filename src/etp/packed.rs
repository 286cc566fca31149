//! Shards that travel quantised: cast once after each change, gathered as codes and scales, and de-quantised on every
//! rank when they are used. Casts are the lane's work, de-quantising is the computation's: a kernel of that size would
//! wait on a GPU for what the computation runs.
//!
//! A rank sends its rows' codes and behind them their scales in one piece, so a gather is one collective; what arrives
//! is interleaved by rank, and is read so. Blocks run along rows, which a cut never divides, so that the values are
//! those of each expert quantised whole. In NVFP4 each expert has an amax over all its rows: the ranks' are joined in
//! one all-reduce for all experts of the weight.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, ReduceOp, Tag};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{
    Amax, Dequantize, DequantizeMxfp8, Direction, Matrix, Mxfp8, Mxfp8Mut, Nvfp4, Nvfp4Mut, Quantize, QuantizeMxfp8,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::source::ShardSource;
use super::{Payload, ShardDevice, Shards};

const NVFP4: Nvfp4 = Nvfp4::TE;
const MXFP8: Mxfp8 = Mxfp8::TE;

/// A weight that travels quantised.
#[derive(Debug)]
pub(super) struct Packed<D: ShardDevice> {
    /// The lane's, whose memory the cast is.
    device: D,
    stream: D::Stream,
    payload: Payload,
    shards: Arc<Shards>,
    rank: usize,
    /// Bytes of a row's codes and of its scales.
    row: [usize; 2],
    cast: Mutex<Option<Arc<Cast<D>>>>,
    casts: AtomicU64,
}

/// A rank's shard as it travels.
#[derive(Debug)]
struct Cast<D: Device> {
    /// Of which state of the shard.
    epoch: u64,
    bytes: Tensor<D>,
    /// `F32 [L]` of all ranks; unused in MXFP8.
    amaxes: Tensor<D>,
}

/// Rows of one expert in a rank's shard.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    expert: usize,
    /// In the shard.
    rows: Range<usize>,
}

/// What of the rows of `rank` belongs to which expert of `each` rows; padding to none.
fn pieces(shards: &Shards, each: usize, rank: usize) -> Vec<Piece> {
    let [first, all] = [rank * shards.shard_dims()[0], shards.rows_of(rank).end];
    let mut pieces = Vec::new();
    let mut at = first;
    while at < all {
        let expert = at / each;
        let end = all.min((expert + 1) * each);
        pieces.push(Piece { expert, rows: at - first..end - first });
        at = end;
    }
    pieces
}

impl<D: ShardDevice> Packed<D> {
    /// None of a weight that travels as it is.
    ///
    /// # Errors
    /// Rows that the form cannot have, or a type.
    pub fn new(
        device: &D,
        (payload, dtype): (Payload, DType),
        (shards, rank): (Arc<Shards>, usize),
    ) -> Result<Option<Self>> {
        let [_, width] = shards.shard_dims();
        let row = match payload {
            Payload::Plain => return Ok(None),
            Payload::Nvfp4 => {
                let sizes = NVFP4.sizes([1, width], Direction::Rows)?;
                [sizes.codes[1], sizes.scales[1]]
            }
            Payload::Mxfp8 => [width, Mxfp8::scale_dims([1, width], Direction::Rows)[1]],
        };
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::invalid("Chain::add", "payload", "a weight of f32, bf16 or f16", dtype));
        }
        let (device, stream) = (device.clone(), device.own_stream());
        let (cast, casts) = (Mutex::new(None), AtomicU64::new(0));
        Ok(Some(Self { device, stream, payload, shards, rank, row, cast, casts }))
    }

    /// Bytes of a shard as it travels.
    fn shard_bytes(&self) -> usize {
        self.shards.shard_dims()[0] * (self.row[0] + self.row[1])
    }

    /// Bytes of what a gather brings.
    pub fn bytes(&self) -> usize {
        self.shard_bytes() * self.shards.ranks()
    }

    /// Bytes that are kept from one gather to the next.
    pub fn kept(&self) -> usize {
        if self.casts() == 0 { 0 } else { self.shard_bytes() + 4 * self.experts() }
    }

    /// Casts so far.
    pub fn casts(&self) -> u64 {
        self.casts.load(Ordering::Relaxed)
    }

    fn experts(&self) -> usize {
        let dims = self.shards.dims();
        dims[..dims.len() - 2].iter().product()
    }

    fn pieces(&self, rank: usize) -> Vec<Piece> {
        let dims = self.shards.dims();
        pieces(&self.shards, dims[dims.len() - 2], rank)
    }

    /// Where rows' codes, or scales, are in a rank's bytes.
    fn place(&self, which: usize, rows: &Range<usize>) -> Range<usize> {
        let first = if which == 0 { 0 } else { self.shards.shard_dims()[0] * self.row[0] };
        first + rows.start * self.row[which]..first + rows.end * self.row[which]
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Cast<D>>>> {
        self.cast.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gathers codes and scales into `into`, from a cast of the shard's state `epoch`, made now if there is none.
    pub fn gather(
        &self,
        comm: &mut dyn Communicator<D>,
        (tag, epoch): (Tag, u64),
        source: &dyn ShardSource<D>,
        into: TensorMut<'_, D>,
    ) -> Result<()> {
        let kept = self.lock().clone().filter(|cast| cast.epoch == epoch);
        let cast = match kept {
            Some(cast) => cast,
            None => {
                let cast = Arc::new(self.cast(comm, (tag, epoch), source)?);
                *self.lock() = Some(Arc::clone(&cast));
                cast
            }
        };
        comm.all_gather(tag, cast.bytes.view(), into)
    }

    /// Quantises the shard; a collective in NVFP4.
    fn cast(
        &self,
        comm: &mut dyn Communicator<D>,
        (tag, epoch): (Tag, u64),
        source: &dyn ShardSource<D>,
    ) -> Result<Cast<D>> {
        let mut amaxes = match self.own_amaxes(source) {
            Ok(amaxes) => amaxes,
            Err(error) => return Err(told(comm, tag, error)),
        };
        if self.payload == Payload::Nvfp4 {
            // No amax has a sign, so their bits are in the numbers' order, and a NaN's are the largest: integers, which
            // every communicator joins where they are.
            let bits = TensorMut::new(amaxes.view_mut().into_data(), DType::I32, &[self.experts()])?;
            comm.all_reduce(tag, ReduceOp::Max, bits)?;
        }
        let bytes = match self.quantise(source, &mut amaxes) {
            Ok(bytes) => bytes,
            Err(error) => return Err(told(comm, tag, error)),
        };
        self.casts.fetch_add(1, Ordering::Relaxed);
        Ok(Cast { epoch, bytes, amaxes })
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

    /// `F32 [L]`: of this rank's rows of each expert, 0 of none.
    fn own_amaxes(&self, source: &dyn ShardSource<D>) -> Result<Tensor<D>> {
        let mut all = Tensor::zeros(&self.device, DType::F32, &[self.experts()])?;
        if self.payload != Payload::Nvfp4 {
            return Ok(all);
        }
        let pieces = self.pieces(self.rank);
        let one = |_: &Piece| Tensor::empty(&self.device, DType::F32, &[1]);
        let mut own: Vec<Tensor<D>> = pieces.iter().map(one).collect::<Result<_>>()?;
        self.read(source, |shard| {
            let mut calls = Vec::with_capacity(pieces.len());
            for (piece, amax) in pieces.iter().zip(&mut own) {
                let matrix = Matrix::new(part(&shard, &piece.rows)?)?;
                calls.push(Amax { format: &NVFP4, matrix, rows: Some(amax.view_mut()), columns: None });
            }
            self.device.multi_compute_amax(&self.stream, calls)
        })?;
        for (piece, amax) in pieces.iter().zip(&own) {
            let slot = D::slice_mut(all.view_mut().into_data(), piece.expert * 4..piece.expert * 4 + 4);
            self.device.copy(amax.view().data(), slot)?;
        }
        Ok(all)
    }

    fn quantise(&self, source: &dyn ShardSource<D>, amaxes: &mut Tensor<D>) -> Result<Tensor<D>> {
        let rows = self.shards.shard_dims()[0];
        // Padding is never read.
        let mut bytes = Tensor::zeros(&self.device, DType::U8, &[self.shard_bytes()])?;
        let mut sides: Vec<Tensor<D>> =
            self.row.iter().map(|row| Tensor::empty(&self.device, DType::U8, &[rows, *row])).collect::<Result<_>>()?;
        let [codes, scales] = &mut sides[..] else {
            return Err(Error::invalid("etp gather", "payload", "codes and scales", "others"));
        };
        let pieces = self.pieces(self.rank);
        self.read(source, |shard| {
            for Piece { expert, rows } in &pieces {
                let matrix = Matrix::new(part(&shard, rows)?)?;
                let (codes, scales) = (part_mut(codes, rows)?, part_mut(scales, rows)?);
                match self.payload {
                    Payload::Nvfp4 => {
                        let slot = D::slice_mut(amaxes.view_mut().into_data(), expert * 4..expert * 4 + 4);
                        let amax = TensorMut::new(slot, DType::F32, &[1])?;
                        let rows = Some(Nvfp4Mut { codes, scales, amax });
                        let call = Quantize { format: &NVFP4, matrix, rows, columns: None };
                        self.device.quantize_cast_only(&self.stream, call)?;
                    }
                    Payload::Plain | Payload::Mxfp8 => {
                        let rows = Some(Mxfp8Mut { codes, scales });
                        let call = QuantizeMxfp8 { format: MXFP8, matrix, rows, columns: None };
                        self.device.quantize_mxfp8(&self.stream, call)?;
                    }
                }
            }
            Ok(())
        })?;
        for (which, side) in sides.iter().enumerate() {
            let own = self.shards.rows_of(self.rank).len();
            let to = D::slice_mut(bytes.view_mut().into_data(), self.place(which, &(0..own)));
            self.device.copy(D::slice(side.view().data(), 0..own * self.row[which]), to)?;
        }
        Ok(bytes)
    }

    /// Every rank's rows of what has arrived, at their place in the gathered weight, on `device`; its padding stays as it
    /// was.
    pub fn dequantise(&self, device: &D, arrived: TensorRef<'_, D>, mut into: TensorMut<'_, D>) -> Result<()> {
        let stream = device.own_stream();
        let held = self.lock().clone();
        let cast = held.as_ref().ok_or_else(|| Error::invalid("etp gather", "amaxes", "those of the cast", "none"))?;
        let ([shard_rows, width], dtype) = (self.shards.shard_dims(), into.dtype());
        let row_bytes = into.row_bytes();
        for rank in 0..self.shards.ranks() {
            let first = rank * self.shard_bytes();
            let bytes = D::slice(arrived.data(), first..first + self.shard_bytes());
            for Piece { expert, rows } in self.pieces(rank) {
                let side = |which: usize| {
                    let dims = [rows.len(), self.row[which]];
                    TensorRef::<D>::new(D::slice(D::shorten(bytes), self.place(which, &rows)), DType::U8, &dims)
                };
                let (codes, scales) = (side(0)?, side(1)?);
                let start = (rank * shard_rows + rows.start) * row_bytes;
                let to = D::slice_mut(into.reborrow().into_data(), start..start + rows.len() * row_bytes);
                let out = TensorMut::new(to, dtype, &[rows.len(), width])?;
                match self.payload {
                    Payload::Nvfp4 => {
                        let slot = D::slice(cast.amaxes.view().data(), expert * 4..expert * 4 + 4);
                        let amax = TensorRef::new(slot, DType::F32, &[1])?;
                        let call = Dequantize { format: &NVFP4, codes, scales, amax, out };
                        device.dequantize(&stream, call)?;
                    }
                    Payload::Plain | Payload::Mxfp8 => {
                        let call = DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out };
                        device.dequantize_mxfp8(&stream, call)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Tells the other ranks, which are in a collective of the gather; gives the error back.
fn told<D: Device>(comm: &mut dyn Communicator<D>, tag: Tag, error: Error) -> Error {
    let _ = comm.refuse(tag, &error.to_string());
    error
}

/// Rows of a matrix.
fn part<'a, D: Device>(of: &'a TensorRef<'_, D>, rows: &Range<usize>) -> Result<TensorRef<'a, D>> {
    let row = of.row_bytes();
    let data = D::slice(D::shorten(of.data()), rows.start * row..rows.end * row);
    TensorRef::new(data, of.dtype(), &[rows.len(), of.dims()[1]])
}

/// Rows of a matrix, to write.
fn part_mut<'a, D: Device>(of: &'a mut Tensor<D>, rows: &Range<usize>) -> Result<TensorMut<'a, D>> {
    let (row, dtype, width) = (of.view().row_bytes(), of.dtype(), of.dims()[1]);
    let data = D::slice_mut(of.view_mut().into_data(), rows.start * row..rows.end * row);
    TensorMut::new(data, dtype, &[rows.len(), width])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_experts_in_shards() {
        // 3 experts of 5 rows over shards of 6: 0‥5 and a row; four rows and two; three rows and padding.
        let shards = Shards::new(&[3, 5, 2], 3, 6).unwrap();
        assert_eq!((shards.shard_dims(), shards.padding()), ([6, 2], 3));
        let piece = |expert, rows| Piece { expert, rows };
        assert_eq!(pieces(&shards, 5, 0), [piece(0, 0..5), piece(1, 5..6)]);
        assert_eq!(pieces(&shards, 5, 1), [piece(1, 0..4), piece(2, 4..6)]);
        assert_eq!(pieces(&shards, 5, 2), [piece(2, 0..3)]);
        // A rank of nothing but padding.
        let shards = Shards::new(&[1, 15, 2], 2, 16).unwrap();
        assert_eq!((pieces(&shards, 15, 0), pieces(&shards, 15, 1)), (vec![piece(0, 0..15)], vec![]));
    }
}
