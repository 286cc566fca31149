// Quantized weights as the right operand of the portable products: eight neighboring columns of a weight row are
// brought as codes, and leave for shared memory as T. Code times block scale is exact in T (FP4); the factor above it
// is applied to the sums where it is the same for a whole column, else to the elements.
#pragma once
#include "portable/gemm.cuh"
#include "quant/quantize.cuh"

namespace quant {

// Eight codes and what they are multiplied by.
struct CodeGroup {
    uint2 codes;
    float scale;
};

template <int FORMAT>
__device__ __forceinline__ CodeGroup load_codes(const QuantWeightParams& w, int64_t group, int64_t row, int64_t column) {
    const int64_t line = group * w.rows + row;
    if constexpr (FORMAT == WEIGHT_FP8) {
        // Blocks begin anew with each part.
        const int64_t each = w.rows / w.parts, high = (each + 127) / 128;
        const int64_t block = (group * w.parts + row / each) * high + row % each / 128;
        const uint2 codes = *reinterpret_cast<const uint2*>(w.codes + line * w.code_bytes + column);
        return {codes, static_cast<const float*>(w.scales)[block * w.blocks + column / 128]};
    } else {
        constexpr int BLOCK = FORMAT == WEIGHT_NVFP4 ? 16 : 32;
        const unsigned codes = *reinterpret_cast<const unsigned*>(w.codes + line * w.code_bytes + column / 2);
        const unsigned scale = static_cast<const uint8_t*>(w.scales)[line * w.blocks + column / BLOCK];
        return {{codes, 0}, FORMAT == WEIGHT_NVFP4 ? e4m3_value(scale) : e8m0_value(scale)};
    }
}

// Element i of eight.
template <int FORMAT>
__device__ __forceinline__ float element(const CodeGroup& e, int i) {
    if (FORMAT == WEIGHT_FP8) return e4m3_value((i < 4 ? e.codes.x : e.codes.y) >> i % 4 * 8 & 0xffu) * e.scale;
    return e2m1_value(e.codes.x >> 4 * i) * e.scale;
}

__device__ __forceinline__ float factor_of(const QuantWeightParams& w, int64_t group, int64_t row) {
    return w.factors ? w.factors[group * w.parts + row / (w.rows / w.parts)] : 1.0f;
}

template <class T, int KIND, int FORMAT>
struct MmaSyncOperand {
    static constexpr bool MN_MAJOR = OperandMajor<KIND>::b_mn_major;
    static constexpr int ACROSS = (MN_MAJOR ? mma_sync::BLOCK_N : mma_sync::BLOCK_K) / 8;  // chunks of a row of a stage
    const GemmParams& p;
    const QuantWeightParams& w;
    const Tile& t;
    int64_t k_count;
    int64_t row[2];     // weight row of a chunk: of its column (-1 past the last), or the first of the stage's
    int64_t column[2];  // weight column: the first of the stage's, or of its columns (-1)
    CodeGroup codes[2];
    float scale[2];     // MN_MAJOR: the factor of the chunk's row

    __device__ __forceinline__ MmaSyncOperand(const GemmParams& p, const Tile& t, int64_t, int64_t k_count, const QuantWeightParams& w)
        : p(p), w(w), t(t), k_count(k_count) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * mma_sync::THREADS, r = id / ACROSS, c = id % ACROSS * 8;
            const int64_t n = t.n_tile * mma_sync::BLOCK_N + c;
            row[i] = MN_MAJOR ? r : tile_column(p, KIND, mma_sync::BLOCK_N, t.n_tile, r);
            column[i] = !MN_MAJOR ? c : n < p.n ? n : -1;
        }
    }
    __device__ __forceinline__ void load(int64_t k0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t r = MN_MAJOR ? k0 + row[i] : row[i], c = MN_MAJOR ? column[i] : k0 + column[i];
            const bool inside = MN_MAJOR ? r < k_count && c >= 0 : r >= 0 && c < k_count;
            codes[i] = {{0, 0}, 0.0f}, scale[i] = 1.0f;
            if (!inside) continue;
            codes[i] = load_codes<FORMAT>(w, t.group, r, c);
            if (MN_MAJOR) scale[i] = factor_of(w, t.group, r);
        }
    }
    __device__ __forceinline__ void store(T* shared) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * mma_sync::THREADS, r = id / ACROSS, c = id % ACROSS * 8;
            alignas(16) T out[8];
#pragma unroll
            for (int k = 0; k < 8; k++) out[k] = from_float<T>(MN_MAJOR ? element<FORMAT>(codes[i], k) * scale[i] : element<FORMAT>(codes[i], k));
            *reinterpret_cast<uint4*>(shared + r * (MN_MAJOR ? mma_sync::LD_MN : mma_sync::LD_K) + c) = *reinterpret_cast<const uint4*>(out);
        }
    }
    __device__ __forceinline__ float factor(int column) const {
        if (MN_MAJOR) return 1.0f;
        const int64_t n = tile_column(p, KIND, mma_sync::BLOCK_N, t.n_tile, column);
        return n < 0 ? 1.0f : factor_of(w, t.group, n);
    }
};

template <int KIND, int FORMAT>
struct SimtOperand {
    const QuantWeightParams& w;
    const int64_t group;

    __device__ __forceinline__ SimtOperand(const GemmParams&, const Tile& t, const QuantWeightParams& w) : w(w), group(t.group) {}
    __device__ __forceinline__ float at(int64_t k, int64_t n) const {
        const int64_t row = OperandMajor<KIND>::b_mn_major ? k : n, column = OperandMajor<KIND>::b_mn_major ? n : k;
        const CodeGroup e = load_codes<FORMAT>(w, group, row, column / 8 * 8);
        const int i = static_cast<int>(column % 8);
        float v = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) v = i == j ? element<FORMAT>(e, j) : v;
        return v * factor_of(w, group, row);
    }
};

}  // namespace quant
