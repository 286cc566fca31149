//! Where the compiler and its files are looked for, and the folder of what it compiles.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::nccl_ep::NcclEpError;

/// Folder of what the library compiles.
pub(super) const CACHE: &str = "NCCL_EP_JIT_CACHE_DIR";

/// Where to look, in order: a folder or file, and who names it.
pub(super) struct SearchPaths(Vec<(String, PathBuf)>);

impl SearchPaths {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    /// A variable's value, and below it.
    pub(super) fn variable(mut self, get: Env<'_>, name: &str, below: &str) -> Self {
        if let Some(value) = get(name).filter(|v| !v.is_empty()) {
            let path = PathBuf::from(value);
            // Joining nothing would leave a slash behind a file's name.
            self.0.push((name.to_string(), if below.is_empty() { path } else { path.join(below) }));
        }
        self
    }

    pub(super) fn path(mut self, who: &str, path: Option<PathBuf>) -> Self {
        self.0.extend(path.map(|p| (who.to_string(), p)));
        self
    }

    /// The first that has `file`. One that the library's own variable names is the only one tried.
    pub(super) fn find(
        self,
        (what, variable, file): (&'static str, &'static str, &str),
    ) -> Result<PathBuf, NcclEpError> {
        let fixed = self.0.iter().any(|(who, _)| who == variable);
        let candidates = || self.0.iter().filter(|(who, _)| !fixed || who == variable);
        let is_there = |p: &&(String, PathBuf)| match file {
            "" => p.1.is_file(),
            file => p.1.join(file).is_file(),
        };
        candidates().find(is_there).map(|(_, p)| p.clone()).ok_or_else(|| {
            let shown: Vec<String> = candidates().map(|(who, p)| format!("{} ({who})", p.display())).collect();
            let tried = if shown.is_empty() { "nothing".to_string() } else { shown.join(", ") };
            NcclEpError::Environment { what, tried, variable }
        })
    }
}

/// Reads a variable.
pub(super) type Env<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The folder so many levels above a file.
pub(super) fn above(file: &Path, levels: usize, below: &str) -> Option<PathBuf> {
    file.ancestors().nth(levels).map(|folder| folder.join(below))
}

pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The folder for compiled kernels, made if need be, refused unless it is this user's alone to write.
pub(super) fn cache(get: Env<'_>) -> Result<PathBuf, NcclEpError> {
    // SAFETY: no arguments, cannot fail.
    let user = unsafe { libc::geteuid() };
    let given = |name: &str| get(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let below = |home: PathBuf, part: &str| home.join(part).join("moebius/nccl-ep");
    let folder = given(CACHE)
        .or_else(|| given("XDG_CACHE_HOME").map(|home| below(home, "")))
        .or_else(|| given("HOME").map(|home| below(home, ".cache")))
        .unwrap_or_else(|| std::env::temp_dir().join(format!("moebius-nccl-ep-{user}")));
    let refused = |problem: String| NcclEpError::Cache { path: shown(&folder), problem };
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(|e| refused(e.to_string()))?;
    let found = std::fs::symlink_metadata(&folder).map_err(|e| refused(e.to_string()))?;
    if !found.is_dir() {
        return Err(refused("is not a folder itself, but a link".to_string()));
    }
    if found.uid() != user {
        return Err(refused(format!("belongs to user {}, this process runs as {user}", found.uid())));
    }
    if found.mode() & 0o022 != 0 {
        return Err(refused(format!("others may write to it (mode {:o})", found.mode() & 0o777)));
    }
    Ok(folder)
}
