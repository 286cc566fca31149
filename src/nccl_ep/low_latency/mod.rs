//! Low latency: groups and handles for decoding, forward only, and ranks that may be late.

mod calls;
mod group;
mod handle;
mod masks;
mod options;
mod rows;

pub use group::LowLatencyGroup;
pub use handle::LowLatencyHandle;
pub use options::LowLatencyOptions;
pub use rows::{LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyLayout, LowLatencyReceiveArgs};
