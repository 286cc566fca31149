// What Hopper kernels build their pipelines from: barriers in shared memory, asynchronous copies, the copy engine.
#pragma once
#include <cuda.h>
#include <cstdint>

namespace hopper {

__device__ __forceinline__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar), "r"(parity)
        : "memory");
}

// 16 bytes, or zeros where `valid` is false.
__device__ __forceinline__ void copy(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

// What the copy engine is to bring in this phase, beside the threads' own copies.
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk(uint32_t to, const CUtensorMap& map, uint32_t bar, int64_t x, int64_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(static_cast<int>(x)), "r"(static_cast<int>(y))
        : "memory");
}
__device__ __forceinline__ void bulk(uint32_t to, const CUtensorMap& map, uint32_t bar, int64_t x, int64_t y, int64_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(static_cast<int>(x)), "r"(static_cast<int>(y)), "r"(static_cast<int>(z))
        : "memory");
}

}  // namespace hopper
