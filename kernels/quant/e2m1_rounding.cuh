// Quick parts of NVFP4 casts that take aligned matrices of 16-bit elements.
#pragma once
#include "quant/quantize.cuh"

namespace quant {

template <class T>
__device__ __forceinline__ float low(unsigned pair) {
    if constexpr (std::is_same<T, bf16>::value) return __uint_as_float(pair << 16);
    else return __low2float(*reinterpret_cast<const __half2*>(&pair));
}
template <class T>
__device__ __forceinline__ float high(unsigned pair) {
    if constexpr (std::is_same<T, bf16>::value) return __uint_as_float(pair & 0xffff0000u);
    else return __high2float(*reinterpret_cast<const __half2*>(&pair));
}

// Bits of `yes` where `mask` has ones, else of `no`; the compiler takes two instructions.
__device__ __forceinline__ unsigned bit_select(unsigned mask, unsigned yes, unsigned no) {
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;\n" : "=r"(d) : "r"(mask), "r"(yes), "r"(no));
    return d;
}

// Larger magnitudes of two pairs, of any sign; NaN wins.
template <class T>
__device__ __forceinline__ unsigned max_magnitude(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    unsigned most;
    if constexpr (std::is_same<T, bf16>::value) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;\n" : "=r"(most) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;\n" : "=r"(most) : "r"(a), "r"(b));
    return most;
#else
    return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// Constants that the compiler shall not see through: of a factor of 16 it makes a shift, at half the rate, before the
// assembler can weigh one against the other; and pairs of halves it makes anew wherever they are used. In blocks of so
// many threads, which it does not know.
template <int THREADS>
struct OpaqueConstants {
    unsigned sixteen, halves, ones, twos;

    __device__ __forceinline__ OpaqueConstants() {
        asm volatile("mov.b32 %0, 16;\n" : "=r"(sixteen));
        // 2^-12 and 2^-13, just below, and 2^-14.
        const unsigned none = blockDim.x - THREADS;
        halves = none + 0x0bff0bffu, ones = none + 0x07ff07ffu, twos = none + 0x04000400u;
    }
};

// As `e2m1_nearest8` of values that are not -0 and not above 7: four upper bits of each are shifted in for its sign.
template <class OpaqueConstants>
__device__ __forceinline__ unsigned nearest8_signed(const float (&y)[8], const OpaqueConstants& kept) {
    unsigned word = 0, signs = 0;
#pragma unroll
    for (int k = 7; k >= 0; k--) {
        const float a = fabsf(y[k]);
        const int halves = __float_as_int(__fmaf_rn(a, 2.0f, 8388608.0f)), ones = __float_as_int(__fadd_rn(a, 8388610.0f)),
                  twos = __float_as_int(__fmaf_rn(a, 0.5f, 8388612.0f));
        word = word * kept.sixteen + __vimin3_s32(halves, ones, twos);
        signs = __funnelshift_l(__float_as_uint(y[k]), signs, 4);
    }
    return (word - 0xfb000000u) | (signs & 0x88888888u);
}

// The same of bf16, two at a time in f16, with another factor: products are rounded to f16, and those to E2M1, ties
// towards zero. Factors that make ties of elements' products, (4 + i) / v with 0 <= i < 4 and v of 128 to 255, lie
// 1/1785 of them or more apart; between them nothing changes. Rounding to f16 first moves those of i up by 2^-9 / (4 +
// i) of them, which differs by less than 2^-12 from one i to another, so that none passes another; where several are
// one, those that ties to even round up (i of 2 and 3) come to lie below those that they round down. So some factor
// between neighbors does what `factor` does in binary32. (All 2^23 mantissas were tried.)
__device__ __forceinline__ float reciprocal(float v) {
    float r;
    asm("rcp.approx.f32 %0, %1;\n" : "=f"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float nudge(float factor) {
    const float m = __uint_as_float((__float_as_uint(factor) & 0x7fffffu) | 0x3f800000u), power = __uint_as_float(__float_as_uint(factor) & 0x7f800000u);
    float above = __fmul_rn(m, 0.99932f), below = __fmul_rn(m, 1.00068f);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The element nearest to a tie, and the factor from which on it passes.
        const float c = 1.0f + 0.25f * i, s = c * reciprocal(m) < 1.0f ? 2.0f : 1.0f, tie = c * s;
        const float v = __fsub_rn(__fadd_rn(__fmul_rn(tie, reciprocal(m)), 98304.0f), 98304.0f), product = __fmul_rn(v, m);
        const float bound = __fmul_rn((c + 0x1p-11f) * s, reciprocal(v));
        if (i < 2 ? product > tie : product >= tie) above = fmaxf(above, bound);
        else below = fminf(below, bound);
    }
    return __fmul_rn(__fmaf_rn(0.5f, above, 0.5f * below), power);
}
// |a| b + c
__device__ __forceinline__ unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("{\n.reg .b32 magnitude;\nabs.f16x2 magnitude, %1;\nfma.rn.f16x2 %0, magnitude, %2, %3;\n}\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// `y` is times NUDGED_SCALE, so that the sums that round it are subnormal: multiples of 2^-24, and their bits the
// codes.
constexpr float NUDGED_SCALE = 0x1p-11f;
template <class OpaqueConstants>
__device__ __forceinline__ unsigned nearest8_nudged(const float (&y)[8], const OpaqueConstants& kept) {
    unsigned t[4], word = 0;
#pragma unroll
    for (int k = 3; k >= 0; k--) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(t[k]) : "f"(y[k + 4]), "f"(y[k]));
        // Steps of a half, one and two; the first two just below, so that ties are not reached.
        word = word * kept.sixteen + __vimin3_u16x2(fma_halves(t[k], kept.halves, 0), fma_halves(t[k], kept.ones, 0x00020002u), fma_halves(t[k], kept.twos, 0x00040004u));
    }
    unsigned signs;  // of elements 0, 2, 4 and 6, each in all bits of its byte
    asm("prmt.b32 %0, %1, %2, 0xfbd9;\n" : "=r"(signs) : "r"(t[0]), "r"(t[2]));
    return word | (signs & 0x08080808u) | (__byte_perm(t[1], t[3], 0x7351) & 0x80808080u);
}

// Stochastically: as `e2m1_stochastic8` of 16-bit elements, but of products times 2^-14, signs with them, and without
// what is added to |y| there. That matters where a product that is below a quarter lies at most 2^-26 below a multiple
// of 2^-9: 17 bits one behind another are ones then. `v`: a mantissa of bf16.
__device__ __forceinline__ bool just_below(float factor, int v) {
    unsigned run = (__float_as_uint(__fmul_rn(__uint_as_float((__float_as_uint(factor) & 0x7fffffu) | 0x3f800000u), static_cast<float>(v))) & 0x7fffffu) | 0x800000u;
    run &= run >> 1, run &= run >> 2, run &= run >> 4, run &= run >> 8;
    return run & run >> 1;
}
__device__ __forceinline__ unsigned at_most_six(unsigned a) {
    unsigned d;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.f16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(0x0e000e00u));
#else
    d = __vminu2(a & 0x7fff7fffu, 0x0e000e00u) | (a & 0x80008000u);
#endif
    return d;
}
// Adds what `e2m1_stochastic8` adds to |y|: 2^-26, half the step by which its sum with a byte rounds up in binary32.
__device__ __forceinline__ void finer(float (&y)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) y[k] = __fadd_rz(y[k], copysignf(0x1p-40f, y[k]));
}
// a b + c by one multiplication: the compiler would take shifts and sums, on the integer pipe, which is the fuller one.
__device__ __forceinline__ unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("mad.lo.u32 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ unsigned stochastic8_small(const float (&y)[8], unsigned low, unsigned high) {
    unsigned c[4];  // signs in bit 15, codes in bits 9 to 11, of elements 0 and 2, 1 and 3, 4 and 6, 5 and 7
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int first = k / 2 * 4 + k % 2;
        asm("cvt.rz.f16x2.f32 %0, %1, %2;\n" : "=r"(c[k]) : "f"(y[first + 2]), "f"(y[first]));
        c[k] = at_most_six(c[k]);
    }
    // Twice each element's byte. The even elements' are the word less 256 times the odd ones'. No half carries into the
    // next: at most 0x8e00 and 0x1fe meet.
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        const unsigned bytes = k ? high : low, odd = __byte_perm(bytes, 0, 0x4341);
        c[k] = multiply_add(odd, 0u - 512, multiply_add(bytes, 2, c[k])), c[k + 1] = multiply_add(odd, 2, c[k + 1]);
    }
    // Codes beside their signs, in a byte's upper half.
    unsigned even = __byte_perm(c[0], c[2], 0x7531), odd = __byte_perm(c[1], c[3], 0x7531);
    even = bit_select(0x70707070u, even * 8, even), odd = bit_select(0x70707070u, odd * 8, odd);
    return bit_select(0x0f0f0f0fu, even >> 4, odd);
}

}  // namespace quant
