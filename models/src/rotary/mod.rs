//! Rotary position embedding: frequencies with every scaling that published configurations name, whole heads or their
//! first entries, halves or interleaved pairs.

mod parameters;
mod scaling;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result as CandleResult, Tensor};

use crate::config::ConfigFile;
use crate::error::Result;
use crate::ops::{rotate, wide};

pub(crate) use parameters::RopeParameters;
use scaling::{Frequencies, LlamaBands, Scaling, llama3, long, powers, yarn, yarn_growth};

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
