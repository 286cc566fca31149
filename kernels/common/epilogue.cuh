// Epilogues: the work on a tile of sums before it leaves the chip. The tile lies in shared memory in f32, so that every
// way of multiplying (mma, fused multiply-add) shares these lines. A warp owns whole rows: dots along a row are summed
// in one fixed order.
#pragma once
#include "common/activation.cuh"

enum Kind { UP, DOWN, DOWN_BWD, UP_DGRAD, LINEAR, LINEAR_DX, WGRAD, LINEAR_DW };

// How the operands of a kind are stored.
template <int KIND>
struct OperandMajor {
    static constexpr bool a_mn_major = KIND == WGRAD || KIND == LINEAR_DW;                     // A is [k, m]
    static constexpr bool b_mn_major = a_mn_major || KIND == DOWN_BWD || KIND == UP_DGRAD || KIND == LINEAR_DX;  // B is [k, n]
};

struct Tile {
    int64_t group;
    int64_t slot;    // first slot; first row of the output for weight gradients
    int rows;        // rows that exist
    int64_t n_tile;
    int64_t split;
};

// Columns of gate (and of up behind them) of a tile of an up projection.
__device__ __forceinline__ int tile_columns(const GemmParams& p, int kind, int block_n) {
    return kind == UP && p.activation != ACT_RELU2 ? block_n / 2 : block_n;
}

// Row of B (or column, for B as stored [k, n]) behind column j of a tile; -1 past the end.
__device__ __forceinline__ int64_t tile_column(const GemmParams& p, int kind, int block_n, int64_t n_tile, int j) {
    const int columns = tile_columns(p, kind, block_n);
    const int64_t n = n_tile * columns + (j < columns ? j : j - columns);
    if (n >= p.n) return -1;
    return j < columns ? n : p.n + n;
}

template <class T>
__device__ __forceinline__ void put(T* out, int64_t at, float v, bool add) {
    out[at] = from_float<T>(add ? to_float(out[at]) + v : v);
}

template <class T, int KIND, int BLOCK_N>
__device__ void epilogue(const GemmParams& p, const float* tile, int ld, const Tile& t) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int columns = tile_columns(p, KIND, BLOCK_N);
    const int64_t n0 = t.n_tile * columns;
    const int valid = static_cast<int>(p.n - n0 < columns ? p.n - n0 : columns);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const int act = static_cast<int>(p.activation);
    for (int r = threadIdx.x / 32; r < t.rows; r += warps) {
        const float* c = tile + r * ld;
        const int64_t slot = t.slot + r;
        if constexpr (KIND == UP) {
            const bool gated = act != ACT_RELU2;
            const int64_t wide = gated ? 2 * p.n : p.n;
            const float in = p.scale ? p.scale[slot] : 1.0f, after = p.out_scale ? p.out_scale[slot] : 1.0f;
            const T* bias = static_cast<const T*>(p.bias) + t.group * wide;
            T* pre = static_cast<T*>(p.pre_out) + slot * wide;
            for (int j = lane; j < valid; j += 32) {
                float g = c[j], u = gated ? c[columns + j] : 0.0f;
                if (p.scale) g *= in, u *= in;
                if (p.bias) {
                    g += to_float(bias[n0 + j]);
                    if (gated) u += to_float(bias[p.n + n0 + j]);
                }
                if (p.pre_out) {
                    pre[n0 + j] = from_float<T>(g);
                    if (gated) pre[p.n + n0 + j] = from_float<T>(u);
                }
                float v = activate(act, alpha, limit, g, u).value;
                if (p.out_scale) v *= after;
                put(static_cast<T*>(p.out), slot * p.n + n0 + j, v, p.accumulate);
            }
        } else if constexpr (KIND == DOWN) {
            const float scale = p.scale ? p.scale[slot] : 1.0f, on_bias = p.bias_scale ? p.bias_scale[slot] : 1.0f;
            const T* bias = static_cast<const T*>(p.bias) + t.group * p.n;
            for (int j = lane; j < valid; j += 32) {
                float v = c[j];
                if (p.scale) v *= scale;
                if (p.bias) v += on_bias * to_float(bias[n0 + j]);
                put(static_cast<T*>(p.out), slot * p.n + n0 + j, v, p.accumulate);
            }
        } else if constexpr (KIND == DOWN_BWD) {
            const bool gated = act != ACT_RELU2;
            const int64_t wide = gated ? 2 * p.n : p.n;
            const float w = p.scale ? p.scale[slot] : 1.0f;
            const T* pre = static_cast<const T*>(p.pre) + slot * wide;
            T* d_pre = static_cast<T*>(p.out) + slot * wide;
            T* hidden = static_cast<T*>(p.hidden) + slot * p.n;
            float dot = 0.0f;
            for (int j = lane; j < valid; j += 32) {
                const int64_t at = n0 + j;
                Glu f = activate(act, alpha, limit, to_float(pre[at]), gated ? to_float(pre[p.n + at]) : 0.0f);
                dot += c[j] * f.value;
                d_pre[at] = from_float<T>(f.by_gate * c[j] * w);
                if (gated) d_pre[p.n + at] = from_float<T>(f.by_up * c[j] * w);
                if (p.hidden) hidden[at] = from_float<T>(f.value * w);
            }
            if (p.partial) {
                dot = warp_sum(dot);
                if (lane == 0) p.partial[slot * p.n_tiles + t.n_tile] = dot;
            }
        } else if constexpr (KIND == UP_DGRAD) {
            if (p.partial) {
                const int64_t from = mapped_row(p.x_map, slot, p.x_rows, p.fault, p.site, OPERAND_SECOND);
                const T* x = static_cast<const T*>(p.x) + from * p.n;
                float dot = 0.0f;
                for (int j = lane; j < valid; j += 32) dot += from < 0 ? 0.0f : c[j] * to_float(x[n0 + j]);
                dot = warp_sum(dot);
                if (lane == 0) p.partial[slot * p.n_tiles + t.n_tile] = dot;
            }
            const float scale = p.scale ? p.scale[slot] : 1.0f;
            for (int j = lane; j < valid; j += 32) {
                put(static_cast<T*>(p.out), slot * p.n + n0 + j, p.scale ? c[j] * scale : c[j], p.accumulate);
            }
        } else if constexpr (KIND == LINEAR) {
            float* out = (p.partial ? p.partial + t.split * p.m * p.n : static_cast<float*>(p.out)) + slot * p.n;
            for (int j = lane; j < valid; j += 32) {
                out[n0 + j] = p.bias && !p.partial ? c[j] + load_any(p.bias, p.bias_type, n0 + j) : c[j];
            }
        } else if constexpr (KIND == LINEAR_DX) {
            for (int j = lane; j < valid; j += 32) {
                const int64_t at = slot * p.n + n0 + j;
                const float v = p.accumulate ? load_any(p.out, p.out_type, at) + c[j] : c[j];
                store_any(p.out, p.out_type, at, v);
            }
        } else if constexpr (KIND == WGRAD) {
            const int64_t out = (t.group * p.m + slot) * p.n + n0;
            for (int j = lane; j < valid; j += 32) {
                const float old = p.accumulate ? load_any(p.out, p.out_type, out + j) : 0.0f;
                store_any(p.out, p.out_type, out + j, p.accumulate ? old + c[j] : c[j]);
            }
        } else {
            // One of the parts that the slots are cut into; `sum_parts` adds them in order.
            float* out = p.partial + (t.split * p.m + slot) * p.n;
            for (int j = lane; j < valid; j += 32) out[n0 + j] = c[j];
        }
    }
}
