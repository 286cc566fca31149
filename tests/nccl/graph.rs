//! Steps of whole layers over several GPUs in which nothing waits: the same bits as those that do, nothing asked of the
//! driver, errors told later, and forward and backward, prepare included, replayed from a graph.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::comm::Communicator;
use moebius::config::{CapacityOrder, ExpertCapacity, MoeConfig};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Group, GroupConfig, Overflow, Reporting};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, DispatchOptions, GradientsMut, Inputs, Layer, Mode, ParamViews, Role};
use moebius::nccl::NcclComm;
use moebius::{DType, Error, Result, Tensor};

use crate::conformance::gpus;
use crate::several::numbers;
use crate::{KINDS, Run};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("a_plan_that_waits_for_nothing_gives_the_same_bits", same_bits),
        ("a_seen_step_asks_the_driver_for_nothing", asks_for_nothing),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay),
        ("a_graph_tells_what_is_wrong_later", graphs_tell),
        ("what_cannot_be_recorded_says_so", not_capturable),
    ]
}

const PATIENCE: Duration = Duration::from_secs(60);
/// Tokens that a rank may have.
const MOST: usize = 96;

/// Tokens of a rank: not all that it may have, and not as many as the others'.
fn tokens(rank: usize) -> usize {
    MOST - 17 * rank
}

/// A layer of one rank with memory for everything that a step writes.
struct Steps {
    cuda: Cuda,
    rank: usize,
    layer: Layer,
    group: Group<Cuda>,
    params: Vec<(Role, Tensor<Cuda>)>,
    x: Tensor<Cuda>,
    d_y: Tensor<Cuda>,
    out: Vec<Tensor<Cuda>>,
}

/// Configurations with what only they have.
fn configs() -> Vec<MoeConfig> {
    let plain = MoeConfig::new(128, 64, 16, 4);
    let mut aux = MoeConfig::new(64, 40, 8, 2);
    (aux.aux.balance, aux.aux.z, aux.aux.over_ranks) = (0.1, 0.01, true);
    let mut limited = plain.clone();
    limited.router.expert_capacity =
        Some(ExpertCapacity { factor: 0.9, order: CapacityOrder::Position, renormalize: true });
    vec![plain, aux, limited]
}

impl Steps {
    fn new(comm: NcclComm, config: &MoeConfig, kind: DispatcherKind, options: DispatchOptions) -> Result<Self> {
        let (cuda, rank, ranks) = (comm.cuda().clone(), comm.rank(), comm.size());
        let experts = config.router.num_experts;
        let group = GroupConfig { dispatcher: kind, max_rows: 1 << 16, ..GroupConfig::new(experts, MOST) };
        let group = Group::new(cuda.clone(), cuda.stream(), Box::new(comm), group)?;
        let put = |seed: u64, dims: &[usize], scale: f64| {
            let values = numbers(seed, dims.iter().product(), scale);
            cuda.write(&cuda.stream(), &values, DType::BF16, dims)
        };
        let mut params = Vec::new();
        for (i, role) in [Role::Router, Role::Up, Role::Down].into_iter().enumerate() {
            let Some(dims) = role.dims(config, experts / ranks) else { continue };
            // The router is the same on all ranks.
            let seed = if role == Role::Router { 5 } else { 100 * (rank as u64 + 1) + i as u64 };
            params.push((role, put(seed, &dims, 0.4)?));
        }
        let dims = [tokens(rank), config.hidden];
        let (x, d_y) = (put(7 + rank as u64, &dims, 3.0)?, put(70 + rank as u64, &dims, 3.0)?);
        let mut out = vec![put(0, &dims, 0.0)?, put(0, &dims, 0.0)?];
        for (_, t) in &params {
            out.push(put(0, t.dims(), 0.0)?);
        }
        let layer = Layer::new(config.clone(), 0)?.with_dispatch(options);
        Ok(Self { cuda, rank, layer, group, params, x, d_y, out })
    }

    fn set_x(&mut self, seed: u64) -> Result<()> {
        let dims = self.x.dims().to_vec();
        let values = numbers(1000 + 10 * seed + self.rank as u64, dims.iter().product(), 3.0);
        let values: Tensor<Cpu> = Cpu::new().write(&(), &values, DType::BF16, &dims)?;
        self.cuda.upload(&self.cuda.stream(), values.as_bytes(), self.x.view_mut())
    }

    /// Forward and backward, into the same memory each time.
    fn step(&mut self) -> Result<()> {
        let find = |role| self.params.iter().find(|(r, _)| *r == role).map(|(_, t)| t.view());
        let views = ParamViews::collect(|role| Ok(find(role)))?;
        let params = views.params();
        let [y, d_x, router, up, down] = &mut self.out[..] else {
            return Err(Error::Device { call: "test", operation: "outputs".into(), message: "not five".into() });
        };
        let mode = Mode { backward: true, noise: None };
        let made = self.layer.forward_into(&mut self.group, mode, (self.x.view(), &params), y.view_mut())?;
        let Some(context) = made.context else { return Ok(()) };
        let inputs = Inputs { x: self.x.view(), params: &params };
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.3 };
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
    fn results(&self) -> Result<Vec<Vec<u8>>> {
        self.out.iter().map(|t| self.cuda.download(&self.cuda.stream(), t.view())).collect()
    }

    /// Results of steps over these inputs.
    fn over(&mut self, seeds: std::ops::Range<u64>) -> Result<Vec<Vec<Vec<u8>>>> {
        let one = |seed| {
            self.set_x(seed)?;
            self.step()?;
            self.results()
        };
        seeds.map(one).collect()
    }
}

/// Every rank's body on a thread; results in rank order.
fn each<T: Send>(ranks: usize, body: impl Fn(NcclComm, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    let (body, barrier) = (&body, &Barrier::new(ranks));
    thread::scope(|scope| {
        let start = |comm| scope.spawn(move || body(comm, barrier));
        let threads: Vec<_> = gpus::communicators(ranks, PATIENCE).into_iter().map(start).collect();
        let one = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, Result<T>>)| {
            thread.join().expect("a rank").unwrap_or_else(|e| panic!("rank {rank}: {e}"))
        };
        threads.into_iter().enumerate().map(one).collect()
    })
}

/// Rows that are enough for all tokens of all ranks.
fn fixed(ranks: usize, reporting: Reporting) -> DispatchOptions {
    let rows = ranks * MOST * 4 + 16 * 16;
    DispatchOptions {
        capacity: Capacity::Static(rows),
        overflow: Overflow::Error,
        alignment: 16,
        reporting: Some(reporting),
    }
}

const GATHER: DispatcherKind = DispatcherKind::AllGather;

fn same_bits(_: &Cuda, ranks: usize) {
    for (kind, config) in KINDS.into_iter().flat_map(|kind| configs().into_iter().map(move |c| (kind, c))) {
        let results =
            |options: DispatchOptions| each(ranks, |comm, _| Steps::new(comm, &config, kind, options)?.over(0..3));
        let drops = DispatchOptions {
            capacity: Capacity::Static(MOST * config.router.top_k / 2),
            overflow: Overflow::Drop,
            alignment: 4,
            reporting: None,
        };
        for options in [fixed(ranks, Reporting::Immediate), drops, DispatchOptions::default()] {
            let later = results(DispatchOptions { reporting: Some(Reporting::Deferred), ..options });
            let at_once = results(DispatchOptions { reporting: Some(Reporting::Immediate), ..options });
            assert!(at_once[0].windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
            assert!(later == at_once, "{kind:?}, {options:?}");
        }
    }
}

fn asks_for_nothing(_: &Cuda, ranks: usize) {
    for config in configs() {
        each(ranks, |comm, _| {
            let mut steps = Steps::new(comm, &config, GATHER, fixed(ranks, Reporting::Deferred))?;
            steps.over(0..2)?;
            let before = steps.cuda.memory();
            for _ in 0..5 {
                steps.step()?;
            }
            assert_eq!(steps.cuda.memory(), before);
            steps.group.dispatcher().check()
        });
    }
}

fn graphs_replay(_: &Cuda, ranks: usize) {
    for config in configs() {
        each(ranks, |comm, barrier| {
            let mut steps = Steps::new(comm, &config, GATHER, fixed(ranks, Reporting::Deferred))?;
            let eager = steps.over(0..4)?;
            assert!(eager.windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
            let cuda = steps.cuda.clone();
            let mut graph = cuda.capture(|| steps.step())?;
            for round in 0..25 {
                for (seed, expected) in eager.iter().enumerate().rev() {
                    steps.set_x(seed as u64)?;
                    graph.replay()?;
                    assert!(steps.results()? == *expected, "replay {round} differs from the eager step");
                }
            }
            // An eager step between replays.
            assert!(steps.over(1..2)?[0] == eager[1]);
            steps.set_x(2)?;
            graph.replay()?;
            assert!(steps.results()? == eager[2]);
            steps.group.dispatcher().check()?;
            // Before the group that it calls.
            drop(graph);
            barrier.wait();
            Ok(())
        });
    }
}

/// All tokens choose the first experts, which the first rank has no room for.
fn graphs_tell(_: &Cuda, ranks: usize) {
    let config = configs().swap_remove(0);
    each(ranks, |comm, barrier| {
        let fits = MOST * 4 + 64 * ranks;
        let options = DispatchOptions { capacity: Capacity::Static(fits), ..fixed(ranks, Reporting::Deferred) };
        let mut steps = Steps::new(comm, &config, GATHER, DispatchOptions { alignment: 1, ..options })?;
        steps.over(0..1)?;
        let cuda = steps.cuda.clone();
        let mut graph = cuda.capture(|| steps.step())?;
        graph.replay()?;
        steps.group.dispatcher().check()?;
        let experts = config.router.num_experts;
        let ones: Tensor<Cpu> = Cpu::new().write(&(), &vec![1.0; steps.x.bytes() / 2], DType::BF16, steps.x.dims())?;
        let router: Vec<f64> = (0..experts * 128).map(|i| if i / 128 < 4 { 0.01 } else { -0.01 }).collect();
        let router: Tensor<Cpu> = Cpu::new().write(&(), &router, DType::BF16, &[experts, 128])?;
        cuda.upload(&cuda.stream(), ones.as_bytes(), steps.x.view_mut())?;
        cuda.upload(&cuda.stream(), router.as_bytes(), steps.params[0].1.view_mut())?;
        for _ in 0..3 {
            graph.replay()?;
        }
        let all = (0..ranks).map(|r| tokens(r) * 4).sum::<usize>();
        match steps.group.dispatcher().check() {
            Err(Error::Capacity { rank: 0, needed, capacity }) if fits < all => {
                assert_eq!((needed, capacity), (all, fits));
            }
            other => panic!("{other:?}"),
        }
        steps.group.dispatcher().check()?;
        drop(graph);
        barrier.wait();
        Ok(())
    });
}

fn not_capturable(_: &Cuda, ranks: usize) {
    let config = configs().swap_remove(0);
    let fixed = fixed(ranks, Reporting::Deferred);
    let waits = DispatchOptions { reporting: Some(Reporting::Immediate), ..fixed };
    let open = DispatchOptions { capacity: Capacity::Eager, ..fixed };
    for (kind, options) in [(DispatcherKind::AllToAll, fixed), (GATHER, waits), (GATHER, open)] {
        each(ranks, |comm, barrier| {
            let mut steps = Steps::new(comm, &config, kind, options)?;
            let eager = steps.over(0..1)?;
            let cuda = steps.cuda.clone();
            let error = cuda.capture(|| steps.step()).err();
            // A router that reports at once waits first.
            let call = if options.reporting == Some(Reporting::Immediate) { "route" } else { "prepare" };
            let refused = matches!(error, Some(Error::NotCapturable { call: found, .. }) if found == call);
            assert!(refused, "{kind:?}: {error:?}");
            barrier.wait();
            // And goes on.
            assert!(steps.over(0..1)? == eager);
            barrier.wait();
            Ok(())
        });
    }
}
