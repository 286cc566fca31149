//! Published safetensors checkpoints: a rank's share of a Mixture-of-Experts block, and back.

use std::path::{Path, PathBuf};

use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// An opened checkpoint folder.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
}

/// One rank's parameters of one block; fields as in [`Params`].
#[derive(Debug)]
#[allow(missing_docs)]
pub struct BlockParams {
    pub router: Tensor<Cpu>,
    pub router_bias: Option<Tensor<Cpu>>,
    pub selection_bias: Option<Tensor<Cpu>>,
    pub up: Tensor<Cpu>,
    pub up_bias: Option<Tensor<Cpu>>,
    pub down: Tensor<Cpu>,
    pub down_bias: Option<Tensor<Cpu>>,
    pub shared_up: Option<Tensor<Cpu>>,
    pub shared_down: Option<Tensor<Cpu>>,
    pub shared_gate: Option<Tensor<Cpu>>,
}

/// One rank's share of one Mixture-of-Experts block.
#[derive(Debug)]
pub struct Block {
    /// Sizes and formulas, of all ranks.
    pub config: MoeConfig,
    /// This rank's parameters.
    pub params: BlockParams,
}

/// Which share of a block to load, and how.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// This rank.
    pub rank: usize,
    /// Ranks that share the experts.
    pub ranks: usize,
    /// Convert to this floating type; `None`: as stored (de-quantised forms: BF16 checkpoints' `torch_dtype`, else F32).
    pub dtype: Option<DType>,
}

impl Checkpoint {
    /// Opens a folder: reads `config.json` and the headers of its safetensors files.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let _ = dir;
        todo!()
    }

    /// Folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Layers with a Mixture-of-Experts block.
    pub fn moe_layers(&self) -> &[usize] {
        todo!()
    }

    /// Sizes and formulas of a layer's block.
    pub fn block_config(&self, layer: usize) -> Result<MoeConfig> {
        let _ = layer;
        todo!()
    }

    /// Loads one rank's share of a block.
    pub fn load_block(&self, layer: usize, options: LoadOptions) -> Result<Block> {
        let _ = (layer, options);
        todo!()
    }

    /// Any tensor by its name on disk, de-quantised.
    pub fn tensor(&self, name: &str, dtype: Option<DType>) -> Result<Tensor<Cpu>> {
        let _ = (name, dtype);
        todo!()
    }
}
