// A matrix to NVFP4 with its amaxes given, in one or both directions: a block brings a panel of it to shared memory
// once, and its threads take blocks of 16 along rows, then down columns.
#include "quant/quantize.cuh"

namespace {
using namespace quant;

// Codes and scales of columns, on their way out: a column's lie together in memory, and are written from here.
constexpr int CODES = SmemPanel<bf16>::ROWS / 2 + 16, SCALES = SmemPanel<bf16>::ROWS / 16;

struct SharedStorage {
    unsigned char panel[SmemPanel<bf16>::BYTES];
    unsigned tiles[8][8];
    // From here on only where columns are wanted.
    alignas(16) unsigned char codes[128 * CODES];
    unsigned char scales[128 * SCALES];
};

__device__ __forceinline__ uint4 random_of(const QuantCastParams& p, const QuantSide& side, int64_t line, int64_t block, unsigned direction) {
    const uint4 counter = make_uint4(static_cast<unsigned>(side.first_block + block), static_cast<unsigned>(side.first_line + line),
                                     direction, static_cast<unsigned>(p.stream));
    return philox(counter, p.keys);
}

// Largest magnitude of each 16 x 16 tile of the panel: four threads a tile.
template <class T>
__device__ __forceinline__ void measure(const SmemPanel<T>& panel, SharedStorage& s) {
    constexpr int WIDE = SmemPanel<T>::COLUMNS / 16;
    const int tile = threadIdx.x / 4;
    if (tile >= WIDE * 8) return;  // whole warps
    unsigned most = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float v[16];
        panel.along(v, tile / WIDE * 16 + threadIdx.x % 4 * 4 + r, tile % WIDE * 16);
        most = max(most, __float_as_uint(magnitude(v)));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    if (threadIdx.x % 4 == 0) s.tiles[tile / WIDE][tile % WIDE] = most;
}

template <class T, int MODE>
__device__ __forceinline__ void along_rows(const QuantCastParams& p, const SmemPanel<T>& panel, SharedStorage& s, int64_t row, int64_t column) {
    constexpr int WIDE = SmemPanel<T>::COLUMNS / 16;
    const QuantSide& side = p.rows;
    const bool aligned = words_of(side.codes, side.code_bytes, 8);
    Factors<MODE> factors(p.by_line ? 0.0f : *side.amax);
#pragma unroll 1
    for (int i = threadIdx.x; i < SmemPanel<T>::ROWS * WIDE; i += SmemPanel<T>::THREADS) {
        const int64_t line = row + i / WIDE, block = column / 16 + i % WIDE;
        if (line >= p.matrix.rows || block >= side.blocks) continue;
        float v[16];
        panel.along(v, i / WIDE, i % WIDE * 16);
        if (p.by_line) factors = Factors<MODE>(side.amax[line]);
        const float most = MODE == TILED ? __uint_as_float(s.tiles[i / WIDE / 16][i % WIDE]) : magnitude(v);
        const unsigned scale = factors.scale(most);
        const uint4 random = MODE == STOCHASTIC ? random_of(p, side, line, block, 0) : make_uint4(0, 0, 0, 0);
        const uint2 codes = factors.template encode<T>(v, most, scale, random);
        side.scales[line * side.blocks + block] = static_cast<uint8_t>(scale);
        store8(side.codes + line * side.code_bytes + block * 8, codes, side.code_bytes - block * 8, aligned);
    }
}

template <class T, int MODE>
__device__ __forceinline__ void down_columns(const QuantCastParams& p, const SmemPanel<T>& panel, SharedStorage& s, int64_t row, int64_t column) {
    constexpr int WORDS = SmemPanel<T>::COLUMNS / SmemPanel<T>::EACH, HIGH = SmemPanel<T>::ROWS / 16;
    const QuantSide& side = p.columns;
    Factors<MODE> factors(p.by_line ? 0.0f : *side.amax);
#pragma unroll 1
    for (int i = threadIdx.x; i < WORDS * HIGH; i += SmemPanel<T>::THREADS) {
        const int first = i % WORDS * SmemPanel<T>::EACH, high = i / WORDS;
        float v[SmemPanel<T>::EACH][16];
        panel.down(v, high * 16, first);
#pragma unroll
        for (int c = 0; c < SmemPanel<T>::EACH; c++) {
            const int64_t line = column + first + c, block = row / 16 + high;
            if (p.by_line) factors = Factors<MODE>(line < p.matrix.columns ? side.amax[line] : 0.0f);
            if constexpr (sizeof(T) == 2 && (MODE == TE || MODE == STOCHASTIC)) {
                if (p.signs >= 0) hadamard(v[c], static_cast<unsigned>(p.signs));
            }
            const float most = MODE == TILED ? __uint_as_float(s.tiles[high][(first + c) / 16]) : magnitude(v[c]);
            const unsigned scale = factors.scale(most);
            const uint4 random = MODE == STOCHASTIC ? random_of(p, side, line, block, 1) : make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint2*>(s.codes + (first + c) * CODES + high * 8) = factors.template encode<T>(v[c], most, scale, random);
            s.scales[(first + c) * SCALES + high] = static_cast<uint8_t>(scale);
        }
    }
    __syncthreads();
    // Out: pieces of 8 bytes, those of a column by neighboring threads.
    const bool aligned = words_of(side.codes, side.code_bytes, 8);
    for (int i = threadIdx.x; i < SmemPanel<T>::COLUMNS * HIGH; i += SmemPanel<T>::THREADS) {
        const int64_t line = column + i / HIGH, block = row / 16 + i % HIGH;
        if (line >= p.matrix.columns || block >= side.blocks) continue;
        const uint2 word = *reinterpret_cast<const uint2*>(s.codes + i / HIGH * CODES + i % HIGH * 8);
        store8(side.codes + line * side.code_bytes + block * 8, word, side.code_bytes - block * 8, aligned);
        side.scales[line * side.blocks + block] = s.scales[i / HIGH * SCALES + i % HIGH];
    }
}

template <class T, int MODE>
__device__ __forceinline__ void cast(const QuantCastParams& p) {
    extern __shared__ __align__(16) unsigned char memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    const SmemPanel<T> panel{s.panel};
    int64_t row, column;
    place<T>(p.matrix, row, column);
    panel.load(p.matrix, row, column);
    __syncthreads();
    if (MODE == TILED) {
        measure(panel, s);
        __syncthreads();
    }
    if (p.rows.codes) along_rows<T, MODE>(p, panel, s, row, column);
    if (p.columns.codes) down_columns<T, MODE>(p, panel, s, row, column);
}

// Rows alone, of a matrix without gaps whose rows are whole blocks, with one amax: a block's place follows from its
// number.
template <class T, int MODE>
__device__ __forceinline__ void cast_rows(const QuantCastParams& p) {
    constexpr int EACH = CAST_THREAD_BYTES / 16 / sizeof(T), THREADS = QUANT_THREADS;
    const QuantSide& side = p.rows;
    const int64_t all = p.matrix.rows * side.blocks, first = static_cast<int64_t>(blockIdx.x) * EACH * THREADS + threadIdx.x;
    Block<T> blocks[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * THREADS;
        if (i < all) blocks[j].load(static_cast<const T*>(p.matrix.base) + i * 16);
    }
    const Factors<MODE> factors(*side.amax);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int64_t i = first + j * THREADS;
        if (i >= all) return;
        float v[16];
        blocks[j].widen(v);
        const float most = blocks[j].magnitude();
        const unsigned scale = factors.scale(most);
        uint4 random = make_uint4(0, 0, 0, 0);
        if (MODE == STOCHASTIC) {
            // As 32-bit numbers: the host knows that they are.
            const unsigned line = static_cast<unsigned>(i) / static_cast<unsigned>(side.blocks);
            random = random_of(p, side, line, static_cast<unsigned>(i) - line * static_cast<unsigned>(side.blocks), 0);
        }
        *reinterpret_cast<uint2*>(side.codes + i * 8) = factors.template encode<T>(v, most, scale, random, MODE == STOCHASTIC ? blocks[j].words : nullptr);
        side.scales[i] = static_cast<uint8_t>(scale);
    }
}

// Rows alone in 16 x 16 tiles, of a matrix without gaps of whole tiles and a multiple of 64 columns. A warp has 16 rows
// of 64 columns, 8 lanes a row, so that a line of memory is one load; a thread's four rows are of one tile.
template <class T>
__device__ __forceinline__ void cast_tiles(const QuantCastParams& p) {
    static_assert(32 * NVFP4_TILED_THREAD_BLOCKS == 16 * 64 / 16, "a warp has 16 rows of 64 columns");
    const QuantSide& side = p.rows;
    const unsigned wide = static_cast<unsigned>(p.matrix.columns / 64), unit = blockIdx.x * (QUANT_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = static_cast<int64_t>(unit / wide) * 16 + lane / 8, column = unit % wide * 64 + lane % 8 * 8;
    if (row >= p.matrix.rows) return;  // whole warps
    uint4 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = __ldcs(reinterpret_cast<const uint4*>(static_cast<const T*>(p.matrix.base) + (row + j * 4) * p.matrix.columns + column));
    const Factors<TILED> factors(*side.amax);
    unsigned pairs = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        pairs = __vimax3_u16x2(pairs, words[j].x & 0x7fff7fffu, words[j].y & 0x7fff7fffu);
        pairs = __vimax3_u16x2(pairs, words[j].z & 0x7fff7fffu, words[j].w & 0x7fff7fffu);
    }
#pragma unroll
    for (int d = 1; d < 32; d = d == 1 ? 8 : d * 2) pairs = __vmaxu2(pairs, __shfl_xor_sync(~0u, pairs, d));
    const unsigned short half = static_cast<unsigned short>(max(pairs & 0xffffu, pairs >> 16));
    const float most = to_float(*reinterpret_cast<const T*>(&half));
    const unsigned scale = factors.scale(most);
    const bool nan = (scale & 0x7fu) == 0x7fu;
    const float factor = factors.factor(scale);
    const bool narrow = __fmul_rn(most, factor) < 7.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float y[8];
        widen<T>(y, words[j]);
#pragma unroll
        for (int k = 0; k < 8; k++) y[k] = __fmul_rn(y[k], factor);
        unsigned codes = 0;
        if (!nan) codes = narrow ? e2m1_nearest8<false>(y) : e2m1_nearest8(y);
        *reinterpret_cast<unsigned*>(side.codes + (row + j * 4) * side.code_bytes + column / 2) = codes;
        if (lane % 2 == 0) side.scales[(row + j * 4) * side.blocks + column / 16] = static_cast<uint8_t>(scale);
    }
}

}  // namespace

#define CAST_TILES(name, T) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast_tiles<T>(p); }
#define CAST_ROWS(name, T, MODE) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast_rows<T, MODE>(p); }
#define CAST(name, T, MODE) \
    extern "C" __global__ void __launch_bounds__(QUANT_THREADS) name(const __grid_constant__ QuantCastParams p) { cast<T, MODE>(p); }
#define CASTS(type, T)                            \
    CAST(nvfp4_te_##type, T, TE)                  \
    CAST(nvfp4_stochastic_##type, T, STOCHASTIC)  \
    CAST(nvfp4_tiled_##type, T, TILED)            \
    CAST(nvfp4_modelopt_##type, T, MODELOPT)      \
    CAST_ROWS(nvfp4_rows_te_##type, T, TE)        \
    CAST_ROWS(nvfp4_rows_stochastic_##type, T, STOCHASTIC) \
    CAST_ROWS(nvfp4_rows_modelopt_##type, T, MODELOPT)

CASTS(bf16, bf16)
CASTS(f16, f16)
CASTS(f32, float)
CAST_TILES(nvfp4_rows_tiled_bf16, bf16)
CAST_TILES(nvfp4_rows_tiled_f16, f16)

static_assert(sizeof(SharedStorage) == NVFP4_CAST_COLUMNS_SMEM && offsetof(SharedStorage, codes) == NVFP4_CAST_SMEM, "common/shapes.h has others");
