//! Chores: `cargo run -p xtask -- CHORE`.

mod bindings;
mod generated;
mod guide;
mod layers;
mod links;
mod params;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo run -p xtask -- bindings --headers DIR [--cuda DIR] [--check]
       cargo run -p xtask -- params [--check]
       cargo run -p xtask -- links
       cargo run -p xtask -- guide
       cargo run -p xtask -- layers

bindings  writes src/nccl_ep/sys.rs from DIR/nccl_ep.h and DIR/nccl.h
  --headers DIR  headers of NCCL and NCCL EP
  --cuda DIR     CUDA's headers (CUDA_HOME/include where left out)
params    writes src/cuda/bindings.rs from kernels/common/params.h and the headers beside it, and
          models/src/ops/params.rs from models/kernels/params.h
  --check        writes nothing, and fails where a file is not what would be written
Needs libclang (LIBCLANG_PATH) and gcc, whose own headers libclang reads.

links     checks that every relative link and anchor of the documents leads somewhere
guide     builds docs/ into target/book with mdBook
layers    fails where a file of src names what xtask/layers.txt does not allow";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.split_first() {
        Some((chore, rest)) if chore == "bindings" => bindings::run(rest),
        Some((chore, rest)) if chore == "params" => params::run(rest),
        Some((chore, rest)) if chore == "links" => links::run(rest),
        Some((chore, rest)) if chore == "guide" => guide::run(rest),
        Some((chore, [])) if chore == "layers" => layers::run(),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(message) => {
            println!("{message}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("xtask: {problem}");
            ExitCode::FAILURE
        }
    }
}
