//! Gradients of the experts' weights and biases: sums over the slots of each expert.
//!
//! The sums may be in f32 where the operands are 16-bit, for gradients that many steps add to.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{BiasGrad, Segments, Wgrad};
use crate::tensor::{TensorMut, dims3};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::experts::portable_shape;
use super::fault_site::MappedCall;
use super::heuristics::{ORDER_WGRAD_COLUMNS, WGRAD_UNDER_RETURN};
use super::launch::{Grid, argument};
use super::layout::{SourceRows, check_segments, input, optional, output, pointer};
use super::params::{self, type_code};
use super::permute::gather_to_slots;
use super::tensor_map::TensorMapSpec;
use super::tile_config::SM90_WGRAD;

const CALL: &str = MappedCall::Wgrad.name();
/// Columns of a Hopper tile's wide side.
const BLOCK_N: usize = params::WGRAD_BLOCK_N as usize;

/// Whether a weight gradient of so many columns of the wide side brings mapped rows into order.
pub(super) fn orders_rows(device: &Cuda, dtype: DType, columns: usize) -> bool {
    device.sm90() && matches!(dtype, DType::BF16 | DType::F16) && columns >= ORDER_WGRAD_COLUMNS
}

/// A sum over slots, checked.
struct WgradCall<'a> {
    device: &'a Cuda,
    dtype: DType,
    left: SourceRows,
    right: SourceRows,
    /// Experts, columns of the left rows, of the right rows.
    sizes: [usize; 3],
    segments: &'a Segments<Cuda>,
    slot_weights: u64,
    out: u64,
    out_type: DType,
    accumulate: bool,
    movement_sms: Option<usize>,
}

pub(super) fn wgrad(device: &Cuda, call: Wgrad<'_, Cuda>) -> Result<()> {
    let [experts, m, n] = dims3(CALL, "out", call.out.dims())?;
    let dtype = call.left.base.dtype();
    type_code(CALL, "left", dtype)?;
    let segments = call.segments;
    check_segments(CALL, segments, experts)?;
    let out_type = gradient_type(dtype, &call.out);
    let site = |operand| device.site(MappedCall::Wgrad, segments.origin, operand);
    let sums = WgradCall {
        device,
        dtype,
        left: SourceRows::new(CALL, "left", &call.left, dtype, m, (segments.rows, site(params::OPERAND_FIRST)?))?,
        right: SourceRows::new(CALL, "right", &call.right, dtype, n, (segments.rows, site(params::OPERAND_SECOND)?))?,
        sizes: [experts, m, n],
        segments,
        slot_weights: optional(CALL, "slot_weights", &call.slot_weights, DType::F32, &[segments.rows])?,
        out: output(CALL, "out", call.out, out_type, &[experts, m, n])?,
        out_type,
        accumulate: call.accumulate,
        movement_sms: call.movement_sms,
    };
    match sums.sm90_kernel() {
        Some(kernel) => sums.sm90(kernel)?,
        None => sums.portable()?,
    }
    call.bias.map_or(Ok(()), |bias| sums.bias(bias))
}

/// f32 where the caller's gradient is that, else the operands' type.
fn gradient_type(operands: DType, out: &TensorMut<'_, Cuda>) -> DType {
    if out.dtype() == DType::F32 { DType::F32 } else { operands }
}

impl WgradCall<'_> {
    /// 16-bit types in whole 16-byte words, one operand at least in slot order, no weights in the sum.
    fn sm90_kernel(&self) -> Option<&Kernel> {
        let [experts, m, n] = self.sizes;
        let narrow = SM90_WGRAD.tile;
        let tiles = (m.div_ceil(narrow) + 1) as u64 * (n.div_ceil(narrow) + 1) as u64;
        // Mapped rows are found by a number of 16-byte words.
        let numbered = |rows: &SourceRows, columns: usize| {
            rows.map == 0 || u32::try_from((rows.rows as u64).saturating_mul(columns as u64 / 8)).is_ok()
        };
        let serves = self.left.vector
            && self.right.vector
            && self.out.is_multiple_of(16)
            && (self.left.map == 0 || self.right.map == 0)
            && numbered(&self.left, m)
            && numbered(&self.right, n)
            && self.slot_weights == 0
            && i32::try_from(tiles.saturating_mul(experts as u64)).is_ok();
        self.device.sm90_kernels().filter(|_| serves)?.wgrad.of(self.dtype)
    }

    fn sm90(&self, kernel: &Kernel) -> Result<()> {
        let [experts, m, n] = self.sizes;
        // The operand that may lie behind a map is the narrow one.
        let transposed = self.right.map != 0;
        let ((narrow, columns), (wide, wide_columns)) =
            if transposed { ((&self.right, n), (&self.left, m)) } else { ((&self.left, m), (&self.right, n)) };
        let gathered = match narrow.map != 0 && orders_rows(self.device, self.dtype, wide_columns) {
            true => Some(gather_to_slots(self.device, CALL, narrow, self.segments.rows, columns, self.dtype)?),
            false => None,
        };
        let in_order = gathered.as_ref().map(|rows| SourceRows {
            base: rows.view().data().ptr,
            map: 0,
            rows: self.segments.rows as i64,
            vector: true,
            site: narrow.site,
        });
        let narrow = in_order.as_ref().unwrap_or(narrow);
        let p = params::WeightGradParams {
            mapped: narrow.base,
            map: narrow.map,
            mapped_rows: narrow.rows,
            narrow: columns as i64,
            wide: wide_columns as i64,
            offsets: self.segments.offsets.view().data().ptr,
            counts: self.segments.counts.view().data().ptr,
            slots: self.segments.rows as i64,
            groups: experts as i64,
            first: 0,
            transposed: i64::from(transposed),
            out_type: type_code(CALL, "out", self.out_type)?,
            accumulate: i64::from(self.accumulate),
            fault: self.device.inner.status,
            site: narrow.site,
        };
        let rows = |source: &SourceRows, columns: usize| {
            let sizes = [columns as u64, source.rows as u64];
            TensorMapSpec { call: CALL, dtype: self.dtype, base: source.base, sizes: &sizes }.boxes(64)
        };
        // Operands come 64 rows at a time.
        let operands = [rows(narrow, columns)?, rows(wide, wide_columns)?];
        // Blocks work in pairs, on neighboring tiles of the narrow side.
        let pairs = columns.div_ceil(2 * SM90_WGRAD.tile) * wide_columns.div_ceil(BLOCK_N);
        // Rows that were brought into order are waited for.
        let movement_sms = self.movement_sms.filter(|_| in_order.is_none()).unwrap_or(0);
        let first = self.experts_under(movement_sms);
        let beside_movement = self.device.reserving_more(movement_sms);
        let parts = [(0..first, true, &beside_movement), (first..experts, false, self.device)];
        for (part, programmatic, device) in parts {
            if part.is_empty() {
                continue;
            }
            let at = part.start as u64;
            let p = params::WeightGradParams {
                offsets: p.offsets + at * size_of::<i64>() as u64,
                counts: p.counts + at * size_of::<i64>() as u64,
                groups: part.len() as i64,
                first: part.start as i64,
                ..p
            };
            let base = self.out + at * (m * n * self.out_type.size()) as u64;
            let sizes = [n as u64, m as u64, part.len() as u64];
            let out = TensorMapSpec { call: CALL, dtype: self.out_type, base, sizes: &sizes };
            // Sums leave in squares of 64 or, in f32, 32.
            let out = out.boxes(if self.out_type == DType::F32 { 32 } else { 64 })?;
            let blocks = 2 * (part.len() * pairs).min(device.usable_sms() / 2);
            let grid = Grid { shared: SM90_WGRAD.shared, programmatic, ..Grid::new(blocks, SM90_WGRAD.threads) };
            let [a, b] = &operands;
            let mut arguments = [argument(&p), argument(a), argument(b), argument(&out)];
            // SAFETY: all tensors were checked against the sizes in `p`; maps and segments, which only the device knows,
            // are checked by the kernel. It takes these four arguments.
            unsafe { device.launch_with(CALL, kernel, grid, &mut arguments) }?;
        }
        Ok(())
    }

    /// Experts whose gradients are made while a movement of so many SMs runs.
    fn experts_under(&self, movement_sms: usize) -> usize {
        let [experts, rows, _] = self.sizes;
        if movement_sms == 0 {
            return 0;
        }
        experts.saturating_mul(WGRAD_UNDER_RETURN).div_ceil((rows * movement_sms).max(1)).min(experts)
    }

    fn portable(&self) -> Result<()> {
        let [experts, m, n] = self.sizes;
        let shape = portable_shape(CALL, "left", self.dtype)?;
        let code = type_code(CALL, "left", self.dtype)?;
        let (m_tiles, n_tiles) = (m.div_ceil(shape.tile), n.div_ceil(shape.tile));
        let p = params::GemmParams {
            a: self.left.base,
            a_map: self.left.map,
            a_rows: self.left.rows,
            a_type: code,
            b: self.right.base,
            b_map: self.right.map,
            b_rows: self.right.rows,
            b_type: code,
            offsets: self.segments.offsets.view().data().ptr,
            counts: self.segments.counts.view().data().ptr,
            m: m as i64,
            n: n as i64,
            k: self.segments.rows as i64,
            groups: experts as i64,
            scale: self.slot_weights,
            out: self.out,
            out_type: type_code(CALL, "out", self.out_type)?,
            accumulate: i64::from(self.accumulate),
            fault: self.device.inner.status,
            site: self.left.site,
            vector_a: i64::from(self.left.vector),
            vector_b: i64::from(self.right.vector),
            m_tiles: m_tiles as i64,
            n_tiles: n_tiles as i64,
            split: 1,
            ..Default::default()
        };
        let blocks = experts.saturating_mul(m_tiles).saturating_mul(n_tiles);
        let grid = Grid { shared: shape.shared, ..Grid::new(blocks, shape.threads) };
        let kernel = self.device.kernels().wgrad.sums.of(self.dtype);
        // SAFETY: as for Hopper's kernels.
        unsafe { self.device.launch(CALL, kernel, grid, &p) }
    }

    /// Gradient of the bias: the left rows alone, summed.
    fn bias(&self, bias: BiasGrad<'_, Cuda>) -> Result<()> {
        let [experts, m, _] = self.sizes;
        if let Some(w) = &bias.slot_weights {
            input(CALL, "bias.slot_weights", w, DType::F32, &[self.segments.rows])?;
        }
        let out_type = gradient_type(self.dtype, &bias.out);
        let p = params::ColumnSumsParams {
            rows: self.left.base,
            map: self.left.map,
            base_rows: self.left.rows,
            type_: type_code(CALL, "left", self.dtype)?,
            scale: pointer(&bias.slot_weights),
            offsets: self.segments.offsets.view().data().ptr,
            counts: self.segments.counts.view().data().ptr,
            slots: self.segments.rows as i64,
            groups: experts as i64,
            width: m as i64,
            out: output(CALL, "bias.out", bias.out, out_type, &[experts, m])?,
            out_type: type_code(CALL, "bias.out", out_type)?,
            accumulate: i64::from(self.accumulate),
            fault: self.device.inner.status,
            site: self.left.site,
        };
        let blocks = (m.div_ceil(params::COLUMN_SUMS_COLUMNS as usize), experts);
        let grid = Grid { blocks, ..Grid::new(0, params::COLUMN_SUMS_THREADS) };
        // SAFETY: as for the weight gradient.
        unsafe { self.device.launch(CALL, &self.device.kernels().wgrad.column_sums, grid, &p) }
    }
}
