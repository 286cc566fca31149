//! Finding a stage's kernels by their names.

use crate::error::Result;

use super::per_type::{Fp4Forward, Half, HalfOrAny, PerType};

/// A kernel to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct KernelSpec {
    /// The file in `kernels/` that has it.
    pub(in crate::cuda) stage: &'static str,
    pub(in crate::cuda) name: &'static str,
    /// Shared memory beside its own variables that it is to be allowed; 0: what every kernel has.
    pub(in crate::cuda) shared: u32,
}

/// A GPU, as far as kernels depend on it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Traits {
    /// It has those of sm_90a.
    pub(in crate::cuda) sm90: bool,
    /// Shared memory that the kernels of few rows with quantized weights may take.
    pub(in crate::cuda) decode_shared: u32,
}

/// Finds the kernels of a stage.
pub(super) struct Stage<'a, K> {
    pub(super) stage: &'static str,
    pub(super) find: &'a mut dyn FnMut(KernelSpec) -> Result<K>,
}

impl<K> Stage<'_, K> {
    /// A kernel that needs no more shared memory than every kernel has.
    pub(super) fn one(&mut self, name: &'static str) -> Result<K> {
        self.asking(name, 0)
    }

    pub(super) fn asking(&mut self, name: &'static str, shared: u32) -> Result<K> {
        (self.find)(KernelSpec { stage: self.stage, name, shared })
    }

    pub(super) fn half(&mut self, [f16, bf16]: [&'static str; 2], shared: u32) -> Result<Half<K>> {
        Ok(Half { f16: self.asking(f16, shared)?, bf16: self.asking(bf16, shared)? })
    }

    /// `shared` is what those of 16-bit types ask for.
    pub(super) fn types(&mut self, [f32, f16, bf16]: [&'static str; 3], shared: u32) -> Result<PerType<K>> {
        Ok(PerType { f32: self.one(f32)?, half: self.half([f16, bf16], shared)? })
    }

    pub(super) fn half_or_any(&mut self, [any, f16, bf16]: [&'static str; 3], shared: u32) -> Result<HalfOrAny<K>> {
        Ok(HalfOrAny { any: self.one(any)?, half: self.half([f16, bf16], shared)? })
    }

    pub(super) fn fp4_forward(&mut self, names: [&'static str; 4], shared: u32) -> Result<Fp4Forward<K>> {
        let [up_nvfp4, up_mxfp4, down_nvfp4, down_mxfp4] = names;
        Ok(Fp4Forward {
            up_nvfp4: self.asking(up_nvfp4, shared)?,
            up_mxfp4: self.asking(up_mxfp4, shared)?,
            down_nvfp4: self.asking(down_nvfp4, shared)?,
            down_mxfp4: self.asking(down_mxfp4, shared)?,
        })
    }
}
