// What the kernels share that return rows of slots to other GPUs of the host and add them (sm90_nvlink_combine.cu, whose
// head describes pieces, groups, planners and words; sm90_nvlink_combine_mxfp8.cu): pieces of work and who plans them, words
// behind rows, and loads into rings. QUANTIZED: sums travel as MXFP8, codes and scales; otherwise rows do as they are.
#pragma once
#include <type_traits>
#include "common/nvlink.cuh"

namespace nvlink_sums {

// Words of each row that a thread handles together; threads of a group.
constexpr int WORDS = NVLINK_SUM_WORDS, GROUP = NVLINK_SUM_WARPS * 32;
static_assert(NVLINK_SUM_GROUPS < 16, "a barrier each, beside the block's");

// What a thread moves at a time: a word of 16 bytes, or an element.
template <class T, int N>
using WordOf = typename std::conditional<N == 1, T, uint4>::type;

template <class T, int N>
__device__ __forceinline__ void add(float (&sum)[N], const WordOf<T, N>& word) {
    T v[N];
    memcpy(v, &word, sizeof v);
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] += to_float(v[i]);
}

// The same of bf16 words, of which each element is the upper half of its f32: one instruction takes it apart.
template <>
__device__ __forceinline__ void add<bf16, 8>(float (&sum)[8], const uint4& word) {
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] += __uint_as_float(pairs[i] << 16);
        sum[2 * i + 1] += __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

template <class T, int N>
__device__ __forceinline__ WordOf<T, N> rounded(const float (&sum)[N]) {
    T v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from_float<T>(sum[i]);
    WordOf<T, N> word;
    memcpy(&word, v, sizeof v);
    return word;
}

// PIECE_END: there are no more. PIECE_NONE: the next is not known yet.
enum PieceKind : int { PIECE_SUM, PIECE_COPIES, PIECE_NONE, PIECE_END };

// Where the scales lie of rows that travel quantized: of those that are added, and of the one that is sent. Such rows' codes
// are what `from` and `to` point to, whatever their type.
template <bool QUANTIZED>
struct PieceScales {};
template <>
struct PieceScales<true> {
    const uint8_t* from_scales[32];
    uint8_t* to_scales;
};

// What a group works on, in shared memory. Rows that are added in order: some of lower ranks' sums, then this rank's
// slots, whose sum is rounded or quantized before it counts, then higher ranks' sums; where one rounding is all, no slot counts
// as such, and of a quantized row that is sent all rows do. Or rows that are copied.
template <class T, bool QUANTIZED>
struct Piece : PieceScales<QUANTIZED> {
    const T* from[32];
    T* to[32];  // one for a sum
    int kind;
    int count;
    int slots_from;
    int slots;
    nvlink::Word* arrived;  // the word that says so at another rank; null: the rows stay here
};

// Rows are read once: the first to leave L2, where the peers' sums arrive meanwhile.
__device__ __forceinline__ uint64_t read_once() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void load_to_shared(uint32_t to, const uint8_t* from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
    uint4 word;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n" : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "r"(from) : "memory");
    return word;
}
__device__ __forceinline__ void end_of_place() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// All but the last so many places have come.
template <int PLACES>
__device__ __forceinline__ void wait_for_place() { asm volatile("cp.async.wait_group %0;\n" ::"n"(PLACES) : "memory"); }

// Hands over the words of the next `count` rows of a ring: each with its number among a place's.
template <class Ring, class Take>
__device__ __forceinline__ void take_rows(Ring& ring, int count, Take&& take) {
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        ring.load();
        wait_for_place<NVLINK_RING - 1>();
#pragma unroll
        for (int w = 0; w < WORDS; w++) take(w, load_shared(ring.next + Ring::NEXT_WORD * w));
        ring.next = ring.behind(ring.next);
    }
}

// A group's workers have ended a piece, and its planner has made the next.
__device__ __forceinline__ void meet(int group) { asm volatile("bar.sync %0, %1;\n" ::"r"(1 + group), "n"(GROUP + 32) : "memory"); }

// Words that peers wait for, of rows that a group has stored: from its planner to the warp that stores them.
struct RowWords {
    static constexpr uint32_t PLACES = 8;
    nvlink::Word* words[PLACES];
    uint32_t put;   // words that have been put here
    uint32_t told;  // of which so many have been stored at the peers
    uint32_t ended; // no more will come
};

__device__ __forceinline__ uint32_t load_acquire_block(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_block(uint32_t* at, uint32_t value) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(value) : "memory");
}

// Hands over the word of a row, by one thread, behind a barrier with those that have stored the row.
__device__ __forceinline__ void put_word(RowWords& rows, nvlink::Word* word) {
    while (rows.put - load_acquire_block(&rows.told) == RowWords::PLACES) __nanosleep(20);
    rows.words[rows.put % RowWords::PLACES] = word;
    store_release_block(&rows.put, rows.put + 1);
}

// Stores the words of all groups as they come, a lane a group, until all have ended. One fence orders what all groups have
// stored so far before their words.
__device__ __forceinline__ void tell_of_rows(const NvLinkCombineParams& p, const nvlink::Block& block, RowWords* groups) {
    const int lane = threadIdx.x % 32;
    const nvlink::Word epoch = block.epoch;
    const bool has_group = lane < static_cast<int>(NVLINK_SUM_GROUPS);
    RowWords& rows = groups[has_group ? lane : 0];
    uint32_t told = 0;
    for (;;) {
        // In this order: a word that is put before the end is seen with it.
        const bool ended = !has_group || load_acquire_block(&rows.ended) != 0;
        const uint32_t put = has_group ? load_acquire_block(&rows.put) : told;
        if (!__any_sync(~0u, put != told)) {
            if (__all_sync(~0u, ended)) return;
            __nanosleep(20);
            continue;
        }
        nvlink::fence_system();
        for (; told != put; told++) {
            nvlink::Word* word = rows.words[told % RowWords::PLACES];
            nvlink::delay(p.call, static_cast<uint32_t>(reinterpret_cast<uint64_t>(word) / sizeof(nvlink::Word)));
            nvlink::store_relaxed(word, epoch << 32);
        }
        if (has_group) store_release_block(&rows.told, told);
        __syncwarp();
    }
}

// Plans a group's pieces, by a warp, each while the one before is worked on.
template <class T, bool QUANTIZED>
struct Planner {
    const NvLinkCombineParams& p;
    const nvlink::Block& block;
    Piece<T, QUANTIZED>& piece;

    __device__ __forceinline__ int64_t row_of(int64_t rank, int64_t row) const { return rank * p.max_tokens + row; }

    // The slot of choice `lane` of a row that arrived, or -1.
    __device__ __forceinline__ int32_t slot_of_lane(int64_t rank, int64_t row) const {
        const int lane = threadIdx.x % 32;
        return lane < p.top_k ? p.row_slots[row_of(rank, row) * p.top_k + lane] : -1;
    }

    __device__ __forceinline__ const T* row_at(int64_t slot) const { return static_cast<const T*>(p.rows) + slot * p.width; }

    // Codes and scales of row `row` of the message from rank `from`, in the zone of rank `at`.
    __device__ __forceinline__ T* codes_of(int64_t at, int64_t from, int64_t row) const {
        return reinterpret_cast<T*>(block.zones[at] + row_of(from, row) * p.width);
    }
    __device__ __forceinline__ uint8_t* scales_of(int64_t at, int64_t from, int64_t row) const {
        return block.zones[at] + p.scales_at + row_of(from, row) * p.scale_bytes;
    }

    // Lists what the lanes name, in their order, behind `before` others. Returns how many there are.
    __device__ __forceinline__ int append(bool names, const T* from, int before, T* to = nullptr, const uint8_t* scales = nullptr) const {
        const uint32_t all = __ballot_sync(~0u, names);
        const int at = before + __popc(all & ((1u << threadIdx.x % 32) - 1));
        if (names) piece.from[at] = from, piece.to[at] = to;
        if constexpr (QUANTIZED) {
            if (names) piece.from_scales[at] = scales;
        }
        return before + __popc(all);
    }

    __device__ __forceinline__ void describe(PieceKind kind, int count, int slots_from, int slots, nvlink::Word* arrived) const {
        if (threadIdx.x % 32 != 0) return;
        piece.kind = kind, piece.count = count, piece.slots_from = slots_from, piece.slots = slots, piece.arrived = arrived;
    }

    // A row that arrived goes back to rank `to`.
    __device__ __forceinline__ void plan_return(int64_t to, int64_t row) const {
        const int lane = threadIdx.x % 32;
        const int32_t slot = slot_of_lane(to, row);
        const int64_t token = p.row_tokens[row_of(to, row)], choice = token * p.top_k + lane;
        T* zone = reinterpret_cast<T*>(block.zones[to]);
        const int count = append(slot >= 0, row_at(slot), 0, zone + choice * p.width);
        __syncwarp();
        if constexpr (QUANTIZED) {
            if (lane == 0) piece.to[0] = codes_of(to, p.call.rank, row), piece.to_scales = scales_of(to, p.call.rank, row);
        } else {
            if (!p.in_k_order && lane == 0) piece.to[0] = zone + row_of(p.call.rank, row) * p.width;
        }
        nvlink::Word* arrived = nvlink::words_of(p.call, to) + NVLINK_ROWS + row_of(p.call.rank, row);
        if constexpr (QUANTIZED) describe(PIECE_SUM, count, 0, count, arrived);
        else describe(p.in_k_order ? PIECE_COPIES : PIECE_SUM, count, 0, 0, arrived);
        if (!p.with_weights || slot < 0) return;
        auto* weights = reinterpret_cast<float*>(block.zones[to] + p.weights_at);
        weights[choice] = p.weights != nullptr ? p.weights[slot] : 0.0f;
    }

    // Whether a token's rows of other ranks are there, or with `patience` will be; lane r holds the row's number in the
    // message to rank r. With patience, false means given up.
    __device__ __forceinline__ bool arrive(int32_t row, bool patience) const {
        const int64_t lane = threadIdx.x % 32;
        bool there = true;
        if (lane < p.call.ranks && lane != p.call.rank && row >= 0) {
            const nvlink::Word* word = nvlink::words_of(p.call, p.call.rank) + NVLINK_ROWS + row_of(lane, row);
            nvlink::Word met;
            if (patience) there = nvlink::wait_for(p.call, word, block.epoch, NVLINK_WAIT_ROW, lane, met);
            else there = nvlink::load_acquire(word) >> 32 == block.epoch;
        }
        return __all_sync(~0u, there);
    }

    // The sum of a token's rows. False: they are not there, or with patience given up.
    __device__ __forceinline__ bool plan_sum(int64_t token, bool patience) const {
        const int64_t lane = threadIdx.x % 32, ranks = p.call.ranks, rank = p.call.rank, choice = token * p.top_k + lane;
        const bool kept = lane < p.top_k && p.kept[choice] >= 0;
        const int32_t row = lane < ranks ? p.token_rows[token * ranks + lane] : -1;
        const int32_t own = __shfl_sync(~0u, row, static_cast<int>(rank));
        const int32_t slot = own >= 0 ? slot_of_lane(rank, own) : -1;
        if (!arrive(row, patience)) return false;
        const auto* arrived = reinterpret_cast<const T*>(block.zones[rank]);
        int count, lower = 0, slots = 0;
        if constexpr (QUANTIZED) {
            T* codes = codes_of(rank, lane, row);
            const uint8_t* scales = scales_of(rank, lane, row);
            lower = append(row >= 0 && lane < rank, codes, 0, nullptr, scales);
            slots = append(slot >= 0, row_at(slot), lower) - lower;
            count = append(row >= 0 && lane > rank, codes, lower + slots, nullptr, scales);
        } else if (p.in_k_order) {
            count = append(kept, slot >= 0 ? row_at(slot) : arrived + choice * p.width, 0);
        } else {
            const T* from = arrived + row_of(lane, row) * p.width;
            lower = append(row >= 0 && lane < rank, from, 0);
            slots = append(slot >= 0, row_at(slot), lower) - lower;
            count = append(row >= 0 && lane > rank, from, lower + slots);
        }
        __syncwarp();
        if (lane == 0) piece.to[0] = static_cast<T*>(p.out) + token * p.width;
        describe(PIECE_SUM, count, lower, slots, nullptr);
        if (p.out_weights != nullptr && lane < p.top_k) {
            const auto* weights = reinterpret_cast<const float*>(block.zones[rank] + p.weights_at);
            float weight = 0.0f;
            if (slot >= 0) weight = p.weights != nullptr ? p.weights[slot] : 0.0f;
            else if (kept) weight = weights[choice];
            p.out_weights[choice] = weight;
        }
        return true;
    }

    // The next piece; `most`: numbers of rows and of tokens that are summed end before it. `owed`: the piece before is
    // one that a peer waits for, and is told to be there when the group meets next. A wait must not hold that up, as the
    // peer's own may be for it: then the token is kept in `waiting` (else -1), and no piece is made.
    __device__ __forceinline__ void next(int64_t most, bool owed, int64_t& waiting) const {
        const int64_t ranks = p.call.ranks, rank = p.call.rank;
        auto* ticket = nvlink::words_of(p.call, rank) + NVLINK_TICKET;
        while (waiting < 0) {
            nvlink::Word taken = 0;
            if (threadIdx.x % 32 == 0) taken = atomicAdd(ticket, 1ull);
            taken = __shfl_sync(~0u, taken, 0);
            const int64_t i = static_cast<int64_t>(taken) / ranks, part = static_cast<int64_t>(taken) - i * ranks;
            if (i >= most) return describe(PIECE_END, 0, 0, 0, nullptr);
            if (part + 1 < ranks) {
                const int64_t to = (rank + 1 + part) % ranks;
                if (i < p.arrived[to]) return plan_return(to, i);
            } else if (i >= p.lag && i - p.lag < p.tokens) {
                waiting = i - p.lag;
            }
        }
        const bool planned = plan_sum(waiting, !owed);
        if (!planned) describe(owed ? PIECE_NONE : PIECE_END, 0, 0, 0, nullptr);
        if (planned || !owed) waiting = -1;
    }
};

// A group's planner: `pieces` is where two take turns. Hands over the words of rows that have been stored.
template <class T, bool QUANTIZED>
__device__ __forceinline__ void plan(const NvLinkCombineParams& p, const nvlink::Block& block, Piece<T, QUANTIZED>* pieces, int group, RowWords& rows) {
    int64_t most = p.tokens + p.lag, waiting = -1;
    for (int64_t r = 0; r < p.call.ranks; r++) most = p.arrived[r] > most ? p.arrived[r] : most;
    const bool first = threadIdx.x % 32 == 0;
    bool owed = false;
    for (int n = 0;; n++) {
        Planner<T, QUANTIZED>{p, block, pieces[n % 2]}.next(most, owed, waiting);
        __syncwarp();
        meet(group);
        nvlink::Word* arrived = n > 0 ? pieces[(n + 1) % 2].arrived : nullptr;
        if (arrived != nullptr && first) put_word(rows, arrived);
        if (pieces[n % 2].kind == PIECE_END) break;
        owed = pieces[n % 2].arrived != nullptr;
    }
    if (first) store_release_block(&rows.ended, 1);
}

// The kernel: `work` does a group's share of a piece, and is told where the block's rings lie.
template <class T, bool QUANTIZED, class Work>
__device__ __forceinline__ void combine(const NvLinkCombineParams& p, Work&& work) {
    extern __shared__ uint4 ring[];
    __shared__ nvlink::Block block;
    __shared__ Piece<T, QUANTIZED> pieces[NVLINK_SUM_GROUPS][2];
    __shared__ RowWords row_words[NVLINK_SUM_GROUPS];
    // All blocks are there: weight gradients may start on the SMs that they leave.
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
    if (threadIdx.x < NVLINK_SUM_GROUPS) {
        RowWords& rows = row_words[threadIdx.x];
        rows.put = rows.told = rows.ended = 0;
    }
    nvlink::start(p.call, block);
    const int planner = (static_cast<int>(threadIdx.x) - static_cast<int>(NVLINK_SUM_WORKERS)) / 32;
    if (!block.stopped && planner == static_cast<int>(NVLINK_SUM_GROUPS)) {
        tell_of_rows(p, block, row_words);
    } else if (!block.stopped && threadIdx.x >= NVLINK_SUM_WORKERS) {
        plan<T, QUANTIZED>(p, block, pieces[planner], planner, row_words[planner]);
    } else if (!block.stopped) {
        const int group = threadIdx.x / GROUP;
        const auto ring_at = static_cast<uint32_t>(__cvta_generic_to_shared(ring));
        for (int n = 0;; n++) {
            meet(group);
            const Piece<T, QUANTIZED>& piece = pieces[group][n % 2];
            if (piece.kind == PIECE_END) break;
            if (piece.kind != PIECE_NONE) work(piece, ring_at);
        }
    }
    nvlink::end(p.call, block);
}

}  // namespace nvlink_sums
