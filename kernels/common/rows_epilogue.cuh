// What happens to a tile of sums of `rows.cuh` before it leaves the chip. A warp owns 16 rows of each half of the tile,
// and works on its own: results are gathered in its staging buffer and leave it in whole rows. Where an option is not
// used (bias, weights, adding), its code is jumped over as one piece: code that is not fetched costs nothing.
#pragma once
#include "rows.cuh"

namespace rows {

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
struct Rows {
    int lane, first, live;  // first of the 16 rows of a half; rows of the tile
    int slot;               // of the tile
    uint32_t staging;       // address of the warp's buffer

    // Row of the tile that lane l stands for.
    __device__ __forceinline__ int own() const { return lane / 16 * 64 + first + lane % 16; }
    __device__ __forceinline__ float value(const float* of_slot) const {
        return of_slot && own() < live ? of_slot[slot + own()] : 1.0f;
    }
    // The value that lane holds for the row of accumulator i (of a group of four) in a half.
    template <class V>
    __device__ __forceinline__ V of(V held, int half, int i) const {
        return __shfl_sync(~0u, held, half * 16 + lane / 4 + i / 2 % 2 * 8);
    }
    // Address in the staging buffer of this lane's row of matrices at `column`; rows `pitch` bytes apart.
    __device__ __forceinline__ uint32_t matrices(int pitch, int column) const {
        return staging + (lane / 8 % 2 * 8 + lane % 8) * pitch + (column + lane / 16 * 8) * 2;
    }
};

// Sixteen columns of sums (two blocks of eight), rounded, into the staging buffer.
template <class T>
__device__ __forceinline__ void stage(uint32_t to, const float* left, const float* right) {
    const uint32_t v[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]), pack<T>(right[2], right[3])};
    store_matrices(to, v);
}

// Sends 16 rows of `bytes` from the staging buffer. `to` is this lane's row, null where there is none to send.
__device__ __forceinline__ void send(uint32_t from, int pitch, void* to, int bytes) {
    fence_proxy();
    __syncwarp();
    if (to && bytes > 0) bulk_store(to, from + threadIdx.x % 16 * pitch, bytes);
    bulk_commit();
}
__device__ __forceinline__ void sent() {
    bulk_wait_read();
    __syncwarp();
}

// These run over WIDTH accumulators, in blocks of four a thread for eight columns; `column(j)` is block j's first.
template <class T, int WIDTH, int N, class Column>
__device__ __forceinline__ void add_bias(const Rows& rows, float (&v)[N], int half, const T* bias, float on_bias, Column&& column, int64_t end) {
    const float factor[2] = {rows.of(on_bias, half, 0), rows.of(on_bias, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (n < end) v[i] += factor[i / 2 % 2] * to_float(bias[n]);
    }
}
template <int WIDTH, int N>
__device__ __forceinline__ void scale_by(const Rows& rows, float (&v)[N], int half, float scale) {
    const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] *= factor[i / 2 % 2];
}
// Adds what memory holds.
template <class T, int WIDTH, int N, class Column>
__device__ __forceinline__ void add_old(const Rows& rows, float (&v)[N], int half, const T* base, int64_t ld, int to, Column&& column) {
    const int row[2] = {rows.of(to, half, 0), rows.of(to, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (row[i / 2 % 2] >= 0 && n < ld) v[i] += to_float(base[row[i / 2 % 2] * ld + n]);
    }
}

// Down's and the input gradient's: weights, bias, then out.
template <class T, int KIND, int COUNT, int WIDTH>
__device__ __forceinline__ void finish_plain(const Gemm& p, const Rows& rows, const Work& w, Sums<KIND>& acc) {
    constexpr int PITCH = Layout<KIND>::PITCH, LEAVING = Layout<KIND>::LEAVING, PART = WIDTH < LEAVING / 2 ? WIDTH : LEAVING / 2;
    const int own = rows.own();
    const int to = own < rows.live ? static_cast<int>(out_row(p, rows.slot + own, 0)) : -1;
    auto column = [&](int j) { return w.column + j * 8; };
    const int bytes = static_cast<int>(min(static_cast<int64_t>(BN<KIND>), p.n - w.column)) * 2;
#pragma unroll
    for (int half = 0; half < COUNT; half++) {
        if (half * 64 + rows.first >= rows.live) continue;
        if (p.scale) scale_by<WIDTH>(rows, acc[half], half, rows.value(p.scale));
        if (KIND % WIDE == DOWN && p.bias) {
            const T* bias = static_cast<const T*>(p.bias) + w.group * p.n;
            add_bias<T, WIDTH>(rows, acc[half], half, bias, rows.value(p.bias_scale), column, p.n);
        }
        if (p.accumulate) add_old<T, WIDTH>(rows, acc[half], half, static_cast<const T*>(p.out), p.n, to, column);
        const int row = __shfl_sync(~0u, to, half * 16 + rows.lane % 16);
        T* at = rows.lane < 16 && row >= 0 ? static_cast<T*>(p.out) + row * p.n + w.column : nullptr;
#pragma unroll
        for (int part = 0; part < WIDTH / PART; part++) {
            const float* from = acc[half] + part * PART;
            sent();
#pragma unroll
            for (int j = 0; j < PART / 8; j++) stage<T>(rows.matrices(PITCH, j * 16), from + j * 8, from + j * 8 + 4);
            send(rows.staging, PITCH, at ? at + part * LEAVING : nullptr, min(bytes - part * LEAVING * 2, LEAVING * 2));
        }
    }
    sent();
}

// Up's: weights, biases, pre-activations out, activation, weights, out. Pairs of 32 gate and 32 up columns lie side by
// side in the accumulators: of 96, gate j is at 32 (j / 16) + j % 16, and up 16 behind.
template <class T>
__device__ __forceinline__ void finish_up(const Gemm& p, const Rows& rows, const Work& w, Sums<UP>& acc) {
    constexpr int PITCH = Layout<UP>::PITCH, WIDTH = BN<UP> / 2, half = 0;
    const int own = rows.own(), act = static_cast<int>(p.activation);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const int to = own < rows.live ? static_cast<int>(out_row(p, rows.slot + own, 0)) : -1;
    // Block j of eight accumulator columns: four of gate, four of up, and so on.
    auto column = [&](int j) { return w.column + j / 8 * 32 + j % 4 * 8; };
    const int bytes = static_cast<int>(min(static_cast<int64_t>(COLUMNS<UP>), p.n - w.column)) * 2;
    const float after = rows.value(p.out_scale);
    if (rows.first >= rows.live) return;
    float(&v)[WIDTH] = acc[0];
    if (p.scale) scale_by<WIDTH>(rows, v, half, rows.value(p.scale));
    if (p.bias) {
        const T* bias = static_cast<const T*>(p.bias) + w.group * 2 * p.n;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
            if (n < p.n) v[i] += to_float(bias[i / 16 % 2 * p.n + n]);
        }
    }
    if (p.pre_out) {
        const int local = half * 64 + rows.first + rows.lane;
        T* at = static_cast<T*>(p.pre_out) + (static_cast<int64_t>(rows.slot) + local) * 2 * p.n + w.column;
#pragma unroll
        for (int up = 0; up < 2; up++) {
            sent();
#pragma unroll
            for (int j = 0; j < WIDTH / 16; j++) {
                const float* from = v + j / 2 * 32 + up * 16 + j % 2 * 8;
                stage<T>(rows.matrices(PITCH, j * 16), from, from + 4);
            }
            send(rows.staging, PITCH, rows.lane < 16 && local < rows.live ? at + up * p.n : nullptr, bytes);
        }
    }
    const float factor[2] = {rows.of(after, half, 0), rows.of(after, half, 2)};
    with_gate(act, [&](auto kind) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) {
            const int at = i / 16 * 32 + i % 16;
            v[at] = activate<true>(kind.value, alpha, limit, v[at], v[at + 16]).value * factor[i / 2 % 2];
        }
    });
    if (p.accumulate) add_old<T, WIDTH>(rows, v, half, static_cast<const T*>(p.out), p.n, to, column);
    sent();
#pragma unroll
    for (int j = 0; j < WIDTH / 16; j++) {
        const float* from = v + j / 2 * 32 + j % 2 * 8;
        stage<T>(rows.matrices(PITCH, j * 16), from, from + 4);
    }
    const int row = __shfl_sync(~0u, to, half * 16 + rows.lane % 16);
    T* at = static_cast<T*>(p.out) + row * p.n + w.column;
    send(rows.staging, PITCH, rows.lane < 16 && row >= 0 ? at : nullptr, bytes);
    sent();
}

}  // namespace rows
