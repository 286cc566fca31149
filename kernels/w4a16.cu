// Products of rows with quantized weights, and the gradients with respect to rows: any format, any activation, any
// number of rows, on any architecture. Shapes are those of grouped_gemm.cu, weights codes and scales (NVFP4, MXFP4, fp8
// blocks).
//
// The weights are de-quantized between memory and shared memory (portable/quantized_operand.cuh); the loop, its grid
// and its tiles are the portable ones. Limited by mma.sync and by the de-quantizing, which each tile of rows repeats.
// Faster forward kernels with FP4 weights: w4a16_decode.cu (few rows), sm90_w4a16.cu (many). Hopper makes the gradients,
// and fp8 blocks' forward of many rows, by its dense kernels, behind sm90_dequantize.cu. Notes: kernels/notes/w4a16.md.
#include "portable/quantized_operand.cuh"

#define MMA_SYNC(name, T, KIND, FORMAT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(mma_sync::THREADS, 2)                                                   \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ QuantWeightParams w) {                                  \
        mma_sync::run<T, KIND, quant::MmaSyncOperand<T, KIND, FORMAT>>(p, w);                                                    \
    }
#define SIMT(name, KIND, FORMAT)                                                                                     \
    extern "C" __global__ void __launch_bounds__(simt::THREADS)                                                      \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ QuantWeightParams w) {                                  \
        simt::run<float, KIND, quant::SimtOperand<KIND, FORMAT>>(p, w);                                                   \
    }
#define PRODUCT(product, KIND, format, FORMAT)                   \
    MMA_SYNC(product##_##format##_bf16, bf16, KIND, FORMAT)        \
    MMA_SYNC(product##_##format##_f16, f16, KIND, FORMAT)          \
    SIMT(product##_##format##_f32, KIND, FORMAT)
#define PRODUCTS(format, FORMAT)                      \
    PRODUCT(up, UP, format, FORMAT)                   \
    PRODUCT(down, DOWN, format, FORMAT)               \
    PRODUCT(down_bwd, DOWN_BWD, format, FORMAT)       \
    PRODUCT(up_dgrad, UP_DGRAD, format, FORMAT)

PRODUCTS(nvfp4, WEIGHT_NVFP4)
PRODUCTS(mxfp4, WEIGHT_MXFP4)
PRODUCTS(fp8, WEIGHT_FP8)
