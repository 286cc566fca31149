//! Llama 4's text model: chunked attention with interleaved rotation on most layers; on the others full attention
//! without rotation, whose queries grow with their position. Dense layers between those with experts.

use serde::Deserialize;

use crate::config::Base;
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::params::Loader;
use crate::self_attention::{Biases, QkNorm, SelfAttention, Temperature};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    /// Inner size of the dense layers; `intermediate_size` is the experts'.
    intermediate_size_mlp: usize,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    use_qk_norm: Option<bool>,
    /// 1 for layers with rotation.
    #[serde(default)]
    no_rope_layers: Option<Vec<usize>>,
    #[serde(default)]
    no_rope_layer_interval: Option<usize>,
    #[serde(default)]
    attention_chunk_size: Option<usize>,
    #[serde(default)]
    attn_temperature_tuning: Option<Switch>,
    #[serde(default)]
    floor_scale: Option<f64>,
    #[serde(default)]
    attn_scale: Option<f64>,
}

/// A flag that some configurations write as a number.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Switch {
    Flag(bool),
    Number(f64),
}

impl Switch {
    fn on(self) -> bool {
        match self {
            Self::Flag(on) => on,
            Self::Number(number) => number != 0.0,
        }
    }
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let dense = Some(file.size("intermediate_size_mlp", config.intermediate_size_mlp)?);
    let layers = config.base.num_hidden_layers;
    let interval = file.size("no_rope_layer_interval", config.no_rope_layer_interval.unwrap_or(4))?;
    let listed = config.no_rope_layers.as_deref().filter(|list| !list.is_empty());
    let listed = listed.map(|list| file.per_layer("no_rope_layers", list, layers)).transpose()?;
    let rotated = |layer: usize| listed.map_or(!(layer + 1).is_multiple_of(interval), |list| list[layer] != 0);
    let kinds = config.base.layer_types.as_deref();
    let kinds = file.layer_types(kinds, layers, ["full_attention", "chunked_attention"])?;
    // Layers with rotation are chunked where it does not say.
    let chunked = |layer: usize| kinds.map_or(rotated(layer), |kinds| kinds[layer] == "chunked_attention");
    let chunk = file.span("attention_chunk_size", config.attention_chunk_size)?;
    let temperature = Temperature {
        floor: file.positive("floor_scale", config.floor_scale.unwrap_or(8192.0))?,
        factor: config.attn_scale.unwrap_or(0.1),
    };
    let tuned = config.attn_temperature_tuning.is_none_or(Switch::on);
    let normalized = config.use_qk_norm.unwrap_or(true);
    let (biases, eps) = (Biases::all(config.attention_bias.unwrap_or(false)), config.base.rms_norm_eps);
    let rotary = config.base.rotary(&file, heads.dim, 5e5)?.interleaved();
    let frame = DecoderSpec::of(&config.base);
    let names = crate::decoder::Names { dense: "feed_forward", ..frame.names };
    DecoderSpec { names, dense, ..frame }.load(p, rotary, |p, prefix, layer| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, biases)?;
        let rotary = rotated(layer);
        Ok(Box::new(SelfAttention {
            rotary,
            norm: if normalized && rotary { QkNorm::RotatedUnit { eps } } else { QkNorm::None },
            chunk: chunk.filter(|_| chunked(layer)),
            temperature: (tuned && !rotary).then_some(temperature),
            ..attention
        }))
    })
}
