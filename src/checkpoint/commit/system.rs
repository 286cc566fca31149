//! System calls that a snapshot needs.

use std::path::Path;

#[cfg(target_os = "linux")]
pub(super) use linux::{can_exchange, copy_owner, exchange};
#[cfg(not(target_os = "linux"))]
pub(super) use other::{can_exchange, copy_owner, exchange};

/// Whether both folders belong to the same user: in a folder that anybody may write to, a stranger may have made one.
#[cfg(unix)]
pub(super) fn same_owner(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let owner = |path: &Path| path.symlink_metadata().map(|meta| meta.uid());
    matches!((owner(a), owner(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(not(unix))]
pub(super) fn same_owner(_: &Path, _: &Path) -> bool {
    false
}

#[cfg(target_os = "linux")]
mod linux {
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
    pub(in crate::checkpoint::commit) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
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
    pub(in crate::checkpoint::commit) fn can_exchange(target: &Path) -> bool {
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
    pub(in crate::checkpoint::commit) fn copy_owner(from: &Path, to: &Path) -> io::Result<()> {
        let (want, made) = (fs::metadata(from)?, fs::metadata(to)?);
        if (want.uid(), want.gid()) != (made.uid(), made.gid()) {
            chown(to, Some(want.uid()), Some(want.gid()))?;
        }
        fs::set_permissions(to, Permissions::from_mode(want.mode() & 0o7777))
    }
}

/// No exchange of names here.
#[cfg(not(target_os = "linux"))]
mod other {
    use std::io;
    use std::path::Path;

    pub(in crate::checkpoint::commit) fn exchange(_: &Path, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::checkpoint::commit) fn can_exchange(_: &Path) -> bool {
        false
    }

    pub(in crate::checkpoint::commit) fn copy_owner(_: &Path, _: &Path) -> io::Result<()> {
        Ok(())
    }
}
