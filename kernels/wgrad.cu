// Weight gradients, portable path: for each expert the sum over its rows of left times right, [N, m] and [N, n] (either
// may lie behind a map) -> [E, m, n], of their type or f32, written or added to; and gradients of biases, [N, m] -> [E,
// m].
//
// A block a tile of an expert's output: 128 x 128 by steps of 32 slots with mma.sync for 16-bit types, 64 x 64 by 16
// with fused multiply-add for f32 (portable/gemm.cuh). Slots may be weighted. Limited by the multiplying instructions.
// Hopper takes sm90_wgrad.cu instead. Notes: kernels/NOTES.md, "Portable path".
#include "portable/gemm.cuh"

extern "C" __global__ void __launch_bounds__(mma_sync::THREADS, 2) wgrad_bf16(const __grid_constant__ GemmParams p) { mma_sync::run<bf16, WGRAD>(p); }
extern "C" __global__ void __launch_bounds__(mma_sync::THREADS, 2) wgrad_f16(const __grid_constant__ GemmParams p) { mma_sync::run<f16, WGRAD>(p); }
extern "C" __global__ void __launch_bounds__(simt::THREADS) wgrad_f32(const __grid_constant__ GemmParams p) { simt::run<float, WGRAD>(p); }

// Gradient of a bias: rows of a group summed, scaled where asked for. A block takes 32 columns of a group; each
// of its eight warps takes every eighth slot, and their sums are added in the order of the warps.
extern "C" __global__ void column_sums(const __grid_constant__ ColumnSumsParams p) {
    constexpr int WARPS = COLUMN_SUMS_THREADS / 32;
    static_assert(COLUMN_SUMS_COLUMNS == 32, "a lane a column");
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane, group = blockIdx.y;
    int64_t offset = p.offsets ? p.offsets[group] : 0, count = p.counts ? p.counts[group] : p.slots;
    if (offset < 0 || count < 0 || offset > p.slots - count) {
        if (threadIdx.x == 0 && count != 0) raise_segment(p.fault, group, offset, count, p.site);
        count = 0;
    }
    float sum = 0.0f;
    for (int64_t i = warp; i < count; i += WARPS) {
        const int64_t slot = offset + i, row = mapped_row(p.map, slot, p.base_rows, p.fault, p.site);
        if (row < 0 || column >= p.width) continue;
        const float v = load_any(p.rows, p.type, row * p.width + column);
        sum += p.scale ? p.scale[slot] * v : v;
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= p.width) return;
    float total = 0.0f;
    for (int w = 0; w < WARPS; w++) total += sums[w][lane];
    const int64_t at = group * p.width + column;
    store_any(p.out, p.out_type, at, p.accumulate ? load_any(p.out, p.out_type, at) + total : total);
}
