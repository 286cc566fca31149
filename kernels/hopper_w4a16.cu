// Products of many rows with FP4 weights on Hopper (sm_90a): up with a gate, and down, bf16, rows of a multiple of 64.
//
// Weights are the left operand, which the matrix unit takes from registers: each warp makes bf16 of the codes of its 16 weight
// rows in the registers that the product reads. No bf16 weight is ever in memory of any kind. A tile is weight rows by rows of a
// layout, the output's columns by its rows, turned on its way out.
//
// A block stays on its multiprocessor and walks through tiles. Two warpgroups multiply, 64 weight rows and all rows of the tile
// each, for up 8 of gate and 8 of up in turn; while the matrix unit works on a step of 64 k, they make the next one's weights. One
// warpgroup brings rows, one codes and scales, into rings of their own: codes turned so that a multiplying thread's are a word,
// scales a pair of bf16 each. As the two that multiply share no results, one may run ahead by as much as the rings hold, so that
// one's epilogue runs under the other's products.
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

constexpr int BK = 64, THREADS = 512, ROWS = 256, WEIGHTS = 128;
// Columns of the output that a tile makes.
template <int KIND>
constexpr int COLUMNS = KIND == UP ? WEIGHTS / 2 : WEIGHTS;
// Codes and scales come for two steps at a time: of a step 32 bytes of codes a weight row, then the four scales of each
// row, each twice in a word.
constexpr int CODE_STEPS = 2, SCALES = WEIGHTS * 32, CODE_STEP = SCALES + WEIGHTS * 16, CODE_STAGE = CODE_STEPS * CODE_STEP;
// As they come, steps of codes and scales lie where the threads that asked for them read them.
constexpr int AHEAD = 3, STORED = WEIGHTS * (32 + 4);
// Shared memory: both rings, codes as stored, what a warpgroup's results leave through, barriers.
constexpr int STAGES = 5, CODE_STAGES = 3, STAGE = ROWS * BK * 2, LEAVING = 8192;
constexpr int CODES = STAGES * STAGE, AS_STORED = CODES + CODE_STAGES * CODE_STAGE, STAGED = AS_STORED + AHEAD * STORED;
constexpr int BARRIERS = STAGED + 2 * LEAVING;
constexpr int SHARED = BARRIERS + 2 * (STAGES + CODE_STAGES) * 8;
static_assert(SHARED == 231040 && SHARED <= 232448, "src/cuda/launch.rs reserves as much");

// A place in a ring, whose stages are used one after another, again and again.
template <int COUNT>
struct Position {
    uint32_t stage = 0, turn = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, turn ^= 1;
    }
};
template <int COUNT, int BYTES>
struct Ring {
    using At = Position<COUNT>;
    uint32_t stages, barriers;
    __device__ __forceinline__ uint32_t stage(const At& at) const { return stages + at.stage * BYTES; }
    __device__ __forceinline__ uint32_t full(const At& at) const { return barriers + at.stage * 8; }
    __device__ __forceinline__ uint32_t empty(const At& at) const { return full(at) + COUNT * 8; }
    __device__ __forceinline__ void wait_full(const At& at) const { barrier_wait(full(at), at.turn); }
    __device__ __forceinline__ void wait_empty(const At& at) const { barrier_wait(empty(at), at.turn ^ 1); }
};
using RowRing = Ring<STAGES, STAGE>;
using CodeRing = Ring<CODE_STAGES, CODE_STAGE>;
struct Rings {
    RowRing rows;
    CodeRing codes;
    uint32_t stored, staging;
    __device__ __forceinline__ explicit Rings(uint32_t base)
        : rows{base, base + BARRIERS}, codes{base + CODES, base + BARRIERS + 2 * STAGES * 8}, stored(base + AS_STORED), staging(base + STAGED) {}
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

// Place of 16 bytes of a row's codes within a step's: eight rows' are a line of the memory's banks.
__device__ __forceinline__ uint32_t code_place(int row, int chunk) { return row * 32 + ((chunk ^ (row >> 2 & 1)) << 4); }

// A word's four pairs of codes, of which byte i has pair i / 2 + i % 2 * 2, as `pattern` wants them: nibbles of a byte 16 bits from
// each other, so 1 and 4 change places, and 3 and 6.
__device__ __forceinline__ uint32_t packed(uint32_t bytes) {
    const uint32_t change = (bytes ^ bytes >> 12) & 0xf0f0u;
    return bytes ^ change ^ change << 12;
}

// Codes of 32 k, turned so that a multiplying thread's are one word: of each 8 k it has two, by its place in the quad.
__device__ __forceinline__ void turn(uint32_t (&to)[4], const uint4& v) {
    const uint32_t a = __byte_perm(v.x, v.z, 0x5140), b = __byte_perm(v.y, v.w, 0x5140);
    const uint32_t c = __byte_perm(v.x, v.z, 0x7362), d = __byte_perm(v.y, v.w, 0x7362);
    to[0] = __byte_perm(a, b, 0x5410), to[1] = __byte_perm(a, b, 0x7632);
    to[2] = __byte_perm(c, d, 0x5410), to[3] = __byte_perm(c, d, 0x7632);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = packed(to[i]);
}

// The warpgroup that brings codes and scales, step after step of the block's tiles. A thread has half of a step's codes of two
// weight rows, and the scales of one; it asks for them AHEAD steps before it turns them, and alone reads what it asked for.
template <int FORMAT, int KIND>
struct Feed {
    static constexpr int BYTES = BK / Format<FORMAT>::BLOCK;  // of scales, for a row and a step
    const Gemm& p;
    const QuantWeight& w;
    const Rings& rings;
    const int thread, steps, count;
    int tile = 0, step = 0;  // of the next request
    uint32_t slot = 0;
    const char* from[2];
    const uint8_t* scales_from;

    __device__ __forceinline__ Feed(const Gemm& p, const QuantWeight& w, const Rings& rings, int steps, int count)
        : p(p), w(w), rings(rings), thread(threadIdx.x % 128), steps(steps), count(count) {}
    __device__ __forceinline__ int64_t row(const int4& t, int own) const {
        const int64_t row = weight_row<KIND>(p, t, own);
        return t.x * w.rows + (row < w.rows ? row : w.rows - 1);
    }
    __device__ __forceinline__ void look_up() {
        const int4 t = Walk{p}.at<KIND>(tile);
#pragma unroll
        for (int j = 0; j < 2; j++) from[j] = reinterpret_cast<const char*>(w.codes) + row(t, thread / 2 + j * 64) * w.code_bytes + thread % 2 * 16;
        scales_from = static_cast<const uint8_t*>(w.scales) + row(t, thread) * w.blocks;
    }
    // Asks for the next step's, if there is one.
    __device__ __forceinline__ void request() {
        if (tile < count) {
            if (step == 0) look_up();
            const uint32_t to = rings.stored + slot * STORED;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                copy(to + (j * 128 + thread) * 16, from[j]);
                from[j] += 32;
            }
            // Words of four bytes: of two bytes the lower half of a word alone, or the upper with the lower.
            const uint64_t at = reinterpret_cast<uint64_t>(scales_from);
            const uint32_t bytes = BYTES == 4 || at & 2 ? 4 : 2;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to + WEIGHTS * 32 + thread * 4), "l"(at & ~3ull), "r"(bytes) : "memory");
            scales_from += BYTES;
            if (++step == steps) step = 0, tile++;
        }
        asm volatile("cp.async.commit_group;\n" ::: "memory");
        if (++slot == AHEAD) slot = 0;
    }
    __device__ __forceinline__ void run() {
        CodeRing::At at;
        // Whether the two bytes of a step are a word's upper ones changes with each step.
        for (int i = 0; i < AHEAD; i++) request();
        for (int i = 0; i < count; i++) {
            uint32_t upper = 0;
            if (BYTES == 2) upper = row(Walk{p}.at<KIND>(i), thread) * w.blocks & 2;
            for (int step = 0; step < steps; step++) {
                const int odd = step % CODE_STEPS;
                asm volatile("cp.async.wait_group %0;\n" ::"n"(AHEAD - 1) : "memory");
                if (odd == 0) rings.codes.wait_empty(at);
                const uint32_t stored = rings.stored + slot * STORED, stage = rings.codes.stage(at) + odd * CODE_STEP;
                auto write = [&](uint32_t to, const uint32_t (&v)[4]) {
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
                };
                uint4 codes[2];
                uint32_t scales, v[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                                 : "=r"(codes[j].x), "=r"(codes[j].y), "=r"(codes[j].z), "=r"(codes[j].w)
                                 : "r"(stored + (j * 128 + thread) * 16)
                                 : "memory");
                }
                asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(scales) : "r"(stored + WEIGHTS * 32 + thread * 4) : "memory");
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    turn(v, codes[j]);
                    write(stage + code_place(thread / 2 + j * 64, thread % 2), v);
                }
                if (BYTES == 2) {
                    scales = scales >> upper * 8 & 0xffffu;
                    upper ^= 2;
                }
                Format<FORMAT>::expand(v, scales);
                write(stage + SCALES + thread * 16, v);
                if (odd || step + 1 == steps) {
                    barrier_arrive(rings.codes.full(at));
                    at.next();
                }
                request();
            }
        }
        // Copies must not outlive the block's shared memory.
        asm volatile("cp.async.wait_all;\n" ::: "memory");
    }
};

// The warpgroup that brings rows.
template <int KIND>
struct Producer {
    const Gemm& p;
    const CUtensorMap& rows;
    const Rings& rings;
    const int thread, steps;

    // In slot order they come by the copy engine, for which one thread asks.
    __device__ __forceinline__ void direct() {
        const Walk walk{p};
        const int count = walk.count();
        if (thread > 0) return;
        RowRing::At at;
        int4 after = walk.at<KIND>(0);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = walk.at<KIND>(i + 1);
            for (int step = 0; step < steps; step++, at.next()) {
                rings.rows.wait_empty(at);
                barrier_arrive_expect(rings.rows.full(at), STAGE);
                bulk(rings.rows.stage(at), rows, rings.rows.full(at), step * BK, t.y);
            }
        }
    }

    // Rows behind a map: eight threads a row of 64 k. Lanes look up the warp's rows, a tile ahead of their use.
    __device__ __forceinline__ void gather() {
        constexpr int EACH = ROWS / 16, LOOKED_UP = ROWS / 128, UNROLLED = 4;
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
        const int64_t pitch = p.k * 2;
        RowRing::At at;
        int4 after = walk.at<KIND>(0);
        look_up(after);
        for (int i = 0; i < count; i++) {
            const int4 t = after;
            if (i + 1 < count) after = walk.at<KIND>(i + 1);
            // A copy holds on to its address for some hundred cycles. So each has registers of its own, which several steps read
            // in place.
            const char* from[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                from[j] = static_cast<const char*>(p.a) + __shfl_sync(~0u, next[j / 8], j % 8 * 4 + lane / 8) * pitch + c * 16;
            }
            const int passes = (t.z + 15) / 16;
            for (int first = 0; first < steps; first += UNROLLED) {
#pragma unroll
                for (int u = 0; u < UNROLLED; u++, at.next()) {
                    const int step = first + u;
                    if (step == steps) break;
                    rings.rows.wait_empty(at);
                    const uint32_t to = rings.rows.stage(at) + into;
                    if (passes == EACH) {
#pragma unroll
                        for (int j = 0; j < EACH; j++) copy(to + j * 2048, from[j] + u * (BK * 2));
                    } else {
#pragma unroll
                        for (int j = 0; j < EACH; j++) {
                            if (j < passes) copy(to + j * 2048, from[j] + u * (BK * 2));
                        }
                    }
                    barrier_arrive_after_copies(rings.rows.full(at));
                    if (u == 0 && first == 0) look_up(after);
                }
#pragma unroll
                for (int j = 0; j < EACH; j++) from[j] += UNROLLED * BK * 2;
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
// Weights of 64 rows and 64 k as the products read them: by 16 k.
using Fragment = uint32_t[4][4];
__device__ __forceinline__ void pin(Fragment& v) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
}

// Codes and scales of a fragment, of a thread's two rows.
struct Codes {
    uint32_t words[2][2], scales[2][4];

    __device__ __forceinline__ void load(uint32_t stage, uint32_t codes, uint32_t scales_at) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++) {
                asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(words[half][chunk]) : "r"(stage + (codes ^ chunk << 4) + half * 256) : "memory");
            }
            uint32_t(&v)[4] = scales[half];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(stage + scales_at + half * 128) : "memory");
        }
    }
    template <int FORMAT>
    __device__ __forceinline__ void convert(Fragment& to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                const uint32_t pair = pattern(words[i % 2][i / 2], j);
                to[i / 2 * 2 + j / 2][j % 2 * 2 + i % 2] = Format<FORMAT>::value(pair, scales[i % 2][i / 2 * 2 + j / 2]);
            }
        }
        pin(to);
    }
};

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory");
}
// In two halves of which the second has REST rows: with one instruction for 256 the assembler wants more registers than 512
// threads start with.
template <int N, int REST>
__device__ __forceinline__ void multiply_rows(float (&acc)[ROWS / 2], const Fragment& a, uint64_t b) {
    float (&low)[64] = reinterpret_cast<float (&)[64]>(acc[0]);
    float (&high)[64] = reinterpret_cast<float (&)[64]>(acc[64]);
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#pragma unroll
    for (int k = 0; k < BK / 16; k++) {
        wgmma_left<N, 0>(low, a[k], b + k * 2, 1);
        if constexpr (REST > 0) wgmma_left<REST, 0>(high, a[k], b + 1024 + k * 2, 1);
    }
    commit();
}
// Of a tile with so many rows.
__device__ __forceinline__ void multiply(float (&acc)[ROWS / 2], const Fragment& a, uint64_t b, int rows) {
    pin(acc);
    if (rows > 192) multiply_rows<128, 128>(acc, a, b);
    else if (rows > 128) multiply_rows<128, 64>(acc, a, b);
    else if (rows > 64) multiply_rows<128, 0>(acc, a, b);
    else multiply_rows<64, 0>(acc, a, b);
}

// What a multiplying warpgroup keeps from tile to tile.
template <int FORMAT>
struct Worker {
    const Rings& rings;
    const int steps, group, first;  // first: weight row of this thread in the warpgroup's 64
    const bool mapped;
    const uint32_t codes, scales;   // places of that row in a step's codes
    RowRing::At at, before;         // of rows: the stage in use, and the one whose products may still be under way
    CodeRing::At code_at;

    __device__ __forceinline__ Worker(const Gemm& p, const Rings& rings)
        : rings(rings), steps(static_cast<int>(p.k / BK)), group(threadIdx.x / 128), first(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
          mapped(p.a_map), codes(code_place(group * 64 + first, 0) + threadIdx.x % 4 * 4), scales(SCALES + (group * 64 + first) * 16) {}

    // Of step 0 or 1 of a stage of codes.
    __device__ __forceinline__ void load(Codes& to, int odd) const { to.load(rings.codes.stage(code_at) + odd * CODE_STEP, codes, scales); }
    // By each lane, as each has read codes and scales of its own.
    __device__ __forceinline__ void release_codes() {
        barrier_arrive(rings.codes.empty(code_at));
        code_at.next();
    }
    __device__ __forceinline__ void release_rows(const RowRing::At& position) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(rings.rows.empty(position));
    }
    __device__ __forceinline__ void wait_rows() const {
        rings.rows.wait_full(at);
        // Rows behind a map came by ordinary writes; wgmma reads through another proxy.
        if (mapped) fence_proxy();
    }
    // Products of a step, and while the matrix unit works on them the weights of the next, step ODD of its stage.
    template <int ODD>
    __device__ __forceinline__ void multiply_and_convert(float (&acc)[ROWS / 2], Fragment& now, Fragment& next, int count, bool first, bool more) {
        multiply(acc, now, operand(rings.rows.stage(at)), count);
        const RowRing::At own = at;
        at.next();
        Codes codes;
        if (more) {
            if (ODD == 0) rings.codes.wait_full(code_at);
            load(codes, ODD);
            wait_rows();
        }
        wait<1>();
        pin(next);
        if (!first) release_rows(before);
        before = own;
        if (more) {
            codes.convert<FORMAT>(next);
            if (ODD == CODE_STEPS - 1) release_codes();
        }
    }

    // Sums of a tile, of which `count` rows count.
    __device__ __forceinline__ void products(float (&acc)[ROWS / 2], int count) {
        Fragment a[2] = {};
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;
        {
            Codes codes;
            rings.codes.wait_full(code_at);
            load(codes, 0);
            codes.convert<FORMAT>(a[0]);
        }
        wait_rows();
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            multiply_and_convert<1>(acc, a[0], a[1], count, step == 0, step + 1 < steps);
            if (step + 1 == steps) {
                release_codes();
                break;
            }
            multiply_and_convert<0>(acc, a[1], a[0], count, false, step + 2 < steps);
        }
        wait<0>();
        pin(acc);
        pin(a[0]);
        pin(a[1]);
        release_rows(before);
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
    // `count` rows to `out`, whose rows are `wide`, from row `first` on; or where that is negative to row `row_of(r)` each,
    // perhaps added. (The first way gains down 4 %, up nothing.)
    template <class RowOf>
    __device__ __forceinline__ void send(bf16* out, int64_t wide, int64_t columns, int count, int64_t first, bool add, RowOf&& row_of) const {
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
        if (first >= 0) {
            bf16* to = out + (first + thread / CHUNKS) * wide + c * 8;
            const int most = c * 8 < columns ? count - thread / CHUNKS : 0;
#pragma unroll
            for (int j = 0; j < 4; j++, to += wide * (128 / CHUNKS)) {
                if (j * (128 / CHUNKS) < most) {
                    // As text, or the compiler makes four stores of it.
                    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v[j].x), "r"(v[j].y), "r"(v[j].z), "r"(v[j].w) : "memory");
                }
            }
            return;
        }
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
    // All rows of a tile from accumulators, as many at a time as there is room for; `first` and `row_of` as above, of the tile.
    // Of up, gate's place or up's.
    template <int N, class RowOf>
    __device__ __forceinline__ void send_all(const float (&v)[N], int up, bf16* out, int64_t wide, int64_t columns, int count, int64_t first, bool add, RowOf&& row_of) const {
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
            send(out, wide, columns, count - from, first < 0 ? first : first + from, add, [&](int r) { return row_of(from + r); });
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
__device__ __forceinline__ void finish_up(const Gemm& p, float (&acc)[ROWS / 2], const Place& at, const Staging<UP>& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] *= at.factor[i / 2 % 2];
    if (p.scale) scale_rows(p.scale, acc, at);
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * 2 * p.n + at.column + at.first;
        const bool inside = at.first < columns;
        const float own[2] = {inside ? to_float(bias[0]) : 0.0f, inside ? to_float(bias[p.n]) : 0.0f};
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] += own[i / 2 % 2];
    }
    if (p.pre_out) {
        auto to_slot = [&](int r) { return static_cast<int64_t>(at.t.y) + r; };
        bf16* pre = static_cast<bf16*>(p.pre_out) + at.column;
        staging.send_all(acc, 0, pre, 2 * p.n, columns, at.t.z, -1, false, to_slot);
        staging.send_all(acc, 1, pre + p.n, 2 * p.n, columns, at.t.z, -1, false, to_slot);
    }
    with_gate(static_cast<int>(p.activation), [&](auto kind) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            if (i / 2 % 2) continue;
            acc[i] = activate<true>(kind.value, static_cast<float>(p.alpha), static_cast<float>(p.limit), acc[i], acc[i + 2]).value;
        }
    });
    if (p.out_scale) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            if (i / 2 % 2 == 0) acc[i] *= at.of_row(p.out_scale, i);
        }
    }
    staging.send_all(acc, 0, static_cast<bf16*>(p.out) + at.column, p.n, columns, at.t.z, -1, p.accumulate,
                     [&](int r) { return out_row(p, at.t.y + r, threadIdx.x % Staging<UP>::CHUNKS); });
}

__device__ __forceinline__ void finish_down(const Gemm& p, float (&acc)[ROWS / 2], const Place& at, const Staging<DOWN>& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] *= at.factor[0];
    if (p.scale) scale_rows(p.scale, acc, at);
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * p.n + at.column + at.first;
        float own[2];
#pragma unroll
        for (int h = 0; h < 2; h++) own[h] = at.first + h * 8 < columns ? to_float(bias[h * 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) acc[i] += own[i / 2 % 2] * (p.bias_scale ? at.of_row(p.bias_scale, i) : 1.0f);
    }
    staging.send_all(acc, 0, static_cast<bf16*>(p.out) + at.column, p.n, columns, at.t.z, p.out_map || p.accumulate ? -1 : at.t.y, p.accumulate,
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
        float acc[ROWS / 2];
        worker.products(acc, t.z);
        if constexpr (KIND == UP) finish_up(p, acc, place, staging);
        else finish_down(p, acc, place, staging);
    }
}

template <int FORMAT, int KIND>
__device__ __forceinline__ void run(const Gemm& p, const QuantWeight& w, const CUtensorMap& rows) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const Rings rings(address(shared));
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            // Each thread that copies, or the copy engine's; each warp that multiplies.
            barrier_init(rings.rows.full({i, 0}), p.a_map ? 128 : 1);
            barrier_init(rings.rows.empty({i, 0}), 8);
        }
        for (uint32_t i = 0; i < CODE_STAGES; i++) {
            // Of each thread that writes, each that reads.
            barrier_init(rings.codes.full({i, 0}), 128);
            barrier_init(rings.codes.empty({i, 0}), 256);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
    __syncthreads();
    if (Walk{p}.count() == 0) return;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int steps = static_cast<int>(p.k / BK), thread = threadIdx.x % 128;
    if (role == 3) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
        Feed<FORMAT, KIND>(p, w, rings, steps, Walk{p}.count()).run();
    } else if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
        Producer<KIND> producer{p, rows, rings, thread, steps};
        if (p.a_map) producer.gather();
        else producer.direct();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;\n");
        work<FORMAT, KIND>(p, w, rings);
    }
}

}  // namespace

#define PRODUCT(name, FORMAT, KIND)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                      \
        name(const __grid_constant__ Gemm p, const __grid_constant__ QuantWeight w,               \
             const __grid_constant__ CUtensorMap rows) {                                          \
        run<FORMAT, KIND>(p, w, rows);                                                            \
    }

PRODUCT(hopper_up_nvfp4, WEIGHT_NVFP4, UP)
PRODUCT(hopper_down_nvfp4, WEIGHT_NVFP4, DOWN)
PRODUCT(hopper_up_mxfp4, WEIGHT_MXFP4, UP)
PRODUCT(hopper_down_mxfp4, WEIGHT_MXFP4, DOWN)
#endif
