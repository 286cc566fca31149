// Rows to other GPUs of the host by stores over NVLink (common/nvlink.cuh has the protocol).
//
//   sm90_nvlink_dispatch  tokens [T, row] -> to every rank that keeps a choice of the token, once, in the order of tokens:
//                         zone [R, max_tokens, row]. Weights [T, K] and scales [T, bytes] travel with their rows.
//
// A warp takes a token: it loads each word of the row once and stores it to every zone that wants it, this rank's own
// among them. Many warps with 16-byte stores reach the link's rate at any length of rows. Limited by the link's bytes,
// and on few SMs by the bytes that these have under way.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink.cuh"

namespace {

// Where a token's row goes: `mask` has a bit for each rank, and lane r holds the row in the message to rank r.
struct Targets {
    uint32_t mask;
    int32_t row;
};

template <class W, int UNROLL>
__device__ __forceinline__ void push_words(const W* from, int words, W* const* to, int targets) {
    const int lane = threadIdx.x % 32;
    for (int at = lane; at < words; at += 32 * UNROLL) {
        W values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (at + 32 * i < words) values[i] = from[at + 32 * i];
        }
        for (int target = 0; target < targets; target++) {
            W* out = to[target];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                if (at + 32 * i < words) out[at + 32 * i] = values[i];
            }
        }
    }
}

// One part of a token to all its targets, by a warp. `to`: the warp's own room for addresses.
__device__ __forceinline__ void push_part(const NvLinkDispatchParams& p, const NvLinkPart& part, int64_t token, Targets t,
                                          const nvlink::Block& block, uint8_t** to) {
    if (part.source == nullptr) return;
    const int lane = threadIdx.x % 32;
    // From the next rank on, so that ranks do not all begin with the same one.
    const int ranks = static_cast<int>(p.call.ranks), rank = static_cast<int>(p.call.rank);
    const int order = (lane - rank - 1 + 2 * ranks) % ranks;
    __syncwarp();
    if (t.mask >> lane & 1) {
        int before = 0;
        for (int r = 0; r < ranks; r++) before += (t.mask >> r & 1) && (r - rank - 1 + 2 * ranks) % ranks < order;
        to[before] = block.zones[lane] + part.at + (p.call.rank * p.max_tokens + t.row) * part.bytes;
    }
    __syncwarp();
    const uint8_t* from = static_cast<const uint8_t*>(part.source) + token * part.bytes;
    const int targets = __popc(t.mask), bytes = static_cast<int>(part.bytes);
    if (part.word == 16) push_words<uint4, 4>(reinterpret_cast<const uint4*>(from), bytes / 16, reinterpret_cast<uint4**>(to), targets);
    else if (part.word == 4) push_words<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from), bytes / 4, reinterpret_cast<uint32_t**>(to), targets);
    else if (part.word == 2) push_words<uint16_t, 4>(reinterpret_cast<const uint16_t*>(from), bytes / 2, reinterpret_cast<uint16_t**>(to), targets);
    else push_words<uint8_t, 4>(from, bytes, to, targets);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) sm90_nvlink_dispatch(const __grid_constant__ NvLinkDispatchParams p) {
    __shared__ nvlink::Block block;
    __shared__ uint8_t* to[NVLINK_THREADS / 32][NVLINK_RANKS];
    // A product of other rows may start on the SMs that this kernel leaves.
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
    nvlink::start(p.call, block);
    if (!block.stopped) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ranks = static_cast<int>(p.call.ranks);
        const int64_t step = static_cast<int64_t>(gridDim.x) * (NVLINK_THREADS / 32);
        // Blocks side by side take tokens side by side.
        for (int64_t token = static_cast<int64_t>(warp) * gridDim.x + blockIdx.x; token < p.tokens; token += step) {
            const int32_t row = lane < ranks ? p.token_rows[token * ranks + lane] : -1;
            const Targets targets{__ballot_sync(~0u, row >= 0), row};
            nvlink::delay(p.call, static_cast<uint32_t>(token) + 3);
            push_part(p, p.rows, token, targets, block, to[warp]);
            push_part(p, p.weights, token, targets, block, to[warp]);
            push_part(p, p.scales, token, targets, block, to[warp]);
        }
    }
    nvlink::end(p.call, block);
}
#endif
