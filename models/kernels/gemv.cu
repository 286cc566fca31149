// Products of few rows with a weight, y = x wᵀ + bias: each warp reads a row of the weight once, for all rows of x, which
// lie in shared memory. The order of a sum does not depend on the number of rows.

#include "common.cuh"

namespace {

// Loads of a lane that are on their way together.
constexpr int DEPTH = 8;

template <int ROWS, typename T> __device__ void gemv(const GemvParams &params) {
    const T *x = static_cast<const T *>(params.x), *w = static_cast<const T *>(params.w);
    const T *bias = static_cast<const T *>(params.bias);
    T *y = static_cast<T *>(params.y);
    const int inputs = params.inputs, outputs = params.outputs;
    extern __shared__ __align__(16) uint8_t shared[];
    uint4 *rows = reinterpret_cast<uint4 *>(shared);
    const int chunks = inputs / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int output = blockIdx.x * GEMV_WARPS + warp;
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
    for (int i = threadIdx.x; i < ROWS * chunks; i += 32 * GEMV_WARPS) rows[i] = reinterpret_cast<const uint4 *>(x)[i];
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

// Shared memory: x. Grid: rows of the weight, GEMV_WARPS a block.
#define GEMV(T, ROWS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * GEMV_WARPS)                                                      \
        gemv_##T##_##ROWS(const __grid_constant__ GemvParams params) {                                                 \
        wait_for_previous_kernel();                                                                                    \
        gemv<ROWS, T>(params);                                                                                         \
    }

GEMV(bf16, 1)
GEMV(bf16, 2)
GEMV(bf16, 3)
GEMV(bf16, 4)
GEMV(f16, 1)
GEMV(f16, 2)
GEMV(f16, 3)
GEMV(f16, 4)
static_assert(GEMV_MOST_ROWS == 4, "a kernel for each number of rows");
