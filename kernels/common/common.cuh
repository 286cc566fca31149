// Conversions, faults and the instructions that all stages share.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "common/params.h"

using bf16 = __nv_bfloat16;
using f16 = __half;

// A fault in the first word of the status (params.h). Of two faults the larger code wins, and of one code the smaller
// detail; of two needs of rows the larger: words only grow, so that what they say does not depend on the order of
// threads, blocks or kernels.
__device__ inline unsigned long long fault_word(Fault code, long long detail) {
    constexpr unsigned long long DETAIL = (1ull << FAULT_DETAIL_BITS) - 1;
    return (static_cast<unsigned long long>(code) << FAULT_DETAIL_BITS) | (DETAIL - (detail & DETAIL));
}
__device__ inline void raise_fault(unsigned long long* fault, Fault code, long long detail) {
    atomicMax(fault, fault_word(code, detail));
}

// Half of what was found at an entry, for the first of the two words that tell it, or inverted for the second. The words
// begin with the entry, so that they are those of the first; where calls have met different values there, the two words
// tell that by not agreeing.
__device__ inline unsigned long long found_word(long long entry, uint32_t half, bool inverted) {
    return static_cast<unsigned long long>(~static_cast<uint32_t>(entry)) << 32 | (inverted ? ~half : half);
}

// An entry of a map that names no row, and what it holds, in the call of this site. The loop stays a loop: with its steps
// side by side `sm90_w4a16.cu` spilled registers, for what does not happen.
__device__ inline void raise_map(unsigned long long* fault, long long entry, int found, long long site, Operand operand = OPERAND_FIRST) {
    unsigned long long word = fault_word(FAULT_MAP, entry << SITE_BITS | site | operand << ORIGIN_BITS);
    unsigned long long* at = fault;
#pragma unroll 1
    for (int i = 0; i < 3; i++) {
        atomicMax(at, word);
        at = fault + STATUS_MAP_FOUND + i;
        word = found_word(entry, static_cast<uint32_t>(found), i > 0);
    }
}

// A segment outside its layout, where it begins and what it counts, in the call of this site.
__device__ inline void raise_segment(unsigned long long* fault, long long segment, long long offset, long long count, long long site) {
    raise_fault(fault, FAULT_SEGMENT, segment << SITE_BITS | site);
    const uint32_t halves[4] = {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(count),
                                static_cast<uint32_t>(count >> 32)};
    // Here the other way round: as a loop it had `sm90_wgrad.cu` spill.
#pragma unroll
    for (int i = 0; i < 8; i++) atomicMax(fault + STATUS_SEGMENT_FOUND + i, found_word(segment, halves[i / 2], i % 2 > 0));
}

// Both of these words begin with the need, so that capacity and rank are those of the layout that needs most; of equal
// needs the highest rank and the fewest rows. The rank is told with its own origin.
__device__ inline void raise_capacity(unsigned long long* fault, long long needed, long long rank, long long rows, long long origin) {
    constexpr long long RANK = (1 << NEEDED_RANK_BITS) - 1;
    raise_fault(fault, FAULT_CAPACITY, rows);
    atomicMax(fault + STATUS_NEEDED_RANK,
              static_cast<unsigned long long>(needed) << (NEEDED_RANK_BITS + ORIGIN_BITS) | (rank & RANK) << ORIGIN_BITS | origin);
    atomicMax(fault + STATUS_NEEDED_ROWS, (static_cast<unsigned long long>(needed) << 32) | (0xffffffffull - (rows & 0xffffffffull)));
}

// An id of a backward that names no expert. The words begin with the choice, so that they are those of the first.
__device__ inline void raise_id(unsigned long long* fault, long long choice, int id, const int64_t (&sizes)[2], long long origin) {
    raise_fault(fault, FAULT_ID, choice << ORIGIN_BITS | origin);
    const unsigned long long first = (0xffffffffull - (choice & 0xffffffffll)) << 32;
    atomicMax(fault + STATUS_ID, first | static_cast<uint32_t>(id));
    atomicMax(fault + STATUS_ID_TOP_K, first | static_cast<uint32_t>(sizes[0]));
    atomicMax(fault + STATUS_ID_EXPERTS, first | static_cast<uint32_t>(sizes[1]));
}

// Copies the status words to memory of the host, a thread each: every caller has a warp at least. Words that tell nothing
// are there already, and the kernels behind this one would wait until the host has them.
static_assert(STATUS_WORDS <= 32);
__device__ __forceinline__ void copy_status(const unsigned long long* words, unsigned long long* host, int64_t count) {
    const volatile unsigned long long* from = words;
    if (from[STATUS_FAULT] == 0 && from[STATUS_NAN] == ~0ull) return;
    if (threadIdx.x < count) static_cast<volatile unsigned long long*>(host)[threadIdx.x] = from[threadIdx.x];
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(f16 v) { return __half2float(v); }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ f16 from_float<f16>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }

// Element i of a tensor whose type is a value.
__device__ __forceinline__ float load_any(const void* base, int64_t type, int64_t i) {
    if (type == TYPE_F32) return static_cast<const float*>(base)[i];
    if (type == TYPE_F16) return to_float(static_cast<const f16*>(base)[i]);
    return to_float(static_cast<const bf16*>(base)[i]);
}
__device__ __forceinline__ void store_any(void* base, int64_t type, int64_t i, float v) {
    if (type == TYPE_F32) static_cast<float*>(base)[i] = v;
    else if (type == TYPE_F16) static_cast<f16*>(base)[i] = from_float<f16>(v);
    else static_cast<bf16*>(base)[i] = from_float<bf16>(v);
}

// Row of a mapped tensor; -1 (and a fault) where the map points outside.
__device__ __forceinline__ int64_t mapped_row(const int32_t* map, int64_t slot, int64_t rows, unsigned long long* fault, int64_t site,
                                              Operand operand = OPERAND_FIRST) {
    int64_t row = map ? map[slot] : slot;
    if (row < 0 || row >= rows) {
        raise_map(fault, slot, static_cast<int>(row), site, operand);
        return -1;
    }
    return row;
}

// Programmatic dependent launch, from 9.0 on. A kernel that `KernelSpec::early` names is started while the one before it
// in the stream still runs; it calls this first, in every thread, and so waits until all that was written before can be
// read. Then it lets the next of its kind start.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}
