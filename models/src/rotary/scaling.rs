//! Frequencies of the scalings that published configurations name.

use std::f64::consts::TAU;

use crate::config::ConfigFile;
use crate::error::Result;

use super::RotaryConfig;

/// Inverse frequencies, and the factor of cosines and sines.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Frequencies {
    pub(super) inverse: Vec<f32>,
    pub(super) scale: f64,
}

/// How frequencies depend on the length of the sequence.
#[derive(Debug, Clone)]
pub(super) enum Scaling {
    Fixed(Frequencies),
    /// NTK scaling: beyond `original` positions theta grows with the length.
    Dynamic {
        theta: f64,
        factor: f64,
        original: usize,
    },
    /// Other frequencies beyond `original` positions.
    Long {
        short: Frequencies,
        long: Frequencies,
        original: usize,
    },
}

/// `0.1 · m · ln(scale) + 1`, yarn's growth of attention; 1 where nothing is stretched.
pub(super) fn yarn_growth(scale: f64, m: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 }
}

/// `theta^(-2i/dim)` for i in `0..dim/2`, each divided by `divisor(i)`.
pub(super) fn powers(theta: f64, dim: usize, divisor: impl Fn(usize) -> f64) -> Vec<f32> {
    (0..dim / 2).map(|i| (theta.powf(-((2 * i) as f64) / dim as f64) / divisor(i)) as f32).collect()
}

pub(super) fn yarn(config: &RotaryConfig, factor: f64, original: usize) -> Frequencies {
    let (r, dim, theta) = (&config.parameters, config.dim, config.theta);
    let set = |m: Option<f64>| m.filter(|m| *m != 0.0);
    let scale = r.attention_factor.unwrap_or(match (set(r.mscale), set(r.mscale_all_dim)) {
        (Some(m), Some(all)) => yarn_growth(factor, m) / yarn_growth(factor, all),
        _ => yarn_growth(factor, 1.0),
    });
    // The pair whose frequency turns this often over the original length.
    let pair = |turns: f64| dim as f64 * (original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair(set(r.beta_fast).unwrap_or(32.0)), pair(set(r.beta_slow).unwrap_or(1.0)));
    if r.truncate.unwrap_or(true) {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    // From frequencies as they were (fast pairs) to frequencies divided by the factor (slow pairs).
    let inverse = (0..dim / 2).map(|i| {
        let kept = theta.powf(-((2 * i) as f64) / dim as f64);
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        (kept / factor * ramp + kept * (1.0 - ramp)) as f32
    });
    Frequencies { inverse: inverse.collect(), scale }
}

/// Bands of wavelengths, in parts of the original length.
pub(super) struct LlamaBands {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) factor: f64,
    pub(super) original: usize,
}

pub(super) fn llama3(inverse: Vec<f32>, bands: LlamaBands) -> Vec<f32> {
    let LlamaBands { low, high, factor, original } = bands;
    let scaled = |f: f32| {
        let f = f64::from(f);
        // Turns over the original length: many stay as they are, few are divided by the factor.
        let turns = original as f64 * f / TAU;
        let kept = match high > low {
            true => ((turns - low) / (high - low)).clamp(0.0, 1.0),
            // There is no band between.
            false => f64::from(u8::from(turns >= low)),
        };
        ((1.0 - kept) * f / factor + kept * f) as f32
    };
    inverse.into_iter().map(scaled).collect()
}

pub(super) fn long(file: &ConfigFile, config: &RotaryConfig, original: usize) -> Result<Scaling> {
    let (r, dim) = (&config.parameters, config.dim);
    let factor = r.factor.unwrap_or(config.max_positions as f64 / original as f64);
    let scale = r.attention_factor.unwrap_or(match factor <= 1.0 {
        true => 1.0,
        false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    });
    let of = |field: &'static str, factors: &Option<Vec<f64>>| {
        let factors = factors.as_deref().unwrap_or_default();
        if factors.len() != dim / 2 || !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
            return file.refuse(field, format!("{} numbers > 0", dim / 2), format!("{} numbers", factors.len()));
        }
        let inverse = powers(config.theta, dim, |i| factors[i]);
        Ok(Frequencies { inverse, scale })
    };
    Ok(Scaling::Long {
        short: of("rope_parameters.short_factor", &r.short_factor)?,
        long: of("rope_parameters.long_factor", &r.long_factor)?,
        original,
    })
}
