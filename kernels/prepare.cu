// Layouts: the list of row tiles of a layout, made on the device from its counts.
#include "common/common.cuh"

// One block. Each thread takes a run of groups; runs are joined by a scan over the block, so the list is in slot order.
// Filled zones must be ascending, apart and inside the layout; one that is not gets no tiles and raises the fault.
extern "C" __global__ void __launch_bounds__(256) schedule(const __grid_constant__ Schedule p) {
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
    int64_t tiles = 0;
    walk([&](int64_t g) { tiles += (p.counts[g] + p.tile_rows - 1) / p.tile_rows; });
    const int64_t upto = inclusive(tiles, false);
    if (threadIdx.x == blockDim.x - 1) *p.tile_count = static_cast<int32_t>(upto < p.max_tiles ? upto : p.max_tiles);
    int64_t at = upto - tiles;
    walk([&](int64_t g) {
        for (int64_t s = 0; s < p.counts[g]; s += p.tile_rows, at++) {
            const int64_t rows = p.counts[g] - s < p.tile_rows ? p.counts[g] - s : p.tile_rows;
            if (at >= p.max_tiles) break;
            p.tiles[at] = make_int4(static_cast<int>(g), static_cast<int>(p.offsets[g] + s), static_cast<int>(rows), 0);
        }
    });
}
