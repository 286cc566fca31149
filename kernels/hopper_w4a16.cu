// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// A block stays on its multiprocessor and walks through tiles of 128 rows by 256 weight rows. One warpgroup reads codes,
// makes bf16 of them and writes these to the ring as the matrix unit wants them. Two multiply, 64 rows and all columns
// each, and while the matrix unit works bring the rows of three stages on, by copies of 16 bytes a thread. So a weight is
// de-quantised once a tile, and is bf16 in shared memory only.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/epilogue.cuh"
#include "common/fp4.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace {
using namespace hopper;
using namespace fp4;

constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, THREADS = 384;
constexpr int A_BYTES = BM * BK * 2, STAGE = A_BYTES + BN * BK * 2;
// Results leave through a buffer a warp, 128 columns at a time; rows are 16 bytes apart from a multiple of 128.
constexpr int WIDTH = 128, PITCH = WIDTH * 2 + 16, STAGING = STAGES * STAGE, BARRIERS = STAGING + 8 * 16 * PITCH;
constexpr int SHARED = BARRIERS + 2 * STAGES * 8;
static_assert(SHARED == 231488 && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

struct Ring {
    uint32_t base;
    __device__ __forceinline__ uint32_t stage(uint32_t at) const { return base + at % STAGES * STAGE; }
    __device__ __forceinline__ uint32_t full(uint32_t at) const { return base + BARRIERS + at % STAGES * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t at) const { return full(at) + STAGES * 8; }
    __device__ __forceinline__ void wait_full(uint32_t at) const { barrier_wait(full(at), at / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(uint32_t at) const { barrier_wait(empty(at), (at / STAGES & 1) ^ 1); }
};

// Tiles of this block: all columns of a row tile one after another.
struct Walk {
    const Gemm& p;
    __device__ __forceinline__ int count() const {
        const int all = *p.tile_count * static_cast<int>(p.n_tiles), own = blockIdx.x;
        return all > own ? (all - own - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    }
    // (group, first slot, rows, first column)
    template <int KIND>
    __device__ __forceinline__ int4 at(int i) const {
        const int id = blockIdx.x + i * gridDim.x, wide = static_cast<int>(p.n_tiles);
        int4 t = p.tiles[id / wide];
        t.w = id % wide * (KIND == UP ? BN / 2 : BN);
        return t;
    }
};

// Rows on their way: 256 threads, eight a row of 64 k, four rows each. Runs ahead of the products, into the next tile.
template <int KIND>
struct Rows {
    const Gemm& p;
    const Ring& ring;
    const Walk walk;
    const int thread, steps, count;
    int tile, step;
    uint32_t at, into;
    const char* from[4];

    __device__ __forceinline__ Rows(const Gemm& p, const Ring& ring, int thread)
        : p(p), ring(ring), walk{p}, thread(thread), steps(static_cast<int>(p.k / BK)), count(walk.count()), tile(-1), step(steps - 1), at(0) {
        const int r = thread / 8, c = thread % 8;
        into = r * 128 + ((c ^ (r & 7)) << 4);
    }
    // The next stage, if there is one. Waits until its readers have left it.
    __device__ __forceinline__ void bring() {
        if (++step == steps) {
            step = 0;
            if (++tile < count) {
                const int4 t = walk.at<KIND>(tile);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    // Row 0 in place of none: its products are not stored.
                    const int local = thread / 8 + j * 32;
                    const int64_t row = local < t.z ? mapped_row(p.a_map, t.y + local, p.a_rows, p.fault) : 0;
                    from[j] = static_cast<const char*>(p.a) + (row < 0 ? 0 : row) * p.k * 2 + thread % 8 * 16;
                }
            }
        }
        if (tile >= count) return;
        ring.wait_empty(at);
        const uint32_t to = ring.stage(at) + into;
#pragma unroll
        for (int j = 0; j < 4; j++) copy(to + j * 4096, from[j] + step * (BK * 2));
        barrier_arrive_after_copies(ring.full(at));
        at++;
    }
};

// Weight row behind row j of the tile: of an up projection, 32 of gate and 32 of up in turn.
template <int KIND>
__device__ __forceinline__ int64_t weight_row(const Gemm& p, int column, int j) {
    const int64_t n = KIND == UP ? column + j / 64 * 32 + j % 32 : column + j;
    const int64_t inside = n < p.n ? n : p.n - 1;
    return KIND == UP && j % 64 >= 32 ? p.n + inside : inside;
}

// Two threads a weight row, 32 codes each; four rows a thread.
template <int FORMAT, int KIND>
__device__ __forceinline__ void bring_weights(const Gemm& p, const QuantWeight& w, const Ring& ring) {
    const Walk walk{p};
    const int thread = threadIdx.x % 128, lane = thread % 32, half = lane % 2;
    const int first = thread / 32 * 16 + lane / 2;  // and every 64 behind it
    const int steps = static_cast<int>(p.k / BK), count = walk.count();
    uint4 codes[4];
    uint32_t scales[4];
    const uint8_t* from[4];
    const uint8_t* scale_from[4];
    auto point = [&](int i) {
        const int4 t = walk.at<KIND>(i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = t.x * w.rows + weight_row<KIND>(p, t.w, first + j * 64);
            from[j] = w.codes + row * w.code_bytes + half * 16;
            scale_from[j] = static_cast<const uint8_t*>(w.scales) + row * w.blocks + half * (32 / Format<FORMAT>::BLOCK);
        }
    };
    auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            codes[j] = *reinterpret_cast<const uint4*>(from[j] + step * (BK / 2));
            const uint8_t* s = scale_from[j] + step * (BK / Format<FORMAT>::BLOCK);
            scales[j] = FORMAT == WEIGHT_NVFP4 ? *reinterpret_cast<const unsigned short*>(s) : *s;
        }
    };
    if (count > 0) {
        point(0);
        load(0);
    }
    uint32_t at = 0;
    for (int i = 0; i < count; i++) {
        for (int step = 0; step < steps; step++, at++) {
            uint4 now[4];
            uint32_t now_scales[4];
#pragma unroll
            for (int j = 0; j < 4; j++) now[j] = codes[j], now_scales[j] = scales[j];
            // The next step's, which may be the next tile's first.
            if (step + 1 < steps) {
                load(step + 1);
            } else if (i + 1 < count) {
                point(i + 1);
                load(0);
            }
            ring.wait_empty(at);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int r = first + j * 64;
                uint32_t expanded[4];
                // Of 32 codes: two scales, or one.
                Format<FORMAT>::expand(expanded, now_scales[j]);
                const uint32_t row = ring.stage(at) + A_BYTES + r * 128;
                const uint32_t words[4] = {now[j].x, now[j].y, now[j].z, now[j].w};
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    uint32_t v[4];
                    decode<FORMAT>(v, words[k], expanded[k / 2]);
                    // Pairs (i, i + 4) to pairs of neighbours.
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(row + (((half * 4 + k) ^ (r & 7)) << 4)),
                                 "r"(__byte_perm(v[0], v[1], 0x5410)), "r"(__byte_perm(v[2], v[3], 0x5410)),
                                 "r"(__byte_perm(v[0], v[1], 0x7632)), "r"(__byte_perm(v[2], v[3], 0x7632))
                                 : "memory");
                }
            }
            fence_proxy();
            barrier_arrive(ring.full(at));
        }
    }
}

// Operand in shared memory by rows of 64 k, swizzled by 128 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    return ((at & 0x3ffff) >> 4) | (16ull >> 4 << 16) | (1024ull >> 4 << 32) | (1ull << 62);
}

__device__ __forceinline__ void pin(float (&v)[128]) {
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(v[i])::"memory");
}

template <int KIND>
__device__ __forceinline__ void products(float (&acc)[128], const Ring& ring, Rows<KIND>& rows, uint32_t at, int steps, int half) {
    const bool releases = threadIdx.x % 32 == 0;
    for (int step = 0; step < steps; step++) {
        ring.wait_full(at + step);
        // Rows came by ordinary writes; wgmma reads through another proxy.
        fence_proxy();
        const uint64_t a = operand(ring.stage(at + step)) + half * 512, b = operand(ring.stage(at + step) + A_BYTES);
        pin(acc);
        asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
        for (int k = 0; k < BK / 16; k++) wgmma<0, 0>(acc, a + k * 2, b + k * 2, step > 0 || k > 0, bf16{});
        asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
        if (step > 0) {
            if (releases) barrier_arrive(ring.empty(at + step - 1));
            rows.bring();
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
    pin(acc);
    if (releases) barrier_arrive(ring.empty(at + steps - 1));
    rows.bring();
}

// 16 rows of a warp and 128 columns on their way out. `rows`: the output's row of each, -1 for none.
struct Staging {
    uint32_t base;
    __device__ __forceinline__ void put(int row, int column, float a, float b) const {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(base + row * PITCH + column * 2), "r"(*reinterpret_cast<const uint32_t*>(&pair)) : "memory");
    }
    // Columns from `column` on of rows of `wide`; `row_of(r)` gives the row.
    template <class RowOf>
    __device__ __forceinline__ void send(void* out, int64_t wide, int64_t column, int64_t columns, bool add, RowOf&& row_of) const {
        __syncwarp();
        const int lane = threadIdx.x % 32, c = lane % 16 * 8;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int r = j * 2 + lane / 16;
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(base + r * PITCH + c * 2));
            const int64_t row = row_of(r);
            if (row < 0 || c >= columns) continue;
            uint4* to = reinterpret_cast<uint4*>(static_cast<bf16*>(out) + row * wide + column + c);
            if (add) {
                uint4 old = *to;
                bf16* sums = reinterpret_cast<bf16*>(&v);
                const bf16* before = reinterpret_cast<const bf16*>(&old);
#pragma unroll
                for (int k = 0; k < 8; k++) sums[k] = from_float<bf16>(to_float(before[k]) + to_float(sums[k]));
            }
            *to = v;
        }
        __syncwarp();
    }
};

template <int KIND>
__device__ __forceinline__ void finish(const Gemm& p, const int4& t, float (&acc)[128], const Staging& staging, int first, const float (&factor)[2]) {
    const int lane = threadIdx.x % 32;
    int local[2] = {first + lane / 4, first + lane / 4 + 8};
    // What a lane holds of its two rows; of rows that do not exist, anything.
    auto slot_of = [&](int h) { return static_cast<int64_t>(t.y) + (local[h] < t.z ? local[h] : 0); };
    auto value_of = [&](const float* values, int h) { return values ? values[slot_of(h)] : 1.0f; };
    // The output's row of lane l < 16, for the lanes that write it.
    const int own = lane < 16 && first + lane < t.z ? static_cast<int>(out_row(p, t.y + first + lane, 0)) : -1;
    auto to_out = [&](int r) { return static_cast<int64_t>(__shfl_sync(~0u, own, r)); };
    auto to_slot = [&](int r) { return first + r < t.z ? static_cast<int64_t>(t.y) + first + r : -1; };
    if constexpr (KIND == UP) {
        const int64_t columns = p.n - t.w < BN / 2 ? p.n - t.w : BN / 2;
        auto column = [](int i) { return i / 32 * 32 + i % 16 / 4 * 8; };  // of gate, before the lane's own
        const float in[2] = {value_of(p.scale, 0), value_of(p.scale, 1)}, after[2] = {value_of(p.out_scale, 0), value_of(p.out_scale, 1)};
#pragma unroll
        for (int i = 0; i < 128; i++) {
            const int up = i / 16 % 2, h = i / 2 % 2;
            acc[i] *= factor[up] * in[h];
            if (p.bias) {
                const int64_t n = t.w + column(i) + lane % 4 * 2 + i % 2;
                if (n < p.n) acc[i] += to_float(static_cast<const bf16*>(p.bias)[(t.x * 2 + up) * p.n + n]);
            }
        }
        if (p.pre_out) {
#pragma unroll
            for (int up = 0; up < 2; up++) {
#pragma unroll
                for (int i = 0; i < 128; i += 2) {
                    if (i / 16 % 2 == up) staging.put(lane / 4 + i / 2 % 2 * 8, column(i) + lane % 4 * 2, acc[i], acc[i + 1]);
                }
                staging.send(p.pre_out, 2 * p.n, up * p.n + t.w, columns, false, to_slot);
            }
        }
        with_gate(static_cast<int>(p.activation), [&](auto kind) {
#pragma unroll
            for (int i = 0; i < 128; i++) {
                if (i / 16 % 2) continue;
                acc[i] = activate<true>(kind.value, static_cast<float>(p.alpha), static_cast<float>(p.limit), acc[i], acc[i + 16]).value * after[i / 2 % 2];
            }
        });
#pragma unroll
        for (int i = 0; i < 128; i += 2) {
            if (i / 16 % 2 == 0) staging.put(lane / 4 + i / 2 % 2 * 8, column(i) + lane % 4 * 2, acc[i], acc[i + 1]);
        }
        staging.send(p.out, p.n, t.w, columns, p.accumulate, to_out);
    } else {
        const float scale[2] = {factor[0] * value_of(p.scale, 0), factor[0] * value_of(p.scale, 1)};
        const float on_bias[2] = {value_of(p.bias_scale, 0), value_of(p.bias_scale, 1)};
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const int64_t at = t.w + part * WIDTH, columns = p.n - at < WIDTH ? p.n - at : WIDTH;
#pragma unroll
            for (int i = 0; i < 64; i += 2) {
                const int h = i / 2 % 2, c = i / 4 * 8 + lane % 4 * 2;
                float a = acc[part * 64 + i] * scale[h], b = acc[part * 64 + i + 1] * scale[h];
                if (p.bias && at + c < p.n) {
                    const bf16* bias = static_cast<const bf16*>(p.bias) + t.x * p.n + at + c;
                    a += on_bias[h] * to_float(bias[0]), b += on_bias[h] * to_float(bias[1]);
                }
                staging.put(lane / 4 + h * 8, c, a, b);
            }
            staging.send(p.out, p.n, at, columns, p.accumulate, to_out);
        }
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const QuantWeight& w) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Ring ring{address(shared)};
    if (threadIdx.x < STAGES) {
        // Each thread, each warp that multiplies.
        barrier_init(ring.full(threadIdx.x), THREADS);
        barrier_init(ring.empty(threadIdx.x), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;\n");
        bring_weights<FORMAT, KIND>(p, w, ring);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;\n");
    const Walk walk{p};
    const int steps = static_cast<int>(p.k / BK), count = walk.count(), half = group - 1, warp = threadIdx.x / 32 - 4;
    const Staging staging{ring.base + STAGING + warp * 16 * PITCH};
    Rows<KIND> rows(p, ring, threadIdx.x - 128);
    for (int i = 0; i < STAGES - 1; i++) rows.bring();
    float acc[128];
    uint32_t at = 0;
    for (int i = 0; i < count; i++, at += steps) {
        const int4 t = walk.at<KIND>(i);
        products<KIND>(acc, ring, rows, at, steps, half);
        const float* factors = w.factors ? w.factors + t.x * w.parts : nullptr;
        const float one = Format<FORMAT>::LEFT;
        const float factor[2] = {factors ? one * factors[0] : one, factors ? one * factors[w.parts - 1] : one};
        finish<KIND>(p, t, acc, staging, half * 64 + warp % 4 * 16, factor);
    }
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

}  // namespace

#define PRODUCT(name, FORMAT, KIND)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                         \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w) {                \
        run<FORMAT, KIND>(p, w);                                                                     \
    }

PRODUCT(hopper_up_nvfp4, WEIGHT_NVFP4, UP)
PRODUCT(hopper_down_nvfp4, WEIGHT_NVFP4, DOWN)
PRODUCT(hopper_up_mxfp4, WEIGHT_MXFP4, UP)
PRODUCT(hopper_down_mxfp4, WEIGHT_MXFP4, DOWN)
#endif
