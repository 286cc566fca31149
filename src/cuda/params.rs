//! Descriptions that kernels take by value; `kernels/common/params.h` holds the same structs, documented there. Every
//! field is 8 bytes wide; sizes and offsets are asserted on both sides.

use crate::config::Activation;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::philox::Keys;

macro_rules! description {
    ($name:ident, $fields:literal: $($field:ident: $type:ty),* $(,)?; $($check:ident @ $index:literal),*) => {
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == 8 * $fields);
        $(const _: () = assert!(std::mem::offset_of!($name, $check) == 8 * $index);)*
    };
}

description!(Gemm, 42:
    a: u64, a_map: u64, a_rows: i64, a_type: i64, b: u64, b_map: u64, b_rows: i64, b_type: i64,
    tiles: u64, tile_count: u64, offsets: u64, counts: u64, m: i64, n: i64, k: i64, groups: i64,
    bias: u64, bias_type: i64, scale: u64, bias_scale: u64, out_scale: u64, pre: u64, pre_out: u64,
    out: u64, out_map: u64, out_rows: i64, out_type: i64, accumulate: i64, hidden: u64, partial: u64,
    x: u64, x_map: u64, x_rows: i64, activation: i64, alpha: f64, limit: f64, fault: u64,
    vector_a: i64, vector_b: i64, m_tiles: i64, n_tiles: i64, split: i64;
    tiles @ 8, bias @ 16, out @ 23, activation @ 33, split @ 41);

description!(WeightGrad, 13:
    mapped: u64, map: u64, mapped_rows: i64, narrow: i64, wide: i64, offsets: u64, counts: u64, slots: i64, groups: i64,
    transposed: i64, out_type: i64, accumulate: i64, fault: u64;
    fault @ 12);

description!(TileList, 9:
    offsets: u64, counts: u64, groups: i64, rows: i64, tile_rows: i64, tiles: u64, tile_count: u64, max_tiles: i64,
    fault: u64;
    fault @ 8);

description!(LocalPlan, 24:
    ids: u64, wide: i64, choices: i64, top_k: i64, experts: i64, alignment: i64, expert_limit: i64, rows: i64,
    may_drop: i64, chunk: i64, chunks: i64, before: u64, offsets: u64, counts: u64, stats: u64, kept: u64,
    row_map: u64, weight_map: u64, return_map: u64, tiles: u64, tile_rows: i64, max_tiles: i64, fault: u64, report: u64;
    rows @ 7, report @ 23);

description!(WriteRecord, 32:
    ids: u64, wide: i64, choices: i64, top_k: i64, experts: i64, rank: i64, record: u64, errors: u64,
    header: [u64; 24];
    header @ 8);

description!(RecordsPlan, 33:
    records: u64, size: i64, ranks: i64, rank: i64, max_tokens: i64, tokens: i64, top_k: i64, experts: i64,
    alignment: i64, factor: f64, rows: i64, may_drop: i64, host_waits: i64, room: i64, chunk: i64, chunks: i64, before: u64,
    scratch: u64, offsets: u64, counts: u64, stats: u64, kept: u64, row_map: u64, weight_map: u64, return_map: u64,
    errors: u64, fault: u64, places: u64, message_counts: u64, totals: u64, send_tokens: u64, send_choices: u64,
    return_slots: u64;
    rows @ 10, stats @ 20, fault @ 26, return_slots @ 32);

#[cfg(feature = "nccl-ep")]
description!(ExternalLayout, 10:
    loads: u64, starts: u64, total: u64, first: i64, groups: i64, rows: i64, offsets: u64, counts: u64, row_map: u64,
    fault: u64;
    rows @ 5, fault @ 9);

#[cfg(feature = "nccl-ep")]
description!(SegmentStarts, 6:
    loads: u64, first: i64, groups: i64, alignment: i64, starts: u64, total: u64;
    total @ 5);

#[cfg(feature = "nccl-ep")]
description!(LowLatencyRows, 14:
    ids: u64, weights: u64, counts: u64, tokens: i64, ranks: i64, top_k: i64, slots: i64, out_ids: u64,
    out_weights: u64, row_of: u64, token_of: u64, row_map: u64, return_map: u64, out_map: u64;
    slots @ 6, out_map @ 13);

description!(RowsOp, 11:
    source: u64, map: u64, out: u64, source_rows: i64, out_rows: i64, width: i64, fan: i64, kind: i64, word: i64,
    grad: u64, fault: u64;
    fault @ 10);

description!(AddShares, 9:
    own: u64, others: u64, main: u64, count: i64, parts: i64, rank: i64, wide: i64, first: i64, scale: f64;
    scale @ 8);

description!(SlotDots, 12:
    partial: u64, parts: i64, grad: u64, grad_map: u64, grad_rows: i64, bias: u64, kind: i64, width: i64, tiles: u64,
    tile_count: u64, out: u64, fault: u64;
    fault @ 11);

description!(ColumnSums, 14:
    rows: u64, map: u64, base_rows: i64, kind: i64, scale: u64, offsets: u64, counts: u64, slots: i64, groups: i64,
    width: i64, out: u64, out_type: i64, accumulate: i64, fault: u64;
    fault @ 13);

description!(Routing, 29:
    logits: u64, bias: u64, bias_type: i64, ids: u64, weights: u64, d_weights: u64, d_logits: u64, scratch: u64,
    tokens: i64, experts: i64, top_k: i64, score: i64, epsilon: f64, groups: i64, keep: i64, rank_by: i64,
    renorm: i64, p: f64, norm_epsilon: f64, floor: f64, scale: f64, jitter: f64, key: u64, first_token: u64,
    aux_coef: u64, sequence: i64, aux_sigmoid: i64, aux_z: u64, fault: u64;
    score @ 11, key @ 22, fault @ 28);

description!(AuxLoss, 24:
    logits: u64, ids: u64, scores: u64, picks: u64, z_terms: u64, partial: u64, totals: u64, out: u64, sums: u64,
    coef: u64, z_coef: u64, tokens: i64, experts: i64, top_k: i64, sequence: i64, sequences: i64, chunks: i64,
    by_sequence: i64, hugging_face: i64, sigmoids: i64, balance: f64, z: f64, d_loss: u64,
    fault: u64;
    fault @ 23);

description!(KeepSum, 6:
    weights: u64, kept: u64, grad: u64, out: u64, tokens: i64, top_k: i64;
    top_k @ 5);

description!(StridedMatrix, 6:
    base: u64, rows: i64, columns: i64, row_stride: i64, column_stride: i64, vector: i64;
    vector @ 5);

description!(AmaxJob, 10: matrix: StridedMatrix, kind: i64, out: u64, other: u64, first_block: i64; first_block @ 9);

/// Matrices that one launch takes the amaxes of.
pub(super) const AMAX_JOBS: usize = 40;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AmaxJobs {
    pub(super) jobs: [AmaxJob; AMAX_JOBS],
    pub(super) count: i64,
}
const _: () = assert!(size_of::<AmaxJobs>() == 8 * 401);

description!(AmaxLines, 9: matrix: StridedMatrix, kind: i64, out: u64, signs: i64; signs @ 8);

description!(ConcatRows, 9:
    left: u64, right: u64, whole: u64, rows: i64, left_bytes: i64, right_bytes: i64, whole_bytes: i64, word: i64, back: i64;
    back @ 8);

description!(QuantSide, 7:
    codes: u64, scales: u64, amax: u64, code_bytes: i64, blocks: i64, first_line: i64, first_block: i64;
    first_block @ 6);

description!(QuantCast, 31:
    matrix: StridedMatrix, rows: QuantSide, columns: QuantSide, by_line: i64, stream: i64, signs: i64, floor: i64,
    keys: Keys;
    columns @ 13, signs @ 22, keys @ 24);

description!(Dequantize, 12:
    codes: u64, scales: u64, amax: u64, out: u64, out_type: i64, lines: i64, len: i64, code_bytes: i64, blocks: i64,
    by_line: i64, modelopt: i64, first_block: i64;
    first_block @ 11);

/// Matrices that one launch brings back to floating point.
pub(super) const BACK_JOBS: usize = 40;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct DequantizeJobs {
    pub(super) jobs: [Dequantize; BACK_JOBS],
    pub(super) count: i64,
}
const _: () = assert!(size_of::<DequantizeJobs>() == 8 * 481);

description!(SwizzleScales, 5: scales: u64, out: u64, lines: i64, blocks: i64, back: i64; back @ 4);

description!(QuantWeight, 9:
    codes: u64, scales: u64, factors: u64, format: i64, rows: i64, columns: i64, code_bytes: i64, blocks: i64, parts: i64;
    parts @ 8);

/// Number of a type that kernels compute in.
pub(super) fn type_code(call: &'static str, tensor: &str, dtype: DType) -> Result<i64> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        other => Err(Error::invalid(call, format!("tensor {tensor}"), "f32, f16 or bf16 (on CUDA)", other)),
    }
}

/// Number, alpha and limit of an activation.
pub(super) fn activation_code(activation: Activation) -> (i64, f64, f64) {
    match activation {
        Activation::SiluGlu => (0, 0.0, 0.0),
        Activation::GeluGlu => (1, 0.0, 0.0),
        Activation::ClampedGlu { alpha, limit } => (2, alpha, limit),
        Activation::Relu2 => (3, 0.0, 0.0),
    }
}
