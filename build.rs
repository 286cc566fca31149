//! Compiles `kernels/*.cu` for the `cuda` feature (`build/cuda.rs`), and a shim for `nccl-ep`; does nothing without
//! them.

#[cfg(feature = "cuda")]
#[path = "build/cubin_cache.rs"]
mod cubin_cache;
#[cfg(feature = "cuda")]
#[path = "build/cuda.rs"]
mod cuda;

/// nvcc's arguments beside architecture, format and files.
#[cfg(feature = "cuda")]
const NVCC_FLAGS: [&str; 7] =
    ["-std=c++17", "-O3", "-lineinfo", "--extra-device-vectorization", "-Xptxas", "-v,-warn-spills", "-Ikernels"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    #[cfg(feature = "cuda")]
    if let Err(problem) = cuda::build(cuda::Target::Cubins, &NVCC_FLAGS) {
        eprintln!("\nmoebius, feature cuda: {problem}\n");
        std::process::exit(1);
    }
    #[cfg(feature = "nccl-ep")]
    if let Err(problem) = shim() {
        eprintln!("\nmoebius, feature nccl-ep: {problem}\n");
        std::process::exit(1);
    }
}

/// Compiles the functions that keep C++ exceptions out of Rust.
#[cfg(feature = "nccl-ep")]
fn shim() -> Result<(), String> {
    const SOURCE: &str = "src/nccl_ep/shim.cpp";
    println!("cargo:rerun-if-changed={SOURCE}");
    if std::env::var_os("DOCS_RS").is_some() {
        return Ok(());
    }
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").file(SOURCE).warnings(true).extra_warnings(true);
    build.try_compile("moebius_nccl_ep").map_err(|e| {
        format!("{SOURCE} needs a C++ compiler (g++, or what CXX names; Debian: apt-get install g++): {e}")
    })
}
