// Rows of f32, bf16 or f16, of which a group of threads has each: a warp a short one, a block of few threads a longer one, a
// block of many the longest.
#pragma once

#include "common.cuh"

namespace {

__device__ float wide(float x) { return x; }
__device__ float narrow(float x, float) { return x; }

// N neighbors as f32: eight by accesses of 16 bytes, or one.
template <typename T, int N> __device__ void load(const T *from, float (&to)[N]) {
    if constexpr (N == 1) {
        to[0] = wide(*from);
    } else {
        constexpr int ACCESSES = N * sizeof(T) / sizeof(uint4);
        alignas(16) T values[N];
#pragma unroll
        for (int i = 0; i < ACCESSES; i++) {
            reinterpret_cast<uint4 *>(values)[i] = reinterpret_cast<const uint4 *>(from)[i];
        }
#pragma unroll
        for (int j = 0; j < N; j++) to[j] = wide(values[j]);
    }
}

template <typename T, int N> __device__ void store(T *to, const float (&from)[N]) {
    if constexpr (N == 1) {
        *to = narrow(from[0], T());
    } else {
        constexpr int ACCESSES = N * sizeof(T) / sizeof(uint4);
        alignas(16) T values[N];
#pragma unroll
        for (int j = 0; j < N; j++) values[j] = narrow(from[j], T());
#pragma unroll
        for (int i = 0; i < ACCESSES; i++) {
            reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(values)[i];
        }
    }
}

struct Sum {
    static __device__ float of(float a, float b) { return a + b; }
};
struct Most {
    static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

// Sums, or the largest, over a group's threads, in all of them.
template <int GROUP, typename OF, int N> __device__ void reduce(float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) x[n] = OF::of(x[n], __shfl_xor_sync(ALL, x[n], offset));
    }
    if constexpr (GROUP > 32) {
        constexpr int OF_BLOCK = GROUP / 32;
        __shared__ float parts[N][OF_BLOCK];
        // Behind those who still read what was reduced before.
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int n = 0; n < N; n++) parts[n][threadIdx.x / 32] = x[n];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = parts[n][0];
#pragma unroll
            for (int i = 1; i < OF_BLOCK; i++) x[n] = OF::of(x[n], parts[n][i]);
        }
    }
}

template <int GROUP, typename OF> __device__ float reduce(float x) {
    float one[1] = {x};
    reduce<GROUP, OF>(one);
    return one[0];
}

// A row of a group of threads.
template <int GROUP> struct Row {
    // May lie behind the last row of groups that are warps.
    static __device__ int64_t index() { return (int64_t)blockIdx.x * (blockDim.x / GROUP) + threadIdx.x / GROUP; }
    static __device__ int thread() { return threadIdx.x % GROUP; }
    // The row's part of a block's shared memory, of so many entries a group.
    static __device__ float *kept(float *shared, int size) { return shared + (size_t)(threadIdx.x / GROUP) * size; }
};

} // namespace

// A kernel NAME_T_GROUP for each type and group of threads: `NAME<T, GROUP, N>` of a PARAMS with rows and size, where N
// neighbors are read together.
#define ROW_KERNEL(NAME, PARAMS, T, GROUP, BLOCK)                                                                      \
    extern "C" __global__ void __launch_bounds__(BLOCK) NAME##_##T##_##GROUP(const __grid_constant__ PARAMS params) {  \
        wait_for_previous_kernel();                                                                                    \
        if (Row<GROUP>::index() >= params.rows) return;                                                                \
        if (params.size % 8 == 0) {                                                                                    \
            NAME<T, GROUP, 8>(params);                                                                                 \
        } else {                                                                                                       \
            NAME<T, GROUP, 1>(params);                                                                                 \
        }                                                                                                              \
    }
typedef float f32;
#define ROW_KERNELS(NAME, PARAMS)                                                                                      \
    ROW_KERNEL(NAME, PARAMS, bf16, 32, THREADS)                                                                        \
    ROW_KERNEL(NAME, PARAMS, bf16, 256, SMALL_ROW_THREADS)                                                             \
    ROW_KERNEL(NAME, PARAMS, bf16, 512, ROW_THREADS)                                                                   \
    ROW_KERNEL(NAME, PARAMS, f16, 32, THREADS)                                                                         \
    ROW_KERNEL(NAME, PARAMS, f16, 256, SMALL_ROW_THREADS)                                                              \
    ROW_KERNEL(NAME, PARAMS, f16, 512, ROW_THREADS)                                                                    \
    ROW_KERNEL(NAME, PARAMS, f32, 32, THREADS)                                                                         \
    ROW_KERNEL(NAME, PARAMS, f32, 256, SMALL_ROW_THREADS)                                                              \
    ROW_KERNEL(NAME, PARAMS, f32, 512, ROW_THREADS)
static_assert(SMALL_ROW_THREADS == 256 && ROW_THREADS == 512, "the names of kernels that have a block a row");
