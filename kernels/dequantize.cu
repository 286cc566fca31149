// Quantized matrices back to floating point, many in one launch, and block scales to and from the order in which tensor
// cores read them.
#include "quant/eights.cuh"

namespace {
using namespace quant;

// Threads take elements by eights, whose results lie beside their neighbors': a warp writes whole sectors. A thread
// loads all that it takes before it computes.
constexpr int THREADS = QUANT_THREADS, EACH = DEQUANTIZE_THREAD_EIGHTS, SPAN = DEQUANTIZE_SPAN;

// The job that this block belongs to.
__device__ __forceinline__ const DequantizeJob& job_of(const DequantizeJobs& p) {
    int low = 0, high = static_cast<int>(p.count);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (p.jobs[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return p.jobs[low];
}

// Eight i to whole words of an output. In f32 two neighbors have exchanged halves of their eights before: each has a
// quarter of both, so that both together write a sector.
template <class T>
__device__ __forceinline__ void store(void* to, unsigned i, const float (&v)[8]) {
    if constexpr (sizeof(T) == 4) {
        float4* out = static_cast<float4*>(to) + static_cast<int64_t>(i / 2) * 4 + i % 2;
        out[0] = make_float4(v[0], v[1], v[2], v[3]), out[2] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        static_cast<uint4*>(to)[i] = pack_eight<T>(v);
    }
}

// Factor of a block.
__device__ __forceinline__ float factor_of(const DequantizeJob& p, unsigned scale, float amax) {
    const float s = e4m3_value(scale);
    return p.modelopt ? __fmul_rn(s, __fdiv_rn(amax, BOUND)) : __fmul_rn(__fmul_rn(s, amax), 1.0f / BOUND);
}

__device__ __forceinline__ void decode(const DequantizeJob& p, unsigned word, float factor, float (&v)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __fmul_rn(e2m1_value(word >> 4 * k), factor);
    if (!p.modelopt) return;
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __fadd_rn(v[k], 0.0f);  // its table has +0 for code 8
}

// Lines of whole eights without gaps whose number fits 32 bits: an eight's place follows from its number alone.
__device__ __forceinline__ bool plain(const DequantizeJob& p, int64_t bytes_of_eight, int64_t whole) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.codes) * (16 / bytes_of_eight);
    return p.len % whole == 0 && p.code_bytes == p.len / 8 * bytes_of_eight && places % 16 == 0 && (p.lines * p.len / 8) >> 32 == 0;
}

// One eight of any matrix.
__device__ __forceinline__ void nvfp4_eight(const DequantizeJob& p, int64_t i) {
    const int64_t halves = p.blocks * 2;
    if (i >= p.lines * halves) return;
    const int64_t line = quotient(i, halves), half = i - line * halves, left = p.len - half * 8, bytes = p.code_bytes - half * 4;
    const uint8_t* from = p.codes + line * p.code_bytes + half * 4;
    unsigned word = 0;
    for (int k = 0; k < 4 && k < bytes; k++) word |= static_cast<unsigned>(from[k]) << 8 * k;
    const float factor = factor_of(p, p.scales[line * p.blocks + half / 2], p.amax[p.by_line ? line : 0]);
    float v[8];
    decode(p, word, factor, v);
#pragma unroll
    for (int k = 0; k < 8; k++) if (k < left) store_any(p.out, p.out_type, line * p.len + half * 8 + k, v[k]);
}

// Scales of blocks of E4M3 codes.
struct Mxfp8Scales {
    static constexpr int BLOCK = 32;
    static constexpr bool COLUMNS = true;  // blocks may run along columns
    static constexpr uintptr_t BYTES = 1;
    using Stored = unsigned;
    static __device__ __forceinline__ Stored load(const uint8_t* scales, int64_t i) { return scales[i]; }
    static __device__ __forceinline__ Stored load_aligned(const uint8_t* scales, int64_t i) { return scales[i]; }
    static __device__ __forceinline__ float value(Stored scale) { return e8m0_value(scale); }
};
struct Fp8BlockScales {
    static constexpr int BLOCK = FP8_BLOCK_COLUMNS;
    static constexpr bool COLUMNS = false;
    static constexpr uintptr_t BYTES = 4;
    using Stored = unsigned;
    // From any address.
    static __device__ __forceinline__ Stored load(const uint8_t* scales, int64_t i) {
        Stored bits = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) bits |= static_cast<Stored>(scales[i * 4 + k]) << 8 * k;
        return bits;
    }
    static __device__ __forceinline__ Stored load_aligned(const uint8_t* scales, int64_t i) { return reinterpret_cast<const Stored*>(scales)[i]; }
    static __device__ __forceinline__ float value(Stored scale) { return __uint_as_float(scale); }
};

template <class F>
__device__ __forceinline__ void e4m3_eight(const DequantizeJob& p, int64_t i) {
    const int64_t wide = (p.len + 7) / 8;
    if (i >= p.lines * wide) return;
    const int64_t line = quotient(i, wide), column = (i - line * wide) * 8;
    for (int k = 0; k < 8 && column + k < p.len; k++) {
        const int64_t at = line * p.len + column + k;
        const int64_t scale = F::COLUMNS && p.by_line ? line / F::BLOCK * p.len + column + k : line * p.blocks + column / F::BLOCK;
        store_any(p.out, p.out_type, at, __fmul_rn(e4m3_value(p.codes[at]), F::value(F::load(p.scales, scale))));
    }
}

template <class T>
__device__ __forceinline__ void nvfp4(const DequantizeJob& p, unsigned first) {
    const unsigned halves = static_cast<unsigned>(p.len / 8), all = static_cast<unsigned>(p.lines) * halves;
    unsigned words[EACH], scales[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const unsigned i = min(first + j * THREADS, all - 1);
        words[j] = __ldcs(reinterpret_cast<const unsigned*>(p.codes) + i), scales[j] = p.scales[i / 2];
    }
    float amax = p.amax[0];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const unsigned i = first + j * THREADS;
        // Both neighbors' eights are of one block.
        if constexpr (sizeof(T) == 4) words[j] = __byte_perm(words[j], __shfl_xor_sync(~0u, words[j], 1), threadIdx.x % 2 ? 0x3276 : 0x5410);
        if (i >= all) continue;
        if (p.by_line) amax = p.amax[i / halves];
        float v[8];
        decode(p, words[j], factor_of(p, scales[j], amax), v);
        store<T>(p.out, i, v);
    }
}

// Scale of an eight. Where lines have whole blocks its place follows from the eight's number, else from line and column.
template <class F, bool WHOLE>
__device__ __forceinline__ typename F::Stored scale_of(const DequantizeJob& p, unsigned i) {
    constexpr unsigned EIGHTS = F::BLOCK / 8;
    if constexpr (WHOLE) {
        return F::load_aligned(p.scales, i / EIGHTS);
    } else {
        const unsigned wide = static_cast<unsigned>(p.len / 8), line = i / wide;
        return F::load_aligned(p.scales, line * p.blocks + (i - line * wide) / EIGHTS);
    }
}

// Lines of a multiple of 16: eights that neighbors exchange are of one block, also of a line's last, which may be short.
template <class T, class F, bool WHOLE>
__device__ __forceinline__ void e4m3(const DequantizeJob& p, unsigned first) {
    const unsigned all = static_cast<unsigned>(p.lines * (p.len / 8));
    uint2 codes[EACH];
    typename F::Stored scales[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const unsigned i = min(first + j * THREADS, all - 1);
        codes[j] = __ldcs(reinterpret_cast<const uint2*>(p.codes) + i), scales[j] = scale_of<F, WHOLE>(p, i);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const unsigned i = first + j * THREADS;
        if constexpr (sizeof(T) == 4) {
            const bool odd = threadIdx.x % 2;
            const unsigned other = __shfl_xor_sync(~0u, odd ? codes[j].x : codes[j].y, 1);
            codes[j] = odd ? make_uint2(other, codes[j].y) : make_uint2(codes[j].x, other);
        }
        if (i >= all) continue;
        float v[8];
        e4m3_values(codes[j], v);
        const float factor = F::value(scales[j]);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], factor);
        store<T>(p.out, i, v);
    }
}

template <class F, bool WHOLE>
__device__ __forceinline__ void e4m3_of_type(const DequantizeJob& p, unsigned first) {
    if (p.out_type == TYPE_BF16) e4m3<bf16, F, WHOLE>(p, first);
    else if (p.out_type == TYPE_F16) e4m3<f16, F, WHOLE>(p, first);
    else e4m3<float, F, WHOLE>(p, first);
}

// E4M3 codes of any matrix.
template <class F>
__device__ __forceinline__ void e4m3_dequantize(const DequantizeJobs& jobs) {
    const DequantizeJob& p = job_of(jobs);
    const int64_t start = (blockIdx.x - p.first_block) * SPAN + threadIdx.x;
    if (p.by_line || !plain(p, 8, 16) || reinterpret_cast<uintptr_t>(p.scales) % F::BYTES) {
#pragma unroll 1
        for (int j = 0; j < EACH; j++) e4m3_eight<F>(p, start + j * THREADS);
        return;
    }
    if (p.len % F::BLOCK == 0) e4m3_of_type<F, true>(p, static_cast<unsigned>(start));
    else e4m3_of_type<F, false>(p, static_cast<unsigned>(start));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) nvfp4_dequantize(const __grid_constant__ DequantizeJobs jobs) {
    const DequantizeJob& p = job_of(jobs);
    const int64_t start = (blockIdx.x - p.first_block) * SPAN + threadIdx.x;
    if (!plain(p, 4, 16)) {
#pragma unroll 1
        for (int j = 0; j < EACH; j++) nvfp4_eight(p, start + j * THREADS);
        return;
    }
    if (p.out_type == TYPE_BF16) nvfp4<bf16>(p, static_cast<unsigned>(start));
    else if (p.out_type == TYPE_F16) nvfp4<f16>(p, static_cast<unsigned>(start));
    else nvfp4<float>(p, static_cast<unsigned>(start));
}

extern "C" __global__ void __launch_bounds__(THREADS) mxfp8_dequantize(const __grid_constant__ DequantizeJobs jobs) {
    e4m3_dequantize<Mxfp8Scales>(jobs);
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_block_dequantize(const __grid_constant__ DequantizeJobs jobs) {
    e4m3_dequantize<Fp8BlockScales>(jobs);
}

// Scales [lines, blocks] to tiles of 128 x 4, padded with zeros, or back. A thread four scales of a line.
extern "C" __global__ void __launch_bounds__(THREADS) swizzle(const __grid_constant__ SwizzleScalesParams p) {
    const int64_t wide = (p.blocks + 3) / 4, high = (p.lines + 127) / 128 * 128, i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= high * wide) return;
    // In the order of the tiles' words.
    const int64_t tile = i / 128, in = i % 128, line = tile / wide * 128 + in % 4 * 32 + in / 4, block = tile % wide * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const bool inside = line < p.lines && block + k < p.blocks;
        if (p.back) {
            if (inside) p.out[line * p.blocks + block + k] = p.scales[i * 4 + k];
        } else {
            p.out[i * 4 + k] = inside ? p.scales[line * p.blocks + block + k] : 0;
        }
    }
}
