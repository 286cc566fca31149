// Products of rows with their expert's weight: up, down, and the gradients with respect to rows. Portable path.
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
