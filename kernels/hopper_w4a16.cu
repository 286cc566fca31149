// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// Weights are the left operand, which the matrix unit takes from registers: each warp makes bf16 of the codes of its 16
// weight rows in the registers that the product reads. No bf16 weight is ever in memory of any kind. A tile is weight
// rows by rows of a layout, the output's columns by its rows, turned on its way out.
//
// A block stays on its multiprocessor and walks through tiles. Two warpgroups multiply, 64 weight rows and all rows of
// the tile each, for up 8 of gate and 8 of up in turn; while the matrix unit works on a step of 64 k, they make the
// next one's weights. One warpgroup brings rows, one codes and scales, into rings of their own: codes turned so that a
// multiplying thread's are a word, scales a pair of bf16 each. As the two that multiply share no results, one may run
// ahead by as much as the rings hold, so that one's epilogue runs under the other's products. Barriers, and the
// history: kernels/notes/w4a16.md.
//
// Rows in slot order come by the copy engine, rows behind a map by copies of 16 bytes a thread. Those past a tile's end
// are the next zone's, or whatever the stage held: a row of the right operand has a column of the sums to itself, and
// theirs are never stored.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/w4_epilogue.cuh"
#include "common/w4_feed.cuh"
#include "common/w4_multiply.cuh"
#include "common/w4_rows.cuh"

namespace w4 {

template <int FORMAT, int KIND>
__device__ __forceinline__ void work(const Gemm& p, const QuantWeight& w, const Rings& rings) {
    const Walk walk{p};
    const int count = walk.count(), group = threadIdx.x / 128;
    Worker<FORMAT> worker(p, rings, group, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
    int4 after = walk.at<KIND>(0);
    for (int i = 0; i < count; i++) {
        const int4 t = after;
        if (i + 1 < count) after = walk.at<KIND>(i + 1);
        const float* factors = w.factors ? w.factors + t.x * w.parts : nullptr;
        const float one = Format<FORMAT>::LEFT;
        const float factor[2] = {factors ? one * factors[0] : one, factors ? one * factors[w.parts - 1] : one};
        float acc[ROWS / 2];
        worker.products(acc, t.z);
        const int thread = fresh_thread() % 128;
        const Staging<KIND> staging{rings.staging + group * LEAVING, group, thread};
        // Of up a warp's 16 weight rows are 8 columns.
        const Place place{t, t.w + group * (COLUMNS<KIND> / 2), thread / 32 * (KIND == UP ? 8 : 16) + thread % 32 / 4, thread % 4 * 2, factor};
        if constexpr (KIND == UP) finish_up(p, acc, place, staging);
        else finish_down(p, acc, place, staging);
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const QuantWeight& w, const CUtensorMap& rows) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings rings(address(shared));
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            // Each warp that copies, or the copy engine's thread; each warp that multiplies.
            barrier_init(rings.rows.full({i, 0}), p.a_map ? 4 : 1);
            barrier_init(rings.rows.empty({i, 0}), 8);
        }
        for (uint32_t i = 0; i < CODE_STAGES; i++) {
            // Of each thread that writes, each that reads.
            barrier_init(rings.codes.full({i, 0}), 128);
            barrier_init(rings.codes.empty({i, 0}), 256);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (Walk{p}.count() == 0) return;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int steps = static_cast<int>(p.k / BK), thread = threadIdx.x % 128;
    // 48 + 64 + 2 x 200 registers: 4 x 128, with which the threads start.
    if (role == 3) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 48;\n");
        Feed<FORMAT, KIND>(p, w, Rings(kept(address(shared))), steps, Walk{p}.count()).run();
    } else if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;\n");
        Producer<KIND> producer{p, rows, rings, thread, steps};
        if (p.a_map) producer.gather();
        else producer.direct();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;\n");
        work<FORMAT, KIND>(p, w, rings);
    }
}

}  // namespace w4

#define PRODUCT(name, FORMAT, KIND)                                                               \
    extern "C" __global__ void __launch_bounds__(w4::THREADS, 1)                                  \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w,               \
             const __grid_constant__ CUtensorMap rows) {                                          \
        w4::run<FORMAT, KIND>(p, w, rows);                                                        \
    }

PRODUCT(hopper_up_nvfp4, WEIGHT_NVFP4, UP)
PRODUCT(hopper_down_nvfp4, WEIGHT_NVFP4, DOWN)
PRODUCT(hopper_up_mxfp4, WEIGHT_MXFP4, UP)
PRODUCT(hopper_down_mxfp4, WEIGHT_MXFP4, DOWN)
#endif
