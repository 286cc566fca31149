//! Qwen2-MoE: biases on queries, keys and values; sliding windows on some layers where the configuration says so; dense
//! layers between those with experts.

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
    qkv_bias: Option<bool>,
    #[serde(default)]
    use_sliding_window: Option<bool>,
    #[serde(default)]
    sliding_window: Option<usize>,
    /// Of layers below it every other one has the window, where `layer_types` does not say.
    #[serde(default)]
    max_window_layers: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let slides = config.use_sliding_window.unwrap_or(false);
    let window = file.span("sliding_window", config.sliding_window.filter(|_| slides))?;
    let kinds = config.base.layer_types.as_deref();
    let kinds = file.layer_types(kinds, config.base.num_hidden_layers, ["full_attention", "sliding_attention"])?;
    let below = config.max_window_layers.unwrap_or(28);
    let windowed = |layer: usize| match kinds {
        Some(kinds) => kinds[layer] == "sliding_attention",
        None => layer < below && layer.is_multiple_of(2),
    };
    let biases = Biases { qkv: config.qkv_bias.unwrap_or(true), output: false };
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, layer| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, biases)?;
        Ok(Box::new(SelfAttention { window: window.filter(|_| windowed(layer)), ..attention }))
    })
}
