// Epilogue of `sm90_w4a16.cu`: a tile of sums, before it leaves the chip, is turned through shared memory, row by
// row.
#pragma once
#include "sm90/w4a16_pipeline.cuh"

namespace w4a16 {

// Columns of a warpgroup on their way out, as many rows as fit. Chunks of 16 bytes are permuted.
template <int KIND>
struct Staging {
    static constexpr int WIDE = COLUMNS<KIND>, CHUNKS = WIDE / 16, COUNT = STAGING_BYTES / WIDE;  // bytes and chunks of a row, rows
    uint32_t base;
    int group, thread;  // of the warpgroup
    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;\n" ::"r"(1 + group) : "memory"); }
    __device__ __forceinline__ uint32_t place(int row, int chunk) const {
        return base + row * WIDE + ((chunk ^ (CHUNKS == 8 ? row & 7 : row >> 1 & 3)) << 4);
    }
    // Four blocks of 8 columns by 8 rows, turned: of up 8 columns of 32 rows, of down 16 of 16 rows.
    __device__ __forceinline__ void put(int row, const uint32_t (&v)[4]) const {
        const int lane = thread % 32, warp = thread / 32, which = lane / 8;
        const uint32_t to = KIND == UP ? place(row + lane, warp) : place(row + which / 2 * 8 + lane % 8, warp * 2 + which % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    }
    // A matrix that rows leave for: columns from the warpgroup's first on, and how many there are.
    struct OutputRows {
        bf16* out;
        int64_t wide, columns;
    };
    // Of the first `count` rows put there, those of this thread, by `write(row, 16 bytes)`.
    template <class Write>
    __device__ __forceinline__ void take(int64_t columns, int count, Write&& write) const {
        const int c = thread % CHUNKS, most = c * 8 < columns ? count : 0;
        sync();
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "r"(place(thread / CHUNKS + j * (128 / CHUNKS), c))
                         : "memory");
        }
        sync();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int r = thread / CHUNKS + j * (128 / CHUNKS);
            if (r < most) write(r, v[j]);
        }
    }
    // All rows of a tile, as many at a time as there is room for. `make` gives the sums of BLOCK rows from accumulator
    // `at` on, of which a pair in STRIDE leaves, from pair `which` on; `take_from(first row)` takes them.
    static constexpr int BLOCK = KIND == UP ? 32 : 16, STRIDE = KIND == UP ? 4 : 2;
    template <class Make, class TakeFrom>
    __device__ __forceinline__ void send_all(int which, int count, Make&& make, TakeFrom&& take_from) const {
#pragma unroll
        for (int from = 0; from < BLOCK_N; from += COUNT) {
            if (from >= count) break;
#pragma unroll
            for (int r = from; r < from + COUNT; r += BLOCK) {
                float v[BLOCK / 2];
                make(v, r / 2);
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[i * STRIDE + which * 2], v[i * STRIDE + which * 2 + 1]);
                    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
                }
                put(r - from, words);
            }
            take_from(from);
        }
    }
    // To rows from `first` on.
    template <class Make>
    __device__ __forceinline__ void send_in_order(int which, const OutputRows& to, int64_t first, int count, Make&& make) const {
        send_all(which, count, make, [&](int from) {
            // Each behind the one before: no products.
            bf16* at = to.out + (first + from + thread / CHUNKS) * to.wide + thread % CHUNKS * 8;
            take(to.columns, count - from, [&](int, const uint4& v) {
                // As text, or the compiler makes four stores of it.
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
                at += to.wide * (128 / CHUNKS);
            });
        });
    }
    // The same, perhaps added to what is there.
    template <class Make>
    __device__ __forceinline__ void send(int which, const OutputRows& to, bool add, int64_t first, int count, Make&& make) const {
        send_all(which, count, make, [&](int from) {
            take(to.columns, count - from, [&](int r, uint4& v) {
                uint4* at = reinterpret_cast<uint4*>(to.out + (first + from + r) * to.wide + thread % CHUNKS * 8);
                if (add) {
                    uint4 old = *at;
                    bf16* sums = reinterpret_cast<bf16*>(&v);
                    const bf16* before = reinterpret_cast<const bf16*>(&old);
#pragma unroll
                    for (int k = 0; k < 8; k++) sums[k] = from_float<bf16>(to_float(before[k]) + to_float(sums[k]));
                }
                *at = v;
            });
        });
    }
};

// Position of a tile, as its end needs it.
struct TilePosition {
    const int4& t;
    int64_t column;  // the warpgroup's first
    int first, pair;  // of its columns this thread's first, of eight rows its first
    const float (&factor)[2];

    // A number of the tile's row behind accumulator i; of rows that do not exist, any.
    __device__ __forceinline__ float of_row(const float* values, int i) const {
        const int local = i / 4 * 8 + pair + i % 2;
        return values[t.y + (local < t.z ? local : 0)];
    }
};

// A factor a row, from accumulator `from` on: of four accumulators two are of one row and two of the next.
template <int N>
__device__ __forceinline__ void scale_rows(const float* scales, float (&v)[N], const TilePosition& at, int from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float first = at.of_row(scales, from + i), second = at.of_row(scales, from + i + 1);
        v[i] *= first, v[i + 1] *= second, v[i + 2] *= first, v[i + 3] *= second;
    }
}

// Of four accumulators two are gate's and two up's, of the same column and rows. Accumulators stay as they are: changed
// all at once, in steps of which each may be left out, they would need registers twice. WEIGHED: there may be factors a
// row, and biases. Without it none of their code is in the way: to jump over it again and again costs more than the
// rest.
template <int ACT, bool WEIGHED>
struct UpEpilogue {
    const GemmParams& p;
    const float (&acc)[BLOCK_N / 2];
    const TilePosition& at;
    const float (&bias)[2];

    // Gate and up of 32 rows, from accumulator `from` on.
    __device__ __forceinline__ void before(float (&v)[16], int from) const {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = __fmul_rn(acc[from + i], at.factor[i / 2 % 2]);
        if (!WEIGHED) return;
        if (p.scale) scale_rows(p.scale, v, at, from);
        if (p.bias) {
#pragma unroll
            for (int i = 0; i < 16; i++) v[i] += bias[i / 2 % 2];
        }
    }
    __device__ __forceinline__ void after(float (&v)[16], int from) const {
        before(v, from);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (i / 2 % 2) continue;
            v[i] = activate<true>(ACT, static_cast<float>(p.alpha), static_cast<float>(p.limit), v[i], v[i + 2]).value;
            if (WEIGHED && p.out_scale) v[i] *= at.of_row(p.out_scale, from + i);
        }
    }
};
__device__ __forceinline__ void epilogue_up(const GemmParams& p, const float (&acc)[BLOCK_N / 2], const TilePosition& at, const Staging<UP>& staging) {
    const int64_t columns = p.n - at.column;
    float bias[2] = {};
    if (p.bias && at.first < columns) {
        const bf16* from = static_cast<const bf16*>(p.bias) + at.t.x * 2 * p.n + at.column + at.first;
        bias[0] = to_float(from[0]), bias[1] = to_float(from[p.n]);
    }
    if (p.pre_out) {
        const UpEpilogue<ACT_SILU, true> end{p, acc, at, bias};
        bf16* pre = static_cast<bf16*>(p.pre_out) + at.column;
        auto before = [&](float (&v)[16], int from) { end.before(v, from); };
        staging.send_in_order(0, {pre, 2 * p.n, columns}, at.t.y, at.t.z, before);
        staging.send_in_order(1, {pre + p.n, 2 * p.n, columns}, at.t.y, at.t.z, before);
    }
    const Staging<UP>::OutputRows to{static_cast<bf16*>(p.out) + at.column, p.n, columns};
    const bool plain = !p.scale && !p.bias && !p.out_scale && !p.accumulate;
    with_gate(static_cast<int>(p.activation), [&](auto kind) {
        if (plain) {
            const UpEpilogue<kind.value, false> end{p, acc, at, bias};
            staging.send_in_order(0, to, at.t.y, at.t.z, [&](float (&v)[16], int from) { end.after(v, from); });
        } else {
            const UpEpilogue<kind.value, true> end{p, acc, at, bias};
            staging.send(0, to, p.accumulate, at.t.y, at.t.z, [&](float (&v)[16], int from) { end.after(v, from); });
        }
    });
}

__device__ __forceinline__ void epilogue_down(const GemmParams& p, float (&acc)[BLOCK_N / 2], const TilePosition& at, const Staging<DOWN>& staging) {
    const int64_t columns = p.n - at.column;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) acc[i] *= at.factor[0];
    if (p.scale) scale_rows(p.scale, acc, at, 0);
    if (p.bias) {
        const bf16* bias = static_cast<const bf16*>(p.bias) + at.t.x * p.n + at.column + at.first;
        float own[2];
#pragma unroll
        for (int h = 0; h < 2; h++) own[h] = at.first + h * 8 < columns ? to_float(bias[h * 8]) : 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) acc[i] += own[i / 2 % 2] * (p.bias_scale ? at.of_row(p.bias_scale, i) : 1.0f);
    }
    const Staging<DOWN>::OutputRows to{static_cast<bf16*>(p.out) + at.column, p.n, columns};
    auto after = [&](float (&v)[8], int from) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = acc[from + i];
    };
    if (p.accumulate) staging.send(0, to, true, at.t.y, at.t.z, after);
    else staging.send_in_order(0, to, at.t.y, at.t.z, after);
}

}  // namespace w4a16
