// The first of each row's largest entries, a block a row.

#include "common.cuh"

namespace {

// Larger, or as large and before; not-a-numbers are below all.
__device__ bool before(float a, int at, float b, int bt) { return a > b || (a == b && at < bt); }

__device__ void larger(float &most, int &where, float other, int there) {
    if (before(other, there, most, where)) most = other, where = there;
}

template <typename T> __device__ void argmax(const ArgmaxParams &params) {
    const int size = params.size;
    __shared__ float mosts[ROW_THREADS / 32];
    __shared__ int places[ROW_THREADS / 32];
    const T *row = static_cast<const T *>(params.x) + (size_t)blockIdx.x * size;
    float most = -INFINITY;
    int where = INT32_MAX;
    // Rows of a size that is no multiple of 8 do not begin at whole loads: these go entry by entry.
    const int whole = size % 8 == 0 ? size : 0;
#pragma unroll 4
    for (int i = threadIdx.x * 8; i < whole; i += ROW_THREADS * 8) {
        float values[8];
        unpack(*reinterpret_cast<const uint4 *>(row + i), values, T());
#pragma unroll
        for (int j = 0; j < 8; j++) larger(most, where, values[j], i + j);
    }
    for (int i = whole + threadIdx.x; i < size; i += ROW_THREADS) larger(most, where, wide(row[i]), i);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        larger(most, where, __shfl_xor_sync(ALL, most, offset), __shfl_xor_sync(ALL, where, offset));
    }
    if (threadIdx.x % 32 == 0) mosts[threadIdx.x / 32] = most, places[threadIdx.x / 32] = where;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < ROW_THREADS / 32; i++) larger(most, where, mosts[i], places[i]);
    // A row of nothing that can be compared.
    params.out[blockIdx.x] = where < size ? where : 0;
}

} // namespace

#define ARGMAX(T)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                          \
        argmax_##T(const __grid_constant__ ArgmaxParams params) {                                                      \
        wait_for_previous_kernel();                                                                                    \
        argmax<T>(params);                                                                                             \
    }

ARGMAX(bf16)
ARGMAX(f16)
