//! Sharded expert weights: what gathers and reduce-scatters beside the computation cost, and what memory they need.
//!
//! A stack of layers, each with all experts on every rank and its weights cut over the ranks. Times are of a layer in
//! the middle of the stack, between events of the computation's stream: of the computation alone, with whole weights at
//! hand; of the collectives alone, each weight taken and let go; of both; and of both without the collectives, which
//! leaves the chain's own work in the computation's order (shards put in place, sums, casts, de-quantizing).

use std::sync::Arc;

use moebius::config::MoeConfig;
use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::CudaEvent;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{
    Chain, ChainMemory, Comms, EtpOptions, Payload, Phase, Reduction, Shard, ShardDevice, Shares, WeightId, WeightSpec,
};
use moebius::layer::{Context, Cotangents, Inputs, Layer, Mode, ParamKind, ParamViews, Params};
use moebius::nccl::{NcclComm, NcclLibrary, NcclWorld};
use moebius::weights::WeightSource;
use moebius::{DType, Result, Tensor};

use crate::data::Random;
use crate::layer::gradients;
use crate::report::{Report, Spread, spread};
use crate::timed::{between, event};
use crate::wrapped::{Silent, Wrapped};
use crate::{Rank, TIMEOUT, Workload, on_ranks};

const WARM_UP: usize = 2;
const REPEATS: usize = 7;
/// Layers; times are of those without the first and the last.
const LAYERS: usize = 5;

/// Experts of a rank where 256 are spread over eight, with the rows that each then gets.
const DSV3_EP8: Workload = Workload {
    name: "dsv3-ep8-rank",
    tokens: 4096,
    hidden: 7168,
    inner: 2048,
    experts: 32,
    top_k: 8,
    routing: crate::UNIFORM,
    shared: 0,
};

/// A measured configuration.
#[derive(Debug, Clone, Copy)]
struct Setting {
    payload: Payload,
    /// Steps that gathers start ahead; 0: none does.
    ahead: usize,
    /// SMs that the computation beside collectives leaves to them.
    reserved_sms: usize,
    /// Threads that gathers and reductions run on: one for both, or one each.
    collective_threads: usize,
    /// Copy engines move what they can.
    copy_engines: bool,
}

/// Options of the measurements.
#[derive(Debug, Clone)]
pub struct Asked {
    pub payloads: Vec<Payload>,
    pub ahead: Vec<usize>,
    pub reserved_sms: Vec<usize>,
    /// 2: gathers and reductions beside each other; 1: in turn.
    pub collective_threads: Vec<usize>,
    /// Without copy engines (0) and with them (1).
    pub copy_engines: Vec<usize>,
}

pub fn run(library: &NcclLibrary, world: &NcclWorld, report: &Report, (gpus, asked): (&[Cuda], &Asked)) -> Result<()> {
    let collectives_world = |copy_engines: bool| -> Result<NcclWorld> {
        let beside: Vec<Cuda> = gpus.iter().map(Cuda::with_new_stream).collect::<Result<_>>()?;
        let make = if copy_engines { NcclWorld::with_copy_engines } else { NcclWorld::new };
        make(library, &beside, TIMEOUT)
    };
    let mut settings: Vec<Setting> = Vec::new();
    for (&payload, &ahead) in asked.payloads.iter().flat_map(|payload| asked.ahead.iter().map(move |a| (payload, a))) {
        for copy_engines in asked.copy_engines.iter().map(|engines| *engines != 0) {
            // Without overlap there is nothing to reserve SMs for.
            let (reserved, threads) = match ahead {
                0 => (&[0][..], &[2][..]),
                _ => (&asked.reserved_sms[..], &asked.collective_threads[..]),
            };
            for &collective_threads in threads {
                let of = |&reserved_sms| Setting { payload, ahead, reserved_sms, collective_threads, copy_engines };
                settings.extend(reserved.iter().map(of));
            }
        }
    }
    for setting in settings {
        // Made anew: memory of the communicators' own stays as long as they do.
        let worlds = [collectives_world(setting.copy_engines)?, collectives_world(setting.copy_engines)?];
        let [gathers, reductions] = [worlds[0].communicators(TIMEOUT)?, worlds[1].communicators(TIMEOUT)?];
        let comms: Vec<_> = gathers.into_iter().zip(reductions).map(|pair| std::sync::Mutex::new(Some(pair))).collect();
        let parts = on_ranks(world, |rank, _| {
            let taken = comms[rank.rank].lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            match taken {
                Some(pair) => measure(rank, &gpus[rank.rank], (DSV3_EP8, setting), pair),
                None => {
                    let (operation, message) = ("take the communicators".into(), "none".into());
                    Err(moebius::Error::Device { call: "bench", operation, message })
                }
            }
        })?;
        lines(report, (DSV3_EP8, setting), &parts);
        // Helper threads give their communicators back a moment later.
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    Ok(())
}

/// Milliseconds a layer of a forward and of a backward.
type Times = [Vec<f64>; 2];

/// Measurements of one rank.
struct Part {
    alone: Times,
    collectives: Times,
    both: Times,
    /// The computation and the chain's own work.
    work: Times,
    /// After the last layer's backward, until its gradients have arrived.
    tail: Vec<f64>,
    memory: ChainMemory,
    /// Bytes of memory that the collectives' own devices have reserved.
    collective_memory: usize,
    shards: usize,
    bytes_an_element: f64,
    /// Of adding what two ranks share of `up`'s gradient to its main gradient.
    add: Vec<f64>,
    add_bytes: usize,
}

fn lines(report: &Report, (w, setting): (Workload, Setting), parts: &[Part]) {
    let of =
        |f: &dyn Fn(&Part) -> &Vec<f64>| -> Spread { spread(&parts.iter().map(|p| f(p).clone()).collect::<Vec<_>>()) };
    let Setting { payload, ahead, reserved_sms, collective_threads, copy_engines } = setting;
    let about = format!(
        "\"payload\":\"{payload:?}\",\"ahead\":{ahead},\"reserved_sms\":{reserved_sms},\
         \"collective_threads\":{collective_threads},\"copy_engines\":{copy_engines}"
    );
    let (mut exposed, mut whole) = (0.0, 0.0);
    for (i, phase) in ["fwd", "bwd"].into_iter().enumerate() {
        let (alone, collectives) = (of(&|p| &p.alone[i]), of(&|p| &p.collectives[i]));
        let (both, work) = (of(&|p| &p.both[i]), of(&|p| &p.work[i]));
        let more = both.median - alone.median;
        let bound = (collectives.median - alone.median).max(0.0) + 0.1 * alone.median;
        (exposed, whole) = (exposed + more, whole + alone.median);
        let rest = format!(
            "\"p99_ms\":{:.4},\"compute_ms\":{:.4},\"collectives_ms\":{:.4},\"work_ms\":{:.4},\
             \"exposed_ms\":{more:.4},\"exposed_share\":{:.3},\"exposed_collectives_ms\":{:.4},\"bound_ms\":{bound:.4}",
            both.p99,
            alone.median,
            collectives.median,
            work.median,
            more / alone.median,
            both.median - work.median
        );
        report.etp(&w, &format!("etp_{phase}"), both.median, &format!("{about},{rest}"));
    }
    let tail = of(&|p| &p.tail);
    let rest = format!("\"exposed_ms\":{exposed:.4},\"exposed_share\":{:.3}", exposed / whole);
    report.etp(&w, "etp_layer", whole + exposed, &format!("{about},{rest},\"tail_ms\":{:.4}", tail.median));
    let p = &parts[0];
    let add = of(&|p| &p.add);
    let rest = format!("\"bytes\":{},\"gbps\":{:.0}", p.add_bytes, p.add_bytes as f64 / add.median / 1e6);
    report.etp(&w, "etp_add", add.median, &format!("{about},{rest}"));
    let m = &p.memory;
    let rest = format!(
        "\"layers\":{LAYERS},\"shards\":{},\"main\":{},\"gathered\":{},\"quantized\":{},\"arrived\":{},\"gradients\":{},\
         \"reduced\":{},\"collective_memory\":{},\"bytes_an_element\":{:.4}",
        p.shards,
        m.main,
        m.gathered,
        m.quantized,
        m.arrived,
        m.gradients,
        m.reduced,
        p.collective_memory,
        p.bytes_an_element
    );
    report.etp(&w, "etp_memory", 0.0, &format!("{about},{rest}"));
}

/// A layer's weights, wherever they are.
fn params<'a>(
    views: &'a ParamViews<'_, Cuda>,
    up: &'a dyn WeightSource<Cuda>,
    down: &'a dyn WeightSource<Cuda>,
) -> Params<'a, Cuda> {
    Params { up, down, ..views.params() }
}

/// State that a step changes.
struct Own {
    /// On the whole GPU, and on what is not reserved.
    groups: [Group<Cuda>; 2],
    gradients: [Tensor<Cuda>; 2],
}

struct Bench {
    cuda: Cuda,
    layer: Layer,
    chain: Arc<Chain<Cuda>>,
    ids: Vec<[WeightId; 2]>,
    router: Tensor<Cuda>,
    whole: [Tensor<Cuda>; 2],
    x: Tensor<Cuda>,
    d_y: Tensor<Cuda>,
}

/// Kind of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    Alone,
    Collectives,
    Both,
    Work,
}

fn measure(
    rank: &Rank<'_>,
    gpu: &Cuda,
    (w, setting): (Workload, Setting),
    (gather, reduce): (NcclComm, NcclComm),
) -> Result<Part> {
    let cuda = gpu.reserving_sms(setting.reserved_sms);
    let collective_devices = [gather.cuda().clone(), reduce.cuda().clone()];
    let (prefetch, ahead) = (setting.ahead > 0, setting.ahead.max(1));
    let (in_turn, reduction) = (setting.collective_threads == 1, Reduction::Pairwise);
    let options = EtpOptions { prefetch, ahead, in_turn, reduction, ..EtpOptions::default() };
    let silent = Silent::default();
    let [gather, reduce] = [gather, reduce].map(|inner| Box::new(Wrapped { inner, about: silent.clone() }));
    let comms = Comms { gather, reduce };
    let chain = Arc::new(Chain::new(cuda.clone(), comms, options)?);
    let group = |cuda: &Cuda| cuda.group(GroupConfig::new(w.experts, w.tokens));
    let groups = [group(gpu)?, group(&cuda)?];
    let scale = |n: usize| (n as f64).powf(-0.5);
    let (up, down) = ([w.experts, 2 * w.inner, w.hidden], [w.experts, w.hidden, w.inner]);
    let mut random = Random(2 + rank.rank as u64);
    let (mut ids, mut shards) = (Vec::new(), 0);
    for l in 0..LAYERS {
        let mut add = |which: usize, dims: [usize; 3], fan: usize| -> Result<WeightId> {
            let shard = random.tensor(&cuda, &chain.shards(&dims)?.shard_dims(), scale(fan))?;
            shards += shard.bytes();
            let mut spec = WeightSpec::new(format!("layer {l}, {which}"), l as u32, &dims, DType::BF16);
            spec.payload = setting.payload;
            chain.add(spec, Arc::new(Shard::new(shard)))
        };
        ids.push([add(0, up, w.hidden)?, add(1, down, w.inner)?]);
    }
    let whole = [random.tensor(&cuda, &up, scale(w.hidden))?, random.tensor(&cuda, &down, scale(w.inner))?];
    let gradients = [Tensor::empty(&cuda, DType::BF16, &up)?, Tensor::empty(&cuda, DType::BF16, &down)?];
    let mut own = Own { groups, gradients };
    let bench = Bench {
        layer: Layer::new(MoeConfig::new(w.hidden, w.inner, w.experts, w.top_k), 0)?,
        chain,
        ids,
        router: Random(1).tensor(&cuda, &[w.experts, w.hidden], scale(w.hidden))?,
        whole,
        x: random.tensor(&cuda, &[w.tokens, w.hidden], 1.0)?,
        d_y: random.tensor(&cuda, &[w.tokens, w.hidden], 1.0)?,
        cuda,
    };
    let mut part = Part {
        alone: Times::default(),
        collectives: Times::default(),
        both: Times::default(),
        work: Times::default(),
        tail: Vec::new(),
        memory: ChainMemory::default(),
        collective_memory: 0,
        shards,
        bytes_an_element: 0.0,
        add: Vec::new(),
        add_bytes: 0,
    };
    let mut traffic = bench.chain.traffic();
    for what in [What::Alone, What::Collectives, What::Both, What::Work] {
        if what == What::Work {
            bench.chain.drain()?;
            traffic = bench.chain.traffic();
        }
        for repeat in 0..WARM_UP + REPEATS {
            rank.meet()?;
            bench.cuda.check()?;
            silent.set(what == What::Work);
            let (forward, backward, tail) = bench.step(&mut own, what)?;
            if repeat < WARM_UP {
                continue;
            }
            let times = match what {
                What::Alone => &mut part.alone,
                What::Collectives => &mut part.collectives,
                What::Both => &mut part.both,
                What::Work => &mut part.work,
            };
            times[0].push(forward);
            times[1].push(backward);
            if what == What::Both {
                part.tail.push(tail);
            }
        }
    }
    let shares = &own.gradients[0];
    let mut main = Tensor::zeros(gpu, DType::F32, &[up[0] * up[1] / 2, up[2]])?;
    // The first of a step, which does not read what is in main.
    part.add_bytes = shares.bytes() + main.bytes();
    for _ in 0..WARM_UP + REPEATS {
        let from = event(gpu)?;
        let shares = Shares::together(shares.view(), main.view().count(), 1.0, true)?;
        gpu.add_shares(shares, main.view_mut())?;
        let to = event(gpu)?;
        gpu.check()?;
        part.add.push(between(&from, &to)?);
    }
    part.add.drain(..WARM_UP);
    part.memory = bench.chain.memory();
    part.collective_memory = collective_devices.iter().map(|device| device.memory().reserved).sum();
    let elements = (LAYERS * 3 * w.experts * w.inner * w.hidden) as f64;
    let steps = (2 * (WARM_UP + REPEATS)) as f64;
    part.bytes_an_element = (traffic.gathered_bytes + traffic.reduced_bytes) as f64 / elements / steps;
    Ok(part)
}

impl Bench {
    /// Milliseconds a layer of a forward and a backward, and of what comes after.
    fn step(&self, own: &mut Own, what: What) -> Result<(f64, f64, f64)> {
        let mut marks: Vec<CudaEvent> = Vec::new();
        let mut contexts = Vec::new();
        let chained = what != What::Alone;
        let chain = &self.chain;
        if chained {
            chain.begin(Phase::Forward)?;
        }
        for l in 0..LAYERS {
            marks.push(event(&self.cuda)?);
            contexts.extend(self.forward(own, (l, what))?);
        }
        if chained {
            chain.end()?;
            chain.begin(Phase::Backward)?;
        }
        let mut back: Vec<CudaEvent> = Vec::new();
        for l in (0..LAYERS).rev() {
            back.push(event(&self.cuda)?);
            let context = contexts.pop();
            self.backward(own, (l, what), context)?;
        }
        let last = event(&self.cuda)?;
        if chained {
            chain.end()?;
            chain.finish(None, |_, _| Ok(()))?;
        }
        let end = event(&self.cuda)?;
        self.cuda.check()?;
        let middle = (LAYERS - 2) as f64;
        let of = |marks: &[CudaEvent]| Ok::<_, moebius::Error>(between(&marks[1], &marks[LAYERS - 1])? / middle);
        Ok((of(&marks)?, of(&back)?, between(&last, &end)?))
    }

    fn views(&self) -> Result<ParamViews<'_, Cuda>> {
        ParamViews::collect(|kind| {
            Ok(match kind {
                ParamKind::Router => Some(self.router.view()),
                ParamKind::Up => Some(self.whole[0].view()),
                ParamKind::Down => Some(self.whole[1].view()),
                _ => None,
            })
        })
    }

    fn forward(&self, own: &mut Own, (l, what): (usize, What)) -> Result<Option<Context<Cuda>>> {
        let [up, down] = self.ids[l];
        if what == What::Collectives {
            for id in [up, down] {
                drop(self.chain.source(id)?.acquire()?);
            }
            return Ok(None);
        }
        let mode = Mode { backward: true, noise: None };
        let (views, group) = (self.views()?, &mut own.groups[usize::from(what != What::Alone)]);
        let made = match what {
            What::Alone => self.layer.forward(group, mode, self.x.view(), &views.params())?,
            _ => {
                let (up, down) = (self.chain.source(up)?, self.chain.source(down)?);
                self.layer.forward(group, mode, self.x.view(), &params(&views, &up, &down))?
            }
        };
        Ok(made.context)
    }

    fn backward(&self, own: &mut Own, (l, what): (usize, What), context: Option<Context<Cuda>>) -> Result<()> {
        let [up, down] = self.ids[l];
        if what == What::Collectives {
            for id in [down, up] {
                drop(self.chain.source(id)?.acquire()?);
            }
            for id in [down, up] {
                self.chain.submit(self.chain.gradient_buffer(id)?)?;
            }
            return Ok(());
        }
        let Some(context) = context else { return Ok(()) };
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.0 };
        let (views, group) = (self.views()?, &mut own.groups[usize::from(what != What::Alone)]);
        let mut d_x = Tensor::empty(&self.cuda, DType::BF16, self.x.dims())?;
        let mut d_router = Tensor::empty(&self.cuda, DType::BF16, self.router.dims())?;
        let [d_up, d_down] = &mut own.gradients;
        if what == What::Alone {
            let params = views.params();
            let into = gradients(&mut d_x, &mut d_router, [d_up.view_mut(), d_down.view_mut()]);
            let inputs = Inputs { x: self.x.view(), params: &params };
            return self.layer.backward_into(group, context, inputs, cotangents, into);
        }
        let (mut room_up, mut room_down) = (self.chain.gradient_buffer(up)?, self.chain.gradient_buffer(down)?);
        let sources = (self.chain.source(up)?, self.chain.source(down)?);
        let params = params(&views, &sources.0, &sources.1);
        let into = gradients(&mut d_x, &mut d_router, [room_up.view_mut()?, room_down.view_mut()?]);
        let inputs = Inputs { x: self.x.view(), params: &params };
        self.layer.backward_into(group, context, inputs, cotangents, into)?;
        self.chain.submit(room_down)?;
        self.chain.submit(room_up)
    }
}
