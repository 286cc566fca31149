//! The layer as a candle module.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{Result, Tensor, Var};

use crate::checkpoint::Block;
use crate::cpu::Cpu;
use crate::ep::{Group, GroupConfig};
use crate::layer::{Layer, Mode};
use crate::metrics::Load;

/// One rank's group, shared by its layers.
#[derive(Debug, Clone)]
pub struct EpGroup(Arc<Mutex<Group<Cpu>>>);

impl EpGroup {
    /// Shares a group among layers of this rank.
    pub fn new(group: Group<Cpu>) -> Self {
        Self(Arc::new(Mutex::new(group)))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).rank()
    }

    /// Number of ranks R.
    pub fn ranks(&self) -> usize {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).ranks()
    }

    /// The group itself, exclusively: for collectives of the caller's own.
    pub fn lock(&self) -> std::sync::MutexGuard<'_, Group<Cpu>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A group of one rank.
    pub fn single(config: GroupConfig) -> Result<Self> {
        let _ = config;
        todo!()
    }
}

/// A Mixture-of-Experts layer over the ranks of a group.
#[derive(Debug, Clone)]
pub struct ExpertParallelMoE {
    layer: Layer,
    group: EpGroup,
}

/// What a forward gives beside `y`.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// Same shape as the input.
    pub y: Tensor,
    /// Auxiliary losses' sum, a scalar in f32 (f64 for f64 tokens) that carries gradients.
    pub aux: Tensor,
    /// Router logits `[T, E]`, detached.
    pub logits: Tensor,
    /// Chosen experts `[T, K]`, U32... i64, detached.
    pub ids: Tensor,
    /// Routing weights `[T, K]`, detached.
    pub weights: Tensor,
    /// Load of the experts over all ranks.
    pub load: Load,
}

impl ExpertParallelMoE {
    /// From variables: `router.weight [E, H]`, `router.bias [E]`, `router.selection_bias [E]`, `experts.up [L, G·I, H]`,
    /// `experts.up_bias`, `experts.down [L, H, I]`, `experts.down_bias`, `shared.up [G·S, H]`, `shared.down [H, S]`,
    /// `shared.gate [1, H]`, as the configuration has them.
    pub fn new(layer: Layer, group: EpGroup, vb: candle_nn::VarBuilder<'_>) -> Result<Self> {
        let _ = (layer, group, vb);
        todo!()
    }

    /// From a loaded block; its tensors become variables if `trainable`.
    pub fn from_block(block: Block, number: u32, group: EpGroup, trainable: bool) -> Result<Self> {
        let _ = (block, number, group, trainable);
        todo!()
    }

    /// From layer `layer` of a checkpoint folder.
    pub fn from_checkpoint(dir: impl AsRef<Path>, layer: usize, group: EpGroup, trainable: bool) -> Result<Self> {
        let _ = (dir, layer, group, trainable);
        todo!()
    }

    /// Parameters with their names (those of [`new`](Self::new)); variables where trainable.
    pub fn params(&self) -> Vec<(&'static str, &Tensor)> {
        todo!()
    }

    /// Trainable parameters, for an optimiser.
    pub fn vars(&self) -> Vec<Var> {
        todo!()
    }

    /// Forward over `[T, H]` or `[B, S, H]`. `mode.backward` is set from whether anything tracks gradients.
    pub fn forward_full(&self, x: &Tensor, mode: Mode) -> Result<MoeOutput> {
        let _ = (x, mode, &self.layer, &self.group);
        todo!()
    }
}

impl candle_core::Module for ExpertParallelMoE {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_full(x, Mode::default())?.y)
    }
}
