// In the place of kernels/common/common.cuh.
#pragma once
#include "device.hpp"
#include "common/params.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
// The library of the kernels is loaded once for each block that may run at once, each with its own.
#define __shared__ static

// No test sums in these.
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

inline unsigned long long fault_word(Fault code, long long detail) {
    constexpr unsigned long long DETAIL = (1ull << FAULT_DETAIL_BITS) - 1;
    return (static_cast<unsigned long long>(code) << FAULT_DETAIL_BITS) | (DETAIL - (detail & DETAIL));
}
inline void raise_fault(unsigned long long* fault, Fault code, long long detail) { atomicMax(fault, fault_word(code, detail)); }

inline float to_float(float v) { return v; }
inline float to_float(f16 v) { return v.bits; }
inline float to_float(bf16 v) { return v.bits; }
template <class T>
T from_float(float v);
template <>
inline float from_float<float>(float v) { return v; }
template <>
inline f16 from_float<f16>(float v) { return {static_cast<uint16_t>(v)}; }
template <>
inline bf16 from_float<bf16>(float v) { return {static_cast<uint16_t>(v)}; }
