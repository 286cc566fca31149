//! Moving and adding rows.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{ConcatLayout, ConcatRows, GatherRows, ReduceRows, SplitRows};
use crate::tensor::Tensor;

use super::device::Cuda;
use super::fault_site::MappedCall;
use super::heuristics::LOOP_BLOCKS;
use super::launch::{Grid, whole_warps};
use super::layout::{SourceRows, at};
use super::params::{self, PERMUTE_THREADS, type_code};

pub(super) fn gather_rows(device: &Cuda, call: GatherRows<'_, Cuda>) -> Result<()> {
    const CALL: &str = MappedCall::GatherRows.name();
    let row = call.source.row_bytes();
    Error::check_dtype(CALL, "out", call.source.dtype(), call.out.dtype())?;
    Error::check_dtype(CALL, "map", DType::I32, call.map.dtype())?;
    Error::check_shape(CALL, "out", &[call.map.count(), row], &[call.out.rows(), call.out.row_bytes()])?;
    let gather = RowGather {
        source: call.source.data().ptr,
        source_rows: call.source.rows(),
        map: call.map.data().ptr,
        rows: call.out.rows(),
        bytes: row,
        site: device.site(MappedCall::GatherRows, call.origin, params::OPERAND_FIRST)?,
        out: call.out.into_data().ptr,
    };
    launch_gather(device, CALL, gather)
}

/// Rows behind a map, checked.
struct RowGather {
    source: u64,
    source_rows: usize,
    /// An entry for each row of the output.
    map: u64,
    out: u64,
    rows: usize,
    /// Of a row.
    bytes: usize,
    /// The call, as a fault's detail has it.
    site: i64,
}

fn launch_gather(device: &Cuda, call: &'static str, gather: RowGather) -> Result<()> {
    let RowGather { source, source_rows, map, out, rows, bytes, site } = gather;
    let word = [16, 4, 1].into_iter().find(|w| (source | out | bytes as u64).is_multiple_of(*w)).unwrap_or(1);
    let p = params::RowsOpParams {
        source,
        map,
        out,
        source_rows: source_rows as i64,
        out_rows: rows as i64,
        width: bytes as i64,
        word: word as i64,
        fault: device.inner.status,
        site,
        ..Default::default()
    };
    let blocks = (rows * bytes).div_ceil(PERMUTE_THREADS as usize * word as usize).min(LOOP_BLOCKS);
    // SAFETY: `out` has a row for each entry of the map; the kernel checks its entries against the source's rows.
    unsafe { device.launch(call, &device.kernels().permute.gather_rows, Grid::new(blocks, PERMUTE_THREADS), &p) }
}

/// Rows joined (`whole` is written) or taken apart.
fn joined(
    device: &Cuda,
    call: &'static str,
    rows: usize,
    at: ConcatLayout,
    [left, right, whole]: [u64; 3],
    back: bool,
) -> Result<()> {
    let sizes = (at.left | at.right | at.whole) as u64 | left | right | whole;
    let word = if sizes.is_multiple_of(4) { 4 } else { 1 };
    let p = params::ConcatRowsParams {
        left,
        right,
        whole,
        rows: rows as i64,
        left_bytes: at.left as i64,
        right_bytes: at.right as i64,
        whole_bytes: at.whole as i64,
        word,
        back: i64::from(back),
    };
    let blocks = (rows * at.whole).div_ceil(PERMUTE_THREADS as usize * word as usize).min(LOOP_BLOCKS);
    // SAFETY: all have as many rows, of the bytes that were checked.
    unsafe { device.launch(call, &device.kernels().concat_rows, Grid::new(blocks, PERMUTE_THREADS), &p) }
}

pub(super) fn concat_rows(device: &Cuda, call: ConcatRows<'_, Cuda>) -> Result<()> {
    const CALL: &str = "concat_rows";
    let at = call.check(CALL)?;
    let right = call.right.map_or(0, |t| t.data().ptr);
    let rows = call.out.rows();
    joined(device, CALL, rows, at, [call.left.data().ptr, right, call.out.into_data().ptr], false)
}

pub(super) fn split_rows(device: &Cuda, call: SplitRows<'_, Cuda>) -> Result<()> {
    const CALL: &str = "split_rows";
    let at = call.check(CALL)?;
    let right = call.right.map_or(0, |t| t.into_data().ptr);
    let rows = call.source.rows();
    joined(device, CALL, rows, at, [call.left.into_data().ptr, right, call.source.data().ptr], true)
}

/// The rows of a source in slot order; zeros at padding.
pub(super) fn gather_to_slots(
    device: &Cuda,
    call: &'static str,
    source: &SourceRows,
    slots: usize,
    width: usize,
    dtype: DType,
) -> Result<Tensor<Cuda>> {
    let mut out = Tensor::empty(device, dtype, &[slots, width])?;
    let gather = RowGather {
        source: source.base,
        source_rows: source.rows as usize,
        map: source.map,
        out: at(&mut out),
        rows: slots,
        bytes: width * dtype.size(),
        site: source.site,
    };
    launch_gather(device, call, gather)?;
    Ok(out)
}

pub(super) fn reduce_rows(device: &Cuda, call: ReduceRows<'_, Cuda>) -> Result<()> {
    const CALL: &str = MappedCall::ReduceRows.name();
    Error::check_dtype(CALL, "out", call.source.dtype(), call.out.dtype())?;
    Error::check_dtype(CALL, "map", DType::I32, call.map.dtype())?;
    let (tokens, row) = (call.out.rows(), call.out.row_bytes());
    Error::check_shape(CALL, "map", &[tokens], &[call.map.rows()])?;
    Error::check_shape(CALL, "source", &[row], &[call.source.row_bytes()])?;
    let fan = call.map.count().checked_div(tokens).unwrap_or(0);
    let kind = type_code(CALL, "source", call.source.dtype())?;
    let width = row / call.source.dtype().size();
    let source_rows = call.source.rows();
    let (source, out) = (call.source.data().ptr, call.out.into_data().ptr);
    let wide = (source | out | row as u64).is_multiple_of(16);
    let p = params::RowsOpParams {
        source,
        map: call.map.data().ptr,
        out,
        source_rows: source_rows as i64,
        out_rows: tokens as i64,
        width: width as i64,
        fan: fan as i64,
        type_: kind,
        word: if wide { 16 } else { 1 },
        fault: device.inner.status,
        site: device.site(MappedCall::ReduceRows, call.origin, params::OPERAND_FIRST)?,
        ..Default::default()
    };
    let lanes = if wide { row / 16 } else { width };
    let threads = whole_warps(lanes, PERMUTE_THREADS);
    let few = wide && matches!(fan, 2 | 4 | 6 | 8) && [width, source_rows].iter().all(|n| i32::try_from(*n).is_ok());
    let kernels = &device.kernels().permute;
    let kernel = if few { &kernels.reduce_few_rows } else { &kernels.reduce_rows };
    // SAFETY: `out` has a row for each line of the map; the kernel checks its entries against the source's rows.
    unsafe { device.launch(CALL, kernel, Grid::new(tokens, threads), &p) }
}
