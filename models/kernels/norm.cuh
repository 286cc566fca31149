// Statistics of rows that are normed, the same for a forward and its backward.
#pragma once

#include "rows.cuh"

namespace {

// Of a row in shared memory, whose entries a group's threads have N at a time. A thread has the same entries in all loops over
// the row, so what it keeps needs no barrier.
template <int GROUP, int N> struct NormRow {
    float *entries;
    int size;
    float sum = 0, squares = 0;

    // Keeps entries from i on.
    __device__ void keep(int i, const float (&a)[N]) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            entries[i + j] = a[j];
            sum += a[j];
            squares = fmaf(a[j], a[j], squares);
        }
    }

    // The mean, 0 unless rows are centered, and the factor of what is left, once all entries are kept.
    __device__ float2 statistics(bool centered, float eps) {
        float mean = 0;
        if (centered) {
            mean = reduce<GROUP, Sum>(sum) / size;
            // Squares of differences: a difference of squares cancels.
            squares = 0;
            for (int i = Row<GROUP>::thread() * N; i < size; i += GROUP * N) {
#pragma unroll
                for (int j = 0; j < N; j++) squares = fmaf(entries[i + j] - mean, entries[i + j] - mean, squares);
            }
        }
        return make_float2(mean, rsqrtf(reduce<GROUP, Sum>(squares) / size + eps));
    }
};

} // namespace
