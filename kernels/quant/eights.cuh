// Eight codes of E4M3 to floating point, and eight numbers to words of 16-bit ones.
#pragma once
#include "quant/quantize.cuh"

namespace quant {

// Values of eight E4M3 codes.
__device__ __forceinline__ void e4m3_values(uint2 codes, float (&v)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const unsigned pair = (k < 4 ? codes.x : codes.y) >> 8 * (k % 4) & 0xffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(MOEBIUS_SOFT_E4M3)
        unsigned halves;  // f16, exact
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves));
        v[k] = both.x, v[k + 1] = both.y;
#else
        v[k] = e4m3_value(pair & 0xffu), v[k + 1] = e4m3_value(pair >> 8);
#endif
    }
}

// Eight numbers, rounded to a 16-bit type.
template <class T>
__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
    static_assert(sizeof(T) == 2, "a word of eight");
    unsigned pairs[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if constexpr (std::is_same<T, f16>::value) {
            const __half2 pair = __floats2half2_rn(v[2 * k], v[2 * k + 1]);
            pairs[k] = *reinterpret_cast<const unsigned*>(&pair);
        } else {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * k], v[2 * k + 1]);
            pairs[k] = *reinterpret_cast<const unsigned*>(&pair);
        }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace quant
