//! Whole decoders around [`moebius`]'s Mixture-of-Experts layer, on candle.
//!
//! [`Qwen3Moe`] is Qwen3-MoE: everything but the experts is replicated on every rank of a
//! group, and each rank runs sequences of its own. The group's device, a CPU or a GPU, is where the decoder lives
//! ([`DeviceGroup`](moebius::candle::DeviceGroup)).

mod attention;
mod blocks;
mod config;
mod error;
mod params;
mod qwen3_moe;
mod rotary;

pub use config::Config;
pub use error::{Error, Result};
pub use params::LoadOptions;
pub use qwen3_moe::{Cache, Qwen3Moe};
