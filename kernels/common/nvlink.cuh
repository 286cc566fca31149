// What calls over windows share: epochs, words that other ranks wait for, and giving up.
//
// A call is one kernel on each rank of the group; all ranks make the same calls in the same order, on one stream each.
// The control words of every rank carry it:
//
//   start   block 0 stores to each peer that this rank's zone is free, as its stream has come to this call, and where the
//           zone lies; then each block waits for the same of every peer, and may store rows there
//   rows    plain stores to peers' zones
//   end     the last block that ends stores to each peer that all has been written, and waits for the same of every peer;
//           then the kernel ends, and what comes next on the stream reads the zone
//
// A dispatch that sends by groups of experts has marks between its rows and its end: each block stores to each peer how many
// groups it has sent, and block 0 of the receiver writes how many have come whole from all blocks of all ranks, for a
// product on the same GPU that has started before its rows have come (sm90_nvlink_groups.cu). All ranks send so in the
// same calls, by as many blocks.
//
// A call that brings records alone asks for no zone. Each record goes to a bank of its epoch's parity, with a word of that
// bank behind it: who is two calls on has had a word of the call between, for which this rank had to end the first.
//
// Words hold the number of the call, its epoch, and are compared for equality, so nothing is ever cleared. One word for a
// peer and purpose suffices: a peer stores its word of the next call only when it has ended this one, for which it needed
// this rank's last word, which is stored when all blocks here have met the peer's. The epoch is such a word, so a captured
// graph may be replayed.
//
// Order in memory: stores of many threads are followed by a barrier among them and by one thread's release at the scope
// of the system; whoever waits acquires at that scope, before a barrier with the threads that read.
//
// No wait is endless. Whoever has waited for longer than the call allows writes down what for, tells all ranks to give
// up, and goes on to the end of its kernel without what did not come. Blocks and warps that have nothing to wait for may go
// on storing rows until they do, or end; nobody is to use those. Every wait, and every later call, sees that, and raises a
// fault on its own rank. Then the windows are of no use until the hosts have cleared all their words together. A
// host that is about to take peers' memory away ends its own rank's waits in the same way, by a word of its own. Behind that
// word lies one in which kernels tell the host at once what they have raised: nobody waits for the replays of a graph who
// would read the fault.
#pragma once
#include "common/common.cuh"
#include "common/nvlink_memory.cuh"

namespace nvlink {

// The control words of a rank.
__device__ __forceinline__ Word* words_of(const NvLinkCall& c, int64_t rank) { return reinterpret_cast<Word*>(c.words[rank]); }

// Tests: idles in some threads, so that ranks, blocks and warps meet in other orders.
__device__ __forceinline__ void delay(const NvLinkCall& c, uint32_t who) {
    if (c.delay == 0) return;
    uint32_t hash = (who + 1) * 2654435761u ^ static_cast<uint32_t>(words_of(c, c.rank)[NVLINK_EPOCH]) * 40503u ^ static_cast<uint32_t>(c.rank) * 97u;
    hash ^= hash >> 15;
    if (hash % 4 != 0) return;
    const Word until = nanoseconds() + hash / 4 % static_cast<uint32_t>(c.delay);
    while (nanoseconds() < until) __nanosleep(200);
}

// A fault's detail.
__device__ __forceinline__ long long peer_detail(const NvLinkCall& c, NvLinkPhase phase, int64_t peer) {
    return (static_cast<long long>(phase) << NVLINK_PEER_BITS | peer) << ORIGIN_BITS | c.origin;
}

__device__ __forceinline__ void raise_peer(const NvLinkCall& c, long long detail) {
    raise_fault(c.fault, FAULT_PEER, detail);
    if (c.stop == nullptr) return;
    // The second of the host's words, which kernels write: one of the first faults, as what follows comes of these.
    Word* told = const_cast<Word*>(c.stop) + 1;
    if (load_relaxed(told) == 0) store_relaxed(told, fault_word(FAULT_PEER, detail));
}

// Writes down what was waited for in vain, if it is the first here, and tells every rank.
__device__ __noinline__ void give_up(const NvLinkCall& c, NvLinkPhase phase, int64_t peer, Word epoch, Word met) {
    Word* own = words_of(c, c.rank);
    const long long detail = peer_detail(c, phase, peer);
    if (atomicCAS(own + NVLINK_ERROR, 0ull, static_cast<Word>(detail)) == 0) {
        store_relaxed(own + NVLINK_ERROR + 1, epoch);
        store_relaxed(own + NVLINK_ERROR + 2, met);
        store_relaxed(own + NVLINK_ERROR + 3, static_cast<Word>(c.timeout));
        raise_peer(c, detail);
    }
    for (int64_t r = 0; r < c.ranks; r++) store_relaxed(words_of(c, r) + NVLINK_ABORT, static_cast<Word>(c.rank) + 1);
}

// Raises the fault of a rank that stops as another has given up; where this one has too, again the one that it raised then, which
// names who did not come: the word that told it may be another's, who waited for the same. That the host has its own know already.
__device__ __noinline__ void raise_stopped(const NvLinkCall& c, Word by) {
    const Word first = load_relaxed(words_of(c, c.rank) + NVLINK_ERROR);
    if (first != 0) return raise_peer(c, static_cast<long long>(first));
    // A block that starts late may see that this rank has given up in this call, and not yet in what.
    if (by != static_cast<Word>(c.rank) + 1 && by <= static_cast<Word>(c.ranks)) raise_peer(c, peer_detail(c, NVLINK_STOPPED, static_cast<int64_t>(by) - 1));
}

// Whether some rank has given up: what this one writes from here on is not to be used either.
__device__ __forceinline__ bool given_up(const NvLinkCall& c) {
    const Word by = load_relaxed(words_of(c, c.rank) + NVLINK_ABORT);
    // What this rank has waited for in vain it has raised.
    if (by != 0 && by != static_cast<Word>(c.rank) + 1) raise_stopped(c, by);
    return by != 0;
}

// Whether the host wants no waits any more. Its word is behind PCIe, so waits look at it seldom (and the exchange of low
// latency once a call), and it is told to the others here.
__device__ __noinline__ bool host_stops(const NvLinkCall& c) {
    if (c.stop == nullptr || load_relaxed(c.stop) == 0) return false;
    atomicCAS(words_of(c, c.rank) + NVLINK_ABORT, 0ull, static_cast<Word>(NVLINK_HOST));
    return true;
}

// Waits until a word of this rank's window has the epoch. False: given up.
__device__ __noinline__ bool keep_waiting(const NvLinkCall& c, const Word* word, uint32_t epoch, NvLinkPhase phase, int64_t peer, Word* met) {
    const Word start = nanoseconds();
    for (uint32_t polls = 1; (*met = load_relaxed(word)) >> 32 != epoch; polls++) {
        if (polls % 64 != 0) continue;
        if (given_up(c) || (polls % 1024 == 0 && host_stops(c))) return false;
        if (nanoseconds() - start < static_cast<Word>(c.timeout)) continue;
        give_up(c, phase, peer, epoch, *met);
        return false;
    }
    return true;
}

// The same, and acquires what was released with the word.
__device__ __forceinline__ bool wait_for(const NvLinkCall& c, const Word* word, uint32_t epoch, NvLinkPhase phase, int64_t peer, Word& met) {
    met = load_acquire(word);
    if (met >> 32 == epoch) return true;
    if (!keep_waiting(c, word, epoch, phase, peer, &met)) return false;
    // Its loads acquire nothing; the word stays.
    met = load_acquire(word);
    return true;
}

// A block's part in a call, in shared memory.
struct Block {
    uint8_t* zones[NVLINK_RANKS];  // where this rank may write in each rank's window
    uint32_t epoch;
    int stopped;                   // given up
};

// The call behind that of this number. Of 32 bits; 0 is what words hold that were never written, so the call behind the last
// odd number is 2: banks take turns by parity.
__device__ __forceinline__ uint32_t next_epoch(uint32_t epoch) { return epoch == 0xffffffff ? 2 : epoch + 1; }

// Comes to a call, in every block: its epoch, and whether it has been given up already.
__device__ __forceinline__ void enter(const NvLinkCall& c, Block& block) {
    Word* own = words_of(c, c.rank);
    if (threadIdx.x == 0) {
        block.epoch = next_epoch(static_cast<uint32_t>(own[NVLINK_EPOCH]));
        const Word gave_up = load_relaxed(own + NVLINK_ABORT);
        block.stopped = gave_up != 0;
        // Told again for each call: the host may have asked since.
        if (gave_up != 0) raise_stopped(c, gave_up);
    }
    __syncthreads();
}

// Begins a call, in every block.
__device__ __forceinline__ void start(const NvLinkCall& c, Block& block) {
    Word* own = words_of(c, c.rank);
    enter(c, block);
    const int64_t peer = threadIdx.x;
    if (peer < c.ranks && !block.stopped) {
        const Word epoch = block.epoch;
        if (blockIdx.x == 0 && peer != c.rank) {
            delay(c, 1);
            // Needs no release: the kernels that have read the zone have ended.
            store_relaxed(words_of(c, peer) + NVLINK_READY + c.rank, epoch << 32 | static_cast<Word>(c.zone) / NVLINK_ZONE_UNIT);
        }
        Word met = static_cast<Word>(c.zone) / NVLINK_ZONE_UNIT;
        const bool ready = peer == c.rank || wait_for(c, own + NVLINK_READY + peer, block.epoch, NVLINK_WAIT_READY, peer, met);
        if (!ready) block.stopped = 1;
        block.zones[peer] = reinterpret_cast<uint8_t*>(c.zones[peer]) + (met & 0xffffffffull) * NVLINK_ZONE_UNIT;
    }
    __syncthreads();
}

// Ends a call, in every block.
__device__ __forceinline__ void end(const NvLinkCall& c, Block& block) {
    __shared__ int last;
    Word* own = words_of(c, c.rank);
    __syncthreads();
    if (threadIdx.x == 0) {
        // The block's stores come before its count, and those of all before the last block's words.
        fence_system();
        const Word before = atomicAdd(own + NVLINK_BLOCKS, 1ull);
        const bool moved = !given_up(c);
        last = before + 1 == gridDim.x;
        if (last && moved) {
            delay(c, 2);
            fence_system();
            const Word epoch = block.epoch;
            for (int64_t r = 0; r < c.ranks; r++) {
                if (r != c.rank) store_relaxed(words_of(c, r) + NVLINK_DONE + c.rank, epoch << 32);
            }
        }
    }
    __syncthreads();
    if (!last) return;
    const int64_t peer = threadIdx.x;
    Word met;
    if (peer < c.ranks && peer != c.rank) wait_for(c, own + NVLINK_DONE + peer, block.epoch, NVLINK_WAIT_DONE, peer, met);
    __syncthreads();
    if (threadIdx.x == 0) {
        own[NVLINK_BLOCKS] = own[NVLINK_TICKET] = 0;
        own[NVLINK_EPOCH] = block.epoch;
    }
}

// Where the record of a rank goes in the memory of another, or lies in this rank's own.
__device__ __forceinline__ uint8_t* record_at(const NvLinkCall& c, int64_t bank, uint32_t epoch, int64_t at, int64_t rank, int64_t bytes) {
    return reinterpret_cast<uint8_t*>(c.zones[at]) + c.zone + epoch % 2 * bank + rank * bytes;
}

// Ends what a block stores of its rank's record; the last block to come stores what `rest` does, by all its threads, and
// tells every rank. Then each block waits for the records of all. A block waits for the others of its grid, so all of them
// must run at once.
template <class Rest>
__device__ __forceinline__ void end_records(const NvLinkCall& c, Block& block, Rest&& rest) {
    __shared__ int tells;
    Word* own = words_of(c, c.rank);
    const Word epoch = block.epoch;
    const int bank = static_cast<int>(epoch % 2) * static_cast<int>(NVLINK_RANKS);
    __syncthreads();
    if (threadIdx.x == 0) {
        delay(c, blockIdx.x + 3);
        // The block's stores come before its count, and those of all before the last block's words.
        fence_system();
        const bool last = atomicAdd(own + NVLINK_BLOCKS, 1ull) + 1 == gridDim.x;
        if (last) {
            fence_system();
            // All blocks have read it.
            own[NVLINK_BLOCKS] = 0;
            own[NVLINK_EPOCH] = epoch;
        }
        tells = last && !given_up(c);
    }
    __syncthreads();
    if (tells) {
        rest();
        __syncthreads();
        if (threadIdx.x == 0) {
            fence_system();
            for (int64_t r = 0; r < c.ranks; r++) store_relaxed(words_of(c, r) + NVLINK_RECORDS + bank + c.rank, epoch << 32);
        }
    }
    const int64_t peer = threadIdx.x;
    Word met;
    if (peer < c.ranks && !block.stopped && !wait_for(c, own + NVLINK_RECORDS + bank + peer, block.epoch, NVLINK_WAIT_DONE, peer, met)) block.stopped = 1;
    __syncthreads();
}

// All blocks of a grid that run at once meet; what each has written is there for all. Without a timeout: none of them waits
// for anybody else without one. The first block's share turns the word's highest bit over when all have come.
__device__ __forceinline__ void grid_sync(const NvLinkCall& c) {
    __syncthreads();
    if (threadIdx.x == 0) {
        auto* word = reinterpret_cast<uint32_t*>(words_of(c, c.rank) + NVLINK_BARRIER);
        const uint32_t share = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        __threadfence();
        const uint32_t before = atomicAdd(word, share);
        uint32_t now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(now) : "l"(word) : "memory");
        } while (((before ^ now) & 0x80000000u) == 0);
        __threadfence();
    }
    __syncthreads();
}

}  // namespace nvlink
