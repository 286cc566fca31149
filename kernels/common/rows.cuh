// Products of a layout's rows with their experts' weights on Hopper.
//
// A block stays on its multiprocessor and walks through tiles of 128 x 192. One warpgroup brings operands into a ring of
// four stages of 64 k; two multiply, taking turns: each makes whole tiles, so that one's epilogue runs under the other's
// products ("pingpong"). In the ring, one tile's stages follow the other's. A warpgroup looks at its first stage only when
// told that all stages before have come: a stage's barrier tells odd from even uses, not how many there were.
//
//   tile:           0             1             2             3
//   warpgroup 0:    [ products ][ epilogue  ]   [ products ][ epilogue  ]
//   warpgroup 1:                [ products ][ epilogue  ]   [ products ] ...
//
// Two blocks make a cluster, which works on two row tiles, of one expert where the schedule could pair them. They share
// the weights: each block asks for half of a stage's and the copy engine delivers it to both. Hence a stage is free when
// the readers of both blocks have released it, whether it was shared or not.
//
// Rows in slot order and weights come by the copy engine; rows behind a map by copies of 16 bytes a thread, which can
// follow it. Rows past a tile's end are zeros or the next zone's; their products are never stored.
#pragma once
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace rows {
using namespace hopper;

constexpr int BM = 128, BN = 192, BK = 64, STAGES = 4, THREADS = 384;
// Weights come in boxes of 32 rows of 64 k, or of 32 k of 64 columns. A pair of boxes is 64 columns of a tile; each block
// of the cluster brings one of the two.
constexpr int BOX = 4096, PAIRS = BN / 64;
constexpr int A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + PAIRS * 2 * BOX;
// Tiles described ahead. The producer is at most four stages, so as many tiles, ahead.
constexpr int WORKS = 8;
// Of a warp, for results on their way out.
constexpr int STAGING = 7680;
constexpr int SHARED = 1024 + STAGES * STAGE_BYTES + 8 * STAGING + WORKS * 16 + 2 * STAGES * 8;
static_assert(SHARED == 226496 && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

// Columns of the output that a tile makes; a pair of boxes makes a third of them.
template <int KIND>
constexpr int COLUMNS = KIND == UP ? BN / 2 : BN;

// One tile: `rows` of group `group` from slot `slot` on, and the columns from `column` on.
struct Work {
    int group, slot, rows, column;
    bool shared;  // the other block needs the same weights
};

// The tiles of this block, in order.
struct Walk {
    const Gemm& p;
    const uint32_t units;  // pairs of row tiles

    __device__ __forceinline__ explicit Walk(const Gemm& p) : p(p), units(*p.tile_count / 2) {}
    // How many.
    __device__ __forceinline__ uint32_t count() const {
        const uint32_t all = units * static_cast<uint32_t>(p.n_tiles), cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
        return all > cluster ? (all - cluster - 1) / clusters + 1 : 0;
    }
    // Eight column tiles pass over all rows before the next eight: their weights stay in L2.
    __device__ __forceinline__ Work at(uint32_t i, int columns) const {
        constexpr uint32_t GROUP = 8;
        const uint32_t id = blockIdx.x / 2 + i * (gridDim.x / 2);
        const uint32_t first = id / (GROUP * units) * GROUP;
        const uint32_t wide = min(GROUP, static_cast<uint32_t>(p.n_tiles) - first), rest = id - first * units;
        const uint32_t unit = rest / wide, n = first + rest % wide;
        const int4* tile = p.tiles + 2 * unit;
        const int4 own = tile[blockIdx.x % 2];
        return {own.x, own.y, own.z, static_cast<int>(n) * columns, own.x == tile[1 - blockIdx.x % 2].x};
    }
};

// What all roles share of a block: the ring by position. Position i is stage i % 4, used for the (i / 4)-th time.
struct Ring {
    uint32_t stages, full, empty, works;  // addresses
    __device__ __forceinline__ uint32_t stage(uint32_t at) const { return stages + at % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full_at(uint32_t at) const { return full + at % STAGES * 8; }
    __device__ __forceinline__ uint32_t empty_at(uint32_t at) const { return empty + at % STAGES * 8; }
    __device__ __forceinline__ void wait_full(uint32_t at) const { barrier_wait(full_at(at), at / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(uint32_t at) const { barrier_wait(empty_at(at), (at / STAGES & 1) ^ 1); }
    // By one lane of each reading warp.
    __device__ __forceinline__ void release(uint32_t at) const {
        barrier_arrive_at(empty_at(at), 0);
        barrier_arrive_at(empty_at(at), 1);
    }
};

// The copy engine's share of a stage.
template <int KIND>
struct Engine {
    const Gemm& p;
    const CUtensorMap &a, &b;
    const Ring& ring;
    bool direct;  // A comes this way too

    __device__ __forceinline__ void box(const Work& w, uint32_t at, int k, int pair, int half) const {
        constexpr bool BY_K = Stored<KIND>::b_by_k;
        const uint32_t to = ring.stage(at) + A_BYTES + (2 * pair + half) * BOX;
        const int column = w.column + pair * (COLUMNS<KIND> / PAIRS);
        const int x = BY_K ? column : k;
        const int y = BY_K ? k + half * 32 : column + (KIND == UP ? half * static_cast<int>(p.n) : half * 32);
        if (w.shared) bulk_both(to, b, ring.full_at(at), x, y, w.group);
        else bulk(to, b, ring.full_at(at), x, y, w.group);
    }
    // `pairs` pairs of boxes, and this thread's arrival.
    __device__ __forceinline__ void bring(const Work& w, uint32_t at, int k, int pairs) const {
        barrier_arrive_expect(ring.full_at(at), pairs * 2 * BOX + (direct ? A_BYTES : 0));
        for (int pair = 0; pair < pairs; pair++) {
            if (w.shared) {
                box(w, at, k, pair, blockIdx.x % 2);
            } else {
                box(w, at, k, pair, 0);
                box(w, at, k, pair, 1);
            }
        }
        if (direct) bulk(ring.stage(at), a, ring.full_at(at), k, w.slot);
    }
};

// Whether a tile is so near the last column that two pairs of boxes hold it.
template <int KIND>
__device__ __forceinline__ bool narrow(const Gemm& p, int column) {
    return KIND != DOWN_BWD && p.n - column <= COLUMNS<KIND> / PAIRS * 2;
}

__device__ __forceinline__ void describe(const Ring& ring, int i, const Work& w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(ring.works + i % WORKS * 16), "r"(w.group), "r"(w.slot), "r"(w.rows), "r"(w.column)
                 : "memory");
}

// Producer where the copy engine brings everything: one thread.
template <int KIND>
__device__ __forceinline__ void produce(const Gemm& p, const CUtensorMap& a, const CUtensorMap& b, const Ring& ring) {
    const Walk walk(p);
    const Engine<KIND> engine{p, a, b, ring, true};
    const int steps = static_cast<int>((p.k + BK - 1) / BK), count = walk.count();
    uint32_t at = 0;
    for (int i = 0; i < count; i++) {
        const Work w = walk.at(i, COLUMNS<KIND>);
        const int pairs = narrow<KIND>(p, w.column) ? 2 : 3;
        for (int step = 0; step < steps; step++, at++) {
            ring.wait_empty(at);
            if (step == 0) describe(ring, i, w);
            engine.bring(w, at, step * BK, pairs);
        }
    }
}

// Producer of rows behind a map: all four warps, eight threads a row. Each lane looks up one row of a tile, a tile ahead
// of its use, and gives it to the lanes that copy it.
template <int KIND>
__device__ __forceinline__ void gather(const Gemm& p, const CUtensorMap& a, const CUtensorMap& b, const Ring& ring) {
    const Walk walk(p);
    const Engine<KIND> engine{p, a, b, ring, false};
    const int thread = threadIdx.x % 128, lane = thread % 32, r = thread / 8, c = thread % 8;
    const int steps = static_cast<int>((p.k + BK - 1) / BK), count = walk.count();
    const int looked_up = thread / 32 * 4 + lane % 4 + lane / 4 * 16;
    auto look_up = [&](const Work& w) {
        return looked_up < w.rows ? static_cast<int>(mapped_row(p.a_map, w.slot + looked_up, p.a_rows, p.fault)) : -1;
    };
    const uint32_t words = static_cast<uint32_t>(p.k / 8);
    const uint32_t into = r * 128 + ((c ^ (r & 7)) << 4);
    int next_row = count > 0 ? look_up(walk.at(0, COLUMNS<KIND>)) : -1;
    uint32_t at = 0;
    for (int i = 0; i < count; i++) {
        const Work w = walk.at(i, COLUMNS<KIND>);
        const int pairs = narrow<KIND>(p, w.column) ? 2 : 3;
        uint32_t offset[8], live = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int row = __shfl_sync(~0u, next_row, j * 4 + lane / 8);
            offset[j] = row < 0 ? 0 : row * words;
            live |= static_cast<uint32_t>(row >= 0) << j;
        }
        const char* from = static_cast<const char*>(p.a) + c * 16;
        for (int step = 0; step < steps; step++, at++) {
            ring.wait_empty(at);
            if (thread == 0) {
                if (step == 0) describe(ring, i, w);
                engine.bring(w, at, step * BK, pairs);
            }
            const uint32_t to = ring.stage(at) + into;
            // Past the last k: zeros, read from the row's start.
            const bool inside = step * BK + c * 8 < p.k;
            const uint32_t valid = inside ? live : 0;
            const char* source = from + (inside ? step * (BK * 2) : 0);
#pragma unroll
            for (int j = 0; j < 8; j++) copy(to + j * 2048, source + static_cast<uint64_t>(offset[j]) * 16, valid >> j & 1);
            barrier_arrive_after_copies(ring.full_at(at));
            if (step == 0 && i + 1 < count) next_row = look_up(walk.at(i + 1, COLUMNS<KIND>));
        }
    }
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Operand in shared memory, swizzled by 128 bytes. By rows of 64 k, or in blocks of 64 columns with rows of one k.
template <bool BY_K>
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    const uint64_t leading = BY_K ? BK * 128 : 16, stride = 1024;
    return ((at & 0x3ffff) >> 4) | (leading >> 4 << 16) | (stride >> 4 << 32) | (1ull << 62);
}

using Sums = float[2][96];

// Keeps the compiler from moving accumulators while the matrix unit owns them.
template <int HALVES>
__device__ __forceinline__ void pin(Sums& acc) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int i = 0; i < 96; i++) asm volatile("" : "+f"(acc[h][i])::"memory");
    }
}

// The turn of warpgroup `group`, given by the other one.
__device__ __forceinline__ void take_turn(int group) { asm volatile("bar.sync %0, 256;\n" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;\n" ::"r"(1 + group) : "memory"); }

// Products of a tile: the first 64 rows or both 64 rows, and 192 or 128 columns. One step's stay in flight.
template <class T, int KIND, int HALVES, bool NARROW>
__device__ __forceinline__ void products(Sums& acc, const Ring& ring, uint32_t at, int steps, bool gathered, bool more) {
    constexpr bool B_BY_K = Stored<KIND>::b_by_k;
    const bool releases = threadIdx.x % 32 == 0;
    for (int step = 0; step < steps; step++) {
        ring.wait_full(at + step);
        if (more && step == steps - 1) give_turn(1 - threadIdx.x / 128);
        // The copies were ordinary writes; wgmma reads through another proxy.
        if (gathered) fence_proxy();
        const uint64_t a = operand<false>(ring.stage(at + step)), b = operand<B_BY_K>(ring.stage(at + step) + A_BYTES);
        pin<HALVES>(acc);
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
        for (int k = 0; k < BK / 16; k++) {
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const uint64_t da = a + h * 512 + k * 2, db = b + k * (B_BY_K ? 128 : 2);
                if constexpr (NARROW) wgmma_128<0, B_BY_K>(acc[h], da, db, step > 0 || k > 0, T{});
                else wgmma_192<0, B_BY_K>(acc[h], da, db, step > 0 || k > 0, T{});
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
        if (step > 0 && releases) ring.release(at + step - 1);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    pin<HALVES>(acc);
    if (releases) ring.release(at + steps - 1);
}

}  // namespace rows
