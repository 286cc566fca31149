//! A folder's files, changed as its manifest says.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::super::folder::{CONFIG, INDEX, Manifest, QUANTIZATION, SINGLE, STAGING, own_name, same_file};
use super::super::json::{MAX_INDEX, read_limited};
use super::super::reader::parse_index;
use super::kill_point::step;
use crate::error::Result;

/// Names in a folder that are its checkpoint's, if they are there.
pub(super) fn owned(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names: BTreeSet<String> = [CONFIG, QUANTIZATION, SINGLE, INDEX].map(str::to_string).into();
    let index = dir.join(INDEX);
    // Of an index that cannot be read, nothing says what its shards are: they stay.
    if let Ok(map) = read_limited(&index, MAX_INDEX).and_then(|text| parse_index(&text, &index)) {
        let shard = |file: &str| own_name(file).is_some();
        names.extend(map.into_iter().map(|(_, file)| file).filter(|file| shard(file)));
    }
    names.retain(|name| dir.join(name).symlink_metadata().is_ok_and(|meta| !meta.is_dir()));
    Ok(names)
}

/// Step 3: writes the manifest, unless it is there, and does what it says. May be done again from any point. Leaves
/// [`STAGING`] empty.
pub(super) fn replace(dir: &Path, manifest: &Manifest) -> io::Result<()> {
    let [new, path] = Manifest::paths(dir);
    if !path.exists() {
        let file = File::create(&new)?;
        (&file).write_all(&manifest.text())?;
        file.sync_all()?;
        step("manifest written")?;
        fs::rename(&new, &path)?;
        sync(&dir.join(STAGING))?;
        step("manifest counts")?;
    }
    let staged = |name: &str| dir.join(STAGING).join(name);
    let later = |name: &&String| *name == CONFIG;
    if staged(CONFIG).exists() {
        remove(&dir.join(CONFIG))?;
        sync(dir)?;
        step("no config.json")?;
    }
    for name in &manifest.stale {
        remove(&dir.join(name))?;
        step("a stale file removed")?;
    }
    let (config, others): (Vec<&String>, Vec<&String>) = manifest.files.iter().partition(later);
    for name in others.into_iter().chain(config) {
        let from = staged(name);
        if from.symlink_metadata().is_ok() {
            fs::rename(from, dir.join(name))?;
            step("a file moved")?;
        }
    }
    sync(dir)?;
    fs::remove_file(&path)?;
    step("manifest removed")
}

/// Removes a folder that takes part in an exchange, which holds links to files that are elsewhere too, and files of a
/// checkpoint. What else is in it moves to `into`.
pub(super) fn discard(dir: &Path, into: Option<&Path>) -> io::Result<()> {
    let mut owned = owned(dir).map_err(io::Error::other)?;
    if let Ok(Some(manifest)) = Manifest::read(dir) {
        owned.extend(manifest.files.into_iter().chain(manifest.stale));
    }
    let mut last = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if name == STAGING || name == INDEX {
            // They say what the rest is, so they go last.
            last.push(path);
        } else if let Some(into) = into.filter(|_| !name.to_str().is_some_and(|name| owned.contains(name))) {
            move_newer(&path, &into.join(&name))?;
        } else if !entry.file_type()?.is_dir() {
            remove(&path)?;
        }
        step("an entry of the snapshot gone")?;
    }
    last.sort();
    for path in last.into_iter().rev() {
        match path.is_dir() {
            true => fs::remove_dir_all(&path)?,
            false => remove(&path)?,
        }
    }
    match fs::remove_dir(dir) {
        // A folder that was not there before: not this crate's to remove.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        done => done,
    }
}

/// Moves a file to where there is none, or an older one.
fn move_newer(from: &Path, to: &Path) -> io::Result<()> {
    let meta = from.symlink_metadata()?;
    match to.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
        Err(e) => Err(e),
        Ok(other) if same_file(&meta, &other) => remove(from),
        Ok(other) if !meta.is_dir() && !other.is_dir() && meta.modified()? > other.modified()? => fs::rename(from, to),
        Ok(_) if meta.is_dir() => Ok(()),
        Ok(_) => remove(from),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Makes what was done to a folder's names durable.
pub(super) fn sync(dir: &Path) -> io::Result<()> {
    // Unit tests end a save at each of its steps, not the system.
    if cfg!(all(unix, not(test))) { File::open(dir)?.sync_all() } else { Ok(()) }
}
