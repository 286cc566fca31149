// Products of rows with their expert's weight, portable path (sm_80 and later, and what Hopper's kernels do not serve):
// up [N, H] x [E, 2 I, H], down [N, I] x [E, H, I], and the gradients with respect to their rows, down_bwd and
// up_dgrad.
//
// A block a tile: 128 x 128 by steps of 32 k with mma.sync for 16-bit types (two blocks a multiprocessor), 64 x 64 by
// 16 with fused multiply-add for f32. Rows may be read and written by a map. The grid is as large as the layout could
// need: the row tiles' list, made on the device, says which blocks have work. The loops are in common/gemm.cuh, what
// happens to the sums in common/epilogue.cuh. Limited by the multiplying instructions. Notes: kernels/NOTES.md,
// "Portable path".
#include "common/gemm.cuh"

#define TENSOR(name, T, KIND) \
    extern "C" __global__ void __launch_bounds__(tensor::THREADS, 2) name(const __grid_constant__ Gemm p) { tensor::run<T, KIND>(p); }
#define SCALAR(name, T, KIND) \
    extern "C" __global__ void __launch_bounds__(scalar::THREADS) name(const __grid_constant__ Gemm p) { scalar::run<T, KIND>(p); }

TENSOR(up_bf16, bf16, UP)
TENSOR(up_f16, f16, UP)
SCALAR(up_f32, float, UP)
TENSOR(down_bf16, bf16, DOWN)
TENSOR(down_f16, f16, DOWN)
SCALAR(down_f32, float, DOWN)
TENSOR(down_bwd_bf16, bf16, DOWN_BWD)
TENSOR(down_bwd_f16, f16, DOWN_BWD)
SCALAR(down_bwd_f32, float, DOWN_BWD)
TENSOR(up_dgrad_bf16, bf16, UP_DGRAD)
TENSOR(up_dgrad_f16, f16, UP_DGRAD)
SCALAR(up_dgrad_f32, float, UP_DGRAD)
