//! Qwen3-Next and, with other names of some projections, Qwen3.5-MoE's text model: three layers with the gated delta
//! rule to one with attention, whose sums are gated; norms multiply with 1 + w.

use serde::Deserialize;

use crate::config::{Base, ConfigFile};
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::gated_delta::{DeltaSizes, GatedDelta};
use crate::norm::{NormKind, NormSpec};
use crate::params::Loader;
use crate::self_attention::{Biases, QkNorm, SelfAttention, qk_norms};

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    /// Every so many layers one has attention, where `layer_types` does not say.
    #[serde(default)]
    full_attention_interval: Option<usize>,
    linear_conv_kernel_dim: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
}

impl Config {
    fn delta(&self, file: &ConfigFile) -> Result<DeltaSizes> {
        let sizes = DeltaSizes {
            hidden: self.base.hidden_size,
            key_heads: file.size("linear_num_key_heads", self.linear_num_key_heads)?,
            value_heads: file.size("linear_num_value_heads", self.linear_num_value_heads)?,
            key_dim: file.size("linear_key_head_dim", self.linear_key_head_dim)?,
            value_dim: file.size("linear_value_head_dim", self.linear_value_head_dim)?,
            kernel: file.size("linear_conv_kernel_dim", self.linear_conv_kernel_dim)?,
        };
        if !sizes.value_heads.is_multiple_of(sizes.key_heads) {
            return file.refuse("linear_num_value_heads", "a multiple of linear_num_key_heads", sizes.value_heads);
        }
        for dim in [sizes.key_dim, sizes.value_dim] {
            file.size("linear_num_value_heads times a head's size", sizes.value_heads.saturating_mul(dim))?;
        }
        Ok(sizes)
    }
}

/// Qwen3-Next.
pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    load_with(p, true)
}

/// Qwen3.5-MoE.
pub(super) fn load_qwen3_5(p: &mut Loader<'_>) -> Result<DecoderStack> {
    load_with(p, false)
}

/// `by_head`: the recurrent layers' projections lie key head by key head.
fn load_with(p: &mut Loader<'_>, by_head: bool) -> Result<DecoderStack> {
    let (mut config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    config.base.partial_rotary_factor.get_or_insert(0.25);
    let (heads, delta) = (config.base.heads(&file)?, config.delta(&file)?);
    let interval = file.size("full_attention_interval", config.full_attention_interval.unwrap_or(4))?;
    let kinds = config.base.layer_types.as_deref();
    let kinds = file.layer_types(kinds, config.base.num_hidden_layers, ["full_attention", "linear_attention"])?;
    let recurrent = |layer: usize| match kinds {
        Some(kinds) => kinds[layer] == "linear_attention",
        None => !(layer + 1).is_multiple_of(interval),
    };
    let biases = Biases::all(config.attention_bias.unwrap_or(false));
    let eps = config.base.rms_norm_eps;
    let norm = NormSpec { kind: NormKind::RmsPlusOne, eps };
    let rotary = config.base.rotary(&file, heads.dim, 1e4)?;
    DecoderSpec { norm, ..DecoderSpec::of(&config.base) }.load(p, rotary, |p, prefix, layer| {
        if recurrent(layer) {
            return Ok(Box::new(GatedDelta::load(p, &format!("{prefix}linear_attn"), delta, eps, by_head)?));
        }
        let prefix = format!("{prefix}self_attn");
        let attention = SelfAttention::load_gated(p, &prefix, heads, biases, true)?;
        let (q, k) = qk_norms(p, &prefix, ["q_norm", "k_norm"], [heads.dim; 2], norm)?;
        Ok(Box::new(SelfAttention { norm: QkNorm::Head { q, k }, ..attention }))
    })
}
