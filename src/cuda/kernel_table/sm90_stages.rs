//! The kernels of the stages that exist for sm_90a alone, and their names.

use crate::error::Result;

use crate::cuda::tile_config::{
    NVLINK_ITEMS_SMEM, NVLINK_PLAN_SMEM, NVLINK_SUM_SMEM, ROUTE_PLAN_SMEM, SM90_DECODE, SM90_DECODE_LINEAR,
    SM90_GROUPED_GEMM, SM90_LINEAR, SM90_LINEAR_D_X, SM90_W4A16, SM90_WGRAD,
};

use super::find::{KernelSpec, Stage};
use super::per_type::{Fp4Forward, Half, PerFormat, PerProduct, PerType, Product, TileShape};

/// `sm90_nvlink_plan.cu`, `sm90_nvlink_dispatch.cu`, `sm90_nvlink_groups.cu`, `sm90_nvlink_combine.cu`,
/// `sm90_nvlink_combine_mxfp8.cu`, `sm90_nvlink_low_latency.cu`, `sm90_nvlink_low_latency_exchange.cu`.
#[derive(Debug)]
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only ranks on several GPUs have peers"))]
pub(in crate::cuda) struct NvLinkKernels<K> {
    pub(in crate::cuda) exchange: K,
    pub(in crate::cuda) plan: K,
    pub(in crate::cuda) dispatch: K,
    pub(in crate::cuda) groups: K,
    pub(in crate::cuda) combine: PerType<K>,
    pub(in crate::cuda) combine_mxfp8: PerType<K>,
    pub(in crate::cuda) low_latency_exchange: K,
    pub(in crate::cuda) low_latency_dispatch: K,
    pub(in crate::cuda) low_latency_combine: PerType<K>,
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
    let mut combine_mxfp8 = Stage { stage: "sm90_nvlink_combine_mxfp8", find };
    let quantized = ["sm90_nvlink_combine_mxfp8_f16", "sm90_nvlink_combine_mxfp8_bf16"];
    let combine_mxfp8 = PerType {
        f32: combine_mxfp8.asking("sm90_nvlink_combine_mxfp8_f32", NVLINK_SUM_SMEM)?,
        half: combine_mxfp8.half(quantized, NVLINK_SUM_SMEM)?,
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
            combine_mxfp8,
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
