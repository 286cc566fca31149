//! Ranks as threads, each with a group, a layer and its parameters, in the widest type; a GPU is a rank alone.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use moebius::checkpoint::BlockParams;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::layer::{
    Context, Cotangents, GradientMask, Gradients, Inputs, Layer, Mode, ParamKind, ParamViews, Params, PerParam,
};
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{DType, Error, MoeConfig, Result, Tensor, TensorRef};

pub use super::devices::Target;

pub const RANKS: usize = 4;
pub const EXPERTS: usize = 8;
pub const HIDDEN: usize = 8;
pub const INNER: usize = 4;
pub const TOKENS: usize = 3;
/// The rank that every fault is on; a rank alone is its own.
pub const CULPRIT: usize = 2;
pub const KINDS: [DispatcherKind; 3] =
    [DispatcherKind::AllToAll, DispatcherKind::Hierarchical, DispatcherKind::AllGather];
/// Long enough for a loaded machine; what is told at once is told well within it.
pub const TIMEOUT: Duration = Duration::from_secs(60);
pub const AT_ONCE: Duration = Duration::from_secs(30);
/// The first limit where one is reached by design, and what a loaded machine may add until a thread runs again.
pub const SHORT: Duration = Duration::from_millis(300);
pub const SLACK: Duration = Duration::from_secs(5);

pub fn config() -> MoeConfig {
    MoeConfig::new(HIDDEN, INNER, EXPERTS, 2)
}

/// Values that depend on their number alone, in ±0.5.
pub fn values(seed: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    range.map(|i| (((i + 1) * 7919 + seed * 104_729) % 1009) as f64 / 1009.0 - 0.5).collect()
}

pub fn tensor(seed: usize, first: usize, dims: &[usize]) -> Tensor<Cpu> {
    let count: usize = dims.iter().product();
    Tensor::from_vec(values(seed, first * count..(first + 1) * count), dims).expect("tensor")
}

/// A rank's share of the parameters.
pub fn params(rank: usize, ranks: usize) -> BlockParams {
    let local = EXPERTS / ranks;
    BlockParams {
        router: tensor(1, 0, &[EXPERTS, HIDDEN]),
        up: tensor(2, rank, &[local, 2 * INNER, HIDDEN]),
        down: tensor(3, rank, &[local, HIDDEN, INNER]),
        others: PerParam::none(),
    }
}

pub struct Rank<D: Target = Cpu> {
    pub rank: usize,
    pub group: Group<D>,
    pub layer: Layer,
}

/// Parameters on a device.
pub struct Own<D: Target>(Vec<Option<Tensor<D>>>);

impl<D: Target> Own<D> {
    pub fn views(&self) -> Result<ParamViews<'_, D>> {
        ParamViews::collect(|kind| Ok(self.get(kind)))
    }

    pub fn get(&self, kind: ParamKind) -> Option<TensorRef<'_, D>> {
        self.0[kind as usize].as_ref().map(Tensor::view)
    }
}

/// A forward and its backward.
pub struct Step {
    pub y: Vec<f64>,
    pub d_x: Vec<f64>,
}

impl Rank {
    pub fn new(comm: ThreadComm, kind: DispatcherKind) -> Self {
        Self::on(&Cpu::poisoning(), comm, kind)
    }
}

impl<D: Target> Rank<D> {
    pub fn on(device: &D, comm: ThreadComm, kind: DispatcherKind) -> Self {
        Self::joined(device, comm, kind).expect("group")
    }

    pub fn joined(device: &D, comm: ThreadComm, kind: DispatcherKind) -> Result<Self> {
        // Two hosts, for dispatchers that know any.
        let new = GroupConfig::new(EXPERTS, 4 * TOKENS);
        let config = GroupConfig { dispatcher: kind, max_rows: 64, ranks_per_host: RANKS / 2, ..new };
        let group = device.join(comm, config)?;
        Ok(Self { rank: group.rank(), group, layer: Layer::new(self::config(), 5)? })
    }

    pub fn is_culprit(&self) -> bool {
        self.rank == CULPRIT % self.group.ranks()
    }

    /// A tensor of the host: f64 in the device's widest type, others as they are.
    pub fn put(&self, t: &Tensor<Cpu>) -> Tensor<D> {
        match t.dtype() {
            DType::F64 => self.group.device().put(D::wide(), &t.to_f64(), t.dims()),
            _ => self.group.device().host(t),
        }
    }

    /// Parameters of the host likewise.
    pub fn own(&self, params: &BlockParams) -> Own<D> {
        Own(ParamKind::ALL.into_iter().map(|kind| params.get(kind).map(|t| self.put(t))).collect())
    }

    /// This rank's tokens.
    pub fn x(&self) -> Tensor<Cpu> {
        tensor(4, self.rank, &[TOKENS * RANKS / self.group.ranks(), HIDDEN])
    }

    fn read(&self, t: &Tensor<D>) -> Vec<f64> {
        self.group.device().values(t.view())
    }

    pub fn forward(&mut self, x: TensorRef<'_, D>, params: &Params<'_, D>) -> Result<(Vec<f64>, Context<D>)> {
        let mode = Mode { backward: true, noise: None };
        let forward = self.layer.forward(&mut self.group, mode, x, params)?;
        self.group.device().settled(Ok(()))?;
        Ok((self.read(&forward.y), forward.context.expect("a context")))
    }

    pub fn backward<'a>(
        &mut self,
        context: Context<D>,
        x: &'a Tensor<D>,
        params: &'a Params<'a, D>,
        d_y: &Tensor<D>,
    ) -> Result<Gradients<D>> {
        let (inputs, cotangents) = (Inputs { x: x.view(), params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
        self.layer.backward(&mut self.group, context, inputs, cotangents, GradientMask::ALL)
    }

    /// A whole step with good input, whose gradient of y is the tokens.
    pub fn step(&mut self) -> Result<Step> {
        let own = self.own(&params(self.rank, self.group.ranks()));
        let views = own.views()?;
        let x = self.put(&self.x());
        let (y, context) = self.forward(x.view(), &views.params())?;
        let gradients = self.backward(context, &x, &views.params(), &x)?;
        Ok(Step { y, d_x: self.read(gradients.x.as_ref().expect("asked for")) })
    }

    /// The group works: a step gives what one rank alone gives on the CPU, to the rounding of sums of up to 16 terms.
    pub fn works(&mut self, alone: &Step) {
        let found = self.step().expect("a step after a fault");
        let count = found.y.len();
        let own = self.rank * count..(self.rank + 1) * count;
        for (found, expected) in [(found.y, &alone.y[own.clone()]), (found.d_x, &alone.d_x[own.clone()])] {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() <= D::bound(1e-13, 1e-6), "{a} after a fault, {b} alone");
            }
        }
    }
}

/// The step of all tokens on one rank.
pub fn alone() -> Step {
    let comm = ThreadWorld::create(1, TIMEOUT).pop().expect("one rank");
    Rank::new(comm, DispatcherKind::Local).step().expect("a step alone")
}

/// Runs `body` on every rank; a rank's panic is its result.
pub fn on_ranks<T: Send>(timeout: Duration, body: impl Fn(ThreadComm) -> T + Sync) -> Vec<thread::Result<T>> {
    on(RANKS, timeout, body)
}

/// Runs `body` over each way to travel that the device has: several ranks on the CPU, a GPU alone.
pub fn each_kind<D: Target>(device: &D, name: &str, body: impl Fn(&mut Rank<D>) + Sync) {
    let (kinds, ranks) = if D::has_f64() { (&KINDS[..], RANKS) } else { (&[DispatcherKind::Local][..], 1) };
    for &kind in kinds {
        all_well(name, on(ranks, TIMEOUT, |comm| body(&mut Rank::on(device, comm, kind))));
    }
}

fn on<T: Send>(ranks: usize, timeout: Duration, body: impl Fn(ThreadComm) -> T + Sync) -> Vec<thread::Result<T>> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || body(comm));
        let threads: Vec<_> = ThreadWorld::create(ranks, timeout).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join()).collect()
    })
}

/// Says that no rank panicked.
pub fn all_well<T>(name: &str, results: Vec<thread::Result<T>>) -> Vec<T> {
    results.into_iter().map(|r| r.unwrap_or_else(|_| panic!("{name}: a rank panicked"))).collect()
}

/// Conduct of a weight when it is acquired.
#[derive(Debug, Clone, Copy)]
pub enum Trouble {
    Fail,
    Panic,
}

/// A weight that makes trouble once told to.
#[derive(Debug)]
pub struct Troubled<'a, D: Target = Cpu> {
    pub tensor: TensorRef<'a, D>,
    pub armed: AtomicBool,
    pub trouble: Mutex<Trouble>,
}

impl<'a, D: Target> Troubled<'a, D> {
    pub fn new(tensor: TensorRef<'a, D>, armed: bool, trouble: Trouble) -> Self {
        Self { tensor, armed: AtomicBool::new(armed), trouble: Mutex::new(trouble) }
    }

    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl<D: Target> WeightSource<D> for Troubled<'_, D> {
    fn dims(&self) -> &[usize] {
        self.tensor.dims()
    }

    fn acquire(&self) -> Result<WeightGuard<'_, D>> {
        if !self.armed.load(Ordering::SeqCst) {
            return self.tensor.acquire();
        }
        let trouble = *self.trouble.lock().expect("trouble");
        match trouble {
            // Unwinds without the hook's noise.
            Trouble::Panic => std::panic::resume_unwind(Box::new("a weight's own trouble")),
            Trouble::Fail => Err(Error::Framework { call: "acquire", framework: "test", message: "no weight".into() }),
        }
    }
}
