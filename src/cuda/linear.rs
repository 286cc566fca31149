//! Dense products with a small weight, and the elementwise sigmoid.

use cudarc::driver::sys::CUtensorMap;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Linear, LinearBwd, Sigmoid};
use crate::tensor::{Tensor, TensorMut, TensorRef, dims2};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::{SPLIT_BLOCKS, SPLIT_HIDDEN, SPLIT_PARTS, SPLIT_TOKENS};
use super::kernel_table::HalfOrAny;
use super::launch::{Grid, argument};
use super::layout::{aligned, input, output, pointer};
use super::params::{self, type_code};
use super::sm90_decode;
use super::tensor_map::TensorMapSpec;
use super::tile_config::{MMA_SYNC, SIMT, SM90_LINEAR, SM90_LINEAR_D_X, TF32, TileConfig};

/// Experts of which Hopper's kernel makes the tokens' gradient at most.
const SM90_EXPERTS: usize = params::SM90_LINEAR_DX_EXPERTS as usize;
/// Columns of a tile of the weight's gradient.
const SM90_WEIGHT_COLUMNS: usize = params::SM90_LINEAR_DW_COLUMNS as usize;

/// Columns of the weight that a block of the tokens' gradient keeps.
fn sm90_columns(experts: usize) -> usize {
    let most = params::SM90_LINEAR_DX_NUMBERS as usize / experts.next_power_of_two();
    most.min(params::SM90_LINEAR_DX_COLUMNS as usize)
}

/// A tensor of any type that kernels compute in.
pub(super) fn any(call: &'static str, name: &str, t: TensorRef<'_, Cuda>, dims: &[usize]) -> Result<(u64, i64)> {
    Error::check_shape(call, name, dims, t.dims())?;
    Ok((t.data().ptr, type_code(call, name, t.dtype())?))
}

fn any_mut(call: &'static str, name: &str, t: TensorMut<'_, Cuda>, dims: &[usize]) -> Result<(u64, i64)> {
    Error::check_shape(call, name, dims, t.dims())?;
    let code = type_code(call, name, t.dtype())?;
    Ok((t.into_data().ptr, code))
}

pub(super) fn linear(device: &Cuda, call: Linear<'_, Cuda>) -> Result<()> {
    const CALL: &str = "linear";
    let [t, h] = dims2(CALL, "x", call.x.dims())?;
    let [e, _] = dims2(CALL, "weight", call.weight.dims())?;
    let (a, a_type) = any(CALL, "x", call.x, &[t, h])?;
    let (b, b_type) = any(CALL, "weight", call.weight, &[e, h])?;
    let (bias, bias_type) = call.bias.map_or(Ok((0, 0)), |bias| any(CALL, "bias", bias, &[e]))?;
    let dtype = call.x.dtype();
    let kernels = device.kernels();
    // On tensor cores where both are of one 16-bit type.
    let half = kernels.linear.forward.half.of(dtype).filter(|_| dtype == call.weight.dtype());
    let (kernel, shape) = half.map_or((&kernels.linear.forward.any, SIMT), |kernel| (kernel, MMA_SYNC));
    let out = output(CALL, "out", call.out, DType::F32, &[t, e])?;
    let vector = [aligned(call.x, h), aligned(call.weight, h)];
    let sm90 = device.sm90_kernels().filter(|_| half.is_some() && vector == [true; 2] && t > 0);
    let sm90 = sm90.and_then(|sm90| sm90.linear.of(dtype));
    let decode = sm90.and_then(|_| sm90_decode::linear_kernel(device, dtype, t));
    let shape = if sm90.is_some() { SM90_LINEAR } else { shape };
    let (m_tiles, n_tiles) = (t.div_ceil(shape.tile), e.div_ceil(shape.tile));
    let whole = sm90.is_some() || half.is_none() || h < SPLIT_PARTS * SPLIT_HIDDEN;
    let split = if whole { 1 } else { h.div_ceil(SPLIT_HIDDEN) };
    let mut parts = Tensor::empty(device, DType::F32, &[if split > 1 { split } else { 0 }, t, e])?;
    let p = params::GemmParams {
        a,
        a_rows: t as i64,
        a_type,
        b,
        b_type,
        m: t as i64,
        n: e as i64,
        k: h as i64,
        groups: 1,
        bias,
        bias_type,
        out,
        fault: device.inner.status,
        vector_a: i64::from(vector[0]),
        vector_b: i64::from(vector[1]),
        m_tiles: m_tiles as i64,
        n_tiles: n_tiles as i64,
        partial: if split > 1 { parts.view_mut().into_data().ptr } else { 0 },
        split: split as i64,
        ..Default::default()
    };
    if let Some(kernel) = decode {
        let ((m_tiles, n_tiles), grid) = sm90_decode::linear_grid(t, e);
        let p = params::GemmParams { m_tiles: m_tiles as i64, n_tiles: n_tiles as i64, ..p };
        // SAFETY: all tensors were checked against the sizes in `p`.
        return unsafe { device.launch(CALL, kernel, grid, &p) };
    }
    let blocks = m_tiles.saturating_mul(n_tiles).saturating_mul(split);
    let grid = Grid { shared: shape.shared, ..Grid::new(blocks, shape.threads) };
    if let Some(kernel) = sm90 {
        let map = |base, rows| TensorMapSpec { call: CALL, dtype, base, sizes: &[h as u64, rows as u64] }.boxes(64);
        let maps = [map(a, t)?, map(b, e)?];
        // SAFETY: all tensors were checked against the sizes in `p`.
        return unsafe { launch_mapped(device, CALL, kernel, grid, &p, &maps) };
    }
    // SAFETY: all tensors were checked against the sizes in `p`; `parts` has `split` matrices.
    unsafe { device.launch(CALL, kernel, grid, &p) }?;
    if split > 1 {
        sum_parts(device, CALL, &p)?;
    }
    Ok(())
}

/// Launches a kernel that takes `p` and then the maps.
///
/// # Safety
/// As [`Cuda::launch`].
unsafe fn launch_mapped(
    device: &Cuda,
    call: &'static str,
    kernel: &Kernel,
    grid: Grid,
    p: &params::GemmParams,
    maps: &[CUtensorMap],
) -> Result<()> {
    let mut arguments: Vec<_> = std::iter::once(argument(p)).chain(maps.iter().map(argument)).collect();
    // SAFETY: the caller's promise.
    unsafe { device.launch_with(call, kernel, grid, &mut arguments) }
}

/// Adds the parts of a sum, in order.
fn sum_parts(device: &Cuda, call: &'static str, p: &params::GemmParams) -> Result<()> {
    let count = (p.m as usize).saturating_mul(p.n as usize);
    // SAFETY: `partial` has `split` matrices of the output's size, as the caller made it.
    unsafe {
        device.launch(call, &device.kernels().linear.sum_parts, Grid::threads_of(count, params::PERMUTE_THREADS), p)
    }
}

pub(super) fn linear_bwd(device: &Cuda, call: LinearBwd<'_, Cuda>) -> Result<()> {
    const CALL: &str = "linear_bwd";
    let [t, h] = dims2(CALL, "x", call.x.dims())?;
    let [e, _] = dims2(CALL, "weight", call.weight.dims())?;
    let (x, x_type) = any(CALL, "x", call.x, &[t, h])?;
    let (weight, weight_type) = any(CALL, "weight", call.weight, &[e, h])?;
    let d_out = input(CALL, "d_out", &call.d_out, DType::F32, &[t, e])?;
    let base = params::GemmParams {
        a: d_out,
        a_rows: t as i64,
        a_type: type_code(CALL, "d_out", DType::F32)?,
        groups: 1,
        fault: device.inner.status,
        split: 1,
        ..Default::default()
    };
    // On tensor cores where operands of the model's 16-bit type and the gradients come in whole 16-byte words.
    let dtype = call.x.dtype();
    let words = aligned(call.x, h) && aligned(call.weight, h) && aligned(call.d_out, e);
    let kernels = device.kernels();
    let choose = |of: &HalfOrAny<Kernel>| -> (Kernel, TileConfig) {
        let half = of.half.of(dtype).filter(|_| words && dtype == call.weight.dtype());
        half.map_or((of.any, SIMT), |kernel| (*kernel, TF32))
    };
    let grid = |shape: TileConfig, blocks| Grid { shared: shape.shared, ..Grid::new(blocks, shape.threads) };
    // Hopper's are for bf16: gradients are small, and f16 holds small numbers badly.
    let sm90 = device.sm90_kernels();
    let sm90 = sm90.filter(|_| words && dtype == DType::BF16 && dtype == call.weight.dtype() && t > 0);
    let map = |base, rows: usize, high: usize| {
        TensorMapSpec { call: CALL, dtype, base, sizes: &[h as u64, rows as u64] }.boxes(high as u32)
    };
    // TMA writes to stacks.
    let stack =
        |base, rows: usize| TensorMapSpec { call: CALL, dtype, base, sizes: &[h as u64, rows as u64, 1] }.boxes(64);
    if let Some(d_x) = call.d_x {
        Error::check_dtype(CALL, "d_x", dtype, d_x.dtype())?;
        let (out, out_type) = any_mut(CALL, "d_x", d_x, &[t, h])?;
        let sm90 = sm90.filter(|_| e <= SM90_EXPERTS && out.is_multiple_of(16));
        let (kernel, shape) = choose(&kernels.linear.d_x);
        let (m_tiles, n_tiles) = match sm90 {
            Some(_) => (t.div_ceil(SM90_LINEAR_D_X.tile), h.div_ceil(sm90_columns(e))),
            None => (t.div_ceil(shape.tile), h.div_ceil(shape.tile)),
        };
        let p = params::GemmParams {
            b: weight,
            b_type: weight_type,
            m: t as i64,
            n: h as i64,
            k: e as i64,
            out,
            out_type,
            accumulate: 1,
            m_tiles: m_tiles as i64,
            n_tiles: n_tiles as i64,
            ..base
        };
        let blocks = m_tiles.saturating_mul(n_tiles);
        // SAFETY, both: all tensors were checked against the sizes in `p`.
        if let Some(sm90) = sm90 {
            // Blocks stay, two row tiles at a time. Each slab of columns has one at least, whatever SMs are reserved.
            let most = (device.usable_sms() / n_tiles.max(1)).min(m_tiles.div_ceil(2)).max(1) * n_tiles;
            let maps = [map(weight, e, e.next_power_of_two().max(16))?, stack(out, t)?];
            let grid = grid(SM90_LINEAR_D_X, most);
            // SAFETY: as above.
            unsafe { launch_mapped(device, CALL, &sm90.linear_d_x, grid, &p, &maps) }?;
        } else {
            // SAFETY: as above.
            unsafe { device.launch(CALL, &kernel, grid(shape, blocks), &p) }?;
        }
    }
    if let Some(d_weight) = call.d_weight {
        let (out, out_type) = any_mut(CALL, "d_weight", d_weight, &[e, h])?;
        let (kernel, shape) = choose(&kernels.linear.d_weight);
        let (m_tiles, n_tiles) = match sm90 {
            Some(_) => (e.div_ceil(SM90_LINEAR.tile), h.div_ceil(SM90_WEIGHT_COLUMNS)),
            None => (e.div_ceil(shape.tile), h.div_ceil(shape.tile)),
        };
        let tiles = m_tiles.saturating_mul(n_tiles).max(1);
        // Two of Hopper's blocks share an SM: one more than all of them hold would double the time.
        let parts = if sm90.is_some() { SPLIT_BLOCKS / tiles } else { SPLIT_BLOCKS.div_ceil(tiles) };
        let split = parts.min(t.div_ceil(SPLIT_TOKENS)).max(1);
        let mut parts = Tensor::empty(device, DType::F32, &[split, e, h])?;
        let p = params::GemmParams {
            b: x,
            b_rows: t as i64,
            b_type: x_type,
            m: e as i64,
            n: h as i64,
            k: t as i64,
            out,
            out_type,
            partial: parts.view_mut().into_data().ptr,
            m_tiles: m_tiles as i64,
            n_tiles: n_tiles as i64,
            split: split as i64,
            ..base
        };
        let blocks = tiles.saturating_mul(split);
        // SAFETY, both: as above; `parts` has `split` matrices.
        if let Some(sm90) = sm90 {
            let sizes = [e as u64, t as u64];
            let logits = TensorMapSpec { call: CALL, dtype: DType::F32, base: d_out, sizes: &sizes };
            let maps = [map(x, t, SM90_LINEAR.tile)?, logits.boxes(SM90_LINEAR.tile as u32)?];
            let grid = grid(SM90_LINEAR, blocks);
            // SAFETY: as above.
            unsafe { launch_mapped(device, CALL, &sm90.linear_d_weight, grid, &p, &maps) }?;
        } else {
            // SAFETY: as above.
            unsafe { device.launch(CALL, &kernel, grid(shape, blocks), &p) }?;
        }
        sum_parts(device, CALL, &p)?;
    }
    if let Some(d_bias) = call.d_bias {
        let (out, out_type) = any_mut(CALL, "d_bias", d_bias, &[e])?;
        let p = params::ColumnSumsParams {
            rows: d_out,
            base_rows: t as i64,
            slots: t as i64,
            groups: 1,
            width: e as i64,
            out,
            out_type,
            fault: device.inner.status,
            ..Default::default()
        };
        let grid = Grid::new(e.div_ceil(params::COLUMN_SUMS_COLUMNS as usize), params::COLUMN_SUMS_THREADS);
        // SAFETY: `d_out` is `[t, e]` in f32 (type 0), `out` has e elements.
        unsafe { device.launch(CALL, &kernels.wgrad.column_sums, grid, &p) }?;
    }
    Ok(())
}

pub(super) fn sigmoid(device: &Cuda, call: Sigmoid<'_, Cuda>) -> Result<()> {
    const CALL: &str = "sigmoid";
    let n = call.value.count();
    Error::check_dtype(CALL, "value", DType::F32, call.value.dtype())?;
    Error::check_dtype(CALL, "out", DType::F32, call.out.dtype())?;
    Error::check_shape(CALL, "out", &[n], &[call.out.count()])?;
    if let Some(grad) = &call.grad {
        Error::check_dtype(CALL, "grad", DType::F32, grad.dtype())?;
        Error::check_shape(CALL, "grad", &[n], &[grad.count()])?;
    }
    let p = params::RowsOpParams {
        source: call.value.data().ptr,
        grad: pointer(&call.grad),
        out: call.out.into_data().ptr,
        width: n as i64,
        fault: device.inner.status,
        ..Default::default()
    };
    // SAFETY: all three have n elements of f32.
    unsafe { device.launch(CALL, &device.kernels().permute.sigmoid, Grid::threads_of(n, params::PERMUTE_THREADS), &p) }
}
