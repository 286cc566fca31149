// A matrix to MXFP8: E4M3 in blocks of 32 along rows, down columns, or 32 x 32, with an E8M0 scale each. Codes keep the
// matrix's shape in both directions.
#include "quant/mxfp8.cuh"

namespace {
using namespace quant;
using namespace mxfp8;

struct SharedStorage {
    unsigned char panel[SmemPanel<bf16>::BYTES];
    unsigned tiles[4][4];
};

// Largest magnitude of each 32 x 32 tile: a warp row by row.
template <class T>
__device__ __forceinline__ void measure(const SmemPanel<T>& panel, SharedStorage& s, bool floor) {
    constexpr int WIDE = SmemPanel<T>::COLUMNS / 32;
    for (int tile = threadIdx.x / 32; tile < WIDE * 4; tile += SmemPanel<T>::THREADS / 32) {
        unsigned most = 0;
        for (int r = 0; r < 32; r++) most = join(most, to_float(*panel.element(tile / WIDE * 32 + r, tile % WIDE * 32 + threadIdx.x % 32)), floor);
        most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0) s.tiles[tile / WIDE][tile % WIDE] = most;
    }
}

// Half a block a thread.
template <class T, bool TILED>
__device__ __forceinline__ void along_rows(const QuantCastParams& p, const SmemPanel<T>& panel, SharedStorage& s, int64_t row, int64_t column) {
    constexpr int WIDE = SmemPanel<T>::COLUMNS / 16;
    const QuantSide& side = p.rows;
    const bool floor = p.floor, aligned = side.code_bytes % 8 == 0;
    for (int i = threadIdx.x; i < SmemPanel<T>::ROWS * WIDE; i += SmemPanel<T>::THREADS) {
        const int r = i / WIDE, half = i % WIDE;
        const int64_t line = row + r, at = column + half * 16;
        float v[16];
        panel.along(v, r, half * 16);
        unsigned most = 0;
#pragma unroll
        for (int k = 0; k < 16; k++) most = join(most, v[k], floor);
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        if (TILED) most = s.tiles[r / 32][half / 2];
        const unsigned scale = scale_of(most, floor);
        const float factor = factor_of(scale, floor);
        unsigned words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) words[k] = codes4(v + 4 * k, factor);
        if (line >= p.matrix.rows || at >= p.matrix.columns) continue;
        uint8_t* to = side.codes + line * side.code_bytes + at;
        store8(to, make_uint2(words[0], words[1]), side.code_bytes - at, aligned);
        store8(to + 8, make_uint2(words[2], words[3]), side.code_bytes - at - 8, aligned);
        if (half % 2 == 0) side.scales[line * side.blocks + at / 32] = static_cast<uint8_t>(scale);
    }
}

template <class T, bool TILED>
__device__ __forceinline__ void down_columns(const QuantCastParams& p, const SmemPanel<T>& panel, SharedStorage& s, int64_t row, int64_t column) {
    constexpr int EACH = SmemPanel<T>::EACH, WORDS = SmemPanel<T>::COLUMNS / EACH;
    const QuantSide& side = p.columns;
    const bool floor = p.floor;
    for (int i = threadIdx.x; i < WORDS * 4; i += SmemPanel<T>::THREADS) {
        const int first = i % WORDS * EACH, high = i / WORDS;
        float v[EACH][32];
        panel.down(v, high * 32, first);
        unsigned codes[EACH][8], scales[EACH];
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            unsigned most = 0;
#pragma unroll
            for (int k = 0; k < 32; k++) most = join(most, v[c][k], floor);
            if (TILED) most = s.tiles[high][(first + c) / 32];
            scales[c] = scale_of(most, floor);
            const float factor = factor_of(scales[c], floor);
#pragma unroll
            for (int k = 0; k < 8; k++) codes[c][k] = codes4(v[c] + 4 * k, factor);
        }
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const int64_t j = column + first + c;
            if (j >= p.matrix.columns || row + high * 32 >= p.matrix.rows) continue;
            side.scales[(row / 32 + high) * p.matrix.columns + j] = static_cast<uint8_t>(scales[c]);
        }
        const int64_t j = column + first, top = row + high * 32;
        const bool pair = EACH == 2 && side.code_bytes % 2 == 0 && j + 1 < p.matrix.columns;
#pragma unroll
        for (int k = 0; k < 32; k++) {
            if (top + k >= p.matrix.rows) break;
            uint8_t* to = side.codes + (top + k) * side.code_bytes + j;
            if (pair) {
                *reinterpret_cast<unsigned short*>(to) =
                    static_cast<unsigned short>((codes[0][k / 4] >> 8 * (k % 4) & 0xffu) | (codes[EACH - 1][k / 4] >> 8 * (k % 4) & 0xffu) << 8);
                continue;
            }
#pragma unroll
            for (int c = 0; c < EACH; c++) if (j + c < p.matrix.columns) to[c] = static_cast<uint8_t>(codes[c][k / 4] >> 8 * (k % 4));
        }
    }
}

template <class T, bool TILED>
__device__ __forceinline__ void cast(const QuantCastParams& p) {
    __shared__ __align__(16) SharedStorage s;
    const SmemPanel<T> panel{s.panel};
    int64_t row, column;
    place<T>(p.matrix, row, column);
    panel.load(p.matrix, row, column);
    __syncthreads();
    if (TILED) {
        measure(panel, s, p.floor);
        __syncthreads();
    }
    if (p.rows.codes) along_rows<T, TILED>(p, panel, s, row, column);
    if (p.columns.codes) down_columns<T, TILED>(p, panel, s, row, column);
}

// Rows alone, of a matrix without gaps whose rows are whole blocks: half a block's place follows from its number.
template <class T>
__device__ __forceinline__ void cast_rows(const QuantCastParams& p) {
    constexpr int EACH = CAST_THREAD_BYTES / 16 / sizeof(T), THREADS = QUANT_THREADS;
    const QuantSide& side = p.rows;
    const bool floor = p.floor;
    const int64_t all = p.matrix.rows * p.matrix.columns / 16, first = static_cast<int64_t>(blockIdx.x) * EACH * THREADS + threadIdx.x;
    Block<T> blocks[EACH] = {};
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * THREADS;
        if (i < all) blocks[j].load(static_cast<const T*>(p.matrix.base) + i * 16);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * THREADS;
        float v[16];
        blocks[j].widen(v);
        unsigned most = __float_as_uint(blocks[j].magnitude());
        if (!floor && most > 0x7f800000u) {
            most = 0;
#pragma unroll
            for (int k = 0; k < 16; k++) most = join(most, v[k], false);
        }
        most = max(most, __shfl_xor_sync(~0u, most, 1));
        const unsigned scale = scale_of(most, floor);
        const float factor = factor_of(scale, floor);
        if (i >= all) continue;
        *reinterpret_cast<uint4*>(side.codes + i * 16) =
            make_uint4(codes4(v, factor), codes4(v + 4, factor), codes4(v + 8, factor), codes4(v + 12, factor));
        if (i % 2 == 0) side.scales[i / 2] = static_cast<uint8_t>(scale);
    }
}

}  // namespace

#define CAST(name, T, TILED) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast<T, TILED>(p); }

CAST(mxfp8_bf16, bf16, false)
CAST(mxfp8_f16, f16, false)
CAST(mxfp8_f32, float, false)
CAST(mxfp8_tiled_bf16, bf16, true)
CAST(mxfp8_tiled_f16, f16, true)
CAST(mxfp8_tiled_f32, float, true)

#define CAST_ROWS(name, T) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast_rows<T>(p); }

CAST_ROWS(mxfp8_rows_bf16, bf16)
CAST_ROWS(mxfp8_rows_f16, f16)
CAST_ROWS(mxfp8_rows_f32, float)
