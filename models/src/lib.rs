//! Whole decoders around [`moebius`]'s Mixture-of-Experts layer, on candle.
//!
//! [`Model::load`] reads a published folder: `config.json` says which family it is. Everything but the experts is
//! replicated on every rank of a group, and each rank runs sequences of its own. The group's device, a CPU or a GPU, is
//! where the decoder lives ([`DeviceGroup`](moebius::candle::DeviceGroup)).

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod generate;
pub mod ops;

mod cache;
mod chunk_masks;
mod config;
mod config_entries;
mod decoder;
mod error;
mod family;
mod gated_delta;
mod host_memory;
mod latent_attention;
mod loss;
mod mlp;
mod model;
mod norm;
mod params;
mod random;
mod rotary;
mod save;
mod self_attention;
mod static_cache;
mod stepper;
#[cfg(test)]
mod testing;

pub use cache::Cache;
pub use decoder::{Point, Tap};
pub use error::{Error, Result};
pub use family::families;
pub use loss::Loss;
pub use model::Model;
pub use params::{ExpertWeights, LoadOptions, LoadProgress, ProgressFn};
pub use stepper::Stepper;
