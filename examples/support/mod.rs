//! Code shared by the examples and the test suites. Nothing here is part of the crate.
#![allow(dead_code, reason = "every user takes a part")]

pub mod compare;
pub mod dense;
pub mod device;
pub mod folder;
pub mod job;
pub mod names;
pub mod output;
pub mod processes;
pub mod quantized_payload;
pub mod random;
#[cfg(feature = "candle")]
pub mod rank_results;
#[cfg(feature = "burn")]
pub mod run_burn;
#[cfg(feature = "candle")]
pub mod run_candle;
pub mod stages;
pub mod table;
