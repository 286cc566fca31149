//! The kernels of quantization's stages, and their names: casts, amaxes, the way back, and products with quantized
//! weights.

use crate::dtype::DType;
use crate::error::Result;

use crate::cuda::tile_config::{MMA_SYNC, NVFP4_ALIGNED_SMEM};

use super::find::Stage;
use super::per_type::{FewRowsForward, Half, PerFormat, PerProduct, PerType};

/// `mxfp8_cast.cu`: of whole rows, in tiles, of anything.
#[derive(Debug)]
pub(in crate::cuda) struct Mxfp8CastKernels<K> {
    pub(in crate::cuda) rows: PerType<K>,
    pub(in crate::cuda) tiled: PerType<K>,
    pub(in crate::cuda) any: PerType<K>,
}

/// `fp8_block_cast.cu`: of whole blocks without gaps, of anything.
#[derive(Debug)]
pub(in crate::cuda) struct Fp8BlockCastKernels<K> {
    pub(in crate::cuda) rows: PerType<K>,
    pub(in crate::cuda) any: PerType<K>,
}

/// How a cast to NVFP4 rounds and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum Nvfp4Mode {
    /// TransformerEngine's.
    Te,
    /// Rounding by random bits.
    Stochastic,
    /// A scale a tile of 16 x 16.
    Tiled,
    /// ModelOpt's.
    ModelOpt,
}

/// `nvfp4_cast.cu`: of anything, and of whole rows.
#[derive(Debug)]
pub(in crate::cuda) struct Nvfp4CastKernels<K> {
    te: PerType<K>,
    stochastic: PerType<K>,
    tiled: PerType<K>,
    modelopt: PerType<K>,
    rows_te: PerType<K>,
    rows_stochastic: PerType<K>,
    rows_tiled: Half<K>,
    rows_modelopt: PerType<K>,
}

impl<K> Nvfp4CastKernels<K> {
    pub(in crate::cuda) fn any(&self, mode: Nvfp4Mode, dtype: DType) -> &K {
        match mode {
            Nvfp4Mode::Te => self.te.of(dtype),
            Nvfp4Mode::Stochastic => self.stochastic.of(dtype),
            Nvfp4Mode::Tiled => self.tiled.of(dtype),
            Nvfp4Mode::ModelOpt => self.modelopt.of(dtype),
        }
    }

    /// That of whole rows; of tiles for 16-bit types alone.
    pub(in crate::cuda) fn rows(&self, mode: Nvfp4Mode, dtype: DType) -> Option<&K> {
        match mode {
            Nvfp4Mode::Te => Some(self.rows_te.of(dtype)),
            Nvfp4Mode::Stochastic => Some(self.rows_stochastic.of(dtype)),
            Nvfp4Mode::Tiled => self.rows_tiled.of(dtype),
            Nvfp4Mode::ModelOpt => Some(self.rows_modelopt.of(dtype)),
        }
    }
}

/// `nvfp4_cast_aligned.cu`: rows and columns of whole panels.
#[derive(Debug)]
pub(in crate::cuda) struct Nvfp4AlignedKernels<K> {
    te: Half<K>,
    stochastic: Half<K>,
    tiled: Half<K>,
}

impl<K> Nvfp4AlignedKernels<K> {
    pub(in crate::cuda) fn of(&self, mode: Nvfp4Mode, dtype: DType) -> Option<&K> {
        match mode {
            Nvfp4Mode::Te => self.te.of(dtype),
            Nvfp4Mode::Stochastic => self.stochastic.of(dtype),
            Nvfp4Mode::Tiled => self.tiled.of(dtype),
            Nvfp4Mode::ModelOpt => None,
        }
    }
}

/// `quant_amax.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct QuantAmaxKernels<K> {
    pub(in crate::cuda) zero: K,
    pub(in crate::cuda) whole: K,
    pub(in crate::cuda) lines: K,
    pub(in crate::cuda) transformed: K,
    pub(in crate::cuda) first_non_finite: K,
}

/// `dequantize.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct DequantizeKernels<K> {
    pub(in crate::cuda) nvfp4: K,
    pub(in crate::cuda) mxfp8: K,
    pub(in crate::cuda) fp8_block: K,
    pub(in crate::cuda) swizzle: K,
}

/// `w4a16_decode.cu`: tiles of 8 rows by four warps, the same of half as many weight rows, of up to 16 by eight.
#[derive(Debug)]
pub(in crate::cuda) struct DecodeKernels<K> {
    pub(in crate::cuda) eight: FewRowsForward<K>,
    pub(in crate::cuda) eight_narrow: FewRowsForward<K>,
    pub(in crate::cuda) sixteen: FewRowsForward<K>,
}

pub(super) fn mxfp8_cast<K>(mut stage: Stage<'_, K>) -> Result<Mxfp8CastKernels<K>> {
    Ok(Mxfp8CastKernels {
        rows: stage.types(["mxfp8_rows_f32", "mxfp8_rows_f16", "mxfp8_rows_bf16"], 0)?,
        tiled: stage.types(["mxfp8_tiled_f32", "mxfp8_tiled_f16", "mxfp8_tiled_bf16"], 0)?,
        any: stage.types(["mxfp8_f32", "mxfp8_f16", "mxfp8_bf16"], 0)?,
    })
}

pub(super) fn fp8_block_cast<K>(mut stage: Stage<'_, K>) -> Result<Fp8BlockCastKernels<K>> {
    Ok(Fp8BlockCastKernels {
        rows: stage.types(["fp8_block_rows_f32", "fp8_block_rows_f16", "fp8_block_rows_bf16"], 0)?,
        any: stage.types(["fp8_block_f32", "fp8_block_f16", "fp8_block_bf16"], 0)?,
    })
}

pub(super) fn nvfp4_cast<K>(mut stage: Stage<'_, K>) -> Result<Nvfp4CastKernels<K>> {
    Ok(Nvfp4CastKernels {
        te: stage.types(["nvfp4_te_f32", "nvfp4_te_f16", "nvfp4_te_bf16"], 0)?,
        stochastic: stage.types(["nvfp4_stochastic_f32", "nvfp4_stochastic_f16", "nvfp4_stochastic_bf16"], 0)?,
        tiled: stage.types(["nvfp4_tiled_f32", "nvfp4_tiled_f16", "nvfp4_tiled_bf16"], 0)?,
        modelopt: stage.types(["nvfp4_modelopt_f32", "nvfp4_modelopt_f16", "nvfp4_modelopt_bf16"], 0)?,
        rows_te: stage.types(["nvfp4_rows_te_f32", "nvfp4_rows_te_f16", "nvfp4_rows_te_bf16"], 0)?,
        rows_stochastic: stage
            .types(["nvfp4_rows_stochastic_f32", "nvfp4_rows_stochastic_f16", "nvfp4_rows_stochastic_bf16"], 0)?,
        rows_tiled: stage.half(["nvfp4_rows_tiled_f16", "nvfp4_rows_tiled_bf16"], 0)?,
        rows_modelopt: stage
            .types(["nvfp4_rows_modelopt_f32", "nvfp4_rows_modelopt_f16", "nvfp4_rows_modelopt_bf16"], 0)?,
    })
}

pub(super) fn nvfp4_aligned<K>(mut stage: Stage<'_, K>) -> Result<Nvfp4AlignedKernels<K>> {
    let [nearest, stochastic] = NVFP4_ALIGNED_SMEM;
    Ok(Nvfp4AlignedKernels {
        te: stage.half(["nvfp4_aligned_te_f16", "nvfp4_aligned_te_bf16"], nearest)?,
        stochastic: stage.half(["nvfp4_aligned_stochastic_f16", "nvfp4_aligned_stochastic_bf16"], stochastic)?,
        tiled: stage.half(["nvfp4_aligned_tiled_f16", "nvfp4_aligned_tiled_bf16"], nearest)?,
    })
}

pub(super) fn quant_amax<K>(mut stage: Stage<'_, K>) -> Result<QuantAmaxKernels<K>> {
    Ok(QuantAmaxKernels {
        zero: stage.one("amax_zero")?,
        whole: stage.one("amax")?,
        lines: stage.one("amax_lines")?,
        transformed: stage.one("amax_transformed")?,
        first_non_finite: stage.one("first_non_finite")?,
    })
}

pub(super) fn dequantize<K>(mut stage: Stage<'_, K>) -> Result<DequantizeKernels<K>> {
    Ok(DequantizeKernels {
        nvfp4: stage.one("nvfp4_dequantize")?,
        mxfp8: stage.one("mxfp8_dequantize")?,
        fp8_block: stage.one("fp8_block_dequantize")?,
        swizzle: stage.one("swizzle")?,
    })
}

pub(super) fn w4a16<K>(mut stage: Stage<'_, K>) -> Result<PerFormat<PerProduct<PerType<K>>>> {
    let shared = MMA_SYNC.shared;
    Ok(PerFormat {
        nvfp4: PerProduct {
            up: stage.types(["up_nvfp4_f32", "up_nvfp4_f16", "up_nvfp4_bf16"], shared)?,
            down: stage.types(["down_nvfp4_f32", "down_nvfp4_f16", "down_nvfp4_bf16"], shared)?,
            down_bwd: stage.types(["down_bwd_nvfp4_f32", "down_bwd_nvfp4_f16", "down_bwd_nvfp4_bf16"], shared)?,
            up_dgrad: stage.types(["up_dgrad_nvfp4_f32", "up_dgrad_nvfp4_f16", "up_dgrad_nvfp4_bf16"], shared)?,
        },
        mxfp4: PerProduct {
            up: stage.types(["up_mxfp4_f32", "up_mxfp4_f16", "up_mxfp4_bf16"], shared)?,
            down: stage.types(["down_mxfp4_f32", "down_mxfp4_f16", "down_mxfp4_bf16"], shared)?,
            down_bwd: stage.types(["down_bwd_mxfp4_f32", "down_bwd_mxfp4_f16", "down_bwd_mxfp4_bf16"], shared)?,
            up_dgrad: stage.types(["up_dgrad_mxfp4_f32", "up_dgrad_mxfp4_f16", "up_dgrad_mxfp4_bf16"], shared)?,
        },
        fp8: PerProduct {
            up: stage.types(["up_fp8_f32", "up_fp8_f16", "up_fp8_bf16"], shared)?,
            down: stage.types(["down_fp8_f32", "down_fp8_f16", "down_fp8_bf16"], shared)?,
            down_bwd: stage.types(["down_bwd_fp8_f32", "down_bwd_fp8_f16", "down_bwd_fp8_bf16"], shared)?,
            up_dgrad: stage.types(["up_dgrad_fp8_f32", "up_dgrad_fp8_f16", "up_dgrad_fp8_bf16"], shared)?,
        },
    })
}

pub(super) fn w4a16_decode<K>(mut stage: Stage<'_, K>, shared: u32) -> Result<DecodeKernels<K>> {
    let eight = ["decode8_up_nvfp4", "decode8_up_mxfp4", "decode8_down_nvfp4", "decode8_down_mxfp4"];
    let narrow = [
        "decode8_narrow_up_nvfp4",
        "decode8_narrow_up_mxfp4",
        "decode8_narrow_down_nvfp4",
        "decode8_narrow_down_mxfp4",
    ];
    let sixteen = ["decode16_up_nvfp4", "decode16_up_mxfp4", "decode16_down_nvfp4", "decode16_down_mxfp4"];
    // Those of eight rows serve where these take half of it at most, and have memory of a fixed size besides.
    Ok(DecodeKernels {
        eight: stage.few_rows_forward(eight, ["decode8_up_fp8", "decode8_down_fp8"], shared / 2)?,
        eight_narrow: stage.few_rows_forward(
            narrow,
            ["decode8_narrow_up_fp8", "decode8_narrow_down_fp8"],
            shared / 2,
        )?,
        sixteen: stage.few_rows_forward(sixteen, ["decode16_up_fp8", "decode16_down_fp8"], shared)?,
    })
}
