//! Typed, bounded access to `config.json`.

use serde_json::Value;

use crate::error::{CheckpointError, CheckpointResult};

/// Bounds on sizes that a configuration may claim: far above any published model, low enough that no product of
/// them overflows.
pub(super) const MAX_HIDDEN: usize = 1 << 20;
/// Inner size of an expert.
pub(super) const MAX_INTERMEDIATE: usize = 1 << 22;
/// Layers of a model.
pub(super) const MAX_LAYERS: usize = 1 << 14;

/// Keys of a configuration, looked up in several objects in turn (`ffn_config` before the root, say).
/// A key that holds `null` counts as absent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    path: &'a str,
    scopes: [Option<&'a Value>; 2],
}

impl<'a> Fields<'a> {
    /// The keys of `root`, behind those of its object `nested`, where it has one.
    pub fn new(path: &'a str, root: &'a Value, nested: Option<&str>) -> Self {
        Self { path, scopes: [nested.and_then(|key| root.get(key)), Some(root)] }
    }

    /// Without the nested object, whose keys may have other meanings (DBRX's `ffn_config.hidden_size`).
    pub fn root(self) -> Self {
        Self { scopes: [None, self.scopes[1]], ..self }
    }

    /// [`CheckpointError::Config`] for a key.
    pub fn error(&self, key: &str, expected: impl ToString, found: impl ToString) -> CheckpointError {
        CheckpointError::Config {
            path: self.path.to_string(),
            field: key.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// A key's value, `null` too.
    pub fn raw(&self, key: &str) -> Option<&'a Value> {
        self.scopes.iter().flatten().find_map(|scope| scope.get(key))
    }

    /// A key's value.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw(key).filter(|value| !value.is_null())
    }

    fn first(&self, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        keys.iter().find_map(|key| Some((*key, self.get(key)?)))
    }

    fn integer(&self, key: &str, value: &Value, max: usize) -> CheckpointResult<usize> {
        let found = value.as_u64().and_then(|v| usize::try_from(v).ok()).filter(|v| *v <= max);
        found.ok_or_else(|| self.error(key, format!("an integer in 0..={max}"), short(value)))
    }

    /// An integer under the first of several keys.
    pub fn size_or(&self, keys: &[&'static str], max: usize) -> CheckpointResult<Option<usize>> {
        self.first(keys).map(|(key, value)| self.integer(key, value, max)).transpose()
    }

    /// A required integer of at least 1.
    pub fn size(&self, keys: &[&'static str], max: usize) -> CheckpointResult<usize> {
        match self.size_or(keys, max)? {
            Some(0) => Err(self.error(&keys.join(" / "), format!("an integer in 1..={max}"), 0)),
            Some(size) => Ok(size),
            None => Err(self.error(&keys.join(" / "), format!("an integer in 1..={max}"), "nothing")),
        }
    }

    /// An integer, or this layer's of a list with one a layer.
    pub fn layered(&self, keys: &[&'static str], layer: usize, max: usize) -> CheckpointResult<Option<usize>> {
        let Some((key, value)) = self.first(keys) else { return Ok(None) };
        let Some(list) = value.as_array() else { return self.integer(key, value, max).map(Some) };
        match list.get(layer) {
            Some(value) => self.integer(key, value, max).map(Some),
            None => Err(self.error(key, format!("an entry for layer {layer}"), format!("{} entries", list.len()))),
        }
    }

    /// A list of integers.
    pub fn list(&self, key: &str, max: usize) -> CheckpointResult<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(list) = value.as_array() else {
            return Err(self.error(key, "a list of integers", short(value)));
        };
        if list.len() > MAX_LAYERS {
            return Err(self.error(key, format!("at most {MAX_LAYERS} entries"), list.len()));
        }
        list.iter().map(|value| self.integer(key, value, max)).collect::<CheckpointResult<_>>().map(Some)
    }

    /// A list of strings.
    pub fn words(&self, key: &str) -> CheckpointResult<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let words = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        words.map(Some).ok_or_else(|| self.error(key, "a list of strings", short(value)))
    }

    /// A finite number.
    pub fn number(&self, key: &str, default: f64) -> CheckpointResult<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let found = value.as_f64().filter(|v| v.is_finite());
        found.ok_or_else(|| self.error(key, "a finite number", short(value)))
    }

    /// A flag.
    pub fn flag(&self, key: &str, default: bool) -> CheckpointResult<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(key, "true or false", short(value)))
    }

    /// A string.
    pub fn word(&self, key: &str) -> CheckpointResult<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "a string", short(value)))
    }

    /// Refuses any other word under a key that may be absent.
    pub fn only(&self, key: &str, allowed: &[&str]) -> CheckpointResult<()> {
        match self.word(key)? {
            Some(word) if !allowed.contains(&word) => {
                Err(self.error(key, allowed.join(" or "), format!("{:?}", clip(word))))
            }
            _ => Ok(()),
        }
    }
}

/// A value for a message: a hostile file must not fill the log.
pub(super) fn short(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(map) => match map.iter().next() {
            Some((key, value @ (Value::String(_) | Value::Number(_)))) if map.len() == 1 => {
                format!("an object with {:?}: {}", clip(key), short(value))
            }
            _ => format!("an object of {}", map.len()),
        },
        Value::String(text) => format!("{:?}", clip(text)),
        other => other.to_string(),
    }
}

/// The first characters of a text.
pub(super) fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}
