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
use super::json::{MAX_CONFIG, config_error, io_error, open_file, parse_value, read_open};
use crate::error::{CheckpointError, CheckpointResult, Error};

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
    pub fn read(dir: &Path) -> CheckpointResult<Option<Self>> {
        Ok(Pending::read(dir)?.map(|pending| pending.manifest))
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

/// A save whose files lie in part in [`STAGING`], by the file that says so. It is held open, so that no later save's
/// file can be taken for it.
#[derive(Debug)]
struct Pending {
    manifest: Manifest,
    file: OpenFile,
}

impl Pending {
    fn read(dir: &Path) -> CheckpointResult<Option<Self>> {
        let [_, path] = Manifest::paths(dir);
        let kind = |path: &Path| path.symlink_metadata().map(|meta| meta.file_type());
        // Not through links, which could leave the folder.
        if !kind(&dir.join(STAGING)).is_ok_and(|kind| kind.is_dir()) || !kind(&path).is_ok_and(|kind| kind.is_file()) {
            return Ok(None);
        }
        let file = match OpenFile::open(&path) {
            // The save has finished meanwhile.
            Err(_) if path.symlink_metadata().is_err() => return Ok(None),
            // The next save's may have come meanwhile.
            Err(_) => OpenFile::open(&path)?,
            Ok(file) => file,
        };
        let json = parse_value(&read_open(&file.file, file.meta.len(), MAX_CONFIG, &path)?, &path)?;
        let names = |key: &str| {
            let list = json.get(key).and_then(Value::as_array);
            let names = list.and_then(|list| list.iter().map(|name| own_name(name.as_str()?)).collect());
            let names: Option<Vec<&str>> = names;
            let names = names
                .ok_or_else(|| config_error(&path, key, "a list of names of a checkpoint's files", "something else"))?;
            Ok(names.into_iter().map(str::to_string).collect())
        };
        let manifest = Manifest { files: names("files")?, stale: names("stale")? };
        Ok(Some(Self { manifest, file }))
    }
}

/// A file that is held open.
#[derive(Debug)]
struct OpenFile {
    file: File,
    meta: Metadata,
}

impl OpenFile {
    fn open(path: &Path) -> CheckpointResult<Self> {
        let (file, _) = open_file(path)?;
        let meta = file.metadata().map_err(|e| io_error(path, e))?;
        Ok(Self { file, meta })
    }

    /// Whether both are the same file, or both none.
    fn same(a: Option<&Self>, b: Option<&Self>) -> bool {
        match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => same_file(&a.meta, &b.meta),
            _ => false,
        }
    }
}

/// A folder that is being read.
#[derive(Debug)]
pub(super) struct Folder {
    dir: PathBuf,
    pending: Option<Pending>,
    options: OpenOptions,
}

impl Folder {
    pub fn open(dir: &Path, options: OpenOptions) -> CheckpointResult<Self> {
        Ok(Self { dir: dir.to_path_buf(), pending: Pending::read(dir)?, options })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where a file lies; `None` if the checkpoint has none of this name. Without the option it lies in the folder
    /// itself, not only a link to it.
    pub fn find(&self, name: &str) -> CheckpointResult<Option<PathBuf>> {
        let mut places = vec![self.dir.join(name)];
        if let Some(pending) = &self.pending {
            if !pending.manifest.files.iter().any(|file| file == name) {
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
    pub fn require(&self, name: &str) -> CheckpointResult<PathBuf> {
        // In the words that the system has for a file that it is asked for.
        let missing = || io_error(&self.dir.join(name), "No such file or directory");
        self.find(name)?.ok_or_else(missing)
    }

    fn inside(&self, name: &str, path: &Path) -> CheckpointResult<()> {
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
                    "a link to {}, outside the folder; OpenOptions::follow_links allows it, --follow-links of a program",
                    file.display()
                ),
            }),
        }
    }
}

/// One version of a checkpoint: its config.json, held open, so that no later file can be taken for it. A save replaces
/// it before any other file of the checkpoint changes, but for those in [`STAGING`]: they are this version's as long as
/// the same [`Manifest`] stands there.
#[derive(Debug)]
struct Version {
    config: Option<OpenFile>,
}

impl Version {
    fn of(folder: &Folder) -> Self {
        let path = folder.find(CONFIG).ok().flatten();
        Self { config: path.and_then(|path| OpenFile::open(&path).ok()) }
    }

    /// Whether what was read of the folder since [`of`](Self::of) is of this version.
    fn still(&self, folder: &Folder) -> bool {
        let now = Self::of(folder);
        // Last, as it says whose the files in `STAGING` were that `now` may have met.
        let pending = Pending::read(&folder.dir).ok().flatten();
        let [before, after] = [&folder.pending, &pending].map(|pending| pending.as_ref().map(|p| &p.file));
        OpenFile::same(self.config.as_ref(), now.config.as_ref()) && OpenFile::same(before, after)
    }
}

/// How often a folder is read anew that is replaced meanwhile.
const ATTEMPTS: usize = 100;
/// How often a folder is read anew that has no config.json: between two saves it may have none for a moment.
const ATTEMPTS_WITHOUT: usize = 3;

/// Reads a folder, all of it from one version of the checkpoint: again where a save has replaced it meanwhile.
///
/// # Errors
/// Those of `read`, of the version that was there; a folder that is replaced again and again.
pub(super) fn read_one_version<T>(
    dir: &Path,
    options: OpenOptions,
    read: impl Fn(&Folder) -> crate::error::Result<T>,
) -> crate::error::Result<T> {
    let staged = |folder: &Folder| {
        folder.pending.as_ref().map(|_| std::fs::read_dir(dir.join(STAGING)).map_or(0, Iterator::count))
    };
    let mut without = 0;
    for _ in 0..ATTEMPTS {
        let folder = Folder::open(dir, options)?;
        let (version, staged_before) = (Version::of(&folder), staged(&folder));
        let result = read(&folder);
        // A file that could not be opened may have been on its way from `STAGING` to its place.
        let moved =
            matches!(&result, Err(Error::Checkpoint(CheckpointError::Io { .. }))) && staged(&folder) != staged_before;
        without += usize::from(version.config.is_none());
        if version.still(&folder) && !moved && (version.config.is_some() || without >= ATTEMPTS_WITHOUT) {
            return result;
        }
    }
    Err(io_error(dir, "the checkpoint is replaced again and again while it is opened").into())
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A folder in the middle of a save: config.json and, if it counts, the manifest of this letter, files staged.
    fn stage(dir: &Path, letter: &str, counts: bool) {
        let staging = dir.join(STAGING);
        fs::create_dir_all(&staging).unwrap();
        for name in [CONFIG, SINGLE] {
            fs::write(staging.join(name), letter).unwrap();
        }
        if counts {
            let files = [CONFIG, SINGLE].map(str::to_string).into();
            fs::write(&Manifest::paths(dir)[1], Manifest { files, stale: Vec::new() }.text()).unwrap();
            let _ = fs::remove_file(dir.join(CONFIG));
        }
    }

    /// The steps left of a save whose manifest counts.
    fn finish(dir: &Path) {
        for name in [SINGLE, CONFIG] {
            fs::rename(dir.join(STAGING).join(name), dir.join(name)).unwrap();
        }
        fs::remove_dir_all(dir.join(STAGING)).unwrap();
    }

    fn text(folder: &Folder, name: &str) -> String {
        fs::read_to_string(folder.find(name).unwrap().unwrap()).unwrap()
    }

    /// A reader that has seen a save's manifest goes on when that save is done and the next one stages its files, which
    /// do not count yet: it reads again, whether or not config.json is among those that are staged so far.
    #[test]
    fn staged_files_of_the_next_save_are_not_the_last_ones() {
        for config_staged in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let dir = dir.path();
            stage(dir, "a", true);
            let attempts = std::cell::Cell::new(0);
            let read = read_one_version(dir, OpenOptions::default(), |folder| {
                attempts.set(attempts.get() + 1);
                let before = text(folder, CONFIG);
                if attempts.get() == 1 {
                    finish(dir);
                    stage(dir, "b", false);
                    if !config_staged {
                        fs::remove_file(dir.join(STAGING).join(CONFIG)).unwrap();
                    }
                }
                Ok(before + &text(folder, SINGLE))
            });
            assert_eq!((read.unwrap().as_str(), attempts.get()), ("aa", 2), "config.json is staged: {config_staged}");
        }
    }

    /// As above, but config.json is met in the next save's files before anything else is read, and the next save counts
    /// and finishes while the rest is read.
    #[test]
    fn a_version_is_of_the_manifest_that_led_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        stage(dir, "a", true);
        let folder = Folder::open(dir, OpenOptions::default()).unwrap();
        finish(dir);
        stage(dir, "b", false);
        let version = Version::of(&folder);
        stage(dir, "b", true);
        assert!(!version.still(&folder));
        finish(dir);
        assert!(!version.still(&folder));
    }

    /// Without config.json between two saves a folder is read again; one that never has it is an error.
    #[test]
    fn no_config_for_a_moment() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let attempts = std::cell::Cell::new(0);
        let read = |appears: usize| {
            attempts.set(0);
            read_one_version(dir, OpenOptions::default(), |folder| {
                attempts.set(attempts.get() + 1);
                let found = folder.require(CONFIG).map(|_| ());
                if attempts.get() == appears {
                    fs::write(dir.join(CONFIG), "a").unwrap();
                }
                Ok(found?)
            })
        };
        assert!(read(usize::MAX).is_err());
        assert_eq!(attempts.get(), ATTEMPTS_WITHOUT);
        assert!(read(2).is_ok());
        assert_eq!(attempts.get(), 3);
    }
}
