// Loads and stores of memory that other GPUs write to and read, and the clock that they share. tests/low_latency/common/ has the
// same for a CPU.
#pragma once
#include <stdint.h>

namespace nvlink {

using Word = unsigned long long;

__device__ __forceinline__ Word load_relaxed(const Word* at) {
    Word value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(at) : "memory");
    return value;
}
// What was released with the value is there. Cheaper than a fence behind a relaxed load, which waits for all that the SM has
// under way.
__device__ __forceinline__ Word load_acquire(const Word* at) {
    Word value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];\n" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_relaxed(Word* at, Word value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;\n" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;\n" ::: "memory"); }
__device__ __forceinline__ Word nanoseconds() {
    Word now;
    asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(now)::"memory");
    return now;
}

// Packets of 16 bytes, stored and loaded as a whole.
__device__ __forceinline__ void store_packet(void* at, uint4 v) {
    const uint64_t low = static_cast<uint64_t>(v.y) << 32 | v.x, high = static_cast<uint64_t>(v.w) << 32 | v.z;
    asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.sys.global.b128 [%0], v;\n}\n" ::"l"(at), "l"(low), "l"(high) : "memory");
}
__device__ __forceinline__ uint4 load_packet(const void* at) {
    uint64_t low, high;
    asm volatile("{\n.reg .b128 v;\nld.relaxed.sys.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}\n" : "=l"(low), "=l"(high) : "l"(at) : "memory");
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
}

}  // namespace nvlink
