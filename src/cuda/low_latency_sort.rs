//! Rows that arrive in any order (NCCL EP's low latency): brought into the order of their tokens, and planned from
//! there, so that slots lie as they do with every other dispatcher and in every run.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{Capacity, DispatchSpec, Overflow};
use crate::tensor::{Tensor, TensorRef};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::launch::Grid;
use super::layout::at;
use super::params::PLAN_THREADS;
use super::{params, plan};

const CALL: &str = "dispatch";

/// Segments of all ranks' choices: where each starts, and their end.
pub(crate) struct SegmentStarts {
    pub(crate) starts: Tensor<Cuda>,
    pub(crate) total: Tensor<Cuda>,
}

/// Where the segments of `groups` experts from `first` on begin. `loads`: `I64 [E]`, over all ranks.
pub(crate) fn starts(
    device: &Cuda,
    loads: &Tensor<Cuda>,
    first: usize,
    groups: usize,
    alignment: usize,
) -> Result<SegmentStarts> {
    let mut starts = Tensor::empty(device, DType::I64, &[groups])?;
    let mut total = Tensor::empty(device, DType::I64, &[1])?;
    let p = params::SegmentStartsParams {
        loads: loads.view().data().address(),
        first: first as i64,
        groups: groups as i64,
        alignment: alignment.max(1) as i64,
        starts: at(&mut starts),
        total: at(&mut total),
    };
    // SAFETY: every tensor has the size that `params.h` states for it; the experts are among those of `loads`.
    unsafe { device.launch("prepare", &device.kernels().plan.segment_starts, Grid::new(1, PLAN_THREADS), &p) }?;
    Ok(SegmentStarts { starts, total })
}

/// Ids with one more a token, that of no expert: `I32 [T, K + 1]`.
pub(crate) fn packed_ids(device: &Cuda, ids: TensorRef<'_, Cuda>) -> Result<Tensor<Cuda>> {
    let (tokens, k) = (ids.rows(), ids.dims().get(1).copied().unwrap_or(0));
    Error::check_dtype(CALL, "ids", DType::I32, ids.dtype())?;
    let mut out = Tensor::empty(device, DType::I32, &[tokens, k + 1])?;
    let p = params::LowLatencyRowsParams {
        ids: ids.data().address(),
        tokens: tokens as i64,
        top_k: k as i64,
        out_ids: at(&mut out),
        ..Default::default()
    };
    spread(device, &device.kernels().plan.low_latency_pack, tokens * (k + 1), &p)?;
    Ok(out)
}

/// Weights with one more a token, its number: `F32 [T, K + 1]`. `None`: zeros.
pub(crate) fn packed_weights(
    device: &Cuda,
    weights: Option<TensorRef<'_, Cuda>>,
    tokens: usize,
    k: usize,
) -> Result<Tensor<Cuda>> {
    if let Some(w) = &weights {
        Error::check_dtype(CALL, "weights", DType::F32, w.dtype())?;
        Error::check_shape(CALL, "weights", &[tokens, k], w.dims())?;
    }
    let mut out = Tensor::empty(device, DType::F32, &[tokens, k + 1])?;
    let p = params::LowLatencyRowsParams {
        weights: weights.map_or(0, |w| w.data().address()),
        tokens: tokens as i64,
        top_k: k as i64,
        out_weights: at(&mut out),
        ..Default::default()
    };
    spread(device, &device.kernels().plan.low_latency_pack, tokens * (k + 1), &p)?;
    Ok(out)
}

/// Rows that a dispatch has brought of R ranks' at most M tokens.
pub(crate) struct LowLatencyReceived<'a> {
    /// `I32 [R · M, K + 1]`: local experts, or −1.
    pub(crate) ids: &'a Tensor<Cuda>,
    /// `F32 [R · M, K + 1]`.
    pub(crate) weights: &'a Tensor<Cuda>,
    /// `I32 [R]`.
    pub(crate) counts: &'a Tensor<Cuda>,
    pub(crate) experts: usize,
    pub(crate) alignment: usize,
    /// Rows N of the layout.
    pub(crate) slots: usize,
}

/// The slots of what arrived.
pub(crate) struct SortedRows {
    /// Row that arrived for each slot, `I32 [N]`.
    pub(crate) row_map: Tensor<Cuda>,
    /// Number among `weights` for each slot, `I32 [N]`.
    pub(crate) weight_map: Tensor<Cuda>,
    /// In the order of tokens, `F32 [R · M, K]`; where there is no token, anything.
    pub(crate) weights: Tensor<Cuda>,
    /// Slots of each row that arrived, `I32 [R · M, K]`.
    pub(crate) return_map: Tensor<Cuda>,
}

/// Slots by (expert, source rank, token, k).
pub(crate) fn sorted(device: &Cuda, from: &LowLatencyReceived<'_>) -> Result<SortedRows> {
    let (ranks, [rows, wide]) = match (from.counts.dims(), from.ids.dims()) {
        ([ranks], [rows, wide]) => (*ranks, [*rows, *wide]),
        (_, dims) => return Err(Error::invalid(CALL, "tensor ids", "[R · M, K + 1]", format!("{dims:?}"))),
    };
    let k = wide - 1;
    let of = |dtype, dims: &[usize]| Tensor::empty(device, dtype, dims);
    let (mut ids, mut row_of) = (of(DType::I32, &[rows, k])?, of(DType::I32, &[rows])?);
    let (mut weights, mut token_of) = (of(DType::F32, &[rows, k])?, of(DType::I32, &[rows])?);
    for t in [&mut ids, &mut row_of] {
        device.fill_bytes(CALL, t.view_mut().into_data(), 0xff)?;
    }
    let mut p = params::LowLatencyRowsParams {
        ids: from.ids.view().data().address(),
        weights: from.weights.view().data().address(),
        counts: from.counts.view().data().address(),
        tokens: rows.checked_div(ranks).unwrap_or(0) as i64,
        ranks: ranks as i64,
        top_k: k as i64,
        slots: from.slots as i64,
        out_ids: at(&mut ids),
        out_weights: at(&mut weights),
        row_of: at(&mut row_of),
        token_of: at(&mut token_of),
        ..Default::default()
    };
    spread(device, &device.kernels().plan.low_latency_sort, rows * wide, &p)?;
    let spec = DispatchSpec {
        alignment: from.alignment.max(1),
        capacity: Capacity::Static(from.slots),
        // Rows without a slot were dropped, or were an error, in prepare; a last segment may be cut.
        overflow: Overflow::Drop,
        ..DispatchSpec::new(0, k)
    };
    let planned = plan::plan_alone(device, ids.view(), &spec, from.experts, 0)?;
    let (plan, _) = planned.ok_or_else(|| Error::invalid(CALL, "experts", "as many as the GPU plans", from.experts))?;
    let (mut row_map, by_token) = (plan.row_map, plan.return_map);
    let mut return_map = of(DType::I32, &[rows, k])?;
    p.row_map = at(&mut row_map);
    p.return_map = by_token.view().data().address();
    p.out_map = at(&mut return_map);
    spread(device, &device.kernels().plan.low_latency_map, from.slots.max(rows * k), &p)?;
    Ok(SortedRows { row_map, weight_map: plan.weight_map, weights, return_map })
}

/// One thread an entry.
fn spread(device: &Cuda, kernel: &Kernel, entries: usize, p: &params::LowLatencyRowsParams) -> Result<()> {
    match entries {
        0 => Ok(()),
        // SAFETY: every tensor has the size that `params.h` states for it; the kernels check what arrived.
        _ => unsafe { device.launch(CALL, kernel, Grid::threads_of(entries, PLAN_THREADS), p) },
    }
}
