// Attention of blocks of queries over blocks of keys, forward: no matrix of scores is stored.
//
// A block of threads has `ROWS` queries of one head, each warp 16 or 32 of them, and goes over the keys that any of them
// sees: scores, their running maximum and sum (online softmax), and the weighted sum of values stay in registers. Keys of
// the next step are loaded while values are multiplied, and the other way round.
//
// Types: bf16 or f16 in memory and in products, f32 in sums. Softmax in powers of two: scores come multiplied by log2(e).

#include "attention.cuh"

namespace {

constexpr int KEYS = ATTENTION_KEYS;

// D: entries of a query and key; V: of a value. TILES: 16 queries each, of a warp.
template <int D, int V, int TILES, typename T> __device__ void forward(const AttentionParams &params) {
    const T *q = static_cast<const T *>(params.q), *k = static_cast<const T *>(params.k);
    const T *v = static_cast<const T *>(params.v), *sinks = static_cast<const T *>(params.sinks);
    T *out = static_cast<T *>(params.out);
    float *log_sums = params.log_sums;
    constexpr int ROWS = WARPS * TILES * 16;
    constexpr int COLUMNS = KEYS / 8;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(shared);
    const uint32_t k_tile = q_tile + ROWS * D * 2, v_tile = k_tile + KEYS * D * 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, batch = blockIdx.z;
    const int key_head = head / (params.heads / params.key_heads);
    // The last queries see most keys: they begin first.
    const int start = (gridDim.x - 1 - blockIdx.x) * ROWS;
    q += batch * params.q_strides.sequence + head * params.q_strides.head;
    k += batch * params.k_strides.sequence + key_head * params.k_strides.head;
    v += batch * params.v_strides.sequence + key_head * params.v_strides.head;
    const int rows = min(ROWS, params.queries - start);
    // Keys that any query sees, counted from the first key.
    const int begin = max(0, low(params.first + start, params) - params.first_key);
    const int end = params.first + start + rows - params.first_key;
    // Steps begin at multiples of KEYS, so that the order of sums does not depend on the block.
    const int first_step = begin / KEYS, steps = (end + KEYS - 1) / KEYS;

    load_rows<ROWS, D>(q_tile, q, params.q_strides.row, start, params.queries);
    load_rows<KEYS, D>(k_tile, k, params.k_strides.row, first_step * KEYS, params.positions);
    commit();

    float acc[TILES][V / 8][4] = {};
    float most[TILES][2], sum[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++) most[m][0] = most[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
    const float scale = params.scale * LOG2E;
    const int warp_row = warp * TILES * 16;

    for (int step = first_step; step < steps; step++) {
        wait<0>();
        __syncthreads();
        load_rows<KEYS, V>(v_tile, v, params.v_strides.row, step * KEYS, params.positions);
        commit();
        float scores[TILES][COLUMNS][4] = {};
        multiply_rows<TILES, KEYS, D>(scores, q_tile, warp_row, k_tile, T());
        wait<0>();
        __syncthreads();
        if (step + 1 < steps) {
            load_rows<KEYS, D>(k_tile, k, params.k_strides.row, (step + 1) * KEYS, params.positions);
            commit();
        }
        // Positions of the step's keys, and whether some query of the block does not see one of them.
        const int position = params.first_key + step * KEYS;
        const bool masked = position + KEYS - 1 > params.first + start ||
                            position < low(params.first + start + ROWS - 1, params);
        uint32_t p[TILES][KEYS / 16][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (masked) {
                    const int query = params.first + start + warp_row + m * 16 + half * 8 + lane / 4;
                    const int lowest = low(query, params);
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const int key = position + n * 8 + lane % 4 * 2 + i;
                            if (key > query || key < lowest) scores[m][n][half * 2 + i] = -INFINITY;
                        }
                    }
                }
                float next = most[m][half];
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
                    next = fmaxf(next, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
                }
                next = fmaxf(next, __shfl_xor_sync(ALL, next, 1));
                next = fmaxf(next, __shfl_xor_sync(ALL, next, 2));
                // A query that has seen no key yet.
                const float at = next == -INFINITY ? 0 : next * scale;
                const float shrink = exp2f(most[m][half] * scale - at);
                most[m][half] = next;
                float added = 0;
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &score = scores[m][n][half * 2 + i];
                        score = exp2f(fmaf(score, scale, -at));
                        added += score;
                    }
                }
                sum[m][half] = sum[m][half] * shrink + added;
#pragma unroll
                for (int n = 0; n < V / 8; n++) {
                    acc[m][n][half * 2] *= shrink;
                    acc[m][n][half * 2 + 1] *= shrink;
                }
            }
            pack_sums<KEYS>(p[m], scores[m], T());
        }
        multiply_columns<TILES, KEYS, V>(acc, p, v_tile, T());
    }
    const float sink = sinks ? wide(sinks[head]) * LOG2E : 0;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = start + warp_row + m * 16 + half * 8 + lane / 4;
            float total = sum[m][half];
            total += __shfl_xor_sync(ALL, total, 1);
            total += __shfl_xor_sync(ALL, total, 2);
            float at = most[m][half] * scale, factor = 1;
            if (sinks) {
                const float next = fmaxf(at, sink);
                factor = exp2f(at - next);
                total = total * factor + exp2f(sink - next);
                at = next;
            }
            if (row >= params.queries) continue;
            factor /= total;
            T *to = out + (((int64_t)batch * params.queries + row) * params.heads + head) * V;
            store_row<V>(to, acc[m], half, factor);
            if (log_sums && lane % 4 == 0) {
                log_sums[((int64_t)batch * params.heads + head) * params.queries + row] = (at + log2f(total)) / LOG2E;
            }
        }
    }
}

} // namespace

// Shared memory: tiles of queries, keys and values. Grid: blocks of queries, heads, sequences.
#define ATTENTION_FORWARD(T, D, V, TILES)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        attention_forward_##T##_##D##_##V(const __grid_constant__ AttentionParams params) {                            \
        wait_for_previous_kernel();                                                                                    \
        forward<D, V, TILES, T>(params);                                                                               \
    }

ATTENTION_FORWARD(bf16, 64, 64, 2)
ATTENTION_FORWARD(bf16, 128, 128, 2)
ATTENTION_FORWARD(bf16, 192, 128, 1)
ATTENTION_FORWARD(bf16, 256, 256, 1)
ATTENTION_FORWARD(f16, 64, 64, 2)
ATTENTION_FORWARD(f16, 128, 128, 2)
ATTENTION_FORWARD(f16, 192, 128, 1)
ATTENTION_FORWARD(f16, 256, 256, 1)
