// Dense products with a small weight: router logits and shared gate, forward and backward.
#include "common/gemm.cuh"

extern "C" __global__ void __launch_bounds__(tensor::THREADS, 2) linear_bf16(const __grid_constant__ Gemm p) { tensor::run<bf16, LINEAR>(p); }
extern "C" __global__ void __launch_bounds__(tensor::THREADS, 2) linear_f16(const __grid_constant__ Gemm p) { tensor::run<f16, LINEAR>(p); }
extern "C" __global__ void __launch_bounds__(scalar::THREADS) linear_any(const __grid_constant__ Gemm p) { scalar::run<float, LINEAR>(p); }
extern "C" __global__ void __launch_bounds__(scalar::THREADS) linear_d_x(const __grid_constant__ Gemm p) { scalar::run<float, LINEAR_DX>(p); }
extern "C" __global__ void __launch_bounds__(scalar::THREADS) linear_d_weight(const __grid_constant__ Gemm p) { scalar::run<float, LINEAR_DW>(p); }

// Adds the parts that `linear_d_weight` cut its sum into, in their order.
extern "C" __global__ void sum_parts(const __grid_constant__ Gemm p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.m * p.n) return;
    float sum = 0.0f;
    for (int64_t s = 0; s < p.split; s++) sum += p.partial[s * p.m * p.n + i];
    store_any(p.out, p.out_type, i, sum);
}
