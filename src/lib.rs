//! Expert-parallel Mixture-of-Experts layers for candle and burn, forward and backward.
//!
//! A layer routes each token to K of E experts. The experts are spread over ranks, which are threads or processes with
//! one device each; the layer sends tokens to the ranks of their experts, multiplies, and brings the results back. Most
//! programs need one type, `ExpertParallelMoE`, which is a module of [`candle`] or of `burn`.
//!
//! # From candle
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use moebius::{MoeConfig, candle};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let vars = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//!     let config = MoeConfig::new(64, 32, 8, 2); // hidden, intermediate, experts, top-k
//!     let moe = candle::moe(config, vb.pp("moe"))?; // one rank
//!     let x = Tensor::ones((3, 5, 64), DType::F32, &Device::Cpu)?;
//!     let y = (moe.forward(&x)? + x)?;
//!     let gradients = y.sqr()?.mean_all()?.backward()?; // for every variable: router and experts
//!     assert!(moe.vars().iter().all(|v| gradients.get(v).is_some()));
//!     Ok(())
//! }
//! ```
//!
//! # From burn
//!
//! With the feature `burn`; the same program is a test in the documentation of `moebius::burn`.
//!
//! ```ignore
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
//!     let model = Model::<Autodiff<Flex>>::new(&device)?;
//!     let y = model.forward(Tensor::random([2, 5, 16], Distribution::Default, &device))?;
//!     let gradients = y.powi_scalar(2).mean().backward();
//!     assert_eq!(model.moe.experts.up.grad(&gradients).map(|g| g.dims()), Some([8, 64, 64]));
//!     Ok(())
//! }
//! ```
//!
//! # Concepts
//!
//! | concept | what it is | type |
//! |---|---|---|
//! | configuration | sizes, routing formula, activation, auxiliary losses | [`MoeConfig`], [`config`] |
//! | device | memory, kernels, and the stream that they run on | [`Cpu`](crate::cpu::Cpu), `cuda::Cuda`; [`Device`], [`Kernels`](crate::kernels::Kernels) |
//! | tensor | untyped bytes of a device with a [`DType`] and a shape, and borrowed views of it | [`Tensor`], [`TensorRef`], [`TensorMut`] |
//! | communicator | collectives between ranks, with tags and timeouts | [`Communicator`](crate::comm::Communicator), [`ThreadWorld`](crate::cpu::ThreadWorld), `nccl::NcclComm` |
//! | group | a rank's membership: experts, limits, dispatcher; serves any number of layers | [`Group`](crate::ep::Group), [`GroupConfig`](crate::ep::GroupConfig) |
//! | group that modules share | a [`Layer`](crate::layer::Layer) borrows a `Group`; modules share one as an `EpGroup`, or as their framework's `DeviceGroup`, which hides the device's type and keeps what the framework needs beside it. An `EpGroup` is taken wherever a `DeviceGroup` is, but by candle on a GPU, which wants its own device beside it (`DeviceGroup::new`) | [`EpGroup`](crate::ep::EpGroup), [`candle::DeviceGroup`], `burn::DeviceGroup` |
//! | dispatcher | moves tokens to experts and back | [`TokenDispatcher`](crate::ep::TokenDispatcher), [`DispatcherKind`](crate::ep::DispatcherKind) |
//! | handle | the routing of one call, which backward needs again | [`Handle`](crate::ep::Handle) |
//! | slot | a row of the expert-major layout, one for each choice that is kept | [`kernels`] |
//! | layer | route, prepare, dispatch, up, down, combine, and their gradients | [`Layer`](crate::layer::Layer) |
//! | checkpoint | a published folder of safetensors, of which a rank reads its own experts | [`Checkpoint`](crate::checkpoint::Checkpoint) |
//! | quantized matrix | NVFP4, MXFP8, fp8 blocks and the codecs of these | [`quant`] |
//! | chain | weights sharded over ranks, gathered just before use | [`Chain`](crate::etp::Chain) |
//! | optimizer | AdamW with main weights in f32, over whole parameters and parts of them | [`AdamW`](crate::optim::AdamW), [`ParamShard`](crate::optim::ParamShard) |
//! | identity, mesh | which rank a process is, and how a world divides | [`ranks`] |
//! | lazy value | what a device computes and nobody waits for until it is read | [`Lazy`] |
//! | error | typed, with call, rank, tensor, expected and found | [`Error`], [`CommError`], [`CheckpointError`] |
//!
//! # Layers of the crate
//!
//! A module names only modules of its own line and of lines below.
//!
//! ```text
//! candle, burn                        adapters: they gather tensors, call the layer, and wrap what comes back
//! checkpoint                          published checkpoints, read and written
//! cpu, cuda, nccl, nccl_ep, nvlink    devices, and the communicators and dispatchers that connect them
//! ep, layer, etp, optim, ranks        dispatchers, the layer (stages, no arithmetic), sharded weights, optimizers,
//!                                     ranks as processes; over any device and communicator
//! kernels, comm                       traits: the primitives of a device, the collectives between ranks
//! tensor, quant, config, plan, error  descriptions: tensors, number formats, configurations, a routing's plan
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `candle` (default) | [`candle`] |
//! | `burn`, `burn-cuda` | `burn`, on its CPU back end `Flex` and on its CUDA back end |
//! | `cuda` | `cuda`: one NVIDIA GPU |
//! | `nccl`, `nccl-ep` | `nccl` and `nccl_ep`: several GPUs |
//!
//! # The guide
//!
//! The repository's `docs/` is a guide (`cargo run --release -p xtask -- guide`): how to install and train, how a layer
//! works, with one token followed through a run over two ranks, how an error of one rank reaches the others
//! (`docs/errors.md`), every routing and quantization formula, the terms, and how to extend the crate. `kernels/NOTES.md`
//! explains the CUDA kernels, `models/kernels/NOTES.md` those of the decoders in `models/`.

/// The README's examples compile and run.
#[cfg(all(doctest, feature = "candle"))]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod balance;
pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod cpu;
pub mod ep;
pub mod etp;
pub mod kernels;
pub mod layer;
pub mod metrics;
pub mod optim;
pub mod quant;
pub mod ranks;
pub mod weights;

#[cfg(feature = "burn")]
pub mod burn;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "nccl")]
mod library_dispatchers;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "nccl-ep")]
pub mod nccl_ep;
#[cfg(feature = "nccl")]
mod nvlink;

#[cfg(any(feature = "candle", feature = "burn"))]
mod adapter;
mod aux_loss;
mod compare;
mod device;
mod dtype;
mod error;
mod fnv1a;
mod host_memory;
mod lazy;
mod plan;
mod splitmix64;
mod tag;
mod tensor;

/// Types that candle's and burn's modules have in common, generic over what a framework adds. Programs name them by their
/// framework: `candle::DeviceGroup`, `candle::LoadAs`, `burn::DeviceGroup`, `burn::LoadAs`.
#[cfg(any(feature = "candle", feature = "burn"))]
pub mod framework {
    #[doc(inline)]
    pub use crate::adapter::{DeviceGroup, LoadAs};
}

pub use config::MoeConfig;
pub use device::Device;
pub use dtype::DType;
pub use error::{CheckpointError, CommError, Error, IdProblem, NcclEpError, NcclError, Result};
pub use lazy::Lazy;
pub use tensor::{Shape, Tensor, TensorMut, TensorRef};
