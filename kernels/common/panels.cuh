// Quick parts of NVFP4 casts that take whole panels of 128 x 128 elements of 16 bits.
#pragma once
#include "quant.cuh"

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

// Larger magnitudes of two pairs, of any sign; NaN wins.
template <class T>
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    unsigned most;
    if constexpr (std::is_same<T, bf16>::value) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;\n" : "=r"(most) : "r"(a), "r"(b));
    else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;\n" : "=r"(most) : "r"(a), "r"(b));
    return most;
#else
    return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// As `e2m1_nearest8` of values that are not -0 and not above 7: four upper bits of each are shifted in for its sign. In
// blocks of so many threads.
template <int THREADS>
__device__ __forceinline__ unsigned nearest8_signed(const float (&y)[8]) {
#ifdef MOEBIUS_CVT_E2M1
    return e2m1_nearest8(y);
#else
    const unsigned sixteen = blockDim.x / (THREADS / 16);  // which the compiler does not know: it would shift, at half the rate
    unsigned word = 0, signs = 0;
#pragma unroll
    for (int k = 7; k >= 0; k--) {
        const float a = fabsf(y[k]);
        const int halves = __float_as_int(__fmaf_rn(a, 2.0f, 8388608.0f)), ones = __float_as_int(__fadd_rn(a, 8388610.0f)),
                  twos = __float_as_int(__fmaf_rn(a, 0.5f, 8388612.0f));
        word = word * sixteen + __vimin3_s32(halves, ones, twos);
        signs = __funnelshift_l(__float_as_uint(y[k]), signs, 4);
    }
    return (word - 0xfb000000u) | (signs & 0x88888888u);
#endif
}

constexpr int SIDE = 128, CODES = 72;  // of a panel; bytes from a column's codes to the next's: few lanes meet on a bank
constexpr unsigned EACH = 2;           // panels that a block of threads takes one after another

// What blocks of each scale are multiplied by, and what makes their scales, of rows and of columns: half of the threads
// for either.
template <int MODE, class Shared>
__device__ __forceinline__ void tabulate(const QuantCast& p, Shared& s) {
    const int which = threadIdx.x / 128;
    const QuantSide& side = which ? p.columns : p.rows;
    if (!side.codes) return;
    const Factors<MODE> factors(*side.amax);
    s.factors[which][threadIdx.x % 128] = factors.factor(threadIdx.x % 128);
    s.first[which] = factors.first;
}

// Columns' codes of a panel on their way out: a column's lie together, 64 bytes of eight lanes.
template <class Index>
__device__ __forceinline__ void write_codes(const QuantSide& side, const unsigned char* from, Index row, Index column) {
    const int first = threadIdx.x / 8, piece = threadIdx.x % 8 * 8;
    uint8_t* codes = side.codes + (column + first) * side.code_bytes + row / 2 + piece;
#pragma unroll
    for (int i = 0; i < SIDE / 32; i++) {
        *reinterpret_cast<uint2*>(codes + i * 32 * side.code_bytes) = *reinterpret_cast<const uint2*>(from + (first + i * 32) * CODES + piece);
    }
}

// Row and column of a whole panel, in the order of `place` (quant.cuh).
__device__ __forceinline__ uint2 whole_panel(const Strided& m, unsigned panel) {
    constexpr unsigned GROUP = 8;
    const unsigned wide = static_cast<unsigned>(m.columns / SIDE), high = static_cast<unsigned>(m.rows / SIDE);
    const unsigned first = panel / (GROUP * wide) * GROUP, rest = panel - first * wide, own = min(high - first, GROUP), across = rest / own;
    return make_uint2((first + rest - across * own) * SIDE, across * SIDE);
}

}  // namespace quant
