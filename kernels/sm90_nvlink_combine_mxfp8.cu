// The same as sm90_nvlink_combine.cu, with sums that travel as MXFP8: about half of the bytes over the link.
//
//   sm90_nvlink_combine_mxfp8_*  rows [N, width] -> [T, width]; width a multiple of 32
//
// A rank's sum of a (token, rank) in f32, in the order of k, is quantized in place of being rounded to the rows' type: for each 32
// columns the largest magnitude gives a scale, by the rule of the crate's cast (quant/mxfp8.cuh), and each column a code of
// E4M3. Codes go to the token's rank row by row, and their scales to an area behind all codes of the zone. There the ranks'
// sums are taken from their codes, added in f32 in the order of the ranks, and rounded once. A rank quantizes its own as well, so
// that what a token gets does not depend on where it lies.
//
// A block's columns are N = 16 / sizeof(T) of each of 32 / N neighboring lanes, which find its scale together. Scales of a warp's
// columns are kept in shared memory until the row's end, as stores of a byte over the link cost as much as stores of a line.
//
// Limited as combine is, less by the link and more by instructions. Empty where the architecture is not Hopper (sm_90a). Notes:
// kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink_sums.cuh"
#include "quant/mxfp8.cuh"

namespace {
using namespace nvlink_sums;

template <class T>
using SumPiece = Piece<T, true>;

// Columns that share a scale; warps of a group.
constexpr int BLOCK = 32, WARPS = NVLINK_SUM_WARPS;

// N columns of a block, and the block's scale.
template <int N>
struct Codes {
    uint32_t words[N / 4];
    uint32_t scale;
};

// By all lanes of a warp, each of which has N columns.
template <int N>
__device__ __forceinline__ Codes<N> quantized(const float (&sum)[N]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = mxfp8::join(most, sum[i], false);
#pragma unroll
    for (int lanes = 1; lanes < BLOCK / N; lanes *= 2) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    Codes<N> codes;
    codes.scale = mxfp8::scale_of(most, false);
    const float factor = mxfp8::factor_of(codes.scale, false);
#pragma unroll
    for (int i = 0; i < N / 4; i++) codes.words[i] = mxfp8::codes4(sum + 4 * i, factor);
    return codes;
}

// Two codes' values, the first in the low byte.
__device__ __forceinline__ float2 values(uint32_t codes) {
    uint32_t pair;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n" : "=r"(pair) : "r"(codes));
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Adds what codes stand for. A product and a sum stay two operations, as the first overflows where a block had an infinity.
template <int N>
__device__ __forceinline__ void add_codes(float (&sum)[N], const Codes<N>& codes) {
    const float scale = quant::e8m0_value(codes.scale);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 two = values(codes.words[i / 2] >> 16 * (i % 2));
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(two.x, scale));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(two.y, scale));
    }
}

// Through L1: lines hold the scales of several rows, of which some may have come later than a line was read. What makes it
// right is that a planner waits for each row with an acquire of the system, which empties L1, then meets its group, and only
// then the group loads.
template <int BYTES>
__device__ __forceinline__ void load_few_to_shared(uint32_t to, const uint8_t* from, uint64_t policy) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(BYTES), "l"(policy) : "memory");
}

// The ring of sm90_nvlink_combine.cu, with rows of two kinds: of slots, and with CODES of other ranks' sums, of which a word of
// the place has the codes of a thread's N columns and, behind 8 bytes, the scales of four blocks, its own among them. A warp's
// words of a place lie beside each other in the row, so that scales of its blocks do too.
template <class T, bool CODES>
struct Ring {
    static constexpr int N = 16 / sizeof(T), NEXT = 32 * 16, WARP = NEXT * WORDS, STEP = WARP * WARPS;
    static constexpr uint32_t NEXT_WORD = NVLINK_SUM_WORKERS * 16, NEXT_PLACE = NEXT_WORD * WORDS;
    static_assert(NEXT / sizeof(T) % (4 * BLOCK) == 0, "each word's scales begin a word of 4 bytes");
    const SumPiece<T>& piece;
    const int bytes, lower, slots;
    const uint64_t policy;
    const uint8_t* from;  // the next row to load from: asked for a load ahead
    int load_row = 0, load_at;
    const uint32_t begin;
    uint32_t load_to, next;  // places

    __device__ __forceinline__ Ring(const SumPiece<T>& piece, int bytes, uint32_t ring)
        : piece(piece), bytes(bytes), lower(piece.slots_from), slots(piece.slots), policy(read_once()), from(row(0)),
          load_at(piece.count > 0 ? first_of_warp() + lane() * 16 : bytes), begin(ring + threadIdx.x * 16), load_to(begin), next(begin) {
#pragma unroll 1
        for (uint32_t i = 0; i + 1 < NVLINK_RING; i++) load();
    }

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
    static __device__ __forceinline__ int first_of_warp() { return static_cast<int>(threadIdx.x % GROUP / 32) * WARP; }
    // Where the scale of a lane's block lies among those of four.
    static __device__ __forceinline__ uint32_t scale_shift() { return threadIdx.x / (BLOCK / N) % 4 * 8; }
    __device__ __forceinline__ uint32_t behind(uint32_t place) const {
        return place == begin + NEXT_PLACE * (NVLINK_RING - 1) ? begin : place + NEXT_PLACE;
    }
    __device__ __forceinline__ const uint8_t* row(int i) const { return reinterpret_cast<const uint8_t*>(piece.from[i]); }
    __device__ __forceinline__ bool has_codes(int row) const { return CODES && static_cast<uint32_t>(row - lower) >= static_cast<uint32_t>(slots); }

    __device__ __forceinline__ void load_codes() const {
        const int column = load_at / static_cast<int>(sizeof(T));
        const uint8_t* scales = piece.from_scales[load_row] + column / (4 * BLOCK) * 4;
        constexpr int NEXT_COLUMN = NEXT / static_cast<int>(sizeof(T));
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (load_at + NEXT * w >= bytes) continue;
            load_few_to_shared<N>(load_to + NEXT_WORD * w, from + column + NEXT_COLUMN * w, policy);
            load_few_to_shared<4>(load_to + NEXT_WORD * w + 8, scales + NEXT_COLUMN / BLOCK * w, policy);
        }
    }

    __device__ __forceinline__ void load() {
        if (has_codes(load_row)) {
            load_codes();
        } else {
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (load_at + NEXT * w < bytes) load_to_shared(load_to + NEXT_WORD * w, from + load_at + NEXT * w, policy);
            }
        }
        end_of_place();
        load_to = behind(load_to);
        if (++load_row == piece.count) load_row = 0, load_at += STEP;
        from = row(load_row);
    }

    // Adds the next `count` rows, of slots.
    __device__ __forceinline__ void add_slots(int count, float (&sum)[WORDS][N]) {
        take_rows(*this, count, [&](int w, const uint4& word) { add<T, N>(sum[w], word); });
    }

    // The same of other ranks' sums.
    __device__ __forceinline__ void add_sums(int count, float (&sum)[WORDS][N]) {
        take_rows(*this, count, [&](int w, const uint4& word) {
            Codes<N> codes;
            codes.words[0] = word.x;
            if constexpr (N == 8) codes.words[1] = word.y;
            codes.scale = word.z >> scale_shift() & 0xff;
            add_codes<N>(sum[w], codes);
        });
    }
};

// Scales of a warp's blocks, from so many of its steps over a row, until they are stored.
struct KeptScales {
    static constexpr int STEPS = 32;
    uint4 scales[STEPS];
};

// Stores those of `steps` steps, of which each is in one word of 16 bytes or of 8, from the row's step `first` on.
template <class T>
__device__ __forceinline__ void store_scales(const SumPiece<T>& piece, const KeptScales& kept, int first, int steps) {
    using Word = typename std::conditional<sizeof(T) == 2, uint4, uint2>::type;
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x % GROUP / 32);
    __syncwarp();
    if (lane < steps) reinterpret_cast<Word*>(piece.to_scales)[(first + lane) * WARPS + warp] = reinterpret_cast<const Word*>(kept.scales)[lane];
    __syncwarp();
}

// A row's slots, to another rank. By whole warps: lanes past the row's end work on what lies in their places, and store none of it.
template <class T>
__device__ __forceinline__ void send_sum(const SumPiece<T>& piece, int width, uint32_t ring_at, KeptScales& kept) {
    using Words = Ring<T, false>;
    constexpr int N = Words::N, SCALES = 32 * N / BLOCK;  // of a warp's word
    const int bytes = width * static_cast<int>(sizeof(T)), lane = Words::lane(), count = piece.count;
    auto* out = reinterpret_cast<uint8_t*>(piece.to[0]);
    auto* scales = reinterpret_cast<uint8_t*>(kept.scales) + lane / (BLOCK / N);
    Words ring(piece, bytes, ring_at);
    int step = 0, stored = 0;
#pragma unroll 1
    for (int begin = Words::first_of_warp(); begin < bytes; begin += Words::STEP) {
        float sum[WORDS][N] = {};
        ring.add_slots(count, sum);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const Codes<N> codes = quantized<N>(sum[w]);
            if (lane % (BLOCK / N) == 0) scales[((step - stored) * WORDS + w) * SCALES] = static_cast<uint8_t>(codes.scale);
            const int at = begin + lane * 16 + Words::NEXT * w;
            if (at >= bytes) continue;
            uint8_t* to = out + at / static_cast<int>(sizeof(T));
            if constexpr (N == 8) *reinterpret_cast<uint2*>(to) = make_uint2(codes.words[0], codes.words[1]);
            else *reinterpret_cast<uint32_t*>(to) = codes.words[0];
        }
        if (++step - stored == KeptScales::STEPS) store_scales<T>(piece, kept, stored, KeptScales::STEPS), stored = step;
    }
    store_scales<T>(piece, kept, stored, step - stored);
    wait_for_place<0>();
}

// A token's sums: lower ranks', this rank's, higher ranks'. By whole warps, too.
template <class T>
__device__ __forceinline__ void add_sums(const SumPiece<T>& piece, int width, uint32_t ring_at) {
    using Words = Ring<T, true>;
    constexpr int N = Words::N;
    const int bytes = width * static_cast<int>(sizeof(T)), lower = piece.slots_from, slots = piece.slots, count = piece.count;
    auto* out = reinterpret_cast<uint8_t*>(piece.to[0]);
    Words ring(piece, bytes, ring_at);
#pragma unroll 1
    for (int begin = Words::first_of_warp(); begin < bytes; begin += Words::STEP) {
        float sum[WORDS][N] = {};
        ring.add_sums(lower, sum);
        if (slots > 0) {
            float here[WORDS][N] = {};
            ring.add_slots(slots, here);
#pragma unroll
            for (int w = 0; w < WORDS; w++) add_codes<N>(sum[w], quantized<N>(here[w]));
        }
        ring.add_sums(count - lower - slots, sum);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const int at = begin + Words::lane() * 16 + Words::NEXT * w;
            if (at < bytes) *reinterpret_cast<uint4*>(out + at) = rounded<T, N>(sum[w]);
        }
    }
    wait_for_place<0>();
}

// Either, of rows that begin anywhere, an element at a time: a warp takes a block.
template <class T>
__device__ __forceinline__ void work_in_elements(const SumPiece<T>& piece, int width) {
    const bool sends = piece.arrived != nullptr;
    const int lower = piece.slots_from, behind = lower + piece.slots;
    for (int at = threadIdx.x % GROUP; at < width; at += GROUP) {
        float sum = 0.0f, here = 0.0f;
        const auto add_sums = [&](int row, int end) {
            for (; row < end; row++) {
                const float scale = quant::e8m0_value(piece.from_scales[row][at / BLOCK]);
                const float value = quant::e4m3_value(reinterpret_cast<const uint8_t*>(piece.from[row])[at]);
                sum = __fadd_rn(sum, __fmul_rn(value, scale));
            }
        };
        add_sums(0, lower);
        for (int row = lower; row < behind; row++) here += to_float(piece.from[row][at]);
        const unsigned scale = mxfp8::scale_of(__reduce_max_sync(~0u, mxfp8::join(0, here, false)), false);
        const unsigned code = quant::e4m3(__fmul_rn(here, mxfp8::factor_of(scale, false)));
        if (sends) {
            reinterpret_cast<uint8_t*>(piece.to[0])[at] = static_cast<uint8_t>(code);
            if (at % BLOCK == 0) piece.to_scales[at / BLOCK] = static_cast<uint8_t>(scale);
            continue;
        }
        if (behind > lower) sum = __fadd_rn(sum, __fmul_rn(quant::e4m3_value(code), quant::e8m0_value(scale)));
        add_sums(behind, piece.count);
        piece.to[0][at] = from_float<T>(sum);
    }
}

template <class T>
__device__ __forceinline__ void return_quantized(const NvLinkCombineParams& p) {
    __shared__ KeptScales kept[NVLINK_SUM_WORKERS / 32];
    combine<T, true>(p, [&](const SumPiece<T>& piece, uint32_t ring) {
        const int width = static_cast<int>(p.width);
        if (p.word != 16) work_in_elements<T>(piece, width);
        else if (piece.arrived != nullptr) send_sum<T>(piece, width, ring, kept[threadIdx.x / 32]);
        else add_sums<T>(piece, width, ring);
    });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_mxfp8_f32(const __grid_constant__ NvLinkCombineParams p) {
    return_quantized<float>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_mxfp8_f16(const __grid_constant__ NvLinkCombineParams p) {
    return_quantized<f16>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_mxfp8_bf16(const __grid_constant__ NvLinkCombineParams p) {
    return_quantized<bf16>(p);
}
#endif
