//! Ranks as threads, each with a group, a layer and its parameters, in f64.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use moebius::checkpoint::BlockParams;
use moebius::comm::{ThreadComm, ThreadWorld};
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::layer::{Context, Cotangents, Gradients, Inputs, Layer, Mode, Params, Wanted};
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{Error, MoeConfig, Result, Tensor, TensorRef};

pub const RANKS: usize = 4;
pub const EXPERTS: usize = 8;
pub const HIDDEN: usize = 8;
pub const INNER: usize = 4;
pub const TOKENS: usize = 3;
/// The rank that every fault is on.
pub const CULPRIT: usize = 2;
pub const KINDS: [DispatcherKind; 2] = [DispatcherKind::AllToAll, DispatcherKind::AllGather];
/// Long enough for a loaded machine; what is told at once is told well within it.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const AT_ONCE: Duration = Duration::from_secs(10);

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
        router_bias: None,
        selection_bias: None,
        up: tensor(2, rank, &[local, 2 * INNER, HIDDEN]),
        up_bias: None,
        down: tensor(3, rank, &[local, HIDDEN, INNER]),
        down_bias: None,
        shared_up: None,
        shared_down: None,
        shared_gate: None,
    }
}

pub struct Rank {
    pub rank: usize,
    pub group: Group<Cpu>,
    pub layer: Layer,
}

/// A forward and its backward.
pub struct Step {
    pub y: Vec<f64>,
    pub d_x: Vec<f64>,
}

impl Rank {
    pub fn new(comm: ThreadComm, kind: DispatcherKind) -> Self {
        let config = GroupConfig { dispatcher: kind, max_rows: 64, ..GroupConfig::new(EXPERTS, 4 * TOKENS) };
        let group = Group::new(Cpu::poisoning(), (), Box::new(comm), config).expect("group");
        Self { rank: group.rank(), group, layer: Layer::new(self::config(), 5).expect("layer") }
    }

    pub fn is_culprit(&self) -> bool {
        self.rank == CULPRIT
    }

    /// This rank's tokens.
    pub fn x(&self) -> Tensor<Cpu> {
        tensor(4, self.rank, &[TOKENS * RANKS / self.group.ranks(), HIDDEN])
    }

    pub fn forward(&mut self, x: TensorRef<'_, Cpu>, params: &Params<'_, Cpu>) -> Result<(Vec<f64>, Context<Cpu>)> {
        let mode = Mode { backward: true, noise: None };
        let forward = self.layer.forward(&mut self.group, mode, x, params)?;
        Ok((forward.y.to_f64(), forward.context.expect("a context")))
    }

    pub fn backward<'a>(
        &mut self,
        context: Context<Cpu>,
        x: &'a Tensor<Cpu>,
        params: &'a Params<'a, Cpu>,
        d_y: &Tensor<Cpu>,
    ) -> Result<Gradients<Cpu>> {
        let (inputs, cotangents) = (Inputs { x: x.view(), params }, Cotangents { y: Some(d_y.view()), aux: 0.0 });
        self.layer.backward(&mut self.group, context, inputs, cotangents, Wanted::ALL)
    }

    /// A whole step with good input, whose gradient of y is the tokens.
    pub fn step(&mut self) -> Result<Step> {
        let own = params(self.rank, self.group.ranks());
        let views = own.views()?;
        let x = self.x();
        let (y, context) = self.forward(x.view(), &views.params())?;
        let gradients = self.backward(context, &x, &views.params(), &x)?;
        Ok(Step { y, d_x: gradients.x.expect("asked for").to_f64() })
    }

    /// The group works: a step gives what one rank alone gives, to the rounding of f64 sums of up to 16 terms.
    pub fn works(&mut self, alone: &Step) {
        let found = self.step().expect("a step after a fault");
        let count = found.y.len();
        let own = self.rank * count..(self.rank + 1) * count;
        for (found, expected) in [(found.y, &alone.y[own.clone()]), (found.d_x, &alone.d_x[own.clone()])] {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() <= 1e-13, "{a} after a fault, {b} alone");
            }
        }
    }
}

/// The step of all tokens on one rank.
pub fn alone() -> Step {
    let comm = ThreadWorld::create(1, PATIENCE).pop().expect("one rank");
    Rank::new(comm, DispatcherKind::Local).step().expect("a step alone")
}

/// Runs `body` on every rank; a rank's panic is its result.
pub fn on_ranks<T: Send>(timeout: Duration, body: impl Fn(ThreadComm) -> T + Sync) -> Vec<thread::Result<T>> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || body(comm));
        let threads: Vec<_> = ThreadWorld::create(RANKS, timeout).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join()).collect()
    })
}

/// Says that no rank panicked.
pub fn all_well<T>(name: &str, results: Vec<thread::Result<T>>) -> Vec<T> {
    results.into_iter().map(|r| r.unwrap_or_else(|_| panic!("{name}: a rank panicked"))).collect()
}

/// What a weight does when it is acquired.
#[derive(Debug, Clone, Copy)]
pub enum Trouble {
    Fail,
    Panic,
}

/// A weight that makes trouble once told to.
#[derive(Debug)]
pub struct Troubled<'a> {
    pub tensor: TensorRef<'a, Cpu>,
    pub armed: AtomicBool,
    pub trouble: Mutex<Trouble>,
}

impl<'a> Troubled<'a> {
    pub fn new(tensor: TensorRef<'a, Cpu>, armed: bool, trouble: Trouble) -> Self {
        Self { tensor, armed: AtomicBool::new(armed), trouble: Mutex::new(trouble) }
    }

    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl WeightSource<Cpu> for Troubled<'_> {
    fn dims(&self) -> &[usize] {
        self.tensor.dims()
    }

    fn acquire(&self, stream: &()) -> Result<WeightGuard<'_, Cpu>> {
        if !self.armed.load(Ordering::SeqCst) {
            return self.tensor.acquire(stream);
        }
        let trouble = *self.trouble.lock().expect("trouble");
        match trouble {
            // Unwinds without the hook's noise.
            Trouble::Panic => std::panic::resume_unwind(Box::new("a weight's own trouble")),
            Trouble::Fail => Err(Error::Framework { call: "acquire", framework: "test", message: "no weight".into() }),
        }
    }
}
