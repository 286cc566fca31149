//! Where goldens lie.
#![allow(dead_code, reason = "every suite takes a part")]

use std::path::{Path, PathBuf};

/// The folders of goldens: the shipped ones, or `MOEBIUS_GOLDEN`, as a program away from its sources needs.
pub fn golden() -> PathBuf {
    let named = std::env::var_os("MOEBIUS_GOLDEN").filter(|root| !root.is_empty());
    named.map_or_else(|| shipped("golden"), PathBuf::from)
}

/// One of these folders by name; the shipped one where there is none of that name.
pub fn golden_of(name: &str) -> PathBuf {
    let root = golden();
    assert!(root.is_dir(), "MOEBIUS_GOLDEN: no folder {}", root.display());
    let own = root.join(name);
    if own.join("config.json").is_file() { own } else { shipped("golden").join(name) }
}

/// The quantization vectors: beside those folders, or the shipped ones.
pub fn golden_quant() -> PathBuf {
    let own = golden().with_file_name("golden-quant");
    if own.is_dir() { own } else { shipped("golden-quant") }
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}
