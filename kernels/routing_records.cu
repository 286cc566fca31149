// Layouts of groups of several ranks: each rank's choices become a record (`record_ids`), and from all ranks' records
// the slots of one rank are planned, as plan.cu does it for a rank alone.
//
// Choices are those of R max_tokens tokens in the order (rank, token, k); a rank has as many tokens as its header says,
// and the rest count as none. Every rank numbers the choices of all experts, and so knows what the others keep; it maps
// its own experts' slots. What is wrong with the records (src/plan/routing_record.rs) is kept in `errors`
// (src/plan/deferred_errors.rs), the same on all ranks, and raises the fault.
//
// In: ids [T, K], then all ranks' records. Out: segments of the L local experts, kept ids [T, K], maps of the N slots
// and of all rows' choices. A block of one warp a chunk of the choices, one block for the segments. Limited by launches
// and walks of single warps. Notes: kernels/notes/plan.md.
#include "common/routing_records.cuh"

namespace {

struct NumberSlots {
    const RecordsPlanParams& p;
    int64_t locals;
    __device__ void operator()(int64_t i, int e, int rank) const {
        const ChoiceOrigin at = origin_of(p, i);
        const int64_t slot = slot_of(p, at, e, rank);
        const uint32_t k = static_cast<uint32_t>(p.top_k), token = at.choice / k;
        if (token >= p.padded_tokens) return;
        const int64_t row = at.rank * p.padded_tokens + token, choice = row * k + (at.choice - token * k);
        const bool here = slot >= 0 && e / locals == p.rank;
        p.return_map[choice] = here ? static_cast<int32_t>(slot) : -1;
        if (!here) return;
        p.row_map[slot] = static_cast<int32_t>(row);
        p.weight_map[slot] = static_cast<int32_t>(choice);
    }
};

// Raises the fault of rank `odd`'s record; of one whose fault is a bad id also the words that name it.
__device__ void raise_odd_record(const RecordsPlanParams& p, int64_t odd, bool bad_id) {
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

// Keeps the records' headers where one has failed, has masked an id or differs from this rank's, and nothing is kept
// yet. A host that waits sees to all but the masked ids itself. By a whole block.
__device__ void check_headers(const RecordsPlanParams& p) {
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
    if (threadIdx.x == 0) p.stats[p.experts + p.experts / p.ranks + 2] = troubled;
    if (!masked && (!troubled || p.host_waits)) return;
    if (threadIdx.x == 0) raise_odd_record(p, static_cast<int64_t>(first_odd), masked && !troubled);
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
__device__ void layout_segments(const RecordsPlanParams& p) {
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

}  // namespace

// The first bad id is the smallest choice, kept as the largest complement so that zero means none. The last block to
// end writes the header and clears both words.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) record_ids(const __grid_constant__ WriteRecordParams p) {
    __shared__ bool last;
    auto id_of = [&](int64_t i) {
        return p.wide ? static_cast<const int64_t*>(p.ids)[i] : static_cast<const int32_t*>(p.ids)[i];
    };
    auto* ids = reinterpret_cast<int32_t*>(p.record + HEADER_BYTES / 8);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.choices; i += step) {
        const int64_t id = id_of(i);
        bool real = id >= 0 && id < p.experts;
        const bool odd = !real && id != -1;
        for (int64_t other = i / p.top_k * p.top_k; real && other < i; other++) real = id_of(other) != id;
        if (odd || (!real && id >= 0)) atomicMax(p.errors + ERRORS_FIRST_BAD, ~static_cast<unsigned long long>(i));
        ids[i] = real ? static_cast<int32_t>(id) : -1;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.errors + ERRORS_BLOCKS_DONE, 1ull) + 1 == gridDim.x;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const int word = threadIdx.x;
    if (word < HEADER_WORDS) p.record[word] = static_cast<unsigned long long>(p.header[word]);
    __syncthreads();
    if (word != 0) return;
    p.record[PENDING] = p.errors[0] != 0;
    const unsigned long long bad = atomicExch(p.errors + ERRORS_FIRST_BAD, 0ull);
    p.errors[ERRORS_BLOCKS_DONE] = 0;
    if (bad == 0) return;
    const int64_t i = static_cast<int64_t>(~bad), token = i / p.top_k, id = id_of(i);
    int64_t first = 0;
    if (id >= 0 && id < p.experts) {
        while (id_of(token * p.top_k + first) != id) first++;
        first++;
    }
    const int64_t words[] = {p.rank, token, i - token * p.top_k, id, first};
    p.record[KIND] = 1;
    for (int w = 0; w < 5; w++) p.record[BAD + w] = static_cast<unsigned long long>(words[w]);
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS) routing_records_count(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    for (int e = threadIdx.x; e < p.experts; e += 32) count[e] = 0;
    __syncwarp();
    const int64_t first = blockIdx.x * p.chunk;
    for_each_choice(RecordedChoices{p}, first, end_of(p, first), count, [](int64_t, int, int) {});
    for (int e = threadIdx.x; e < p.experts; e += 32) p.before[e * p.chunks + blockIdx.x] = count[e];
}

// A warp an expert: chunks' counts become counts before the chunk.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) routing_records_scan(const __grid_constant__ RecordsPlanParams p) {
    scan_chunks(p.before, p.chunks, p.experts, p.stats);
}

extern "C" __global__ void __launch_bounds__(PLAN_SEGMENTS_THREADS) routing_records_segments(const __grid_constant__ RecordsPlanParams p) {
    check_headers(p);
    __syncthreads();
    layout_segments(p);
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS) routing_records_slots(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    for (int e = threadIdx.x; e < p.experts; e += 32) count[e] = p.before[e * p.chunks + blockIdx.x];
    __syncwarp();
    const int64_t first = blockIdx.x * p.chunk;
    for_each_choice(RecordedChoices{p}, first, end_of(p, first), count, NumberSlots{p, p.experts / p.ranks});
}
