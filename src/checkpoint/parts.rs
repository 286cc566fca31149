//! A rank's parts of a model whose weights are spread over ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layer::PerParam;
use crate::optim::ParamShard;
use crate::tensor::Tensor;

type ReadRange<'a> = dyn Fn(Range<usize>) -> Result<Vec<u8>> + 'a;

/// A rank's part of a tensor, wherever it lies; what is saved of it is read piece by piece.
#[derive(Clone)]
pub struct RankPart<'a> {
    dtype: DType,
    shard: ParamShard,
    read: Arc<ReadRange<'a>>,
}

impl fmt::Debug for RankPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankPart<{} {:?}>", self.dtype, self.shard)
    }
}

impl<'a> RankPart<'a> {
    /// A part whose bytes `read` gives, by elements counted from the part's first. Others than those are an error of
    /// the save, on every rank.
    pub fn new(dtype: DType, shard: ParamShard, read: impl Fn(Range<usize>) -> Result<Vec<u8>> + 'a) -> Self {
        Self { dtype, shard, read: Arc::new(read) }
    }

    /// A part in memory; rows of padding may be behind it.
    pub fn of(shard: ParamShard, tensor: &'a Tensor<Cpu>) -> Self {
        let size = tensor.dtype().size();
        Self::new(tensor.dtype(), shard, move |range| {
            // Of a tensor that is too small nothing, which a save refuses.
            Ok(tensor.as_bytes().get(range.start * size..range.end * size).unwrap_or_default().to_vec())
        })
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements of the whole tensor.
    pub(super) fn count(&self) -> usize {
        self.shard.all_rows() * self.shard.width()
    }

    /// The elements that this rank holds.
    pub(super) fn elements(&self) -> Range<usize> {
        let (rows, width) = (self.shard.rows(), self.shard.width());
        rows.start * width..rows.end * width
    }

    /// Bytes of elements of the whole tensor that this rank holds; `name` of the tensor for errors.
    pub(super) fn read(&self, name: &str, elements: Range<usize>) -> Result<Vec<u8>> {
        let first = self.elements().start;
        let own = elements.start - first..elements.end - first;
        let (expected, read) = (own.len() * self.dtype.size(), (self.read)(own.clone())?);
        if read.len() != expected {
            let expected = format!("{expected} bytes for elements {own:?}");
            return Err(Error::invalid("Checkpoint::save_parts", format!("part of {name}"), expected, read.len()));
        }
        Ok(read)
    }
}

/// A rank's parts of a block's parameters. The whole is that of all experts (`[E, …]`), whatever dimensions a part's
/// [`ParamShard`] has for it.
#[derive(Debug, Clone)]
pub struct RankBlock<'a> {
    /// The layer.
    pub layer: usize,
    /// All parameters that the layer has.
    pub params: PerParam<Option<RankPart<'a>>>,
}

/// A rank's part of a tensor beside the blocks, by its name on disk.
#[derive(Debug, Clone)]
pub struct RankTensor<'a> {
    /// Its name in the checkpoint.
    pub name: String,
    /// Sizes of the whole.
    pub dims: Vec<usize>,
    /// This rank's part.
    pub part: RankPart<'a>,
}

/// A rank's parts of a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct RankModel<'a> {
    /// Its blocks.
    pub blocks: &'a [RankBlock<'a>],
    /// Tensors beside them.
    pub tensors: &'a [RankTensor<'a>],
}
