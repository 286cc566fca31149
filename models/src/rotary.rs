//! Rotary position embedding: frequencies with every scaling that published configurations name, whole heads or their
//! first entries, halves or interleaved pairs.

use std::f64::consts::TAU;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use serde::Deserialize;

use crate::config::ConfigFile;
use crate::error::Result;
use crate::ops::{rotate, wide};

/// `rope_parameters`, or `rope_scaling`, as it stands in `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(crate) struct RopeParameters {
    pub rope_theta: Option<f64>,
    pub rope_type: Option<String>,
    /// The `rope_type` of older versions.
    #[serde(rename = "type")]
    pub old_type: Option<String>,
    pub partial_rotary_factor: Option<f64>,
    pub factor: Option<f64>,
    pub original_max_position_embeddings: Option<usize>,
    /// Hunyuan's.
    pub alpha: Option<f64>,
    pub attention_factor: Option<f64>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: Option<bool>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub short_factor: Option<Vec<f64>>,
    pub long_factor: Option<Vec<f64>>,
    /// PhiMoE's alone, in the place of `attention_factor`.
    pub short_mscale: Option<f64>,
    pub long_mscale: Option<f64>,
}

impl RopeParameters {
    fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.old_type.as_deref()).unwrap_or("default")
    }
}

/// The sizes and parameters of a rotary embedding.
#[derive(Debug)]
pub(crate) struct RotaryConfig {
    pub parameters: RopeParameters,
    /// Rotated entries of a head, an even number.
    pub dim: usize,
    pub theta: f64,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// `original_max_position_embeddings`, wherever it stands.
    pub original: Option<usize>,
}

/// Inverse frequencies, and the factor of cosines and sines.
#[derive(Debug, Clone, PartialEq)]
struct Frequencies {
    inverse: Vec<f32>,
    scale: f64,
}

/// How frequencies depend on the length of the sequence.
#[derive(Debug, Clone)]
enum Scaling {
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

/// Rotary embedding of one model.
#[derive(Debug, Clone)]
pub(crate) struct Rotary {
    scaling: Scaling,
    dim: usize,
    /// Pairs are entries 2i and 2i + 1 rather than i and dim/2 + i.
    interleaved: bool,
    /// Longest sequence.
    context: usize,
    /// Yarn's factor of the softmax scale in DeepSeek's models.
    softmax_factor: f64,
}

/// Cosines and sines of a range of positions, `[S, dim/2]`.
#[derive(Debug, Clone)]
pub(crate) struct Angles {
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
}

/// `0.1 · m · ln(scale) + 1`, yarn's growth of attention; 1 where nothing is stretched.
fn yarn_growth(scale: f64, m: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 }
}

/// `theta^(-2i/dim)` for i in `0..dim/2`, each divided by `divisor(i)`.
fn powers(theta: f64, dim: usize, divisor: impl Fn(usize) -> f64) -> Vec<f32> {
    (0..dim / 2).map(|i| (theta.powf(-((2 * i) as f64) / dim as f64) / divisor(i)) as f32).collect()
}

impl Rotary {
    pub fn new(file: &ConfigFile, config: RotaryConfig) -> Result<Self> {
        let RotaryConfig { ref parameters, dim, theta, max_positions, original } = config;
        let r = parameters;
        let kind = r.kind();
        let known = "default, linear, dynamic, yarn, llama3 or longrope";
        let need = |field: &'static str, value: Option<f64>| match value {
            Some(value) => file.positive(field, value),
            None => file.refuse(field, "a number", "nothing"),
        };
        let numbers = [
            ("rope_parameters.attention_factor", r.attention_factor),
            ("rope_parameters.short_mscale", r.short_mscale),
            ("rope_parameters.long_mscale", r.long_mscale),
            ("rope_parameters.beta_fast", r.beta_fast.filter(|n| *n != 0.0)),
            ("rope_parameters.beta_slow", r.beta_slow.filter(|n| *n != 0.0)),
            ("rope_parameters.factor", r.factor),
        ];
        for (field, number) in numbers {
            number.map(|number| file.positive(field, number)).transpose()?;
        }
        for (field, number) in
            [("rope_parameters.mscale", r.mscale), ("rope_parameters.mscale_all_dim", r.mscale_all_dim)]
        {
            if number.is_some_and(|number| !number.is_finite()) {
                return file.refuse(field, "a finite number", "another");
            }
        }
        let factor = || need("rope_parameters.factor", r.factor);
        let first = file.size("original_max_position_embeddings", original.unwrap_or(max_positions))?;
        let plain = |inverse| Scaling::Fixed(Frequencies { inverse, scale: 1.0 });
        // Configurations whose sequences may be longer than `max_position_embeddings` say so by a factor.
        let stretched = |factor: f64| max_positions.max((first as f64 * factor).min((1u64 << 28) as f64) as usize);
        // DeepSeek's models take it with any scaling that has a factor.
        let all_dim = r.mscale_all_dim.filter(|m| *m != 0.0);
        let grown = |factor: f64| all_dim.map_or(1.0, |m| yarn_growth(factor, m).powi(2));
        let plain_type = matches!(kind, "default" | "mrope");
        let mut softmax_factor = r.factor.filter(|_| !plain_type).map_or(1.0, grown);
        let mut context = max_positions;
        let scaling = match kind {
            "default" | "mrope" => plain(powers(theta, dim, |_| 1.0)),
            "linear" => {
                let factor = factor()?;
                context = stretched(factor);
                plain(powers(theta, dim, |_| factor))
            }
            "dynamic" if dim <= 2 => return file.refuse("head_dim", "more than 2 rotated entries", dim),
            "dynamic" => match r.alpha {
                Some(alpha) => {
                    let alpha = file.positive("rope_parameters.alpha", alpha)?;
                    let theta = theta * alpha.powf(dim as f64 / (dim as f64 - 2.0));
                    plain(powers(theta, dim, |_| 1.0))
                }
                None => {
                    let factor = factor()?;
                    context = stretched(factor);
                    Scaling::Dynamic { theta, factor, original: max_positions }
                }
            },
            "yarn" if theta <= 1.0 => return file.refuse("rope_theta", "more than 1 with yarn", theta),
            "longrope" | "su" if first < 2 => {
                return file.refuse("original_max_position_embeddings", "more than 1 with longrope", first);
            }
            "yarn" => {
                let factor = match r.factor {
                    Some(_) => factor()?,
                    None => max_positions as f64 / first as f64,
                };
                context = stretched(factor);
                softmax_factor = grown(factor);
                Scaling::Fixed(yarn(&config, factor, first))
            }
            "llama3" => {
                let (low, high) = (
                    need("rope_parameters.low_freq_factor", r.low_freq_factor)?,
                    need("rope_parameters.high_freq_factor", r.high_freq_factor)?,
                );
                if high < low {
                    return file.refuse("rope_parameters.high_freq_factor", "low_freq_factor or more", high);
                }
                let factor = factor()?;
                plain(llama3(powers(theta, dim, |_| 1.0), LlamaBands { low, high, factor, original: first }))
            }
            "longrope" | "su" => long(file, &config, first)?,
            other => return file.refuse("rope_parameters.rope_type", known, format!("{other:?}")),
        };
        Ok(Self { scaling, dim, interleaved: false, context, softmax_factor })
    }

    /// PhiMoE's, as transformers has it: with a scaling of any kind, frequencies are those of short sequences at every
    /// length, and the factor of cosines and sines is `short_mscale`, beyond the original length `long_mscale`.
    pub fn phimoe(file: &ConfigFile, config: RotaryConfig) -> Result<Self> {
        let r = &config.parameters;
        let plain_type = matches!(r.kind(), "default" | "mrope");
        let (factors, original) = ([r.short_mscale, r.long_mscale], config.original.unwrap_or(config.max_positions));
        let rotary = Self::new(file, config)?;
        if plain_type {
            return Ok(rotary);
        }
        let kept = rotary.frequencies(1);
        let [short, long] =
            factors.map(|factor| Frequencies { inverse: kept.inverse.clone(), scale: factor.unwrap_or(kept.scale) });
        let scaling = if short == long { Scaling::Fixed(short) } else { Scaling::Long { short, long, original } };
        Ok(Self { scaling, ..rotary })
    }

    /// With pairs of neighbors.
    pub fn interleaved(self) -> Self {
        Self { interleaved: true, ..self }
    }

    /// Longest sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Yarn's factor of the softmax scale in DeepSeek's models; 1 without `mscale_all_dim`.
    pub fn softmax_factor(&self) -> f64 {
        self.softmax_factor
    }

    /// Whether the angles of a position depend on the sequence's length, so that a cache must hold keys as they were
    /// before the rotation.
    pub fn depends_on_length(&self) -> bool {
        !matches!(self.scaling, Scaling::Fixed(_))
    }

    /// Frequencies in a sequence of `len` positions.
    fn frequencies(&self, len: usize) -> Frequencies {
        match &self.scaling {
            Scaling::Fixed(f) => f.clone(),
            Scaling::Dynamic { theta, factor, original } => {
                let grown = factor * len.max(*original) as f64 / *original as f64 - (factor - 1.0);
                let theta = theta * grown.powf(self.dim as f64 / (self.dim as f64 - 2.0));
                Frequencies { inverse: powers(theta, self.dim, |_| 1.0), scale: 1.0 }
            }
            Scaling::Long { short, long, original } => if len > *original { long } else { short }.clone(),
        }
    }

    /// Angles of the positions `range` of a sequence that ends with them. They are made for each forward: their cost is
    /// that of one row of one head, and no table need be as long as the longest sequence.
    pub fn angles(&self, range: std::ops::Range<usize>, dtype: DType, device: &Device) -> CandleResult<Angles> {
        let Frequencies { inverse, scale } = self.frequencies(range.end);
        let positions: Vec<f32> = range.map(|p| p as f32).collect();
        let positions = Tensor::from_vec(positions, ((), 1), device)?;
        let angles = positions.matmul(&Tensor::new(inverse, device)?.unsqueeze(0)?)?;
        // Interleaved pairs are rotated in f32, as the references do.
        let dtype = if self.interleaved { wide(dtype) } else { dtype };
        let finish = |t: Tensor| if scale == 1.0 { t.to_dtype(dtype) } else { (t * scale)?.to_dtype(dtype) };
        Ok(Angles { cos: finish(angles.cos()?)?, sin: finish(angles.sin()?)?, interleaved: self.interleaved })
    }
}

fn yarn(config: &RotaryConfig, factor: f64, original: usize) -> Frequencies {
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
struct LlamaBands {
    low: f64,
    high: f64,
    factor: f64,
    original: usize,
}

fn llama3(inverse: Vec<f32>, bands: LlamaBands) -> Vec<f32> {
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

fn long(file: &ConfigFile, config: &RotaryConfig, original: usize) -> Result<Scaling> {
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

impl Angles {
    /// Rotates the first entries of `[B, heads, S, D]`.
    pub fn apply(&self, x: &Tensor) -> CandleResult<Tensor> {
        let (dim, d) = (self.cos.dim(1)? * 2, x.dim(3)?);
        if dim < d {
            let rotated = self.apply(&x.narrow(3, 0, dim)?)?;
            return Tensor::cat(&[rotated, x.narrow(3, dim, d - dim)?], 3);
        }
        let dtype = x.dtype();
        let x = x.contiguous()?.to_dtype(self.cos.dtype())?;
        rotate(&x, [&self.cos, &self.sin], self.interleaved)?.to_dtype(dtype)
    }

    /// Cosines and sines of pairs of entries i and dim/2 + i; `None` of neighbors.
    pub fn halves(&self) -> Option<(&Tensor, &Tensor)> {
        (!self.interleaved).then_some((&self.cos, &self.sin))
    }

    /// Those of one position, U32 `[1]` on the device, counted from the first.
    pub fn at(&self, position: &Tensor) -> CandleResult<Self> {
        let of = |t: &Tensor| t.index_select(position, 0);
        Ok(Self { cos: of(&self.cos)?, sin: of(&self.sin)?, interleaved: self.interleaved })
    }

    /// The last `len` positions.
    pub fn last(&self, len: usize) -> CandleResult<Self> {
        let of = |t: &Tensor| t.narrow(0, t.dim(0)? - len, len)?.contiguous();
        Ok(Self { cos: of(&self.cos)?, sin: of(&self.sin)?, interleaved: self.interleaved })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::Error;
    use crate::testing::{difference, random};

    const DIM: usize = 8;
    const THETA: f64 = 100.0;

    fn rotary(parameters: serde_json::Value) -> Result<Rotary> {
        let parameters: RopeParameters = serde_json::from_value(parameters).expect("parameters");
        let original = parameters.original_max_position_embeddings;
        let config = RotaryConfig { parameters, dim: DIM, theta: THETA, max_positions: 64, original };
        Rotary::new(&ConfigFile("config.json".into()), config)
    }

    fn inverse(parameters: serde_json::Value, len: usize) -> Vec<f64> {
        let frequencies = rotary(parameters).expect("a rotary embedding").frequencies(len);
        frequencies.inverse.into_iter().map(f64::from).collect()
    }

    #[track_caller]
    fn near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-6, "{found}, expected {expected}");
        }
    }

    /// `100^(-2i/8)`.
    fn plain() -> [f64; 4] {
        [0, 1, 2, 3].map(|i| 10f64.powf(-0.5 * f64::from(i)))
    }

    #[test]
    fn frequencies_are_the_closed_forms() {
        near(&inverse(json!({}), 1), &plain());
        near(&inverse(json!({"type": "linear", "factor": 4.0}), 1), &plain().map(|f| f / 4.0));
        // Without a band between, a pair is either kept or divided: turns over 64 positions are 10.2, 3.2, 1.02, 0.32.
        let step = json!({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0,
            "original_max_position_embeddings": 64});
        near(&inverse(step, 1), &[plain()[0], plain()[1], plain()[2] / 4.0, plain()[3] / 4.0]);
        // Below the original length nothing changes; at twice of it theta grows by (2·2 − 1)^(8/6).
        let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
        near(&inverse(dynamic.clone(), 64), &plain());
        let grown = THETA * 3f64.powf(8.0 / 6.0);
        near(&inverse(dynamic, 128), &[0, 1, 2, 3].map(|i| grown.powf(-f64::from(i) / 4.0)));
        let alpha = json!({"rope_type": "dynamic", "alpha": 5.0, "factor": 1.0});
        let grown = THETA * 5f64.powf(8.0 / 6.0);
        near(&inverse(alpha, 128), &[0, 1, 2, 3].map(|i| grown.powf(-f64::from(i) / 4.0)));
        let long = json!({"rope_type": "longrope", "original_max_position_embeddings": 32,
            "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 2.0, 2.0, 2.0]});
        near(&inverse(long.clone(), 32), &[0, 1, 2, 3].map(|i| plain()[i] / (i + 1) as f64));
        near(&inverse(long.clone(), 33), &plain().map(|f| f / 2.0));
        // √(1 + ln 2 / ln 32) = √1.2.
        let scale = rotary(long).expect("a rotary embedding").frequencies(1).scale;
        assert!((scale - 1.2f64.sqrt()).abs() < 1e-12);
    }

    /// Other factors of cosines and sines beyond the original length, the same frequencies.
    #[test]
    fn phi_changes_the_factor_alone() {
        let phi = |parameters: serde_json::Value| {
            let parameters: RopeParameters = serde_json::from_value(parameters).expect("parameters");
            let original = parameters.original_max_position_embeddings;
            let config = RotaryConfig { parameters, dim: DIM, theta: THETA, max_positions: 64, original };
            Rotary::phimoe(&ConfigFile("config.json".into()), config).expect("a rotary embedding")
        };
        let long = json!({"rope_type": "longrope", "original_max_position_embeddings": 32, "short_mscale": 1.5,
            "long_mscale": 2.5, "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 2.0, 2.0, 2.0]});
        let linear = json!({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32,
            "short_mscale": 1.5, "long_mscale": 2.5});
        for parameters in [long, linear] {
            let rotary = phi(parameters.clone());
            let [short, beyond] = [32, 33].map(|len| rotary.frequencies(len));
            assert_eq!((short.scale, beyond.scale), (1.5, 2.5), "{parameters}");
            assert_eq!(short.inverse, beyond.inverse, "{parameters}");
            assert!(rotary.depends_on_length());
        }
        assert!(!phi(json!({"short_mscale": 1.5, "long_mscale": 2.5})).depends_on_length());
    }

    /// Fast pairs stay, slow ones are divided by the factor, and between them frequencies fall.
    #[test]
    fn bands_end_where_they_should() {
        for parameters in [
            json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
                "beta_slow": 0.5}),
            json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
                "low_freq_factor": 0.5, "high_freq_factor": 4.0}),
        ] {
            let found = inverse(parameters, 1);
            // Turns over 64 positions: 10.2, 3.2, 1.02, 0.32.
            near(&[found[0], found[3]], &[plain()[0], plain()[3] / 8.0]);
            for i in [1, 2] {
                assert!(found[i] > plain()[i] / 8.0 && found[i] <= plain()[i], "{found:?}");
            }
        }
        let llama = json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
            "low_freq_factor": 0.5, "high_freq_factor": 4.0});
        let kept = (64.0 * plain()[1] / TAU - 0.5) / 3.5;
        near(&inverse(llama, 1)[1..2], &[plain()[1] * (kept + (1.0 - kept) / 8.0)]);
    }

    #[test]
    fn contexts_are_as_long_as_the_scaling_says() {
        let context = |parameters| rotary(parameters).expect("a rotary embedding").context();
        assert_eq!(context(json!({})), 64);
        assert_eq!(context(json!({"rope_type": "linear", "factor": 4.0})), 256);
        assert_eq!(context(json!({"rope_type": "dynamic", "factor": 2.0})), 128);
        // The configuration's own length has the factor in it.
        assert_eq!(context(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})), 64);
    }

    #[test]
    fn what_is_missing_is_named() {
        for (parameters, field) in [
            (json!({"rope_type": "linear"}), "rope_parameters.factor"),
            (json!({"rope_type": "linear", "factor": 0.0}), "rope_parameters.factor"),
            (json!({"rope_type": "llama3", "factor": 8.0}), "rope_parameters.low_freq_factor"),
            (json!({"rope_type": "longrope", "short_factor": [1.0]}), "rope_parameters.short_factor"),
            (json!({"rope_type": "spiral"}), "rope_parameters.rope_type"),
        ] {
            let error = rotary(parameters).expect_err("a refusal");
            assert!(matches!(error, Error::Config { field: found, .. } if found == field), "{error:?}");
        }
    }

    /// Interleaved pairs are halves of permuted entries, and entries beyond the rotated ones stay.
    #[test]
    fn pairs_of_neighbors_are_halves_in_another_order() {
        let rotary = rotary(json!({})).expect("a rotary embedding");
        let angles = |rotary: &Rotary| rotary.angles(5..8, DType::F64, &Device::Cpu).expect("angles");
        let x = random(1, &[2, 3, 3, DIM + 4]);
        let y = angles(&rotary.clone().interleaved()).apply(&x).expect("a rotation");
        let order: Vec<u32> = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11].to_vec();
        let order = Tensor::new(order, &Device::Cpu).expect("an order");
        let permuted = |t: &Tensor| t.contiguous().and_then(|t| t.index_select(&order, 3)).expect("a permutation");
        let halves = angles(&rotary).apply(&permuted(&x)).expect("a rotation");
        assert!(difference(&permuted(&y), &halves) < 1e-15);
        let (rest, same) = (y.narrow(3, DIM, 4).expect("rest"), x.narrow(3, DIM, 4).expect("rest"));
        assert!(difference(&rest, &same) == 0.0 && difference(&y, &x) > 0.1);
    }
}
