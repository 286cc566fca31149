//! Compiles `kernels/*.cu` to PTX for the `cuda` feature; does nothing without it.
//!
//! `build/` links to the layer's code for this, so that a package of this crate has it too.

#[cfg(feature = "cuda")]
#[path = "build/cubin_cache.rs"]
mod cubin_cache;
#[cfg(feature = "cuda")]
#[path = "build/cuda.rs"]
mod cuda;

/// nvcc's arguments beside architecture, format and files.
#[cfg(feature = "cuda")]
const NVCC_FLAGS: [&str; 3] = ["-std=c++17", "-O3", "--use_fast_math"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    // Capability 8.0 is the first with bf16, 9.0 the first whose kernels may start early.
    #[cfg(feature = "cuda")]
    if let Err(problem) = cuda::build(cuda::Target::Ptx(&["80", "90"]), &NVCC_FLAGS) {
        eprintln!("\nmoebius-models, feature cuda: {problem}\n");
        std::process::exit(1);
    }
}
