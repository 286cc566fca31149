//! Published safetensors checkpoints: a rank's share of a Mixture-of-Experts block, and back.
//!
//! [`Checkpoint::open`] reads `config.json` and the headers of the tensor files; [`Checkpoint::load_block`] then reads
//! the bytes of one rank's experts and no others. Checkpoints are untrusted: files, their JSON and every name in it
//! have limits, far above published ones, that are checked before anything is parsed; every size is checked against the
//! file before a tensor is allocated; and what is wrong is a [`CheckpointError`](crate::CheckpointError) that names
//! file and tensor.

mod calls;
mod commit;
mod config_defaults;
mod convert;
mod declared;
mod family;
mod fields;
mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod header;
mod json;
mod layout;
mod load;
mod matrix;
mod model;
mod nvfp4;
mod open;
mod optimizer;
mod optimizer_state;
mod options;
mod params;
mod parts;
mod quantize;
mod quantized;
mod rank_params;
mod reader;
mod save;
mod stored;

pub use crate::error::{printable, printable_lines};
pub use gather::gather_blocks;
pub use open::Checkpoint;
pub use options::{BlockBytes, BlockShards, LoadOptions, OpenOptions, Progress, SaveOptions, ShardOptions};
pub use params::{Block, BlockParams, LayerBlock};
pub use parts::{RankBlock, RankModel, RankPart, RankTensor};
pub use quantize::QuantizedTensor;
pub use quantized::QuantizedBlock;
pub use stored::Form;
