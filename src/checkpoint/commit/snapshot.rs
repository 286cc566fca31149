//! A folder that takes the target's place while the target changes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::super::folder::{CONFIG, Manifest, STAGING};
use super::kill_point::{step, stopped};
use super::lock::{Lock, lock};
use super::replace::{discard, replace, sync};
use super::system::{self, same_owner};

/// A folder that stands at the target's place while the target changes.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// Where the target is meanwhile, and the snapshot before and after.
    pub(super) other: PathBuf,
    _lock: Option<Lock>,
}

impl Snapshot {
    /// Where one is made: beside the target.
    fn path(target: &Path) -> Option<PathBuf> {
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name()?);
        name.push(STAGING);
        Some(target.parent()?.join(name))
    }

    /// Step 2. `None` where one could not show all that the target holds; the target is then as it was.
    pub(super) fn show(target: &Path, manifest: &Manifest) -> io::Result<Option<Self>> {
        let Some(other) = Self::path(target).filter(|_| system::can_exchange(target)) else { return Ok(None) };
        if fs::create_dir(&other).is_err() {
            return Ok(None);
        }
        let made = Self::fill(&other, target, manifest).and_then(|lock| {
            step("snapshot complete")?;
            system::exchange(&other, target)?;
            Ok(lock)
        });
        match made {
            Ok(lock) => {
                let shown = Self { other, _lock: lock };
                // Best effort: what follows is right whichever of both names a crash keeps.
                let _ = target.parent().map(sync);
                step("snapshot shown")?;
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
    pub(super) fn end(self, target: &Path) -> io::Result<()> {
        step("target changed")?;
        system::exchange(&self.other, target)?;
        step("target back")?;
        discard(&self.other, Some(target))
    }
}

/// Finishes or undoes a save that was killed. The caller has locked the target.
pub(super) fn recover(target: &Path) -> io::Result<()> {
    let pending = Manifest::read(target).map_err(io::Error::other)?;
    if let Some(other) = Snapshot::path(target)
        && other.symlink_metadata().is_ok_and(|meta| meta.is_dir())
        && same_owner(&other, target)
    {
        let _lock = lock(&other).map_err(io::Error::other)?;
        // A snapshot that has not been shown yet is links alone. Then all new files still lie in the target. Once it
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
