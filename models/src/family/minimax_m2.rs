//! MiniMax-M2: queries and keys are normalized over all heads at once; a part of each head is rotated.

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
    /// Rotated entries of a head, in published configurations.
    #[serde(default)]
    rotary_dim: Option<usize>,
    #[serde(default)]
    use_qk_norm: Option<bool>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (mut config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    if let (None, Some(rotated)) = (config.base.partial_rotary_factor, config.rotary_dim) {
        config.base.partial_rotary_factor = Some(rotated as f64 / heads.dim as f64);
    }
    let normalized = config.use_qk_norm.unwrap_or(true);
    let rotary = config.base.rotary(&file, heads.dim, 5e6)?;
    let norm = NormSpec::rms(config.base.rms_norm_eps);
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load(p, &prefix, heads, Biases::NONE)?;
        if !normalized {
            return Ok(Box::new(attention));
        }
        let sizes = [heads.queries * heads.dim, heads.keys * heads.dim];
        let (q, k) = qk_norms(p, &prefix, ["q_norm", "k_norm"], sizes, norm)?;
        Ok(Box::new(SelfAttention { norm: QkNorm::Whole { q, k }, ..attention }))
    })
}
