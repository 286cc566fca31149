//! The layer as a burn module: against a dense reference of burn operations, and as a citizen of burn's autodiff,
//! records and optimisers.
#![cfg(feature = "burn")]

mod dense;
mod exact;
mod faults;
#[cfg(feature = "burn-cuda")]
mod gpu;
mod module;
#[cfg(feature = "burn-cuda")]
mod order;
mod support;
