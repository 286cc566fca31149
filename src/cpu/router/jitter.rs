//! Multiplicative noise on logits from a counter-based generator: no state, so the factor of a (token, expert) is the
//! same on whatever rank and thread it is computed.
//!
//! The words seed, step, layer, global token and expert are absorbed in this order into h = 0 by
//! `h ← mix((h xor word) + γ)`, all modulo 2⁶⁴, with γ and `mix` the increment and finalizer of SplitMix64
//! (Steele, Lea and Flood, OOPSLA 2014). r = ⌊h / 2⁴⁰⌋ / 2²⁴ lies in [0, 1), and the factor 1 + ε·(2r − 1) is computed
//! in `f64` and rounded once.

use crate::config::RouterConfig;
use crate::kernels::Jitter;
use crate::splitmix64::{GAMMA, mix};

/// The noise of one call.
pub(super) struct JitterNoise {
    epsilon: f64,
    key: u64,
    first_token: u64,
}

impl JitterNoise {
    /// `None` where there is nothing to multiply by.
    pub(super) fn new(config: &RouterConfig, jitter: Option<Jitter>) -> Option<Self> {
        let jitter = jitter.filter(|_| config.jitter > 0.0)?;
        Some(Self { epsilon: config.jitter, key: key(jitter), first_token: jitter.first_token })
    }

    /// The noise of this rank's token `t`.
    pub(super) fn token(&self, t: usize) -> TokenNoise {
        TokenNoise { epsilon: self.epsilon, key: absorb(self.key, self.first_token.wrapping_add(t as u64)) }
    }
}

/// The noise of one token.
#[derive(Clone, Copy)]
pub(super) struct TokenNoise {
    epsilon: f64,
    key: u64,
}

impl TokenNoise {
    /// Factor of the logit of `expert`.
    pub(super) fn factor(self, expert: usize) -> f64 {
        let r = (absorb(self.key, expert as u64) >> 40) as f64 / (1u64 << 24) as f64;
        1.0 + self.epsilon * (2.0 * r - 1.0)
    }
}

/// Key that all tokens of a call have in common.
pub(crate) fn key(jitter: Jitter) -> u64 {
    [jitter.seed, jitter.step, u64::from(jitter.layer)].into_iter().fold(0, absorb)
}

fn absorb(h: u64, word: u64) -> u64 {
    mix((h ^ word).wrapping_add(GAMMA))
}
