// What the kernels of this folder share: types, the matrix instruction of a warp, and copies to shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "params.h"

namespace {

constexpr unsigned ALL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;

typedef __nv_bfloat16 bf16;
typedef __half f16;

// Programmatic dependent launch, from 9.0 on: every kernel here is started while the one before it in the stream still
// runs. It calls this first, in every thread, and so waits until all that was written before can be read; then the next
// may be started.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ float wide(bf16 x) { return __bfloat162float(x); }
__device__ float wide(f16 x) { return __half2float(x); }
__device__ bf16 narrow(float x, bf16) { return __float2bfloat16_rn(x); }
__device__ f16 narrow(float x, f16) { return __float2half_rn(x); }
__device__ uint32_t pack(float a, float b, bf16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&pair);
}
__device__ uint32_t pack(float a, float b, f16) {
    __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ float2 wide(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 wide(__half2 pair) { return __half22float2(pair); }

// Two neighbors.
template <typename T> struct PairOf;
template <> struct PairOf<bf16> { typedef __nv_bfloat162 Type; };
template <> struct PairOf<f16> { typedef __half2 Type; };

// Eight neighbors as f32.
template <typename T> __device__ void unpack(uint4 from, float *to, T) {
    const typename PairOf<T>::Type *pairs = reinterpret_cast<const typename PairOf<T>::Type *>(&from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = wide(pairs[i]);
        to[2 * i] = pair.x;
        to[2 * i + 1] = pair.y;
    }
}

// d += a b: 16 x 8 sums of 16 products. Thread (g, t) = (lane / 4, lane % 4) has of d rows g and g + 8, columns 2t and 2t + 1.
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}
__device__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// 16 bytes to shared memory; zeros where `there` is false.
__device__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// Where 16 bytes `chunk` of a row lie in a tile of rows of D entries: chunks of eight neighboring rows are in other banks.
template <int D> __device__ uint32_t place(int row, int chunk) { return (row * (D / 8) + (chunk ^ (row & 7))) * 16; }

// Rows `first ..` of at most `count` to a tile, by all threads.
template <int ROWS, int D, typename T>
__device__ void load_rows(uint32_t tile, const T *from, int64_t stride, int first, int count) {
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool there = first + row < count;
        copy_async(tile + place<D>(row, chunk), from + (there ? (first + row) * stride : 0) + chunk * 8, there);
    }
}

} // namespace

