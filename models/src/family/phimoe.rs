//! PhiMoE: layer norms with biases, biases in attention and in the output projection, a rotation of its own.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::norm::{NormKind, NormSpec};
use crate::params::Loader;
use crate::rotary::Rotary;
use crate::self_attention::{Biases, SelfAttention};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    lm_head_bias: Option<bool>,
    #[serde(default)]
    sliding_window: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let window = file.span("sliding_window", config.sliding_window)?;
    let biases = Biases::all(config.attention_bias.unwrap_or(false));
    let rotary = Rotary::phimoe(&file, config.base.rotary_config(&file, heads.dim, 1e6)?)?;
    let frame = DecoderSpec::of(&config.base);
    let norm = NormSpec { kind: NormKind::Layer { bias: true }, eps: config.base.rms_norm_eps };
    let frame = DecoderSpec { norm, head_bias: config.lm_head_bias.unwrap_or(false), ..frame };
    frame.load(p, rotary, |p, prefix, _| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, biases)?;
        Ok(Box::new(SelfAttention { window, ..attention }))
    })
}
