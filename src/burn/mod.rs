//! The layer as a burn module.
//!
//! [`ExpertParallelMoE`] is a [`Module`](burn::module::Module) on burn's CPU back end, `Flex`, on its CUDA back end,
//! and on `Autodiff` over either, where one custom operation carries forward and backward. It holds no arithmetic: it
//! hands burn's memory to [`Layer`](crate::layer::Layer), without a copy where a tensor is contiguous, and has the
//! layer write into memory of burn's.
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Distribution, Tensor, backend::Backend};
//! use moebius::MoeConfig;
//! use moebius::burn::{ExpertParallelMoE, ExpertParallelMoEConfig, MoeBackend};
//!
//! #[derive(Module, Debug)]
//! struct Model<B: Backend> { embed: Linear<B>, moe: ExpertParallelMoE<B> }
//! impl<B: MoeBackend> Model<B> {
//!     fn new(device: &B::Device) -> moebius::Result<Self> {
//!         let config = MoeConfig::new(64, 32, 8, 2); // hidden, intermediate, experts, top-k
//!         let moe = ExpertParallelMoEConfig::new(config).init(device)?;
//!         Ok(Self { embed: LinearConfig::new(16, 64).init(device), moe })
//!     }
//!     fn forward(&self, x: Tensor<B, 3>) -> moebius::Result<Tensor<B, 3>> {
//!         let x = self.embed.forward(x);
//!         Ok(self.moe.forward(x.clone())? + x)
//!     }
//! }
//!
//! fn main() -> moebius::Result<()> {
//!     let device = Default::default();
//! # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
//!     let model = Model::<Autodiff<Flex>>::new(&device)?;
//!     let y = model.forward(Tensor::random([2, 5, 16], Distribution::Default, &device))?;
//!     let gradients = y.powi_scalar(2).mean().backward();
//!     assert_eq!(model.moe.experts.up.grad(&gradients).map(|g| g.dims()), Some([8, 64, 64]));
//!     Ok(())
//! }
//! ```
//!
//! Training with auxiliary losses, jitter, and a bias that balances the experts:
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
//! use burn::tensor::{Distribution, Tensor};
//! use moebius::MoeConfig;
//! use moebius::burn::{ExpertParallelMoE, ExpertParallelMoEConfig};
//! use moebius::config::AuxConfig;
//!
//! type B = Autodiff<Flex>;
//!
//! let config = MoeConfig::new(16, 32, 8, 2)
//!     .with_router(|router| router.with_selection_bias(true).with_jitter(0.01))
//!     .with_aux(AuxConfig::default().with_balance(0.01).with_z(0.001));
//! let device = Default::default();
//! # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
//! let mut moe = ExpertParallelMoEConfig::new(config).init::<B>(&device)?;
//! let mut adam = AdamWConfig::new().init::<B, ExpertParallelMoE<B>>();
//! for _step in 0..20 {
//!     let x = Tensor::<B, 2>::random([64, 16], Distribution::Default, &device);
//!     let y = moe.forward_t(x.clone(), true)?; // with jitter; a backward through y adds the auxiliary losses' gradient
//!     let loss = (y - x).powi_scalar(2).mean();
//!     let gradients = GradientsParams::from_grads(loss.backward(), &moe);
//!     moe = adam.step(0.01, moe, gradients);
//!     moe.update_selection_bias(moe.last_load()?.get()?, 0.001)?;
//!     println!("auxiliary losses {:?}", moe.last_aux()?.get()?);
//! }
//! # Ok::<(), moebius::Error>(())
//! ```
//!
//! Two ranks, each a thread with half of the experts:
//!
//! ```
//! use std::time::Duration;
//!
//! use burn::backend::{Autodiff, Flex};
//! use burn::optim::{GradientsParams, Optimizer, SgdConfig};
//! use burn::tensor::{Distribution, ElementConversion, Tensor};
//! use moebius::burn::{EpGroup, ExpertParallelMoE, ExpertParallelMoEConfig};
//! use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
//! use moebius::ep::{Group, GroupConfig};
//! use moebius::{MoeConfig, Result};
//!
//! type B = Autodiff<Flex>;
//!
//! fn rank(comm: ThreadComm) -> Result<f32> {
//!     let (config, device) = (MoeConfig::new(16, 32, 8, 2), Default::default());
//!     let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::of(&config, 64))?; // at most 64 tokens a rank
//!     let moe = ExpertParallelMoEConfig::new(config).init_on::<B>(EpGroup::new(group), &device)?;
//!     let x = Tensor::<B, 2>::random([10, 16], Distribution::Default, &device);
//!     let loss = (moe.forward(x.clone())? - x).powi_scalar(2).mean();
//!     let mut gradients = GradientsParams::from_grads(loss.backward(), &moe);
//!     moe.reduce_gradients(&mut gradients)?; // the router's, which both ranks hold
//!     let _moe = SgdConfig::new().init::<B, ExpertParallelMoE<B>>().step(0.1, moe, gradients);
//!     Ok(loss.into_scalar().elem())
//! }
//!
//! # <Flex as burn::tensor::backend::Backend>::seed(&Default::default(), 1);
//! let ranks = ThreadWorld::create(2, Duration::from_secs(60)).into_iter();
//! let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(|| rank(comm))).collect();
//! for rank in ranks {
//!     println!("loss {}", rank.join().expect("a rank panicked")?);
//! }
//! # Ok::<(), moebius::Error>(())
//! ```
//!
//! Loading published weights, evaluating, saving: [`ExpertParallelMoE::from_checkpoint`]. Experts of your own, as burn
//! operations: [`DispatchCombine`].
//!
//! # On a GPU
//! With the `burn-cuda` feature the layer runs on burn's CUDA back end, through this crate's kernels: on
//! `CubeBackend<CudaRuntime, ..>`, which is what burn calls `Cuda` without its `fusion` feature. The group comes from
//! [`DeviceGroup::single`], or from an [`EpGroup`] over `moebius::burn::cuda`:
//!
//! ```ignore
//! type B = Autodiff<burn::backend::Cuda>;
//! let device = Default::default();
//! let config = MoeConfig::new(2048, 768, 128, 8);
//! let group = DeviceGroup::single::<B>(&config, &device)?; // its layers share one workspace
//! let moe = ExpertParallelMoEConfig::new(config).init_on::<B>(&group, &device)?;
//! ```
//!
//! burn hides its stream, so the kernels have one of their own, in the same context. A call puts its work behind all
//! that the context holds, and all that comes later behind its work; the GPU does the waiting, the host goes on
//! ([`DeviceGroup::waits`] counts). Drivers before CUDA 12.5 leave both waits to the host. What burn has done with its
//! own memory is in order either way; other programs' streams in the same context are held up for as long, and none of
//! them may be captured into a graph meanwhile. A call cannot be captured itself.
//!
//! Results lie in burn's memory, without a copy; what forward keeps for backward, and the workspace, lie in the
//! crate's (`Cuda::memory`). burn pads rows of some sizes (those that are not a multiple
//! of a power of two of bytes, up to 512): a tensor so padded is copied at each call, also a parameter. Parameters made
//! here are not padded, but those that burn computes anew, as an optimizer's step does, may be.
//!
//! NaN logits and the like are seen by kernels and told at the next wait: by [`Lazy::get`](crate::Lazy::get) of the
//! load, or a later call.
//!
//! # Ranks
//! A rank is a thread (or a process) with its own [`EpGroup`] and its own module; the module's parameters are this
//! rank's share, so a record is one rank's too. The group is not part of the record: it is given to
//! [`init_on`](ExpertParallelMoEConfig::init_on), and [`load_record`](burn::module::Module::load_record) keeps it.
//! Parameters that every rank holds (router, shared expert) get this rank's share of the gradient:
//! [`ExpertParallelMoE::reduce_gradients`] sums it over the ranks before an optimizer's step, [`reduce_gradients`] that of
//! a whole model, and [`reduce_gradients_over`] over the ranks of another communicator, such as data-parallel replicas'.
//! [`GradientReducer`] does all of it beside backward, over microbatches too.
//! Over several GPUs a rank's device is `CudaDevice::new(rank)`, and its group one over a communicator of
//! `moebius::nccl`.
//!
//! # Sharded experts
//! Where experts do not fit a rank's memory, [`ShardedParams`] shares their weights, gradients and optimizer state among
//! the ranks that hold the same ones; each weight is gathered ahead of its use. [`ShardedParams::load`] loads shards of a
//! published checkpoint, [`ShardedParams::to_blocks`] gives them whole to be saved. Linear layers, embeddings and norms
//! are shards of a chain as [`ShardedDense`], routers and shared experts by [`ExpertParallelMoE::into_all_sharded`];
//! `to_parts` of both has what a rank saves.
//!
//! # Optimizers
//! burn's own step element by element on whatever a rank holds: experts, shards, replicated parameters. They keep
//! moments in the parameter's type and no main weights beside 16-bit ones. [`AdamW`] keeps both in f32, and takes main
//! gradients in f32 ([`GradientReducer::with_main_gradients_in_f32`]).
//!
//! # Threads as ranks, and burn's graph lock
//! `backward()` of burn 0.21 holds the lock of its autodiff graph throughout, and at its end takes the lock of every
//! graph of the process. Between ranks that are threads of one process this allows
//! - one `backward()` a step on each rank, on graphs that share no tensor.
//!
//! It forbids, because one rank then waits for burn's lock while its peer waits for it in a collective,
//! - leaves shared between rank threads: a clone of a module shares its parameters' leaves, so build the layers of
//!   each rank anew, or [`fork`](burn::module::Module::fork) those that have no group;
//! - a second, independent `backward()` on one rank while a peer may be inside one.
//!
//! Either ends in a [`CommError`](crate::CommError) on each rank once the communicator's timeout is over, not in a
//! hang.
//! burn runs a graph by depth, so layers on parallel branches may be reached in another order on a rank whose branches
//! are deeper, which the collectives' tags turn into an error; let the output of one feed the other. Ranks as
//! processes know no such limits but the last.
//!
//! # Errors in backward
//! burn's `backward()` returns nothing, so an error unwinds: the panic's message is the error's text, and the typed
//! error waits in [`DeviceGroup::take_failure`]. Peers are told at once of what fails in the layer's own part, and know
//! by the communicator's timeout of a rank that fails elsewhere; they end in typed errors. [`GradientReducer::backward`]
//! returns the typed error, and tells peers of what fails elsewhere too. A second `backward()` of the
//! same loss is refused by burn before it reaches the layer. burn frees the nodes that a backward used: a new loss made
//! of an old output reaches neither this layer nor any other operation before it.
//!
//! # Other back ends
//! Fusion, and back ends of other devices, are refused when the program is compiled: they do not implement
//! [`MoeBackend`]. A fused graph runs later than it is built, so a collective inside it could run in another order on
//! every rank. Neither can gradients of gradients be had:
//!
//! ```compile_fail
//! use burn::backend::{Autodiff, Flex};
//! fn layer_runs_on<B: moebius::burn::MoeBackend>() {}
//! layer_runs_on::<Autodiff<Autodiff<Flex>>>();
//! ```

mod adamw_param;
mod autodiff;
mod backend;
mod backward;
mod config;
#[cfg(feature = "burn-cuda")]
mod cuda;
#[cfg(feature = "burn-cuda")]
mod cuda_output;
mod dense;
mod dense_autodiff;
mod dense_call;
mod dispatch;
mod dispatch_autodiff;
mod dispatch_combine;
mod etp;
mod expert_sums;
mod flex;
mod group;
mod init;
mod layer_calls;
mod module;
mod native;
mod optimizer;
mod param_values;
mod quantized;
mod reduce;
mod reduce_hook;
mod reducer;
mod run;
mod shard_param;
mod sharded_dense;
mod sharded_module;
mod step_gradients;
#[cfg(test)]
mod tests;
mod train;

/// A rank's group as its layers share it, of the CPU unless said otherwise.
pub type EpGroup<D = crate::cpu::Cpu> = crate::ep::EpGroup<D>;
pub use crate::adapter::{BUCKET_BYTES, FrameworkDevice, ReduceComms};
pub use adamw_param::AdamWParam;
pub use backend::{CoreDevice, MoeBackend, NativeBackend};
pub use backward::backward_with;
pub use config::ExpertParallelMoEConfig;
#[cfg(feature = "burn-cuda")]
pub use cuda::cuda;
pub use dispatch_combine::{DispatchCombine, Dispatched, Routed};
pub use etp::{ShardHolder, ShardedParams};
pub use group::{DeviceGroup, Waits};
pub use init::{LoadAs, ShardedLoad};
pub use module::{
    ExpertParallelMoE, ExpertParallelMoERecord, Experts, ExpertsRecord, MoeOutput, Router, RouterRecord, SharedExpert,
    SharedExpertRecord,
};
pub use optimizer::AdamW;
pub use reduce::{ReduceOptions, reduce_gradients, reduce_gradients_over};
pub use reducer::GradientReducer;
pub use sharded_dense::{DenseLoad, ShardedDense, ShardedDenseRecord};
