// Rows of slots back to their tokens on other GPUs of the host, by stores over NVLink, and their sums
// (common/nvlink.cuh has the protocol).
//
//   nvlink_combine_*  rows [N, width] -> [T, width]; weights of slots [N] -> [T, K], if wanted
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
// Notes: kernels/notes/nvlink.md.
#include <type_traits>
#include "common/nvlink.cuh"

namespace {

// Slots' rows that a thread has under way before it adds the first, and words of each.
constexpr int AT_ONCE = 4, WORDS = 2;

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

// Adds rows of `width` elements in order, from `first` on WORDS loaded 32 apart: those of the lanes that `mask` has a bit
// for, of which each holds where its row begins.
template <class T, int N>
__device__ __forceinline__ void add_rows(float (&sum)[WORDS][N], const T* row, uint32_t mask, int first, int width) {
    while (mask != 0) {
        const T* from[AT_ONCE];
        int rows = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int lane = mask != 0 ? __ffs(mask) - 1 : 0;
            from[i] = reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), lane));
            rows += mask != 0;
            mask &= mask - 1;
        }
        WordOf<T, N> loaded[AT_ONCE][WORDS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (i < rows && first + 32 * N * w < width) loaded[i][w] = *reinterpret_cast<const WordOf<T, N>*>(from[i] + first + 32 * N * w);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (i < rows && first + 32 * N * w < width) add<T, N>(sum[w], loaded[i][w]);
            }
        }
    }
}

template <class T, int N>
struct Combine {
    const NvLinkCombineParams& p;
    const nvlink::Block& block;
    int width;

    __device__ __forceinline__ int64_t row_of(int64_t rank, int64_t row) const { return rank * p.max_tokens + row; }

    // The slot of choice `lane` of a row that arrived, or -1.
    __device__ __forceinline__ int32_t slot_of_lane(int64_t rank, int64_t row) const {
        const int lane = threadIdx.x % 32;
        return lane < p.top_k ? p.row_slots[row_of(rank, row) * p.top_k + lane] : -1;
    }

    __device__ __forceinline__ const T* row_at(int32_t slot) const { return static_cast<const T*>(p.rows) + static_cast<int64_t>(slot) * width; }

    // A row that arrived goes back to rank `to`, by a warp.
    __device__ __forceinline__ void push(int64_t to, int64_t row) const {
        const int lane = threadIdx.x % 32;
        const int32_t slot = slot_of_lane(to, row);
        const uint32_t mask = __ballot_sync(~0u, slot >= 0);
        const int64_t token = p.row_tokens[row_of(to, row)];
        T* zone = reinterpret_cast<T*>(block.zones[to]);
        if (p.in_k_order) {
            for (uint32_t left = mask; left != 0; left &= left - 1) {
                const int k = __ffs(left) - 1;
                copy(row_at(__shfl_sync(~0u, slot, k)), zone + (token * p.top_k + k) * width);
            }
        } else {
            const T* from = row_at(slot);
            T* out = zone + row_of(p.call.rank, row) * width;
            for (int at = 0; at < width; at += 32 * N * WORDS) {
                float sum[WORDS][N] = {};
                const int first = at + lane * N;
                add_rows<T, N>(sum, from, mask, first, width);
#pragma unroll
                for (int w = 0; w < WORDS; w++) {
                    if (first + 32 * N * w < width) *reinterpret_cast<WordOf<T, N>*>(out + first + 32 * N * w) = rounded<T, N>(sum[w]);
                }
            }
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

    __device__ __forceinline__ void copy(const T* from, T* to) const {
        constexpr int AHEAD = 4;
        for (int first = threadIdx.x % 32 * N; first < width; first += 32 * N * AHEAD) {
            WordOf<T, N> loaded[AHEAD];
#pragma unroll
            for (int w = 0; w < AHEAD; w++) {
                if (first + 32 * N * w < width) loaded[w] = *reinterpret_cast<const WordOf<T, N>*>(from + first + 32 * N * w);
            }
#pragma unroll
            for (int w = 0; w < AHEAD; w++) {
                if (first + 32 * N * w < width) *reinterpret_cast<WordOf<T, N>*>(to + first + 32 * N * w) = loaded[w];
            }
        }
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

    // The sum of a token's rows, by a warp. False: given up.
    __device__ __forceinline__ bool sum(int64_t token) const {
        const int64_t lane = threadIdx.x % 32, ranks = p.call.ranks, rank = p.call.rank;
        const int32_t row = lane < ranks ? p.token_rows[token * ranks + lane] : -1;
        const int32_t own = __shfl_sync(~0u, row, static_cast<int>(rank));
        const int32_t slot = own >= 0 ? slot_of_lane(rank, own) : -1;
        if (!wait(row)) return false;
        if (p.in_k_order) sum_choices(token, slot);
        else sum_ranks(token, row, slot);
        if (p.out_weights != nullptr && lane < p.top_k) {
            const auto* arrived = reinterpret_cast<const float*>(block.zones[rank] + p.weights_at);
            float weight = 0.0f;
            if (slot >= 0) weight = p.weights != nullptr ? p.weights[slot] : 0.0f;
            else if (p.kept[token * p.top_k + lane] >= 0) weight = arrived[token * p.top_k + lane];
            p.out_weights[token * p.top_k + lane] = weight;
        }
        return true;
    }

    __device__ __forceinline__ void sum_ranks(int64_t token, int32_t row, int32_t slot) const {
        const int lane = threadIdx.x % 32, rank = static_cast<int>(p.call.rank);
        const T* own = row_at(slot);
        const T* arrived = reinterpret_cast<const T*>(block.zones[rank]) + row_of(lane, row) * width;
        const uint32_t slots = __ballot_sync(~0u, slot >= 0), all = __ballot_sync(~0u, row >= 0);
        const uint32_t lower = all & ((1u << rank) - 1), higher = all & ~((2u << rank) - 1);
        T* out = static_cast<T*>(p.out) + token * width;
        for (int at = 0; at < width; at += 32 * N * WORDS) {
            const int first = at + lane * N;
            float sum[WORDS][N] = {}, here[WORDS][N] = {};
            add_rows<T, N>(here, own, slots, first, width);
            add_rows<T, N>(sum, arrived, lower, first, width);
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (slots != 0) add<T, N>(sum[w], rounded<T, N>(here[w]));
            }
            add_rows<T, N>(sum, arrived, higher, first, width);
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (first + 32 * N * w < width) *reinterpret_cast<WordOf<T, N>*>(out + first + 32 * N * w) = rounded<T, N>(sum[w]);
            }
        }
    }

    __device__ __forceinline__ void sum_choices(int64_t token, int32_t slot) const {
        const int lane = threadIdx.x % 32;
        const bool kept = lane < p.top_k && p.kept[token * p.top_k + lane] >= 0;
        const T* arrived = reinterpret_cast<const T*>(block.zones[p.call.rank]) + (token * p.top_k + lane) * width;
        const T* from = slot >= 0 ? row_at(slot) : arrived;
        const uint32_t mask = __ballot_sync(~0u, kept);
        T* out = static_cast<T*>(p.out) + token * width;
        for (int at = 0; at < width; at += 32 * N * WORDS) {
            const int first = at + lane * N;
            float sum[WORDS][N] = {};
            add_rows<T, N>(sum, from, mask, first, width);
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (first + 32 * N * w < width) *reinterpret_cast<WordOf<T, N>*>(out + first + 32 * N * w) = rounded<T, N>(sum[w]);
            }
        }
    }

    __device__ __forceinline__ void run() const {
        const int lane = threadIdx.x % 32;
        const int64_t ranks = p.call.ranks, rank = p.call.rank;
        const int64_t *arrived = p.totals + ranks;
        int64_t most = p.tokens + p.lag;
        for (int64_t r = 0; r < ranks; r++) most = arrived[r] > most ? arrived[r] : most;
        auto* ticket = nvlink::words_of(p.call, rank) + NVLINK_TICKET;
        while (true) {
            nvlink::Word taken = 0;
            if (lane == 0) taken = atomicAdd(ticket, 1ull);
            taken = __shfl_sync(~0u, taken, 0);
            const int64_t i = static_cast<int64_t>(taken) / ranks, part = static_cast<int64_t>(taken) - i * ranks;
            if (i >= most) return;
            if (part + 1 < ranks) {
                const int64_t to = (rank + 1 + part) % ranks;
                if (i < arrived[to]) push(to, i);
            } else if (i >= p.lag && i - p.lag < p.tokens) {
                if (!sum(i - p.lag)) return;
            }
        }
    }
};

template <class T>
__device__ __forceinline__ void combine(const NvLinkCombineParams& p) {
    __shared__ nvlink::Block block;
    nvlink::start(p.call, block);
    if (!block.stopped) {
        if (p.word == 16) Combine<T, 16 / sizeof(T)>{p, block, static_cast<int>(p.width)}.run();
        else Combine<T, 1>{p, block, static_cast<int>(p.width)}.run();
    }
    nvlink::end(p.call, block);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) nvlink_combine_f32(const __grid_constant__ NvLinkCombineParams p) {
    combine<float>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) nvlink_combine_f16(const __grid_constant__ NvLinkCombineParams p) {
    combine<f16>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) nvlink_combine_bf16(const __grid_constant__ NvLinkCombineParams p) {
    combine<bf16>(p);
}
