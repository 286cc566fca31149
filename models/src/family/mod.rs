//! The families: one file each, which reads the family's part of `config.json` and says how the decoder is put together
//! from the shared pieces.

mod granitemoe;
mod mixtral;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_moe;

use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::params::Loader;

/// Loads a family's decoder.
type Load = fn(&mut Loader<'_>) -> Result<Decoder>;

/// The values of `model_type` that have a decoder, and its loader.
const FAMILIES: &[(&[&str], Load)] = &[
    (&["mixtral"], mixtral::load),
    (&["qwen2_moe"], qwen2_moe::load),
    (&["qwen3_moe"], qwen3_moe::load),
    (&["olmoe"], olmoe::load),
    (&["phimoe"], phimoe::load),
    (&["granitemoe", "granitemoeshared"], granitemoe::load),
];

/// The values of `model_type` that [`Model::load`](crate::Model::load) takes.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|(types, _)| types.iter().copied())
}

/// Loads the decoder of a checkpoint's family.
pub(crate) fn load(p: &mut Loader<'_>) -> Result<Decoder> {
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
