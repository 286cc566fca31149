// Layouts: slots for the choices of a group of one rank, and the list of row tiles of a layout, made on the device.
//
// A slot is its expert's first slot plus the number of earlier choices of that expert, in the order (token, k). Choices
// are cut into chunks of one warp each: `plan_count` counts each expert's choices in each chunk, `plan_scan` adds up
// the chunks before, `plan_segments` lays the experts out and lists their tiles, `plan_slots` walks the chunks again
// and numbers. `plan_small` is all of these in one block. Warps number their choices by comparing ids, so no result
// depends on the order of threads.
#include "common/counting_sort.cuh"

namespace {

// Choices as the caller gave them. A bad id counts as none (-1) and raises the fault. All choices are walked twice, and
// the first walk is over before the second begins; in this one, the choice that the fault is of tells its id.
struct CallerChoices {
    const LocalPlanParams& p;
    bool second;
    __device__ __forceinline__ int64_t id(int64_t i) const {
        return p.wide ? static_cast<const int64_t*>(p.ids)[i] : static_cast<const int32_t*>(p.ids)[i];
    }
    __device__ __forceinline__ int expert(int64_t i, int64_t id, int64_t at) const {
        const int lane = threadIdx.x % 32;
        const uint32_t below = (1u << lane) - 1;
        const bool real = id >= 0 && id < p.experts;
        const int64_t token = i / p.top_k;
        // Twice in a token: among these 32, or where the token began before them.
        const unsigned long long key = real ? static_cast<unsigned long long>(token) << 20 | id : ~0ull - lane;
        const uint32_t twins = __match_any_sync(~0u, key) & below;  // by all lanes, whatever their ids
        bool bad = id < -1 || id >= p.experts || twins != 0;
        if (real && token * p.top_k < at) {
            for (int64_t other = token * p.top_k; other < at; other++) bad = bad || this->id(other) == id;
        }
        if (bad) raise(i, id);
        return real && !bad ? static_cast<int>(id) : -1;
    }
    __device__ void raise(int64_t i, int64_t id) const {
        const int64_t detail = i << ORIGIN_BITS | p.origin;
        if (!second) {
            raise_fault(p.fault, FAULT_CHOICE, detail);
            return;
        }
        volatile unsigned long long* status = p.fault;
        const unsigned long long own = fault_word(FAULT_CHOICE, detail);
        // Of an earlier call's fault the same words were told already.
        if (status[STATUS_FAULT] != own || status[STATUS_CHOICE] == own) return;
        int64_t first = i / p.top_k * p.top_k;
        const int64_t begin = first;
        while (first < i && this->id(first) != id) first++;
        status[STATUS_CHOICE] = own;
        status[STATUS_CHOICE_ID] = static_cast<unsigned long long>(id);
        status[STATUS_CHOICE_FIRST] = first < i && id >= 0 && id < p.experts ? first - begin + 1 : 0;
        status[STATUS_CHOICE_SIZES] = static_cast<unsigned long long>(p.experts) << 32 | p.top_k;
    }
};

struct NumberSlots {
    const LocalPlanParams& p;
    __device__ void operator()(int64_t i, int e, int rank) const {
        const int64_t slot = e >= 0 && rank < p.counts[e] ? p.offsets[e] + rank : -1;
        p.kept[i] = slot >= 0 ? e : -1;
        p.return_map[i] = static_cast<int32_t>(slot);
        if (slot < 0) return;
        p.row_map[slot] = static_cast<int32_t>(i / p.top_k);
        p.weight_map[slot] = static_cast<int32_t>(i);
    }
};

__device__ __forceinline__ int64_t end_of(const LocalPlanParams& p, int64_t first, int64_t chunk) {
    return first + chunk < p.choices ? first + chunk : p.choices;
}

// Slots without a choice; as many threads as may be.
__device__ __forceinline__ void clear_maps(const LocalPlanParams& p) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows; i += step) {
        p.row_map[i] = -1;
        p.weight_map[i] = -1;
    }
}

// Lays the experts out behind each other, from their numbers of choices in `stats`. A block of whole warps, each with
// a run of experts.
__device__ void layout_segments(const LocalPlanParams& p) {
    const int64_t per = (p.experts + blockDim.x - 1) / blockDim.x;
    const int64_t first = threadIdx.x * per, last = first + per < p.experts ? first + per : p.experts;
    auto kept = [&](int64_t e) { return p.stats[e] < p.expert_limit ? p.stats[e] : p.expert_limit; };
    // A division of 64 bits takes as long as a read.
    auto padded = [&](int64_t e) { return p.alignment == 1 ? kept(e) : (kept(e) + p.alignment - 1) / p.alignment * p.alignment; };
    auto inside = [&](int64_t slot) { return slot < p.rows ? slot : p.rows; };
    int64_t own = 0, needed, dropped = 0, all_dropped;
    for (int64_t e = first; e < last; e++) own += padded(e);
    int64_t end = block_sum(own, needed) - own;
    for (int64_t e = first; e < last; e++) {
        const int64_t start = inside(end), room = p.rows - start;
        end += padded(e);
        const int64_t count = kept(e) < room ? kept(e) : room;
        p.offsets[e] = start;
        p.counts[e] = count;
        p.stats[p.experts + e] = inside(end) - start;
        dropped += p.stats[e] - count;
    }
    // By all threads alike: where there is room for everything, nothing is.
    all_dropped = 0;
    if (needed > p.rows || p.expert_limit < p.choices) block_sum(dropped, all_dropped);
    if (threadIdx.x != 0) return;
    p.stats[2 * p.experts] = needed;
    p.stats[2 * p.experts + 1] = all_dropped;
    if (needed > p.rows && !p.may_drop) {
        raise_capacity(p.fault, needed, 0, p.rows, p.origin);
    }
}

// A block of at most 1024 threads for each chunk of groups. All look at all segments, and list those of their chunk.
// Each thread takes a run of groups; runs are joined by a scan over the block, so
// the list is in slot order. Filled segments must be ascending, apart and inside the layout; one that is not gets no
// tiles and raises the fault.
//
// PAIRED: for kernels whose blocks work on tiles 2 i and 2 i + 1 together. Both are of one group where possible: a
// group's odd tile at the end is put together with that of the next group that has one. Should one be left over, its
// partner is a tile of no rows.
//
// LAID_OUT: segments come from `layout_segments`, which keeps them ascending, apart and inside.
template <bool PAIRED, bool LAID_OUT = false>
__device__ void write_tile_list(const TileListParams& p) {
    __shared__ int64_t totals[32];
    const int64_t per = (p.groups + blockDim.x - 1) / blockDim.x;
    const int64_t first = threadIdx.x * per, last = first + per < p.groups ? first + per : p.groups;
    const int64_t chunk_first = blockIdx.x * p.chunk, chunk_last = chunk_first + p.chunk;
    int4* list = p.tiles + blockIdx.x * p.max_tiles;
    int32_t* count = p.tile_count + blockIdx.x;
    if (threadIdx.x == 0) p.tickets[blockIdx.x] = 0;
    // Sum or largest, none below zero, of the threads before this one, and with its own.
    struct Upto {
        int64_t before, own;
    };
    auto scan = [&](int64_t own, bool most) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        auto join = [&](int64_t a, int64_t b) { return most ? (a > b ? a : b) : a + b; };
        for (int d = 1; d < 32; d *= 2) {
            const int64_t other = __shfl_up_sync(~0u, own, d);
            if (lane >= d) own = join(other, own);
        }
        int64_t before = __shfl_up_sync(~0u, own, 1);
        if (lane == 0) before = 0;
        __syncthreads();  // the last scan's totals have been read
        if (lane == 31) totals[warp] = own;
        __syncthreads();
        int64_t upto = lane < static_cast<int>(blockDim.x / 32) ? totals[lane] : 0;
        for (int d = 1; d < 32; d *= 2) {
            const int64_t other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto = join(other, upto);
        }
        const int64_t warps = __shfl_sync(~0u, upto, (warp + 31) % 32);
        if (warp > 0) before = join(warps, before), own = join(warps, own);
        return Upto{before, own};
    };
    auto inside = [&](int64_t g) {
        return p.counts[g] > 0 && p.offsets[g] >= 0 && p.offsets[g] <= p.rows - p.counts[g];
    };
    int64_t floor = 0;
    if (!LAID_OUT) {
        int64_t end = 0;
        for (int64_t g = first; g < last; g++) {
            if (!inside(g)) continue;
            const int64_t e = p.offsets[g] + p.counts[g];
            end = e > end ? e : end;
        }
        floor = scan(end, true).before;
    }
    auto for_each_group = [&](auto&& visit) {
        int64_t end = floor;
        for (int64_t g = first; g < last; g++) {
            if (p.counts[g] == 0) continue;
            if (!inside(g) || p.offsets[g] < end) {
                raise_segment(p.fault, g, p.offsets[g], p.counts[g], p.site);
                continue;
            }
            end = p.offsets[g] + p.counts[g];
            if (g >= chunk_first && g < chunk_last) visit(g);
        }
    };
    // Counts are below 2^31; a division of 64 bits takes as long as a read.
    const uint32_t tile_rows = static_cast<uint32_t>(p.tile_rows);
    auto tiles_of = [&](int64_t g) -> int64_t { return (static_cast<uint32_t>(p.counts[g]) + tile_rows - 1) / tile_rows; };
    auto put = [&](int64_t at, int64_t g, int64_t tile, bool empty = false) {
        if (at >= p.max_tiles) return;
        const int64_t s = tile * p.tile_rows, left = p.counts[g] - s, rows = left < p.tile_rows ? left : p.tile_rows;
        list[at] = make_int4(static_cast<int>(g - chunk_first), static_cast<int>(p.offsets[g] + s), empty ? 0 : static_cast<int>(rows), 0);
    };
    int64_t tiles = 0, odd = 0, last_odd = 0;  // the last group with an odd number of tiles, plus one
    for_each_group([&](int64_t g) {
        const int64_t n = tiles_of(g);
        tiles += n;
        if (PAIRED && n % 2 != 0) odd++, last_odd = g + 1;
    });
    const Upto upto = scan(tiles, false);
    if (!PAIRED) {
        if (threadIdx.x == blockDim.x - 1) *count = static_cast<int32_t>(upto.own < p.max_tiles ? upto.own : p.max_tiles);
        int64_t at = upto.before;
        for_each_group([&](int64_t g) {
            for (int64_t i = 0; i < tiles_of(g); i++, at++) put(at, g, i);
        });
        return;
    }
    // A tile without its partner yet waits: what lies before it is written.
    int64_t odds = scan(odd, false).before, at = upto.before - odds % 2, waiting = scan(last_odd, true).before;
    for_each_group([&](int64_t g) {
        const int64_t n = tiles_of(g), even = n / 2 * 2;
        for (int64_t i = 0; i < even; i++, at++) put(at, g, i);
        if (n % 2 == 0) return;
        if (odds++ % 2 != 0) {
            put(at++, waiting - 1, tiles_of(waiting - 1) - 1);
            put(at++, g, even);
        }
        waiting = g + 1;
    });
    if (threadIdx.x != blockDim.x - 1) return;
    if (odds % 2 != 0) {
        put(at++, waiting - 1, tiles_of(waiting - 1) - 1);
        put(at++, waiting - 1, tiles_of(waiting - 1) - 1, true);
    }
    *count = static_cast<int32_t>(at < p.max_tiles ? at : p.max_tiles);
}

// The work of one block once the segments are laid out: the list of their tiles, and what has been found until now,
// which is all that there is to find: numbering raises what counting has raised.
__device__ void finish_segments(const LocalPlanParams& p) {
    __syncthreads();
    if (p.tiles != nullptr) {
        const TileListParams list{p.offsets, p.counts, p.experts, p.experts, p.rows, p.tile_rows, p.tiles + 1, &p.tiles->x, reinterpret_cast<uint32_t*>(&p.tiles->y), p.max_tiles, p.fault, p.origin};
        if (p.paired) write_tile_list<true, true>(list);
        else write_tile_list<false, true>(list);
        __syncthreads();
    }
    copy_status(p.fault, p.report, STATUS_WORDS);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARP_THREADS) plan_count(const __grid_constant__ LocalPlanParams p) {
    extern __shared__ int32_t count[];
    for (int e = threadIdx.x; e < p.experts; e += 32) count[e] = 0;
    __syncwarp();
    const int64_t first = blockIdx.x * p.chunk;
    for_each_choice(CallerChoices{p, false}, first, end_of(p, first, p.chunk), count, [](int64_t, int, int) {});
    for (int e = threadIdx.x; e < p.experts; e += 32) p.before[e * p.chunks + blockIdx.x] = count[e];
}

// A warp an expert: chunks' counts become counts before the chunk. All blocks clear the maps;
// there are more than experts need where maps are long.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_scan(const __grid_constant__ LocalPlanParams p) {
    clear_maps(p);
    scan_chunks(p.before, p.chunks, p.experts, p.stats);
}

extern "C" __global__ void __launch_bounds__(PLAN_SEGMENTS_THREADS) plan_segments(const __grid_constant__ LocalPlanParams p) {
    layout_segments(p);
    finish_segments(p);
}

extern "C" __global__ void __launch_bounds__(WARP_THREADS) plan_slots(const __grid_constant__ LocalPlanParams p) {
    extern __shared__ int32_t count[];
    for (int e = threadIdx.x; e < p.experts; e += 32) count[e] = p.before[e * p.chunks + blockIdx.x];
    __syncwarp();
    const int64_t first = blockIdx.x * p.chunk;
    for_each_choice(CallerChoices{p, true}, first, end_of(p, first, p.chunk), count, NumberSlots{p});
}

// One block, a warp a chunk. The layout is made in shared memory, as each step reads what the one before has written:
// offsets and counts [E], statistics [2 E + 2], then [chunks, E] counts.
extern "C" __global__ void __launch_bounds__(PLAN_SEGMENTS_THREADS) plan_small(const __grid_constant__ LocalPlanParams p) {
    wait_for_previous_kernel();
    extern __shared__ int64_t layout[];
    LocalPlanParams shared = p;
    shared.offsets = layout, shared.counts = layout + p.experts, shared.stats = layout + 2 * p.experts;
    int32_t* count = reinterpret_cast<int32_t*>(layout + 4 * p.experts + 2);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    int32_t* own = count + warp * p.experts;
    for (int i = threadIdx.x; i < warps * p.experts; i += blockDim.x) count[i] = 0;
    clear_maps(p);
    __syncthreads();
    const int64_t first = warp * p.chunk, last = end_of(p, first, p.chunk);
    for_each_choice(CallerChoices{p, false}, first, last, own, [](int64_t, int, int) {});
    __syncthreads();
    for (int e = threadIdx.x; e < p.experts; e += blockDim.x) {
        int32_t total = 0;
        for (int w = 0; w < warps; w++) {
            const int32_t here = count[w * p.experts + e];
            count[w * p.experts + e] = total;
            total += here;
        }
        shared.stats[e] = total;
    }
    __syncthreads();
    layout_segments(shared);
    finish_segments(shared);
    for (int e = threadIdx.x; e < 2 * p.experts + 2; e += blockDim.x) p.stats[e] = shared.stats[e];
    for (int e = threadIdx.x; e < p.experts; e += blockDim.x) p.offsets[e] = shared.offsets[e], p.counts[e] = shared.counts[e];
    for_each_choice(CallerChoices{p, true}, first, last, own, NumberSlots{shared});
}

// Status words to memory of the host.
extern "C" __global__ void __launch_bounds__(WARP_THREADS) report(const __grid_constant__ RowsOpParams p) {
    copy_status(static_cast<const unsigned long long*>(p.source), static_cast<unsigned long long*>(p.out), p.width);
}

// Segments and slots of a layout that another library made: filled slots, which it does not tell apart from padding,
// are the expert's choices. More rows than there is room for raise the fault.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_external_layout(const __grid_constant__ ExternalLayoutParams p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    auto inside = [&](int64_t slot) { return slot < p.rows ? slot : p.rows; };
    auto filled = [&](int64_t j) {
        const int64_t start = inside(p.starts[j]);
        const int64_t end = inside(j + 1 < p.groups ? p.starts[j + 1] : *p.total);
        const int64_t load = p.loads[p.first + j];
        return load < end - start ? load : end - start;
    };
    if (at < p.groups) {
        p.offsets[at] = inside(p.starts[at]);
        p.counts[at] = filled(at);
    }
    if (at == 0 && *p.total > p.rows) {
        raise_capacity(p.fault, *p.total, p.first / p.groups, p.rows, p.origin);
    }
    if (at >= p.rows) return;
    // The last segment that starts at or before the slot.
    int64_t low = 0, high = p.groups;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (p.starts[middle] <= at ? low : high) = middle;
    }
    p.row_map[at] = at - p.starts[low] < filled(low) ? static_cast<int32_t>(at) : -1;
}

// Where segments begin, from the counts of all ranks' choices. One block; L is small, and the counts stay in L1.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) segment_starts(const __grid_constant__ SegmentStartsParams p) {
    auto padded = [&](int64_t j) { return (p.loads[p.first + j] + p.alignment - 1) / p.alignment * p.alignment; };
    for (int64_t j = threadIdx.x; j <= p.groups; j += blockDim.x) {
        int64_t start = 0;
        for (int64_t i = 0; i < j; i++) start += padded(i);
        *(j < p.groups ? &p.starts[j] : p.total) = start;
    }
}

// A choice more a token: none, whose weight is the token's number. That is exact below 2^24.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) low_latency_pack(const __grid_constant__ LowLatencyRowsParams p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t wide = p.top_k + 1, token = at / wide, k = at % wide;
    if (token >= p.tokens) return;
    const bool own = k < p.top_k;
    if (p.out_ids != nullptr) p.out_ids[at] = own ? p.ids[token * p.top_k + k] : -1;
    if (p.out_weights == nullptr) return;
    const float weight = own && p.weights != nullptr ? p.weights[token * p.top_k + k] : 0.f;
    p.out_weights[at] = own ? weight : static_cast<float>(token);
}

// Sorts the rows that arrived into the order of their tokens.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) low_latency_sort(const __grid_constant__ LowLatencyRowsParams p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t wide = p.top_k + 1, row = at / wide, k = at % wide;
    if (row >= p.ranks * p.tokens) return;
    const int64_t rank = row / p.tokens;
    int64_t token = -1;
    if (row % p.tokens < p.counts[rank]) {
        const float number = p.weights[row * wide + p.top_k];
        if (number >= 0.f && number < static_cast<float>(p.tokens)) token = rank * p.tokens + static_cast<int64_t>(number);
    }
    if (k == p.top_k) {
        p.token_of[row] = static_cast<int32_t>(token);
        if (token >= 0) p.row_of[token] = static_cast<int32_t>(row);
    } else if (token >= 0) {
        p.out_ids[token * p.top_k + k] = p.ids[row * wide + k];
        p.out_weights[token * p.top_k + k] = p.weights[row * wide + k];
    }
}

// Maps of a plan that was made in the order of tokens, for rows as they lie.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) low_latency_map(const __grid_constant__ LowLatencyRowsParams p) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < p.slots && p.row_map[at] >= 0) p.row_map[at] = p.row_of[p.row_map[at]];
    const int64_t row = at / p.top_k;
    if (row >= p.ranks * p.tokens) return;
    const int32_t token = p.token_of[row];
    p.out_map[at] = token >= 0 ? p.return_map[token * p.top_k + at % p.top_k] : -1;
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) list_tiles(const __grid_constant__ TileListParams p) {
    wait_for_previous_kernel();
    write_tile_list<false>(p);
}
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) list_tiles_paired(const __grid_constant__ TileListParams p) { write_tile_list<true>(p); }
