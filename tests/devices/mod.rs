//! Devices that a suite runs on: its bodies are the same for the CPU and for a GPU.
#![allow(dead_code, unused_macros, unused_imports, reason = "every suite takes a part")]

use std::time::Duration;

use moebius::comm::{Communicator, Solo};
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig, LibraryDispatchers};
use moebius::kernels::Kernels;
use moebius::optim::StepDevice;
use moebius::quant::Codec;
use moebius::{DType, Result, Tensor, TensorRef};

#[path = "../common/goldens.rs"]
mod goldens;
#[cfg(feature = "nccl")]
pub mod gpus;
#[path = "../common/seed.rs"]
pub mod seed;

pub use goldens::{golden, golden_of, golden_quant};

/// Tests by name.
pub type Cases<D> = Vec<(&'static str, fn(&D))>;

/// Arguments of a rank's thread: its device, and its access to the other ranks.
pub struct Endpoint<D: Kernels> {
    pub device: D,
    pub comm: Box<dyn Communicator<D>>,
}

impl<D: Target> Endpoint<D> {
    /// Joins a group.
    pub fn join(self, config: GroupConfig) -> Result<Group<D>> {
        Group::new(self.device.clone(), self.comm, config)
    }
}

/// A device under test. Each of its buffers starts as NaN (−1 in integer types).
pub trait Target: Kernels + Codec + StepDevice + LibraryDispatchers {
    /// The floating types it computes in, the widest first.
    const FLOATS: &'static [DType];

    /// Ranks to be, in rank order, each for a thread of its own.
    fn endpoints(&self, ranks: usize, timeout: Duration) -> Vec<Endpoint<Self>>;

    /// A rank's group between threads; on a GPU that of a rank alone.
    fn join(&self, comm: ThreadComm, config: GroupConfig) -> Result<Group<Self>>;

    /// The group of a rank alone.
    fn alone(&self, config: GroupConfig) -> Result<Group<Self>> {
        Group::new(self.clone(), Box::new(Solo::new(self.clone())), config)
    }

    /// The device as it keeps a token's bits whatever else a call holds, for quantized experts too.
    fn batch_invariant(&self) -> Self {
        self.clone()
    }

    /// Result of the work enqueued so far, where a call may return before it knows.
    fn settled(&self, result: Result<()>) -> Result<()>;

    /// Waits until the host could know what the device has seen, without asking.
    fn wait_for_news(&self);

    /// A tensor of these values, rounded to the type.
    fn put(&self, dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<Self> {
        self.write(values, dtype, dims).expect("a tensor")
    }

    /// A host tensor on the device.
    fn host(&self, t: &Tensor<Cpu>) -> Tensor<Self> {
        let mut to = Tensor::empty(self, t.dtype(), t.dims()).expect("room");
        self.upload(t.as_bytes(), to.view_mut()).expect("an upload");
        to
    }

    /// A tensor's elements.
    fn values(&self, t: TensorRef<'_, Self>) -> Vec<f64> {
        self.read(t).expect("a read")
    }

    /// A tensor on the host.
    fn to_cpu(&self, t: &Tensor<Self>) -> Tensor<Cpu> {
        let bytes = self.download(t.view()).expect("a download");
        let mut to = Tensor::empty(&Cpu::new(), t.dtype(), t.dims()).expect("room");
        to.as_bytes_mut().copy_from_slice(&bytes);
        to
    }

    /// The widest floating type.
    fn wide() -> DType {
        Self::FLOATS[0]
    }

    /// True where finite differences mean something.
    fn has_f64() -> bool {
        Self::wide() == DType::F64
    }

    /// A bound for the widest type: `f64` there, else `f32`.
    fn bound(f64: f64, f32: f64) -> f64 {
        if Self::has_f64() { f64 } else { f32 }
    }
}

impl Target for Cpu {
    const FLOATS: &'static [DType] = &[DType::F64, DType::F32, DType::F16, DType::BF16];

    fn endpoints(&self, ranks: usize, timeout: Duration) -> Vec<Endpoint<Self>> {
        let comms = ThreadWorld::create(ranks, timeout).into_iter();
        comms.map(|comm| Endpoint { device: *self, comm: Box::new(comm) }).collect()
    }

    fn join(&self, comm: ThreadComm, config: GroupConfig) -> Result<Group<Self>> {
        Group::new(*self, Box::new(comm), config)
    }

    fn settled(&self, result: Result<()>) -> Result<()> {
        result
    }

    fn wait_for_news(&self) {}
}

#[cfg(feature = "cuda")]
impl Target for moebius::cuda::Cuda {
    const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::BF16];

    #[cfg(not(feature = "nccl"))]
    fn endpoints(&self, ranks: usize, _: Duration) -> Vec<Endpoint<Self>> {
        assert_eq!(ranks, 1, "several GPUs are for NCCL");
        vec![Endpoint { device: self.clone(), comm: Box::new(Solo::new(self.clone())) }]
    }

    #[cfg(feature = "nccl")]
    fn endpoints(&self, ranks: usize, timeout: Duration) -> Vec<Endpoint<Self>> {
        gpus::endpoints(self, ranks, timeout)
    }

    fn join(&self, _: ThreadComm, config: GroupConfig) -> Result<Group<Self>> {
        self.alone(config)
    }

    fn batch_invariant(&self) -> Self {
        moebius::cuda::Cuda::batch_invariant(self)
    }

    fn settled(&self, result: Result<()>) -> Result<()> {
        let seen = self.check();
        result.and(seen)
    }

    fn wait_for_news(&self) {
        self.stream().synchronize().expect("the stream");
    }
}

/// Lists a suite's bodies, each a `fn name<D: Target>(device: &D)`: tests of the CPU here, and a list for any device.
macro_rules! cases {
    ($($name:ident),+ $(,)?) => {
        /// The suite's bodies by name.
        #[allow(clippy::type_complexity, reason = "names and functions, no more")]
        pub fn cases<D: Target>() -> Vec<(&'static str, fn(&D))> {
            vec![$((stringify!($name), $name::<D>)),+]
        }

        mod on_cpu {
            $(#[test] fn $name() { super::$name(&moebius::cpu::Cpu::poisoning()); })+
        }
    };
}
pub(crate) use cases;
