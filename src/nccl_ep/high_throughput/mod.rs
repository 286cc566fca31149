//! High throughput: groups and handles for training and prefill, forward and backward.

mod group;
mod handle;
mod options;
mod rows;

pub use group::Group;
pub use handle::{Handle, HandleOptions};
pub use options::GroupOptions;
pub use rows::{CombineArgs, Direction, DispatchArgs, UpdateCounters};
