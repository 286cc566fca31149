//! How a weight is cut: equal runs of rows, the padding at the tail of the whole.

pub(in crate::etp) mod in_place;
#[cfg(any(test, feature = "candle"))]
pub(in crate::etp) mod initial;
pub(in crate::etp) mod quantized;
pub(in crate::etp) mod source;

use std::ops::Range;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor, TensorRef};

const CALL: &str = "Shards::new";
/// Rows of a dense weight whose padding is of no account beside them.
const FEW: usize = 1024;

/// The cut of one weight over N ranks.
///
/// All dimensions but the last count rows, so the experts of `[L, R, C]` are L·R rows of C: a gathered weight is one
/// collective, and whole where it lies. The rows are padded at their tail to a multiple of `pad`·N (N = 1: not at
/// all, the shard is the weight byte for byte), and rank r holds rows `r·S .. (r + 1)·S`, S the padded rows over N.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    dims: Vec<usize>,
    ranks: usize,
    rows: usize,
    width: usize,
    shard_rows: usize,
}

impl Shards {
    /// Cuts a weight of sizes `dims` over `ranks`. `pad` 0: no padding, the rows must divide.
    ///
    /// # Errors
    /// Fewer than two dimensions or an empty one, no ranks, sizes that overflow, rows that do not divide where `pad`
    /// is 0.
    pub fn new(dims: &[usize], ranks: usize, pad: usize) -> Result<Self> {
        let (Some((&width, outer)), true) = (dims.split_last(), dims.len() >= 2 && !dims.contains(&0)) else {
            return Err(Error::invalid(CALL, "dims", "two dimensions or more, none 0", format!("{dims:?}")));
        };
        if ranks == 0 {
            return Err(Error::invalid(CALL, "ranks", "at least 1", ranks));
        }
        Shape::new(dims)?;
        let rows: usize = outer.iter().product();
        if pad == 0 && !rows.is_multiple_of(ranks) {
            let expected = format!("a multiple of the {ranks} ranks, as pad = 0 adds no rows");
            return Err(Error::invalid(CALL, "rows", expected, rows));
        }
        // A shard of whole 16-row tiles can be quantized by itself; a rank that is alone has no cut to align.
        let unit = if ranks == 1 { 1 } else { pad.max(1) };
        let shard_rows = rows.div_ceil(ranks).checked_next_multiple_of(unit);
        let fits = shard_rows.filter(|s| {
            s.checked_mul(ranks).and_then(|all| Shape::new(&[all, width]).ok()).is_some_and(|shape| shape.count() > 0)
        });
        let Some(shard_rows) = fits else {
            return Err(Error::invalid(CALL, "pad", "padded rows that fit the address space", pad));
        };
        Ok(Self { dims: dims.to_vec(), ranks, rows, width, shard_rows })
    }

    /// Lines that a dense weight is cut into, `[lines, width]`, the same at any number of ranks: its rows, in halves
    /// while they are fewer than 1024 and of an even width, or else its elements. So little padding goes with a bias or
    /// a router.
    pub fn lines(dims: &[usize]) -> [usize; 2] {
        let (mut width, rows) =
            (dims.last().copied().unwrap_or(1), dims.split_last().map_or(1, |(_, outer)| outer.iter().product()));
        let mut lines: usize = rows;
        while lines < FEW && width > 1 {
            let parts = if width.is_multiple_of(2) { 2 } else { width };
            (lines, width) = (lines.saturating_mul(parts), width / parts);
        }
        [lines, width]
    }

    /// Sizes of the weight.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Ranks N.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Sizes of a shard, `[S, C]`, the same on every rank.
    pub fn shard_dims(&self) -> [usize; 2] {
        [self.shard_rows, self.width]
    }

    /// Sizes of what a gather brings, `[N·S, C]`.
    pub fn gathered_dims(&self) -> [usize; 2] {
        [self.shard_rows * self.ranks, self.width]
    }

    /// Rows of padding at the tail of what a gather brings.
    pub fn padding(&self) -> usize {
        self.shard_rows * self.ranks - self.rows
    }

    /// Rows of the weight that a rank holds; the rest of its S rows is padding.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        let at = |r: usize| (r.min(self.ranks) * self.shard_rows).min(self.rows);
        at(rank)..at(rank.saturating_add(1))
    }

    /// The weight in what a gather brought: all but the padding, which is one slice at the tail.
    ///
    /// # Errors
    /// A tensor of other sizes.
    pub fn strip<'a, D: Device>(&self, gathered: TensorRef<'a, D>) -> Result<TensorRef<'a, D>> {
        Error::check_shape("Shards::strip", "gathered", &self.gathered_dims(), gathered.dims())?;
        let bytes = self.rows * gathered.row_bytes();
        TensorRef::new(D::slice(gathered.data(), 0..bytes), gathered.dtype(), &self.dims)
    }

    /// A rank's shard of the whole weight; padding is zeros.
    ///
    /// # Errors
    /// A tensor of other sizes, or a rank that there is not.
    pub fn cut<D: Device>(&self, device: &D, whole: TensorRef<'_, D>, rank: usize) -> Result<Tensor<D>> {
        const CALL: &str = "Shards::cut";
        Error::check_shape(CALL, "whole", &self.dims, whole.dims())?;
        if rank >= self.ranks {
            return Err(Error::invalid(CALL, "rank", format!("0..{}", self.ranks), rank));
        }
        let row = self.width * whole.dtype().size();
        let rows = self.rows_of(rank);
        let mut shard = Tensor::empty(device, whole.dtype(), &self.shard_dims())?;
        let filled = rows.len() * row;
        device.copy(
            D::slice(whole.data(), rows.start * row..rows.end * row),
            D::slice_mut(shard.view_mut().into_data(), 0..filled),
        )?;
        let all = self.shard_rows * row;
        device.zero(D::slice_mut(shard.view_mut().into_data(), filled..all))?;
        Ok(shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    #[test]
    fn closed_forms() {
        // 3 experts of 5 rows: 15 rows, padded to 2 · 16.
        let s = Shards::new(&[3, 5, 2], 2, 16).unwrap();
        assert_eq!((s.shard_dims(), s.gathered_dims(), s.padding()), ([16, 2], [32, 2], 17));
        assert_eq!((s.rows_of(0), s.rows_of(1)), (0..15, 15..15));
        // Padding to 2 · 3: shards of 9.
        let s = Shards::new(&[3, 5, 2], 2, 3).unwrap();
        assert_eq!((s.shard_dims(), s.padding(), s.rows_of(0), s.rows_of(1)), ([9, 2], 3, 0..9, 9..15));
        // Nothing to pad.
        let s = Shards::new(&[2, 64, 7], 4, 16).unwrap();
        assert_eq!((s.shard_dims(), s.padding(), s.rows_of(3)), ([32, 7], 0, 96..128));
        // Alone: as it is, whatever the padding.
        let s = Shards::new(&[3, 5, 2], 1, 16).unwrap();
        assert_eq!((s.shard_dims(), s.padding(), s.rows_of(0)), ([15, 2], 0, 0..15));
    }

    #[test]
    fn lines_are_the_rows_unless_they_are_few() {
        assert_eq!(Shards::lines(&[1024, 24]), [1024, 24]);
        assert_eq!(Shards::lines(&[8, 2048]), [1024, 16]);
        assert_eq!(Shards::lines(&[3, 24]), [72, 1]);
        assert_eq!(Shards::lines(&[4096]), [1024, 4]);
        assert_eq!(Shards::lines(&[50257]), [50257, 1]);
        assert_eq!(Shards::lines(&[1, 6]), [6, 1]);
        assert_eq!(Shards::lines(&[]), [1, 1]);
    }

    #[test]
    fn no_padding_needs_rows_that_divide() {
        assert!(Shards::new(&[2, 6, 3], 4, 0).is_ok());
        let error = Shards::new(&[3, 5, 2], 2, 0).unwrap_err().to_string();
        assert!(error.contains("multiple of the 2 ranks") && error.contains("15"), "{error}");
    }

    #[test]
    fn impossible_cuts_are_errors() {
        let wrong: [(&[usize], usize, usize); 6] = [
            (&[4], 1, 16),
            (&[4, 0, 2], 1, 16),
            (&[4, 2], 0, 16),
            (&[4, 2], 2, usize::MAX),
            (&[4, 2], usize::MAX, 2),
            (&[usize::MAX, 2], 2, 1),
        ];
        for (dims, ranks, pad) in wrong {
            assert!(Shards::new(dims, ranks, pad).is_err(), "{dims:?} over {ranks} by {pad}");
        }
    }

    #[test]
    fn shards_join_to_the_weight_and_a_tail_of_zeros() {
        let device = Cpu::poisoning();
        let values: Vec<f32> = (0..30).map(|v| v as f32 + 1.0).collect();
        let whole = Tensor::from_vec(values.clone(), &[3, 5, 2]).unwrap();
        for (ranks, pad) in [(1, 16), (2, 3), (4, 1), (3, 0), (2, 16)] {
            let s = Shards::new(&[3, 5, 2], ranks, pad).unwrap();
            let mut joined = Vec::new();
            for rank in 0..ranks {
                joined.extend_from_slice(s.cut(&device, whole.view(), rank).unwrap().as_slice::<f32>().unwrap());
            }
            let gathered = Tensor::from_vec(joined.clone(), &s.gathered_dims()).unwrap();
            let stripped = s.strip(gathered.view()).unwrap();
            assert_eq!((stripped.dims(), stripped.as_slice::<f32>().unwrap()), (&[3, 5, 2][..], &values[..]));
            assert!(joined[30..].iter().all(|v| v.to_bits() == 0), "{ranks} ranks, pad {pad}");
        }
    }
}
