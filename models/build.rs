//! Compiles `kernels/*.cu` to PTX for the `cuda` feature; does nothing without it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(problem) = cuda::build() {
        eprintln!("\nmoebius-models, feature cuda: {problem}\n");
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::env;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    const KERNELS: [&str; 5] = ["attention", "few_rows_linear", "head_rows", "rows", "slot_attention"];
    /// PTX of this runs on every later GPU, too: the driver compiles it. The first with bf16.
    const ARCHITECTURE: &str = "compute_80";
    /// Where nvcc is, as for the layer's own kernels: the compiler itself, then folders with `bin/nvcc`, then `PATH`.
    const COMPILERS: [&str; 1] = ["NVCC"];
    const FOLDERS: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];

    pub fn build() -> Result<(), String> {
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set (run by cargo)")?);
        for name in ["DOCS_RS"].iter().chain(&COMPILERS).chain(&FOLDERS) {
            println!("cargo:rerun-if-env-changed={name}");
        }
        for kernel in KERNELS {
            let source = format!("kernels/{kernel}.cu");
            println!("cargo:rerun-if-changed={source}");
            println!("cargo:rerun-if-changed=kernels/common.cuh");
            let ptx = out.join(format!("{kernel}.ptx"));
            // A documentation host has no nvcc, and runs nothing.
            match env::var_os("DOCS_RS") {
                Some(_) => std::fs::write(&ptx, "").map_err(|e| format!("{}: {e}", ptx.display()))?,
                None => compile(&source, &ptx)?,
            }
        }
        Ok(())
    }

    fn compile(source: &str, ptx: &Path) -> Result<(), String> {
        let nvcc = nvcc();
        let mut command = Command::new(&nvcc);
        command.args(["--ptx", "--std=c++17", "-O3", "--use_fast_math"]);
        command.arg(format!("-arch={ARCHITECTURE}")).arg("-o").arg(ptx).arg(source);
        let output = command.output().map_err(|e| {
            format!("{} cannot be run ({e}); install CUDA's compiler, or name its folder in CUDA_HOME", nvcc.display())
        })?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("{source}:\n{}", String::from_utf8_lossy(&output.stderr))),
        }
    }

    fn nvcc() -> PathBuf {
        let set = |name: &&str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let there = |folder: PathBuf| Some(folder.join("bin").join("nvcc")).filter(|nvcc| nvcc.is_file());
        let given = COMPILERS.iter().find_map(set);
        given.or_else(|| FOLDERS.iter().filter_map(set).find_map(there)).unwrap_or_else(|| PathBuf::from("nvcc"))
    }
}
