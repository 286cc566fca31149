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
    constexpr int PITCH = Layout<KIND>::PITCH;
    const int own = rows.own();
    const int to = own < rows.live ? static_cast<int>(out_row(p, rows.slot + own, 0)) : -1;
    auto column = [&](int j) { return w.column + j * 8; };
    const int bytes = static_cast<int>(min(static_cast<int64_t>(BN<KIND>), p.n - w.column)) * 2;
#pragma unroll
    for (int half = 0; half < COUNT; half++) {
        if (half * 64 + rows.first >= rows.live) continue;
        if (p.scale) scale_by<WIDTH>(rows, acc[half], half, rows.value(p.scale));
        if (KIND == DOWN && p.bias) {
            const T* bias = static_cast<const T*>(p.bias) + w.group * p.n;
            add_bias<T, WIDTH>(rows, acc[half], half, bias, rows.value(p.bias_scale), column, p.n);
        }
        if (p.accumulate) add_old<T, WIDTH>(rows, acc[half], half, static_cast<const T*>(p.out), p.n, to, column);
        const int row = __shfl_sync(~0u, to, half * 16 + rows.lane % 16);
        T* at = rows.lane < 16 && row >= 0 ? static_cast<T*>(p.out) + row * p.n + w.column : nullptr;
        sent();
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) stage<T>(rows.matrices(PITCH, j * 16), acc[half] + j * 8, acc[half] + j * 8 + 4);
        send(rows.staging, PITCH, at, bytes);
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

// Down's gradient through the activation. The pre-activations come 32 columns at a time, two such chunks ahead, and are
// replaced by their gradients on the way out. Both by the copy engine: loads of the warp's own would queue behind the
// rows that the producer gathers.
struct Tensors {
    const CUtensorMap &pre, &d_pre, &hidden;  // [rows, 2 or 1, n], in boxes of 16 rows of 32 columns
};

template <class T>
struct Chunks {
    // Three buffers of gate and up, then two of the activation.
    static constexpr int BUFFER = 1024, AHEAD = 3;
    static_assert((2 * AHEAD + 2) * BUFFER == Layout<DOWN_BWD>::STAGING, "staging buffer");
    const Gemm& p;
    const Tensors& tensors;
    const Rows& rows;
    int column;
    uint32_t barriers;  // of the warp

    __device__ __forceinline__ uint32_t gate(int q) const { return rows.staging + q % AHEAD * 2 * BUFFER; }
    __device__ __forceinline__ uint32_t hidden(int q) const { return rows.staging + (2 * AHEAD + q % 2) * BUFFER; }
    // Chunk q is columns 32 (q % 6) and on, of half q / 6.
    __device__ __forceinline__ int first_column(int q) const { return column + q % 6 * 32; }
    __device__ __forceinline__ int first_row(int q) const { return rows.slot + q / 6 * 64 + rows.first; }
    // By one lane; the `number`-th chunk of the warp goes by way of barrier `number` % AHEAD.
    __device__ __forceinline__ void load(int q, uint32_t number) const {
        const uint32_t bar = barriers + number % AHEAD * 8;
        barrier_arrive_expect(bar, 2 * BUFFER);
        bulk(gate(q), tensors.pre, bar, first_column(q), 0, first_row(q));
        bulk(gate(q) + BUFFER, tensors.pre, bar, first_column(q), 1, first_row(q));
    }
    __device__ __forceinline__ void wait(uint32_t number) const { barrier_wait(barriers + number % AHEAD * 8, number / AHEAD & 1); }
    // Sends gate, up and the activation. Boxes would run over the last row of a tile: that warp's go word by word.
    __device__ __forceinline__ void store(int q) const {
        fence_proxy();
        __syncwarp();
        if (q / 6 * 64 + rows.first + 16 <= rows.live) {
            if (rows.lane == 0) {
                bulk_store(tensors.d_pre, gate(q), first_column(q), 0, first_row(q));
                bulk_store(tensors.d_pre, gate(q) + BUFFER, first_column(q), 1, first_row(q));
                if (p.hidden) bulk_store(tensors.hidden, hidden(q), first_column(q), 0, first_row(q));
            }
        } else {
            words(q, gate(q), static_cast<T*>(p.out), 2 * p.n);
            words(q, gate(q) + BUFFER, static_cast<T*>(p.out) + p.n, 2 * p.n);
            if (p.hidden) words(q, hidden(q), static_cast<T*>(p.hidden), p.n);
        }
        bulk_commit();
    }
    __device__ __forceinline__ void words(int q, uint32_t from, T* base, int64_t ld) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = i * 8 + rows.lane / 4, c = rows.lane % 4;
            const int64_t n = first_column(q) + c * 8;
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + swizzled(row, c)) : "memory");
            if (q / 6 * 64 + rows.first + row < rows.live && n < p.n) *reinterpret_cast<uint4*>(base + (static_cast<int64_t>(first_row(q)) + row) * ld + n) = v;
        }
    }
    // Rows of 64 bytes, as the copy engine lays them out.
    static __device__ __forceinline__ uint32_t swizzled(int row, int word) { return row * 64 + ((word ^ (row / 2 & 3)) << 4); }
    // Where this lane's row of matrices is, for columns 16 part and on.
    __device__ __forceinline__ uint32_t matrices(int part) const {
        return swizzled(rows.lane / 8 % 2 * 8 + rows.lane % 8, part * 2 + rows.lane / 16);
    }
};

// Eight accumulators of the 16 columns from 16 c on, of a half: a loop over c in place of as many copies of its body,
// which would not fit the instruction cache. In assembly, as the compiler would put the array into memory.
template <int COUNT>
__device__ __forceinline__ void pick(const Sums<DOWN_BWD>& acc, int half, int c, float (&d)[8]) {
#pragma unroll
    for (int h = 0; h < COUNT; h++) {
        if (half != h) continue;
#pragma unroll
        for (int i = 0; i < 12; i++) {
            const float* v = acc[h] + i * 8;
            asm volatile(
                "{\n.reg .pred other;\nsetp.ne.s32 other, %8, %9;\n@other bra NEXT;\n"
                "mov.f32 %0, %10;\nmov.f32 %1, %11;\nmov.f32 %2, %12;\nmov.f32 %3, %13;\n"
                "mov.f32 %4, %14;\nmov.f32 %5, %15;\nmov.f32 %6, %16;\nmov.f32 %7, %17;\nNEXT:\n}\n"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                : "r"(c), "r"(i), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
        }
    }
}

// Chunks of a warp: none for a half without rows.
__device__ __forceinline__ int chunk_count(const Rows& rows) {
    return 64 + rows.first < rows.live ? 12 : rows.first < rows.live ? 6 : 0;
}

// `number` counts the chunks of the warp; the first two of the tile are on their way.
template <class T, int COUNT>
__device__ __forceinline__ void finish_down_bwd(const Chunks<T>& chunks, const Work& w, Sums<DOWN_BWD>& acc, uint32_t& number) {
    const Gemm& p = chunks.p;
    const Rows& rows = chunks.rows;
    const int act = static_cast<int>(p.activation), count = chunk_count(rows);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const float scale = rows.value(p.scale);
#pragma unroll 1
    for (int half = 0; half < count / 6; half++) {
        float dot[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int c = 0; c < 12; c++) {
            const int q = half * 6 + c / 2;
            if (c % 2 == 0) {
                chunks.wait(number);
            } else if (rows.lane == 0) {
                // Where the chunk after the next goes, the one before has left.
                bulk_wait_read();
                if (q + 2 < count) chunks.load(q + 2, number + 2);
            }
            __syncwarp();
            float d[8] = {};
            pick<COUNT>(acc, half, c, d);
            const uint32_t at = chunks.matrices(c % 2);
            uint32_t g[4], u[4];
            load_matrices(chunks.gate(q) + at, g);
            load_matrices(chunks.gate(q) + Chunks<T>::BUFFER + at, u);
            const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
            with_gate(act, [&](auto kind) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 a = unpack<T>(g[i]), b = unpack<T>(u[i]);
                    const Glu x = activate<true>(kind.value, alpha, limit, a.x, b.x), y = activate<true>(kind.value, alpha, limit, a.y, b.y);
                    const float f = factor[i % 2], dx = d[2 * i], dy = d[2 * i + 1];
                    // Rows past the end are not stored, columns past it not counted.
                    if (w.column + c * 16 + i / 2 * 8 < p.n) dot[i % 2] += dx * x.value + dy * y.value;
                    g[i] = pack<T>(x.by_gate * dx * f, y.by_gate * dy * f);
                    u[i] = pack<T>(x.by_up * dx * f, y.by_up * dy * f);
                    d[2 * i] = x.value * f, d[2 * i + 1] = y.value * f;
                }
            });
            store_matrices(chunks.gate(q) + at, g);
            store_matrices(chunks.gate(q) + Chunks<T>::BUFFER + at, u);
            stage<T>(chunks.hidden(q) + at, d, d + 4);
            if (c % 2 == 0) continue;
            chunks.store(q);
            number++;
        }
        if (!p.partial) continue;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
            dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
            const int row = half * 64 + rows.first + rows.lane / 4 + h * 8;
            if (rows.lane % 4 == 0 && row < rows.live) {
                p.partial[(static_cast<int64_t>(rows.slot) + row) * p.n_tiles + w.column / BN<DOWN_BWD>] = dot[h];
            }
        }
    }
}

// What a tile's describer wrote.
template <int KIND>
__device__ __forceinline__ Work described(const Ring<KIND>& ring, int i) {
    Work w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(w.group), "=r"(w.slot), "=r"(w.rows), "=r"(w.column) : "r"(ring.work(i)) : "memory");
    return w;
}

// Both warpgroups: 64 rows each of every tile.
template <class T>
__device__ __forceinline__ void multiply_together(const Gemm& p, const Ring<UP>& ring) {
    const Walk walk(p);
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    const int steps = static_cast<int>((p.k + BK - 1) / BK), count = walk.count();
    Rows rows{static_cast<int>(threadIdx.x % 32), warp * 16, 0, 0, ring.base + Layout<UP>::STAGED + warp * Layout<UP>::STAGING};
    for (int i = 0; i < count; i++) {
        const uint32_t at = static_cast<uint32_t>(i) * steps;
        ring.wait_full(at);
        const Work w = described(ring, i);
        rows.live = w.rows, rows.slot = w.slot;
        if (group * 64 >= w.rows) {
            pass(ring, at, steps);
            continue;
        }
        Sums<UP> acc;
        products<T, UP, 1, false>(acc, ring, at, steps, p.a_map, false);
        finish_up<T>(p, rows, w, acc);
    }
}

// One of the two warpgroups: every second tile.
template <class T, int KIND>
__device__ __forceinline__ void multiply_in_turns(const Gemm& p, const Tensors& tensors, const Ring<KIND>& ring) {
    const Walk walk(p);
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    const int steps = static_cast<int>((p.k + BK - 1) / BK), count = walk.count();
    const uint32_t staging = ring.base + Layout<KIND>::STAGED + warp * Layout<KIND>::STAGING;
    Rows rows{static_cast<int>(threadIdx.x % 32), warp % 4 * 16, 0, 0, staging};
    uint32_t number = 0;
    for (int i = group; i < count; i += 2) {
        const uint32_t at = static_cast<uint32_t>(i) * steps;
        if (i > 0) take_turn(group);
        ring.wait_full(at);
        const Work w = described(ring, i);
        rows.live = w.rows, rows.slot = w.slot;
        const Chunks<T> chunks{p, tensors, rows, w.column, ring.base + Layout<KIND>::PRIVATE + warp * 24};
        if constexpr (KIND == DOWN_BWD) {
            if (rows.lane == 0 && chunk_count(rows) > 0) {
                bulk_wait_read();
                chunks.load(0, number);
                chunks.load(1, number + 1);
            }
        }
        // The accumulators of each case are its own: the compiler must see one owner.
        auto tile = [&](auto halves, auto is_narrow) {
            constexpr int COUNT = halves.value, WIDTH = is_narrow.value ? 64 : 96;
            Sums<KIND> acc;
            products<T, KIND, COUNT, is_narrow.value>(acc, ring, at, steps, p.a_map, i + 1 < count);
            if constexpr (KIND == DOWN_BWD) finish_down_bwd<T, COUNT>(chunks, w, acc, number);
            else finish_plain<T, KIND, COUNT, WIDTH>(p, rows, w, acc);
        };
        // Gradients through the activation, whose code is long, have no case for the last columns.
        if (KIND != DOWN_BWD && narrow<KIND>(p, w.column)) tile(Constant<2>{}, Constant<KIND != DOWN_BWD>{});
        else if (w.rows > 64) tile(Constant<2>{}, Constant<0>{});
        else tile(Constant<1>{}, Constant<0>{});
    }
    bulk_wait_read();
}

template <class T, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const CUtensorMap& a, const CUtensorMap& b, const Tensors& tensors) {
    extern __shared__ __align__(1024) char raw[];
    const Ring<KIND> ring{address(raw)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < Layout<KIND>::STAGES; s++) {
            // The copy engine's thread, and all that gather.
            barrier_init(ring.full_at(s), p.a_map ? 129 : 1);
            // Four warps of each block read a stage, or all eight.
            barrier_init(ring.empty_at(s), TOGETHER<KIND> ? 16 : 8);
        }
        for (int at = Layout<KIND>::PRIVATE; at < Layout<KIND>::BYTES; at += 8) barrier_init(ring.base + at, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    cluster_sync();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        if (TOGETHER<KIND>) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        if (p.a_map) gather<KIND>(p, a, b, ring);
        else if (threadIdx.x % 128 == 0) produce<KIND>(p, a, b, ring);
        __syncwarp();
    } else {
        if (TOGETHER<KIND>) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        if constexpr (TOGETHER<KIND>) multiply_together<T>(p, ring);
        else multiply_in_turns<T, KIND>(p, tensors, ring);
    }
    // No block leaves while the other may still signal it.
    cluster_sync();
}

}  // namespace rows
