//! The layer as a candle module: [`ExpertParallelMoE`] behaves like any other layer of a candle model, with
//! gradients for its input and its parameters.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use moebius::{MoeConfig, candle};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = VarMap::new();
//! let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//! let config = MoeConfig::new(64, 32, 8, 2); // hidden, intermediate, experts, top-k
//! let moe = candle::moe(config, vb.pp("moe"))?; // one rank
//! let x = Tensor::arange(0f32, 960., &Device::Cpu)?.sin()?.reshape((3, 5, 64))?;
//! let y = moe.forward(&x)?;
//! let gradients = y.sqr()?.mean_all()?.backward()?;
//! assert!(moe.vars().iter().all(|v| gradients.get(v).is_some()));
//! # Ok(()) }
//! ```
//!
//! Training with auxiliary losses and a bias that balances the experts:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
//! use moebius::config::AuxConfig;
//! use moebius::{MoeConfig, candle};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = MoeConfig::new(16, 32, 8, 2)
//!     .with_router(|router| router.with_selection_bias(true).with_jitter(0.01))
//!     .with_aux(AuxConfig::default().with_balance(0.01).with_z(0.001));
//! let vars = VarMap::new();
//! let moe = candle::moe(config, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let mut adam = AdamW::new(moe.vars(), ParamsAdamW { lr: 0.01, ..Default::default() })?;
//! for _step in 0..20 {
//!     let x = Tensor::arange(0f32, 1024., &Device::Cpu)?.sin()?.reshape((64, 16))?;
//!     let y = moe.forward_t(&x, true)?; // with jitter; a backward through y adds the auxiliary losses' gradient
//!     adam.backward_step(&(y - x)?.sqr()?.mean_all()?)?;
//!     moe.update_selection_bias(moe.last_load()?.get()?, 0.001)?;
//!     println!("auxiliary losses {:?}", moe.last_aux()?.get()?);
//! }
//! # Ok(()) }
//! ```
//!
//! Two ranks, each a thread with half of the experts:
//!
//! ```
//! use std::time::Duration;
//!
//! use candle_core::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
//! use moebius::MoeConfig;
//! use moebius::candle::{DeviceGroup, ExpertParallelMoE};
//! use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
//! use moebius::ep::{Group, GroupConfig};
//!
//! fn rank(comm: ThreadComm) -> Result<f32> {
//!     let config = MoeConfig::new(16, 32, 8, 2);
//!     let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::of(&config, 64))?; // at most 64 tokens a rank
//!     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
//!     let moe = ExpertParallelMoE::new(config, group, vb)?;
//!     let x = Tensor::arange(0f32, 160., &Device::Cpu)?.sin()?.reshape((10, 16))?;
//!     let loss = (moe.forward(&x)? - x)?.sqr()?.mean_all()?;
//!     let mut gradients = loss.backward()?;
//!     moe.reduce_gradients(&mut gradients)?; // the router's, which both ranks hold
//!     SGD::new(moe.vars(), 0.1)?.step(&gradients)?;
//!     loss.to_scalar()
//! }
//!
//! let ranks = ThreadWorld::create(2, Duration::from_secs(60)).into_iter();
//! let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(|| rank(comm))).collect();
//! for rank in ranks {
//!     println!("loss {}", rank.join().expect("a rank panicked")?);
//! }
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Loading published weights, evaluating, saving: [`ExpertParallelMoE::from_checkpoint`]. Experts of your own, as candle
//! operations: [`DispatchCombine`].
//!
//! On a GPU (the `cuda` feature) the device is one of `Device::new_cuda_with_stream`, and nothing else differs. The
//! layer works in the device's context and stream, reads candle's memory where it lies, and its outputs and gradients
//! become candle's without a copy. Layers that share a [`DeviceGroup`] share a workspace. All tensors of a module are
//! of that one candle device. The forward does not wait for the GPU, so that a NaN logit is reported by the next call
//! that waits; see [`Reporting`](crate::ep::Reporting). Auxiliary losses and their gradient stay on the GPU too.
//!
//! Every rank of a group calls the same layers in the same order, forward and backward. A rank whose loss does not
//! reach the layer's output never runs its backward: its peers get a typed error after the communicator's timeout.
//! Through candle errors come as candle's; [`error_of`] gives this crate's back.
//! Gradients of replicated parameters (router, shared expert) are each rank's own share:
//! [`ExpertParallelMoE::reduce_gradients`] sums them over the ranks.
//!
//! [`AdamW`] is an optimizer with main weights in f32 for variables in f32, bf16 and f16, with clipping and loss scaling
//! that do not wait for a GPU, over ranks and shards too.
//!
//! A rank may have no tokens. candle's binary operations on empty tensors return their left operand and forget the
//! right one, so write a residual as `moe.forward(&x)? + x`: the other way round, an empty rank would lose the layer
//! from its graph, never run its backward, and its peers would wait for it until the timeout.
//!
//! On one node of the autograd graph hang all of the layer's inputs, and from it hang `y` and the auxiliary loss:
//! candle's custom operations have at most three inputs and one output, so a chain of two-input operations gathers
//! the inputs into a token, and the token's backward, which candle runs after those of `y` and the loss, runs the
//! layer's backward once.

mod build;
#[cfg(feature = "cuda")]
mod capture;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod dispatch_combine;
mod dispatch_ops;
mod error;
mod etp;
mod given_outputs;
mod gradient_hook;
mod group;
mod host_experts;
mod initial;
mod main_gradients;
mod module;
mod op;
mod optimizer;
mod options;
mod params;
mod pending;
mod precomputed;
mod quantized;
mod quantized_params;
mod reduce;
mod reducer;
mod route_op;
mod run;
mod sharded_functions;
mod sharded_weights;
mod train;
mod views_mut;

/// A rank's group as its layers share it, of the CPU unless said otherwise.
pub type EpGroup<D = crate::cpu::Cpu> = crate::ep::EpGroup<D>;
pub use crate::adapter::{BUCKET_BYTES, ReduceComms};
pub use build::{ShardedIn, moe};
#[cfg(feature = "cuda")]
pub use capture::{Capture, CapturedStep, device_for_capture};
#[cfg(feature = "cuda")]
pub use cuda::cuda;
pub use device::{CandleDevice, StorageMut, routing_ids};
pub use dispatch_combine::{DispatchCombine, Dispatched};
pub use dispatch_ops::DispatchedRowsMut;
pub use error::{error_of, refusal_reason};
pub use etp::{GradientType, VarShard, WeightVar, finish_sharded};
pub use group::DeviceGroup;
pub use host_experts::HostExperts;
pub use main_gradients::{MainGradients, backward};
pub use module::{ExpertParallelMoE, whole_tensor};
pub use optimizer::{AdamW, AdamWParam};
pub use options::{LoadAs, Parameters};
pub use pending::refuse_backward;
pub use reduce::{reduce_gradients, reduce_gradients_over};
pub use reducer::GradientReducer;
pub use route_op::Routed;
pub use run::MoeOutput;
pub use sharded_functions::{FunctionGradients, ShardedFunction};
pub use sharded_weights::{NewWeight, ShardedModule, ShardedWeights};
pub use views_mut::with_storages_mut;
