// Logits to expert ids and weights, and back. A warp takes a token; per-expert values are f32, sums f64, as on the CPU.
// Formulas: src/cpu/router/.
//
//   route, route_softmax          logits f32 [T, E] -> ids i32 [T, K] and weights f32 [T, K], best first
//   route_bwd, route_softmax_bwd  ids, weights' gradients [T, K], losses' coefficients -> logits' gradients f32 [T, E]
//   renormalize_kept              weights of tokens with dropped choices, or their gradient; a thread a token
//
// `route` and `route_bwd` have every formula, with six rows of E words a warp in shared memory, or in `scratch` where
// those do not fit. The others have the commonest one in registers, to the same bits. Blocks of 8 warps, fewer where
// shared memory asks for it. Limited by instructions, not bytes. Notes: kernels/notes/router.md.
#include "common/register_choice.cuh"

#define EACH(i, n) for (int i = lane; i < (n); i += 32)

namespace {

__device__ float sigmoid_of(float l) {
    const float small = expf(-fabsf(l));
    return l < 0.0f ? small / (1.0f + small) : 1.0f / (1.0f + small);
}

__device__ unsigned long long absorb(unsigned long long h, unsigned long long word) {
    unsigned long long z = (h ^ word) + 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// A token's rows of working memory.
struct Token {
    const RoutingParams& p;
    int lane, e, k;
    float *logits, *scores, *ranking, *extra, *grad;
    int32_t* chosen;
    unsigned long long key;

    __device__ Token(const RoutingParams& p, float* memory) : p(p), lane(threadIdx.x % 32) {
        e = static_cast<int>(p.experts), k = static_cast<int>(p.top_k);
        logits = memory, scores = memory + e, ranking = memory + 2 * e, extra = memory + 3 * e, grad = memory + 4 * e;
        chosen = reinterpret_cast<int32_t*>(memory + 5 * e);
    }

    __device__ double noise(int expert) const {
        const double r = static_cast<double>(absorb(key, expert) >> 40) / 16777216.0;
        return 1.0 + p.jitter * (2.0 * r - 1.0);
    }

    __device__ bool scored() const { return p.score == SCORE_SOFTMAX || p.score == SCORE_SIGMOID; }
    __device__ bool zeroes_scores() const { return p.rank_by == RANK_MAX && scored() && !p.bias; }

    // Writes softmax(from) to `to`; gives log of the sum of exponentials.
    __device__ double softmax(const float* from, float* to) {
        float max = NONE;
        EACH(i, e) max = fmaxf(max, from[i]);
        max = warp_max(max);
        double sum = 0.0;
        EACH(i, e) {
            to[i] = exp_below(from[i], max);
            sum += to[i];
        }
        sum = warp_sum(sum);
        const float total = static_cast<float>(sum);
        EACH(i, e) to[i] /= total;
        __syncwarp();
        return max + log(sum);
    }

    // Sparsemixer's softmax over the logits near their maximum; `without` is left out.
    __device__ void masked_softmax(int without) {
        float max = NONE;
        EACH(i, e) if (i != without) max = fmaxf(max, logits[i]);
        max = warp_max(max);
        const float threshold = static_cast<float>(2.0 * p.epsilon);
        double sum = 0.0;
        EACH(i, e) {
            const float l = logits[i];
            const bool far = (max - l) / fmaxf(fabsf(l), max) > threshold;
            scores[i] = i != without && !far ? exp_below(l, max) : 0.0f;
            sum += scores[i];
        }
        const float total = static_cast<float>(warp_sum(sum));
        EACH(i, e) scores[i] /= total;
        __syncwarp();
    }

    // `checked`: the first NaN of all tokens is noted.
    __device__ void load(int64_t t, bool checked) {
        const float* from = p.logits + t * e;
        key = absorb(p.key, p.first_token + t);
        EACH(i, e) {
            const float l = from[i];
            if (checked && isnan(l)) atomicMin(p.fault + STATUS_NAN, (static_cast<unsigned long long>(t) << NAN_EXPERT_BITS | i) << ORIGIN_BITS | p.origin);
            logits[i] = p.jitter > 0.0 ? l * static_cast<float>(noise(i)) : l;
        }
        __syncwarp();
        if (p.score == SCORE_SOFTMAX) softmax(logits, scores);
        if (p.score == SCORE_SIGMOID) EACH(i, e) scores[i] = sigmoid_of(logits[i]);
        __syncwarp();
    }

    // Ranks the groups by `ranking`; extra[g] becomes 1 for a group that is kept, else 0.
    __device__ void keep_groups() {
        const int groups = static_cast<int>(p.groups), size = e / groups;
        float* rank = grad;
        EACH(g, groups) {
            float first = NONE, second = NONE;
            for (int i = g * size; i < (g + 1) * size; i++) {
                const float s = ranking[i];
                if (s > first) second = first, first = s;
                else if (s > second) second = s;
            }
            float r = p.rank_by == RANK_TOP2 && size > 1 ? first + second : first;
            rank[g] = isnan(r) ? NONE : r;
        }
        __syncwarp();
        EACH(g, groups) {
            int better = 0;
            for (int o = 0; o < groups; o++) better += rank[o] > rank[g] || (rank[o] == rank[g] && o < g);
            extra[g] = better < p.keep ? 1.0f : 0.0f;
        }
        __syncwarp();
    }

    // A number that is greater for a greater rank, and equal for 0 and -0; 0 for a NaN, which is no candidate.
    static __device__ unsigned order(float rank) {
        if (isnan(rank)) return 0;
        const unsigned bits = __float_as_uint(rank + 0.0f);
        return bits >> 31 ? ~bits : bits | 1u << 31;
    }

    // Writes the best K experts to `chosen`, best first, the lower index first among equals; E where none is left.
    __device__ void choose() {
        EACH(i, e) {
            float r = scored() ? scores[i] : logits[i];
            if (p.bias) r += load_any(p.bias, p.bias_type, i);
            ranking[i] = isnan(r) ? NONE : r;
        }
        __syncwarp();
        if (p.groups) {
            keep_groups();
            const int size = e / static_cast<int>(p.groups);
            const bool choosable = p.rank_by == RANK_MAX && scored(), zeroed = zeroes_scores();
            EACH(i, e) {
                if (extra[i / size] != 0.0f) continue;
                ranking[i] = choosable ? 0.0f : NAN;
                if (zeroed) scores[i] = 0.0f;
            }
            __syncwarp();
        }
        // The best of the lane's own; only the lane whose best was taken looks again.
        unsigned best;
        int at;
        auto look = [&] {
            best = 0, at = e;
            EACH(i, e) {
                const unsigned o = order(ranking[i]);
                if (o > best) best = o, at = i;
            }
        };
        look();
        for (int j = 0; j < k; j++) {
            const unsigned most = __reduce_max_sync(~0u, best);
            const int taken = __reduce_min_sync(~0u, best == most && most != 0 ? at : e);
            if (lane == 0) chosen[j] = taken;
            if (taken == at && at < e) {
                ranking[at] = NAN;
                look();
            }
        }
        __syncwarp();
    }

    // Weights of the chosen before renormalization, to `out[K]`.
    __device__ void raw_weights(float* out) {
        const int32_t* ids = chosen;
        if (p.score == SCORE_SPARSEMIXER) {
            int without = -1;
            for (int j = 0; j < k; j++) {
                masked_softmax(without);
                if (lane == 0) out[j] = scores[ids[j]];
                without = ids[j];
                __syncwarp();
            }
            return;
        }
        if (p.score == SCORE_TOPK_SOFTMAX) {
            float max = NONE;
            EACH(j, k) max = fmaxf(max, logits[ids[j]]);
            max = warp_max(max);
            double sum = 0.0;
            EACH(j, k) {
                out[j] = exp_below(logits[ids[j]], max);
                sum += out[j];
            }
            const float total = static_cast<float>(warp_sum(sum));
            EACH(j, k) out[j] /= total;
        } else if (p.score == SCORE_TOPK_SIGMOID) {
            EACH(j, k) out[j] = sigmoid_of(logits[ids[j]]);
        } else {
            EACH(j, k) out[j] = scores[ids[j]];
        }
        __syncwarp();
    }
};

// max((sum of w^p)^(1/p) + epsilon, floor).
struct Divisor {
    double p, norm, value;
    bool floored;

    __device__ Divisor(const Token& t, const float* w) : p(1.0), norm(1.0), value(1.0), floored(true) {
        if (!t.p.renorm) return;
        const int lane = t.lane;
        p = t.p.p;
        double sum = 0.0;
        if (p == 1.0) {
            EACH(j, t.k) sum += w[j];
            norm = warp_sum(sum);
        } else {
            float max = 0.0f;
            EACH(j, t.k) max = fmaxf(max, w[j]);
            max = warp_max(max);
            norm = 0.0;
            if (max != 0.0f) {
                EACH(j, t.k) sum += pow(static_cast<double>(w[j]) / max, p);
                norm = max * pow(warp_sum(sum), 1.0 / p);
            }
        }
        value = norm + t.p.norm_epsilon;
        floored = value < t.p.floor;
        if (floored) value = t.p.floor;
    }
    __device__ double divide(double w) const { return value > 0.0 ? w / value : 0.0; }
    __device__ double slope(double w) const {
        if (floored) return 0.0;
        if (p == 1.0) return 1.0;
        return w > 0.0 ? pow(w / norm, p - 1.0) : 0.0;
    }
};

__device__ float* memory_of_warp(const RoutingParams& p) {
    extern __shared__ float shared[];
    const int64_t warp = threadIdx.x / 32, of_block = blockDim.x / 32;
    if (p.scratch) return p.scratch + (blockIdx.x * of_block + warp) * ROUTER_WORK_ROWS * p.experts;
    return shared + warp * ROUTER_WORK_ROWS * p.experts;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 4) route(const __grid_constant__ RoutingParams p) {
    wait_for_previous_kernel();
    Token token(p, memory_of_warp(p));
    const int lane = token.lane, of_block = blockDim.x / 32;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * of_block + threadIdx.x / 32; t < p.tokens; t += static_cast<int64_t>(gridDim.x) * of_block) {
        token.load(t, true);
        token.choose();
        // Indices past the end come of NaN logits alone, which fail the call; keep reads inside.
        EACH(j, token.k) if (token.chosen[j] >= token.e) token.chosen[j] = 0;
        __syncwarp();
        float* weights = token.extra;
        token.raw_weights(weights);
        const Divisor divisor(token, weights);
        EACH(j, token.k) {
            p.ids[t * token.k + j] = token.chosen[j];
            p.weights[t * token.k + j] = static_cast<float>(divisor.divide(weights[j]) * p.scale);
        }
        __syncwarp();
    }
}

// Gradient with respect to the logits, from that of the weights and of the auxiliary losses.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 4) route_bwd(const __grid_constant__ RoutingParams p) {
    Token token(p, memory_of_warp(p));
    const int lane = token.lane, of_block = blockDim.x / 32, e = token.e, k = token.k;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * of_block + threadIdx.x / 32; t < p.tokens; t += static_cast<int64_t>(gridDim.x) * of_block) {
        const int32_t* ids = token.chosen;
        float* out = p.d_logits + t * e;
        bool bad = false;
        EACH(j, k) {
            const int32_t id = p.ids[t * k + j];
            if (id < 0 || id >= e) {
                bad = true;
                raise_id(p.fault, t * k + j, id, {p.top_k, p.experts}, p.origin);
            }
            token.chosen[j] = id;
        }
        if (__any_sync(~0u, bad)) {
            EACH(i, e) out[i] = 0.0f;
            continue;
        }
        token.load(t, false);
        if (p.groups && token.zeroes_scores()) {
            EACH(i, e) token.ranking[i] = token.scores[i];
            __syncwarp();
            token.keep_groups();
            const int size = e / static_cast<int>(p.groups);
            EACH(i, e) if (token.extra[i / size] == 0.0f) token.scores[i] = 0.0f;
            __syncwarp();
        }
        float* w = token.ranking;
        float* g = token.extra;
        float* d = token.grad;
        token.raw_weights(w);
        EACH(j, k) g[j] = static_cast<float>(p.d_weights[t * k + j] * p.scale);
        __syncwarp();
        if (p.renorm) {
            const Divisor divisor(token, w);
            double dot = 0.0;
            EACH(j, k) dot += static_cast<double>(g[j]) * w[j];
            dot = warp_sum(dot);
            EACH(j, k) g[j] = static_cast<float>(divisor.divide(g[j]) - divisor.divide(divisor.divide(dot)) * divisor.slope(w[j]));
            __syncwarp();
        }
        double dot = 0.0;
        EACH(j, k) dot += static_cast<double>(g[j]) * w[j];
        dot = warp_sum(dot);
        if (p.score == SCORE_SOFTMAX && p.groups) token.softmax(token.logits, token.scores);
        EACH(i, e) d[i] = p.score == SCORE_SOFTMAX ? static_cast<float>(-token.scores[i] * dot) : 0.0f;
        __syncwarp();
        if (p.score == SCORE_SPARSEMIXER) {
            int without = -1;
            for (int j = 0; j < k; j++) {
                token.masked_softmax(without);
                const float gw = g[j] * w[j];
                EACH(i, e) d[i] += (i == ids[j] ? gw : 0.0f) - gw * token.scores[i];
                without = ids[j];
                __syncwarp();
            }
        } else {
            for (int j = 0; j < k; j++) {
                const int at = ids[j];
                if (at % 32 != lane) continue;
                const double gw = static_cast<double>(g[j]) * w[j];
                if (p.score == SCORE_SOFTMAX) d[at] += static_cast<float>(gw);
                else if (p.score == SCORE_TOPK_SOFTMAX) d[at] += static_cast<float>(w[j] * (g[j] - dot));
                else d[at] += static_cast<float>(gw * sigmoid_of(-token.logits[at]));
            }
        }
        __syncwarp();
        const float* clean = p.logits + t * e;
        if (p.jitter > 0.0) EACH(i, e) d[i] *= static_cast<float>(token.noise(i));
        __syncwarp();
        const double z = p.aux_z ? *p.aux_z : 0.0;
        if (z != 0.0) {
            const double log_sum = token.softmax(clean, token.scores);
            EACH(i, e) if (token.scores[i] != 0.0f) d[i] += static_cast<float>(2.0 * z * log_sum * token.scores[i]);
        }
        if (p.aux_coef) {
            const double* coef = p.aux_coef + t / p.sequence * e;
            double dot = 0.0;
            if (p.aux_sigmoid) {
                double sum = 0.0;
                EACH(i, e) {
                    token.scores[i] = sigmoid_of(clean[i]);
                    sum += token.scores[i];
                }
                sum = warp_sum(sum);
                EACH(i, e) if (sum > 0.0) token.scores[i] /= static_cast<float>(sum);
            } else if (z == 0.0) {
                token.softmax(clean, token.scores);
            }
            EACH(i, e) dot += coef[i] * token.scores[i];
            dot = warp_sum(dot);
            EACH(i, e) {
                const double rest = p.aux_sigmoid ? sigmoid_of(-clean[i]) : 1.0;
                d[i] += static_cast<float>(token.scores[i] * rest * (coef[i] - dot));
            }
        }
        EACH(i, e) out[i] = d[i];
        __syncwarp();
    }
}

// The gradient of common/register_choice.cuh.
namespace {

template <int EACH_LANE>
__device__ __forceinline__ void gradient_in_registers(const RoutingParams& p, int64_t t) {
    const int lane = threadIdx.x % 32, e = static_cast<int>(p.experts), k = static_cast<int>(p.top_k);
    const bool chooses = lane < k;
    const int32_t given = chooses ? p.ids[t * k + lane] : 0;
    const bool outside = given < 0 || given >= e;
    if (__any_sync(~0u, outside)) {
        if (outside) raise_id(p.fault, t * k + lane, given, {p.top_k, p.experts}, p.origin);
        for (int i = lane; i < e; i += 32) p.d_logits[t * e + i] = 0.0f;
        return;
    }
    bool bad;
    const RegisterLogits<EACH_LANE> held(p, p.logits + t * e, bad);
    const float score = held.of(given), w = chooses ? score : 0.0f;
    float g = chooses ? static_cast<float>(p.d_weights[t * k + lane] * p.scale) : 0.0f;
    if (p.renorm) {
        const Norm norm(p, w);
        const double dot = warp_sum(static_cast<double>(g) * w);
        if (chooses) g = static_cast<float>(norm.divide(g) - norm.divide(norm.divide(dot)) * (norm.floored ? 0.0 : 1.0));
    }
    const double own = static_cast<double>(g) * w, dot = warp_sum(own);
    float d[EACH_LANE];
#pragma unroll
    for (int i = 0; i < EACH_LANE; i++) d[i] = static_cast<float>(-held.scores[i] * dot);
    const float share = static_cast<float>(own);
    for (int j = 0; j < k; j++) {
        const int at = __shfl_sync(~0u, given, j);
        const float v = __shfl_sync(~0u, share, j);
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            if (at == lane + 32 * i) d[i] += v;
        }
    }
    float* out = p.d_logits + t * e + lane;
#pragma unroll
    for (int i = 0; i < EACH_LANE; i++) {
        if (lane + 32 * i < e) out[32 * i] = d[i];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 6) route_softmax(const __grid_constant__ RoutingParams p) {
    wait_for_previous_kernel();
    const int64_t t = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (t >= p.tokens) return;
    const int k = static_cast<int>(p.top_k), lane = threadIdx.x % 32;
    with_experts(p.experts, [&](auto number) {
        const Choice choice = choose_in_registers<number.value>(p, t, p.logits + t * p.experts);
        if (lane < k) p.ids[t * k + lane] = choice.id, p.weights[t * k + lane] = choice.weight;
    });
}
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS, 5) route_softmax_bwd(const __grid_constant__ RoutingParams p) {
    const int64_t t = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (t < p.tokens) with_experts(p.experts, [&](auto number) { gradient_in_registers<number.value>(p, t); });
}

// Scales a token's kept weights to the sum that all had, or the gradient of that. A thread a token.
extern "C" __global__ void renormalize_kept(const __grid_constant__ RenormalizeKeptParams p) {
    const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (t >= p.tokens) return;
    const int64_t first = t * p.top_k, last = first + p.top_k;
    double all = 0.0, left = 0.0, dot = 0.0;
    bool dropped = false;
    for (int64_t i = first; i < last; i++) {
        all += p.weights[i];
        if (p.kept[i] >= 0) {
            left += p.weights[i];
            if (p.grad) dot += static_cast<double>(p.weights[i]) * p.grad[i];
        } else {
            dropped = true;
        }
    }
    const bool scaled = dropped && left != 0.0;
    for (int64_t i = first; i < last; i++) {
        const bool here = p.kept[i] >= 0;
        const double v = p.grad ? p.grad[i] : p.weights[i];
        double out = here ? v : 0.0;
        if (scaled && !p.grad) out = here ? v * (all / left) : 0.0;
        if (scaled && p.grad) out = dot / left + (here ? v * all / left - dot * all / (left * left) : 0.0);
        p.out[i] = static_cast<float>(out);
    }
}
