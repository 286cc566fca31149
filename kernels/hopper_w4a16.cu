// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// Weights are the left operand, which the matrix unit takes from registers: codes lie in shared memory as they are stored,
// and each warp makes bf16 of those of its 16 weight rows in the registers that the product reads. No bf16 weight is ever in
// memory of any kind. A tile is weight rows by rows of a layout, the output's columns by its rows, turned on its way out.
//
// A block stays on its multiprocessor and walks through tiles. One warpgroup brings rows and codes into rings of their own,
// and scales, a pair of bf16 each; two multiply, 64 weight rows and all rows of the tile each, for up 8 of gate and 8 of up in turn. While the matrix unit works on one fragment, the
// warps make the next. As the two share no results, one may run ahead by as much as the ring holds, so that one's epilogue
// runs under the other's products.
//
// Rows in slot order come by the copy engine, rows behind a map by copies of 16 bytes a thread. Those past a tile's end are
// the next zone's, or whatever the stage held: a row of the right operand has a column of the sums to itself, and theirs are
// never stored.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/epilogue.cuh"
#include "common/fp4.cuh"
#include "common/pipeline.cuh"
#include "common/wgmma.cuh"

namespace {
using namespace hopper;
using namespace fp4;

constexpr int BK = 64, THREADS = 384, ROWS = 256, WEIGHTS = 128;
// Codes come for 256 k at a time, 128 bytes of a weight row, in boxes of some weight rows. A stage of them ends with scales: for
// each step and weight row the four of 64 k, each twice in a word.
constexpr int CODE_STEPS = 4, SCALES = WEIGHTS * 128, CODE_STAGE = SCALES + CODE_STEPS * WEIGHTS * 16;
template <int KIND>
constexpr int BOX_ROWS = KIND == UP ? 8 : 64;
// Columns of the output that a tile makes.
template <int KIND>
constexpr int COLUMNS = KIND == UP ? WEIGHTS / 2 : WEIGHTS;
// Shared memory: both rings, what a warpgroup's results leave through, barriers.
constexpr int STAGES = 5, CODE_STAGES = 2, STAGE = ROWS * BK * 2, LEAVING = 8192;
constexpr int CODES = STAGES * STAGE, STAGED = CODES + CODE_STAGES * CODE_STAGE, BARRIERS = STAGED + 2 * LEAVING;
constexpr int SHARED = BARRIERS + 2 * (STAGES + CODE_STAGES) * 8;
static_assert(SHARED == 229488 && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

// Position i of a ring is stage i % COUNT, used for the (i / COUNT)-th time.
template <int COUNT, int BYTES>
struct Ring {
    uint32_t stages, barriers;
    __device__ __forceinline__ uint32_t stage(uint32_t at) const { return stages + at % COUNT * BYTES; }
    __device__ __forceinline__ uint32_t full(uint32_t at) const { return barriers + at % COUNT * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t at) const { return full(at) + COUNT * 8; }
    __device__ __forceinline__ void wait_full(uint32_t at) const { barrier_wait(full(at), at / COUNT & 1); }
    __device__ __forceinline__ void wait_empty(uint32_t at) const { barrier_wait(empty(at), (at / COUNT & 1) ^ 1); }
};
struct Rings {
    Ring<STAGES, STAGE> rows;
    Ring<CODE_STAGES, CODE_STAGE> codes;
    uint32_t staging;
    __device__ __forceinline__ explicit Rings(uint32_t base)
        : rows{base, base + BARRIERS}, codes{base + CODES, base + BARRIERS + 2 * STAGES * 8}, staging(base + STAGED) {}
};

// Tiles of this block: all columns of a row tile one after another.
struct Walk {
    const Gemm& p;
    __device__ __forceinline__ int count() const {
        const int all = *p.tile_count * static_cast<int>(p.n_tiles), own = blockIdx.x;
        return all > own ? (all - own - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    }
    // (group, first slot, rows, first column)
    template <int KIND>
    __device__ __forceinline__ int4 at(int i) const {
        const int id = blockIdx.x + i * gridDim.x, wide = static_cast<int>(p.n_tiles);
        int4 t = p.tiles[id / wide];
        t.w = id % wide * COLUMNS<KIND>;
        return t;
    }
};

// Row `own` of a tile's weights in the stack's matrix.
template <int KIND>
__device__ __forceinline__ int64_t weight_row(const Gemm& p, const int4& t, int own) {
    return KIND == UP ? t.w + own / 16 * 8 + own % 8 + (own & 8 ? p.n : 0) : t.w + own;
}

// The warpgroup that brings. A thread has the scales of one weight row.
template <int FORMAT, int KIND>
struct Producer {
    static constexpr int BYTES = BK / Format<FORMAT>::BLOCK;  // of scales, for a row and a step
    const Gemm& p;
    const QuantWeight& w;
    const CUtensorMap& rows;
    const CUtensorMap& codes;
    const Rings& rings;
    const int thread, steps;
    uint32_t code_at;
    uint32_t scales[CODE_STEPS];  // as stored, of the next codes

    __device__ __forceinline__ void load_scales(const int4& t, int step) {
        const int64_t row = weight_row<KIND>(p, t, thread), inside = t.x * w.rows + (row < w.rows ? row : w.rows - 1);
        const uint8_t* from = static_cast<const uint8_t*>(w.scales) + inside * w.blocks + step * BYTES;
#pragma unroll
        for (int i = 0; i < CODE_STEPS; i++, from += BYTES) {
            scales[i] = 0;
            if (step + i < steps) scales[i] = BYTES == 4 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const unsigned short*>(from);
        }
    }
    // Codes of 256 k of tile `t` and their scales.
    __device__ __forceinline__ void bring_codes(const int4& t, const int4& after, int step) {
        constexpr int BOXES = WEIGHTS / BOX_ROWS<KIND>;
        rings.codes.wait_empty(code_at);
        const uint32_t stage = rings.codes.stage(code_at), full = rings.codes.full(code_at);
        if (thread == 0) barrier_arrive_expect(full, SCALES);
        __syncwarp();
        if (thread < BOXES) {
            const int first = thread * BOX_ROWS<KIND>;
            bulk(stage + first * 128, codes, full, step * (BK / 2), weight_row<KIND>(p, t, first), t.x);
        }
#pragma unroll
        for (int i = 0; i < CODE_STEPS; i++) {
            uint32_t v[4];
            Format<FORMAT>::expand(v, scales[i]);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(stage + SCALES + (i * WEIGHTS + thread) * 16),
                         "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
        }
        barrier_arrive(full);
        code_at++;
        if (step + CODE_STEPS < steps) load_scales(t, step + CODE_STEPS);
        else load_scales(after, 0);
    }

    // Rows in slot order come by the copy engine, for which one warp waits.
    __device__ __forceinline__ void direct() {
        const Walk walk{p};
        const int count = walk.count();
        uint32_t at = 0;
        int4 after = walk.at<KIND>(0);
        load_scales(after, 0);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = walk.at<KIND>(i + 1);
            for (int step = 0; step < steps; step++, at++) {
                if (step % CODE_STEPS == 0) bring_codes(t, after, step);
                if (thread >= 32) continue;
                rings.rows.wait_empty(at);
                if (thread == 0) {
                    barrier_arrive_expect(rings.rows.full(at), STAGE);
                    bulk(rings.rows.stage(at), rows, rings.rows.full(at), step * BK, t.y);
                }
                __syncwarp();
            }
        }
    }

    // Rows behind a map: eight threads a row of 64 k. Lanes look up the warp's rows, a tile ahead of their use.
    __device__ __forceinline__ void gather() {
        constexpr int EACH = ROWS / 16, LOOKED_UP = ROWS / 128;
        const Walk walk{p};
        const int count = walk.count(), lane = thread % 32, r = thread / 8, c = thread % 8;
        const uint32_t into = r * 128 + ((c ^ (r & 7)) << 4);
        int next[LOOKED_UP];
        // Row 4 j + l of the warp's is row 16 j + l of its four of each sixteen.
        auto look_up = [&](const int4& t) {
#pragma unroll
            for (int q = 0; q < LOOKED_UP; q++) {
                const int local = thread / 32 * 4 + lane % 4 + (lane / 4 + q * 8) * 16;
                const int64_t row = mapped_row(p.a_map, t.y + (local < t.z ? local : 0), p.a_rows, p.fault);
                next[q] = static_cast<int>(row < 0 ? 0 : row);
            }
        };
        const uint32_t pitch = static_cast<uint32_t>(p.k * 2);
        uint32_t at = 0;
        int4 after = walk.at<KIND>(0);
        load_scales(after, 0);
        look_up(after);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = walk.at<KIND>(i + 1);
            uint32_t row[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) row[j] = __shfl_sync(~0u, next[j / 8], j % 8 * 4 + lane / 8);
            const int passes = (t.z + 15) / 16;
            for (int step = 0; step < steps; step++, at++) {
                if (step % CODE_STEPS == 0) bring_codes(t, after, step);
                // All addresses before the wait, each in registers of its own: a copy holds on to its address for some hundred
                // cycles, and in one pair of registers each copy would wait for the one before.
                const char* from[EACH];
#pragma unroll
                for (int j = 0; j < EACH; j++) {
                    const char* base = static_cast<const char*>(p.a) + c * 16 + step * (BK * 2);
                    asm volatile("mad.wide.u32 %0, %1, %2, %3;\n" : "=l"(from[j]) : "r"(row[j]), "r"(pitch), "l"(base));
                }
                rings.rows.wait_empty(at);
                const uint32_t to = rings.rows.stage(at) + into;
                if (passes == EACH) {
#pragma unroll
                    for (int j = 0; j < EACH; j++) copy(to + j * 2048, from[j]);
                } else {
#pragma unroll
                    for (int j = 0; j < EACH; j++) {
                        if (j < passes) copy(to + j * 2048, from[j]);
                    }
                }
                barrier_arrive_after_copies(rings.rows.full(at));
                if (step == min(1, steps - 1)) look_up(after);
            }
        }
        // Copies must not outlive the block's shared memory.
        asm volatile("cp.async.wait_all;\n" ::: "memory");
    }
};

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
// Weights of 64 rows and 32 k as the products read them: by 16 k.
using Fragment = uint32_t[2][4];
__device__ __forceinline__ void pin(Fragment& v) {
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Codes and scales of a fragment, of a thread's two rows.
struct Codes {
    uint32_t words[2][4], scales[2][2];

    __device__ __forceinline__ void load(uint32_t from, uint32_t scales_at) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t(&v)[4] = words[half];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from + half * 1024) : "memory");
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(scales[half][0]), "=r"(scales[half][1]) : "r"(scales_at + half * 128) : "memory");
        }
    }
    // Of each 8 k a thread has the two codes of byte t of the word, t being its place in the quad.
    template <int FORMAT>
    __device__ __forceinline__ void convert(Fragment& to) const {
        const uint32_t of_word = threadIdx.x % 4 * 17 + 0x40;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t(&v)[4] = words[half];
            const uint32_t bytes = __byte_perm(__byte_perm(v[0], v[2], of_word), __byte_perm(v[1], v[3], of_word), 0x5410);
            // Nibbles of a byte to 16 bits from each other: 1 and 4 change places, and 3 and 6.
            const uint32_t change = (bytes ^ bytes >> 12) & 0xf0f0u, word = bytes ^ change ^ change << 12;
#pragma unroll
            for (int j = 0; j < 4; j++) to[j / 2][j % 2 * 2 + half] = Format<FORMAT>::value(pattern(word, j), scales[half][j / 2]);
        }
        pin(to);
    }
};

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
template <int N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], Fragment& a, uint64_t b) {
    pin(acc);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < 2; k++) wgmma_left<N, 0>(acc, a[k], b + k * 2, 1);
    commit();
}

// What a multiplying warpgroup keeps from tile to tile.
template <int FORMAT>
struct Worker {
    const Rings& rings;
    const int steps, group, first;  // first: weight row of this thread in the warpgroup's 64
    const bool mapped;
    const uint32_t codes, scales;   // places of that row in a stage
    uint32_t at, code_at;

    __device__ __forceinline__ Worker(const Gemm& p, const Rings& rings)
        : rings(rings), steps(static_cast<int>(p.k / BK)), group(threadIdx.x / 128), first(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
          mapped(p.a_map), codes((group * 64 + first) * 128 + threadIdx.x % 32 / 4 * 16), scales(SCALES + (group * 64 + first) * 16), at(0), code_at(0) {}

    __device__ __forceinline__ bool releases() const { return threadIdx.x % 32 == 0; }
    // Fragment 0 or 1 of a step: halves of its k.
    __device__ __forceinline__ void load(Codes& to, int which, int step) const {
        const uint32_t stage = rings.codes.stage(code_at), quarter = step % CODE_STEPS;
        to.load((stage + codes) ^ quarter << 5 ^ which << 4, stage + scales + quarter * (WEIGHTS * 16) + which * 8);
    }
    // By each lane, as each has read codes and scales of its own.
    __device__ __forceinline__ void release_codes() {
        barrier_arrive(rings.codes.empty(code_at));
        code_at++;
    }
    __device__ __forceinline__ void release_rows(uint32_t position) const {
        if (releases()) barrier_arrive(rings.rows.empty(position));
    }

    // Sums of a tile, of which N rows count. Of the two fragments of a step one is multiplied while the other is made, from
    // codes that were read before.
    template <int N>
    __device__ __forceinline__ void products(float (&acc)[N / 2]) {
        Fragment a[2] = {};
        Codes next[2];
        // Not by the first product, or registers would live from one tile's case to another's.
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
        rings.codes.wait_full(code_at);
        load(next[0], 0, 0);
        load(next[1], 1, 0);
        next[0].convert<FORMAT>(a[0]);
#pragma unroll 1
        for (int step = 0; step < steps; step++, at++) {
            const bool more = step + 1 < steps;
            rings.rows.wait_full(at);
            // Rows behind a map came by ordinary writes; wgmma reads through another proxy.
            if (mapped) fence_proxy();
            const uint64_t b = operand(rings.rows.stage(at));
            multiply<N>(acc, a[0], b);
            if (more) {
                if (step % CODE_STEPS == CODE_STEPS - 1) {
                    release_codes();
                    rings.codes.wait_full(code_at);
                }
                load(next[0], 0, step + 1);
            }
            wait<1>();
            pin(a[1]);
            if (step > 0) release_rows(at - 1);
            next[1].convert<FORMAT>(a[1]);
            multiply<N>(acc, a[1], b + 4);
            if (more) load(next[1], 1, step + 1);
            wait<1>();
            pin(a[0]);
            if (more) next[0].convert<FORMAT>(a[0]);
        }
        wait<0>();
        pin(acc);
        pin(a[0]);
        pin(a[1]);
        release_rows(at - 1);
        release_codes();
    }
};

// Columns of a warpgroup on their way out, as many rows as fit. Chunks of 16 bytes are permuted.
template <int KIND>
struct Staging {
    static constexpr int WIDE = COLUMNS<KIND>, CHUNKS = WIDE / 16, COUNT = LEAVING / WIDE;  // bytes and chunks of a row, rows
    uint32_t base;
    int group;
    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;\n" ::"r"(1 + group) : "memory"); }
    __device__ __forceinline__ uint32_t place(int row, int chunk) const {
        return base + row * WIDE + ((chunk ^ (CHUNKS == 8 ? row & 7 : row >> 1 & 3)) << 4);
    }
    // Four blocks of 8 columns by 8 rows, turned: of up 8 columns of 32 rows, of down 16 of 16 rows.
    __device__ __forceinline__ void put(int row, const uint32_t (&v)[4]) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, which = lane / 8;
        const uint32_t to = KIND == UP ? place(row + lane, warp) : place(row + which / 2 * 8 + lane % 8, warp * 2 + which % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    }
    // `count` rows to `out`, whose rows are `wide`; `row_of(r)` says which one row r is.
    template <class RowOf>
    __device__ __forceinline__ void send(bf16* out, int64_t wide, int64_t columns, int count, bool add, RowOf&& row_of) const {
        const int thread = threadIdx.x % 128, c = thread % CHUNKS;
        sync();
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int r = thread / CHUNKS + j * (128 / CHUNKS);
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "r"(place(r, c))
                         : "memory");
        }
        sync();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int r = thread / CHUNKS + j * (128 / CHUNKS);
            if (r >= count || c * 8 >= columns) continue;
            const int64_t row = row_of(r);
            if (row < 0) continue;
            uint4* to = reinterpret_cast<uint4*>(out + row * wide + c * 8);
            if (add) {
                uint4 old = *to;
                bf16* sums = reinterpret_cast<bf16*>(&v[j]);
                const bf16* before = reinterpret_cast<const bf16*>(&old);
#pragma unroll
                for (int k = 0; k < 8; k++) sums[k] = from_float<bf16>(to_float(before[k]) + to_float(sums[k]));
            }
            *to = v[j];
        }
    }
    // All rows of a tile from accumulators, as many at a time as there is room for; `row_of` as above, of the tile. Of up, gate's
    // place or up's.
    template <int N, class RowOf>
    __device__ __forceinline__ void send_all(const float (&v)[N], int up, bf16* out, int64_t wide, int64_t columns, int count, bool add, RowOf&& row_of) const {
#pragma unroll
        for (int from = 0; from < 2 * N; from += COUNT) {
            if (from >= count) break;
#pragma unroll
            for (int r = from; r < from + COUNT && r < 2 * N; r += KIND == UP ? 32 : 16) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int at = r / 2 + (KIND == UP ? i * 4 + up * 2 : i * 2);
                    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[at], v[at + 1]);
                    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
                }
                put(r - from, words);
            }
            send(out, wide, columns, count - from, add, [&](int r) { return row_of(from + r); });
        }
    }
};

// What a tile's end needs to know of its place.
struct Place {
    const int4& t;
    int64_t column;  // the warpgroup's first
    int first;       // of its columns this thread's first
    const float (&factor)[2];

    // A number of the tile's row behind accumulator i; of rows that do not exist, any.
    __device__ __forceinline__ float of_row(const float* values, int i) const {
        const int local = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        return values[t.y + (local < t.z ? local : 0)];
    }
};

// A factor a row: of four accumulators two are of one row and two of the next.
template <int N>
__device__ __forceinline__ void scale_rows(const float* scales, float (&acc)[N], const Place& at) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float first = at.of_row(scales, i), second = at.of_row(scales, i + 1);
        acc[i] *= first, acc[i + 1] *= second, acc[i + 2] *= first, acc[i + 3] *= second;
    }
}

// Of four accumulators two are gate's and two up's, of the same column and rows.
template <int N>
__device__ __forceinline__ void finish_up(const Gemm& p, float (&acc)[N / 2], const Place& at, const Staging<UP>& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] *= at.factor[i / 2 % 2];
    if (p.scale) scale_rows(p.scale, acc, at);
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * 2 * p.n + at.column + at.first;
        const bool inside = at.first < columns;
        const float own[2] = {inside ? to_float(bias[0]) : 0.0f, inside ? to_float(bias[p.n]) : 0.0f};
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] += own[i / 2 % 2];
    }
    if (p.pre_out) {
        auto to_slot = [&](int r) { return static_cast<int64_t>(at.t.y) + r; };
        bf16* pre = static_cast<bf16*>(p.pre_out) + at.column;
        staging.send_all(acc, 0, pre, 2 * p.n, columns, at.t.z, false, to_slot);
        staging.send_all(acc, 1, pre + p.n, 2 * p.n, columns, at.t.z, false, to_slot);
    }
    with_gate(static_cast<int>(p.activation), [&](auto kind) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i / 2 % 2) continue;
            acc[i] = activate<true>(kind.value, static_cast<float>(p.alpha), static_cast<float>(p.limit), acc[i], acc[i + 2]).value;
        }
    });
    if (p.out_scale) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (i / 2 % 2 == 0) acc[i] *= at.of_row(p.out_scale, i);
        }
    }
    staging.send_all(acc, 0, static_cast<bf16*>(p.out) + at.column, p.n, columns, at.t.z, p.accumulate,
                     [&](int r) { return out_row(p, at.t.y + r, threadIdx.x % Staging<UP>::CHUNKS); });
}

template <int N>
__device__ __forceinline__ void finish_down(const Gemm& p, float (&acc)[N / 2], const Place& at, const Staging<DOWN>& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] *= at.factor[0];
    if (p.scale) scale_rows(p.scale, acc, at);
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * p.n + at.column + at.first;
        float own[2];
#pragma unroll
        for (int h = 0; h < 2; h++) own[h] = at.first + h * 8 < columns ? to_float(bias[h * 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] += own[i / 2 % 2] * (p.bias_scale ? at.of_row(p.bias_scale, i) : 1.0f);
    }
    staging.send_all(acc, 0, static_cast<bf16*>(p.out) + at.column, p.n, columns, at.t.z, p.accumulate,
                     [&](int r) { return out_row(p, at.t.y + r, threadIdx.x % Staging<DOWN>::CHUNKS); });
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void work(const Gemm& p, const QuantWeight& w, const Rings& rings) {
    const Walk walk{p};
    const int count = walk.count(), group = threadIdx.x / 128;
    const Staging<KIND> staging{rings.staging + group * LEAVING, group};
    Worker<FORMAT> worker(p, rings);
    // Of up a warp's 16 weight rows are 8 columns.
    const int first = KIND == UP ? threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4 : worker.first;
    int4 after = walk.at<KIND>(0);
    for (int i = 0; i < count; i++) {
        const int4 t = after;
        if (i + 1 < count) after = walk.at<KIND>(i + 1);
        const float* factors = w.factors ? w.factors + t.x * w.parts : nullptr;
        const float one = Format<FORMAT>::LEFT;
        const float factor[2] = {factors ? one * factors[0] : one, factors ? one * factors[w.parts - 1] : one};
        const Place place{t, t.w + group * (COLUMNS<KIND> / 2), first, factor};
        // The accumulators of each case are its own: the compiler must see one owner.
        auto tile = [&](auto rows) {
            constexpr int N = rows.value;
            float acc[N / 2];
            worker.template products<N>(acc);
            if constexpr (KIND == UP) finish_up<N>(p, acc, place, staging);
            else finish_down<N>(p, acc, place, staging);
        };
        if (t.z <= 64) tile(Constant<64>{});
        else if (t.z <= 128) tile(Constant<128>{});
        else if (t.z <= 192) tile(Constant<192>{});
        else tile(Constant<256>{});
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const QuantWeight& w, const CUtensorMap& rows, const CUtensorMap& codes) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings rings(address(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            // Each thread that copies, or the copy engine's; each warp that multiplies.
            barrier_init(rings.rows.full(i), p.a_map ? 128 : 1);
            barrier_init(rings.rows.empty(i), 8);
        }
        for (int i = 0; i < CODE_STAGES; i++) {
            // Of each thread's scales, and the copy engine's.
            barrier_init(rings.codes.full(i), 129);
            barrier_init(rings.codes.empty(i), 256);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (Walk{p}.count() == 0) return;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;\n");
        Producer<FORMAT, KIND> producer{p, w, rows, codes, rings, static_cast<int>(threadIdx.x % 128), static_cast<int>(p.k / BK), 0, {}};
        if (p.a_map) producer.gather();
        else producer.direct();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;\n");
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
