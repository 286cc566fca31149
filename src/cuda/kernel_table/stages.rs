//! The kernels of each stage, and their names.

use crate::dtype::DType;
use crate::error::Result;

use crate::cuda::tile_config::{
    MMA_SYNC, NVFP4_ALIGNED_SMEM, NVLINK_ITEMS_SMEM, NVLINK_PLAN_SMEM, NVLINK_SUM_SMEM, PLAN_SMALL_SMEM,
    ROUTE_PLAN_SMEM, SM90_DECODE, SM90_DECODE_LINEAR, SM90_GROUPED_GEMM, SM90_LINEAR, SM90_LINEAR_D_X, SM90_W4A16,
    SM90_WGRAD, TF32,
};

use super::find::{KernelSpec, Stage};
use super::per_type::{
    FewRowsForward, Fp4Forward, Half, HalfOrAny, PerFormat, PerProduct, PerType, Product, TileShape,
};

/// `aux_loss.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct AuxLossKernels<K> {
    pub(in crate::cuda) scores: K,
    pub(in crate::cuda) chunks: K,
    pub(in crate::cuda) totals: K,
    pub(in crate::cuda) finish: K,
    pub(in crate::cuda) value: K,
    pub(in crate::cuda) coefficients: K,
}

/// `adamw.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct AdamWKernels<K> {
    pub(in crate::cuda) square_leaves: K,
    pub(in crate::cuda) square_nodes: K,
    pub(in crate::cuda) norm_sums: K,
    pub(in crate::cuda) step_control: K,
    pub(in crate::cuda) adamw: K,
    pub(in crate::cuda) convert_type: K,
}

/// `linear.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct LinearKernels<K> {
    pub(in crate::cuda) forward: HalfOrAny<K>,
    pub(in crate::cuda) d_x: HalfOrAny<K>,
    pub(in crate::cuda) d_weight: HalfOrAny<K>,
    pub(in crate::cuda) sum_parts: K,
}

/// `all_to_all_plan.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct AllToAllPlanKernels<K> {
    pub(in crate::cuda) places: K,
    pub(in crate::cuda) count: K,
    pub(in crate::cuda) scan: K,
    pub(in crate::cuda) number: K,
    pub(in crate::cuda) zones: K,
}

/// `sm90_nvlink_plan.cu`, `sm90_nvlink_dispatch.cu`, `sm90_nvlink_groups.cu`, `sm90_nvlink_combine.cu`,
/// `sm90_nvlink_low_latency.cu`, `sm90_nvlink_low_latency_exchange.cu`.
#[derive(Debug)]
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only ranks on several GPUs have peers"))]
pub(in crate::cuda) struct NvLinkKernels<K> {
    pub(in crate::cuda) exchange: K,
    pub(in crate::cuda) plan: K,
    pub(in crate::cuda) dispatch: K,
    pub(in crate::cuda) groups: K,
    pub(in crate::cuda) combine: PerType<K>,
    pub(in crate::cuda) low_latency_exchange: K,
    pub(in crate::cuda) low_latency_dispatch: K,
    pub(in crate::cuda) low_latency_combine: PerType<K>,
}

/// `mxfp8_cast.cu`: of whole rows, in tiles, of anything.
#[derive(Debug)]
pub(in crate::cuda) struct Mxfp8CastKernels<K> {
    pub(in crate::cuda) rows: PerType<K>,
    pub(in crate::cuda) tiled: PerType<K>,
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

/// `permute.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct PermuteKernels<K> {
    pub(in crate::cuda) gather_rows: K,
    pub(in crate::cuda) reduce_rows: K,
    pub(in crate::cuda) reduce_few_rows: K,
    pub(in crate::cuda) slot_dots: K,
    pub(in crate::cuda) sigmoid: K,
    pub(in crate::cuda) add_shares: PerType<K>,
}

/// `plan.cu`.
#[derive(Debug)]
#[cfg_attr(not(feature = "nccl-ep"), allow(dead_code, reason = "some are for that feature's dispatchers"))]
pub(in crate::cuda) struct PlanKernels<K> {
    pub(in crate::cuda) plan_small: K,
    pub(in crate::cuda) plan_count: K,
    pub(in crate::cuda) plan_scan: K,
    pub(in crate::cuda) plan_segments: K,
    pub(in crate::cuda) plan_slots: K,
    pub(in crate::cuda) segment_starts: K,
    pub(in crate::cuda) plan_external_layout: K,
    pub(in crate::cuda) low_latency_pack: K,
    pub(in crate::cuda) low_latency_sort: K,
    pub(in crate::cuda) low_latency_map: K,
    pub(in crate::cuda) list_tiles: K,
    pub(in crate::cuda) list_tiles_paired: K,
    pub(in crate::cuda) report: K,
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
    pub(in crate::cuda) swizzle: K,
}

/// `routing_records.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct RoutingRecordsKernels<K> {
    pub(in crate::cuda) record_ids: K,
    pub(in crate::cuda) count: K,
    pub(in crate::cuda) scan: K,
    pub(in crate::cuda) segments: K,
    pub(in crate::cuda) slots: K,
}

/// `router.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct RouterKernels<K> {
    pub(in crate::cuda) route: K,
    pub(in crate::cuda) route_bwd: K,
    pub(in crate::cuda) route_softmax: K,
    pub(in crate::cuda) route_softmax_bwd: K,
    pub(in crate::cuda) renormalize_kept: K,
}

/// `w4a16_decode.cu`: tiles of 8 rows by four warps, the same of half as many weight rows, of up to 16 by eight.
#[derive(Debug)]
pub(in crate::cuda) struct DecodeKernels<K> {
    pub(in crate::cuda) eight: FewRowsForward<K>,
    pub(in crate::cuda) eight_narrow: FewRowsForward<K>,
    pub(in crate::cuda) sixteen: FewRowsForward<K>,
}

/// `wgrad.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct WgradKernels<K> {
    pub(in crate::cuda) sums: PerType<K>,
    pub(in crate::cuda) column_sums: K,
}

/// The stages that exist for sm_90a alone.
#[derive(Debug)]
pub(in crate::cuda) struct Sm90Kernels<K> {
    #[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only ranks on several GPUs have peers"))]
    pub(in crate::cuda) nvlink: NvLinkKernels<K>,
    gemm: PerProduct<Half<K>>,
    gemm_down_wide: Half<K>,
    gemm_up_dgrad_wide: Half<K>,
    gemm_down_bwd_square: Half<K>,
    pub(in crate::cuda) decode_up: Half<K>,
    pub(in crate::cuda) decode_down: Half<K>,
    pub(in crate::cuda) decode_linear: Half<K>,
    pub(in crate::cuda) route_plan: Half<K>,
    pub(in crate::cuda) linear: Half<K>,
    pub(in crate::cuda) linear_d_x: K,
    pub(in crate::cuda) linear_d_weight: K,
    pub(in crate::cuda) dequantize: PerFormat<Half<K>>,
    pub(in crate::cuda) w4a16: Fp4Forward<K>,
    pub(in crate::cuda) wgrad: Half<K>,
}

impl<K> Sm90Kernels<K> {
    /// Products of 16-bit rows, with tiles of a shape where the product has such.
    pub(in crate::cuda) fn gemm(&self, product: Product, shape: TileShape) -> &Half<K> {
        match (product, shape) {
            (Product::Down, TileShape::Wide) => &self.gemm_down_wide,
            (Product::Dgrad, TileShape::Wide) => &self.gemm_up_dgrad_wide,
            (Product::DownBwd, TileShape::Square) => &self.gemm_down_bwd_square,
            _ => self.gemm.of(product),
        }
    }
}

pub(super) fn adamw<K>(mut stage: Stage<'_, K>) -> Result<AdamWKernels<K>> {
    Ok(AdamWKernels {
        square_leaves: stage.one("square_leaves")?,
        square_nodes: stage.one("square_nodes")?,
        norm_sums: stage.one("norm_sums")?,
        step_control: stage.one("step_control")?,
        adamw: stage.one("adamw")?,
        convert_type: stage.one("convert_type")?,
    })
}

pub(super) fn aux_loss<K>(mut stage: Stage<'_, K>) -> Result<AuxLossKernels<K>> {
    Ok(AuxLossKernels {
        scores: stage.one("aux_loss_scores")?,
        chunks: stage.one("aux_loss_chunks")?,
        totals: stage.one("aux_loss_totals")?,
        finish: stage.one("aux_loss_finish")?,
        value: stage.one("aux_loss_value")?,
        coefficients: stage.one("aux_loss_coefficients")?,
    })
}

pub(super) fn grouped_gemm<K>(mut stage: Stage<'_, K>) -> Result<PerProduct<PerType<K>>> {
    Ok(PerProduct {
        up: stage.types(["up_f32", "up_f16", "up_bf16"], MMA_SYNC.shared)?,
        down: stage.types(["down_f32", "down_f16", "down_bf16"], MMA_SYNC.shared)?,
        down_bwd: stage.types(["down_bwd_f32", "down_bwd_f16", "down_bwd_bf16"], MMA_SYNC.shared)?,
        up_dgrad: stage.types(["up_dgrad_f32", "up_dgrad_f16", "up_dgrad_bf16"], MMA_SYNC.shared)?,
    })
}

pub(super) fn linear<K>(mut stage: Stage<'_, K>) -> Result<LinearKernels<K>> {
    Ok(LinearKernels {
        forward: stage.half_or_any(["linear_any", "linear_f16", "linear_bf16"], MMA_SYNC.shared)?,
        d_x: stage.half_or_any(["linear_d_x_any", "linear_d_x_f16", "linear_d_x_bf16"], TF32.shared)?,
        d_weight: stage
            .half_or_any(["linear_d_weight_any", "linear_d_weight_f16", "linear_d_weight_bf16"], TF32.shared)?,
        sum_parts: stage.one("sum_parts")?,
    })
}

pub(super) fn all_to_all_plan<K>(mut stage: Stage<'_, K>) -> Result<AllToAllPlanKernels<K>> {
    Ok(AllToAllPlanKernels {
        places: stage.one("all_to_all_places")?,
        count: stage.one("all_to_all_count")?,
        scan: stage.one("all_to_all_scan")?,
        number: stage.one("all_to_all_number")?,
        zones: stage.one("all_to_all_zones")?,
    })
}

pub(super) fn mxfp8_cast<K>(mut stage: Stage<'_, K>) -> Result<Mxfp8CastKernels<K>> {
    Ok(Mxfp8CastKernels {
        rows: stage.types(["mxfp8_rows_f32", "mxfp8_rows_f16", "mxfp8_rows_bf16"], 0)?,
        tiled: stage.types(["mxfp8_tiled_f32", "mxfp8_tiled_f16", "mxfp8_tiled_bf16"], 0)?,
        any: stage.types(["mxfp8_f32", "mxfp8_f16", "mxfp8_bf16"], 0)?,
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

pub(super) fn permute<K>(mut stage: Stage<'_, K>) -> Result<PermuteKernels<K>> {
    Ok(PermuteKernels {
        gather_rows: stage.one("gather_rows")?,
        reduce_rows: stage.one("reduce_rows")?,
        reduce_few_rows: stage.one("reduce_few_rows")?,
        slot_dots: stage.one("slot_dots")?,
        sigmoid: stage.one("sigmoid")?,
        add_shares: stage.types(["add_shares_f32", "add_shares_f16", "add_shares_bf16"], 0)?,
    })
}

pub(super) fn plan<K>(mut stage: Stage<'_, K>) -> Result<PlanKernels<K>> {
    Ok(PlanKernels {
        plan_small: stage.asking("plan_small", PLAN_SMALL_SMEM)?,
        plan_count: stage.one("plan_count")?,
        plan_scan: stage.one("plan_scan")?,
        plan_segments: stage.one("plan_segments")?,
        plan_slots: stage.one("plan_slots")?,
        segment_starts: stage.one("segment_starts")?,
        plan_external_layout: stage.one("plan_external_layout")?,
        low_latency_pack: stage.one("low_latency_pack")?,
        low_latency_sort: stage.one("low_latency_sort")?,
        low_latency_map: stage.one("low_latency_map")?,
        list_tiles: stage.one("list_tiles")?,
        list_tiles_paired: stage.one("list_tiles_paired")?,
        report: stage.one("report")?,
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
        swizzle: stage.one("swizzle")?,
    })
}

pub(super) fn routing_records<K>(mut stage: Stage<'_, K>) -> Result<RoutingRecordsKernels<K>> {
    Ok(RoutingRecordsKernels {
        record_ids: stage.one("record_ids")?,
        count: stage.one("routing_records_count")?,
        scan: stage.one("routing_records_scan")?,
        segments: stage.one("routing_records_segments")?,
        slots: stage.one("routing_records_slots")?,
    })
}

pub(super) fn router<K>(mut stage: Stage<'_, K>) -> Result<RouterKernels<K>> {
    Ok(RouterKernels {
        route: stage.one("route")?,
        route_bwd: stage.one("route_bwd")?,
        route_softmax: stage.one("route_softmax")?,
        route_softmax_bwd: stage.one("route_softmax_bwd")?,
        renormalize_kept: stage.one("renormalize_kept")?,
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

pub(super) fn wgrad<K>(mut stage: Stage<'_, K>) -> Result<WgradKernels<K>> {
    Ok(WgradKernels {
        sums: stage.types(["wgrad_f32", "wgrad_f16", "wgrad_bf16"], MMA_SYNC.shared)?,
        column_sums: stage.one("column_sums")?,
    })
}

pub(super) fn sm90<K>(find: &mut dyn FnMut(KernelSpec) -> Result<K>) -> Result<Sm90Kernels<K>> {
    let mut gemm = Stage { stage: "sm90_grouped_gemm", find };
    let products = PerProduct {
        up: gemm.half(["sm90_up_f16", "sm90_up_bf16"], SM90_GROUPED_GEMM.shared)?,
        down: gemm.half(["sm90_down_f16", "sm90_down_bf16"], SM90_GROUPED_GEMM.shared)?,
        down_bwd: gemm.half(["sm90_down_bwd_f16", "sm90_down_bwd_bf16"], SM90_GROUPED_GEMM.shared)?,
        up_dgrad: gemm.half(["sm90_up_dgrad_f16", "sm90_up_dgrad_bf16"], SM90_GROUPED_GEMM.shared)?,
    };
    let gemm_down_wide = gemm.half(["sm90_down_wide_f16", "sm90_down_wide_bf16"], SM90_GROUPED_GEMM.shared)?;
    let gemm_up_dgrad_wide =
        gemm.half(["sm90_up_dgrad_wide_f16", "sm90_up_dgrad_wide_bf16"], SM90_GROUPED_GEMM.shared)?;
    let gemm_down_bwd_square =
        gemm.half(["sm90_down_bwd_square_f16", "sm90_down_bwd_square_bf16"], SM90_GROUPED_GEMM.shared)?;
    let mut decode = Stage { stage: "sm90_decode", find };
    let decode_up = decode.half(["sm90_decode_up_f16", "sm90_decode_up_bf16"], SM90_DECODE.shared)?;
    let decode_down = decode.half(["sm90_decode_down_f16", "sm90_decode_down_bf16"], SM90_DECODE.shared)?;
    let decode_linear =
        decode.half(["sm90_decode_linear_f16", "sm90_decode_linear_bf16"], SM90_DECODE_LINEAR.shared)?;
    let route_plan = Stage { stage: "sm90_route_plan", find }
        .half(["sm90_route_plan_f16", "sm90_route_plan_bf16"], ROUTE_PLAN_SMEM)?;
    let mut linear = Stage { stage: "sm90_linear", find };
    let forward = linear.half(["sm90_linear_f16", "sm90_linear_bf16"], SM90_LINEAR.shared)?;
    let linear_d_x = linear.asking("sm90_linear_d_x", SM90_LINEAR_D_X.shared)?;
    let linear_d_weight = linear.asking("sm90_linear_d_weight", SM90_LINEAR.shared)?;
    let mut dequantize = Stage { stage: "sm90_dequantize", find };
    let dequantize = PerFormat {
        nvfp4: dequantize.half(["sm90_dequantize_nvfp4_f16", "sm90_dequantize_nvfp4_bf16"], 0)?,
        mxfp4: dequantize.half(["sm90_dequantize_mxfp4_f16", "sm90_dequantize_mxfp4_bf16"], 0)?,
        fp8: dequantize.half(["sm90_dequantize_fp8_f16", "sm90_dequantize_fp8_bf16"], 0)?,
    };
    let fp4 = ["sm90_up_nvfp4", "sm90_up_mxfp4", "sm90_down_nvfp4", "sm90_down_mxfp4"];
    let mut plan = Stage { stage: "sm90_nvlink_plan", find };
    let (exchange, plan) = (plan.one("sm90_nvlink_exchange")?, plan.asking("sm90_nvlink_plan", NVLINK_PLAN_SMEM)?);
    let dispatch = Stage { stage: "sm90_nvlink_dispatch", find }.one("sm90_nvlink_dispatch")?;
    let groups = Stage { stage: "sm90_nvlink_groups", find }.asking("sm90_nvlink_groups", NVLINK_ITEMS_SMEM)?;
    let mut combine = Stage { stage: "sm90_nvlink_combine", find };
    let combine = PerType {
        f32: combine.asking("sm90_nvlink_combine_f32", NVLINK_SUM_SMEM)?,
        half: combine.half(["sm90_nvlink_combine_f16", "sm90_nvlink_combine_bf16"], NVLINK_SUM_SMEM)?,
    };
    let low_latency_exchange =
        Stage { stage: "sm90_nvlink_low_latency_exchange", find }.one("sm90_nvlink_low_latency_exchange")?;
    let mut low_latency = Stage { stage: "sm90_nvlink_low_latency", find };
    let low_latency_dispatch = low_latency.one("sm90_nvlink_low_latency_dispatch")?;
    let sums = ["sm90_nvlink_low_latency_combine_f16", "sm90_nvlink_low_latency_combine_bf16"];
    let low_latency_combine =
        PerType { f32: low_latency.one("sm90_nvlink_low_latency_combine_f32")?, half: low_latency.half(sums, 0)? };
    Ok(Sm90Kernels {
        nvlink: NvLinkKernels {
            exchange,
            plan,
            dispatch,
            groups,
            combine,
            low_latency_exchange,
            low_latency_dispatch,
            low_latency_combine,
        },
        gemm: products,
        gemm_down_wide,
        gemm_up_dgrad_wide,
        gemm_down_bwd_square,
        decode_up,
        decode_down,
        decode_linear,
        route_plan,
        linear: forward,
        linear_d_x,
        linear_d_weight,
        dequantize,
        w4a16: Stage { stage: "sm90_w4a16", find }.fp4_forward(fp4, SM90_W4A16.shared)?,
        wgrad: Stage { stage: "sm90_wgrad", find }.half(["sm90_wgrad_f16", "sm90_wgrad_bf16"], SM90_WGRAD.shared)?,
    })
}
