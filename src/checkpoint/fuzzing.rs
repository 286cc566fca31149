//! Entry points for the fuzz targets: the parsers of untrusted files, on bytes. Not part of the interface.

use std::path::Path;

use super::layout::BlockLayout;
use super::model::Model;
use super::{folder, header, reader};

/// A whole safetensors file, header first; true if it is accepted.
pub fn header(file: &[u8]) -> bool {
    let mut prefix = [0; 8];
    if let Some(bytes) = file.get(..8) {
        prefix.copy_from_slice(bytes);
    }
    let Ok(length) = header::length(prefix, file.len() as u64) else { return false };
    let (json, data) = file[8..].split_at(length as usize);
    header::parse(json, data.len() as u64).is_ok()
}

/// An index; true if it is accepted.
pub fn index(json: &[u8]) -> bool {
    let Ok(entries) = reader::parse_index(json, Path::new("index")) else { return false };
    entries.iter().all(|(_, file)| folder::plain_name(file).is_some())
}

/// A `config.json`; true if it is accepted. Names of the first block are made too.
pub fn config(json: &[u8]) -> bool {
    let Ok(model) = Model::parse(json, Path::new("config.json")) else { return false };
    if let Some((layer, config)) = model.blocks.first() {
        let layout = BlockLayout::find(model.family, config, format!("model.layers.{layer}."), &|_| false);
        let parts = layout.replicated().into_iter().chain(layout.expert(config.router.num_experts - 1));
        for part in parts {
            // Sizes within the bounds multiply without overflow.
            let count = part.dims.iter().try_fold(1usize, |count, dim| count.checked_mul(*dim));
            assert!(count.is_some_and(|count| count <= isize::MAX as usize / 8), "{part:?}");
        }
    }
    true
}
