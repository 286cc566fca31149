// Calls of low latency over windows: in packets, each with the number of its call, by which the receiver knows that it has
// come (nvlink.cuh has the rest).
//
// A call is one kernel on each rank of the group; all make the same calls in the same order. What travels is cut into
// packets of 16 bytes: 14 of payload, and the call's tag. A receiver knows from the plan which packets come, and looks at
// each until it has the tag. Nothing else tells of rows: no flag behind them, no fence, no meeting before them.
//
// Order in memory. A packet is one store of 128 bits and is read by one load of 128 bits, both relaxed at the scope of the
// system and aligned to their size, so each is performed as a whole (single-copy atomicity): who sees the tag has the
// payload that was stored with it. No packet says anything of another, so no store has to come before another, and neither
// side needs a fence. What a kernel reads of other kernels' data, it reads on its own GPU behind them in one stream.
//
// Banks. There are two in each memory (of records, and of rows), and a call uses that of its epoch's parity. In each call
// each rank sends each other a header, with rows or without, and waits for theirs. So a peer that writes to a bank again, two
// calls on, has had this rank's header of the call between, which is sent by a kernel behind the one that read the bank: all
// its reads have been performed, as it has compared and stored what they returned. Likewise the bank is cleared by the call
// that has used it.
//
// Tags. The tag is the lower half of the call's number, its epoch. Epochs whose lower half is 0 are left out, as this is
// what memory holds at first. A packet of 65536 epochs ago looks like one of now, so what is left over has to go before:
//
//   sweep   a bank has SWEEPS parts, numbered by the epochs of its parity in turn. A call clears the parts of all epochs
//           since the bank's last call, but for what it uses. So it does not matter how many of the epochs between were calls
//           in other memory, or calls of the peers while this rank was away. The last call's epoch lies in the bank, where
//           the rank would receive from itself. A call in which a rank was lost, whose packets have not overwritten what it
//           uses, does not count: the next one clears its parts too. So behind the last call that counts a bank holds nothing
//           that was stored more than 2 SWEEPS epochs before it.
//   rest    a call whose bank has had none for MOST_REST epochs, and may therefore find what has its tag, counts on nobody:
//           it reads no packet and clears all of the bank. Its rank says so in the header, as one that is absent, and all meet
//           again in the next prepare. That is a rank that was away for so long; or all of them, where a handle was kept for
//           as many calls. Without patience a rank cannot be away, and rows' memory has every call; but that of a graph from
//           before wider rows came, which has no other calls than its replays, must not rest for so long.
//   return  what a rank was storing when it stalled may come only when the receiver is many calls on, and has cleared that
//           part. All that comes so late is of the last call in which the rank has sent to that receiver, as at the end of
//           each call it looks for peers that are ahead, and sends those nothing more. For each rank that it goes on without
//           it keeps the number of this call. It counts on one again only in a call from which on the tag of that number
//           does not come for 3 SWEEPS epochs. Two ranks read each other's packets where both count on each other, so it
//           suffices that each looks at what it has sent itself. The receiver has cleared those packets 2 SWEEPS epochs
//           behind their coming in a bank that has calls; one that has had none for so long, and a rank has been taken in
//           again since, rests. The number stays as it is while a rank makes calls by itself, and the receiver's go on: so
//           the tag has passed within 4 SWEEPS of the receiver's calls, whatever this rank does meanwhile.
//
// A rank that is absent is not sent rows, and sends none before both have met in a prepare again, which is a later kernel.
//
// Patience. With one, a rank whose packets are not there in time is marked as absent: the call goes on without what it
// lacks, and later calls neither wait for that rank nor send it rows, but a header each: where it is gone for good that goes
// to memory which nobody reads and its own mapping keeps. Without one it is given up as in every other call.
#pragma once
#include "common/nvlink.cuh"

namespace low_latency {

using nvlink::load_packet;
using nvlink::store_packet;
using nvlink::Word;

// Parts of a bank, one of which is cleared for each epoch of its parity.
constexpr uint32_t SWEEPS = 4096;
// Epochs for which a bank may have had no call: with the 2 SWEEPS before, and as many as a margin, all tags.
constexpr uint32_t MOST_REST = 0x10000 - 4 * SWEEPS;
// The same where a rank has been taken in again since, whose packets of before may have come there behind the last call.
constexpr uint32_t MOST_REST_OF_RETURN = 2 * SWEEPS;

// The call behind that of this number: of the other bank, and not of tag 0.
__device__ __forceinline__ uint32_t next_epoch(uint32_t epoch) { return (epoch & 0xffff) == 0xffff ? epoch + 3 : epoch + 1; }

// A block's part in a call, in shared memory.
struct Block {
    uint32_t epoch;
    uint32_t rested;  // epochs since the bank's last call
    uint32_t absent;  // a bit for each rank that the call goes without
    int stopped;      // given up
    Word start;
};

__device__ __forceinline__ Word* control_of(const LowLatencyCall& c, int64_t rank) {
    return reinterpret_cast<Word*>(c.call.words[rank] + c.control);
}
// Where rank `at` has the packets that rank `from` sends it.
__device__ __forceinline__ uint4* area_of(const LowLatencyCall& c, uint32_t epoch, int64_t at, int64_t from) {
    return reinterpret_cast<uint4*>(c.call.zones[at] + c.call.zone) + ((epoch & 1) * c.call.ranks + from) * c.area;
}
__device__ __forceinline__ uint4* header_of(const LowLatencyCall& c, uint32_t epoch, int64_t at, int64_t from) {
    return reinterpret_cast<uint4*>(control_of(c, at) + LOW_LATENCY_HEADERS) + (epoch & 1) * NVLINK_RANKS + from;
}
// Where the epoch of the last call of a bank lies.
__device__ __forceinline__ Word* last_call_of(const LowLatencyCall& c, uint32_t epoch) {
    return reinterpret_cast<Word*>(area_of(c, epoch, c.call.rank, c.call.rank));
}
__device__ __forceinline__ bool is_later(uint32_t epoch, uint32_t than) { return static_cast<int32_t>(epoch - than) > 0; }
__device__ __forceinline__ bool is_absent(const Block& block, int64_t rank) { return block.absent >> rank & 1; }

// Whether a call may find packets of before that have its tag in its bank. `returned`: LOW_LATENCY_RETURNED.
__device__ __forceinline__ bool rests(const Block& block, uint32_t returned) {
    // Numbers of calls come round: so what is compared is how long ago both were.
    return block.rested > MOST_REST || (block.rested > MOST_REST_OF_RETURN && block.epoch - returned < block.rested);
}

// Goes on without a rank, to which this one may have sent until a call.
__device__ __forceinline__ void mark_absent(const LowLatencyCall& c, int64_t peer, uint32_t sent) {
    Word* own = control_of(c, c.call.rank);
    if ((atomicOr(own + LOW_LATENCY_ABSENT, 1ull << peer) >> peer & 1) != 0) return;
    nvlink::store_relaxed(own + LOW_LATENCY_SENT + peer, sent);
    atomicOr(own + LOW_LATENCY_LATE, 1ull << peer);
}
// The same in the midst of a call that had counted on it.
__device__ __forceinline__ void lose(const LowLatencyCall& c, const Block& block, int64_t peer) {
    nvlink::store_relaxed(control_of(c, c.call.rank) + LOW_LATENCY_LOST, block.epoch);
    mark_absent(c, peer, block.epoch);
}
// Begins a call without all others, to which this rank may have sent until the one before.
__device__ __noinline__ void go_alone(const LowLatencyCall& c, Block& block, uint32_t ended) {
    for (int64_t peer = 0; peer < c.call.ranks; peer++) {
        if (peer == c.call.rank) continue;
        mark_absent(c, peer, ended);
        block.absent |= 1u << peer;
    }
}

// Whether nobody waits any more for what rank `peer` sends in this call.
__device__ __noinline__ bool no_longer_waits(const LowLatencyCall& c, const Block& block, int64_t peer, uint32_t polls, Word met) {
    const bool late = nvlink::nanoseconds() - block.start >= static_cast<Word>(c.patience > 0 ? c.patience : c.call.timeout);
    if (c.patience > 0) {
        if (nvlink::load_relaxed(control_of(c, c.call.rank) + LOW_LATENCY_ABSENT) >> peer & 1) return true;
        // One that is calls ahead has gone on without this rank, and what it had sent is overwritten; one that says so has sent
        // nothing.
        const uint4 header = load_packet(header_of(c, block.epoch, c.call.rank, peer));
        const bool ahead = is_later(header.x, block.epoch), alone = header.x == block.epoch && (header.y >> c.call.rank & 1) == 0;
        if (late || ahead || alone) {
            lose(c, block, peer);
            return true;
        }
        return polls % 1024 == 0 && nvlink::host_stops(c.call);
    }
    if (nvlink::given_up(c.call) || (polls % 1024 == 0 && nvlink::host_stops(c.call))) return true;
    if (late) nvlink::give_up(c.call, NVLINK_WAIT_ROW, peer, block.epoch, met);
    return late;
}

// Reads a packet once it has the tag. False: it does not come.
__device__ __forceinline__ bool wait_for_packet(const LowLatencyCall& c, const Block& block, const uint4* at, int64_t peer, uint4& packet) {
    const uint32_t tag = block.epoch & 0xffff;
    packet = load_packet(at);
    for (uint32_t polls = 1; packet.w >> 16 != tag; polls++) {
        if (polls % 64 == 0 && no_longer_waits(c, block, peer, polls, packet.w >> 16)) return false;
        packet = load_packet(at);
    }
    return true;
}

// Comes to a call, in every block. The first one tells all peers.
__device__ __forceinline__ void start(const LowLatencyCall& c, Block& block) {
    if (threadIdx.x == 0) {
        const Word* own = control_of(c, c.call.rank);
        // Of both banks, so that the loads do not wait for the epoch.
        const auto even = static_cast<uint32_t>(*last_call_of(c, 0)), odd = static_cast<uint32_t>(*last_call_of(c, 1));
        const auto ended = static_cast<uint32_t>(own[LOW_LATENCY_EPOCH]), returned = static_cast<uint32_t>(own[LOW_LATENCY_RETURNED]);
        block.epoch = next_epoch(ended);
        block.rested = block.epoch - (block.epoch % 2 == 0 ? even : odd);
        block.absent = static_cast<uint32_t>(nvlink::load_relaxed(own + LOW_LATENCY_ABSENT));
        block.start = nvlink::nanoseconds();
        const Word gave_up = nvlink::load_relaxed(nvlink::words_of(c.call, c.call.rank) + NVLINK_ABORT);
        block.stopped = gave_up != 0;
        if (gave_up != 0) nvlink::raise_stopped(c.call, gave_up);
        // In every block, as all see the same epochs.
        if (c.patience > 0 && !block.stopped && rests(block, returned)) go_alone(c, block, ended);
        nvlink::delay(c.call, blockIdx.x);
    }
    __syncthreads();
    const int64_t peer = threadIdx.x;
    if (blockIdx.x == 0 && peer < c.call.ranks && peer != c.call.rank && !block.stopped) {
        store_packet(header_of(c, block.epoch, peer, c.call.rank), {block.epoch, ~block.absent, 0, 0});
    }
}

// Clears what this call does not use of its bank, in the parts of the epochs since the bank's last call: of each rank's
// area, from packet `used(rank)` on, which is to be exact, as what is neither used nor cleared stays until its tag comes
// again. By a warp for each rank.
template <class Used>
__device__ __forceinline__ void sweep(const LowLatencyCall& c, const Block& block, Used&& used) {
    const int64_t part = (c.area + SWEEPS - 1) / SWEEPS;
    const uint32_t epochs = (block.rested + 1) / 2, parts = epochs < SWEEPS ? epochs : SWEEPS;
    const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32), warps = static_cast<int>(gridDim.x * blockDim.x / 32);
    // The last warps have the least to do.
    for (int64_t from = warps - 1 - warp; from < c.call.ranks; from += warps) {
        if (from == c.call.rank) continue;
        // What a rank had sent before it was gone on without would be taken for a later call's as well.
        const int64_t in_use = is_absent(block, from) ? 0 : used(from);
        uint4* area = area_of(c, block.epoch, c.call.rank, from);
#pragma unroll 1
        for (uint32_t i = 0; i < parts; i++) {
            const int64_t first = (block.epoch / 2 - i) % SWEEPS * part, last = first + part < c.area ? first + part : c.area;
            for (int64_t j = (in_use > first ? in_use : first) + threadIdx.x % 32; j < last; j += 32) store_packet(area + j, {});
        }
    }
}

// Counts a call that has ended, and as one of its bank. By one thread.
__device__ __forceinline__ void count_call(const LowLatencyCall& c, const Block& block) {
    Word* own = control_of(c, c.call.rank);
    own[LOW_LATENCY_EPOCH] = block.epoch;
    if (!block.stopped && nvlink::load_relaxed(own + LOW_LATENCY_LOST) != block.epoch) *last_call_of(c, block.epoch) = block.epoch;
}

// Ends a call, in every block: the first waits for all peers' headers, the last counts the call.
__device__ __forceinline__ void end(const LowLatencyCall& c, Block& block) {
    const int64_t peer = threadIdx.x;
    if (blockIdx.x == 0 && peer < c.call.ranks && peer != c.call.rank && !block.stopped && !is_absent(block, peer)) {
        const uint4* at = header_of(c, block.epoch, c.call.rank, peer);
        uint32_t met = load_packet(at).x;
        for (uint32_t polls = 1; is_later(block.epoch, met); polls++) {
            if (polls % 64 == 0 && no_longer_waits(c, block, peer, polls, 0)) break;
            met = load_packet(at).x;
        }
        // One that is calls ahead has gone on without this rank: so it is sent nothing more, whatever is waited for.
        if (c.patience > 0 && is_later(met, block.epoch)) lose(c, block, peer);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    Word* own = control_of(c, c.call.rank);
    __threadfence();
    if (atomicAdd(own + LOW_LATENCY_BLOCKS_ENDED, 1ull) + 1 != gridDim.x) return;
    __threadfence();
    own[LOW_LATENCY_BLOCKS_ENDED] = 0;
    count_call(c, block);
}

// Numbers work of several lists over the grid's warps, one list behind the other. A list that is not wanted counts all the
// same: of the blocks of a call, one that comes late may see a rank as absent that another has counted on.
struct WarpShare {
    int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
    int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
    int before = 0;  // entries of earlier lists, modulo `warps`

    // Calls `each` with this warp's entries of a list of so many, if it is wanted.
    template <class Each>
    __device__ __forceinline__ void of(bool wanted, int entries, Each&& each) {
        const int first = warp - before < 0 ? warp - before + warps : warp - before;
        for (int i = first; wanted && i < entries; i += warps) each(i);
        before = (before + entries) % warps;
    }
};

// Payload of a packet: bytes [14 j, 14 j + 14) of a row of an even number of bytes; what lies past its end is 0. In words
// of 4 bytes where rows are aligned to these. The upper half of the last word is free.
__device__ __forceinline__ uint32_t row_word(const uint8_t* row, int at, int bytes, bool words) {
    if (at >= bytes) return 0;
    if (words) return *reinterpret_cast<const uint32_t*>(row + at);
    const auto* halves = reinterpret_cast<const uint16_t*>(row + at);
    return halves[0] | (at + 2 < bytes ? static_cast<uint32_t>(halves[1]) << 16 : 0);
}
__device__ __forceinline__ uint4 row_payload(const uint8_t* row, int j, int bytes, bool words) {
    const int at = static_cast<int>(PACKET_PAYLOAD) * j;
    if (!words || j % 2 == 0) {
        return {row_word(row, at, bytes, words), row_word(row, at + 4, bytes, words), row_word(row, at + 8, bytes, words), row_word(row, at + 12, bytes, words) & 0xffff};
    }
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = row_word(row, at - 2 + 4 * i, bytes, true);
    return {__funnelshift_r(w[0], w[1], 16), __funnelshift_r(w[1], w[2], 16), __funnelshift_r(w[2], w[3], 16), w[3] >> 16};
}

// Stores payloads of a warp's neighboring packets, the first of them an even one, into a row; lanes past its end take part.
__device__ __forceinline__ void store_payload(uint8_t* row, int j, int bytes, bool words, uint4 v) {
    const int at = static_cast<int>(PACKET_PAYLOAD) * j;
    // The half that an even packet ends with and the one that the next begins with share a word.
    const uint32_t next = __shfl_down_sync(~0u, v.x, 1);
    if (words) {
        uint32_t w[4] = {v.x, v.y, v.z, (v.w & 0xffff) | next << 16};
        if (j % 2 != 0) w[0] = __funnelshift_r(v.x, v.y, 16), w[1] = __funnelshift_r(v.y, v.z, 16), w[2] = __funnelshift_r(v.z, v.w, 16);
        const int first = j % 2 == 0 ? at : at + 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + 4 * i < bytes && (i < 3 || j % 2 == 0)) *reinterpret_cast<uint32_t*>(row + first + 4 * i) = w[i];
        }
        return;
    }
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 7; i++) {
        if (at + 2 * i < bytes) *reinterpret_cast<uint16_t*>(row + at + 2 * i) = static_cast<uint16_t>(w[i / 2] >> 16 * (i % 2));
    }
}

}  // namespace low_latency
