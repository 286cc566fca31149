// What the producers of weight gradients on Hopper (sm90_wgrad.cu) bring of the operand that may lie behind a map: TMA
// follows no map, so all 128 threads copy.
#pragma once
#include "common/common.cuh"
#include "ptx/mbarrier_tma.cuh"

namespace wgrad {
using namespace ptx;

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64, STAGES = 4, THREADS = 384;
// Operands lie in blocks of 64 columns: a row of 128 bytes for each slot, swizzled.
constexpr int BLOCK_BYTES = BLOCK_K * 128, A_BYTES = BLOCK_M / 64 * BLOCK_BYTES, B_BYTES = BLOCK_N / 64 * BLOCK_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;

struct WorkTile {
    int group;
    int narrow, wide;  // first column of either side
    int first, count;  // slots
};

// The part of a producer in the gathered operand: in each step four rows, 16 bytes in each of two blocks of columns.
struct FastGather {
    // An elected lane orders what TMA brings.
    static constexpr bool ELECTED = true;
    const WeightGradParams& p;
    const char* column;  // the thread's first column in row 0
    const int32_t* map;  // of the segment, from the lane's first entry on
    int slot;            // that entry, within the segment
    uint32_t live;       // which of the two blocks have the thread's columns
    // Where rows of two steps lie, in words of 16 bytes from row 0 on: a lane knows one, and all the warp's 16 of both are
    // among the lanes.
    uint32_t now;
    uint32_t there;      // lanes whose row is there; the others know row 0
    bool whole;          // all are, and so are all columns
    int32_t ahead[2];    // rows of two steps each
    const char* from[4]; // the step's

    __device__ FastGather(const WeightGradParams& p, const WorkTile& t) : p(p) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, at = t.narrow + lane % 8 * 8;
        column = static_cast<const char*>(p.mapped) + static_cast<int64_t>(at) * 2;
        // One number from here on: else it is added up anew for each row.
        asm volatile("" : "+l"(column));
        live = (at < p.narrow ? 1 : 0) | (at + 64 < p.narrow ? 2 : 0);
        slot = lane / 16 * 64 + lane % 16 / 4 * 16 + warp * 4 + lane % 4;
        map = p.map + t.first + slot;
        const int32_t first = read(0, t.count);
#pragma unroll
        for (int i = 0; i < 2; i++) ahead[i] = read((i + 1) * 2 * BLOCK_K, t.count);
        find(first, 0, t);
    }
    __device__ __forceinline__ int32_t read(int k, int count) const {
        int32_t row = -1;
        if (slot + k < count) asm volatile("ld.global.nc.s32 %0, [%1];\n" : "=r"(row) : "l"(map + k));
        return row;
    }
    // The lane's row of the two steps from k on.
    __device__ __forceinline__ void find(int32_t row, int k, const WorkTile& t) {
        const bool valid = static_cast<unsigned>(row) < p.mapped_rows;
        if (!valid && slot + k < t.count) raise_map(p.fault, t.first + slot + k, row, p.site);
        now = valid ? static_cast<uint32_t>(row) * static_cast<uint32_t>(p.narrow / 8) : 0;
        there = __ballot_sync(~0u, valid);
        whole = __all_sync(~0u, valid && live == 3);
    }
    // Where the step's rows lie. Before the stage is waited for, so that each row has registers of its own: a copy that
    // shares them waits until the one before has been taken.
    __device__ __forceinline__ void find_rows(int k, int) {
        const int lane = threadIdx.x % 32, second = k / BLOCK_K % 2;
#pragma unroll
        for (int i = 0; i < 4; i++) from[i] = column + static_cast<uint64_t>(__shfl_sync(~0u, now, second * 16 + i * 4 + lane / 8)) * 16;
    }
    // Zeros where there is none; what is not valid is not read.
    __device__ __forceinline__ void copy_rows(uint32_t to, int k) const {
        const int row = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
        to += row * 128 + ((chunk ^ (row & 7)) << 4);
        if (whole) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                cp_async(to + i * 2048, from[i]);
                cp_async(to + i * 2048 + BLOCK_BYTES, from[i] + 128);
            }
        } else {
            const uint32_t valid = there >> (k / BLOCK_K % 2 * 16 + threadIdx.x % 32 / 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                cp_async(to + i * 2048, from[i], valid >> i * 4 & live & 1);
                cp_async(to + i * 2048 + BLOCK_BYTES, from[i] + 128, (valid >> i * 4 & 1) && live & 2);
            }
        }
    }
    __device__ __forceinline__ void next(int k, const WorkTile& t) {
        if (k / BLOCK_K % 2 == 0) return;
        find(ahead[0], k + BLOCK_K, t);
        ahead[0] = ahead[1];
        ahead[1] = read(k + 5 * BLOCK_K, t.count);
    }
};

// The same where sums leave in f32: it checks each step's rows by themselves, and takes three times as many instructions.
// Beside results that are added in L2, copies that come all at once hold up what they are for.
struct SlowGather {
    static constexpr bool ELECTED = false;
    const WeightGradParams& p;
    const char* column;  // the thread's first column in row 0
    int pitch;           // bytes of a row
    const int32_t* map;  // of the segment, from the lane's first entry on
    int slot;            // that entry, within the segment
    uint32_t live;       // which of the two blocks have the thread's columns
    uint32_t valid;      // of the step's four rows
    const char* from[4]; // they
    int32_t ahead[3];    // rows of two steps each: a lane holds one, and all the warp's 16 of both are among the lanes

    __device__ SlowGather(const WeightGradParams& p, const WorkTile& t) : p(p), pitch(static_cast<int>(p.narrow) * 2) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, at = t.narrow + lane % 8 * 8;
        column = static_cast<const char*>(p.mapped) + static_cast<int64_t>(at) * 2;
        live = (at < p.narrow ? 1 : 0) | (at + 64 < p.narrow ? 2 : 0);
        slot = lane / 16 * 64 + lane % 16 / 4 * 16 + warp * 4 + lane % 4;
        map = p.map + t.first + slot;
#pragma unroll
        for (int i = 0; i < 3; i++) ahead[i] = read(i * 2 * BLOCK_K, t.count);
    }
    __device__ __forceinline__ int32_t read(int k, int count) const {
        int32_t row = -1;
        if (slot + k < count) asm volatile("ld.global.nc.s32 %0, [%1];\n" : "=r"(row) : "l"(map + k));
        return row;
    }
    // The entries `first + 16 i` name no row. They are read again, and reported one after the other: told where each is
    // found, they made the producers' loop over steps longer, which cost 4 % of the product's time.
    __device__ __forceinline__ void report(uint32_t outside, int64_t first) const {
#pragma unroll 1
        for (; outside; outside &= outside - 1) {
            const int64_t entry = first + (__ffs(outside) - 1) * 16;
            raise_map(p.fault, entry, p.map[entry], p.site);
        }
    }
    // Where the next step's rows lie; row 0 where there is no slot, or the map points outside. Before the stage is waited
    // for, so that each row has registers of its own: a copy that shares them waits until the one before has been
    // taken.
    __device__ __forceinline__ void find_rows(int k, int count) {
        const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 8, second = k / BLOCK_K % 2;
        uint32_t outside = 0;
        valid = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = __shfl_sync(~0u, ahead[0], second * 16 + i * 4 + lane / 8);
            const uint32_t there = row + i * 16 < count - k ? 1 << i : 0;
            if (static_cast<unsigned>(at) >= p.mapped_rows) {
                outside |= there;
                at = 0;
            } else {
                valid |= there;
            }
            from[i] = column + static_cast<int64_t>(at) * pitch;
        }
        if (outside) report(outside, map - p.map - slot + k + row);
        if (second) {
            ahead[0] = ahead[1], ahead[1] = ahead[2];
            ahead[2] = read(k + 5 * BLOCK_K, count);
        }
    }
    // Zeros where there is none; what is not valid is not read.
    __device__ __forceinline__ void copy_rows(uint32_t to, int) const {
        const int row = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
        to += row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            cp_async(to + i * 2048, from[i], valid >> i & live & 1);
            cp_async(to + i * 2048 + BLOCK_BYTES, from[i] + 128, (valid >> i & 1) && live & 2);
        }
    }
    __device__ __forceinline__ void next(int, const WorkTile&) const {}
};

}  // namespace wgrad
