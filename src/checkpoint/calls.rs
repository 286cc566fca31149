//! Loading and saving: the calls of a checkpoint over the steps in the files below.

use std::path::Path;

use super::open::Checkpoint;
use super::options::{BlockBytes, BlockShards, LoadOptions, Progress, SaveOptions, ShardOptions};
use super::params::{Block, BlockParams, LayerBlock};
use super::parts::RankModel;
use super::quantize::QuantizedTensor;
use super::quantized::QuantizedBlock;
use super::rank_params::{RankParams, Ranks};
use super::stored::Form;
use crate::comm::Communicator;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::ep::Group;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::Tensor;

impl Checkpoint {
    /// Loads one rank's share of a block.
    ///
    /// Reads the bytes of this rank's experts and of the replicated parameters only, straight into the parameters or
    /// through about a mebibyte of scratch.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError) for missing, extra, mis-shaped or wrongly typed tensors of the block
    /// (of any rank's experts), before anything is allocated; [`Error::Invalid`](crate::Error::Invalid) for ranks that do
    /// not divide the experts.
    pub fn load_block(&self, layer: usize, options: LoadOptions) -> Result<Block> {
        self.load(layer, (options, None), &mut |_| {})
    }

    /// Loads one rank's share of a block whose routed experts are quantized, and leaves them so.
    ///
    /// NVFP4 (ModelOpt's, compressed-tensors'), MXFP4 (gpt-oss', compressed-tensors') and fp8 in blocks of 128×128 stay as
    /// they are; all else is as [`load_block`](Self::load_block) has it.
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block); experts that are stored otherwise.
    pub fn load_quantized(&self, layer: usize, options: LoadOptions) -> Result<QuantizedBlock<Cpu>> {
        self.load_as_stored(layer, options, &mut |_| {})
    }

    /// As [`load_quantized`](Self::load_quantized), telling how far it has come.
    ///
    /// # Errors
    /// As [`load_quantized`](Self::load_quantized).
    pub fn load_quantized_with(
        &self,
        layer: usize,
        options: LoadOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<QuantizedBlock<Cpu>> {
        self.load_as_stored(layer, options, progress)
    }

    /// As [`load_block`](Self::load_block), telling how far it has come.
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block).
    pub fn load_block_with(
        &self,
        layer: usize,
        options: LoadOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Block> {
        self.load(layer, (options, None), progress)
    }

    /// As [`load_block`](Self::load_block), but of `up` and `down` this rank's shard only (`[S, C]`, padding zeros):
    /// of weights that lie (out, in) on disk it reads these rows, of others the experts that they are of. Everything
    /// else is whole. To save, join the shards with [`Chain::whole`](crate::etp::Chain::whole).
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block) and [`Shards::new`](crate::etp::Shards::new).
    pub fn load_shard(&self, layer: usize, options: LoadOptions, shard: ShardOptions) -> Result<Block> {
        self.load_shards(layer, options, BlockShards { experts: shard, dense: None }, &mut |_| {})
    }

    /// As [`load_shard`](Self::load_shard), with a cut of the other parameters too, and telling how far it has come.
    /// Those come as shards of their [lines](crate::etp::Shards::lines).
    ///
    /// # Errors
    /// As [`load_shard`](Self::load_shard).
    pub fn load_shards(
        &self,
        layer: usize,
        options: LoadOptions,
        shards: BlockShards,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Block> {
        self.load(layer, (options, Some(&shards)), progress)
    }

    /// Form in which the routed experts of a block are stored.
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block).
    pub fn block_form(&self, layer: usize) -> Result<Form> {
        let config = self.block(layer)?;
        Ok(self.check_block(&self.layout(layer, config), false)?.form)
    }

    /// True of a block whose routed experts [`load_quantized`](Self::load_quantized) keeps as they are stored: NVFP4,
    /// MXFP4 or fp8 in blocks of 128x128, a row an output. False of other forms, and of experts that are not quantized.
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block).
    pub fn keeps_quantized(&self, layer: usize) -> Result<bool> {
        self.keeps_all(layer)
    }

    /// Sizes of one rank's share of a block.
    ///
    /// # Errors
    /// As [`load_block`](Self::load_block).
    pub fn block_bytes(&self, layer: usize, options: LoadOptions) -> Result<BlockBytes> {
        self.measure(layer, options)
    }

    /// Any tensor by its name on disk, de-quantized; `dtype` as in [`LoadOptions`].
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError) for a missing tensor, or one that cannot be converted.
    pub fn tensor(&self, name: &str, dtype: Option<DType>) -> Result<Tensor<Cpu>> {
        self.load_tensor(name, dtype)
    }

    /// Sizes of any tensor by its name on disk, of a quantized one those of what it stands for; nothing is read.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError) for a missing tensor.
    pub fn tensor_dims(&self, name: &str) -> Result<Vec<usize>> {
        self.find_tensor(name).map(|stored| stored.dims)
    }

    /// A rank's shard of any tensor's [lines](crate::etp::Shards::lines), padding zeros: of a matrix it reads these rows.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor) and [`Shards::new`](crate::etp::Shards::new).
    pub fn tensor_shard(&self, name: &str, dtype: Option<DType>, shard: ShardOptions) -> Result<Tensor<Cpu>> {
        self.load_tensor_shard(name, dtype, shard)
    }

    /// One rank's parameters, or their gradients, as named tensors of the published layout, in the types that they have.
    /// Of a block that is stored plain and was loaded as stored, this is the inverse of [`load_block`](Self::load_block),
    /// bit for bit. Absent optional tensors are left out.
    ///
    /// # Errors
    /// Tensors that do not fit the block. Families that keep all experts in one tensor need all experts: see
    /// [`gather_blocks`](super::gather_blocks).
    pub fn disk_tensors(
        &self,
        layer: usize,
        params: &BlockParams,
        rank: usize,
        ranks: usize,
    ) -> Result<Vec<(String, Tensor<Cpu>)>> {
        self.scatter(layer, params, LoadOptions { rank, ranks, dtype: None })
    }
}

impl Checkpoint {
    /// Writes a checkpoint: the given blocks, as [`gather_blocks`](super::gather_blocks) joins them, under their
    /// published names, everything else copied from this one. `config.json` is written as it is.
    ///
    /// The folder changes as one: a reader finds what was there or what was saved, each whole, also where the process
    /// is killed; what a killed save leaves, the next one removes. (On Linux that is so for every reader. Where the
    /// system cannot exchange folders, or the folder holds subfolders or access lists, other programs may find no
    /// `config.json` for a moment, or after a kill until the next save; this crate's readers do not.) Files of an older
    /// checkpoint that the new one does not have go (`hf_quant_config.json`, the index and the shards that it names);
    /// all others stay.
    ///
    /// Blocks are written in the types of their tensors, and loading them gives the same bits. Where this checkpoint is
    /// quantized, everything is written de-quantized and `config.json` loses its `quantization_config`.
    ///
    /// # Errors
    /// Blocks whose tensors do not fit, or lack any; the folder of this checkpoint itself;
    /// [`CheckpointError`](crate::CheckpointError) where reading or writing fails, or another save into the folder is
    /// under way.
    pub fn save(&self, dir: impl AsRef<Path>, blocks: &[LayerBlock<'_>]) -> Result<()> {
        self.save_with(dir, blocks, SaveOptions::default())
    }

    /// As [`save`](Self::save), with options.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_with(&self, dir: impl AsRef<Path>, blocks: &[LayerBlock<'_>], options: SaveOptions) -> Result<()> {
        self.check_shares(blocks, 1)?;
        self.save_from(dir.as_ref(), RankParams::of_experts(blocks, 0, 1), options)
    }

    /// As [`save_with`](Self::save_with), of blocks whose experts lie on the ranks of a group. Collective: every rank
    /// gives its own share of the same layers; the first one writes, with its own replicated parameters, and holds one
    /// matrix of another rank at a time.
    ///
    /// # Errors
    /// As [`save`](Self::save), on every rank; shares that differ in layers or types; a collective's.
    pub fn save_over_ranks<D: Kernels>(
        &self,
        dir: impl AsRef<Path>,
        shares: &[LayerBlock<'_>],
        group: &mut Group<D>,
        options: SaveOptions,
    ) -> Result<()> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let device = group.device().clone();
        let mut link = Ranks::new(&device, group.dispatcher().communicator());
        let mut parts = RankParams::of_experts(shares, rank, ranks).over(&mut link);
        parts.refuse_on_error(self.check_shares(shares, ranks))?;
        self.save_from(dir.as_ref(), parts, options)
    }

    /// As [`save_over_ranks`](Self::save_over_ranks), of a model whose parts lie on the ranks of any communicator,
    /// however they are cut: blocks, and tensors beside them in place of this checkpoint's own. Collective: every rank
    /// gives what it holds of the same blocks and tensors in the same order; where several hold the same, the lowest
    /// rank gives it. The first rank writes, and holds a matrix, or 16 Mi elements of another tensor, at a time. The
    /// communicator's work may be on another stream than the device's.
    ///
    /// # Errors
    /// As [`save_over_ranks`](Self::save_over_ranks); parts that do not make a tensor whole, on every rank.
    pub fn save_parts<D: Kernels>(
        &self,
        dir: impl AsRef<Path>,
        model: RankModel<'_>,
        device: &D,
        comm: &mut dyn Communicator<D>,
        options: SaveOptions,
    ) -> Result<()> {
        let mut link = Ranks::new(device, comm);
        self.save_from(dir.as_ref(), RankParams::parts(model).over(&mut link), options)
    }

    fn save_from(&self, dir: &Path, mut parts: RankParams<'_>, options: SaveOptions) -> Result<()> {
        let planned = match parts.writes() {
            true => self.check_target(dir, Some(options.replace_source)),
            false => Ok(()),
        };
        let planned = planned.and_then(|()| self.plan_save(&parts, options));
        let plan = parts.refuse_on_error(planned)?;
        let fingerprint = plan.fingerprint(&parts);
        parts.agree(fingerprint)?;
        parts.exchange_ranges()?;
        let written = self.write_plan(dir, &plan, &mut parts);
        parts.refuse_on_error(written)
    }

    /// Refuses tensors that do not fit the configurations of their blocks.
    fn check_shares(&self, shares: &[LayerBlock<'_>], ranks: usize) -> Result<()> {
        const CALL: &str = "Checkpoint::save";
        shares.iter().try_for_each(|LayerBlock { layer, params }| {
            let config = self.block(*layer)?;
            let experts = LoadOptions { rank: 0, ranks, dtype: None }.experts(CALL, config.router.num_experts)?;
            params.check(CALL, config, experts.len())
        })
    }
}

impl Checkpoint {
    /// Writes this checkpoint with the routed experts of every block in NVFP4, in ModelOpt's form without scales of
    /// activations, and everything else as it is, with `hf_quant_config.json` beside `config.json`. The folder changes
    /// as one, as with [`save`](Self::save). Gate and up of an expert share their second-level scale.
    ///
    /// # Errors
    /// The folder of this checkpoint itself, whose weights would be lost. Blocks whose experts are fused, already
    /// quantized, not finite, or of columns that are no multiple of 16; [`CheckpointError`](crate::CheckpointError)
    /// where reading or writing fails.
    pub fn save_nvfp4(&self, dir: impl AsRef<Path>) -> Result<Vec<QuantizedTensor>> {
        self.save_nvfp4_with(dir, SaveOptions::default())
    }

    /// As [`save_nvfp4`](Self::save_nvfp4), with options.
    ///
    /// # Errors
    /// As [`save_nvfp4`](Self::save_nvfp4).
    pub fn save_nvfp4_with(&self, dir: impl AsRef<Path>, options: SaveOptions) -> Result<Vec<QuantizedTensor>> {
        self.write_nvfp4(dir.as_ref(), options)
    }
}
