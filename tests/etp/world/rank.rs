//! A rank: microbatches, and steps of an optimizer with whole weights or shards.

use super::*;

/// Where a layer's weights are.
pub(super) enum Weights<D: Chained> {
    Whole(Vec<[OnDevice<D>; 2]>),
    Sharded { chain: Arc<Chain<D>>, ids: Vec<[WeightId; 2]>, shards: Vec<[Arc<Shard<D>>; 2]> },
}

/// AdamW with values of its own in f32, element by element.
struct Adam {
    value: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl Adam {
    fn new(value: &[f64]) -> Self {
        let value: Vec<f32> = value.iter().map(|v| *v as f32).collect();
        Self { m: vec![0.0; value.len()], v: vec![0.0; value.len()], value }
    }

    fn step(&mut self, t: usize, gradient: &[f32]) {
        let (b1, b2) = (0.9f32, 0.99f32);
        let (c1, c2) = (1.0 - b1.powi(t as i32 + 1), 1.0 - b2.powi(t as i32 + 1));
        for (i, g) in gradient.iter().enumerate() {
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g;
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * g * g;
            let change = self.m[i] / c1 / ((self.v[i] / c2).sqrt() + 1e-6);
            self.value[i] -= 0.05 * (change + 0.01 * self.value[i]);
        }
    }
}

/// One rank.
pub(super) struct Rank<D: Chained> {
    pub(super) run: Run,
    pub(super) w: usize,
    pub(super) device: D,
    pub(super) group: Group<D>,
    pub(super) layers: Vec<Layer>,
    pub(super) routers: Vec<OnDevice<D>>,
    pub(super) weights: Weights<D>,
    /// Ranks with the same experts.
    pub(super) data: Box<dyn Communicator<D>>,
    /// Ranks with the same shard.
    pub(super) replicas: Box<dyn Communicator<D>>,
}

fn params<'a, D: Chained>(
    router: TensorRef<'a, D>,
    up: &'a dyn WeightSource<D>,
    down: &'a dyn WeightSource<D>,
) -> Params<'a, D> {
    Params { router, up, down, others: PerParam::none() }
}

impl<D: Chained> Rank<D> {
    /// Calls `f` with the parameters of a layer.
    fn with<R>(&mut self, l: usize, f: impl FnOnce(&Layer, &mut Group<D>, &Params<'_, D>) -> Result<R>) -> Result<R> {
        let router = self.routers[l].view();
        match &self.weights {
            Weights::Whole(all) => {
                let (up, down) = (all[l][0].view(), all[l][1].view());
                f(&self.layers[l], &mut self.group, &params(router, &up, &down))
            }
            Weights::Sharded { chain, ids, .. } => {
                let (up, down) = (chain.source(ids[l][0])?, chain.source(ids[l][1])?);
                f(&self.layers[l], &mut self.group, &params(router, &up, &down))
            }
        }
    }

    fn chain(&self) -> Option<&Chain<D>> {
        match &self.weights {
            Weights::Whole(_) => None,
            Weights::Sharded { chain, .. } => Some(chain),
        }
    }

    /// Forward and backward of a microbatch; whole gradients where weights are whole.
    fn microbatch(&mut self, step: usize, batch: usize, out: &mut Outcome) -> Result<Vec<Vec<f32>>> {
        let h = self.run.config.hidden;
        let dims = [self.run.tokens(self.w), h];
        let device = self.device.clone();
        let mut xs = vec![device.host(&self.run.tensor([2, step, batch, self.w], &dims, 1.0))];
        let mut contexts: Vec<Context<D>> = Vec::new();
        self.chain().map_or(Ok(()), |chain| chain.begin(Phase::Forward))?;
        for l in 0..self.run.layers {
            let x = xs.last().unwrap();
            let mode = Mode { backward: true, noise: None };
            let forward = self.with(l, |layer, group, params| layer.forward(group, mode, x.view(), params))?;
            contexts.push(forward.context.unwrap());
            xs.push(forward.y);
        }
        self.chain().map_or(Ok(()), Chain::end)?;
        self.chain().map_or(Ok(()), |chain| chain.begin(Phase::Backward))?;
        let mut d = device.host(&self.run.tensor([3, step, batch, self.w], &dims, 1.0));
        let mut gradients = Vec::new();
        for l in (0..self.run.layers).rev() {
            let mut d_x = OnDevice::empty(&device, self.run.dtype, &dims)?;
            let context = contexts.pop().unwrap();
            let (x, y) = (&xs[l], Some(d.view()));
            let none = GradientsMut::none;
            let router = self.routers[l].view();
            let cotangents = Cotangents { y, aux: 0.0 };
            match &self.weights {
                Weights::Sharded { chain, ids, .. } => {
                    let [up, down] = ids[l];
                    let (mut d_up, mut d_down) = (chain.gradient_buffer(up)?, chain.gradient_buffer(down)?);
                    let sources = (chain.source(up)?, chain.source(down)?);
                    let params = params(router, &sources.0, &sources.1);
                    let inputs = Inputs { x: x.view(), params: &params };
                    let into = GradientsMut {
                        x: Some(d_x.view_mut()),
                        params: PerParam {
                            up: Some(d_up.view_mut()?),
                            down: Some(d_down.view_mut()?),
                            ..PerParam::none()
                        },
                        ..none()
                    };
                    self.layers[l].backward_into(&mut self.group, context, inputs, cotangents, into)?;
                    chain.submit(d_down)?;
                    chain.submit(d_up)?;
                }
                Weights::Whole(all) => {
                    let [up, down] = self.run.dims();
                    let mut d_up = OnDevice::empty(&device, self.run.dtype, &up)?;
                    let mut d_down = OnDevice::empty(&device, self.run.dtype, &down)?;
                    let sources = (all[l][0].view(), all[l][1].view());
                    let params = params(router, &sources.0, &sources.1);
                    let inputs = Inputs { x: x.view(), params: &params };
                    let into = GradientsMut {
                        x: Some(d_x.view_mut()),
                        params: PerParam {
                            up: Some(d_up.view_mut()),
                            down: Some(d_down.view_mut()),
                            ..PerParam::none()
                        },
                        ..none()
                    };
                    self.layers[l].backward_into(&mut self.group, context, inputs, cotangents, into)?;
                    gradients.splice(0..0, [d_up, d_down]);
                }
            }
            d = d_x;
        }
        self.chain().map_or(Ok(()), Chain::end)?;
        // Nothing has waited for the device so far.
        out.values.extend(xs[1..].iter().chain([&d]).map(|t| device.bytes(t.view())));
        let values = |t: &OnDevice<D>| device.values(t.view()).iter().map(|v| *v as f32).collect();
        Ok(gradients.iter().map(values).collect())
    }

    /// All ranks' values, by rank.
    fn gather(&mut self, sequence: usize, own: &[f32]) -> Result<Vec<Vec<f32>>> {
        let tag = Tag { layer: 9, op: Op::User, sequence: sequence as u64 };
        let device = self.data.device().unwrap_or(&self.device).clone();
        let send = device.host(&Tensor::from_vec(own.to_vec(), &[own.len()])?);
        let mut recv = OnDevice::empty(&device, DType::F32, &[own.len() * self.data.size()])?;
        self.data.all_gather(tag, send.view(), recv.view_mut())?;
        Ok(device.floats(recv.view()).chunks(own.len()).map(<[f32]>::to_vec).collect())
    }

    pub(super) fn train(mut self) -> Result<Outcome> {
        let mut out = Outcome::default();
        let mut optimizers: Vec<Adam> = match &self.weights {
            Weights::Whole(_) => {
                let p = self.w % self.run.ep;
                let first = |l| [0, 1].map(|which| Adam::new(&self.run.weight(p, l, which).to_f64()));
                (0..self.run.layers).flat_map(first).collect()
            }
            Weights::Sharded { shards, .. } => {
                let values = |shard: &Arc<Shard<D>>| shard.update(|t| Ok(self.device.values(t.view()))).unwrap();
                shards.iter().flatten().map(|s| Adam::new(&values(s))).collect()
            }
        };
        for step in 0..self.run.steps {
            let mut local = Vec::new();
            for batch in 0..self.run.microbatches {
                local.push(self.microbatch(step, batch, &mut out)?);
            }
            match &self.weights {
                Weights::Whole(_) => self.step_whole(step, &local, &mut optimizers, &mut out)?,
                Weights::Sharded { .. } => self.step_shards(step, &mut optimizers, &mut out)?,
            }
        }
        out.weights = match &self.weights {
            Weights::Whole(_) => {
                let dims = self.run.dims();
                let value = |(i, o): (usize, &Adam)| of_type(self.run.dtype, o.value.clone(), &dims[i % 2]);
                optimizers.iter().enumerate().map(value).map(|t| t.as_bytes().to_vec()).collect()
            }
            Weights::Sharded { chain, ids, .. } => {
                let whole = |id: &WeightId| Ok(self.device.bytes(chain.whole(*id)?.view()));
                ids.iter().flatten().map(whole).collect::<Result<_>>()?
            }
        };
        Ok(out)
    }

    /// The sum that sharded weights must have to the bit, computed without them.
    fn step_whole(
        &mut self,
        step: usize,
        local: &[Vec<Vec<f32>>],
        optimizers: &mut [Adam],
        out: &mut Outcome,
    ) -> Result<()> {
        let (n, replicas) = (self.run.etp, self.run.replicas());
        let factor = match self.run.options.scale {
            Scale::Sum => 1.0,
            Scale::Mean => 1.0 / (n * replicas) as f32,
        };
        for (i, optimizer) in optimizers.iter_mut().enumerate() {
            let count = local[0][i].len();
            let mut groups = vec![vec![0f32; count]; replicas];
            for batch in local {
                let all = self.gather(step, &batch[i])?;
                for (group, main) in all.chunks(n).zip(&mut groups) {
                    for (at, main) in main.iter_mut().enumerate() {
                        *main += factor * tree(&group.iter().map(|g| g[at]).collect::<Vec<_>>());
                    }
                }
            }
            let sum: Vec<f32> = (0..count).map(|at| tree(&groups.iter().map(|g| g[at]).collect::<Vec<_>>())).collect();
            optimizer.step(step, &sum);
            out.gradients.push(sum.iter().map(|v| v.to_bits()).collect());
            if let Weights::Whole(all) = &mut self.weights {
                let dims = all[i / 2][i % 2].dims().to_vec();
                let value = of_type(self.run.dtype, optimizer.value.clone(), &dims);
                all[i / 2][i % 2] = self.device.host(&through(self.run.payload, &value));
            }
        }
        Ok(())
    }

    fn step_shards(&mut self, step: usize, optimizers: &mut [Adam], out: &mut Outcome) -> Result<()> {
        let Weights::Sharded { chain, shards, .. } = &self.weights else { return Ok(()) };
        let (chain, shards) = (Arc::clone(chain), shards.clone());
        let mut gradients: Vec<Vec<f32>> = Vec::new();
        let device = self.device.clone();
        chain.finish(Some(&mut *self.replicas), |id, gradient| {
            assert_eq!(id_number(id), gradients.len(), "in order of registration");
            gradients.push(device.floats(gradient));
            Ok(())
        })?;
        self.check_memory(&chain);
        let n = self.run.etp;
        for (i, (gradient, shard)) in gradients.iter().zip(shards.iter().flatten()).enumerate() {
            optimizers[i].step(step, gradient);
            shard.update(|t| {
                let dims = t.dims().to_vec();
                *t = device.host(&of_type(self.run.dtype, optimizers[i].value.clone(), &dims));
                Ok(())
            })?;
            // The whole gradient, for comparison.
            let all = self.gather(step, gradient)?;
            let cut = chain.shards(&self.run.dims()[i % 2])?;
            let mut whole: Vec<u32> = all[..n].concat().iter().map(|v| v.to_bits()).collect();
            let count = cut.dims().iter().product();
            assert!(whole[count..].iter().all(|bits| *bits << 1 == 0), "padding has no gradient");
            whole.truncate(count);
            out.gradients.push(whole);
        }
        Ok(())
    }
}

impl<D: Chained> Rank<D> {
    /// The table of docs/etp.md.
    fn check_memory(&self, chain: &Chain<D>) {
        let run = &self.run;
        let size = run.dtype.size();
        let [u, d] = run.dims().map(|dims| {
            let [rows, width] = chain.shards(&dims).unwrap().gathered_dims();
            rows * width
        });
        let memory = chain.memory();
        let twice = run.options.ahead > 1;
        assert_eq!(memory.main, run.layers * (u + d) * 4 / run.etp);
        // A row of `up` has H elements, one of `down` I.
        let row = |count: usize| match run.payload {
            Payload::Nvfp4 => count / 2 + count.div_ceil(16),
            Payload::Mxfp8 => count + count.div_ceil(32),
            Payload::Fp8Block => count + 4 * count.div_ceil(128),
            _ => 0,
        };
        let [up, down] =
            [(u, run.config.hidden), (d, run.config.intermediate)].map(|(all, width)| all / width * row(width));
        let amaxes = if run.payload == Payload::Nvfp4 { 2 * 4 * run.dims()[0][0] } else { 0 };
        assert_eq!(memory.quantized, run.layers * ((up + down) / run.etp + amaxes));
        assert_eq!(memory.arrived, if up == down { up } else { up + down });
        if run.dims()[0] == run.dims()[1] {
            // One shape: two buffers, three with recomputation; a layer's gradients and one more.
            let buffers = if run.config.recompute { 3 } else { 2 } + usize::from(twice);
            let gradients = if D::ENQUEUES { 4 } else { 3 };
            assert_eq!((memory.gathered, memory.gradients), (buffers * u * size, gradients * u * size));
            return;
        }
        let gathered = match (twice, run.config.recompute) {
            (true, _) => 2 * (u + d),
            (_, true) => 2 * u + d,
            _ => u + d,
        };
        // What nobody waits for is one buffer more.
        let gradients = if D::ENQUEUES { 2 * u + 2 * d } else { 2 * u + d };
        assert_eq!((memory.gathered, memory.gradients), (gathered * size, gradients * size));
        // Sums, or the other ranks' shares: a rank's own are added where they lie.
        let blocks = match run.options.reduction {
            Reduction::Pairwise => run.etp - 1,
            _ => 1,
        };
        assert_eq!(memory.reduced, (u + d) * size / run.etp * blocks);
    }
}

fn id_number(id: WeightId) -> usize {
    format!("{id:?}").trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
}
