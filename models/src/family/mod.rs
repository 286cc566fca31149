//! The families: one file each, which reads the family's part of `config.json` and says how the decoder is put together
//! from the shared pieces.

mod dbrx;
mod deepseek;
mod ernie4_5_moe;
mod glm4_moe;
mod gpt_oss;
mod granitemoe;
mod hunyuan_v1_moe;
mod llama4;
mod minimax_m2;
mod mixtral;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_moe;
mod qwen3_next;

use crate::decoder::DecoderStack;
use crate::error::{Error, Result};
use crate::params::Loader;

/// Loads a family's decoder.
type Load = fn(&mut Loader<'_>) -> Result<DecoderStack>;

/// The values of `model_type` that have a decoder, and its loader.
const FAMILIES: &[(&[&str], Load)] = &[
    (&["mixtral"], mixtral::load),
    (&["qwen2_moe"], qwen2_moe::load),
    (&["qwen3_moe"], qwen3_moe::load),
    (&["olmoe"], olmoe::load),
    (&["phimoe"], phimoe::load),
    (&["granitemoe", "granitemoeshared"], granitemoe::load),
    (&["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"], deepseek::load),
    (&["glm4_moe"], glm4_moe::load),
    (&["gpt_oss"], gpt_oss::load),
    (&["minimax_m2"], minimax_m2::load),
    (&["llama4_text", "llama4"], llama4::load),
    (&["ernie4_5_moe"], ernie4_5_moe::load),
    (&["hunyuan_v1_moe"], hunyuan_v1_moe::load),
    (&["dbrx"], dbrx::load),
    (&["qwen3_next"], qwen3_next::load),
    (&["qwen3_5_moe", "qwen3_5_moe_text"], qwen3_next::load_qwen3_5),
];

/// The values of `model_type` that [`Model::load`](crate::Model::load) takes.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|(types, _)| types.iter().copied())
}

/// Loads the decoder of a checkpoint's family.
pub(crate) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let found = p.checkpoint().family();
    match FAMILIES.iter().find(|(types, _)| types.contains(&found)) {
        Some((_, load)) => load(p),
        None => Err(Error::Family {
            path: p.file().0,
            found: found.to_string(),
            known: families().collect::<Vec<_>>().join(", "),
        }),
    }
}
