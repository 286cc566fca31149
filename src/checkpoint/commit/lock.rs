//! A folder that other savers leave alone.

use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::path::Path;

use super::super::folder::same_file;
use super::super::json::io_error;
use crate::error::CheckpointError;

/// A folder that other savers leave alone.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing alone would leave it to a process that is being started at this moment and has a copy of the file.
        let _ = self.0.unlock();
    }
}

/// The folder itself, locked. Where locks do not work (some network file systems), nothing keeps savers apart.
pub(super) fn lock(dir: &Path) -> std::result::Result<Option<Lock>, CheckpointError> {
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
    // Another folder has taken the name meanwhile: another saver's snapshot.
    let meta = |meta: io::Result<Metadata>| meta.map_err(|e| io_error(dir, e));
    match same_file(&meta(file.0.metadata())?, &meta(fs::metadata(dir))?) {
        true => Ok(Some(file)),
        false => Err(busy()),
    }
}
