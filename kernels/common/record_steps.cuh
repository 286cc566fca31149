// Steps of a prepare by records that more than one kernel takes: a rank's own record, what is wrong with all of them, and
// the experts' segments.
#pragma once
#include "common/routing_records.cuh"

__device__ __forceinline__ int64_t id_of(const WriteRecordParams& p, int64_t choice) {
    return p.wide ? static_cast<const int64_t*>(p.ids)[choice] : static_cast<const int32_t*>(p.ids)[choice];
}

// A choice as the record has it: -1 where its id is bad or the token's second of that expert. The first bad one is the
// smallest choice, kept as the largest complement so that zero means none.
__device__ __forceinline__ int32_t recorded_id(const WriteRecordParams& p, int64_t choice) {
    const int64_t id = id_of(p, choice);
    bool real = id >= 0 && id < p.experts;
    const bool odd = !real && id != -1;
    for (int64_t other = choice / p.top_k * p.top_k; real && other < choice; other++) real = id_of(p, other) != id;
    if (odd || (!real && id >= 0)) atomicMax(p.errors + ERRORS_FIRST_BAD, ~static_cast<unsigned long long>(choice));
    return real ? static_cast<int32_t>(id) : -1;
}

// Writes the record's header when all choices have been recorded, and clears the word of the first bad one. By a whole
// block.
__device__ inline void write_header(const WriteRecordParams& p, unsigned long long* header) {
    const int word = threadIdx.x;
    if (word < HEADER_WORDS) header[word] = static_cast<unsigned long long>(p.header[word]);
    __syncthreads();
    if (word != 0) return;
    header[PENDING] = p.errors[0] != 0;
    const unsigned long long bad = atomicExch(p.errors + ERRORS_FIRST_BAD, 0ull);
    if (bad == 0) return;
    const int64_t i = static_cast<int64_t>(~bad), token = i / p.top_k, id = id_of(p, i);
    int64_t first = 0;
    if (id >= 0 && id < p.experts) {
        while (id_of(p, token * p.top_k + first) != id) first++;
        first++;
    }
    const int64_t words[] = {p.rank, token, i - token * p.top_k, id, first};
    header[KIND] = 1;
    for (int w = 0; w < 5; w++) header[BAD + w] = static_cast<unsigned long long>(words[w]);
}

// Raises the fault of rank `odd`'s record; of one whose fault is a bad id also the words that name it.
__device__ inline void raise_odd_record(const RecordsPlanParams& p, int64_t odd, bool bad_id) {
    const int64_t detail = odd << ORIGIN_BITS | p.origin;
    raise_fault(p.fault, FAULT_RECORD, detail);
    volatile unsigned long long* status = p.fault;
    const unsigned long long own = fault_word(FAULT_RECORD, detail);
    // Of an earlier call's fault the same words were told already.
    if (!bad_id || status[STATUS_FAULT] != own || status[STATUS_RECORD] == own) return;
    status[STATUS_RECORD] = own;
    for (int i = 0; i < FIELD - BAD; i++) status[STATUS_RECORD_BAD + i] = word_of(p, odd, BAD + i);
    status[STATUS_RECORD_LAYER] = word_of(p, odd, BAD_LAYER);
    status[STATUS_RECORD_EXPERTS] = p.experts;
}

// What is found in the records' headers: `troubled`, that a rank has failed or its spec differs from this rank's; `masked`,
// that one has masked an id; and the first rank of such.
struct HeadersFound {
    bool troubled, masked;
    unsigned long long first_odd;
};

// By a whole block; every thread is told.
__device__ inline HeadersFound examine_headers(const RecordsPlanParams& p) {
    __shared__ unsigned long long first_odd;
    if (threadIdx.x == 0) first_odd = ~0ull;
    __syncthreads();
    bool troubled = false, masked = false;
    for (int64_t i = threadIdx.x; i < p.ranks * HEADER_WORDS; i += blockDim.x) {
        const int64_t rank = i / HEADER_WORDS;
        const int word = static_cast<int>(i - rank * HEADER_WORDS);
        const unsigned long long value = word_of(p, rank, word);
        const bool failed = word == KIND && value > 1;
        const bool differs = word >= FIELD && word < PENDING && value != word_of(p, p.rank, word);
        const bool odd = word == KIND && value == 1;
        if (failed || differs || odd) atomicMin(&first_odd, static_cast<unsigned long long>(rank));
        troubled = troubled || failed || differs;
        masked = masked || odd;
    }
    troubled = __syncthreads_or(troubled);
    masked = __syncthreads_or(masked);
    return {troubled, masked, first_odd};
}

// Keeps the records' headers where there is something in them to tell and nothing is kept yet. A host that waits sees to
// all but the masked ids itself. By a whole block.
__device__ inline void keep_headers(const RecordsPlanParams& p, const HeadersFound& found) {
    if (!found.masked && (!found.troubled || p.host_waits)) return;
    if (threadIdx.x == 0) raise_odd_record(p, static_cast<int64_t>(found.first_odd), found.masked && !found.troubled);
    const bool kept = p.errors[0] != 0;
    __syncthreads();
    if (kept) return;
    auto* to = reinterpret_cast<uint32_t*>(p.errors + ERRORS_WORDS);
    for (int64_t i = threadIdx.x; i < p.ranks * (HEADER_BYTES / 4); i += blockDim.x) {
        to[i] = header_of(p, i / (HEADER_BYTES / 4))[i % (HEADER_BYTES / 4)];
    }
    if (threadIdx.x == 0) p.errors[0] = ERRORS_RECORDS;
}

// Lays the experts of every rank out behind each other, from their numbers of choices in `stats`. By a block of 1024
// threads, each with a run of experts.
__device__ inline void layout_segments(const RecordsPlanParams& p) {
    const int64_t per = (p.experts + blockDim.x - 1) / blockDim.x, locals = p.experts / p.ranks;
    const int64_t first = threadIdx.x * per, last = first + per < p.experts ? first + per : p.experts;
    int64_t *upto = p.scratch, *starts = p.scratch + p.experts, *keeps = p.scratch + 2 * p.experts;
    int64_t limit = INT64_MAX, choices = 0;
    if (p.factor >= 0) {
        for (int64_t r = 0; r < p.ranks; r++) choices += tokens_of(p, r) * p.top_k;
        // As the host computes it, to the bit.
        const double share = ceil(__ddiv_rn(__dmul_rn(p.factor, static_cast<double>(choices)), static_cast<double>(p.experts)));
        if (share < 9.2e18) limit = static_cast<int64_t>(share);
    }
    auto kept = [&](int64_t e) { return p.stats[e] < limit ? p.stats[e] : limit; };
    auto padded = [&](int64_t e) { return (kept(e) + p.alignment - 1) / p.alignment * p.alignment; };
    auto inside = [&](int64_t slot) { return slot < p.rows ? slot : p.rows; };
    int64_t own = 0, all;
    for (int64_t e = first; e < last; e++) own += padded(e);
    int64_t before = block_sum(own, all) - own;
    for (int64_t e = first; e < last; e++) {
        upto[e] = before;
        before += padded(e);
    }
    __syncthreads();
    auto needed = [&](int64_t r) { return (r + 1 < p.ranks ? upto[(r + 1) * locals] : all) - upto[r * locals]; };
    for (int64_t e = first; e < last; e++) {
        const int64_t rank = e / locals, slot = upto[e] - upto[rank * locals];
        const int64_t start = inside(slot), count = kept(e) < p.rows - start ? kept(e) : p.rows - start;
        starts[e] = start;
        keeps[e] = count;
        if (rank != p.rank) continue;
        p.offsets[e - rank * locals] = start;
        p.counts[e - rank * locals] = count;
        p.stats[p.experts + e - rank * locals] = inside(slot + padded(e)) - start;
    }
    int64_t* tail = p.stats + p.experts + locals;
    for (int64_t r = threadIdx.x; r < p.ranks; r += blockDim.x) {
        tail[5 + 3 * r] = tokens_of(p, r);
        tail[6 + 3 * r] = word_of(p, r, BACKWARD) != 0;
        tail[7 + 3 * r] = word_of(p, r, PENDING) != 0;
    }
    if (threadIdx.x != 0) return;
    tail[0] = needed(p.rank);
    tail[1] = tail[3] = tail[4] = 0;
    if (p.may_drop) return;
    for (int64_t r = 0; r < p.ranks; r++) {
        if (needed(r) <= p.rows) continue;
        if (p.host_waits) {
            tail[3] = needed(r), tail[4] = r;
            return;
        }
        raise_capacity(p.fault, needed(r), r, p.rows, p.origin);
        if (p.errors[0] == 0) {
            p.errors[1] = r, p.errors[2] = needed(r), p.errors[3] = p.rows;
            p.errors[ERRORS_LAYER] = word_of(p, p.rank, FIELD);
            p.errors[0] = ERRORS_CAPACITY;
        }
        return;
    }
}
