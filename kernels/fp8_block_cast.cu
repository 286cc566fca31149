// Rows of a matrix to fp8 blocks: matrix [rows, columns] -> E4M3 codes [rows, columns] and f32 scales
// [rows, ceil(columns / 128)], one for each 128 columns of a row. A warp takes FP8_BLOCK_WARP_BLOCKS blocks, four elements
// a lane; a last block of a row may be short. Limited by bytes; each element costs a division.
#include "quant/mxfp8.cuh"

namespace {
using namespace quant;

constexpr int BLOCK = FP8_BLOCK_COLUMNS, EACH = FP8_BLOCK_WARP_BLOCKS, WARPS = QUANT_THREADS / 32;
// No smaller scale is normal; the largest power of two stands for an infinite one, by which infinities and zeros would be divided to NaN.
constexpr float LEAST_SCALE = 0x1p-126f, LARGEST_SCALE = 0x1p127f;

// A lane's elements of a block: zeros past the row's end.
template <class T>
__device__ __forceinline__ void load(const StridedMatrix& m, int64_t row, int64_t column, float (&v)[4]) {
    const T* from = static_cast<const T*>(m.base) + row * m.row_stride;
    if (m.vector) {
        // Rows of whole words of 16 bytes end with a lane's elements.
        using Word = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
        Word word{};
        if (column < m.columns) word = __ldcs(reinterpret_cast<const Word*>(from + column));
        const T* values = reinterpret_cast<const T*>(&word);
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = to_float(values[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = column + k < m.columns ? to_float(from[(column + k) * m.column_stride]) : 0.0f;
}

// So many bytes of a word, which may lie anywhere.
__device__ __forceinline__ void store_bytes(uint8_t* to, unsigned word, int64_t bytes) {
    if (bytes >= 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
        *reinterpret_cast<unsigned*>(to) = word;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) if (k < bytes) to[k] = static_cast<uint8_t>(word >> 8 * k);
}

template <class T>
__device__ __forceinline__ void cast(const QuantCastParams& p) {
    const StridedMatrix& m = p.matrix;
    const QuantSide& side = p.rows;
    const int64_t wide = (m.columns + BLOCK - 1) / BLOCK, all = m.rows * wide;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * EACH * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float v[EACH][4];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = min(first + j * WARPS, all - 1), row = quotient(i, wide);
        load<T>(m, row, (i - row * wide) * BLOCK + lane * 4, v[j]);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * WARPS;
        if (i >= all) return;
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) most = mxfp8::join(most, v[j][k], false);
        most = __reduce_max_sync(~0u, most);
        const float scale = fminf(fmaxf(__fdiv_rn(__uint_as_float(most), E4M3_MAX), LEAST_SCALE), LARGEST_SCALE);
        const int64_t row = quotient(i, wide), column = (i - row * wide) * BLOCK + lane * 4;
        const unsigned low = e4m3_pair(__fdiv_rn(v[j][0], scale), __fdiv_rn(v[j][1], scale));
        const unsigned high = e4m3_pair(__fdiv_rn(v[j][2], scale), __fdiv_rn(v[j][3], scale));
        store_bytes(side.codes + row * side.code_bytes + column, low | high << 16, m.columns - column);
        if (lane == 0) store_bytes(side.scales + i * 4, __float_as_uint(scale), 4);
    }
}

}  // namespace

#define CAST(name, T) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast<T>(p); }

CAST(fp8_block_bf16, bf16)
CAST(fp8_block_f16, f16)
CAST(fp8_block_f32, float)
