//! The layer on a GPU against the layer on the CPU, from the same inputs. Without a GPU every test prints
//! "skipped: no GPU" and passes.
#![cfg(feature = "cuda")]

mod faults;
mod harness;
mod layer;
mod repeat;
mod wgrad;
mod wide;
