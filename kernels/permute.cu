// Moving rows, adding a token's rows in a fixed order, and sums over a slot's parts. All limited by bytes.
//
//   gather_rows                   source [S, row], map [N] -> [N, row], zeros where the map has -1; a thread a word
//   reduce_rows, reduce_few_rows  source [N, width], map [T, K] -> [T, width]: sums of K rows in f32; a block a row
//   add_shares_*                  ranks' shares [parts, count] -> added to f32 [count], in pairs; a thread words of
//                                 four elements
//   slot_dots                     parts f32 [N, column tiles] -> f32 [N]; a block a row tile
//   sigmoid                       f32, or its gradient; a thread an element
//
// Notes: kernels/notes/permute.md.
#include "common/common.cuh"

template <class W>
__device__ void gather(const RowsOpParams& p) {
    const int64_t words = p.width / static_cast<int64_t>(sizeof(W));
    const W* source = static_cast<const W*>(p.source);
    W* out = static_cast<W*>(p.out);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.out_rows * words; i += step) {
        const int64_t row = i / words, from = p.map[row];
        if (from >= p.source_rows) raise_map(p.fault, row, static_cast<int>(from), p.site);
        W value;
        memset(&value, 0, sizeof(W));
        if (from >= 0 && from < p.source_rows) value = source[from * words + (i - row * words)];
        // Not kept in L2, where the source's rows are wanted again.
        __stcs(out + i, value);
    }
}

extern "C" __global__ void gather_rows(const __grid_constant__ RowsOpParams p) {
    wait_for_previous_kernel();
    if (p.word == 16) gather<uint4>(p);
    else if (p.word == 4) gather<uint32_t>(p);
    else gather<uint8_t>(p);
}

// One block a row of the output; eight elements a thread where rows allow it.
template <class T, int N>
__device__ void reduce(const RowsOpParams& p) {
    struct alignas(sizeof(T) * N) Pack {
        T v[N];
    };
    for (int64_t row = blockIdx.x; row < p.out_rows; row += gridDim.x) {
        const int32_t* map = p.map + row * p.fan;
        for (int64_t c = static_cast<int64_t>(threadIdx.x) * N; c < p.width; c += static_cast<int64_t>(blockDim.x) * N) {
            float sum[N] = {};
            for (int64_t k = 0; k < p.fan; k++) {
                const int64_t from = map[k];
                if (from < 0 || from >= p.source_rows) continue;
                const Pack pack = *reinterpret_cast<const Pack*>(static_cast<const T*>(p.source) + from * p.width + c);
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += to_float(pack.v[i]);
            }
            Pack pack;
#pragma unroll
            for (int i = 0; i < N; i++) pack.v[i] = from_float<T>(sum[i]);
            *reinterpret_cast<Pack*>(static_cast<T*>(p.out) + row * p.width + c) = pack;
        }
        // Behind the sums, which the registers are for.
        for (int64_t k = threadIdx.x; k < p.fan; k += blockDim.x) {
            if (map[k] >= p.source_rows) raise_map(p.fault, row * p.fan + k, map[k], p.site);
        }
    }
}

// The same of FAN rows in words of 16 bytes, all of which are under way before the first is added.
template <class T, int FAN>
__device__ void reduce_few(const RowsOpParams& p) {
    constexpr int N = 16 / sizeof(T);
    const int width = static_cast<int>(p.width);
    const int32_t rows = static_cast<int32_t>(p.source_rows);
    const int32_t* map = p.map + static_cast<int64_t>(blockIdx.x) * FAN;
    for (int c = threadIdx.x * N; c < width; c += blockDim.x * N) {
        uint4 packs[FAN];
        uint32_t real = 0;
#pragma unroll
        for (int k = 0; k < FAN; k++) {
            const int32_t from = map[k];
            if (from < 0 || from >= rows) continue;
            real |= 1u << k;
            packs[k] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.source) + static_cast<int64_t>(from) * width + c);
        }
        float sum[N] = {};
#pragma unroll
        for (int k = 0; k < FAN; k++) {
            if (!(real >> k & 1)) continue;
            T v[N];
            memcpy(v, &packs[k], 16);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += to_float(v[i]);
        }
        T v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = from_float<T>(sum[i]);
        uint4 pack;
        memcpy(&pack, v, 16);
        *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + static_cast<int64_t>(blockIdx.x) * width + c) = pack;
    }
    if (threadIdx.x < FAN && map[threadIdx.x] >= rows) {
        raise_map(p.fault, static_cast<int64_t>(blockIdx.x) * FAN + threadIdx.x, map[threadIdx.x], p.site);
    }
}

extern "C" __global__ void reduce_rows(const __grid_constant__ RowsOpParams p) {
    wait_for_previous_kernel();
    const bool wide = p.word == 16;
    if (p.type == TYPE_F32) wide ? reduce<float, 4>(p) : reduce<float, 1>(p);
    else if (p.type == TYPE_F16) wide ? reduce<f16, 8>(p) : reduce<f16, 1>(p);
    else wide ? reduce<bf16, 8>(p) : reduce<bf16, 1>(p);
}

template <class T>
__device__ void reduce_some(const RowsOpParams& p) {
    if (p.fan == 8) reduce_few<T, 8>(p);
    else if (p.fan == 6) reduce_few<T, 6>(p);
    else if (p.fan == 4) reduce_few<T, 4>(p);
    else reduce_few<T, 2>(p);
}

// A block a row, of two, four, six or eight, in words of 16 bytes.
extern "C" __global__ void __launch_bounds__(PERMUTE_THREADS, 4) reduce_few_rows(const __grid_constant__ RowsOpParams p) {
    wait_for_previous_kernel();
    if (p.type == TYPE_F32) reduce_some<float>(p);
    else if (p.type == TYPE_F16) reduce_some<f16>(p);
    else reduce_some<bf16>(p);
}

// Joins values in pairs as they come, ((0 + 1) + (2 + 3)) + ...: a counter whose bits say which sums are waiting.
template <int N>
struct Pairs {
    static constexpr int LEVELS = ADD_SHARES_LEVELS;
    float waiting[LEVELS][N];

    __device__ void add(int64_t k, const float (&value)[N]) {
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = value[i];
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (k >> level & 1) {
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] = waiting[level][i] + sum[i];
            } else {
#pragma unroll
                for (int i = 0; i < N; i++) waiting[level][i] = sum[i];
                return;
            }
        }
    }

    // The sum of `count` values.
    __device__ void take(int64_t count, float (&sum)[N]) const {
        bool first = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!(count >> level & 1)) continue;
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = first ? waiting[level][i] : waiting[level][i] + sum[i];
            first = false;
        }
    }
};

template <class T>
__device__ __forceinline__ const T* share(const AddSharesParams& p, int64_t k) {
    if (k == p.rank) return static_cast<const T*>(p.own);
    return static_cast<const T*>(p.others) + (k - (k > p.rank)) * p.count;
}

// Products and sums are rounded one by one, as on the CPU; a first sum is added to zeros, which decides the sign of a
// zero.
__device__ __forceinline__ float add_to(float main, float scale, float sum) {
    return __fadd_rn(main, __fmul_rn(scale, sum));
}

// PARTS shares, four elements of each at a time: so that a warp's words of main lie together. A thread with eight would
// write every sector in two parts, at three quarters of the rate. All words are under way before the first is added.
template <class T, int PARTS>
__device__ void add_few(const AddSharesParams& p) {
    constexpr int N = ADD_SHARES_ELEMENTS, WORDS = PARTS > 4 ? 1 : PARTS > 2 ? 4 : 8;
    using Pack = typename std::conditional<sizeof(T) == 2, uint2, uint4>::type;
    const float scale = static_cast<float>(p.scale);
    const int64_t next = static_cast<int64_t>(blockDim.x) * N, span = next * WORDS;
    for (int64_t at = blockIdx.x * span + threadIdx.x * N; at < p.count; at += gridDim.x * span) {
        Pack packs[WORDS][PARTS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + w * next >= p.count) break;
#pragma unroll
            for (int k = 0; k < PARTS; k++) packs[w][k] = *reinterpret_cast<const Pack*>(share<T>(p, k) + at + w * next);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + w * next >= p.count) break;
            Pairs<N> pairs;
#pragma unroll
            for (int k = 0; k < PARTS; k++) {
                T v[N];
                memcpy(v, &packs[w][k], sizeof v);
                pairs.add(k, {to_float(v[0]), to_float(v[1]), to_float(v[2]), to_float(v[3])});
            }
            float sum[N];
            pairs.take(PARTS, sum);
            float4* main = reinterpret_cast<float4*>(p.main + at + w * next);
            float4 out = {};
            if (!p.first) out = *main;
            out.x = add_to(out.x, scale, sum[0]), out.y = add_to(out.y, scale, sum[1]);
            out.z = add_to(out.z, scale, sum[2]), out.w = add_to(out.w, scale, sum[3]);
            *main = out;
        }
    }
}

// Any number of shares, at any address: an element at a time.
template <class T>
__device__ void add_many(const AddSharesParams& p) {
    const float scale = static_cast<float>(p.scale);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < p.count; at += step) {
        Pairs<1> pairs;
        for (int64_t k = 0; k < p.parts; k++) pairs.add(k, {to_float(share<T>(p, k)[at])});
        float sum[1];
        pairs.take(p.parts, sum);
        p.main[at] = add_to(p.first ? 0.0f : p.main[at], scale, sum[0]);
    }
}

// Adds ranks' shares to a main gradient.
template <class T>
__device__ void add_shares(const AddSharesParams& p) {
    if (!p.wide) add_many<T>(p);
    else if (p.parts == 1) add_few<T, 1>(p);
    else if (p.parts == 2) add_few<T, 2>(p);
    else if (p.parts == 4) add_few<T, 4>(p);
    else if (p.parts == 8) add_few<T, 8>(p);
    else add_many<T>(p);
}

extern "C" __global__ void add_shares_f32(const __grid_constant__ AddSharesParams p) {
    add_shares<float>(p);
}
extern "C" __global__ void add_shares_f16(const __grid_constant__ AddSharesParams p) {
    add_shares<f16>(p);
}
extern "C" __global__ void add_shares_bf16(const __grid_constant__ AddSharesParams p) {
    add_shares<bf16>(p);
}

// Gradient of each slot's weight from the parts that the tiles left: a thread a slot or, with a bias, a warp.
extern "C" __global__ void slot_dots(const __grid_constant__ SlotDotsParams p) {
    const int64_t tile = blockIdx.x;
    if (tile >= *p.tile_count) return;
    const int4 t = p.tiles[tile];
    if (!p.bias) {
        for (int r = threadIdx.x; r < t.z; r += blockDim.x) {
            const float* parts = p.partial + (t.y + r) * p.parts;
            float sum = 0.0f;
            for (int64_t i = 0; i < p.parts; i++) sum += parts[i];
            p.out[t.y + r] = sum;
        }
        return;
    }
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int r = threadIdx.x / 32; r < t.z; r += warps) {
        const int64_t slot = t.y + r;
        float sum = 0.0f;
        for (int64_t i = lane; i < p.parts; i += 32) sum += p.partial[slot * p.parts + i];
        const int64_t row = mapped_row(p.grad_map, slot, p.grad_rows, p.fault, p.site);
        for (int64_t i = lane; row >= 0 && i < p.width; i += 32) {
            sum += load_any(p.grad, p.type, row * p.width + i) * load_any(p.bias, p.type, t.x * p.width + i);
        }
        sum = warp_sum(sum);
        if (lane == 0) p.out[slot] = sum;
    }
}

// Logistic function of f32 values, or its gradient from its output.
extern "C" __global__ void sigmoid(const __grid_constant__ RowsOpParams p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.width) return;
    const float v = static_cast<const float*>(p.source)[i];
    static_cast<float*>(p.out)[i] = p.grad ? p.grad[i] * v * (1.0f - v) : 1.0f / (1.0f + expf(-v));
}
