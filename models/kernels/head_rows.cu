// Heads of the product of queries, keys and values: norm, rotation, and each where attention reads it.

#include "common.cuh"

struct HeadSizes {
    // Tokens of a sequence.
    int sequences, len, heads, keys, dim;
    // Rotated entries of a head, an even number; 0 where nothing is rotated.
    int rotated;
    // Of keys and values, from one head to the next.
    int slots;
    float eps;
};

// One warp a head of a token. `qkv` is [sequence, token, heads + 2 keys, D]; queries go to [sequence, head, token, D], keys
// and values to [sequence, key head, slot, D], from slot `*slot` on (null: 0). Weights of norms may be null; angles are
// [token, rotated / 2], of pairs of entries i and rotated / 2 + i. Shared memory: WARPS D floats.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_rows(const bf16 *qkv, bf16 *q, bf16 *k, bf16 *v, const uint32_t *slot, const bf16 *q_weight, const bf16 *k_weight,
              const bf16 *cos, const bf16 *sin, const HeadSizes sizes) {
    extern __shared__ float rows[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = sizes.dim;
    float *row = rows + warp * dim;
    const int per_token = sizes.heads + 2 * sizes.keys;
    const int index = blockIdx.x * WARPS + warp, place = index / per_token;
    const int sequence = place / sizes.len, token = place % sizes.len;
    if (sequence >= sizes.sequences) return;
    int head = index % per_token;
    const int kind = head < sizes.heads ? 0 : head < sizes.heads + sizes.keys ? 1 : 2;
    head -= kind == 0 ? 0 : kind == 1 ? sizes.heads : sizes.heads + sizes.keys;
    const bf16 *from = qkv + (size_t)index * dim;
    bf16 *to;
    if (kind == 0) {
        to = q + (((size_t)sequence * sizes.heads + head) * sizes.len + token) * dim;
    } else {
        const size_t place_of = token + (slot ? *slot : 0);
        // A number that no cache has is not followed.
        if (place_of >= sizes.slots) return;
        const size_t at = ((size_t)sequence * sizes.keys + head) * sizes.slots + place_of;
        to = (kind == 1 ? k : v) + at * dim;
    }
    if (kind == 2) {
        for (int i = lane; i < dim; i += 32) to[i] = from[i];
        return;
    }
    float squares = 0;
    for (int i = lane; i < dim; i += 32) {
        float x = wide(from[i]);
        row[i] = x;
        squares += x * x;
    }
    const bf16 *weight = kind == 0 ? q_weight : k_weight;
    if (weight) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(ALL, squares, offset);
        const float factor = rsqrtf(squares / dim + sizes.eps);
        // Rounded as a norm of its own is.
        for (int i = lane; i < dim; i += 32) row[i] = wide(narrow(factor * row[i] * wide(weight[i]), bf16()));
    }
    __syncwarp();
    const int half = sizes.rotated / 2;
    cos += (size_t)token * half;
    sin += (size_t)token * half;
    for (int i = lane; i < dim; i += 32) {
        float x = row[i];
        if (i < half) {
            x = x * wide(cos[i]) - row[i + half] * wide(sin[i]);
        } else if (i < sizes.rotated) {
            x = x * wide(cos[i - half]) + row[i - half] * wide(sin[i - half]);
        }
        to[i] = narrow(x, bf16());
    }
}
