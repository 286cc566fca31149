// The router of few tokens on Hopper (sm_90a), one rank: logits, choices and the layout of their slots in one launch, to
// the bits that sm90_decode.cu, router.cu and plan.cu give by three, with the slots' weights, which permute.cu gathers by
// a fourth. A decode step waits for each of these in every layer. Empty where the architecture is another.
//
//   sm90_route_plan_*   x [T, H], weight [E, H] -> logits f32 [T, E]; ids, weights [T, K]; layout, maps, tiles; T <= 8
//
// One cluster of eight blocks. A block has 16 experts a warp that multiplies, one or two of these: all warps load, and the
// sum runs over k in the order of the other kernels. The first block gets all logits in its shared memory. There a warp
// chooses for each token, a thread counts for each expert, and every choice finds its slot by comparing ids, so that no
// result depends on the order of threads. Limited by latency: notes in kernels/notes/decode.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/register_choice.cuh"
#include "portable/gemm.cuh"
#include "ptx/mbarrier_tma.cuh"

namespace {

constexpr int TOKENS = ROUTE_PLAN_TOKENS, BLOCKS = ROUTE_PLAN_BLOCKS, THREADS = ROUTE_PLAN_THREADS, WARPS = THREADS / 32;
constexpr int EXPERTS = ROUTE_PLAN_WARP_EXPERTS, MOST_EXPERTS = BLOCKS * ROUTE_PLAN_WARPS * EXPERTS;
// A step is 64 k: rows of 128 bytes, whose chunks of 8 k are swizzled by their row.
constexpr int STEP = 64, ROW_BYTES = STEP * 2;
static_assert(ROUTE_PLAN_ROW_BYTES == TOKENS * ROW_BYTES && ROUTE_PLAN_WEIGHT_BYTES == EXPERTS * ROW_BYTES, "common/shapes.h has others");
static_assert(MOST_EXPERTS == THREADS && TOKENS <= WARPS && MOST_EXPERTS <= ROUTER_REGISTER_EXPERTS, "a thread takes an expert, a warp a token");

// Where a block's rows and weights lie: steps of the tokens' rows and `warps` tiles of weight rows.
struct Stages {
    uint32_t base, bytes;
    __device__ __forceinline__ uint32_t rows(int step) const { return base + step * bytes; }
    __device__ __forceinline__ uint32_t weights(int step, int tile) const { return rows(step) + ROUTE_PLAN_ROW_BYTES + tile * ROUTE_PLAN_WEIGHT_BYTES; }
    static __device__ __forceinline__ uint32_t place(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ row % 8) << 4); }
};

// The steps of a warp: each has a run of them, in the order of k.
struct StepRange {
    int first, last;
    __device__ __forceinline__ StepRange(int warp, int steps) {
        const int per = (steps + WARPS - 1) / WARPS;
        first = min(warp * per, steps), last = min(first + per, steps);
    }
};

// This warp's run of the block's rows and weights, on their way to shared memory; `arrived` counts its lanes' copies.
template <class T>
__device__ __forceinline__ void load_run(const GemmParams& p, const Stages& stages, const StepRange& own, int tiles, uint32_t arrived) {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const T *x = static_cast<const T*>(p.a), *weight = static_cast<const T*>(p.b);
    for (int step = own.first; step < own.last; step++) {
        const int64_t k = step * STEP + chunk * 8;
        const bool inside = k < p.k;
        for (int tile = 0; tile < tiles; tile++) {
#pragma unroll
            for (int i = 0; i < EXPERTS / 4; i++) {
                const int row = i * 4 + lane / 8;
                const int64_t expert = (blockIdx.x * tiles + tile) * EXPERTS + row;
                const bool valid = inside && expert < p.n;
                ptx::cp_async(stages.weights(step, tile) + Stages::place(row, chunk), valid ? weight + expert * p.k + k : weight, valid);
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++) {
            const int row = i * 4 + lane / 8;
            const bool valid = inside && row < p.m;
            ptx::cp_async(stages.rows(step) + Stages::place(row, chunk), valid ? x + row * p.k + k : x, valid);
        }
    }
    ptx::mbarrier_arrive_after_cp_async(arrived);
}

// What the tensor cores take of a step: weights left, rows right.
struct Fragments {
    uint32_t a[STEP / 16][4], b[STEP / 32][4];
    __device__ __forceinline__ void read(const Stages& stages, int step, int tile) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < STEP / 32; i++) ptx::ldmatrix(stages.rows(step) + Stages::place(lane % 8, i * 4 + lane / 8), b[i]);
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) ptx::ldmatrix(stages.weights(step, tile) + Stages::place(lane % 16, i * 2 + lane / 16), a[i]);
    }
};

// Sums of a tile: sum[0] and sum[1] of weight row lane / 4, the others of that plus 8, each of tokens 2 (lane % 4) and the
// next. A step's fragments are read under the products of the step before.
template <class T>
__device__ __forceinline__ void multiply(const Stages& stages, int steps, int tile, uint32_t arrived, float (&sum)[4]) {
    Fragments even, odd;
    int there = 0;  // steps that have arrived
    int warp = 0;
    auto read = [&](int step, Fragments& to) {
        if (step >= steps) return;
        if (step >= there) {
            ptx::mbarrier_wait(arrived + warp * 8, 0);
            there = StepRange(warp++, steps).last;
        }
        to.read(stages, step, tile);
    };
    auto add = [&](const Fragments& from) {
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) mma<T>(sum, from.a[i], from.b[i / 2][i % 2 * 2], from.b[i / 2][i % 2 * 2 + 1]);
    };
    read(0, even);
    for (int step = 0; step < steps; step += 2) {
        read(step + 1, odd);
        add(even);
        if (step + 1 >= steps) break;
        read(step + 2, even);
        add(odd);
    }
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }
// A number for the first block of the cluster, at the same address.
__device__ __forceinline__ void store_first_block(uint32_t to, float v) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, 0;\nst.shared::cluster.f32 [there], %1;\n}\n" ::"r"(to), "f"(v) : "memory");
}

// Sum, with its own, of what the threads up to this one have; `total` gets that of all.
__device__ __forceinline__ unsigned long long inclusive_sum(unsigned long long own, unsigned long long& total) {
    __shared__ unsigned long long sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const unsigned long long other = __shfl_up_sync(~0u, own, d);
        if (lane >= d) own += other;
    }
    if (lane == 31) sums[warp] = own;
    __syncthreads();
    total = 0;
    unsigned long long before = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + own;
}

// Slots of at most a choice a thread, every one of a real expert and no two of a token's alike, where there is room for all
// of them: a thread an expert, then lanes of warps that hold a token's choices.
__device__ void lay_out(const LocalPlanParams& p, const Choice& choice, bool chooses) {
    __shared__ int32_t ids[TOKENS * 32], starts[MOST_EXPERTS];
    const int choices = static_cast<int>(p.choices), k = static_cast<int>(p.top_k), e = threadIdx.x, experts = static_cast<int>(p.experts);
    const int token = threadIdx.x / 32, number = token * k + threadIdx.x % 32;
    if (chooses) ids[number] = choice.id;
    for (int i = threadIdx.x; i < p.rows; i += THREADS) p.row_map[i] = -1, p.weight_map[i] = -1, p.slot_weights[i] = 0.0f;
    __syncthreads();
    int load = 0;
    for (int i = 0; i < choices; i++) load += ids[i] == e;
    const uint32_t alignment = static_cast<uint32_t>(p.alignment), tile_rows = static_cast<uint32_t>(p.tile_rows);
    const uint32_t padded = alignment == 1 ? load : (load + alignment - 1) / alignment * alignment, tiles = (load + tile_rows - 1) / tile_rows;
    unsigned long long total;
    const unsigned long long upto = inclusive_sum(static_cast<unsigned long long>(tiles) << 32 | padded, total);
    const int start = static_cast<int>(static_cast<uint32_t>(upto) - padded);
    if (e < experts) {
        starts[e] = start;
        p.offsets[e] = start;
        p.counts[e] = load;
        p.stats[e] = load;
        p.stats[experts + e] = padded;
        const int at = static_cast<int>(upto >> 32) - static_cast<int>(tiles);
        for (int i = 0; i < static_cast<int>(tiles); i++) {
            const int first = i * static_cast<int>(tile_rows), left = load - first;
            if (at + i < p.max_tiles) p.tiles[1 + at + i] = make_int4(e, start + first, min(left, static_cast<int>(tile_rows)), 0);
        }
    }
    if (e == 0) {
        p.stats[2 * experts] = static_cast<uint32_t>(total);
        p.stats[2 * experts + 1] = 0;
        // Their number, and the ticket.
        *reinterpret_cast<int2*>(p.tiles) = make_int2(static_cast<int>(min(static_cast<int64_t>(total >> 32), p.max_tiles)), 0);
    }
    __syncthreads();
    copy_status(p.fault, p.report, STATUS_WORDS);
    if (!chooses) return;
    int slot = starts[choice.id];
    for (int i = 0; i < token * k; i++) slot += ids[i] == choice.id;
    p.kept[number] = choice.id;
    p.return_map[number] = slot;
    p.row_map[slot] = token;
    p.weight_map[slot] = number;
    p.slot_weights[slot] = choice.weight;
}

template <class T>
__device__ __forceinline__ void run(const GemmParams& p, const RoutingParams& routing, const LocalPlanParams& plan) {
    extern __shared__ __align__(1024) char stages_of_block[];
    __shared__ float logits[TOKENS][MOST_EXPERTS];
    __shared__ __align__(8) uint64_t arrived[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = static_cast<int>((p.k + STEP - 1) / STEP);
    const int tiles = p.n > BLOCKS * EXPERTS ? ROUTE_PLAN_WARPS : 1;
    const Stages stages{ptx::smem_address(stages_of_block), static_cast<uint32_t>(ROUTE_PLAN_ROW_BYTES + tiles * ROUTE_PLAN_WEIGHT_BYTES)};
    const uint32_t barriers = ptx::smem_address(arrived);
    if (lane == 0) {
        ptx::mbarrier_init(barriers + warp * 8, 32);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncwarp();
    load_run<T>(p, stages, StepRange(warp, steps), tiles, barriers + warp * 8);
    // The first block is there to be written to, once all have come this far; barriers of other warps are, too.
    cluster_arrive();
    cluster_wait();
    if (warp < tiles) {
        float sum[4] = {};
        multiply<T>(stages, steps, warp, barriers, sum);
        const int first = (blockIdx.x * tiles + warp) * EXPERTS + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int expert = first + i / 2 * 8, token = lane % 4 * 2 + i % 2;
            if (expert >= p.n || token >= p.m) continue;
            const float v = p.bias ? sum[i] + load_any(p.bias, p.bias_type, expert) : sum[i];
            static_cast<float*>(p.out)[token * p.n + expert] = v;
            store_first_block(ptx::smem_address(&logits[token][expert]), v);
        }
    }
    __syncwarp();
    cluster_arrive();
    if (blockIdx.x != 0) return;
    cluster_wait();
    Choice choice{0, 0.0f};
    const int k = static_cast<int>(routing.top_k);
    const bool routes = warp < routing.tokens;
    if (routes) with_experts(routing.experts, [&](auto number) { choice = choose_in_registers<number.value>(routing, warp, logits[warp]); });
    const bool chooses = routes && lane < k;
    if (chooses) routing.ids[warp * k + lane] = choice.id, routing.weights[warp * k + lane] = choice.weight;
    lay_out(plan, choice, chooses);
}

}  // namespace

#define ROUTE_PLAN(name, T)                                                                                       \
    extern "C" __global__ void __cluster_dims__(BLOCKS) __launch_bounds__(THREADS)                                \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ RoutingParams routing,                 \
             const __grid_constant__ LocalPlanParams plan) {                                                      \
        wait_for_previous_kernel();                                                                               \
        run<T>(p, routing, plan);                                                                                 \
    }

ROUTE_PLAN(sm90_route_plan_bf16, bf16)
ROUTE_PLAN(sm90_route_plan_f16, f16)
#endif
