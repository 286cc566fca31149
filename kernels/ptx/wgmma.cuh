// Matrix instructions of a warpgroup: 64 x N x 16 for N of 256, 192, 128 and 64. Accumulators 4 j .. 4 j + 3 of thread
// t are, in columns 8 j + 2 (t % 4) and the one after, row t / 4 and then row t / 4 + 8 (of the warp's 16). TA and TB:
// 1 for an operand stored [k, m or n]. A tag chooses the type. `wgmma_128` of more leaves the rest of `d` alone.
#pragma once
#include "common/common.cuh"

// An instruction names its registers one by one: 32 at a time, as text and as operands.
#define REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
                    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
                    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT_32(i) OUT_8(i), OUT_8(i + 8), OUT_8(i + 16), OUT_8(i + 24)
#define OUT_64(i) OUT_32(i), OUT_32(i + 32)
#define OUT_96(i) OUT_64(i), OUT_32(i + 64)
#define OUT_128(i) OUT_64(i), OUT_64(i + 64)

// Behind the accumulators come a, b, whether to add to them, and the two ways of storing.
#define WGMMA(N, TYPE, REGISTERS, OUT, A, B, ADD, ROWS, COLUMNS)                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " \
                 A ", " B ", p, 1, 1, " ROWS ", " COLUMNS ";\n}\n"                                  \
                 : OUT(0)                                                                           \
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB))
#define WGMMA_256(TYPE)                                                                                              \
    WGMMA("256", TYPE, REGISTERS_0 ", " REGISTERS_1 ", " REGISTERS_2 ", " REGISTERS_3, OUT_128, "%128", "%129", "%130", "%131", "%132")
#define WGMMA_192(TYPE) \
    WGMMA("192", TYPE, REGISTERS_0 ", " REGISTERS_1 ", " REGISTERS_2, OUT_96, "%96", "%97", "%98", "%99", "%100")
#define WGMMA_128(TYPE) WGMMA("128", TYPE, REGISTERS_0 ", " REGISTERS_1, OUT_64, "%64", "%65", "%66", "%67", "%68")

template <int TA, int TB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add, bf16) {
    WGMMA_256("bf16");
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add, f16) {
    WGMMA_256("f16");
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_192(float (&d)[96], uint64_t a, uint64_t b, int add, bf16) {
    WGMMA_192("bf16");
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_192(float (&d)[96], uint64_t a, uint64_t b, int add, f16) {
    WGMMA_192("f16");
}
template <int TA, int TB, int SIZE>
__device__ __forceinline__ void wgmma_128(float (&d)[SIZE], uint64_t a, uint64_t b, int add, bf16) {
    static_assert(SIZE >= 64);
    WGMMA_128("bf16");
}
template <int TA, int TB, int SIZE>
__device__ __forceinline__ void wgmma_128(float (&d)[SIZE], uint64_t a, uint64_t b, int add, f16) {
    static_assert(SIZE >= 64);
    WGMMA_128("f16");
}

template <int TA, int TB>
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, int add, bf16) {
    WGMMA("64", "bf16", REGISTERS_0, OUT_32, "%32", "%33", "%34", "%35", "%36");
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b, int add, f16) {
    WGMMA("64", "f16", REGISTERS_0, OUT_32, "%32", "%33", "%34", "%35", "%36");
}
// A from registers: of rows t / 4 and t / 4 + 8 the k of 2 (t % 4) and the one after, then the same 8 further on. TB as
// above; sums in the first N / 2 of `d`.
#define WGMMA_RS(N, REGISTERS, OUT, A0, A1, A2, A3, B, ADD, COLUMNS)                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" REGISTERS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " \
                 B ", p, 1, 1, " COLUMNS ";\n}\n"                                                                             \
                 : OUT(0)                                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB))
template <int N, int TB, int SIZE>
__device__ __forceinline__ void wgmma_rs(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b, int add) {
    static_assert(SIZE >= N / 2 && (N == 256 || N == 192 || N == 128 || N == 64));
    if constexpr (N == 256) {
        WGMMA_RS("256", REGISTERS_0 ", " REGISTERS_1 ", " REGISTERS_2 ", " REGISTERS_3, OUT_128, "%128", "%129", "%130", "%131", "%132", "%133", "%134");
    } else if constexpr (N == 192) {
        WGMMA_RS("192", REGISTERS_0 ", " REGISTERS_1 ", " REGISTERS_2, OUT_96, "%96", "%97", "%98", "%99", "%100", "%101", "%102");
    } else if constexpr (N == 128) {
        WGMMA_RS("128", REGISTERS_0 ", " REGISTERS_1, OUT_64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
    } else {
        WGMMA_RS("64", REGISTERS_0, OUT_32, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
    }
}
__device__ __forceinline__ void wgmma_128(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) { wgmma_rs<128, 1>(d, a, b, add); }

#undef WGMMA_RS
#undef WGMMA_128
#undef WGMMA_192
#undef WGMMA_256
#undef WGMMA
#undef OUT_128
#undef OUT_96
#undef OUT_64
#undef OUT_32
#undef OUT_8
#undef REGISTERS_3
#undef REGISTERS_2
#undef REGISTERS_1
#undef REGISTERS_0
