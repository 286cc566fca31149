// The roles of a block over rows (see sm90/grouped_gemm_mainloop.cuh): start, producer, the two warpgroups that
// multiply, end.
#pragma once
#include "sm90/grouped_gemm_epilogue_bwd.cuh"

namespace grouped_gemm {

// Description of a tile, as its describer wrote it.
template <int KIND>
__device__ __forceinline__ WorkTile read_tile(const Ring<KIND>& ring, int i) {
    WorkTile w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(w.group), "=r"(w.slot), "=r"(w.rows), "=r"(w.column) : "r"(ring.tile_slot(i)) : "memory");
    return w;
}

// Both warpgroups: 64 rows each of every tile.
template <class T, int KIND>
__device__ __forceinline__ void mma_cooperative(const GemmParams& p, const OutputMaps& maps, const Ring<KIND>& ring) {
    // Of the whole warp, and known to be: TMA is then told without a loop over lanes.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    const int steps = static_cast<int>((p.k + BLOCK_K - 1) / BLOCK_K);
    WarpRows rows{static_cast<int>(threadIdx.x % 32), warp * 16, 0, 0, ring.base + SmemLayout<KIND>::STAGING_OFFSET + warp * SmemLayout<KIND>::STAGING};
    uint32_t turn = 0;
    for (int i = 0;; i++) {
        const uint32_t at = static_cast<uint32_t>(i) * steps;
        ring.wait_full(at);
        const WorkTile w = warp_uniform(read_tile(ring, i));
        if (w.rows < 0) break;
        rows.live = w.rows, rows.slot = w.slot;
        if (group * 64 >= w.rows) {
            skip_tile(ring, at, steps);
            continue;
        }
        Accumulators<KIND> acc;
        // Asked for under the products.
        const float after = KIND == UP ? rows.value(p.out_scale, p) : 1.0f;
        mma_tile<T, KIND, 1, false>(acc, ring, at, steps, p.a_map, false);
        if constexpr (KIND == UP) epilogue_up<T>(p, maps, rows, w, acc, turn, after);
        else epilogue_plain<T, KIND, 1, BLOCK_N<KIND> / 2>(p, maps, rows, w, acc, turn);
    }
    tma_store_wait_read();
}

// One of the two warpgroups: every second tile.
template <class T, int KIND>
__device__ __forceinline__ void mma_pingpong(const GemmParams& p, const OutputMaps& maps, const Ring<KIND>& ring) {
    const int group = threadIdx.x / 128, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int steps = static_cast<int>((p.k + BLOCK_K - 1) / BLOCK_K);
    const uint32_t staging = ring.base + SmemLayout<KIND>::STAGING_OFFSET + warp * SmemLayout<KIND>::STAGING;
    WarpRows rows{static_cast<int>(threadIdx.x % 32), warp % 4 * 16, 0, 0, staging};
    uint32_t number = 0;
    for (int i = group;; i += 2) {
        const uint32_t at = static_cast<uint32_t>(i) * steps;
        if (i > 0) pingpong_wait(group);
        // The tile before may have been the end.
        if (i > 0 && __shfl_sync(~0u, read_tile(ring, i - 1).rows, 0) < 0) break;
        ring.wait_full(at);
        const WorkTile w = warp_uniform(read_tile(ring, i));
        if (w.rows < 0) {
            pingpong_arrive(1 - group);
            break;
        }
        rows.live = w.rows, rows.slot = w.slot;
        const EpilogueChunks<T, KIND> chunks{p, maps, rows, w.column, ring.base + SmemLayout<KIND>::WARP_BARRIER_OFFSET + warp * 24};
        if constexpr (OPERATION<KIND> == DOWN_BWD) {
            if (rows.lane == 0) {
                tma_store_wait_read();
                for (int q = 0; q < min(EpilogueChunks<T, KIND>::LOADED_AHEAD, chunks.count()); q++) chunks.load(q, number + q);
            }
        }
        // The accumulators of each case are its own: the compiler must see one owner.
        auto tile = [&](auto halves, auto is_narrow) {
            constexpr int COUNT = halves.value, WIDTH = is_narrow.value ? 64 : BLOCK_N<KIND> / 2;
            Accumulators<KIND> acc;
            mma_tile<T, KIND, COUNT, is_narrow.value>(acc, ring, at, steps, p.a_map, true);
            if constexpr (OPERATION<KIND> == DOWN_BWD) epilogue_down_bwd<T, KIND, COUNT, WIDTH>(chunks, acc, number);
            else epilogue_plain<T, KIND, COUNT, WIDTH>(p, maps, rows, w, acc, number);
        };
        bool narrow = false;
        if constexpr (!SQUARE<KIND>) narrow = narrow_tile<KIND>(p, w.column);
        if (narrow) tile(Constant<2>{}, Constant<!SQUARE<KIND>>{});
        else if (w.rows > 64) tile(Constant<2>{}, Constant<0>{});
        else tile(Constant<1>{}, Constant<0>{});
    }
    tma_store_wait_read();
}

template <class T, int KIND>
__device__ __forceinline__ void run(const GemmParams& p, const CUtensorMap& a, const CUtensorMap& b, const OutputMaps& maps) {
    extern __shared__ __align__(1024) char raw[];
    const Ring<KIND> ring{smem_address(raw)};
    if (threadIdx.x == 0) {
        for (int s = 0; s < SmemLayout<KIND>::STAGES; s++) {
            // TMA's thread, and all that gather.
            mbarrier_init(ring.full_at(s), p.a_map ? 129 : 1);
            // Four warps of each block read a stage, or all eight.
            mbarrier_init(ring.empty_at(s), COOPERATIVE<KIND> ? 16 : 8);
        }
        for (int at = SmemLayout<KIND>::WARP_BARRIER_OFFSET; at < SmemLayout<KIND>::TICKET_OFFSET + QUEUED_TILES * 8; at += 8) mbarrier_init(ring.base + at, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    cluster_sync();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        if (COOPERATIVE<KIND>) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        // A long epilogue beside short sums is held up by copies that come all at once (kernels/notes/grouped_gemm.md,
        // "Version 7").
        constexpr int LONG_SUM = 4096;
        // Never reached in up_dgrad's kernels: the gathering producers, as gradients of pre-activations lie in slot order,
        // and in `epilogue_plain` the scaling, as the portable kernel serves weights at the input (`up_dgrad` in
        // src/cuda/experts.rs).
        if (p.a_map && KIND == DOWN_BWD && p.k < LONG_SUM) produce_gather<KIND, 1>(p, a, b, ring);
        else if (p.a_map) produce_gather<KIND, 4>(p, a, b, ring);
        else if (__shfl_sync(~0u, threadIdx.x % 128 / 32, 0) == 0) produce_tma<KIND>(p, a, b, ring);
        __syncwarp();
    } else {
        if (COOPERATIVE<KIND>) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
        if constexpr (COOPERATIVE<KIND>) mma_cooperative<T, KIND>(p, maps, ring);
        else mma_pingpong<T, KIND>(p, maps, ring);
    }
    // What started while the kernel before it ran ends behind it.
    if (threadIdx.x == 0) asm volatile("griddepcontrol.wait;\n" ::: "memory");
    // No block leaves while the other may still signal it.
    cluster_sync();
}

}  // namespace grouped_gemm
