// The ranks' records of a prepare by packets, with patience (common/nvlink_low_latency.cuh has the protocol).
//
//   sm90_nvlink_low_latency_exchange  a record of each rank -> all ranks' [R, bytes]
//
// A call in which ranks that were absent are taken in again, and others left. Each rank says in its header which ranks it
// goes on with, and two go on together where both say so. A rank counts on another that it had in its last call; on one whose
// last call is as far as its own, or that has come to the last prepare; and on one that waits to come back to a prepare of this
// layer.
//
// A rank that finds the others calls ahead was absent there. It asks them to wait for it at this layer, waits for the next
// header of such a call that counts on it, and takes over its epoch: so it enters the same step of the same layer. Where
// nobody comes it goes on alone, and sends nothing to those that are past its call. What it had not stored of the last call
// in which it has sent when it stalled may have come to the others a moment ago. Where the tag of that call is about to come
// again it does not ask, and goes on alone without waiting; what lies in its own memory is cleared, or tells it to count on
// nobody (common/nvlink_low_latency.cuh says when).
//
// The record of a rank that does not come is this rank's own without tokens. By one block. Limited by latencies: a launch and
// a flight over the link.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink_low_latency.cuh"
#include "common/record_layout.h"

namespace {

using low_latency::Block;
using low_latency::control_of;
using low_latency::header_of;
using low_latency::is_later;
using nvlink::Word;

// The header of the last call that a rank has come to.
__device__ __forceinline__ uint4 last_header(const LowLatencyCall& c, int64_t from) {
    const uint4 even = low_latency::load_packet(header_of(c, 0, c.call.rank, from)), odd = low_latency::load_packet(header_of(c, 1, c.call.rank, from));
    return is_later(odd.x, even.x) ? odd : even;
}

__device__ __forceinline__ bool in_time(const LowLatencyCall& c, Word start) { return nvlink::nanoseconds() - start < static_cast<Word>(c.patience); }

// Whether a call's tag does not come within so many calls from another on.
__device__ __forceinline__ bool has_passed(uint32_t call, uint32_t from, uint32_t calls) { return (call - from) % 0x10000 >= calls; }

// The last call in which this rank may have sent to another. `ended`: the last that it has ended.
__device__ __forceinline__ uint32_t last_sent(const LowLatencyCall& c, const Block& block, uint32_t ended, int64_t to) {
    return low_latency::is_absent(block, to) ? static_cast<uint32_t>(control_of(c, c.call.rank)[LOW_LATENCY_SENT + to]) : ended;
}

// Where peers are ahead, waits until one of them counts on this rank at this layer, and takes over its epoch. By one thread.
// Returns the peers that were ahead.
__device__ __noinline__ uint32_t come_back(const LowLatencyCall& c, Block& block, uint32_t layer, uint32_t ended) {
    uint32_t ahead = 0, latest = block.epoch, seen[NVLINK_RANKS];
    int64_t first = 0;  // of those that are ahead
    for (int64_t r = 0; r < c.call.ranks; r++) {
        if (r == c.call.rank) continue;
        seen[r] = last_header(c, r).x;
        if (is_later(seen[r], block.epoch)) ahead |= 1u << r;
        if (is_later(seen[r], latest)) latest = seen[r], first = r;
    }
    // As many calls more than it takes to count on it, as they go on until both meet.
    if (ahead == 0 || !has_passed(last_sent(c, block, ended, first), latest, 4 * low_latency::SWEEPS)) return ahead;
    auto ask = [&](Word word) {
        for (int64_t r = 0; r < c.call.ranks; r++) nvlink::store_relaxed(control_of(c, r) + LOW_LATENCY_RETURNS + c.call.rank, word);
    };
    ask(layer);
    uint32_t met = 0;
    for (uint32_t polls = 1; met == 0 && in_time(c, block.start); polls++) {
        for (int64_t r = 0; r < c.call.ranks; r++) {
            if ((ahead >> r & 1) == 0) continue;
            const uint4 header = last_header(c, r);
            // Who says so for the first time waits for this rank, whether others of the same call have seen it ask or not.
            if (is_later(header.x, seen[r]) && header.z == layer && (header.y >> c.call.rank & 1)) met = header.x;
        }
        if (polls % 1024 == 0 && nvlink::host_stops(c.call)) break;
    }
    ask(0);
    if (met != 0) block.epoch = met;
    return ahead;
}

// Keeps the headers of a rank that does not come any more within half a round of epochs of this one's, past which they would
// count as ahead. One that comes back just then loses a header, and is met a step later.
__device__ __forceinline__ void renew_headers(const LowLatencyCall& c, uint32_t ended, int64_t from) {
    constexpr uint32_t HALF = 0x80000000;
    if (ended - last_header(c, from).x < HALF / 2) return;
    // Of both banks, counting on nobody.
    for (uint32_t epoch = ended - HALF / 4, i = 0; i < 2; i++, epoch--) low_latency::store_packet(header_of(c, epoch, c.call.rank, from), {epoch, 0, 0, 0});
}

// Which ranks this one counts on, in `block.absent` those that it does not. By one thread. Returns those that came to the last
// prepare, though the two did not count on each other.
__device__ __forceinline__ uint32_t choose_ranks(const LowLatencyCall& c, Block& block, uint32_t layer, uint32_t ended) {
    Word* own = control_of(c, c.call.rank);
    const uint32_t before = block.absent, came = before == 0 ? 0 : static_cast<uint32_t>(own[LOW_LATENCY_CAME]);
    if (came != 0) own[LOW_LATENCY_CAME] = 0;
    const uint32_t ahead = come_back(c, block, layer, ended);
    uint32_t counted = 1u << c.call.rank;
    for (int64_t r = 0; r < c.call.ranks; r++) {
        if (r == c.call.rank) continue;
        const bool absent = before >> r & 1, was_ahead = ahead >> r & 1;
        // One that is past this call does not come to it.
        if (was_ahead && is_later(last_header(c, r).x, block.epoch)) continue;
        const bool comes = !absent || (came >> r & 1) || !is_later(ended, last_header(c, r).x) ||
                           nvlink::load_relaxed(own + LOW_LATENCY_RETURNS + r) == layer;
        const bool in_step = !absent && !was_ahead;
        if (!comes) renew_headers(c, ended, r);
        else if (in_step || has_passed(last_sent(c, block, ended, r), block.epoch, 3 * low_latency::SWEEPS)) counted |= 1u << r;
    }
    block.absent = ((1u << c.call.ranks) - 1) & ~counted;
    const uint32_t lost = block.absent & ~before;
    if (lost == 0) return came;
    for (int64_t r = 0; r < c.call.ranks; r++) {
        if (lost >> r & 1) nvlink::store_relaxed(own + LOW_LATENCY_SENT + r, ended);
    }
    atomicOr(own + LOW_LATENCY_LATE, static_cast<Word>(lost));
    return came;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_THREADS, 1) sm90_nvlink_low_latency_exchange(const __grid_constant__ LowLatencyExchangeParams p) {
    __shared__ Block block;
    __shared__ uint32_t before, awaited;  // ranks that it went on without, and those that it waits for
    const LowLatencyCall& c = p.call;
    Word* own = control_of(c, c.call.rank);
    const int rank = static_cast<int>(c.call.rank), ranks = static_cast<int>(c.call.ranks), bytes = static_cast<int>(p.bytes);
    const auto layer = static_cast<uint32_t>(p.layer) + 1;
    if (threadIdx.x == 0) {
        const auto ended = static_cast<uint32_t>(own[LOW_LATENCY_EPOCH]);
        const uint32_t others = ((1u << ranks) - 1) & ~(1u << rank);
        block.epoch = low_latency::next_epoch(ended);
        block.absent = before = static_cast<uint32_t>(own[LOW_LATENCY_ABSENT]);
        block.start = nvlink::nanoseconds();
        block.stopped = nvlink::host_stops(c.call) || nvlink::load_relaxed(nvlink::words_of(c.call, rank) + NVLINK_ABORT) != 0;
        uint32_t came = 0;
        if (!block.stopped) came = choose_ranks(c, block, layer, ended);
        else block.absent = others;
        awaited = others & ~block.absent;
        block.rested = block.epoch - static_cast<uint32_t>(*low_latency::last_call_of(c, block.epoch));
        // A rank that stayed does not rest for one that it takes in again now: it would find the same in each prepare to come,
        // where handles are kept for long, and the tag of what the other has sent does not come in this call, which clears the
        // bank. One that has taken over an epoch has more to clear. One that has come to the last prepare has cleared already.
        const auto returned_before = static_cast<uint32_t>(own[LOW_LATENCY_RETURNED]);
        if (before & awaited & ~came) own[LOW_LATENCY_RETURNED] = block.epoch;
        const bool took_over = block.epoch != low_latency::next_epoch(ended);
        const uint32_t returned = took_over ? static_cast<uint32_t>(own[LOW_LATENCY_RETURNED]) : returned_before;
        // It reads no records then, but waits for the others to come.
        if (low_latency::rests(block, returned)) block.absent = others;
        atomicExch(own + LOW_LATENCY_ABSENT, static_cast<Word>(block.absent));
        // What has been waited for before does not count.
        block.start = nvlink::nanoseconds();
    }
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < ranks && peer != rank && !block.stopped) low_latency::store_packet(header_of(c, block.epoch, peer, rank), {block.epoch, ~block.absent, layer, 0});
    const auto* source = static_cast<const uint8_t*>(p.source);
    const int packets = (bytes + static_cast<int>(PACKET_PAYLOAD) - 1) / static_cast<int>(PACKET_PAYLOAD);
    for (int to = 0; to < ranks; to++) {
        if (to == rank || low_latency::is_absent(block, to)) continue;
        uint4* area = low_latency::area_of(c, block.epoch, to, rank);
        for (int j = threadIdx.x; j < packets; j += blockDim.x) {
            uint4 v = low_latency::row_payload(source, j, bytes, true);
            v.w |= block.epoch << 16;
            low_latency::store_packet(area + j, v);
        }
    }
    // Those that come, and count on this rank.
    if (peer < ranks && (awaited >> peer & 1)) {
        const uint4* at = header_of(c, block.epoch, rank, peer);
        uint4 header = low_latency::load_packet(at);
        bool comes = true;
        for (uint32_t polls = 1; comes && header.x != block.epoch; polls++) {
            if (polls % 64 == 0 && (!in_time(c, block.start) || is_later(last_header(c, peer).x, block.epoch + 2) || (polls % 1024 == 0 && nvlink::host_stops(c.call)))) comes = false;
            header = low_latency::load_packet(at);
        }
        comes = header.x == block.epoch;
        // One that has asked to come back, and has not, asks again if it is still there.
        if (!comes) nvlink::store_relaxed(own + LOW_LATENCY_RETURNS + peer, 0);
        if (low_latency::is_absent(block, peer) || !comes || (header.y >> rank & 1) == 0) {
            atomicOr(own + LOW_LATENCY_ABSENT, 1ull << peer);
            // Awaited in the next prepare too, so that neither is ahead of the other there.
            if (comes) atomicOr(own + LOW_LATENCY_CAME, 1ull << peer);
            nvlink::store_relaxed(own + LOW_LATENCY_SENT + peer, block.epoch);
            if ((before >> peer & 1) == 0) atomicOr(own + LOW_LATENCY_LATE, 1ull << peer);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) block.absent = static_cast<uint32_t>(atomicOr(own + LOW_LATENCY_ABSENT, 0ull));
    __syncthreads();
    auto* out = static_cast<uint8_t*>(p.out);
    for (int from = 0; from < ranks; from++) {
        uint8_t* record = out + static_cast<int64_t>(from) * bytes;
        const uint4* area = low_latency::area_of(c, block.epoch, rank, from);
        bool whole = from == rank || !low_latency::is_absent(block, from);
        for (int first = 0; first < packets && whole; first += static_cast<int>(blockDim.x)) {
            const int j = first + static_cast<int>(threadIdx.x);
            uint4 v{};
            if (j >= packets) {
            } else if (from == rank) {
                v = low_latency::row_payload(source, j, bytes, true);
            } else {
                whole = low_latency::wait_for_packet(c, block, area + j, from, v);
            }
            low_latency::store_payload(record, j, bytes, true, v);
        }
        if (__syncthreads_and(whole)) continue;
        // As this rank's own, with no tokens.
        auto* words = reinterpret_cast<uint32_t*>(record);
        for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
            const int word = i / 2;
            const bool none = word == KIND || word == TOKENS || word == PENDING;
            words[i] = i >= static_cast<int>(HEADER_BYTES) / 4 ? ~0u : none ? 0 : reinterpret_cast<const uint32_t*>(source)[i];
        }
    }
    low_latency::sweep(c, block, [&](int64_t) { return static_cast<int64_t>(packets); });
    __syncthreads();
    if (threadIdx.x == 0) low_latency::count_call(c, block);
}
#endif
