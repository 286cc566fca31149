//! Code that the adapters of candle and burn share: a rank's group whose device is known at run time only, dispatch and
//! combine over a framework's tensors, the collectives that an adapter runs itself, the cotangents that backward brings, how a module is loaded, and what it
//! keeps between training steps.

mod buckets;
mod collectives;
mod dispatch;
#[cfg(feature = "candle")]
mod gradient_sums;
mod group;
#[cfg(feature = "burn")]
mod host_tensor;
mod load_as;
mod outputs;
#[cfg(feature = "candle")]
mod quantized;
mod selection_bias;
mod sharded;
mod sharded_held;
mod submit;
mod training_state;

pub use buckets::BUCKET_BYTES;
pub(crate) use buckets::{NO_LAYER, Summand, buckets};
#[cfg(feature = "candle")]
pub(crate) use collectives::broadcast;
pub use dispatch::{DispatchTokens, DispatchedRows, ResultSpec};
pub(crate) use dispatch::{FrameworkTensors, GuardedCall, PendingDispatch, pieces};
#[cfg(feature = "candle")]
pub use gradient_sums::ReduceComms;
#[cfg(feature = "candle")]
pub(crate) use gradient_sums::{GradientSum, GradientSums, PendingSum};
#[cfg(feature = "burn")]
pub(crate) use group::AnyChain;
pub(crate) use group::AnyGroup;
#[cfg(feature = "candle")]
pub(crate) use group::any_device;
pub use group::{Any, FrameworkDevice};
#[cfg(feature = "burn")]
pub(crate) use host_tensor::HostTensor;
pub use load_as::LoadAs;
#[cfg(feature = "burn")]
pub(crate) use outputs::DispatchedCotangents;
pub(crate) use outputs::{DispatchedPart, LayerOutput, OutputCotangents};
#[cfg(feature = "candle")]
pub(crate) use quantized::{AnyQuantized, QuantizedExperts};
pub(crate) use selection_bias::moved_selection_bias;
pub(crate) use sharded::{Chained, NewExperts, Sharded, TypedSource, param_shard, with_sources};
pub(crate) use sharded_held::{HeldGradients, HeldGuards, HeldId, HeldWeight, acquire, sources, view};
pub(crate) use training_state::{LastForward, TrainingState};
