//! Published safetensors checkpoints: a rank's share of a Mixture-of-Experts block, and back.
//!
//! [`Checkpoint::open`] reads `config.json` and the headers of the tensor files; [`Checkpoint::load_block`] then reads
//! the bytes of one rank's experts and no others. Checkpoints are untrusted: files, their JSON and every name in it
//! have limits, far above published ones, that are checked before anything is parsed; every size is checked against the
//! file before a tensor is allocated; and what is wrong is a [`CheckpointError`](crate::CheckpointError) that names file and tensor.

mod commit;
mod convert;
mod declared;
mod family;
mod fields;
mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod header;
mod json;
mod layout;
mod load;
mod matrix;
mod model;
mod nvfp4;
mod optimizer;
mod options;
mod params;
mod parts;
mod quantize;
mod quantized;
mod rank_params;
mod reader;
mod save;
mod stored;

use std::path::Path;

use crate::comm::Communicator;
use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;
use rank_params::{RankParams, Ranks};

pub use crate::error::printable;
pub use gather::gather_blocks;
pub use options::{BlockBytes, BlockShards, LoadOptions, OpenOptions, Progress, SaveOptions, ShardOptions};
pub use parts::{RankBlock, RankModel, RankPart, RankTensor};
pub use quantized::QuantizedBlock;
pub use stored::Form;

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Checkpoint {
    files: reader::Files,
    model: model::Model,
    /// Prefix of a layer's number in tensor names.
    root: &'static str,
    /// Declarations of quantization in the files.
    declared: declared::Declared,
    moe_layers: Vec<usize>,
}

/// One rank's parameters of one block; fields as in [`Params`](crate::layer::Params).
#[derive(Debug)]
pub struct BlockParams {
    /// `[E, H]`.
    pub router: Tensor<Cpu>,
    /// `[E]`, added to the logits.
    pub router_bias: Option<Tensor<Cpu>>,
    /// `[E]`, added to the scores for choosing only.
    pub selection_bias: Option<Tensor<Cpu>>,
    /// `[L, G·I, H]`, gate rows first.
    pub up: Tensor<Cpu>,
    /// `[L, G·I]`.
    pub up_bias: Option<Tensor<Cpu>>,
    /// `[L, H, I]`.
    pub down: Tensor<Cpu>,
    /// `[L, H]`.
    pub down_bias: Option<Tensor<Cpu>>,
    /// `[G·S, H]`, S the shared expert's inner size.
    pub shared_up: Option<Tensor<Cpu>>,
    /// `[H, S]`.
    pub shared_down: Option<Tensor<Cpu>>,
    /// `[1, H]`.
    pub shared_gate: Option<Tensor<Cpu>>,
}

/// A block's parameters and its layer, as [`Checkpoint::save`] takes them: [`BlockParams::at_layer`].
#[derive(Debug, Clone, Copy)]
pub struct LayerBlock<'a> {
    /// The layer.
    pub layer: usize,
    /// Its parameters, or a rank's share of them.
    pub params: &'a BlockParams,
}

impl BlockParams {
    /// As the parameters of a layer, to be saved.
    pub fn at_layer(&self, layer: usize) -> LayerBlock<'_> {
        LayerBlock { layer, params: self }
    }
}

/// One rank's share of one Mixture-of-Experts block.
#[derive(Debug)]
pub struct Block {
    /// Sizes and formulas, of all ranks.
    pub config: MoeConfig,
    /// This rank's parameters.
    pub params: BlockParams,
}

impl Block {
    /// Refuses a block whose parameters are not those of its configuration, with `local` experts on this rank.
    ///
    /// # Errors
    /// [`Error::Shape`], or [`Error::Invalid`] with the name of a parameter that is missing.
    pub fn check(&self, call: &'static str, local: usize) -> Result<()> {
        use crate::layer::ParamKind;
        self.params.check(call, &self.config, local)?;
        let absent = |kind: &ParamKind| kind.dims(&self.config, local).is_some() && self.params.get(*kind).is_none();
        match ParamKind::ALL.into_iter().find(absent) {
            None => Ok(()),
            Some(kind) => Err(Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none")),
        }
    }
}

impl Checkpoint {
    /// Opens a folder: reads `config.json` and the headers of its safetensors files.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError), for anything that is damaged, hostile or unknown.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(dir, OpenOptions::default())
    }

    /// As [`open`](Self::open), with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(dir: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        folder::read_one_version(dir.as_ref(), options, Self::read)
    }

    /// Reads `config.json` alone: sizes and formulas of a model that is made rather than loaded. Such a checkpoint has no
    /// tensors, whatever else lies in the folder.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_config(dir: impl AsRef<Path>) -> Result<Self> {
        folder::read_one_version(dir.as_ref(), OpenOptions::default(), |folder| {
            Self::read_with(folder, |folder| Ok(reader::Files::none(folder)))
        })
    }

    fn read(folder: &folder::Folder) -> Result<Self> {
        Self::read_with(folder, reader::Files::open)
    }

    fn read_with(
        folder: &folder::Folder,
        files: impl FnOnce(&folder::Folder) -> std::result::Result<reader::Files, crate::error::CheckpointError>,
    ) -> Result<Self> {
        let path = folder.require(folder::CONFIG)?;
        let model = model::Model::parse(&json::read_limited(&path, json::MAX_CONFIG)?, &path)?;
        let mut declared = model.declared.clone();
        if let Some(path) = folder.find(folder::QUANTIZATION)? {
            declared.add_file(&path)?;
        }
        let files = files(folder)?;
        let moe_layers: Vec<usize> = model.blocks.iter().map(|(layer, _)| *layer).collect();
        let root = find_root(&files, &model);
        Ok(Self { files, model, root, declared, moe_layers })
    }

    /// Folder.
    pub fn dir(&self) -> &Path {
        self.files.dir()
    }

    /// The `model_type` of the (text) model.
    pub fn family(&self) -> &str {
        &self.model.model_type
    }

    /// Every known `model_type`.
    pub fn families() -> impl Iterator<Item = &'static str> {
        family::FAMILIES.iter().flat_map(|family| family.types).copied()
    }

    /// `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        &self.model.json
    }

    /// The model's type, as `config.json` has it.
    pub fn model_dtype(&self) -> Option<DType> {
        self.model.dtype
    }

    /// Layers of the model, of any kind.
    pub fn num_layers(&self) -> usize {
        self.model.layers
    }

    /// Layers with a Mixture-of-Experts block.
    pub fn moe_layers(&self) -> &[usize] {
        &self.moe_layers
    }

    /// Names of all tensors on disk, sorted; quantized ones with their scales, by the names they have there.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, _)| name)
    }

    /// True if there is a tensor of this name, in whatever form ([`tensor`](Self::tensor) finds it).
    pub fn has(&self, name: &str) -> bool {
        !matches!(self.stored(name), Ok(None))
    }

    /// Start of the names of a layer's block (`model.layers.3.mlp.`). A shared expert may lie outside (Granite's).
    ///
    /// # Errors
    /// A layer without a block.
    pub fn block_prefix(&self, layer: usize) -> Result<String> {
        let config = self.block(layer)?;
        let prefixes = self.layout(layer, config).prefixes();
        Ok(prefixes.into_iter().next().unwrap_or_default())
    }

    /// Start of the names of a layer (`model.layers.3.`).
    pub fn layer_prefix(&self, layer: usize) -> String {
        format!("{}{layer}.", self.root)
    }

    /// Sizes and formulas of a layer's block.
    ///
    /// # Errors
    /// A layer without a block.
    pub fn block_config(&self, layer: usize) -> Result<MoeConfig> {
        self.block(layer).cloned()
    }

    fn block(&self, layer: usize) -> Result<&MoeConfig> {
        let found = self.model.blocks.binary_search_by_key(&layer, |(layer, _)| *layer);
        match found {
            Ok(index) => Ok(&self.model.blocks[index].1),
            Err(_) => Err(Error::invalid("Checkpoint::block_config", "layer", "a layer with a block", layer)),
        }
    }

    fn layout<'a>(&self, layer: usize, config: &'a MoeConfig) -> layout::BlockLayout<'a> {
        let has = |name: &str| self.has(name);
        layout::BlockLayout::find(self.model.family, config, self.layer_prefix(layer), &has)
    }

    /// Loads one rank's share of a block.
    ///
    /// Reads the bytes of this rank's experts and of the replicated parameters only, straight into the parameters or
    /// through about a mebibyte of scratch.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::CheckpointError) for missing, extra, mis-shaped or wrongly typed tensors of the block (of any rank's
    /// experts), before anything is allocated; [`Error::Invalid`] for ranks that do not divide the experts.
    pub fn load_block(&self, layer: usize, options: LoadOptions) -> Result<Block> {
        self.load(layer, (options, None), &mut |_| {})
    }

    /// Loads one rank's share of a block whose routed experts are quantized, and leaves them so.
    ///
    /// NVFP4 (ModelOpt's, compressed-tensors'), MXFP4 and fp8 in blocks of 128×128 stay as they are; all else is as
    /// [`load_block`](Self::load_block) has it.
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
    /// [`gather_blocks`].
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
    /// Writes a checkpoint: the given blocks, as [`gather_blocks`] joins them, under their published names, everything
    /// else copied from this one. `config.json` is written as it is.
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
    /// Blocks whose tensors do not fit, or lack any; the folder of this checkpoint itself; [`CheckpointError`](crate::CheckpointError) where
    /// reading or writing fails, or another save into the folder is under way.
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
        let mut link = Ranks { device: group.device().clone(), comm: group.dispatcher().communicator() };
        let mut parts = RankParams::of_experts(shares, rank, ranks).over(&mut link);
        parts.refuse_on_error(self.check_shares(shares, ranks))?;
        self.save_from(dir.as_ref(), parts, options)
    }

    /// As [`save_over_ranks`](Self::save_over_ranks), of a model whose parts lie on the ranks of any communicator,
    /// however they are cut: blocks, and tensors beside them in place of this checkpoint's own. Collective: every rank
    /// gives what it holds of the same blocks and tensors in the same order; where several hold the same, the lowest
    /// rank gives it. The first rank writes, and holds a matrix, or 16 Mi elements of another tensor, at a time.
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
        let mut link = Ranks { comm, device: device.clone() };
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

/// A matrix that [`Checkpoint::save_nvfp4`] quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Its name on disk.
    pub name: String,
    /// Rows and columns.
    pub dims: [usize; 2],
    /// The largest magnitude of those that share its second-level scale.
    pub amax: f32,
    /// ‖de-quantized − original‖ / ‖original‖, 0 of a zero matrix.
    pub error: f64,
}

impl Checkpoint {
    /// Writes this checkpoint with the routed experts of every block in NVFP4, in ModelOpt's form without scales of
    /// activations, and everything else as it is, with `hf_quant_config.json` beside `config.json`. The folder changes
    /// as one, as with [`save`](Self::save). Gate and up of an expert share their second-level scale.
    ///
    /// # Errors
    /// The folder of this checkpoint itself, whose weights would be lost. Blocks whose experts are fused, already
    /// quantized, not finite, or of columns that are no multiple of 16; [`CheckpointError`](crate::CheckpointError) where reading or writing
    /// fails.
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

/// The prefix under which the first block's router is found; the family's usual one if none is.
fn find_root(files: &reader::Files, model: &model::Model) -> &'static str {
    let Some((layer, _)) = model.blocks.first() else { return family::ROOTS[0] };
    let there = |root: &&&'static str| {
        model.family.blocks.iter().any(|block| {
            let prefix = format!("{root}{layer}.{block}.");
            files.with_prefix(&prefix).next().is_some()
        })
    };
    family::ROOTS.iter().find(there).copied().unwrap_or(family::ROOTS[0])
}
