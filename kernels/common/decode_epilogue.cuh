// Epilogues of the products of few rows: sums stay in the registers of the threads that made them.
// The operations and their roundings are those of sm90/grouped_gemm_epilogue.cuh, so that a row's bits do not depend on
// which kernel served it. Products are rounded before they are added to (`__fmul_rn`), as there.
#pragma once
#include "common/epilogue.cuh"

// An element of the output of an up projection, of its gate and up.
template <class T, int ACT>
__device__ __forceinline__ void decode_epilogue_up(const GemmParams& p, int64_t group, int64_t slot, int64_t column, float g, float u) {
    constexpr bool gated = ACT != ACT_RELU2;
    const int64_t wide = gated ? 2 * p.n : p.n;
    if (p.scale) g = __fmul_rn(g, p.scale[slot]), u = __fmul_rn(u, p.scale[slot]);
    if (p.bias) {
        const T* bias = static_cast<const T*>(p.bias) + group * wide + column;
        g += to_float(bias[0]);
        if (gated) u += to_float(bias[p.n]);
    }
    if (p.pre_out) {
        T* pre = static_cast<T*>(p.pre_out) + slot * wide + column;
        pre[0] = from_float<T>(g);
        if (gated) pre[p.n] = from_float<T>(u);
    }
    float v = activate<true>(ACT, static_cast<float>(p.alpha), static_cast<float>(p.limit), g, u).value;
    if (p.out_scale) v = __fmul_rn(v, p.out_scale[slot]);
    put(static_cast<T*>(p.out), slot * p.n + column, v, p.accumulate);
}

// Two elements of a row of the output of a down projection; columns past the last are left out.
template <class T>
__device__ __forceinline__ void decode_epilogue_down(const GemmParams& p, int64_t group, int64_t slot, const int64_t (&columns)[2], const float (&sums)[2]) {
    const float scale = p.scale ? p.scale[slot] : 1.0f, on_bias = p.bias_scale ? p.bias_scale[slot] : 1.0f;
    const T* bias = static_cast<const T*>(p.bias) + group * p.n;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (columns[i] >= p.n) continue;
        float v = __fmul_rn(sums[i], scale);
        if (p.bias) v = fmaf(on_bias, to_float(bias[columns[i]]), v);
        put(static_cast<T*>(p.out), slot * p.n + columns[i], v, p.accumulate);
    }
}
