// The router's dense products on Hopper (sm_90a): logits of 16-bit tokens, and for bf16 the gradients of tokens and weight.
// Everything else, and every other architecture, takes `linear.cu`. Empty where the architecture is another.
//
// These products are small: a tile is 64 rows, so that few tokens or few experts still fill the GPU, and two blocks share a
// multiprocessor, so that one waits for memory while the other works. The logits' gradients are f32. They are multiplied
// as the sum of two bf16 numbers, which holds 16 bits of each: less is lost than by the rounding of the result.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/common.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace {
using namespace hopper;

// A ring of stages of 16 KiB; one warp has them filled, four multiply.
constexpr int BK = 64, STAGES = 6, STAGE = 16384, THREADS = 160;
constexpr int SHARED = 1024 + STAGES * STAGE + 2 * STAGES * 8;
// The tokens' gradient: columns that a block makes, 128 at a time, the most experts that it takes, and the memory of one such
// part: the weight's, and that of what is added to. Two are under way.
constexpr int DX_PARTS = 4, DX_COLUMNS = DX_PARTS * 128, DX_EXPERTS = 128, DX_THREADS = 128;
constexpr int DX_OLD = 128 * DX_EXPERTS * 2, DX_PART = DX_OLD + 128 * 64 * 2;
constexpr int DX_SHARED = 1024 + 2 * DX_PART + 16;
static_assert(SHARED == 99424 && DX_SHARED == 99344, "src/cuda/launch.rs reserves as much");

struct Ring {
    uint32_t base, barriers;
    __device__ __forceinline__ uint32_t stage(int i) const { return base + i % STAGES * STAGE; }
    __device__ __forceinline__ uint32_t full(int i) const { return barriers + i % STAGES * 8; }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + STAGES * 8; }
    __device__ __forceinline__ void wait_full(int i) const { barrier_wait(full(i), i / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(int i) const { barrier_wait(empty(i), (i / STAGES & 1) ^ 1); }
};

__device__ __forceinline__ uint32_t aligned_base() {
    extern __shared__ char raw[];
    return (address(raw) + 1023) / 1024 * 1024;
}
__device__ __forceinline__ Ring start_ring() {
    const uint32_t base = aligned_base();
    const Ring ring{base, base + STAGES * STAGE};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(ring.full(i), 1), barrier_init(ring.empty(i), 4);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    return ring;
}

// Operand swizzled by 128 bytes: rows of 64 k, or blocks of 64 columns `leading` bytes apart with rows of one k.
__device__ __forceinline__ uint64_t operand(uint32_t at, uint32_t leading) {
    return ((at & 0x3ffff) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
template <int N>
__device__ __forceinline__ void begin(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT, int N>
__device__ __forceinline__ void finish(float (&v)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
    if constexpr (LEFT == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
    }
}
// Operands in registers are there before the matrix unit reads them.
template <int N>
__device__ __forceinline__ void ready(uint32_t (&v)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Two numbers as the sum of two bf16 each.
struct Split {
    uint32_t high, low;
    __device__ __forceinline__ Split(float x, float y) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
        const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
        memcpy(&high, &h, 4), memcpy(&low, &l, 4);
    }
};

// Logits: 64 tokens by 64 experts a block.
template <class T>
__device__ void forward(const Gemm& p, const CUtensorMap& x, const CUtensorMap& weight) {
    const Ring ring = start_ring();
    const int row = static_cast<int>(blockIdx.x / p.n_tiles) * 64, column = static_cast<int>(blockIdx.x % p.n_tiles) * 64;
    const int steps = static_cast<int>((p.k + BK - 1) / BK);
    if (threadIdx.x >= 128) {
        if (threadIdx.x != 128) return;
        for (int i = 0; i < steps; i++) {
            ring.wait_empty(i);
            barrier_arrive_expect(ring.full(i), STAGE);
            bulk(ring.stage(i), x, ring.full(i), i * BK, row);
            bulk(ring.stage(i) + STAGE / 2, weight, ring.full(i), i * BK, column);
        }
        return;
    }
    float acc[32] = {};
    for (int i = 0; i < steps; i++) {
        ring.wait_full(i);
        const uint64_t a = operand(ring.stage(i), 16), b = operand(ring.stage(i) + STAGE / 2, 16);
        begin(acc);
#pragma unroll
        for (int k = 0; k < BK / 16; k++) wgmma_64<0, 0>(acc, a + k * 2, b + k * 2, 1, T{});
        commit();
        finish<1>(acc);
        if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty(i - 1));
    }
    finish<0>(acc);
    const int lane = threadIdx.x % 32, first = row + threadIdx.x / 32 * 16 + lane / 4;
    float* out = static_cast<float*>(p.out);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int64_t r = first + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r < p.m && n < p.n) out[r * p.n + n] = p.bias ? acc[i] + load_any(p.bias, p.bias_type, n) : acc[i];
    }
}

// Adds to the tokens' gradient: 64 tokens by 512 columns a block. What is there comes and the sum leaves by the copy engine.
__device__ void gradient_of_x(const Gemm& p, const CUtensorMap& weight, const CUtensorMap& out) {
    const uint32_t base = aligned_base(), barriers = base + 2 * DX_PART;
    const int lane = threadIdx.x % 32, steps = static_cast<int>((p.k + 15) / 16), block = steps * 16 * 128;
    const int column = static_cast<int>(blockIdx.x % p.n_tiles) * DX_COLUMNS;
    const int parts = static_cast<int>(min(static_cast<int64_t>(DX_PARTS), (p.n - column + 127) / 128));
    const int row_of_block = static_cast<int>(blockIdx.x / p.n_tiles) * 64;
    const int64_t row = row_of_block + threadIdx.x / 32 * 16 + lane / 4;
    auto load = [&](int part) {
        const uint32_t to = base + part % 2 * DX_PART, bar = barriers + part % 2 * 8;
        barrier_arrive_expect(bar, 2 * (block + 8192));
        for (int j = 0; j < 2; j++) {
            const int x = column + part * 128 + j * 64;
            bulk(to + j * block, weight, bar, x, 0);
            bulk(to + DX_OLD + j * 8192, out, bar, x, row_of_block, 0);
        }
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) barrier_init(barriers + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
        for (int part = 0; part < min(2, parts); part++) load(part);
    }
    __syncthreads();
    // Rows past the last are read in its place, and not stored.
    uint32_t high[8][4] = {}, low[8][4] = {};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= steps) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t r = min(row + i % 2 * 8, p.m - 1), at = k * 16 + i / 2 * 8 + lane % 4 * 2;
            float2 v = {0.0f, 0.0f};
            if (at < p.k) v = *reinterpret_cast<const float2*>(static_cast<const float*>(p.a) + r * p.k + at);
            const Split split(v.x, v.y);
            high[k][i] = split.high, low[k][i] = split.low;
        }
    }
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
        float acc[64] = {};
        const uint32_t at_part = base + part % 2 * DX_PART;
        barrier_wait(barriers + part % 2 * 8, part / 2 & 1);
        const uint64_t b = operand(at_part, block);
        ready(high), ready(low);
        begin(acc);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k >= steps) continue;
            wgmma_128(acc, high[k], b + k * 128, 1);
            wgmma_128(acc, low[k], b + k * 128, 1);
        }
        commit();
        finish<0>(acc);
        // Added to what was there, 16 columns at a time, each warp in its own rows.
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int r = warp * 16 + lane % 16, word = j % 4 * 2 + lane / 16;
            const uint32_t at = at_part + DX_OLD + j / 4 * 8192 + r * 128 + ((word ^ (r & 7)) << 4);
            uint32_t v[4];
            load_matrices(at, v);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                __nv_bfloat162 pair;
                memcpy(&pair, &v[i], 4);
                pair = __floats2bfloat162_rn(acc[8 * j + 2 * i] + __low2float(pair), acc[8 * j + 2 * i + 1] + __high2float(pair));
                memcpy(&v[i], &pair, 4);
            }
            store_matrices(at, v);
        }
        fence_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int j = 0; j < 2; j++) bulk_store(out, at_part + DX_OLD + j * 8192, column + part * 128 + j * 64, row_of_block, 0);
            bulk_commit();
            bulk_wait_read();
            if (part + 2 < parts) load(part + 2);
        }
    }
}

// One of the parts, over tokens, of the weight's gradient: 64 experts by 128 columns a block. `sum_parts` adds them.
__device__ void gradient_of_weight(const Gemm& p, const CUtensorMap& x) {
    const Ring ring = start_ring();
    const int64_t tiles = p.m_tiles * p.n_tiles, tile = blockIdx.x % tiles, part = blockIdx.x / tiles;
    const int64_t per = ((p.k + p.split - 1) / p.split + BK - 1) / BK * BK, begins = min(part * per, p.k), ends = min(begins + per, p.k);
    const int steps = static_cast<int>((ends - begins + BK - 1) / BK), column = static_cast<int>(tile % p.n_tiles) * 128;
    if (threadIdx.x >= 128) {
        if (threadIdx.x != 128) return;
        for (int i = 0; i < steps; i++) {
            ring.wait_empty(i);
            barrier_arrive_expect(ring.full(i), STAGE);
            for (int b = 0; b < 2; b++) bulk(ring.stage(i) + b * STAGE / 2, x, ring.full(i), column + b * 64, begins + i * BK);
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    const int64_t row = tile / p.n_tiles * 64 + threadIdx.x / 32 * 16 + lane / 4;
    // The gradients of a step's tokens: of the thread's two experts, as `wgmma_128` wants them. Tokens past the end: zeros.
    // The copy engine's rows past the part's end are the next part's tokens, and zeros past the last.
    float ahead[4][8];
    auto read = [&](int step) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int64_t t = begins + step * BK + k * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2, e = row + i / 2 % 2 * 8;
                ahead[k][i] = t < ends && e < p.m ? static_cast<const float*>(p.a)[t * p.m + e] : 0.0f;
            }
        }
    };
    float acc[64] = {};
    if (steps > 0) read(0);
    for (int i = 0; i < steps; i++) {
        uint32_t high[4][4], low[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const Split split(ahead[k][2 * j], ahead[k][2 * j + 1]);
                high[k][j] = split.high, low[k][j] = split.low;
            }
        }
        ring.wait_full(i);
        const uint64_t b = operand(ring.stage(i), STAGE / 2);
        ready(high), ready(low);
        begin(acc);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wgmma_128(acc, high[k], b + k * 128, 1);
            wgmma_128(acc, low[k], b + k * 128, 1);
        }
        commit();
        if (i + 1 < steps) read(i + 1);
        finish<0>(acc);
        if (lane == 0) barrier_arrive(ring.empty(i));
    }
    float* out = p.partial + part * p.m * p.n;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int64_t e = row + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (e < p.m && n < p.n) out[e * p.n + n] = acc[i];
    }
}
}  // namespace

#define FORWARD(name, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                              \
        name(const __grid_constant__ Gemm p, const __grid_constant__ CUtensorMap x,                       \
             const __grid_constant__ CUtensorMap weight) {                                                \
        forward<T>(p, x, weight);                                                                         \
    }
FORWARD(hopper_linear_bf16, bf16)
FORWARD(hopper_linear_f16, f16)

extern "C" __global__ void __launch_bounds__(DX_THREADS, 2)
    hopper_linear_d_x(const __grid_constant__ Gemm p, const __grid_constant__ CUtensorMap weight,
                      const __grid_constant__ CUtensorMap out) {
    gradient_of_x(p, weight, out);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    hopper_linear_d_weight(const __grid_constant__ Gemm p, const __grid_constant__ CUtensorMap x) {
    gradient_of_weight(p, x);
}
#endif
