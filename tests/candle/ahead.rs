//! Work that the host does not wait for. Run with no other test beside it: every device of candle's is of the one
//! context of the GPU, and where another thread loads kernels or gives page-locked memory back, as a device's start and
//! end do, the driver waits for all that the context runs, and holds up every thread's launches until then.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use moebius::Lazy;
use moebius::candle::ExpertParallelMoE;
use moebius::cuda::Cuda;
use moebius::layer::AuxValue;

use crate::gpu::poisoned;
use crate::support::{AnyResult, config, flat, seeded, tokens};
use crate::trials::tests;

/// Parts of a step, each behind work of its own that takes long.
struct Watch<'a> {
    cuda: Cuda,
    big: &'a Tensor,
    /// Products ahead of each part.
    products: usize,
    /// Each part's time on the host.
    parts: Vec<String>,
    /// Parts at whose end the GPU had done what was ahead of them.
    waited: Vec<&'static str>,
}

impl<'a> Watch<'a> {
    fn new(cuda: Cuda, big: &'a Tensor) -> Self {
        Self { cuda, big, products: 0, parts: Vec::new(), waited: Vec::new() }
    }

    fn part<T>(&mut self, name: &'static str, part: impl FnOnce() -> AnyResult<T>) -> AnyResult<T> {
        for _ in 0..self.products {
            self.big.matmul(self.big)?;
        }
        // On candle's own stream, which the group insists on.
        let (ahead, began) = (self.cuda.record()?, Instant::now());
        let made = part()?;
        let took = began.elapsed();
        if self.products > 0 && ahead.is_done()? {
            self.waited.push(name);
        }
        self.parts.push(format!("{name} {:.2} ms", took.as_secs_f64() * 1e3));
        Ok(made)
    }

    fn step(&mut self, moe: &ExpertParallelMoE, x: &Tensor) -> AnyResult<(Tensor, Tensor, Lazy<AuxValue>)> {
        let own = self.part("candle's own arithmetic", || Ok((x.sqr()?.sum_all()? * 0.5)?.backward()?))?;
        own.get(x).ok_or("no gradient of x")?;
        let out = self.part("the layer's forward", || Ok(moe.forward_full(x, None)?))?;
        let loss = self.part("candle's loss", || Ok((out.y.sqr()?.sum_all()? + (&out.aux * 0.5)?)?))?;
        let gradients = self.part("the backward", || Ok(loss.backward()?))?;
        Ok((out.aux, gradients.get(x).ok_or("no gradient of x")?.clone(), out.losses))
    }
}

/// Behind work that takes long, a step is enqueued before any of it has run, with auxiliary losses as without; then it
/// gives what it gave before.
fn the_host_runs_ahead_of_a_step(device: &Device) -> AnyResult<()> {
    let mut with_losses = config();
    (with_losses.aux.balance, with_losses.aux.z) = (0.1, 0.01);
    let n = 8192;
    let big = Tensor::zeros((n, n), DType::F32, device)?;
    big.matmul(&big)?.sum_all()?.to_scalar::<f32>()?;
    for (name, config) in [("none", config()), ("two", with_losses)] {
        let moe = seeded(poisoned(device, 16)?, config)?;
        let x = tokens(0..13, device)?;
        let mut watch = Watch::new(moe.group().on::<Cuda>().ok_or("no GPU")?.lock().device().clone(), &big);
        let (aux, dx, _) = watch.step(&moe, &x)?;
        let expected = (flat(&aux)?, flat(&dx)?);
        // A second time: what the driver does at the first use of anything is over.
        watch.step(&moe, &x)?;
        watch.cuda.check()?;
        // A third of a second at 50 TFLOP/s, where a part takes the host a millisecond.
        (watch.products, watch.parts) = (16, Vec::new());
        let (aux, dx, losses) = watch.step(&moe, &x)?;
        let parts = watch.parts.join(", ");
        println!("losses: {name}: {parts}");
        assert!(watch.waited.is_empty(), "losses: {name}: the host waited for the GPU in {:?}: {parts}", watch.waited);
        assert!(losses.known().is_none() || name == "none");
        assert!((flat(&aux)?, flat(&dx)?) == expected, "losses: {name}: another result");
    }
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    the_host_runs_ahead_of_a_step,
}
