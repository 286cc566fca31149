// Rows of slots back to their tokens on other GPUs of the host, by stores over NVLink, and their sums
// (common/nvlink.cuh has the protocol).
//
//   sm90_nvlink_combine_*  rows [N, width] -> [T, width]; weights of slots [N] -> [T, K], if wanted
//
// Each row that arrived in dispatch goes back to its token's rank: as the sum of its slots here in f32, in the order of
// k, rounded once. The token's rank adds the sums of the ranks in their order, in f32, and rounds once; its own it makes
// on the way. Or (`in_k_order`) every slot's row goes back, to a place of its (token, k), and the token's rank adds them
// in the order of k: more bytes, and the same bits for every number of ranks.
//
// Behind each row that has been stored a word of the receiver's has the call's epoch. Groups of warps take pieces of work
// by a ticket, in one order: for each i, row i to every peer, then token i - lag. So what a token waits for has been taken
// by some group of the peer before, if the peer has come as far as this rank: no wait is for a group that waits itself,
// and no number of blocks has to run at once. A group has a warp more that plans the next piece beside the present one:
// the ticket, the maps and the wait take as long as a short row. One more warp of the block stores the words behind all
// groups' rows: what orders a row before its word waits for all that the SM has under way, so it is done for the rows of many
// groups together, and no group waits for it.
//
// Limited by the link's bytes; in memory each slot's row is read once, each sum that travels written and read once.
//
// Empty where the architecture is not Hopper (sm_90a). Notes: kernels/notes/nvlink.md.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#include "common/nvlink_sums.cuh"

namespace {
using namespace nvlink_sums;

template <class T>
using RowPiece = Piece<T, false>;

// The sum of WORDS words of a row, as it grows.
template <class T, int N>
struct Sum {
    float all[WORDS][N] = {};
    float here[WORDS][N] = {};

    __device__ __forceinline__ void take(const RowPiece<T>& piece, int row, const WordOf<T, N> (&words)[WORDS]) {
        const bool slot = row >= piece.slots_from && row < piece.slots_from + piece.slots;
#pragma unroll
        for (int w = 0; w < WORDS; w++) slot ? add<T, N>(here[w], words[w]) : add<T, N>(all[w], words[w]);
        if (row + 1 != piece.slots_from + piece.slots || piece.slots == 0) return;
#pragma unroll
        for (int w = 0; w < WORDS; w++) add<T, N>(all[w], rounded<T, N>(here[w]));
    }
};

// A thread's words of a piece's rows come through a ring in shared memory of its own, so that many are under way and none
// takes a register: place after place has words of a row, row after row, then the next words. A thread reads what it has
// loaded itself, so no barrier is needed. Offsets are in bytes.
template <class T>
struct Ring {
    static constexpr int N = 16 / sizeof(T), NEXT = GROUP * 16, STEP = NEXT * WORDS;
    static constexpr uint32_t NEXT_WORD = NVLINK_SUM_WORKERS * 16, NEXT_PLACE = NEXT_WORD * WORDS;
    const RowPiece<T>& piece;
    const int bytes;
    const uint64_t policy;
    const uint8_t* from;  // the next row to load from: asked for a load ahead
    int load_row = 0, load_at;
    const uint32_t begin;
    uint32_t load_to, next;  // places

    __device__ __forceinline__ Ring(const RowPiece<T>& piece, int bytes, uint32_t ring)
        : piece(piece), bytes(bytes), policy(read_once()), from(row(0)), load_at(piece.count > 0 ? first() : bytes),
          begin(ring + threadIdx.x * 16), load_to(begin), next(begin) {
#pragma unroll 1
        for (uint32_t i = 0; i + 1 < NVLINK_RING; i++) load();
    }

    static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x % GROUP) * 16; }
    __device__ __forceinline__ uint32_t behind(uint32_t place) const {
        return place == begin + NEXT_PLACE * (NVLINK_RING - 1) ? begin : place + NEXT_PLACE;
    }
    __device__ __forceinline__ const uint8_t* row(int i) const { return reinterpret_cast<const uint8_t*>(piece.from[i]); }

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (load_at + NEXT * w < bytes) load_to_shared(load_to + NEXT_WORD * w, from + load_at + NEXT * w, policy);
        }
        end_of_place();
        load_to = behind(load_to);
        if (++load_row == piece.count) load_row = 0, load_at += STEP;
        from = row(load_row);
    }

    // Adds the next `count` rows.
    __device__ __forceinline__ void add_rows(int count, float (&sum)[WORDS][N]) {
        take_rows(*this, count, [&](int w, const uint4& word) { add<T, N>(sum[w], word); });
    }
};

// Adds a piece's rows of words.
template <class T>
__device__ __forceinline__ void add_rows_in_words(const RowPiece<T>& piece, int width, uint32_t ring_at) {
    using Words = Ring<T>;
    const int bytes = width * static_cast<int>(sizeof(T)), lower = piece.slots_from, slots = piece.slots;
    auto* out = reinterpret_cast<uint8_t*>(piece.to[0]);
    Words ring(piece, bytes, ring_at);
#pragma unroll 1
    for (int at = Words::first(); at < bytes; at += Words::STEP) {
        float sum[WORDS][Words::N] = {};
        ring.add_rows(lower, sum);
        if (slots > 0) {
            float here[WORDS][Words::N] = {};
            ring.add_rows(slots, here);
#pragma unroll
            for (int w = 0; w < WORDS; w++) add<T, Words::N>(sum[w], rounded<T, Words::N>(here[w]));
        }
        ring.add_rows(piece.count - lower - slots, sum);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + Words::NEXT * w < bytes) *reinterpret_cast<uint4*>(out + at + Words::NEXT * w) = rounded<T, Words::N>(sum[w]);
        }
    }
    wait_for_place<0>();
}

// The same of rows of any width, an element at a time.
template <class T>
__device__ __forceinline__ void add_rows_in_elements(const RowPiece<T>& piece, int width) {
    T* out = piece.to[0];
    for (int at = threadIdx.x % GROUP; at < width; at += GROUP * WORDS) {
        Sum<T, 1> sum;
        for (int row = 0; row < piece.count; row++) {
            T words[WORDS] = {};
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                if (at + GROUP * w < width) words[w] = piece.from[row][at + GROUP * w];
            }
            sum.take(piece, row, words);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at + GROUP * w < width) out[at + GROUP * w] = rounded<T, 1>(sum.all[w]);
        }
    }
}

template <class W, int AHEAD>
__device__ __forceinline__ void copy_words(const W* from, W* to, int words) {
    for (int first = threadIdx.x % GROUP; first < words; first += GROUP * AHEAD) {
        W loaded[AHEAD];
#pragma unroll
        for (int w = 0; w < AHEAD; w++) {
            if (first + GROUP * w < words) loaded[w] = from[first + GROUP * w];
        }
#pragma unroll
        for (int w = 0; w < AHEAD; w++) {
            if (first + GROUP * w < words) to[first + GROUP * w] = loaded[w];
        }
    }
}

template <class T>
__device__ __forceinline__ void work(const NvLinkCombineParams& p, const RowPiece<T>& piece, uint32_t ring) {
    const int width = static_cast<int>(p.width);
    const bool wide = p.word == 16;
    if (piece.kind == PIECE_SUM) {
        if (wide) add_rows_in_words<T>(piece, width, ring);
        else add_rows_in_elements<T>(piece, width);
        return;
    }
    for (int i = 0; i < piece.count; i++) {
        if (wide) copy_words<uint4, 4>(reinterpret_cast<const uint4*>(piece.from[i]), reinterpret_cast<uint4*>(piece.to[i]), width / static_cast<int>(16 / sizeof(T)));
        else copy_words<T, 4>(piece.from[i], piece.to[i], width);
    }
}

template <class T>
__device__ __forceinline__ void return_rows(const NvLinkCombineParams& p) {
    combine<T, false>(p, [&](const RowPiece<T>& piece, uint32_t ring) { work<T>(p, piece, ring); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_f32(const __grid_constant__ NvLinkCombineParams p) {
    return_rows<float>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_f16(const __grid_constant__ NvLinkCombineParams p) {
    return_rows<f16>(p);
}
extern "C" __global__ void __launch_bounds__(NVLINK_SUM_THREADS, 1) sm90_nvlink_combine_bf16(const __grid_constant__ NvLinkCombineParams p) {
    return_rows<bf16>(p);
}
#endif
