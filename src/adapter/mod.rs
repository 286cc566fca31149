//! Code that the adapters of candle and burn share: a rank's group whose device is known at run time only, dispatch and
//! combine over a framework's tensors, sharded weights of a layer, the collectives that an adapter runs itself, the
//! cotangents that backward brings, how a module is loaded, and what it keeps between training steps.

mod buckets;
mod collectives;
mod device_group;
mod dispatch;
mod gradient_reduction;
mod gradient_sums;
mod group;
mod heuristics;
#[cfg(feature = "burn")]
mod host_tensor;
mod load_as;
mod outputs;
mod quantized;
mod resident_weights;
mod selection_bias;
mod sharded;
mod step_reduction;
mod submit;
mod training_state;

pub(crate) use buckets::{NO_LAYER, Summand, variables_hash};
#[cfg(feature = "candle")]
pub(crate) use collectives::broadcast;
pub use device_group::DeviceGroup;
pub use dispatch::{DispatchTokens, DispatchedRows, ResultSpec};
pub(crate) use dispatch::{FrameworkTensors, GuardedCall, PendingDispatch, check_expert_output, pieces};
#[cfg(feature = "burn")]
pub(crate) use gradient_reduction::AllReduce;
pub(crate) use gradient_reduction::{GradientReduction, REDUCE_GRADIENTS, TypeNumber, number_of_type, type_of_number};
pub use gradient_sums::ReduceComms;
pub(crate) use gradient_sums::{GradientSums, SumDescription};
pub(crate) use group::ErasedChain;
pub use group::{DeviceErased, FrameworkDevice};
#[cfg(feature = "candle")]
pub(crate) use group::{ErasedGroup, match_device};
pub use heuristics::BUCKET_BYTES;
#[cfg(feature = "candle")]
pub(crate) use heuristics::VARIABLES_AT_ONCE;
#[cfg(feature = "burn")]
pub(crate) use host_tensor::HostTensor;
pub use load_as::LoadAs;
#[cfg(feature = "burn")]
pub(crate) use outputs::DispatchedCotangents;
pub(crate) use outputs::{DispatchedPart, LayerOutput, OutputCotangents};
pub(crate) use quantized::{ErasedQuantizedExperts, QuantizedExperts};
pub(crate) use resident_weights::{
    ErasedResidentWeight, GatheredWeights, ResidentGradients, acquire_resident, resident_sources, resident_view,
};
pub(crate) use selection_bias::moved_selection_bias;
pub(crate) use sharded::{
    ErasedLayerShards, LayerShards, NewExperts, StoredExperts, TypedSource, param_shard, with_sources,
};
pub(crate) use step_reduction::{
    EarlySums, PendingBuckets, ReducedParam, StepGradients, StepReduction, SumOf, agree, fail, summed_in_part,
};
pub(crate) use training_state::{LastForward, TrainingState};
