//! Ranks of a chain on any device, and a chain of small weights with known values, without layers.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::DispatcherKind;
use moebius::etp::{
    Chain, Comms, EtpOptions, Phase, Reduction, Scale, Shard, ShardDevice, ShardSource, WeightId, WeightSpec,
};
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{DType, Result, Tensor, TensorMut, TensorRef};

use super::devices::Target;
#[cfg(feature = "nccl")]
use super::devices::gpus;
use super::faulty_comm::{Address, FaultyComm, Windows};

/// A device whose ranks can share weights.
pub trait Chained: Target + ShardDevice {
    /// The dispatchers that tokens can travel by beside shared weights, but for all-to-all, which every device has.
    const OTHER_DISPATCHERS: &'static [DispatcherKind];

    /// Most ranks that there can be.
    fn most(&self) -> usize;

    /// The device of a rank.
    fn of_rank(&self, rank: usize) -> Self;

    /// Communicators of these ranks, in this order, each on a stream of its own; `purpose` tells those of the same ranks
    /// apart.
    fn among(&self, ranks: &[usize], purpose: &'static str, limit: Duration) -> Vec<Box<dyn Communicator<Self>>>;

    /// So many ranks, or as many as there can be.
    fn up_to(&self, ranks: usize) -> usize {
        ranks.min(self.most())
    }

    /// Elements of an f32 tensor.
    fn floats(&self, t: TensorRef<'_, Self>) -> Vec<f32> {
        assert_eq!(t.dtype(), DType::F32);
        self.bytes(t).as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }

    /// Bytes of a tensor.
    fn bytes(&self, t: TensorRef<'_, Self>) -> Vec<u8> {
        self.download(t).unwrap()
    }
}

thread_local! {
    static MEMORY: Cell<bool> = const { Cell::new(false) };
}

/// Runs with collective threads whose communicators have memory of their own for collectives: on GPUs, copy engines'.
pub fn with_memory(run: impl FnOnce()) {
    struct Until;
    impl Drop for Until {
        fn drop(&mut self) {
            MEMORY.set(false);
        }
    }
    MEMORY.set(true);
    // A body that panics, too.
    let _until = Until;
    run();
}

/// Whether that is how this thread runs.
pub fn has_memory() -> bool {
    MEMORY.get()
}

impl Chained for Cpu {
    const OTHER_DISPATCHERS: &'static [DispatcherKind] = &[DispatcherKind::Hierarchical, DispatcherKind::AllGather];

    fn most(&self) -> usize {
        8
    }

    fn of_rank(&self, _: usize) -> Self {
        *self
    }

    fn among(&self, ranks: &[usize], _: &'static str, limit: Duration) -> Vec<Box<dyn Communicator<Self>>> {
        let memory = MEMORY.get().then_some(*self);
        let written = Windows::default();
        let address = |recv: &TensorMut<'_, Cpu>| recv.as_ref().data().as_ptr() as usize;
        let endpoint = |comm| {
            let windows = memory.map(|_| (address as Address<Cpu>, Arc::clone(&written)));
            Box::new(FaultyComm { memory, windows, ..FaultyComm::new(Box::new(comm)) }) as Box<_>
        };
        ThreadWorld::create(ranks.len(), limit).into_iter().map(endpoint).collect()
    }
}

#[cfg(feature = "nccl")]
impl Chained for moebius::cuda::Cuda {
    const OTHER_DISPATCHERS: &'static [DispatcherKind] =
        &[DispatcherKind::Hierarchical, DispatcherKind::AllGather, DispatcherKind::NvLink];

    fn most(&self) -> usize {
        gpus::available().unwrap()
    }

    fn of_rank(&self, rank: usize) -> Self {
        let (_, mut gpus) = gpus::first(rank + 1);
        gpus.swap_remove(rank)
    }

    fn among(&self, ranks: &[usize], purpose: &'static str, limit: Duration) -> Vec<Box<dyn Communicator<Self>>> {
        if let [rank] = ranks {
            let own = self.of_rank(*rank);
            let own = if purpose.is_empty() { own } else { own.with_new_stream().unwrap() };
            return vec![Box::new(moebius::comm::Solo::new(own))];
        }
        let engines = MEMORY.get() && !purpose.is_empty();
        gpus::for_purpose(ranks, (purpose, engines), limit).into_iter().map(|comm| Box::new(comm) as Box<_>).collect()
    }
}

/// Sizes of every weight of the test: 12 rows of two, which two ranks and four pad to 16.
pub const DIMS: [usize; 3] = [3, 4, 2];
pub const COUNT: usize = 24;

/// Whole weight number `i`.
pub fn value(i: usize) -> Vec<f32> {
    (0..COUNT).map(|at| (1000 * (i + 1) + at) as f32).collect()
}

pub fn tensor(values: Vec<f32>) -> Tensor<Cpu> {
    Tensor::from_vec(values, &DIMS).unwrap()
}

/// A rank's endpoint in a chain.
pub struct Place<D: Chained> {
    pub device: D,
    pub comms: Comms<D>,
}

impl<D: Chained> Place<D> {
    /// A chain without weights.
    pub fn chain(self, options: EtpOptions) -> Result<Chain<D>> {
        Chain::new(self.device.clone(), self.comms, options)
    }

    pub fn test_chain(self, options: EtpOptions, weights: usize, recompute: bool) -> Result<TestChain<D>> {
        TestChain::new(self, options, weights, recompute)
    }
}

/// One rank's chain.
pub struct TestChain<D: Chained> {
    pub device: D,
    pub chain: Arc<Chain<D>>,
    pub ids: Vec<WeightId>,
    pub shards: Vec<Arc<Shard<D>>>,
}

/// A rank's shard of a whole weight.
pub fn cut<D: Chained>(device: &D, chain: &Chain<D>, whole: Vec<f32>) -> Tensor<D> {
    let whole = device.host(&tensor(whole));
    chain.shards(&DIMS).unwrap().cut(device, whole.view(), chain.rank()).unwrap()
}

impl<D: Chained> TestChain<D> {
    /// `weights` weights, each a layer of its own, or two a layer with the first recomputed.
    pub fn new(place: Place<D>, options: EtpOptions, weights: usize, recompute: bool) -> Result<Self> {
        let device = place.device.clone();
        let chain = Arc::new(place.chain(options)?);
        let mut test = Self { device, chain, ids: Vec::new(), shards: Vec::new() };
        (0..weights).try_for_each(|_| test.add(recompute))?;
        Ok(test)
    }

    /// Adds the next weight.
    pub fn add(&mut self, recompute: bool) -> Result<()> {
        let i = self.ids.len();
        let shard = Arc::new(Shard::new(cut(&self.device, &self.chain, value(i))));
        let layer = if recompute { i / 2 } else { i };
        let mut spec = WeightSpec::new(format!("w{i}"), layer as u32, &DIMS, DType::F32);
        spec.recompute = recompute && i.is_multiple_of(2);
        self.ids.push(self.chain.add(spec, Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?);
        self.shards.push(shard);
        Ok(())
    }

    /// Acquires weight `i`, checks its values, and lets go of it.
    pub fn read(&self, i: usize) -> Result<()> {
        let source = self.chain.source(self.ids[i])?;
        let guard = source.acquire()?;
        holds(&self.device, &guard, &value(i));
        Ok(())
    }

    /// A whole pass.
    pub fn pass(&self, phase: Phase, order: &[usize]) -> Result<()> {
        self.chain.begin(phase)?;
        order.iter().try_for_each(|i| self.read(*i))?;
        self.chain.end()
    }

    /// Submits rank · 100 + `what` in every element, as weight `i`'s gradient.
    pub fn gradient(&self, i: usize, what: f32) -> Result<()> {
        let mut buffer = self.chain.gradient_buffer(self.ids[i])?;
        let values = vec![self.chain.rank() as f32 * 100.0 + what; COUNT];
        self.device.upload(bytemuck::cast_slice(&values), buffer.view_mut()?)?;
        self.chain.submit(buffer)
    }

    /// Ends the step, whose gradients must be `expected`, one value for all elements of a weight.
    pub fn finish(&self, expected: &[f32]) -> Result<()> {
        let cut = self.chain.shards(&DIMS)?;
        let (filled, all) = (cut.rows_of(self.chain.rank()).len() * 2, cut.shard_dims()[0] * 2);
        let mut found = Vec::new();
        self.chain.finish(None, |_, gradient| {
            found.push(self.device.floats(gradient));
            Ok(())
        })?;
        let shard = |value: &f32| [vec![*value; filled], vec![0.0; all - filled]].concat();
        assert_eq!(found, expected.iter().map(shard).collect::<Vec<_>>(), "rank {}", self.chain.rank());
        Ok(())
    }

    /// The sum of what the ranks submit as `what`.
    pub fn sum(&self, what: f32) -> f32 {
        let n = self.chain.ranks();
        (n * (n - 1) / 2) as f32 * 100.0 + n as f32 * what
    }
}

pub fn holds<D: Chained>(device: &D, guard: &WeightGuard<'_, D>, expected: &[f32]) {
    let tensor = guard.tensor().unwrap();
    assert_eq!((tensor.dims(), &device.floats(tensor.borrow())[..]), (&DIMS[..], expected));
}

/// Runs `f` on each of `n` ranks with communicators of the chain's; gives what each returned.
pub fn ranks<D: Chained, R: Send>(
    device: &D,
    n: usize,
    limit: Duration,
    f: impl Fn(usize, Place<D>) -> R + Sync,
) -> Vec<R> {
    let all: Vec<usize> = (0..n).collect();
    let comms_for = |name| device.among(&all, name, limit);
    let comms = comms_for("gather").into_iter().zip(comms_for("reduce"));
    thread::scope(|scope| {
        let start = |(rank, (gather, reduce))| {
            let (f, device) = (&f, device.of_rank(rank));
            let place = Place { device, comms: Comms { gather, reduce } };
            scope.spawn(move || f(rank, place))
        };
        let threads: Vec<_> = comms.enumerate().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Everything on, padding to 4 N rows.
pub const ON: EtpOptions = EtpOptions {
    pad: 4,
    prefetch: true,
    ahead: 1,
    in_turn: false,
    reduction: Reduction::Pairwise,
    scale: Scale::Sum,
    replicas: 1,
    seed: 0,
};

pub const MINUTE: Duration = Duration::from_secs(60);

/// Lists a file's bodies with the ranks that each needs at least: tests of the CPU here, and a list for any device.
macro_rules! bodies {
    ($($ranks:literal $name:ident),+ $(,)?) => {
        /// The file's bodies.
        #[allow(clippy::type_complexity, reason = "numbers, names and functions, no more")]
        pub fn bodies<D: Chained>() -> Vec<(usize, &'static str, fn(&D))> {
            vec![$(($ranks, stringify!($name), $name::<D>)),+]
        }

        mod on_cpu {
            $(#[test] fn $name() { super::$name(&moebius::cpu::Cpu::poisoning()); })+
        }
    };
}
pub(crate) use bodies;
