// Rows of a layout, brought for the products with FP4 weights (`sm90_w4a16.cu`).
#pragma once
#include "sm90/w4a16_pipeline.cuh"

namespace w4a16 {

// The warpgroup that brings rows.
template <int KIND>
struct RowProducer {
    const GemmParams& p;
    const CUtensorMap& rows;
    const Rings& rings;
    const int thread, steps;

    // In slot order they come by TMA, for which one thread asks.
    __device__ __forceinline__ void produce_tma() {
        const TileScheduler scheduler{p};
        const int count = scheduler.count();
        if (thread > 0) return;
        RowRing::At at;
        int4 after = scheduler.at<KIND>(0);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = scheduler.at<KIND>(i + 1);
            for (int step = 0; step < steps; step++, at.next()) {
                rings.rows.wait_empty(at);
                mbarrier_arrive_expect_tx(rings.rows.full(at), STAGE_BYTES);
                tma_load(rings.rows.stage(at), rows, rings.rows.full(at), step * BLOCK_K, t.y);
            }
        }
    }

    // Rows behind a map: eight threads a row of 64 k. Lanes look up the warp's rows, a tile ahead of their use. A
    // step's rows are told of when the next LAG steps' have been asked for: the warps that multiply may wait for those
    // told of until stages are free again.
    static constexpr int LAG = 1;
    static_assert(LAG <= STAGES - 3, "a stage is given back when the second step after its own has come");
    __device__ __forceinline__ void produce_gather() {
        constexpr int EACH = BLOCK_N / 16, LOOKED_UP = BLOCK_N / 128, UNROLLED = 4;
        const TileScheduler scheduler{p};
        const int count = scheduler.count(), lane = thread % 32, r = thread / 8, c = thread % 8;
        const uint32_t into = r * 128 + ((c ^ (r & 7)) << 4);
        int next[LOOKED_UP];
        // Row 4 j + l of the warp's is row 16 j + l of its four of each sixteen.
        auto locate_rows = [&](const int4& t) {
#pragma unroll
            for (int q = 0; q < LOOKED_UP; q++) {
                const int local = thread / 32 * 4 + lane % 4 + (lane / 4 + q * 8) * 16;
                const int64_t row = mapped_row(p.a_map, t.y + (local < t.z ? local : 0), p.a_rows, p.fault, p.site);
                next[q] = static_cast<int>(row < 0 ? 0 : row);
            }
        };
        const int64_t pitch = p.k * 2;
        RowRing::At at, behind;
        int unpublished = 0;  // steps that the multiplying warps have not been told of
        auto publish = [&] {
            // Copies are ordinary writes, and wgmma reads through another proxy. Those that multiply have no time for
            // this.
            fence_proxy_async();
            __syncwarp();
            mbarrier_arrive_elected(rings.rows.full(behind));
            behind.next();
        };
        int4 after = scheduler.at<KIND>(0);
        locate_rows(after);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = scheduler.at<KIND>(i + 1);
            // A copy holds on to its address for some hundred cycles. So each has registers of its own, which several
            // steps read in place.
            const char* from[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                from[j] = static_cast<const char*>(p.a) + __shfl_sync(~0u, next[j / 8], j % 8 * 4 + lane / 8) * pitch + c * 16;
            }
            const int passes = (t.z + 15) / 16;
            for (int first = 0; first < steps; first += UNROLLED) {
#pragma unroll
                for (int u = 0; u < UNROLLED; u++, at.next()) {
                    const int step = first + u;
                    if (step == steps) break;
                    rings.rows.wait_empty(at);
                    const uint32_t to = rings.rows.stage(at) + into;
                    if (passes == EACH) {
#pragma unroll
                        for (int j = 0; j < EACH; j++) cp_async(to + j * 2048, from[j] + u * (BLOCK_K * 2));
                    } else {
#pragma unroll
                        for (int j = 0; j < EACH; j++) {
                            if (j < passes) cp_async(to + j * 2048, from[j] + u * (BLOCK_K * 2));
                        }
                    }
                    asm volatile("cp.async.commit_group;\n" ::: "memory");
                    if (unpublished < LAG) {
                        unpublished++;
                    } else {
                        asm volatile("cp.async.wait_group %0;\n" ::"n"(LAG) : "memory");
                        publish();
                    }
                    if (u == 0 && first == 0) locate_rows(after);
                }
#pragma unroll
                for (int j = 0; j < EACH; j++) from[j] += UNROLLED * BLOCK_K * 2;
            }
        }
        // Copies must not outlive the block's shared memory.
        asm volatile("cp.async.wait_all;\n" ::: "memory");
        for (; unpublished > 0; unpublished--) publish();
    }
};

}  // namespace w4a16
