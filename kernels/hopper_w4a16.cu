// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// Weights are the left operand, which the matrix unit takes from registers: codes lie in shared memory as they are stored,
// and each warp makes bf16 of those of its 16 weight rows in the registers that the product reads. No bf16 weight is ever in
// memory of any kind. A tile is weight rows by rows of a layout, the output's columns by its rows, turned on its way out.
//
// A block stays on its multiprocessor and walks through tiles. One warpgroup brings rows and codes into rings of their own;
// two multiply, BLOCKS times 64 weight rows and all rows of the tile each. While the matrix unit works on one fragment, the
// warps make the next. As the two share no results, one may run ahead by as much as the ring holds, so that one's epilogue
// runs under the other's products.
//
// Rows in slot order come by the copy engine, rows behind a map by copies of 16 bytes a thread. Those past a tile's end are
// the next zone's or the tile's first; their products are never stored.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/epilogue.cuh"
#include "common/fp4.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace {
using namespace hopper;
using namespace fp4;

constexpr int BK = 64, THREADS = 384;
// Codes come for 256 k at a time, 128 bytes of a weight row; boxes hold 64 rows.
constexpr int CODE_STEPS = 4, BOX = 64 * 128;
// Results leave 64 columns and 128 rows at a time a warpgroup.
constexpr int LEAVING = 128;

// Blocks of 64 weight rows of a warpgroup: of gate and of up, or one. Rows of the layout follow from the accumulators.
template <int KIND>
struct Layout {
    static constexpr int BLOCKS = KIND == UP ? 2 : 1, ROWS = 256 / BLOCKS;
    static constexpr int STAGES = KIND == UP ? 6 : 5, CODE_STAGES = KIND == UP ? 3 : 2;
    static constexpr int STAGE = ROWS * BK * 2, CODE_STAGE = 2 * BLOCKS * BOX;
    static constexpr int CODES = STAGES * STAGE, STAGED = CODES + CODE_STAGES * CODE_STAGE, BARRIERS = STAGED + 2 * LEAVING * 128;
    static constexpr int BYTES = BARRIERS + 2 * (STAGES + CODE_STAGES) * 8;
};
constexpr int SHARED = 229520;
static_assert(Layout<UP>::BYTES <= SHARED && Layout<DOWN>::BYTES <= SHARED && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

// Position i of a ring is stage i % STAGES, used for the (i / STAGES)-th time.
template <int STAGES, int BYTES>
struct Ring {
    uint32_t stages, barriers;
    __device__ __forceinline__ uint32_t stage(uint32_t at) const { return stages + at % STAGES * BYTES; }
    __device__ __forceinline__ uint32_t full(uint32_t at) const { return barriers + at % STAGES * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t at) const { return full(at) + STAGES * 8; }
    __device__ __forceinline__ void wait_full(uint32_t at) const { barrier_wait(full(at), at / STAGES & 1); }
    __device__ __forceinline__ void wait_empty(uint32_t at) const { barrier_wait(empty(at), (at / STAGES & 1) ^ 1); }
};
template <int KIND>
struct Rings {
    using L = Layout<KIND>;
    Ring<L::STAGES, L::STAGE> rows;
    Ring<L::CODE_STAGES, L::CODE_STAGE> codes;
    uint32_t staging;
    __device__ __forceinline__ explicit Rings(uint32_t base)
        : rows{base, base + L::BARRIERS}, codes{base + L::CODES, base + L::BARRIERS + 2 * L::STAGES * 8}, staging(base + L::STAGED) {}
};

// Tiles of this block: all columns of a row tile one after another.
struct Walk {
    const Gemm& p;
    __device__ __forceinline__ int count() const {
        const int all = *p.tile_count * static_cast<int>(p.n_tiles), own = blockIdx.x;
        return all > own ? (all - own - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    }
    // (group, first slot, rows, first column)
    __device__ __forceinline__ int4 at(int i) const {
        const int id = blockIdx.x + i * gridDim.x, wide = static_cast<int>(p.n_tiles);
        int4 t = p.tiles[id / wide];
        t.w = id % wide * 128;
        return t;
    }
};

// Codes of 256 k of a tile: the first block of each warpgroup, then the second, which is up's.
template <int KIND>
__device__ __forceinline__ void bring_codes(const Gemm& p, const CUtensorMap& codes, const Rings<KIND>& rings, const int4& t, uint32_t at, int step) {
    using L = Layout<KIND>;
    rings.codes.wait_empty(at);
    barrier_arrive_expect(rings.codes.full(at), L::CODE_STAGE);
#pragma unroll
    for (int box = 0; box < 2 * L::BLOCKS; box++) {
        bulk(rings.codes.stage(at) + box * BOX, codes, rings.codes.full(at), step * (BK / 2), t.w + box % 2 * 64 + box / 2 * p.n, t.x);
    }
}

// Producers where the copy engine brings everything: a thread each for rows and codes.
template <int KIND>
__device__ __forceinline__ void produce(const Gemm& p, const CUtensorMap& rows, const CUtensorMap& codes, const Rings<KIND>& rings) {
    const Walk walk{p};
    const int steps = static_cast<int>(p.k / BK), count = walk.count();
    const bool brings_codes = threadIdx.x % 128 >= 32;
    uint32_t at = 0;
    for (int i = 0; i < count; i++) {
        const int4 t = walk.at(i);
        for (int step = 0; step < steps; step += brings_codes ? CODE_STEPS : 1, at++) {
            if (brings_codes) {
                bring_codes(p, codes, rings, t, at, step);
                continue;
            }
            rings.rows.wait_empty(at);
            barrier_arrive_expect(rings.rows.full(at), Layout<KIND>::STAGE);
            bulk(rings.rows.stage(at), rows, rings.rows.full(at), step * BK, t.y);
        }
    }
}

// Producer of rows behind a map: eight threads a row of 64 k. Lanes look up the warp's rows, a tile ahead of their use.
template <int KIND>
__device__ __forceinline__ void gather(const Gemm& p, const CUtensorMap& codes, const Rings<KIND>& rings) {
    using L = Layout<KIND>;
    constexpr int EACH = L::ROWS / 16, LOOKED_UP = L::ROWS / 128;
    const Walk walk{p};
    const int steps = static_cast<int>(p.k / BK), count = walk.count();
    const int thread = threadIdx.x % 128, lane = thread % 32, r = thread / 8, c = thread % 8;
    const uint32_t into = r * 128 + ((c ^ (r & 7)) << 4);
    int next[LOOKED_UP];
    // Row j * 4 + l of the warp's is row 16 j + l of its quarter of each sixteen.
    auto look_up = [&](const int4& t) {
#pragma unroll
        for (int q = 0; q < LOOKED_UP; q++) {
            const int local = thread / 32 * 4 + lane % 4 + (lane / 4 + q * 8) * 16;
            const int64_t row = mapped_row(p.a_map, t.y + (local < t.z ? local : 0), p.a_rows, p.fault);
            next[q] = static_cast<int>(row < 0 ? 0 : row);
        }
    };
    int4 t{}, after{};
    if (count > 0) {
        after = walk.at(0);
        look_up(after);
    }
    const int64_t pitch = p.k * 2;
    uint32_t at = 0, code_at = 0;
    for (int i = 0; i < count; i++) {
        t = after;
        int row[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) row[j] = __shfl_sync(~0u, next[j / 8], j % 8 * 4 + lane / 8);
        const int passes = (t.z + 15) / 16;
        for (int step = 0; step < steps; step++, at++) {
            if (thread == 0 && step % CODE_STEPS == 0) bring_codes(p, codes, rings, t, code_at, step);
            if (step % CODE_STEPS == 0) code_at++;
            rings.rows.wait_empty(at);
            const uint32_t to = rings.rows.stage(at) + into;
            const char* from = static_cast<const char*>(p.a) + step * (BK * 2) + c * 16;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                if (j < passes) copy(to + j * 2048, from + row[j] * pitch);
            }
            barrier_arrive_after_copies(rings.rows.full(at));
            if (i + 1 == count) continue;
            if (step == 0) after = walk.at(i + 1);
            if (step == min(1, steps - 1)) look_up(after);
        }
    }
    // Copies must not outlive the block's shared memory.
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Operand in shared memory by rows of 64 k, swizzled by 128 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    return ((at & 0x3ffff) >> 4) | (16ull >> 4 << 16) | (1024ull >> 4 << 32) | (1ull << 62);
}

// Keep the compiler from moving registers while the matrix unit owns them.
template <int N>
__device__ __forceinline__ void pin(float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}
// Weights of 64 rows and half a step's k, or all, as the products read them: by 16 k.
template <int HALVES>
using Fragment = uint32_t[2 * HALVES][4];
template <int N>
__device__ __forceinline__ void pin(uint32_t (&v)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Scales of a thread's two rows of each block. A quad's lanes hold those of four steps.
template <int FORMAT, int KIND>
struct Scales {
    static constexpr int BLOCKS = Layout<KIND>::BLOCKS, BYTES = BK / Format<FORMAT>::BLOCK;
    const Gemm& p;
    const QuantWeight& w;
    uint32_t now[BLOCKS][2], next[BLOCKS][2];

    // Those of steps `step` to `step + 3` of a tile; `first`: this thread's first row in a block of the tile.
    __device__ __forceinline__ void load(const int4& t, int first, int step, int steps) {
        const int own = step + threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) {
            const int64_t row = t.w + first + i % 2 * 8 + i / 2 * p.n, inside = t.x * w.rows + (row < w.rows ? row : w.rows - 1);
            const uint8_t* from = static_cast<const uint8_t*>(w.scales) + inside * w.blocks + own * BYTES;
            next[i / 2][i % 2] = 0;
            if (own < steps) next[i / 2][i % 2] = BYTES == 4 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const unsigned short*>(from);
        }
    }
    __device__ __forceinline__ void turn() {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; i++) now[i / 2][i % 2] = next[i / 2][i % 2];
    }
    __device__ __forceinline__ uint32_t of(int block, int half, int step) const {
        return __shfl_sync(~0u, now[block][half], (threadIdx.x & 28) | (step & 3));
    }
};

// A fragment of the codes from `chunk` (32 of them) of this thread's first row in the block. Of each 8 k a thread has the
// two codes of byte t of the word, t being its place in the quad.
template <int FORMAT, int HALVES>
__device__ __forceinline__ void convert(Fragment<HALVES>& to, uint32_t row, uint32_t chunk, const uint32_t (&scales)[2][4]) {
    const uint32_t lane = threadIdx.x % 32, of_word = lane % 4 * 17 + 0x40, swizzle = lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            uint32_t v[4];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                         : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                         : "r"(row + half * 1024 + (((chunk + i) ^ swizzle) << 4))
                         : "memory");
            const uint32_t bytes = __byte_perm(__byte_perm(v[0], v[2], of_word), __byte_perm(v[1], v[3], of_word), 0x5410);
            // Nibbles of a byte to 16 bits from each other: 1 and 4 change places, and 3 and 6.
            const uint32_t change = (bytes ^ bytes >> 12) & 0xf0f0u, word = bytes ^ change ^ change << 12;
#pragma unroll
            for (int j = 0; j < 4; j++) to[i * 2 + j / 2][j % 2 * 2 + half] = Format<FORMAT>::value(pattern(word, j), scales[half][i * 2 + j / 2]);
        }
    }
    pin(to);
}

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
template <int N, int SIZE, int COUNT>
__device__ __forceinline__ void multiply(float (&acc)[SIZE], uint32_t (&a)[COUNT][4], uint64_t b) {
    pin(acc);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < COUNT; k++) wgmma_left<N, 0>(acc, a[k], b + k * 2, 1);
    commit();
}

// What a multiplying warpgroup keeps from tile to tile.
template <int FORMAT, int KIND>
struct Worker {
    using L = Layout<KIND>;
    const Gemm& p;
    const Rings<KIND>& rings;
    Scales<FORMAT, KIND> scales;
    const int steps, group, first;  // first: row of this thread in a block of 64
    uint32_t at, code_at;

    __device__ __forceinline__ Worker(const Gemm& p, const QuantWeight& w, const Rings<KIND>& rings)
        : p(p), rings(rings), scales{p, w}, steps(static_cast<int>(p.k / BK)), group(threadIdx.x / 128),
          first(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), at(0), code_at(0) {}

    __device__ __forceinline__ bool releases() const { return threadIdx.x % 32 == 0; }
    // Fragment 0 or 1 of a step.
    __device__ __forceinline__ void make(Fragment<L::BLOCKS>& to, int which, int step) const {
        const int block = which % L::BLOCKS;
        const uint32_t row = rings.codes.stage(code_at) + (block * 2 + group) * BOX + first * 128;
        uint32_t expanded[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t own = scales.of(block, half, step);
            Format<FORMAT>::expand(expanded[half], L::BLOCKS == 2 || which == 0 ? own : own >> 8 * Scales<FORMAT, KIND>::BYTES / 2);
        }
        convert<FORMAT, L::BLOCKS>(to, row, step % CODE_STEPS * 2 + (L::BLOCKS == 1 ? which : 0), expanded);
    }
    // Before a step's first fragment: the next codes and scales, where it begins with some.
    __device__ __forceinline__ void begin(const int4& t, const int4& after, int step) {
        if (step % CODE_STEPS) return;
        rings.codes.wait_full(code_at);
        scales.turn();
        if (step + CODE_STEPS < steps) scales.load(t, group * 64 + first, step + CODE_STEPS, steps);
        else scales.load(after, group * 64 + first, 0, steps);
    }
    // After its last one.
    __device__ __forceinline__ void end(int step) {
        if (step % CODE_STEPS != CODE_STEPS - 1 && step + 1 < steps) return;
        __syncwarp();
        if (releases()) barrier_arrive(rings.codes.empty(code_at));
        code_at++;
    }
    __device__ __forceinline__ void wait_rows(int step) const {
        rings.rows.wait_full(at + step);
        // Rows behind a map came by ordinary writes; wgmma reads through another proxy.
        if (p.a_map) fence_proxy();
    }
    __device__ __forceinline__ void release_rows(int step) const {
        if (releases()) barrier_arrive(rings.rows.empty(at + step));
    }

    // Sums of a tile, of which N rows count. A step has two fragments: its blocks, or the halves of its k.
    template <int N>
    __device__ __forceinline__ void products(float (&acc)[L::BLOCKS][N / 2], const int4& t, const int4& after) {
        constexpr int LAST = L::BLOCKS - 1, LATER = 4 - 2 * L::BLOCKS;
        Fragment<L::BLOCKS> a[2] = {};
        // Not by the first product, or registers would live from one tile's case to another's.
#pragma unroll
        for (int i = 0; i < L::BLOCKS * N / 2; i++) acc[i / (N / 2)][i % (N / 2)] = 0.0f;
        begin(t, after, 0);
        make(a[0], 0, 0);
        for (int step = 0; step < steps; step++) {
            wait_rows(step);
            const uint64_t b = operand(rings.rows.stage(at + step));
            multiply<N>(acc[0], a[0], b);
            wait<1>();
            pin(a[1]);
            if (step > 0) release_rows(step - 1);
            make(a[1], 1, step);
            end(step);
            multiply<N>(acc[LAST], a[1], b + 2 * LATER);
            wait<1>();
            pin(a[0]);
            if (step + 1 < steps) {
                begin(t, after, step + 1);
                make(a[0], 0, step + 1);
            }
        }
        wait<0>();
#pragma unroll
        for (int b = 0; b < L::BLOCKS; b++) pin(acc[b]);
        pin(a[1]);
        release_rows(steps - 1);
        at += steps;
    }
};

// 64 columns of a warpgroup and 128 rows on their way out, a row in 128 bytes, its chunks of 16 permuted.
struct Staging {
    uint32_t base;
    int group;
    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;\n" ::"r"(1 + group) : "memory"); }
    // Values of the warp's 16 columns in two blocks of 8 rows, the first at `row`.
    __device__ __forceinline__ void put(int row, const float* v) const {
        const int lane = threadIdx.x % 32, r = row + lane / 16 * 8 + lane % 8, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
            words[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(base + r * 128 + ((chunk ^ (r & 7)) << 4)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    }
    // `count` rows to `out`, whose rows are `wide`; `row_of(r)` says which one row r is.
    template <class RowOf>
    __device__ __forceinline__ void send(bf16* out, int64_t wide, int64_t columns, int count, bool add, RowOf&& row_of) const {
        sync();
        const int thread = threadIdx.x % 128, c = thread % 8;
        for (int r = thread / 8; r < count; r += 16) {
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(base + r * 128 + ((c ^ (r & 7)) << 4))
                         : "memory");
            const int64_t row = row_of(r);
            if (row < 0 || c * 8 >= columns) continue;
            uint4* to = reinterpret_cast<uint4*>(out + row * wide + c * 8);
            if (add) {
                uint4 old = *to;
                bf16* sums = reinterpret_cast<bf16*>(&v);
                const bf16* before = reinterpret_cast<const bf16*>(&old);
#pragma unroll
                for (int k = 0; k < 8; k++) sums[k] = from_float<bf16>(to_float(before[k]) + to_float(sums[k]));
            }
            *to = v;
        }
        sync();
    }
};

// What a tile's end needs to know of its place.
struct Place {
    const int4& t;
    int64_t column;  // first of the warpgroup's 64
    int first;       // of them this thread's first; the other is 8 on
    const float (&factor)[2];

    // A number of the tile's row behind accumulator i; of rows that do not exist, any.
    __device__ __forceinline__ float of_row(const float* values, int i) const {
        const int local = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        return values[t.y + (local < t.z ? local : 0)];
    }
};

template <int N>
__device__ __forceinline__ void finish_up(const Gemm& p, float (&acc)[2][N / 2], const Place& at, const Staging& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int up = 0; up < 2; up++) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[up][i] *= at.factor[up];
        if (p.scale) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) acc[up][i] *= at.of_row(p.scale, i);
        }
        if (p.bias) {
            const bf16* bias = static_cast<const bf16*>(p.bias) + (at.t.x * 2 + up) * p.n;
            float own[2];
#pragma unroll
            for (int h = 0; h < 2; h++) own[h] = at.first + h * 8 < columns ? to_float(bias[at.column + at.first + h * 8]) : 0.0f;
#pragma unroll
            for (int i = 0; i < N / 2; i++) acc[up][i] += own[i / 2 % 2];
        }
        if (p.pre_out) {
#pragma unroll
            for (int i = 0; i < N / 2; i += 8) staging.put(i * 2, acc[up] + i);
            staging.send(static_cast<bf16*>(p.pre_out) + up * p.n + at.column, 2 * p.n, columns, at.t.z, false, [&](int r) { return static_cast<int64_t>(at.t.y) + r; });
        }
    }
    with_gate(static_cast<int>(p.activation), [&](auto kind) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            acc[0][i] = activate<true>(kind.value, static_cast<float>(p.alpha), static_cast<float>(p.limit), acc[0][i], acc[1][i]).value;
        }
    });
    if (p.out_scale) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[0][i] *= at.of_row(p.out_scale, i);
    }
#pragma unroll
    for (int i = 0; i < N / 2; i += 8) staging.put(i * 2, acc[0] + i);
    staging.send(static_cast<bf16*>(p.out) + at.column, p.n, columns, at.t.z, p.accumulate, [&](int r) { return out_row(p, at.t.y + r, threadIdx.x % 8); });
}

template <int N>
__device__ __forceinline__ void finish_down(const Gemm& p, float (&acc)[1][N / 2], const Place& at, const Staging& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[0][i] *= at.factor[0];
    if (p.scale) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[0][i] *= at.of_row(p.scale, i);
    }
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * p.n;
        float own[2];
#pragma unroll
        for (int h = 0; h < 2; h++) own[h] = at.first + h * 8 < columns ? to_float(bias[at.column + at.first + h * 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[0][i] += own[i / 2 % 2] * (p.bias_scale ? at.of_row(p.bias_scale, i) : 1.0f);
    }
#pragma unroll
    for (int from = 0; from < N; from += LEAVING) {
#pragma unroll
        for (int i = 0; i < LEAVING / 2; i += 8) {
            if (from + i * 2 < N) staging.put(i * 2, acc[0] + from / 2 + i);
        }
        staging.send(static_cast<bf16*>(p.out) + at.column, p.n, columns, min(at.t.z - from, LEAVING), p.accumulate,
                     [&](int r) { return out_row(p, at.t.y + from + r, threadIdx.x % 8); });
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void work(const Gemm& p, const QuantWeight& w, const Rings<KIND>& rings) {
    using L = Layout<KIND>;
    const Walk walk{p};
    const int count = walk.count(), group = threadIdx.x / 128;
    const Staging staging{rings.staging + group * LEAVING * 128, group};
    Worker<FORMAT, KIND> worker(p, w, rings);
    int4 after = make_int4(0, 0, 0, 0);
    if (count > 0) {
        after = walk.at(0);
        worker.scales.load(after, group * 64 + worker.first, 0, worker.steps);
    }
    for (int i = 0; i < count; i++) {
        const int4 t = after;
        if (i + 1 < count) after = walk.at(i + 1);
        const float* factors = w.factors ? w.factors + t.x * w.parts : nullptr;
        const float one = Format<FORMAT>::LEFT;
        const float factor[2] = {factors ? one * factors[0] : one, factors ? one * factors[w.parts - 1] : one};
        const Place place{t, t.w + group * 64, worker.first, factor};
        // The accumulators of each case are its own: the compiler must see one owner.
        auto tile = [&](auto rows) {
            constexpr int N = rows.value;
            float acc[L::BLOCKS][N / 2];
            worker.template products<N>(acc, t, after);
            if constexpr (KIND == UP) finish_up<N>(p, acc, place, staging);
            else finish_down<N>(p, acc, place, staging);
        };
        if (t.z <= 64) tile(Constant<64>{});
        else if (L::ROWS == 128 || t.z <= 128) tile(Constant<128>{});
        else if constexpr (L::ROWS == 256) {
            if (t.z <= 192) tile(Constant<192>{});
            else tile(Constant<256>{});
        }
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const QuantWeight& w, const CUtensorMap& rows, const CUtensorMap& codes) {
    using L = Layout<KIND>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings<KIND> rings(address(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            // Each thread that copies, or the copy engine's; each warp that multiplies.
            barrier_init(rings.rows.full(i), p.a_map ? 128 : 1);
            barrier_init(rings.rows.empty(i), 8);
        }
        for (int i = 0; i < L::CODE_STAGES; i++) {
            barrier_init(rings.codes.full(i), 1);
            barrier_init(rings.codes.empty(i), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        if (p.a_map) gather<KIND>(p, codes, rings);
        else if (threadIdx.x % 32 == 0 && threadIdx.x % 128 < 64) produce<KIND>(p, rows, codes, rings);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
        work<FORMAT, KIND>(p, w, rings);
    }
}

}  // namespace

#define PRODUCT(name, FORMAT, KIND)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                      \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w,               \
             const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap codes) { \
        run<FORMAT, KIND>(p, w, rows, codes);                                                     \
    }

PRODUCT(hopper_up_nvfp4, WEIGHT_NVFP4, UP)
PRODUCT(hopper_down_nvfp4, WEIGHT_NVFP4, DOWN)
PRODUCT(hopper_up_mxfp4, WEIGHT_MXFP4, UP)
PRODUCT(hopper_down_mxfp4, WEIGHT_MXFP4, DOWN)
#endif
