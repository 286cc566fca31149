//! Ernie 4.5: interleaved rotation, biases in attention, dense layers and the output projection or nowhere, dense layers
//! before those with experts.

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
    #[serde(default)]
    moe_num_shared_experts: Option<usize>,
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.base.check(&file)?;
    let heads = config.base.heads(&file)?;
    let bias = config.use_bias.unwrap_or(false);
    if bias && config.moe_num_shared_experts.unwrap_or(0) > 0 {
        return file.refuse("use_bias", "false where there are shared experts, whose biases the layer has not", true);
    }
    let rotary = config.base.rotary(&file, heads.dim, 5e5)?.interleaved();
    let tied = config.base.tie_word_embeddings.unwrap_or(true);
    let frame = DecoderSpec { tied, head_bias: bias, dense_bias: bias, ..DecoderSpec::of(&config.base) };
    frame.load(p, rotary, |p, prefix, _| {
        let attention = SelfAttention::load(p, &format!("{prefix}self_attn"), heads, Biases::all(bias))?;
        Ok(Box::new(attention))
    })
}
