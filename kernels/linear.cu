// Dense products with a small weight: router logits and shared gate, forward and backward. What Hopper's kernels do not
// serve (sm90_linear.cu), and every other architecture.
//
//   linear_*           x [T, H], weight [E, H] -> logits f32 [T, E], or parts of them over H
//   linear_d_x_*       logits' gradients f32 [T, E], weight -> added to [T, H]
//   linear_d_weight_*  those gradients, x -> f32 parts [parts, E, H] over T
//   sum_parts          adds parts in their order, so that no sum depends on the order of blocks; a thread an element
//
// A block a tile and part: 128 x 128 with mma.sync for 16-bit types (gradients as tf32, portable/linear_bwd_tf32.cuh),
// 64 x 64 with multiply-add for others. Limited by bytes where tensor cores serve. Notes: kernels/notes/router.md.
#include "portable/linear_bwd_tf32.cuh"

#define MMA_SYNC(name, T) \
    extern "C" __global__ void __launch_bounds__(mma_sync::THREADS, 2) name(const __grid_constant__ GemmParams p) { mma_sync::run<T, LINEAR>(p); }
#define TF32(name, T, KIND) \
    extern "C" __global__ void __launch_bounds__(tf32::THREADS, 2) name(const __grid_constant__ GemmParams p) { tf32::run<T, KIND>(p); }
#define SIMT(name, KIND) \
    extern "C" __global__ void __launch_bounds__(simt::THREADS, 2) name(const __grid_constant__ GemmParams p) { simt::run<float, KIND>(p); }

MMA_SYNC(linear_bf16, bf16)
MMA_SYNC(linear_f16, f16)
SIMT(linear_any, LINEAR)
TF32(linear_d_x_bf16, bf16, LINEAR_DX)
TF32(linear_d_x_f16, f16, LINEAR_DX)
SIMT(linear_d_x_any, LINEAR_DX)
TF32(linear_d_weight_bf16, bf16, LINEAR_DW)
TF32(linear_d_weight_f16, f16, LINEAR_DW)
SIMT(linear_d_weight_any, LINEAR_DW)

// Adds the parts that a sum was cut into, in their order, and a bias of a value a column where there is one.
extern "C" __global__ void sum_parts(const __grid_constant__ GemmParams p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.m * p.n) return;
    float sum = 0.0f;
    for (int64_t s = 0; s < p.split; s++) sum += p.partial[s * p.m * p.n + i];
    if (p.bias) sum += load_any(p.bias, p.bias_type, i % p.n);
    store_any(p.out, p.out_type, i, sum);
}
