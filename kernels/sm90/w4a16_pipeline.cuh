// Parts that the files of `sm90_w4a16.cu` share: the shape of a tile, the rings between the warpgroups, the tiles of a
// block.
#pragma once
#include "common/epilogue.cuh"
#include "ptx/mbarrier_tma.cuh"

namespace w4a16 {
using namespace ptx;

constexpr int BLOCK_K = 64, THREADS = 512, BLOCK_N = 256, BLOCK_M = 128;
// Columns of the output that a tile makes.
template <int KIND>
constexpr int COLUMNS = KIND == UP ? BLOCK_M / 2 : BLOCK_M;
// Codes and scales come for two steps at a time: of a step 32 bytes of codes a weight row, then the four scales of each
// row, each twice in a word.
constexpr int CODE_STEPS = 2, SCALES_OFFSET = BLOCK_M * 32, CODE_STEP_BYTES = SCALES_OFFSET + BLOCK_M * 16, CODE_STAGE_BYTES = CODE_STEPS * CODE_STEP_BYTES;
// As they come, steps of codes and scales lie where the threads that asked for them read them.
constexpr int AHEAD = 3, RAW_STEP_BYTES = BLOCK_M * (32 + 4);
// Shared memory: both rings, codes as stored, what a warpgroup's results leave through, barriers.
constexpr int STAGES = 5, CODE_STAGES = 3, STAGE_BYTES = BLOCK_N * BLOCK_K * 2, STAGING_BYTES = 8192;
constexpr int CODES_OFFSET = STAGES * STAGE_BYTES, RAW_CODES_OFFSET = CODES_OFFSET + CODE_STAGES * CODE_STAGE_BYTES, STAGING_OFFSET = RAW_CODES_OFFSET + AHEAD * RAW_STEP_BYTES;
constexpr int BARRIER_OFFSET = STAGING_OFFSET + 2 * STAGING_BYTES;
constexpr int SMEM_BYTES = BARRIER_OFFSET + 2 * (STAGES + CODE_STAGES) * 8;
static_assert(SMEM_BYTES <= 232448, "a block has no more");
static_assert(BLOCK_M == W4A16_BLOCK_M && BLOCK_N == W4A16_BLOCK_N && THREADS == W4A16_THREADS && SMEM_BYTES == W4A16_SMEM, "common/shapes.h has others");

// The thread's number, read where this stands, and a value that the compiler keeps: left to itself it keeps what
// follows from the number through a whole tile, and makes what is wanted in each step anew, which takes a hundred
// cycles behind products.
__device__ __forceinline__ int reread_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return thread;
}
__device__ __forceinline__ uint32_t opaque(uint32_t v) { return __shfl_sync(~0u, v, threadIdx.x % 32); }

// A place in a ring, whose stages are used one after another, again and again.
template <int COUNT>
struct RingPosition {
    uint32_t stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, phase ^= 1;
    }
};
template <int COUNT, int BYTES>
struct Ring {
    using At = RingPosition<COUNT>;
    uint32_t stages, barriers;
    __device__ __forceinline__ uint32_t stage(const At& at) const { return stages + at.stage * BYTES; }
    __device__ __forceinline__ uint32_t full(const At& at) const { return barriers + at.stage * 8; }
    __device__ __forceinline__ uint32_t empty(const At& at) const { return full(at) + COUNT * 8; }
    __device__ __forceinline__ void wait_full(const At& at) const { mbarrier_wait(full(at), at.phase); }
    __device__ __forceinline__ uint32_t is_full(const At& at) const { return mbarrier_test_wait(full(at), at.phase); }
    __device__ __forceinline__ void wait_empty(const At& at) const { mbarrier_wait(empty(at), at.phase ^ 1); }
};
using RowRing = Ring<STAGES, STAGE_BYTES>;
using CodeRing = Ring<CODE_STAGES, CODE_STAGE_BYTES>;
struct Rings {
    RowRing rows;
    CodeRing codes;
    uint32_t stored, staging;
    __device__ __forceinline__ explicit Rings(uint32_t base)
        : rows{base, base + BARRIER_OFFSET}, codes{base + CODES_OFFSET, base + BARRIER_OFFSET + 2 * STAGES * 8}, stored(base + RAW_CODES_OFFSET), staging(base + STAGING_OFFSET) {}
};

// Tiles of this block: all columns of a row tile one after another.
struct TileScheduler {
    const GemmParams& p;
    __device__ __forceinline__ int count() const {
        const int all = *p.tile_count * static_cast<int>(p.n_tiles), own = blockIdx.x;
        return all > own ? (all - own - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    }
    // (group, first slot, rows, first column)
    template <int KIND>
    __device__ __forceinline__ int4 at(int i) const {
        const int id = blockIdx.x + i * gridDim.x, wide = static_cast<int>(p.n_tiles);
        int4 t = p.tiles[id / wide];
        t.w = id % wide * COLUMNS<KIND>;
        return t;
    }
};

// Row `own` of a tile's weights in the stack's matrix.
template <int KIND>
__device__ __forceinline__ int64_t weight_row(const GemmParams& p, const int4& t, int own) {
    return KIND == UP ? t.w + own / 16 * 8 + own % 8 + (own & 8 ? p.n : 0) : t.w + own;
}

// Place of 16 bytes of a row's codes within a step's: eight rows' are a line of the memory's banks.
__device__ __forceinline__ uint32_t code_place(int row, int chunk) { return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4); }

}  // namespace w4a16
