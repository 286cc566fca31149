// In the place of kernels/common/nvlink_memory.cuh. Whoever looks at memory lets others run first, as it may be waiting.
#pragma once
#include "device.hpp"

namespace nvlink {

using Word = unsigned long long;

inline Word load_relaxed(const Word* at) {
    emulated::yield();
    return emulated::load_word(reinterpret_cast<const uint64_t*>(at));
}
inline Word load_acquire(const Word* at) { return load_relaxed(at); }
inline void store_relaxed(Word* at, Word value) { emulated::store_word_later(reinterpret_cast<uint64_t*>(at), value); }
// The kernels of low latency have none.
void fence_system();
inline Word nanoseconds() { return emulated::clock(); }

inline void store_packet(void* at, uint4 v) { emulated::store_later(at, v); }
inline uint4 load_packet(const void* at) {
    emulated::yield();
    return *static_cast<const uint4*>(at);
}

}  // namespace nvlink
