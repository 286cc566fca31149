// Quantized experts as 16-bit numbers on Hopper (sm_90a), for products whose own kernels read no codes: the gradients
// with respect to rows, and fp8 blocks' forward of many rows. Hopper's dense products (sm90_grouped_gemm.cu) follow.
//
//   codes, scales, factors of [E, rows, columns] -> [n, rows, columns] in bf16 or f16, of n experts from one on
//
// The grid is some blocks an expert; those of one without rows in this layout write nothing, as nothing reads its
// weights. A thread takes elements by eights, eight of them: a warp reads a line of codes and writes whole sectors. An
// element is code times scale times factor in f32, rounded once, as the portable kernels' gradients have it
// (portable/quantized_operand.cuh). Limited by bytes. Notes: kernels/notes/w4a16.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "quant/eights.cuh"

namespace {
using namespace quant;

constexpr unsigned THREADS = QUANT_THREADS, EACH = DEQUANTIZE_THREAD_EIGHTS, SPAN = DEQUANTIZE_SPAN;

// Matrices that an expert's is made of, one below the other.
struct Parts {
    unsigned count, rows;  // rows of each

    __device__ __forceinline__ explicit Parts(const QuantWeightParams& w)
        : count(static_cast<unsigned>(w.parts)), rows(static_cast<unsigned>(w.rows) / count) {}
    // That of a row, mostly without a division.
    __device__ __forceinline__ unsigned of(unsigned row) const { return count == 1 ? 0u : count == 2 ? row >= rows : row / rows; }
};

// One expert's weights. An eight is named by its number in the matrix, or by its row and its place in this.
template <int FORMAT>
struct Expert {
    const QuantWeightParams& w;
    const int64_t group;
    const unsigned width, count;  // eights of a row, and of all
    const Parts parts;

    __device__ __forceinline__ Expert(const QuantWeightParams& w, int64_t group)
        : w(w), group(group), width(static_cast<unsigned>(w.columns / 8)), count(static_cast<unsigned>(w.rows) * width), parts(w) {}
    __device__ __forceinline__ uint2 codes(unsigned i) const {
        if constexpr (FORMAT == WEIGHT_FP8) return __ldcs(reinterpret_cast<const uint2*>(w.codes) + group * count + i);
        else return {__ldcs(reinterpret_cast<const unsigned*>(w.codes) + group * count + i), 0};
    }
    // Bits of the block's scale.
    __device__ __forceinline__ unsigned scale(unsigned i, unsigned row, unsigned column) const {
        if constexpr (FORMAT == WEIGHT_FP8) {
            // Blocks begin anew with each part.
            const unsigned part = parts.of(row), high = (parts.rows + 127) / 128;
            const int64_t block = (group * parts.count + part) * high + (row - part * parts.rows) / 128;
            return __float_as_uint(static_cast<const float*>(w.scales)[block * w.blocks + column / 16]);
        } else {
            constexpr unsigned EIGHTS = FORMAT == WEIGHT_NVFP4 ? 2 : 4;
            return static_cast<const uint8_t*>(w.scales)[group * (count / EIGHTS) + i / EIGHTS];
        }
    }
    __device__ __forceinline__ float factor(unsigned row) const {
        return w.factors ? w.factors[group * parts.count + parts.of(row)] : 1.0f;
    }
    static __device__ __forceinline__ void decode(float (&v)[8], uint2 codes, unsigned scale, float factor) {
        if constexpr (FORMAT == WEIGHT_FP8) {
            e4m3_values(codes, v);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = e2m1_value(codes.x >> 4 * k);
        }
        const float by = FORMAT == WEIGHT_FP8 ? __uint_as_float(scale) : FORMAT == WEIGHT_NVFP4 ? e4m3_value(scale) : e8m0_value(scale);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(__fmul_rn(v[k], by), factor);
    }
};

template <class T, int FORMAT>
__device__ __forceinline__ void run(const DequantizeExpertsParams& p, const QuantWeightParams& w) {
    const unsigned blocks = static_cast<unsigned>(p.blocks), local = blockIdx.x / blocks;
    if (p.counts[local] <= 0) return;
    const Expert<FORMAT> expert(w, p.first + local);
    const unsigned start = (blockIdx.x - local * blocks) * SPAN + threadIdx.x;
    uint4* out = static_cast<uint4*>(p.out) + static_cast<int64_t>(local) * expert.count;
    // A division for the first eight, none for those that follow.
    unsigned row = start / expert.width, column = start - row * expert.width;
    const unsigned rows = THREADS / expert.width, columns = THREADS - rows * expert.width;
    uint2 codes[EACH];
    unsigned scales[EACH];
    float factors[EACH];
#pragma unroll
    for (unsigned j = 0; j < EACH; j++) {
        const unsigned i = start + j * THREADS;
        codes[j] = make_uint2(0, 0), scales[j] = 0, factors[j] = 0.0f;
        if (i < expert.count) codes[j] = expert.codes(i), scales[j] = expert.scale(i, row, column), factors[j] = expert.factor(row);
        row += rows, column += columns;
        if (column >= expert.width) column -= expert.width, row++;
    }
#pragma unroll
    for (unsigned j = 0; j < EACH; j++) {
        const unsigned i = start + j * THREADS;
        if (i >= expert.count) continue;
        float v[8];
        expert.decode(v, codes[j], scales[j], factors[j]);
        out[i] = pack_eight<T>(v);
    }
}

}  // namespace

#define DEQUANTIZE(name, T, FORMAT)                                                                             \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS)                                                 \
        name(const __grid_constant__ DequantizeExpertsParams p, const __grid_constant__ QuantWeightParams w) {  \
        run<T, FORMAT>(p, w);                                                                                   \
    }

DEQUANTIZE(sm90_dequantize_nvfp4_bf16, bf16, WEIGHT_NVFP4)
DEQUANTIZE(sm90_dequantize_nvfp4_f16, f16, WEIGHT_NVFP4)
DEQUANTIZE(sm90_dequantize_mxfp4_bf16, bf16, WEIGHT_MXFP4)
DEQUANTIZE(sm90_dequantize_mxfp4_f16, f16, WEIGHT_MXFP4)
DEQUANTIZE(sm90_dequantize_fp8_bf16, bf16, WEIGHT_FP8)
DEQUANTIZE(sm90_dequantize_fp8_f16, f16, WEIGHT_FP8)
#endif
