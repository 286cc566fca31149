// What a kernel's source names of CUDA, on a CPU: a thread of a grid is a fiber, and one fiber runs at a time.
#pragma once
#include <stdint.h>
#include <string.h>

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct int2 {
    int32_t x, y;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
struct Index {
    uint32_t x;
};
#pragma GCC visibility push(default)
// Of the fiber that runs.
extern Index threadIdx, blockIdx, blockDim, gridDim;
#pragma GCC visibility pop

#pragma GCC visibility push(default)
namespace emulated {
// Lets other fibers run.
void yield();
// The fibers of a block meet; the number of those that gave true.
int meet_block(bool value);
// The fibers of a warp meet; what each gave.
const uint64_t* meet_warp(uint64_t value);
uint64_t clock();
// A packet's store, which others see some time later, at the latest at the kernel's end.
void store_later(void* at, uint4 packet);
// A word's: other blocks of the rank do not see it at once either, unless the block that stores has a fence behind it.
void store_word_later(uint64_t* at, uint64_t value);
// A word as this block sees it.
uint64_t load_word(const uint64_t* at);
// What the threads of this block have stored in words is seen by all, as the fence of one is behind a barrier with the
// others. Of packets it says nothing: for other GPUs a fence of this scope orders nothing.
void fence();
// An atomic operation on a word sees all of this rank's stores there.
void settle(const void* at);
}  // namespace emulated
#pragma GCC visibility pop

inline void __syncthreads() { emulated::meet_block(true); }
inline int __syncthreads_and(int value) { return emulated::meet_block(value != 0) == static_cast<int>(blockDim.x); }
inline uint32_t __ballot_sync(uint32_t, bool value) {
    const uint64_t* all = emulated::meet_warp(value);
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= static_cast<uint32_t>(all[i] != 0) << i;
    return bits;
}
inline bool __all_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
    return static_cast<T>(emulated::meet_warp(static_cast<uint64_t>(value))[lane & 31]);
}
template <class T>
T __shfl_down_sync(uint32_t, T value, uint32_t by) {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t* all = emulated::meet_warp(static_cast<uint64_t>(value));
    return static_cast<T>(all[lane + by < 32 ? lane + by : lane]);
}
inline void __threadfence() { emulated::fence(); }
inline void __nanosleep(uint32_t) { emulated::yield(); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
inline uint32_t __float_as_uint(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float __uint_as_float(uint32_t v) {
    float value;
    memcpy(&value, &v, 4);
    return value;
}

using Bits = unsigned long long;
inline Bits atomicOr(Bits* at, Bits v) {
    emulated::settle(at);
    const Bits was = *at;
    *at = was | v;
    return was;
}
inline Bits atomicAdd(Bits* at, Bits v) {
    emulated::settle(at);
    const Bits was = *at;
    *at = was + v;
    return was;
}
inline Bits atomicExch(Bits* at, Bits v) {
    emulated::settle(at);
    const Bits was = *at;
    *at = v;
    return was;
}
inline uint32_t atomicAdd(uint32_t* at, uint32_t v) {
    emulated::settle(at);
    const uint32_t was = *at;
    *at = was + v;
    return was;
}
inline Bits atomicCAS(Bits* at, Bits compare, Bits v) {
    emulated::settle(at);
    const Bits was = *at;
    if (was == compare) *at = v;
    return was;
}
inline Bits atomicMax(Bits* at, Bits v) {
    emulated::settle(at);
    const Bits was = *at;
    if (was < v) *at = v;
    return was;
}
