//! The whole layer: with its router, without, and as a replayed graph.

use std::cell::RefCell;

use moebius::config::MoeConfig;
use moebius::cuda::Cuda;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Cotangents, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam};
use moebius::{DType, Result, Tensor};

use crate::Workload;
use crate::data::Random;
use crate::output::complain;
use crate::report::{CALLS, LONG, Report, SETS, STEPS};
use crate::routed::Routed;

/// Tokens and the gradient of the output.
pub struct Set {
    pub x: Tensor<Cuda>,
    pub d_y: Tensor<Cuda>,
}

/// Parameters.
pub struct Weights {
    pub router: Tensor<Cuda>,
    pub up: Tensor<Cuda>,
    pub down: Tensor<Cuda>,
}

/// Outputs of a step; the same memory each time.
pub struct Results {
    pub y: Tensor<Cuda>,
    pub d_x: Tensor<Cuda>,
    pub d_router: Tensor<Cuda>,
    pub d_up: Tensor<Cuda>,
    pub d_down: Tensor<Cuda>,
}

impl Results {
    /// `experts`: type of the experts' gradients.
    fn new(cuda: &Cuda, weights: &Weights, x: &Tensor<Cuda>, experts: DType) -> Result<Self> {
        let of = |t: &Tensor<Cuda>, dtype| Tensor::zeros(cuda, dtype, t.dims());
        Ok(Self {
            y: of(x, DType::BF16)?,
            d_x: of(x, DType::BF16)?,
            d_router: of(&weights.router, DType::BF16)?,
            d_up: of(&weights.up, experts)?,
            d_down: of(&weights.down, experts)?,
        })
    }

    pub fn gradients(&mut self, accumulate: bool) -> GradientsMut<'_, Cuda> {
        GradientsMut {
            x: Some(self.d_x.view_mut()),
            accumulate,
            params: PerParam {
                router: Some(self.d_router.view_mut()),
                up: Some(self.d_up.view_mut()),
                down: Some(self.d_down.view_mut()),
                ..PerParam::none()
            },
        }
    }
}

struct Bench<'a> {
    layer: Layer,
    group: Group<Cuda>,
    params: ParamViews<'a, Cuda>,
    sets: &'a [Set],
}

impl Bench<'_> {
    fn forward(&mut self, set: usize, results: &mut Results) -> Result<()> {
        let x = self.sets[set].x.view();
        self.layer
            .forward_into(
                &mut self.group,
                Mode::default(),
                Inputs { x, params: &self.params.params() },
                results.y.view_mut(),
            )
            .map(drop)
    }

    fn step(&mut self, set: usize, results: &mut Results, accumulate: bool) -> Result<()> {
        let Set { x, d_y } = &self.sets[set];
        let params = self.params.params();
        let mode = Mode { backward: true, noise: None };
        let made = self.layer.forward_into(
            &mut self.group,
            mode,
            Inputs { x: x.view(), params: &params },
            results.y.view_mut(),
        )?;
        let Some(context) = made.context else { return Ok(()) };
        let inputs = Inputs { x: x.view(), params: &params };
        let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
        let into = results.gradients(accumulate);
        self.layer.backward_into(&mut self.group, context, inputs, cotangents, into)
    }

    /// Bytes of the weights of the experts that a set's tokens use.
    fn bytes_read(&mut self, results: &mut Results, w: &Workload) -> Result<usize> {
        let x = self.sets[0].x.view();
        let made = self.layer.forward_into(
            &mut self.group,
            Mode::default(),
            Inputs { x, params: &self.params.params() },
            results.y.view_mut(),
        )?;
        let used = made.routing.load.get()?.tokens_per_expert.iter().filter(|n| **n > 0).count();
        Ok(used * 3 * w.hidden * w.inner * DType::BF16.size())
    }
}

pub fn run(cuda: &Cuda, report: &Report, w: &Workload) -> Result<()> {
    let mut random = Random(2);
    let sets: Vec<Set> = (0..SETS)
        .map(|_| {
            let mut of = |deviation| random.tensor(cuda, &[w.tokens, w.hidden], deviation);
            Ok(Set { x: of(1.0)?, d_y: of(1.0)? })
        })
        .collect::<Result<_>>()?;
    let scale = |n: usize| (n as f64).powf(-0.5);
    let weights = Weights {
        router: random.tensor(cuda, &[w.experts, w.hidden], scale(w.hidden))?,
        up: random.tensor(cuda, &[w.experts, 2 * w.inner, w.hidden], scale(w.hidden))?,
        down: random.tensor(cuda, &[w.experts, w.hidden, w.inner], scale(w.inner))?,
    };
    let params = ParamViews::collect(|kind| {
        Ok(match kind {
            ParamKind::Router => Some(weights.router.view()),
            ParamKind::Up => Some(weights.up.view()),
            ParamKind::Down => Some(weights.down.view()),
            _ => None,
        })
    })?;
    let layer = Layer::new(MoeConfig::new(w.hidden, w.inner, w.experts, w.top_k), 0)?;
    let group = cuda.group(GroupConfig::new(w.experts, w.tokens))?;
    let mut bench = Bench { layer, group, params, sets: &sets };
    let mut results = Results::new(cuda, &weights, &sets[0].x, DType::BF16)?;

    let bytes = bench.bytes_read(&mut results, w)?;
    let ms = report.time(|set| bench.forward(set, &mut results))?;
    report.reading(w, "fwd", ms, bytes);
    for (phase, burst) in [("fwd+bwd", STEPS), ("fwd+bwd-long", LONG)] {
        let ms = report.time_burst(burst, |set| bench.step(set, &mut results, false))?;
        report.line(w, phase, ms, 3.0 * w.flop());
    }
    graphs(cuda, report, w, bytes, (&mut bench, &mut results))?;

    let mut routed = Routed::new(cuda, w, &weights, &mut random)?;
    let ms = report.time(|set| routed.forward(&sets[set], set, &mut results))?;
    report.reading(w, "fwd-no-router", ms, bytes);
    let ms = report.time_burst(STEPS, |set| routed.step(&sets[set], set, &mut results))?;
    report.line(w, "fwd+bwd-no-router", ms, 3.0 * w.flop());
    drop((routed, results));

    let mut results = Results::new(cuda, &weights, &sets[0].x, DType::F32)?;
    match report.time_burst(STEPS, |set| bench.step(set, &mut results, true)) {
        Ok(ms) => report.line(w, "fwd+bwd-f32-add", ms, 3.0 * w.flop()),
        Err(e) => complain(format_args!("{}: no gradients in f32: {e}", w.name)),
    }
    cuda.check()
}

/// The same, captured once for each input set and replayed; a forward reads so many bytes.
fn graphs(
    cuda: &Cuda,
    report: &Report,
    w: &Workload,
    bytes: usize,
    (bench, results): (&mut Bench<'_>, &mut Results),
) -> Result<()> {
    let shared = RefCell::new((bench, results));
    for (phase, backward, burst) in [("fwd-graph", false, CALLS), ("fwd+bwd-graph", true, STEPS)] {
        let captured = (0..SETS).map(|set| {
            cuda.capture(|| {
                let (bench, results) = &mut *shared.borrow_mut();
                match backward {
                    true => bench.step(set, results, false),
                    false => bench.forward(set, results),
                }
            })
        });
        match captured.collect::<Result<Vec<_>>>() {
            Ok(mut graphs) => {
                let ms = report.time_burst(burst, |set| graphs[set].replay())?;
                match backward {
                    true => report.line(w, phase, ms, 3.0 * w.flop()),
                    false => report.reading(w, phase, ms, bytes),
                }
            }
            Err(e) => complain(format_args!("{}: {phase} was not captured: {e}", w.name)),
        }
    }
    Ok(())
}
