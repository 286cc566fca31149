// Weights of products of few rows, on their way to L2 while the kernel before still runs.
#pragma once
#include "common/common.cuh"

// The expert of the `at`-th tile as the list has it now, or -1. In a layer the list is older than the kernel before; were
// it not, this would be the guess of an older list, and a prefetch for nothing. Read past L1, which would keep it.
__device__ __forceinline__ int64_t expert_before_wait(const GemmParams& p, int64_t at) {
    if (at >= __ldcg(p.tile_count)) return -1;
    const int64_t group = __ldcg(&p.tiles[at].x);
    return group >= 0 && group < p.groups ? group : -1;
}
