// Products of a tile of FP4 weights with rows: codes to bf16 in the registers that the matrix unit reads (`hopper_w4a16.cu`).
#pragma once
#include "fp4.cuh"
#include "w4.cuh"
#include "wgmma.cuh"

namespace w4 {
using namespace fp4;

// Operand in shared memory by rows of 64 k, swizzled by 128 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    return ((at & 0x3ffff) >> 4) | (16ull >> 4 << 16) | (1024ull >> 4 << 32) | (1ull << 62);
}

// Keep the compiler from moving registers while the matrix unit owns them.
template <int N>
__device__ __forceinline__ void pin(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}
// Weights of 64 rows and 64 k as the products read them: by 16 k.
using Fragment = uint32_t[4][4];
__device__ __forceinline__ void pin(Fragment& v) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Codes and scales of a fragment, of a thread's two rows.
struct Codes {
    uint32_t words[2][2], scales[2][4];

    __device__ __forceinline__ void load(uint32_t stage, uint32_t codes, uint32_t scales_at) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++) {
                asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(words[half][chunk]) : "r"(stage + (codes ^ chunk << 4) + half * 256) : "memory");
            }
            uint32_t(&v)[4] = scales[half];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(stage + scales_at + half * 128) : "memory");
        }
    }
    template <int FORMAT>
    __device__ __forceinline__ void convert(Fragment& to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                const uint32_t pair = pattern(words[i % 2][i / 2], j);
                to[i / 2 * 2 + j / 2][j % 2 * 2 + i % 2] = Format<FORMAT>::value(pair, scales[i % 2][i / 2 * 2 + j / 2]);
            }
        }
        pin(to);
    }
};

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
// In two halves of which the second has REST rows: with one instruction for 256 the assembler wants more registers than 512
// threads start with.
template <int N, int REST>
__device__ __forceinline__ void multiply_rows(float (&acc)[ROWS / 2], const Fragment& a, uint64_t b) {
    float (&low)[64] = reinterpret_cast<float (&)[64]>(acc[0]);
    float (&high)[64] = reinterpret_cast<float (&)[64]>(acc[64]);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < BK / 16; k++) {
        wgmma_left<N, 0>(low, a[k], b + k * 2, 1);
        if constexpr (REST > 0) wgmma_left<REST, 0>(high, a[k], b + 1024 + k * 2, 1);
    }
    commit();
}
// Of a tile with so many rows.
__device__ __forceinline__ void multiply(float (&acc)[ROWS / 2], const Fragment& a, uint64_t b, int rows) {
    pin(acc);
    if (rows > 192) multiply_rows<128, 128>(acc, a, b);
    else if (rows > 128) multiply_rows<128, 64>(acc, a, b);
    else if (rows > 64) multiply_rows<128, 0>(acc, a, b);
    else multiply_rows<64, 0>(acc, a, b);
}

// What a multiplying warpgroup keeps from tile to tile.
template <int FORMAT>
struct Worker {
    const Rings& rings;
    const int steps, group, first;  // first: weight row of this thread in the warpgroup's 64
    const bool mapped;
    const uint32_t codes, scales;   // places of that row in a step's codes
    RowRing::At at, before;         // of rows: the stage in use, and the one whose products may still be under way
    CodeRing::At code_at;

    __device__ __forceinline__ Worker(const Gemm& p, const Rings& rings)
        : rings(rings), steps(static_cast<int>(p.k / BK)), group(threadIdx.x / 128), first(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
          mapped(p.a_map), codes(code_place(group * 64 + first, 0) + threadIdx.x % 4 * 4), scales(SCALES + (group * 64 + first) * 16) {}

    // Of step 0 or 1 of a stage of codes.
    __device__ __forceinline__ void load(Codes& to, int odd) const { to.load(rings.codes.stage(code_at) + odd * CODE_STEP, codes, scales); }
    // By each lane, as each has read codes and scales of its own.
    __device__ __forceinline__ void release_codes() {
        barrier_arrive(rings.codes.empty(code_at));
        code_at.next();
    }
    __device__ __forceinline__ void release_rows(const RowRing::At& position) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(rings.rows.empty(position));
    }
    __device__ __forceinline__ void wait_rows() const {
        rings.rows.wait_full(at);
        // Rows behind a map came by ordinary writes; wgmma reads through another proxy.
        if (mapped) fence_proxy();
    }
    // Products of a step, and while the matrix unit works on them the weights of the next, step ODD of its stage.
    template <int ODD>
    __device__ __forceinline__ void multiply_and_convert(float (&acc)[ROWS / 2], Fragment& now, Fragment& next, int count, bool first, bool more) {
        multiply(acc, now, operand(rings.rows.stage(at)), count);
        const RowRing::At own = at;
        at.next();
        Codes codes;
        if (more) {
            if (ODD == 0) rings.codes.wait_full(code_at);
            load(codes, ODD);
            wait_rows();
        }
        wait<1>();
        pin(next);
        if (!first) release_rows(before);
        before = own;
        if (more) {
            codes.convert<FORMAT>(next);
            if (ODD == CODE_STEPS - 1) release_codes();
        }
    }

    // Sums of a tile, of which `count` rows count.
    __device__ __forceinline__ void products(float (&acc)[ROWS / 2], int count) {
        Fragment a[2] = {};
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
        {
            Codes codes;
            rings.codes.wait_full(code_at);
            load(codes, 0);
            codes.convert<FORMAT>(a[0]);
        }
        wait_rows();
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            multiply_and_convert<1>(acc, a[0], a[1], count, step == 0, step + 1 < steps);
            if (step + 1 == steps) {
                release_codes();
                break;
            }
            multiply_and_convert<0>(acc, a[1], a[0], count, false, step + 2 < steps);
        }
        wait<0>();
        pin(acc);
        pin(a[0]);
        pin(a[1]);
        release_rows(before);
    }
};

}  // namespace w4
