//! An opened checkpoint, and what its configuration and headers say.

use std::path::Path;

use super::declared::Declared;
use super::folder::{CONFIG, Folder, QUANTIZATION, read_one_version};
use super::layout::BlockLayout;
use super::model::Model;
use super::options::OpenOptions;
use super::reader::Files;
use super::stored::Stored;
use super::{family, json};
use crate::config::MoeConfig;
use crate::dtype::DType;
use crate::error::{CheckpointError, Error, Result};

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) files: Files,
    pub(super) model: Model,
    /// Prefix of a layer's number in tensor names.
    root: &'static str,
    /// Declarations of quantization in the files.
    pub(super) declared: Declared,
    moe_layers: Vec<usize>,
}

impl Checkpoint {
    /// Opens a folder: reads `config.json` and the headers of its safetensors files.
    ///
    /// # Errors
    /// [`CheckpointError`], for anything that is damaged, hostile or unknown.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(dir, OpenOptions::default())
    }

    /// As [`open`](Self::open), with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(dir: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        read_one_version(dir.as_ref(), options, Self::read)
    }

    /// Reads `config.json` alone: sizes and formulas of a model that is made rather than loaded. Such a checkpoint has no
    /// tensors, whatever else lies in the folder.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_config(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_config_with(dir, OpenOptions::default())
    }

    /// As [`open_config`](Self::open_config), with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_config_with(dir: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        read_one_version(dir.as_ref(), options, |folder| Self::read_with(folder, |folder| Ok(Files::none(folder))))
    }

    /// The JSON of a folder's `config.json`, whatever model it describes; `None` where the checkpoint has none. It is
    /// found as [`open`](Self::open) finds it, also after a save that was killed, and has the same limits; a key that
    /// comes twice is an error.
    ///
    /// # Errors
    /// [`CheckpointError`], for a file that cannot be read or is no JSON within the limits.
    pub fn read_config(dir: impl AsRef<Path>, options: OpenOptions) -> Result<Option<serde_json::Value>> {
        read_one_version(dir.as_ref(), options, |folder| {
            let Some(path) = folder.find(CONFIG)? else { return Ok(None) };
            Ok(Some(json::parse_value(&json::read_limited(&path, json::MAX_CONFIG)?, &path)?))
        })
    }

    fn read(folder: &Folder) -> Result<Self> {
        Self::read_with(folder, Files::open)
    }

    fn read_with(
        folder: &Folder,
        files: impl FnOnce(&Folder) -> std::result::Result<Files, CheckpointError>,
    ) -> Result<Self> {
        let path = folder.require(CONFIG)?;
        let model = Model::parse(&json::read_limited(&path, json::MAX_CONFIG)?, &path)?;
        let mut declared = model.declared.clone();
        if let Some(path) = folder.find(QUANTIZATION)? {
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

    pub(super) fn block(&self, layer: usize) -> Result<&MoeConfig> {
        let found = self.model.blocks.binary_search_by_key(&layer, |(layer, _)| *layer);
        match found {
            Ok(index) => Ok(&self.model.blocks[index].1),
            Err(_) => Err(Error::invalid("Checkpoint::block_config", "layer", "a layer with a block", layer)),
        }
    }

    pub(super) fn layout<'a>(&self, layer: usize, config: &'a MoeConfig) -> BlockLayout<'a> {
        let has = |name: &str| self.has(name);
        BlockLayout::find(self.model.family, config, self.layer_prefix(layer), &has)
    }

    pub(super) fn stored(&self, name: &str) -> Result<Option<Stored<'_>>> {
        Ok(Stored::find(&self.files, name, &self.declared.fp8_blocks)?)
    }
}

/// The prefix under which the first block's router is found; the family's usual one if none is.
fn find_root(files: &Files, model: &Model) -> &'static str {
    let Some((layer, _)) = model.blocks.first() else { return family::ROOTS[0] };
    let there = |root: &&&'static str| {
        model.family.blocks.iter().any(|block| {
            let prefix = format!("{root}{layer}.{block}.");
            files.with_prefix(&prefix).next().is_some()
        })
    };
    family::ROOTS.iter().find(there).copied().unwrap_or(family::ROOTS[0])
}
