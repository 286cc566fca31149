//! The kernels of the stages that every GPU has, and their names; quantization's are in `quant_stages`.

use crate::error::Result;

use crate::cuda::tile_config::{MMA_SYNC, PLAN_SMALL_SMEM, TF32};

use super::find::Stage;
use super::per_type::{HalfOrAny, PerProduct, PerType};

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

/// `wgrad.cu`.
#[derive(Debug)]
pub(in crate::cuda) struct WgradKernels<K> {
    pub(in crate::cuda) sums: PerType<K>,
    pub(in crate::cuda) column_sums: K,
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

pub(super) fn wgrad<K>(mut stage: Stage<'_, K>) -> Result<WgradKernels<K>> {
    Ok(WgradKernels {
        sums: stage.types(["wgrad_f32", "wgrad_f16", "wgrad_bf16"], MMA_SYNC.shared)?,
        column_sums: stage.one("column_sums")?,
    })
}
