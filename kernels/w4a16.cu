// Products of rows with quantised weights, and the gradients with respect to rows: any format, any activation, any
// number of rows, on any architecture. Shapes are those of grouped_gemm.cu, weights codes and scales (NVFP4, MXFP4, fp8
// blocks).
//
// The weights are de-quantised between memory and shared memory (common/quant_gemm.cuh); the loop, its grid and its
// tiles are the portable ones. Limited by mma.sync and by the de-quantising, which each tile of rows repeats. What is
// faster for forward with FP4 weights: w4a16_decode.cu (few rows), hopper_w4a16.cu (many). Notes:
// kernels/notes/w4a16.md.
#include "common/quant_gemm.cuh"

#define TENSOR(name, T, KIND, FORMAT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(tensor::THREADS, 2)                                                   \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w) {                                  \
        tensor::run<T, KIND, quant::Tensor<T, KIND, FORMAT>>(p, w);                                                    \
    }
#define SCALAR(name, KIND, FORMAT)                                                                                     \
    extern "C" __global__ void __launch_bounds__(scalar::THREADS)                                                      \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w) {                                  \
        scalar::run<float, KIND, quant::Scalar<KIND, FORMAT>>(p, w);                                                   \
    }
#define PRODUCT(product, KIND, format, FORMAT)                   \
    TENSOR(product##_##format##_bf16, bf16, KIND, FORMAT)        \
    TENSOR(product##_##format##_f16, f16, KIND, FORMAT)          \
    SCALAR(product##_##format##_f32, KIND, FORMAT)
#define PRODUCTS(format, FORMAT)                      \
    PRODUCT(up, UP, format, FORMAT)                   \
    PRODUCT(down, DOWN, format, FORMAT)               \
    PRODUCT(down_bwd, DOWN_BWD, format, FORMAT)       \
    PRODUCT(up_dgrad, UP_DGRAD, format, FORMAT)

PRODUCTS(nvfp4, WEIGHT_NVFP4)
PRODUCTS(mxfp4, WEIGHT_MXFP4)
PRODUCTS(fp8, WEIGHT_FP8)
