//! Files that chores generate: written, or compared with what is there.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's folder.
pub(super) fn root() -> Result<&'static Path, String> {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("the repository's folder is not to be found".to_string())
}

/// Writes `text` to `file` of the repository, or, to `check`, fails where the file holds something else.
pub(super) fn settle(file: &str, text: &str, check: bool) -> Result<String, String> {
    let path: PathBuf = root()?.join(file);
    if !check {
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        return Ok(format!("{file}: {} lines", text.lines().count()));
    }
    let found = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    if found == text {
        return Ok(format!("{file} is what these headers give"));
    }
    let differs = found.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line = differs.unwrap_or_else(|| found.lines().count().min(text.lines().count()));
    let at = |text: &str| text.lines().nth(line).unwrap_or("(its end)").to_string();
    Err(format!("{file}, line {}: the file has\n  {}\nthe headers give\n  {}", line + 1, at(&found), at(text)))
}

/// gcc's own headers (`stddef.h` …), which a libclang without a clang beside it lacks.
pub(super) fn compiler_headers() -> Option<String> {
    let output = Command::new("gcc").arg("-print-file-name=include").output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?.trim().to_string();
    Path::new(&folder).is_absolute().then_some(folder)
}
