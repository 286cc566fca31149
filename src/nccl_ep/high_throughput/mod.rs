//! High throughput: groups and handles for training and prefill, forward and backward.

mod group;
mod handle;
mod options;
mod rows;

pub(in crate::nccl_ep) use group::GroupPlace;
pub use group::HighThroughputGroup;
pub use handle::{HandleOptions, HighThroughputHandle};
pub use options::HighThroughputOptions;
pub use rows::{CombineArgs, DispatchArgs, PassDirection, UpdateCounters};
