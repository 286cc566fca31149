// Prepare over NVLink (common/nvlink.cuh has the protocol): the ranks' records, and the plan from them, in one kernel.
//
//   sm90_nvlink_exchange  a record of each rank -> all ranks' [R, bytes]
//   sm90_nvlink_plan      ids [T, K] -> segments of the L local experts, kept ids [T, K], maps of the N slots and of zones
//
// What `record_ids`, the exchange, and the kernels of routing_records.cu and all_to_all_plan.cu do one after another, with
// the same results. Each block plans a run of tokens of all ranks' and holds their choices in shared memory. The grid meets
// twice: when blocks have counted their choices of each expert, and when they have counted the rows of each message. Between
// the two every block adds up what the blocks before it have counted and lays out all segments for itself.
//
// Nothing is numbered by the order of threads: a choice's number is that of the blocks before, of the warps before and of
// the lanes before. Where a call has been given up, a block goes on with no choices at all, so that the maps name nothing.
//
// Limited by latencies: a launch, fences at the scope of the system, a flight over the link, the grid's meetings. Blocks
// wait for each other, so the launch is one that has all of them run at once.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink.cuh"
#include "common/record_steps.cuh"

namespace {

constexpr int WARPS = NVLINK_THREADS / 32;
constexpr int TALLIES = 2 * NVLINK_RANKS + 1;

// The block's choices as their experts.
struct HeldChoices {
    const int32_t* experts;
    __device__ __forceinline__ int64_t id(int64_t i) const { return experts[i]; }
    __device__ __forceinline__ int expert(int64_t, int64_t id, int64_t) const { return static_cast<int>(id); }
};

// What a block holds in shared memory; all behind each other, numbers of 8 bytes first (src/cuda/nvlink_plan.rs counts
// them).
struct Held {
    RecordsPlanParams plan;  // with segments and statistics in shared memory
    int32_t* before;         // [E]: choices of each expert in the blocks before
    int32_t* totals;         // [E]: in all
    int32_t* counts;         // [WARPS, E]: in the block's warps before
    int32_t* experts;        // [choices], or -1: nobody's; once slots are known: where it is not kept
    int32_t* slots;          // [choices], or -1
    int32_t* rows;           // [tokens]: the row of the token's message to this rank, where it has one
    int32_t* goes;           // [tokens]: a bit for each rank that keeps a choice
};

// A block's part of all ranks' tokens.
struct Run {
    int64_t first;  // token
    int tokens;
    int choices;
};

__device__ __forceinline__ Run run_of(const NvLinkPlanParams& p) {
    const int64_t first = blockIdx.x * p.block_tokens, all = p.plan.ranks * p.plan.max_tokens, left = all - first;
    const int tokens = static_cast<int>(left < 0 ? 0 : left < p.block_tokens ? left : p.block_tokens);
    return {first, tokens, tokens * static_cast<int>(p.plan.top_k)};
}

__device__ __forceinline__ Held hold(const NvLinkPlanParams& p, uint32_t epoch) {
    extern __shared__ int64_t memory[];
    Held h{p.plan};
    const int64_t experts = p.plan.experts, locals = experts / p.plan.ranks;
    h.plan.records = nvlink::record_at(p.call, p.bank, epoch, p.call.rank, 0, 0);
    int64_t* at = memory;
    h.plan.stats = at, at += experts + locals + 5 + 3 * p.plan.ranks;
    h.plan.scratch = at, at += 3 * experts;
    h.plan.offsets = at, at += locals;
    h.plan.counts = at, at += locals;
    auto* words = reinterpret_cast<int32_t*>(at);
    const int64_t choices = p.block_tokens * p.plan.top_k;
    h.before = words, words += experts;
    h.totals = words, words += experts;
    h.counts = words, words += WARPS * experts;
    h.experts = words, words += choices;
    h.slots = words, words += choices;
    h.rows = words, words += p.block_tokens;
    h.goes = words;
    return h;
}

// Where slots lie that nobody fills.
__device__ __forceinline__ void clear_maps(const NvLinkPlanParams& p) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.map_rows; i += step) p.plan.row_map[i] = p.plan.weight_map[i] = -1;
}

// This rank's record to all ranks.
__device__ __forceinline__ void send_record(const NvLinkPlanParams& p, nvlink::Block& block) {
    __shared__ unsigned long long header[HEADER_WORDS];
    const int64_t rank = p.call.rank, ranks = p.call.ranks, size = p.plan.size;
    auto record_of = [&](int64_t at) { return reinterpret_cast<uint32_t*>(nvlink::record_at(p.call, p.bank, block.epoch, at, rank, size)); };
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.record.choices && !block.stopped; i += step) {
        const auto id = static_cast<uint32_t>(recorded_id(p.record, i));
        for (int64_t r = 0; r < ranks; r++) record_of(r)[HEADER_BYTES / 4 + i] = id;
    }
    if (p.maps) clear_maps(p);
    nvlink::end_records(p.call, block, [&]() {
        write_header(p.record, header);
        __syncthreads();
        for (int64_t i = threadIdx.x; i < ranks * 2 * HEADER_WORDS; i += blockDim.x) {
            const int64_t r = i / (2 * HEADER_WORDS), word = i - r * 2 * HEADER_WORDS;
            record_of(r)[word] = reinterpret_cast<const uint32_t*>(header)[word];
        }
    });
}

// The block's choices, and how many of each expert its warps before have; the block's counts go to all blocks.
__device__ __forceinline__ void count_choices(const NvLinkPlanParams& p, const Held& h, Run run, bool stopped) {
    const int experts = static_cast<int>(p.plan.experts), warp = threadIdx.x / 32;
    const RecordedChoices recorded{h.plan};
    for (int i = threadIdx.x; i < WARPS * experts; i += blockDim.x) h.counts[i] = 0;
    for (int i = threadIdx.x; i < run.choices; i += blockDim.x) {
        const int64_t choice = run.first * p.plan.top_k + i, id = stopped ? -1 : recorded.id(choice);
        h.experts[i] = recorded.expert(choice, id, 0);
    }
    __syncthreads();
    const int each = (run.choices + NVLINK_THREADS - 1) / NVLINK_THREADS * 32, first = warp * each;
    const int last = first + each < run.choices ? first + each : run.choices;
    for_each_choice(HeldChoices{h.experts}, first, last, h.counts + warp * experts, [](int64_t, int, int) {});
    __syncthreads();
    const int padded = (experts + 3) / 4 * 4;
    for (int e = threadIdx.x; e < padded; e += blockDim.x) {
        int32_t all = 0;
        for (int w = 0; w < WARPS && e < experts; w++) {
            const int32_t here = h.counts[w * experts + e];
            h.counts[w * experts + e] = all;
            all += here;
        }
        p.counts[static_cast<int64_t>(blockIdx.x) * padded + e] = static_cast<uint16_t>(all);
    }
}

// Adds up what all blocks have counted, and those before this one.
__device__ __forceinline__ void add_counts(const NvLinkPlanParams& p, const Held& h) {
    const int experts = static_cast<int>(p.plan.experts), quads = (experts + 3) / 4;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) h.before[e] = h.totals[e] = 0;
    __syncthreads();
    const int together = quads < static_cast<int>(NVLINK_THREADS) ? static_cast<int>(NVLINK_THREADS) / quads : 1;
    const auto* counts = reinterpret_cast<const uint2*>(p.counts);
    for (int i = threadIdx.x; i < together * quads; i += blockDim.x) {
        const int quad = i % quads;
        int32_t all[4] = {}, before[4] = {};
#pragma unroll 4
        for (int b = i / quads; b < static_cast<int>(gridDim.x); b += together) {
            const uint2 four = __ldcg(counts + static_cast<int64_t>(b) * quads + quad);
            const uint32_t here[4] = {four.x & 0xffff, four.x >> 16, four.y & 0xffff, four.y >> 16};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                all[j] += here[j];
                if (b < static_cast<int>(blockIdx.x)) before[j] += here[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (quad * 4 + j >= experts) break;
            atomicAdd(h.totals + quad * 4 + j, all[j]);
            atomicAdd(h.before + quad * 4 + j, before[j]);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) h.plan.stats[e] = h.totals[e];
    __syncthreads();
}

// The segments of all ranks' experts, in shared memory; the first block tells what is wrong. Returns whether the ranks'
// specs differ: so do their plans then, and none would find the rows of another, so nothing travels. Where the call has
// been given up, records may be those of an earlier call, or none: nothing is wrong with them then.
__device__ __forceinline__ bool lay_out(const NvLinkPlanParams& p, Held& h, bool stopped) {
    const HeadersFound found = stopped ? HeadersFound{} : examine_headers(h.plan);
    const bool tells = blockIdx.x == 0 && p.exchange && !stopped;
    if (tells) keep_headers(h.plan, found);
    else h.plan.may_drop = 1;
    __syncthreads();
    layout_segments(h.plan);
    if (threadIdx.x == 0) h.plan.stats[p.plan.experts + p.plan.experts / p.plan.ranks + 2] = found.troubled;
    __syncthreads();
    return found.troubled;
}

// Segments and statistics for all, by the first block.
__device__ __forceinline__ void write_segments(const NvLinkPlanParams& p, const Held& h) {
    const int64_t experts = p.plan.experts, locals = experts / p.plan.ranks, stats = experts + locals + 5 + 3 * p.plan.ranks;
    for (int64_t i = threadIdx.x; i < stats + 4 * p.plan.ranks; i += blockDim.x) p.plan.stats[i] = i < stats ? h.plan.stats[i] : 0;
    for (int64_t i = threadIdx.x; i < locals; i += blockDim.x) p.plan.offsets[i] = h.plan.offsets[i], p.plan.counts[i] = h.plan.counts[i];
}

// Slots of the block's choices, and which of this rank's are kept; returns to each thread how many of its are dropped.
__device__ __forceinline__ int number_slots(const NvLinkPlanParams& p, const Held& h, Run run) {
    const int experts = static_cast<int>(p.plan.experts), warp = threadIdx.x / 32;
    const int64_t *starts = h.plan.scratch + experts, *keeps = h.plan.scratch + 2 * experts;
    const int each = (run.choices + NVLINK_THREADS - 1) / NVLINK_THREADS * 32, first = warp * each;
    const int last = first + each < run.choices ? first + each : run.choices;
    int dropped = 0;
    for_each_choice(HeldChoices{h.experts}, first, last, h.counts + warp * experts, [&](int64_t i, int e, int inside) {
        const int64_t number = e >= 0 ? h.before[e] + inside : 0;
        const int64_t slot = e >= 0 && number < keeps[e] ? starts[e] + number : -1;
        h.slots[i] = static_cast<int32_t>(slot);
        const ChoiceOrigin at = origin_of(p.plan, run.first * p.plan.top_k + i);
        if (at.rank != p.plan.rank || at.choice >= p.plan.tokens * p.plan.top_k) return;
        p.plan.kept[at.choice] = slot >= 0 ? e : -1;
        dropped += e >= 0 && slot < 0;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < run.choices; i += blockDim.x) {
        if (h.slots[i] < 0) h.experts[i] = -1;
    }
    __syncthreads();
    return dropped;
}

// A token's rank, and its number there.
struct TokenPlace {
    int64_t source, token;
};
__device__ __forceinline__ TokenPlace place_of(const NvLinkPlanParams& p, int64_t token) {
    const uint32_t at = static_cast<uint32_t>(token), each = static_cast<uint32_t>(p.plan.max_tokens), source = at / each;
    return {source, at - source * each};
}

// Which ranks keep a choice of each token.
__device__ __forceinline__ void find_ranks(const NvLinkPlanParams& p, const Held& h, Run run, bool troubled) {
    const int k = static_cast<int>(p.plan.top_k), locals = static_cast<int>(p.plan.experts / p.plan.ranks);
    for (int t = threadIdx.x; t < run.tokens; t += blockDim.x) {
        int goes = 0;
        for (int c = 0; c < k && !troubled; c++) {
            const int e = h.experts[t * k + c];
            if (e >= 0) goes |= 1 << e / locals;
        }
        h.goes[t] = goes;
    }
    __syncthreads();
}

// Visits the tokens of the block's warps, 32 at a time: `visit(token, place, message, number)` for each message that a
// token's row is in, with the rows of that message before it in `counts`, which it raises: first those to this rank, by
// source, then those from it, by destination.
template <class Visit>
__device__ __forceinline__ void for_each_row(const NvLinkPlanParams& p, const Held& h, Run run, int32_t* counts, Visit&& visit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ranks = static_cast<int>(p.plan.ranks);
    const int each = (run.tokens + NVLINK_THREADS - 1) / NVLINK_THREADS * 32, first = warp * each;
    for (int at = first; at < first + each && at < run.tokens; at += 32) {
        const int t = at + lane;
        const bool real = t < run.tokens;
        const TokenPlace place = place_of(p, run.first + t);
        const int goes = real ? h.goes[t] : 0;
        for (int m = 0; m < 2 * ranks; m++) {
            const bool in = m < ranks;
            const bool travels = in ? place.source == m && (goes >> p.plan.rank & 1) : place.source == p.plan.rank && (goes >> (m - ranks) & 1);
            const uint32_t all = __ballot_sync(~0u, travels);
            if (real) visit(t, place, m, travels ? counts[m] + __popc(all & ((1u << lane) - 1)) : -1);
            __syncwarp();
            if (lane == 0) counts[m] += __popc(all);
            __syncwarp();
        }
    }
}

// Counts of messages' rows in the warps and blocks before, by each warp.
struct RowCounts {
    int32_t warps[WARPS][TALLIES];
    int32_t before[TALLIES], all[TALLIES];
};

__device__ __forceinline__ void count_rows(const NvLinkPlanParams& p, const Held& h, Run run, int dropped, RowCounts& rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kinds = 2 * static_cast<int>(p.plan.ranks) + 1;
    for (int m = lane; m < TALLIES; m += 32) rows.warps[warp][m] = 0;
    if (threadIdx.x < TALLIES) rows.before[threadIdx.x] = rows.all[threadIdx.x] = 0;
    __syncwarp();
    for_each_row(p, h, run, rows.warps[warp], [](int, TokenPlace, int, int) {});
    dropped = __reduce_add_sync(~0u, dropped);
    if (lane == 0) rows.warps[warp][kinds - 1] = dropped;
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= kinds) return;
    int32_t all = 0;
    for (int w = 0; w < WARPS; w++) {
        const int32_t here = rows.warps[w][threadIdx.x];
        rows.warps[w][threadIdx.x] = all;
        all += here;
    }
    p.tallies[static_cast<int64_t>(blockIdx.x) * kinds + threadIdx.x] = all;
}

__device__ __forceinline__ void add_rows(const NvLinkPlanParams& p, RowCounts& rows) {
    const int kinds = 2 * static_cast<int>(p.plan.ranks) + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane < kinds) {
        int32_t all = 0, before = 0;
        for (int b = warp; b < static_cast<int>(gridDim.x); b += WARPS) {
            const int32_t here = __ldcg(p.tallies + static_cast<int64_t>(b) * kinds + lane);
            all += here;
            if (b < static_cast<int>(blockIdx.x)) before += here;
        }
        atomicAdd(rows.all + lane, all);
        atomicAdd(rows.before + lane, before);
    }
    __syncthreads();
    if (lane < kinds) rows.warps[warp][lane] += rows.before[lane];
    __syncwarp();
}

// Maps of the block's tokens and choices.
__device__ __forceinline__ void write_maps(const NvLinkPlanParams& p, const Held& h, Run run, RowCounts& rows) {
    const int ranks = static_cast<int>(p.plan.ranks), k = static_cast<int>(p.plan.top_k), locals = static_cast<int>(p.plan.experts / ranks);
    for_each_row(p, h, run, rows.warps[threadIdx.x / 32], [&](int t, TokenPlace place, int message, int row) {
        if (message < ranks) {
            if (row < 0) return;
            h.rows[t] = row;
            p.plan.row_tokens[place.source * p.plan.padded_tokens + row] = static_cast<int32_t>(place.token);
        } else if (place.source == p.plan.rank && place.token < p.plan.tokens) {
            p.plan.token_rows[place.token * ranks + message - ranks] = row;
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < run.choices; i += blockDim.x) {
        const int t = i / k, c = i - t * k;
        if ((h.goes[t] >> p.plan.rank & 1) == 0) continue;
        const int64_t arrived = place_of(p, run.first + t).source * p.plan.padded_tokens + h.rows[t];
        const bool here = h.experts[i] >= 0 && h.experts[i] / locals == p.plan.rank;
        const int32_t slot = here ? h.slots[i] : -1;
        p.plan.row_slots[arrived * k + c] = slot;
        if (!here) continue;
        p.plan.row_map[slot] = static_cast<int32_t>(arrived);
        p.plan.weight_map[slot] = static_cast<int32_t>(arrived * k + c);
    }
}

// All ranks' records out of their bank, by all blocks.
__device__ __forceinline__ void copy_records(const uint8_t* bank, void* out, int64_t bytes) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    const auto* from = reinterpret_cast<const uint32_t*>(bank);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes / 4; i += step) static_cast<uint32_t*>(out)[i] = from[i];
}

// In their place where the call has been given up, as the bank may hold records of an earlier call then: records of no
// tokens with this rank's spec, of which there is nothing to tell but what this rank's own tells.
__device__ __forceinline__ void write_empty_records(const NvLinkExchangeParams& p) {
    const int64_t words = p.bytes / 4, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    const auto* own = static_cast<const uint32_t*>(p.source);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.call.ranks * words; i += step) {
        const int64_t rank = i / words, at = i - rank * words, word = at / 2;
        const bool empty = word == TOKENS || (rank != p.call.rank && (word == KIND || word == PENDING));
        static_cast<uint32_t*>(p.out)[i] = at >= HEADER_BYTES / 4 ? ~0u : empty ? 0 : own[at];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) sm90_nvlink_exchange(const __grid_constant__ NvLinkExchangeParams p) {
    __shared__ nvlink::Block block;
    nvlink::enter(p.call, block);
    const int64_t words = p.bytes / 4, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const auto* from = static_cast<const uint32_t*>(p.source);
    for (int64_t r = 0; r < p.call.ranks && !block.stopped; r++) {
        auto* to = reinterpret_cast<uint32_t*>(nvlink::record_at(p.call, p.bank, block.epoch, r, p.call.rank, p.bytes));
        for (int64_t i = first; i < words; i += step) to[i] = from[i];
    }
    nvlink::end_records(p.call, block, []() {});
    if (block.stopped) write_empty_records(p);
    else copy_records(nvlink::record_at(p.call, p.bank, block.epoch, p.call.rank, 0, 0), p.out, p.call.ranks * p.bytes);
}

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) sm90_nvlink_plan(const __grid_constant__ NvLinkPlanParams p) {
    __shared__ nvlink::Block block;
    __shared__ RowCounts rows;
    nvlink::enter(p.call, block);
    if (p.exchange) {
        send_record(p, block);
    } else {
        // The last call's; it may have been given up.
        if (threadIdx.x == 0) block.epoch = static_cast<uint32_t>(nvlink::words_of(p.call, p.call.rank)[NVLINK_EPOCH]);
        clear_maps(p);
        __syncthreads();
    }
    const Run run = run_of(p);
    Held h = hold(p, block.epoch);
    count_choices(p, h, run, block.stopped);
    nvlink::grid_sync(p.call);
    add_counts(p, h);
    const bool troubled = lay_out(p, h, block.stopped);
    if (!p.maps) {
        if (blockIdx.x == 0) write_segments(p, h);
        if (p.records != nullptr) copy_records(h.plan.records, p.records, p.plan.ranks * p.plan.size);
        return;
    }
    const int dropped = number_slots(p, h, run);
    find_ranks(p, h, run, troubled);
    count_rows(p, h, run, dropped, rows);
    nvlink::grid_sync(p.call);
    add_rows(p, rows);
    write_maps(p, h, run, rows);
    if (blockIdx.x != 0) return;
    if (threadIdx.x < p.plan.ranks) p.plan.arrived[threadIdx.x] = rows.all[threadIdx.x];
    if (threadIdx.x == 0) h.plan.stats[p.plan.experts + p.plan.experts / p.plan.ranks + 1] = rows.all[2 * p.plan.ranks];
    __syncthreads();
    write_segments(p, h);
    copy_status(p.call.fault, p.report, STATUS_WORDS);
}
#endif
