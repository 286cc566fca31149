//! JSON of untrusted files: bounded in size before it is parsed, duplicate keys refused.
//!
//! [`Limits::check`] walks over a text without taking memory. What it lets through makes values of a bounded size, so
//! that a hostile file costs its own bytes (bounded too) and little more.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::map::Entry;

use crate::error::{CheckpointError, printable};

/// Most bytes of a `config.json` or `hf_quant_config.json`; published ones have a few thousand.
pub(super) const MAX_CONFIG: u64 = 4 << 20;
/// Most bytes of an index; Kimi-K2's in NVFP4 would have 31 million, no published one has more.
pub(super) const MAX_INDEX: u64 = 64 << 20;
/// Most tensors of a checkpoint; Kimi-K2 in NVFP4 has 281 thousand.
pub(super) const MAX_TENSORS: usize = 1 << 19;
/// Most bytes of a tensor's or a file's name, or of another key; published ones have at most some 100.
pub(super) const MAX_NAME: usize = 1024;
/// Most dimensions of a tensor; published ones have at most 5.
pub(super) const MAX_STORED_DIMS: usize = 16;

/// Limits of a JSON text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Arrays and objects within each other.
    pub depth: usize,
    /// Values of any kind.
    pub values: usize,
    /// Objects among them.
    pub objects: usize,
    /// Entries of an array.
    pub array: usize,
    /// Bytes of a key, as written.
    pub key: usize,
    /// Bytes of a string that is a value, as written.
    pub text: usize,
}

/// Of a configuration: no published one has a tenth of the values.
const CONFIG_LIMITS: Limits =
    Limits { depth: 32, values: 1 << 16, objects: 1 << 16, array: 1 << 16, key: MAX_NAME, text: 1 << 20 };
/// Of an index: a file's name each tensor, and metadata.
const INDEX_LIMITS: Limits =
    Limits { depth: 8, values: MAX_TENSORS + 1024, objects: 1024, array: 1024, key: MAX_NAME, text: MAX_NAME };
/// Of a header: a type, a shape and two offsets each tensor, and metadata, in which some tools put a file of their own.
pub(super) const HEADER: Limits = Limits {
    depth: 4,
    values: MAX_TENSORS * (6 + MAX_STORED_DIMS),
    // The header itself, and metadata.
    objects: MAX_TENSORS + 2,
    array: MAX_STORED_DIMS,
    key: MAX_NAME,
    text: 1 << 20,
};

impl Limits {
    /// Refuses a text that holds more. Of what is no JSON it may let anything through.
    pub fn check(&self, json: &[u8]) -> Result<(), String> {
        // Of each open array or object: whether it is an array, and its commas.
        let mut open: Vec<(bool, usize)> = Vec::with_capacity(self.depth);
        let (mut at, mut values, mut objects) = (0, 0, 0);
        let more = |what: &str, limit: usize, at: usize| Err(format!("{what} (limit {limit}) at byte {at}"));
        while let Some(&byte) = json.get(at) {
            let start = at;
            at += 1;
            match byte {
                b'"' => {
                    at += string_end(&json[at..]);
                    let colon = json[at..].iter().find(|b| !b.is_ascii_whitespace()) == Some(&b':');
                    let (what, limit) = if colon { ("a key", self.key) } else { ("a string", self.text) };
                    let bytes = at - start;
                    if bytes > limit + 2 {
                        return more(&format!("{what} of {bytes} bytes"), limit, start);
                    }
                    values += usize::from(!colon);
                }
                b'{' | b'[' => {
                    if open.len() == self.depth {
                        return more("values within each other", self.depth, start);
                    }
                    open.push((byte == b'[', 0));
                    values += 1;
                    objects += usize::from(byte == b'{');
                }
                b'}' | b']' => {
                    open.pop();
                }
                b',' => {
                    if let Some((array, commas)) = open.last_mut() {
                        *commas += 1;
                        if *array && *commas >= self.array {
                            return more("a longer array", self.array, start);
                        }
                    }
                }
                b':' | b' ' | b'\t' | b'\n' | b'\r' => {}
                _ => {
                    // A number, or a word.
                    let rest = json[at..].iter().position(|b| b",]}:\" \t\n\r".contains(b));
                    at += rest.unwrap_or(json.len() - at);
                    values += 1;
                }
            }
            if values > self.values {
                return more("more values", self.values, start);
            }
            if objects > self.objects {
                return more("more objects", self.objects, start);
            }
        }
        Ok(())
    }
}

/// Bytes to the end of a string, its closing quote included.
fn string_end(json: &[u8]) -> usize {
    let mut escaped = false;
    for (at, byte) in json.iter().enumerate() {
        match byte {
            b'"' if !escaped => return at + 1,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    json.len()
}

/// A configuration, in which no key comes twice.
pub(super) fn parse_value(json: &[u8], path: &Path) -> Result<Value, CheckpointError> {
    let refuse = |problem: String| config_error(path, "(whole file)", "a JSON object within the limits", problem);
    CONFIG_LIMITS.check(json).map_err(refuse)?;
    let Strict(value) = serde_json::from_slice(json).map_err(|e| refuse(e.to_string()))?;
    let kind = match &value {
        Value::Object(_) => return Ok(value),
        Value::Array(_) => "a list",
        Value::String(_) => "a string",
        Value::Number(_) => "a number",
        Value::Bool(_) => "true or false",
        Value::Null => "null",
    };
    Err(config_error(path, "(whole file)", "an object", kind))
}

/// The pairs of an index's `weight_map`, within the limits.
pub(super) fn check_index(json: &[u8]) -> Result<(), String> {
    INDEX_LIMITS.check(json)
}

/// A JSON value; a key that comes twice in an object is an error.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ValueVisitor;
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = Strict;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Strict, E> {
                Ok(Strict(Value::Null))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Strict, E> {
                Ok(Strict(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Strict, E> {
                Ok(Strict(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Strict, E> {
                Ok(Strict(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Strict, E> {
                Ok(Strict(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Strict, E> {
                Ok(Strict(value.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Strict, A::Error> {
                let mut values = Vec::new();
                while let Some(Strict(value)) = list.next_element()? {
                    values.push(value);
                }
                Ok(Strict(Value::Array(values)))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strict, A::Error> {
                let mut object = serde_json::Map::new();
                while let Some(key) = map.next_key::<String>()? {
                    let Strict(value) = map.next_value()?;
                    match object.entry(key) {
                        Entry::Vacant(entry) => {
                            entry.insert(value);
                        }
                        Entry::Occupied(entry) => return Err(A::Error::custom(twice(entry.key()))),
                    }
                }
                Ok(Strict(Value::Object(object)))
            }
        }
        deserializer.deserialize_any(ValueVisitor)
    }
}

fn twice(key: &str) -> String {
    format!("key {} comes twice", printable(key))
}

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
    read_open(&file, bytes, limit, path)
}

/// The bytes of an open file of so many bytes.
pub(super) fn read_open(file: &File, bytes: u64, limit: u64, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    if bytes > limit {
        return Err(CheckpointError::TooLarge { path: path.display().to_string(), bytes, limit });
    }
    let mut text = Vec::with_capacity(bytes as usize);
    file.take(limit).read_to_end(&mut text).map_err(|e| io_error(path, e))?;
    Ok(text)
}

/// A value of an object whose type may depend on its key.
pub(super) trait Keyed: Sized {
    /// Most keys of an object.
    const MOST: usize = MAX_TENSORS;

    /// Reads the value of `key`; `None` for one that is checked and skipped.
    fn read<'de, A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Option<Self>, A::Error>;
}

impl Keyed for String {
    fn read<'de, A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<Option<Self>, A::Error> {
        map.next_value().map(Some)
    }
}

/// A string that is not kept.
pub(super) struct Text;

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl Visitor<'_> for TextVisitor {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E>(self, _: &str) -> Result<Text, E> {
                Ok(Text)
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

impl Keyed for Text {
    /// Of metadata; published ones have one or two.
    const MOST: usize = 1024;

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
                        if pairs.len() == V::MOST {
                            return Err(A::Error::custom(format_args!("more than {} keys in an object", V::MOST)));
                        }
                        pairs.push((key, value));
                    }
                }
                let unique = Unique(pairs);
                match unique.duplicate() {
                    Some(name) => Err(A::Error::custom(twice(name))),
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
