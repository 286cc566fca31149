// Products of few rows with a weight, y = x wᵀ + bias: each warp reads a row of the weight once, for all rows of x, which
// lie in shared memory. The order of a sum does not depend on the number of rows.

#include "common.cuh"

namespace {

constexpr int LINEAR_WARPS = 8;
// Loads of a lane that are on their way together.
constexpr int DEPTH = 8;

template <int ROWS, typename T>
__device__ void few_rows(const T *x, const T *w, const T *bias, T *y, int inputs, int outputs) {
    extern __shared__ __align__(16) uint8_t shared[];
    uint4 *rows = reinterpret_cast<uint4 *>(shared);
    const int chunks = inputs / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int output = blockIdx.x * LINEAR_WARPS + warp;
    const uint4 *from = reinterpret_cast<const uint4 *>(w + (size_t)min(output, outputs - 1) * inputs);
    uint4 bits[DEPTH];
    auto load = [&](int first) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int chunk = first + d * 32 + lane;
            bits[d] = chunk < chunks ? __ldcs(from + chunk) : uint4{};
        }
    };
    // The weight is under way while x comes.
    load(0);
    for (int i = threadIdx.x; i < ROWS * chunks; i += 32 * LINEAR_WARPS) rows[i] = reinterpret_cast<const uint4 *>(x)[i];
    __syncthreads();
    if (output >= outputs) return;
    float sums[ROWS] = {};
    for (int first = 0; first < chunks; first += 32 * DEPTH) {
        if (first > 0) load(first);
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int chunk = first + d * 32 + lane;
            if (chunk >= chunks) break;
            float weights[8];
            unpack(bits[d], weights, T());
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float values[8];
                unpack(rows[r * chunks + chunk], values, T());
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] = fmaf(values[i], weights[i], sums[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sums[r] += __shfl_xor_sync(ALL, sums[r], offset);
        if (lane == 0) y[(size_t)r * outputs + output] = narrow(sums[r] + (bias ? wide(bias[output]) : 0), T());
    }
}

} // namespace

// `x [rows, inputs]`, `w [outputs, inputs]`, inputs a multiple of 8; `bias` may be null. Shared memory: x.
#define FEW_ROWS_LINEAR(NAME, T, ROWS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * LINEAR_WARPS) few_rows_linear_##NAME##_##ROWS(                   \
        const T *x, const T *w, const T *bias, T *y, const int inputs, const int outputs) {                            \
        few_rows<ROWS>(x, w, bias, y, inputs, outputs);                                                                \
    }

FEW_ROWS_LINEAR(bf16, bf16, 1)
FEW_ROWS_LINEAR(bf16, bf16, 2)
FEW_ROWS_LINEAR(bf16, bf16, 3)
FEW_ROWS_LINEAR(bf16, bf16, 4)
FEW_ROWS_LINEAR(f16, f16, 1)
FEW_ROWS_LINEAR(f16, f16, 2)
FEW_ROWS_LINEAR(f16, f16, 3)
FEW_ROWS_LINEAR(f16, f16, 4)
