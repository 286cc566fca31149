// The two portable ways of multiplying, behind one description: mma.sync (sm_80 and later) for 16-bit types, fused
// multiply-add in f32 for everything else. Operands are read where they lie: K-major ([rows, k]) or MN-major ([k,
// rows]), through row maps, with zeros past their ends.
#pragma once
#include "common/epilogue.cuh"

// Tile of a block, and the slots that its sum runs over (weight gradients). False: nothing to do.
template <int KIND, int BLOCK_M>
__device__ bool schedule_tile(const GemmParams& p, Tile& t, int64_t& k_first, int64_t& k_count) {
    constexpr int64_t GROUP = 16;  // n tiles that share the rows of A while those are in L2
    int64_t block = blockIdx.x;
    if constexpr (OperandMajor<KIND>::a_mn_major) {
        t.n_tile = block % p.n_tiles;
        block /= p.n_tiles;
        const int64_t m_tile = block % p.m_tiles;
        block /= p.m_tiles;
        t.split = block % p.split;
        t.group = block / p.split;
        t.slot = m_tile * BLOCK_M;
        t.rows = static_cast<int>(p.m - t.slot < BLOCK_M ? p.m - t.slot : BLOCK_M);
        int64_t offset = p.offsets ? p.offsets[t.group] : 0, count = p.counts ? p.counts[t.group] : p.k;
        if (offset < 0 || count < 0 || offset > p.k - count) {
            if (threadIdx.x == 0 && count != 0) raise_segment(p.fault, t.group, offset, count, p.site);
            count = 0;
        }
        const int64_t part = (count + p.split - 1) / p.split;
        k_first = offset + t.split * part;
        k_count = count - t.split * part;
        k_count = k_count < 0 ? 0 : k_count < part ? k_count : part;
        return true;
    } else {
        // Parts of whole stages: where a part starts does not depend on the number of rows.
        t.split = block % p.split;
        block /= p.split;
        const int64_t part = ((p.k + p.split - 1) / p.split + 31) / 32 * 32;
        k_first = t.split * part < p.k ? t.split * part : p.k;
        k_count = p.k - k_first < part ? p.k - k_first : part;
        const int64_t per = GROUP * p.m_tiles, first = block / per * GROUP;
        const int64_t wide = p.n_tiles - first < GROUP ? p.n_tiles - first : GROUP;
        block %= per;
        t.n_tile = first + block % wide;
        const int64_t m_tile = block / wide;
        if (!p.tiles) {
            t.group = 0;
            t.slot = m_tile * BLOCK_M;
            t.rows = static_cast<int>(p.m - t.slot < BLOCK_M ? p.m - t.slot : BLOCK_M);
            return t.rows > 0;
        }
        if (m_tile >= *p.tile_count) return false;
        const int4 tile = p.tiles[m_tile];
        t.group = tile.x, t.slot = tile.y, t.rows = tile.z;
        return true;
    }
}

// ---------------------------------------------------------------------------------------------- mma.sync

__device__ __forceinline__ uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void cp_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(smem_address(to)), "l"(from));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* from) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(smem_address(from)));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(smem_address(from)));
    }
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

namespace mma_sync {
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32, STAGES = 4, THREADS = 256, LD_C = BLOCK_N + 4;
// Rows are padded by 16 bytes, which makes ldmatrix free of bank conflicts in either layout.
constexpr int LD_K = BLOCK_K + 8, LD_MN = BLOCK_M + 8;
constexpr int OPERAND = BLOCK_M * LD_K > BLOCK_K * LD_MN ? BLOCK_M * LD_K : BLOCK_K * LD_MN;
constexpr int SMEM_BYTES = STAGES * 2 * OPERAND * 2 > BLOCK_M * LD_C * 4 ? STAGES * 2 * OPERAND * 2 : BLOCK_M * LD_C * 4;
static_assert(BLOCK_M == BLOCK_N, "one operand layout");
static_assert(BLOCK_M == MMA_SYNC_TILE && THREADS == MMA_SYNC_THREADS && SMEM_BYTES == MMA_SYNC_SMEM, "common/shapes.h has others");

// Eight elements to shared memory: `valid` of them, the rest zeros, scaled where asked for.
template <class T>
__device__ __forceinline__ void chunk(T* to, const T* from, int64_t valid, bool vector, float scale, bool scaled) {
    if (valid >= 8 && vector && !scaled) {
        cp_async(to, from);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v = i < valid ? to_float(from[i]) : 0.0f;
        to[i] = from_float<T>(scaled ? v * scale : v);
    }
}

// Source of one operand for a thread: two of the 512 chunks of a stage.
template <class T, bool MN_MAJOR>
struct OperandLoader {
    const T* row[2];   // K-major: the chunk's row, null past the end
    int64_t column[2]; // MN-major: first column of the chunk, -1 past the end
    int64_t left[2];   // MN-major: columns from there on
    const T* base;
    const int32_t* map;
    const float* scale;
    int64_t rows, ld, first, count;
    unsigned long long* fault;
    int64_t site;
    Operand operand;
    bool vector;

    __device__ void load(T* shared, int64_t k0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * THREADS;
            if constexpr (MN_MAJOR) {
                const int kr = id / (BLOCK_M / 8), c = id % (BLOCK_M / 8) * 8;
                const int64_t slot = first + k0 + kr;
                int64_t valid = 0, from = 0;
                if (k0 + kr < count && column[i] >= 0) {
                    from = mapped_row(map, slot, rows, fault, site, operand);
                    valid = from < 0 ? 0 : left[i];
                }
                const bool scaled = scale != nullptr && valid > 0;
                chunk(shared + kr * LD_MN + c, base + from * ld + column[i], valid, vector, scaled ? scale[slot] : 1.0f, scaled);
            } else {
                const int r = id / (BLOCK_K / 8), c = id % (BLOCK_K / 8) * 8;
                const int64_t k = k0 + c;
                const int64_t valid = row[i] ? count - k : 0;
                chunk(shared + r * LD_K + c, row[i] + k, valid, vector, 1.0f, false);
            }
        }
    }
};

// The right operand as it is stored. `load` begins to bring a stage, `store` ends it.
template <class T, int KIND>
struct DenseOperand {
    static constexpr bool MN_MAJOR = OperandMajor<KIND>::b_mn_major;
    OperandLoader<T, MN_MAJOR> b;
    int64_t at;

    __device__ __forceinline__ DenseOperand(const GemmParams& p, const Tile& t, int64_t k_first, int64_t k_count) {
        b.fault = p.fault, b.site = p.site, b.operand = OPERAND_SECOND, b.vector = p.vector_b, b.scale = nullptr;
        if constexpr (KIND == WGRAD) {
            b.base = static_cast<const T*>(p.b), b.map = p.b_map, b.rows = p.b_rows;
            b.ld = p.n, b.first = k_first, b.count = k_count;
        } else {
            const int64_t wide = KIND == UP && p.activation != ACT_RELU2 ? 2 * p.n : p.n;
            b.base = static_cast<const T*>(p.b) + t.group * wide * p.k, b.map = nullptr, b.rows = p.k;
            b.ld = MN_MAJOR ? wide : p.k, b.first = 0, b.count = k_count;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * THREADS;
            if constexpr (MN_MAJOR) {
                const int64_t c = t.n_tile * BLOCK_N + id % (BLOCK_N / 8) * 8;
                b.column[i] = c < p.n ? c : -1, b.left[i] = p.n - c;
            } else {
                const int64_t n = tile_column(p, KIND, BLOCK_N, t.n_tile, id / (BLOCK_K / 8));
                b.row[i] = n < 0 ? nullptr : b.base + n * p.k + k_first;
            }
        }
    }
    __device__ __forceinline__ void load(int64_t k0) { at = k0; }
    __device__ __forceinline__ void store(T* shared) { b.load(shared, at); }
    // Factor of a column's sums.
    __device__ __forceinline__ float factor(int) const { return 1.0f; }
};

// B makes the right operand from its own description, if it has one.
template <class T, int KIND, class B = DenseOperand<T, KIND>, class... Args>
__device__ void run(const GemmParams& p, const Args&... args) {
    constexpr bool A_MN_MAJOR = OperandMajor<KIND>::a_mn_major, B_MN_MAJOR = OperandMajor<KIND>::b_mn_major;
    extern __shared__ __align__(16) char shared[];
    T* stages = reinterpret_cast<T*>(shared);
    Tile t;
    int64_t k_first, k_count;
    if (!schedule_tile<KIND, BLOCK_M>(p, t, k_first, k_count)) return;

    OperandLoader<T, A_MN_MAJOR> a;
    B b(p, t, k_first, k_count, args...);
    a.base = static_cast<const T*>(p.a), a.map = p.a_map, a.rows = p.a_rows, a.vector = p.vector_a;
    a.fault = p.fault, a.site = p.site, a.operand = OPERAND_FIRST;
    a.ld = A_MN_MAJOR ? p.m : p.k, a.first = k_first, a.count = k_count, a.scale = KIND == WGRAD ? p.scale : nullptr;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int id = threadIdx.x + i * THREADS;
        if constexpr (A_MN_MAJOR) {
            const int c = id % (BLOCK_M / 8) * 8;
            a.column[i] = t.slot + c < p.m ? t.slot + c : -1, a.left[i] = p.m - t.slot - c;
        } else {
            const int r = id / (BLOCK_K / 8);
            const int64_t from = r < t.rows ? mapped_row(p.a_map, t.slot + r, p.a_rows, p.fault, p.site) : -1;
            a.row[i] = from < 0 ? nullptr : a.base + from * p.k + k_first;
        }
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wm = warp / 4 * 64, wn = warp % 4 * 32;
    float acc[4][4][4] = {};
    const int64_t steps = (k_count + BLOCK_K - 1) / BLOCK_K;
    auto stage = [&](int64_t step) { return stages + step % STAGES * 2 * OPERAND; };
    auto fetch = [&](int64_t step) {
        if (step < steps) {
            a.load(stage(step), step * BLOCK_K);
            b.store(stage(step) + OPERAND);
        }
        asm volatile("cp.async.commit_group;\n");
        if (step + 1 < steps) b.load((step + 1) * BLOCK_K);
    };
    if (steps > 0) b.load(0);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
    for (int64_t step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2));
        __syncthreads();
        fetch(step + STAGES - 1);
        const T* as = stage(step);
        const T* bs = as + OPERAND;
#pragma unroll
        for (int kk = 0; kk < BLOCK_K; kk += 16) {
            uint32_t fa[4][4], fb[2][4];
            const int quarter = lane / 8, r = lane % 8;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = wm + i * 16 + (quarter & 1) * 8, k = kk + (quarter & 2) * 4;
                ldmatrix<A_MN_MAJOR>(fa[i], A_MN_MAJOR ? as + (k + r) * LD_MN + m : as + (m + r) * LD_K + k);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = wn + j * 16 + (quarter & 2) * 4, k = kk + (quarter & 1) * 8;
                ldmatrix<B_MN_MAJOR>(fb[j], B_MN_MAJOR ? bs + (k + r) * LD_MN + n : bs + (n + r) * LD_K + k);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) mma<T>(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
    }
    asm volatile("cp.async.wait_group 0;\n");
    __syncthreads();
    float* tile = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float* c = tile + (wm + i * 16 + lane / 4) * LD_C + wn + j * 8 + lane % 4 * 2;
            const int column = wn + j * 8 + lane % 4 * 2;
            const float first = b.factor(column), second = b.factor(column + 1);
            c[0] = acc[i][j][0] * first, c[1] = acc[i][j][1] * second;
            c[8 * LD_C] = acc[i][j][2] * first, c[8 * LD_C + 1] = acc[i][j][3] * second;
        }
    __syncthreads();
    epilogue<T, KIND, BLOCK_N>(p, tile, LD_C, t);
}
}  // namespace mma_sync

// ---------------------------------------------------------------------------------------------- multiply-add

namespace simt {
constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 16, THREADS = 256, LD = BLOCK_M + 4;
constexpr int SMEM_BYTES = BLOCK_M * LD * 4;
static_assert(BLOCK_M == SIMT_TILE && THREADS == SIMT_THREADS && SMEM_BYTES == SIMT_SMEM, "common/shapes.h has others");
static_assert(BLOCK_M == BLOCK_N && SMEM_BYTES >= 2 * BLOCK_K * LD * 4, "one operand layout, and room for both");

// Elements of a right operand that is not a weight gradient's: k, and a column of it.
template <int KIND>
struct DenseOperand {
    const GemmParams& p;
    const int64_t wide, group;

    __device__ __forceinline__ DenseOperand(const GemmParams& p, const Tile& t)
        : p(p), wide(KIND == UP && p.activation != ACT_RELU2 ? 2 * p.n : p.n), group(KIND == LINEAR_DW ? 0 : t.group * wide * p.k) {}
    __device__ __forceinline__ float at(int64_t k, int64_t n) const {
        return load_any(p.b, p.b_type, group + (OperandMajor<KIND>::b_mn_major ? k * wide + n : n * p.k + k));
    }
};

// T is the type of the epilogue's tensors; those of the operands are values. B as above.
template <class T, int KIND, class B = DenseOperand<KIND>, class... Args>
__device__ void run(const GemmParams& p, const Args&... args) {
    constexpr bool A_MN_MAJOR = OperandMajor<KIND>::a_mn_major, B_MN_MAJOR = OperandMajor<KIND>::b_mn_major;
    extern __shared__ __align__(16) char shared[];
    float* as = reinterpret_cast<float*>(shared);
    float* bs = as + BLOCK_K * LD;
    Tile t;
    int64_t k_first, k_count;
    if (!schedule_tile<KIND, BLOCK_M>(p, t, k_first, k_count)) return;
    const B b(p, t, args...);
    float acc[4][4] = {};
    const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    for (int64_t k0 = 0; k0 < k_count; k0 += BLOCK_K) {
        for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += THREADS) {
            // Neighboring threads read neighboring elements in either layout.
            const int k = A_MN_MAJOR ? i / BLOCK_M : i % BLOCK_K, r = A_MN_MAJOR ? i % BLOCK_M : i / BLOCK_K;
            float v = 0.0f;
            if (k0 + k < k_count && r < t.rows) {
                const int64_t slot = A_MN_MAJOR ? k_first + k0 + k : t.slot + r;
                const int64_t row = mapped_row(p.a_map, slot, p.a_rows, p.fault, p.site);
                if (row >= 0) v = load_any(p.a, p.a_type, A_MN_MAJOR ? row * p.m + t.slot + r : row * p.k + k0 + k);
                if (KIND == WGRAD && p.scale) v *= p.scale[slot];
            }
            as[k * LD + r] = v;
        }
        for (int i = threadIdx.x; i < BLOCK_N * BLOCK_K; i += THREADS) {
            const int k = B_MN_MAJOR ? i / BLOCK_N : i % BLOCK_K, c = B_MN_MAJOR ? i % BLOCK_N : i / BLOCK_K;
            const int64_t n = tile_column(p, KIND, BLOCK_N, t.n_tile, c);
            float v = 0.0f;
            if (k0 + k < k_count && n >= 0) {
                if constexpr (A_MN_MAJOR) {
                    const int64_t row = mapped_row(p.b_map, k_first + k0 + k, p.b_rows, p.fault, p.site, OPERAND_SECOND);
                    if (row >= 0) v = load_any(p.b, p.b_type, row * p.n + n);
                } else {
                    v = b.at(k0 + k, n);
                }
            }
            bs[k * LD + c] = v;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BLOCK_K; k++) {
            float va[4], vb[4];
#pragma unroll
            for (int i = 0; i < 4; i++) va[i] = as[k * LD + tm + i], vb[i] = bs[k * LD + tn + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = fmaf(va[i], vb[j], acc[i][j]);
        }
        __syncthreads();
    }
    float* tile = as;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) tile[(tm + i) * LD + tn + j] = acc[i][j];
    __syncthreads();
    epilogue<T, KIND, BLOCK_N>(p, tile, LD, t);
}
}  // namespace simt
