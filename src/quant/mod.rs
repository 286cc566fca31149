//! Quantized formats: NVFP4, MXFP8, fp8 blocks, and the elements that checkpoints are made of.
//!
//! [`Codec`] is what a device does: [`quantize`](Codec::quantize), or its two phases with an all-reduce between them,
//! and back. A [`Matrix`] goes in; an [`Nvfp4`] says how. `docs/quantization.md` has the formulas, in the order in
//! which they are computed, and what becomes of NaN, infinities and partial blocks.
//!
//! Sources: OCP Microscaling Formats (MX) 1.0 for E2M1, E8M0, MXFP4 and MXFP8; OCP 8-bit Floating Point (OFP8) 1.0
//! for E4M3; TransformerEngine and nvidia-modelopt for the two NVFP4 recipes, compressed-tensors for its layout;
//! DeepSeek-V3's `weight_scale_inv`. All arithmetic is binary32 with one rounding a step, in the order of the
//! reference implementations, so results equal theirs bit for bit.
//!
//! ```
//! use moebius::cpu::Cpu;
//! use moebius::quant::{Codec, Direction, Matrix, Nvfp4, Nvfp4Tensors, Quantize};
//! use moebius::{DType, Tensor};
//!
//! let weight = Tensor::<Cpu>::from_vec((0..512).map(|i| (i as f32).sin()).collect(), &[16, 32])?;
//! let (cpu, format) = (Cpu::new(), Nvfp4::TE.tiled());
//! let mut rows = Nvfp4Tensors::empty(&cpu, &format, [16, 32], Direction::Rows)?;
//! let matrix = Matrix::new(weight.view())?;
//! cpu.quantize(Quantize { format: &format, matrix, rows: Some(rows.view_mut()), columns: None })?;
//! let mut back = Tensor::<Cpu>::empty(&cpu, DType::F32, &[16, 32])?;
//! cpu.dequantize(rows.dequantize(&format, back.view_mut()))?;
//! # Ok::<(), moebius::Error>(())
//! ```

mod block_sizes;
mod calls;
pub(crate) mod check;
mod codec;
mod element;
mod format;
mod hadamard;
mod matrix;
pub(crate) mod nvfp4;
pub(crate) mod philox;
mod swizzle;
mod weight;

pub use block_sizes::{FP8_BLOCK, MX_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK};
pub use calls::{
    Amax, Dequantize, DequantizeFp8Block, DequantizeMxfp8, Fp8BlockMut, Fp8BlockTensors, Mxfp8Mut, Mxfp8Tensors,
    Nvfp4Mut, Nvfp4Tensors, Quantize, QuantizeFp8Block, QuantizeMxfp8, Swizzle,
};
pub use codec::Codec;
pub(crate) use element::decode_fp4;
pub use element::{
    E2M1, E2M1_MAX, E4M3, E4M3_MAX, E4M3_NAN, e2m1_nearest, e2m1_stochastic, e4m3_nearest, e4m3_stochastic, e8m0,
    e8m0_ceil, e8m0_floor,
};
pub use format::{
    AmaxScope, Blocks, Direction, MxScale, Mxfp8, Nvfp4, Nvfp4Sizes, Random, Recipe, Rounding, fp8_block_scale_dims,
};
pub use hadamard::Hadamard;
pub use matrix::{Layout, Matrix};
pub(crate) use nvfp4::amax_of_cast;
pub use philox::philox4x32;
pub use swizzle::{TILE_COLUMNS, TILE_ROWS, swizzled_index, swizzled_len};
pub use weight::{Quantized, QuantizedRef, QuantizedTensors, WeightFormat};
