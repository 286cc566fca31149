// Choices by the message that they travel in, where each token goes once to every rank that keeps a choice of it.
#pragma once
#include "common/routing_records.cuh"

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
