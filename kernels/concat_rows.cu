// Rows that travel quantized: block scales and what belongs to the row, one behind the other, and apart again.
//
// Forth: left [rows, left_bytes] and right [rows, right_bytes] -> whole [rows, whole_bytes], filled up with zeros.
// Back: whole -> left and right. A thread a word of 4 bytes, or of 1 where sizes ask for it; blocks loop. Limited by
// its launch. Notes: kernels/notes/quantization.md, "Tokens that travel quantized".
#include "common/common.cuh"

template <class W>
__device__ void join(const ConcatRowsParams& p) {
    constexpr int64_t BYTES = sizeof(W);
    const int64_t whole = p.whole_bytes / BYTES, left = p.left_bytes / BYTES, right = p.right_bytes / BYTES;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.rows * whole; i += step) {
        const int64_t row = i / whole, c = i - row * whole;
        W* part = nullptr;  // none: what fills rows up
        if (c < left) part = reinterpret_cast<W*>(p.left) + row * left + c;
        else if (c < left + right) part = reinterpret_cast<W*>(p.right) + row * right + c - left;
        W* at = reinterpret_cast<W*>(p.whole) + i;
        if (!p.back) *at = part ? *part : W{0};
        else if (part) *part = *at;
    }
}

extern "C" __global__ void concat_rows(const __grid_constant__ ConcatRowsParams p) {
    if (p.word == 4) join<uint32_t>(p);
    else join<uint8_t>(p);
}
