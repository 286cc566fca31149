// The maps of rows that travel by stores into zones (nvlink_dispatch.cu, nvlink_combine.cu).
//
// routing_records.cu has laid out the experts, and all_to_all_plan.cu has noted where each choice is kept and counted the
// messages' rows. Each message has a zone of its own with room for all tokens of a rank, so that its rows can be placed
// without the counts of others: row i of the message from rank r is row r max_tokens + i of those that arrive.
//
// The first choice of a token in a message writes for all of them. A block of one warp a chunk of the choices. Limited by
// walks of single warps. Notes: kernels/notes/nvlink.md.
#include "common/message_choices.cuh"

extern "C" __global__ void __launch_bounds__(WARP_THREADS) nvlink_maps(const __grid_constant__ RecordsPlanParams p) {
    extern __shared__ int32_t count[];
    const int64_t first = blockIdx.x * p.chunk, last = end_of(p, first), k = p.top_k;
    for (int m = threadIdx.x; m < 4 * p.ranks; m += 32) count[m] = p.message_counts[m * p.chunks + blockIdx.x];
    if (blockIdx.x == 0 && threadIdx.x < p.ranks) p.arrived[threadIdx.x] = p.totals[p.ranks + threadIdx.x];
    __syncwarp();
    for_each_message_choice<true>(p, first, last, count, [&](int64_t i, ChoiceOrigin at, int message, int, int row, bool leads) {
        if (!leads) return;
        const int64_t token = at.choice / static_cast<uint32_t>(k), begin = i - (at.choice - token * k);
        const int64_t arrived = message * p.max_tokens + row;
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
