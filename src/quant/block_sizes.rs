//! Elements of a block, which share a scale.

/// Elements of one NVFP4 block, which share an E4M3 scale.
pub const NVFP4_BLOCK: usize = 16;
/// Elements of one MXFP4 block, which share an E8M0 scale.
pub const MXFP4_BLOCK: usize = 32;
/// Elements of one MXFP8 block, which share an E8M0 scale.
pub const MX_BLOCK: usize = 32;
/// Columns of one fp8 block, which share an f32 scale: those of one row, in a weight those of as many rows.
pub const FP8_BLOCK: usize = 128;
