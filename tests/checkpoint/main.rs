//! Checkpoints: every shipped folder, both on-disk forms, families without a folder, damaged files, and back to disk.

mod damage;
mod families;
mod forms;
mod golden;
mod support;
