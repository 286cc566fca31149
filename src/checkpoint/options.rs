//! Options of opening, loading and saving; progress and sizes of a load.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::Shards;
use crate::layer::ParamKind;

/// Which share of a block to load, and how.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// This rank.
    pub rank: usize,
    /// Ranks that share the experts.
    pub ranks: usize,
    /// Convert to this floating type; `None`: as stored (de-quantized weights: BF16 or F16 where `config.json` names
    /// it as the model's type, else F32).
    ///
    /// Parameters that decide routing keep their precision: the selection bias, and the router of families that publish
    /// it in F32 (Ernie, Hunyuan), get this type's [accumulator](DType::accumulator).
    pub dtype: Option<DType>,
}

impl Default for LoadOptions {
    /// All experts, of the only rank, as stored.
    fn default() -> Self {
        Self { rank: 0, ranks: 1, dtype: None }
    }
}

/// Which shard of the routed experts' weights to load; see [`etp`](crate::etp).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardOptions {
    /// This rank, among those that hold the same experts.
    pub rank: usize,
    /// Ranks that hold the same experts.
    pub ranks: usize,
    /// As [`EtpOptions::pad`](crate::etp::EtpOptions::pad).
    pub pad: usize,
}

impl ShardOptions {
    /// The cut of a weight.
    ///
    /// # Errors
    /// As [`Shards::new`]; a rank that there is not.
    pub fn shards(&self, dims: &[usize]) -> Result<Shards> {
        if self.rank >= self.ranks {
            return Err(Error::invalid("ShardOptions", "rank", format!("0..{}", self.ranks), self.rank));
        }
        Shards::new(dims, self.ranks, self.pad)
    }
}

/// Which shards of a block to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockShards {
    /// Of the routed experts' weights, over the ranks that hold the same experts.
    pub experts: ShardOptions,
    /// Of router and shared expert, over all ranks; the experts' biases are cut with the experts then. The selection
    /// bias is whole. `None`: all of them are.
    pub dense: Option<ShardOptions>,
}

impl BlockShards {
    /// The cut of a parameter, and this rank's place in it, if it is cut.
    pub(super) fn of(&self, kind: ParamKind, dims: &[usize]) -> Result<Option<(Shards, usize)>> {
        let lines = Shards::lines(dims);
        let (cut, dims) = match (kind, self.dense) {
            (ParamKind::Up | ParamKind::Down, _) => (self.experts, dims),
            (ParamKind::SelectionBias, _) | (_, None) => return Ok(None),
            (ParamKind::UpBias | ParamKind::DownBias, Some(_)) => (self.experts, &lines[..]),
            (_, Some(dense)) => (dense, &lines[..]),
        };
        Ok(Some((cut.shards(dims)?, cut.rank)))
    }
}

/// How to open a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Let the checkpoint's files be links that leave the folder, as those of the Hugging Face cache are. Off by
    /// default: a checkpoint from a stranger could name any file.
    pub follow_links: bool,
}

impl OpenOptions {
    /// With [`follow_links`](Self::follow_links).
    pub fn with_follow_links(mut self, follow_links: bool) -> Self {
        self.follow_links = follow_links;
        self
    }
}

/// How to save.
///
/// ```
/// use moebius::checkpoint::SaveOptions;
///
/// let options = SaveOptions::default().with_max_shard_bytes(1 << 30);
/// assert_eq!((options.max_shard_bytes, options.replace_source), (1 << 30, false));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Most bytes of tensors in a file; more become several, with an index (`model-00001-of-00003.safetensors`, …,
    /// `model.safetensors.index.json`). A tensor is in one file, however large it is. 5 GB by default, as with Hugging
    /// Face's tools.
    pub max_shard_bytes: u64,
    /// Replace the checkpoint that is read, where its folder is given to save to. What is open stays readable. Off by
    /// default. [`save_nvfp4`](super::Checkpoint::save_nvfp4) never does, as it would leave nothing of the weights'
    /// precision.
    pub replace_source: bool,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { max_shard_bytes: 5_000_000_000, replace_source: false }
    }
}

impl SaveOptions {
    /// With [`max_shard_bytes`](Self::max_shard_bytes).
    pub fn with_max_shard_bytes(mut self, max_shard_bytes: u64) -> Self {
        self.max_shard_bytes = max_shard_bytes;
        self
    }

    /// With [`replace_source`](Self::replace_source).
    pub fn with_replace_source(mut self, replace_source: bool) -> Self {
        self.replace_source = replace_source;
        self
    }
}

/// How far a load has come; given after each tensor.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The layer.
    pub layer: usize,
    /// The tensor just read, by its name on disk.
    pub tensor: &'a str,
    /// Bytes of memory filled.
    pub done: u64,
    /// Bytes of memory to fill.
    pub total: u64,
}

/// Sizes of one rank's share of a block, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockBytes {
    /// This rank's experts in memory.
    pub experts: u64,
    /// Router and shared expert in memory, the same on every rank.
    pub replicated: u64,
    /// Bytes that this rank reads of the files.
    pub disk: u64,
}
