//! Training over several GPUs: gradients summed beside backward, the optimizer over ranks, and weights that are shards.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Barrier, Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use candle_nn::{Optimizer, VarBuilder};
use moebius::candle::{
    AdamW, Capture, DeviceGroup, ExpertParallelMoE, GradientReducer, GradientType, MainGradients, ReduceComms,
    ShardedWeights, WeightVar, error_of, finish_sharded,
};
use moebius::comm::{Communicator, Op, Tag};
use moebius::config::SharedConfig;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase, Reduction};
use moebius::layer::{DispatchOptions, Layer, ParamKind};
use moebius::optim::{AdamWOptions, GroupOptions};
use moebius::{MoeConfig, Tensor as OwnTensor};

use crate::gpus::{RankComms, on_ranks_for_capture, on_ranks_with_comms};
use crate::support::{AnyResult, EXPERTS, H, config, flat, normal, of_type};

/// A case's name, and its test on so many GPUs.
type Case = (&'static str, fn(usize) -> AnyResult<()>);

pub fn cases() -> [Case; 5] {
    [
        ("captured_steps_have_the_eager_ones_bits", captured_steps_have_the_eager_ones_bits),
        ("a_capture_with_an_eager_capacity_is_refused", a_capture_with_an_eager_capacity_is_refused),
        ("sums_that_fail_give_their_memory_back", sums_that_fail_give_their_memory_back),
        ("sums_beside_backward_and_steps_over_ranks", sums_beside_backward_and_steps_over_ranks),
        ("shards_give_what_whole_weights_give", shards_give_what_whole_weights_give),
    ]
}

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(SharedConfig { intermediate: 8, gated: true, bias: false });
    full.expert_bias = true;
    full
}

fn options() -> AdamWOptions {
    let group = GroupOptions { lr: 0.01, ..GroupOptions::default() };
    AdamWOptions { group, max_norm: Some(0.5), ..AdamWOptions::default() }
}

fn boxed(comm: moebius::nccl::NcclComm) -> Box<dyn Communicator<Cuda>> {
    Box::new(comm)
}

/// Values of all ranks, in rank order.
struct HostGather {
    barrier: Barrier,
    values: Mutex<Vec<Vec<f32>>>,
}

impl HostGather {
    fn new(ranks: usize) -> Self {
        Self { barrier: Barrier::new(ranks), values: Mutex::new(vec![Vec::new(); ranks]) }
    }

    fn all(&self, rank: usize, own: Vec<f32>) -> Vec<Vec<f32>> {
        let values = || self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values()[rank] = own;
        self.barrier.wait();
        let all = values().clone();
        self.barrier.wait();
        all
    }

    /// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), of as many ranks as there are, a power of two.
    fn sum(&self, rank: usize, own: Vec<f32>) -> Vec<f32> {
        let mut sums = self.all(rank, own);
        let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
        while sums.len() > 1 {
            sums = sums.chunks(2).map(add).collect();
        }
        sums.swap_remove(0)
    }
}

/// A rank's layer in training, with its sums over ranks and its optimizer.
struct Training {
    moe: ExpertParallelMoE,
    state: RefCell<(MainGradients, AdamW)>,
    x: Tensor,
}

impl Training {
    fn step(&self) -> candle_core::Result<Tensor> {
        let (gradients, adam) = &mut *self.state.borrow_mut();
        let y = (self.moe.forward(&self.x)? + &self.x)?;
        let loss = y.to_dtype(DType::F32)?.sqr()?.sum(1)?.sum_all()?;
        gradients.backward(&loss)?;
        self.moe.reduce_gradients(gradients.store_mut())?;
        adam.step(gradients.store())?;
        gradients.reset();
        Ok(loss.detach())
    }
}

/// Rows that hold every routing of [`TOKENS`] a rank.
const ROWS: usize = 256;
const TOKENS: usize = 16;

fn with_capacity(capacity: Capacity, number: u32) -> AnyResult<Layer> {
    Ok(Layer::new(full(), number)?.with_dispatch(DispatchOptions { capacity, ..DispatchOptions::default() }))
}

/// Replays of a step of all ranks, whose router's gradients and norm are summed in it, give an eager step's bits.
fn captured_steps_have_the_eager_ones_bits(ranks: usize) -> AnyResult<()> {
    for dtype in [DType::F32, DType::BF16] {
        let config = GroupConfig { max_rows: ROWS, ..GroupConfig::new(EXPERTS, TOKENS) };
        on_ranks_for_capture(ranks, &config, |group, mut beside| {
            let (rank, device) = (group.rank(), group.device());
            let tokens = |step: u64| normal(100 + 10 * step + rank as u64, (TOKENS, H), dtype, device);
            let norms = [1, 2].map(|sequence| beside.split(Tag { layer: 1, op: Op::Init, sequence }, Some(0), rank));
            let mut trainings = Vec::new();
            for (number, norms) in norms.into_iter().enumerate() {
                let layer = with_capacity(Capacity::Static(ROWS), number as u32)?;
                let moe = of_type(group.clone(), full(), dtype)?.with_layer(layer);
                let (params, norms) = (moe.optimizer_params("moe")?, norms?.ok_or("a part")?);
                let cuda = norms.cuda().clone();
                let adam = AdamW::over_ranks(&cuda, boxed(norms), params, options(), &[options().group])?;
                let state = RefCell::new((MainGradients::new(), adam));
                trainings.push(Training { moe, state, x: tokens(0)? });
            }
            let [eager, captured] = &trainings[..] else { return Err("two".into()) };
            let expected = flat(&eager.step()?)?;
            let capture = Capture::new(device)?.group(group)?.optimizer(&captured.state.borrow().1)?;
            // SAFETY: nothing replaces what `captured` has, and its gradients are reset by the step alone.
            let mut graph = unsafe { capture.run(|| Ok(vec![captured.step()?])) }?;
            assert_eq!(flat(&graph.outputs()[0])?, expected, "{dtype:?}, the first step");
            for step in 1..100 {
                let x = tokens(step)?;
                for training in [eager, captured] {
                    training.x.slice_set(&x, 0, 0)?;
                }
                let expected = flat(&eager.step()?)?;
                graph.replay()?;
                assert_eq!(flat(&graph.outputs()[0])?, expected, "{dtype:?}, step {step}");
                graph.check()?;
            }
            for ((name, a), (_, b)) in captured.moe.params().into_iter().zip(eager.moe.params()) {
                assert_eq!(flat(a)?, flat(b)?, "{dtype:?}, {name}");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// What waits for the number of rows cannot be captured: typed, on every rank, and eager calls go on.
fn a_capture_with_an_eager_capacity_is_refused(ranks: usize) -> AnyResult<()> {
    on_ranks_for_capture(ranks, &GroupConfig::new(EXPERTS, TOKENS), |group, _| {
        let moe = of_type(group.clone(), full(), DType::F32)?.with_layer(with_capacity(Capacity::Eager, 0)?).detached();
        let x = normal(100 + group.rank() as u64, (TOKENS, H), DType::F32, group.device())?;
        let expected = flat(&moe.forward(&x)?)?;
        let capture = Capture::new(group.device())?.group(group)?;
        // SAFETY: nothing replaces the layer's weights or x.
        let error = unsafe { capture.run(|| Ok(vec![moe.forward(&x)?])) }.map(drop).expect_err("an eager capacity");
        assert!(error_of(&error).is_some() && error.to_string().contains("static capacity"), "{error}");
        assert_eq!(flat(&moe.forward(&x)?)?, expected, "the group goes on");
        Ok(())
    })?;
    Ok(())
}

/// Sums beside backward have the bits of those behind it; the norm is that of all ranks' gradients; what all ranks hold
/// stays the same on all, through a save and a load.
fn sums_beside_backward_and_steps_over_ranks(ranks: usize) -> AnyResult<()> {
    for dtype in [DType::F32, DType::BF16] {
        let dir = tempfile::tempdir()?;
        let exchange = HostGather::new(ranks);
        on_ranks_with_comms(ranks, &GroupConfig::new(EXPERTS, 64), |group, beside| {
            let RankComms { cuda, comms: [sums, norms], .. } = beside;
            let (rank, device) = (group.rank(), group.device());
            let layers = [0, 4].map(|number| -> AnyResult<_> {
                Ok(of_type(group.clone(), full(), dtype)?.with_layer(Layer::new(full(), number)?))
            });
            let [first, second] = layers;
            let layers = [first?, second?];
            let comms = ReduceComms { group: boxed(sums), replicas: None };
            let reducer = GradientReducer::new(&cuda, comms)?.with_bucket_bytes(300);
            let reducer = layers.iter().fold(reducer, GradientReducer::with_layer);
            let loss = |microbatch: u64| -> AnyResult<Tensor> {
                // Other numbers of tokens on every rank.
                let x = normal(100 + 10 * microbatch + rank as u64, (7 + rank, H), dtype, device)?;
                let mut h = x;
                for layer in &layers {
                    h = (layer.forward_t(&h, true)? + h)?;
                }
                Ok(h.to_dtype(DType::F32)?.sqr()?.sum(1)?.sum_all()?)
            };
            let new = || if dtype == DType::F32 { MainGradients::new() } else { MainGradients::in_f32() };
            let (mut after, mut beside) = (new(), new());
            let mut params = Vec::new();
            for (number, layer) in layers.iter().enumerate() {
                params.extend(layer.optimizer_params(&format!("layers.{number}"))?);
            }
            let vars: Vec<_> =
                layers.iter().flat_map(ExpertParallelMoE::params).map(|(name, t)| (name, t.clone())).collect();
            let mut adam = AdamW::over_ranks(&cuda, boxed(norms), params, options(), &[options().group])?;
            for step in 0..3u64 {
                for microbatch in 0..2 {
                    after.backward(&loss(2 * step + microbatch)?)?;
                    match microbatch {
                        1 => beside.backward_reduced(&loss(2 * step + microbatch)?, &reducer)?,
                        _ => beside.backward(&loss(2 * step + microbatch)?)?,
                    }
                }
                after.reduce(&reducer)?;
                let mut squares = 0.0;
                for (name, t) in &vars {
                    let found = flat(beside.get(t)?)?;
                    assert_eq!(found, flat(after.get(t)?)?, "{name}, step {step}");
                    let own: f64 = found.iter().map(|v| f64::from(*v).powi(2)).sum();
                    let replicated = !name.starts_with("experts");
                    let all = exchange.all(rank, found);
                    match replicated {
                        true => {
                            all.iter().for_each(|of| assert_eq!(*of, all[0], "sums of {name} on every rank"));
                            squares += own;
                        }
                        false => squares += all.iter().flatten().map(|v| f64::from(*v).powi(2)).sum::<f64>(),
                    }
                }
                adam.step(beside.store())?;
                after.reset();
                beside.reset();
                let stats = adam.stats()?;
                // Two sums in f64 of the same squares, in other orders.
                assert!((stats.norm / squares.sqrt() - 1.0).abs() < 1e-12, "{} {}", stats.norm, squares.sqrt());
                assert_eq!(stats.steps, step + 1);
                for (name, t) in vars.iter().filter(|(name, _)| !name.starts_with("experts")) {
                    let all = exchange.all(rank, flat(t)?);
                    all.iter().for_each(|of| assert_eq!(*of, all[0], "{name} on every rank, step {step}"));
                }
                if step == 1 {
                    adam.save(dir.path())?;
                    assert_eq!(adam.load_at(dir.path(), 2)?, 2);
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The same values, whose backward fails if it is to.
struct Fails(bool);

impl CustomOp1 for Fails {
    fn name(&self) -> &'static str {
        "fails"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        candle_core::bail!("of a GPU alone")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((x.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match self.0 {
            true => candle_core::bail!("an operation of the user's own"),
            false => Ok(Some(gradient.clone())),
        }
    }
}

/// A rank's backward fails between two layers, when the sums of the second have begun on the others: where the
/// communicators live, those buckets' memory is free again.
fn sums_that_fail_give_their_memory_back(ranks: usize) -> AnyResult<()> {
    on_ranks_with_comms(ranks, &GroupConfig::new(EXPERTS, 64), |group, beside| {
        let RankComms { cuda, comms: [sums, _], .. } = beside;
        let layer = |number| -> AnyResult<_> {
            Ok(of_type(group.clone(), full(), DType::F32)?.with_layer(Layer::new(full(), number)?))
        };
        let layers = [layer(0)?, layer(4)?];
        let reducer = GradientReducer::new(&cuda, ReduceComms { group: boxed(sums), replicas: None })?;
        let reducer = layers.iter().fold(reducer, GradientReducer::with_layer);
        let x = normal(70 + group.rank() as u64, (5, H), DType::F32, group.device())?;
        let mut main = MainGradients::new();
        let mut step = |fails: bool| -> AnyResult<bool> {
            let h = layers[0].forward_t(&x, true)?.apply_op1(Fails(fails && group.rank() == 0))?;
            let done = main.backward_reduced(&layers[1].forward_t(&h, true)?.sqr()?.sum_all()?, &reducer);
            main.reset();
            Ok(done.is_ok())
        };
        assert!(step(false)?);
        let mut in_use = Vec::new();
        for _ in 0..4 {
            assert!(!step(true)?);
            group.device().synchronize()?;
            in_use.push(cuda.memory().in_use);
        }
        assert_eq!(in_use, [in_use[0]; 4], "rank {}", group.rank());
        assert!(step(false)?);
        Ok(())
    })
    .map(drop)
}

/// A layer with its values, all of it shards of a chain if there is one.
fn module(group: &DeviceGroup, chain: Option<&Arc<Chain<Cuda>>>) -> AnyResult<ExpertParallelMoE> {
    let (config, mut tensors) = (full(), HashMap::new());
    for kind in ParamKind::ALL {
        let Some(dims) = kind.dims(&config, EXPERTS) else { continue };
        let t = normal(500 + kind as u64, dims.clone(), DType::F32, &Device::Cpu)?;
        let t = match chain.filter(|_| matches!(kind, ParamKind::Up | ParamKind::Down)) {
            Some(chain) => cut(chain, &t)?,
            None => t,
        };
        tensors.insert(kind.name().to_string(), Var::from_tensor(&t.to_device(group.device())?)?.into_inner());
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, group.device());
    let layer = Layer::new(config, 0)?;
    Ok(match chain {
        Some(chain) => ExpertParallelMoE::sharded(layer, group, chain, Payload::Plain, vb)?,
        None => ExpertParallelMoE::new(layer, group, vb)?,
    })
}

/// This rank's shard of a weight on the host.
fn cut(chain: &Chain<Cuda>, whole: &Tensor) -> AnyResult<Tensor> {
    let of = OwnTensor::<moebius::cpu::Cpu>::from_vec(flat(whole)?, whole.dims())?;
    let own = chain.shards(whole.dims())?.cut(&moebius::cpu::Cpu::new(), of.view(), chain.rank())?;
    Ok(Tensor::from_slice(own.as_slice::<f32>()?, own.dims(), &Device::Cpu)?)
}

/// A layer whose experts are shards, with a dense weight that is shards around it: outputs, gradients and steps of AdamW
/// as those of whole weights, to the bit.
fn shards_give_what_whole_weights_give(ranks: usize) -> AnyResult<()> {
    let exchange = HostGather::new(ranks);
    on_ranks_with_comms(ranks, &GroupConfig::new(EXPERTS, 64), |of_ranks, beside| {
        let RankComms { cuda, comms: [gather, reduce], .. } = beside;
        let (rank, device) = (of_ranks.rank(), of_ranks.device());
        // Every rank has all experts: a group of its own.
        let group = DeviceGroup::single(GroupConfig::new(EXPERTS, 64), device)?;
        let comms = Comms { gather: boxed(gather), reduce: boxed(reduce) };
        let options = EtpOptions { reduction: Reduction::Pairwise, ..EtpOptions::default() };
        let chain = Arc::new(Chain::new(cuda.clone(), comms, options)?);
        let projection = normal(90, (H, H), DType::F32, device)?;
        let (whole, sharded) = (module(&group, None)?, module(&group, Some(&chain))?);
        let whole_projection = Var::from_tensor(&projection)?;
        let lines = chain.shards(&moebius::etp::Shards::lines(&[H, H]))?;
        let own = OwnTensor::<moebius::cpu::Cpu>::from_vec(flat(&projection)?, lines.dims())?;
        let own = lines.cut(&moebius::cpu::Cpu::new(), own.view(), chain.rank())?;
        let shard = Var::from_tensor(&Tensor::from_slice(own.as_slice::<f32>()?, own.dims(), device)?)?;
        let named = HashMap::from([("weight".to_string(), shard.as_tensor().clone())]);
        let weights = ShardedWeights::new(&chain, VarBuilder::from_tensors(named, DType::F32, device));
        let dense = weights.linear_no_bias(H, H)?;
        let mut adam =
            AdamW::new(whole.vars().into_iter().chain([whole_projection.clone()]).collect(), self::options())?;
        for step in 0..3u64 {
            let x = normal(200 + 10 * step + rank as u64, (5 + rank, H), DType::F32, device)?;
            let loss = |y: &Tensor| y.sqr()?.sum(1)?.sum_all();
            let y_expected = whole.forward_t(&x.matmul(&whole_projection.t()?)?, true)?;
            let expected = loss(&y_expected)?.backward()?;
            chain.begin(Phase::Forward)?;
            let y = sharded.forward_t(&candle_core::Module::forward(&dense, &x)?, true)?;
            chain.end()?;
            chain.begin(Phase::Backward)?;
            let mut found = loss(&y)?.backward()?;
            chain.end()?;
            assert_eq!(flat(&y)?, flat(&y_expected)?, "y of step {step}");
            let shards: Vec<WeightVar> = sharded.shards().into_iter().chain(weights.shards()).collect();
            finish_sharded(&chain, None, &shards, &mut found, GradientType::AsSummed)?;
            let mut summed = candle_core::backprop::GradStore::default();
            for t in whole.params().into_iter().map(|(_, t)| t.clone()).chain([whole_projection.as_tensor().clone()]) {
                let own = expected.get(&t).ok_or("a gradient")?;
                let sum = exchange.sum(rank, flat(own)?);
                summed.insert(&t, Tensor::from_vec(sum, t.dims(), device)?);
            }
            for (kind, at) in [(ParamKind::Up, 0), (ParamKind::Down, 1)] {
                let whole = summed.get(whole.param(kind).ok_or("a weight")?).ok_or("a sum")?.clone();
                let own = flat(&cut(&chain, &whole)?)?;
                let shard = found.get(&shards[at].var).ok_or("a shard's gradient")?;
                assert_eq!(flat(shard)?, own, "{kind:?}, step {step}");
            }
            let of_lines = flat(summed.get(&whole_projection).ok_or("a sum")?)?;
            let of_lines = OwnTensor::<moebius::cpu::Cpu>::from_vec(of_lines, lines.dims())?;
            let own = lines.cut(&moebius::cpu::Cpu::new(), of_lines.view(), chain.rank())?;
            assert_eq!(
                flat(found.get(&shard).ok_or("a gradient")?)?,
                own.as_slice::<f32>()?,
                "projection, step {step}"
            );
            adam.step(&summed)?;
            // The shards become those of the new weights.
            for (kind, at) in [(ParamKind::Up, 0), (ParamKind::Down, 1)] {
                let new = cut(&chain, whole.param(kind).ok_or("a weight")?)?;
                shards[at].var.set(&new.to_device(device)?)?;
            }
            let new = OwnTensor::<moebius::cpu::Cpu>::from_vec(flat(&whole_projection)?, lines.dims())?;
            let new = lines.cut(&moebius::cpu::Cpu::new(), new.view(), chain.rank())?;
            shard.set(&Tensor::from_slice(new.as_slice::<f32>()?, new.dims(), device)?)?;
            for ((_, s), (_, w)) in sharded.params().into_iter().zip(whole.params()) {
                if s.dims() == w.dims() {
                    Var::from_tensor(s)?.set(w)?;
                }
            }
        }
        Ok(())
    })?;
    Ok(())
}
