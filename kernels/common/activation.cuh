// Activations between the up and down projections. Formulas: src/cpu/activation.rs.
#pragma once
#include "common/common.cuh"

struct Glu {
    float value, by_gate, by_up;
};

// FAST: to a few units in the last place of f32, for results that are rounded to 16 bits. Without the steps for
// subnormal numbers: the exponential's are lost beside 1, the result's are 0.
template <bool FAST>
__device__ __forceinline__ float logistic(float x) {
    if (!FAST) return 1.0f / (1.0f + expf(-x));
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(1.0f + power));
    return result;
}

// Value and derivatives by gate and by up; without a gate, `g` is the only input and `by_up` unused.
template <bool FAST = false>
__device__ __forceinline__ Glu activate(int activation, float alpha, float limit, float g, float u) {
    if (activation == ACT_SILU) {
        float s = logistic<FAST>(g), silu = g * s;
        return {silu * u, u * (s + silu * (1.0f - s)), silu};
    }
    if (activation == ACT_GELU) {
        const float c = 0.7978845608028654f, cubic = 0.044715f;
        float t = tanhf(c * (g + cubic * g * g * g));
        float gelu = 0.5f * g * (1.0f + t);
        float slope = 0.5f * (1.0f + t) + 0.5f * g * (1.0f - t * t) * c * (1.0f + 3.0f * cubic * g * g);
        return {gelu * u, u * slope, gelu};
    }
    if (activation == ACT_CLAMPED) {
        bool inside_g = g <= limit, inside_u = u >= -limit && u <= limit;
        // Not fminf and fmaxf, which would turn a NaN into the limit.
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
        float s = logistic<FAST>(alpha * g), swish = g * s;
        float by_gate = (u + 1.0f) * (s + alpha * swish * (1.0f - s));
        return {(u + 1.0f) * swish, inside_g ? by_gate : 0.0f, inside_u ? swish : 0.0f};
    }
    float r = g > 0.0f ? g : g <= 0.0f ? 0.0f : g;
    return {r * r, 2.0f * r, 0.0f};
}

// Runs `body` with the activation as a constant, so that a loop over elements holds the code of one alone: with all of
// them in an unrolled loop, the instruction cache misses and the epilogue takes twenty times as long.
template <int VALUE>
struct Constant {
    static constexpr int value = VALUE;
};
template <class Body>
__device__ __forceinline__ void with_gate(int activation, Body&& body) {
    if (activation == ACT_SILU) body(Constant<ACT_SILU>{});
    else if (activation == ACT_GELU) body(Constant<ACT_GELU>{});
    else body(Constant<ACT_CLAMPED>{});
}
