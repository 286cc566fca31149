// Codes and scales of FP4 weights, brought and turned by a warpgroup of their own for those that multiply
// (`sm90_w4a16.cu`).
#pragma once
#include "quant/fp4_to_bf16.cuh"
#include "sm90/w4a16_pipeline.cuh"

namespace w4a16 {
using namespace fp4;

// A word's four pairs of codes, of which byte i has pair i / 2 + i % 2 * 2, as `pattern` wants them: nibbles of a byte
// 16 bits from each other, so 1 and 4 change places, and 3 and 6.
__device__ __forceinline__ uint32_t swap_nibbles(uint32_t bytes) {
    const uint32_t change = (bytes ^ bytes >> 12) & 0xf0f0u;
    return bytes ^ change ^ change << 12;
}

// Codes of 32 k, turned so that a multiplying thread's are one word: of each 8 k it has two, by its place in the quad.
__device__ __forceinline__ void transpose_codes(uint32_t (&to)[4], const uint4& v) {
    const uint32_t a = __byte_perm(v.x, v.z, 0x5140), b = __byte_perm(v.y, v.w, 0x5140);
    const uint32_t c = __byte_perm(v.x, v.z, 0x7362), d = __byte_perm(v.y, v.w, 0x7362);
    to[0] = __byte_perm(a, b, 0x5410), to[1] = __byte_perm(a, b, 0x7632);
    to[2] = __byte_perm(c, d, 0x5410), to[3] = __byte_perm(c, d, 0x7632);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = swap_nibbles(to[i]);
}

// The warpgroup that brings codes and scales, step after step of the block's tiles. A thread has half of a step's codes
// of two weight rows, and the scales of one; it asks for them AHEAD steps before it turns them, and alone reads what it
// asked for.
template <int FORMAT, int KIND>
struct WeightProducer {
    static constexpr int BYTES = BLOCK_K / Format<FORMAT>::BLOCK;  // of scales, for a row and a step
    const GemmParams& p;
    const QuantWeightParams& w;
    const Rings rings;
    const int thread, steps, count;
    int tile = 0, step = 0;  // of the next request
    uint32_t slot = 0;
    const char* from[2];
    const uint8_t* scales_from;

    __device__ __forceinline__ WeightProducer(const GemmParams& p, const QuantWeightParams& w, const Rings& rings, int steps, int count)
        : p(p), w(w), rings(rings), thread(threadIdx.x % 128), steps(steps), count(count) {}
    __device__ __forceinline__ int64_t row(const int4& t, int own) const {
        const int64_t row = weight_row<KIND>(p, t, own);
        return t.x * w.rows + (row < w.rows ? row : w.rows - 1);
    }
    __device__ __forceinline__ void locate_rows() {
        const int4 t = TileScheduler{p}.at<KIND>(tile);
#pragma unroll
        for (int j = 0; j < 2; j++) from[j] = reinterpret_cast<const char*>(w.codes) + row(t, thread / 2 + j * 64) * w.code_bytes + thread % 2 * 16;
        scales_from = static_cast<const uint8_t*>(w.scales) + row(t, thread) * w.blocks;
    }
    static __device__ __forceinline__ uint64_t advance(const void* from, uint32_t bytes) {
        uint64_t at;
        asm("mad.wide.u32 %0, %1, 1, %2;\n" : "=l"(at) : "r"(bytes), "l"(from));
        return at;
    }
    // Asks for the next step's, if there is one.
    __device__ __forceinline__ void prefetch() {
        if (tile < count) {
            if (step == 0) locate_rows();
            // A copy holds on to its address for some hundred cycles: each has registers of its own, by one product,
            // and all are made before the first.
            const uint32_t to = rings.stored + slot * RAW_STEP_BYTES + thread * 16;
            const uint64_t first = advance(from[0], step * 32), second = advance(from[1], step * 32);
            // Words of four bytes: of two bytes the lower half of a word alone, or the upper with the lower.
            const uint64_t at = advance(scales_from, step * BYTES);
            const uint32_t bytes = BYTES == 4 || at & 2 ? 4 : 2;
            const uint64_t word = BYTES == 4 ? at : at & ~3ull;
            asm volatile(
                "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
                "cp.async.cg.shared.global.L2::128B [%0 + 2048], [%2], 16;\n"
                "cp.async.ca.shared.global [%3], [%4], 4, %5;\n" ::"r"(to),
                "l"(first), "l"(second), "r"(rings.stored + slot * RAW_STEP_BYTES + BLOCK_M * 32 + thread * 4), "l"(word), "r"(bytes)
                : "memory");
            if (++step == steps) step = 0, tile++;
        }
        asm volatile("cp.async.commit_group;\n" ::: "memory");
        if (++slot == AHEAD) slot = 0;
    }
    __device__ __forceinline__ void run() {
        CodeRing::At at;
        // Whether the two bytes of a step are a word's upper ones changes with each step.
        for (int i = 0; i < AHEAD; i++) prefetch();
        for (int i = 0; i < count; i++) {
            uint32_t upper = 0;
            if (BYTES == 2) upper = row(TileScheduler{p}.at<KIND>(i), thread) * w.blocks & 2;
            for (int step = 0; step < steps; step++) {
                const int odd = step % CODE_STEPS;
                asm volatile("cp.async.wait_group %0;\n" ::"n"(AHEAD - 1) : "memory");
                const uint32_t stored = rings.stored + slot * RAW_STEP_BYTES, stage = rings.codes.stage(at) + odd * CODE_STEP_BYTES;
                auto write = [&](uint32_t to, const uint32_t (&v)[4]) {
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
                };
                uint4 codes[2];
                uint32_t scales, v[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                                 : "=r"(codes[j].x), "=r"(codes[j].y), "=r"(codes[j].z), "=r"(codes[j].w)
                                 : "r"(stored + (j * 128 + thread) * 16)
                                 : "memory");
                }
                asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(scales) : "r"(stored + BLOCK_M * 32 + thread * 4) : "memory");
                if (odd == 0) rings.codes.wait_empty(at);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    transpose_codes(v, codes[j]);
                    write(stage + code_place(thread / 2 + j * 64, thread % 2), v);
                }
                if (BYTES == 2) {
                    scales = scales >> upper * 8 & 0xffffu;
                    upper ^= 2;
                }
                Format<FORMAT>::expand(v, scales);
                write(stage + SCALES_OFFSET + thread * 16, v);
                if (odd || step + 1 == steps) {
                    mbarrier_arrive(rings.codes.full(at));
                    at.next();
                }
                prefetch();
            }
        }
        // Copies must not outlive the block's shared memory.
        asm volatile("cp.async.wait_all;\n" ::: "memory");
    }
};

}  // namespace w4a16
