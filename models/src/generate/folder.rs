//! The small JSON files of a published folder.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::error::{Error, Result};

/// Text of `dir/name`; `None` where there is no such file.
pub(super) fn text(dir: &Path, name: &str) -> Result<Option<String>> {
    let path = dir.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::File { path: path.display().to_string(), problem: e.to_string() }),
    }
}

/// JSON of `dir/name`; null where there is no such file.
pub(super) fn json(dir: &Path, name: &str) -> Result<Value> {
    let Some(text) = text(dir, name)? else { return Ok(Value::Null) };
    serde_json::from_str(&text).map_err(|e| problem(dir, name, &e.to_string()))
}

pub(super) fn problem(dir: &Path, name: &str, problem: &str) -> Error {
    Error::File { path: dir.join(name).display().to_string(), problem: problem.into() }
}

/// The text of a special token: a string, or the `content` of an object.
pub(super) fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}
