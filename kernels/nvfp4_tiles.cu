// A matrix to NVFP4 in 16 x 16 tiles down columns, or in both directions: whole panels of 128 x 128 elements of 16 bits.
// Both directions hold the same codes, so elements are encoded once. A warp has 16 rows of 64 columns, a thread four rows
// of eight; columns' codes are put together in shared memory.
#include "common/panels.cuh"

namespace {
using namespace quant;

struct Shared {
    alignas(16) unsigned char codes[SIDE * CODES];
    alignas(8) unsigned char tiles[8][8], transposed[8][8];  // scales
    float factors[2][128];  // by scale, of rows and of columns
    float first[2];
};

template <class T>
struct Unit {
    uint4 words[4];

    __device__ __forceinline__ void load(const T* from, int64_t stride) {
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = __ldcs(reinterpret_cast<const uint4*>(from + j * stride));
    }
    // Of the tile, whose lanes are four rows of two.
    __device__ __forceinline__ float magnitude() const {
        unsigned most = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) most = larger<T>(most, larger<T>(larger<T>(words[j].x, words[j].y), larger<T>(words[j].z, words[j].w)));
        most = larger<T>(most, __shfl_xor_sync(~0u, most, 1));
        most = larger<T>(most, __shfl_xor_sync(~0u, most, 8));
        most = larger<T>(most, __shfl_xor_sync(~0u, most, 16));
        return fabsf(low<T>(larger<T>(most, most >> 16)));
    }
    __device__ __forceinline__ unsigned codes(int j, float own) const {
        const unsigned pairs[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
        float y[8];
#pragma unroll
        for (int k = 0; k < 4; k++) y[2 * k] = __fmaf_rn(low<T>(pairs[k]), own, 0.0f), y[2 * k + 1] = __fmaf_rn(high<T>(pairs[k]), own, 0.0f);
        return nearest8_signed<256>(y);
    }
    // Where a product may round to zero, be above 7, or be NaN.
    __device__ __forceinline__ unsigned any_codes(int j, unsigned scale, float own) const {
        if ((scale & 0x7fu) == 0x7fu) return 0;
        const unsigned pairs[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
        float y[8];
#pragma unroll
        for (int k = 0; k < 4; k++) y[2 * k] = __fmul_rn(low<T>(pairs[k]), own), y[2 * k + 1] = __fmul_rn(high<T>(pairs[k]), own);
        return e2m1_nearest8(y);
    }
};

// Eight columns' codes of four rows each, from four rows' of eight columns.
__device__ __forceinline__ void turn(unsigned char* to, const unsigned (&codes)[4]) {
    unsigned even[2], odd[2];  // a byte two rows of a column
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const unsigned first = codes[2 * j], second = codes[2 * j + 1], up = second << 4, down = first >> 4;
        even[j] = up ^ ((first ^ up) & 0x0f0f0f0fu), odd[j] = second ^ ((down ^ second) & 0x0f0f0f0fu);
    }
    const unsigned pairs[4] = {__byte_perm(even[0], even[1], 0x5140), __byte_perm(odd[0], odd[1], 0x5140),
                               __byte_perm(even[0], even[1], 0x7362), __byte_perm(odd[0], odd[1], 0x7362)};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int column = k / 2 * 4 + k % 2;
        *reinterpret_cast<unsigned short*>(to + column * CODES) = static_cast<unsigned short>(pairs[k]);
        *reinterpret_cast<unsigned short*>(to + (column + 2) * CODES) = static_cast<unsigned short>(pairs[k] >> 16);
    }
}

// What codes and scales of the panel became, on their way out.
__device__ __forceinline__ void write(const QuantCast& p, const Shared& s, uint2 at) {
    if (p.columns.codes) write_codes(p.columns, s.codes, at.x, at.y);
    const bool down = threadIdx.x >= SIDE;
    const unsigned i = threadIdx.x % SIDE;
    const QuantSide& side = down ? p.columns : p.rows;
    if (!side.codes) return;
    uint8_t* scales = side.scales + ((down ? at.y : at.x) + i) * side.blocks + (down ? at.x : at.y) / 16;
    *reinterpret_cast<uint2*>(scales) = *reinterpret_cast<const uint2*>(down ? s.transposed[i / 16] : s.tiles[i / 16]);
}

template <class T>
__device__ __forceinline__ void cast(const QuantCast& p) {
    __shared__ Shared s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quarter = lane / 8 * 4, eight = lane % 8 * 8;
    tabulate<TILED>(p, s);
    // Amaxes that differ, or are NaN, make codes that differ.
    const bool apart = p.rows.codes && p.columns.codes && *p.rows.amax != *p.columns.amax;
    const unsigned all = static_cast<unsigned>((p.matrix.rows / SIDE) * (p.matrix.columns / SIDE)), end = min(all, (blockIdx.x + 1) * EACH);
#pragma unroll 1
    for (unsigned panel = blockIdx.x * EACH; panel < end; panel++) {
        const uint2 at = whole_panel(p.matrix, panel);
        const unsigned row = at.x + warp * 16 + quarter, column = at.y + eight;
        Unit<T> units[2];
        const T* from = static_cast<const T*>(p.matrix.base) + row * p.matrix.row_stride + column;
#pragma unroll
        for (int u = 0; u < 2; u++) units[u].load(from + u * 64, p.matrix.row_stride);
        __syncthreads();  // the table, and what the last panel left, is written
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const float most = units[u].magnitude();
#pragma unroll 1
            for (int pass = p.rows.codes ? 0 : 1; pass < (apart ? 2 : p.rows.codes ? 1 : 2); pass++) {
                const unsigned scale = e4m3_pair(__fmul_rn(most, s.first[pass]), 0.0f);
                const float own = s.factors[pass][scale];
                unsigned codes[4];
                if (own >= 0x1p-16f && __fmul_rn(most, own) < 7.0f) {
#pragma unroll
                    for (int j = 0; j < 4; j++) codes[j] = units[u].codes(j, own);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; j++) codes[j] = units[u].any_codes(j, scale, own);
                }
                const bool rows = p.rows.codes && pass == 0, columns = p.columns.codes && (pass == 1 || !apart);
                const int tile = u * 4 + eight / 16;
                if (rows) {
                    uint8_t* to = p.rows.codes + row * p.rows.code_bytes + (column + u * 64) / 2;
#pragma unroll
                    for (int j = 0; j < 4; j++) *reinterpret_cast<unsigned*>(to + j * p.rows.code_bytes) = codes[j];
                    if (lane < 8 && lane % 2 == 0) s.tiles[warp][tile] = static_cast<unsigned char>(scale);
                }
                if (columns) {
                    turn(s.codes + (u * 64 + eight) * CODES + warp * 8 + quarter / 2, codes);
                    if (lane < 8 && lane % 2 == 0) s.transposed[tile][warp] = static_cast<unsigned char>(scale);
                }
            }
        }
        __syncthreads();
        write(p, s, at);
    }
}

}  // namespace

#define CAST(name, T) \
    extern "C" __global__ void __launch_bounds__(256, 4) name(const __grid_constant__ QuantCast p) { cast<T>(p); }

CAST(nvfp4_tiles_bf16, bf16)
CAST(nvfp4_tiles_f16, f16)
