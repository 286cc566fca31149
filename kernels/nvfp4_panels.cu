// Columns of a matrix to NVFP4, or both directions of it: whole panels of 128 x 128 elements of 16 bits, recipe `te`, one
// amax. What counts is instructions an element (`kernels/notes/quantisation.md`): what blocks are multiplied by comes from
// a table of all block scales, magnitudes are compared two at a time, signs are brought by shifts. `nvfp4_cast.cu` has
// all other cases.
#include "common/panels.cuh"

namespace {
using namespace quant;

constexpr int THREADS = 256, HIGH = SIDE / 16;
constexpr int PITCH = 272;  // bytes from a row of the panel to the next: few lanes meet on a bank

struct Shared {
    unsigned char panel[SIDE * PITCH];
    float factors[2][128];  // by scale, of rows and of columns
    float first[2];
    alignas(16) unsigned char codes[SIDE * CODES];
    alignas(16) unsigned char scales[SIDE * HIGH];
};

// A block: its elements, and by twos as they are stored.
template <class T, int MODE>
__device__ __forceinline__ uint2 codes_of(const float (&v)[16], const unsigned (&pairs)[8], float most, unsigned scale, float own, uint4 random, const QuantSide& side) {
    // From 2^-16 on no element's product is rounded to zero.
    if (own >= 0x1p-16f && (MODE == STOCHASTIC || __fmul_rn(most, own) < 7.0f)) {
        float y[2][8];
#pragma unroll
        for (int k = 0; k < 16; k++) y[k / 8][k % 8] = MODE == STOCHASTIC ? __fmul_rn(v[k], own) : __fmaf_rn(v[k], own, 0.0f);
        if constexpr (MODE != STOCHASTIC) return make_uint2(nearest8_signed<THREADS>(y[0]), nearest8_signed<THREADS>(y[1]));
        else {
            const unsigned words[2][4] = {{pairs[0], pairs[1], pairs[2], pairs[3]}, {pairs[4], pairs[5], pairs[6], pairs[7]}};
            return make_uint2(e2m1_stochastic8<T>(words[0], y[0], random.x, random.y), e2m1_stochastic8<T>(words[1], y[1], random.z, random.w));
        }
    }
    return Factors<MODE>(*side.amax).template encode<T>(v, most, scale, random);
}

template <int MODE>
__device__ __forceinline__ uint4 random_of(const QuantCast& p, unsigned block, unsigned line, unsigned direction) {
    if (MODE != STOCHASTIC) return make_uint4(0, 0, 0, 0);
    return philox(make_uint4(block, line, direction, static_cast<unsigned>(p.stream)), p.keys);
}

// Four lanes have four blocks of a row, a sector of codes, a warp eight rows.
template <class T, int MODE>
__device__ __forceinline__ void along_rows(const QuantCast& p, const Shared& s, int64_t row, int64_t column) {
    const QuantSide& side = p.rows;
    const int first = threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
    const unsigned char* from = s.panel + first * PITCH;
    const int64_t line = row + first;
    uint8_t* codes = side.codes + line * side.code_bytes + column / 2;
    uint8_t* scales = side.scales + line * side.blocks + column / 16;
    // 64 rows, twice; in each the left half and the right one.
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        const int block = threadIdx.x % 4 + i % 2 * 4;
        const uint4* words = reinterpret_cast<const uint4*>(from + block * 32);
        const uint4 left = words[0], right = words[1];
        const unsigned pairs[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
        float v[16];
        unsigned larger_of[4];
#pragma unroll
        for (int k = 0; k < 4; k++) larger_of[k] = larger<T>(pairs[k], pairs[k + 4]);
#pragma unroll
        for (int k = 0; k < 8; k++) v[2 * k] = low<T>(pairs[k]), v[2 * k + 1] = high<T>(pairs[k]);
        const unsigned both = larger<T>(larger<T>(larger_of[0], larger_of[1]), larger<T>(larger_of[2], larger_of[3]));
        const float most = fabsf(low<T>(larger<T>(both, both >> 16)));
        const unsigned scale = e4m3_pair(__fmul_rn(most, s.first[0]), 0.0f);
        const uint4 random = random_of<MODE>(p, static_cast<unsigned>(side.first_block + column / 16) + block, static_cast<unsigned>(side.first_line + line) + i / 2 * 64, 0);
        *reinterpret_cast<uint2*>(codes + block * 8) = codes_of<T, MODE>(v, pairs, most, scale, s.factors[0][scale], random, side);
        scales[block] = static_cast<uint8_t>(scale);
        if (i == 1) from += 64 * PITCH, codes += 64 * side.code_bytes, scales += 64 * side.blocks;
    }
}

// A thread has two columns of sixteen rows, twice.
template <class T, int MODE>
__device__ __forceinline__ void down_columns(const QuantCast& p, Shared& s, int64_t row, int64_t column) {
    const QuantSide& side = p.columns;
    const int first = threadIdx.x % 64 * 2;
#pragma unroll 1
    for (int high_block = threadIdx.x / 64; high_block < HIGH; high_block += THREADS / 64) {
        unsigned words[16];
#pragma unroll
        for (int k = 0; k < 16; k++) words[k] = *reinterpret_cast<const unsigned*>(s.panel + (high_block * 16 + k) * PITCH + first * 2);
        unsigned both = larger<T>(words[0], words[1]);
#pragma unroll
        for (int k = 2; k < 16; k++) both = larger<T>(both, words[k]);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float v[16];
            unsigned pairs[8];
#pragma unroll
            for (int k = 0; k < 16; k++) v[k] = c ? high<T>(words[k]) : low<T>(words[k]);
#pragma unroll
            for (int k = 0; k < 8; k++) pairs[k] = __byte_perm(words[2 * k], words[2 * k + 1], c ? 0x7632 : 0x5410);
            const float most = fabsf(c ? high<T>(both) : low<T>(both));
            const unsigned scale = e4m3_pair(__fmul_rn(most, s.first[1]), 0.0f);
            const uint4 random = random_of<MODE>(p, static_cast<unsigned>(side.first_block + row / 16) + high_block, static_cast<unsigned>(side.first_line + column) + first + c, 1);
            *reinterpret_cast<uint2*>(s.codes + (first + c) * CODES + high_block * 8) = codes_of<T, MODE>(v, pairs, most, scale, s.factors[1][scale], random, side);
            s.scales[(first + c) * HIGH + high_block] = static_cast<uint8_t>(scale);
        }
    }
}

// What columns became, on its way out.
__device__ __forceinline__ void write_columns(const QuantCast& p, const Shared& s, int64_t row, int64_t column) {
    const QuantSide& side = p.columns;
    write_codes(side, s.codes, row, column);
    if (threadIdx.x >= SIDE) return;
    uint8_t* scales = side.scales + (column + threadIdx.x) * side.blocks + row / 16;
    *reinterpret_cast<uint2*>(scales) = *reinterpret_cast<const uint2*>(s.scales + threadIdx.x * HIGH);
}

// A panel on its way to shared memory.
template <class T>
struct Load {
    static constexpr int LOADS = SIDE / 16;
    uint4 words[LOADS];

    __device__ __forceinline__ void start(const Strided& m, uint2 at) {
        const T* from = static_cast<const T*>(m.base) + (at.x + threadIdx.x / 16) * m.row_stride + at.y + threadIdx.x % 16 * 8;
#pragma unroll
        for (int i = 0; i < LOADS; i++) words[i] = __ldcs(reinterpret_cast<const uint4*>(from + i * 16 * m.row_stride));
    }
    __device__ __forceinline__ void end(Shared& s) const {
#pragma unroll
        for (int i = 0; i < LOADS; i++) *reinterpret_cast<uint4*>(s.panel + (threadIdx.x / 16 + i * 16) * PITCH + threadIdx.x % 16 * 16) = words[i];
    }
};

template <class T, int MODE>
__device__ __forceinline__ void cast(const QuantCast& p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const unsigned all = static_cast<unsigned>((p.matrix.rows / SIDE) * (p.matrix.columns / SIDE)), end = min(all, (blockIdx.x + 1) * EACH);
    unsigned panel = blockIdx.x * EACH;
    uint2 at = whole_panel(p.matrix, panel);
    Load<T> load;
    load.start(p.matrix, at);
    tabulate<MODE>(p, s);
#pragma unroll 1
    while (true) {
        load.end(s);
        __syncthreads();
        if (p.rows.codes) along_rows<T, MODE>(p, s, at.x, at.y);
        if (p.columns.codes) down_columns<T, MODE>(p, s, at.x, at.y);
        __syncthreads();
        const uint2 before = at;
        const bool last = ++panel == end;
        if (p.columns.codes) write_columns(p, s, before.x, before.y);
        if (last) return;
        at = whole_panel(p.matrix, panel), load.start(p.matrix, at);
    }
}

}  // namespace

#define CAST(name, T, MODE) \
    extern "C" __global__ void __launch_bounds__(256, 4) name(const __grid_constant__ QuantCast p) { cast<T, MODE>(p); }

CAST(nvfp4_panels_te_bf16, bf16, TE)
CAST(nvfp4_panels_te_f16, f16, TE)
CAST(nvfp4_panels_stochastic_bf16, bf16, STOCHASTIC)
CAST(nvfp4_panels_stochastic_f16, f16, STOCHASTIC)

static_assert(sizeof(Shared) == 46096, "src/cuda/quant.rs asks for as much");
