//! Qwen3-MoE: queries and keys are normalized head by head.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::norm::NormSpec;
use crate::params::Loader;
use crate::self_attention::{Biases, QkNorm, SelfAttention, qk_norms};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    use_sliding_window: Option<bool>,
    #[serde(default)]
    sliding_window: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let slides = config.use_sliding_window.unwrap_or(false);
    let window = file.span("sliding_window", config.sliding_window.filter(|_| slides))?;
    let biases = Biases::all(config.attention_bias.unwrap_or(false));
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    let norm = NormSpec::rms(config.base.rms_norm_eps);
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load(p, &prefix, heads, biases)?;
        let (q, k) = qk_norms(p, &prefix, ["q_norm", "k_norm"], [heads.dim; 2], norm)?;
        Ok(Box::new(SelfAttention { norm: QkNorm::Head { q, k }, window, ..attention }))
    })
}
