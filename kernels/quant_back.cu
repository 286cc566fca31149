// Quantised matrices back to floating point, and block scales to and from the order in which tensor cores read them.
#include "common/quant.cuh"

namespace {
using namespace quant;

constexpr int THREADS = 256;

// Of 32 bits where that is enough: a division of 64 is a hundred instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    return (a | b) >> 32 ? a / b : static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

// Elements of a run to an output of any type.
template <int N>
__device__ __forceinline__ void put(const QuantBack& p, int64_t at, const float (&v)[N], int count) {
    const bool aligned = p.len % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
    if (p.out_type == TYPE_F32) {
        float* out = static_cast<float*>(p.out) + at;
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            if (k + 4 <= count && aligned) *reinterpret_cast<float4*>(out + k) = make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
            else {
#pragma unroll
                for (int i = 0; i < 4; i++) if (k + i < count) out[k + i] = v[k + i];
            }
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k += 8) {
        unsigned short half[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (p.out_type == TYPE_F16) half[i] = __half_as_ushort(from_float<f16>(v[k + i]));
            else half[i] = __bfloat16_as_ushort(from_float<bf16>(v[k + i]));
        }
        unsigned short* out = static_cast<unsigned short*>(p.out) + at + k;
        if (k + 8 <= count && aligned) {
            *reinterpret_cast<uint4*>(out) = make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16, half[6] | half[7] << 16);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) if (k + i < count) out[i] = half[i];
        }
    }
}

}  // namespace

// A thread half a block: its eight results lie beside its neighbour's, so that a warp writes whole sectors.
extern "C" __global__ void __launch_bounds__(THREADS) nvfp4_back(const __grid_constant__ QuantBack p) {
    const int64_t halves = p.blocks * 2, i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.lines * halves) return;
    const int64_t line = quotient(i, halves), half = i - line * halves, left = p.len - half * 8;
    if (left <= 0) return;
    const float amax = p.amax[p.by_line ? line : 0], scale = e4m3_value(p.scales[line * p.blocks + half / 2]);
    const float factor = p.modelopt ? __fmul_rn(scale, __fdiv_rn(amax, BOUND)) : __fmul_rn(__fmul_rn(scale, amax), 1.0f / BOUND);
    const uint8_t* from = p.codes + line * p.code_bytes + half * 4;
    const int64_t bytes = p.code_bytes - half * 4;
    unsigned word = 0;
    if (bytes >= 4 && words_of(p.codes, p.code_bytes, 4)) word = *reinterpret_cast<const unsigned*>(from);
    else {
        for (int k = 0; k < 4 && k < bytes; k++) word |= static_cast<unsigned>(from[k]) << 8 * k;
    }
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        v[k] = __fmul_rn(e2m1_value(word >> 4 * k), factor);
        if (p.modelopt) v[k] = __fadd_rn(v[k], 0.0f);  // its table has +0 for code 8
    }
    put(p, line * p.len + half * 8, v, static_cast<int>(left < 8 ? left : 8));
}

// A thread eight elements of a line.
extern "C" __global__ void __launch_bounds__(THREADS) mxfp8_back(const __grid_constant__ QuantBack p) {
    const int64_t wide = (p.len + 7) / 8, i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.lines * wide) return;
    const int64_t line = quotient(i, wide), column = (i - line * wide) * 8, left = p.len - column;
    const uint8_t* from = p.codes + line * p.len + column;
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const bool inside = k < left;
        const unsigned code = inside ? from[k] : 0;
        const unsigned scale = !inside ? 0 : p.by_line ? p.scales[line / 32 * p.len + column + k] : p.scales[line * p.blocks + column / 32];
        v[k] = __fmul_rn(e4m3_value(code), e8m0_value(scale));
    }
    put(p, line * p.len + column, v, static_cast<int>(left < 8 ? left : 8));
}

// Scales [lines, blocks] to tiles of 128 x 4, padded with zeros, or back. A thread four scales of a line.
extern "C" __global__ void __launch_bounds__(THREADS) swizzle(const __grid_constant__ QuantBack p) {
    const int64_t wide = (p.blocks + 3) / 4, high = (p.lines + 127) / 128 * 128, i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= high * wide) return;
    // In the order of the tiles' words.
    const int64_t tile = i / 128, in = i % 128, line = tile / wide * 128 + in % 4 * 32 + in / 4, block = tile % wide * 4;
    uint8_t* out = static_cast<uint8_t*>(p.out);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const bool inside = line < p.lines && block + k < p.blocks;
        if (p.back) {
            if (inside) out[line * p.blocks + block + k] = p.scales[i * 4 + k];
        } else {
            out[i * 4 + k] = inside ? p.scales[line * p.blocks + block + k] : 0;
        }
    }
}
