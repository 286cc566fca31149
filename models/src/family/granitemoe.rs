//! Granite-MoE, with or without a shared expert: factors of the embedding, the scores, the residual branches and the
//! logits.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack, Scales};
use crate::error::Result;
use crate::params::Loader;
use crate::self_attention::{Biases, SelfAttention};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    embedding_multiplier: Option<f64>,
    /// Factor of the scores, in the place of 1 / √D.
    #[serde(default)]
    attention_multiplier: Option<f64>,
    #[serde(default)]
    residual_multiplier: Option<f64>,
    /// A divisor.
    #[serde(default)]
    logits_scaling: Option<f64>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let factor = |field: &'static str, value: Option<f64>| file.positive(field, value.unwrap_or(1.0));
    let scales = Scales {
        embedding: factor("embedding_multiplier", config.embedding_multiplier)?,
        residual: factor("residual_multiplier", config.residual_multiplier)?,
        logits: 1.0 / factor("logits_scaling", config.logits_scaling)?,
    };
    let scale = factor("attention_multiplier", config.attention_multiplier)?;
    let biases = Biases::all(config.attention_bias.unwrap_or(false));
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    DecoderSpec { scales, ..DecoderSpec::of(&config.base) }.load(p, rotary, |p, prefix, _| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, biases)?;
        Ok(Box::new(SelfAttention { scale, ..attention }))
    })
}
