// A decode step's attention: one query a sequence over keys and values in slots of memory that stays.
//
// `slot_rows` makes heads of the projections: norm, rotation, and keys and values to their slots. `slot_attention` gives
// each block a run of slots of one key head and some of its query heads, `slot_combine` joins the runs. How many slots are
// filled is read from the device's memory, so that a captured step can be replayed as they fill.
//
// Types: bf16 in memory, f32 in registers. Softmax in powers of two: scores come multiplied by log2(e).

#include <cuda_bf16.h>
#include <stdint.h>

namespace {

constexpr unsigned ALL = 0xffffffffu;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Entries of a head that a lane holds, as two loads of 16 bytes.
constexpr int LANE = 16;
// Below every score, and finite: a run without keys has this maximum.
constexpr float LOWEST = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;

__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }

__device__ void unpack(uint4 from, float *to) {
    const __nv_bfloat162 *pairs = reinterpret_cast<const __nv_bfloat162 *>(&from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = __bfloat1622float2(pairs[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

} // namespace

struct RowSizes {
    int sequences, heads, keys, dim;
    // Rotated entries of a head, an even number; 0 where nothing is rotated.
    int rotated;
    int slots;
    // Entries from one sequence to the next.
    int q_stride, k_stride, v_stride;
    float eps;
};

// One warp a head: of each sequence the queries', which are written in place, then the keys', then the values', which go
// to their slot. Weights of norms and angles may be absent (null). Shared memory: WARPS · dim floats.
extern "C" __global__ void __launch_bounds__(THREADS)
    slot_rows(__nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, __nv_bfloat16 *k_slots,
              __nv_bfloat16 *v_slots, const uint32_t *slot, const __nv_bfloat16 *q_weight, const __nv_bfloat16 *k_weight,
              const __nv_bfloat16 *cos, const __nv_bfloat16 *sin, const RowSizes sizes) {
    extern __shared__ float rows[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = sizes.dim;
    float *row = rows + warp * dim;
    const int per_sequence = sizes.heads + 2 * sizes.keys;
    const int index = blockIdx.x * WARPS + warp;
    const int sequence = index / per_sequence;
    if (sequence >= sizes.sequences) return;
    int head = index % per_sequence;
    const int kind = head < sizes.heads ? 0 : head < sizes.heads + sizes.keys ? 1 : 2;
    head -= kind == 0 ? 0 : kind == 1 ? sizes.heads : sizes.heads + sizes.keys;
    const int stride = kind == 0 ? sizes.q_stride : kind == 1 ? sizes.k_stride : sizes.v_stride;
    const size_t at = (size_t)sequence * stride + (size_t)head * dim;
    const __nv_bfloat16 *from = (kind == 0 ? q : kind == 1 ? k : v) + at;
    const size_t place = (((size_t)sequence * sizes.keys + head) * sizes.slots + *slot) * dim;
    __nv_bfloat16 *to = kind == 0 ? q + at : (kind == 1 ? k_slots : v_slots) + place;
    if (kind == 2) {
        for (int i = lane; i < dim; i += 32) to[i] = from[i];
        return;
    }
    float squares = 0;
    for (int i = lane; i < dim; i += 32) {
        float x = wide(from[i]);
        row[i] = x;
        squares += x * x;
    }
    const __nv_bfloat16 *weight = kind == 0 ? q_weight : k_weight;
    if (weight) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(ALL, squares, offset);
        const float factor = rsqrtf(squares / dim + sizes.eps);
        // Rounded as a norm of its own is.
        for (int i = lane; i < dim; i += 32) row[i] = wide(narrow(factor * row[i] * wide(weight[i])));
    }
    __syncwarp();
    const int half = sizes.rotated / 2;
    for (int i = lane; i < dim; i += 32) {
        float x = row[i];
        if (i < half) {
            x = x * wide(cos[i]) - row[i + half] * wide(sin[i]);
        } else if (i < sizes.rotated) {
            x = x * wide(cos[i - half]) + row[i - half] * wide(sin[i - half]);
        }
        to[i] = narrow(x);
    }
}

struct AttentionSizes {
    int heads, keys, slots, splits;
    // Entries from one sequence's queries to the next's.
    int q_stride;
    float scale;
};

namespace {

// Sums of one run: block (split, part of the key head's query heads, sequence · key head). `partial` is
// [sequence · head, split, D], `stats` [sequence · head, split] of maximum and sum.
template <int D, int GROUP>
__device__ void attend(const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, const uint32_t *filled,
                       float *partial, float2 *stats, const AttentionSizes &sizes) {
    constexpr int LANES = D / LANE;
    constexpr int KEYS = 32 / LANES;
    __shared__ float queries[GROUP][D];
    __shared__ float sums[WARPS][GROUP][D];
    __shared__ float2 ends[WARPS][GROUP];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sub = lane / LANES, part = lane % LANES;
    const int sequence = blockIdx.z / sizes.keys, key_head = blockIdx.z % sizes.keys;
    const int first_head = key_head * (sizes.heads / sizes.keys) + blockIdx.y * GROUP;
    const __nv_bfloat16 *from = q + (size_t)sequence * sizes.q_stride + (size_t)first_head * D;
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        queries[i / D][i % D] = wide(from[i]) * (sizes.scale * LOG2E);
    }
    __syncthreads();
    const int count = min((int)*filled, sizes.slots);
    // Runs of whole steps of the block.
    const int run = (count + sizes.splits * KEYS * WARPS - 1) / (sizes.splits * KEYS * WARPS) * (KEYS * WARPS);
    const int start = blockIdx.x * run, end = min(start + run, count);
    const size_t base = (size_t)blockIdx.z * sizes.slots * D;
    float most[GROUP], sum[GROUP], acc[GROUP][LANE];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        most[g] = LOWEST;
        sum[g] = 0;
#pragma unroll
        for (int i = 0; i < LANE; i++) acc[g][i] = 0;
    }
    for (int first = start + warp * KEYS; first < end; first += KEYS * WARPS) {
        const int key = first + sub;
        const bool there = key < end;
        uint4 k_bits[2] = {}, v_bits[2] = {};
        if (there) {
            const size_t row = base + (size_t)key * D;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int at = c * (D / 2) + part * 8;
                k_bits[c] = *reinterpret_cast<const uint4 *>(k + row + at);
                v_bits[c] = *reinterpret_cast<const uint4 *>(v + row + at);
            }
        }
        float values[LANE], dots[GROUP];
        unpack(k_bits[0], values);
        unpack(k_bits[1], values + 8);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float dot = 0;
#pragma unroll
            for (int i = 0; i < LANE; i++) dot += values[i] * queries[g][(i / 8) * (D / 2) + part * 8 + i % 8];
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(ALL, dot, offset);
            dots[g] = there ? dot : -INFINITY;
        }
        unpack(v_bits[0], values);
        unpack(v_bits[1], values + 8);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const float next = fmaxf(most[g], dots[g]);
            const float shrink = exp2f(most[g] - next), p = exp2f(dots[g] - next);
            most[g] = next;
            sum[g] = sum[g] * shrink + p;
#pragma unroll
            for (int i = 0; i < LANE; i++) acc[g][i] = acc[g][i] * shrink + p * values[i];
        }
    }
    // Keys of a warp, then warps.
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int offset = LANES; offset < 32; offset *= 2) {
            const float other = __shfl_xor_sync(ALL, most[g], offset);
            const float next = fmaxf(most[g], other);
            const float own = exp2f(most[g] - next), theirs = exp2f(other - next);
            sum[g] = sum[g] * own + __shfl_xor_sync(ALL, sum[g], offset) * theirs;
#pragma unroll
            for (int i = 0; i < LANE; i++) {
                acc[g][i] = acc[g][i] * own + __shfl_xor_sync(ALL, acc[g][i], offset) * theirs;
            }
            most[g] = next;
        }
        if (sub == 0) {
#pragma unroll
            for (int i = 0; i < LANE; i++) sums[warp][g][(i / 8) * (D / 2) + part * 8 + i % 8] = acc[g][i];
            if (part == 0) ends[warp][g] = make_float2(most[g], sum[g]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        const int g = i / D, d = i % D;
        float next = LOWEST, total = 0, y = 0;
        for (int w = 0; w < WARPS; w++) next = fmaxf(next, ends[w][g].x);
        for (int w = 0; w < WARPS; w++) {
            const float factor = exp2f(ends[w][g].x - next);
            total += ends[w][g].y * factor;
            y += sums[w][g][d] * factor;
        }
        const size_t place = ((size_t)sequence * sizes.heads + first_head + g) * sizes.splits + blockIdx.x;
        partial[place * D + d] = y;
        if (d == 0) stats[place] = make_float2(next, total);
    }
}

} // namespace

#define SLOT_ATTENTION(D, GROUP)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) slot_attention_##D##_##GROUP(                                \
        const __nv_bfloat16 *q, const __nv_bfloat16 *k, const __nv_bfloat16 *v, const uint32_t *filled,                \
        float *partial, float2 *stats, const AttentionSizes sizes) {                                                   \
        attend<D, GROUP>(q, k, v, filled, partial, stats, sizes);                                                      \
    }

SLOT_ATTENTION(64, 1)
SLOT_ATTENTION(64, 2)
SLOT_ATTENTION(64, 4)
SLOT_ATTENTION(128, 1)
SLOT_ATTENTION(128, 2)
SLOT_ATTENTION(128, 4)
SLOT_ATTENTION(256, 1)
SLOT_ATTENTION(256, 2)
SLOT_ATTENTION(256, 4)

// Joins the runs of a head: one block each, of D threads. A sink takes part in the softmax without a value.
extern "C" __global__ void slot_combine(const float *partial, const float2 *stats, const __nv_bfloat16 *sinks,
                                        __nv_bfloat16 *out, const int heads, const int splits) {
    const size_t row = blockIdx.x;
    const float sink = sinks ? wide(sinks[row % heads]) * LOG2E : LOWEST;
    float most = sink;
    for (int s = 0; s < splits; s++) most = fmaxf(most, stats[row * splits + s].x);
    float total = sinks ? exp2f(sink - most) : 0, y = 0;
    for (int s = 0; s < splits; s++) {
        const float2 end = stats[row * splits + s];
        const float factor = exp2f(end.x - most);
        total += end.y * factor;
        y += partial[(row * splits + s) * blockDim.x + threadIdx.x] * factor;
    }
    out[row * blockDim.x + threadIdx.x] = narrow(y / total);
}
