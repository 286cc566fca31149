//! The layer as a candle user meets it: inside a model, trained, with odd shapes, and used wrongly. What one rank does
//! is done on every device: the CPU, and with the `cuda` feature a GPU where there is one ("skipped: no GPU" else).
#![cfg(feature = "candle")]

#[cfg(feature = "cuda")]
mod gpu;
mod module;
mod ranks;
mod support;
