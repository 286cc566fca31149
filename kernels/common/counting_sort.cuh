// Numbering choices in their order: warps walk chunks of them, and blocks add up what the chunks have counted.
#pragma once
#include "common/common.cuh"

// Visits the choices [first, last) in order, 32 at a time: `visit(choice, expert, rank)` with the number of choices of
// the same expert before it in `count`, E numbers that it raises. `source` has ids (`id`) and says, with all lanes
// together, which expert an id stands for, or -1 (`expert`).
template <class Source, class Visit>
__device__ __forceinline__ void for_each_choice(const Source& source, int64_t first, int64_t last, int32_t* count, Visit&& visit) {
    const int lane = threadIdx.x % 32;
    const uint32_t below = (1u << lane) - 1;
    int64_t next = first + lane < last ? source.id(first + lane) : -1;
    for (int64_t at = first; at < last; at += 32) {
        const int64_t i = at + lane, id = next;
        next = i + 32 < last ? source.id(i + 32) : -1;
        const int e = source.expert(i, id, at);
        const uint32_t same = __match_any_sync(~0u, e);
        const int ahead = __popc(same & below);
        if (i < last) visit(i, e, e >= 0 ? count[e] + ahead : 0);
        __syncwarp();
        if (e >= 0 && ahead == 0) count[e] += __popc(same);
        __syncwarp();
    }
}

// A warp an expert, blocks of 256: chunks' counts become counts before the chunk, and their sums go to `totals`.
__device__ __forceinline__ void scan_chunks(int32_t* counts, int64_t chunks, int64_t experts, int64_t* totals) {
    const int lane = threadIdx.x % 32;
    const int64_t e = static_cast<int64_t>(blockIdx.x) * (PLAN_THREADS / 32) + threadIdx.x / 32;
    if (e >= experts) return;
    int32_t* before = counts + e * chunks;
    int32_t total = 0;
    for (int64_t at = 0; at < chunks; at += 32) {
        const int32_t own = at + lane < chunks ? before[at + lane] : 0;
        int32_t upto = own;
        for (int d = 1; d < 32; d *= 2) {
            const int32_t other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
        if (at + lane < chunks) before[at + lane] = total + upto - own;
        total += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) totals[e] = total;
}

// Inclusive sum over a block of whole warps; `total` gets the sum of all.
__device__ inline int64_t block_sum(int64_t own, int64_t& total) {
    __shared__ int64_t sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto scan = [&](int64_t v) {
        for (int d = 1; d < 32; d *= 2) {
            const int64_t other = __shfl_up_sync(~0u, v, d);
            if (lane >= d) v += other;
        }
        return v;
    };
    const int64_t within = scan(own);
    if (lane == 31) sums[warp] = within;
    __syncthreads();
    if (warp == 0) sums[lane] = scan(lane < static_cast<int>(blockDim.x / 32) ? sums[lane] : 0);
    __syncthreads();
    total = sums[31];
    const int64_t result = within + (warp > 0 ? sums[warp - 1] : 0);
    __syncthreads();
    return result;
}

