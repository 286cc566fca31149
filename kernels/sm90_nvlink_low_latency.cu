// Few rows to other GPUs of the host and back, by packets over NVLink (common/nvlink_low_latency.cuh has the protocol).
//
//   sm90_nvlink_low_latency_dispatch   tokens [T, row] -> to every rank that keeps a choice of the token, once:
//                                      [R, max_tokens, row], with weights and scales
//   sm90_nvlink_low_latency_combine_*  rows [N, width] -> [T, width]
//
// A warp takes 32 neighboring packets of a row. It sends all of its share first, and then looks for what comes: a block
// waits for no other of its grid, and as all blocks run at once, what a peer waits for is on its way. They do as long as
// nothing of another stream keeps some from starting, as the launch is not a cooperative one; then peers wait until that has
// ended, or for as long as the call allows. Sums are those of
// sm90_nvlink_combine.cu to the bit: of a row's slots here in f32, in the order of k, rounded; and of the ranks' sums in
// their order, in f32, rounded.
//
// Limited by latencies: a launch, the loads of maps and rows, a flight over the link; from some 64 tokens on by the link.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink_low_latency.cuh"

namespace {

using low_latency::Block;
using low_latency::WarpShare;

// A part of a row, cut into packets.
struct Part {
    const uint8_t* source;
    uint8_t* out;
    int bytes;
    int packets;
    int pieces;  // of a warp's work
    bool words;
};

__device__ __forceinline__ Part part_of(const NvLinkPart& p, void* out) {
    constexpr int PAYLOAD = PACKET_PAYLOAD;
    const int bytes = p.source == nullptr ? 0 : static_cast<int>(p.bytes), packets = (bytes + PAYLOAD - 1) / PAYLOAD;
    return {static_cast<const uint8_t*>(p.source), static_cast<uint8_t*>(out), bytes, packets, (packets + 31) / 32, p.word >= 4};
}

// The parts of a row behind each other.
struct Parts {
    Part rows, weights, scales;

    __device__ __forceinline__ int packets() const { return rows.packets + weights.packets + scales.packets; }
    __device__ __forceinline__ int pieces() const { return rows.pieces + weights.pieces + scales.pieces; }

    // The part of a piece, the piece's number there, and the part's first packet.
    __device__ __forceinline__ Part of(int& piece, int& first) const {
        first = 0;
        if (piece < rows.pieces) return rows;
        piece -= rows.pieces, first = rows.packets;
        if (piece < weights.pieces) return weights;
        piece -= weights.pieces, first += weights.packets;
        return scales;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(LOW_LATENCY_THREADS, LOW_LATENCY_BLOCKS) sm90_nvlink_low_latency_dispatch(const __grid_constant__ LowLatencyDispatchParams p) {
    __shared__ Block block;
    low_latency::start(p.call, block);
    const Parts parts{part_of(p.rows, p.out_rows), part_of(p.weights, p.out_weights), part_of(p.scales, p.out_scales)};
    const int rank = static_cast<int>(p.call.call.rank), ranks = static_cast<int>(p.call.call.ranks), lane = threadIdx.x % 32;
    const int packets = parts.packets(), pieces = parts.pieces(), tokens = static_cast<int>(p.tokens), max_tokens = static_cast<int>(p.max_tokens);
    const uint32_t tag = block.epoch << 16;
    if (!block.stopped) {
        WarpShare sent;
        for (int i = 1; i < ranks; i++) {
            const int to = (rank + i) % ranks;
            uint4* area = low_latency::area_of(p.call, block.epoch, to, rank);
            sent.of(!low_latency::is_absent(block, to), tokens * pieces, [&](int entry) {
                const int token = entry / pieces, row = p.token_rows[token * ranks + to];
                if (row < 0) return;
                int piece = entry - token * pieces, first;
                const Part part = parts.of(piece, first);
                const int j = piece * 32 + lane;
                if (j >= part.packets) return;
                uint4 v = low_latency::row_payload(part.source + static_cast<int64_t>(token) * part.bytes, j, part.bytes, part.words);
                v.w |= tag;
                low_latency::store_packet(area + row * packets + first + j, v);
            });
        }
        WarpShare received;
        for (int i = 0; i < ranks; i++) {
            // This rank's own rows while others' are on their way.
            const int from = (rank + i) % ranks;
            const uint4* area = low_latency::area_of(p.call, block.epoch, rank, from);
            received.of(!low_latency::is_absent(block, from), static_cast<int>(p.arrived[from]) * pieces, [&](int entry) {
                const int row = entry / pieces;
                int piece = entry - row * pieces, first;
                const Part part = parts.of(piece, first);
                const int j = piece * 32 + lane;
                uint4 v{};
                bool whole = true;
                if (j >= part.packets) {
                } else if (from == rank) {
                    const int token = p.row_tokens[rank * max_tokens + row];
                    v = low_latency::row_payload(part.source + static_cast<int64_t>(token) * part.bytes, j, part.bytes, part.words);
                } else {
                    whole = low_latency::wait_for_packet(p.call, block, area + row * packets + first + j, from, v);
                }
                if (__all_sync(~0u, whole)) low_latency::store_payload(part.out + static_cast<int64_t>(from * max_tokens + row) * part.bytes, j, part.bytes, part.words, v);
            });
        }
        low_latency::sweep(p.call, block, [&](int64_t from) { return p.arrived[from] * packets; });
    }
    low_latency::end(p.call, block);
}

namespace {

// Elements of a packet: 7 of 16 bits, 3 of 32.
template <class T>
constexpr int ELEMENTS = sizeof(T) == 4 ? 3 : 7;

template <class T>
__device__ __forceinline__ uint4 element_payload(const T* row, int j, int width, bool words) {
    if constexpr (sizeof(T) == 4) {
        uint32_t w[3];
#pragma unroll
        for (int i = 0; i < 3; i++) w[i] = 3 * j + i < width ? __float_as_uint(row[3 * j + i]) : 0;
        return {w[0], w[1], w[2], 0};
    } else {
        return low_latency::row_payload(reinterpret_cast<const uint8_t*>(row), j, width * 2, words);
    }
}

template <class T>
__device__ __forceinline__ void add(float (&sum)[ELEMENTS<T>], const uint4& v) {
    T elements[16 / sizeof(T)];
    memcpy(elements, &v, sizeof v);
#pragma unroll
    for (int i = 0; i < ELEMENTS<T>; i++) sum[i] += to_float(elements[i]);
}

template <class T>
__device__ __forceinline__ uint4 rounded(const float (&sum)[ELEMENTS<T>]) {
    T elements[16 / sizeof(T)] = {};
#pragma unroll
    for (int i = 0; i < ELEMENTS<T>; i++) elements[i] = from_float<T>(sum[i]);
    uint4 v;
    memcpy(&v, elements, sizeof v);
    return v;
}

// The sum of a row's slots, rounded, by a warp: of the elements of packet j.
template <class T>
__device__ __forceinline__ uint4 slot_sum(const LowLatencyCombineParams& p, int from, int row, int j, bool words) {
    constexpr int SIDE = 4;  // slots whose loads are under way together
    const int lane = threadIdx.x % 32;
    const int slot = lane < p.top_k ? p.row_slots[(static_cast<int64_t>(from) * p.max_tokens + row) * p.top_k + lane] : -1;
    uint32_t left = __ballot_sync(~0u, slot >= 0 && slot < p.slots);
    const T* rows = static_cast<const T*>(p.rows);
    float sum[ELEMENTS<T>] = {};
    while (left != 0) {
        uint4 v[SIDE];
        uint32_t taken = left;
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            const int at = __shfl_sync(~0u, slot, taken == 0 ? 0 : __ffs(taken) - 1);
            if (taken != 0) v[i] = element_payload(rows + at * p.width, j, static_cast<int>(p.width), words);
            taken &= taken - 1;
        }
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            if (left != 0) add<T>(sum, v[i]);
            left &= left - 1;
        }
    }
    return rounded<T>(sum);
}

// How many of this rank's tokens have a row that comes back from a rank: rows are numbered in the tokens' order. By a warp.
__device__ __forceinline__ int64_t rows_back(const LowLatencyCombineParams& p, int64_t from) {
    const int lane = threadIdx.x % 32;
    for (int64_t end = p.tokens; end > 0; end -= 32) {
        const int64_t token = end - 32 + lane;
        const int row = token >= 0 ? p.token_rows[token * p.call.call.ranks + from] : -1;
        const uint32_t has = __ballot_sync(~0u, row >= 0);
        if (has != 0) return __shfl_sync(~0u, row, 31 - __clz(has)) + 1;
    }
    return 0;
}

template <class T>
__device__ __forceinline__ void combine(const LowLatencyCombineParams& p) {
    __shared__ Block block;
    low_latency::start(p.call, block);
    const int rank = static_cast<int>(p.call.call.rank), ranks = static_cast<int>(p.call.call.ranks), lane = threadIdx.x % 32;
    const int width = static_cast<int>(p.width), tokens = static_cast<int>(p.tokens);
    const int packets = (width + ELEMENTS<T> - 1) / ELEMENTS<T>, pieces = (packets + 31) / 32;
    const uint32_t tag = block.epoch << 16;
    const bool words = width * sizeof(T) % 4 == 0 && (reinterpret_cast<uint64_t>(p.rows) | reinterpret_cast<uint64_t>(p.out)) % 4 == 0;
    T* out = static_cast<T*>(p.out);
    if (!block.stopped) {
        WarpShare sent;
        for (int i = 1; i < ranks; i++) {
            const int to = (rank + i) % ranks;
            uint4* area = low_latency::area_of(p.call, block.epoch, to, rank);
            sent.of(!low_latency::is_absent(block, to), static_cast<int>(p.arrived[to]) * pieces, [&](int entry) {
                const int row = entry / pieces, j = (entry - row * pieces) * 32 + lane;
                uint4 v = slot_sum<T>(p, to, row, j, words);
                v.w |= tag;
                if (j < packets) low_latency::store_packet(area + row * packets + j, v);
            });
        }
        // While rows are on their way.
        low_latency::sweep(p.call, block, [&](int64_t from) { return rows_back(p, from) * packets; });
        WarpShare summed;
        summed.of(true, tokens * pieces, [&](int entry) {
            const int token = entry / pieces, j = (entry - token * pieces) * 32 + lane;
            const int row_of = lane < ranks ? p.token_rows[token * ranks + lane] : -1;
            const int own = __shfl_sync(~0u, row_of, rank);
            // Before what has yet to come.
            const uint4 here = own < 0 ? uint4{} : slot_sum<T>(p, rank, own, j, words);
            float sum[ELEMENTS<T>] = {};
            for (int from = 0; from < ranks; from++) {
                const int row = __shfl_sync(~0u, row_of, from);
                if (row < 0 || low_latency::is_absent(block, from)) continue;
                uint4 v = here;
                bool whole = true;
                if (from != rank && j < packets) {
                    whole = low_latency::wait_for_packet(p.call, block, low_latency::area_of(p.call, block.epoch, rank, from) + row * packets + j, from, v);
                }
                if (__all_sync(~0u, whole)) add<T>(sum, v);
            }
            const uint4 v = rounded<T>(sum);
            T* to = out + static_cast<int64_t>(token) * width;
            if constexpr (sizeof(T) == 4) {
                const uint32_t w[3] = {v.x, v.y, v.z};
#pragma unroll
                for (int e = 0; e < 3; e++) {
                    if (3 * j + e < width) to[3 * j + e] = __uint_as_float(w[e]);
                }
            } else {
                low_latency::store_payload(reinterpret_cast<uint8_t*>(to), j, width * 2, words, v);
            }
        });
    }
    low_latency::end(p.call, block);
}

}  // namespace

#define LOW_LATENCY_COMBINE(name, type)                                                                                      \
    extern "C" __global__ void __launch_bounds__(LOW_LATENCY_THREADS, LOW_LATENCY_BLOCKS)                                    \
        sm90_nvlink_low_latency_combine_##name(const __grid_constant__ LowLatencyCombineParams p) {                          \
        combine<type>(p);                                                                                                    \
    }
LOW_LATENCY_COMBINE(f32, float)
LOW_LATENCY_COMBINE(f16, f16)
LOW_LATENCY_COMBINE(bf16, bf16)
#endif
