// What attention's forward and backward share: who sees whom, and a warp's products of tiles in shared memory.
#pragma once

#include "common.cuh"

namespace {

// First position that a query at `position` sees.
__device__ int low(int position, const AttentionParams &params) {
    int low = params.window ? max(0, position + 1 - params.window) : 0;
    return params.chunk ? max(low, position / params.chunk * params.chunk) : low;
}

// Last position whose query sees a key at `position`.
__device__ int high(int position, const AttentionParams &params) {
    int64_t high = INT32_MAX;
    if (params.window) high = min(high, (int64_t)position + params.window - 1);
    if (params.chunk) high = min(high, ((int64_t)(position / params.chunk) + 1) * params.chunk - 1);
    return (int)high;
}

// Where chunk `chunk` of a row lies, behind what `place` says of its first one: chunks of other groups of eight lie 128
// bytes apart, and those of a group differ in bits 4 to 6 of their addresses, as tiles begin at multiples of 128.
__device__ __forceinline__ uint32_t chunk_at(uint32_t first, int chunk) {
    return (first ^ (chunk % 8 * 16)) + chunk / 8 * 128;
}

// sums += a bᵀ: rows of tile `a` from `row` on, and all COLUMNS rows of tile `b`, of D entries.
template <int TILES, int COLUMNS, int D, typename T>
__device__ __forceinline__ void multiply_rows(
    float (&sums)[TILES][COLUMNS / 8][4], uint32_t a, int row, uint32_t b, T) {
    const int lane = threadIdx.x % 32;
    a += place<D>(row + lane % 16, lane / 16);
    b += place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        uint32_t left[TILES][4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            load_matrices(left[m], chunk_at(a, kk * 2) + m * 16 * D * 2);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            uint32_t right[4];
            load_matrices(right, chunk_at(b, kk * 2) + n * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                multiply(sums[m][2 * n], left[m], right[0], right[1], T());
                multiply(sums[m][2 * n + 1], left[m], right[2], right[3], T());
            }
        }
    }
}

// A product's sums of 16 rows as the left side of the next one.
template <int COLUMNS, typename T>
__device__ __forceinline__ void pack_sums(uint32_t (&to)[COLUMNS / 16][4], const float (&sums)[COLUMNS / 8][4], T) {
#pragma unroll
    for (int kk = 0; kk < COLUMNS / 16; kk++) {
        to[kk][0] = pack(sums[2 * kk][0], sums[2 * kk][1], T());
        to[kk][1] = pack(sums[2 * kk][2], sums[2 * kk][3], T());
        to[kk][2] = pack(sums[2 * kk + 1][0], sums[2 * kk + 1][1], T());
        to[kk][3] = pack(sums[2 * kk + 1][2], sums[2 * kk + 1][3], T());
    }
}

// sums += a b: `a` of ROWS columns in registers, and a tile of ROWS rows of D entries.
template <int TILES, int ROWS, int D, typename T>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[TILES][D / 8][4], const uint32_t (&a)[TILES][ROWS / 16][4], uint32_t b, T) {
    const int lane = threadIdx.x % 32;
    b += place<D>(lane % 16, lane / 16);
#pragma unroll
    for (int kk = 0; kk < ROWS / 16; kk++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t right[4];
            load_matrices_transposed(right, chunk_at(b, n * 2) + kk * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                multiply(sums[m][2 * n], a[m][kk], right[0], right[1], T());
                multiply(sums[m][2 * n + 1], a[m][kk], right[2], right[3], T());
            }
        }
    }
}

// A half of a tile of 16 rows, of which a thread has row lane / 4: to a row in memory, times a factor.
template <int D, typename T>
__device__ __forceinline__ void store_row(T *to, const float (&sums)[D / 8][4], int half, float factor) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const uint32_t pair = pack(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor, T());
        *reinterpret_cast<uint32_t *>(to + n * 8 + threadIdx.x % 4 * 2) = pair;
    }
}

} // namespace
