// The router's dense products on Hopper (sm_90a): logits of 16-bit tokens, and for bf16 the gradients of tokens and
// weight. Everything else, and every other architecture, takes `linear.cu`. Empty where the architecture is another.
//
//   sm90_linear_*           x [T, H], weight [E, H] -> logits f32 [T, E]; a block 64 tokens x 64 experts
//   sm90_linear_d_x         logits' gradients f32 [T, E], weight -> added to [T, H]; at most 256 experts
//   sm90_linear_d_weight    those gradients, x -> f32 parts [parts, E, H]; a block 64 experts x 128 columns of a part
//
// These products are small: a tile is 64 rows, so that few tokens or few experts still fill the GPU, and two blocks
// share an SM, so that one waits for memory while the other works; those of the tokens' gradient stay, one
// each, with their part of the weight. The logits' gradients are f32. They are multiplied as the sum of two bf16
// numbers, which holds 16 bits of each: less is lost than by the rounding of the result. Limited by bytes. Notes:
// kernels/notes/router.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/common.cuh"
#include "ptx/mbarrier_tma.cuh"
#include "ptx/wgmma.cuh"

namespace {
using namespace ptx;

// A ring of stages of 16 KiB, twice that for the weight's gradient; one warp has them filled, four multiply.
constexpr int BLOCK_K = 64, STAGES = 6, STAGE_BYTES = 16384, DW_STAGES = STAGES / 2, DW_STAGE_BYTES = 2 * STAGE_BYTES, THREADS = 160;
constexpr int SMEM_BYTES = 1024 + STAGES * STAGE_BYTES + 2 * STAGES * 8;
// The tokens' gradient: two warpgroups with 512 columns of the weight between them, or 256 where there are more than 128
// experts. They take 128 at a time, each with three tiles of what is added to: one comes, one is added to, one leaves.
constexpr int DX_THREADS = 256, DX_TILES = 3, DX_TILE_BYTES = 64 * 256, DX_WEIGHT_BYTES = SM90_LINEAR_DX_NUMBERS * 2;
template <int STEPS>
constexpr int DX_PARTS = STEPS > 8 ? 2 : 4;
static_assert(DX_PARTS<8> * 128 == SM90_LINEAR_DX_COLUMNS && SM90_LINEAR_DX_COLUMNS * 128 == SM90_LINEAR_DX_NUMBERS && DX_PARTS<16> * 128 * SM90_LINEAR_DX_EXPERTS == SM90_LINEAR_DX_NUMBERS, "a block has other columns");
constexpr int DX_SMEM_BYTES = 1024 + DX_WEIGHT_BYTES + 2 * DX_TILES * DX_TILE_BYTES + (2 * DX_TILES + 1) * 8;
static_assert(THREADS == SM90_LINEAR_THREADS && SMEM_BYTES == SM90_LINEAR_SMEM && BLOCK_K == SM90_LINEAR_TILE, "common/shapes.h has others");
static_assert(DX_THREADS == SM90_LINEAR_DX_THREADS && DX_SMEM_BYTES == SM90_LINEAR_DX_SMEM, "common/shapes.h has others");

template <int COUNT, int BYTES>
struct Ring {
    uint32_t base, barriers;
    __device__ __forceinline__ uint32_t stage(int i) const { return base + i % COUNT * BYTES; }
    __device__ __forceinline__ uint32_t full(int i) const { return barriers + i % COUNT * 8; }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + COUNT * 8; }
    __device__ __forceinline__ void wait_full(int i) const { mbarrier_wait(full(i), i / COUNT & 1); }
    __device__ __forceinline__ void wait_empty(int i) const { mbarrier_wait(empty(i), (i / COUNT & 1) ^ 1); }
};

__device__ __forceinline__ uint32_t aligned_base() {
    extern __shared__ char raw[];
    return (smem_address(raw) + 1023) / 1024 * 1024;
}
template <int COUNT, int BYTES>
__device__ __forceinline__ Ring<COUNT, BYTES> start_ring() {
    const uint32_t base = aligned_base();
    const Ring<COUNT, BYTES> ring{base, base + COUNT * BYTES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < COUNT; i++) mbarrier_init(ring.full(i), 1), mbarrier_init(ring.empty(i), 4);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    return ring;
}

// Operand swizzled by 128 bytes: rows of 64 k, or blocks of 64 columns `leading` bytes apart with rows of one k.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t at, uint32_t leading) {
    return ((at & 0x3ffff) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
template <int N>
__device__ __forceinline__ void wgmma_arrive(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT, int N>
__device__ __forceinline__ void wgmma_wait(float (&v)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
    if constexpr (LEFT == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
    }
}
// Operands in registers are there before the tensor core reads them.
template <int N>
__device__ __forceinline__ void fence_registers(uint32_t (&v)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Two numbers as the sum of two bf16 each.
struct SplitBf16 {
    uint32_t high, low;
    __device__ __forceinline__ SplitBf16(float x, float y) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
        const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
        memcpy(&high, &h, 4), memcpy(&low, &l, 4);
    }
};

// Logits: 64 tokens by 64 experts a block.
template <class T>
__device__ void forward(const GemmParams& p, const CUtensorMap& x, const CUtensorMap& weight) {
    const auto ring = start_ring<STAGES, STAGE_BYTES>();
    const int row = static_cast<int>(blockIdx.x / p.n_tiles) * 64, column = static_cast<int>(blockIdx.x % p.n_tiles) * 64;
    const int steps = static_cast<int>((p.k + BLOCK_K - 1) / BLOCK_K);
    if (threadIdx.x >= 128) {
        if (threadIdx.x != 128) return;
        for (int i = 0; i < steps; i++) {
            ring.wait_empty(i);
            mbarrier_arrive_expect_tx(ring.full(i), STAGE_BYTES);
            tma_load(ring.stage(i), x, ring.full(i), i * BLOCK_K, row);
            tma_load(ring.stage(i) + STAGE_BYTES / 2, weight, ring.full(i), i * BLOCK_K, column);
        }
        return;
    }
    float acc[32] = {};
    for (int i = 0; i < steps; i++) {
        ring.wait_full(i);
        const uint64_t a = smem_descriptor(ring.stage(i), 16), b = smem_descriptor(ring.stage(i) + STAGE_BYTES / 2, 16);
        wgmma_arrive(acc);
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++) wgmma_64<0, 0>(acc, a + k * 2, b + k * 2, 1, T{});
        wgmma_commit();
        wgmma_wait<1>(acc);
        if (i > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty(i - 1));
    }
    wgmma_wait<0>(acc);
    const int lane = threadIdx.x % 32, first = row + threadIdx.x / 32 * 16 + lane / 4;
    float* out = static_cast<float*>(p.out);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int64_t r = first + i / 2 % 2 * 8, n = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r < p.m && n < p.n) out[r * p.n + n] = p.bias ? acc[i] + load_any(p.bias, p.bias_type, n) : acc[i];
    }
}

// Adds to the tokens' gradient: blocks that stay, each with its columns of the weight, which are read once. STEPS
// of 16 experts. What is there comes and the sum leaves by TMA.
template <int STEPS>
__device__ __forceinline__ void gradient_of_x(const GemmParams& p, const CUtensorMap& weight, const CUtensorMap& out) {
    constexpr int BLOCK_BYTES = STEPS * 16 * 128, PARTS = DX_PARTS<STEPS>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
    const uint32_t base = aligned_base(), barriers = base + DX_WEIGHT_BYTES + 2 * DX_TILES * DX_TILE_BYTES, arrived = barriers + 2 * DX_TILES * 8;
    const int slabs = static_cast<int>(p.n_tiles), column = static_cast<int>(blockIdx.x) % slabs * (PARTS * 128);
    const int parts = static_cast<int>(min(static_cast<int64_t>(PARTS), (p.n - column + 127) / 128));
    // This warpgroup's row tiles, and its units of work: parts of these.
    const int first = static_cast<int>(blockIdx.x) / slabs * 2 + group, stride = static_cast<int>(gridDim.x) / slabs * 2;
    const int tiles = static_cast<int>(p.m_tiles), units = first < tiles ? (tiles - first + stride - 1) / stride * parts : 0;
    const bool leads = threadIdx.x % 128 == 0;
    auto tile = [&](int unit) { return base + DX_WEIGHT_BYTES + (group * DX_TILES + unit % DX_TILES) * DX_TILE_BYTES; };
    auto barrier = [&](int unit) { return barriers + (group * DX_TILES + unit % DX_TILES) * 8; };
    auto row_of = [&](int unit) { return (first + unit / parts * stride) * 64; };
    auto column_of = [&](int unit, int j) { return column + unit % parts * 128 + j * 64; };
    auto load = [&](int unit) {
        if (unit >= units) return;
        mbarrier_arrive_expect_tx(barrier(unit), DX_TILE_BYTES);
        for (int j = 0; j < 2; j++) tma_load(tile(unit) + j * (DX_TILE_BYTES / 2), out, barrier(unit), column_of(unit, j), row_of(unit), 0);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * DX_TILES + 1; i++) mbarrier_init(barriers + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
        mbarrier_arrive_expect_tx(arrived, 2 * parts * BLOCK_BYTES);
        for (int j = 0; j < 2 * parts; j++) tma_load(base + j * BLOCK_BYTES, weight, arrived, column + j * 64, 0);
    }
    __syncthreads();
    if (leads) {
        for (int unit = 0; unit < DX_TILES; unit++) load(unit);
    }
    uint32_t high[STEPS][4], low[STEPS][4];
    for (int unit = 0; unit < units; unit++) {
        if (unit % parts == 0) {
            // Rows past the last are read in its place, and not stored.
            const int64_t row = row_of(unit) + warp * 16 + lane / 4;
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int64_t r = min(row + i % 2 * 8, p.m - 1), at = k * 16 + i / 2 * 8 + lane % 4 * 2;
                    float2 v = {0.0f, 0.0f};
                    if (at < p.k) v = *reinterpret_cast<const float2*>(static_cast<const float*>(p.a) + r * p.k + at);
                    const SplitBf16 split(v.x, v.y);
                    high[k][i] = split.high, low[k][i] = split.low;
                }
            }
        }
        if (unit == 0) mbarrier_wait(arrived, 0);
        float acc[64] = {};
        const uint64_t b = smem_descriptor(base + unit % parts * 2 * BLOCK_BYTES, BLOCK_BYTES);
        fence_registers(high), fence_registers(low);
        wgmma_arrive(acc);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            wgmma_128(acc, high[k], b + k * 128, 1);
            wgmma_128(acc, low[k], b + k * 128, 1);
        }
        wgmma_commit();
        wgmma_wait<0>(acc);
        mbarrier_wait(barrier(unit), unit / DX_TILES & 1);
        // Added to what was there, 16 columns at a time, each warp in its own rows.
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int r = warp * 16 + lane % 16, word = j % 4 * 2 + lane / 16;
            const uint32_t at = tile(unit) + j / 4 * (DX_TILE_BYTES / 2) + r * 128 + ((word ^ (r & 7)) << 4);
            uint32_t v[4];
            ldmatrix(at, v);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                __nv_bfloat162 pair;
                memcpy(&pair, &v[i], 4);
                pair = __floats2bfloat162_rn(acc[8 * j + 2 * i] + __low2float(pair), acc[8 * j + 2 * i + 1] + __high2float(pair));
                memcpy(&v[i], &pair, 4);
            }
            stmatrix(at, v);
        }
        fence_proxy_async();
        asm volatile("bar.sync %0, 128;\n" ::"r"(1 + group) : "memory");
        if (leads) {
            for (int j = 0; j < 2; j++) tma_store(out, tile(unit) + j * (DX_TILE_BYTES / 2), column_of(unit, j), row_of(unit), 0);
            tma_store_commit();
            // The tile before this one has been read: the next one but one may have its place.
            asm volatile("cp.async.bulk.wait_group.read 1;\n" ::: "memory");
            if (unit > 0) load(unit + 2);
        }
    }
    if (leads) tma_store_wait_read();
}

__device__ __forceinline__ float load_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(at) : "memory");
    return v;
}

// The gradients of the logits as `wgmma_128` wants them: of a step's tokens and the thread's two experts. They lie as
// 64 tokens of 32 experts, twice; no two lanes read the same bank.
struct LogitGradients {
    uint32_t high[4][4], low[4][4];
    __device__ __forceinline__ void read(uint32_t from) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
        from += warp / 2 * 8192 + t * 128 + lane / 4 % 4 * 4;
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float v[2];
#pragma unroll
                for (int i = 0; i < 2; i++) v[i] = load_float(from + (k * 16 + j / 2 * 8 + i) * 128 + (((chunk + j % 2 * 2) ^ (t + i)) << 4));
                const SplitBf16 split(v[0], v[1]);
                high[k][j] = split.high, low[k][j] = split.low;
            }
        }
    }
};

// One of the parts, over tokens, of the weight's gradient: 64 experts by 128 columns a block. `sum_parts` adds them.
// Tokens and experts past the last come as zeros; parts are whole steps but for the last.
__device__ void gradient_of_weight(const GemmParams& p, const CUtensorMap& x, const CUtensorMap& logits) {
    const auto ring = start_ring<DW_STAGES, DW_STAGE_BYTES>();
    const int64_t tiles = p.m_tiles * p.n_tiles, tile = blockIdx.x % tiles, part = blockIdx.x / tiles;
    const int64_t per = ((p.k + p.split - 1) / p.split + BLOCK_K - 1) / BLOCK_K * BLOCK_K, begins = min(part * per, p.k), ends = min(begins + per, p.k);
    const int steps = static_cast<int>((ends - begins + BLOCK_K - 1) / BLOCK_K), column = static_cast<int>(tile % p.n_tiles) * 128;
    const int row_of_block = static_cast<int>(tile / p.n_tiles) * 64;
    if (threadIdx.x >= 128) {
        if (threadIdx.x != 128) return;
        for (int i = 0; i < steps; i++) {
            ring.wait_empty(i);
            mbarrier_arrive_expect_tx(ring.full(i), DW_STAGE_BYTES);
            for (int b = 0; b < 2; b++) {
                tma_load(ring.stage(i) + b * 8192, x, ring.full(i), column + b * 64, begins + i * BLOCK_K);
                tma_load(ring.stage(i) + STAGE_BYTES + b * 8192, logits, ring.full(i), row_of_block + b * 32, begins + i * BLOCK_K);
            }
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    float acc[64] = {};
    LogitGradients even, odd;
    auto read = [&](int i, LogitGradients& to) {
        if (i >= steps) return;
        ring.wait_full(i);
        to.read(ring.stage(i) + STAGE_BYTES);
    };
    // A step's products, under which the next step's gradients are read.
    auto step = [&](int i, LogitGradients& own, LogitGradients& next) {
        const uint64_t b = smem_descriptor(ring.stage(i), STAGE_BYTES / 2);
        fence_registers(own.high), fence_registers(own.low);
        wgmma_arrive(acc);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wgmma_128(acc, own.high[k], b + k * 128, 1);
            wgmma_128(acc, own.low[k], b + k * 128, 1);
        }
        wgmma_commit();
        read(i + 1, next);
        wgmma_wait<0>(acc);
        if (lane == 0) mbarrier_arrive(ring.empty(i));
    };
    read(0, even);
    for (int i = 0; i < steps; i += 2) {
        step(i, even, odd);
        if (i + 1 < steps) step(i + 1, odd, even);
    }
    const int64_t row = row_of_block + threadIdx.x / 32 * 16 + lane / 4;
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
        name(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap x,                       \
             const __grid_constant__ CUtensorMap weight) {                                                \
        forward<T>(p, x, weight);                                                                         \
    }
FORWARD(sm90_linear_bf16, bf16)
FORWARD(sm90_linear_f16, f16)

extern "C" __global__ void __launch_bounds__(DX_THREADS, 1)
    sm90_linear_d_x(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap weight,
                      const __grid_constant__ CUtensorMap out) {
    if (p.k <= 16) gradient_of_x<1>(p, weight, out);
    else if (p.k <= 32) gradient_of_x<2>(p, weight, out);
    else if (p.k <= 64) gradient_of_x<4>(p, weight, out);
    else if (p.k <= 128) gradient_of_x<8>(p, weight, out);
    else gradient_of_x<SM90_LINEAR_DX_EXPERTS / 16>(p, weight, out);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sm90_linear_d_weight(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ CUtensorMap logits) {
    gradient_of_weight(p, x, logits);
}
#endif
