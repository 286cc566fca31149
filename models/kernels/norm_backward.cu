// Gradients of norms: of rows, and of weights and biases, which are sums over rows.
//
// Shared memory of the rows' kernel: a row in f32 for each group of threads.

#include "norm.cuh"

namespace {

// d_x, and the rows' statistics, which are made again from x.
template <typename T, int GROUP, int N> __device__ void norm_backward(const NormBackwardParams &params) {
    extern __shared__ __align__(16) float shared[];
    const int size = params.size, thread = Row<GROUP>::thread();
    NormRow<GROUP, N> row{Row<GROUP>::kept(shared, size), size};
    const int64_t index = Row<GROUP>::index();
    const size_t start = (size_t)index * size;
    const T *x = static_cast<const T *>(params.x) + start, *d_out = static_cast<const T *>(params.d_out) + start;
    const T *weight = static_cast<const T *>(params.weight);
    for (int i = thread * N; i < size; i += GROUP * N) {
        float a[N];
        load(x + i, a);
        row.keep(i, a);
    }
    const auto [mean, factor] = row.statistics(params.centered, params.eps);
    if (params.stats && thread == 0) params.stats[index] = make_float2(mean, factor);
    if (!params.d_x) return;
    // The gradient of an entry before its weight.
    auto scaled = [&](int i, float(&d)[N]) {
        load(d_out + i, d);
        if (!weight) return;
        float w[N];
        load(weight + i, w);
#pragma unroll
        for (int j = 0; j < N; j++) d[j] *= w[j] + params.weight_offset;
    };
    // Of these gradients, the sum and the product with the row that is normed.
    float sums[2] = {0, 0};
    for (int i = thread * N; i < size; i += GROUP * N) {
        float d[N], unit[N];
        scaled(i, d);
        row.get(i, unit);
#pragma unroll
        for (int j = 0; j < N; j++) {
            unit[j] = factor * (unit[j] - mean);
            sums[0] += d[j];
            sums[1] = fmaf(d[j], unit[j], sums[1]);
        }
        row.put(i, unit);
    }
    reduce<GROUP, Sum>(sums);
    const float all = params.centered ? sums[0] / size : 0, along = sums[1] / size;
    T *d_x = static_cast<T *>(params.d_x) + start;
    for (int i = thread * N; i < size; i += GROUP * N) {
        float d[N], unit[N];
        scaled(i, d);
        row.get(i, unit);
#pragma unroll
        for (int j = 0; j < N; j++) d[j] = factor * (d[j] - all - along * unit[j]);
        store(d_x + i, d);
    }
}

constexpr int COLUMN_WARPS = NORM_COLUMN_THREADS / 32;

// Sums over a block's rows of a column each lane, by warps that have every COLUMN_WARPS-th row.
template <typename T> __device__ void norm_weight_sums(const NormBackwardParams &params) {
    __shared__ float parts[2][COLUMN_WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = params.size;
    const int column = blockIdx.x * 32 + lane;
    const int64_t first = (int64_t)blockIdx.y * params.rows_of_block;
    const int64_t end = min(first + params.rows_of_block, (int64_t)params.rows);
    const T *x = static_cast<const T *>(params.x), *d_out = static_cast<const T *>(params.d_out);
    float of_weight = 0, of_bias = 0;
    if (column < size) {
#pragma unroll 4
        for (int64_t row = first + warp; row < end; row += COLUMN_WARPS) {
            const float2 stats = params.stats[row];
            const float d = wide(d_out[row * size + column]);
            of_weight = fmaf(d, stats.y * (wide(x[row * size + column]) - stats.x), of_weight);
            of_bias += d;
        }
    }
    parts[0][warp][lane] = of_weight;
    parts[1][warp][lane] = of_bias;
    __syncthreads();
    float *to = warp == 0 ? params.d_weight : params.d_bias;
    if (warp > 1 || column >= size || !to) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COLUMN_WARPS; i++) sum += parts[warp][i][lane];
    to[(size_t)blockIdx.y * size + column] = sum;
}

} // namespace

ROW_KERNELS(norm_backward, NormBackwardParams)

#define WEIGHT_SUMS(T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(NORM_COLUMN_THREADS)                                                  \
        norm_weight_sums_##T(const __grid_constant__ NormBackwardParams params) {                                      \
        wait_for_previous_kernel();                                                                                    \
        norm_weight_sums<T>(params);                                                                                   \
    }

WEIGHT_SUMS(bf16)
WEIGHT_SUMS(f16)
WEIGHT_SUMS(f32)
