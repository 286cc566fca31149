//! Steps of a whole layer over several GPUs, into the same memory each time.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::comm::Communicator;
use moebius::config::MoeConfig;
use moebius::cpu::Cpu;
use moebius::cuda::{Captured, Cuda};
use moebius::ep::{DispatcherKind, Group, GroupConfig, Overlap};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, DispatchOptions, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam};
use moebius::nccl::NcclComm;
use moebius::{DType, Error, Result, Tensor};

use super::conformance::gpus;
use super::several::numbers;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Bits of all that a step writes.
pub type Bits = Vec<Vec<u8>>;

/// A layer, and what is run of it.
#[derive(Clone)]
pub struct Shape {
    pub kind: DispatcherKind,
    pub config: MoeConfig,
    /// Tokens of rank 0, and the most that a rank may have.
    pub tokens: usize,
    /// Tokens that a rank has fewer than the one before it.
    pub fewer: usize,
    pub backward: bool,
    /// Of the group.
    pub windows: usize,
    pub overlap: Overlap,
}

/// A layer of one rank with memory for everything that a step writes.
pub struct Steps {
    pub cuda: Cuda,
    pub group: Group<Cuda>,
    rank: usize,
    backward: bool,
    layer: Layer,
    params: Vec<(ParamKind, Tensor<Cuda>)>,
    x: Tensor<Cuda>,
    d_y: Tensor<Cuda>,
    out: Vec<Tensor<Cuda>>,
}

impl Steps {
    pub fn new(comm: NcclComm, what: (Shape, DispatchOptions)) -> Result<Self> {
        Self::in_group(comm, what, |config| config)
    }

    /// In a group of another configuration.
    pub fn in_group(
        comm: NcclComm,
        what: (Shape, DispatchOptions),
        change: impl FnOnce(GroupConfig) -> GroupConfig,
    ) -> Result<Self> {
        Self::on(comm.cuda().clone(), comm, what, change)
    }

    /// The same on a device that is the communicator's but for the SMs that it reserves.
    pub fn on(
        cuda: Cuda,
        comm: NcclComm,
        (shape, options): (Shape, DispatchOptions),
        change: impl FnOnce(GroupConfig) -> GroupConfig,
    ) -> Result<Self> {
        let Shape { kind, config, tokens, fewer, backward, windows, overlap } = shape;
        let (rank, ranks) = (comm.rank(), comm.size());
        let experts = config.router.num_experts;
        let group = GroupConfig { dispatcher: kind, max_rows: 1 << 16, windows, ..GroupConfig::new(experts, tokens) };
        let group = change(GroupConfig { overlap, ..group });
        let group = Group::new(cuda.clone(), Box::new(comm), group)?;
        let put = |seed: u64, dims: &[usize], scale: f64| {
            let values = numbers(seed, dims.iter().product(), scale);
            cuda.write(&values, DType::BF16, dims)
        };
        let mut params = Vec::new();
        for (i, kind) in ParamKind::ALL.into_iter().enumerate() {
            let Some(dims) = kind.dims(&config, experts / ranks) else { continue };
            // The router and the shared expert are the same on all ranks.
            let own = matches!(kind, ParamKind::Up | ParamKind::Down);
            let seed = if own { 100 * (rank as u64 + 1) + i as u64 } else { 5 + i as u64 };
            params.push((kind, put(seed, &dims, 0.4)?));
        }
        let dims = [tokens - fewer * rank, config.hidden];
        let (x, d_y) = (put(7 + rank as u64, &dims, 3.0)?, put(70 + rank as u64, &dims, 3.0)?);
        let mut out = vec![put(0, &dims, 0.0)?, put(0, &dims, 0.0)?];
        for (_, t) in &params {
            out.push(put(0, t.dims(), 0.0)?);
        }
        let layer = Layer::new(config, 0)?.with_dispatch(options);
        Ok(Self { cuda, group, rank, backward, layer, params, x, d_y, out })
    }

    /// Writes other inputs to the same memory.
    pub fn set_x(&mut self, seed: u64) -> Result<()> {
        let dims = self.x.dims().to_vec();
        let values = numbers(1000 + 10 * seed + self.rank as u64, dims.iter().product(), 3.0);
        let values: Tensor<Cpu> = Cpu::new().write(&values, DType::BF16, &dims)?;
        self.cuda.upload(values.as_bytes(), self.x.view_mut())
    }

    /// The router's weight.
    pub fn router(&self) -> Result<Vec<u8>> {
        self.cuda.download(self.params[0].1.view())
    }

    pub fn set_router(&mut self, weight: &[u8]) -> Result<()> {
        self.cuda.upload(weight, self.params[0].1.view_mut())
    }

    /// Inputs and a router by which every token chooses the first four experts.
    pub fn choose_the_first_four(&mut self) -> Result<()> {
        let dims = self.x.dims().to_vec();
        let router = &mut self.params[0].1;
        let (experts, hidden) = (router.dims()[0], router.dims()[1]);
        let ones: Tensor<Cpu> = Cpu::new().write(&vec![1.0; dims.iter().product()], DType::BF16, &dims)?;
        let values: Vec<f64> = (0..experts * hidden).map(|i| if i / hidden < 4 { 0.01 } else { -0.01 }).collect();
        let values: Tensor<Cpu> = Cpu::new().write(&values, DType::BF16, &[experts, hidden])?;
        self.cuda.upload(ones.as_bytes(), self.x.view_mut())?;
        self.cuda.upload(values.as_bytes(), router.view_mut())
    }

    /// Takes this rank's experts out: what they add is zero.
    pub fn zero_experts(&mut self) -> Result<()> {
        for (_, down) in self.params.iter_mut().filter(|(kind, _)| *kind == ParamKind::Down) {
            let zeros = vec![0; down.bytes()];
            self.cuda.upload(&zeros, down.view_mut())?;
        }
        Ok(())
    }

    /// A step of tokens that are wider than the layer's.
    pub fn step_of_wider_tokens(&mut self) -> Result<()> {
        let wider = Tensor::zeros(&self.cuda, DType::BF16, &[self.x.dims()[0], self.x.dims()[1] + 8])?;
        let own = std::mem::replace(&mut self.x, wider);
        let result = self.step();
        self.x = own;
        result
    }

    /// Forward and, where the shape says so, backward.
    pub fn step(&mut self) -> Result<()> {
        let find = |kind| self.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view());
        let views = ParamViews::collect(|kind| Ok(find(kind)))?;
        let params = views.params();
        let [y, d_x, router, up, down, ..] = &mut self.out[..] else {
            return Err(Error::Device { call: "test", operation: "outputs".into(), message: "not five".into() });
        };
        let mode = Mode { backward: self.backward, noise: None };
        let made = self.layer.forward_into(
            &mut self.group,
            mode,
            Inputs { x: self.x.view(), params: &params },
            y.view_mut(),
        )?;
        let Some(context) = made.context else { return Ok(()) };
        let inputs = Inputs { x: self.x.view(), params: &params };
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.3 };
        let into = GradientsMut {
            x: Some(d_x.view_mut()),
            params: PerParam {
                router: Some(router.view_mut()),
                up: Some(up.view_mut()),
                down: Some(down.view_mut()),
                ..PerParam::none()
            },
            ..GradientsMut::none()
        };
        self.layer.backward_into(&mut self.group, context, inputs, cotangents, into)
    }

    /// Results of the last step.
    pub fn results(&self) -> Result<Bits> {
        self.out.iter().map(|t| self.cuda.download(t.view())).collect()
    }

    /// Ends the group: the memory of the results.
    pub fn without_group(self) -> Vec<Tensor<Cuda>> {
        self.out
    }

    /// Results of steps over these inputs.
    pub fn over(&mut self, seeds: std::ops::Range<u64>) -> Result<Vec<Bits>> {
        let one = |seed| {
            self.set_x(seed)?;
            self.step()?;
            self.results()
        };
        seeds.map(one).collect()
    }

    /// A captured step, over and over with the inputs of four eager ones, whose results come back with it.
    pub fn replays(&mut self) -> Result<(Captured<()>, Vec<Bits>)> {
        let eager = self.over(0..4)?;
        assert!(eager.windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
        let cuda = self.cuda.clone();
        let mut graph = cuda.capture(|| self.step())?;
        for round in 0..25 {
            for (seed, expected) in eager.iter().enumerate().rev() {
                self.set_x(seed as u64)?;
                graph.replay()?;
                assert!(self.results()? == *expected, "replay {round} differs from the eager step");
            }
        }
        Ok((graph, eager))
    }
}

/// Every rank's body on a thread; results in rank order.
pub fn each<T: Send>(ranks: usize, body: impl Fn(NcclComm, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    each_of(gpus::communicators(ranks, TIMEOUT), body)
}

/// The same of ranks whose communicators the tests do not share: what they have goes with them.
pub fn each_apart<T: Send>(ranks: usize, body: impl Fn(NcclComm, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    let (library, gpus) = gpus::first(ranks);
    each_of(NcclComm::threads(&library, &gpus, TIMEOUT).expect("communicators"), body)
}

fn each_of<T: Send>(comms: Vec<NcclComm>, body: impl Fn(NcclComm, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    let (body, barrier) = (&body, &Barrier::new(comms.len()));
    thread::scope(|scope| {
        let start = |comm| scope.spawn(move || body(comm, barrier));
        let threads: Vec<_> = comms.into_iter().map(start).collect();
        let one = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, Result<T>>)| {
            thread.join().expect("a rank").unwrap_or_else(|e| panic!("rank {rank}: {e}"))
        };
        threads.into_iter().enumerate().map(one).collect()
    })
}
