// A decode step's attention: one query a sequence over keys and values in memory that stays.
//
// `cache_attention` gives each block a run of cache positions of one key head and up to 16 of its query heads, the rows
// of a matrix instruction; `cache_combine` joins the runs. How many cache positions are filled is read from the
// device's memory, so that a captured step can be replayed as they fill.
//
// Types: bf16 in memory, f32 in registers. Softmax in powers of two: scores come multiplied by log2(e).

#include "common.cuh"

namespace {

constexpr int KEYS = CACHE_STEP;
constexpr int GROUP = CACHE_HEADS;
// Below every score, and finite: a run without keys has this maximum.
constexpr float LOWEST = -1e30f;

// Sums of one run: block (run, part of the key head's query heads, sequence * key head). The only run of a head is its
// result.
template <int D> __device__ void attend(const CacheAttentionParams &params) {
    const bf16 *q = static_cast<const bf16 *>(params.q), *k = static_cast<const bf16 *>(params.k);
    const bf16 *v = static_cast<const bf16 *>(params.v), *sinks = static_cast<const bf16 *>(params.sinks);
    bf16 *out = static_cast<bf16 *>(params.out);
    constexpr int STAGES = D == 256 ? 1 : 2;
    constexpr int STAGE = 2 * KEYS * D * 2;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float2 ends[WARPS][GROUP];
    const uint32_t stages = (uint32_t)__cvta_generic_to_shared(shared), q_tile = stages + STAGES * STAGE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = blockIdx.z / params.key_heads, key_head = blockIdx.z % params.key_heads, group = params.heads / params.key_heads;
    const int first_head = key_head * group + blockIdx.y * GROUP, heads = min(GROUP, group - (int)blockIdx.y * GROUP);
    load_rows<GROUP, D>(q_tile, q + ((size_t)sequence * params.heads + first_head) * D, D, 0, heads);
    const int count = min((int)*params.filled, params.positions);
    // Runs of whole steps.
    const int run = (count + params.runs * KEYS - 1) / (params.runs * KEYS) * KEYS;
    const int start = blockIdx.x * run, end = min(start + run, count);
    const size_t base = (size_t)blockIdx.z * params.positions * D;
    auto load = [&](int stage, int first) {
        load_rows<KEYS, D>(stages + stage * STAGE, k + base, D, first, end);
        load_rows<KEYS, D>(stages + stage * STAGE + KEYS * D * 2, v + base, D, first, end);
        commit();
    };
    if (start < end) load(0, start);
    float acc[D / 8][4] = {};
    float most[2] = {LOWEST, LOWEST}, sum[2] = {};
    const float scale = params.scale * LOG2E;
    int stage = 0;
    for (int first = start; first < end; first += KEYS) {
        if (STAGES == 2 && first + KEYS < end) {
            load(stage ^ 1, first + KEYS);
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        const uint32_t k_tile = stages + stage * STAGE, v_tile = k_tile + KEYS * D * 2;
        float scores[2][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            uint32_t a[4], b[4];
            load_matrices(a, q_tile + place<D>(lane % 16, kk * 2 + lane / 16));
            load_matrices(b, k_tile + place<D>(warp * 16 + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
            multiply(scores[0], a, b[0], b[1], bf16());
            multiply(scores[1], a, b[2], b[3], bf16());
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float next = most[half];
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &score = scores[n][half * 2 + i];
                    score = first + warp * 16 + n * 8 + lane % 4 * 2 + i < end ? score * scale : -INFINITY;
                    next = fmaxf(next, score);
                }
            }
            next = fmaxf(next, __shfl_xor_sync(ALL, next, 1));
            next = fmaxf(next, __shfl_xor_sync(ALL, next, 2));
            const float shrink = exp2f(most[half] - next);
            most[half] = next;
            sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &score = scores[n][half * 2 + i];
                    score = exp2f(score - next);
                    sum[half] += score;
                }
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                acc[n][half * 2] *= shrink;
                acc[n][half * 2 + 1] *= shrink;
            }
        }
        const uint32_t p[4] = {pack(scores[0][0], scores[0][1], bf16()), pack(scores[0][2], scores[0][3], bf16()),
                               pack(scores[1][0], scores[1][1], bf16()), pack(scores[1][2], scores[1][3], bf16())};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, v_tile + place<D>(warp * 16 + lane % 16, n * 2 + lane / 16));
            multiply(acc[2 * n], p, b[0], b[1], bf16());
            multiply(acc[2 * n + 1], p, b[2], b[3], bf16());
        }
        __syncthreads();
        if (STAGES == 1 && first + KEYS < end) load(0, first + KEYS);
        stage = STAGES == 2 ? stage ^ 1 : 0;
    }
    // Nothing is on its way to where the sums go now.
    wait<0>();
    __syncthreads();
    // Warps: [WARPS, GROUP, D].
    float *sums = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        sum[half] += __shfl_xor_sync(ALL, sum[half], 1);
        sum[half] += __shfl_xor_sync(ALL, sum[half], 2);
        if (lane % 4 == 0) ends[warp][row] = make_float2(most[half], sum[half]);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float *to = sums + (warp * GROUP + row) * D + n * 8 + lane % 4 * 2;
            to[0] = acc[n][half * 2];
            to[1] = acc[n][half * 2 + 1];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        const int g = i / D, d = i % D;
        const bool only = params.runs == 1;
        const float sink = only && sinks ? wide(sinks[first_head + g]) * LOG2E : LOWEST;
        float next = sink, total = 0, y = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) next = fmaxf(next, ends[w][g].x);
        if (only && sinks) total = exp2f(sink - next);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = exp2f(ends[w][g].x - next);
            total += ends[w][g].y * factor;
            y += sums[(w * GROUP + g) * D + d] * factor;
        }
        const size_t head = (size_t)sequence * params.heads + first_head + g;
        if (only) {
            out[head * D + d] = narrow(y / total, bf16());
        } else {
            const size_t place = head * params.runs + blockIdx.x;
            params.partial[place * D + d] = y;
            if (d == 0) params.stats[place] = make_float2(next, total);
        }
    }
}

} // namespace

// Shared memory: stages of keys and values, then the queries.
#define CACHE_ATTENTION(D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        cache_attention_##D(const __grid_constant__ CacheAttentionParams params) {                                     \
        wait_for_previous_kernel();                                                                                    \
        attend<D>(params);                                                                                             \
    }

CACHE_ATTENTION(64)
CACHE_ATTENTION(128)
CACHE_ATTENTION(256)

// Joins the runs of a head: one block each, of D threads. A sink takes part in the softmax without a value.
extern "C" __global__ void cache_combine(const __grid_constant__ CacheCombineParams params) {
    wait_for_previous_kernel();
    static_assert(CACHE_MOST_RUNS == 64, "a lane has two runs");
    const bf16 *sinks = static_cast<const bf16 *>(params.sinks);
    const int runs = params.runs;
    __shared__ float factors[CACHE_MOST_RUNS];
    __shared__ float denominator;
    const size_t row = blockIdx.x;
    if (threadIdx.x < 32) {
        const float2 none = make_float2(LOWEST, 0);
        const int lane = threadIdx.x;
        const float2 a = lane < runs ? params.stats[row * runs + lane] : none;
        const float2 b = lane + 32 < runs ? params.stats[row * runs + lane + 32] : none;
        const float sink = sinks ? wide(sinks[row % params.heads]) * LOG2E : LOWEST;
        float most = fmaxf(sink, fmaxf(a.x, b.x));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, offset));
        const float of_a = exp2f(a.x - most), of_b = exp2f(b.x - most);
        factors[lane] = of_a;
        factors[lane + 32] = of_b;
        float total = a.y * of_a + b.y * of_b;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(ALL, total, offset);
        if (lane == 0) denominator = total + (sinks ? exp2f(sink - most) : 0);
    }
    __syncthreads();
    const float *from = params.partial + row * runs * blockDim.x + threadIdx.x;
    float y = 0;
#pragma unroll 8
    for (int s = 0; s < runs; s++) y += from[(size_t)s * blockDim.x] * factors[s];
    static_cast<bf16 *>(params.out)[row * blockDim.x + threadIdx.x] = narrow(y / denominator, bf16());
}
