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

    // Entries i to i + N. Of eight, the first four stand in the row's first half and the others in its second: neighboring
    // threads then reach neighboring 16 bytes, which lie in different banks.
    __device__ void put(int i, const float (&a)[N]) {
        if constexpr (N == 1) {
            entries[i] = a[0];
        } else {
            static_assert(N == 8, "halves of four");
            float4 *to = reinterpret_cast<float4 *>(entries) + i / N;
            to[0] = make_float4(a[0], a[1], a[2], a[3]);
            to[size / N] = make_float4(a[4], a[5], a[6], a[7]);
        }
    }

    __device__ void get(int i, float (&a)[N]) const {
        if constexpr (N == 1) {
            a[0] = entries[i];
        } else {
            const float4 *from = reinterpret_cast<const float4 *>(entries) + i / N;
            const float4 first = from[0], second = from[size / N];
            a[0] = first.x, a[1] = first.y, a[2] = first.z, a[3] = first.w;
            a[4] = second.x, a[5] = second.y, a[6] = second.z, a[7] = second.w;
        }
    }

    // Keeps entries from i on, and adds them to the sums.
    __device__ void keep(int i, const float (&a)[N]) {
        put(i, a);
#pragma unroll
        for (int j = 0; j < N; j++) {
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
                float a[N];
                get(i, a);
#pragma unroll
                for (int j = 0; j < N; j++) squares = fmaf(a[j] - mean, a[j] - mean, squares);
            }
        }
        return make_float2(mean, rsqrtf(reduce<GROUP, Sum>(squares) / size + eps));
    }
};

} // namespace
