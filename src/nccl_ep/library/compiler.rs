//! The compiler of NCCL EP's kernels: the library runs nvcc when a kernel is first used, and ends the process where
//! that fails. So compiler, headers and the folder of compiled kernels are found, checked and tried before its first
//! call.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use crate::nccl_ep::NcclEpError;

use super::search::{CACHE, Env, SearchPaths, above, cache, shown};

const NVCC: &str = "NCCL_EP_JIT_NVCC";
const SOURCES: &str = "NCCL_EP_JIT_SOURCE_DIR";
const NCCL_HEADERS: &str = "NCCL_EP_JIT_BUILD_INCLUDE_DIR";
const CUDA_HEADERS: &str = "NCCL_EP_JIT_CUDA_INCLUDE_DIR";
/// The header that its kernels include.
const KERNELS: &str = "device/ht_ep.cuh";
/// Written when a trial compilation succeeded, with what it was of.
const TRIED: &str = "tried";
/// File that a failed compilation leaves in a kernel's folder, to be honored ever after.
const FAILED: &str = "compile.failed";

/// A compiler for the library's kernels, and where it finds and puts things.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiler {
    /// nvcc.
    pub nvcc: PathBuf,
    /// The library's device code.
    pub sources: PathBuf,
    /// NCCL's headers.
    pub nccl: PathBuf,
    /// CUDA's headers.
    pub cuda: PathBuf,
    /// Compiled kernels: a folder of this user's alone.
    pub cache: PathBuf,
}

impl Compiler {
    /// The toolchain that the library in this file would use: its own variables first, then those of CUDA and NCCL,
    /// then what lies beside it.
    ///
    /// # Errors
    /// [`NcclEpError::Environment`] names what is missing and where it was looked for; [`NcclEpError::Cache`].
    pub fn find(library: &Path) -> Result<Self, NcclEpError> {
        Self::find_with(library, &|name| std::env::var_os(name))
    }

    fn find_with(library: &Path, get: Env<'_>) -> Result<Self, NcclEpError> {
        let usual = PathBuf::from("/usr/local/cuda");
        let search: Vec<PathBuf> = get("PATH").map(|p| std::env::split_paths(&p).collect()).unwrap_or_default();
        let on_path = search.iter().map(|folder| folder.join("nvcc")).find(|p| p.is_file());
        let nvcc = SearchPaths::new()
            .variable(get, NVCC, "")
            .variable(get, "NVCC", "")
            .variable(get, "CUDA_HOME", "bin/nvcc")
            .variable(get, "CUDA_PATH", "bin/nvcc")
            .path("PATH", on_path)
            .path("usual place", Some(usual.join("bin/nvcc")))
            .find(("nvcc", NVCC, ""))?;
        // A wheel has lib/cu13/libnccl_ep.so and include, an installation lib/libnccl_ep.so and include.
        let sources = SearchPaths::new()
            .variable(get, SOURCES, "")
            .variable(get, "NCCL_EP_HOME", "include/nccl_ep")
            .path("beside the library", above(library, 2, "include/nccl_ep"))
            .path("beside the library", above(library, 3, "include/nccl_ep"))
            .find(("device code of NCCL EP", SOURCES, KERNELS))?;
        let nccl = SearchPaths::new()
            .variable(get, NCCL_HEADERS, "")
            .variable(get, "NCCL_HOME", "include")
            .path("beside NCCL EP's", sources.parent().map(Path::to_path_buf))
            // The wheels' folders: nccl/ep/include/nccl_ep and nvidia/nccl/include.
            .path("the wheel beside it", above(&sources, 4, "nvidia/nccl/include"))
            .path("usual place", Some(PathBuf::from("/usr/include")))
            .find(("headers of NCCL", NCCL_HEADERS, "nccl_device.h"))?;
        let cuda = SearchPaths::new()
            .variable(get, CUDA_HEADERS, "")
            .variable(get, "CUDA_HOME", "include")
            .variable(get, "CUDA_PATH", "include")
            .path("beside nvcc", above(&nvcc, 2, "include"))
            .path("usual place", Some(usual.join("include")))
            .find(("headers of CUDA", CUDA_HEADERS, "cuda_runtime.h"))?;
        Ok(Self { nvcc, sources, nccl, cuda, cache: cache(get)? })
    }

    /// Tries the compiler unless that has been done, removes what its earlier failures left, and tells the library.
    ///
    /// # Errors
    /// [`NcclEpError::Compile`] with the compiler's output; [`NcclEpError::Cache`].
    pub fn prepare(&self) -> Result<(), NcclEpError> {
        let refused = |e: std::io::Error| NcclEpError::Cache { path: shown(&self.cache), problem: e.to_string() };
        // Ranks take turns, be they threads or processes.
        let lock = File::create(self.cache.join("lock")).map_err(refused)?;
        lock.lock().map_err(refused)?;
        let (file, key) = (self.cache.join(TRIED), self.key());
        if !std::fs::read_to_string(&file).is_ok_and(|found| found == key) {
            self.compile(&self.cache.join("trial.cu"))?;
            std::fs::write(&file, key).map_err(refused)?;
        }
        self.forget_failures().map_err(refused)?;
        self.announce();
        Ok(())
    }

    /// Key of the values that a trial depends on.
    fn key(&self) -> String {
        let stamp = |path: &Path| {
            let modified = std::fs::metadata(path).and_then(|m| m.modified()).ok();
            modified.and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_nanos())
        };
        let files = [self.nvcc.clone(), self.sources.join(KERNELS), self.nccl.join("nccl_device.h")];
        let parts = files.iter().map(|f| format!("{} {}", f.display(), stamp(f)));
        parts.chain([shown(&self.cuda)]).collect::<Vec<_>>().join("\n")
    }

    /// Compiles the device code as the library would, to nothing.
    fn compile(&self, file: &Path) -> Result<(), NcclEpError> {
        let refused = |e: std::io::Error| NcclEpError::Cache { path: shown(&self.cache), problem: e.to_string() };
        std::fs::write(file, format!("#include \"{KERNELS}\"\n")).map_err(refused)?;
        let include = |path: PathBuf| format!("-I{}", path.display());
        let mut command = Command::new(&self.nvcc);
        command.args(["--cubin", "--std=c++17", "--extended-lambda", "--expt-relaxed-constexpr", "-arch=sm_90"]);
        command.args(self.sources.parent().map(|p| include(p.to_path_buf())));
        command.args([self.sources.clone(), self.sources.join("device"), self.nccl.clone()].map(include));
        command.args([self.nccl.join("nccl_device"), self.cuda.clone(), self.cuda.join("cccl")].map(include));
        command.arg(file).arg("-o").arg(file.with_extension("cubin"));
        let shown = format!("{command:?}");
        let failed = |status: String, output: String| NcclEpError::Compile { status, command: shown.clone(), output };
        let output = command.output().map_err(|e| failed("not started".to_string(), e.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Err(failed(output.status.to_string(), text))
    }

    /// Removes the marks of failed compilations, which the library would take for final.
    fn forget_failures(&self) -> std::io::Result<()> {
        for entry in std::fs::read_dir(&self.cache)? {
            let mark = entry?.path().join(FAILED);
            if mark.is_file() {
                std::fs::remove_file(mark)?;
            }
        }
        Ok(())
    }

    /// Sets the library's variables to what was found.
    fn announce(&self) {
        let pairs = [
            (NVCC, &self.nvcc),
            (SOURCES, &self.sources),
            (NCCL_HEADERS, &self.nccl),
            (CUDA_HEADERS, &self.cuda),
            (CACHE, &self.cache),
        ];
        for (name, value) in pairs {
            if std::env::var_os(name).as_deref() != Some(value.as_os_str()) {
                // SAFETY: other threads of Rust are kept apart by the standard library; of C, `NcclEpLibrary::open` asks
                // its callers to call it first.
                unsafe { std::env::set_var(name, value) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    type Test = Result<(), Box<dyn std::error::Error>>;

    /// A library with its headers, a CUDA folder whose nvcc is a script, and a cache below one folder.
    fn installed(root: &Path, nvcc: &str) -> std::io::Result<PathBuf> {
        for (file, text) in [
            ("ep/include/nccl_ep/device/ht_ep.cuh", ""),
            ("ep/include/nccl_device.h", ""),
            ("ep/lib/libnccl_ep.so.0", ""),
            ("cuda/include/cuda_runtime.h", ""),
            ("cuda/bin/nvcc", nvcc),
        ] {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap_or(root))?;
            std::fs::write(&path, text)?;
        }
        std::fs::set_permissions(root.join("cuda/bin/nvcc"), Permissions::from_mode(0o755))?;
        Ok(root.join("ep/lib/libnccl_ep.so.0"))
    }

    /// Variables of a test.
    fn variables(root: &Path) -> impl Fn(&str) -> Option<OsString> {
        let (cuda, cache) = (root.join("cuda"), root.join("cache"));
        move |name| match name {
            "CUDA_HOME" => Some(cuda.clone().into()),
            CACHE => Some(cache.clone().into()),
            _ => None,
        }
    }

    #[test]
    fn headers_are_found_beside_the_library_and_a_failure_says_where_it_looked() -> Test {
        let root = tempfile::tempdir()?;
        let library = installed(root.path(), "#!/bin/sh\nexit 0\n")?;
        let found = Compiler::find_with(&library, &variables(root.path()))?;
        assert_eq!(found.sources, root.path().join("ep/include/nccl_ep"));
        assert_eq!(found.cuda, root.path().join("cuda/include"));
        assert_eq!(std::fs::metadata(&found.cache)?.mode() & 0o777, 0o700);
        std::fs::remove_dir_all(root.path().join("ep/include/nccl_ep"))?;
        let error = Compiler::find_with(&library, &variables(root.path())).map_err(|e| e.to_string());
        let Err(text) = error else { return Err("device code that is not there was found".into()) };
        assert!(text.contains("ep/include/nccl_ep (beside the library)") && text.contains(SOURCES), "{text}");
        Ok(())
    }

    #[test]
    fn a_variable_of_the_librarys_own_that_is_wrong_is_an_error() -> Test {
        let root = tempfile::tempdir()?;
        let library = installed(root.path(), "")?;
        let others = variables(root.path());
        let wrong = |name: &str| if name == NVCC { Some("/nowhere/nvcc".into()) } else { others(name) };
        let tried = "/nowhere/nvcc (NCCL_EP_JIT_NVCC)".to_string();
        let expected = NcclEpError::Environment { what: "nvcc", tried, variable: NVCC };
        assert_eq!(Compiler::find_with(&library, &wrong), Err(expected));
        Ok(())
    }

    #[test]
    fn a_cache_that_others_may_write_is_refused() -> Test {
        let root = tempfile::tempdir()?;
        let library = installed(root.path(), "")?;
        let folder = root.path().join("cache");
        std::fs::create_dir(&folder)?;
        std::fs::set_permissions(&folder, Permissions::from_mode(0o777))?;
        let found = Compiler::find_with(&library, &variables(root.path()));
        assert!(matches!(&found, Err(NcclEpError::Cache { problem, .. }) if problem.contains("777")), "{found:?}");
        std::fs::remove_dir(&folder)?;
        std::os::unix::fs::symlink(root.path(), &folder)?;
        let found = Compiler::find_with(&library, &variables(root.path()));
        assert!(matches!(&found, Err(NcclEpError::Cache { problem, .. }) if problem.contains("link")), "{found:?}");
        Ok(())
    }

    #[test]
    fn a_failed_trial_says_what_the_compiler_said_and_a_good_one_forgets_failures() -> Test {
        let root = tempfile::tempdir()?;
        let library = installed(root.path(), "#!/bin/sh\necho no such header >&2; exit 3\n")?;
        let compiler = Compiler::find_with(&library, &variables(root.path()))?;
        let found = compiler.prepare();
        assert!(
            matches!(&found, Err(NcclEpError::Compile { output, .. }) if output == "no such header\n"),
            "{found:?}"
        );
        let mark = compiler.cache.join("kernel").join(FAILED);
        std::fs::create_dir(compiler.cache.join("kernel"))?;
        std::fs::write(&mark, "")?;
        std::fs::write(&compiler.nvcc, "#!/bin/sh\nexit 0\n")?;
        compiler.compile(&compiler.cache.join("trial.cu"))?;
        compiler.forget_failures()?;
        assert!(!mark.exists());
        Ok(())
    }
}
