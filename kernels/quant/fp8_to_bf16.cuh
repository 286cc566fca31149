// E4M3 weights with a scale a block of 128 x 128, to bf16 in registers, four codes at a time. E4M3 is exact in bf16; the
// scales are for the f32 sums.
#pragma once
#include "quant/fp4_to_bf16.cuh"

namespace fp8 {

// Bytes 0 and 2 of a word, or 1 and 3: in the places of bf16's exponent and mantissa they are their value times 2^-120.
// Code 0x7f, which is NaN, comes out as 480, as FP4's scales do.
__device__ __forceinline__ uint32_t pair(uint32_t word, int i) {
    const uint32_t at = i ? word : word << 8;
    return fp4::multiply((at >> 4 & 0x07f007f0u) | (at & 0x80008000u), fp4::pair_of(120));
}
// Four pairs of two words.
__device__ __forceinline__ void decode(uint32_t (&to)[4], uint32_t first, uint32_t second) {
    to[0] = pair(first, 0), to[1] = pair(first, 1), to[2] = pair(second, 0), to[3] = pair(second, 1);
}

}  // namespace fp8

namespace fp4 {

template <>
struct Format<WEIGHT_FP8> {
    static constexpr float LEFT = 1.0f;
    // Where the scales of a weight row's blocks begin; blocks begin anew with each part.
    static __device__ __forceinline__ const uint8_t* scales(const QuantWeightParams& w, int64_t group, int64_t row) {
        const uint32_t each = static_cast<uint32_t>(w.rows) / static_cast<uint32_t>(w.parts), high = (each + 127) / 128;
        const uint32_t part = static_cast<uint32_t>(row) / each, in_part = static_cast<uint32_t>(row) - part * each;
        const int64_t block = (group * w.parts + part) * high + in_part / 128;
        return reinterpret_cast<const uint8_t*>(static_cast<const float*>(w.scales) + block * w.blocks);
    }
    // A float's bits.
    static __device__ __forceinline__ uint32_t load(const uint8_t* row, int64_t k) {
        return __ldg(reinterpret_cast<const uint32_t*>(row) + k / 128);
    }
};

}  // namespace fp4
