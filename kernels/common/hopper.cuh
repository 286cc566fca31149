// Grouped GEMMs on Hopper: a persistent kernel of one producer warpgroup, which gathers operands into a ring of shared
// memory, and two that multiply with wgmma, 64 rows each of a tile of 128 x 256. Operands are read where they lie, through row maps, in
// either orientation; rows past a group's end are zeros and are never stored. Notes: kernels/NOTES.md.
#pragma once
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace hopper {

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, THREADS = 384;
constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
// Staging of 16 rows of 64 columns a warp; 16 bytes of padding a row keep it free of bank conflicts.
constexpr int LD_OUT = 72, WARP_OUT = 16 * LD_OUT * 2;
// 128 rows of 64 columns.
constexpr int PRE_BYTES = 128 * 128;
constexpr int BARRIERS = 2 * STAGES * 8;
constexpr int SHARED = 1024 + STAGES * STAGE_BYTES + 8 * WARP_OUT + BARRIERS;
static_assert(SHARED == 216128 && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

// Operand in shared memory, swizzled by 128 bytes. K-major: rows of 64 k. MN-major: blocks of 64 columns, rows of one k.
template <bool BY_K>
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
    const uint64_t leading = BY_K ? BK * 128 : 16, stride = 1024;
    return ((at & 0x3ffff) >> 4) | (leading >> 4 << 16) | (stride >> 4 << 32) | (1ull << 62);
}

struct Ring {
    uint32_t full, empty;  // barriers
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Tile number `id` and the slots that its sum runs over; false past the last.
template <int KIND>
__device__ __forceinline__ bool tile_at(const Gemm& p, int64_t id, int64_t m_tiles, Tile& t, int64_t& k_first, int64_t& k_count) {
    constexpr int64_t GROUP = 8;  // n tiles whose columns stay in L2 while the rows pass
    t.split = 0;
    if constexpr (KIND == WGRAD) {
        const int64_t per = p.m_tiles * p.n_tiles;
        t.group = id / per;
        if (t.group >= p.groups) return false;
        const int64_t within = id % per;
        const int64_t first = within / (GROUP * p.m_tiles) * GROUP;
        const int64_t wide = p.n_tiles - first < GROUP ? p.n_tiles - first : GROUP;
        const int64_t rest = within - first * p.m_tiles;
        t.n_tile = first + rest % wide;
        t.slot = rest / wide * BM;
        t.rows = static_cast<int>(p.m - t.slot < BM ? p.m - t.slot : BM);
        k_first = p.offsets[t.group], k_count = p.counts[t.group];
        if (k_first < 0 || k_count < 0 || k_first > p.k - k_count) {
            if (threadIdx.x == 0 && k_count != 0) raise_fault(p.fault, FAULT_ZONE, t.group);
            k_count = 0;
        }
        return true;
    } else {
        if (id >= m_tiles * p.n_tiles) return false;
        const int64_t first = id / (GROUP * m_tiles) * GROUP;
        const int64_t wide = p.n_tiles - first < GROUP ? p.n_tiles - first : GROUP;
        const int64_t rest = id - first * m_tiles;
        t.n_tile = first + rest % wide;
        const int4 tile = p.tiles[rest / wide];
        t.group = tile.x, t.slot = tile.y, t.rows = tile.z;
        k_first = 0, k_count = p.k;
        return true;
    }
}

// Rows of 64 k each, one a group of eight threads: the producer's part of a K-major operand. `row` gives the address of
// the thread's i-th row, `live` says which exist.
template <int ROWS, class Row>
__device__ __forceinline__ void load_by_row(uint32_t to, Row&& row, uint32_t live, int64_t k_bytes, bool inside) {
    const int r = threadIdx.x % 128 / 8, c = threadIdx.x % 8;
    to += r * 128 + ((c ^ (r & 7)) << 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const bool valid = inside && (live >> i & 1);
        copy(to + i * 2048, row(i) + (valid ? k_bytes : 0), valid);
    }
}

// One k a row of 64 columns: the producer's part of an MN-major operand. `row` are the addresses of the thread's four
// rows at its first column, `live` says which exist, `columns` which of the blocks of 64 columns do.
template <int BLOCKS>
__device__ __forceinline__ void load_by_k(uint32_t to, const char* const (&row)[4], uint32_t live, uint32_t columns) {
    const int r = threadIdx.x % 128 / 8, c = threadIdx.x % 8;
    to += r * 128 + ((c ^ (r & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t here = live >> i & 1 ? columns : 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) copy(to + b * (BK * 128) + i * 2048, row[i] + b * 128, here >> b & 1);
    }
}

// Rows of a sum over slots, a step ahead of their use.
struct SlotRows {
    const char* row[4];
    uint32_t live, columns;

    // `first` is the operand's address at the thread's first column; blocks from there on exist while below `end`.
    template <int BLOCKS>
    __device__ __forceinline__ void of_tile(int64_t column, int64_t end) {
        columns = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) columns |= static_cast<uint32_t>(column + b * 64 + threadIdx.x % 8 * 8 < end) << b;
    }
    __device__ __forceinline__ void of_step(const Gemm& p, const char* first, int64_t ld_bytes, const int32_t* map, int64_t rows, int64_t slot, int64_t left) {
        live = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int k = i * 16 + threadIdx.x % 128 / 8;
            int64_t from = -1;
            if (k < left) from = mapped_row(map, slot + k, rows, p.fault);
            row[i] = first + (from < 0 ? 0 : from * ld_bytes);
            live |= static_cast<uint32_t>(from >= 0) << i;
        }
    }
};

// Rows behind a map come by copies of 16 bytes a thread, which can follow it; everything else by the copy engine: weights
// always, rows in slot order too. The copy engine would bring the next zone's rows past the end of a sum over slots (and
// padding may hold anything), so the last, partial step of such a sum comes by threads again, with zeros.
template <int KIND>
__device__ __forceinline__ void produce(const Gemm& p, const CUtensorMap& a_tensor, const CUtensorMap& b_tensor, const CUtensorMap& pre_tensor, uint32_t stages, Ring ring, int64_t m_tiles) {
    constexpr bool A_BY_K = Stored<KIND>::a_by_k, B_BY_K = Stored<KIND>::b_by_k;
    const int r = threadIdx.x % 128 / 8, c = threadIdx.x % 8;
    const bool leader = threadIdx.x % 128 == 0, a_direct = !p.a_map, b_direct = KIND != WGRAD || !p.b_map;
    Tile t;
    int64_t k_first, k_count;
    for (int64_t id = blockIdx.x; tile_at<KIND>(p, id, m_tiles, t, k_first, k_count); id += gridDim.x) {
        const int steps = static_cast<int>((k_count + BK - 1) / BK);
        const int64_t column = t.n_tile * (KIND == UP ? BN / 2 : BN);
        const char* a_row[8];
        uint32_t a_live = 0;
        if constexpr (!A_BY_K) {
            if (!a_direct) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int row = i * 16 + r;
                    const int64_t from = row < t.rows ? mapped_row(p.a_map, t.slot + row, p.a_rows, p.fault) : -1;
                    a_row[i] = static_cast<const char*>(p.a) + (from < 0 ? 0 : from * p.k * 2) + c * 16;
                    a_live |= static_cast<uint32_t>(from >= 0) << i;
                }
            }
        }
        SlotRows a_next, b_next;
        const char* a_first = static_cast<const char*>(p.a) + (t.slot + c * 8) * 2;
        const char* b_first = static_cast<const char*>(p.b) + (column + c * 8) * 2;
        auto a_rows = [&](int64_t k) { a_next.of_step(p, a_first, p.m * 2, p.a_map, p.a_rows, k_first + k, k_count - k); };
        auto b_rows = [&](int64_t k) { b_next.of_step(p, b_first, p.n * 2, p.b_map, p.b_rows, k_first + k, k_count - k); };
        if constexpr (KIND == WGRAD) {
            a_next.of_tile<2>(t.slot, p.m);
            b_next.of_tile<4>(column, p.n);
            if (!a_direct) a_rows(0);
            if (!b_direct) b_rows(0);
        }
        for (int step = 0; step < steps; step++) {
            barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
            const uint32_t to = stages + ring.stage * STAGE_BYTES, to_b = to + A_BYTES, full = ring.full + ring.stage * 8;
            const int64_t k = static_cast<int64_t>(step) * BK;
            const bool whole = KIND != WGRAD || k + BK <= k_count;
            const bool a_bulk = a_direct && whole, b_bulk = b_direct && whole;
            if (leader && (a_bulk || b_bulk)) {
                barrier_expect(full, (a_bulk ? A_BYTES : 0) + (b_bulk ? B_BYTES : 0));
                if (b_bulk) {
                    if constexpr (KIND == WGRAD) {
#pragma unroll
                        for (int b = 0; b < 4; b++) bulk(to_b + b * 8192, b_tensor, full, column + b * 64, k_first + k);
                    } else if constexpr (B_BY_K) {
#pragma unroll
                        for (int b = 0; b < 4; b++) bulk(to_b + b * 8192, b_tensor, full, column + b * 64, k, t.group);
                    } else {
                        bulk(to_b, b_tensor, full, k, column, t.group);
                        bulk(to_b + 16384, b_tensor, full, k, KIND == UP ? p.n + column : column + 128, t.group);
                    }
                }
                if (a_bulk) {
                    if constexpr (A_BY_K) {
                        bulk(to, a_tensor, full, t.slot, k_first + k);
                        bulk(to + 8192, a_tensor, full, t.slot + 64, k_first + k);
                    } else {
                        bulk(to, a_tensor, full, k, t.slot);
                    }
                }
            }
            if (!a_bulk) {
                if constexpr (A_BY_K) {
                    if (a_direct) a_rows(k);
                    load_by_k<2>(to, a_next.row, a_next.live, a_next.columns);
                } else {
                    load_by_row<8>(to, [&](int i) { return a_row[i]; }, a_live, k * 2, k + c * 8 < k_count);
                }
            }
            if constexpr (KIND == WGRAD) {
                if (!b_bulk) {
                    if (b_direct) b_rows(k);
                    load_by_k<4>(to_b, b_next.row, b_next.live, b_next.columns);
                }
            }
            barrier_arrive_after_copies(full);
            ring.next();
            // The next rows' numbers are on their way while this waits for room.
            if constexpr (KIND == WGRAD) {
                if (!a_direct) a_rows(k + BK);
                if (!b_direct) b_rows(k + BK);
            }
        }
        if constexpr (KIND == DOWN_BWD) {
            // Pre-activations of the tile, 64 columns of gate and of up at a time, behind the operands in the ring.
            for (int s = 0; s < BN / 64; s++) {
                barrier_wait(ring.empty + ring.stage * 8, ring.parity ^ 1);
                const uint32_t to = stages + ring.stage * STAGE_BYTES, full = ring.full + ring.stage * 8;
                if (leader) {
                    barrier_expect(full, 2 * PRE_BYTES);
                    bulk(to, pre_tensor, full, column + s * 64, t.slot);
                    bulk(to + PRE_BYTES, pre_tensor, full, p.n + column + s * 64, t.slot);
                }
                barrier_arrive(full);
                ring.next();
            }
        }
    }
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// A warp's 16 rows of the tile on their way out or in, 64 columns at a time.
template <class T>
struct Slice {
    T* buffer;       // 16 x LD_OUT
    int lane;
    int row[4];      // row in memory of the four rows that this lane stores, -1: none

    static __device__ __forceinline__ uint32_t pack(float x, float y) {
        T v[2] = {from_float<T>(x), from_float<T>(y)};
        uint32_t word;
        memcpy(&word, v, 4);
        return word;
    }
    __device__ __forceinline__ uint32_t* word(int half, int j) {
        return reinterpret_cast<uint32_t*>(buffer + (lane / 4 + half * 8) * LD_OUT + j * 8 + lane % 4 * 2);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t word) {
        T v[2];
        memcpy(v, &word, 4);
        return {to_float(v[0]), to_float(v[1])};
    }
    // `v` are 32 values in the order of the accumulators of 64 columns; word i of 16 holds values 2 i and 2 i + 1.
    __device__ __forceinline__ void store(T* base, int64_t ld, int64_t column, int64_t columns, const float* v) {
        uint32_t words[16];
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = pack(v[2 * i], v[2 * i + 1]);
        store(base, ld, column, columns, words);
    }
    __device__ __forceinline__ void store(T* base, int64_t ld, int64_t column, int64_t columns, const uint32_t (&words)[16]) {
#pragma unroll
        for (int i = 0; i < 16; i++) *word(i % 2, i / 2) = words[i];
        __syncwarp();
        const int64_t at = column + lane % 8 * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 data = *reinterpret_cast<const uint4*>(buffer + (i * 4 + lane / 8) * LD_OUT + lane % 8 * 8);
            if (row[i] >= 0 && at < columns) *reinterpret_cast<uint4*>(base + row[i] * ld + at) = data;
        }
        __syncwarp();
    }
    __device__ __forceinline__ void load(const T* base, int64_t ld, int64_t column, int64_t columns, uint32_t (&words)[16]) {
        const int64_t at = column + lane % 8 * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 data = make_uint4(0, 0, 0, 0);
            if (row[i] >= 0 && at < columns) data = *reinterpret_cast<const uint4*>(base + row[i] * ld + at);
            *reinterpret_cast<uint4*>(buffer + (i * 4 + lane / 8) * LD_OUT + lane % 8 * 8) = data;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = *word(i % 2, i / 2);
        __syncwarp();
    }
    // Adds what memory holds to 32 values.
    __device__ __forceinline__ void add(const T* base, int64_t ld, int64_t column, int64_t columns, float* v) {
        uint32_t words[16];
        load(base, ld, column, columns, words);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 old = unpack(words[i]);
            v[2 * i] += old.x, v[2 * i + 1] += old.y;
        }
    }
};

template <class T, int KIND>
__device__ __forceinline__ void finish(const Gemm& p, const Tile& t, float (&acc)[128], T* buffer, uint32_t stages, Ring& ring) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = warp * 16;  // the warp's rows within the tile
    // A warp without rows still takes its turns in the ring.
    if (KIND != DOWN_BWD && first >= t.rows) return;
    const int act = static_cast<int>(p.activation);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    Slice<T> in{buffer, lane}, out{buffer, lane};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = first + i * 4 + lane / 8;
        const int64_t slot = t.slot + r;
        in.row[i] = r < t.rows ? static_cast<int>(slot) : -1;
        out.row[i] = in.row[i];
        if (KIND != WGRAD && p.out_map && r < t.rows) out.row[i] = static_cast<int>(out_row(p, slot, lane % 8));
    }
    // The two rows whose accumulators this thread holds.
    const int own[2] = {first + lane / 4, first + lane / 4 + 8};
    auto of_row = [&](const float* values, int h) { return values && own[h] < t.rows ? values[t.slot + own[h]] : 1.0f; };

    if constexpr (KIND == UP) {
        const int64_t column = t.n_tile * (BN / 2);
        const T* bias = static_cast<const T*>(p.bias) + t.group * 2 * p.n;
        const float before[2] = {of_row(p.scale, 0), of_row(p.scale, 1)}, after[2] = {of_row(p.out_scale, 0), of_row(p.out_scale, 1)};
#pragma unroll
        for (int s = 0; s < 2; s++) {
            float* g = acc + s * 32;
            float* u = acc + 64 + s * 32;
            const int64_t at = column + s * 64;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                g[i] *= before[i / 2 % 2], u[i] *= before[i / 2 % 2];
                const int64_t n = at + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (p.bias && n < p.n) g[i] += to_float(bias[n]), u[i] += to_float(bias[p.n + n]);
            }
            if (p.pre_out) {
                in.store(static_cast<T*>(p.pre_out), 2 * p.n, at, p.n, g);
                in.store(static_cast<T*>(p.pre_out) + p.n, 2 * p.n, at, p.n, u);
            }
            with_gate(act, [&](auto kind) {
#pragma unroll
                for (int i = 0; i < 32; i++) g[i] = activate<true>(kind.value, alpha, limit, g[i], u[i]).value * after[i / 2 % 2];
            });
            if (p.accumulate) out.add(static_cast<const T*>(p.out), p.n, at, p.n, g);
            out.store(static_cast<T*>(p.out), p.n, at, p.n, g);
        }
    } else if constexpr (KIND == DOWN_BWD) {
        const float w[2] = {of_row(p.scale, 0), of_row(p.scale, 1)};
        float dot[2] = {0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int64_t at = t.n_tile * BN + s * 64;
            float* d = acc + s * 32;
            uint32_t g[16], u[16];
            barrier_wait(ring.full + ring.stage * 8, ring.parity);
            const uint32_t from = stages + ring.stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int row = own[i % 2];
                const uint32_t at_word = from + row * 128 + ((i / 2 ^ (row & 7)) << 4) + lane % 4 * 4;
                asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(g[i]) : "r"(at_word) : "memory");
                asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(u[i]) : "r"(at_word + PRE_BYTES) : "memory");
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty + ring.stage * 8);
            ring.next();
            with_gate(act, [&](auto kind) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const float2 gate = Slice<T>::unpack(g[i]), up = Slice<T>::unpack(u[i]);
                    const Glu x = activate<true>(kind.value, alpha, limit, gate.x, up.x), y = activate<true>(kind.value, alpha, limit, gate.y, up.y);
                    const float scale = w[i % 2], dx = d[2 * i], dy = d[2 * i + 1];
                    // Rows past the end are not stored, columns past it not counted.
                    if (at + i / 2 * 8 < p.n) dot[i % 2] += dx * x.value + dy * y.value;
                    g[i] = Slice<T>::pack(x.by_gate * dx * scale, y.by_gate * dy * scale);
                    u[i] = Slice<T>::pack(x.by_up * dx * scale, y.by_up * dy * scale);
                    d[2 * i] = x.value * scale, d[2 * i + 1] = y.value * scale;
                }
            });
            in.store(static_cast<T*>(p.out), 2 * p.n, at, p.n, g);
            in.store(static_cast<T*>(p.out) + p.n, 2 * p.n, at, p.n, u);
            if (p.hidden) in.store(static_cast<T*>(p.hidden), p.n, at, p.n, d);
        }
        if (p.partial) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
                dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
                if (lane % 4 == 0 && own[h] < t.rows) p.partial[(t.slot + own[h]) * p.n_tiles + t.n_tile] = dot[h];
            }
        }
    } else {
        const T* bias = static_cast<const T*>(p.bias) + t.group * p.n;
        const float scale[2] = {KIND == WGRAD ? 1.0f : of_row(p.scale, 0), KIND == WGRAD ? 1.0f : of_row(p.scale, 1)};
        const float on_bias[2] = {of_row(p.bias_scale, 0), of_row(p.bias_scale, 1)};
        T* base = static_cast<T*>(p.out) + (KIND == WGRAD ? t.group * p.m * p.n : 0);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int64_t at = t.n_tile * BN + s * 64;
            float* v = acc + s * 32;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                v[i] *= scale[i / 2 % 2];
                if (KIND == DOWN) {
                    const int64_t n = at + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    if (p.bias && n < p.n) v[i] += on_bias[i / 2 % 2] * to_float(bias[n]);
                }
            }
            if (p.accumulate) out.add(base, p.n, at, p.n, v);
            out.store(base, p.n, at, p.n, v);
        }
    }
}

template <class T, int KIND>
__device__ __forceinline__ void multiply(const Gemm& p, uint32_t stages, Ring ring, int64_t m_tiles, T* buffer) {
    constexpr bool A_BY_K = Stored<KIND>::a_by_k, B_BY_K = Stored<KIND>::b_by_k;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    // K-major: 64 rows of 128 bytes further; MN-major: one block of 64 columns further. The same number.
    const uint32_t own = group * 8192;
    Tile t;
    int64_t k_first, k_count;
    float acc[128];
    for (int64_t id = blockIdx.x; tile_at<KIND>(p, id, m_tiles, t, k_first, k_count); id += gridDim.x) {
        const int64_t steps = (k_count + BK - 1) / BK;
        if (steps == 0) {
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] = 0.0f;
        }
        int before = 0;
        for (int64_t step = 0; step < steps; step++) {
            barrier_wait(ring.full + ring.stage * 8, ring.parity);
            // The copies were ordinary writes; wgmma reads through another proxy.
            asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
            const uint32_t a = stages + ring.stage * STAGE_BYTES + own, b = stages + ring.stage * STAGE_BYTES + A_BYTES;
            const uint64_t da = descriptor<A_BY_K>(a), db = descriptor<B_BY_K>(b);
#pragma unroll
            for (int i = 0; i < 128; i++) asm volatile("" : "+f"(acc[i])::"memory");
            asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
            for (int k = 0; k < BK / 16; k++) {
                wgmma<A_BY_K, B_BY_K>(acc, da + k * (A_BY_K ? 128 : 2), db + k * (B_BY_K ? 128 : 2), step > 0 || k > 0, T{});
            }
            asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
            if (step > 0 && lane == 0) barrier_arrive(ring.empty + before * 8);
            before = ring.stage;
            ring.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
        for (int i = 0; i < 128; i++) asm volatile("" : "+f"(acc[i])::"memory");
        if (steps > 0 && lane == 0) barrier_arrive(ring.empty + before * 8);
        finish<T, KIND>(p, t, acc, buffer, stages, ring);
    }
}

template <class T, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const CUtensorMap& a_tensor, const CUtensorMap& b_tensor, const CUtensorMap& pre_tensor) {
    extern __shared__ char raw[];
    const uint32_t base = (address(raw) + 1023) / 1024 * 1024;
    char* start = raw + (base - address(raw));
    const uint32_t barriers = base + STAGES * STAGE_BYTES + 8 * WARP_OUT;
    Ring ring{barriers, barriers + STAGES * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, 128);
            barrier_init(ring.empty + s * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    const int64_t m_tiles = KIND == WGRAD ? p.m_tiles : *p.tile_count;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        produce<KIND>(p, a_tensor, b_tensor, pre_tensor, base, ring, m_tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
        T* buffer = reinterpret_cast<T*>(start + STAGES * STAGE_BYTES + threadIdx.x / 32 * WARP_OUT);
        multiply<T, KIND>(p, base, ring, m_tiles, buffer);
    }
}

}  // namespace hopper
