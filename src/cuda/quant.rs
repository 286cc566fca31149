//! The codec of a GPU.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::quant::check;
use crate::quant::philox;
use crate::quant::{
    Amax, AmaxScope, Blocks, Codec, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Direction, FP8_BLOCK, MX_BLOCK,
    Matrix, MxScale, Mxfp8, Mxfp8Mut, NVFP4_BLOCK, Nvfp4, Nvfp4Mut, Quantize, QuantizeFp8Block, QuantizeMxfp8, Recipe,
    Rounding, Swizzle, TILE_ROWS,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::FINITE_BLOCKS;
use super::kernel_table::Nvfp4Mode;
use super::launch::Grid;
use super::params::{self, AMAX_JOBS, DEQUANTIZE_JOBS, QUANT_THREADS as THREADS, type_code};
use super::tile_config::NVFP4_ALIGNED_SMEM;

/// Bytes of a matrix that a block takes the maximum of (`kernels/quant_amax.cu`).
const SPAN: usize = params::AMAX_SPAN as usize;
/// Eights of elements that a block brings back to floating point (`kernels/dequantize.cu`).
const DEQUANTIZE_SPAN: usize = params::DEQUANTIZE_SPAN as usize;
/// Bytes of a matrix without gaps that a thread casts along rows (`kernels/nvfp4_cast.cu`, `kernels/mxfp8_cast.cu`,
/// `kernels/fp8_block_cast.cu`).
const CAST_THREAD_BYTES: usize = params::CAST_THREAD_BYTES as usize;
/// Rows of a panel, and bytes of one (`kernels/quant/quantize.cuh`).
const PANEL: [usize; 2] = [params::PANEL_ROWS as usize, params::PANEL_BYTES as usize];
/// Shared memory of the NVFP4 kernels, without and with columns (`kernels/nvfp4_cast.cu`).
const CAST_SHARED: [u32; 2] = [params::NVFP4_CAST_SMEM, params::NVFP4_CAST_COLUMNS_SMEM];
/// Rows and columns that a block takes of a matrix whose own are multiples of [`ALIGNED`]
/// (`kernels/nvfp4_cast_aligned.cu`).
const ALIGNED_BLOCK: [usize; 2] = [params::NVFP4_ALIGNED_ROWS as usize, params::NVFP4_ALIGNED_COLUMNS as usize];
/// Blocks that a warp casts of any matrix (`kernels/fp8_block_cast.cu`).
const FP8_BLOCK_WARP_BLOCKS: usize = params::FP8_BLOCK_WARP_BLOCKS as usize;
const _: () = assert!(params::FP8_BLOCK_COLUMNS as usize == FP8_BLOCK);
const ALIGNED: usize = params::NVFP4_ALIGNED_MULTIPLE as usize;

/// A matrix as kernels take it.
fn strided(matrix: &Matrix<'_, Cuda>) -> params::StridedMatrix {
    let layout = matrix.layout();
    let size = matrix.dtype().size();
    // Of an empty matrix nothing is read, and its offset may be anywhere.
    let empty = layout.dims.contains(&0);
    let offset = if empty { 0 } else { (layout.offset * size) as u64 };
    let base = matrix.base().data().ptr + offset;
    let words = |bytes: usize| bytes.is_multiple_of(16);
    let vector = layout.strides[1] == 1
        && base.is_multiple_of(16)
        && words(layout.dims[1] * size)
        && (words(layout.strides[0] * size) || layout.dims[0] <= 1);
    params::StridedMatrix {
        base,
        rows: layout.dims[0] as i64,
        columns: layout.dims[1] as i64,
        row_stride: layout.strides[0] as i64,
        column_stride: layout.strides[1] as i64,
        vector: i64::from(vector),
    }
}

/// Blocks that cover a matrix with panels.
fn panels(matrix: &Matrix<'_, Cuda>) -> usize {
    let [rows, columns] = matrix.dims();
    rows.div_ceil(PANEL[0]) * columns.div_ceil(PANEL[1] / matrix.dtype().size())
}

/// Whether columns are wanted of an aligned matrix of 16-bit elements with one amax, as they are, to whole words.
fn aligned_matrix(p: &params::QuantCastParams, size: usize) -> bool {
    let words = |side: &params::QuantSide| side.codes.is_multiple_of(16) && side.scales.is_multiple_of(8);
    let whole = |n: i64| (n as usize).is_multiple_of(ALIGNED) && i32::try_from(n).is_ok();
    p.columns.codes != 0
        && size == 2
        && p.by_line == 0
        && p.signs < 0
        && p.matrix.vector == 1
        && whole(p.matrix.rows)
        && whole(p.matrix.columns)
        && words(&p.rows)
        && words(&p.columns)
}

/// The same elements, in an order that is read fast: for what does not depend on it.
fn any_order<'a>(matrix: Matrix<'a, Cuda>) -> params::StridedMatrix {
    let layout = matrix.layout();
    let matrix = if layout.strides[1] > layout.strides[0] { matrix.transposed() } else { matrix };
    let mut plain = strided(&matrix);
    if plain.vector == 1 && plain.row_stride == plain.columns {
        (plain.columns, plain.row_stride) = (plain.rows * plain.columns, plain.rows * plain.columns);
        plain.rows = 1;
    }
    plain
}

impl Cuda {
    /// Amaxes of whole matrices, as many as fit a launch at a time.
    fn amaxes(&self, call: &'static str, jobs: &[params::AmaxJob]) -> Result<()> {
        for jobs in jobs.chunks(AMAX_JOBS) {
            let mut p = params::AmaxJobs { jobs: [params::AmaxJob::default(); AMAX_JOBS], count: jobs.len() as i64 };
            let mut blocks = 0;
            for (to, from) in p.jobs.iter_mut().zip(jobs) {
                *to = params::AmaxJob { first_block: blocks as i64, ..*from };
                let size = if from.type_ == params::TYPE_F32 { 4 } else { 2 };
                blocks += (from.matrix.rows * from.matrix.columns) as usize * size / SPAN + 1;
            }
            // SAFETY: each job's outputs hold a number, and its matrix lies in its tensor.
            unsafe { self.launch(call, &self.kernels().quant_amax.zero, Grid::new(1, params::AMAX_ZERO_THREADS), &p) }?;
            // SAFETY: as above.
            unsafe { self.launch(call, &self.kernels().quant_amax.whole, Grid::new(blocks, THREADS), &p) }?;
        }
        Ok(())
    }

    /// Amaxes of the lines of a matrix, or one of its transformed lines.
    fn amax_lines(
        &self,
        call: &'static str,
        format: &Nvfp4,
        lines: Matrix<'_, Cuda>,
        out: TensorMut<'_, Cuda>,
        columns: bool,
    ) -> Result<()> {
        let kind = type_code(call, "matrix", lines.dtype())?;
        let to = out.as_ref().data().ptr;
        self.zero(out.into_data())?;
        let [count, len] = lines.dims();
        if count == 0 || len == 0 {
            return Ok(());
        }
        if let Some(transform) = format.transform().filter(|_| columns) {
            // Row by row of the matrix itself.
            let matrix = lines.transposed();
            let p = params::AmaxLinesParams {
                matrix: strided(&matrix),
                type_: kind,
                out: to,
                signs: i64::from(transform.signs),
            };
            let blocks = len.div_ceil(params::AMAX_TRANSFORMED_ROWS as usize) * count.div_ceil(THREADS as usize);
            // SAFETY: `out` holds one number; rows come in sixteens, as was checked.
            return unsafe {
                self.launch(call, &self.kernels().quant_amax.transformed, Grid::new(blocks, THREADS), &p)
            };
        }
        let p = params::AmaxLinesParams { matrix: strided(&lines), type_: kind, out: to, signs: 0 };
        let blocks = match p.matrix.column_stride {
            1 => count.div_ceil((THREADS / params::WARP_THREADS) as usize),
            _ => count.div_ceil(THREADS as usize) * len.div_ceil(params::AMAX_LINE_ELEMENTS as usize),
        };
        // SAFETY: `out` holds a number a line.
        unsafe { self.launch(call, &self.kernels().quant_amax.lines, Grid::new(blocks, THREADS), &p) }
    }

    fn amax(&self, call: &'static str, calls: Vec<Amax<'_, Self>>) -> Result<()> {
        calls.iter().try_for_each(|c| check::amax(call, c))?;
        let mut jobs = Vec::new();
        for Amax { format, matrix, mut rows, mut columns } in calls {
            let whole = format.scope() == AmaxScope::Matrix;
            let mut plain = [None, None];
            if whole {
                plain[0] = rows.take();
                plain[1] = columns.take_if(|_| format.transform().is_none());
            }
            let [first, second] = plain.map(|out| out.map(|out| out.into_data().ptr));
            if let Some(out) = first.or(second) {
                let other = first.and(second).unwrap_or(0);
                let kind = type_code(call, "matrix", matrix.dtype())?;
                jobs.push(params::AmaxJob { matrix: any_order(matrix), type_: kind, out, other, first_block: 0 });
            }
            if let Some(rows) = rows {
                self.amax_lines(call, format, matrix, rows, false)?;
            }
            if let Some(columns) = columns {
                self.amax_lines(call, format, matrix.transposed(), columns, true)?;
            }
        }
        self.amaxes(call, &jobs)
    }

    fn cast(&self, call: &'static str, quantize: Quantize<'_, Self>) -> Result<()> {
        check::quantize(call, &quantize)?;
        let Quantize { format, matrix, rows, columns } = quantize;
        if matrix.dims().contains(&0) || (rows.is_none() && columns.is_none()) {
            return Ok(());
        }
        let mut p = params::QuantCastParams {
            matrix: strided(&matrix),
            by_line: i64::from(format.scope() == AmaxScope::Line),
            signs: format.transform().map_or(-1, |t| i64::from(t.signs)),
            ..Default::default()
        };
        let mut first_row = 0;
        let mode = match (format.recipe(), format.rounding(), format.blocks()) {
            (Recipe::ModelOpt, ..) => Nvfp4Mode::ModelOpt,
            (_, Rounding::Stochastic(random), _) => {
                p.keys = bytemuck::cast(philox::keys(philox::key(random.seed)));
                (p.stream, first_row) = (i64::from(random.stream), random.first_row as i64);
                Nvfp4Mode::Stochastic
            }
            (.., Blocks::Tile) => Nvfp4Mode::Tiled,
            _ => Nvfp4Mode::Te,
        };
        let side = |side: Nvfp4Mut<'_, Cuda>| {
            let (code_bytes, blocks) = (side.codes.row_bytes() as i64, side.scales.row_bytes() as i64);
            let [codes, scales, amax] = [side.codes, side.scales, side.amax].map(|t| t.into_data().ptr);
            params::QuantSide { codes, scales, amax, code_bytes, blocks, ..Default::default() }
        };
        let shared = CAST_SHARED[usize::from(columns.is_some())];
        if let Some(rows) = rows {
            p.rows = params::QuantSide { first_line: first_row, ..side(rows) };
        }
        if let Some(columns) = columns {
            p.columns = params::QuantSide { first_block: first_row / NVFP4_BLOCK as i64, ..side(columns) };
        }
        let (size, dtype) = (matrix.dtype().size(), matrix.dtype());
        // Whole blocks without gaps, numbered in 32 bits.
        let blocks = matrix.dims()[0] * matrix.dims()[1] / NVFP4_BLOCK;
        let whole = match mode {
            Nvfp4Mode::Tiled => {
                size == 2 && matrix.dims()[0].is_multiple_of(NVFP4_BLOCK) && matrix.dims()[1].is_multiple_of(64)
            }
            _ => matrix.dims()[1].is_multiple_of(NVFP4_BLOCK),
        };
        let plain = p.columns.codes == 0
            && whole
            && p.by_line == 0
            && p.matrix.vector == 1
            && p.matrix.row_stride == p.matrix.columns
            && p.rows.codes.is_multiple_of(8)
            && u32::try_from(blocks).is_ok();
        let [height, width] = matrix.dims();
        let whole_blocks = height.div_ceil(ALIGNED_BLOCK[0]) * width.div_ceil(ALIGNED_BLOCK[1]);
        let kernels = self.kernels();
        let of_rows = kernels.nvfp4_cast.rows(mode, dtype).filter(|_| plain);
        let of_panels = kernels.nvfp4_aligned.of(mode, dtype).filter(|_| aligned_matrix(&p, size));
        let (kernel, grid) = match (of_rows, of_panels) {
            (Some(kernel), _) => {
                let of_thread = match mode {
                    Nvfp4Mode::Tiled => params::NVFP4_TILED_THREAD_BLOCKS as usize,
                    _ => CAST_THREAD_BYTES / NVFP4_BLOCK / size,
                };
                (kernel, Grid::threads_of(blocks.div_ceil(of_thread), THREADS))
            }
            (None, Some(kernel)) => {
                let shared = NVFP4_ALIGNED_SMEM[usize::from(mode == Nvfp4Mode::Stochastic)];
                (kernel, Grid { shared, ..Grid::new(whole_blocks, THREADS) })
            }
            _ => (kernels.nvfp4_cast.any(mode, dtype), Grid { shared, ..Grid::new(panels(&matrix), THREADS) }),
        };
        // SAFETY: sides have the sizes that the format gives for this matrix, as was checked; the kernel writes no
        // more.
        unsafe { self.launch(call, kernel, grid, &p) }
    }
}

/// Matrices back to floating point, each with its eights of elements, as many as fit a launch at a time.
fn launch_dequantize(
    device: &Cuda,
    call: &'static str,
    kernel: &Kernel,
    jobs: &[(params::DequantizeJob, usize)],
) -> Result<()> {
    for jobs in jobs.chunks(DEQUANTIZE_JOBS) {
        let mut p = params::DequantizeJobs {
            jobs: [params::DequantizeJob::default(); DEQUANTIZE_JOBS],
            count: jobs.len() as i64,
        };
        let mut blocks = 0;
        for (to, (from, eights)) in p.jobs.iter_mut().zip(jobs) {
            *to = params::DequantizeJob { first_block: blocks as i64, ..*from };
            blocks += eights.div_ceil(DEQUANTIZE_SPAN);
        }
        // SAFETY: codes, scales and amaxes have the sizes that the format gives for their outputs, as was checked.
        unsafe { device.launch(call, kernel, Grid::new(blocks, THREADS), &p) }?;
    }
    Ok(())
}

/// Fields of an output of `[lines, len]`.
fn output(call: &'static str, out: TensorMut<'_, Cuda>, [lines, len]: [usize; 2]) -> Result<params::DequantizeJob> {
    let out_type = type_code(call, "out", out.dtype())?;
    let out = out.into_data().ptr;
    Ok(params::DequantizeJob { out, out_type, lines: lines as i64, len: len as i64, ..Default::default() })
}

fn dequantize(device: &Cuda, call: &'static str, calls: Vec<Dequantize<'_, Cuda>>) -> Result<()> {
    let dims = calls.iter().map(|c| check::dequantize(call, c)).collect::<Result<Vec<_>>>()?;
    let job = |(c, dims): (Dequantize<'_, Cuda>, [usize; 2])| {
        let blocks = dims[1].div_ceil(NVFP4_BLOCK);
        let job = params::DequantizeJob {
            codes: c.codes.data().ptr,
            scales: c.scales.data().ptr,
            amax: c.amax.data().ptr,
            code_bytes: c.codes.row_bytes() as i64,
            blocks: blocks as i64,
            by_line: i64::from(c.format.scope() == AmaxScope::Line),
            modelopt: i64::from(c.format.recipe() == Recipe::ModelOpt),
            ..output(call, c.out, dims)?
        };
        Ok((job, dims[0] * blocks * 2))
    };
    launch_dequantize(
        device,
        call,
        &device.kernels().dequantize.nvfp4,
        &calls.into_iter().zip(dims).map(job).collect::<Result<Vec<_>>>()?,
    )
}

/// E4M3 codes and their scales, so many a row, back to floating point; and the eights of elements.
fn e4m3_job(
    call: &'static str,
    [codes, scales]: [TensorRef<'_, Cuda>; 2],
    blocks: usize,
    out: TensorMut<'_, Cuda>,
    dims: [usize; 2],
) -> Result<(params::DequantizeJob, usize)> {
    let job = params::DequantizeJob {
        codes: codes.data().ptr,
        scales: scales.data().ptr,
        code_bytes: dims[1] as i64,
        blocks: blocks as i64,
        ..output(call, out, dims)?
    };
    Ok((job, dims[0] * dims[1].div_ceil(8)))
}

fn dequantize_mxfp8(device: &Cuda, call: &'static str, calls: Vec<DequantizeMxfp8<'_, Cuda>>) -> Result<()> {
    let dims = calls.iter().map(|c| check::dequantize_mxfp8(call, c)).collect::<Result<Vec<_>>>()?;
    let job = |(c, dims): (DequantizeMxfp8<'_, Cuda>, [usize; 2])| {
        let blocks = Mxfp8::scale_dims(dims, Direction::Rows)[1];
        let (job, eights) = e4m3_job(call, [c.codes, c.scales], blocks, c.out, dims)?;
        Ok((params::DequantizeJob { by_line: i64::from(c.direction == Direction::Columns), ..job }, eights))
    };
    launch_dequantize(
        device,
        call,
        &device.kernels().dequantize.mxfp8,
        &calls.into_iter().zip(dims).map(job).collect::<Result<Vec<_>>>()?,
    )
}

fn quantize_fp8_block(device: &Cuda, quantize: QuantizeFp8Block<'_, Cuda>) -> Result<()> {
    const CALL: &str = "quantize_fp8_block";
    check::quantize_fp8_block(CALL, &quantize)?;
    let QuantizeFp8Block { matrix, rows } = quantize;
    let [lines, len] = matrix.dims();
    if lines == 0 || len == 0 {
        return Ok(());
    }
    let [codes, scales] = [rows.codes, rows.scales].map(|t| t.into_data().ptr);
    let rows = params::QuantSide { codes, scales, code_bytes: len as i64, ..Default::default() };
    let p = params::QuantCastParams { matrix: strided(&matrix), rows, ..Default::default() };
    let kernels = &device.kernels().fp8_block_cast;
    let dtype = matrix.dtype();
    let plain = p.matrix.vector == 1
        && (p.matrix.row_stride == p.matrix.columns || lines == 1)
        && len.is_multiple_of(FP8_BLOCK)
        && codes.is_multiple_of(16)
        && scales.is_multiple_of(4);
    let (kernel, grid) = if plain {
        let of_block = THREADS as usize * CAST_THREAD_BYTES / dtype.size();
        (kernels.rows.of(dtype), Grid::new((lines * len).div_ceil(of_block), THREADS))
    } else {
        let warps = (lines * len.div_ceil(FP8_BLOCK)).div_ceil(FP8_BLOCK_WARP_BLOCKS);
        (kernels.any.of(dtype), Grid::warps_of(warps, THREADS))
    };
    // SAFETY: codes and scales have the sizes that the format gives for this matrix, as was checked.
    unsafe { device.launch(CALL, kernel, grid, &p) }
}

fn dequantize_fp8_block(device: &Cuda, call: &'static str, calls: Vec<DequantizeFp8Block<'_, Cuda>>) -> Result<()> {
    let dims = calls.iter().map(|c| check::dequantize_fp8_block(call, c)).collect::<Result<Vec<_>>>()?;
    let job = |(c, dims): (DequantizeFp8Block<'_, Cuda>, [usize; 2])| {
        e4m3_job(call, [c.codes, c.scales], dims[1].div_ceil(FP8_BLOCK), c.out, dims)
    };
    let jobs = calls.into_iter().zip(dims).map(job).collect::<Result<Vec<_>>>()?;
    launch_dequantize(device, call, &device.kernels().dequantize.fp8_block, &jobs)
}

fn reorder(device: &Cuda, call: &'static str, swizzle: Swizzle<'_, Cuda>, back: bool) -> Result<()> {
    let [lines, blocks] = check::swizzle(call, &swizzle, back)?;
    let p = params::SwizzleScalesParams {
        scales: swizzle.from.data().ptr,
        out: swizzle.to.into_data().ptr,
        lines: lines as i64,
        blocks: blocks as i64,
        back: i64::from(back),
    };
    let words = lines.next_multiple_of(TILE_ROWS) * blocks.div_ceil(4);
    // SAFETY: both sides have the sizes that were checked.
    unsafe { device.launch(call, &device.kernels().dequantize.swizzle, Grid::threads_of(words, THREADS), &p) }
}

impl Codec for Cuda {
    fn compute_amax(&self, call: Amax<'_, Self>) -> Result<()> {
        self.amax("compute_amax", vec![call])
    }
    fn multi_compute_amax(&self, calls: Vec<Amax<'_, Self>>) -> Result<()> {
        self.amax("multi_compute_amax", calls)
    }
    fn quantize_cast_only(&self, call: Quantize<'_, Self>) -> Result<()> {
        self.cast("quantize_cast_only", call)
    }
    fn dequantize(&self, call: Dequantize<'_, Self>) -> Result<()> {
        dequantize(self, "dequantize", vec![call])
    }
    fn multi_dequantize(&self, calls: Vec<Dequantize<'_, Self>>) -> Result<()> {
        dequantize(self, "multi_dequantize", calls)
    }
    fn quantize_mxfp8(&self, call: QuantizeMxfp8<'_, Self>) -> Result<()> {
        const CALL: &str = "quantize_mxfp8";
        check::quantize_mxfp8(CALL, &call)?;
        let QuantizeMxfp8 { format, matrix, rows, columns } = call;
        if matrix.dims().contains(&0) || (rows.is_none() && columns.is_none()) {
            return Ok(());
        }
        let side = |side: Mxfp8Mut<'_, Cuda>| {
            let (code_bytes, blocks) = (side.codes.row_bytes() as i64, side.scales.row_bytes() as i64);
            let [codes, scales] = [side.codes, side.scales].map(|t| t.into_data().ptr);
            params::QuantSide { codes, scales, code_bytes, blocks, ..Default::default() }
        };
        let p = params::QuantCastParams {
            matrix: strided(&matrix),
            rows: rows.map(side).unwrap_or_default(),
            columns: columns.map(side).unwrap_or_default(),
            floor: i64::from(format.scale == MxScale::Floor),
            ..Default::default()
        };
        let dtype = matrix.dtype();
        let kernels = &self.kernels().mxfp8_cast;
        let [lines, len] = matrix.dims();
        let plain = p.columns.codes == 0
            && format.blocks != Blocks::Tile
            && p.matrix.vector == 1
            && (p.matrix.row_stride == p.matrix.columns || lines == 1)
            && len.is_multiple_of(MX_BLOCK)
            && p.rows.codes.is_multiple_of(16);
        let (kernel, blocks) = match (plain, format.blocks) {
            (true, _) => {
                let of_block = THREADS as usize * CAST_THREAD_BYTES / dtype.size();
                (kernels.rows.of(dtype), (lines * len).div_ceil(of_block))
            }
            (_, Blocks::Tile) => (kernels.tiled.of(dtype), panels(&matrix)),
            _ => (kernels.any.of(dtype), panels(&matrix)),
        };
        // SAFETY: sides have the sizes that the format gives for this matrix, as was checked.
        unsafe { self.launch(CALL, kernel, Grid::new(blocks, THREADS), &p) }
    }
    fn dequantize_mxfp8(&self, call: DequantizeMxfp8<'_, Self>) -> Result<()> {
        dequantize_mxfp8(self, "dequantize_mxfp8", vec![call])
    }
    fn multi_dequantize_mxfp8(&self, calls: Vec<DequantizeMxfp8<'_, Self>>) -> Result<()> {
        dequantize_mxfp8(self, "multi_dequantize_mxfp8", calls)
    }
    fn quantize_fp8_block(&self, call: QuantizeFp8Block<'_, Self>) -> Result<()> {
        quantize_fp8_block(self, call)
    }
    fn dequantize_fp8_block(&self, call: DequantizeFp8Block<'_, Self>) -> Result<()> {
        dequantize_fp8_block(self, "dequantize_fp8_block", vec![call])
    }
    fn multi_dequantize_fp8_block(&self, calls: Vec<DequantizeFp8Block<'_, Self>>) -> Result<()> {
        dequantize_fp8_block(self, "multi_dequantize_fp8_block", calls)
    }
    fn swizzle(&self, call: Swizzle<'_, Self>) -> Result<()> {
        reorder(self, "swizzle", call, false)
    }
    fn unswizzle(&self, call: Swizzle<'_, Self>) -> Result<()> {
        reorder(self, "unswizzle", call, true)
    }
    fn first_non_finite(&self, matrix: Matrix<'_, Self>) -> Result<Option<[usize; 2]>> {
        const CALL: &str = "first_non_finite";
        let [rows, columns] = matrix.dims();
        let mut place = Tensor::empty(self, DType::I64, &[1])?;
        self.fill_bytes(CALL, place.view_mut().into_data(), 0xff)?;
        let out = place.view().data().ptr;
        let kind = type_code(CALL, "matrix", matrix.dtype())?;
        let p = params::AmaxLinesParams { matrix: strided(&matrix), type_: kind, out, signs: 0 };
        let blocks = (rows * columns).div_ceil(THREADS as usize).min(FINITE_BLOCKS * self.inner.sm_count);
        // SAFETY: `out` holds a number of 8 bytes.
        unsafe { self.launch(CALL, &self.kernels().quant_amax.first_non_finite, Grid::new(blocks, THREADS), &p) }?;
        let mut bytes = [0; 8];
        self.read_bytes(CALL, out, &mut bytes)?;
        let at = u64::from_ne_bytes(bytes);
        Ok((at != u64::MAX).then(|| [at as usize / columns, at as usize % columns]))
    }
}
