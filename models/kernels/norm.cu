// Norms of rows, root mean square or layer norms, of x or of a sum x + y that is stored too: what a residual and the norm
// behind it are.
//
// Shared memory: a row in f32 for each group of threads.

#include "norm.cuh"

namespace {

template <typename T, int GROUP, int N> __device__ void norm(const NormParams &params) {
    extern __shared__ __align__(16) float shared[];
    const int size = params.size, thread = Row<GROUP>::thread();
    NormRow<GROUP, N> row{Row<GROUP>::kept(shared, size), size};
    const size_t start = (size_t)Row<GROUP>::index() * size;
    const T *x = static_cast<const T *>(params.x) + start;
    const T *y = params.y ? static_cast<const T *>(params.y) + start : nullptr;
    const T *weight = static_cast<const T *>(params.weight), *bias = static_cast<const T *>(params.bias);
    T *sums = static_cast<T *>(params.sums) + start, *out = static_cast<T *>(params.out) + start;
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
        row.keep(i, a);
    }
    const auto [mean, factor] = row.statistics(params.centered, params.eps);
    for (int i = thread * N; i < size; i += GROUP * N) {
        float values[N];
        row.get(i, values);
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = factor * (values[j] - mean);
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
