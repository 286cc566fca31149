// Rows of slots back to their tokens on other GPUs of the host, by stores over NVLink, and their sums
// (common/nvlink.cuh has the protocol).
//
//   sm90_nvlink_combine_*  rows [N, width] -> [T, width]; weights of slots [N] -> [T, K], if wanted
//
// Each row that arrived in dispatch goes back to its token's rank: as the sum of its slots here in f32, in the order of
// k, rounded once. The token's rank adds the sums of the ranks in their order, in f32, and rounds once; its own it makes
// on the way. Or (`in_k_order`) every slot's row goes back, to a place of its (token, k), and the token's rank adds them
// in the order of k: more bytes, and the same bits for every number of ranks.
//
// Behind each row that has been stored a word in the receiver's window has the call's epoch. Warps take pieces of work by
// a ticket, in one order: for each i, row i to every peer, then token i - lag. So what a token waits for has been taken
// by some warp of the peer before, if the peer has come as far as this rank: no wait is for a warp that waits itself, and
// no number of blocks has to run at once.
//
// Limited by the link's bytes; in memory each slot's row is read once, each sum that travels written and read once.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include <type_traits>
#include "common/nvlink.cuh"

namespace {

// Words of each row that a thread handles together.
constexpr int WORDS = NVLINK_SUM_WORDS;
constexpr int WARPS = NVLINK_SUM_THREADS / 32;

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

template <class T, int N>
__device__ __forceinline__ WordOf<T, N> rounded(const float (&sum)[N]) {
    T v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from_float<T>(sum[i]);
    WordOf<T, N> word;
    memcpy(&word, v, sizeof v);
    return word;
}

// Rows that are added in order, by a warp: first some of lower ranks' sums, then this rank's slots, whose sum is rounded
// before it counts, then higher ranks' sums. Without such sums that rounding is the last.
template <class T>
struct Rows {
    const T* const* at;  // where each begins, in shared memory
    int count;
    int slots_from;
    int slots;
};

// The sum of WORDS words of a row, as it grows.
template <class T, int N>
struct Sum {
    float all[WORDS][N] = {};
    float here[WORDS][N] = {};

    __device__ __forceinline__ void take(const Rows<T>& rows, int row, const WordOf<T, N> (&words)[WORDS]) {
        const bool slot = row >= rows.slots_from && row < rows.slots_from + rows.slots;
#pragma unroll
        for (int w = 0; w < WORDS; w++) slot ? add<T, N>(here[w], words[w]) : add<T, N>(all[w], words[w]);
        if (row + 1 != rows.slots_from + rows.slots || rows.slots == 0) return;
#pragma unroll
        for (int w = 0; w < WORDS; w++) add<T, N>(all[w], rounded<T, N>(here[w]));
    }
};

// Rows are read once: the first to leave L2, where the peers' sums arrive meanwhile.
__device__ __forceinline__ uint64_t read_once() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void load_to_shared(uint4* to, const void* from, uint64_t policy) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n" ::"r"(at), "l"(from), "l"(policy) : "memory");
}
__device__ __forceinline__ void end_of_place() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// All but the last so many places have come.
template <int PLACES>
__device__ __forceinline__ void wait_for_place() { asm volatile("cp.async.wait_group %0;\n" ::"n"(PLACES) : "memory"); }

// Adds rows of `width` elements into `out`. A thread's words come through a ring in shared memory of its own, so that
// many are under way and none takes a register: place after place has words of a row, row after row, then the
// next words. A thread reads what it has loaded itself, so no barrier is needed.
template <class T>
__device__ __forceinline__ void add_rows_in_words(const Rows<T>& rows, T* out, int width, uint4* ring) {
    constexpr int N = 16 / sizeof(T), STEP = 32 * N * WORDS;
    const int lane = threadIdx.x % 32;
    const uint64_t policy = read_once();
    ring += threadIdx.x;
    int load_row = 0, load_at = rows.count > 0 ? lane * N : width, load_place = 0;
    auto load = [&]() {
        if (load_at < width) {
            const T* from = rows.at[load_row] + load_at;
            uint4* to = ring + load_place * (WORDS * NVLINK_SUM_THREADS);
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (load_at + 32 * N * w < width) load_to_shared(to + NVLINK_SUM_THREADS * w, from + 32 * N * w, policy);
            }
        }
        end_of_place();
        if (++load_place == NVLINK_RING) load_place = 0;
        if (++load_row == rows.count) load_row = 0, load_at += STEP;
    };
#pragma unroll 1
    for (uint32_t i = 0; i + 1 < NVLINK_RING; i++) load();
    int place = 0;
#pragma unroll 1
    for (int at = lane * N; at < width; at += STEP) {
        Sum<T, N> sum;
#pragma unroll 1
        for (int row = 0; row < rows.count; row++) {
            load();
            wait_for_place<NVLINK_RING - 1>();
            const uint4* from = ring + place * (WORDS * NVLINK_SUM_THREADS);
            uint4 words[WORDS];
#pragma unroll
            for (int w = 0; w < WORDS; w++) words[w] = from[NVLINK_SUM_THREADS * w];
            sum.take(rows, row, words);
            if (++place == NVLINK_RING) place = 0;
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + 32 * N * w < width) *reinterpret_cast<uint4*>(out + at + 32 * N * w) = rounded<T, N>(sum.all[w]);
        }
    }
    wait_for_place<0>();
}

// The same of rows of any width, an element at a time.
template <class T>
__device__ __forceinline__ void add_rows_in_elements(const Rows<T>& rows, T* out, int width) {
    for (int at = threadIdx.x % 32; at < width; at += 32 * WORDS) {
        Sum<T, 1> sum;
        for (int row = 0; row < rows.count; row++) {
            T words[WORDS] = {};
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (at + 32 * w < width) words[w] = rows.at[row][at + 32 * w];
            }
            sum.take(rows, row, words);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + 32 * w < width) out[at + 32 * w] = rounded<T, 1>(sum.all[w]);
        }
    }
}

template <class T>
struct Combine {
    const NvLinkCombineParams& p;
    const nvlink::Block& block;
    const T** list;  // the warp's own room for a row of each lane
    uint4* ring;

    __device__ __forceinline__ int64_t row_of(int64_t rank, int64_t row) const { return rank * p.max_tokens + row; }

    // The slot of choice `lane` of a row that arrived, or -1.
    __device__ __forceinline__ int32_t slot_of_lane(int64_t rank, int64_t row) const {
        const int lane = threadIdx.x % 32;
        return lane < p.top_k ? p.row_slots[row_of(rank, row) * p.top_k + lane] : -1;
    }

    __device__ __forceinline__ const T* row_at(int64_t slot) const { return static_cast<const T*>(p.rows) + slot * p.width; }

    // Lists the rows of the lanes that name one, in the order of lanes, behind `before` others. Returns how many there are.
    __device__ __forceinline__ int append(bool names, const T* row, int before) const {
        const uint32_t all = __ballot_sync(~0u, names);
        if (names) list[before + __popc(all & ((1u << threadIdx.x % 32) - 1))] = row;
        return before + __popc(all);
    }

    __device__ __forceinline__ void add_rows(int count, int slots_from, int slots, T* out) const {
        __syncwarp();
        const Rows<T> rows{list, count, slots_from, slots};
        const int width = static_cast<int>(p.width);
        if (p.word == 16) add_rows_in_words<T>(rows, out, width, ring);
        else add_rows_in_elements<T>(rows, out, width);
        __syncwarp();
    }

    // A row that arrived goes back to rank `to`.
    __device__ __forceinline__ void push(int64_t to, int64_t row) const {
        const int lane = threadIdx.x % 32;
        const int32_t slot = slot_of_lane(to, row);
        const int64_t token = p.row_tokens[row_of(to, row)];
        T* zone = reinterpret_cast<T*>(block.zones[to]);
        if (p.in_k_order) {
            for (uint32_t left = __ballot_sync(~0u, slot >= 0); left != 0; left &= left - 1) {
                const int k = __ffs(left) - 1;
                copy(row_at(__shfl_sync(~0u, slot, k)), zone + (token * p.top_k + k) * p.width);
            }
        } else {
            add_rows(append(slot >= 0, row_at(slot), 0), 0, 0, zone + row_of(p.call.rank, row) * p.width);
        }
        if (p.with_weights && slot >= 0) {
            auto* weights = reinterpret_cast<float*>(block.zones[to] + p.weights_at);
            weights[token * p.top_k + lane] = p.weights != nullptr ? p.weights[slot] : 0.0f;
        }
        nvlink::delay(p.call, static_cast<uint32_t>(row) * 8 + static_cast<uint32_t>(to));
        __syncwarp();
        const nvlink::Word epoch = block.epoch;
        if (lane == 0) nvlink::store_release(nvlink::words_of(p.call, to) + NVLINK_ROWS + row_of(p.call.rank, row), epoch << 32);
    }

    template <class W, int AHEAD>
    __device__ __forceinline__ void copy_words(const W* from, W* to, int words) const {
        for (int first = threadIdx.x % 32; first < words; first += 32 * AHEAD) {
            W loaded[AHEAD];
#pragma unroll
            for (int w = 0; w < AHEAD; w++) {
                if (first + 32 * w < words) loaded[w] = from[first + 32 * w];
            }
#pragma unroll
            for (int w = 0; w < AHEAD; w++) {
                if (first + 32 * w < words) to[first + 32 * w] = loaded[w];
            }
        }
    }

    __device__ __forceinline__ void copy(const T* from, T* to) const {
        const int width = static_cast<int>(p.width);
        if (p.word == 16) copy_words<uint4, 8>(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), width / static_cast<int>(16 / sizeof(T)));
        else copy_words<T, 4>(from, to, width);
    }

    // Waits for a token's rows of other ranks; lane r holds the row's number in the message to rank r. False: given up.
    __device__ __forceinline__ bool wait(int32_t row) const {
        const int64_t lane = threadIdx.x % 32;
        bool there = true;
        if (lane < p.call.ranks && lane != p.call.rank && row >= 0) {
            nvlink::Word met;
            const nvlink::Word* word = nvlink::words_of(p.call, p.call.rank) + NVLINK_ROWS + row_of(lane, row);
            there = nvlink::wait_for(p.call, word, block.epoch, NVLINK_WAIT_ROW, lane, met);
        }
        return __all_sync(~0u, there);
    }

    // The sum of a token's rows. False: given up.
    __device__ __forceinline__ bool sum(int64_t token) const {
        const int64_t lane = threadIdx.x % 32, ranks = p.call.ranks, rank = p.call.rank;
        const int32_t row = lane < ranks ? p.token_rows[token * ranks + lane] : -1;
        const int32_t own = __shfl_sync(~0u, row, static_cast<int>(rank));
        const int32_t slot = own >= 0 ? slot_of_lane(rank, own) : -1;
        const bool kept = lane < p.top_k && p.kept[token * p.top_k + lane] >= 0;
        if (!wait(row)) return false;
        const auto* arrived = reinterpret_cast<const T*>(block.zones[rank]);
        T* out = static_cast<T*>(p.out) + token * p.width;
        if (p.in_k_order) {
            const T* from = slot >= 0 ? row_at(slot) : arrived + (token * p.top_k + lane) * p.width;
            add_rows(append(kept, from, 0), 0, 0, out);
        } else {
            const T* from = arrived + row_of(lane, row) * p.width;
            const int lower = append(row >= 0 && lane < rank, from, 0);
            const int slots = append(slot >= 0, row_at(slot), lower) - lower;
            add_rows(append(row >= 0 && lane > rank, from, lower + slots), lower, slots, out);
        }
        if (p.out_weights != nullptr && lane < p.top_k) {
            const auto* weights = reinterpret_cast<const float*>(block.zones[rank] + p.weights_at);
            float weight = 0.0f;
            if (slot >= 0) weight = p.weights != nullptr ? p.weights[slot] : 0.0f;
            else if (kept) weight = weights[token * p.top_k + lane];
            p.out_weights[token * p.top_k + lane] = weight;
        }
        return true;
    }

    __device__ __forceinline__ void run() const {
        const int64_t ranks = p.call.ranks, rank = p.call.rank;
        int64_t most = p.tokens + p.lag;
        for (int64_t r = 0; r < ranks; r++) most = p.arrived[r] > most ? p.arrived[r] : most;
        auto* ticket = nvlink::words_of(p.call, rank) + NVLINK_TICKET;
        while (true) {
            nvlink::Word taken = 0;
            if (threadIdx.x % 32 == 0) taken = atomicAdd(ticket, 1ull);
            taken = __shfl_sync(~0u, taken, 0);
            const int64_t i = static_cast<int64_t>(taken) / ranks, part = static_cast<int64_t>(taken) - i * ranks;
            if (i >= most) return;
            if (part + 1 < ranks) {
                const int64_t to = (rank + 1 + part) % ranks;
                if (i < p.arrived[to]) push(to, i);
            } else if (i >= p.lag && i - p.lag < p.tokens) {
                if (!sum(i - p.lag)) return;
            }
        }
    }
};

template <class T>
__device__ __forceinline__ void combine(const NvLinkCombineParams& p) {
    extern __shared__ uint4 ring[];
    __shared__ nvlink::Block block;
    __shared__ const T* lists[WARPS][32];
    nvlink::start(p.call, block);
    if (!block.stopped) Combine<T>{p, block, lists[threadIdx.x / 32], ring}.run();
    nvlink::end(p.call, block);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_f32(const __grid_constant__ NvLinkCombineParams p) {
    combine<float>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_f16(const __grid_constant__ NvLinkCombineParams p) {
    combine<f16>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_bf16(const __grid_constant__ NvLinkCombineParams p) {
    combine<bf16>(p);
}
#endif
