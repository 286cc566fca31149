// Products of a tile of FP4 weights with rows: codes to bf16 in the registers that the tensor core reads
// (`sm90_w4a16.cu`).
#pragma once
#include "quant/fp4_to_bf16.cuh"
#include "sm90/w4a16_pipeline.cuh"
#include "ptx/wgmma.cuh"

namespace w4a16 {
using namespace fp4;

// Operand in shared memory by rows of 64 k, swizzled by 128 bytes: the lower half of its description, and the whole of
// one `offset` bytes further on. An addition of 64 bits would be three instructions one after another.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t at) { return ((at & 0x3ffff) >> 4) | (16u >> 4 << 16); }
__device__ __forceinline__ uint64_t descriptor_at(uint32_t low, uint32_t offset) {
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};\n" : "=l"(d) : "r"(low + offset / 16), "n"(1024 >> 4 | 1 << 30));
    return d;
}

// Keep the compiler from moving registers while the tensor core owns them.
template <int N>
__device__ __forceinline__ void fence_registers(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}
// Weights of 64 rows and 64 k as the products read them: by 16 k.
using Fragment = uint32_t[4][4];
__device__ __forceinline__ void fence_registers(Fragment& v) {
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
        fence_registers(to);
    }
};

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
// In two halves of which the second has REST rows: with one instruction for 256 the assembler wants more registers than
// 512 threads start with.
template <int N, int REST>
__device__ __forceinline__ void multiply_rows(float (&acc)[BLOCK_N / 2], const Fragment& a, uint32_t b) {
    float (&low)[64] = reinterpret_cast<float (&)[64]>(acc[0]);
    float (&high)[64] = reinterpret_cast<float (&)[64]>(acc[64]);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; k++) {
        wgmma_rs<N, 0>(low, a[k], descriptor_at(b, k * 32), 1);
        if constexpr (REST > 0) wgmma_rs<REST, 0>(high, a[k], descriptor_at(b, 16384 + k * 32), 1);
    }
    wgmma_commit();
}
// Of a tile with so many rows.
__device__ __forceinline__ void multiply(float (&acc)[BLOCK_N / 2], const Fragment& a, uint32_t b, int rows) {
    fence_registers(acc);
    if (__builtin_expect(rows > 192, 1)) multiply_rows<128, 128>(acc, a, b);
    else if (rows > 128) multiply_rows<128, 64>(acc, a, b);
    else if (rows > 64) multiply_rows<128, 0>(acc, a, b);
    else multiply_rows<64, 0>(acc, a, b);
}

// State that a multiplying warpgroup keeps from tile to tile.
//
// The work of a warp between two batches of products, one thing after another, is what limits these kernels, and what
// it asks of barriers and shared memory behind a batch waits for that batch to be taken. So a step's codes are read,
// and its rows' barrier is looked at, before the batch of the step before.
template <int FORMAT>
struct MmaWarpgroup {
    const Rings& rings;
    const int steps;
    const uint32_t codes, scales;   // places of this thread's row in a step's codes
    RowRing::At at, ahead, before;  // of rows: of the step in hand and the next, and the one whose products may still be under way
    CodeRing::At code_at;
    Codes read;                     // of the next step, where `has_read`
    uint32_t has_read = 0, rows_full = 0;

    __device__ __forceinline__ MmaWarpgroup(const GemmParams& p, const Rings& rings, int group, int first)
        : rings(rings), steps(static_cast<int>(p.k / BLOCK_K)), codes(opaque(code_place(group * 64 + first, 0) + threadIdx.x % 4 * 4)),
          scales(opaque(SCALES_OFFSET + (group * 64 + first) * 16)) {
        ahead.next();
    }

    // Of step 0 or 1 of a stage of codes.
    __device__ __forceinline__ void load(int odd) { read.load(rings.codes.stage(code_at) + odd * CODE_STEP_BYTES, codes, scales); }
    // By each lane, as each has read codes and scales of its own.
    __device__ __forceinline__ void release_codes() {
        mbarrier_arrive(rings.codes.empty(code_at));
        code_at.next();
    }
    // Products of a step, and while the tensor core works on them the weights of the next, step ODD of its stage.
    template <int ODD>
    __device__ __forceinline__ void multiply_and_convert(float (&acc)[BLOCK_N / 2], Fragment& now, Fragment& next, int count, int step) {
        const bool more = step + 1 < steps, further = step + 2 < steps;
        multiply(acc, now, descriptor_low(rings.rows.stage(at)), count);
        if (more) {
            if (ODD == 0 && !has_read) {
                rings.codes.wait_full(code_at);
                load(0);
            }
            if (!rows_full) rings.rows.wait_full(ahead);
        }
        wgmma_wait<1>();
        fence_registers(next);
        mbarrier_arrive_elected(rings.rows.empty(before), step > 0);
        before = at;
        at = ahead;
        ahead.next();
        if (!more) return;
        // Of a tile's last steps these are the next tile's.
        rows_full = rings.rows.is_full(ahead);
        CodeRing::At then = code_at;
        if (ODD) then.next();
        const uint32_t codes_full = ODD ? rings.codes.is_full(then) : 1;
        read.convert<FORMAT>(next);
        if (ODD) release_codes();
        has_read = further && codes_full;
        if (has_read) load(!ODD);
    }

    // Sums of a tile, of which `count` rows count.
    __device__ __forceinline__ void mma_tile(float (&acc)[BLOCK_N / 2], int count) {
        Fragment a[2] = {};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) acc[i] = 0.0f;
        rings.codes.wait_full(code_at);
        load(0);
        read.convert<FORMAT>(a[0]);
        rings.rows.wait_full(at);
        rows_full = rings.rows.is_full(ahead);
        if (steps > 1) load(1);
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            multiply_and_convert<1>(acc, a[0], a[1], count, step);
            if (step + 1 == steps) {
                release_codes();
                break;
            }
            multiply_and_convert<0>(acc, a[1], a[0], count, step + 1);
        }
        wgmma_wait<0>();
        fence_registers(acc);
        fence_registers(a[0]);
        fence_registers(a[1]);
        mbarrier_arrive_elected(rings.rows.empty(before));
    }
};

}  // namespace w4a16
