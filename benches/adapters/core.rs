//! The layer itself, between its own tensors: what a framework's module is compared with.

use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use moebius::cuda::Cuda;
use moebius::cuda::cudarc;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Cotangents, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam};
use moebius::{DType, MoeConfig, Tensor};

use super::data::Random;
use super::{Result, Workload, asked};

/// Of the values: router, up, down, x, gradient of y, in this order.
pub const SEED: u64 = 5;
/// Steps before the first that counts, and those that count.
const WARM_UP: usize = 3;
const STEPS: usize = 20;

/// Rest before a measurement: clock and temperature are those of the first one then.
const PAUSE: Duration = Duration::from_millis(400);

/// Median milliseconds of a step, queued behind the one before: events of the GPU's stream around each.
pub fn time_queued(cuda: &Cuda, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    let event = || cuda.stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    step()?;
    cuda.check()?;
    std::thread::sleep(PAUSE);
    for _ in 0..WARM_UP {
        step()?;
    }
    let mut events = vec![event()?];
    for _ in 0..STEPS {
        step()?;
        events.push(event()?);
    }
    cuda.check()?;
    let spans = events.windows(2).map(|pair| pair[0].elapsed_ms(&pair[1]));
    let mut times = spans.collect::<std::result::Result<Vec<f32>, _>>()?;
    times.sort_by(f32::total_cmp);
    Ok(f64::from(times[times.len() / 2]))
}

struct Core<'a> {
    layer: Layer,
    group: Group<Cuda>,
    params: ParamViews<'a, Cuda>,
    x: &'a Tensor<Cuda>,
    d_y: &'a Tensor<Cuda>,
    y: Tensor<Cuda>,
}

impl Core<'_> {
    fn step(&mut self, into: GradientsMut<'_, Cuda>) -> Result<()> {
        let params = self.params.params();
        let inputs = || Inputs { x: self.x.view(), params: &params };
        let mode = Mode { backward: true, noise: None };
        let made = self.layer.forward_into(&mut self.group, mode, inputs(), self.y.view_mut())?;
        let context = made.context.ok_or("no context")?;
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.0 };
        Ok(self.layer.backward_into(&mut self.group, context, inputs(), cotangents, into)?)
    }
}

/// Forward and backward with gradients stored in bf16, and added in f32.
pub fn run(cuda: &Cuda, workload: &Workload, gpu: &str) -> Result<()> {
    let Workload { tokens: t, hidden: h, inner: i, experts: e, top_k: k, .. } = *workload;
    let mut random = Random(SEED);
    let mut draw = |dims: &[usize], scale: usize| random.tensor(cuda, dims, (scale as f64).powf(-0.5));
    let (router, up, down) = (draw(&[e, h], h)?, draw(&[e, 2 * i, h], h)?, draw(&[e, h, i], i)?);
    let (x, d_y) = (draw(&[t, h], 1)?, draw(&[t, h], 1)?);
    let params = ParamViews::collect(|kind| {
        Ok(match kind {
            ParamKind::Router => Some(router.view()),
            ParamKind::Up => Some(up.view()),
            ParamKind::Down => Some(down.view()),
            _ => None,
        })
    })?;
    let layer = Layer::new(MoeConfig::new(h, i, e, k), 2)?;
    let group = cuda.group(GroupConfig::new(e, t))?;
    let empty = |like: &Tensor<Cuda>, dtype| Tensor::zeros(cuda, dtype, like.dims());
    let mut core = Core { layer, group, params, x: &x, d_y: &d_y, y: empty(&x, DType::BF16)? };
    let (mut d_x, mut d_router) = (empty(&x, DType::BF16)?, empty(&router, DType::BF16)?);
    let forms = [("fwd+bwd-stored", DType::BF16, false), ("fwd+bwd-f32-add", DType::F32, true)];
    for (phase, dtype, accumulate) in forms.into_iter().filter(|(phase, ..)| asked(phase)) {
        let (mut d_up, mut d_down) = (empty(&up, dtype)?, empty(&down, dtype)?);
        let ms = time_queued(cuda, || {
            core.step(GradientsMut {
                x: Some(d_x.view_mut()),
                accumulate,
                params: PerParam {
                    router: Some(d_router.view_mut()),
                    up: Some(d_up.view_mut()),
                    down: Some(d_down.view_mut()),
                    ..PerParam::none()
                },
            })
        })?;
        workload.report("moebius", phase, ms, gpu);
    }
    if asked("fwd-graph") {
        let mut forward = || {
            let params = core.params.params();
            let inputs = Inputs { x: core.x.view(), params: &params };
            core.layer.forward_into(&mut core.group, Mode::default(), inputs, core.y.view_mut()).map(drop)
        };
        forward()?;
        let mut graph = cuda.capture(forward)?;
        workload.report("moebius", "fwd-graph", time_queued(cuda, || Ok(graph.replay()?))?, gpu);
    }
    Ok(())
}
