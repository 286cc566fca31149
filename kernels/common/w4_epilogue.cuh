// What happens to a tile of sums of `hopper_w4a16.cu` before it leaves the chip: turned through shared memory, row by row.
#pragma once
#include "w4.cuh"

namespace w4 {

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

}  // namespace w4
