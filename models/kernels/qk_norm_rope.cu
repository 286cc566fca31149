// Heads of the product of queries, keys and values: qk-norm, rotary embedding, and each where attention reads it.
//
// One warp a head of a token. Shared memory: WARPS D floats.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) qk_norm_rope(const __grid_constant__ QkNormRopeParams params) {
    wait_for_previous_kernel();
    const bf16 *qkv = static_cast<const bf16 *>(params.qkv);
    const bf16 *cos = static_cast<const bf16 *>(params.cos), *sin = static_cast<const bf16 *>(params.sin);
    bf16 *q = static_cast<bf16 *>(params.q), *k = static_cast<bf16 *>(params.k), *v = static_cast<bf16 *>(params.v);
    extern __shared__ float rows[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = params.dim;
    float *row = rows + warp * dim;
    const int per_token = params.heads + 2 * params.key_heads;
    const int index = blockIdx.x * WARPS + warp, place = index / per_token;
    const int sequence = place / params.tokens, token = place % params.tokens;
    if (sequence >= params.sequences) return;
    int head = index % per_token;
    const int kind = head < params.heads ? 0 : head < params.heads + params.key_heads ? 1 : 2;
    head -= kind == 0 ? 0 : kind == 1 ? params.heads : params.heads + params.key_heads;
    const bf16 *from = qkv + (size_t)index * dim;
    bf16 *to;
    if (kind == 0) {
        to = q + (((size_t)sequence * params.heads + head) * params.tokens + token) * dim;
    } else {
        const size_t place_of = token + (params.position ? *params.position : 0);
        // A number that no cache has is not followed.
        if (place_of >= params.positions) return;
        const size_t at = ((size_t)sequence * params.key_heads + head) * params.positions + place_of;
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
    const bf16 *weight = static_cast<const bf16 *>(kind == 0 ? params.q_weight : params.k_weight);
    if (weight) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(ALL, squares, offset);
        const float factor = rsqrtf(squares / dim + params.eps);
        // Rounded as a norm of its own is.
        for (int i = lane; i < dim; i += 32) row[i] = wide(narrow(factor * row[i] * wide(weight[i]), bf16()));
    }
    __syncwarp();
    const int half = params.rotated / 2;
    cos += (size_t)token * half;
    sin += (size_t)token * half;
    for (int i = lane; i < dim; i += 32) {
        float x = row[i];
        if (i < half) {
            x = x * wide(cos[i]) - row[i + half] * wide(sin[i]);
        } else if (i < params.rotated) {
            x = x * wide(cos[i - half]) + row[i - half] * wide(sin[i - half]);
        }
        to[i] = narrow(x, bf16());
    }
}
