// Epilogue of `sm90/grouped_gemm_mainloop.cuh`: the work on a tile of sums before it leaves the chip. A warp owns 16
// rows of each half of the tile, and works on its own: results are gathered in its staging buffers and leave them in
// boxes of 16 rows of 64 columns by TMA (8 rows for DOWN_BWD), or row by row where some of these must not be written. Where an option is not used
// (bias, weights, adding), its code is jumped over as one piece: code that is not fetched costs nothing.
#pragma once
#include "sm90/grouped_gemm_mainloop.cuh"

namespace grouped_gemm {

template <class T>
__device__ __forceinline__ uint32_t pack(float x, float y) {
    T v[2] = {from_float<T>(x), from_float<T>(y)};
    uint32_t word;
    memcpy(&word, v, 4);
    return word;
}
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
    T v[2];
    memcpy(v, &word, 4);
    return {to_float(v[0]), to_float(v[1])};
}

// A warp's view of its tile. Lane l knows row l of its 32: 16 of the first half of the tile, then 16 of the second.
struct WarpRows {
    int lane, first, live;  // first of the 16 rows of a half; rows of the tile
    int slot;               // of the tile
    uint32_t staging;       // address of the warp's buffer

    // Row of the tile that lane l stands for.
    __device__ __forceinline__ int own() const { return lane / 16 * 64 + first + lane % 16; }
    __device__ __forceinline__ float value(const float* of_slot) const {
        return of_slot && own() < live ? of_slot[slot + own()] : 1.0f;
    }
    // The same of values behind a map of slots.
    __device__ __forceinline__ float value(const float* of_slot, const GemmParams& p) const {
        if (!p.out_scale_map || own() >= live) return value(of_slot);
        const int64_t at = p.out_scale_map[slot + own()];
        return at >= 0 && at < p.out_scales ? of_slot[at] : 0.0f;
    }
    // The value that lane holds for the row of accumulator i (of a group of four) in a half.
    template <class V>
    __device__ __forceinline__ V of(V held, int half, int i) const {
        return __shfl_sync(~0u, held, half * 16 + lane / 4 + i / 2 % 2 * 8);
    }
};

// Where results go: [rows, planes, n], in boxes of 16 rows (8 for DOWN_BWD) of STORE_COLUMNS columns of one plane.
struct OutputMaps {
    const CUtensorMap &pre, &gated, &plain;  // pre-activations, results of gate and up, of one plane
};

// A matrix of results: this lane's row (of the 32 that the warp's lanes know) in it, -1 where there is none, and how
// far apart rows are. Boxes serve where a warp's 16 rows are all live.
template <class T>
struct OutputRows {
    const CUtensorMap& map;
    T* base;
    int64_t pitch;
    int row, plane;
};

// Results on their way out: 64 columns of a warp's 16 rows at a time, in buffers that take turns. A buffer is free when
// TMA has read what left STORE_BUFFERS turns before, which is seldom waited for: other work lies between.
template <class T, int KIND>
struct TmaStore {
    const WarpRows& rows;
    const int64_t end;  // columns
    uint32_t& turn;     // of the warp, from tile to tile

    static __device__ __forceinline__ uint32_t place(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
    // Eight blocks of eight columns, rounded; `of(j)` has the accumulators of block j.
    template <class Of>
    __device__ __forceinline__ uint32_t stage(Of&& of) const {
        if (rows.lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(SmemLayout<KIND>::STORE_BUFFERS - 1) : "memory");
        __syncwarp();
        const uint32_t at = rows.staging + turn % SmemLayout<KIND>::STORE_BUFFERS * STORE_BOX_BYTES;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float *left = of(j), *right = of(j + 1);
            const uint32_t v[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
            stmatrix(at + place(rows.lane % 16, j + rows.lane / 16), v);
        }
        return at;
    }
    __device__ __forceinline__ void send(uint32_t from, const OutputRows<T>& to, int half, int column) const {
        fence_proxy_async();
        __syncwarp();
        if (half * 64 + rows.first + 16 <= rows.live) {
            if (rows.lane == 0) tma_store(to.map, from, column, to.plane, rows.slot + half * 64 + rows.first);
        } else {
            words(from, to, half, column);
        }
        if (rows.lane == 0) tma_store_commit();
        turn++;
    }
    // Rows some of which must not be written, word by word.
    __device__ __forceinline__ void words(uint32_t from, const OutputRows<T>& to, int half, int column) const {
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            const int own = i * 4 + rows.lane / 8, c = rows.lane % 8, row = __shfl_sync(~0u, to.row, half * 16 + own);
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + place(own, c)) : "memory");
            if (row < 0 || column + c * 8 >= end) continue;
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to.base + row * to.pitch + column + c * 8), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        }
    }
};

// These run over WIDTH accumulators, in blocks of four a thread for eight columns; `column(j)` is block j's first.
template <class T, int WIDTH, int N, class Column>
__device__ __forceinline__ void add_bias(const WarpRows& rows, float (&v)[N], int half, const T* bias, float on_bias, Column&& column, int64_t end) {
    const float factor[2] = {rows.of(on_bias, half, 0), rows.of(on_bias, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (n < end) v[i] += factor[i / 2 % 2] * to_float(bias[n]);
    }
}
template <int WIDTH, int N>
__device__ __forceinline__ void scale_by(const WarpRows& rows, float (&v)[N], int half, float scale) {
    const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] *= factor[i / 2 % 2];
}
// Adds what memory holds.
template <class T, int WIDTH, int N, class Column>
__device__ __forceinline__ void add_old(const WarpRows& rows, float (&v)[N], int half, const T* base, int64_t ld, int to, Column&& column) {
    const int row[2] = {rows.of(to, half, 0), rows.of(to, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (row[i / 2 % 2] >= 0 && n < ld) v[i] += to_float(base[row[i / 2 % 2] * ld + n]);
    }
}

// Down's and the input gradient's: weights, bias, then out.
template <class T, int KIND, int COUNT, int WIDTH>
__device__ __forceinline__ void epilogue_plain(const GemmParams& p, const OutputMaps& maps, const WarpRows& rows, const WorkTile& w, Accumulators<KIND>& acc, uint32_t& turn) {
    const int own = rows.own();
    const OutputRows<T> to{maps.plain, static_cast<T*>(p.out), p.n, own < rows.live ? rows.slot + own : -1, 0};
    const TmaStore<T, KIND> store{rows, p.n, turn};
    auto column = [&](int j) { return w.column + j * 8; };
#pragma unroll
    for (int half = 0; half < COUNT; half++) {
        if (half * 64 + rows.first >= rows.live) continue;
        if (p.scale) scale_by<WIDTH>(rows, acc[half], half, rows.value(p.scale));
        if (OPERATION<KIND> == DOWN && p.bias) {
            const T* bias = static_cast<const T*>(p.bias) + w.group * p.n;
            add_bias<T, WIDTH>(rows, acc[half], half, bias, rows.value(p.bias_scale), column, p.n);
        }
        if (p.accumulate) add_old<T, WIDTH>(rows, acc[half], half, static_cast<const T*>(p.out), p.n, to.row, column);
#pragma unroll
        for (int part = 0; part < WIDTH / 32; part++) {
            if (w.column + part * STORE_COLUMNS >= p.n) continue;
            const uint32_t from = store.stage([&](int j) { return acc[half] + part * 32 + j * 4; });
            store.send(from, to, half, w.column + part * STORE_COLUMNS);
        }
    }
}

// Up's: weights, biases, pre-activations out, activation, weights, out. Pairs of 32 gate and 32 up columns lie side by
// side in the accumulators: gate j is at 32 (j / 16) + j % 16, and up 16 behind. Half of the columns at a time, in an
// order in which an activation is made between a buffer's uses. `after`: the weight on the activation of this lane's row.
template <class T>
__device__ __forceinline__ void epilogue_up(const GemmParams& p, const OutputMaps& maps, const WarpRows& rows, const WorkTile& w, Accumulators<UP>& acc, uint32_t& turn, float after) {
    constexpr int WIDTH = BLOCK_N<UP> / 2;
    if (rows.first >= rows.live) return;
    const int own = rows.own(), act = static_cast<int>(p.activation);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const int slot = own < rows.live ? rows.slot + own : -1;
    const OutputRows<T> to{maps.plain, static_cast<T*>(p.out), p.n, slot, 0};
    const TmaStore<T, UP> store{rows, p.n, turn};
    float(&v)[WIDTH] = acc[0];
    if (p.scale) scale_by<WIDTH>(rows, v, 0, rows.value(p.scale));
    if (p.bias) {
        const T* bias = static_cast<const T*>(p.bias) + w.group * 2 * p.n;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const int64_t n = w.column + i / 32 * 32 + i / 4 % 4 * 8 + rows.lane % 4 * 2 + i % 2;
            if (n < p.n) v[i] += to_float(bias[i / 16 % 2 * p.n + n]);
        }
    }
    const float factor[2] = {rows.of(after, 0, 0), rows.of(after, 0, 2)};
    auto store_part = [&](int part, int up, const OutputRows<T>& target) {
        const int column = w.column + part * STORE_COLUMNS;
        if (column >= p.n) return;
        const uint32_t from = store.stage([&](int j) { return v + part * 64 + j / 4 * 32 + up * 16 + j % 4 * 4; });
        store.send(from, target, 0, column);
    };
    auto pre = [&](int up) { return OutputRows<T>{maps.gated, static_cast<T*>(p.pre_out) + up * p.n, 2 * p.n, slot, up}; };
    if (p.pre_out) store_part(0, 0, pre(0)), store_part(1, 0, pre(0));
#pragma unroll
    for (int part = 0; part < 2; part++) {
        with_gate(act, [&](auto kind) {
#pragma unroll
            for (int i = 0; i < WIDTH / 4; i++) {
                const int at = part * 64 + i / 16 * 32 + i % 16;
                v[at] = activate<true>(kind.value, alpha, limit, v[at], v[at + 16]).value * factor[i / 2 % 2];
            }
        });
        if (p.pre_out) store_part(part, 1, pre(1));
        if (p.accumulate) {
            const int row[2] = {rows.of(to.row, 0, 0), rows.of(to.row, 0, 2)};
#pragma unroll
            for (int i = 0; i < WIDTH / 4; i++) {
                const int64_t n = w.column + part * 64 + i / 4 * 8 + rows.lane % 4 * 2 + i % 2;
                if (row[i / 2 % 2] >= 0 && n < p.n) v[part * 64 + i / 16 * 32 + i % 16] += to_float(static_cast<const T*>(p.out)[row[i / 2 % 2] * p.n + n]);
            }
        }
        store_part(part, 0, to);
    }
}

}  // namespace grouped_gemm
