// Plans of several ranks for a transport that sends each token once to every rank that keeps a choice of it: which rows
// and choices make up the messages between this rank and the others.
//
// routing_records.cu has counted and laid out the experts. `all_to_all_places` numbers the choices and notes where each
// is kept; `all_to_all_count` and `all_to_all_scan` count choices and tokens of each message over the chunks;
// `all_to_all_number` writes the maps. Messages to this rank are told apart by their source and those from it by their
// destination, each with its own ones among them: 4 R counts of choices in, tokens in, choices out and tokens out.
// `all_to_all_zones` writes the maps of rows that are stored into zones (sm90_nvlink_dispatch.cu) instead.
//
// A block of one warp a chunk of the choices; of the scan a warp a count. Limited by launches and walks of single
// warps. Notes: kernels/notes/plan.md.
#include "common/routing_records.cuh"

namespace {

struct PlaceChoices {
    const RecordsPlanParams& p;
    int64_t locals;
    __device__ void operator()(int64_t i, int e, int rank) const {
        const int64_t slot = slot_of(p, origin_of(p, i), e, rank);
        p.places[i] = slot >= 0 ? make_int2(static_cast<int>(e / locals), static_cast<int>(slot)) : make_int2(-1, -1);
    }
};

// Visits the choices [first, last) in order: `visit(choice, message, number, row, leads)` with the message that the
// choice travels in (-1: none), its number there, and the number of its token's row there, which it leads if it is the
// first of the token's choices to travel in it. IN: messages to this rank.
template <bool IN, class Visit>
__device__ void for_each_message_choice(const RecordsPlanParams& p, int64_t first, int64_t last, int32_t* counts, Visit&& visit) {
    const int lane = threadIdx.x % 32;
    const uint32_t below = (1u << lane) - 1;
    int32_t *choices = counts, *rows = counts + p.ranks;
    for (int64_t at = first; at < last; at += 32) {
        const int64_t i = at + lane;
        const bool real = i < last;
        const ChoiceOrigin place = real ? origin_of(p, i) : ChoiceOrigin{0, 0};
        const int kept_at = real ? p.places[i].x : -1;
        const bool travels = kept_at >= 0 && (IN ? kept_at : place.rank) == p.rank;
        const int message = travels ? static_cast<int>(IN ? place.rank : kept_at) : -1;
        bool leads = travels;
        if (travels) {
            const int64_t k = place.choice % static_cast<uint32_t>(p.top_k);
            for (int64_t other = i - k; other < i; other++) leads = leads && p.places[other].x != kept_at;
        }
        const uint32_t same = __match_any_sync(~0u, message), leading = __ballot_sync(~0u, leads);
        const int ahead = __popc(same & below);
        const int number = travels ? choices[message] + ahead : 0;
        const int row = travels ? rows[message] + __popc(same & leading & (below | 1u << lane)) - 1 : 0;
        if (real) visit(i, place, message, number, row, leads);
        __syncwarp();
        if (travels && ahead == 0) choices[message] += __popc(same), rows[message] += __popc(same & leading);
        __syncwarp();
    }
}

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

// The maps of messages that have a zone each, with room for all tokens of a rank, so that a row can be placed without the
// counts of others: row i of the message from rank r is row r padded_tokens + i of those that arrive. The first choice of
// a token in a message writes for all of them. Where the ranks' specs differ, so do their plans, and none would find the
// rows of another: then nothing travels.
extern "C" __global__ void __launch_bounds__(WARP_THREADS) all_to_all_zones(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    const int64_t first = blockIdx.x * p.chunk, last = end_of(p, first), k = p.top_k;
    if (p.stats[p.experts + p.experts / p.ranks + 2] != 0) {
        if (blockIdx.x == 0 && threadIdx.x < p.ranks) p.arrived[threadIdx.x] = 0;
        const int64_t step = static_cast<int64_t>(gridDim.x) * 32;
        for (int64_t i = blockIdx.x * 32 + threadIdx.x; i < p.tokens * p.ranks; i += step) p.token_rows[i] = -1;
        return;
    }
    for (int m = threadIdx.x; m < 4 * p.ranks; m += 32) count[m] = p.message_counts[m * p.chunks + blockIdx.x];
    if (blockIdx.x == 0 && threadIdx.x < p.ranks) p.arrived[threadIdx.x] = p.totals[p.ranks + threadIdx.x];
    __syncwarp();
    for_each_message_choice<true>(p, first, last, count, [&](int64_t i, ChoiceOrigin at, int message, int, int row, bool leads) {
        if (!leads) return;
        const int64_t token = at.choice / static_cast<uint32_t>(k), begin = i - (at.choice - token * k);
        const int64_t arrived = message * p.padded_tokens + row;
        p.row_tokens[arrived] = static_cast<int32_t>(token);
        for (int64_t c = 0; c < k; c++) {
            const int2 place = p.places[begin + c];
            const bool here = place.x == p.rank;
            p.row_slots[arrived * k + c] = here ? place.y : -1;
            if (!here) continue;
            p.row_map[place.y] = static_cast<int32_t>(arrived);
            p.weight_map[place.y] = static_cast<int32_t>(arrived * k + c);
        }
    });
    for_each_message_choice<false>(p, first, last, count + 2 * p.ranks,
                         [&](int64_t i, ChoiceOrigin at, int message, int, int row, bool leads) {
        if (at.rank != p.rank || at.choice >= p.tokens * k) return;
        const int64_t token = at.choice / static_cast<uint32_t>(k);
        if (leads) p.token_rows[token * p.ranks + message] = row;
        if (at.choice != token * k) return;
        for (int r = 0; r < p.ranks; r++) {
            bool goes = false;
            for (int64_t c = 0; c < k; c++) goes = goes || p.places[i + c].x == r;
            if (!goes) p.token_rows[token * p.ranks + r] = -1;
        }
    });
}
