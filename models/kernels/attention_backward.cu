// Gradients of attention of blocks of queries over blocks of keys. No matrix of scores is stored, and none is added up
// in memory: a block of threads owns the rows that it writes, and goes over the others in one order.
//
//   dots       D = rows of the result times rows of its gradient
//   keys       a block of keys: dV = Σ Pᵀ dO and dK = Σ dSᵀ Q · scale over the queries that see it, of all its heads
//   queries    a block of queries: dQ = Σ dS K · scale over the keys that it sees
//
// P = exp(S · scale − log sums) is made again from the scores S = Q Kᵀ, and dS = P ∘ (dO Vᵀ − D). The keys' kernel
// makes the transposed of both, whose sums in registers are the left sides of its second products.
//
// Types: bf16 or f16 in memory and in products, f32 in sums.

#include "attention.cuh"

namespace {

// Numbers of a tile's queries.
enum RowNumber { LOG_SUMS, DOTS, ROW_NUMBERS };

// Rows of the result times its gradient's: V / 8 neighboring threads have one.
template <int V, typename T> __device__ void dots(const AttentionBackwardParams &params) {
    constexpr int LANES = V / 8;
    const AttentionParams &forward = params.forward;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const int64_t rows = (int64_t)forward.queries * forward.heads, batch = blockIdx.z;
    const int lane = threadIdx.x % LANES, query = row / forward.heads, head = row % forward.heads;
    const bool there = row < rows;
    float sum = 0;
    if (there) {
        const Strides &strides = params.d_out_strides;
        const T *d_out = static_cast<const T *>(params.d_out) + batch * strides.sequence + head * strides.head;
        float y[8], d_y[8];
        unpack(reinterpret_cast<const uint4 *>(forward.out)[(batch * rows + row) * LANES + lane], y, T());
        unpack(reinterpret_cast<const uint4 *>(d_out + query * strides.row)[lane], d_y, T());
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(y[i], d_y[i], sum);
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    if (there && lane == 0) params.dots[(batch * forward.heads + head) * forward.queries + query] = sum;
}

// Rows `first ..` of at most `count` to a tile, as `load_rows` does, with fewer registers for addresses: eight
// neighbors copy 128 bytes of a row at a time. Nothing is read where a row is not there.
template <int ROWS, int D, typename T>
__device__ __forceinline__ void load_tile(uint32_t tile, const T *from, int64_t stride, int first, int count) {
    constexpr int AT_ONCE = THREADS / 8;
    static_assert(ROWS % AT_ONCE == 0 && D % 64 == 0, "whole rounds of all threads");
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    tile += place<D>(row, chunk);
    from += (first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_ONCE) {
        const bool there = first + row + i < count;
        const T *const at = there ? from + i * stride : from;
#pragma unroll
        for (int j = 0; j < D / 64; j++) copy_async(tile + i * D * 2 + j * 128, at + j * 64, there);
    }
}

// 4 bytes to shared memory; zero where `there` is false.
__device__ void copy_word_async(uint32_t to, const float *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0));
}

__device__ float2 load_pair(uint32_t from) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from));
    return pair;
}

// A block of keys, WARPS · TILES · 16 of them. QUERIES: of a step. KEYS, VALUES: whose gradient is wanted.
template <int D, int V, int TILES, int QUERIES, bool KEYS, bool VALUES, typename T>
__device__ __forceinline__ void keys(const AttentionBackwardParams &params, int block) {
    constexpr int ROWS = WARPS * TILES * 16;
    constexpr uint32_t Q_BYTES = QUERIES * D * 2, D_OUT_BYTES = QUERIES * V * 2;
    constexpr uint32_t STEP_BYTES = Q_BYTES + D_OUT_BYTES, NUMBER_BYTES = QUERIES * 4;
    const AttentionParams &forward = params.forward;
    extern __shared__ __align__(128) uint8_t shared[];
    // Tiles of keys and values, of two steps, and the two steps' numbers of rows.
    const uint32_t k_tile = (uint32_t)__cvta_generic_to_shared(shared), v_tile = k_tile + ROWS * D * 2;
    const uint32_t step_tiles = v_tile + ROWS * V * 2, numbers = step_tiles + 2 * STEP_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_head = blockIdx.y, batch = blockIdx.z;
    const int group = forward.heads / forward.key_heads, start = block * ROWS, warp_row = warp * TILES * 16;
    const int rows = min(ROWS, forward.positions - start);
    // Queries that see any of the keys, counted from the first query.
    const int position = forward.first_key + start;
    const int begin = max(0, position - forward.first);
    const int end = min(forward.queries - 1, high(position + rows - 1, forward) - forward.first) + 1;
    const int first_step = begin / QUERIES, steps = (end + QUERIES - 1) / QUERIES;

    auto load_step = [&](int head, int step, int half) {
        const Strides &q_strides = forward.q_strides, &strides = params.d_out_strides;
        const T *q = static_cast<const T *>(forward.q) + batch * q_strides.sequence + head * q_strides.head;
        const T *d_out = static_cast<const T *>(params.d_out) + batch * strides.sequence + head * strides.head;
        const uint32_t to = step_tiles + half * STEP_BYTES;
        load_tile<QUERIES, D>(to, q, q_strides.row, step * QUERIES, forward.queries);
        load_tile<QUERIES, V>(to + Q_BYTES, d_out, strides.row, step * QUERIES, forward.queries);
        const int64_t first = ((int64_t)batch * forward.heads + head) * forward.queries;
// Not unrolled: addresses would take registers that sums have.
#pragma unroll 1
        for (int i = threadIdx.x; i < ROW_NUMBERS * QUERIES; i += THREADS) {
            const int query = step * QUERIES + i % QUERIES;
            const float *from = (i / QUERIES == LOG_SUMS ? forward.log_sums : params.dots) + first;
            const bool there = query < forward.queries;
            copy_word_async(numbers + half * ROW_NUMBERS * NUMBER_BYTES + i * 4, from + (there ? query : 0), there);
        }
        commit();
    };

    float d_k[KEYS ? TILES : 1][D / 8][4] = {}, d_v[VALUES ? TILES : 1][V / 8][4] = {};
    int last[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            last[m][half] = high(position + warp_row + m * 16 + half * 8 + lane / 4, forward);
        }
    }
    const float scale = forward.scale * LOG2E;
    int head = key_head * group, step = first_step, half = 0;
    const int heads = first_step < steps ? head + group : head;
    if (head < heads) {
        const Strides &k_strides = forward.k_strides, &v_strides = forward.v_strides;
        const T *k = static_cast<const T *>(forward.k) + batch * k_strides.sequence + key_head * k_strides.head;
        const T *v = static_cast<const T *>(forward.v) + batch * v_strides.sequence + key_head * v_strides.head;
        load_tile<ROWS, D>(k_tile, k, k_strides.row, start, forward.positions);
        if (KEYS) load_tile<ROWS, V>(v_tile, v, v_strides.row, start, forward.positions);
        load_step(head, step, half);
    }
    while (head < heads) {
        wait<0>();
        __syncthreads();
        const int first_query = forward.first + step * QUERIES;
        const uint32_t q_tile = step_tiles + half * STEP_BYTES, d_out_tile = q_tile + Q_BYTES;
        const uint32_t row_numbers = numbers + half * ROW_NUMBERS * NUMBER_BYTES + lane % 4 * 8;
        half ^= 1;
        if (++step == steps) step = first_step, head++;
        if (head < heads) load_step(head, step, half);

        float p[TILES][QUERIES / 8][4] = {};
        multiply_rows<TILES, QUERIES, D>(p, k_tile, warp_row, q_tile, T());
        // Whether some query of the step does not see one of the keys.
        const bool masked = position + ROWS - 1 > first_query || high(position, forward) < first_query + QUERIES - 1;
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 sums = load_pair(row_numbers + LOG_SUMS * NUMBER_BYTES + n * 32);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &entry = p[m][n][i];
                    entry = exp2f(fmaf(entry, scale, -LOG2E * (i % 2 ? sums.y : sums.x)));
                    if (masked) {
                        const int query = first_query + n * 8 + lane % 4 * 2 + i % 2;
                        const int key = position + warp_row + m * 16 + i / 2 * 8 + lane / 4;
                        if (query < key || query > last[m][i / 2]) entry = 0;
                    }
                }
            }
        }
        uint32_t left[TILES][QUERIES / 16][4];
        if constexpr (VALUES) {
#pragma unroll
            for (int m = 0; m < TILES; m++) pack_sums<QUERIES>(left[m], p[m], T());
            multiply_columns<TILES, QUERIES, V>(d_v, left, d_out_tile, T());
        }
        if constexpr (KEYS) {
            float d_s[TILES][QUERIES / 8][4] = {};
            multiply_rows<TILES, QUERIES, V>(d_s, v_tile, warp_row, d_out_tile, T());
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                const float2 products = load_pair(row_numbers + DOTS * NUMBER_BYTES + n * 32);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        d_s[m][n][i] = p[m][n][i] * (d_s[m][n][i] - (i % 2 ? products.y : products.x));
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < TILES; m++) pack_sums<QUERIES>(left[m], d_s[m], T());
            multiply_columns<TILES, QUERIES, D>(d_k, left, q_tile, T());
        }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = start + warp_row + m * 16 + half * 8 + lane / 4;
            if (row >= forward.positions) continue;
            const int64_t to = ((int64_t)batch * forward.key_heads + key_head) * forward.positions + row;
            if constexpr (KEYS) store_row<D>(static_cast<T *>(params.d_k) + to * D, d_k[m], half, forward.scale);
            if constexpr (VALUES) store_row<V>(static_cast<T *>(params.d_v) + to * V, d_v[m], half, 1);
        }
    }
}

// A block of queries, WARPS · TILES · 16 of them. KEYS: of a step.
template <int D, int V, int TILES, int KEYS, typename T>
__device__ __forceinline__ void queries(const AttentionBackwardParams &params) {
    constexpr int ROWS = WARPS * TILES * 16;
    constexpr uint32_t K_BYTES = KEYS * D * 2, STEP_BYTES = K_BYTES + KEYS * V * 2;
    const AttentionParams &forward = params.forward;
    extern __shared__ __align__(128) uint8_t shared[];
    // Tiles of queries and the result's gradient, and of two steps.
    const uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(shared), d_out_tile = q_tile + ROWS * D * 2;
    const uint32_t step_tiles = d_out_tile + ROWS * V * 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, batch = blockIdx.z;
    const int key_head = head / (forward.heads / forward.key_heads), warp_row = warp * TILES * 16;
    // The last queries see most keys: they begin first.
    const int start = (gridDim.x - 1 - blockIdx.x) * ROWS;
    const Strides &q_strides = forward.q_strides, &strides = params.d_out_strides;
    const T *q = static_cast<const T *>(forward.q) + batch * q_strides.sequence + head * q_strides.head;
    const T *d_out = static_cast<const T *>(params.d_out) + batch * strides.sequence + head * strides.head;
    const Strides &k_strides = forward.k_strides, &v_strides = forward.v_strides;
    const T *k = static_cast<const T *>(forward.k) + batch * k_strides.sequence + key_head * k_strides.head;
    const T *v = static_cast<const T *>(forward.v) + batch * v_strides.sequence + key_head * v_strides.head;
    const int rows = min(ROWS, forward.queries - start);
    // Keys that any query sees, counted from the first key.
    const int begin = max(0, low(forward.first + start, forward) - forward.first_key);
    const int end = forward.first + start + rows - forward.first_key;
    const int first_step = begin / KEYS, steps = (end + KEYS - 1) / KEYS;

    auto load_step = [&](int step) {
        const uint32_t to = step_tiles + step % 2 * STEP_BYTES;
        load_tile<KEYS, D>(to, k, k_strides.row, step * KEYS, forward.positions);
        load_tile<KEYS, V>(to + K_BYTES, v, v_strides.row, step * KEYS, forward.positions);
        commit();
    };
    load_tile<ROWS, D>(q_tile, q, q_strides.row, start, forward.queries);
    load_tile<ROWS, V>(d_out_tile, d_out, strides.row, start, forward.queries);
    load_step(first_step);

    // Of the thread's rows: logarithms of sums, to the base of two, and products.
    float sums[TILES][2], products[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = start + warp_row + m * 16 + half * 8 + lane / 4;
            const bool there = row < forward.queries;
            const int64_t at = ((int64_t)batch * forward.heads + head) * forward.queries + row;
            sums[m][half] = there ? forward.log_sums[at] * LOG2E : 0;
            products[m][half] = there ? params.dots[at] : 0;
        }
    }
    float d_q[TILES][D / 8][4] = {};
    const float scale = forward.scale * LOG2E;
    for (int step = first_step; step < steps; step++) {
        wait<0>();
        __syncthreads();
        const uint32_t k_tile = step_tiles + step % 2 * STEP_BYTES, v_tile = k_tile + K_BYTES;
        if (step + 1 < steps) load_step(step + 1);
        float p[TILES][KEYS / 8][4] = {}, d_s[TILES][KEYS / 8][4] = {};
        multiply_rows<TILES, KEYS, D>(p, q_tile, warp_row, k_tile, T());
        multiply_rows<TILES, KEYS, V>(d_s, d_out_tile, warp_row, v_tile, T());
        // Positions of the step's keys, and whether some query of the block does not see one of them.
        const int position = forward.first_key + step * KEYS;
        const bool masked = position + KEYS - 1 > forward.first + start ||
                            position < low(forward.first + start + ROWS - 1, forward);
        uint32_t left[TILES][KEYS / 16][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float entry = exp2f(fmaf(p[m][n][i], scale, -sums[m][i / 2]));
                    d_s[m][n][i] = entry * (d_s[m][n][i] - products[m][i / 2]);
                    if (masked) {
                        const int key = position + n * 8 + lane % 4 * 2 + i % 2;
                        const int query = forward.first + start + warp_row + m * 16 + i / 2 * 8 + lane / 4;
                        if (key > query || key < low(query, forward)) d_s[m][n][i] = 0;
                    }
                }
            }
            pack_sums<KEYS>(left[m], d_s[m], T());
        }
        multiply_columns<TILES, KEYS, D>(d_q, left, k_tile, T());
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = start + warp_row + m * 16 + half * 8 + lane / 4;
            if (row >= forward.queries) continue;
            const int64_t to = ((int64_t)batch * forward.heads + head) * forward.queries + row;
            store_row<D>(static_cast<T *>(params.d_q) + to * D, d_q[m], half, forward.scale);
        }
    }
}

} // namespace

// Grid: blocks of THREADS · 8 / V rows, 1, sequences.
#define ATTENTION_DOTS(T, V)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        attention_dots_##T##_##V(const __grid_constant__ AttentionBackwardParams params) {                             \
        wait_for_previous_kernel();                                                                                    \
        dots<V, T>(params);                                                                                            \
    }

// Grid: blocks of keys, key heads, sequences.
#define ATTENTION_BACKWARD_KEYS(T, D, V, TILES, QUERIES)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        attention_backward_keys_##T##_##D##_##V(const __grid_constant__ AttentionBackwardParams params) {              \
        wait_for_previous_kernel();                                                                                    \
        keys<D, V, TILES, QUERIES, true, true, T>(params, blockIdx.x);                                                 \
    }

// Sums of both gradients take more than a thread's registers: two blocks of threads have a block of keys, one of them
// makes dK, the other dV, and both the scores.
#define ATTENTION_BACKWARD_KEYS_APART(T, D, V, TILES, QUERIES)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        attention_backward_keys_##T##_##D##_##V(const __grid_constant__ AttentionBackwardParams params) {              \
        wait_for_previous_kernel();                                                                                    \
        if (blockIdx.x % 2 == 0) {                                                                                     \
            keys<D, V, TILES, QUERIES, true, false, T>(params, blockIdx.x / 2);                                        \
        } else {                                                                                                       \
            keys<D, V, TILES, QUERIES, false, true, T>(params, blockIdx.x / 2);                                        \
        }                                                                                                              \
    }

// Grid: blocks of queries, heads, sequences.
#define ATTENTION_BACKWARD_QUERIES(T, D, V, TILES, KEYS)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        attention_backward_queries_##T##_##D##_##V(const __grid_constant__ AttentionBackwardParams params) {           \
        wait_for_previous_kernel();                                                                                    \
        queries<D, V, TILES, KEYS, T>(params);                                                                         \
    }

#define ATTENTION_BACKWARD(T)                                                                                          \
    ATTENTION_DOTS(T, 64)                                                                                              \
    ATTENTION_DOTS(T, 128)                                                                                             \
    ATTENTION_DOTS(T, 256)                                                                                             \
    ATTENTION_BACKWARD_KEYS(T, 64, 64, 2, 32)                                                                          \
    ATTENTION_BACKWARD_KEYS(T, 128, 128, 1, 64)                                                                        \
    ATTENTION_BACKWARD_KEYS(T, 192, 128, 1, 32)                                                                        \
    ATTENTION_BACKWARD_KEYS_APART(T, 256, 256, 1, 16)                                                                  \
    ATTENTION_BACKWARD_QUERIES(T, 64, 64, 2, 64)                                                                       \
    ATTENTION_BACKWARD_QUERIES(T, 128, 128, 2, 32)                                                                     \
    ATTENTION_BACKWARD_QUERIES(T, 192, 128, 1, 32)                                                                     \
    ATTENTION_BACKWARD_QUERIES(T, 256, 256, 1, 16)

ATTENTION_BACKWARD(bf16)
ATTENTION_BACKWARD(f16)
