//! NCCL EP.
fn main() {}
