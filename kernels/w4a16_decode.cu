// Products of few rows with FP4 weights and with fp8 blocks: up and down, bf16, on any architecture. Memory bound, so
// weights are read once, by the threads that multiply, straight into registers, and become bf16 there.
//
// Rows [N, k] or behind a map, codes and scales of [E, n, k] -> [N, n], k a multiple of 64. A block a tile of up to 8
// rows (four warps, four blocks an SM) or 16 rows (eight warps), by 32 weight rows a warp, with a gate 16 of
// gate and 16 of up; or half as many, of which two warps have half of k each.
//
// Weights are the left operand of m16n8k16, rows the right one (16 columns of the output by 8 rows). The order of k
// within a product is free as long as both operands have the same: a thread takes 32 neighboring bytes of a weight
// row, 64 codes of FP4 or 32 of fp8, and rows lie in shared memory so that the matching numbers are 16 bytes. The pairs of
// a word of FP4 are its nibbles i and i + 4, of fp8 its bytes i and i + 2.
//
// E2M1 times E4M3 is exact in bf16; what is above the blocks is applied to the f32 sums. So is E4M3 alone: a step of fp8 is
// a block's 128 columns, whose sums are multiplied with its scale. Notes: kernels/notes/w4a16.md.
#include "common/decode_epilogue.cuh"
#include "quant/fp4_to_bf16.cuh"
#include "quant/fp8_to_bf16.cuh"
#include "portable/gemm.cuh"

namespace {
using namespace fp4;

// Codes of a byte.
template <int FORMAT>
constexpr int PER_BYTE = FORMAT == WEIGHT_FP8 ? 1 : 2;
// Chunks of 8 k that a thread takes in a step, and columns of a step.
template <int FORMAT>
constexpr int CHUNKS = DECODE_THREAD_STEP / 16 * PER_BYTE<FORMAT>;
template <int FORMAT>
constexpr int STEP = 4 * 8 * CHUNKS<FORMAT>;
static_assert(STEP<WEIGHT_NVFP4> == DECODE_STEP && STEP<WEIGHT_FP8> == 128, "fp8: the columns of a block");

// A thread's share of a step of one weight row: 32 bytes of codes, and their scales.
template <int FORMAT>
struct StepCodes {
    uint4 codes[2];
    uint32_t scales;
};

template <int FORMAT, int M>
struct WeightRows {
    const uint8_t* codes[2 * M];   // of weight rows g and g + 8 of each tile, from this thread's first code on
    const uint8_t* scales[2 * M];
    int64_t columns;
    int first;                 // this thread's first k in a step

    __device__ __forceinline__ void load(StepCodes<FORMAT> (&to)[2 * M], int64_t k0) const {
        const bool inside = k0 + first < columns;
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
            to[r].codes[0] = to[r].codes[1] = make_uint4(0, 0, 0, 0);
            to[r].scales = 0;
            // A block's scale is for the sums of the whole quad, whichever of it have codes.
            if (FORMAT == WEIGHT_FP8 && k0 < columns) to[r].scales = Format<FORMAT>::load(scales[r], k0);
            if (!inside) continue;
            const uint4* from = reinterpret_cast<const uint4*>(codes[r] + k0 / PER_BYTE<FORMAT>);
            to[r].codes[0] = __ldcs(from), to[r].codes[1] = __ldcs(from + 1);
            if (FORMAT != WEIGHT_FP8) to[r].scales = Format<FORMAT>::load(scales[r], k0 + first);
        }
    }
};

// Word i of a share.
__device__ __forceinline__ uint32_t word_of(const uint4 (&codes)[2], int i) {
    const uint4& v = codes[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

// Eight codes, those of a thread's i-th chunk.
template <int FORMAT>
__device__ __forceinline__ void decode_chunk(uint32_t (&to)[4], const uint4 (&codes)[2], int i, const uint32_t (&scales)[4]) {
    if constexpr (FORMAT == WEIGHT_FP8) fp8::decode(to, word_of(codes, 2 * i), word_of(codes, 2 * i + 1));
    else decode<FORMAT>(to, word_of(codes, i), scales[i / 2]);
}
// Eight numbers of a row, in the order of their codes' pairs.
template <int FORMAT>
__device__ __forceinline__ uint4 paired(const uint4& v) {
    if constexpr (FORMAT == WEIGHT_FP8)
        return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
}

// Chunk of 8 k in a row of shared memory: threads of a quad read chunks that lie as far apart as one takes.
template <int FORMAT>
__device__ __forceinline__ int swizzled_chunk(int chunk) { return chunk ^ (chunk / CHUNKS<FORMAT> & 3); }

// Warps that share a tile of weight rows, each with its part of k: a warp alone with one other on its scheduler waits
// for its own instructions.
template <int M>
constexpr int PARTS = M == 1 ? 2 : 1;

// Steps of a warp, and the first of the second half of all: each half of k has a sum of its own, whoever makes it, and the
// second is added to the first.
struct Steps {
    int from, to, second;

    template <int PARTS>
    static __device__ __forceinline__ Steps of(int steps, int part) {
        const int second = (steps + 1) / 2;
        return {part * second, PARTS == 2 && part == 0 ? second : steps, second};
    }
};

// Sums of the first half of k, which a warp alone sets aside: in shared memory by blocks of four warps, whose registers are
// all in use; in registers by those of eight, which have no shared memory left.
template <int THREADS>
struct SharedSums {
    float4 (*sums)[THREADS];
    __device__ __forceinline__ float4& operator[](int i) { return sums[i][threadIdx.x]; }
};
template <int N>
struct RegisterSums {
    float4 sums[N];
    __device__ __forceinline__ float4& operator[](int i) { return sums[i]; }
};

// Sums of M tiles of 16 weight rows. `codes` has the first AHEAD steps; as many are on their way while one is multiplied.
template <int FORMAT, int M, int NT, int AHEAD, class Sums>
__device__ __forceinline__ void mma_tile(float (&acc)[M][NT][4], const WeightRows<FORMAT, M>& rows, StepCodes<FORMAT> (&codes)[AHEAD][2 * M], const uint4* x, int pitch, const Steps& steps, Sums first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    StepCodes<FORMAT> last[2 * M];
    StepCodes<FORMAT>(&now)[2 * M] = codes[0];
#pragma unroll 1
    for (int step = steps.from; step < steps.to; step++) {
        if (PARTS<M> == 1 && step == steps.second) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float(&sum)[4] = acc[m][n];
                    first[m * NT + n] = make_float4(sum[0], sum[1], sum[2], sum[3]);
                    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
                }
        }
        if (step + AHEAD < steps.to) rows.load(last, static_cast<int64_t>(step + AHEAD) * STEP<FORMAT>);
        constexpr bool BY_BLOCK = FORMAT == WEIGHT_FP8;
        uint32_t scales[2 * M][4];
        float of_block[BY_BLOCK ? M : 1][BY_BLOCK ? NT : 1][4] = {};
        if constexpr (!BY_BLOCK) {
#pragma unroll
            for (int r = 0; r < 2 * M; r++) Format<FORMAT>::expand(scales[r], now[r].scales);
        }
#pragma unroll
        for (int i = 0; i < CHUNKS<FORMAT>; i++) {
            uint4 b[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) b[n] = x[(n * 8 + g) * pitch + step * (STEP<FORMAT> / 8) + t * CHUNKS<FORMAT> + (i ^ t)];
#pragma unroll
            for (int m = 0; m < M; m++) {
                uint32_t low[4], high[4];
                decode_chunk<FORMAT>(low, now[2 * m].codes, i, scales[2 * m]);
                decode_chunk<FORMAT>(high, now[2 * m + 1].codes, i, scales[2 * m + 1]);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float(&sums)[4] = *(BY_BLOCK ? &of_block[BY_BLOCK ? m : 0][BY_BLOCK ? n : 0] : &acc[m][n]);
                    mma<bf16>(sums, {low[0], high[0], low[1], high[1]}, b[n].x, b[n].y);
                    mma<bf16>(sums, {low[2], high[2], low[3], high[3]}, b[n].z, b[n].w);
                }
            }
        }
        if constexpr (BY_BLOCK) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[m][n][i] = fmaf(of_block[m][n][i], __uint_as_float(now[2 * m + i / 2].scales), acc[m][n][i]);
        }
#pragma unroll
        for (int r = 0; r < 2 * M; r++) {
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; i++) codes[i][r] = codes[i + 1][r];
            codes[AHEAD - 1][r] = last[r];
        }
    }
    if (PARTS<M> != 1) return;
    const bool halved = steps.to > steps.second;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float4 kept = halved ? first[m * NT + n] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float(&sum)[4] = acc[m][n];
            sum[0] = kept.x + sum[0], sum[1] = kept.y + sum[1], sum[2] = kept.z + sum[2], sum[3] = kept.w + sum[3];
        }
}

template <int FORMAT, int KIND, int WARPS, int M, int NT>
__device__ __forceinline__ void tile(const GemmParams& p, const QuantWeightParams& w, const int4& t, int64_t block, uint4* x, int pitch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const bool gated = KIND == UP && p.activation != ACT_RELU2;
    // A thread has every eighth weight row of the warp's 16 M: of as many columns of the output, or of half of them the
    // gate and then up.
    const int warp_tile = warp / PARTS<M>, part = warp % PARTS<M>;
    const int64_t column = (block * (WARPS / PARTS<M>) + warp_tile) * (gated ? 8 : 16) * M + g;
    const int all_steps = static_cast<int>((p.k + STEP<FORMAT> - 1) / STEP<FORMAT>);
    const Steps steps = Steps::of<PARTS<M>>(all_steps, part);
    WeightRows<FORMAT, M> rows;
    rows.columns = p.k, rows.first = lane % 4 * 8 * CHUNKS<FORMAT>;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const bool up = gated && r >= M;
        // Past the last column: that one again, not stored.
        const int64_t n = column + (up ? r - M : r) * 8, inside = (n < p.n ? n : p.n - 1) + (up ? p.n : 0);
        rows.codes[r] = w.codes + (t.x * w.rows + inside) * w.code_bytes + rows.first / PER_BYTE<FORMAT>;
        rows.scales[r] = Format<FORMAT>::scales(w, t.x, inside);
    }
    // A warp of one tile has registers for a step more.
    constexpr int AHEAD = M == 1 ? 2 : 1;
    StepCodes<FORMAT> codes[AHEAD][2 * M];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) rows.load(codes[i], static_cast<int64_t>(steps.from + i) * STEP<FORMAT>);

    // Rows, the numbers of a chunk in the order of code pairs.
    const int chunks = all_steps * (STEP<FORMAT> / 8), filled = static_cast<int>(p.k / 8);
    for (int r = warp; r < NT * 8; r += WARPS) {
        const int64_t row = r < t.z ? mapped_row(p.a_map, t.y + r, p.a_rows, p.fault, p.site) : -1;
        const uint4* from = reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.a) + row * p.k);
        for (int first = lane; first < chunks; first += 32 * 8) {
            // Eight loads on their way at a time.
            uint4 v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = make_uint4(0, 0, 0, 0);
                if (row >= 0 && first + j * 32 < filled) v[j] = from[first + j * 32];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (first + j * 32 >= chunks) break;
                x[r * pitch + swizzled_chunk<FORMAT>(first + j * 32)] = paired<FORMAT>(v[j]);
            }
        }
    }
    __syncthreads();

    float acc[M][NT][4] = {};
    if constexpr (WARPS == DECODE8_WARPS && PARTS<M> == 1) {
        __shared__ float4 first[M * NT][WARPS * 32];
        mma_tile(acc, rows, codes, x, pitch, steps, SharedSums<WARPS * 32>{first});
    } else {
        mma_tile(acc, rows, codes, x, pitch, steps, RegisterSums<M * NT>{});
    }
    if constexpr (PARTS<M> == 2) {
        static_assert(M == 1 && NT == 1, "a thread has one tile's sums");
        // The rows have been read by all.
        __syncthreads();
        float4* sums = reinterpret_cast<float4*>(x);
        if (part == 1) sums[warp_tile * 32 + lane] = make_float4(acc[0][0][0], acc[0][0][1], acc[0][0][2], acc[0][0][3]);
        __syncthreads();
        if (part == 1) return;
        const float4 second = sums[warp_tile * 32 + lane];
        acc[0][0][0] += second.x, acc[0][0][1] += second.y, acc[0][0][2] += second.z, acc[0][0][3] += second.w;
    }

    // What sums are multiplied with. Of a weight of two parts, gate and up have a factor each.
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t weight_part = w.parts == 2 && gated ? half : 0;
        factors[half] = Format<FORMAT>::LEFT * (w.factors ? w.factors[t.x * w.parts + weight_part] : 1.0f);
    }

    // Visits the rows with this thread's sums of one: those of the r-th of its weight rows.
    auto each = [&](auto&& visit) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = n * 8 + lane % 4 * 2 + i;
                if (row < t.z) visit(t.y + row, [&](int r) { return acc[r / 2][n][r % 2 * 2 + i] * factors[r / M]; });
            }
    };
    if constexpr (KIND == UP) {
        if (gated) {
            with_gate(static_cast<int>(p.activation), [&](auto kind) {
                each([&](int64_t slot, auto&& sum) {
#pragma unroll
                    for (int r = 0; r < M; r++) {
                        if (column + r * 8 < p.n) decode_epilogue_up<bf16, kind.value>(p, t.x, slot, column + r * 8, sum(r), sum(M + r));
                    }
                });
            });
        } else {
            each([&](int64_t slot, auto&& sum) {
#pragma unroll
                for (int r = 0; r < 2 * M; r++) {
                    if (column + r * 8 < p.n) decode_epilogue_up<bf16, ACT_RELU2>(p, t.x, slot, column + r * 8, sum(r), 0.0f);
                }
            });
        }
    } else {
        each([&](int64_t slot, auto&& sum) {
#pragma unroll
            for (int r = 0; r < 2 * M; r += 2) decode_epilogue_down<bf16>(p, t.x, slot, {column + r * 8, column + r * 8 + 8}, {sum(r), sum(r + 1)});
        });
    }
}

template <int FORMAT, int KIND, int WARPS, int M>
__device__ __forceinline__ void run(const GemmParams& p, const QuantWeightParams& w) {
    extern __shared__ __align__(16) uint4 x[];
    const int64_t at = blockIdx.x / p.n_tiles, block = blockIdx.x % p.n_tiles;
    // Both at once: the list has room for this tile even where it has none.
    const int4 t = p.tiles[at];
    if (at >= *p.tile_count) return;
    const int pitch = static_cast<int>((p.k + STEP<FORMAT> - 1) / STEP<FORMAT> * (STEP<FORMAT> / 8)) + 4;
    if constexpr (WARPS == DECODE8_WARPS) tile<FORMAT, KIND, WARPS, M, 1>(p, w, t, block, x, pitch);
    else if (t.z <= 8) tile<FORMAT, KIND, WARPS, M, 1>(p, w, t, block, x, pitch);
    else tile<FORMAT, KIND, WARPS, M, 2>(p, w, t, block, x, pitch);
}

}  // namespace

// Tiles of up to 8 rows and small blocks, of which one begins while another ends, of a quarter of the weight rows where there
// would be few blocks; and of up to 16 rows. Sums do not depend on which.
#define DECODE(name, FORMAT, KIND, WARPS, M)                                                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)                                           \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ QuantWeightParams w) {                  \
        wait_for_previous_kernel();                                                                                \
        run<FORMAT, KIND, WARPS, M>(p, w);                                                                         \
    }

DECODE(decode8_narrow_up_nvfp4, WEIGHT_NVFP4, UP, DECODE8_WARPS, 1)
DECODE(decode8_narrow_down_nvfp4, WEIGHT_NVFP4, DOWN, DECODE8_WARPS, 1)
DECODE(decode8_narrow_up_mxfp4, WEIGHT_MXFP4, UP, DECODE8_WARPS, 1)
DECODE(decode8_narrow_down_mxfp4, WEIGHT_MXFP4, DOWN, DECODE8_WARPS, 1)
DECODE(decode8_narrow_up_fp8, WEIGHT_FP8, UP, DECODE8_WARPS, 1)
DECODE(decode8_narrow_down_fp8, WEIGHT_FP8, DOWN, DECODE8_WARPS, 1)
DECODE(decode8_up_nvfp4, WEIGHT_NVFP4, UP, DECODE8_WARPS, 2)
DECODE(decode8_down_nvfp4, WEIGHT_NVFP4, DOWN, DECODE8_WARPS, 2)
DECODE(decode8_up_mxfp4, WEIGHT_MXFP4, UP, DECODE8_WARPS, 2)
DECODE(decode8_down_mxfp4, WEIGHT_MXFP4, DOWN, DECODE8_WARPS, 2)
DECODE(decode8_up_fp8, WEIGHT_FP8, UP, DECODE8_WARPS, 2)
DECODE(decode8_down_fp8, WEIGHT_FP8, DOWN, DECODE8_WARPS, 2)
DECODE(decode16_up_nvfp4, WEIGHT_NVFP4, UP, DECODE16_WARPS, 2)
DECODE(decode16_down_nvfp4, WEIGHT_NVFP4, DOWN, DECODE16_WARPS, 2)
DECODE(decode16_up_mxfp4, WEIGHT_MXFP4, UP, DECODE16_WARPS, 2)
DECODE(decode16_down_mxfp4, WEIGHT_MXFP4, DOWN, DECODE16_WARPS, 2)
DECODE(decode16_up_fp8, WEIGHT_FP8, UP, DECODE16_WARPS, 2)
DECODE(decode16_down_fp8, WEIGHT_FP8, DOWN, DECODE16_WARPS, 2)
