//! Products of up to four rows (`kernels/few_rows_linear.cu`): bf16 and f16.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CpuStorage, CudaStorage, CustomOp2, DType, Error, Layout, Result, Shape, Tensor};
use candle_nn::Linear;
use half::{bf16, f16};

use super::cuda::{Module, address, grid, int, is_plain, module, type_name};

const MODULE: Module = module!("few_rows_linear");
/// Most rows with a kernel.
const MOST_ROWS: usize = 4;
/// Most rows of the weight: with more (an output layer's) cuBLAS is as quick, as its blocks read x fewer times.
const MOST_OUTPUTS: usize = 32_768;
/// Warps of a block, which do a row of the weight each.
const WARPS: usize = 8;
/// What a block has of shared memory without being asked for more.
const SHARED: usize = 48 << 10;

/// Whether there is a kernel for it.
pub(super) fn serves(of: &Linear, x: &Tensor) -> bool {
    let (w, bias) = (of.weight(), of.bias());
    let ([rows, inputs], [outputs, columns]) = (x.dims(), w.dims()) else { return false };
    type_name(x.dtype()).is_some()
        && (1..=MOST_ROWS).contains(rows)
        && inputs == columns
        && inputs.is_multiple_of(8)
        && (1..=MOST_OUTPUTS).contains(outputs)
        && rows * inputs * 2 <= SHARED
        && [Some(x), Some(w), bias].into_iter().flatten().all(|t| is_plain(t, x) && !t.track_op())
        && bias.is_none_or(|bias| bias.dims() == [*outputs])
}

/// Of what [`serves`] has found.
pub(super) fn forward(of: &Linear, x: &Tensor) -> Result<Tensor> {
    x.apply_op2_no_bwd(of.weight(), &Op { bias: of.bias() })
}

struct Op<'a> {
    bias: Option<&'a Tensor>,
}

impl CustomOp2 for Op<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("linear: a tensor of the CPU"))
    }

    fn cuda_fwd(&self, x: &CudaStorage, lx: &Layout, w: &CudaStorage, lw: &Layout) -> Result<(CudaStorage, Shape)> {
        match x.dtype() {
            DType::BF16 => self.run::<bf16>("bf16", (x, lx), (w, lw)),
            _ => self.run::<f16>("f16", (x, lx), (w, lw)),
        }
    }
}

impl Op<'_> {
    fn run<T: CudaDType + DeviceRepr>(
        &self,
        dtype: &str,
        (x, lx): (&CudaStorage, &Layout),
        (w, lw): (&CudaStorage, &Layout),
    ) -> Result<(CudaStorage, Shape)> {
        let ((rows, inputs), outputs) = (lx.shape().dims2()?, lw.dims()[0]);
        let device = x.device().clone();
        // SAFETY: the kernel writes all of it before anything reads it.
        let y = unsafe { device.alloc::<T>(rows * outputs)? };
        {
            let (x, w) = (x.as_cuda_slice::<T>()?, w.as_cuda_slice::<T>()?);
            let stream = x.stream().clone();
            let ((x, _x), (w, _w), (to, _y)) = (x.device_ptr(&stream), w.device_ptr(&stream), y.device_ptr(&stream));
            let at = |address: u64, layout: &Layout| address + (layout.start_offset() * size_of::<T>()) as u64;
            let (x, w) = (at(x, lx), at(w, lw));
            let bias = self.bias.map(Tensor::storage_and_layout);
            let bias = bias.as_ref().map(|(s, l)| address::<T>(s, l.start_offset())).transpose()?;
            let bias = bias.as_ref().map_or(0, |(address, _)| *address);
            let function = MODULE.kernel(&device, &format!("few_rows_linear_{dtype}_{rows}"))?;
            let config = grid([outputs.div_ceil(WARPS), 1, 1], 32 * WARPS, rows * inputs * size_of::<T>())?;
            let (inputs, outputs) = (int(inputs)?, int(outputs)?);
            let mut builder = stream.launch_builder(&function);
            builder.arg(&x).arg(&w).arg(&bias).arg(&to).arg(&inputs).arg(&outputs);
            // SAFETY: the arguments are the kernel's, in its order, of the shapes that `serves` has compared; their memory
            // is locked for reading or allocated for this, and freed on the stream that the kernel is on.
            unsafe { builder.launch(config) }.w()?;
        }
        Ok((CudaStorage::wrap_cuda_slice(y, device), Shape::from((rows, outputs))))
    }
}
