// Largest magnitudes: of many matrices in one launch, of lines, of a transformed matrix; and the first value that is
// not finite. A maximum does not depend on the order in which it is taken, so blocks join theirs with atomics. Every
// place must hold 0 before.
#include "quant/quantize.cuh"

namespace {
using namespace quant;

constexpr int THREADS = QUANT_THREADS;
constexpr int64_t SPAN = AMAX_SPAN;
static_assert(AMAX_JOBS <= AMAX_ZERO_THREADS, "a thread of amax_zero a job");

// Joins a block's maxima.
__device__ __forceinline__ void join(unsigned most, unsigned* out, unsigned* other) {
    __shared__ unsigned warps[THREADS / 32];
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x >= THREADS / 32) return;
    most = __reduce_max_sync((1u << THREADS / 32) - 1, warps[threadIdx.x]);
    if (threadIdx.x != 0) return;
    most = magnitude_bits(most);
    if (most == 0) return;
    atomicMax(out, most);
    if (other) atomicMax(other, most);
}

template <class T>
struct Bits;
template <>
struct Bits<float> {
    static __device__ __forceinline__ void take(unsigned& most, unsigned word) { most = max(most, word & 0x7fffffffu); }
    static __device__ __forceinline__ unsigned whole(unsigned most) { return most; }
};
// Two at a time, in the halves of a word, as integers; widened at the end.
template <class T>
struct Bits {
    static __device__ __forceinline__ void take(unsigned& most, unsigned word) { most = __vmaxu2(most, word & 0x7fff7fffu); }
    static __device__ __forceinline__ unsigned whole(unsigned most) {
        const unsigned short half = static_cast<unsigned short>(max(most & 0xffffu, most >> 16));
        return __float_as_uint(to_float(*reinterpret_cast<const T*>(&half)));
    }
};

template <class T>
__device__ __forceinline__ unsigned largest(const StridedMatrix& m, int64_t block) {
    unsigned most = 0;
    if (m.vector) {
        // Rows of words; usually one, the whole matrix.
        const int64_t wide = m.columns * sizeof(T) / 16, words = m.rows * wide, first = block * (SPAN / 16);
        const int64_t last = first + SPAN / 16 < words ? first + SPAN / 16 : words;
        auto at = [&](int64_t i) {
            const int64_t row = m.rows == 1 ? 0 : i / wide;
            return reinterpret_cast<const uint4*>(static_cast<const T*>(m.base) + row * m.row_stride) + (i - row * wide);
        };
        int64_t i = first + threadIdx.x;
        constexpr int AHEAD = 8;
        for (; i + (AHEAD - 1) * THREADS < last; i += AHEAD * THREADS) {
            uint4 words[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) words[k] = __ldcs(at(i + k * THREADS));
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                Bits<T>::take(most, words[k].x), Bits<T>::take(most, words[k].y);
                Bits<T>::take(most, words[k].z), Bits<T>::take(most, words[k].w);
            }
        }
        for (; i < last; i += THREADS) {
            const uint4 word = __ldcs(at(i));
            Bits<T>::take(most, word.x), Bits<T>::take(most, word.y), Bits<T>::take(most, word.z), Bits<T>::take(most, word.w);
        }
        return Bits<T>::whole(most);
    }
    constexpr int64_t EACH = SPAN / sizeof(T);
    const int64_t all = m.rows * m.columns, first = block * EACH, last = first + EACH < all ? first + EACH : all;
    for (int64_t i = first + threadIdx.x; i < last; i += THREADS) {
        const int64_t row = i / m.columns, column = i - row * m.columns;
        const float v = to_float(static_cast<const T*>(m.base)[row * m.row_stride + column * m.column_stride]);
        most = max(most, __float_as_uint(v) & 0x7fffffffu);
    }
    return most;
}

template <class T>
__device__ __forceinline__ float at(const StridedMatrix& m, int64_t row, int64_t column) {
    return to_float(static_cast<const T*>(m.base)[row * m.row_stride + column * m.column_stride]);
}

// Lines are rows. Where their elements lie together, a warp a line; else a thread a line and so many elements.
template <class T>
__device__ __forceinline__ void lines(const AmaxLinesParams& p) {
    const StridedMatrix& m = p.matrix;
    if (m.column_stride == 1) {
        const int64_t line = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
        if (line >= m.rows) return;
        unsigned most = 0;
        for (int64_t k = threadIdx.x % 32; k < m.columns; k += 32) most = max(most, __float_as_uint(at<T>(m, line, k)) & 0x7fffffffu);
        most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0) p.out[line] = magnitude_bits(most);
        return;
    }
    const int64_t groups = (m.rows + THREADS - 1) / THREADS, line = blockIdx.x % groups * THREADS + threadIdx.x;
    constexpr int64_t EACH = AMAX_LINE_ELEMENTS;
    const int64_t first = blockIdx.x / groups * EACH, last = first + EACH < m.columns ? first + EACH : m.columns;
    if (line >= m.rows) return;
    unsigned most = 0;
    for (int64_t k = first; k < last; k++) most = max(most, __float_as_uint(at<T>(m, line, k)) & 0x7fffffffu);
    atomicMax(p.out + line, magnitude_bits(most));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) amax(const __grid_constant__ AmaxJobs p) {
    int low = 0, high = static_cast<int>(p.count);  // the last job that begins at or before this block
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (p.jobs[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    const AmaxJob& job = p.jobs[low];
    const int64_t block = blockIdx.x - job.first_block;
    unsigned most;
    if (job.type == TYPE_F32) most = largest<float>(job.matrix, block);
    else if (job.type == TYPE_F16) most = largest<f16>(job.matrix, block);
    else most = largest<bf16>(job.matrix, block);
    join(most, job.out, job.other);
}

// Before `amax`.
extern "C" __global__ void __launch_bounds__(AMAX_ZERO_THREADS) amax_zero(const __grid_constant__ AmaxJobs p) {
    if (threadIdx.x >= p.count) return;
    *p.jobs[threadIdx.x].out = 0;
    if (p.jobs[threadIdx.x].other) *p.jobs[threadIdx.x].other = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_lines(const __grid_constant__ AmaxLinesParams p) {
    if (p.type == TYPE_F32) lines<float>(p);
    else if (p.type == TYPE_F16) lines<f16>(p);
    else lines<bf16>(p);
}

// Of the columns of a bf16 matrix after the transform: a thread takes 16 rows of a column.
extern "C" __global__ void __launch_bounds__(THREADS) amax_transformed(const __grid_constant__ AmaxLinesParams p) {
    const StridedMatrix& m = p.matrix;
    const int64_t groups = (m.columns + THREADS - 1) / THREADS, column = blockIdx.x % groups * THREADS + threadIdx.x;
    unsigned most = 0;
    constexpr int EACH = AMAX_TRANSFORMED_ROWS;
    for (int64_t row = blockIdx.x / groups * EACH; row < m.rows && row < (blockIdx.x / groups + 1) * EACH && column < m.columns; row += 16) {
        float v[16];
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = at<bf16>(m, row + k, column);
        hadamard(v, static_cast<unsigned>(p.signs));
        most = max(most, __float_as_uint(magnitude(v)));
    }
    join(most, p.out, nullptr);
}

// The least row-major number of an element that is not finite, in `out` (8 bytes, all ones before).
extern "C" __global__ void __launch_bounds__(THREADS) first_non_finite(const __grid_constant__ AmaxLinesParams p) {
    const StridedMatrix& m = p.matrix;
    const int64_t all = m.rows * m.columns;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < all; i += static_cast<int64_t>(gridDim.x) * THREADS) {
        const int64_t row = i / m.columns;
        const float v = load_any(m.base, p.type, row * m.row_stride + (i - row * m.columns) * m.column_stride);
        if ((__float_as_uint(v) & 0x7f800000u) != 0x7f800000u) continue;
        atomicMin(reinterpret_cast<unsigned long long*>(p.out), static_cast<unsigned long long>(i));
        return;
    }
}
