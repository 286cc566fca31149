//! Finding and loading NCCL.

use std::ffi::{CStr, OsString, c_char};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::Result;
use crate::ranks::UniqueId;

use crate::nccl::NcclError;
use crate::nccl::ffi::sys::{CommPtr, Functions, RawUniqueId, Status};

/// Names the library's file; goes before the system's search.
pub const LIBRARY_VARIABLE: &str = "MOEBIUS_NCCL";
const NAME: &str = "libnccl.so.2";
const OLDEST: i32 = 21800;
const OLDEST_TEXT: &str = "2.18.0";

/// NCCL, loaded. Cheap to clone; never unloaded, since NCCL keeps threads of its own.
#[derive(Clone)]
pub struct NcclLibrary(Arc<LoadedNccl>);

struct LoadedNccl {
    functions: Functions,
    path: String,
    version: i32,
}

impl fmt::Debug for NcclLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclLibrary {{ path: {:?}, version: {} }}", self.0.path, self.version())
    }
}

/// Which file, and who says so.
struct LibraryPath {
    path: OsString,
    source: &'static str,
}

impl NcclLibrary {
    /// The library that `MOEBIUS_NCCL` names, else `libnccl.so.2` as the system finds it (or as this process has
    /// loaded it already).
    ///
    /// # Errors
    /// [`NcclError`]: it cannot be loaded, is too old or is not NCCL. A path that is given is the only one tried.
    pub fn open() -> Result<Self> {
        match std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Self::load(LibraryPath { path, source: LIBRARY_VARIABLE }),
            None => {
                Self::load(LibraryPath { path: NAME.into(), source: "as the system searches; MOEBIUS_NCCL is not set" })
            }
        }
    }

    /// The library in this file.
    ///
    /// # Errors
    /// As [`NcclLibrary::open`].
    pub fn at(path: impl AsRef<Path>) -> Result<Self> {
        Self::load(LibraryPath { path: path.as_ref().into(), source: "the caller's path" })
    }

    fn load(wanted: LibraryPath) -> Result<Self> {
        let (path, source_of_path) = (wanted.path.to_string_lossy().into_owned(), wanted.source);
        // Globally: libnccl_ep finds its NCCL functions there.
        // SAFETY: NCCL's initializers only prepare its own state. What else a caller names by a path of theirs is, as
        // with any library path, code that they trust.
        let library = unsafe { Library::open(Some(&wanted.path), RTLD_NOW | RTLD_GLOBAL) };
        let library: libloading::Library =
            library.map_err(|e| NcclError::Load { path: path.clone(), source_of_path, message: reason(&e) })?.into();
        // SAFETY: the name is NCCL's, or the caller's word for it; the version is asked below before anything else.
        let functions = unsafe { Functions::find(&library) }.map_err(|symbol| NcclError::Symbol {
            path: path.clone(),
            source_of_path,
            symbol,
            needed: OLDEST_TEXT,
        })?;
        std::mem::forget(library);
        let loaded = Self::of(functions, path, source_of_path)?;
        tracing::debug!(path = loaded.0.path, version = loaded.version(), "loaded NCCL");
        Ok(loaded)
    }

    /// A library of these functions.
    pub(in crate::nccl) fn of(functions: Functions, path: String, source_of_path: &'static str) -> Result<Self> {
        let mut version = 0;
        // SAFETY: the result is written to a local.
        let status = unsafe { (functions.get_version)(&raw mut version) };
        if status != Status::SUCCESS {
            // Not asked for a text: what cannot tell its version is hardly NCCL.
            let (name, detail) = (path, String::new());
            return Err(NcclError::Call { function: "ncclGetVersion", code: status.0, name, detail }.into());
        }
        if version < OLDEST {
            let (found, needed, reason) = (text_of(version), OLDEST_TEXT, "ncclCommSplit, for groups of a mesh");
            return Err(NcclError::Version { path, source_of_path, found, needed, reason }.into());
        }
        Ok(Self(Arc::new(LoadedNccl { functions, path, version })))
    }

    /// The functions, for callers that go beyond this crate's.
    pub fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// The file, as it was asked for.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Version as NCCL counts: 2.30.7 is 23007.
    pub fn version_code(&self) -> i32 {
        self.0.version
    }

    /// Version as text.
    pub fn version(&self) -> String {
        text_of(self.0.version)
    }

    /// A new id, for the ranks of one communicator.
    ///
    /// # Errors
    /// [`NcclError::Call`], for instance where there is no network interface to meet at.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = RawUniqueId { internal: [0; 128] };
        // SAFETY: the result is written to a local.
        let status = unsafe { (self.0.functions.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", std::ptr::null_mut(), status)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// A status as a result. The communicator, where there is one, tells more; it may be null.
    pub(in crate::nccl) fn check(
        &self,
        function: &'static str,
        comm: CommPtr,
        status: Status,
    ) -> std::result::Result<(), NcclError> {
        if status == Status::SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a string of its own for any number; the last error's lives until the next, and
        // is copied here. The communicator is alive or null.
        let (name, detail) = unsafe {
            (text((self.0.functions.get_error_string)(status)), text((self.0.functions.get_last_error)(comm)))
        };
        Err(NcclError::Call { function, code: status.0, name, detail: detail.trim().to_string() })
    }

    /// A function that an older library lacks.
    pub(in crate::nccl) fn newer<F: Copy>(&self, function: &'static str, found: Option<F>) -> Result<F> {
        Ok(found.ok_or_else(|| NcclError::Missing { function, found: self.version() })?)
    }
}

/// A version as text. Up to 2.8 NCCL counted in thousands.
fn text_of(code: i32) -> String {
    let major = if code < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", code / major, code % major / 100, code % 100)
}

/// The loader's own words, which the error wraps.
pub(crate) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// # Safety
/// Null, or a C string.
unsafe fn text(from: *const c_char) -> String {
    if from.is_null() {
        return String::new();
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}
