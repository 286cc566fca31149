//! GLM-4-MoE: half of each head is rotated; queries and keys are normalized head by head where the configuration says
//! so; dense layers before those with experts.

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
    use_qk_norm: Option<bool>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (mut config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    config.base.partial_rotary_factor.get_or_insert(0.5);
    let heads = config.base.heads(&file)?;
    let biases = Biases { qkv: config.attention_bias.unwrap_or(false), output: false };
    let normalized = config.use_qk_norm.unwrap_or(false);
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    let norm = NormSpec::rms(config.base.rms_norm_eps);
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load(p, &prefix, heads, biases)?;
        if !normalized {
            return Ok(Box::new(attention));
        }
        let (q, k) = qk_norms(p, &prefix, ["q_norm", "k_norm"], [heads.dim; 2], norm)?;
        Ok(Box::new(SelfAttention { norm: QkNorm::Head { q, k }, ..attention }))
    })
}
