// Element formats and block arithmetic of the quantizers. Every operation is one of binary32 with one rounding, in the
// order of docs/quantization.md: the intrinsics keep the compiler from joining a product and a sum. Subnormals are
// kept.
#pragma once
#include "common/common.cuh"
#include "common/philox.cuh"
#include <type_traits>

namespace quant {

constexpr float FMAX = 3.402823466e+38f, E2M1_MAX = 6.0f, E4M3_MAX = 448.0f, BOUND = 2688.0f;

// Of 32 bits where that is enough: a division of 64 is a hundred instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    return (a | b) >> 32 ? a / b : static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

// The lesser of value and cap; NaN stays NaN, which `fminf` would drop.
__device__ __forceinline__ float cap(float value, float most) { return value > most ? most : value; }

// Bits of a magnitude, every NaN the same: magnitudes are ordered as their bits are, NaN above infinity.
__device__ __forceinline__ unsigned magnitude_bits(unsigned bits) {
    bits &= 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fc00000u : bits;
}

// E4M3, to nearest even, saturating; NaN is 0x7F.
__device__ __forceinline__ unsigned e4m3_soft(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    if (x != x) return 0x7fu;
    const float a = fminf(fabsf(x), E4M3_MAX);
    // Below the least normal, multiples of 2^-9: 2^23 as a summand rounds to integers.
    const unsigned small = __float_as_uint(__fadd_rn(__fmul_rn(a, 512.0f), 8388608.0f)) & 0xfu;
    const unsigned raw = __float_as_uint(a), normal = ((raw + 0x7ffffu + (raw >> 20 & 1u)) >> 20) - (120u << 3);
    return (a < 0.015625f ? small : normal < 0x7eu ? normal : 0x7eu) | sign;
}
// Two at once, the first in the low byte.
__device__ __forceinline__ unsigned e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(MOEBIUS_SOFT_E4M3)
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3_soft(low) | e4m3_soft(high) << 8;
#endif
}
__device__ __forceinline__ unsigned e4m3(float x) { return e4m3_pair(x, 0.0f) & 0xffu; }

// Value of an E4M3 byte: its bits in binary32's places are the value times 2^-120, exactly.
__device__ __forceinline__ float e4m3_value(unsigned byte) {
    const float v = __fmul_rn(__uint_as_float((byte & 0x7fu) << 20 | (byte & 0x80u) << 24), 1.329227996e+36f);
    return (byte & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : v;
}
// Value of an E2M1 code, likewise from 2^-126.
__device__ __forceinline__ float e2m1_value(unsigned code) {
    return __fmul_rn(__uint_as_float((code & 7u) << 22 | (code & 8u) << 28), 8.507059173e+37f);
}
__device__ __forceinline__ float e8m0_value(unsigned byte) {
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Eight E2M1 codes, the first in the low nibble. A magnitude's code is the least of three sums that round it to each of
// the format's steps: 2^23 as a summand makes the addition round to an integer, ties to even, and the step's own first
// code, added with it, keeps its parity. What is above 7 is 7, as is NaN (not in recipe `te`, whose caller knows);
// without CAPPED the caller knows that nothing is.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define MOEBIUS_CVT_E2M1
#endif
template <bool CAPPED = true>
__device__ __forceinline__ unsigned e2m1_nearest8(const float (&y)[8]) {
#ifdef MOEBIUS_CVT_E2M1
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        // The instruction keeps the sign of a zero: adding +0 drops it.
        unsigned short pair;
        asm("{\n.reg .b8 b;\ncvt.rn.satfinite.e2m1x2.f32 b, %1, %2;\nmov.b16 %0, {b, 0};\n}\n"
            : "=h"(pair) : "f"(__fadd_rn(y[k + 1], 0.0f)), "f"(__fadd_rn(y[k], 0.0f)));
        word |= static_cast<unsigned>(pair & 0xff) << 4 * k;
    }
    return word;
#else
    unsigned word = 0;
#pragma unroll
    for (int k = 7; k >= 0; k--) {
        const float a = fabsf(y[k]);
        const int halves = __float_as_int(__fmaf_rn(a, 2.0f, 8388608.0f)), ones = __float_as_int(__fadd_rn(a, 8388610.0f)),
                  twos = __float_as_int(__fmaf_rn(a, 0.5f, 8388612.0f));
        int least = __vimin3_s32(halves, ones, twos);
        if (CAPPED) least = min(least, 0x4b000007);
        float negative;
        asm("set.lt.f32.f32 %0, %1, 0f00000000;\n" : "=f"(negative) : "f"(y[k]));
        word = word * 16 + __float_as_uint(__fmaf_rn(negative, 8.0f, __int_as_float(least)));
    }
    // 0x4b000000 for each code, of which the last two's are left.
    return word - 0xfb000000u;
#endif
}

// The same stochastically: t = |y| + u step truncated, u = byte / 256, with steps of half, one and two. From 1 on a
// step is the second bit of a binary32's mantissa, so the byte is added below it and carries by itself, exactly. Below,
// t is rounded once, and adding 1 brings its halves to the same place. Either way the code is 254 less than what is
// above that place.
__device__ __forceinline__ unsigned e2m1_stochastic8(const float (&y)[8], unsigned low, unsigned high) {
    unsigned word = 0;
#pragma unroll
    for (int k = 7; k >= 0; k--) {
        const float a = fminf(fabsf(y[k]), E2M1_MAX);
        // 16385 + byte / 512; shifted by 14 bits, the byte below the second bit and 1 above the mantissa (2 codes).
        const unsigned byte = __byte_perm(k < 4 ? low : high, 0x46800200u, 0x7650 + k % 4);
        const unsigned large = __float_as_uint(a) + (byte << 14);
        const float t = __fadd_rn(a, __fsub_rn(__uint_as_float(byte), 16385.0f));
        const unsigned small = __float_as_uint(__fadd_rd(t, 1.0f));
        const unsigned bits = a >= 1.0f ? large : small;
        word = word * 16 + ((y[k] < 0.0f ? bits + (8u << 22) : bits) >> 22);
    }
    return word - 0xeeeeeedeu;
}

// The same of 16-bit elements, by twos: y is x by the block's factor, which is at least 2^-16, so that its sign is that
// of an x that is not zero. As f16 scaled by 2^-14 and truncated, a magnitude's code is what is above its 9 low bits,
// below one too, where f16 is subnormal; half a step's byte is added below. The sum of |y| and the byte's value,
// rounded to binary32, reaches a step's end from 2^-26 below it on where |y| is below a quarter; a finer |y| has that
// added.
template <class T>
__device__ __forceinline__ unsigned e2m1_stochastic8(const unsigned (&words)[4], const float (&y)[8], unsigned low, unsigned high) {
    unsigned codes[4];  // in the upper 4 bits of each half
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float first = __fmaf_rz(fabsf(y[2 * k]), 0x1p-14f, 0x1p-40f), second = __fmaf_rz(fabsf(y[2 * k + 1]), 0x1p-14f, 0x1p-40f);
        unsigned pair, positive;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(second), "f"(first));
        const unsigned bytes = __byte_perm(k < 2 ? low : high, 0, k % 2 ? 0x4342 : 0x4140);
        const unsigned sum = (__vminu2(pair, 0x0e000e00u) + bytes * 2) * 8;
        // No -0.
        if constexpr (std::is_same<T, bf16>::value) asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(positive) : "r"(words[k]), "r"(0x3f803f80u), "r"(0u));
        else asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(positive) : "r"(words[k]), "r"(0x3c003c00u), "r"(0u));
        codes[k] = sum | (positive & 0x80008000u);
    }
    const unsigned left = __byte_perm(codes[0], codes[1], 0x7351), right = __byte_perm(codes[2], codes[3], 0x7351);
    const unsigned even = __byte_perm(left, right, 0x5410) >> 4, odd = __byte_perm(left, right, 0x7632);
    return odd ^ ((even ^ odd) & 0x0f0f0f0fu);
}

enum Mode { TE, STOCHASTIC, TILED, MODELOPT };

// Factors that one amax gives for all its blocks.
template <int MODE>
struct Factors {
    float to_scale;  // te: S / 6. modelopt: amax / 2688
    float decode;    // te: 1 / S

    __device__ __forceinline__ explicit Factors(float amax) {
        if (MODE == MODELOPT) {
            to_scale = __fdiv_rn(amax, BOUND), decode = 0.0f;
            return;
        }
        float encode = cap(__fdiv_rn(BOUND, amax), FMAX);
        if (encode == 0.0f) encode = 1.0f;
        to_scale = __fmul_rn(encode, 1.0f / E2M1_MAX);
        decode = __frcp_rn(encode);
    }
    // E4M3 scale of a block with this largest magnitude.
    __device__ __forceinline__ unsigned scale(float block) const {
        if (MODE == MODELOPT) {
            float d = __fdiv_rn(block, __fmul_rn(E2M1_MAX, to_scale));
            d = d == 0.0f ? 1.0f : d;
            return e4m3(d < 0.001953125f ? 0.001953125f : cap(d, E4M3_MAX));
        }
        return e4m3(cap(__fmul_rn(block, to_scale), E4M3_MAX));
    }
    // te: what elements of a block with this scale are multiplied by.
    __device__ __forceinline__ float factor(unsigned scale) const { return cap(__frcp_rn(__fmul_rn(e4m3_value(scale), decode)), FMAX); }
    // Codes of a block whose largest magnitude is at most `most`; `random` counts in mode STOCHASTIC. NARROW: of
    // elements of 16 bits.
    template <class T>
    __device__ __forceinline__ uint2 encode(const float (&v)[16], float most, unsigned scale, uint4 random, const uint4* words = nullptr) const {
        constexpr bool NARROW = sizeof(T) == 2;
        float y[2][8];
        if (MODE == MODELOPT) {
            const float divisor = __fmul_rn(e4m3_value(scale), to_scale);
            // A quotient from a reciprocal and its remainder is rounded right where nothing underflows, which it cannot
            // for elements of 16 bits.
            if (NARROW && divisor > 7.9e-31f && divisor < 65536.0f) {
                const float reciprocal = __frcp_rn(divisor);
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    const float q = __fmul_rn(v[k], reciprocal);
                    y[k / 8][k % 8] = __fmaf_rn(__fmaf_rn(-q, divisor, v[k]), reciprocal, q);
                }
                return make_uint2(e2m1_nearest8(y[0]), e2m1_nearest8(y[1]));
            }
#pragma unroll
            for (int k = 0; k < 16; k++) y[k / 8][k % 8] = __fdiv_rn(v[k], divisor);
            return make_uint2(e2m1_nearest8(y[0]), e2m1_nearest8(y[1]));
        }
        // A NaN in the block or above it: no comparison of the reference's holds, but its stochastic code is 7.
        if ((scale & 0x7fu) == 0x7fu) return MODE == STOCHASTIC ? make_uint2(0x77777777u, 0x77777777u) : make_uint2(0, 0);
        const float by = factor(scale);
#pragma unroll
        for (int k = 0; k < 16; k++) y[k / 8][k % 8] = __fmul_rn(v[k], by);
        if (MODE != STOCHASTIC && __fmul_rn(most, by) < 7.0f) return make_uint2(e2m1_nearest8<false>(y[0]), e2m1_nearest8<false>(y[1]));
        if constexpr (MODE == STOCHASTIC && NARROW) {
            if (words && by >= 0x1p-16f) {
                const unsigned w[2][4] = {{words[0].x, words[0].y, words[0].z, words[0].w}, {words[1].x, words[1].y, words[1].z, words[1].w}};
                return make_uint2(e2m1_stochastic8<T>(w[0], y[0], random.x, random.y), e2m1_stochastic8<T>(w[1], y[1], random.z, random.w));
            }
        }
        if (MODE == STOCHASTIC) {
            return make_uint2(e2m1_stochastic8(y[0], random.x, random.y), e2m1_stochastic8(y[1], random.z, random.w));
        }
        return make_uint2(e2m1_nearest8(y[0]), e2m1_nearest8(y[1]));
    }
};

// The transform of 16 elements: terms are exact, and added in the order of k. `signs`: bit k where g[k] is -1.
__device__ __forceinline__ void hadamard(float (&v)[16], unsigned signs) {
    float sums[16];
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const float term = __fmul_rn(v[k], signs >> k & 1u ? -0.25f : 0.25f);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            bool minus = false;
            for (int bit = 0; bit < 4; bit++) minus = minus != ((k & j) >> bit & 1);
            const float signed_term = minus ? -term : term;
            sums[j] = __fadd_rn(k == 0 ? 0.0f : sums[j], signed_term);
        }
    }
#pragma unroll
    for (int j = 0; j < 16; j++) v[j] = __bfloat162float(__float2bfloat16_rn(sums[j]));
}

// Largest magnitude of some values.
template <int N>
__device__ __forceinline__ float magnitude(const float (&v)[N]) {
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < N; k++) most = max(most, __float_as_uint(v[k]) & 0x7fffffffu);
    return __uint_as_float(most);
}

// Elements of a word of 16 bytes.
template <class T>
__device__ __forceinline__ void widen(float* v, const uint4& word) {
    if constexpr (std::is_same<T, bf16>::value) {
        const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int i = 0; i < 4; i++) v[2 * i] = __uint_as_float(pairs[i] << 16), v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    } else {
        const T* values = reinterpret_cast<const T*>(&word);
#pragma unroll
        for (int k = 0; k < 16 / sizeof(T); k++) v[k] = to_float(values[k]);
    }
}

// A block of 16 elements that lie together, as it is stored.
template <class T>
struct Block {
    static constexpr int WORDS = sizeof(T);  // of 16 bytes
    uint4 words[WORDS];

    __device__ __forceinline__ void load(const void* from) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = __ldcs(static_cast<const uint4*>(from) + i);
    }
    __device__ __forceinline__ void widen(float (&v)[16]) const {
#pragma unroll
        for (int i = 0; i < WORDS; i++) quant::widen<T>(v + i * (16 / sizeof(T)), words[i]);
    }
    // Two at a time where two are in a word, as integers.
    __device__ __forceinline__ float magnitude() const {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const uint4 w = words[i];
            if constexpr (sizeof(T) == 2) {
                most = __vimax3_u16x2(most, w.x & 0x7fff7fffu, w.y & 0x7fff7fffu);
                most = __vimax3_u16x2(most, w.z & 0x7fff7fffu, w.w & 0x7fff7fffu);
            } else {
                most = __vimax3_u32(most, w.x & 0x7fffffffu, w.y & 0x7fffffffu);
                most = __vimax3_u32(most, w.z & 0x7fffffffu, w.w & 0x7fffffffu);
            }
        }
        if constexpr (sizeof(T) == 4) return __uint_as_float(most);
        const unsigned short half = static_cast<unsigned short>(max(most & 0xffffu, most >> 16));
        return to_float(*reinterpret_cast<const T*>(&half));
    }
};

// A part of a matrix in shared memory, as it is stored: 128 rows of 256 bytes. Rows are 16 bytes apart from a multiple
// of 128, so that words of 16 bytes one below another lie on different banks.
template <class T>
struct SmemPanel {
    static constexpr int ROWS = PANEL_ROWS, COLUMNS = PANEL_BYTES / sizeof(T), PITCH = 272, BYTES = ROWS * PITCH, THREADS = QUANT_THREADS;
    static constexpr int EACH = 4 / sizeof(T);  // columns of a word of 4 bytes
    unsigned char* at;

    __device__ __forceinline__ T* element(int row, int column) const {
        return reinterpret_cast<T*>(at + row * PITCH) + column;
    }
    // From element (row, column) on; zeros past the matrix's ends. By all threads.
    __device__ __forceinline__ void load(const StridedMatrix& m, int64_t row, int64_t column) const {
        const T* base = static_cast<const T*>(m.base);
        if (m.vector) {
            constexpr int WORDS = COLUMNS * sizeof(T) / 16, LOADS = ROWS * WORDS / THREADS;
            uint4 words[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int word = i * THREADS + threadIdx.x, r = word / WORDS, c = word % WORDS * (16 / sizeof(T));
                const bool inside = row + r < m.rows && column + c < m.columns;
                words[i] = make_uint4(0, 0, 0, 0);
                if (inside) words[i] = __ldcs(reinterpret_cast<const uint4*>(base + (row + r) * m.row_stride + column + c));
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int word = i * THREADS + threadIdx.x;
                *reinterpret_cast<uint4*>(at + word / WORDS * PITCH + word % WORDS * 16) = words[i];
            }
            return;
        }
        const bool across = m.column_stride > m.row_stride;  // rows lie nearer to each other than columns
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
            const int r = across ? i % ROWS : i / COLUMNS, c = across ? i / ROWS : i % COLUMNS;
            const bool inside = row + r < m.rows && column + c < m.columns;
            *element(r, c) = inside ? base[(row + r) * m.row_stride + (column + c) * m.column_stride] : from_float<T>(0.0f);
        }
    }
    // N elements of a row.
    template <int N>
    __device__ __forceinline__ void along(float (&v)[N], int row, int column) const {
        const uint4* words = reinterpret_cast<const uint4*>(element(row, column));
        constexpr int PER = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N / PER; i++) {
            widen<T>(v + i * PER, words[i]);
        }
    }
    // N elements of each of EACH columns.
    template <int N>
    __device__ __forceinline__ void down(float (&v)[EACH][N], int row, int column) const {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const unsigned word = *reinterpret_cast<const unsigned*>(element(row + k, column));
            const T* values = reinterpret_cast<const T*>(&word);
#pragma unroll
            for (int c = 0; c < EACH; c++) v[c][k] = to_float(values[c]);
        }
    }
};

// Row and column of the panel of this block. Eight rows of panels go together, so that what neighbors write to the same
// lines of memory, they write at about the same time.
template <class T>
__device__ __forceinline__ void place(const StridedMatrix& m, int64_t& row, int64_t& column) {
    constexpr int64_t GROUP = 8;
    const int64_t wide = (m.columns + SmemPanel<T>::COLUMNS - 1) / SmemPanel<T>::COLUMNS, high = (m.rows + SmemPanel<T>::ROWS - 1) / SmemPanel<T>::ROWS;
    const int64_t first = blockIdx.x / (GROUP * wide) * GROUP, rest = blockIdx.x % (GROUP * wide);
    const int64_t tall = high - first < GROUP ? high - first : GROUP;
    row = (first + rest % tall) * SmemPanel<T>::ROWS, column = rest / tall * SmemPanel<T>::COLUMNS;
}

// True where all lines can be read and written in words of so many bytes.
__device__ __forceinline__ bool words_of(const void* base, int64_t line_bytes, unsigned word) {
    return (reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(line_bytes)) % word == 0;
}

// Up to 8 bytes, the last of which may be outside.
__device__ __forceinline__ void store8(uint8_t* to, uint2 word, int64_t bytes, bool aligned) {
    if (bytes >= 8 && aligned) {
        *reinterpret_cast<uint2*>(to) = word;
        return;
    }
    const unsigned long long all = static_cast<unsigned long long>(word.y) << 32 | word.x;
    for (int i = 0; i < 8 && i < bytes; i++) to[i] = static_cast<uint8_t>(all >> 8 * i);
}

}  // namespace quant
