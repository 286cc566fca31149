//! Whole layers over NCCL EP with nothing waiting for the GPU: the routing that the library makes gives what the host's plan
//! gives, errors are told later, and forward and backward, prepare included, replay to the bit.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::config::MoeConfig;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Group, GroupConfig, Overflow, Reporting};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, DispatchOptions, GradientsMut, Inputs, Layer, Mode, ParamViews, Role};
use moebius::nccl::NcclComm;
use moebius::{DType, Error, Result, Tensor};

use crate::gpus;
use crate::several::numbers;

#[allow(clippy::type_complexity, reason = "names and functions, no more")]
pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("routing_on_the_gpu_is_the_hosts", routing_on_the_gpu_is_the_hosts),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay_the_bits_of_eager_steps),
        ("what_the_gpu_finds_is_told_later", what_the_gpu_finds_is_told_later),
    ]
}

const PATIENCE: Duration = Duration::from_secs(60);
const T: usize = 96;

/// A layer, and what is run of it.
#[derive(Clone)]
pub struct Shape {
    pub kind: DispatcherKind,
    pub config: MoeConfig,
    pub tokens: usize,
    pub backward: bool,
    /// Of the group.
    pub windows: usize,
}

fn shape() -> Shape {
    Shape { kind: DispatcherKind::NcclEp, config: config(), tokens: T, backward: true, windows: 0 }
}

/// A layer of one rank with memory for everything that a step writes.
pub struct Steps {
    pub cuda: Cuda,
    shape: Shape,
    layer: Layer,
    group: Group<Cuda>,
    params: Vec<(Role, Tensor<Cuda>)>,
    x: Tensor<Cuda>,
    d_y: Tensor<Cuda>,
    out: Vec<Tensor<Cuda>>,
}

fn config() -> MoeConfig {
    MoeConfig::new(128, 64, 16, 4)
}

impl Steps {
    pub fn new(comm: NcclComm, ranks: usize, (shape, options): (Shape, DispatchOptions)) -> Result<Self> {
        let (config, tokens, cuda) = (shape.config.clone(), shape.tokens, comm.cuda().clone());
        let rank = moebius::comm::Communicator::rank(&comm);
        let group = GroupConfig {
            dispatcher: shape.kind,
            max_rows: 1 << 16,
            windows: shape.windows,
            ..GroupConfig::new(config.router.num_experts, tokens)
        };
        let group = Group::new(cuda.clone(), cuda.stream(), Box::new(comm), group)?;
        let local = config.router.num_experts / ranks;
        let put = |seed: u64, dims: &[usize], scale: f64| {
            let values = numbers(seed, dims.iter().product(), scale);
            cuda.write(&cuda.stream(), &values, DType::BF16, dims)
        };
        let mut params = Vec::new();
        for (i, role) in Role::ALL.into_iter().enumerate() {
            let Some(dims) = role.dims(&config, local) else { continue };
            // The router and the shared expert are the same on all ranks.
            let own = matches!(role, Role::Up | Role::Down);
            let seed = if own { 100 * (rank as u64 + 1) + i as u64 } else { 5 + i as u64 };
            params.push((role, put(seed, &dims, 0.4)?));
        }
        let x = put(7 + rank as u64, &[tokens, config.hidden], 3.0)?;
        let d_y = put(70 + rank as u64, &[tokens, config.hidden], 3.0)?;
        let mut out = vec![put(0, &[tokens, config.hidden], 0.0)?, put(0, &[tokens, config.hidden], 0.0)?];
        for (_, t) in &params {
            out.push(put(0, t.dims(), 0.0)?);
        }
        let layer = Layer::new(config, 0)?.with_dispatch(options);
        Ok(Self { cuda, shape, layer, group, params, x, d_y, out })
    }

    /// Forward and backward, into the same memory each time.
    pub fn step(&mut self) -> Result<()> {
        let find = |role| self.params.iter().find(|(r, _)| *r == role).map(|(_, t)| t.view());
        let views = ParamViews::collect(|role| Ok(find(role)))?;
        let params = views.params();
        let [y, d_x, router, up, down, ..] = &mut self.out[..] else {
            return Err(Error::Device { call: "test", operation: "outputs".into(), message: "not five".into() });
        };
        let mode = Mode { backward: self.shape.backward, noise: None };
        let made = self.layer.forward_into(&mut self.group, mode, (self.x.view(), &params), y.view_mut())?;
        let Some(context) = made.context else { return Ok(()) };
        let inputs = Inputs { x: self.x.view(), params: &params };
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.0 };
        let into = GradientsMut {
            x: Some(d_x.view_mut()),
            router: Some(router.view_mut()),
            up: Some(up.view_mut()),
            down: Some(down.view_mut()),
            ..GradientsMut::none()
        };
        self.layer.backward_into(&mut self.group, context, (inputs, cotangents), into)
    }

    /// Bits of all results.
    pub fn results(&self) -> Result<Vec<Vec<u8>>> {
        self.out.iter().map(|t| self.cuda.download(&self.cuda.stream(), t.view())).collect()
    }
}

/// Every rank's body on a thread.
pub fn each(ranks: usize, body: impl Fn(NcclComm, &Barrier) -> Result<()> + Sync) {
    let (body, barrier) = (&body, &Barrier::new(ranks));
    thread::scope(|scope| {
        let start = |comm| scope.spawn(move || body(comm, barrier));
        let threads: Vec<_> = gpus::communicators(ranks, PATIENCE).into_iter().map(start).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            thread.join().expect("a rank").unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        }
    });
}

pub fn fixed(shape: &Shape, ranks: usize, alignment: usize) -> DispatchOptions {
    let local = shape.config.router.num_experts / ranks;
    let rows =
        ranks * shape.tokens * shape.config.router.top_k + if alignment > 1 { local * (alignment - 1) } else { 0 };
    let rows = rows.next_multiple_of(16);
    DispatchOptions { capacity: Capacity::Static(rows), overflow: Overflow::Error, alignment, reporting: None }
}

/// The first step's routing is the host's plan, the second's the library's: the same rows go through the same sums.
fn routing_on_the_gpu_is_the_hosts(ranks: usize) {
    let open = DispatchOptions { alignment: 16, ..DispatchOptions::default() };
    for options in [DispatchOptions::default(), open, fixed(&shape(), ranks, 1), fixed(&shape(), ranks, 16)] {
        each(ranks, |comm, _| {
            let mut steps = Steps::new(comm, ranks, (shape(), options))?;
            steps.step()?;
            let first = steps.results()?;
            for _ in 0..3 {
                steps.step()?;
                assert!(steps.results()? == first, "{options:?}: a later step differs");
            }
            steps.cuda.check()
        });
        println!("{options:?}: holds");
    }
}

fn graphs_replay_the_bits_of_eager_steps(ranks: usize) {
    replays(ranks, (shape(), fixed(&shape(), ranks, 16)));
}

/// A captured step, over and over with other inputs.
pub fn replays(ranks: usize, (shape, options): (Shape, DispatchOptions)) {
    each(ranks, |comm, barrier| {
        let rank = moebius::comm::Communicator::rank(&comm);
        let mut steps = Steps::new(comm, ranks, (shape.clone(), options))?;
        let dims = [shape.tokens, shape.config.hidden];
        let inputs: Vec<Tensor<Cpu>> = (0..4)
            .map(|i| {
                let values = numbers(1000 + 10 * i + rank as u64, dims[0] * dims[1], 3.0);
                Cpu::new().write(&(), &values, DType::BF16, &dims)
            })
            .collect::<Result<_>>()?;
        let mut eager = Vec::new();
        for x in &inputs {
            steps.cuda.upload(&steps.cuda.stream(), x.as_bytes(), steps.x.view_mut())?;
            steps.step()?;
            eager.push(steps.results()?);
        }
        assert!(eager.windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
        let cuda = steps.cuda.clone();
        let mut graph = cuda.capture(|| steps.step())?;
        for round in 0..25 {
            for (x, expected) in inputs.iter().zip(&eager).rev() {
                cuda.upload(&cuda.stream(), x.as_bytes(), steps.x.view_mut())?;
                graph.replay()?;
                assert!(steps.results()? == *expected, "replay {round} differs from the eager step");
            }
        }
        cuda.check()?;
        // Before the group that it calls.
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

fn what_the_gpu_finds_is_told_later(ranks: usize) {
    each(ranks, |comm, barrier| {
        let rank = moebius::comm::Communicator::rank(&comm);
        let options = DispatchOptions { reporting: Some(Reporting::Deferred), ..fixed(&shape(), ranks, 1) };
        // Room for what a step needs at first, and no more.
        let options = DispatchOptions { capacity: Capacity::Static(T * 4 + 64 * ranks), ..options };
        let mut steps = Steps::new(comm, ranks, (shape(), options))?;
        steps.step()?;
        steps.group.dispatcher().check()?;
        // All tokens choose the first four experts, which are the first rank's.
        let experts = config().router.num_experts;
        let ones: Tensor<Cpu> = Cpu::new().write(&(), &[1.0; T * 128], DType::BF16, &[T, 128])?;
        let router: Vec<f64> = (0..experts * 128).map(|i| if i / 128 < 4 { 0.01 } else { -0.01 }).collect();
        let router: Tensor<Cpu> = Cpu::new().write(&(), &router, DType::BF16, &[experts, 128])?;
        let (cuda, stream) = (steps.cuda.clone(), steps.cuda.stream());
        cuda.upload(&stream, ones.as_bytes(), steps.x.view_mut())?;
        cuda.upload(&stream, router.as_bytes(), steps.params[0].1.view_mut())?;
        steps.step()?;
        let (found, needed) = (steps.group.dispatcher().check(), ranks * T * 4);
        match (rank, found) {
            (0, Err(Error::Capacity { needed: n, .. })) if n == needed => {}
            (1.., Ok(())) => {}
            (_, found) => panic!("rank {rank}: {found:?}"),
        }
        barrier.wait();
        Ok(())
    });
}
