// Gradients of a small dense product for 16-bit models: the logits' gradients are f32 and are multiplied as tf32, which
// holds every bf16 and f16 number exactly; rounding the gradients to its 11 bits costs 2^-12 of each, less than the
// rounding of a 16-bit result. Slots of a sum lie at multiples of 16 bytes in either operand.
#pragma once
#include "portable/gemm.cuh"

namespace tf32 {
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32, STAGES = 3, THREADS = 256;
// Rows of the f32 operand, [m, k] or [k, m], and of the 16-bit one, [k, n], padded against bank conflicts.
constexpr int LD_K = BLOCK_K + 8, LD_M = BLOCK_M + 4, LD_N = BLOCK_N + 8, LD_C = BLOCK_N + 4;
constexpr int A_BYTES = BLOCK_M * LD_K * 4 > BLOCK_K * LD_M * 4 ? BLOCK_M * LD_K * 4 : BLOCK_K * LD_M * 4, B_BYTES = BLOCK_K * LD_N * 2;
constexpr int SMEM_BYTES = STAGES * (A_BYTES + B_BYTES);
static_assert(SMEM_BYTES >= BLOCK_M * LD_C * 4, "room for the sums");
static_assert(BLOCK_M == TF32_TILE && BLOCK_N == BLOCK_M && THREADS == TF32_THREADS && SMEM_BYTES == TF32_SMEM, "common/shapes.h has others");

// 16 bytes, or zeros.
__device__ __forceinline__ void cp_async_or_zero(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(smem_address(to)), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ uint32_t rounded(float v) {
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(v));
    return r;
}
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
    T v[2];
    memcpy(v, &word, 4);
    return {to_float(v[0]), to_float(v[1])};
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A stage: A is f32, [m, k] (LINEAR_DX) or [k, m] (LINEAR_DW); B is [k, n] in both.
template <class T, int KIND>
__device__ __forceinline__ void load_stage(const GemmParams& p, char* stage, const Tile& t, int k, int k_end) {
    const float* a = static_cast<const float*>(p.a);
    constexpr bool A_MN_MAJOR = OperandMajor<KIND>::a_mn_major;
    constexpr int A_WORDS = (A_MN_MAJOR ? BLOCK_M : BLOCK_K) / 4, A_STEP = THREADS / A_WORDS, A_LD = (A_MN_MAJOR ? LD_M : LD_K) * 4;
    {
        const int row = threadIdx.x / A_WORDS, c = threadIdx.x % A_WORDS * 4;
        const int64_t pitch = A_MN_MAJOR ? p.m : p.k;
        const float* from = A_MN_MAJOR ? a + (k + row) * pitch + t.slot + c : a + (t.slot + row) * pitch + k + c;
        const int rows = A_MN_MAJOR ? k_end - k : t.rows;
        const bool inside = A_MN_MAJOR ? t.slot + c < p.m : k + c < k_end;
        char* to = stage + row * A_LD + c * 4;
#pragma unroll
        for (int i = 0; i < (A_MN_MAJOR ? BLOCK_K : BLOCK_M) / A_STEP; i++) {
            const bool valid = inside && row + i * A_STEP < rows;
            cp_async_or_zero(to + i * A_STEP * A_LD, valid ? from + i * A_STEP * pitch : a, valid);
        }
    }
    constexpr int B_WORDS = BLOCK_N / 8, B_STEP = THREADS / B_WORDS;
    const T* b = static_cast<const T*>(p.b);
    const int row = threadIdx.x / B_WORDS, c = threadIdx.x % B_WORDS * 8;
    const int64_t n = t.n_tile * BLOCK_N + c;
    const T* from = b + (k + row) * p.n + n;
#pragma unroll
    for (int i = 0; i < BLOCK_K / B_STEP; i++) {
        const bool valid = n < p.n && k + row + i * B_STEP < k_end;
        cp_async_or_zero(stage + A_BYTES + ((row + i * B_STEP) * LD_N + c) * 2, valid ? from + i * B_STEP * p.n : b, valid);
    }
}

// Fragments of eight k: a thread's two are neighbors, 2 q and 2 q + 1, where the instruction numbers them q and q + 4;
// the order of a sum's terms is free as long as both operands have the same.
template <bool A_MN_MAJOR>
__device__ __forceinline__ void load_a(uint32_t (&f)[4], const float* a, int m, int k) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if constexpr (A_MN_MAJOR) {
        const float* at = a + (k + 2 * q) * LD_M + m + g;
        f[0] = rounded(at[0]), f[1] = rounded(at[8]), f[2] = rounded(at[LD_M]), f[3] = rounded(at[LD_M + 8]);
    } else {
        const float2 v = *reinterpret_cast<const float2*>(a + (m + g) * LD_K + k + 2 * q);
        const float2 w = *reinterpret_cast<const float2*>(a + (m + g + 8) * LD_K + k + 2 * q);
        f[0] = rounded(v.x), f[1] = rounded(w.x), f[2] = rounded(v.y), f[3] = rounded(w.y);
    }
}

// Rows of sums to memory, eight columns a thread: added to 16-bit rows, or a part of a sum over slots in f32.
template <class T, int KIND>
__device__ __forceinline__ void store_sums(const GemmParams& p, const float* tile, const Tile& t) {
    const int64_t n = t.n_tile * BLOCK_N + threadIdx.x % 16 * 8;
    if (n >= p.n) return;
    const int first = threadIdx.x / 16;
    const int64_t at = ((KIND == LINEAR_DW ? t.split * p.m : 0) + t.slot + first) * p.n + n;
    float* part = p.partial + at;
    T* sum_at = static_cast<T*>(p.out) + at;
#pragma unroll 2
    for (int r = first; r < t.rows; r += THREADS / 16, part += THREADS / 16 * p.n, sum_at += THREADS / 16 * p.n) {
        const float4* c = reinterpret_cast<const float4*>(tile + r * LD_C + threadIdx.x % 16 * 8);
        if constexpr (KIND == LINEAR_DW) {
            float4* out = reinterpret_cast<float4*>(part);
            out[0] = c[0], out[1] = c[1];
        } else {
            uint4* out = reinterpret_cast<uint4*>(sum_at);
            uint4 old = p.accumulate ? *out : make_uint4(0, 0, 0, 0);
            uint32_t* words = &old.x;
            const float* v = reinterpret_cast<const float*>(c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 before = unpack<T>(words[i]);
                T sum[2] = {from_float<T>(before.x + v[2 * i]), from_float<T>(before.y + v[2 * i + 1])};
                memcpy(&words[i], sum, 4);
            }
            *out = old;
        }
    }
}

template <class T, int KIND>
__device__ void run(const GemmParams& p) {
    constexpr bool A_MN_MAJOR = OperandMajor<KIND>::a_mn_major;
    extern __shared__ __align__(16) char shared[];
    Tile t;
    int64_t k_first, k_count;
    if (!schedule_tile<KIND, BLOCK_M>(p, t, k_first, k_count)) return;
    const int steps = static_cast<int>((k_count + BLOCK_K - 1) / BLOCK_K), first = static_cast<int>(k_first), end = static_cast<int>(k_first + k_count);
    auto stage = [&](int step) { return shared + step % STAGES * (A_BYTES + B_BYTES); };
    auto next = [&](int step) {
        if (step < steps) load_stage<T, KIND>(p, stage(step), t, first + step * BLOCK_K, end);
        asm volatile("cp.async.commit_group;\n");
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane / 8;
    const int wm = warp / 4 * 64, wn = warp % 4 * 32;
    float acc[4][4][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) next(s);
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2));
        __syncthreads();
        next(step + STAGES - 1);
        const float* a = reinterpret_cast<const float*>(stage(step));
        const T* b = reinterpret_cast<const T*>(stage(step) + A_BYTES);
#pragma unroll
        for (int kk = 0; kk < BLOCK_K; kk += 16) {
            uint32_t fb[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = wn + j * 16 + (quarter & 2) * 4, k = kk + (quarter & 1) * 8;
                ldmatrix<true>(fb[j], b + (k + lane % 8) * LD_N + n);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t fa[4];
                    load_a<A_MN_MAJOR>(fa, a, wm + i * 16, kk + half * 8);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float2 v = unpack<T>(fb[j / 2][j % 2 * 2 + half]);
                        mma(acc[i][j], fa, v.x, v.y);
                    }
                }
            }
        }
    }
    asm volatile("cp.async.wait_group 0;\n");
    __syncthreads();
    float* tile = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float* c = tile + (wm + i * 16 + lane / 4) * LD_C + wn + j * 8 + lane % 4 * 2;
            c[0] = acc[i][j][0], c[1] = acc[i][j][1];
            c[8 * LD_C] = acc[i][j][2], c[8 * LD_C + 1] = acc[i][j][3];
        }
    __syncthreads();
    store_sums<T, KIND>(p, tile, t);
}
}  // namespace tf32
