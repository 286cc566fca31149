//! How an adapter's module is loaded from a checkpoint.

use std::fmt;

#[cfg(feature = "candle")]
use crate::checkpoint::BlockShards;
use crate::checkpoint::{Block, Checkpoint, LoadOptions, Progress, QuantizedBlock};
use crate::cpu::Cpu;
use crate::error::Result;

/// How a module is loaded from a checkpoint: `candle::LoadAs` and `burn::LoadAs`. `T` is what element types are named by:
/// candle's `DType`, and for burn, whose parameters have the core's types, [`DType`](crate::DType). `P` is a framework's
/// kinds of parameters. The default: in the types that are stored.
pub struct LoadAs<'a, T, P = ()> {
    pub(crate) params: P,
    pub(crate) dtype: Option<T>,
    /// Experts stay as they are stored.
    pub(crate) quantized: bool,
    /// Experts are shards in memory of the host.
    #[cfg(feature = "candle")]
    pub(crate) on_host: bool,
    progress: Option<&'a mut dyn FnMut(Progress<'_>)>,
}

impl<T, P: Default> Default for LoadAs<'_, T, P> {
    fn default() -> Self {
        Self::of(P::default())
    }
}

impl<T: fmt::Debug, P: fmt::Debug> fmt::Debug for LoadAs<'_, T, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadAs").field("params", &self.params).field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

impl<'a, T, P> LoadAs<'a, T, P> {
    /// In the types that are stored.
    pub(crate) fn of(params: P) -> Self {
        Self {
            params,
            dtype: None,
            quantized: false,
            #[cfg(feature = "candle")]
            on_host: false,
            progress: None,
        }
    }

    /// In this floating type, as [`LoadOptions::dtype`] says.
    pub fn dtype(self, dtype: T) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Tells after each tensor how far it has come.
    pub fn progress(self, progress: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { progress: Some(progress), ..self }
    }

    /// With experts that stay as they are stored.
    pub(crate) fn keep_quantized(self) -> Self {
        Self { quantized: true, ..self }
    }

    /// With experts that are shards in memory of the host.
    #[cfg(feature = "candle")]
    pub(crate) fn keep_on_host(self) -> Self {
        Self { on_host: true, ..self }
    }

    /// Reads a layer's block, one rank's experts of it.
    pub(crate) fn read(self, checkpoint: &Checkpoint, layer: usize, options: LoadOptions) -> Result<Block> {
        match self.progress {
            Some(progress) => checkpoint.load_block_with(layer, options, progress),
            None => checkpoint.load_block(layer, options),
        }
    }

    /// The same of a block whose routed experts stay as they are stored.
    pub(crate) fn read_quantized(
        self,
        checkpoint: &Checkpoint,
        layer: usize,
        options: LoadOptions,
    ) -> Result<QuantizedBlock<Cpu>> {
        match self.progress {
            Some(progress) => checkpoint.load_quantized_with(layer, options, progress),
            None => checkpoint.load_quantized(layer, options),
        }
    }

    /// The same of this rank's shards.
    #[cfg(feature = "candle")]
    pub(crate) fn read_shards(
        self,
        checkpoint: &Checkpoint,
        layer: usize,
        options: LoadOptions,
        shards: BlockShards,
    ) -> Result<Block> {
        match self.progress {
            Some(progress) => checkpoint.load_shards(layer, options, shards, progress),
            None => checkpoint.load_shards(layer, options, shards, &mut |_| {}),
        }
    }
}
