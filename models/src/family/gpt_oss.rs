//! gpt-oss: sinks in the softmax, a sliding window on every other layer, biases on all projections.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::params::Loader;
use crate::rotary::RopeParameters;
use crate::self_attention::{Biases, SelfAttention};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    sliding_window: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (mut config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let scaling = config.base.rope_scaling.as_ref().filter(|scaling| **scaling != RopeParameters::default());
    if config.base.rope_parameters.is_none() && scaling.is_none() {
        config.base.rope_parameters = Some(RopeParameters {
            rope_type: Some("yarn".into()),
            factor: Some(32.0),
            original_max_position_embeddings: Some(4096),
            truncate: Some(false),
            ..RopeParameters::default()
        });
    }
    let heads = config.base.heads(&file)?;
    let window = file.span("sliding_window", config.sliding_window)?;
    let kinds = config.base.layer_types.as_deref();
    let kinds = file.layer_types(kinds, config.base.num_hidden_layers, ["full_attention", "sliding_attention"])?;
    // Even layers slide where it does not say.
    let slides = |layer: usize| match kinds {
        Some(kinds) => kinds[layer] == "sliding_attention",
        None => layer.is_multiple_of(2),
    };
    let biases = Biases::all(config.attention_bias.unwrap_or(true));
    let rotary = config.base.rotary(&file, heads.dim, 1.5e5)?;
    DecoderSpec::of(&config.base).load(p, rotary, |p, prefix, layer| {
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load(p, &prefix, heads, biases)?;
        let sinks = Some(p.get(&format!("{prefix}.sinks"), &[heads.queries])?);
        Ok(Box::new(SelfAttention { window: window.filter(|_| slides(layer)), sinks, ..attention }))
    })
}
