// Softmax of rows, and its gradient.

#include "rows.cuh"

namespace {

template <typename T, int GROUP, int N> __device__ void softmax(const SoftmaxParams &params) {
    const int size = params.size, thread = Row<GROUP>::thread();
    const size_t start = (size_t)Row<GROUP>::index() * size;
    const T *x = static_cast<const T *>(params.x) + start;
    T *out = static_cast<T *>(params.out) + start;
    // Of the entries so far, the largest and the sum of exponentials of distances from it.
    float most = -INFINITY, sum = 0;
    for (int i = thread * N; i < size; i += GROUP * N) {
        float a[N];
        load(x + i, a);
        float larger = most;
#pragma unroll
        for (int j = 0; j < N; j++) larger = fmaxf(larger, a[j]);
        if (larger > most) {
            sum *= __expf(most - larger);
            most = larger;
        }
        // Where nothing but -inf has come, a distance from it is no number.
#pragma unroll
        for (int j = 0; j < N; j++) sum += a[j] == -INFINITY ? 0 : __expf(a[j] - most);
    }
    const float of_row = reduce<GROUP, Most>(most);
    sum = reduce<GROUP, Sum>(most == of_row ? sum : sum * __expf(most - of_row));
    const float factor = 1 / sum;
    for (int i = thread * N; i < size; i += GROUP * N) {
        float a[N];
        load(x + i, a);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] = factor * __expf(a[j] - of_row);
        store(out + i, a);
    }
}

template <typename T, int GROUP, int N> __device__ void softmax_backward(const SoftmaxBackwardParams &params) {
    const int size = params.size, thread = Row<GROUP>::thread();
    const size_t start = (size_t)Row<GROUP>::index() * size;
    const T *y = static_cast<const T *>(params.y) + start, *d_out = static_cast<const T *>(params.d_out) + start;
    T *d_x = static_cast<T *>(params.d_x) + start;
    float sum = 0;
    for (int i = thread * N; i < size; i += GROUP * N) {
        float p[N], d[N];
        load(y + i, p);
        load(d_out + i, d);
#pragma unroll
        for (int j = 0; j < N; j++) sum = fmaf(p[j], d[j], sum);
    }
    sum = reduce<GROUP, Sum>(sum);
    for (int i = thread * N; i < size; i += GROUP * N) {
        float p[N], d[N];
        load(y + i, p);
        load(d_out + i, d);
#pragma unroll
        for (int j = 0; j < N; j++) d[j] = p[j] * (d[j] - sum);
        store(d_x + i, d);
    }
}

} // namespace

ROW_KERNELS(softmax, SoftmaxParams)
ROW_KERNELS(softmax_backward, SoftmaxBackwardParams)
