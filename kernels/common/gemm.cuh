// The two portable ways of multiplying, behind one description: mma.sync (sm_80 and later) for 16-bit types, fused
// multiply-add in f32 for everything else. Operands are read where they lie: K-major ([rows, k]) or MN-major ([k,
// rows]), through row maps, with zeros past their ends.
#pragma once
#include "epilogue.cuh"

// Tile of a block, and the slots that its sum runs over (weight gradients). False: nothing to do.
template <int KIND, int BM>
__device__ bool tile_of_block(const Gemm& p, Tile& t, int64_t& k_first, int64_t& k_count) {
    constexpr int64_t GROUP = 16;  // n tiles that share the rows of A while those are in L2
    int64_t block = blockIdx.x;
    if constexpr (Stored<KIND>::a_by_k) {
        t.n_tile = block % p.n_tiles;
        block /= p.n_tiles;
        const int64_t m_tile = block % p.m_tiles;
        block /= p.m_tiles;
        t.split = block % p.split;
        t.group = block / p.split;
        t.slot = m_tile * BM;
        t.rows = static_cast<int>(p.m - t.slot < BM ? p.m - t.slot : BM);
        int64_t offset = p.offsets ? p.offsets[t.group] : 0, count = p.counts ? p.counts[t.group] : p.k;
        if (offset < 0 || count < 0 || offset > p.k - count) {
            if (threadIdx.x == 0 && count != 0) raise_fault(p.fault, FAULT_ZONE, t.group);
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
            t.slot = m_tile * BM;
            t.rows = static_cast<int>(p.m - t.slot < BM ? p.m - t.slot : BM);
            return t.rows > 0;
        }
        if (m_tile >= *p.tile_count) return false;
        const int4 tile = p.tiles[m_tile];
        t.group = tile.x, t.slot = tile.y, t.rows = tile.z;
        return true;
    }
}

// ---------------------------------------------------------------------------------------------- mma.sync

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(to)), "l"(from));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* from) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(from)));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(from)));
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

namespace tensor {
constexpr int BM = 128, BN = 128, BK = 32, STAGES = 4, THREADS = 256, LD_C = BN + 4;
// Rows are padded by 16 bytes, which makes ldmatrix free of bank conflicts in either layout.
constexpr int LD_K = BK + 8, LD_MN = BM + 8;
constexpr int OPERAND = BM * LD_K > BK * LD_MN ? BM * LD_K : BK * LD_MN;
constexpr int SHARED = STAGES * 2 * OPERAND * 2 > BM * LD_C * 4 ? STAGES * 2 * OPERAND * 2 : BM * LD_C * 4;
static_assert(BM == BN, "one operand layout");
static_assert(SHARED == 81920, "src/cuda/launch.rs reserves as much");

// Eight elements to shared memory: `valid` of them, the rest zeros, scaled where asked for.
template <class T>
__device__ __forceinline__ void chunk(T* to, const T* from, int64_t valid, bool vector, float scale, bool scaled) {
    if (valid >= 8 && vector && !scaled) {
        copy_async(to, from);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v = i < valid ? to_float(from[i]) : 0.0f;
        to[i] = from_float<T>(scaled ? v * scale : v);
    }
}

// Source of one operand for a thread: two of the 512 chunks of a stage.
template <class T, bool BY_K>
struct Loader {
    const T* row[2];   // K-major: the chunk's row, null past the end
    int64_t column[2]; // MN-major: first column of the chunk, -1 past the end
    int64_t left[2];   // MN-major: columns from there on
    const T* base;
    const int32_t* map;
    const float* scale;
    int64_t rows, ld, first, count;
    unsigned long long* fault;
    bool vector;

    __device__ void load(T* shared, int64_t k0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * THREADS;
            if constexpr (BY_K) {
                const int kr = id / (BM / 8), c = id % (BM / 8) * 8;
                const int64_t slot = first + k0 + kr;
                int64_t valid = 0, from = 0;
                if (k0 + kr < count && column[i] >= 0) {
                    from = mapped_row(map, slot, rows, fault);
                    valid = from < 0 ? 0 : left[i];
                }
                const bool scaled = scale != nullptr && valid > 0;
                chunk(shared + kr * LD_MN + c, base + from * ld + column[i], valid, vector, scaled ? scale[slot] : 1.0f, scaled);
            } else {
                const int r = id / (BK / 8), c = id % (BK / 8) * 8;
                const int64_t k = k0 + c;
                const int64_t valid = row[i] ? count - k : 0;
                chunk(shared + r * LD_K + c, row[i] + k, valid, vector, 1.0f, false);
            }
        }
    }
};

// The right operand as it is stored. `load` begins to bring a stage, `store` ends it.
template <class T, int KIND>
struct Dense {
    static constexpr bool BY_K = Stored<KIND>::b_by_k;
    Loader<T, BY_K> b;
    int64_t at;

    __device__ __forceinline__ Dense(const Gemm& p, const Tile& t, int64_t k_first, int64_t k_count) {
        b.fault = p.fault, b.vector = p.vector_b, b.scale = nullptr;
        if constexpr (KIND == WGRAD) {
            b.base = static_cast<const T*>(p.b), b.map = p.b_map, b.rows = p.b_rows;
            b.ld = p.n, b.first = k_first, b.count = k_count;
        } else {
            const int64_t wide = KIND == UP && p.activation != ACT_RELU2 ? 2 * p.n : p.n;
            b.base = static_cast<const T*>(p.b) + t.group * wide * p.k, b.map = nullptr, b.rows = p.k;
            b.ld = BY_K ? wide : p.k, b.first = 0, b.count = k_count;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int id = threadIdx.x + i * THREADS;
            if constexpr (BY_K) {
                const int64_t c = t.n_tile * BN + id % (BN / 8) * 8;
                b.column[i] = c < p.n ? c : -1, b.left[i] = p.n - c;
            } else {
                const int64_t n = tile_column(p, KIND, BN, t.n_tile, id / (BK / 8));
                b.row[i] = n < 0 ? nullptr : b.base + n * p.k + k_first;
            }
        }
    }
    __device__ __forceinline__ void load(int64_t k0) { at = k0; }
    __device__ __forceinline__ void store(T* shared) { b.load(shared, at); }
    // What the sums of a column are multiplied by.
    __device__ __forceinline__ float factor(int) const { return 1.0f; }
};

// B makes the right operand from its own description, if it has one.
template <class T, int KIND, class B = Dense<T, KIND>, class... Own>
__device__ void run(const Gemm& p, const Own&... own) {
    constexpr bool A_BY_K = Stored<KIND>::a_by_k, B_BY_K = Stored<KIND>::b_by_k;
    extern __shared__ __align__(16) char shared[];
    T* stages = reinterpret_cast<T*>(shared);
    Tile t;
    int64_t k_first, k_count;
    if (!tile_of_block<KIND, BM>(p, t, k_first, k_count)) return;

    Loader<T, A_BY_K> a;
    B b(p, t, k_first, k_count, own...);
    a.base = static_cast<const T*>(p.a), a.map = p.a_map, a.rows = p.a_rows, a.fault = p.fault, a.vector = p.vector_a;
    a.ld = A_BY_K ? p.m : p.k, a.first = k_first, a.count = k_count, a.scale = KIND == WGRAD ? p.scale : nullptr;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int id = threadIdx.x + i * THREADS;
        if constexpr (A_BY_K) {
            const int c = id % (BM / 8) * 8;
            a.column[i] = t.slot + c < p.m ? t.slot + c : -1, a.left[i] = p.m - t.slot - c;
        } else {
            const int r = id / (BK / 8);
            const int64_t from = r < t.rows ? mapped_row(p.a_map, t.slot + r, p.a_rows, p.fault) : -1;
            a.row[i] = from < 0 ? nullptr : a.base + from * p.k + k_first;
        }
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wm = warp / 4 * 64, wn = warp % 4 * 32;
    float acc[4][4][4] = {};
    const int64_t steps = (k_count + BK - 1) / BK;
    auto stage = [&](int64_t step) { return stages + step % STAGES * 2 * OPERAND; };
    auto fetch = [&](int64_t step) {
        if (step < steps) {
            a.load(stage(step), step * BK);
            b.store(stage(step) + OPERAND);
        }
        asm volatile("cp.async.commit_group;\n");
        if (step + 1 < steps) b.load((step + 1) * BK);
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
        for (int kk = 0; kk < BK; kk += 16) {
            uint32_t fa[4][4], fb[2][4];
            const int quarter = lane / 8, r = lane % 8;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int m = wm + i * 16 + (quarter & 1) * 8, k = kk + (quarter & 2) * 4;
                load_matrices<A_BY_K>(fa[i], A_BY_K ? as + (k + r) * LD_MN + m : as + (m + r) * LD_K + k);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = wn + j * 16 + (quarter & 2) * 4, k = kk + (quarter & 1) * 8;
                load_matrices<B_BY_K>(fb[j], B_BY_K ? bs + (k + r) * LD_MN + n : bs + (n + r) * LD_K + k);
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
    epilogue<T, KIND, BN>(p, tile, LD_C, t);
}
}  // namespace tensor

// ---------------------------------------------------------------------------------------------- multiply-add

namespace scalar {
constexpr int BM = 64, BN = 64, BK = 16, THREADS = 256, LD = BM + 4;
constexpr int SHARED = BM * LD * 4;
static_assert(SHARED == 17408, "src/cuda/launch.rs asks for as much");
static_assert(BM == BN && SHARED >= 2 * BK * LD * 4, "one operand layout, and room for both");

// Elements of a right operand that is not a weight gradient's: k, and a column of it.
template <int KIND>
struct Dense {
    const Gemm& p;
    const int64_t wide, group;

    __device__ __forceinline__ Dense(const Gemm& p, const Tile& t)
        : p(p), wide(KIND == UP && p.activation != ACT_RELU2 ? 2 * p.n : p.n), group(KIND == LINEAR_DW ? 0 : t.group * wide * p.k) {}
    __device__ __forceinline__ float at(int64_t k, int64_t n) const {
        return load_any(p.b, p.b_type, group + (Stored<KIND>::b_by_k ? k * wide + n : n * p.k + k));
    }
};

// T is the type of the epilogue's tensors; those of the operands are values. B as above.
template <class T, int KIND, class B = Dense<KIND>, class... Own>
__device__ void run(const Gemm& p, const Own&... own) {
    constexpr bool A_BY_K = Stored<KIND>::a_by_k, B_BY_K = Stored<KIND>::b_by_k;
    extern __shared__ __align__(16) char shared[];
    float* as = reinterpret_cast<float*>(shared);
    float* bs = as + BK * LD;
    Tile t;
    int64_t k_first, k_count;
    if (!tile_of_block<KIND, BM>(p, t, k_first, k_count)) return;
    const B b(p, t, own...);
    float acc[4][4] = {};
    const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    for (int64_t k0 = 0; k0 < k_count; k0 += BK) {
        for (int i = threadIdx.x; i < BM * BK; i += THREADS) {
            // Neighbouring threads read neighbouring elements in either layout.
            const int k = A_BY_K ? i / BM : i % BK, r = A_BY_K ? i % BM : i / BK;
            float v = 0.0f;
            if (k0 + k < k_count && r < t.rows) {
                const int64_t slot = A_BY_K ? k_first + k0 + k : t.slot + r;
                const int64_t row = mapped_row(p.a_map, slot, p.a_rows, p.fault);
                if (row >= 0) v = load_any(p.a, p.a_type, A_BY_K ? row * p.m + t.slot + r : row * p.k + k0 + k);
                if (KIND == WGRAD && p.scale) v *= p.scale[slot];
            }
            as[k * LD + r] = v;
        }
        for (int i = threadIdx.x; i < BN * BK; i += THREADS) {
            const int k = B_BY_K ? i / BN : i % BK, c = B_BY_K ? i % BN : i / BK;
            const int64_t n = tile_column(p, KIND, BN, t.n_tile, c);
            float v = 0.0f;
            if (k0 + k < k_count && n >= 0) {
                if constexpr (A_BY_K) {
                    const int64_t row = mapped_row(p.b_map, k_first + k0 + k, p.b_rows, p.fault);
                    if (row >= 0) v = load_any(p.b, p.b_type, row * p.n + n);
                } else {
                    v = b.at(k0 + k, n);
                }
            }
            bs[k * LD + c] = v;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; k++) {
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
    epilogue<T, KIND, BN>(p, tile, LD, t);
}
}  // namespace scalar
