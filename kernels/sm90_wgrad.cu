// Weight gradients on Hopper (sm_90a): for each expert, the sum over its slots of one row times another. Every other
// architecture, and what src/cuda/wgrad.rs says, takes the portable kernels. Empty where the architecture is another.
//
// In: rows [T or N, narrow], which may lie behind a map, and [N, wide] in slot order, bf16 or f16. Out: [E, narrow,
// wide] or [E, wide, narrow], of their type or f32, written or added to. A block an SM at most, in clusters
// of two.
//
// The output of an expert is cut into tiles of 128 by 256. The narrow side is the operand that may lie behind a map: a
// warpgroup of producers gathers it with copies of 16 bytes a thread, as TMA cannot follow a map. The
// wide side lies in slot order and comes by TMA. Two warpgroups multiply, 64 columns of the narrow side
// each. Sums leave through shared memory as they are or transposed, so that the mapped operand may be the left or the
// right one. Limited by shared memory, whose 128 bytes a cycle products and loads use up. Notes:
// kernels/notes/wgrad.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "ptx/wgmma.cuh"
#include "sm90/wgrad_gather.cuh"

namespace {
using namespace wgrad;

// Sums leave 64 rows of 128 bytes at a time; each multiplying warpgroup has two such slices.
constexpr int SLICE_BYTES = 64 * 128, SLICES = 2;
constexpr int SMEM_BYTES = 1024 + STAGES * STAGE_BYTES + 2 * SLICES * SLICE_BYTES + 2 * STAGES * 8;
static_assert(SMEM_BYTES <= 232448, "a block has no more");
static_assert(BLOCK_M == WGRAD_BLOCK_M && BLOCK_N == WGRAD_BLOCK_N && THREADS == WGRAD_THREADS && SMEM_BYTES == WGRAD_SMEM, "common/shapes.h has others");

// Adds a box to the output, or writes it, of which the part outside the matrix is dropped.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t from, int x, int y, int z, bool add) {
    if (!add) return ptx::tma_store(map, from, x, y, z);
    asm volatile(EVICT_FIRST("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1]") ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory"); }

// ------------------------------------------------------------------------------------------ the order of tiles

// The tiles of this block, an expert after the other; within one, along the narrow side first: blocks that run side by
// side then read the same columns of the wide one. Two blocks make a cluster and take neighboring tiles of the narrow
// side (the last may lie outside); either brings half of the wide one, for both. Segments are read a tile ahead of
// their use.
struct TileScheduler {
    const WeightGradParams& p;
    unsigned id, pairs, per_group, total;
    long long offset, count;

    __device__ explicit TileScheduler(const WeightGradParams& p) : p(p), id(blockIdx.x / 2), offset(0), count(0) {
        pairs = static_cast<unsigned>((p.narrow + 2 * BLOCK_M - 1) / (2 * BLOCK_M));
        per_group = pairs * static_cast<unsigned>((p.wide + BLOCK_N - 1) / BLOCK_N);
        total = per_group * static_cast<unsigned>(p.groups);
        read_ahead();
    }
    __device__ __forceinline__ void read_ahead() {
        if (id >= total) return;
        const unsigned group = id / per_group;
        // Volatile, or the compiler would wait with the load until the numbers are needed.
        asm volatile("ld.global.nc.s64 %0, [%1];\n" : "=l"(offset) : "l"(p.offsets + group));
        asm volatile("ld.global.nc.s64 %0, [%1];\n" : "=l"(count) : "l"(p.counts + group));
    }
    // Where sums are added, experts without slots have nothing to add.
    __device__ __forceinline__ bool next(WorkTile& t) {
        do {
            if (id >= total) return false;
            t.group = static_cast<int>(id / per_group);
            const unsigned within = id % per_group;
            t.narrow = static_cast<int>((within % pairs * 2 + blockIdx.x % 2) * BLOCK_M);
            t.wide = static_cast<int>(within / pairs * BLOCK_N);
            t.first = static_cast<int>(offset), t.count = static_cast<int>(count);
            if (offset < 0 || count < 0 || offset > p.slots - count) {
                if (threadIdx.x == 0 && count != 0) raise_segment(p.fault, p.first + t.group, offset, count, p.site);
                t.first = t.count = 0;
            }
            id += gridDim.x / 2;
            read_ahead();
        } while (t.count == 0 && p.accumulate);
        return true;
    }
};

// Stages in shared memory: `full` counts 128 producers, the announcement of TMA's bytes and these, `empty` the 8
// multiplying warps of either block.
struct Ring {
    uint32_t stages, full, empty;
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ uint32_t at() const { return stages + stage * STAGE_BYTES; }
    __device__ uint32_t full_barrier() const { return full + stage * 8; }
    __device__ uint32_t empty_barrier() const { return empty + stage * 8; }
};

// ------------------------------------------------------------------------------------------ producers

template <class Gather>
__device__ __forceinline__ void produce(const WeightGradParams& p, const CUtensorMap& narrow, const CUtensorMap& wide, Ring ring) {
    const bool orders = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0) == 0, gathers = p.map != nullptr;
    TileScheduler scheduler(p);
    WorkTile t;
    while (scheduler.next(t)) {
        Gather gather(p, gathers ? t : WorkTile{});
        for (int k = 0; k < t.count; k += BLOCK_K) {
            if (gathers) gather.find_rows(k, t.count);
            mbarrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            const uint32_t full = ring.full_barrier();
            if (Gather::ELECTED ? orders && elect_one() : threadIdx.x % 128 == 0) {
                mbarrier_arrive_expect_tx(full, B_BYTES + (gathers ? 0 : A_BYTES));
#pragma unroll
                for (int i = 0; i < BLOCK_N / 128; i++) {
                    const int b = blockIdx.x % 2 * (BLOCK_N / 128) + i;
                    tma_load_multicast(ring.at() + A_BYTES + b * BLOCK_BYTES, wide, full, t.wide + b * 64, t.first + k);
                }
                for (int b = 0; b < BLOCK_M / 64 && !gathers; b++) tma_load(ring.at() + b * BLOCK_BYTES, narrow, full, t.narrow + b * 64, t.first + k);
            }
            if (gathers) gather.copy_rows(ring.at(), k);
            // Behind copies, a thread's arrival comes to pass when all of them have landed: no row is multiplied before it is
            // there. Without copies in flight, or of copies that read nothing, it may come to pass before the announcement
            // above, though the thread made that first; the announcement is an arrival of its own, so that no phase ends
            // without it.
            if (gathers) mbarrier_arrive_after_cp_async(full);
            else mbarrier_arrive(full);
            if (gathers) gather.next(k, t);
            ring.next();
        }
    }
}

// ------------------------------------------------------------------------------------------ sums

// Operand of which a row is one slot: 64-column blocks follow each other, eight slots are 1024 bytes.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t at) {
    const uint64_t leading = BLOCK_BYTES, stride = 1024;
    return ((at & 0x3ffff) >> 4) | (leading >> 4 << 16) | (stride >> 4 << 32) | (1ull << 62);
}

// The last step of a segment: TMA has brought rows of the next one, or padding, which may be NaN and would
// spoil the sum even against zeros. Those within the last 16 become zeros; the others are not multiplied.
__device__ __forceinline__ void zero_rows(uint32_t at, int blocks, int live) {
    // Of each block, a thread has one chunk of one of 16 rows.
    const int chunk = threadIdx.x % 8, row = live + threadIdx.x / 8 % 16;
    if (row >= (live + 15) / 16 * 16) return;
    for (int b = threadIdx.x / 128; b < blocks; b += 2) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(at + b * BLOCK_BYTES + row * 128 + chunk * 16), "r"(0) : "memory");
    }
}

// Two sums as one word.
template <class T>
__device__ __forceinline__ uint32_t pack(const float* v) {
    T pair[2] = {from_float<T>(v[0]), from_float<T>(v[1])};
    uint32_t word;
    memcpy(&word, pair, 4);
    return word;
}

// A slice's 32 sums of each thread, `word(i)` being two of them, to 64 rows of 128 bytes, swizzled, in the order of the
// output. Slice s of 16-bit sums holds columns 64 s of the wide side on.
template <class Word>
__device__ __forceinline__ void stage_16bit(uint32_t to, bool transposed, Word&& word) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, half = lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const uint32_t w[4] = {word(2 * j), word(2 * j + 1), word(2 * j + 2), word(2 * j + 3)};
        // Matrices of 8 x 8: rows 0 and 8 of columns 8 j, then of 8 (j + 1). This lane addresses a row of one of them.
        const int block = j + lane / 16, other = warp * 2 + half;
        const int row = transposed ? block * 8 + lane % 8 : other * 8 + lane % 8, chunk = transposed ? other : block;
        const uint32_t at = to + row * 128 + ((chunk ^ (row & 7)) << 4);
        if (transposed) {
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        } else {
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    }
}

// The same in f32, 16 sums of each thread: 32 columns of the wide side, in two boxes of 32 by 32.
__device__ __forceinline__ void stage_f32(uint32_t to, const float* v, bool transposed) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int n = warp * 16 + lane / 4 + i / 2 % 2 * 8, w = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = transposed ? n / 32 * 32 + w : n, x = transposed ? n % 32 : w;
        const uint32_t at = to + row * 128 + ((x / 4 ^ (row & 7)) << 4) + x % 4 * 4;
        asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(at), "f"(v[i]) : "memory");
    }
}

// Sends slice s of a warpgroup's sums: `stage` puts it into shared memory, `store` has TMA take it.
template <class Stage, class Store>
__device__ __forceinline__ void store_slice(uint32_t slices, int s, Stage&& stage, Store&& store) {
    const int group = threadIdx.x / 128;
    const bool issues = threadIdx.x % 128 == 0;
    const uint32_t at = slices + (group * SLICES + s % SLICES) * SLICE_BYTES;
    if (issues) asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(SLICES - 1) : "memory");
    named_barrier(1 + group, 128);
    stage(at);
    fence_proxy_async();
    named_barrier(1 + group, 128);
    if (issues) {
        store(at);
        asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
    }
}

// Sends all of a tile's sums.
template <class T>
__device__ __forceinline__ void epilogue(const WeightGradParams& p, const CUtensorMap& out, const WorkTile& t, const float (&acc)[128], uint32_t slices) {
    const bool transposed = p.transposed, full = p.out_type == TYPE_F32;
    const int narrow = t.narrow + threadIdx.x / 128 * 64;
    if (full) {
#pragma unroll
        for (int s = 0; s < 8; s++) {
            const int wide = t.wide + s * 32;
            store_slice(slices, s, [&](uint32_t at) { stage_f32(at, acc + 16 * s, transposed); },
                       [&](uint32_t at) {
                           for (int b = 0; b < 2; b++) {
                               const int x = transposed ? narrow + b * 32 : wide, y = transposed ? wide : narrow + b * 32;
                               tma_store(out, at + b * 4096, x, y, t.group, p.accumulate);
                           }
                       });
        }
    } else {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int wide = t.wide + s * 64;
            store_slice(slices, s, [&](uint32_t at) { stage_16bit(at, transposed, [&](int i) { return pack<T>(acc + 32 * s + 2 * i); }); },
                       [&](uint32_t at) { tma_store(out, at, transposed ? narrow : wide, transposed ? wide : narrow, t.group, p.accumulate); });
        }
    }
}

// Sums of a tile that is done, rounded, which leave a slice at a time under the first products of the next one.
struct DeferredStore {
    uint32_t words[64];
    int group, narrow, wide, left = 0;

    template <class T>
    __device__ __forceinline__ void take(const WorkTile& t, const float (&acc)[128]) {
#pragma unroll
        for (int i = 0; i < 64; i++) words[i] = pack<T>(acc + 2 * i);
        group = t.group, narrow = t.narrow + threadIdx.x / 128 * 64, wide = t.wide, left = 4;
    }
    template <int S>
    __device__ __forceinline__ void send(const WeightGradParams& p, const CUtensorMap& out, uint32_t slices) const {
        const bool transposed = p.transposed;
        const int at_wide = wide + S * 64;
        store_slice(slices, S, [&](uint32_t at) { stage_16bit(at, transposed, [&](int i) { return words[16 * S + i]; }); },
                   [&](uint32_t at) { tma_store(out, at, transposed ? narrow : at_wide, transposed ? at_wide : narrow, group, p.accumulate); });
    }
    __device__ __forceinline__ void send_next(const WeightGradParams& p, const CUtensorMap& out, uint32_t slices) {
        if (left == 0) return;
        if (left == 4) send<0>(p, out, slices);
        else if (left == 3) send<1>(p, out, slices);
        else if (left == 2) send<2>(p, out, slices);
        else send<3>(p, out, slices);
        left--;
    }
    __device__ __forceinline__ void send_all(const WeightGradParams& p, const CUtensorMap& out, uint32_t slices) {
        while (left > 0) send_next(p, out, slices);
    }
};

// Keeps the compiler from moving what touches the sums across matrix instructions.
__device__ __forceinline__ void fence_registers(float (&acc)[128]) {
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(acc[i])::"memory");
}
__device__ __forceinline__ void wgmma_arrive(float (&acc)[128]) {
    fence_registers(acc);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// DEFERRED: a tile's sums leave under the next one's products. Sums that leave in f32 would take registers which are not
// there.
template <class T, bool DEFERRED>
__device__ __forceinline__ void consume(const WeightGradParams& p, const CUtensorMap& out, Ring ring, uint32_t slices) {
    const uint32_t own = threadIdx.x / 128 * BLOCK_BYTES;
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        if (lane < 2) mbarrier_arrive_cluster(ring.empty + stage * 8, lane);
    };
    TileScheduler scheduler(p);
    WorkTile t;
    float acc[128];
    DeferredStore done;
    while (scheduler.next(t)) {
        if (t.count == 0) {
#pragma unroll
            for (int i = 0; i < 128; i++) acc[i] = 0.0f;
        }
        int before = -1, k = 0;
        for (; k + BLOCK_K <= t.count; k += BLOCK_K) {
            mbarrier_wait(ring.full_barrier(), ring.parity);
            // The gathering copies were ordinary writes; wgmma reads through another proxy.
            fence_proxy_async();
            const uint64_t a = smem_descriptor(ring.at() + own), b = smem_descriptor(ring.at() + A_BYTES);
            wgmma_arrive(acc);
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; i++) wgmma<1, 1>(acc, a + i * 128, b + i * 128, k + i > 0, T{});
            wgmma_commit();
            if constexpr (DEFERRED) done.send_next(p, out, slices);
            asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
            if (before >= 0) release(before);
            before = ring.stage;
            ring.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
        fence_registers(acc);
        if (before >= 0) release(before);
        if (k < t.count) {
            const int live = t.count - k;
            mbarrier_wait(ring.full_barrier(), ring.parity);
            if (live % 16 != 0) {
                zero_rows(ring.at() + A_BYTES, BLOCK_N / 64, live);
                if (!p.map) zero_rows(ring.at(), BLOCK_M / 64, live);
                fence_proxy_async();
                named_barrier(3, 256);
            }
            fence_proxy_async();
            const uint64_t a = smem_descriptor(ring.at() + own), b = smem_descriptor(ring.at() + A_BYTES);
#pragma unroll 1
            for (int i = 0; i * 16 < live; i++) {
                wgmma_arrive(acc);
                wgmma<1, 1>(acc, a + i * 128, b + i * 128, k + i > 0, T{});
                wgmma_commit();
                asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
                fence_registers(acc);
            }
            release(ring.stage);
            ring.next();
        }
        if constexpr (DEFERRED) {
            done.send_all(p, out, slices);
            done.take<T>(t, acc);
        } else {
            epilogue<T>(p, out, t, acc, slices);
        }
    }
    if constexpr (DEFERRED) done.send_all(p, out, slices);
    // TMA must have read the last slices before their memory goes.
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

template <class T>
__device__ __forceinline__ void run(const WeightGradParams& p, const CUtensorMap& narrow, const CUtensorMap& wide, const CUtensorMap& out) {
    extern __shared__ char raw[];
    const uint32_t base = (smem_address(raw) + 1023) / 1024 * 1024, slices = base + STAGES * STAGE_BYTES;
    const uint32_t barriers = slices + 2 * SLICES * SLICE_BYTES;
    const Ring ring{base, barriers, barriers + STAGES * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(ring.full + s * 8, 129);
            mbarrier_init(ring.empty + s * 8, 16);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    cluster_sync();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const bool full = p.out_type == TYPE_F32;
    if (role == 2) {
        if (full) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 72;\n");
            produce<SlowGather>(p, narrow, wide, ring);
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
            produce<FastGather>(p, narrow, wide, ring);
        }
    } else if (full) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;\n");
        consume<T, false>(p, out, ring, slices);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
        consume<T, true>(p, out, ring, slices);
    }
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    __syncwarp();
    // What started while the kernel before it ran ends behind it.
    if (threadIdx.x == 0) asm volatile("griddepcontrol.wait;\n" ::: "memory");
    // Nor may a block leave while the other still signals it.
    __syncwarp();
    cluster_sync();
}
}  // namespace

#define WGRAD(name, T)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)             \
        name(const __grid_constant__ WeightGradParams p, const __grid_constant__ CUtensorMap narrow,    \
             const __grid_constant__ CUtensorMap wide, const __grid_constant__ CUtensorMap out) { \
        run<T>(p, narrow, wide, out);                                                             \
    }

WGRAD(sm90_wgrad_bf16, bf16)
WGRAD(sm90_wgrad_f16, f16)
#endif
