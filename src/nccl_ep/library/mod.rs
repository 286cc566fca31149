//! Finding and loading NCCL EP.

mod compiler;
mod search;

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::nccl::{NcclLibrary, reason};

pub use compiler::Compiler;

use super::{NcclEpError, result, sys};

/// Names the library's file; goes before the system's search.
pub const NCCL_EP_LIBRARY_VARIABLE: &str = "MOEBIUS_NCCL_EP";
const NAME: &str = "libnccl_ep.so.0";
const OLDEST_NCCL: i32 = 23004;
/// 0.2.x: what was looked at. Later ones may have another interface, or keep other promises behind the same (see the
/// dispatcher for low latency).
const VERSIONS: std::ops::Range<i32> = 200..300;

/// NCCL EP, loaded, with the NCCL that it calls and a compiler for its kernels. Cheap to clone; never unloaded.
#[derive(Clone)]
pub struct NcclEpLibrary(Arc<LoadedNcclEp>);

struct LoadedNcclEp {
    functions: sys::Library,
    nccl: NcclLibrary,
    path: String,
    version: i32,
}

impl fmt::Debug for NcclEpLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclEpLibrary {{ path: {:?}, version: {} }}", self.0.path, self.version())
    }
}

/// Structs of the bindings and the sizes that the interface states for them.
const SIZES: [(&str, usize, u32); 11] = [
    ("ncclEpTensor_t", size_of::<sys::ncclEpTensor_t>(), sys::NCCL_EP_TENSOR_V1_SIZE),
    ("ncclEpGroupConfig_t", size_of::<sys::ncclEpGroupConfig_t>(), sys::NCCL_EP_GROUP_CONFIG_V2_SIZE),
    ("ncclEpLayoutInfo_t", size_of::<sys::ncclEpLayoutInfo_t>(), sys::NCCL_EP_LAYOUT_INFO_V2_SIZE),
    ("ncclEpHandleConfig_t", size_of::<sys::ncclEpHandleConfig_t>(), sys::NCCL_EP_HANDLE_CONFIG_V1_SIZE),
    ("ncclEpDispatchInputs_t", size_of::<sys::ncclEpDispatchInputs_t>(), sys::NCCL_EP_DISPATCH_INPUTS_V1_SIZE),
    ("ncclEpDispatchOutputs_t", size_of::<sys::ncclEpDispatchOutputs_t>(), sys::NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE),
    ("ncclEpDispatchConfig_t", size_of::<sys::ncclEpDispatchConfig_t>(), sys::NCCL_EP_DISPATCH_CONFIG_V2_SIZE),
    ("ncclEpCombineInputs_t", size_of::<sys::ncclEpCombineInputs_t>(), sys::NCCL_EP_COMBINE_INPUTS_V2_SIZE),
    ("ncclEpCombineOutputs_t", size_of::<sys::ncclEpCombineOutputs_t>(), sys::NCCL_EP_COMBINE_OUTPUTS_V1_SIZE),
    ("ncclEpCombineConfig_t", size_of::<sys::ncclEpCombineConfig_t>(), sys::NCCL_EP_COMBINE_CONFIG_V2_SIZE),
    ("ncclEpCompleteConfig_t", size_of::<sys::ncclEpCompleteConfig_t>(), sys::NCCL_EP_COMPLETE_CONFIG_V1_SIZE),
];

fn check_sizes(sizes: &[(&'static str, usize, u32)]) -> Result<(), NcclEpError> {
    match sizes.iter().find(|(_, found, stated)| *found != *stated as usize) {
        None => Ok(()),
        Some((name, found, stated)) => Err(NcclEpError::StructSize { name, expected: *stated as usize, found: *found }),
    }
}

fn text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl NcclEpLibrary {
    /// The library that `MOEBIUS_NCCL_EP` names, else `libnccl_ep.so.0` as the system finds it. The first call of a
    /// process also finds a compiler for its kernels and tells the library through environment variables, so it
    /// belongs before threads of other libraries that read them.
    ///
    /// # Errors
    /// [`NcclEpError`]: it cannot be loaded, it or NCCL is too old, or its kernels would not compile. A path that is given
    /// is the only one tried.
    pub fn open(nccl: &NcclLibrary) -> Result<Self, NcclEpError> {
        match std::env::var_os(NCCL_EP_LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Self::load(nccl, path, NCCL_EP_LIBRARY_VARIABLE),
            None => Self::load(nccl, NAME.into(), "as the system searches; MOEBIUS_NCCL_EP is not set"),
        }
    }

    /// The library in this file.
    ///
    /// # Errors
    /// As [`NcclEpLibrary::open`].
    pub fn at(nccl: &NcclLibrary, path: impl AsRef<Path>) -> Result<Self, NcclEpError> {
        Self::load(nccl, path.as_ref().into(), "the caller's path")
    }

    fn load(nccl: &NcclLibrary, path: OsString, source_of_path: &'static str) -> Result<Self, NcclEpError> {
        check_sizes(&SIZES)?;
        // The library finds NCCL's functions in what is loaded already.
        if nccl.version_code() < OLDEST_NCCL {
            return Err(NcclEpError::NcclVersion { path: nccl.path().to_string(), found: nccl.version() });
        }
        let name = path.to_string_lossy().into_owned();
        let refused =
            |e: &libloading::Error| NcclEpError::Load { path: name.clone(), source_of_path, message: reason(e) };
        // SAFETY: its initializers only prepare its own state. What else a caller names by a path of theirs is, as with
        // any library path, code that they trust.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| refused(&e))?;
        // SAFETY: the functions are the library's of these names, or the caller's word for it.
        let functions = unsafe { sys::Library::from_library(library) }.map_err(|e| refused(&e))?;
        let version = result::get_version(&functions)?;
        if !VERSIONS.contains(&version) {
            return Err(NcclEpError::Version { path: name, found: text(version) });
        }
        let file = loaded_file().unwrap_or_else(|| PathBuf::from(&path));
        Compiler::find(&file)?.prepare()?;
        tracing::debug!(path = name, version = text(version), "loaded NCCL EP");
        Ok(Self(Arc::new(LoadedNcclEp { functions, nccl: nccl.clone(), path: name, version })))
    }

    /// The functions, for callers that go beyond this crate's.
    pub fn functions(&self) -> &sys::Library {
        &self.0.functions
    }

    /// NCCL, as this library calls it.
    pub fn nccl(&self) -> &NcclLibrary {
        &self.0.nccl
    }

    /// The file, as it was asked for.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Version as text.
    pub fn version(&self) -> String {
        text(self.0.version)
    }
}

/// Where the loader found the library: its headers lie beside it.
fn loaded_file() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().find_map(|line| line.split_once('/').filter(|(_, rest)| rest.contains("libnccl_ep.so")));
    path.map(|(_, rest)| PathBuf::from(format!("/{rest}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bindings_have_the_sizes_that_the_interface_states() {
        assert_eq!(check_sizes(&SIZES), Ok(()));
        let wrong = NcclEpError::StructSize { name: "s", expected: 8, found: 4 };
        assert_eq!(check_sizes(&[("t", 8, 8), ("s", 4, 8)]), Err(wrong));
    }

    #[test]
    fn versions_read_as_the_library_writes_them() {
        assert_eq!(text(200), "0.2.0");
        assert_eq!(text(11203), "1.12.3");
        assert!(VERSIONS.contains(&200) && !VERSIONS.contains(&199) && !VERSIONS.contains(&300));
    }
}
