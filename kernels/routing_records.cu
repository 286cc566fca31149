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
#include "common/record_steps.cuh"

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

}  // namespace

// The last block to end writes the header and clears the count of blocks.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) record_ids(const __grid_constant__ WriteRecordParams p) {
    __shared__ bool last;
    auto* ids = reinterpret_cast<int32_t*>(p.record + HEADER_BYTES / 8);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.choices; i += step) ids[i] = recorded_id(p, i);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.errors + ERRORS_BLOCKS_DONE, 1ull) + 1 == gridDim.x;
    __syncthreads();
    if (!last) return;
    __threadfence();
    write_header(p, p.record);
    if (threadIdx.x == 0) p.errors[ERRORS_BLOCKS_DONE] = 0;
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
    const HeadersFound found = examine_headers(p);
    if (threadIdx.x == 0) p.stats[p.experts + p.experts / p.ranks + 2] = found.troubled;
    keep_headers(p, found);
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
