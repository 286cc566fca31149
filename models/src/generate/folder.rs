//! The files beside a published folder's weights: tokenizer, templates, small JSON files.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

use super::error::{Error, Result};

/// Most bytes of a `tokenizer.json`; those of the largest vocabularies, some 260 thousand tokens, have about half.
pub(super) const MAX_TOKENIZER: u64 = 64 << 20;
/// Most bytes of another JSON file; published ones have some thousands, and a few million where they list thousands of
/// added tokens.
const MAX_JSON: u64 = 16 << 20;
/// Most bytes of a template's file. What is compiled has a limit of its own, far below this one, which counts after the
/// template's line ends are made one.
pub(super) const MAX_TEMPLATE: u64 = 1 << 20;

/// Text of `dir/name`, a regular file of at most `limit` bytes or a link to one; `None` where there is no such file.
pub(super) fn text(dir: &Path, name: &str, limit: u64) -> Result<Option<String>> {
    let path = dir.join(name);
    let fail = |e: io::Error| problem(dir, name, &e.to_string());
    let bounded = |bytes: u64| match bytes > limit {
        true => Err(problem(dir, name, &format!("{bytes} bytes, at most {limit} are read"))),
        false => Ok(()),
    };
    let meta = match fs::metadata(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound && path.symlink_metadata().is_ok() => {
            return Err(problem(dir, name, "a link to a file that is not there"));
        }
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        meta => meta.map_err(fail)?,
    };
    // Asked before it is opened: opening a pipe or a device could block for ever.
    if !meta.is_file() {
        return Err(problem(dir, name, "not a regular file"));
    }
    bounded(meta.len())?;
    let mut bytes = Vec::new();
    // The file may have grown meanwhile: one byte past the limit tells.
    File::open(&path).map_err(fail)?.take(limit + 1).read_to_end(&mut bytes).map_err(fail)?;
    bounded(bytes.len() as u64)?;
    String::from_utf8(bytes).map(Some).map_err(|e| problem(dir, name, &e.to_string()))
}

/// JSON of `dir/name`; null where there is no such file.
pub(super) fn json(dir: &Path, name: &str) -> Result<Value> {
    let Some(text) = text(dir, name, MAX_JSON)? else { return Ok(Value::Null) };
    serde_json::from_str(&text).map_err(|e| problem(dir, name, &e.to_string()))
}

pub(super) fn problem(dir: &Path, name: &str, problem: &str) -> Error {
    Error::File { path: dir.join(name).display().to_string(), problem: problem.into() }
}

/// The text of a special token: a string, or the `content` of an object.
pub(super) fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

#[cfg(test)]
mod tests {
    use super::super::{ChatTemplate, Sampling, Tokenizer, tokenizer::tests::bytes_json};
    use super::*;

    /// Reads a folder; gives an error's text.
    type Reader = fn(&Path) -> Option<String>;

    /// Each file, and one that reads it.
    fn readers() -> [(&'static str, Reader); 6] {
        let tokenizer = |dir: &Path| Tokenizer::from_folder(dir).err().map(|e| e.to_string());
        let chat = |dir: &Path| ChatTemplate::from_folder(dir).err().map(|e| e.to_string());
        let sampling = |dir: &Path| Sampling::from_folder(dir).err().map(|e| e.to_string());
        [
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", tokenizer),
            ("generation_config.json", sampling),
            ("special_tokens_map.json", chat),
            ("chat_template.jinja", chat),
            ("additional_chat_templates/tool_use.jinja", chat),
        ]
    }

    /// Makes each file by `make` in a folder that is good without it, and has it read.
    fn refusals(make: impl Fn(&Path), problem: &str) {
        for (name, read) in readers() {
            let dir = tempfile::tempdir().expect("a folder");
            let dir = dir.path();
            fs::create_dir(dir.join("additional_chat_templates")).expect("a folder");
            for (other, text) in [("tokenizer.json", bytes_json()), ("chat_template.jinja", "x".into())] {
                if other != name {
                    fs::write(dir.join(other), text).expect("a file");
                }
            }
            make(&dir.join(name));
            let message = read(dir).expect("an error");
            assert!(message.starts_with(&dir.join(name).display().to_string()), "{name}: {message}");
            assert!(message.contains(problem), "{name}: {message}");
        }
    }

    /// A reader that opened one would wait for a writer, for ever.
    #[cfg(unix)]
    #[test]
    fn pipes_are_refused() {
        let make = |path: &Path| {
            let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo");
            assert!(made.success());
        };
        refusals(make, ": not a regular file");
    }

    #[test]
    fn folders_in_a_files_place_are_refused() {
        refusals(|path| fs::create_dir(path).expect("a folder"), ": not a regular file");
    }

    /// Files that are one hole: they have no block on disk.
    #[test]
    fn huge_files_are_refused_before_they_are_read() {
        let make = |path: &Path| File::create(path).and_then(|file| file.set_len(1 << 27)).expect("a file");
        refusals(make, ": 134217728 bytes, at most ");
    }

    #[test]
    fn a_file_of_the_limit_is_read_and_one_byte_more_is_not() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("a"), "four").expect("a file");
        assert_eq!(text(dir.path(), "a", 4).expect("a text").as_deref(), Some("four"));
        let message = text(dir.path(), "a", 3).expect_err("refused").to_string();
        assert!(message.ends_with("a: 4 bytes, at most 3 are read"), "{message}");
        assert_eq!(text(dir.path(), "b", 3).expect("no file"), None);
        fs::write(dir.path().join("a"), [0xff]).expect("a file");
        let message = text(dir.path(), "a", 3).expect_err("refused").to_string();
        assert!(message.contains("invalid utf-8"), "{message}");
    }

    /// A cache that was fetched in part has links to files that are not there.
    #[cfg(unix)]
    #[test]
    fn links_that_lead_nowhere_are_named() {
        for (name, read) in readers() {
            let dir = tempfile::tempdir().expect("a folder");
            if name != "tokenizer.json" {
                fs::write(dir.path().join("tokenizer.json"), bytes_json()).expect("a tokenizer");
            }
            let at = dir.path().join(name);
            fs::create_dir_all(at.parent().expect("a folder")).expect("a folder");
            std::os::unix::fs::symlink(dir.path().join("blobs"), at).expect("a link");
            let error = read(dir.path()).expect("an error");
            assert!(error.contains(name) && error.contains("a link to a file that is not there"), "{error}");
        }
    }
}
