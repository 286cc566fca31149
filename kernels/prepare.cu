// Layouts: the list of row tiles of a layout, made on the device from its counts.
#include "common/common.cuh"

// One block. Each thread takes a run of groups; runs are joined by a scan over the block, so the list is in slot order.
// Filled zones must be ascending, apart and inside the layout; one that is not gets no tiles and raises the fault.
//
// PAIRED: for kernels whose blocks work on tiles 2 i and 2 i + 1 together. Both are of one group where possible: a
// group's odd tile at the end is put together with that of the next group that has one. Should one be left over, its
// partner is a tile of no rows.
template <bool PAIRED>
__device__ void list_tiles(const Schedule& p) {
    __shared__ int64_t before[256];
    const int64_t per = (p.groups + blockDim.x - 1) / blockDim.x;
    const int64_t first = threadIdx.x * per, last = first + per < p.groups ? first + per : p.groups;
    auto inclusive = [&](int64_t own, bool most) {
        before[threadIdx.x] = own;
        __syncthreads();
        for (int d = 1; d < blockDim.x; d *= 2) {
            const int64_t other = threadIdx.x >= d ? before[threadIdx.x - d] : 0;
            __syncthreads();
            const int64_t mine = before[threadIdx.x];
            before[threadIdx.x] = most ? (other > mine ? other : mine) : other + mine;
            __syncthreads();
        }
        const int64_t result = before[threadIdx.x];
        __syncthreads();
        return result;
    };
    auto inside = [&](int64_t g) {
        return p.counts[g] > 0 && p.offsets[g] >= 0 && p.offsets[g] <= p.rows - p.counts[g];
    };
    int64_t end = 0;
    for (int64_t g = first; g < last; g++) {
        if (!inside(g)) continue;
        const int64_t e = p.offsets[g] + p.counts[g];
        end = e > end ? e : end;
    }
    inclusive(end, true);
    // `inclusive` left the array as it was before its last barrier: read the run before this one.
    __shared__ int64_t ends[256];
    ends[threadIdx.x] = before[threadIdx.x];
    __syncthreads();
    const int64_t floor = threadIdx.x ? ends[threadIdx.x - 1] : 0;
    auto walk = [&](auto&& visit) {
        int64_t end = floor;
        for (int64_t g = first; g < last; g++) {
            if (p.counts[g] == 0) continue;
            if (!inside(g) || p.offsets[g] < end) {
                raise_fault(p.fault, FAULT_ZONE, g);
                continue;
            }
            end = p.offsets[g] + p.counts[g];
            visit(g);
        }
    };
    auto tiles_of = [&](int64_t g) { return (p.counts[g] + p.tile_rows - 1) / p.tile_rows; };
    auto put = [&](int64_t at, int64_t g, int64_t tile, bool empty = false) {
        if (at >= p.max_tiles) return;
        const int64_t s = tile * p.tile_rows, left = p.counts[g] - s, rows = left < p.tile_rows ? left : p.tile_rows;
        p.tiles[at] = make_int4(static_cast<int>(g), static_cast<int>(p.offsets[g] + s), empty ? 0 : static_cast<int>(rows), 0);
    };
    int64_t tiles = 0, odd = 0, last_odd = 0;  // the last group with an odd number of tiles, plus one
    walk([&](int64_t g) {
        const int64_t n = tiles_of(g);
        tiles += n;
        if (PAIRED && n % 2 != 0) odd++, last_odd = g + 1;
    });
    const int64_t upto = inclusive(tiles, false);
    if (!PAIRED) {
        if (threadIdx.x == blockDim.x - 1) *p.tile_count = static_cast<int32_t>(upto < p.max_tiles ? upto : p.max_tiles);
        int64_t at = upto - tiles;
        walk([&](int64_t g) {
            for (int64_t i = 0; i < tiles_of(g); i++, at++) put(at, g, i);
        });
        return;
    }
    const int64_t odd_upto = inclusive(odd, false);
    inclusive(last_odd, true);
    ends[threadIdx.x] = before[threadIdx.x];
    __syncthreads();
    // A tile without its partner yet waits: what lies before it is written.
    int64_t odds = odd_upto - odd, at = upto - tiles - odds % 2, waiting = threadIdx.x ? ends[threadIdx.x - 1] : 0;
    walk([&](int64_t g) {
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
    *p.tile_count = static_cast<int32_t>(at < p.max_tiles ? at : p.max_tiles);
}

extern "C" __global__ void __launch_bounds__(256) schedule(const __grid_constant__ Schedule p) { list_tiles<false>(p); }
extern "C" __global__ void __launch_bounds__(256) schedule_pairs(const __grid_constant__ Schedule p) { list_tiles<true>(p); }
