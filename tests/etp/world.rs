//! A stack of layers trained over a mesh of rank threads, with whole weights and with a chain of sharded ones.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moebius::comm::{Communicator, Op, Tag};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{
    Chain, Comms, EtpOptions, Payload, Phase, Reduction, Scale, Shard, ShardSource, Shards, WeightId, WeightSpec,
};
use moebius::layer::{Context, Cotangents, GradientsMut, Inputs, Layer, Mode, Params, PerParam};
use moebius::quant::{Codec, Direction, Matrix, Mxfp8, Mxfp8Tensors, Nvfp4, Nvfp4Tensors, Quantize, QuantizeMxfp8};
use moebius::weights::WeightSource;
use moebius::{DType, MoeConfig, Result, TensorRef};

use super::random::Random;
use super::test_ranks::{Chained, MINUTE};

/// On the host.
pub type Tensor = moebius::Tensor<Cpu>;
/// On the device under test.
type OnDevice<D> = moebius::Tensor<D>;

/// Model that is trained, and how it is spread. Rank w has experts of `w % ep`; of the ranks with the same, `etp` in a
/// row share a shard group.
#[derive(Debug, Clone)]
pub struct Run {
    pub world: usize,
    pub ep: usize,
    pub etp: usize,
    pub layers: usize,
    pub steps: usize,
    pub microbatches: usize,
    pub dtype: DType,
    pub config: MoeConfig,
    pub options: EtpOptions,
    pub payload: Payload,
}

impl Run {
    /// Over four ranks, or as many as there are.
    pub fn new<D: Chained>(device: &D, ep: usize, etp: usize) -> Self {
        let options = EtpOptions { reduction: moebius::etp::Reduction::Pairwise, ..EtpOptions::default() };
        let config = MoeConfig::new(8, 6, 4, 2);
        let (dtype, payload) = (DType::F32, Payload::Plain);
        let world = device.up_to(4);
        Self { world, ep, etp, layers: 3, steps: 2, microbatches: 1, dtype, config, options, payload }
    }

    pub fn replicas(&self) -> usize {
        self.world / self.ep / self.etp
    }

    fn tokens(&self, rank: usize) -> usize {
        5 + rank
    }

    /// Sizes of one layer's weights on one rank.
    pub fn dims(&self) -> [[usize; 3]; 2] {
        let (local, h, i) = (self.config.router.num_experts / self.ep, self.config.hidden, self.config.intermediate);
        [[local, self.config.up_rows(), h], [local, h, i]]
    }

    /// A tensor that depends on `what` alone.
    fn tensor(&self, what: [usize; 4], dims: &[usize], deviation: f64) -> Tensor {
        let seed = what.iter().fold(7u64, |s, v| s.wrapping_mul(0x1000_0000_01b3).wrapping_add(*v as u64));
        let mut random = Random::new(super::devices::seed::seed(seed));
        let values = (0..dims.iter().product()).map(|_| (deviation * random.normal()) as f32).collect();
        of_type(self.dtype, values, dims)
    }

    /// First values of the experts of EP rank `p`.
    pub fn weight(&self, p: usize, layer: usize, which: usize) -> Tensor {
        let dims = self.dims()[which];
        let (e, each) = (self.config.router.num_experts, dims[1] * dims[2]);
        let all = self.tensor([1, layer, which, 0], &[e, dims[1], dims[2]], 1.0).to_f64();
        let own = &all[p * dims[0] * each..][..dims[0] * each];
        of_type(self.dtype, own.iter().map(|v| *v as f32).collect(), &dims)
    }
}

/// A whole stack of experts as it comes out of a quantized form, each expert quantized by itself.
pub fn through(payload: Payload, whole: &Tensor) -> Tensor {
    let (cpu, [l, rows, columns]) = (Cpu::poisoning(), <[usize; 3]>::try_from(whole.dims()).unwrap());
    let mut values = Vec::new();
    for expert in whole.as_bytes().chunks(rows * columns * whole.dtype().size()) {
        let matrix = Matrix::new(TensorRef::new(expert, whole.dtype(), &[rows, columns]).unwrap()).unwrap();
        let mut out = Tensor::empty(&cpu, whole.dtype(), &[rows, columns]).unwrap();
        let dims = [rows, columns];
        match payload {
            Payload::Nvfp4 => {
                let format = Nvfp4::TE;
                let mut form = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows).unwrap();
                let call = Quantize { format: &format, matrix, rows: Some(form.view_mut()), columns: None };
                cpu.quantize(call).unwrap();
                cpu.dequantize(form.dequantize(&format, out.view_mut())).unwrap();
            }
            Payload::Mxfp8 => {
                let mut form = Mxfp8Tensors::empty(&cpu, dims, Direction::Rows).unwrap();
                let rows = Some(form.view_mut());
                cpu.quantize_mxfp8(QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows, columns: None }).unwrap();
                let (codes, scales) = (form.codes.view(), form.scales.view());
                let (direction, out) = (Direction::Rows, out.view_mut());
                let call = moebius::quant::DequantizeMxfp8 { direction, codes, scales, out };
                cpu.dequantize_mxfp8(call).unwrap();
            }
            _ => return of_type(whole.dtype(), whole.to_f64().iter().map(|v| *v as f32).collect(), whole.dims()),
        }
        values.extend(out.to_f64().iter().map(|v| *v as f32));
    }
    of_type(whole.dtype(), values, &[l, rows, columns])
}

pub fn of_type(dtype: DType, values: Vec<f32>, dims: &[usize]) -> Tensor {
    match dtype {
        DType::F32 => Tensor::from_vec(values, dims),
        DType::BF16 => Tensor::from_vec(values.into_iter().map(half::bf16::from_f32).collect::<Vec<_>>(), dims),
        other => panic!("no test in {other}"),
    }
    .unwrap()
}

/// Results that a rank saw.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Bytes of outputs and gradients of x, per microbatch.
    pub values: Vec<Vec<u8>>,
    /// Bits of whole gradients by step and weight.
    pub gradients: Vec<Vec<u32>>,
    /// Whole weights at the end, bytes.
    pub weights: Vec<Vec<u8>>,
}

/// Communicators of ranks `0..world` to the group that `place` names, at their place in it; their work is in a
/// collective thread of this name.
pub fn mesh<D: Chained>(
    device: &D,
    (world, purpose): (usize, &'static str),
    place: impl Fn(usize) -> (usize, usize),
    timeout: Duration,
) -> Vec<Box<dyn Communicator<D>>> {
    let mut places: Vec<(usize, usize, usize)> = (0..world).map(|w| (place(w).0, place(w).1, w)).collect();
    places.sort_unstable();
    let mut all: Vec<Option<Box<dyn Communicator<D>>>> = (0..world).map(|_| None).collect();
    for group in places.chunk_by(|a, b| a.0 == b.0) {
        let members: Vec<usize> = group.iter().map(|(_, _, w)| *w).collect();
        for (w, comm) in members.iter().zip(device.among(&members, purpose, timeout)) {
            all[*w] = Some(comm);
        }
    }
    all.into_iter().flatten().collect()
}

/// Where a layer's weights are.
enum Weights<D: Chained> {
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
struct Rank<D: Chained> {
    run: Run,
    w: usize,
    device: D,
    group: Group<D>,
    layers: Vec<Layer>,
    routers: Vec<OnDevice<D>>,
    weights: Weights<D>,
    /// Ranks with the same experts.
    data: Box<dyn Communicator<D>>,
    /// Ranks with the same shard.
    replicas: Box<dyn Communicator<D>>,
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

    fn train(mut self) -> Result<Outcome> {
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

/// ((0 + 1) + (2 + 3)), written for the three sizes that the tests have.
pub fn tree(values: &[f32]) -> f32 {
    match values {
        [a] => *a,
        [a, b] => a + b,
        [a, b, c, d] => (a + b) + (c + d),
        other => panic!("{} values", other.len()),
    }
}

/// A chain with the first weights of a run.
fn sharded<D: Chained>(device: &D, run: &Run, p: usize, comms: Comms<D>) -> Result<Weights<D>> {
    let options = EtpOptions { replicas: run.replicas(), ..run.options };
    let chain = Chain::new(device.clone(), comms, options)?;
    let (mut ids, mut shards) = (Vec::new(), Vec::new());
    for l in 0..run.layers {
        let add = |which: usize| -> Result<(WeightId, Arc<Shard<D>>)> {
            let whole = run.weight(p, l, which);
            let cut: Shards = chain.shards(whole.dims())?;
            let shard = Arc::new(Shard::new(cut.cut(device, device.host(&whole).view(), chain.rank())?));
            let name = format!("layers.{l}.{}", ["up", "down"][which]);
            let mut spec = WeightSpec::new(name, l as u32, whole.dims(), run.dtype);
            spec.recompute = run.config.recompute && which == 0;
            spec.payload = run.payload;
            Ok((chain.add(spec, Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?, shard))
        };
        let (up, down) = (add(0)?, add(1)?);
        ids.push([up.0, down.0]);
        shards.push([up.1, down.1]);
    }
    Ok(Weights::Sharded { chain: Arc::new(chain), ids, shards })
}

/// Trains on one thread a rank, with whole weights or sharded ones.
pub fn train<D: Chained>(device: &D, run: &Run, shard: bool) -> Vec<Outcome> {
    let (world, ep, n) = (run.world, run.ep, run.etp);
    let experts = mesh(device, (world, ""), |w| (w / ep, w % ep), MINUTE);
    let data = mesh(device, (world, "data"), |w| (w % ep, w / ep), MINUTE);
    // Ranks with the same experts: `etp` in a row make a shard group, those at the same place in them are replicas.
    let in_group = |w: usize| (w / ep / n * ep + w % ep, w / ep % n);
    let gathers = mesh(device, (world, "gather"), in_group, MINUTE);
    let reductions = mesh(device, (world, "reduce"), in_group, MINUTE);
    let replicas = mesh(device, (world, "replicas"), |w| (w % (ep * n), w / (ep * n)), MINUTE);
    let comms = experts.into_iter().zip(data).zip(gathers.into_iter().zip(reductions)).zip(replicas);
    thread::scope(|scope| {
        let threads: Vec<_> = comms
            .enumerate()
            .map(|(w, (((experts, data), (gather, reduce)), replicas))| {
                let device = device.of_rank(w);
                scope.spawn(move || -> Result<Outcome> {
                    let e = run.config.router.num_experts;
                    let most = run.tokens(world);
                    let group = Group::new(device.clone(), experts, GroupConfig::new(e, most))?;
                    let weights = match shard {
                        true => sharded(&device, run, w % ep, Comms { gather, reduce })?,
                        false => {
                            let weight = |l, which| device.host(&through(run.payload, &run.weight(w % ep, l, which)));
                            Weights::Whole((0..run.layers).map(|l| [weight(l, 0), weight(l, 1)]).collect())
                        }
                    };
                    let layer = |l| Layer::new(run.config.clone(), l as u32);
                    let layers = (0..run.layers).map(layer).collect::<Result<_>>()?;
                    let router = |l| device.host(&run.tensor([0, l, 0, 0], &[e, run.config.hidden], 1.0));
                    let routers = (0..run.layers).map(router).collect();
                    Rank { run: run.clone(), w, device, group, layers, routers, weights, data, replicas }.train()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked").expect("a rank failed")).collect()
    })
}
