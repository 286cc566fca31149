// Products of few rows with 16-bit weights on Hopper (sm_90a): up with a gate, down, and the router's logits. Bound by
// the bytes of the weights, where the kernels for many rows (sm90_grouped_gemm.cu, sm90_linear.cu) have too few tiles to
// fill the GPU. Each sum is made as theirs are, 16 products at a time in the order of k, so a row's bits do not depend
// on which of them serves it. Empty where the architecture is another.
//
//   sm90_decode_up      rows [T, H] behind a map or [N, H], [E, 2 I, H] -> activations [N, I], pre-activations
//   sm90_decode_down    [N, I], [E, H, I] -> [N, H]
//   sm90_decode_linear  x [T, H], weight [E, H] -> logits f32 [T, E]
//
// A warp has 16 weight rows (8 of gate and 8 of up), up to 8 rows of the layout and all of k. It works on its own:
// weights and rows come by cp.async into a ring that no other warp reads. Weights are the left operand of m16n8k16.
// Notes: kernels/notes/decode.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/decode_epilogue.cuh"
#include "portable/gemm.cuh"
#include "ptx/mbarrier_tma.cuh"

namespace {

constexpr int ROWS = SM90_DECODE_ROWS, STEP = 64;
// Warps of a block, and stages of a warp's ring: of the logits, which few blocks make, all that is on its way together.
template <int KIND>
constexpr int WARPS = KIND == LINEAR ? SM90_DECODE_LINEAR_WARPS : SM90_DECODE_WARPS;
template <int KIND>
constexpr int STAGES = KIND == LINEAR ? 32 : 8;
// A stage: 16 weight rows and 8 rows of 64 k, in chunks of 8 k that are swizzled by their row.
constexpr int ROW_BYTES = STEP * 2, WEIGHT_BYTES = 16 * ROW_BYTES, STAGE_BYTES = WEIGHT_BYTES + ROWS * ROW_BYTES;
static_assert(WARPS<UP> * STAGES<UP> * STAGE_BYTES == SM90_DECODE_SMEM && WARPS<LINEAR> * STAGES<LINEAR> * STAGE_BYTES == SM90_DECODE_LINEAR_SMEM, "common/shapes.h has others");
static_assert(ROWS == 8 && SM90_DECODE_COLUMNS == WARPS<UP> * 16 && SM90_DECODE_LINEAR_COLUMNS == WARPS<LINEAR> * 16, "common/shapes.h has others");

struct RowTile {
    int64_t group, slot;
    int rows;
};

// A warp's ring, and what of a stage a lane copies: four chunks of weights and two of rows, all in column `lane % 8`.
template <class T, int STAGES>
struct WarpRing {
    const T *weights[4], *rows[2];  // null: a row of zeros
    uint32_t base, into;            // of the ring; of this lane's first chunk in a stage
    int64_t k;

    // The rows of a lane's copies are 4 apart, which is bit 2 of what a chunk is swizzled by.
    static __device__ __forceinline__ uint32_t place(uint32_t to, int copy) { return (to ^ copy % 2 * 64) + copy * 4 * ROW_BYTES; }
    __device__ __forceinline__ uint32_t stage(int step) const { return base + step % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ bool inside(int step) const { return step * STEP + threadIdx.x % 8 * 8 < k; }
    __device__ __forceinline__ void load_weights(int step) const {
        const bool valid = inside(step);
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::cp_async(place(stage(step) + into, i), valid ? weights[i] + step * STEP : weights[i], valid);
    }
    __device__ __forceinline__ void load_rows(int step) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool valid = inside(step) && rows[i];
            ptx::cp_async(place(stage(step) + WEIGHT_BYTES + into, i), valid ? rows[i] + step * STEP : weights[0], valid);
        }
    }
};

// Sums of a tile: acc[0] and acc[1] of weight row lane / 4, the others of that plus 8, each of rows 2 (lane % 4) and the
// next.
template <class T, int STAGES>
__device__ __forceinline__ void mma_tile(float (&acc)[4], const WarpRing<T, STAGES>& ring, int steps) {
    const int lane = threadIdx.x % 32;
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) ring.load_rows(step);
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    }
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2) : "memory");
        // All lanes' copies of this step are there, and all have read the stage that is filled next.
        __syncwarp();
        if (step + STAGES - 1 < steps) ring.load_weights(step + STAGES - 1), ring.load_rows(step + STAGES - 1);
        asm volatile("cp.async.commit_group;\n" ::: "memory");
        const uint32_t weights = ring.stage(step), rows = weights + WEIGHT_BYTES;
#pragma unroll
        for (int pair = 0; pair < STEP / 32; pair++) {
            uint32_t b[4];
            ptx::ldmatrix(rows + lane % 8 * ROW_BYTES + (((pair * 4 + lane / 8) ^ lane % 8) << 4), b);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t a[4];
                const int chunk = pair * 4 + half * 2 + lane / 16;
                ptx::ldmatrix(weights + lane % 16 * ROW_BYTES + ((chunk ^ lane % 8) << 4), a);
                mma<T>(acc, a, b[half * 2], b[half * 2 + 1]);
            }
        }
    }
}

template <class T, int KIND>
__device__ __forceinline__ void tile(const GemmParams& p, const RowTile& t, int64_t block) {
    extern __shared__ __align__(128) char shared[];
    constexpr int COLUMNS = KIND == UP ? 8 : 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first = (block * WARPS<KIND> + warp) * COLUMNS;
    if (first >= p.n) return;
    WarpRing<T, STAGES<KIND>> ring;
    ring.k = p.k;
    ring.base = ptx::smem_address(shared) + warp * STAGES<KIND> * STAGE_BYTES;
    ring.into = lane / 8 * ROW_BYTES + ((lane % 8 ^ lane / 8) << 4);
    const T* b = static_cast<const T*>(p.b) + t.group * (KIND == UP ? 2 : 1) * p.n * p.k + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int r = i * 4 + lane / 8;
        const int64_t column = first + (KIND == UP ? r % 8 : r), inside = column < p.n ? column : p.n - 1;
        ring.weights[i] = b + (inside + (KIND == UP && r >= 8 ? p.n : 0)) * p.k;
    }
    // Weights are on their way while rows are looked up; the first group of copies waits for both.
    const int steps = static_cast<int>((p.k + STEP - 1) / STEP);
    for (int step = 0; step < min(STAGES<KIND> - 1, steps); step++) ring.load_weights(step);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = i * 4 + lane / 8;
        const int64_t row = r < t.rows ? mapped_row(p.a_map, t.slot + r, p.a_rows, p.fault, p.site) : -1;
        ring.rows[i] = row >= 0 ? static_cast<const T*>(p.a) + row * p.k + lane % 8 * 8 : nullptr;
    }
    float acc[4] = {};
    mma_tile(acc, ring, steps);
    asm volatile("cp.async.wait_all;\n" ::: "memory");

    const int64_t column = first + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = lane % 4 * 2 + i;
        const int64_t slot = t.slot + r;
        if (r >= t.rows) continue;
        if constexpr (KIND == UP) {
            if (column >= p.n) continue;
            with_gate(static_cast<int>(p.activation), [&](auto kind) { decode_epilogue_up<T, kind.value>(p, t.group, slot, column, acc[i], acc[2 + i]); });
        } else if constexpr (KIND == DOWN) {
            decode_epilogue_down<T>(p, t.group, slot, {column, column + 8}, {acc[i], acc[2 + i]});
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t n = column + half * 8;
                const float v = acc[half * 2 + i];
                if (n < p.n) static_cast<float*>(p.out)[slot * p.n + n] = p.bias ? v + load_any(p.bias, p.bias_type, n) : v;
            }
        }
    }
}

template <class T, int KIND>
__device__ __forceinline__ void run(const GemmParams& p) {
    const int64_t at = blockIdx.x / p.n_tiles, block = blockIdx.x % p.n_tiles;
    if constexpr (KIND == LINEAR) {
        const int64_t first = at * ROWS, left = p.m - first;
        tile<T, KIND>(p, {0, first, static_cast<int>(left < ROWS ? left : ROWS)}, block);
    } else {
        // Both at once: the list has room for this tile even where it has none.
        const int4 t = p.tiles[at];
        if (at < *p.tile_count) tile<T, KIND>(p, {t.x, t.y, t.z}, block);
    }
}

}  // namespace

#define DECODE(name, T, KIND)                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS<KIND> * 32) name(const __grid_constant__ GemmParams p) { \
        wait_for_previous_kernel();                                                                          \
        run<T, KIND>(p);                                                                                     \
    }

DECODE(sm90_decode_up_bf16, bf16, UP)
DECODE(sm90_decode_up_f16, f16, UP)
DECODE(sm90_decode_down_bf16, bf16, DOWN)
DECODE(sm90_decode_down_f16, f16, DOWN)
DECODE(sm90_decode_linear_bf16, bf16, LINEAR)
DECODE(sm90_decode_linear_f16, f16, LINEAR)
#endif
