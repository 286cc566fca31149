// Norms of rows, root mean square or layer norms, of x or of a sum x + y that is stored too: what a residual and the norm
// behind it are.
//
// Shared memory: a row in f32 for each group of threads.

#include "rows.cuh"

namespace {

template <typename T, int GROUP, int N> __device__ void norm(const NormParams &params) {
    extern __shared__ __align__(16) float shared[];
    const int size = params.size, thread = Row<GROUP>::thread();
    float *row = Row<GROUP>::kept(shared, size);
    const size_t start = (size_t)Row<GROUP>::index() * size;
    const T *x = static_cast<const T *>(params.x) + start;
    const T *y = params.y ? static_cast<const T *>(params.y) + start : nullptr;
    const T *weight = static_cast<const T *>(params.weight), *bias = static_cast<const T *>(params.bias);
    T *sums = static_cast<T *>(params.sums) + start, *out = static_cast<T *>(params.out) + start;
    float sum = 0, squares = 0;
    // A thread has the same entries in all loops, so what it keeps needs no barrier.
    for (int i = thread * N; i < size; i += GROUP * N) {
        float a[N];
        load(x + i, a);
        if (y) {
            float b[N];
            load(y + i, b);
            // Of what is stored, as a norm of its own.
#pragma unroll
            for (int j = 0; j < N; j++) a[j] = wide(narrow(a[j] + b[j], T()));
            store(sums + i, a);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            row[i + j] = a[j];
            sum += a[j];
            squares = fmaf(a[j], a[j], squares);
        }
    }
    float mean = 0;
    if (params.centered) {
        mean = reduce<GROUP, Sum>(sum) / size;
        // Squares of differences: a difference of squares cancels.
        squares = 0;
        for (int i = thread * N; i < size; i += GROUP * N) {
#pragma unroll
            for (int j = 0; j < N; j++) squares = fmaf(row[i + j] - mean, row[i + j] - mean, squares);
        }
    }
    const float factor = rsqrtf(reduce<GROUP, Sum>(squares) / size + params.eps);
    for (int i = thread * N; i < size; i += GROUP * N) {
        float values[N];
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = factor * (row[i + j] - mean);
        if (weight) {
            float w[N];
            load(weight + i, w);
#pragma unroll
            for (int j = 0; j < N; j++) values[j] *= w[j] + params.weight_offset;
        }
        if (bias) {
            float b[N];
            load(bias + i, b);
#pragma unroll
            for (int j = 0; j < N; j++) values[j] += b[j];
        }
        store(out + i, values);
    }
}

} // namespace

ROW_KERNELS(norm, NormParams)
