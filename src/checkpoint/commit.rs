//! Replaces the checkpoint in a folder by another as one step.
//!
//! A folder holds a checkpoint in several files, and a file system replaces one name at a time. A save goes through
//! these states, in each of which a reader finds the old checkpoint whole or the new one whole, whatever is killed
//! when:
//!
//! 1. Every new file is written and synced in a folder of its own in the target, [`STAGING`].
//! 2. Where the system can exchange two names (`renameat2` of Linux), a *stand-in* is made beside the target: a folder
//!    of links to the new files and to those files of the target that are not the checkpoint's. It takes the target's
//!    name, and the target that of the stand-in, in one step.
//! 3. A [`Manifest`] is written in the target, then the old files go, config.json first, and the new ones take their
//!    names, config.json last.
//! 4. The target and its stand-in change names again, and the stand-in goes.
//!
//! So the target stays the folder that it was, with its permissions, its subfolders and whoever stands in it, and
//! nothing in it that is not the checkpoint's is touched. No stand-in is made where one could not show all that the
//! target holds (a subfolder, extended attributes, files that this user may not link, a mount point), nor on other
//! systems. Then the target has no config.json during step 3. This crate's reader goes by the manifest and finds the
//! new checkpoint; another program finds none for that moment, but never parts of both.
//!
//! The next save into the folder finishes what a killed one left: [`recover`].

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::folder::{CONFIG, INDEX, Manifest, QUANTIZATION, SINGLE, STAGING, own_name, same_file};
use super::json::{MAX_INDEX, io_error, read_limited};
use super::reader::parse_index;
use crate::error::{CheckpointError, Result};

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
        let standin = StandIn::show(&self.target, manifest)?;
        self.unchanged = false;
        match standin {
            Some(standin) => {
                replace(&standin.other, manifest)?;
                standin.end(&self.target)?;
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

/// Names in a folder that are its checkpoint's, if they are there.
fn owned(dir: &Path) -> Result<BTreeSet<String>> {
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
fn replace(dir: &Path, manifest: &Manifest) -> io::Result<()> {
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

/// Finishes or undoes a save that was killed. The caller has locked the target.
fn recover(target: &Path) -> io::Result<()> {
    let pending = Manifest::read(target).map_err(io::Error::other)?;
    if let Some(other) = StandIn::path(target)
        && other.symlink_metadata().is_ok_and(|meta| meta.is_dir())
        && same_owner(&other, target)
    {
        let _lock = lock(&other).map_err(io::Error::other)?;
        // A stand-in that has not been shown yet is links alone. Then all new files still lie in the target. Once it
        // has been shown, both folders may hold what a program has put there; the one at the target's place is
        // complete.
        let shown = other.join(STAGING).is_dir() || !target.join(STAGING).join(CONFIG).exists();
        discard(&other, shown.then_some(target))?;
    }
    if let Some(manifest) = pending {
        replace(target, &manifest)?;
    }
    match fs::remove_dir_all(target.join(STAGING)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes a folder that takes part in an exchange, which holds links to files that are elsewhere too, and files of a
/// checkpoint. What else is in it moves to `into`.
fn discard(dir: &Path, into: Option<&Path>) -> io::Result<()> {
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
        step("an entry of the stand-in gone")?;
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
fn sync(dir: &Path) -> io::Result<()> {
    // Unit tests end a save at each of its steps, not the system.
    if cfg!(all(unix, not(test))) { File::open(dir)?.sync_all() } else { Ok(()) }
}

/// A folder that other savers leave alone.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing alone would leave it to a process that is being started at this moment and has a copy of the file.
        let _ = self.0.unlock();
    }
}

/// The folder itself, locked. Where locks do not work (some network file systems), nothing keeps savers apart.
fn lock(dir: &Path) -> std::result::Result<Option<Lock>, CheckpointError> {
    let busy = || CheckpointError::Busy { path: dir.display().to_string() };
    // A folder cannot be opened as a file elsewhere. Of two savers one then finds its files gone, an error too.
    if cfg!(not(unix)) {
        return Ok(None);
    }
    let file = File::open(dir).map_err(|e| io_error(dir, e))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Err(busy()),
        Err(TryLockError::Error(_)) => return Ok(None),
        Ok(()) => {}
    }
    let file = Lock(file);
    // Another folder has taken the name meanwhile: another saver's stand-in.
    let meta = |meta: io::Result<Metadata>| meta.map_err(|e| io_error(dir, e));
    match same_file(&meta(file.0.metadata())?, &meta(fs::metadata(dir))?) {
        true => Ok(Some(file)),
        false => Err(busy()),
    }
}

/// A folder that stands at the target's place while the target changes.
#[derive(Debug)]
struct StandIn {
    /// Where the target is meanwhile, and the stand-in before and after.
    other: PathBuf,
    _lock: Option<Lock>,
}

impl StandIn {
    /// Where one is made: beside the target.
    fn path(target: &Path) -> Option<PathBuf> {
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name()?);
        name.push(STAGING);
        Some(target.parent()?.join(name))
    }

    /// Step 2. `None` where one could not show all that the target holds; the target is then as it was.
    fn show(target: &Path, manifest: &Manifest) -> io::Result<Option<Self>> {
        let Some(other) = Self::path(target).filter(|_| system::can_stand_in(target)) else { return Ok(None) };
        if fs::create_dir(&other).is_err() {
            return Ok(None);
        }
        let made = Self::fill(&other, target, manifest).and_then(|lock| {
            step("stand-in complete")?;
            system::exchange(&other, target)?;
            Ok(lock)
        });
        match made {
            Ok(lock) => {
                let shown = Self { other, _lock: lock };
                // Best effort: what follows is right whichever of both names a crash keeps.
                let _ = target.parent().map(sync);
                step("stand-in shown")?;
                Ok(Some(shown))
            }
            Err(e) if stopped() => Err(e),
            Err(_) => {
                let _ = discard(&other, None);
                Ok(None)
            }
        }
    }

    fn fill(other: &Path, target: &Path, manifest: &Manifest) -> io::Result<Option<Lock>> {
        system::copy_owner(target, other)?;
        let lock = lock(other).map_err(io::Error::other)?;
        for name in &manifest.files {
            fs::hard_link(target.join(STAGING).join(name), other.join(name))?;
        }
        step("new files linked")?;
        for entry in fs::read_dir(target)? {
            let (name, kind) = entry.and_then(|entry| Ok((entry.file_name(), entry.file_type()?)))?;
            let own = |names: &[String]| names.iter().any(|own| name == own.as_str());
            if name == STAGING || own(&manifest.files) || own(&manifest.stale) {
                continue;
            }
            if !kind.is_file() && !kind.is_symlink() {
                return Err(io::ErrorKind::Unsupported.into());
            }
            fs::hard_link(target.join(&name), other.join(&name))?;
        }
        sync(other)?;
        Ok(lock)
    }

    /// Step 4.
    fn end(self, target: &Path) -> io::Result<()> {
        step("target changed")?;
        system::exchange(&self.other, target)?;
        step("target back")?;
        discard(&self.other, Some(target))
    }
}

/// Whether both folders belong to the same user: in a folder that anybody may write to, a stranger may have made one.
#[cfg(unix)]
fn same_owner(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let owner = |path: &Path| path.symlink_metadata().map(|meta| meta.uid());
    matches!((owner(a), owner(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(not(unix))]
fn same_owner(_: &Path, _: &Path) -> bool {
    false
}

/// System calls that a stand-in needs.
#[cfg(target_os = "linux")]
mod system {
    use std::ffi::CString;
    use std::fs::{self, Permissions};
    use std::io;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    use std::path::Path;

    fn c_path(path: &Path) -> io::Result<CString> {
        Ok(CString::new(path.as_os_str().as_bytes())?)
    }

    /// Exchanges the names of two folders of a file system.
    pub fn exchange(a: &Path, b: &Path) -> io::Result<()> {
        let (a, b) = (c_path(a)?, c_path(b)?);
        let at = libc::AT_FDCWD;
        // SAFETY: both paths end with a zero and outlive the call, which keeps nothing of them. By its number, as not
        // every C library has a function for it.
        let done = unsafe {
            libc::syscall(libc::SYS_renameat2, at, a.as_ptr(), at, b.as_ptr(), libc::RENAME_EXCHANGE as libc::c_long)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Whether a folder beside the target can be just like it: on the same file system, no mount point, no attributes
    /// that a new folder would lack (access lists are such).
    pub fn can_stand_in(target: &Path) -> bool {
        let device = |path: &Path| path.metadata().map(|meta| meta.dev());
        let beside =
            target.parent().is_some_and(|parent| matches!((device(parent), device(target)), (Ok(a), Ok(b)) if a == b));
        beside && !has_attributes(target)
    }

    fn has_attributes(path: &Path) -> bool {
        let Ok(path) = c_path(path) else { return true };
        let mut names = [0u8; 4096];
        // SAFETY: the path ends with a zero, `names` has as many bytes as the call is told; it keeps neither.
        let len = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
        match usize::try_from(len) {
            // A label that the system gives to new folders too.
            Ok(len) => names[..len].split(|b| *b == 0).any(|name| !name.is_empty() && name != b"security.selinux"),
            // A file system without attributes.
            Err(_) => io::Error::last_os_error().raw_os_error() != Some(libc::ENOTSUP),
        }
    }

    /// Gives a new folder the owner, group and permissions of another.
    pub fn copy_owner(from: &Path, to: &Path) -> io::Result<()> {
        let (want, made) = (fs::metadata(from)?, fs::metadata(to)?);
        if (want.uid(), want.gid()) != (made.uid(), made.gid()) {
            chown(to, Some(want.uid()), Some(want.gid()))?;
        }
        fs::set_permissions(to, Permissions::from_mode(want.mode() & 0o7777))
    }
}

/// No exchange of names here.
#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;
    use std::path::Path;

    pub fn exchange(_: &Path, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn can_stand_in(_: &Path) -> bool {
        false
    }

    pub fn copy_owner(_: &Path, _: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// A point at which a test may end a save as a kill would.
#[cfg(not(test))]
fn step(_: &str) -> io::Result<()> {
    Ok(())
}

#[cfg(not(test))]
fn stopped() -> bool {
    false
}

#[cfg(test)]
use tests::{step, stopped};

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::checkpoint::OpenOptions;
    use crate::checkpoint::folder::Folder;

    thread_local! {
        /// Steps until the save ends; 0: it has.
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    pub(super) fn step(name: &str) -> io::Result<()> {
        let left = LEFT.get().saturating_sub(1);
        LEFT.set(left);
        if left == 0 { Err(io::Error::other(format!("killed: {name}"))) } else { Ok(()) }
    }

    pub(super) fn stopped() -> bool {
        LEFT.get() == 0
    }

    /// Saves a form: files with its letter in them.
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
    /// leaves nothing of it. With a subfolder there is no stand-in.
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
                    // Without a stand-in another program may find no config.json, never parts of both.
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
