// MXFP8's scale of a block, and its elements' codes: E4M3 in blocks of 32 with an E8M0 scale each.
#pragma once
#include "quant/quantize.cuh"

namespace mxfp8 {
using namespace quant;

// Largest magnitude's bits; `ceil` skips NaN, which is above infinity.
__device__ __forceinline__ unsigned join(unsigned most, float v, bool floor) {
    const unsigned bits = __float_as_uint(v) & 0x7fffffffu;
    return max(most, floor || bits <= 0x7f800000u ? bits : 0u);
}

__device__ __forceinline__ unsigned scale_of(unsigned most, bool floor) {
    if (floor) {
        if (most == 0x7f800000u) return 247;  // as if the largest exponent were 128
        return __float_as_uint(__fmul_rn(__uint_as_float(most), 0.00390625f)) >> 23 & 0xffu;
    }
    const unsigned bits = __float_as_uint(__fmul_rn(__uint_as_float(most), 1.0f / E4M3_MAX));
    const unsigned exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    if (exponent >= 254) return 254;
    if (exponent == 0) return mantissa > 0x400000u;
    return exponent + (mantissa > 0);
}

// Factor of a block's elements. With `floor` they are divided by a power of two, whose reciprocal is one too.
__device__ __forceinline__ float factor_of(unsigned scale, bool floor) {
    if (!floor) return e8m0_value(254 - min(scale, 254u));
    return scale == 255 ? 0.0f : __frcp_rn(fmaxf(e8m0_value(scale), 1.17549435e-38f));
}
// Four elements' codes.
__device__ __forceinline__ unsigned codes4(const float* v, float factor) {
    return e4m3_pair(__fmul_rn(v[0], factor), __fmul_rn(v[1], factor)) | e4m3_pair(__fmul_rn(v[2], factor), __fmul_rn(v[3], factor)) << 16;
}

}  // namespace mxfp8
