// Products of rows with their expert's weight on Hopper (sm_90a): up, down, and the gradients of their rows. For gated
// activations, 16-bit types, rows of a multiple of 16 bytes; everything else, and every other architecture, takes the
// portable kernels (grouped_gemm.cu). Empty where the architecture is another.
//
//   sm90_up          rows [T, H] behind a map or [N, H], [E, 2 I, H] -> activations [N, I], pre-activations
//   sm90_down        [N, I], [E, H, I] -> [N, H]
//   sm90_down_bwd    [T, H] behind a map or [N, H], [E, H, I], pre-activations -> their gradients [N, 2 I], activations
//                    [N, I], parts of the rows' dots
//   sm90_up_dgrad    [N, 2 I], [E, 2 I, H] -> [N, H]
//   ..._wide         down and up_dgrad in wider tiles, for sums of 8192 and more
//   ..._square       down_bwd in tiles of fewer columns, for sums of less than 4096 (src/cuda/heuristics.rs says where)
//
// The grid is a block an SM at most, in clusters of two; blocks walk through tiles. Limited by the tensor
// core, down_bwd by its rows and its epilogue. sm90/grouped_gemm_mainloop.cuh has the tiles and the ring. Notes:
// kernels/notes/grouped_gemm.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "sm90/grouped_gemm_kernel.cuh"

#define GROUPED_GEMM(name, T, KIND)                                                                                        \
    extern "C" __global__ void __launch_bounds__(grouped_gemm::THREADS, 1) __cluster_dims__(2, 1, 1)                       \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap a,                                \
             const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap pre,                       \
             const __grid_constant__ CUtensorMap gated, const __grid_constant__ CUtensorMap plain) {              \
        grouped_gemm::run<T, KIND>(p, a, b, {pre, gated, plain});                                                         \
    }

GROUPED_GEMM(sm90_up_bf16, bf16, UP)
GROUPED_GEMM(sm90_up_f16, f16, UP)
GROUPED_GEMM(sm90_down_bf16, bf16, DOWN)
GROUPED_GEMM(sm90_down_f16, f16, DOWN)
GROUPED_GEMM(sm90_down_wide_bf16, bf16, DOWN + grouped_gemm::WIDE_TILE)
GROUPED_GEMM(sm90_down_wide_f16, f16, DOWN + grouped_gemm::WIDE_TILE)
GROUPED_GEMM(sm90_down_bwd_bf16, bf16, DOWN_BWD)
GROUPED_GEMM(sm90_down_bwd_f16, f16, DOWN_BWD)
GROUPED_GEMM(sm90_down_bwd_square_bf16, bf16, DOWN_BWD + grouped_gemm::SQUARE_TILE)
GROUPED_GEMM(sm90_down_bwd_square_f16, f16, DOWN_BWD + grouped_gemm::SQUARE_TILE)
GROUPED_GEMM(sm90_up_dgrad_bf16, bf16, UP_DGRAD)
GROUPED_GEMM(sm90_up_dgrad_f16, f16, UP_DGRAD)
GROUPED_GEMM(sm90_up_dgrad_wide_bf16, bf16, UP_DGRAD + grouped_gemm::WIDE_TILE)
GROUPED_GEMM(sm90_up_dgrad_wide_f16, f16, UP_DGRAD + grouped_gemm::WIDE_TILE)
#endif
