// All ranks' records of a prepare, as one rank's plan reads them.
#pragma once
#include "record_layout.h"
#include "common/counting_sort.cuh"

__device__ __forceinline__ const uint32_t* header_of(const RecordsPlanParams& p, int64_t rank) {
    return reinterpret_cast<const uint32_t*>(p.records + rank * p.size);
}

// Records need not begin at multiples of 8 bytes.
__device__ __forceinline__ unsigned long long word_of(const RecordsPlanParams& p, int64_t rank, int word) {
    const uint32_t* at = header_of(p, rank) + 2 * word;
    return at[0] | static_cast<unsigned long long>(at[1]) << 32;
}

__device__ __forceinline__ int64_t tokens_of(const RecordsPlanParams& p, int64_t rank) {
    const unsigned long long tokens = word_of(p, rank, TOKENS);
    return tokens < static_cast<unsigned long long>(p.max_tokens) ? static_cast<int64_t>(tokens) : p.max_tokens;
}

// Where a choice belongs.
struct ChoiceOrigin {
    uint32_t rank, choice;  // the latter among the rank's
};

__device__ __forceinline__ ChoiceOrigin origin_of(const RecordsPlanParams& p, int64_t i) {
    const uint32_t each = static_cast<uint32_t>(p.max_tokens * p.top_k), at = static_cast<uint32_t>(i), rank = at / each;
    return {rank, at - rank * each};
}

// Choices as the records have them.
struct RecordedChoices {
    const RecordsPlanParams& p;
    __device__ __forceinline__ int64_t id(int64_t i) const {
        const ChoiceOrigin at = origin_of(p, i);
        if (at.choice >= tokens_of(p, at.rank) * p.top_k) return -1;
        return reinterpret_cast<const int32_t*>(p.records + at.rank * p.size + HEADER_BYTES)[at.choice];
    }
    // Whoever wrote the record has masked bad ones; one that others disagree with may hold anything.
    __device__ __forceinline__ int expert(int64_t, int64_t id, int64_t) const {
        return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
    }
};

// Slot of a choice on its expert's rank, or -1; where it is this rank's own, it is kept or counted as dropped.
__device__ __forceinline__ int64_t slot_of(const RecordsPlanParams& p, ChoiceOrigin at, int e, int rank) {
    const int64_t slot = e >= 0 && rank < p.scratch[2 * p.experts + e] ? p.scratch[p.experts + e] + rank : -1;
    if (at.rank == p.rank && at.choice < p.tokens * p.top_k) {
        p.kept[at.choice] = slot >= 0 ? e : -1;
        if (e >= 0 && slot < 0) {
            atomicAdd(reinterpret_cast<unsigned long long*>(p.stats + p.experts + p.experts / p.ranks + 1), 1ull);
        }
    }
    return slot;
}

__device__ __forceinline__ int64_t end_of(const RecordsPlanParams& p, int64_t first) {
    const int64_t all = p.ranks * p.max_tokens * p.top_k;
    return first + p.chunk < all ? first + p.chunk : all;
}
