//! Checkpoints: every shipped folder, both on-disk forms, families without a folder, damaged files, and back to disk.

mod compressed_tensors;
mod damage;
mod families;
mod forms;
mod golden;
mod quantize;
mod saving;
#[path = "../common/seed.rs"]
mod seed;
mod support;

/// The references' own reading of names on disk.
#[path = "../../examples/support/mod.rs"]
mod reference;
