// Rows of a matrix to fp8 blocks: matrix [rows, columns] -> E4M3 codes [rows, columns] and f32 scales
// [rows, ceil(columns / 128)], one for each 128 columns of a row. A last block of a row may be short. Rows of whole
// blocks are limited by bytes.
#include "quant/mxfp8.cuh"

namespace {
using namespace quant;

constexpr int BLOCK = FP8_BLOCK_COLUMNS, EACH = FP8_BLOCK_WARP_BLOCKS, WARPS = QUANT_THREADS / 32;
// No smaller scale is normal; the largest power of two stands for an infinite one, by which infinities and zeros would be divided to NaN.
constexpr float LEAST_SCALE = 0x1p-126f, LARGEST_SCALE = 0x1p127f;
// 1 / 448 in two parts. A quotient by 7 is at least a 14th of its last place from the middle between two floats, and what
// both parts give is off by 2^-23 of it at most: rounded, they are the same.
constexpr float INVERSE_MAX = static_cast<float>(1.0 / 448.0), INVERSE_REST = static_cast<float>(1.0 / 448.0 - INVERSE_MAX);

// Divides N elements of a block by its scale, which it returns, without a division: codes are those of quotients that are
// rounded right. `most`: bits of the block's largest magnitude, NaN left out.
//
// With r = 1 / scale and q = v r, both rounded, the result is q - (q scale - v) r, rounded once. This and the quotient can
// have different codes only where v / scale lies beside a middle of two floats, one of which is a middle of two codes (but
// not between 2^-10 and the float below: both are code zero). Let f and S be the significands of quotient and scale, from
// 1 to 2, and a unit the quotient's last place. Then
// - f is at most 31/16. r scale is off one by S 2^-25 at most, so v r is off by f S / 4 units, less than one: q is one of
//   the two floats, half a unit off, and q scale - v is exact;
// - so what is rounded at last is off by S 2^-26 units. But v / scale, of 24 bits each, is 2^-24 / S units from any
//   middle, or more; and this is the larger, as S < 2. (Markstein's theorem, which asks for q at most a unit off.)
// Of quotients from 2^-11 on, the last place of q scale is 2^-57 of the scale's power of two or more: blocks below 2^-80
// are taken by 2^64 first, so that nothing underflows. Smaller quotients, which may, stay below 2^-10 and are code zero;
// they keep the sign of v, and so does a zero: q minus a remainder of +0 is q, of -0 too.
template <int N>
__device__ __forceinline__ float divide(float (&v)[N], unsigned most) {
    if (most == 0x7f800000u) {
        // By a power of two, in one rounding: an infinity's remainder would be NaN.
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = __fmul_rn(v[k], 1.0f / LARGEST_SCALE);
        return LARGEST_SCALE;
    }
    const bool tiny = most < (127u - 80) << 23;
    const float up = tiny ? 0x1p64f : 1.0f, down = tiny ? 0x1p-64f : 1.0f;
    if (tiny) {
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = __fmul_rn(v[k], 0x1p64f);
    }
    const float amax = __fmul_rn(__uint_as_float(most), up);
    const float scale = fmaxf(__fmaf_rn(amax, INVERSE_MAX, __fmul_rn(amax, INVERSE_REST)), __fmul_rn(LEAST_SCALE, up));
    const float r = __frcp_rn(scale);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const float q = __fmul_rn(v[k], r);
        v[k] = __fmaf_rn(__fmaf_rn(q, scale, -v[k]), -r, q);
    }
    return __fmul_rn(scale, down);
}

__device__ __forceinline__ unsigned codes4(const float* q) { return e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16; }

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

// Of any matrix. A warp takes EACH blocks, four elements a lane.
template <class T>
__device__ __forceinline__ void cast(const QuantCastParams& p) {
    const StridedMatrix& m = p.matrix;
    const QuantSide& side = p.rows;
    const int64_t wide = (m.columns + BLOCK - 1) / BLOCK, all = m.rows * wide;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * EACH * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float v[EACH][4];
    int64_t rows[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = min(first + j * WARPS, all - 1);
        rows[j] = quotient(i, wide);
        load<T>(m, rows[j], (i - rows[j] * wide) * BLOCK + lane * 4, v[j]);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * WARPS;
        if (i >= all) return;
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) most = mxfp8::join(most, v[j][k], false);
        const float scale = divide(v[j], __reduce_max_sync(~0u, most));
        const int64_t column = (i - rows[j] * wide) * BLOCK + lane * 4;
        store_bytes(side.codes + rows[j] * side.code_bytes + column, codes4(v[j]), m.columns - column);
        if (lane == 0) store_bytes(side.scales + i * 4, __float_as_uint(scale), 4);
    }
}

// Of a matrix without gaps whose rows are whole blocks, to codes and scales of whole words: the place of a block's eighth,
// which a thread takes, follows from its number.
template <class T>
__device__ __forceinline__ void cast_rows(const QuantCastParams& p) {
    constexpr int PARTS = CAST_THREAD_BYTES / 16 / sizeof(T), THREADS = QUANT_THREADS;
    const QuantSide& side = p.rows;
    const int64_t all = p.matrix.rows * p.matrix.columns / 16, first = static_cast<int64_t>(blockIdx.x) * PARTS * THREADS + threadIdx.x;
    Block<T> parts[PARTS] = {};
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        const int64_t i = first + j * THREADS;
        if (i < all) parts[j].load(static_cast<const T*>(p.matrix.base) + i * 16);
    }
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        const int64_t i = first + j * THREADS;
        float v[16];
        parts[j].widen(v);
        unsigned most = __float_as_uint(parts[j].magnitude());
        if (most > 0x7f800000u) {
            most = 0;
#pragma unroll
            for (int k = 0; k < 16; k++) most = mxfp8::join(most, v[k], false);
        }
#pragma unroll
        for (int by = 1; by < BLOCK / 16; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
        const float scale = divide(v, most);
        if (i >= all) continue;
        *reinterpret_cast<uint4*>(side.codes + i * 16) = make_uint4(codes4(v), codes4(v + 4), codes4(v + 8), codes4(v + 12));
        if (i % 8 == 0) reinterpret_cast<float*>(side.scales)[i / 8] = scale;
    }
}

}  // namespace

#define CAST(name, T, OF) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { OF<T>(p); }

CAST(fp8_block_bf16, bf16, cast)
CAST(fp8_block_f16, f16, cast)
CAST(fp8_block_f32, float, cast)
CAST(fp8_block_rows_bf16, bf16, cast_rows)
CAST(fp8_block_rows_f16, f16, cast_rows)
CAST(fp8_block_rows_f32, float, cast_rows)
