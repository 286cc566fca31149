//! Mixtral: plain attention, perhaps with a sliding window.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::params::Loader;
use crate::self_attention::{Biases, SelfAttention};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    sliding_window: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let window = file.span("sliding_window", config.sliding_window)?;
    let rotary = config.base.rotary(&file, heads.dim, 1e6)?;
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, _| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, Biases::NONE)?;
        Ok(Box::new(SelfAttention { window, ..attention }))
    })
}
