// Products of few rows with FP4 weights: up and down, bf16, on any architecture. Memory bound, so weights are read
// once, by the threads that multiply, straight into registers, and become bf16 there.
//
// Rows [N, k] or behind a map, codes and scales of [E, n, k] -> [N, n], k a multiple of 64. A block a tile of up to 8
// rows (four warps, four blocks an SM) or 16 rows (eight warps), by 32 weight rows a warp, with a gate 16 of
// gate and 16 of up.
//
// Weights are the left operand of m16n8k16, rows the right one (16 columns of the output by 8 rows). The order of k
// within a product is free as long as both operands have the same: a thread takes 64 neighboring codes of a weight
// row, and rows lie in shared memory so that the matching numbers are 16 bytes. A code word's pairs are its nibbles i
// and i + 4.
//
// E2M1 times E4M3 is exact in bf16; what is above the blocks is applied to the f32 sums. Notes: kernels/notes/w4a16.md.
#include "common/epilogue.cuh"
#include "quant/fp4_to_bf16.cuh"
#include "portable/gemm.cuh"

namespace {
using namespace fp4;

constexpr int STEP = DECODE_STEP;

// A thread's share of a step of one weight row: 64 codes and their scales.
template <int FORMAT>
struct StepCodes {
    uint4 codes[2];
    uint32_t scales;
};

template <int FORMAT>
struct WeightRows {
    const uint8_t* codes[4];   // of weight rows g and g + 8 of both tiles, from this thread's first code on
    const uint8_t* scales[4];
    int64_t columns;
    int first;                 // this thread's first k in a step

    __device__ __forceinline__ void load(StepCodes<FORMAT> (&to)[4], int64_t k0) const {
        const bool inside = k0 + first < columns;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            to[r].codes[0] = to[r].codes[1] = make_uint4(0, 0, 0, 0);
            to[r].scales = 0;
            if (!inside) continue;
            const uint4* from = reinterpret_cast<const uint4*>(codes[r] + k0 / 2);
            to[r].codes[0] = __ldcs(from), to[r].codes[1] = __ldcs(from + 1);
            to[r].scales = Format<FORMAT>::load(scales[r], k0 + first);
        }
    }
};

// Word i of a share.
__device__ __forceinline__ uint32_t word_of(const uint4 (&codes)[2], int i) {
    const uint4& v = codes[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

// Chunk of 8 k in a row of shared memory: threads of a quad read chunks 8 apart.
__device__ __forceinline__ int swizzled_chunk(int chunk) { return chunk ^ (chunk >> 3 & 3); }

template <int FORMAT, int NT>
__device__ __forceinline__ void mma_tile(float (&acc)[2][NT][4], const WeightRows<FORMAT>& rows, StepCodes<FORMAT> (&now)[4], const uint4* x, int pitch, int steps) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    StepCodes<FORMAT> next[4];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) rows.load(next, static_cast<int64_t>(step + 1) * STEP);
        uint32_t scales[4][4];
#pragma unroll
        for (int r = 0; r < 4; r++) Format<FORMAT>::expand(scales[r], now[r].scales);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 b[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) b[n] = x[(n * 8 + g) * pitch + step * (STEP / 8) + t * 8 + (i ^ t)];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint32_t low[4], high[4];
                decode<FORMAT>(low, word_of(now[2 * m].codes, i), scales[2 * m][i / 2]);
                decode<FORMAT>(high, word_of(now[2 * m + 1].codes, i), scales[2 * m + 1][i / 2]);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    mma<bf16>(acc[m][n], {low[0], high[0], low[1], high[1]}, b[n].x, b[n].y);
                    mma<bf16>(acc[m][n], {low[2], high[2], low[3], high[3]}, b[n].z, b[n].w);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) now[r] = next[r];
    }
}

// One element of the output of an up projection, with gate and up.
template <int ACT>
__device__ __forceinline__ void epilogue_up(const GemmParams& p, int64_t group, int64_t slot, int64_t column, float g, float u) {
    const bool gated = ACT != ACT_RELU2;
    const int64_t wide = gated ? 2 * p.n : p.n;
    if (p.scale) g *= p.scale[slot], u *= p.scale[slot];
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + group * wide + column;
        g += to_float(bias[0]);
        if (gated) u += to_float(bias[p.n]);
    }
    if (p.pre_out) {
        bf16* pre = static_cast<bf16*>(p.pre_out) + slot * wide + column;
        pre[0] = from_float<bf16>(g);
        if (gated) pre[p.n] = from_float<bf16>(u);
    }
    float v = activate<true>(ACT, static_cast<float>(p.alpha), static_cast<float>(p.limit), g, u).value;
    if (p.out_scale) v *= p.out_scale[slot];
    put(static_cast<bf16*>(p.out), slot * p.n + column, v, p.accumulate);
}

template <int FORMAT, int KIND, int WARPS, int NT>
__device__ __forceinline__ void tile(const GemmParams& p, const QuantWeightParams& w, const int4& t, int64_t block, uint4* x, int pitch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const bool gated = KIND == UP && p.activation != ACT_RELU2;
    // First output columns of the two tiles of 16: of gate and up, or next to each other.
    const int64_t first = (block * WARPS + warp) * (gated ? 16 : 32), second = gated ? first : first + 16;
    const int steps = static_cast<int>((p.k + STEP - 1) / STEP);
    WeightRows<FORMAT> rows;
    rows.columns = p.k, rows.first = lane % 4 * 64;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        // Past the last column: that one again, not stored.
        const int64_t column = (r < 2 ? first : second) + g + r % 2 * 8, inside = column < p.n ? column : p.n - 1;
        const int64_t row = t.x * w.rows + inside + (gated && r >= 2 ? p.n : 0);
        rows.codes[r] = w.codes + row * w.code_bytes + rows.first / 2;
        rows.scales[r] = static_cast<const uint8_t*>(w.scales) + row * w.blocks;
    }
    StepCodes<FORMAT> step_codes[4];
    rows.load(step_codes, 0);

    // Rows, the numbers of a chunk in the order of code pairs.
    const int chunks = steps * (STEP / 8), filled = static_cast<int>(p.k / 8);
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
                x[r * pitch + swizzled_chunk(first + j * 32)] = make_uint4(__byte_perm(v[j].x, v[j].z, 0x5410), __byte_perm(v[j].x, v[j].z, 0x7632),
                                                                  __byte_perm(v[j].y, v[j].w, 0x5410), __byte_perm(v[j].y, v[j].w, 0x7632));
            }
        }
    }
    __syncthreads();

    float acc[2][NT][4] = {};
    mma_tile<FORMAT, NT>(acc, rows, step_codes, x, pitch, steps);

    float factor[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int64_t part = w.parts == 2 ? ((m ? second : first) + (gated && m ? p.n : 0)) / (w.rows / 2) : 0;
        factor[m] = Format<FORMAT>::LEFT * (w.factors ? w.factors[t.x * w.parts + (part < w.parts ? part : 0)] : 1.0f);
    }
    auto each = [&](auto&& visit) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = n * 8 + lane % 4 * 2 + i % 2;
                if (r < t.z) visit(t.y + r, g + i / 2 * 8, acc[0][n][i] * factor[0], acc[1][n][i] * factor[1]);
            }
    };
    if constexpr (KIND == UP) {
        if (gated) {
            with_gate(static_cast<int>(p.activation), [&](auto kind) {
                each([&](int64_t slot, int j, float gate, float up) {
                    if (first + j < p.n) epilogue_up<kind.value>(p, t.x, slot, first + j, gate, up);
                });
            });
        } else {
            each([&](int64_t slot, int j, float one, float two) {
                if (first + j < p.n) epilogue_up<ACT_RELU2>(p, t.x, slot, first + j, one, 0.0f);
                if (second + j < p.n) epilogue_up<ACT_RELU2>(p, t.x, slot, second + j, two, 0.0f);
            });
        }
    } else {
        const bf16* bias = static_cast<const bf16*>(p.bias) + t.x * p.n;
        each([&](int64_t slot, int j, float one, float two) {
            const float scale = p.scale ? p.scale[slot] : 1.0f, on_bias = p.bias_scale ? p.bias_scale[slot] : 1.0f;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int64_t column = (m ? second : first) + j;
                if (column >= p.n) continue;
                float v = (m ? two : one) * scale;
                if (p.bias) v += on_bias * to_float(bias[column]);
                put(static_cast<bf16*>(p.out), slot * p.n + column, v, p.accumulate);
            }
        });
    }
}

template <int FORMAT, int KIND, int WARPS>
__device__ __forceinline__ void run(const GemmParams& p, const QuantWeightParams& w) {
    extern __shared__ __align__(16) uint4 x[];
    const int64_t at = blockIdx.x / p.n_tiles;
    if (at >= *p.tile_count) return;
    const int4 t = p.tiles[at];
    const int pitch = static_cast<int>((p.k + STEP - 1) / STEP * (STEP / 8)) + 4;
    if (WARPS == 4 || t.z <= 8) tile<FORMAT, KIND, WARPS, 1>(p, w, t, blockIdx.x % p.n_tiles, x, pitch);
    else tile<FORMAT, KIND, WARPS, 2>(p, w, t, blockIdx.x % p.n_tiles, x, pitch);
}

}  // namespace

// Tiles of up to 8 rows and small blocks, of which one begins while another ends; and of up to 16 rows.
#define DECODE(name, FORMAT, KIND, WARPS)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 16 / WARPS)                                              \
        name(const __grid_constant__ GemmParams p, const __grid_constant__ QuantWeightParams w) {                                 \
        run<FORMAT, KIND, WARPS>(p, w);                                                                               \
    }

DECODE(decode8_up_nvfp4, WEIGHT_NVFP4, UP, 4)
DECODE(decode8_down_nvfp4, WEIGHT_NVFP4, DOWN, 4)
DECODE(decode8_up_mxfp4, WEIGHT_MXFP4, UP, 4)
DECODE(decode8_down_mxfp4, WEIGHT_MXFP4, DOWN, 4)
DECODE(decode16_up_nvfp4, WEIGHT_NVFP4, UP, 8)
DECODE(decode16_down_nvfp4, WEIGHT_NVFP4, DOWN, 8)
DECODE(decode16_up_mxfp4, WEIGHT_MXFP4, UP, 8)
DECODE(decode16_down_mxfp4, WEIGHT_MXFP4, DOWN, 8)
