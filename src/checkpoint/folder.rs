//! A checkpoint's folder as a reader sees it: which files are the checkpoint's, where each lies, and whether a save has
//! replaced them meanwhile.
//!
//! A save that could only partly take effect, because its process was killed, leaves a folder [`STAGING`] with a
//! [`Manifest`] in it. What the manifest names is then read there, so that a reader sees the new checkpoint and nothing
//! of the old one; [`commit`](super::commit) has the writer's side.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::OpenOptions;
use super::json::{MAX_CONFIG, config_error, io_error, open_file, parse_value, read_limited};
use crate::error::CheckpointError;

type Result<T> = std::result::Result<T, CheckpointError>;

pub(super) const CONFIG: &str = "config.json";
pub(super) const QUANTIZATION: &str = "hf_quant_config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Folder in a checkpoint's own, in which a save writes.
pub(super) const STAGING: &str = ".moebius-save";
/// File in [`STAGING`] whose being there means that the save is complete.
const MANIFEST: &str = "commit.json";

/// Which files a save replaces, and by which.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Manifest {
    /// The new checkpoint's files.
    pub files: Vec<String>,
    /// The old one's, that the new one does not have.
    pub stale: Vec<String>,
}

impl Manifest {
    /// The manifest in a folder's [`STAGING`], if there is one.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let [_, path] = Self::paths(dir);
        let kind = |path: &Path| path.symlink_metadata().map(|meta| meta.file_type());
        // Not through links, which could leave the folder.
        if !kind(&dir.join(STAGING)).is_ok_and(|kind| kind.is_dir()) || !kind(&path).is_ok_and(|kind| kind.is_file()) {
            return Ok(None);
        }
        let json = parse_value(&read_limited(&path, MAX_CONFIG)?, &path)?;
        let names = |key: &str| {
            let list = json.get(key).and_then(Value::as_array);
            let names = list.and_then(|list| list.iter().map(|name| own_name(name.as_str()?)).collect());
            let names: Option<Vec<&str>> = names;
            let names = names
                .ok_or_else(|| config_error(&path, key, "a list of names of a checkpoint's files", "something else"))?;
            Ok(names.into_iter().map(str::to_string).collect())
        };
        Ok(Some(Self { files: names("files")?, stale: names("stale")? }))
    }

    /// Its text.
    pub fn text(&self) -> Vec<u8> {
        json!({ "files": self.files, "stale": self.stale }).to_string().into_bytes()
    }

    /// Where it is written, before it is renamed to where it counts, and where it counts.
    pub fn paths(dir: &Path) -> [PathBuf; 2] {
        let staging = dir.join(STAGING);
        [staging.join(format!("{MANIFEST}.new")), staging.join(MANIFEST)]
    }
}

/// A folder that is being read.
#[derive(Debug)]
pub(super) struct Folder {
    dir: PathBuf,
    /// Of a save whose files lie in part in [`STAGING`].
    pending: Option<Manifest>,
    options: OpenOptions,
}

impl Folder {
    pub fn open(dir: &Path, options: OpenOptions) -> Result<Self> {
        Ok(Self { dir: dir.to_path_buf(), pending: Manifest::read(dir)?, options })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a file lies; `None` if the checkpoint has none of this name. Without the option it lies in the folder
    /// itself, not only a link to it.
    pub fn find(&self, name: &str) -> Result<Option<PathBuf>> {
        let mut places = vec![self.dir.join(name)];
        if let Some(pending) = &self.pending {
            if !pending.files.iter().any(|file| file == name) {
                return Ok(None);
            }
            places.insert(0, self.dir.join(STAGING).join(name));
        }
        for path in places {
            // A link to nothing is there, and an error.
            if path.symlink_metadata().is_ok() {
                self.inside(name, &path)?;
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// As [`find`](Self::find) of a file that must be there.
    pub fn require(&self, name: &str) -> Result<PathBuf> {
        let missing = || io_error(&self.dir.join(name), std::io::Error::from(std::io::ErrorKind::NotFound));
        self.find(name)?.ok_or_else(missing)
    }

    fn inside(&self, name: &str, path: &Path) -> Result<()> {
        if self.options.follow_links {
            return Ok(());
        }
        let real = |path: &Path| path.canonicalize().map_err(|e| io_error(path, e));
        let (file, folder) = (real(path)?, real(path.parent().unwrap_or(&self.dir))?);
        match file.parent() == Some(folder.as_path()) {
            true => Ok(()),
            false => Err(CheckpointError::OutsideFolder {
                path: self.dir.display().to_string(),
                entry: name.to_string(),
                problem: format!(
                    "a link to {}, outside the folder; OpenOptions::follow_links allows it",
                    file.display()
                ),
            }),
        }
    }
}

/// One version of a checkpoint: its config.json, held open, so that no later file can be taken for it.
#[derive(Debug)]
pub(super) struct Version {
    config: Option<(File, Metadata)>,
    /// Files may be on their way from [`STAGING`] to their places.
    pub pending: bool,
}

impl Version {
    /// The version that a folder has now; a save replaces it before any other file of the checkpoint changes.
    pub fn now(dir: &Path, options: OpenOptions) -> Self {
        let folder = Folder::open(dir, options).ok();
        let pending = folder.as_ref().is_some_and(|folder| folder.pending.is_some());
        let path = folder.and_then(|folder| folder.find(CONFIG).ok().flatten());
        let file = path.and_then(|path| open_file(&path).ok()).map(|(file, _)| file);
        Self { config: file.and_then(|file| file.metadata().ok().map(|meta| (file, meta))), pending }
    }

    /// Whether both are the same file, or both none.
    pub fn is(&self, other: &Self) -> bool {
        match (&self.config, &other.config) {
            (None, None) => true,
            (Some((_, a)), Some((_, b))) => same_file(a, b),
            _ => false,
        }
    }
}

/// Whether two files, at least one of them open, are one.
#[cfg(unix)]
pub(super) fn same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// Whether two files look like one: the standard library has no number of a file here.
#[cfg(not(unix))]
pub(super) fn same_file(a: &Metadata, b: &Metadata) -> bool {
    (a.len(), a.modified().ok(), a.created().ok()) == (b.len(), b.modified().ok(), b.created().ok())
}

/// A name that a checkpoint's file may have.
pub(super) fn own_name(name: &str) -> Option<&str> {
    let known = [CONFIG, QUANTIZATION, INDEX].contains(&name) || name.ends_with(".safetensors");
    plain_name(name).filter(|_| known)
}

/// A file's name, if it is no path: neither absolute, nor with `..`, nor in a folder.
pub(super) fn plain_name(entry: &str) -> Option<&str> {
    use std::path::Component;
    let mut parts = Path::new(entry).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) if name == entry => Some(entry),
        _ => None,
    }
}
