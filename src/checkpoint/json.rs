//! JSON of untrusted files: bounded in size, duplicate keys refused.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::error::CheckpointError;

/// Most bytes of a `config.json` or `hf_quant_config.json`; published ones have a few thousand.
pub(super) const MAX_CONFIG: u64 = 16 << 20;
/// Most bytes of an index; Kimi-K2's, the largest known, has 20 million.
pub(super) const MAX_INDEX: u64 = 256 << 20;

/// [`CheckpointError::Io`].
pub(super) fn io_error(path: &Path, error: impl fmt::Display) -> CheckpointError {
    CheckpointError::Io { path: path.display().to_string(), message: error.to_string() }
}

/// Opens a regular file: opening a pipe or a device could block for ever.
pub(super) fn open_file(path: &Path) -> Result<(File, u64), CheckpointError> {
    let meta = std::fs::metadata(path).map_err(|e| io_error(path, e))?;
    if !meta.is_file() {
        return Err(io_error(path, "not a regular file"));
    }
    let file = File::open(path).map_err(|e| io_error(path, e))?;
    let meta = file.metadata().map_err(|e| io_error(path, e))?;
    Ok((file, meta.len()))
}

/// [`CheckpointError::Config`].
pub(super) fn config_error(
    path: &Path,
    field: &str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> CheckpointError {
    CheckpointError::Config {
        path: path.display().to_string(),
        field: field.to_string(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

/// The bytes of a small file.
pub(super) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let (file, bytes) = open_file(path)?;
    if bytes > limit {
        return Err(CheckpointError::TooLarge { path: path.display().to_string(), bytes, limit });
    }
    let mut text = Vec::new();
    file.take(limit).read_to_end(&mut text).map_err(|e| io_error(path, e))?;
    Ok(text)
}

/// A value of an object whose type may depend on its key.
pub(super) trait Keyed: Sized {
    /// Reads the value of `key`; `None` for one that is checked and skipped.
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Option<Self>, A::Error>;
}

impl Keyed for String {
    fn read<'de, A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Option<Self>, A::Error> {
        map.next_value().map(Some)
    }
}

/// A JSON object in file order; a key that comes twice is an error, where a map would keep the last.
pub(super) struct Unique<V>(pub Vec<(String, V)>);

impl<'de, V: Keyed> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<V>(PhantomData<V>);
        impl<'de, V: Keyed> Visitor<'de> for Pairs<V> {
            type Value = Unique<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if let Some(value) = V::read(&key, &mut map)? {
                        pairs.push((key, value));
                    }
                }
                let unique = Unique(pairs);
                match unique.duplicate() {
                    Some(name) => Err(A::Error::custom(format_args!("key {name:?} comes twice"))),
                    None => Ok(unique),
                }
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<V> Unique<V> {
    fn duplicate(&self) -> Option<&str> {
        let mut names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
    }
}
