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
template <class T, int WIDTH, class Column>
__device__ __forceinline__ void add_bias(const Rows& rows, float (&v)[96], int half, const T* bias, float on_bias, Column&& column, int64_t end) {
    const float factor[2] = {rows.of(on_bias, half, 0), rows.of(on_bias, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (n < end) v[i] += factor[i / 2 % 2] * to_float(bias[n]);
    }
}
template <int WIDTH>
__device__ __forceinline__ void scale_by(const Rows& rows, float (&v)[96], int half, float scale) {
    const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] *= factor[i / 2 % 2];
}
// Adds what memory holds.
template <class T, int WIDTH, class Column>
__device__ __forceinline__ void add_old(const Rows& rows, float (&v)[96], int half, const T* base, int64_t ld, int to, Column&& column) {
    const int row[2] = {rows.of(to, half, 0), rows.of(to, half, 2)};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const int64_t n = column(i / 4) + rows.lane % 4 * 2 + i % 2;
        if (row[i / 2 % 2] >= 0 && n < ld) v[i] += to_float(base[row[i / 2 % 2] * ld + n]);
    }
}

// Down's and the input gradient's: weights, bias, then out.
template <class T, int KIND, int HALVES, int WIDTH>
__device__ __forceinline__ void finish_plain(const Gemm& p, const Rows& rows, const Work& w, Sums& acc) {
    constexpr int PITCH = BN * 2 + 16;
    const int own = rows.own();
    const int to = own < rows.live ? static_cast<int>(out_row(p, rows.slot + own, 0)) : -1;
    auto column = [&](int j) { return w.column + j * 8; };
    const int bytes = static_cast<int>(min(static_cast<int64_t>(BN), p.n - w.column)) * 2;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        if (half * 64 + rows.first >= rows.live) continue;
        if (p.scale) scale_by<WIDTH>(rows, acc[half], half, rows.value(p.scale));
        if (KIND == DOWN && p.bias) {
            const T* bias = static_cast<const T*>(p.bias) + w.group * p.n;
            add_bias<T, WIDTH>(rows, acc[half], half, bias, rows.value(p.bias_scale), column, p.n);
        }
        if (p.accumulate) add_old<T, WIDTH>(rows, acc[half], half, static_cast<const T*>(p.out), p.n, to, column);
        sent();
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) stage<T>(rows.matrices(PITCH, j * 16), acc[half] + j * 8, acc[half] + j * 8 + 4);
        const int row = __shfl_sync(~0u, to, half * 16 + rows.lane % 16);
        T* at = static_cast<T*>(p.out) + row * p.n + w.column;
        send(rows.staging, PITCH, rows.lane < 16 && row >= 0 ? at : nullptr, bytes);
    }
    sent();
}

// Up's: weights, biases, pre-activations out, activation, weights, out. Pairs of 32 gate and 32 up columns lie side by
// side in the accumulators: of 96, gate j is at 32 (j / 16) + j % 16, and up 16 behind.
template <class T, int HALVES, int WIDTH>
__device__ __forceinline__ void finish_up(const Gemm& p, const Rows& rows, const Work& w, Sums& acc) {
    constexpr int COLS = COLUMNS<UP>, PITCH = BN * 2 + 16;
    const int own = rows.own(), act = static_cast<int>(p.activation);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const int to = own < rows.live ? static_cast<int>(out_row(p, rows.slot + own, 0)) : -1;
    // Block j of eight accumulator columns: four of gate, four of up, and so on.
    auto column = [&](int j) { return w.column + j / 8 * 32 + j % 4 * 8; };
    const int bytes = static_cast<int>(min(static_cast<int64_t>(COLS), p.n - w.column)) * 2;
    const float after = rows.value(p.out_scale);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        if (half * 64 + rows.first >= rows.live) continue;
        float(&v)[96] = acc[half];
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
            sent();
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++) {
                const int c = j / 4 * 32 + j % 2 * 16 + j / 2 % 2 * COLS;
                stage<T>(rows.matrices(PITCH, c), v + j * 8, v + j * 8 + 4);
            }
            // Lanes 0 to 15 send gate, the others up.
            const int local = half * 64 + rows.first + rows.lane % 16;
            T* at = static_cast<T*>(p.pre_out) + (static_cast<int64_t>(rows.slot) + local) * 2 * p.n + w.column + rows.lane / 16 * p.n;
            send(rows.staging + rows.lane / 16 * COLS * 2, PITCH, local < rows.live ? at : nullptr, bytes);
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
    }
    sent();
}

// Down's gradient through the activation. The pre-activations come 32 columns at a time, three such chunks ahead, by
// copies of the warp's own, and are replaced by their gradients on the way out.
template <class T>
struct Chunks {
    static constexpr int PITCH = 80, BUFFER = 16 * PITCH, AHEAD = 3;
    static_assert(2 * AHEAD * BUFFER == STAGING, "buffers of gate and up");
    const Gemm& p;
    const Rows& rows;
    int column;

    // Chunk q is columns 32 (q % 6) and on, of half q / 6.
    __device__ __forceinline__ uint32_t buffer(int q, int part) const { return rows.staging + (q % AHEAD * 2 + part) * BUFFER; }
    // Two words of 16 bytes a lane and part.
    template <class Visit>
    __device__ __forceinline__ void words(int q, Visit&& visit) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int word = i * 32 + rows.lane, row = q / 6 * 64 + rows.first + word / 4;
            const int64_t n = column + q % 6 * 32 + word % 4 * 8;
            visit(static_cast<int64_t>(rows.slot) + row, n, word / 4 * PITCH + word % 4 * 16, row < rows.live && n < p.n);
        }
    }
    __device__ __forceinline__ void load(int q) const {
        words(q, [&](int64_t slot, int64_t n, int at, bool valid) {
            const T* from = static_cast<const T*>(p.pre) + (valid ? slot * 2 * p.n + n : 0);
            copy(buffer(q, 0) + at, from, valid);
            copy(buffer(q, 1) + at, from + (valid ? p.n : 0), valid);
        });
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    }
    __device__ __forceinline__ void store(int q, int part, T* base, int64_t ld) const {
        words(q, [&](int64_t slot, int64_t n, int at, bool valid) {
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(buffer(q, part) + at) : "memory");
            if (valid) *reinterpret_cast<uint4*>(base + slot * ld + n) = v;
        });
    }
};

template <class T, int HALVES>
__device__ __forceinline__ void finish_down_bwd(const Gemm& p, const Rows& rows, const Work& w, Sums& acc) {
    const Chunks<T> chunks{p, rows, w.column};
    const int act = static_cast<int>(p.activation);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const float scale = rows.value(p.scale);
    const int count = 64 + rows.first < rows.live ? 12 : rows.first < rows.live ? 6 : 0;
    T* d_pre = static_cast<T*>(p.out);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        if (half * 6 >= count) continue;
        const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
        float dot[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < 6; c++) {
            const int q = half * 6 + c;
            asm volatile("cp.async.wait_group 2;\n" ::: "memory");
            __syncwarp();
            float* d = acc[half] + c * 16;
            uint32_t g[2][4], u[2][4];
            const uint32_t at = rows.matrices(Chunks<T>::PITCH, 0) - rows.staging;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                load_matrices(chunks.buffer(q, 0) + at + j * 32, g[j]);
                load_matrices(chunks.buffer(q, 1) + at + j * 32, u[j]);
            }
            __syncwarp();
            with_gate(act, [&](auto kind) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    uint32_t &gate = g[i / 4][i % 4], &up = u[i / 4][i % 4];
                    const float2 a = unpack<T>(gate), b = unpack<T>(up);
                    const Glu x = activate<true>(kind.value, alpha, limit, a.x, b.x), y = activate<true>(kind.value, alpha, limit, a.y, b.y);
                    const float f = factor[i % 2], dx = d[2 * i], dy = d[2 * i + 1];
                    // Rows past the end are not stored, columns past it not counted.
                    if (w.column + c * 32 + i / 2 * 8 < p.n) dot[i % 2] += dx * x.value + dy * y.value;
                    gate = pack<T>(x.by_gate * dx * f, y.by_gate * dy * f);
                    up = pack<T>(x.by_up * dx * f, y.by_up * dy * f);
                    d[2 * i] = x.value * f, d[2 * i + 1] = y.value * f;
                }
            });
#pragma unroll
            for (int j = 0; j < 2; j++) {
                store_matrices(chunks.buffer(q, 0) + at + j * 32, g[j]);
                store_matrices(chunks.buffer(q, 1) + at + j * 32, u[j]);
            }
            __syncwarp();
            chunks.store(q, 0, d_pre, 2 * p.n);
            chunks.store(q, 1, d_pre + p.n, 2 * p.n);
            __syncwarp();
            if (p.hidden) {
#pragma unroll
                for (int j = 0; j < 2; j++) stage<T>(chunks.buffer(q, 0) + at + j * 32, d + j * 8, d + j * 8 + 4);
                __syncwarp();
                chunks.store(q, 0, static_cast<T*>(p.hidden), p.n);
                __syncwarp();
            }
            if (q + Chunks<T>::AHEAD < count) chunks.load(q + Chunks<T>::AHEAD);
            else asm volatile("cp.async.commit_group;\n" ::: "memory");
        }
        if (p.partial) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
                dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
                const int row = half * 64 + rows.first + rows.lane / 4 + h * 8;
                if (rows.lane % 4 == 0 && row < rows.live) {
                    p.partial[(static_cast<int64_t>(rows.slot) + row) * p.n_tiles + w.column / BN] = dot[h];
                }
            }
        }
    }
}

// One of the two warpgroups: every second tile.
template <class T, int KIND>
__device__ __forceinline__ void multiply(const Gemm& p, const Ring& ring, uint32_t staging) {
    const Walk walk(p);
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    const int steps = static_cast<int>((p.k + BK - 1) / BK), count = walk.count();
    const bool gathered = p.a_map;
    Rows rows{static_cast<int>(threadIdx.x % 32), warp % 4 * 16, 0, 0, staging + warp * STAGING};
    for (int i = group; i < count; i += 2) {
        const uint32_t at = static_cast<uint32_t>(i) * steps;
        if (i > 0) take_turn(group);
        ring.wait_full(at);
        Work w;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(w.group), "=r"(w.slot), "=r"(w.rows), "=r"(w.column) : "r"(ring.works + i % WORKS * 16) : "memory");
        rows.live = w.rows, rows.slot = w.slot;
        if constexpr (KIND == DOWN_BWD) {
            const Chunks<T> chunks{p, rows, w.column};
#pragma unroll
            for (int q = 0; q < Chunks<T>::AHEAD; q++) chunks.load(q);
        }
        // The accumulators of each case are its own: the compiler must see one owner.
        auto tile = [&](auto halves, auto is_narrow) {
            constexpr int HALVES = halves.value, WIDTH = is_narrow.value ? 64 : 96;
            Sums acc;
            products<T, KIND, HALVES, is_narrow.value>(acc, ring, at, steps, gathered, i + 1 < count);
            if constexpr (KIND == UP) finish_up<T, HALVES, WIDTH>(p, rows, w, acc);
            else if constexpr (KIND == DOWN_BWD) finish_down_bwd<T, HALVES>(p, rows, w, acc);
            else finish_plain<T, KIND, HALVES, WIDTH>(p, rows, w, acc);
        };
        // Gradients through the activation, whose code is long, have no case for the last columns.
        if (KIND != DOWN_BWD && narrow<KIND>(p, w.column)) tile(Constant<2>{}, Constant<KIND != DOWN_BWD>{});
        else if (w.rows > 64) tile(Constant<2>{}, Constant<0>{});
        else tile(Constant<1>{}, Constant<0>{});
    }
}

template <class T, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const CUtensorMap& a, const CUtensorMap& b) {
    extern __shared__ char raw[];
    const uint32_t base = (address(raw) + 1023) / 1024 * 1024, staging = base + STAGES * STAGE_BYTES;
    const uint32_t works = staging + 8 * STAGING, barriers = works + WORKS * 16;
    const Ring ring{base, barriers, barriers + STAGES * 8, works};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            // The copy engine's thread, and all that gather.
            barrier_init(ring.full + s * 8, p.a_map ? 129 : 1);
            // Four warps of each block read a stage.
            barrier_init(ring.empty + s * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    cluster_sync();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (p.a_map) gather<KIND>(p, a, b, ring);
        else if (threadIdx.x % 128 == 0) produce<KIND>(p, a, b, ring);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        multiply<T, KIND>(p, ring, staging);
    }
    // No block leaves while the other may still signal it.
    cluster_sync();
}

}  // namespace rows
