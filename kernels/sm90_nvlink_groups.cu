// Tokens to other GPUs of the host as `sm90_nvlink_dispatch.cu` sends them, in the order in which the experts' products
// take them, while such a product runs (common/nvlink.cuh has the protocol).
//
//   sm90_nvlink_groups  tokens [T, row] -> to every rank that keeps a choice of the token, once, the rows of a rank's first
//                       experts first: zone [R, max_tokens, row], with weights and scales as there
//
// Each rank's experts are cut into groups of consecutive ones. A row belongs to the first group at its destination that
// has a choice of the token. A block sorts its share of tokens by groups, sends a group after the other, and when all of
// its rows of a group have been stored, its mark in each peer's control words says so. Block 0 of the receiver watches the
// marks of all ranks' blocks, and tells this GPU how many groups have come whole (NVLINK_ARRIVED): what a product behind
// this kernel, which starts while it runs, waits for before it reads a group's rows. The number is cleared before that
// product can start, and is that of all groups once the kernel has given up, so that the product always ends.
//
// Few blocks, which leave the other SMs to the product. Limited by the bytes that these have under way.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink.cuh"
#include "ptx/mbarrier_tma.cuh"

namespace {

constexpr int WARPS = NVLINK_THREADS / 32;
// Warps that send; behind them one that posts marks, and one that watches the peers'.
constexpr int SENDERS = WARPS - 2, POSTER = SENDERS, WATCHER = SENDERS + 1;
constexpr int BINS = NVLINK_GROUPS * NVLINK_RANKS;
// Marks of all ranks' blocks, some a lane.
constexpr int LANE_MARKS = NVLINK_RANKS * NVLINK_MARK_BLOCKS / 32;

struct Shared {
    nvlink::Block block;
    int ends[BINS];          // of rows by (group, destination): where each bin's begin, and behind the sort where they end
    uint64_t sent[NVLINK_GROUPS];
};

// Rows to send are numbered by token and destination.
__device__ __forceinline__ uint32_t item(int64_t token, int to) { return static_cast<uint32_t>(token) * NVLINK_RANKS + to; }

// A token's bin among those of a destination, the next rank's first and this one's own last, or -1.
__device__ __forceinline__ int bin_of(const NvLinkGroupsParams& p, int64_t token, int to) {
    const int ranks = static_cast<int>(p.sent.call.ranks), rank = static_cast<int>(p.sent.call.rank);
    const uint32_t experts = static_cast<uint32_t>(p.local_experts);
    uint32_t first = experts;
#pragma unroll 4
    for (int k = 0; k < static_cast<int>(p.top_k); k++) {
        // Of another rank's experts, and of none, it is larger than all of this one's.
        first = min(first, static_cast<uint32_t>(p.kept[token * p.top_k + k]) - to * experts);
    }
    if (p.sent.token_rows[token * ranks + to] < 0 || first == experts) return -1;
    const int order = (to - rank - 1 + 2 * ranks) % ranks;
    return static_cast<int>(first / static_cast<uint32_t>(p.group_experts)) * ranks + order;
}

// Sorts this block's tokens into `items`, by groups.
__device__ __forceinline__ void sort_rows(const NvLinkGroupsParams& p, Shared& s, uint32_t* items) {
    const int ranks = static_cast<int>(p.sent.call.ranks), bins = static_cast<int>(p.groups) * ranks;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.ends[i] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x + static_cast<int64_t>(threadIdx.x) * gridDim.x, step = static_cast<int64_t>(blockDim.x) * gridDim.x;
    for (int64_t token = first; token < p.sent.tokens; token += step) {
        for (int to = 0; to < ranks; to++) {
            const int bin = bin_of(p, token, to);
            if (bin >= 0) atomicAdd(&s.ends[bin], 1);
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        for (int at = 0; at < bins; at += 32) {
            const int i = at + static_cast<int>(threadIdx.x), own = i < bins ? s.ends[i] : 0;
            int sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, sum, d);
                if (static_cast<int>(threadIdx.x) >= d) sum += other;
            }
            if (i < bins) s.ends[i] = before + sum - own;
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
    // In any order within a bin: where a row goes does not depend on when.
    for (int64_t token = first; token < p.sent.tokens; token += step) {
        for (int to = 0; to < ranks; to++) {
            const int bin = bin_of(p, token, to);
            if (bin >= 0) items[atomicAdd(&s.ends[bin], 1)] = item(token, to);
        }
    }
    __syncthreads();
}

template <class W>
__device__ __forceinline__ void copy_words(const W* from, W* to, int words) {
    constexpr int UNROLL = 8;
    for (int at = threadIdx.x % 32; at < words; at += 32 * UNROLL) {
        W values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (at + 32 * i < words) values[i] = from[at + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (at + 32 * i < words) to[at + 32 * i] = values[i];
        }
    }
}

// A part of a row, by a warp.
__device__ __forceinline__ void send_part(const NvLinkPart& part, int64_t token, int64_t row, uint8_t* zone) {
    if (part.source == nullptr) return;
    const uint8_t* from = static_cast<const uint8_t*>(part.source) + token * part.bytes;
    uint8_t* to = zone + part.at + row * part.bytes;
    const int bytes = static_cast<int>(part.bytes);
    if (part.word == 16) copy_words(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), bytes / 16);
    else if (part.word == 4) copy_words(reinterpret_cast<const uint32_t*>(from), reinterpret_cast<uint32_t*>(to), bytes / 4);
    else if (part.word == 2) copy_words(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<uint16_t*>(to), bytes / 2);
    else copy_words(from, to, bytes);
}

// A warp's share of the block's rows, a group after the other.
__device__ __forceinline__ void send_rows(const NvLinkGroupsParams& p, Shared& s, const uint32_t* items, int warp) {
    const NvLinkDispatchParams& sent = p.sent;
    const int ranks = static_cast<int>(sent.call.ranks);
    int at = warp;
    for (int group = 0; group < p.groups; group++) {
        const int end = s.ends[(group + 1) * ranks - 1];
        for (; at < end; at += SENDERS) {
            const int64_t token = items[at] / NVLINK_RANKS;
            const int to = static_cast<int>(items[at] % NVLINK_RANKS);
            const int64_t row = sent.call.rank * sent.max_tokens + sent.token_rows[token * ranks + to];
            nvlink::delay(sent.call, items[at] + 7);
            send_part(sent.rows, token, row, s.block.zones[to]);
            send_part(sent.weights, token, row, s.block.zones[to]);
            send_part(sent.scales, token, row, s.block.zones[to]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&s.sent[group]));
    }
}

// Marks each group that all of the block's warps have sent, by a lane a rank.
__device__ __forceinline__ void post_marks(const NvLinkGroupsParams& p, Shared& s) {
    const NvLinkCall& c = p.sent.call;
    const int64_t to = threadIdx.x % 32;
    if (to >= c.ranks) return;
    nvlink::Word* mark = nvlink::words_of(c, to) + NVLINK_MARKS + c.rank * NVLINK_MARK_BLOCKS + blockIdx.x;
    const nvlink::Word epoch = s.block.epoch;
    for (int group = 0; group < p.groups; group++) {
        ptx::mbarrier_wait(ptx::smem_address(&s.sent[group]), 0);
        nvlink::delay(c, 3000 + group);
        // The other warps' stores come before the barrier, and so before the mark.
        nvlink::fence_system();
        nvlink::store_relaxed(mark, epoch << 32 | static_cast<nvlink::Word>(group + 1));
    }
}

__device__ __forceinline__ void tell_arrived(const NvLinkCall& c, nvlink::Word groups) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(nvlink::words_of(c, c.rank) + NVLINK_ARRIVED), "l"(groups) : "memory");
}

// Tells how many groups have come from all blocks of all ranks, as their marks tell. By a warp.
__device__ __forceinline__ void watch_marks(const NvLinkGroupsParams& p, const Shared& s) {
    const NvLinkCall& c = p.sent.call;
    const int lane = threadIdx.x % 32;
    const nvlink::Word* own = nvlink::words_of(c, c.rank);
    const uint32_t groups = static_cast<uint32_t>(p.groups);
    const nvlink::Word began = nvlink::nanoseconds();
    uint32_t told = 0;
    for (uint32_t polls = 1; told < groups; polls++) {
        uint32_t least = groups;
        int late = 0;
        nvlink::Word met = 0;
#pragma unroll
        for (int i = 0; i < LANE_MARKS; i++) {
            const int mark = i * 32 + lane, rank = mark / NVLINK_MARK_BLOCKS;
            if (rank >= c.ranks || mark % NVLINK_MARK_BLOCKS >= gridDim.x) continue;
            const nvlink::Word word = nvlink::load_relaxed(own + NVLINK_MARKS + mark);
            const uint32_t done = word >> 32 == s.block.epoch ? static_cast<uint32_t>(word) : 0;
            if (done < least) least = done, late = rank, met = word;
        }
        const uint32_t all = __reduce_min_sync(~0u, least);
        if (all > told) {
            told = all;
            // Acquires what every lane's marks released, and hands it on.
            nvlink::fence_system();
            __syncwarp();
            if (lane == 0) tell_arrived(c, told);
            continue;
        }
        if (polls % 64 != 0) continue;
        enum { GOES_ON, STOPPED, TOO_LATE };
        int state = GOES_ON;
        if (lane == 0) {
            if (nvlink::given_up(c) || (polls % 1024 == 0 && nvlink::host_stops(c))) state = STOPPED;
            else if (nvlink::nanoseconds() - began >= static_cast<nvlink::Word>(c.timeout)) state = TOO_LATE;
        }
        state = __shfl_sync(~0u, state, 0);
        if (state == GOES_ON) continue;
        const uint32_t latest = __ballot_sync(~0u, least == all);
        if (state == TOO_LATE && lane == __ffs(latest) - 1) nvlink::give_up(c, NVLINK_WAIT_MARK, late, s.block.epoch, met);
        break;
    }
    __syncwarp();
    if (lane == 0 && told < groups) tell_arrived(c, groups);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) sm90_nvlink_groups(const __grid_constant__ NvLinkGroupsParams p) {
    extern __shared__ uint32_t items[];
    __shared__ Shared s;
    const NvLinkCall& c = p.sent.call;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        tell_arrived(c, 0);
        __threadfence();
    }
    if (threadIdx.x < NVLINK_GROUPS) ptx::mbarrier_init(ptx::smem_address(&s.sent[threadIdx.x]), SENDERS);
    __syncthreads();
    // From here on the product may start, on the SMs that this kernel leaves.
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
    nvlink::start(c, s.block);
    if (!s.block.stopped) {
        sort_rows(p, s, items);
        if (warp < SENDERS) send_rows(p, s, items, warp);
        else if (warp == POSTER) post_marks(p, s);
        else if (blockIdx.x == 0) watch_marks(p, s);
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
        tell_arrived(c, p.groups);
    }
    nvlink::end(c, s.block);
}
#endif
