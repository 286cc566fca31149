//! Replaces the checkpoint in a folder by another as one step.
//!
//! A folder holds a checkpoint in several files, and a file system replaces one name at a time. A save goes through
//! these states, in each of which a reader finds the old checkpoint whole or the new one whole, whatever is killed
//! when:
//!
//! 1. Every new file is written and synced in a folder of its own in the target, [`STAGING`].
//! 2. Where the system can exchange two names (`renameat2` of Linux), a *snapshot* is made beside the target: a folder
//!    of links to the new files and to those files of the target that are not the checkpoint's. It takes the target's
//!    name, and the target that of the snapshot, in one step.
//! 3. A [`Manifest`] is written in the target, then the old files go, config.json first, and the new ones take their
//!    names, config.json last.
//! 4. The target and its snapshot change names again, and the snapshot goes.
//!
//! So the target stays the folder that it was, with its permissions, its subfolders and whoever stands in it, and
//! nothing in it that is not the checkpoint's is touched. No snapshot is made where one could not show all that the
//! target holds (a subfolder, extended attributes, files that this user may not link, a mount point), nor on other
//! systems. Then the target has no config.json during step 3. This crate's reader goes by the manifest and finds the
//! new checkpoint; another program finds none for that moment, but never parts of both.
//!
//! The next save into the folder finishes what a killed one left: [`recover`].

mod kill_point;
mod lock;
mod replace;
mod snapshot;
mod system;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::folder::{CONFIG, Manifest, STAGING};
use super::json::io_error;
use crate::error::Result;

use kill_point::{step, stopped};
use lock::{Lock, lock};
use replace::{owned, replace, sync};
use snapshot::{Snapshot, recover};

const BUFFER: usize = 1 << 20;
/// Bytes between two syncs of a file.
const SYNC: usize = 256 << 20;

/// A save under way. Dropped before [`finish`](Self::finish), it leaves nothing behind.
#[derive(Debug)]
pub(super) struct Save {
    target: PathBuf,
    /// Folders that [`begin`](Self::begin) made, the innermost last.
    made: Vec<PathBuf>,
    files: Vec<String>,
    /// Keeps other savers out as long as it is open.
    _lock: Option<Lock>,
    /// The folder is as it was but for [`STAGING`].
    unchanged: bool,
}

impl Save {
    /// Makes the folder where there is none, keeps other savers out, and finishes what a killed one left.
    pub fn begin(dir: &Path) -> Result<Self> {
        let missing = dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let mut made: Vec<PathBuf> = missing.map(Path::to_path_buf).collect();
        made.reverse();
        fs::create_dir_all(dir).map_err(|e| io_error(dir, e))?;
        let target = dir.canonicalize().map_err(|e| io_error(dir, e))?;
        let lock = lock(&target)?;
        recover(&target).map_err(|e| io_error(&target, e))?;
        let staging = target.join(STAGING);
        fs::create_dir(&staging).map_err(|e| io_error(&staging, e))?;
        Ok(Self { target, made, files: Vec::new(), _lock: lock, unchanged: true })
    }

    /// Writes a file of the new checkpoint and syncs it.
    pub fn file(&mut self, name: &str, content: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let path = self.target.join(STAGING).join(name);
        // Messages name the file as it will be called.
        let failed = |e: io::Error| io_error(&self.target.join(name), e);
        let file = File::create_new(&path).map_err(failed)?;
        let mut out = BufWriter::with_capacity(BUFFER, Synced { file: &file, since: 0 });
        content(&mut out)?;
        out.flush().map_err(failed)?;
        drop(out);
        file.sync_all().map_err(failed)?;
        self.files.push(name.to_string());
        Ok(())
    }

    /// Makes the new checkpoint the folder's.
    pub fn finish(mut self) -> Result<()> {
        let folder = |name: &&String| self.target.join(name).symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if let Some(name) = self.files.iter().find(folder) {
            return Err(io_error(&self.target.join(name), "a folder, where a file is to be").into());
        }
        let owned = owned(&self.target)?;
        let stale = owned.into_iter().filter(|name| !self.files.contains(name)).collect();
        let manifest = Manifest { files: std::mem::take(&mut self.files), stale };
        self.commit(&manifest).map_err(|e| io_error(&self.target, e).into())
    }

    fn commit(&mut self, manifest: &Manifest) -> io::Result<()> {
        sync(&self.target.join(STAGING))?;
        step("staged")?;
        let snapshot = Snapshot::show(&self.target, manifest)?;
        self.unchanged = false;
        match snapshot {
            Some(snapshot) => {
                replace(&snapshot.other, manifest)?;
                snapshot.end(&self.target)?;
            }
            None => replace(&self.target, manifest).inspect_err(|_| {
                // Nothing has changed before the manifest counts.
                let [_, manifest] = Manifest::paths(&self.target);
                self.unchanged = !manifest.exists() && self.target.join(STAGING).join(CONFIG).exists();
            })?,
        }
        fs::remove_dir_all(self.target.join(STAGING))?;
        sync(&self.target)
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if self.unchanged && !stopped() {
            // The next save removes files that cannot be removed now.
            let _ = fs::remove_dir_all(self.target.join(STAGING));
            for dir in self.made.iter().rev() {
                let _ = fs::remove_dir(dir);
            }
        }
    }
}

/// A file that is synced now and then, so that no sync takes long.
struct Synced<'a> {
    file: &'a File,
    since: usize,
}

impl Write for Synced<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.since += written;
        if self.since >= SYNC {
            self.since = 0;
            self.file.sync_data()?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::kill_point::LEFT;
    use super::*;
    use crate::checkpoint::OpenOptions;
    use crate::checkpoint::folder::{Folder, INDEX, QUANTIZATION, SINGLE};

    fn save(dir: &Path, files: &[&str], letter: &str) -> Result<()> {
        let mut save = Save::begin(dir)?;
        for name in files {
            save.file(name, |out| Ok(out.write_all(&content(name, files, letter)).map_err(|e| io_error(dir, e))?))?;
        }
        save.finish()
    }

    fn content(name: &str, files: &[&str], letter: &str) -> Vec<u8> {
        let map = |file: &&str| format!("\"{file} {letter}\": \"{file}\"");
        let shards: Vec<String> = files.iter().filter(|file| file.contains("-of-")).map(map).collect();
        match name {
            INDEX => format!("{{\"weight_map\": {{{}}}}}", shards.join(",")).into_bytes(),
            _ => letter.as_bytes().to_vec(),
        }
    }

    /// Whether the folder is wholly of this form, as a reader that knows of manifests sees it or as any other.
    fn is(dir: &Path, files: &[&str], letter: &str, ours: bool) -> bool {
        let folder = Folder::open(dir, OpenOptions::default()).unwrap();
        [CONFIG, SINGLE, INDEX, QUANTIZATION, "model-1-of-2.safetensors", "model-2-of-2.safetensors"].iter().all(
            |name| {
                let path =
                    if ours { folder.find(name).unwrap() } else { Some(dir.join(name)).filter(|path| path.exists()) };
                let expected = files.contains(name).then(|| content(name, files, letter));
                path.map(|path| fs::read(path).unwrap()) == expected
            },
        )
    }

    const A: [&str; 2] = [CONFIG, SINGLE];
    const B: [&str; 5] = [CONFIG, QUANTIZATION, INDEX, "model-1-of-2.safetensors", "model-2-of-2.safetensors"];

    /// A save that ends at any of its steps leaves one form or the other whole, and the user's files; the next save
    /// leaves nothing of it. With a subfolder there is no snapshot.
    #[test]
    fn ends_at_every_step() {
        for subfolder in [false, true] {
            for (old, new) in [(&A[..], &B[..]), (&B[..], &A[..]), (&A[..], &A[..])] {
                let mut seen = [0; 2];
                for at in 1.. {
                    let parent = tempfile::tempdir().unwrap();
                    let dir = parent.path().join("model");
                    LEFT.set(usize::MAX);
                    save(&dir, old, "a").unwrap();
                    fs::write(dir.join("README.md"), "mine").unwrap();
                    fs::write(dir.join("model-9-of-9.safetensors"), "mine").unwrap();
                    if subfolder {
                        fs::create_dir(dir.join("runs")).unwrap();
                        fs::write(dir.join("runs/log"), "mine").unwrap();
                    }
                    LEFT.set(at);
                    let result = save(&dir, new, "b");
                    let killed = stopped();
                    LEFT.set(usize::MAX);
                    assert_eq!(result.is_err(), killed, "{result:?}");
                    let forms = [is(&dir, old, "a", true), is(&dir, new, "b", true)];
                    assert!(forms[0] != forms[1], "step {at}: {forms:?}, {result:?}");
                    seen[usize::from(forms[1])] += 1;
                    let whole = is(&dir, old, "a", false) || is(&dir, new, "b", false);
                    // Without a snapshot another program may find no config.json, never parts of both.
                    assert!(
                        whole || (subfolder && !dir.join(CONFIG).exists()) || forms[1] && is(&dir, old, "a", false)
                    );
                    let mine = |name: &str| assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), "mine", "{name}");
                    let all_mine = || {
                        mine("README.md");
                        mine("model-9-of-9.safetensors");
                        if subfolder {
                            mine("runs/log");
                        }
                    };
                    all_mine();
                    // A file that somebody puts there before the next save stays, wherever the name led to.
                    fs::write(dir.join("later.txt"), "mine").unwrap();
                    save(&dir, new, "c").unwrap();
                    assert!(is(&dir, new, "c", false), "step {at}");
                    all_mine();
                    mine("later.txt");
                    let count = |dir: &Path| fs::read_dir(dir).unwrap().count();
                    assert_eq!(count(parent.path()), 1, "step {at}: leftovers beside the folder");
                    assert_eq!(count(&dir), new.len() + 3 + usize::from(subfolder), "step {at}: leftovers");
                    if !killed {
                        break;
                    }
                }
                assert!(seen[0] >= 2 && seen[1] >= 5, "{seen:?}");
            }
        }
    }
}
