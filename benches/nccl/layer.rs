//! The whole layer, and how much of its time its collectives take.

use moebius::config::{MoeConfig, Payload, SharedConfig};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Group};
use moebius::layer::{Cotangents, DispatchOptions, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam};
use moebius::nccl::NcclWorld;
use moebius::{DType, Result, Tensor, TensorMut};

use crate::data::Random;
use crate::report::{Report, Subject, spread};
use crate::timed::{Timed, between, event};
use crate::{Dispatcher, Rank, Workload, on_ranks};

const WARM_UP: usize = 3;
const REPEATS: usize = 15;

/// Milliseconds of forward, of forward and backward, and of the collectives in each.
type Times = [Vec<f64>; 4];

/// Kind of a step.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// As many rows as it needs, or may need.
    Open,
    /// A fixed number of them, half as many again as there are on average: nothing waits.
    Fixed,
    /// The same, replayed from a graph.
    Graph,
}

fn ways(d: Dispatcher) -> Vec<(Way, &'static str)> {
    match (d.name, d.mode) {
        ("all_gather", mode) => vec![(Way::Open, mode), (Way::Fixed, "nccl-static"), (Way::Graph, "nccl-graph")],
        (_, "ht static") => vec![(Way::Fixed, d.mode), (Way::Graph, "ht graph")],
        (_, "auto static") => vec![(Way::Fixed, d.mode), (Way::Graph, "auto graph")],
        (_, "auto measured static") => vec![(Way::Fixed, d.mode), (Way::Graph, "auto measured graph")],
        (_, "ht windows") => vec![(Way::Fixed, d.mode), (Way::Graph, "ht windows graph")],
        (_, "compute alone") => vec![(Way::Fixed, d.mode), (Way::Graph, "compute alone graph")],
        (_, "nvlink static serial") => vec![(Way::Fixed, d.mode), (Way::Graph, "nvlink graph serial")],
        (_, "nvlink static 16 SMs") => vec![(Way::Graph, "nvlink graph 16 SMs")],
        (_, "nvlink static 8 SMs") => vec![(Way::Graph, "nvlink graph 8 SMs")],
        (_, "nvlink static mxfp8") => vec![(Way::Fixed, d.mode), (Way::Graph, "nvlink graph mxfp8")],
        (_, "nvlink static") => vec![(Way::Fixed, d.mode), (Way::Graph, "nvlink graph")],
        (_, "ll") => vec![(Way::Open, d.mode), (Way::Graph, "ll graph")],
        (_, mode) => vec![(Way::Open, mode)],
    }
}

pub fn run(
    world: &NcclWorld,
    report: &Report,
    (workload, dispatchers, payload): (Workload, &[Dispatcher], Payload),
) -> Result<()> {
    let all = dispatchers.iter().copied().flat_map(|d| ways(d).into_iter().map(move |way| (d, way)));
    for (dispatcher, (way, mode)) in all {
        let parts =
            on_ranks(world, |rank, comm| measure(rank, Timed::new(comm), (workload, dispatcher, way, payload)))?;
        let of = |i: usize| -> Vec<Vec<f64>> { parts.iter().map(|p| p[i].clone()).collect() };
        let dispatcher = Dispatcher { mode, ..dispatcher };
        let subject = Subject { workload, dispatcher, routing: "router" };
        let ranks = parts.len() as f64;
        let columns = workload.slots() * workload.inner + workload.tokens * workload.shared;
        let forward = 6.0 * (columns * workload.hidden) as f64 * ranks;
        let all = [("fwd", 0, forward), ("fwd+bwd", 1, 3.0 * forward)];
        for (phase, i, flop) in all.into_iter().filter(|(_, i, _)| *i == 0 || dispatcher.decodes.is_none()) {
            let (time, collective) = (spread(&of(i)), spread(&of(i + 2)).median);
            // Spans are of the communicator's own calls, as they are made: a replay, NVLink and NCCL EP make none.
            let own = ["all_to_all", "all_gather"].contains(&dispatcher.name);
            let spanned = way != Way::Graph && own;
            let share = collective / time.median;
            let parts = match spanned {
                true => format!(",\"collective_ms\":{collective:.4},\"collective_share\":{share:.3}"),
                false => String::new(),
            };
            let tflops = flop / ranks / time.median / 1e9;
            let Workload { inner, shared, .. } = workload;
            let shared = if shared == 0 { String::new() } else { format!(",\"shared\":{shared}") };
            let rest = format!(",\"inner\":{inner}{shared},\"payload\":\"{payload:?}\"{parts},\"tflops\":{tflops:.1}");
            report.line(subject, phase, time, &rest);
        }
    }
    Ok(())
}

struct Weights {
    router: Tensor<Cuda>,
    up: Tensor<Cuda>,
    down: Tensor<Cuda>,
    /// Up and down of a shared expert.
    shared: Option<[Tensor<Cuda>; 2]>,
}

fn measure(
    rank: &Rank<'_>,
    comm: Timed,
    (w, dispatcher, way, payload): (Workload, Dispatcher, Way, Payload),
) -> Result<Times> {
    let cuda = &rank.cuda;
    let spans = comm.about.clone();
    // A rank alone has the experts of one of several, and as many choices of them: the same products.
    let alone = dispatcher.kind == DispatcherKind::Local;
    let w = if alone { Workload { experts: w.experts / rank.ranks, ..w } } else { w };
    let mut group: Group<Cuda> = dispatcher.make(comm, &w)?;
    let local = if alone { w.experts } else { w.experts / rank.ranks };
    let scale = |n: usize| (n as f64).powf(-0.5);
    // The router is every rank's; the rest is each one's own.
    let router = Random(1).tensor(cuda, &[w.experts, w.hidden], scale(w.hidden))?;
    let mut random = Random(2 + rank.rank as u64);
    let weights = Weights {
        router,
        up: random.tensor(cuda, &[local, 2 * w.inner, w.hidden], scale(w.hidden))?,
        down: random.tensor(cuda, &[local, w.hidden, w.inner], scale(w.inner))?,
        shared: match w.shared {
            0 => None,
            columns => Some([
                random.tensor(cuda, &[2 * columns, w.hidden], scale(w.hidden))?,
                random.tensor(cuda, &[w.hidden, columns], scale(columns))?,
            ]),
        },
    };
    let (x, d_y) = (random.tensor(cuda, &[w.tokens, w.hidden], 1.0)?, random.tensor(cuda, &[w.tokens, w.hidden], 1.0)?);
    let of = |t: &Tensor<Cuda>| Tensor::zeros(cuda, DType::BF16, t.dims());
    let (mut y, mut d_x) = (of(&x)?, of(&x)?);
    let (mut d_router, mut d_up, mut d_down) = (of(&weights.router)?, of(&weights.up)?, of(&weights.down)?);
    let mut d_shared = match &weights.shared {
        Some([up, down]) => Some([of(up)?, of(down)?]),
        None => None,
    };
    let params = ParamViews::collect(|kind| {
        Ok(match kind {
            ParamKind::Router => Some(weights.router.view()),
            ParamKind::Up => Some(weights.up.view()),
            ParamKind::Down => Some(weights.down.view()),
            ParamKind::SharedUp => weights.shared.as_ref().map(|[up, _]| up.view()),
            ParamKind::SharedDown => weights.shared.as_ref().map(|[_, down]| down.view()),
            _ => None,
        })
    })?;
    let params = params.params();
    let capacity = match way == Way::Open || dispatcher.decodes.is_some() {
        true => Capacity::Eager,
        false => Capacity::Static(w.slots() * 3 / 2),
    };
    let mut config = MoeConfig::new(w.hidden, w.inner, w.experts, w.top_k);
    config.payload = payload;
    config.shared = (w.shared > 0).then_some(SharedConfig { intermediate: w.shared, gated: false, bias: false });
    let options = DispatchOptions { capacity, ..DispatchOptions::default() };
    let layer = Layer::new(config, 0)?.with_dispatch(options);

    let mut step = |backward: bool| -> Result<()> {
        let mode = Mode { backward, noise: None };
        let made = layer.forward_into(&mut group, mode, Inputs { x: x.view(), params: &params }, y.view_mut())?;
        let Some(context) = made.context else { return Ok(()) };
        let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
        let mut into = gradients(&mut d_x, &mut d_router, [d_up.view_mut(), d_down.view_mut()]);
        if let Some([up, down]) = &mut d_shared {
            (into.params.shared_up, into.params.shared_down) = (Some(up.view_mut()), Some(down.view_mut()));
        }
        layer.backward_into(&mut group, context, Inputs { x: x.view(), params: &params }, cotangents, into)
    };
    let mut times: Times = Default::default();
    for backward in [false, true].into_iter().filter(|b| !b || dispatcher.decodes.is_none()) {
        let mut graph = None;
        for repeat in 0..WARM_UP + REPEATS {
            rank.meet()?;
            spans.take()?;
            if repeat == 1 && way == Way::Graph {
                graph = Some(cuda.capture(|| step(backward))?);
                // Events of a capture have no times.
                spans.forget();
                rank.meet()?;
            }
            let from = event(cuda)?;
            match &mut graph {
                Some(graph) => graph.replay()?,
                None => step(backward)?,
            }
            let to = event(cuda)?;
            cuda.check()?;
            if repeat >= WARM_UP {
                times[usize::from(backward)].push(between(&from, &to)?);
                times[2 + usize::from(backward)].push(spans.take()?);
            }
        }
        // Before any rank leaves what it calls.
        drop(graph);
        rank.meet()?;
    }
    Ok(times)
}

/// Every gradient of a layer without a shared expert.
pub fn gradients<'a>(
    x: &'a mut Tensor<Cuda>,
    router: &'a mut Tensor<Cuda>,
    [up, down]: [TensorMut<'a, Cuda>; 2],
) -> GradientsMut<'a, Cuda> {
    let (x, router) = (Some(x.view_mut()), Some(router.view_mut()));
    GradientsMut {
        x,
        params: PerParam { router, up: Some(up), down: Some(down), ..PerParam::none() },
        ..GradientsMut::none()
    }
}
