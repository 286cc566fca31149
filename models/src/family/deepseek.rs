//! DeepSeek-V2, DeepSeek-V3 and Kimi-K2: latent attention, dense layers before those with experts.

use serde::Deserialize;

use crate::config::{Base, ConfigFile};
use crate::decoder::{DecoderSpec, DecoderStack};
use crate::error::Result;
use crate::latent_attention::{LatentAttention, LatentOptions, LatentSizes};
use crate::params::Loader;
use crate::rotary::RopeParameters;

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(flatten)]
    base: Base,
    #[serde(default)]
    attention_bias: Option<bool>,
    /// Of DeepSeek-V2's dense and shared feed-forward blocks.
    #[serde(default)]
    mlp_bias: Option<bool>,
    #[serde(default)]
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    v_head_dim: usize,
    /// Rotated pairs are neighbors.
    #[serde(default)]
    rope_interleave: Option<bool>,
}

impl Config {
    fn sizes(&self, file: &ConfigFile) -> Result<LatentSizes> {
        let heads = self.base.num_attention_heads;
        let sizes = LatentSizes {
            hidden: self.base.hidden_size,
            heads,
            query_latent: self.q_lora_rank.map(|n| file.size("q_lora_rank", n)).transpose()?,
            latent: file.size("kv_lora_rank", self.kv_lora_rank)?,
            plain: file.size("qk_nope_head_dim", self.qk_nope_head_dim)?,
            rotated: file.size("qk_rope_head_dim", self.qk_rope_head_dim)?,
            value: file.size("v_head_dim", self.v_head_dim)?,
        };
        for entries in [sizes.plain + sizes.rotated, sizes.plain + sizes.value] {
            file.size("num_attention_heads times a head's entries", heads.saturating_mul(entries))?;
        }
        Ok(sizes)
    }
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let sizes = config.sizes(&file)?;
    // The part is that of a whole head's entries elsewhere; here the rotated ones are counted apart.
    let base = Base {
        partial_rotary_factor: None,
        rope_parameters: config.base.rope_parameters.as_ref().map(RopeParameters::without_partial_rotary_factor),
        rope_scaling: config.base.rope_scaling.as_ref().map(RopeParameters::without_partial_rotary_factor),
        ..config.base.clone()
    };
    let rotary = base.rotary(&file, sizes.rotated, 1e4)?;
    let rotary = if config.rope_interleave.unwrap_or(true) { rotary.interleaved() } else { rotary };
    let scale = ((sizes.plain + sizes.rotated) as f64).powf(-0.5) * rotary.softmax_factor();
    // The latents' norms have an epsilon of their own, whatever the configuration's.
    let options = LatentOptions { bias: config.attention_bias.unwrap_or(false), eps: 1e-6, scale };
    let biased = config.mlp_bias.unwrap_or(false) && p.checkpoint().family() == "deepseek_v2";
    DecoderSpec { dense_bias: biased, ..DecoderSpec::of(&config.base) }.load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}self_attn");
        Ok(Box::new(LatentAttention::load(p, &prefix, sizes, options)?))
    })
}
