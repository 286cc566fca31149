//! The part of `config.json` that concerns the decoder around the experts; the experts' own part is
//! [`moebius::checkpoint::Checkpoint::block_config`].

use moebius::checkpoint::Checkpoint;

use serde::Deserialize;

use crate::error::{Error, Result};

/// Sizes and constants of a Qwen3-MoE decoder, from its `config.json`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Config {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Inner size of the dense layers.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; a divisor of the query heads.
    pub num_key_value_heads: usize,
    /// Size of a head; where absent, H / query heads.
    #[serde(default)]
    head_dim: Option<usize>,
    /// The four projections of attention have biases.
    #[serde(default)]
    pub attention_bias: bool,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// ε of the RMS norms.
    pub rms_norm_eps: f64,
    /// The output projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(default)]
    rope_theta: Option<f64>,
    /// transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`.
    #[serde(default, alias = "rope_scaling")]
    rope_parameters: Option<Rope>,
    hidden_act: String,
    #[serde(default)]
    use_sliding_window: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Rope {
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default, alias = "type")]
    rope_type: Option<String>,
}

/// Bound on every size, far above published models, so that products of two of them cannot overflow.
const MAX_SIZE: usize = 1 << 28;

impl Config {
    /// Of a checkpoint: what its `config.json` said when it was opened.
    ///
    /// # Errors
    /// [`Error::Config`], naming the field.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let path = checkpoint.dir().join("config.json").display().to_string();
        let config: Self = Deserialize::deserialize(checkpoint.config()).map_err(|e| Error::Config {
            path: path.clone(),
            field: "(file)",
            expected: "a Qwen3-MoE config".into(),
            found: e.to_string(),
        })?;
        config.check(&path)?;
        Ok(config)
    }

    /// Size of a head D.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Base of the rotary frequencies.
    pub fn rope_theta(&self) -> f64 {
        let nested = self.rope_parameters.as_ref().and_then(|r| r.rope_theta);
        nested.or(self.rope_theta).unwrap_or(10_000.0)
    }

    fn check(&self, path: &str) -> Result<()> {
        let fail = |field, expected: &str, found: String| {
            Err(Error::Config { path: path.into(), field, expected: expected.into(), found })
        };
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.head_dim()),
        ] {
            if size == 0 || size > MAX_SIZE {
                return fail(field, "1..=2^28", size.to_string());
            }
        }
        if !self.head_dim().is_multiple_of(2) {
            return fail("head_dim", "an even number", self.head_dim().to_string());
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return fail(
                "num_key_value_heads",
                "a divisor of num_attention_heads",
                self.num_key_value_heads.to_string(),
            );
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return fail("rms_norm_eps", "a finite number >= 0", self.rms_norm_eps.to_string());
        }
        let theta = self.rope_theta();
        if !(theta.is_finite() && theta > 0.0) {
            return fail("rope_theta", "a finite number > 0", theta.to_string());
        }
        let kind = self.rope_parameters.as_ref().and_then(|r| r.rope_type.as_deref()).unwrap_or("default");
        if kind != "default" {
            return fail("rope_parameters.rope_type", "\"default\"", format!("{kind:?}"));
        }
        if self.hidden_act != "silu" {
            return fail("hidden_act", "\"silu\"", format!("{:?}", self.hidden_act));
        }
        if self.use_sliding_window {
            return fail("use_sliding_window", "false", "true".into());
        }
        Ok(())
    }
}
