// Products of a layout's rows with their experts' weights on Hopper.
//
// A block stays on its SM and walks through tiles of 128 x 192. One warpgroup brings operands into a ring
// of stages of 64 k; two multiply, taking turns: each makes whole tiles, so that one's epilogue runs under the other's
// products ("pingpong"). In the ring, one tile's stages follow the other's. A warpgroup looks at its first stage only
// when told that all stages before have come: a stage's barrier tells odd from even uses, not how many there were.
//
//   tile:           0             1             2             3
//   warpgroup 0:    [ products ][ epilogue  ]   [ products ][ epilogue  ]
//   warpgroup 1:                [ products ][ epilogue  ]   [ products ] ...
//
// The up projection, whose rows are gathered, is made otherwise, as are wide tiles of 128 x 256: see COOPERATIVE. Square tiles, of
// 128 x 128, take turns in the same way.
//
// Two blocks make a cluster, which works on two row tiles, of one expert where the schedule could pair them. They share
// the weights: each block asks for half of a stage's and TMA delivers it to both. Hence a stage is free
// when the readers of both blocks have released it, whether it was shared or not.
//
// Rows in slot order and weights come by TMA; rows behind a map by copies of 16 bytes a thread, which can
// follow it. Rows past a tile's end are the next segment's, zeros, the tile's first row again, or whatever the stage
// held; their products are never stored. Tiles, ring and barriers in pictures, and the history: kernels/notes/grouped_gemm.md.
#pragma once
#include "common/epilogue.cuh"
#include "ptx/mbarrier_tma.cuh"
#include "ptx/wgmma.cuh"

namespace grouped_gemm {
using namespace ptx;

constexpr int BLOCK_M = 128, BLOCK_K = 64, THREADS = 384;

// The product that gathers and has a short epilogue makes wider tiles, of which each row is used more: both warpgroups
// together, 64 rows and all columns each.
// So does, with WIDE_TILE, a product whose K is long: its epilogue is a small part of it, and a wider tile reads less.
constexpr int WIDE_TILE = 16;
// With SQUARE_TILE, a product whose epilogue is long beside its K makes tiles of 128 columns: fewer sums leave registers
// for more of the epilogue at a time, and shared memory for a fifth stage.
constexpr int SQUARE_TILE = 32;
template <int KIND>
constexpr int OPERATION = KIND % WIDE_TILE;
template <int KIND>
constexpr bool SQUARE = KIND / SQUARE_TILE == 1;
template <int KIND>
constexpr bool COOPERATIVE = KIND == UP || KIND / WIDE_TILE == 1;
template <int KIND>
constexpr int BLOCK_N = COOPERATIVE<KIND> ? 256 : SQUARE<KIND> ? 128 : 192;
// Columns of the output that a tile makes.
template <int KIND>
constexpr int COLUMNS = KIND == UP ? BLOCK_N<KIND> / 2 : BLOCK_N<KIND>;

// Weights come in boxes of 32 rows of 64 k, or of 32 k of 64 columns. A pair of boxes is 64 columns of a tile; each
// block of the cluster brings one of the two.
constexpr int BOX_BYTES = 4096, A_BYTES = BLOCK_M * BLOCK_K * 2;
template <int KIND>
constexpr int PAIRS = BLOCK_N<KIND> / 64;
// Tiles described ahead. The producer is at most a ring, so as many tiles, ahead.
constexpr int QUEUED_TILES = 8;

// Results leave in boxes of 16 rows of 64 columns; DOWN_BWD's of 8.
constexpr int STORE_COLUMNS = 64, STORE_BOX_BYTES = GROUPED_GEMM_BOX_ROWS * STORE_COLUMNS * 2;

// Shared memory: the ring, two or three boxes a warp for results on their way out, descriptions of tiles, barriers. The
// gradient through the activation needs more room for its epilogue.
template <int KIND>
struct SmemLayout {
    static constexpr int STAGES = SQUARE<KIND> ? 5 : 4, STAGE_BYTES = A_BYTES + PAIRS<KIND> * 2 * BOX_BYTES;
    // Boxes of a warp that are on their way out at once.
    static constexpr int STORE_BUFFERS = COOPERATIVE<KIND> ? 2 : 3, STAGING = OPERATION<KIND> == DOWN_BWD ? 8192 : STORE_BUFFERS * STORE_BOX_BYTES;
    static constexpr int STAGING_OFFSET = STAGES * STAGE_BYTES, TILE_QUEUE_OFFSET = STAGING_OFFSET + 8 * STAGING, BARRIER_OFFSET = TILE_QUEUE_OFFSET + QUEUED_TILES * 16;
    static constexpr int WARP_BARRIER_OFFSET = BARRIER_OFFSET + 2 * STAGES * 8;  // barriers of each warp
    static constexpr int TICKET_OFFSET = WARP_BARRIER_OFFSET + (OPERATION<KIND> == DOWN_BWD ? 8 * 3 * 8 : 0);  // barriers, then words
    static constexpr int BYTES = TICKET_OFFSET + QUEUED_TILES * 12;
};
// What all blocks ask for. The largest layout, of square tiles, takes 229,872 bytes of it; the 231,616 are what up's took
// while its results left through rows of 272 bytes. Nothing is gained by asking for less: a block has its SM to itself with
// either, and the SM's memory is divided in the same way.
constexpr int SMEM_BYTES = GROUPED_GEMM_SMEM;
static_assert(SmemLayout<DOWN_BWD + SQUARE_TILE>::BYTES == 229872, "the lines above have another number");
static_assert(SmemLayout<UP>::BYTES <= SMEM_BYTES && SmemLayout<DOWN + WIDE_TILE>::BYTES <= SMEM_BYTES && SmemLayout<DOWN_BWD>::BYTES <= SMEM_BYTES && SmemLayout<DOWN_BWD + SQUARE_TILE>::BYTES <= SMEM_BYTES && SMEM_BYTES <= 232448, "a block has no more");
static_assert(BLOCK_M == GROUPED_GEMM_TILE && THREADS == GROUPED_GEMM_THREADS && BLOCK_N<UP> == GROUPED_GEMM_UP_COLUMNS && BLOCK_N<DOWN> == GROUPED_GEMM_COLUMNS && BLOCK_N<DOWN_BWD> == GROUPED_GEMM_COLUMNS && BLOCK_N<DOWN + WIDE_TILE> == GROUPED_GEMM_WIDE_COLUMNS && BLOCK_N<DOWN_BWD + SQUARE_TILE> == GROUPED_GEMM_SQUARE_COLUMNS, "common/shapes.h has others");

// One tile: `rows` of group `group` from slot `slot` on, and the columns from `column` on.
struct WorkTile {
    int group, slot, rows, column;
    bool shared;  // the other block needs the same weights
};

// The tiles, by number.
struct TileScheduler {
    const GemmParams& p;
    const uint32_t units, all;  // pairs of row tiles; tiles of a cluster

    __device__ __forceinline__ explicit TileScheduler(const GemmParams& p) : p(p), units(*p.tile_count / 2), all(units * static_cast<uint32_t>(p.n_tiles)) {}
    // Eight column tiles pass over all rows before the next eight: their weights stay in L2.
    __device__ __forceinline__ WorkTile at(uint32_t id, int columns) const {
        constexpr uint32_t GROUP = 8;
        const uint32_t first = id / (GROUP * units) * GROUP;
        const uint32_t wide = min(GROUP, static_cast<uint32_t>(p.n_tiles) - first), rest = id - first * units;
        const uint32_t unit = rest / wide, n = first + rest % wide;
        const int4* tile = p.tiles + 2 * unit;
        const int4 own = tile[blockIdx.x % 2];
        return {own.x, own.y, own.z, static_cast<int>(n) * columns, own.x == tile[1 - blockIdx.x % 2].x};
    }
};

// State of a block that all roles share: the ring by position. Position i is stage i % STAGES, used for the (i /
// STAGES)-th time.
template <int KIND>
struct Ring {
    static constexpr uint32_t STAGES = SmemLayout<KIND>::STAGES;
    uint32_t base;  // address of the shared memory
    __device__ __forceinline__ uint32_t stage(uint32_t at) const { return base + at % STAGES * SmemLayout<KIND>::STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full_at(uint32_t at) const { return base + SmemLayout<KIND>::BARRIER_OFFSET + at % STAGES * 8; }
    __device__ __forceinline__ uint32_t empty_at(uint32_t at) const { return full_at(at) + STAGES * 8; }
    __device__ __forceinline__ uint32_t tile_slot(uint32_t i) const { return base + SmemLayout<KIND>::TILE_QUEUE_OFFSET + i % QUEUED_TILES * 16; }
    __device__ __forceinline__ uint32_t ticket_full(uint32_t i) const { return base + SmemLayout<KIND>::TICKET_OFFSET + i % QUEUED_TILES * 8; }
    __device__ __forceinline__ uint32_t ticket(uint32_t i) const { return base + SmemLayout<KIND>::TICKET_OFFSET + QUEUED_TILES * 8 + i % QUEUED_TILES * 4; }
    __device__ __forceinline__ void wait_full(uint32_t at) const { mbarrier_wait(full_at(at), at / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(uint32_t at) const { mbarrier_wait(empty_at(at), (at / STAGES & 1) ^ 1); }
    // By one lane of each reading warp.
    __device__ __forceinline__ void release(uint32_t at) const {
        mbarrier_arrive_cluster(empty_at(at), 0);
        mbarrier_arrive_cluster(empty_at(at), 1);
    }
};

// TMA's share of a stage.
template <int KIND>
struct TmaLoader {
    const GemmParams& p;
    const CUtensorMap &a, &b;
    const Ring<KIND>& ring;
    bool direct;  // A comes this way too

    __device__ __forceinline__ void load_box(const WorkTile& w, uint32_t at, int k, int pair, int half) const {
        constexpr bool MN_MAJOR = OperandMajor<OPERATION<KIND>>::b_mn_major;
        const uint32_t to = ring.stage(at) + A_BYTES + (2 * pair + half) * BOX_BYTES;
        const int column = w.column + pair * (COLUMNS<KIND> / PAIRS<KIND>);
        const int x = MN_MAJOR ? column : k;
        const int y = MN_MAJOR ? k + half * 32 : column + (KIND == UP ? half * static_cast<int>(p.n) : half * 32);
        if (w.shared) tma_load_multicast(to, b, ring.full_at(at), x, y, w.group);
        else tma_load(to, b, ring.full_at(at), x, y, w.group);
    }
    // `box_pairs` pairs of boxes, and this thread's arrival.
    __device__ __forceinline__ void load_stage(const WorkTile& w, uint32_t at, int k, int pairs) const {
        mbarrier_arrive_expect_tx(ring.full_at(at), pairs * 2 * BOX_BYTES + (direct ? A_BYTES : 0));
#pragma unroll
        for (int pair = 0; pair < PAIRS<KIND>; pair++) {
            if (pair >= pairs) break;
            if (w.shared) {
                load_box(w, at, k, pair, blockIdx.x % 2);
            } else {
                load_box(w, at, k, pair, 0);
                load_box(w, at, k, pair, 1);
            }
        }
        if (direct) tma_load(ring.stage(at), a, ring.full_at(at), k, w.slot);
    }
};

// Whether a tile is so near the last column that two of its three pairs of boxes hold it.
template <int KIND>
__device__ __forceinline__ bool narrow_tile(const GemmParams& p, int column) {
    return !COOPERATIVE<KIND> && !SQUARE<KIND> && p.n - column <= COLUMNS<KIND> / PAIRS<KIND> * 2;
}
template <int KIND>
__device__ __forceinline__ int box_pairs(const GemmParams& p, int column) {
    return narrow_tile<KIND>(p, column) ? 2 : PAIRS<KIND>;
}

template <int KIND>
__device__ __forceinline__ void publish_tile(const Ring<KIND>& ring, int i, const WorkTile& w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(ring.tile_slot(i)), "r"(w.group), "r"(w.slot), "r"(w.rows), "r"(w.column)
                 : "memory");
}

// Numbers of the whole warp, and known to be.
__device__ __forceinline__ WorkTile warp_uniform(WorkTile w) {
    return {__shfl_sync(~0u, w.group, 0), __shfl_sync(~0u, w.slot, 0), __shfl_sync(~0u, w.rows, 0), __shfl_sync(~0u, w.column, 0), __shfl_sync(~0u, static_cast<int>(w.shared), 0) != 0};
}

// A tile whose description says this ends the block's walk.
constexpr int NO_ROWS = -1;

// The numbers of a cluster's tiles: its own, and then the next that no cluster has taken. Block 0 asks for them, a tile
// ahead, and tells both.
template <int KIND>
struct Tickets {
    const GemmParams& p;
    const Ring<KIND>& ring;
    uint32_t all, id, asked;

    __device__ __forceinline__ Tickets(const GemmParams& p, const Ring<KIND>& ring, uint32_t all) : p(p), ring(ring), all(all), id(blockIdx.x / 2), asked(0) {}
    // By one thread of either block, in tile i: for the number of the next.
    __device__ __forceinline__ void ask(uint32_t i) {
        mbarrier_arrive_expect_tx(ring.ticket_full(i), 4);
        if (blockIdx.x % 2 == 0) asked = atomicAdd(p.ticket, 1u);
    }
    // By the same.
    __device__ __forceinline__ void tell(uint32_t i) const {
        if (blockIdx.x % 2 != 0) return;
        if (asked == all - 1) *p.ticket = 0;  // nobody asks any more
        store_cluster(ring.ticket(i), asked + gridDim.x / 2, ring.ticket_full(i), 0);
        store_cluster(ring.ticket(i), asked + gridDim.x / 2, ring.ticket_full(i), 1);
    }
    // By all who bring.
    __device__ __forceinline__ void take(uint32_t i) {
        mbarrier_wait(ring.ticket_full(i), i / QUEUED_TILES & 1);
        asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(id) : "r"(ring.ticket(i)) : "memory");
        id = __shfl_sync(~0u, id, 0);
    }
    __device__ __forceinline__ bool more() const { return id < all; }
};

// What a product waits for that starts while its rows are still coming (sm90_nvlink_groups.cu).
struct Arrivals {
    const GemmParams& p;
    int seen = 0;  // groups

    // Until the rows of a tile of this expert have come. By all who bring rows: the number is not cleared while any waits.
    __device__ __forceinline__ void wait(int expert) {
        if (p.arrived == nullptr) return;
        const int needed = expert / static_cast<int>(p.arrived_experts) + 1;
        while (seen < needed) {
            unsigned long long come;
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(come) : "l"(p.arrived) : "memory");
            seen = static_cast<int>(come);
            if (seen < needed) __nanosleep(100);
        }
    }
};

// Producer where TMA brings everything: one warp.
template <int KIND>
__device__ __forceinline__ void produce_tma(const GemmParams& p, const CUtensorMap& a, const CUtensorMap& b, const Ring<KIND>& ring) {
    const TileScheduler scheduler(p);
    const TmaLoader<KIND> loader{p, a, b, ring, true};
    const int steps = static_cast<int>((p.k + BLOCK_K - 1) / BLOCK_K);
    Tickets<KIND> tickets(p, ring, scheduler.all);
    uint32_t at = 0, i = 0;
    while (tickets.more()) {
        const WorkTile w = warp_uniform(scheduler.at(tickets.id, COLUMNS<KIND>));
        const int asks = max(steps - 8, 0), tells = max(steps - 4, 0);
        for (int step = 0; step < steps; step++, at++) {
            ring.wait_empty(at);
            if (!elect_one()) continue;
            if (step == 0) publish_tile(ring, i, w);
            if (step == asks) tickets.ask(i);
            loader.load_stage(w, at, step * BLOCK_K, box_pairs<KIND>(p, w.column));
            if (step == tells) tickets.tell(i);
        }
        tickets.take(i++);
    }
    ring.wait_empty(at);
    if (elect_one()) {
        publish_tile(ring, i, WorkTile{0, 0, NO_ROWS, 0, false});
        mbarrier_arrive(ring.full_at(at));
    }
}

// Producer of rows behind a map: all four warps, eight threads a row. Each lane looks up one row of a tile, a tile
// ahead of its use, and gives it to the lanes that copy it.
//
// UNROLLED steps share a row's address, which is then read in place. With 1 it is moved on in each step, and the
// compiler passes every copy's address through one pair of registers: each copy waits until the one before has been
// taken.
template <int KIND, int UNROLLED>
__device__ __forceinline__ void produce_gather(const GemmParams& p, const CUtensorMap& a, const CUtensorMap& b, const Ring<KIND>& ring) {
    const TileScheduler scheduler(p);
    const TmaLoader<KIND> loader{p, a, b, ring, false};
    const int thread = threadIdx.x % 128, lane = thread % 32, r = thread / 8, c = thread % 8;
    const int steps = static_cast<int>((p.k + BLOCK_K - 1) / BLOCK_K);
    Tickets<KIND> tickets(p, ring, scheduler.all);
    const bool orders = __shfl_sync(~0u, thread / 32, 0) == 0;
    const int looked_up = thread / 32 * 4 + lane % 4 + lane / 4 * 16;
    // The tile's first row in place of none: its products are not stored, and no other block asks for it as often.
    auto look_up = [&](int slot, int rows) {
        const int64_t row = mapped_row(p.a_map, slot + (looked_up < rows ? looked_up : 0), p.a_rows, p.fault, p.site);
        return static_cast<int>(row < 0 ? 0 : row);
    };
    const uint32_t into = r * 128 + ((c ^ (r & 7)) << 4);
    int row = 0;  // of the next tile
    WorkTile next{};
    if (tickets.more()) {
        next = scheduler.at(tickets.id, COLUMNS<KIND>);
        row = look_up(next.slot, next.rows);
    }
    // Steps that end with the next tile's number, and with its rows.
    const int takes = max((steps - 8) / UNROLLED * UNROLLED, 0), looks = min(takes + 1, steps - 1);
    uint32_t at = 0, i = 0;
    Arrivals arrivals{p};
    while (tickets.more()) {
        const WorkTile w = KIND == UP ? next : warp_uniform(next);
        arrivals.wait(w.group);
        const int passes = (w.rows + 15) / 16;  // 16 rows each; what later ones would bring is not stored either
        const char* from[8];
#pragma unroll
        for (int j = 0; j < 8; j++) from[j] = static_cast<const char*>(p.a) + __shfl_sync(~0u, row, j * 4 + lane / 8) * p.k * 2 + c * 16;
        for (int first = 0; first < steps; first += UNROLLED) {
#pragma unroll
            for (int u = 0; u < UNROLLED; u++, at++) {
                const int step = first + u;
                if (step >= steps) break;
                ring.wait_empty(at);
                // Up alone is slower with an elected lane, by up to 1 % (kernels/notes/grouped_gemm.md, "Version 12").
                if (KIND == UP ? thread == 0 : orders && elect_one()) {
                    if (step == 0) publish_tile(ring, i, w), tickets.ask(i);
                    loader.load_stage(w, at, step * BLOCK_K, box_pairs<KIND>(p, w.column));
                    if (u == 0 && step == takes) tickets.tell(i);
                }
                const uint32_t to = ring.stage(at) + into;
                const bool inside = step * BLOCK_K + c * 8 < p.k;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j < passes) cp_async(to + j * 2048, from[j] + u * (BLOCK_K * 2), inside);
                }
                mbarrier_arrive_after_cp_async(ring.full_at(at));
                // The next tile's number, and when that has come its rows.
                if (u > 1) continue;
                if (step == takes) {
                    tickets.take(i);
                    if (tickets.more()) next = scheduler.at(tickets.id, COLUMNS<KIND>);
                }
                if (step == looks && tickets.more()) row = look_up(next.slot, next.rows);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) from[j] += UNROLLED * BLOCK_K * 2;
        }
        i++;
    }
    ring.wait_empty(at);
    if (thread == 0) {
        publish_tile(ring, i, WorkTile{0, 0, NO_ROWS, 0, false});
        mbarrier_arrive(ring.full_at(at));
    }
    mbarrier_arrive(ring.full_at(at));
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Operand in shared memory, swizzled by 128 bytes. By rows of 64 k, or in blocks of 64 columns with rows of one k.
template <bool MN_MAJOR>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t at) {
    const uint64_t leading = MN_MAJOR ? BLOCK_K * 128 : 16, stride = 1024;
    return ((at & 0x3ffff) >> 4) | (leading >> 4 << 16) | (stride >> 4 << 32) | (1ull << 62);
}

// Accumulators of a thread: both halves of 64 rows, or its own.
template <int KIND>
constexpr int HALVES = COOPERATIVE<KIND> ? 1 : 2;
template <int KIND>
using Accumulators = float[HALVES<KIND>][BLOCK_N<KIND> / 2];

// Keeps the compiler from moving accumulators while the tensor core owns them.
template <int N>
__device__ __forceinline__ void fence_registers(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}

// The turn of warpgroup `group`, given by the other one.
__device__ __forceinline__ void pingpong_wait(int group) { asm volatile("bar.sync %0, 256;\n" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void pingpong_arrive(int group) { asm volatile("bar.arrive %0, 256;\n" ::"r"(1 + group) : "memory"); }

// Products of a tile: its first COUNT halves, or the warpgroup's own, and all columns or 128. One step's stay in
// flight.
template <class T, int KIND, int COUNT, bool NARROW>
__device__ __forceinline__ void mma_tile(Accumulators<KIND>& acc, const Ring<KIND>& ring, uint32_t at, int steps, bool gathered, bool more) {
    constexpr bool B_MN_MAJOR = OperandMajor<OPERATION<KIND>>::b_mn_major;
    const bool releases = threadIdx.x % 32 == 0;
    const int first = COOPERATIVE<KIND> ? threadIdx.x / 128 : 0;
    for (int step = 0; step < steps; step++) {
        ring.wait_full(at + step);
        if (!COOPERATIVE<KIND> && more && step == steps - 1) pingpong_arrive(1 - threadIdx.x / 128);
        // The copies were ordinary writes; wgmma reads through another proxy.
        if (gathered) fence_proxy_async();
        const uint64_t a = smem_descriptor<false>(ring.stage(at + step)) + first * 512, b = smem_descriptor<B_MN_MAJOR>(ring.stage(at + step) + A_BYTES);
#pragma unroll
        for (int h = 0; h < COUNT; h++) fence_registers(acc[h]);
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++) {
#pragma unroll
            for (int h = 0; h < COUNT; h++) {
                const uint64_t da = a + h * 512 + k * 2, db = b + k * (B_MN_MAJOR ? 128 : 2);
                if constexpr (COOPERATIVE<KIND>) wgmma<0, B_MN_MAJOR>(acc[h], da, db, step > 0 || k > 0, T{});
                else if constexpr (SQUARE<KIND> || NARROW) wgmma_128<0, B_MN_MAJOR>(acc[h], da, db, step > 0 || k > 0, T{});
                else wgmma_192<0, B_MN_MAJOR>(acc[h], da, db, step > 0 || k > 0, T{});
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
        if (step > 0 && releases) ring.release(at + step - 1);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
    for (int h = 0; h < COUNT; h++) fence_registers(acc[h]);
    if (releases) ring.release(at + steps - 1);
}

// A tile in which the warpgroup has no rows.
template <int KIND>
__device__ __forceinline__ void skip_tile(const Ring<KIND>& ring, uint32_t at, int steps) {
    for (int step = 0; step < steps; step++) {
        ring.wait_full(at + step);
        if (threadIdx.x % 32 == 0) ring.release(at + step);
    }
}

}  // namespace grouped_gemm
