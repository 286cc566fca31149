// Plans of several ranks for a transport that sends each token once to every rank that keeps a choice of it: which rows
// and choices make up the messages between this rank and the others.
//
// routing_records.cu has counted and laid out the experts. `all_to_all_places` numbers the choices and notes where each
// is kept; `all_to_all_count` and `all_to_all_scan` count choices and tokens of each message over the chunks;
// `all_to_all_number` writes the maps. Messages to this rank are told apart by their source and those from it by their
// destination, each with its own ones among them: 4 R counts of choices in, tokens in, choices out and tokens out.
//
// A block of one warp a chunk of the choices; of the scan a warp a count. Limited by launches and walks of single
// warps. Notes: kernels/notes/plan.md.
#include "common/message_choices.cuh"

namespace {

struct PlaceChoices {
    const RecordsPlanParams& p;
    int64_t locals;
    __device__ void operator()(int64_t i, int e, int rank) const {
        const int64_t slot = slot_of(p, origin_of(p, i), e, rank);
        p.places[i] = slot >= 0 ? make_int2(static_cast<int>(e / locals), static_cast<int>(slot)) : make_int2(-1, -1);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(WARP_THREADS) all_to_all_places(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    for (int e = threadIdx.x; e < p.experts; e += 32) count[e] = p.before[e * p.chunks + blockIdx.x];
    __syncwarp();
    const int64_t first = blockIdx.x * p.chunk;
    for_each_choice(RecordedChoices{p}, first, end_of(p, first), count, PlaceChoices{p, p.experts / p.ranks});
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS) all_to_all_count(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    const int64_t first = blockIdx.x * p.chunk, last = end_of(p, first);
    for (int m = threadIdx.x; m < 4 * p.ranks; m += 32) count[m] = 0;
    __syncwarp();
    auto nothing = [](int64_t, ChoiceOrigin, int, int, int, bool) {};
    for_each_message_choice<true>(p, first, last, count, nothing);
    for_each_message_choice<false>(p, first, last, count + 2 * p.ranks, nothing);
    for (int m = threadIdx.x; m < 4 * p.ranks; m += 32) p.message_counts[m * p.chunks + blockIdx.x] = count[m];
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) all_to_all_scan(const __grid_constant__ RecordsPlanParams p) {
    scan_chunks(p.message_counts, p.chunks, 4 * p.ranks, p.totals);
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS) all_to_all_number(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    const int64_t first = blockIdx.x * p.chunk, last = end_of(p, first);
    // Messages lie behind each other.
    for (int m = threadIdx.x; m < 4 * p.ranks; m += 32) {
        int64_t start = 0;
        for (int64_t earlier = m / p.ranks * p.ranks; earlier < m; earlier++) start += p.totals[earlier];
        count[m] = static_cast<int32_t>(start) + p.message_counts[m * p.chunks + blockIdx.x];
    }
    __syncwarp();
    for_each_message_choice<true>(p, first, last, count, [&](int64_t i, ChoiceOrigin, int message, int number, int row, bool) {
        if (message < 0) return;
        const int slot = p.places[i].y;
        p.return_slots[number] = slot;
        p.row_map[slot] = row;
        p.weight_map[slot] = number;
    });
    for_each_message_choice<false>(p, first, last, count + 2 * p.ranks,
                         [&](int64_t, ChoiceOrigin at, int message, int number, int row, bool leads) {
        if (at.rank != p.rank || at.choice >= p.tokens * p.top_k) return;
        p.return_map[at.choice] = message >= 0 ? number : -1;
        if (message < 0) return;
        p.send_choices[number] = static_cast<int32_t>(at.choice);
        if (leads) p.send_tokens[row] = static_cast<int32_t>(at.choice / static_cast<uint32_t>(p.top_k));
    });
}
