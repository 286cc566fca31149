//! Ernie 4.5: interleaved rotation, biases everywhere but in routed experts or nowhere, dense layers before those with
//! experts.

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
    use_bias: Option<bool>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let bias = config.use_bias.unwrap_or(false);
    let rotary = config.base.rotary(&file, heads.dim, 5e5)?.interleaved();
    let tied = config.base.tie_word_embeddings.unwrap_or(true);
    let frame = DecoderSpec { tied, head_bias: bias, dense_bias: bias, ..DecoderSpec::of(&config.base) };
    frame.load(p, rotary, |p, prefix, _| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, Biases::all(bias))?;
        Ok(Box::new(attention))
    })
}
