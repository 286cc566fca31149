// Work over whole rows, a block each: a sum with its norm, and the largest of a row.

#include "common.cuh"

namespace {

constexpr int ROW_THREADS = 512;

__device__ float sum_of_block(float x) {
    __shared__ float sums[ROW_THREADS / 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL, x, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
#pragma unroll
    for (int i = 0; i < ROW_THREADS / 32; i++) x += sums[i];
    return x;
}

template <typename T>
__device__ void add_norm(const T *x, const T *y, const T *weight, T *out, int rows, int size, float eps) {
    extern __shared__ __align__(16) uint8_t shared[];
    float *row = reinterpret_cast<float *>(shared);
    const size_t start = (size_t)blockIdx.x * size;
    float squares = 0;
    for (int i = threadIdx.x * 8; i < size; i += ROW_THREADS * 8) {
        float a[8], b[8];
        unpack(*reinterpret_cast<const uint4 *>(x + start + i), a, T());
        unpack(*reinterpret_cast<const uint4 *>(y + start + i), b, T());
        T sums[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // Of what is stored, as a norm of its own.
            sums[j] = narrow(a[j] + b[j], T());
            const float sum = wide(sums[j]);
            row[i + j] = sum;
            squares = fmaf(sum, sum, squares);
        }
        *reinterpret_cast<uint4 *>(out + start + i) = *reinterpret_cast<const uint4 *>(sums);
    }
    const float factor = rsqrtf(sum_of_block(squares) / size + eps);
    T *normed = out + (size_t)rows * size + start;
    for (int i = threadIdx.x * 8; i < size; i += ROW_THREADS * 8) {
        float w[8];
        unpack(*reinterpret_cast<const uint4 *>(weight + i), w, T());
        T values[8];
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] = narrow(factor * row[i + j] * w[j], T());
        *reinterpret_cast<uint4 *>(normed + i) = *reinterpret_cast<const uint4 *>(values);
    }
}

// Larger, or as large and before; not-a-numbers are below all.
__device__ bool before(float a, int at, float b, int bt) { return a > b || (a == b && at < bt); }

__device__ void larger(float &most, int &where, float other, int there) {
    if (before(other, there, most, where)) most = other, where = there;
}

template <typename T> __device__ void argmax(const T *x, uint32_t *out, int size) {
    __shared__ float mosts[ROW_THREADS / 32];
    __shared__ int places[ROW_THREADS / 32];
    const T *row = x + (size_t)blockIdx.x * size;
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
    out[blockIdx.x] = where < size ? where : 0;
}

} // namespace

// out[0] = x + y, out[1] = its root mean square norm; x and y [rows, size], size a multiple of 8. Shared memory: a row in
// f32.
#define ROWS(NAME, T)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) add_rms_norm_##NAME(                                     \
        const T *x, const T *y, const T *weight, T *out, const int rows, const int size, const float eps) {            \
        add_norm(x, y, weight, out, rows, size, eps);                                                                  \
    }                                                                                                                  \
    /* The first of a row's largest entries. */                                                                        \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                          \
        argmax_##NAME(const T *x, uint32_t *out, const int size) {                                                     \
        argmax(x, out, size);                                                                                          \
    }

ROWS(bf16, bf16)
ROWS(f16, f16)
