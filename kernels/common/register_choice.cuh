// A token's scores and choices by one warp, in registers: for router.cu and sm90_route_plan.cu.
#pragma once
#include "common/common.cuh"

constexpr float NONE = -INFINITY;

// exp(l - max), 1 at the maximum also where that is infinite.
__device__ inline float exp_below(float l, float max) { return l == max ? 1.0f : expf(l - max); }

// The commonest formula of the router in registers: softmax of at most 256 logits, no groups, no bias, no jitter, no
// auxiliary losses, a norm that is a sum. A lane holds logits lane, lane + 32 and so on. Sums run in the order of the
// general kernels (router.cu), to the same bits.
template <int EACH_LANE>
struct RegisterLogits {
    int lane, e;
    float scores[EACH_LANE];

    // From a token's logits; whether one is NaN.
    __device__ __forceinline__ RegisterLogits(const RoutingParams& p, const float* logits, bool& bad) : lane(threadIdx.x % 32), e(static_cast<int>(p.experts)) {
        const float* from = logits + lane;
        float max = NONE;
        bad = false;
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            scores[i] = lane + 32 * i < e ? from[32 * i] : NONE;
            bad = bad || isnan(scores[i]);
            max = fmaxf(max, scores[i]);
        }
        max = warp_max(max);
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            if (lane + 32 * i >= e) continue;
            scores[i] = exp_below(scores[i], max);
            sum += scores[i];
        }
        const float total = static_cast<float>(warp_sum(sum));
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) scores[i] = lane + 32 * i < e ? scores[i] / total : 0.0f;
    }
    // The score of an expert, which may be another for each lane.
    __device__ __forceinline__ float of(int id) const {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) {
            const float v = __shfl_sync(~0u, scores[i], id % 32);
            if (id / 32 == i) score = v;
        }
        return score;
    }
};

// A token's norm, or 1: see Divisor in router.cu.
struct Norm {
    double value = 1.0;
    bool floored = true;
    __device__ __forceinline__ Norm(const RoutingParams& p, float w) {
        if (!p.renorm) return;
        value = warp_sum(static_cast<double>(w)) + p.norm_epsilon;
        floored = value < p.floor;
        if (floored) value = p.floor;
    }
    __device__ __forceinline__ double divide(double w) const { return value > 0.0 ? w / value : 0.0; }
};

// A choice of a token: lane j has its j-th best.
struct Choice {
    int id;
    float weight;
};

// The choices of token t from its logits.
template <int EACH_LANE>
__device__ __forceinline__ Choice choose_in_registers(const RoutingParams& p, int64_t t, const float* logits) {
    bool bad;
    const RegisterLogits<EACH_LANE> held(p, logits, bad);
    const int lane = held.lane, e = held.e, k = static_cast<int>(p.top_k);
    int id = lane;
    float w = lane < k ? held.scores[0] : 0.0f;
    if (__any_sync(~0u, bad)) {
        // As in the general kernel: the first NaN of all is noted, every score is NaN, and the choices are the first K
        // experts, as whoever takes them before the host is told counts on distinct ids.
        for (int i = lane; i < e; i += 32) {
            if (isnan(logits[i])) atomicMin(p.fault + STATUS_NAN, (static_cast<unsigned long long>(t) << NAN_EXPERT_BITS | i) << ORIGIN_BITS | p.origin);
        }
    } else {
        // Scores are not negative, so that their bits are in their order; 0 is for what is taken.
        unsigned keys[EACH_LANE];
#pragma unroll
        for (int i = 0; i < EACH_LANE; i++) keys[i] = lane + 32 * i < e ? __float_as_uint(held.scores[i]) + 1 : 0;
        for (int j = 0; j < k; j++) {
            unsigned best = 0;
            int at = e;
#pragma unroll
            for (int i = 0; i < EACH_LANE; i++) {
                if (keys[i] > best) best = keys[i], at = lane + 32 * i;
            }
            const unsigned most = __reduce_max_sync(~0u, best);
            const int taken = __reduce_min_sync(~0u, best == most ? at : e);
            if (lane == j) id = taken, w = __uint_as_float(most - 1);
#pragma unroll
            for (int i = 0; i < EACH_LANE; i++) {
                if (taken == lane + 32 * i) keys[i] = 0;
            }
        }
    }
    const Norm norm(p, w);
    return {id, static_cast<float>(norm.divide(w) * p.scale)};
}

// `body(number)` for the number of logits that a lane holds.
template <int N>
struct LaneCount {
    static constexpr int value = N;
};
template <class Body>
__device__ __forceinline__ void with_experts(int64_t experts, Body&& body) {
    if (experts <= 32) body(LaneCount<1>{});
    else if (experts <= 64) body(LaneCount<2>{});
    else if (experts <= 128) body(LaneCount<4>{});
    else body(LaneCount<8>{});
}
