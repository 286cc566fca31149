// FP4 weights to bf16 in registers, eight codes at a time. E2M1 times E4M3 is exact in bf16; what is above the blocks
// is for the f32 sums.
#pragma once
#include "common/common.cuh"

namespace fp4 {

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    // A product alone is for sm_90 and later.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}
__host__ __device__ constexpr uint32_t pair_of(int exponent) { return static_cast<uint32_t>((exponent + 127) << 7) * 0x10001u; }

// Where a weight row's scales begin, a byte each.
__device__ __forceinline__ const uint8_t* scales_of_row(const QuantWeightParams& w, int64_t group, int64_t row) {
    return static_cast<const uint8_t*>(w.scales) + (group * w.rows + row) * w.blocks;
}

template <int FORMAT>
struct Format;
template <>
struct Format<WEIGHT_NVFP4> {
    // Scales times 2^119, so that a code's bits in the place of bf16's, which are its value times 2^-126, come out
    // times 2^-7.
    static constexpr float LEFT = 128.0f;
    static constexpr int BLOCK = 16;
    static __device__ __forceinline__ const uint8_t* scales(const QuantWeightParams& w, int64_t group, int64_t row) { return scales_of_row(w, group, row); }
    static __device__ __forceinline__ uint32_t load(const uint8_t* row, int64_t k) {
        return __ldcs(reinterpret_cast<const uint32_t*>(row + k / 16));
    }
    // Both halves hold the scale of words 2 i and 2 i + 1.
    static __device__ __forceinline__ void expand(uint32_t (&to)[4], uint32_t scales) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bits = __byte_perm(scales, 0, i ? 0x3424 : 0x1404) >> 4 & 0x07f007f0u;
            const uint32_t v = multiply(multiply(bits, pair_of(120)), pair_of(119));
            to[2 * i] = __byte_perm(v, v, 0x1010), to[2 * i + 1] = __byte_perm(v, v, 0x3232);
        }
    }
    static __device__ __forceinline__ uint32_t value(uint32_t bits, uint32_t scale) { return multiply(bits, scale); }
};
template <>
struct Format<WEIGHT_MXFP4> {
    static constexpr float LEFT = 1.0f;
    static constexpr int BLOCK = 32;
    static __device__ __forceinline__ const uint8_t* scales(const QuantWeightParams& w, int64_t group, int64_t row) { return scales_of_row(w, group, row); }
    static __device__ __forceinline__ uint32_t load(const uint8_t* row, int64_t k) {
        return __ldcs(reinterpret_cast<const unsigned short*>(row + k / 32));
    }
    static __device__ __forceinline__ void expand(uint32_t (&to)[4], uint32_t scales) {
        // 2^-127 is a subnormal.
        const uint32_t v = __vmaxu2(__byte_perm(scales, 0, 0x1404) >> 1 & 0x7f807f80u, 0x00400040u);
        to[0] = to[1] = __byte_perm(v, v, 0x1010), to[2] = to[3] = __byte_perm(v, v, 0x3232);
    }
    static __device__ __forceinline__ uint32_t value(uint32_t bits, uint32_t scale) {
        return multiply(multiply(bits, pair_of(126)), scale);
    }
};

// Pair i of a code word, nibbles i and i + 4: their bits to sign, exponent and mantissa of bf16 by a product, which
// copies them to two places of which one is masked away.
__device__ __forceinline__ uint32_t pattern(uint32_t word, int i) {
    const uint32_t from = i < 2 ? word : word >> 8;
    return (i % 2 ? (from & 0x00f000f0u) * 260u : (from & 0x000f000fu) * 4160u) & 0x81c081c0u;
}
// Four pairs.
template <int FORMAT>
__device__ __forceinline__ void decode(uint32_t (&to)[4], uint32_t word, uint32_t scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = Format<FORMAT>::value(pattern(word, i), scale);
}

}  // namespace fp4
