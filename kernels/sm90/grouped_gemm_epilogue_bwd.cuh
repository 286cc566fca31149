// The epilogue of down's gradient: through the activation to the pre-activations' gradient, with the activation itself
// (down's right operand in its weight gradient) and the rows' dots (gradients of the routing weights) beside it.
//
// The pre-activations come in chunks of 8 rows of 64 columns, two such chunks ahead (one in square tiles), and are replaced by
// their gradients on the way out. Both by TMA: loads of the warp's own would queue behind the rows that the producer gathers.
// A row of a chunk is a whole line of L2, 128 bytes: a box of as many bytes in rows of half a line asks L2 twice as often.
#pragma once
#include "sm90/grouped_gemm_epilogue.cuh"

namespace grouped_gemm {

template <class T, int KIND>
struct EpilogueChunks {
    // Three buffers of gate and up, then two of the activation.
    static constexpr int ROWS = GROUPED_GEMM_BWD_BOX_ROWS, BUFFER = ROWS * STORE_COLUMNS * sizeof(T), AHEAD = 3;
    // Chunks that are asked for before their turn. Square tiles, which take a chunk as a whole, ask at its start, where the
    // buffer of the one before it is still being read.
    static constexpr int LOADED_AHEAD = SQUARE<KIND> ? 1 : 2;
    static_assert(OPERATION<KIND> != DOWN_BWD || (2 * AHEAD + 2) * BUFFER == SmemLayout<KIND>::STAGING, "staging buffer");
    const GemmParams& p;
    const OutputMaps& maps;
    const WarpRows& rows;
    int column;
    uint32_t barriers;  // of the warp

    // Buffers of the `number`-th chunk of the warp.
    __device__ __forceinline__ uint32_t gate(uint32_t number) const { return rows.staging + number % AHEAD * 2 * BUFFER; }
    __device__ __forceinline__ uint32_t hidden(uint32_t number) const { return rows.staging + (2 * AHEAD + number % 2) * BUFFER; }
    // Chunks of a half of the tile: two for every 64 columns that exist, the warp's first eight rows and its second.
    __device__ __forceinline__ int per_half() const {
        return static_cast<int>(min(static_cast<int64_t>(COLUMNS<KIND>), p.n - column) + STORE_COLUMNS - 1) / STORE_COLUMNS * 2;
    }
    // Those of its tile: none for a half without rows.
    __device__ __forceinline__ int count() const {
        return per_half() * (64 + rows.first < rows.live ? 2 : rows.first < rows.live ? 1 : 0);
    }
    // Chunk q is of the first half, or of the second behind it.
    __device__ __forceinline__ int first_column(int q) const { return column + (q < per_half() ? q : q - per_half()) / 2 * STORE_COLUMNS; }
    __device__ __forceinline__ int first_row(int q) const { return rows.slot + (q < per_half() ? 0 : 64) + rows.first + q % 2 * ROWS; }
    // By one lane; the `number`-th chunk of the warp goes by way of barrier `number` % AHEAD.
    __device__ __forceinline__ void load(int q, uint32_t number) const {
        const uint32_t bar = barriers + number % AHEAD * 8;
        mbarrier_arrive_expect_tx(bar, 2 * BUFFER);
        tma_load_evict_first(gate(number), maps.pre, bar, first_column(q), 0, first_row(q));
        tma_load_evict_first(gate(number) + BUFFER, maps.pre, bar, first_column(q), 1, first_row(q));
    }
    __device__ __forceinline__ void wait(uint32_t number) const { mbarrier_wait(barriers + number % AHEAD * 8, number / AHEAD & 1); }
    // Sends gate, up and the activation. A box that would run over the tile's last row goes word by word.
    __device__ __forceinline__ void store(int q, uint32_t number) const {
        fence_proxy_async();
        __syncwarp();
        if (first_row(q) - rows.slot + ROWS <= rows.live) {
            if (rows.lane == 0) {
                tma_store(maps.gated, gate(number), first_column(q), 0, first_row(q));
                tma_store(maps.gated, gate(number) + BUFFER, first_column(q), 1, first_row(q));
                if (p.hidden) tma_store(maps.plain, hidden(number), first_column(q), 0, first_row(q));
            }
        } else {
            words(q, gate(number), static_cast<T*>(p.out), 2 * p.n);
            words(q, gate(number) + BUFFER, static_cast<T*>(p.out) + p.n, 2 * p.n);
            if (p.hidden) words(q, hidden(number), static_cast<T*>(p.hidden), p.n);
        }
        tma_store_commit();
    }
    __device__ __forceinline__ void words(int q, uint32_t from, T* base, int64_t ld) const {
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int in_box = i * 4 + rows.lane / 8, row = first_row(q) + in_box, c = rows.lane % 8;
            const int64_t n = first_column(q) + c * 8;
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + swizzled(in_box, c)) : "memory");
            if (row - rows.slot < rows.live && n < p.n) *reinterpret_cast<uint4*>(base + static_cast<int64_t>(row) * ld + n) = v;
        }
    }
    // Rows of 128 bytes, as TMA lays them out.
    static __device__ __forceinline__ uint32_t swizzled(int row, int word) { return row * 128 + ((word ^ row) << 4); }
    // This lane's row of the matrices of two blocks of eight columns, `block` and the next: of gate by the first 16 lanes, of
    // up by the others.
    __device__ __forceinline__ uint32_t matrices(int block) const { return rows.lane / 16 * BUFFER + swizzled(rows.lane % 8, block + rows.lane / 8 % 2); }
};

// Accumulators of eight rows of two blocks of eight columns: of blocks c / 2 * 2 and the next, and of the warp's first eight rows
// where c is even, else of its second. A loop over c in place of as many copies of its body, which would not fit the instruction cache. The moves
// are in assembly, as the compiler would put the array into memory.
template <int FIRST, int COUNT, int SIZE>
__device__ __forceinline__ void select_accumulators(const float (&acc)[SIZE], int c, float (&d)[4]) {
    if constexpr (COUNT == 1) {
        const float* v = acc + FIRST / 2 * 8 + FIRST % 2 * 2;
        asm volatile("mov.f32 %0, %4;\nmov.f32 %1, %5;\nmov.f32 %2, %6;\nmov.f32 %3, %7;\n"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "f"(v[0]), "f"(v[1]), "f"(v[4]), "f"(v[5]));
    } else {
        if (c < FIRST + COUNT / 2) select_accumulators<FIRST, COUNT / 2>(acc, c, d);
        else select_accumulators<FIRST + COUNT / 2, COUNT - COUNT / 2>(acc, c, d);
    }
}

// Two blocks of eight columns of eight rows through the activation: `v` holds gate of both, then up, and gets their gradients;
// `h` gets the activation. Blocks past the last column (from `left` on) are not counted in the rows' dots.
template <class T, int ACT>
__device__ __forceinline__ void activation_bwd(float alpha, float limit, const float (&d)[4], float factor, int left, uint32_t (&v)[4], uint32_t* h, float& dot) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 a = unpack<T>(v[i]), b = unpack<T>(v[i + 2]);
        const Glu x = activate<true>(ACT, alpha, limit, a.x, b.x), y = activate<true>(ACT, alpha, limit, a.y, b.y);
        const float dx = d[2 * i], dy = d[2 * i + 1];
        if (i < left) dot += dx * x.value + dy * y.value;
        v[i] = pack<T>(x.by_gate * (dx * factor), y.by_gate * (dy * factor));
        v[i + 2] = pack<T>(x.by_up * (dx * factor), y.by_up * (dy * factor));
        h[i] = pack<T>(x.value * factor, y.value * factor);
    }
}

// A warp's part of its half of a tile.
template <class T, int KIND>
struct TileHalf {
    const EpilogueChunks<T, KIND>& chunks;
    int half, first, count;  // first chunk of the half, chunks of the tile
    float factor[2], dot[2];

    __device__ __forceinline__ TileHalf(const EpilogueChunks<T, KIND>& chunks, int half, int count)
        : chunks(chunks), half(half), first(half * chunks.per_half()), count(count), dot{0.0f, 0.0f} {
        const float scale = chunks.rows.value(chunks.p.scale);
        factor[0] = chunks.rows.of(scale, half, 0), factor[1] = chunks.rows.of(scale, half, 2);
    }
    // The next chunk that is asked for goes where another has left: the one before, in the middle of a chunk, or the one
    // before that.
    __device__ __forceinline__ void load_ahead(int q, uint32_t number) const {
        constexpr int NEXT = EpilogueChunks<T, KIND>::LOADED_AHEAD;
        if (chunks.rows.lane == 0) {
            asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(2 - NEXT) : "memory");
            if (q + NEXT < count) chunks.load(q + NEXT, number + NEXT);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void put_dots() {
        const GemmParams& p = chunks.p;
        const WarpRows& rows = chunks.rows;
        if (!p.partial) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
            dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
            const int row = half * 64 + rows.first + rows.lane / 4 + h * 8;
            // Rows past the end are not stored.
            if (rows.lane % 4 == 0 && row < rows.live) {
                p.partial[(static_cast<int64_t>(rows.slot) + row) * p.n_tiles + chunks.column / BLOCK_N<KIND>] = dot[h];
            }
        }
    }
};

// A half of a tile. `number` counts the chunks of the warp, of which two are on their way, one in square tiles.
template <class T, int KIND>
__device__ __forceinline__ void epilogue_half(TileHalf<T, KIND>& half, const float (&acc)[BLOCK_N<KIND> / 2], uint32_t& number) {
    const EpilogueChunks<T, KIND>& chunks = half.chunks;
    const GemmParams& p = chunks.p;
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const int blocks = static_cast<int>(p.n - chunks.column) / 8;  // of eight columns
    const int all = chunks.per_half() * 4;  // pairs of blocks, of eight rows each
#pragma unroll 1
    for (int c = 0; c < all; c++) {
        // Four pairs of blocks a chunk; chunks of the first eight rows and of the second in turn.
        const int q = half.first + c / 4, second = c / 4 % 2, pair = c / 8 * 4 + c % 4;
        if (c % 4 == 0) chunks.wait(number);
        if (c % 4 == (SQUARE<KIND> ? 0 : 2)) half.load_ahead(q, number);
        const uint32_t at = chunks.gate(number) + chunks.matrices(c % 4 * 2);
        uint32_t v[4], h[2];
        ldmatrix(at, v);
        float d[4];
        select_accumulators<0, BLOCK_N<KIND> / 8>(acc, pair * 2 + second, d);
        const float factor = second ? half.factor[1] : half.factor[0];
        float dot = 0.0f;
        with_gate(static_cast<int>(p.activation), [&](auto kind) { activation_bwd<T, kind.value>(alpha, limit, d, factor, blocks - pair * 2, v, h, dot); });
        half.dot[0] += second ? 0.0f : dot, half.dot[1] += second ? dot : 0.0f;
        stmatrix(at, v);
        stmatrix(chunks.hidden(number) + EpilogueChunks<T, KIND>::swizzled(chunks.rows.lane % 8, c % 4 * 2 + chunks.rows.lane / 8 % 2), h);
        if (c % 4 == 3) chunks.store(q, number), number++;
    }
}

// The same for one activation, without a loop: no accumulator is moved, and each that is done with makes room.
template <class T, int KIND, int ACT, int WIDTH>
__device__ __forceinline__ void epilogue_half_fast(TileHalf<T, KIND>& half, const float (&acc)[BLOCK_N<KIND> / 2], uint32_t& number) {
    constexpr int PAIRS_AT_ONCE = SQUARE<KIND> ? 4 : 2;  // of blocks of eight columns
    const EpilogueChunks<T, KIND>& chunks = half.chunks;
    const int blocks = static_cast<int>(chunks.p.n - chunks.column) / 8, per_half = chunks.per_half();
#pragma unroll
    for (int c = 0; c < WIDTH / 16; c++) {
        if (c >= per_half) break;
        if (SQUARE<KIND>) half.load_ahead(half.first + c, number);
        chunks.wait(number);
#pragma unroll
        for (int part = 0; part < 4 / PAIRS_AT_ONCE; part++) {
            if (part == 1) half.load_ahead(half.first + c, number);
            const uint32_t at = chunks.gate(number);
            uint32_t v[PAIRS_AT_ONCE][4], h[2 * PAIRS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++) ldmatrix(at + chunks.matrices((part * PAIRS_AT_ONCE + i) * 2), v[i]);
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++) {
                const int block = c / 2 * 8 + (part * PAIRS_AT_ONCE + i) * 2;
                const float* of = acc + block * 4 + c % 2 * 2;
                const float d[4] = {of[0], of[1], of[4], of[5]};
                activation_bwd<T, ACT>(0.0f, 0.0f, d, half.factor[c % 2], blocks - block, v[i], h + 2 * i, half.dot[c % 2]);
            }
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i++) stmatrix(at + chunks.matrices((part * PAIRS_AT_ONCE + i) * 2), v[i]);
#pragma unroll
            for (int i = 0; i < PAIRS_AT_ONCE; i += 2) {
                const uint32_t four[4] = {h[2 * i], h[2 * i + 1], h[2 * i + 2], h[2 * i + 3]};
                stmatrix(chunks.hidden(number) + EpilogueChunks<T, KIND>::swizzled(chunks.rows.lane % 8, (part * PAIRS_AT_ONCE + i) * 2 + chunks.rows.lane / 8), four);
            }
        }
        chunks.store(half.first + c, number);
        number++;
    }
}

// A half after the other. The second one's accumulators become the first one's, so that there is one copy of the code.
template <class T, int KIND, int COUNT, int WIDTH>
__device__ __forceinline__ void epilogue_down_bwd(const EpilogueChunks<T, KIND>& chunks, Accumulators<KIND>& acc, uint32_t& number) {
    const int count = chunks.count(), halves = count > chunks.per_half() ? 2 : count > 0 ? 1 : 0;
#pragma unroll 1
    for (int i = 0; i < halves; i++) {
        TileHalf<T, KIND> half(chunks, i, count);
        if (chunks.p.activation == ACT_SILU) epilogue_half_fast<T, KIND, ACT_SILU, WIDTH>(half, acc[0], number);
        else epilogue_half<T, KIND>(half, acc[0], number);
        half.put_dots();
        if constexpr (COUNT == 2) {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) acc[0][j] = acc[1][j];
        }
    }
}

}  // namespace grouped_gemm
