// A sum with its root mean square norm, a block a row: what a residual and the norm behind it are.
//
// Shared memory: a row in f32.

#include "common.cuh"

namespace {

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

template <typename T> __device__ void add_rms_norm(const AddRmsNormParams &params) {
    const T *x = static_cast<const T *>(params.x), *y = static_cast<const T *>(params.y);
    const T *weight = static_cast<const T *>(params.weight);
    T *out = static_cast<T *>(params.out);
    const int size = params.size;
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
    const float factor = rsqrtf(sum_of_block(squares) / size + params.eps);
    T *normed = out + (size_t)params.rows * size + start;
    for (int i = threadIdx.x * 8; i < size; i += ROW_THREADS * 8) {
        float w[8];
        unpack(*reinterpret_cast<const uint4 *>(weight + i), w, T());
        T values[8];
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] = narrow(factor * row[i + j] * w[j], T());
        *reinterpret_cast<uint4 *>(normed + i) = *reinterpret_cast<const uint4 *>(values);
    }
}

} // namespace

#define ADD_RMS_NORM(T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                          \
        add_rms_norm_##T(const __grid_constant__ AddRmsNormParams params) {                                            \
        wait_for_previous_kernel();                                                                                    \
        add_rms_norm<T>(params);                                                                                       \
    }

ADD_RMS_NORM(bf16)
ADD_RMS_NORM(f16)
