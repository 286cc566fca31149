// Products of few rows with a weight, y = x wᵀ + bias: each warp reads rows of the weight once, for all rows of x, which
// lie in shared memory. The order of a sum does not depend on the number of rows.

#include "common.cuh"

namespace {

// Rows of the weight that a warp does at a time.
constexpr int OUTPUTS = 2;
constexpr int LINEAR_WARPS = 8;

template <int ROWS, typename T>
__device__ void few_rows(const T *x, const T *w, const T *bias, T *y, int inputs, int outputs) {
    extern __shared__ __align__(16) uint8_t shared[];
    uint4 *rows = reinterpret_cast<uint4 *>(shared);
    const int chunks = inputs / 8;
    for (int i = threadIdx.x; i < ROWS * chunks; i += 32 * LINEAR_WARPS) rows[i] = reinterpret_cast<const uint4 *>(x)[i];
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * LINEAR_WARPS + warp) * OUTPUTS;
    if (first >= outputs) return;
    const uint4 *from[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
        // A last row twice where there is no other.
        from[o] = reinterpret_cast<const uint4 *>(w + (size_t)min(first + o, outputs - 1) * inputs);
    }
    float sums[OUTPUTS][ROWS] = {};
#pragma unroll 4
    for (int chunk = lane; chunk < chunks; chunk += 32) {
        uint4 bits[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) bits[o] = __ldcs(from[o] + chunk);
        float weights[OUTPUTS][8];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) unpack(bits[o], weights[o], T());
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float values[8];
            unpack(rows[r * chunks + chunk], values, T());
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++) {
#pragma unroll
                for (int i = 0; i < 8; i++) sums[o][r] = fmaf(values[i], weights[o][i], sums[o][r]);
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) sums[o][r] += __shfl_xor_sync(ALL, sums[o][r], offset);
            if (lane == 0 && first + o < outputs) {
                const float added = bias ? wide(bias[first + o]) : 0;
                y[(size_t)r * outputs + first + o] = narrow(sums[o][r] + added, T());
            }
        }
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
