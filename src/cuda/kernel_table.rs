//! All kernels of this crate, each a field: what a launch takes is found when the modules are loaded, so a name that is
//! wrong, or a kernel that a cubin lacks, fails there and not at a launch.
//!
//! A table is made by a function that finds one kernel; that of a GPU asks the driver, and tests collect the names.

use crate::dtype::DType;
use crate::error::Result;
use crate::quant::WeightFormat;

use super::tile_config::{
    DEFAULT_SMEM, MMA_SYNC, NVFP4_ALIGNED_SMEM, SM90_GROUPED_GEMM, SM90_LINEAR, SM90_LINEAR_D_X, SM90_W4A16,
    SM90_WGRAD, TF32,
};

/// A kernel to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelSpec {
    /// The file in `kernels/` that has it.
    pub(super) stage: &'static str,
    pub(super) name: &'static str,
    /// Shared memory beside its own variables that it is to be allowed; 0: what every kernel has.
    pub(super) shared: u32,
}

/// A GPU, as far as kernels depend on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traits {
    /// It has those of sm_90a.
    pub(super) sm90: bool,
    /// Shared memory that the kernels of few rows with quantized weights may take.
    pub(super) decode_shared: u32,
}

/// A kernel for each type of floating point.
#[derive(Debug)]
pub(super) struct PerType<K> {
    f32: K,
    half: Half<K>,
}

/// A kernel for each 16-bit type.
#[derive(Debug)]
pub(super) struct Half<K> {
    f16: K,
    bf16: K,
}

/// Kernels for operands of a 16-bit type, and one for any, also different, types.
#[derive(Debug)]
pub(super) struct HalfOrAny<K> {
    pub(super) any: K,
    pub(super) half: Half<K>,
}

impl<K> PerType<K> {
    /// That of a type, f32's where it is no 16-bit one.
    pub(super) fn of(&self, dtype: DType) -> &K {
        self.half.of(dtype).unwrap_or(&self.f32)
    }
}

impl<K> Half<K> {
    /// That of a 16-bit type.
    pub(super) fn of(&self, dtype: DType) -> Option<&K> {
        match dtype {
            DType::F16 => Some(&self.f16),
            DType::BF16 => Some(&self.bf16),
            _ => None,
        }
    }
}

/// Which product a kernel makes, as far as its operands' layout depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    /// Gate and up rows of `[E, 2 n, k]`.
    Up,
    /// Rows of `[E, n, k]`.
    Down,
    /// Columns of `[E, k, n]`.
    Dgrad,
    /// The same, and the gradient of the activation.
    DownBwd,
}

/// Something for each product of experts.
#[derive(Debug)]
pub(super) struct PerProduct<T> {
    up: T,
    down: T,
    down_bwd: T,
    up_dgrad: T,
}

impl<T> PerProduct<T> {
    pub(super) fn of(&self, product: Product) -> &T {
        match product {
            Product::Up => &self.up,
            Product::Down => &self.down,
            Product::DownBwd => &self.down_bwd,
            Product::Dgrad => &self.up_dgrad,
        }
    }
}

/// Something for each format of quantized weights.
#[derive(Debug)]
pub(super) struct PerFormat<T> {
    nvfp4: T,
    mxfp4: T,
    fp8: T,
}

impl<T> PerFormat<T> {
    pub(super) fn of(&self, format: WeightFormat) -> &T {
        match format {
            WeightFormat::Nvfp4 => &self.nvfp4,
            WeightFormat::Mxfp4 => &self.mxfp4,
            WeightFormat::Fp8Block => &self.fp8,
        }
    }
}

/// Kernels for bf16 rows and 4-bit weights, forward.
#[derive(Debug)]
pub(super) struct Fp4Forward<K> {
    up_nvfp4: K,
    up_mxfp4: K,
    down_nvfp4: K,
    down_mxfp4: K,
}

impl<K> Fp4Forward<K> {
    /// That of a product and format, if they have one.
    pub(super) fn of(&self, product: Product, format: WeightFormat) -> Option<&K> {
        match (product, format) {
            (Product::Up, WeightFormat::Nvfp4) => Some(&self.up_nvfp4),
            (Product::Up, WeightFormat::Mxfp4) => Some(&self.up_mxfp4),
            (Product::Down, WeightFormat::Nvfp4) => Some(&self.down_nvfp4),
            (Product::Down, WeightFormat::Mxfp4) => Some(&self.down_mxfp4),
            _ => None,
        }
    }
}

/// `aux_loss.cu`.
#[derive(Debug)]
pub(super) struct AuxLossKernels<K> {
    pub(super) scores: K,
    pub(super) chunks: K,
    pub(super) totals: K,
    pub(super) finish: K,
    pub(super) value: K,
    pub(super) coefficients: K,
}

/// `adamw.cu`.
#[derive(Debug)]
pub(super) struct AdamWKernels<K> {
    pub(super) square_leaves: K,
    pub(super) square_nodes: K,
    pub(super) norm_sums: K,
    pub(super) step_control: K,
    pub(super) adamw: K,
    pub(super) convert_type: K,
}

/// `linear.cu`.
#[derive(Debug)]
pub(super) struct LinearKernels<K> {
    pub(super) forward: HalfOrAny<K>,
    pub(super) d_x: HalfOrAny<K>,
    pub(super) d_weight: HalfOrAny<K>,
    pub(super) sum_parts: K,
}

/// `all_to_all_plan.cu`.
#[derive(Debug)]
pub(super) struct AllToAllPlanKernels<K> {
    pub(super) places: K,
    pub(super) count: K,
    pub(super) scan: K,
    pub(super) number: K,
}

/// `mxfp8_cast.cu`: of whole rows, in tiles, of anything.
#[derive(Debug)]
pub(super) struct Mxfp8CastKernels<K> {
    pub(super) rows: PerType<K>,
    pub(super) tiled: PerType<K>,
    pub(super) any: PerType<K>,
}

/// How a cast to NVFP4 rounds and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Nvfp4Mode {
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
pub(super) struct Nvfp4CastKernels<K> {
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
    pub(super) fn any(&self, mode: Nvfp4Mode, dtype: DType) -> &K {
        match mode {
            Nvfp4Mode::Te => self.te.of(dtype),
            Nvfp4Mode::Stochastic => self.stochastic.of(dtype),
            Nvfp4Mode::Tiled => self.tiled.of(dtype),
            Nvfp4Mode::ModelOpt => self.modelopt.of(dtype),
        }
    }

    /// That of whole rows; of tiles for 16-bit types alone.
    pub(super) fn rows(&self, mode: Nvfp4Mode, dtype: DType) -> Option<&K> {
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
pub(super) struct Nvfp4AlignedKernels<K> {
    te: Half<K>,
    stochastic: Half<K>,
    tiled: Half<K>,
}

impl<K> Nvfp4AlignedKernels<K> {
    pub(super) fn of(&self, mode: Nvfp4Mode, dtype: DType) -> Option<&K> {
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
pub(super) struct PermuteKernels<K> {
    pub(super) gather_rows: K,
    pub(super) reduce_rows: K,
    pub(super) reduce_few_rows: K,
    pub(super) slot_dots: K,
    pub(super) sigmoid: K,
    pub(super) add_shares: PerType<K>,
}

/// `prepare.cu`.
#[derive(Debug)]
#[cfg_attr(not(feature = "nccl-ep"), allow(dead_code, reason = "some are for that feature's dispatchers"))]
pub(super) struct PrepareKernels<K> {
    pub(super) plan_small: K,
    pub(super) plan_count: K,
    pub(super) plan_scan: K,
    pub(super) plan_segments: K,
    pub(super) plan_slots: K,
    pub(super) segment_starts: K,
    pub(super) plan_external_layout: K,
    pub(super) low_latency_pack: K,
    pub(super) low_latency_sort: K,
    pub(super) low_latency_map: K,
    pub(super) list_tiles: K,
    pub(super) list_tiles_paired: K,
    pub(super) report: K,
}

/// `quant_amax.cu`.
#[derive(Debug)]
pub(super) struct QuantAmaxKernels<K> {
    pub(super) zero: K,
    pub(super) whole: K,
    pub(super) lines: K,
    pub(super) transformed: K,
    pub(super) first_non_finite: K,
}

/// `dequantize.cu`.
#[derive(Debug)]
pub(super) struct DequantizeKernels<K> {
    pub(super) nvfp4: K,
    pub(super) mxfp8: K,
    pub(super) swizzle: K,
}

/// `routing_records.cu`.
#[derive(Debug)]
pub(super) struct RoutingRecordsKernels<K> {
    pub(super) record_ids: K,
    pub(super) count: K,
    pub(super) scan: K,
    pub(super) segments: K,
    pub(super) slots: K,
}

/// `router.cu`.
#[derive(Debug)]
pub(super) struct RouterKernels<K> {
    pub(super) route: K,
    pub(super) route_bwd: K,
    pub(super) route_softmax: K,
    pub(super) route_softmax_bwd: K,
    pub(super) keep_sum: K,
}

/// `w4a16_decode.cu`: tiles of 8 rows by four warps, of up to 16 by eight.
#[derive(Debug)]
pub(super) struct DecodeKernels<K> {
    pub(super) eight: Fp4Forward<K>,
    pub(super) sixteen: Fp4Forward<K>,
}

/// `wgrad.cu`.
#[derive(Debug)]
pub(super) struct WgradKernels<K> {
    pub(super) sums: PerType<K>,
    pub(super) column_sums: K,
}

/// The stages that exist for sm_90a alone.
#[derive(Debug)]
pub(super) struct Sm90Kernels<K> {
    gemm: PerProduct<Half<K>>,
    gemm_down_wide: Half<K>,
    gemm_up_dgrad_wide: Half<K>,
    pub(super) linear: Half<K>,
    pub(super) linear_d_x: K,
    pub(super) linear_d_weight: K,
    pub(super) w4a16: Fp4Forward<K>,
    pub(super) wgrad: Half<K>,
}

impl<K> Sm90Kernels<K> {
    /// Products of 16-bit rows, with wider tiles where the product has such.
    pub(super) fn gemm(&self, product: Product, wide: bool) -> &Half<K> {
        match (product, wide) {
            (Product::Down, true) => &self.gemm_down_wide,
            (Product::Dgrad, true) => &self.gemm_up_dgrad_wide,
            _ => self.gemm.of(product),
        }
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Table<K> {
    pub(super) adamw: AdamWKernels<K>,
    pub(super) aux_loss: AuxLossKernels<K>,
    pub(super) grouped_gemm: PerProduct<PerType<K>>,
    pub(super) concat_rows: K,
    pub(super) linear: LinearKernels<K>,
    pub(super) all_to_all_plan: AllToAllPlanKernels<K>,
    pub(super) mxfp8_cast: Mxfp8CastKernels<K>,
    pub(super) nvfp4_cast: Nvfp4CastKernels<K>,
    pub(super) nvfp4_aligned: Nvfp4AlignedKernels<K>,
    pub(super) permute: PermuteKernels<K>,
    pub(super) prepare: PrepareKernels<K>,
    pub(super) quant_amax: QuantAmaxKernels<K>,
    pub(super) dequantize: DequantizeKernels<K>,
    pub(super) routing_records: RoutingRecordsKernels<K>,
    pub(super) router: RouterKernels<K>,
    pub(super) w4a16: PerFormat<PerProduct<PerType<K>>>,
    pub(super) w4a16_decode: DecodeKernels<K>,
    pub(super) wgrad: WgradKernels<K>,
    /// `None`: a GPU that they are not for.
    pub(super) sm90: Option<Sm90Kernels<K>>,
}

/// Finds the kernels of a stage.
struct Stage<'a, K> {
    stage: &'static str,
    find: &'a mut dyn FnMut(KernelSpec) -> Result<K>,
}

impl<K> Stage<'_, K> {
    /// A kernel that needs no more shared memory than every kernel has.
    fn one(&mut self, name: &'static str) -> Result<K> {
        self.asking(name, 0)
    }

    fn asking(&mut self, name: &'static str, shared: u32) -> Result<K> {
        (self.find)(KernelSpec { stage: self.stage, name, shared })
    }

    fn half(&mut self, [f16, bf16]: [&'static str; 2], shared: u32) -> Result<Half<K>> {
        Ok(Half { f16: self.asking(f16, shared)?, bf16: self.asking(bf16, shared)? })
    }

    /// `shared` is what those of 16-bit types ask for.
    fn types(&mut self, [f32, f16, bf16]: [&'static str; 3], shared: u32) -> Result<PerType<K>> {
        Ok(PerType { f32: self.one(f32)?, half: self.half([f16, bf16], shared)? })
    }

    fn half_or_any(&mut self, [any, f16, bf16]: [&'static str; 3], shared: u32) -> Result<HalfOrAny<K>> {
        Ok(HalfOrAny { any: self.one(any)?, half: self.half([f16, bf16], shared)? })
    }

    fn fp4_forward(&mut self, names: [&'static str; 4], shared: u32) -> Result<Fp4Forward<K>> {
        let [up_nvfp4, up_mxfp4, down_nvfp4, down_mxfp4] = names;
        Ok(Fp4Forward {
            up_nvfp4: self.asking(up_nvfp4, shared)?,
            up_mxfp4: self.asking(up_mxfp4, shared)?,
            down_nvfp4: self.asking(down_nvfp4, shared)?,
            down_mxfp4: self.asking(down_mxfp4, shared)?,
        })
    }
}

impl<K> Table<K> {
    /// The table of a GPU of these traits.
    ///
    /// # Errors
    /// The first that `find` returns.
    pub(super) fn new(traits: Traits, mut find: impl FnMut(KernelSpec) -> Result<K>) -> Result<Self> {
        let find = &mut find;
        Ok(Self {
            adamw: adamw(Stage { stage: "adamw", find })?,
            aux_loss: aux_loss(Stage { stage: "aux_loss", find })?,
            grouped_gemm: grouped_gemm(Stage { stage: "grouped_gemm", find })?,
            concat_rows: Stage { stage: "concat_rows", find }.one("concat_rows")?,
            linear: linear(Stage { stage: "linear", find })?,
            all_to_all_plan: all_to_all_plan(Stage { stage: "all_to_all_plan", find })?,
            mxfp8_cast: mxfp8_cast(Stage { stage: "mxfp8_cast", find })?,
            nvfp4_cast: nvfp4_cast(Stage { stage: "nvfp4_cast", find })?,
            nvfp4_aligned: nvfp4_aligned(Stage { stage: "nvfp4_cast_aligned", find })?,
            permute: permute(Stage { stage: "permute", find })?,
            prepare: prepare(Stage { stage: "prepare", find })?,
            quant_amax: quant_amax(Stage { stage: "quant_amax", find })?,
            dequantize: dequantize(Stage { stage: "dequantize", find })?,
            routing_records: routing_records(Stage { stage: "routing_records", find })?,
            router: router(Stage { stage: "router", find })?,
            w4a16: w4a16(Stage { stage: "w4a16", find })?,
            w4a16_decode: w4a16_decode(Stage { stage: "w4a16_decode", find }, traits.decode_shared)?,
            wgrad: wgrad(Stage { stage: "wgrad", find })?,
            sm90: if traits.sm90 { Some(sm90(find)?) } else { None },
        })
    }
}

fn adamw<K>(mut stage: Stage<'_, K>) -> Result<AdamWKernels<K>> {
    Ok(AdamWKernels {
        square_leaves: stage.one("square_leaves")?,
        square_nodes: stage.one("square_nodes")?,
        norm_sums: stage.one("norm_sums")?,
        step_control: stage.one("step_control")?,
        adamw: stage.one("adamw")?,
        convert_type: stage.one("convert_type")?,
    })
}

fn aux_loss<K>(mut stage: Stage<'_, K>) -> Result<AuxLossKernels<K>> {
    Ok(AuxLossKernels {
        scores: stage.one("aux_loss_scores")?,
        chunks: stage.one("aux_loss_chunks")?,
        totals: stage.one("aux_loss_totals")?,
        finish: stage.one("aux_loss_finish")?,
        value: stage.one("aux_loss_value")?,
        coefficients: stage.one("aux_loss_coefficients")?,
    })
}

fn grouped_gemm<K>(mut stage: Stage<'_, K>) -> Result<PerProduct<PerType<K>>> {
    Ok(PerProduct {
        up: stage.types(["up_f32", "up_f16", "up_bf16"], MMA_SYNC.shared)?,
        down: stage.types(["down_f32", "down_f16", "down_bf16"], MMA_SYNC.shared)?,
        down_bwd: stage.types(["down_bwd_f32", "down_bwd_f16", "down_bwd_bf16"], MMA_SYNC.shared)?,
        up_dgrad: stage.types(["up_dgrad_f32", "up_dgrad_f16", "up_dgrad_bf16"], MMA_SYNC.shared)?,
    })
}

fn linear<K>(mut stage: Stage<'_, K>) -> Result<LinearKernels<K>> {
    Ok(LinearKernels {
        forward: stage.half_or_any(["linear_any", "linear_f16", "linear_bf16"], MMA_SYNC.shared)?,
        d_x: stage.half_or_any(["linear_d_x_any", "linear_d_x_f16", "linear_d_x_bf16"], TF32.shared)?,
        d_weight: stage
            .half_or_any(["linear_d_weight_any", "linear_d_weight_f16", "linear_d_weight_bf16"], TF32.shared)?,
        sum_parts: stage.one("sum_parts")?,
    })
}

fn all_to_all_plan<K>(mut stage: Stage<'_, K>) -> Result<AllToAllPlanKernels<K>> {
    Ok(AllToAllPlanKernels {
        places: stage.one("all_to_all_places")?,
        count: stage.one("all_to_all_count")?,
        scan: stage.one("all_to_all_scan")?,
        number: stage.one("all_to_all_number")?,
    })
}

fn mxfp8_cast<K>(mut stage: Stage<'_, K>) -> Result<Mxfp8CastKernels<K>> {
    Ok(Mxfp8CastKernels {
        rows: stage.types(["mxfp8_rows_f32", "mxfp8_rows_f16", "mxfp8_rows_bf16"], 0)?,
        tiled: stage.types(["mxfp8_tiled_f32", "mxfp8_tiled_f16", "mxfp8_tiled_bf16"], 0)?,
        any: stage.types(["mxfp8_f32", "mxfp8_f16", "mxfp8_bf16"], 0)?,
    })
}

fn nvfp4_cast<K>(mut stage: Stage<'_, K>) -> Result<Nvfp4CastKernels<K>> {
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

fn nvfp4_aligned<K>(mut stage: Stage<'_, K>) -> Result<Nvfp4AlignedKernels<K>> {
    let [nearest, stochastic] = NVFP4_ALIGNED_SMEM;
    Ok(Nvfp4AlignedKernels {
        te: stage.half(["nvfp4_aligned_te_f16", "nvfp4_aligned_te_bf16"], nearest)?,
        stochastic: stage.half(["nvfp4_aligned_stochastic_f16", "nvfp4_aligned_stochastic_bf16"], stochastic)?,
        tiled: stage.half(["nvfp4_aligned_tiled_f16", "nvfp4_aligned_tiled_bf16"], nearest)?,
    })
}

fn permute<K>(mut stage: Stage<'_, K>) -> Result<PermuteKernels<K>> {
    Ok(PermuteKernels {
        gather_rows: stage.one("gather_rows")?,
        reduce_rows: stage.one("reduce_rows")?,
        reduce_few_rows: stage.one("reduce_few_rows")?,
        slot_dots: stage.one("slot_dots")?,
        sigmoid: stage.one("sigmoid")?,
        add_shares: stage.types(["add_shares_f32", "add_shares_f16", "add_shares_bf16"], 0)?,
    })
}

fn prepare<K>(mut stage: Stage<'_, K>) -> Result<PrepareKernels<K>> {
    Ok(PrepareKernels {
        // Its counts may take all that there is, and it has variables too.
        plan_small: stage.asking("plan_small", DEFAULT_SMEM)?,
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

fn quant_amax<K>(mut stage: Stage<'_, K>) -> Result<QuantAmaxKernels<K>> {
    Ok(QuantAmaxKernels {
        zero: stage.one("amax_zero")?,
        whole: stage.one("amax")?,
        lines: stage.one("amax_lines")?,
        transformed: stage.one("amax_transformed")?,
        first_non_finite: stage.one("first_non_finite")?,
    })
}

fn dequantize<K>(mut stage: Stage<'_, K>) -> Result<DequantizeKernels<K>> {
    Ok(DequantizeKernels {
        nvfp4: stage.one("nvfp4_dequantize")?,
        mxfp8: stage.one("mxfp8_dequantize")?,
        swizzle: stage.one("swizzle")?,
    })
}

fn routing_records<K>(mut stage: Stage<'_, K>) -> Result<RoutingRecordsKernels<K>> {
    Ok(RoutingRecordsKernels {
        record_ids: stage.one("record_ids")?,
        count: stage.one("routing_records_count")?,
        scan: stage.one("routing_records_scan")?,
        segments: stage.one("routing_records_segments")?,
        slots: stage.one("routing_records_slots")?,
    })
}

fn router<K>(mut stage: Stage<'_, K>) -> Result<RouterKernels<K>> {
    Ok(RouterKernels {
        route: stage.one("route")?,
        route_bwd: stage.one("route_bwd")?,
        route_softmax: stage.one("route_softmax")?,
        route_softmax_bwd: stage.one("route_softmax_bwd")?,
        keep_sum: stage.one("keep_sum")?,
    })
}

fn w4a16<K>(mut stage: Stage<'_, K>) -> Result<PerFormat<PerProduct<PerType<K>>>> {
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

fn w4a16_decode<K>(mut stage: Stage<'_, K>, shared: u32) -> Result<DecodeKernels<K>> {
    let eight = ["decode8_up_nvfp4", "decode8_up_mxfp4", "decode8_down_nvfp4", "decode8_down_mxfp4"];
    let sixteen = ["decode16_up_nvfp4", "decode16_up_mxfp4", "decode16_down_nvfp4", "decode16_down_mxfp4"];
    Ok(DecodeKernels { eight: stage.fp4_forward(eight, shared)?, sixteen: stage.fp4_forward(sixteen, shared)? })
}

fn wgrad<K>(mut stage: Stage<'_, K>) -> Result<WgradKernels<K>> {
    Ok(WgradKernels {
        sums: stage.types(["wgrad_f32", "wgrad_f16", "wgrad_bf16"], MMA_SYNC.shared)?,
        column_sums: stage.one("column_sums")?,
    })
}

fn sm90<K>(find: &mut dyn FnMut(KernelSpec) -> Result<K>) -> Result<Sm90Kernels<K>> {
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
    let mut linear = Stage { stage: "sm90_linear", find };
    let forward = linear.half(["sm90_linear_f16", "sm90_linear_bf16"], SM90_LINEAR.shared)?;
    let linear_d_x = linear.asking("sm90_linear_d_x", SM90_LINEAR_D_X.shared)?;
    let linear_d_weight = linear.asking("sm90_linear_d_weight", SM90_LINEAR.shared)?;
    let fp4 = ["sm90_up_nvfp4", "sm90_up_mxfp4", "sm90_down_nvfp4", "sm90_down_mxfp4"];
    Ok(Sm90Kernels {
        gemm: products,
        gemm_down_wide,
        gemm_up_dgrad_wide,
        linear: forward,
        linear_d_x,
        linear_d_weight,
        w4a16: Stage { stage: "sm90_w4a16", find }.fp4_forward(fp4, SM90_W4A16.shared)?,
        wgrad: Stage { stage: "sm90_wgrad", find }.half(["sm90_wgrad_f16", "sm90_wgrad_bf16"], SM90_WGRAD.shared)?,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::cubins::{CUBINS, arch_is_hopper};
    use super::*;

    /// All kernels that a GPU of this architecture asks for, as (stage, name).
    fn wanted(arch: &str) -> Vec<(&'static str, &'static str)> {
        let mut all = Vec::new();
        let traits = Traits { sm90: arch_is_hopper(arch), decode_shared: 0 };
        let table = Table::new(traits, |kernel| {
            all.push((kernel.stage, kernel.name));
            Ok(())
        });
        assert!(table.is_ok());
        all
    }

    /// Both ways: a name that no cubin has would fail when it is loaded, a kernel that nobody names is dead.
    #[test]
    fn the_cubins_hold_what_the_table_names_and_nothing_else() {
        let archs: BTreeSet<&str> = CUBINS.iter().map(|c| c.arch).collect();
        assert!(!archs.is_empty(), "this build has no kernels");
        for arch in archs {
            let of_arch = CUBINS.iter().filter(|c| c.arch == arch);
            let held: BTreeSet<_> = of_arch.flat_map(|c| c.kernels.iter().map(|name| (c.stage, *name))).collect();
            let named = wanted(arch);
            let once: BTreeSet<_> = named.iter().copied().collect();
            assert_eq!(named.len(), once.len(), "sm_{arch}: a kernel is named twice");
            let missing: Vec<_> = once.difference(&held).collect();
            let unnamed: Vec<_> = held.difference(&once).collect();
            assert!(
                missing.is_empty() && unnamed.is_empty(),
                "sm_{arch}: no cubin has {missing:?}, nobody names {unnamed:?}"
            );
        }
    }

    #[test]
    fn the_first_kernel_that_is_missing_is_told() {
        let traits = Traits { sm90: true, decode_shared: 0 };
        for missing in ["aux_loss_scores", "wgrad_bf16", "sm90_wgrad_bf16"] {
            let table = Table::new(traits, |kernel| match kernel.name == missing {
                true => Err(crate::error::Error::invalid("test", kernel.name, kernel.stage, "nothing")),
                false => Ok(()),
            });
            assert!(table.is_err_and(|e| e.to_string().contains(missing)), "{missing}");
        }
    }
}
