//! The layer as a candle module: [`ExpertParallelMoE`] behaves like any other layer of a candle model, with
//! gradients for its input and its parameters.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use moebius::candle::{EpGroup, ExpertParallelMoE};
//! use moebius::{MoeConfig, ep::GroupConfig, layer::Layer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let config = MoeConfig::new(64, 32, 8, 2); // hidden, intermediate, experts, top-k
//! let group = EpGroup::single(GroupConfig::new(8, 4096))?; // one rank, up to 4096 tokens a call
//! let moe = ExpertParallelMoE::new(Layer::new(config, 0)?, group, vb.pp("moe"))?;
//! let x = Tensor::randn(0f32, 1., (3, 5, 64), &Device::Cpu)?;
//! let y = moe.forward(&x)?;
//! let gradients = y.sqr()?.mean_all()?.backward()?;
//! assert!(moe.vars().iter().all(|v| gradients.get(v).is_some()));
//! # Ok(()) }
//! ```
//!
//! On a GPU (the `cuda` feature) the group is made with candle's device, [`DeviceGroup::single`], and nothing else differs:
//! the layer works in the device's context and stream, reads candle's memory where it lies, and its outputs and gradients
//! become candle's without a copy. All tensors of a module are of that one candle device. The forward does not wait for the
//! GPU, so that a NaN logit is told later, by whoever waits next; see
//! [`Reporting`](crate::ep::Reporting). Auxiliary losses and their gradient stay on the GPU too.
//!
//! Every rank of a group calls the same layers in the same order, forward and backward. A rank whose loss does not
//! reach the layer's output never runs its backward: its peers get a typed error after the communicator's timeout.
//! Through candle errors come as candle's; [`error_of`] gives this crate's back.
//! Gradients of replicated parameters (router, shared expert) are each rank's own share; sum them over the ranks.
//!
//! A rank may have no tokens. candle's binary operations on empty tensors return their left operand and forget the
//! right one, so write a residual as `moe.forward(&x)? + x`: the other way round, an empty rank would lose the layer
//! from its graph, never run its backward, and its peers would wait for it until the timeout.
//!
//! On one node of the autograd graph hang all of the layer's inputs, and from it hang `y` and the auxiliary loss:
//! candle's custom operations have at most three inputs and one output, so a chain of two-input operations gathers
//! the inputs into a token, and the token's backward, which candle runs after those of `y` and the loss, runs the
//! layer's backward once.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod etp;
mod group;
mod host;
mod module;
mod op;
mod run;
mod sharded;

pub use crate::ep::EpGroup;
#[cfg(feature = "cuda")]
pub use cuda::cuda;
pub use error::error_of;
pub use etp::{VarShard, finish_sharded};
pub use group::DeviceGroup;
pub use host::Host;
pub use module::{ExpertParallelMoE, MoeOutput};
