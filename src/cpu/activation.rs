//! Activations between up and down, one row at a time, in the accumulator type.

use crate::config::Activation;

use super::element::Acc;

/// `out = act(pre)`; `pre` holds the gate half, then the up half (only up without a gate).
pub(super) fn forward<A: Acc>(activation: Activation, pre: &[A], out: &mut [A]) {
    let inner = out.len();
    match activation {
        Activation::Relu2 => {
            for (o, &u) in out.iter_mut().zip(pre) {
                let r = u.max(A::zero());
                *o = r * r;
            }
        }
        _ => {
            let (gate, up) = pre.split_at(inner);
            let glu = Glu::new(activation);
            for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                *o = glu.value(g, u).0;
            }
        }
    }
}

/// `out = act(pre)` and `d_pre = act'(pre) · d_out · scale`. Returns `Σ d_out · out`.
pub(super) fn backward<A: Acc>(
    activation: Activation,
    pre: &[A],
    d_out: &[A],
    scale: A,
    out: &mut [A],
    d_pre: &mut [A],
) -> A {
    let inner = out.len();
    let mut dot = A::zero();
    match activation {
        Activation::Relu2 => {
            let two = A::of(2.0);
            for i in 0..inner {
                let r = pre[i].max(A::zero());
                out[i] = r * r;
                dot += d_out[i] * out[i];
                d_pre[i] = two * r * d_out[i] * scale;
            }
        }
        _ => {
            let (gate, up) = pre.split_at(inner);
            let (d_gate, d_up) = d_pre.split_at_mut(inner);
            let glu = Glu::new(activation);
            for i in 0..inner {
                let (value, by_gate, by_up) = glu.value(gate[i], up[i]);
                out[i] = value;
                dot += d_out[i] * value;
                d_gate[i] = by_gate * d_out[i] * scale;
                d_up[i] = by_up * d_out[i] * scale;
            }
        }
    }
    dot
}

/// A gated unit with its constants in the accumulator type.
enum Glu<A> {
    Silu,
    Gelu { c: A, cubic: A },
    Clamped { alpha: A, limit: A },
}

impl<A: Acc> Glu<A> {
    fn new(activation: Activation) -> Self {
        match activation {
            Activation::SiluGlu | Activation::Relu2 => Glu::Silu,
            Activation::GeluGlu => Glu::Gelu { c: A::of((2.0 / std::f64::consts::PI).sqrt()), cubic: A::of(0.044715) },
            Activation::ClampedGlu { alpha, limit } => Glu::Clamped { alpha: A::of(alpha), limit: A::of(limit) },
        }
    }

    /// Value and derivatives by gate and by up. Clamped inputs have derivative zero, as autograd has it.
    #[inline(always)]
    fn value(&self, g: A, u: A) -> (A, A, A) {
        let one = A::one();
        match *self {
            Glu::Silu => {
                let s = sigmoid(g);
                let silu = g * s;
                (silu * u, u * (s + silu * (one - s)), silu)
            }
            Glu::Gelu { c, cubic } => {
                let half = A::of(0.5);
                let t = (c * (g + cubic * g * g * g)).tanh();
                let gelu = half * g * (one + t);
                let slope = half * (one + t) + half * g * (one - t * t) * c * (one + A::of(3.0) * cubic * g * g);
                (gelu * u, u * slope, gelu)
            }
            Glu::Clamped { alpha, limit } => {
                let inside_g = g <= limit;
                let inside_u = u >= -limit && u <= limit;
                // `min` and `max` would turn a NaN into the limit; a NaN must stay visible.
                let g = if g > limit { limit } else { g };
                let u = if u > limit {
                    limit
                } else if u < -limit {
                    -limit
                } else {
                    u
                };
                let s = sigmoid(alpha * g);
                let swish = g * s;
                let by_gate = (u + one) * (s + alpha * swish * (one - s));
                (
                    (u + one) * swish,
                    if inside_g { by_gate } else { A::zero() },
                    if inside_u { swish } else { A::zero() },
                )
            }
        }
    }
}

/// Logistic function.
#[inline(always)]
pub(super) fn sigmoid<A: Acc>(x: A) -> A {
    A::one() / (A::one() + (-x).exp())
}
