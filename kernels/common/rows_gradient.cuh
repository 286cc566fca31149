// The epilogue of down's gradient: through the activation to the pre-activations' gradient, with the activation itself
// (down's right operand in its weight gradient) and the rows' dots (gradients of the routing weights) beside it.
//
// The pre-activations come 32 columns at a time, two such chunks ahead, and are replaced by their gradients on the way
// out. Both by the copy engine: loads of the warp's own would queue behind the rows that the producer gathers.
#pragma once
#include "rows_epilogue.cuh"

namespace rows {

struct Tensors {
    const CUtensorMap &pre, &d_pre, &hidden;  // [rows, 2 or 1, n], in boxes of 16 rows of 32 columns
};

template <class T>
struct Chunks {
    // Three buffers of gate and up, then two of the activation.
    static constexpr int BUFFER = 1024, AHEAD = 3;
    static_assert((2 * AHEAD + 2) * BUFFER == Layout<DOWN_BWD>::STAGING, "staging buffer");
    const Gemm& p;
    const Tensors& tensors;
    const Rows& rows;
    int column;
    uint32_t barriers;  // of the warp

    __device__ __forceinline__ uint32_t gate(int q) const { return rows.staging + q % AHEAD * 2 * BUFFER; }
    __device__ __forceinline__ uint32_t hidden(int q) const { return rows.staging + (2 * AHEAD + q % 2) * BUFFER; }
    // Chunk q is columns 32 (q % 6) and on, of half q / 6.
    __device__ __forceinline__ int first_column(int q) const { return column + q % 6 * 32; }
    __device__ __forceinline__ int first_row(int q) const { return rows.slot + q / 6 * 64 + rows.first; }
    // By one lane; the `number`-th chunk of the warp goes by way of barrier `number` % AHEAD.
    __device__ __forceinline__ void load(int q, uint32_t number) const {
        const uint32_t bar = barriers + number % AHEAD * 8;
        barrier_arrive_expect(bar, 2 * BUFFER);
        bulk(gate(q), tensors.pre, bar, first_column(q), 0, first_row(q));
        bulk(gate(q) + BUFFER, tensors.pre, bar, first_column(q), 1, first_row(q));
    }
    __device__ __forceinline__ void wait(uint32_t number) const { barrier_wait(barriers + number % AHEAD * 8, number / AHEAD & 1); }
    // Sends gate, up and the activation. Boxes would run over the last row of a tile: that warp's go word by word.
    __device__ __forceinline__ void store(int q) const {
        fence_proxy();
        __syncwarp();
        if (q / 6 * 64 + rows.first + 16 <= rows.live) {
            if (rows.lane == 0) {
                bulk_store(tensors.d_pre, gate(q), first_column(q), 0, first_row(q));
                bulk_store(tensors.d_pre, gate(q) + BUFFER, first_column(q), 1, first_row(q));
                if (p.hidden) bulk_store(tensors.hidden, hidden(q), first_column(q), 0, first_row(q));
            }
        } else {
            words(q, gate(q), static_cast<T*>(p.out), 2 * p.n);
            words(q, gate(q) + BUFFER, static_cast<T*>(p.out) + p.n, 2 * p.n);
            if (p.hidden) words(q, hidden(q), static_cast<T*>(p.hidden), p.n);
        }
        bulk_commit();
    }
    __device__ __forceinline__ void words(int q, uint32_t from, T* base, int64_t ld) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = i * 8 + rows.lane / 4, c = rows.lane % 4;
            const int64_t n = first_column(q) + c * 8;
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + swizzled(row, c)) : "memory");
            if (q / 6 * 64 + rows.first + row < rows.live && n < p.n) *reinterpret_cast<uint4*>(base + (static_cast<int64_t>(first_row(q)) + row) * ld + n) = v;
        }
    }
    // Rows of 64 bytes, as the copy engine lays them out.
    static __device__ __forceinline__ uint32_t swizzled(int row, int word) { return row * 64 + ((word ^ (row / 2 & 3)) << 4); }
    // Where this lane's row of matrices is, for columns 16 part and on.
    __device__ __forceinline__ uint32_t matrices(int part) const {
        return swizzled(rows.lane / 8 % 2 * 8 + rows.lane % 8, part * 2 + rows.lane / 16);
    }
};

// Eight accumulators of the 16 columns from 16 c on, of a half: a loop over c in place of as many copies of its body,
// which would not fit the instruction cache. In assembly, as the compiler would put the array into memory.
template <int COUNT>
__device__ __forceinline__ void pick(const Sums<DOWN_BWD>& acc, int half, int c, float (&d)[8]) {
#pragma unroll
    for (int h = 0; h < COUNT; h++) {
        if (half != h) continue;
#pragma unroll
        for (int i = 0; i < 12; i++) {
            const float* v = acc[h] + i * 8;
            asm volatile(
                "{\n.reg .pred other;\nsetp.ne.s32 other, %8, %9;\n@other bra NEXT;\n"
                "mov.f32 %0, %10;\nmov.f32 %1, %11;\nmov.f32 %2, %12;\nmov.f32 %3, %13;\n"
                "mov.f32 %4, %14;\nmov.f32 %5, %15;\nmov.f32 %6, %16;\nmov.f32 %7, %17;\nNEXT:\n}\n"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                : "r"(c), "r"(i), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
        }
    }
}

// Chunks of a warp: none for a half without rows.
__device__ __forceinline__ int chunk_count(const Rows& rows) {
    return 64 + rows.first < rows.live ? 12 : rows.first < rows.live ? 6 : 0;
}

// `number` counts the chunks of the warp; the first two of the tile are on their way.
template <class T, int COUNT>
__device__ __forceinline__ void finish_down_bwd(const Chunks<T>& chunks, const Work& w, Sums<DOWN_BWD>& acc, uint32_t& number) {
    const Gemm& p = chunks.p;
    const Rows& rows = chunks.rows;
    const int act = static_cast<int>(p.activation), count = chunk_count(rows);
    const float alpha = static_cast<float>(p.alpha), limit = static_cast<float>(p.limit);
    const float scale = rows.value(p.scale);
#pragma unroll 1
    for (int half = 0; half < count / 6; half++) {
        float dot[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int c = 0; c < 12; c++) {
            const int q = half * 6 + c / 2;
            if (c % 2 == 0) {
                chunks.wait(number);
            } else if (rows.lane == 0) {
                // Where the chunk after the next goes, the one before has left.
                bulk_wait_read();
                if (q + 2 < count) chunks.load(q + 2, number + 2);
            }
            __syncwarp();
            float d[8] = {};
            pick<COUNT>(acc, half, c, d);
            const uint32_t at = chunks.matrices(c % 2);
            uint32_t g[4], u[4];
            load_matrices(chunks.gate(q) + at, g);
            load_matrices(chunks.gate(q) + Chunks<T>::BUFFER + at, u);
            const float factor[2] = {rows.of(scale, half, 0), rows.of(scale, half, 2)};
            with_gate(act, [&](auto kind) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 a = unpack<T>(g[i]), b = unpack<T>(u[i]);
                    const Glu x = activate<true>(kind.value, alpha, limit, a.x, b.x), y = activate<true>(kind.value, alpha, limit, a.y, b.y);
                    const float f = factor[i % 2], dx = d[2 * i], dy = d[2 * i + 1];
                    // Rows past the end are not stored, columns past it not counted.
                    if (w.column + c * 16 + i / 2 * 8 < p.n) dot[i % 2] += dx * x.value + dy * y.value;
                    g[i] = pack<T>(x.by_gate * dx * f, y.by_gate * dy * f);
                    u[i] = pack<T>(x.by_up * dx * f, y.by_up * dy * f);
                    d[2 * i] = x.value * f, d[2 * i + 1] = y.value * f;
                }
            });
            store_matrices(chunks.gate(q) + at, g);
            store_matrices(chunks.gate(q) + Chunks<T>::BUFFER + at, u);
            stage<T>(chunks.hidden(q) + at, d, d + 4);
            if (c % 2 == 0) continue;
            chunks.store(q);
            number++;
        }
        if (!p.partial) continue;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] += __shfl_xor_sync(~0u, dot[h], 1);
            dot[h] += __shfl_xor_sync(~0u, dot[h], 2);
            const int row = half * 64 + rows.first + rows.lane / 4 + h * 8;
            if (rows.lane % 4 == 0 && row < rows.live) {
                p.partial[(static_cast<int64_t>(rows.slot) + row) * p.n_tiles + w.column / BN<DOWN_BWD>] = dot[h];
            }
        }
    }
}

}  // namespace rows
