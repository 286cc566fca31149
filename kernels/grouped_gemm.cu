// Products of rows with their expert's weight, portable path (sm_80 and later, and what Hopper's kernels do not serve):
// up [N, H] x [E, 2 I, H], down [N, I] x [E, H, I], and the gradients with respect to their rows, down_bwd and
// up_dgrad.
//
// A block a tile: 128 x 128 by steps of 32 k with mma.sync for 16-bit types (two blocks an SM), 64 x 64 by
// 16 with fused multiply-add for f32. Rows may be read by a map. The grid is as large as the layout could
// need: the row tiles' list, made on the device, says which blocks have work. The loops are in portable/gemm.cuh, what
// happens to the sums in common/epilogue.cuh. Limited by the multiplying instructions. Notes: kernels/NOTES.md,
// "Portable path".
#include "portable/gemm.cuh"

#define MMA_SYNC(name, T, KIND) \
    extern "C" __global__ void __launch_bounds__(mma_sync::THREADS, 2) name(const __grid_constant__ GemmParams p) { mma_sync::run<T, KIND>(p); }
#define SIMT(name, T, KIND) \
    extern "C" __global__ void __launch_bounds__(simt::THREADS) name(const __grid_constant__ GemmParams p) { simt::run<T, KIND>(p); }

MMA_SYNC(up_bf16, bf16, UP)
MMA_SYNC(up_f16, f16, UP)
SIMT(up_f32, float, UP)
MMA_SYNC(down_bf16, bf16, DOWN)
MMA_SYNC(down_f16, f16, DOWN)
SIMT(down_f32, float, DOWN)
MMA_SYNC(down_bwd_bf16, bf16, DOWN_BWD)
MMA_SYNC(down_bwd_f16, f16, DOWN_BWD)
SIMT(down_bwd_f32, float, DOWN_BWD)
MMA_SYNC(up_dgrad_bf16, bf16, UP_DGRAD)
MMA_SYNC(up_dgrad_f16, f16, UP_DGRAD)
SIMT(up_dgrad_f32, float, UP_DGRAD)
