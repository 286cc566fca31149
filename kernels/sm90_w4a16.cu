// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// Weights are the left operand, which the tensor core takes from registers: each warp makes bf16 of the codes of its 16
// weight rows in the registers that the product reads. No bf16 weight is ever in memory of any kind. A tile is weight
// rows by rows of a layout, the output's columns by its rows, turned on its way out.
//
// A block stays on its SM and walks through tiles. Two warpgroups multiply, 64 weight rows and all rows of
// the tile each, for up 8 of gate and 8 of up in turn; while the tensor core works on a step of 64 k, they make the
// next one's weights. One warpgroup brings rows, one codes and scales, into rings of their own: codes turned so that a
// multiplying thread's are a word, scales a pair of bf16 each. As the two that multiply share no results, one may run
// ahead by as much as the rings hold, so that one's epilogue runs under the other's products. Barriers, and the
// history: kernels/notes/w4a16.md.
//
// Rows in slot order come by TMA, rows behind a map by copies of 16 bytes a thread. Those past a tile's end
// are the next segment's, or whatever the stage held: a row of the right operand has a column of the sums to itself,
// and theirs are never stored.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "sm90/w4a16_epilogue.cuh"
#include "sm90/w4a16_weight_producer.cuh"
#include "sm90/w4a16_mainloop.cuh"
#include "sm90/w4a16_row_producer.cuh"

namespace w4a16 {

template <int FORMAT, int KIND>
__device__ __forceinline__ void consume(const GemmParams& p, const QuantWeightParams& w, const Rings& rings) {
    const TileScheduler scheduler{p};
    const int count = scheduler.count(), group = threadIdx.x / 128;
    MmaWarpgroup<FORMAT> mma(p, rings, group, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    int4 after = scheduler.at<KIND>(0);
    for (int i = 0; i < count; i++) {
        const int4 t = after;
        if (i + 1 < count) after = scheduler.at<KIND>(i + 1);
        const float* factors = w.factors ? w.factors + t.x * w.parts : nullptr;
        const float one = Format<FORMAT>::LEFT;
        const float factor[2] = {factors ? one * factors[0] : one, factors ? one * factors[w.parts - 1] : one};
        float acc[BLOCK_N / 2];
        mma.mma_tile(acc, t.z);
        const int thread = reread_thread() % 128;
        const Staging<KIND> staging{rings.staging + group * STAGING_BYTES, group, thread};
        // Of up a warp's 16 weight rows are 8 columns.
        const TilePosition place{t, t.w + group * (COLUMNS<KIND> / 2), thread / 32 * (KIND == UP ? 8 : 16) + thread % 32 / 4, thread % 4 * 2, factor};
        if constexpr (KIND == UP) epilogue_up(p, acc, place, staging);
        else epilogue_down(p, acc, place, staging);
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const GemmParams& p, const QuantWeightParams& w, const CUtensorMap& rows) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings rings(smem_address(shared));
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            // Each warp that copies, or TMA's thread; each warp that multiplies.
            mbarrier_init(rings.rows.full({i, 0}), p.a_map ? 4 : 1);
            mbarrier_init(rings.rows.empty({i, 0}), 8);
        }
        for (uint32_t i = 0; i < CODE_STAGES; i++) {
            // Of each thread that writes, each that reads.
            mbarrier_init(rings.codes.full({i, 0}), 128);
            mbarrier_init(rings.codes.empty({i, 0}), 256);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (TileScheduler{p}.count() == 0) return;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int steps = static_cast<int>(p.k / BLOCK_K), thread = threadIdx.x % 128;
    // 48 + 64 + 2 x 200 registers: 4 x 128, with which the threads start.
    if (role == 3) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 48;\n");
        WeightProducer<FORMAT, KIND>(p, w, Rings(opaque(smem_address(shared))), steps, TileScheduler{p}.count()).run();
    } else if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;\n");
        RowProducer<KIND> producer{p, rows, rings, thread, steps};
        if (p.a_map) producer.produce_gather();
        else producer.produce_tma();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;\n");
        consume<FORMAT, KIND>(p, w, rings);
    }
}

}  // namespace w4a16

#define PRODUCT(name, FORMAT, KIND)                                                               \
    extern "C" __global__ void __launch_bounds__(w4a16::THREADS, 1)                                  \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ QuantWeightParams w,               \
             const __grid_constant__ CUtensorMap rows) {                                          \
        w4a16::run<FORMAT, KIND>(p, w, rows);                                                        \
    }

PRODUCT(sm90_up_nvfp4, WEIGHT_NVFP4, UP)
PRODUCT(sm90_down_nvfp4, WEIGHT_NVFP4, DOWN)
PRODUCT(sm90_up_mxfp4, WEIGHT_MXFP4, UP)
PRODUCT(sm90_down_mxfp4, WEIGHT_MXFP4, DOWN)
#endif
