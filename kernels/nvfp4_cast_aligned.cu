// Columns of a matrix to NVFP4, or both directions of it: elements of 16 bits, rows and columns multiples of 128, one
// amax, recipe `te`, to nearest, stochastically or in 16 x 16 tiles (whose directions hold the same codes).
// `nvfp4_cast.cu` has all other cases.
//
// A block has 256 rows of 512 columns, as four slabs (256 rows of 128 columns) one beside another; a warp 64 rows of 64
// columns of each, 16 rows at a time: it brings the next to its own part of shared memory while it encodes these. Rows'
// codes leave at once; columns' as whole lines of memory when the slab is done; scales when the block is. What limits:
// bytes, and how they are written; both directions stochastically, issue and the integer pipe
// (`kernels/notes/quantization.md`).
//
// Grid: blocks of 256 threads, a block 256 x 512 elements, the last of each direction in part. In: the matrix, amaxes.
// Out: codes of rows [rows, columns / 2] and columns [columns, rows / 2], scales [rows, columns / 16] and [columns,
// rows / 16]; rows' may be missing.
#include "quant/e2m1_rounding.cuh"
#include <cstddef>

namespace {
using namespace quant;

constexpr int THREADS = QUANT_THREADS, WARPS = THREADS / 32;
constexpr int SLABS = 4, ACROSS = 2, HIGH = WARPS / ACROSS * 64, WIDE = ACROSS * 64;  // a slab's warps, rows, columns
// Bytes from a row to the next, of codes from a column's to the next's, and of scales: few lanes meet on a bank.
constexpr int PITCH = 144, UNIT = 16 * PITCH, CODES = HIGH / 2 + 8, ROW_SCALES = SLABS * WIDE / 16 + 8, COLUMN_SCALES = HIGH / 16;
using OpaqueConstants = quant::OpaqueConstants<THREADS>;

// Parts of memory that a warp has room for, one of which it encodes, and blocks an SM. Where random bits are made
// it is instructions that more warps hide; where not, memory, which more bytes under way do.
template <int MODE>
struct KernelConfig {
    static constexpr int STAGES = MODE == STOCHASTIC ? 2 : 3, BLOCKS = MODE == STOCHASTIC ? 3 : 2;
};

template <int STAGES>
struct SharedStorage {
    alignas(16) unsigned char stage[WARPS][STAGES][UNIT];
    alignas(8) unsigned char codes[WIDE * CODES];  // columns', of a slab
    alignas(8) unsigned char row_scales[HIGH * ROW_SCALES], column_scales[SLABS * WIDE * COLUMN_SCALES];
    float factors[2][256];  // by scale, of rows and of columns; those of an amax below zero have their sign set
    float to_scale[2];  // what a block's largest is multiplied by for its scale, of rows and of columns
    unsigned mantissas[2][8];
};

// Whether factors are made for f16's sums (`nudge`).
template <class T>
constexpr bool NUDGED =
#ifdef MOEBIUS_CVT_E2M1
    false;
#else
    std::is_same<T, bf16>::value;
#endif

// Factors of the blocks of each scale, in the units of `nearest8` or `stochastic8_small`; NaN where they take the
// long way: of factors below 2^-16 products may be rounded to zero. True where stochastic rounding needs `finer`: for
// bf16 where a product of one of eight mantissas, which all scales have, is `just_below`, as it is for half of the
// amaxes that bf16 has. By all threads.
template <class T, int MODE, class SharedStorage>
__device__ __forceinline__ bool tabulate_factors(const QuantCastParams& p, SharedStorage& s, unsigned thread) {
    constexpr bool MANTISSAS = MODE == STOCHASTIC && std::is_same<T, bf16>::value;
    bool needs_finer = MODE == STOCHASTIC && !MANTISSAS;
    if (MANTISSAS) {
        bool below = false;
#pragma unroll 1
        for (int i = thread / 32; i < 16; i += WARPS) {
            const QuantSide& of = i / 8 ? p.columns : p.rows;
            if (!of.codes) continue;
            const float factor = Factors<MODE>(*of.amax).factor(0x38 + i % 8);  // of 1 and its eighths
#pragma unroll
            for (int k = 0; k < 4; k++) below |= just_below(factor, 128 + k * 32 + thread % 32);
            s.mantissas[i / 8][i % 8] = __float_as_uint(factor) & 0x7fffffu;
        }
        needs_finer = __syncthreads_or(below);
    }
    const int which = thread / 128, scale = thread % 128;
    const QuantSide& side = which ? p.columns : p.rows;
    if (!side.codes) return needs_finer;
    const Factors<MODE> factors(*side.amax);
    const float factor = factors.factor(scale);
    float entry = MODE == STOCHASTIC ? __fmul_rn(factor, 0x1p-14f) : NUDGED<T> ? __fmul_rn(nudge(factor), NUDGED_SCALE) : factor;
    bool fits = factor >= 0x1p-16f;
    if (MANTISSAS && !needs_finer) fits = fits && (__float_as_uint(factor) & 0x7fffffu) == s.mantissas[which][__float_as_uint(e4m3_value(scale)) >> 20 & 7];
    if (!fits) entry = __uint_as_float(0x7fc00000u);
    // Blocks of zeros alone have scale zero as a rule; what else has it is too large times this.
    if (MODE == STOCHASTIC && scale == 0) entry = FMAX;
    s.factors[which][scale] = entry, s.factors[which][128 + scale] = __uint_as_float(0x7fc00000u);
    s.to_scale[which] = factors.to_scale;
    return needs_finer;
}

// Blocks of which the table has no factor, or whose elements it does not fit.
template <class T, int MODE>
__device__ __noinline__ uint2 any_codes(uint4 left, uint4 right, float most, unsigned scale, uint4 random, const float* amax) {
    float v[16];
    widen<T>(v, left), widen<T>(v + 8, right);
    return Factors<MODE>(*amax).template encode<T>(v, most, scale, random);
}

template <class T>
__device__ __forceinline__ unsigned nearest8(const float (&y)[8], const OpaqueConstants& kept) {
#ifdef MOEBIUS_CVT_E2M1
    return e2m1_nearest8(y);
#else
    if constexpr (NUDGED<T>) return nearest8_nudged(y, kept);
    else return nearest8_signed(y, kept);
#endif
}
// Bound that products of blocks with a factor are below, in its units. To nearest they are at most 7 then, rounded to
// f16 as well; stochastically far below f16's largest, and `at_most_six` caps them. No NaN is below.
template <class T, int MODE>
constexpr float LIMIT = MODE == STOCHASTIC ? 8.0f * 0x1p-14f : NUDGED<T> ? 6.9f * NUDGED_SCALE : 6.9f;

// Whether both of a lane's blocks have a factor that their elements fit. They go on together, so that the arithmetic of
// one runs while that of the other waits.
template <class T, int MODE>
__device__ __forceinline__ bool both_fit(const float (&most)[2], const float (&factor)[2]) {
    return __fmul_rn(most[0], factor[0]) < LIMIT<T, MODE> && __fmul_rn(most[1], factor[1]) < LIMIT<T, MODE>;
}

// A block that fits, by its elements.
template <class T, int MODE, bool FINER, class Elements>
__device__ __forceinline__ uint2 codes_of(Elements element, float factor, uint4 random, const OpaqueConstants& kept) {
    float y[2][8];
#pragma unroll
    for (int k = 0; k < 16; k++) y[k / 8][k % 8] = __fmaf_rn(element(k), factor, 0.0f);
    if constexpr (MODE != STOCHASTIC) return make_uint2(nearest8<T>(y[0], kept), nearest8<T>(y[1], kept));
    if (FINER) finer(y[0]), finer(y[1]);
    return make_uint2(stochastic8_small(y[0], random.x, random.y), stochastic8_small(y[1], random.z, random.w));
}

// Where a lane of a warp is, and what it reads and writes there; in shared memory all that is 32 bits wide. What
// follows from a place is added to it as the warp goes on, since its multiplication costs more.
struct LaneState {
    unsigned row_words, column_words;  // of the first stage
    unsigned row_scales, column_codes, column_scales, factors;
    float to_scale[2];
    uint8_t* row_codes;
    uint4 row_counter, column_counter;  // of random bits
};

__device__ __forceinline__ unsigned word_at(unsigned at) {
    unsigned v;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint4 words_at(unsigned at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void put(unsigned at, uint2 v) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(at), "r"(v.x), "r"(v.y) : "memory"); }
__device__ __forceinline__ void put(unsigned at, unsigned v) { asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ void put_half(unsigned at, unsigned v) {
    asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(at), "h"(static_cast<unsigned short>(v)) : "memory");
}
__device__ __forceinline__ void put_byte(unsigned at, unsigned v) { asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(at), "r"(v) : "memory"); }

// 16 rows: a lane has two blocks of one.
template <class T, int MODE, bool FINER>
__device__ __forceinline__ void along_rows(const QuantCastParams& p, const LaneState& at, unsigned stage, const OpaqueConstants& kept) {
    uint4 words[2][2];
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 left = words[i][0] = words_at(at.row_words + stage + i * 32);
        const uint4 right = words[i][1] = words_at(at.row_words + stage + i * 32 + 16);
        const unsigned first = max_magnitude<T>(max_magnitude<T>(left.x, right.x), max_magnitude<T>(left.y, right.y));
        const unsigned both = max_magnitude<T>(first, max_magnitude<T>(max_magnitude<T>(left.z, right.z), max_magnitude<T>(left.w, right.w)));
        most[i] = fabsf(low<T>(max_magnitude<T>(both, both >> 16)));
    }
    const unsigned scales = e4m3_pair(__fmul_rn(most[0], at.to_scale[0]), __fmul_rn(most[1], at.to_scale[0]));
    const float factor[2] = {__uint_as_float(word_at(at.factors + (scales & 0xff) * 4)), __uint_as_float(word_at(at.factors + (scales >> 8) * 4))};
    put_half(at.row_scales, scales);
    uint4 random[2];
    uint2 codes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        random[i] = at.row_counter;
        if (MODE == STOCHASTIC) random[i].x += i, random[i] = philox(random[i], p.keys);
    }
    if (both_fit<T, MODE>(most, factor)) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 left = words[i][0], right = words[i][1];
            const unsigned pairs[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
            auto element = [&](int k) { return k % 2 ? high<T>(pairs[k / 2]) : low<T>(pairs[k / 2]); };
            codes[i] = codes_of<T, MODE, FINER>(element, factor[i], random[i], kept);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned scale = i ? scales >> 8 : scales & 0xff;
            codes[i] = any_codes<T, MODE>(words[i][0], words[i][1], most[i], scale, random[i], p.rows.amax);
        }
    }
    *reinterpret_cast<uint4*>(at.row_codes) = make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
}

// 16 rows: a lane has two columns. Scales are shifted in from above.
template <class T, int MODE, bool FINER>
__device__ __forceinline__ void down_columns(const QuantCastParams& p, const LaneState& at, unsigned stage, unsigned (&scales_of)[2], const OpaqueConstants& kept) {
    unsigned words[16], four[4];
#pragma unroll
    for (int k = 0; k < 16; k++) words[k] = word_at(at.column_words + stage + k * PITCH);
#pragma unroll
    for (int k = 0; k < 4; k++) four[k] = max_magnitude<T>(max_magnitude<T>(words[k], words[k + 4]), max_magnitude<T>(words[k + 8], words[k + 12]));
    const unsigned both = max_magnitude<T>(max_magnitude<T>(four[0], four[1]), max_magnitude<T>(four[2], four[3]));
    const float most[2] = {fabsf(low<T>(both)), fabsf(high<T>(both))};
    const unsigned scales = e4m3_pair(__fmul_rn(most[0], at.to_scale[1]), __fmul_rn(most[1], at.to_scale[1]));
    const unsigned table = at.factors + 1024;
    const float factor[2] = {__uint_as_float(word_at(table + (scales & 0xff) * 4)), __uint_as_float(word_at(table + (scales >> 8) * 4))};
    scales_of[0] = __byte_perm(scales_of[0], scales, 0x4321), scales_of[1] = __byte_perm(scales_of[1], scales, 0x5321);
    uint4 random[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        random[c] = at.column_counter;
        if (MODE == STOCHASTIC) random[c].y += c, random[c] = philox(random[c], p.keys);
    }
    if (both_fit<T, MODE>(most, factor)) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            auto element = [&](int k) { return c ? high<T>(words[k]) : low<T>(words[k]); };
            put(at.column_codes + c * CODES, codes_of<T, MODE, FINER>(element, factor[c], random[c], kept));
        }
    } else {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            auto pair = [&](int k) { return __byte_perm(words[2 * k], words[2 * k + 1], c ? 0x7632 : 0x5410); };
            const uint4 left = make_uint4(pair(0), pair(1), pair(2), pair(3)), right = make_uint4(pair(4), pair(5), pair(6), pair(7));
            const unsigned scale = c ? scales >> 8 : scales & 0xff;
            put(at.column_codes + c * CODES, any_codes<T, MODE>(left, right, most[c], scale, random[c], p.columns.amax));
        }
    }
}

// Eight columns' codes of four rows each, from four rows' of eight columns.
__device__ __forceinline__ void turn(unsigned to, const unsigned (&codes)[4]) {
    unsigned even[2], odd[2];  // a byte two rows of a column
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const unsigned first = codes[2 * j], second = codes[2 * j + 1];
        even[j] = bit_select(0x0f0f0f0fu, first, second << 4), odd[j] = bit_select(0x0f0f0f0fu, first >> 4, second);
    }
    const unsigned pairs[4] = {__byte_perm(even[0], even[1], 0x5140), __byte_perm(odd[0], odd[1], 0x5140),
                               __byte_perm(even[0], even[1], 0x7362), __byte_perm(odd[0], odd[1], 0x7362)};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int column = k / 2 * 4 + k % 2;
        put_half(to + column * CODES, pairs[k]);
        put_half(to + (column + 2) * CODES, pairs[k] >> 16);
    }
}

// Four tiles: a lane has four rows of eight columns, encoded once. Amaxes that differ, or are NaN, make codes that
// differ.
template <class T>
__device__ __forceinline__ void in_tiles(const QuantCastParams& p, const LaneState& at, unsigned stage, unsigned (&scales_of)[2], bool apart, int lane, const OpaqueConstants& kept) {
    uint4 words[4];
    unsigned most_of = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        words[j] = words_at(at.row_words + stage + j * PITCH);
        const unsigned of_row = max_magnitude<T>(max_magnitude<T>(words[j].x, words[j].y), max_magnitude<T>(words[j].z, words[j].w));
        most_of = j ? max_magnitude<T>(most_of, of_row) : of_row;
    }
    most_of = max_magnitude<T>(most_of, __shfl_xor_sync(~0u, most_of, 1));
    most_of = max_magnitude<T>(most_of, __shfl_xor_sync(~0u, most_of, 8));
    most_of = max_magnitude<T>(most_of, __shfl_xor_sync(~0u, most_of, 16));
    const float most = fabsf(low<T>(max_magnitude<T>(most_of, most_of >> 16)));
#pragma unroll 1
    for (int pass = p.rows.codes ? 0 : 1; pass < (apart ? 2 : p.rows.codes ? 1 : 2); pass++) {
        const unsigned scale = e4m3_pair(__fmul_rn(most, pass ? at.to_scale[1] : at.to_scale[0]), 0.0f);
        const float factor = __uint_as_float(word_at(at.factors + pass * 1024 + scale * 4));
        unsigned codes[4];
        if (__fmul_rn(most, factor) < LIMIT<T, TILED>) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned pairs[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
                float y[8];
#pragma unroll
                for (int k = 0; k < 4; k++) y[2 * k] = __fmaf_rn(low<T>(pairs[k]), factor, 0.0f), y[2 * k + 1] = __fmaf_rn(high<T>(pairs[k]), factor, 0.0f);
                codes[j] = nearest8<T>(y, kept);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const uint2 two = any_codes<T, TILED>(words[j], words[j + 1], most, scale, make_uint4(0, 0, 0, 0), pass ? p.columns.amax : p.rows.amax);
                codes[j] = two.x, codes[j + 1] = two.y;
            }
        }
        if (p.rows.codes && pass == 0) {
            uint8_t* to = at.row_codes;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                *reinterpret_cast<unsigned*>(to) = codes[j], to += p.rows.code_bytes;
                if (lane % 2 == 0) put_byte(at.row_scales + j * ROW_SCALES, scale);
            }
        }
        if (p.columns.codes && (pass == 1 || !apart)) {
            turn(at.column_codes, codes);
            scales_of[0] = scales_of[1] = __byte_perm(scales_of[0], scale, 0x4321);
        }
    }
}

// Lines' parts of `bytes` from shared memory to memory, in words that a warp writes by whole lines.
template <int PER_LINE, int FROM_PITCH>
__device__ __forceinline__ void write(uint8_t* to, int64_t pitch, const unsigned char* from, int lines, int bytes, unsigned thread) {
    constexpr int AT_ONCE = THREADS / PER_LINE;
    const int first = thread / PER_LINE, piece = thread % PER_LINE * 8;
    if (piece >= bytes) return;
    to += first * pitch + piece, from += first * FROM_PITCH + piece;
#pragma unroll 8
    for (int i = 0; i < lines / AT_ONCE; i++) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from + i * AT_ONCE * FROM_PITCH);
        to += AT_ONCE * pitch;
    }
}

template <class T, int MODE>
__device__ __forceinline__ void cast(const QuantCastParams& p) {
    constexpr bool TILES = MODE == TILED;
    using SharedStorage = ::SharedStorage<KernelConfig<MODE>::STAGES>;
    extern __shared__ __align__(16) unsigned char memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    unsigned thread, base = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));  // once
    const OpaqueConstants kept;
    const int lane = thread % 32, warp = thread / 32, across = warp % ACROSS * 64, down = warp / ACROSS * 64;
    // Four rows of blocks go together, so that what neighbors write to the same lines of memory, they write at about
    // the same time.
    constexpr unsigned GROUP = 4;
    const unsigned rows = static_cast<unsigned>(p.matrix.rows), columns = static_cast<unsigned>(p.matrix.columns);
    const unsigned wide = (columns + SLABS * WIDE - 1) / (SLABS * WIDE), high = (rows + HIGH - 1) / HIGH;
    const unsigned head = blockIdx.x / (GROUP * wide) * GROUP, rest = blockIdx.x - head * wide, tall = min(high - head, GROUP);
    const unsigned row = (head + rest % tall) * HIGH, column = rest / tall * (SLABS * WIDE);
    const int slabs = min(SLABS, static_cast<int>(columns - column) / WIDE), height = min(HIGH, static_cast<int>(rows - row));
    const bool active = down < height;

    const T* first = static_cast<const T*>(p.matrix.base) + (row + down + lane / 8) * p.matrix.row_stride + column + across + lane % 8 * 8;
    const char* from = reinterpret_cast<const char*>(first);
    const int64_t four_rows = 4 * sizeof(T) * p.matrix.row_stride;
    const unsigned stages = base + offsetof(SharedStorage, stage) + warp * (KernelConfig<MODE>::STAGES * UNIT), to = stages + lane / 8 * PITCH + lane % 8 * 16;
    int left = active ? slabs * 4 : 0;  // units to be brought
    auto bring = [&](unsigned stage) {
        if (left > 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to + stage + j * 4 * PITCH), "l"(from) : "memory");
                from += four_rows;
            }
            if (--left % 4 == 0) from += static_cast<int64_t>(WIDE * sizeof(T)) - 16 * four_rows;
        }
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    };
    constexpr unsigned LAST = (KernelConfig<MODE>::STAGES - 1) * UNIT;
#pragma unroll
    for (unsigned stage = 0; stage < LAST; stage += UNIT) bring(stage);
    const bool needs_finer = tabulate_factors<T, MODE>(p, s, thread);
    const bool apart = TILES && p.rows.codes && *p.rows.amax != *p.columns.amax;
    __syncthreads();

    const int lane_row = TILES ? lane / 8 * 4 : lane / 2, lane_column = TILES ? lane % 8 * 8 : lane % 2 * 32;
    LaneState at;
    at.row_words = stages + lane_row * PITCH + lane_column * 2;
    at.column_words = stages + lane * 4;
    at.row_scales = base + offsetof(SharedStorage, row_scales) + (down + lane_row) * ROW_SCALES + (across + lane_column) / 16;
    at.column_codes = base + offsetof(SharedStorage, codes) + down / 2 + (TILES ? (across + lane_column) * CODES + lane_row / 2 : (across + lane * 2) * CODES);
    // Of two columns a lane: in tiles, of those that its tile has.
    at.column_scales = base + offsetof(SharedStorage, column_scales) + (across + (TILES ? lane_column + lane / 8 * 2 : lane * 2)) * COLUMN_SCALES + down / 16;
    at.factors = base + offsetof(SharedStorage, factors);
    at.to_scale[0] = s.to_scale[0], at.to_scale[1] = s.to_scale[1];
    at.row_codes = p.rows.codes + static_cast<int64_t>(row + down + lane_row) * p.rows.code_bytes + (column + across + lane_column) / 2;
    // Block, line, direction, stream.
    at.row_counter = make_uint4((column + across + lane_column) / 16, row + down + lane_row, 0, static_cast<unsigned>(p.stream));
    at.row_counter.x += static_cast<unsigned>(p.rows.first_block), at.row_counter.y += static_cast<unsigned>(p.rows.first_line);
    at.column_counter = make_uint4((row + down) / 16, column + across + lane * 2, 1, static_cast<unsigned>(p.stream));
    at.column_counter.x += static_cast<unsigned>(p.columns.first_block), at.column_counter.y += static_cast<unsigned>(p.columns.first_line);
    const int64_t codes_on = 16 * p.rows.code_bytes;
    auto run = [&](auto with_finer) {
        unsigned stage = 0, ahead = LAST, scales_of[2] = {0, 0};
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
#pragma unroll 1
            for (int unit = 0; unit < 4; unit++) {
                asm volatile("cp.async.wait_group %0;\n" ::"n"(KernelConfig<MODE>::STAGES - 2) : "memory");
                __syncwarp();
                bring(ahead);
                if (active) {
                    if constexpr (TILES) in_tiles<T>(p, at, stage, scales_of, apart, lane, kept);
                    else {
                        constexpr bool FINER = decltype(with_finer)::value;
                        if (p.rows.codes) along_rows<T, MODE, FINER>(p, at, stage, kept);
                        down_columns<T, MODE, FINER>(p, at, stage, scales_of, kept);
                    }
                }
                ahead = stage, stage = stage == LAST ? 0 : stage + UNIT;
                at.row_codes += codes_on, at.row_scales += 16 * ROW_SCALES, at.column_codes += 8;
                at.row_counter.y += 16, at.column_counter.x++;
            }
#pragma unroll
            for (int c = 0; c < 2; c++) put(at.column_scales + c * COLUMN_SCALES, scales_of[c]);
            __syncthreads();
            uint8_t* codes = p.columns.codes + static_cast<int64_t>(column + slab * WIDE) * p.columns.code_bytes + row / 2;
            write<HIGH / 16, CODES>(codes, p.columns.code_bytes, s.codes, WIDE, height / 2, thread);
            __syncthreads();
            at.row_codes += WIDE / 2 - 4 * codes_on, at.row_scales -= 64u * ROW_SCALES - WIDE / 16;
            at.column_codes -= 32u, at.column_scales += WIDE * COLUMN_SCALES;
            at.row_counter.x += WIDE / 16, at.row_counter.y -= 64, at.column_counter.x -= 4, at.column_counter.y += WIDE;
        }
    };
    if constexpr (MODE != STOCHASTIC) run(std::false_type());
    else if constexpr (!std::is_same<T, bf16>::value) run(std::true_type());
    else if (__any_sync(~0u, needs_finer)) run(std::true_type());  // the same to all, as the compiler shall see
    else run(std::false_type());
    if (p.rows.codes) {
        uint8_t* scales = p.rows.scales + static_cast<int64_t>(row) * p.rows.blocks + column / 16;
        write<SLABS * WIDE / NVFP4_ALIGNED_MULTIPLE, ROW_SCALES>(scales, p.rows.blocks, s.row_scales, height, slabs * (WIDE / 16), thread);
    }
    uint8_t* scales = p.columns.scales + static_cast<int64_t>(column) * p.columns.blocks + row / 16;
    write<HIGH / NVFP4_ALIGNED_MULTIPLE, COLUMN_SCALES>(scales, p.columns.blocks, s.column_scales, slabs * WIDE, height / 16, thread);
}

}  // namespace

#define CAST(name, T, MODE) \
    extern "C" __global__ void __launch_bounds__(THREADS, KernelConfig<MODE>::BLOCKS) name(const __grid_constant__ QuantCastParams p) { cast<T, MODE>(p); }

CAST(nvfp4_aligned_te_bf16, bf16, TE)
CAST(nvfp4_aligned_te_f16, f16, TE)
CAST(nvfp4_aligned_stochastic_bf16, bf16, STOCHASTIC)
CAST(nvfp4_aligned_stochastic_f16, f16, STOCHASTIC)
CAST(nvfp4_aligned_tiled_bf16, bf16, TILED)
CAST(nvfp4_aligned_tiled_f16, f16, TILED)

static_assert(sizeof(SharedStorage<3>) == NVFP4_ALIGNED_SMEM && sizeof(SharedStorage<2>) == NVFP4_ALIGNED_STOCHASTIC_SMEM, "common/shapes.h has others");
static_assert(HIGH == NVFP4_ALIGNED_ROWS && SLABS * WIDE == NVFP4_ALIGNED_COLUMNS, "common/shapes.h has others");
