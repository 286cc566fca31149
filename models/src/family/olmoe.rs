//! OLMoE: queries and keys are normalized over all heads at once; queries, keys and values may be bounded.

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
    clip_qkv: Option<f64>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let clip = config.clip_qkv.map(|bound| file.positive("clip_qkv", bound)).transpose()?;
    let biases = Biases::all(config.attention_bias.unwrap_or(false));
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    let norm = NormSpec::rms(config.base.rms_norm_eps);
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load(p, &prefix, heads, biases)?;
        let sizes = [heads.queries * heads.dim, heads.keys * heads.dim];
        let (q, k) = qk_norms(p, &prefix, ["q_norm", "k_norm"], sizes, norm)?;
        Ok(Box::new(SelfAttention { norm: QkNorm::Whole { q, k }, clip, ..attention }))
    })
}
