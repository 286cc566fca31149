// Auxiliary losses: the sums from which they follow, their value, and the coefficients of their gradients.
//
//   aux_loss_scores        logits f32 [T, E] -> scores f32 [T, E], z terms, choices by softmax; a warp a token
//   aux_loss_chunks        -> counts, scores and z of each chunk of 64 tokens, f64; grid (chunks, sequences)
//   aux_loss_totals        -> the same of each sequence; a thread a number
//   aux_loss_finish        -> f32 [2 E + 4]: what ranks add up; one block
//   aux_loss_value         those sums -> the loss, f32 [1]; one block, whose first thread adds in the host's order
//   aux_loss_coefficients  those sums and the loss's gradient -> f64 [sequences, E], and one for z; a thread a number
//
// Sums run over chunks and then over chunks' sums, in order: no atomics, the same bits in every run. Limited by
// launches. Formulas: src/cpu/router/aux_losses.rs and src/aux_loss.rs. Notes: kernels/notes/router.md.
#include "common/common.cuh"

#define EACH(i, n) for (int64_t i = lane; i < (n); i += 32)

namespace {
constexpr int64_t CHUNK = AUX_CHUNK;
constexpr int TOTAL_THREADS = AUX_TOTAL_THREADS;

__device__ float sigmoid_of(float l) {
    const float small = expf(-fabsf(l));
    return l < 0.0f ? small / (1.0f + small) : 1.0f / (1.0f + small);
}
}  // namespace

// Scores of each token, its z term and, for Hugging Face's loss, its choice by softmax. A warp a token.
extern "C" __global__ void aux_loss_scores(const __grid_constant__ AuxLossParams p) {
    const int lane = threadIdx.x % 32, of_block = blockDim.x / 32;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * of_block + threadIdx.x / 32; t < p.tokens; t += static_cast<int64_t>(gridDim.x) * of_block) {
        const float* l = p.logits + t * p.experts;
        float* s = p.scores + t * p.experts;
        float max = -INFINITY;
        EACH(e, p.experts) max = fmaxf(max, l[e]);
        max = warp_max(max);
        double sum = 0.0;
        EACH(e, p.experts) {
            s[e] = l[e] == max ? 1.0f : expf(l[e] - max);
            sum += s[e];
        }
        sum = warp_sum(sum);
        const double log_sum = max + log(sum);
        if (lane == 0) p.z_terms[t] = log_sum * log_sum;
        EACH(e, p.experts) {
            s[e] /= static_cast<float>(sum);
            if (p.hugging_face && isnan(s[e])) s[e] = 0.0f;
        }
        __syncwarp();
        for (int64_t j = 0; p.hugging_face && j < p.top_k; j++) {
            // The best of those after the previous pick, in the order (score descending, index ascending).
            const int64_t last = j ? p.picks[t * p.top_k + j - 1] : -1;
            const float bound = j ? s[last] : INFINITY;
            float best = -1.0f;
            long long at = p.experts;
            EACH(e, p.experts) {
                const bool after = j == 0 || s[e] < bound || (s[e] == bound && e > last);
                if (after && s[e] > best) best = s[e], at = e;
            }
            for (int d = 16; d > 0; d /= 2) {
                const float v = __shfl_xor_sync(~0u, best, d);
                const long long i = __shfl_xor_sync(~0u, at, d);
                if (v > best || (v == best && i < at)) best = v, at = i;
            }
            if (lane == 0) p.picks[t * p.top_k + j] = static_cast<int32_t>(at);
            __syncwarp();
        }
        if (p.sigmoids) {
            double total = 0.0;
            EACH(e, p.experts) {
                s[e] = sigmoid_of(l[e]);
                total += s[e];
            }
            total = warp_sum(total);
            EACH(e, p.experts) if (total > 0.0) s[e] /= static_cast<float>(total);
        }
    }
}

// Counts, scores and z of each chunk: block (chunk, sequence), threads over experts.
extern "C" __global__ void aux_loss_chunks(const __grid_constant__ AuxLossParams p) {
    const int64_t chunk = blockIdx.x, sequence = blockIdx.y, width = 2 * p.experts + 1;
    const int64_t end_of = (sequence + 1) * p.sequence < p.tokens ? (sequence + 1) * p.sequence : p.tokens;
    const int64_t first = sequence * p.sequence + chunk * CHUNK;
    const int64_t last = first + CHUNK < end_of ? first + CHUNK : end_of;
    double* out = p.partial + (sequence * p.chunks + chunk) * width;
    const int32_t* ids = p.hugging_face ? p.picks : p.ids;
    for (int64_t e = threadIdx.x; e < p.experts; e += blockDim.x) {
        int count = 0;
        for (int64_t i = first * p.top_k; i < last * p.top_k; i++) count += ids[i] == e;
        double score = 0.0;
        for (int64_t t = first; p.scores && t < last; t++) score += p.scores[t * p.experts + e];
        out[e] = count, out[p.experts + e] = score;
    }
    if (threadIdx.x == 0) {
        double z = 0.0;
        for (int64_t t = first; p.z_terms && t < last; t++) z += p.z_terms[t];
        out[2 * p.experts] = z;
    }
}

// Sums over the chunks of each sequence.
extern "C" __global__ void aux_loss_totals(const __grid_constant__ AuxLossParams p) {
    const int64_t width = 2 * p.experts + 1, sequence = blockIdx.y;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= width) return;
    double sum = 0.0;
    for (int64_t c = 0; c < p.chunks; c++) sum += p.partial[(sequence * p.chunks + c) * width + i];
    p.totals[sequence * width + i] = sum;
}

// The sums over sequences. One block; sequence losses are summed by one warp in a fixed order.
extern "C" __global__ void aux_loss_finish(const __grid_constant__ AuxLossParams p) {
    const int64_t e = p.experts, width = 2 * e + 1;
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
        double sum = 0.0;
        for (int64_t s = 0; s < p.sequences; s++) sum += p.totals[s * width + i];
        p.out[i < 2 * e ? i : 2 * e + 1] = static_cast<float>(sum);
    }
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    double losses = 0.0;
    for (int64_t s = 0; p.by_sequence && s < p.sequences; s++) {
        const double tokens = static_cast<double>((s + 1) * p.sequence < p.tokens ? p.sequence : p.tokens - s * p.sequence);
        double dot = 0.0;
        EACH(i, e) dot += p.totals[s * width + i] * p.totals[s * width + e + i];
        losses += e * warp_sum(dot) / (tokens * p.top_k) / tokens;
    }
    if (lane == 0) {
        p.out[2 * e] = static_cast<float>(p.tokens);
        p.out[2 * e + 2] = static_cast<float>(losses);
        p.out[2 * e + 3] = p.by_sequence ? static_cast<float>(p.sequences) : 0.0f;
    }
}

// The losses' sum, to the bit what the host makes of the sums (`aux_value` in src/aux_loss.rs). One block; its first
// thread adds the products in the order of the experts.
extern "C" __global__ void aux_loss_value(const __grid_constant__ AuxLossParams p) {
    __shared__ double products[TOTAL_THREADS];
    const int64_t e = p.experts;
    double dot = 0.0;
    for (int64_t first = 0; first < e; first += TOTAL_THREADS) {
        const int64_t i = first + threadIdx.x, n = e - first < TOTAL_THREADS ? e - first : TOTAL_THREADS;
        // Exact: 24 bits each.
        if (i < e) products[threadIdx.x] = static_cast<double>(p.sums[i]) * static_cast<double>(p.sums[e + i]);
        __syncthreads();
        for (int64_t j = 0; threadIdx.x == 0 && j < n; j++) dot += products[j];
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    const double all = p.sums[2 * e];
    double balance = 0.0, z = 0.0;
    if (!(all <= 0.0)) {
        const double picks = p.hugging_face ? all : all * static_cast<double>(p.top_k);
        const double loss = p.by_sequence ? static_cast<double>(p.sums[2 * e + 2]) / static_cast<double>(p.sums[2 * e + 3])
                                          : static_cast<double>(e) * dot / picks / all;
        // A loss that is not asked for stays out, also where it is infinite; no product is fused with the sum.
        if (p.balance != 0.0) balance = __dmul_rn(p.balance, loss);
        if (p.z != 0.0) z = __dmul_rn(p.z, static_cast<double>(p.sums[2 * e + 1]) / all);
    }
    *p.out = static_cast<float>(__dadd_rn(balance, z));
}

// Coefficients of the losses' gradient with respect to a token's scores.
extern "C" __global__ void aux_loss_coefficients(const __grid_constant__ AuxLossParams p) {
    const int64_t e = p.experts, i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, s = blockIdx.y;
    const double all = p.sums[2 * e], d_loss = p.d_loss ? static_cast<double>(*p.d_loss) : 1.0;
    if (i == 0 && s == 0) {
        if (all <= 0.0 || (p.by_sequence && p.sums[2 * e + 3] <= 0.0)) raise_fault(p.fault, FAULT_SUMS, p.origin);
        *p.z_coef = d_loss * p.z / all;
    }
    if (i >= e || !p.coef) return;
    const double weight = d_loss * p.balance * static_cast<double>(e);
    if (p.by_sequence) {
        const double tokens = static_cast<double>((s + 1) * p.sequence < p.tokens ? p.sequence : p.tokens - s * p.sequence);
        p.coef[s * e + i] = weight / p.sums[2 * e + 3] * p.totals[s * (2 * e + 1) + i] / (tokens * p.top_k) / tokens;
    } else {
        p.coef[i] = weight * p.sums[i] / (p.hugging_face ? all : all * p.top_k) / all;
    }
}
