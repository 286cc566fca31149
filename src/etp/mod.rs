//! Expert weights that are sharded over the ranks that hold the same experts.
//!
//! Each weight is cut along its rows ([`Shards`]). A rank keeps one shard of it, of its main gradient and of the
//! optimizer's state; the whole weight is gathered just before its GEMM, and its gradient is reduce-scattered after.
//! This is no split of the GEMM: every rank multiplies its own tokens by whole weights. It goes with expert
//! parallelism: a mesh has ranks that share experts among them, and ranks that hold the same ones.
//!
//! A [`Chain`] owns this for a model: it learns the order of the weights in the first forward, and from then on has
//! the next weight gathered while the present one is in use (in backward the previous), and each gradient
//! reduce-scattered while the next is computed. [`Chain::source`] is a [`WeightSource`](crate::weights::WeightSource),
//! so a layer takes it in place of a tensor:
//!
//! ```text
//! chain.begin(Phase::Forward)?;    layers' forward with chain.source(up), chain.source(down)    chain.end()?;
//! chain.begin(Phase::Backward)?;   per layer: chain.gradient_buffer(up) … backward_into … chain.submit(…)  chain.end()?;
//! chain.finish(replicas, |weight, gradient| …)?;             the optimizer steps on shards
//! ```
//!
//! A model's dense weights can be in a chain too; from candle, `candle::ShardedWeights` puts them there. Weights that
//! stay [quantized](QuantizedWeight) are frozen.
//!
//! `docs/etp.md` says when it pays and what it needs of memory.
//!
//! ```text
//! shards             the cut of a weight, and where a rank keeps its part: initial values, in place, quantized
//! buffers            memory of whole weights and gradients, and its way between two streams
//! collective         the collectives: what they move, and how
//! collective_thread  where they run, beside the computation
//! chain              a model's weights in the order of use: gathered, reduced, handed out
//! ```

mod buffers;
mod chain;
mod collective;
mod collective_thread;
mod shards;
#[cfg(test)]
mod test_ranks;

use std::sync::Arc;

use crate::comm::Communicator;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::quant::Codec;
use crate::tensor::{Tensor, TensorMut, TensorRef};

pub use crate::config::Payload;
pub use crate::device::CaptureHook;
pub(crate) use buffers::stream_pair::StreamPair;
pub use chain::Chain;
pub use chain::add::NewShard;
pub use chain::collective_state::{ChainTraffic, CollectiveState};
pub use chain::gather::ShardedWeight;
pub use chain::reduce::GradientBuffer;
pub use chain::report::ChainMemory;
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use chain::stored_weight::{NewQuantized, ShardPlace, StoredSpec};
pub use chain::stored_weight::{QuantizedWeight, ShardedQuantized};
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use collective::recover;
pub use shards::Shards;
#[cfg(feature = "candle")]
pub(crate) use shards::initial::{Distribution, initial_values};
pub use shards::source::{Shard, ShardSource};

/// The call that errors of a chain name.
const CALL: &str = "etp";

/// Calls that sharded weights need of a device beside its kernels.
pub trait ShardDevice: Kernels + Codec {
    /// Whether calls return before their work is done, so that it goes on beside other work.
    const ENQUEUES: bool = false;

    /// Adds shares to `main`, of their accumulator type.
    ///
    /// # Errors
    /// Sizes or types that do not fit.
    fn add_shares(&self, shares: Shares<'_, Self>, main: TensorMut<'_, Self>) -> Result<()>;

    /// A tensor in the host's memory, page-locked where the device is a GPU: its copies ([`Device::copy`]) read and write it
    /// beside its kernels, at the speed of the host link. Zeros but for what `fill` makes of its bytes. Dropped, it waits
    /// for all work of the GPU; of a GPU that is stuck, or within a capture, the memory is not given back.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the host has no memory, or lets the process lock no more; a capture; a driver's.
    fn page_locked(&self, dtype: DType, dims: &[usize], fill: &mut dyn FnMut(&mut [u8])) -> Result<Tensor<Self>>;

    /// The same device for work beside this one's: on a GPU with a new stream.
    ///
    /// # Errors
    /// The device's.
    fn beside(&self) -> Result<Self> {
        Ok(self.clone())
    }

    /// Marks the end of the work enqueued so far; nothing where calls run to their end.
    ///
    /// # Errors
    /// The device's.
    fn record_event(&self) -> Result<Option<Self::Event>> {
        Ok(None)
    }

    /// Has this device's waits return what goes wrong on another, whose results its work takes.
    fn adopt_errors_of(&self, other: &Self) {
        let _ = other;
    }

    /// Whether calls of the two are enqueued in one order; not where calls run to their end.
    fn shares_stream_with(&self, other: &Self) -> bool {
        let _ = other;
        false
    }

    /// Whether the memory of one is the other's: on GPUs, whether both are the same GPU.
    fn shares_memory_with(&self, other: &Self) -> bool {
        let _ = other;
        true
    }

    /// Number of the capture, none twice, if calls are captured, to be repeated later.
    fn capture_number(&self) -> Option<u64> {
        None
    }

    /// Refuses a call that others capture, on this device's stream: nobody else may add to their graph meanwhile, as
    /// the helper threads would.
    ///
    /// # Errors
    /// [`Error::NotCapturable`]; the device's.
    fn check_not_captured_elsewhere(&self, call: &'static str) -> Result<()> {
        let _ = call;
        Ok(())
    }

    /// Has each capture call this before it ends, on its thread, for as long as it lives: collectives of helper threads
    /// may still have to be joined to the capture.
    fn add_capture_hook(&self, ending: &Arc<CaptureHook>) {
        let _ = ending;
    }
}

/// Ranks' shares of a gradient, equal blocks of one type: `scale` times their sum, joined in pairs in rank order,
/// ((0 + 1) + (2 + 3)) + ….
#[derive(Debug)]
pub struct Shares<'a, D: Device> {
    /// This rank's, where it lies.
    pub own: TensorRef<'a, D>,
    /// Its place among them.
    pub rank: usize,
    /// The others', back to back.
    pub others: TensorRef<'a, D>,
    /// Factor of the sum.
    pub scale: f64,
    /// The first sum since `main` was last read: it is added to zeros, whatever `main` holds.
    pub first: bool,
}

impl<'a, D: Device> Shares<'a, D> {
    /// Blocks of `count` elements that lie together.
    ///
    /// # Errors
    /// Less than one block.
    pub fn together(all: TensorRef<'a, D>, count: usize, scale: f64, first: bool) -> Result<Self> {
        let (dtype, elements) = (all.dtype(), all.count());
        if elements < count {
            let found = format!("{dtype} {:?}", all.dims());
            return Err(Error::invalid("add_shares", "shares", format!("blocks of {count} elements"), found));
        }
        let cut = |range: std::ops::Range<usize>| {
            let bytes = range.start * dtype.size()..range.end * dtype.size();
            TensorRef::new(D::slice(all.data(), bytes), dtype, &[range.len()])
        };
        Ok(Self { own: cut(0..count)?, rank: 0, others: cut(count..elements)?, scale, first })
    }

    /// Number of blocks.
    ///
    /// # Errors
    /// Sizes or types that do not fit `main`.
    pub(crate) fn parts(&self, main: &TensorMut<'_, D>) -> Result<usize> {
        const CALL: &str = "add_shares";
        let (dtype, count) = (self.own.dtype(), main.count());
        Error::check_dtype(CALL, "others", dtype, self.others.dtype())?;
        Error::check_dtype(CALL, "main", dtype.accumulator(), main.dtype())?;
        let others = self.others.count().checked_div(count).unwrap_or(0);
        let fit = count > 0 && self.own.count() == count && others * count == self.others.count();
        if !dtype.is_float() || !fit || self.rank > others {
            let found = format!("{dtype} {:?} and {:?}, rank {}", self.own.dims(), self.others.dims(), self.rank);
            return Err(Error::invalid(CALL, "shares", format!("blocks of main's size {:?}", main.dims()), found));
        }
        Ok(others + 1)
    }
}

/// How a chain works; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EtpOptions {
    /// Shards are padded to a multiple of this many rows: 16 keeps the tiles of block-quantized forms whole. 0: no
    /// padding, rows must divide.
    pub pad: usize,
    /// Gather the next weight while the present one is in use, and reduce-scatter a gradient while the next is
    /// computed. Off: every collective when its result is asked for. The results are the same to the bit.
    pub prefetch: bool,
    /// Steps ahead that gathers start then, 1 or more. With 1 a layer's `down` is sent while its `up` is in use, and
    /// the next layer's `up`, twice as large, while `down` is; with 2 each has the time of a whole layer, and buffers
    /// are twice as many. The results are the same to the bit.
    pub ahead: usize,
    /// Gathers and reductions take turns on one collective thread, as the pass asks for them, in place of one each:
    /// where both at once take more of a GPU than they leave it. [`Comms::reduce`] is not used. The results are the
    /// same to the bit.
    pub in_turn: bool,
    /// How gradients are added over the ranks.
    pub reduction: Reduction,
    /// Scale of the ranks' gradients.
    pub scale: Scale,
    /// Groups that hold copies of the same shards (data parallelism around the chain): 1 if there is none. The ranks of
    /// [`Chain::finish`]'s communicator, or of [`Chain::with_replicas`]'s.
    pub replicas: usize,
    /// Seed of initial values, where a module draws its shards: an element's is that of seed, name and place in the
    /// whole weight, the same on all replicas of a shard and at any number of ranks. The same on replicas, too.
    pub seed: u64,
}

impl Default for EtpOptions {
    fn default() -> Self {
        Self {
            pad: 16,
            prefetch: true,
            ahead: 1,
            in_turn: false,
            reduction: Reduction::Native,
            scale: Scale::Sum,
            replicas: 1,
            seed: 0,
        }
    }
}

/// How gradients are added over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reduction {
    /// The communicator's reduce-scatter; the sum is rounded to the gradient's type before it reaches the main
    /// gradient.
    Native,
    /// An exchange of the ranks' shares, added in pairs ((0 + 1) + (2 + 3)) in the accumulator type, without rounding
    /// between: exact sums of bf16 gradients, and the same bits however ranks are divided among shards and replicas.
    /// Costs a buffer of a whole gradient, but for this rank's share.
    Pairwise,
}

/// Result of the reduction of the ranks' gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Their sum: each rank's loss is its part of the whole.
    Sum,
    /// Their mean over ranks and replicas: each rank's loss is a mean of its own.
    Mean,
}

/// Direction of a pass over the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Weights in the model's order.
    Forward,
    /// Weights in reverse.
    Backward,
}

/// A weight of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub(crate) usize);

/// [`WeightSpec::layer`] of a weight that belongs to no layer: it is in use by itself.
pub const NO_LAYER: u32 = u32::MAX;

/// Description of a weight for a chain; the same on all ranks.
#[derive(Debug, Clone)]
pub struct WeightSpec {
    /// For errors.
    pub name: String,
    /// Number of its layer, or [`NO_LAYER`]. Weights of a layer follow each other, and their gradients are made together.
    pub layer: u32,
    /// Sizes of the whole weight, such as `[L, G·I, H]`.
    pub dims: Vec<usize>,
    /// Its type, which its shard and its gradient have too.
    pub dtype: DType,
    /// Backward reads it twice: first to recompute what forward did not keep, before the layer's other weights. It is
    /// gathered once and kept between.
    pub recompute: bool,
    /// It is resident in its layer's calls: acquired before the layer's other weights, in backward too, and released after
    /// them, such as a router's.
    pub resident: bool,
    /// How its shards are sent. A quantized shard is cast, in the computation's order, before the first gather after a
    /// [`Chain::finish`], a [`Chain::replace`] or [`Chain::invalidate_casts`], and the cast serves until the next: all
    /// microbatches of a step, forward and backward; from [`Chain::prepare_capture`] on, one forward and its backward.
    /// It is de-quantized on arrival: the layer computes with what the quantized weight stands for. The shard itself
    /// stays as it is for the optimizer, and for [`Chain::whole`]. NVFP4 has an amax an expert (all of a chain joined
    /// in one all-reduce), and rows of an even number of elements; weights are f32, bf16 or f16. Ranks compare it as the
    /// first forward acquires the weight: another than this rank's is [`Error::ConfigMismatch`]
    /// on every rank, with the weight's name, before anything of it travels. So is another weight than this rank acquires.
    pub payload: Payload,
}

impl WeightSpec {
    /// A weight that is sent as it is and is read once a pass.
    pub fn new(name: impl Into<String>, layer: u32, dims: &[usize], dtype: DType) -> Self {
        let (name, dims) = (name.into(), dims.to_vec());
        Self { name, layer, dims, dtype, recompute: false, resident: false, payload: Payload::Plain }
    }
}

/// Two communicators over the ranks that hold the same experts, one for each of a chain's helper threads
/// ([`EtpOptions::in_turn`]: the first for the only one). On a GPU each is made with a `Cuda` of its own beside the
/// chain's (`Cuda::with_new_stream`), or nothing runs beside the computation.
#[derive(Debug)]
pub struct Comms<D: Kernels> {
    /// Carries gathers.
    pub gather: Box<dyn Communicator<D>>,
    /// Carries reductions.
    pub reduce: Box<dyn Communicator<D>>,
}
