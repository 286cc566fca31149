// Building blocks of the Hopper kernels' pipelines: barriers in shared memory, asynchronous copies, TMA.
#pragma once
#include <cuda.h>
#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_after_cp_async(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(bar), "r"(parity)
        : "memory");
}

// Whether a wait would be over.
__device__ __forceinline__ uint32_t mbarrier_test_wait(uint32_t bar, uint32_t parity) {
    uint32_t over;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(over)
        : "r"(bar), "r"(parity)
        : "memory");
    return over;
}
// Whether this lane is the one that gives a whole warp's orders. Where a lane is told by its number, the compiler makes
// each order to TMA a loop over lanes.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected)::"memory");
    return elected != 0;
}
// By one lane of a whole warp, where `wanted`.
__device__ __forceinline__ void mbarrier_arrive_elected(uint32_t bar, bool wanted = true) {
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nelect.sync _|p, 0xffffffff;\nand.pred p, p, q;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(bar),
        "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
// 16 bytes, or zeros where `valid` is false.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

// Bytes that TMA is to bring in this phase, beside the threads' own copies, whose arrivals come later.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& map, uint32_t bar, int64_t x, int64_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(static_cast<int>(x)), "r"(static_cast<int>(y))
        : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& map, uint32_t bar, int64_t x, int64_t y, int64_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(static_cast<int>(x)), "r"(static_cast<int>(y)), "r"(static_cast<int>(z))
        : "memory");
}

// Clusters of two blocks: each reads and signals the other's shared memory.

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Arrives once and says what TMA is to bring in this phase; what was written before is seen by the waiting.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
// Arrives at the same barrier of block `rank` of the cluster. Not at the cluster's scope, which would wait for all of
// the thread's memory accesses: what a stage's readers have read, they have read when they arrive.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar), "r"(rank)
        : "memory");
}
// A word for block `rank` of the cluster, at the same address, whose bytes the barrier there counts.
__device__ __forceinline__ void store_cluster(uint32_t to, uint32_t word, uint32_t bar, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 at, there;\nmapa.shared::cluster.u32 at, %0, %3;\nmapa.shared::cluster.u32 there, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], %1, [there];\n}\n" ::"r"(to),
        "r"(word), "r"(bar), "r"(rank)
        : "memory");
}
// As `tma_load`, into both blocks of the cluster and onto both barriers.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(3))
        : "memory");
}

__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// Data that passes through L2 once is the first to leave it, so that operands which many blocks read stay.
#define EVICT_FIRST(INSTRUCTION) "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n" INSTRUCTION ", policy;\n}\n"

// As `tma_load`, of what no other block reads.
__device__ __forceinline__ void tma_load_evict_first(uint32_t to, const CUtensorMap& map, uint32_t bar, int x, int y, int z) {
    asm volatile(
        EVICT_FIRST("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2]") ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// A run of bytes from shared memory to memory; both ends and the size are multiples of 16.
__device__ __forceinline__ void tma_store(void* to, uint32_t from, uint32_t bytes) {
    asm volatile(EVICT_FIRST("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2") ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t from, int x, int y, int z) {
    asm volatile(EVICT_FIRST("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1]") ::"l"(&map), "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until this thread's bulk stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
// Ordinary writes of shared memory before this are seen by TMA and wgmma after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit values between registers and shared memory; lane l gives row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(uint32_t to, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
// Two of them, by the first 16 lanes.
__device__ __forceinline__ void stmatrix(uint32_t to, const uint32_t (&v)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};\n" ::"r"(to), "r"(v[0]), "r"(v[1]) : "memory");
}
__device__ __forceinline__ void ldmatrix(uint32_t from, uint32_t (&v)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

}  // namespace ptx
