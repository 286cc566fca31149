//! Runs whole layers over rank threads through the crate's core interface.
#![allow(dead_code, reason = "every suite takes a part")]

#[path = "../devices/mod.rs"]
pub mod devices;
pub mod stacks;
#[path = "../../examples/support/mod.rs"]
pub mod support;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{Device, Tensor};
use moebius::checkpoint::BlockParams;
use moebius::config::MoeConfig;
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, Group, GroupConfig, Overlap};
use moebius::layer::{
    Cotangents, DispatchOptions, GradientMask, Inputs, Layer, Mode, Noise, ParamKind, ParamViews, PerParam,
};
use moebius::quant::Quantized;
use moebius::{DType, Error};

use devices::Target;
use support::dense::Params;

pub type CoreTensor = moebius::Tensor<Cpu>;

/// How a block is run.
#[derive(Debug, Clone)]
pub struct Setup {
    pub config: MoeConfig,
    /// Tokens of each rank.
    pub split: Vec<usize>,
    pub dispatcher: DispatcherKind,
    pub dispatch: DispatchOptions,
    pub noise: Option<Noise>,
    /// Up and down of each rank where they are quantized, in place of the parameters'.
    pub quantized: Option<Arc<Vec<[Quantized<Cpu>; 2]>>>,
    /// Each rank's device keeps a token's bits with quantized experts too.
    pub batch_invariant: bool,
    /// What the group allows on a rank, where that is more than the split has on any.
    pub max_tokens_per_rank: Option<usize>,
}

impl Setup {
    pub fn new(config: &MoeConfig, split: &[usize]) -> Self {
        Self {
            config: config.clone(),
            split: split.to_vec(),
            dispatcher: DispatcherKind::Auto,
            dispatch: DispatchOptions::default(),
            noise: None,
            quantized: None,
            batch_invariant: false,
            max_tokens_per_rank: None,
        }
    }
}

/// Gradients that a loss has at a layer's outputs.
#[derive(Debug, Clone, Copy)]
pub struct Cotangent<'a> {
    /// `[T, H]` of all ranks; `None`: the loss does not see y.
    pub y: Option<&'a Tensor>,
    pub aux: f64,
}

/// Results over all ranks, F64.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// `[T, H]`.
    pub y: Tensor,
    /// `[T, E]`.
    pub logits: Tensor,
    /// `[T, K]`.
    pub ids: Vec<Vec<usize>>,
    /// `[T, K]`.
    pub weights: Tensor,
    /// Auxiliary loss of each rank.
    pub aux: Vec<f64>,
    /// Tokens that chose each expert, as each rank was told.
    pub load: Vec<Vec<usize>>,
    /// As [`Params`], and `x`, `logits`, `weights`: joined over the ranks. Empty without a cotangent.
    pub grads: Params,
}

impl Outcome {
    /// Every number, as bits.
    pub fn bits(&self) -> Vec<u64> {
        let mut all: Vec<u64> = self.aux.iter().map(|v| v.to_bits()).collect();
        all.extend(self.ids.iter().flatten().map(|&id| id as u64));
        for t in [&self.y, &self.logits, &self.weights].into_iter().chain(self.grads.values()) {
            all.extend(support::compare::values(t).unwrap().iter().map(|v| v.to_bits()));
        }
        all
    }
}

/// One rank's part of an [`Outcome`].
pub struct Part {
    y: Tensor,
    logits: Tensor,
    ids: Vec<Vec<usize>>,
    weights: Tensor,
    aux: f64,
    load: Vec<usize>,
    grads: Params,
}

impl Part {
    /// Values that must be equal: experts, and tokens that chose each.
    pub fn counts(&self) -> (&[Vec<usize>], &[usize]) {
        (&self.ids, &self.load)
    }

    /// Tensors that may differ by rounding, by name.
    pub fn tensors(&self) -> Vec<(&str, &Tensor)> {
        let own = [("y", &self.y), ("logits", &self.logits), ("weights", &self.weights)];
        own.into_iter().chain(self.grads.iter().map(|(name, t)| (&name[..], t))).collect()
    }
}

/// Runs forward, and backward where a cotangent is given, of one block on one thread a rank. `params` has a share for
/// each rank, in the type that `x` is converted to.
pub fn run(
    setup: &Setup,
    params: &[BlockParams],
    x: &Tensor,
    dtype: DType,
    cotangent: Option<Cotangent<'_>>,
) -> Result<Outcome, Error> {
    // A poisoning device: whatever reads memory that nobody wrote turns the result into NaN.
    run_on(&Cpu::poisoning(), setup, params, x, dtype, cotangent)
}

/// The same on any device; several GPUs want NCCL.
pub fn run_on<D: Target>(
    device: &D,
    setup: &Setup,
    params: &[BlockParams],
    x: &Tensor,
    dtype: DType,
    cotangent: Option<Cotangent<'_>>,
) -> Result<Outcome, Error> {
    Ok(join(&run_parts(device, setup, params, x, dtype, cotangent)?))
}

/// The same, each rank's part by itself.
pub fn run_parts<D: Target>(
    device: &D,
    setup: &Setup,
    params: &[BlockParams],
    x: &Tensor,
    dtype: DType,
    cotangent: Option<Cotangent<'_>>,
) -> Result<Vec<Part>, Error> {
    assert_eq!(setup.split.len(), params.len(), "a share of the parameters for each rank");
    assert_eq!(setup.split.iter().sum::<usize>(), x.dims()[0], "the split has all tokens");
    let endpoints = device.endpoints(params.len(), Duration::from_secs(60));
    let parts: Vec<Result<Part, Error>> = thread::scope(|scope| {
        let threads: Vec<_> = endpoints
            .into_iter()
            .zip(params)
            .map(|(endpoint, params)| scope.spawn(move || run_rank(endpoint, setup, params, x, dtype, cotangent)))
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank's thread panicked")).collect()
    });
    parts.into_iter().collect()
}

/// One rank of the same.
pub fn run_rank<D: Target>(
    mut endpoint: devices::Endpoint<D>,
    setup: &Setup,
    params: &BlockParams,
    x: &Tensor,
    dtype: DType,
    cotangent: Option<Cotangent<'_>>,
) -> Result<Part, Error> {
    let most = setup.split.iter().copied().max().unwrap_or(0);
    let most = setup.max_tokens_per_rank.unwrap_or(most);
    let mut config = GroupConfig::new(setup.config.router.num_experts, most);
    config.dispatcher = setup.dispatcher;
    // Two hosts, for dispatchers that know any.
    config.ranks_per_host = setup.split.len().div_ceil(2);
    // Where products can start before their rows have come, they do.
    config.overlap = Overlap::Sms(4);
    if let moebius::ep::Capacity::Static(rows) = setup.dispatch.capacity {
        config.max_rows = rows;
    }
    if setup.batch_invariant {
        endpoint.device = endpoint.device.batch_invariant();
    }
    let mut group = endpoint.join(config)?;
    let (device, rank) = (group.device().clone(), group.rank());
    let rows = |t: &Tensor| device.host(&rank_rows(t, &setup.split, rank, dtype));
    let dy = cotangent.and_then(|c| c.y).map(rows);
    let aux = cotangent.map(|c| c.aux);
    one_rank(setup, &mut group, params, &rows(x), aux.map(|aux| (dy.as_ref(), aux)))
}

fn one_rank<D: Target>(
    setup: &Setup,
    group: &mut Group<D>,
    params: &BlockParams,
    x: &moebius::Tensor<D>,
    cotangent: Option<(Option<&moebius::Tensor<D>>, f64)>,
) -> Result<Part, Error> {
    let device = group.device().clone();
    let shown = |t: &moebius::Tensor<D>| framework(&device.to_cpu(t));
    let layer = Layer::new(setup.config.clone(), 0)?.with_dispatch(setup.dispatch);
    let own: Vec<Option<moebius::Tensor<D>>> =
        ParamKind::ALL.into_iter().map(|kind| params.get(kind).map(|t| device.host(t))).collect();
    let views = ParamViews::collect(|kind| Ok(own[kind as usize].as_ref().map(|t| t.view())))?;
    let quantized = match &setup.quantized {
        Some(stacks) => Some([stacks[group.rank()][0].to(&device)?, stacks[group.rank()][1].to(&device)?]),
        None => None,
    };
    let mut params = views.params();
    if let Some([up, down]) = &quantized {
        (params.up, params.down) = (up, down);
    }
    let mode = Mode { backward: cotangent.is_some(), noise: setup.noise };
    let forward = layer.forward(group, mode, x.view(), &params)?;
    let mut grads = Params::new();
    if let Some((dy, aux)) = cotangent {
        let context = forward.context.expect("forward keeps a context where backward follows");
        let inputs = Inputs { x: x.view(), params: &params };
        let cotangents = Cotangents { y: dy.map(|t| t.view()), aux };
        let wanted = GradientMask { experts: quantized.is_none(), ..GradientMask::ALL };
        let mut g = layer.backward(group, context, inputs, cotangents, wanted)?;
        let of_params = ParamKind::ALL.into_iter().map(|kind| (kind.name(), g.take(kind))).collect::<Vec<_>>();
        let others = [("x", g.x), ("logits", Some(g.logits)), ("weights", Some(g.weights))];
        let named = of_params.into_iter().chain(others);
        grads.extend(named.filter_map(|(n, t)| Some((n.to_string(), shown(&t?)))));
    }
    let k = setup.config.router.top_k;
    let ids: Vec<usize> = device.values(forward.routing.ids.view()).iter().map(|&id| id as usize).collect();
    Ok(Part {
        y: shown(&forward.y),
        logits: shown(&forward.routing.logits),
        ids: ids.chunks(k).map(<[usize]>::to_vec).collect(),
        weights: shown(&forward.routing.weights),
        aux: forward.aux.get()?.total(),
        load: forward.routing.load.get()?.tokens_per_expert.clone(),
        grads,
    })
}

fn join(parts: &[Part]) -> Outcome {
    let rows = |f: &dyn Fn(&Part) -> Tensor| {
        let parts: Vec<Tensor> = parts.iter().map(f).filter(|t| t.dims()[0] > 0).collect();
        Tensor::cat(&parts, 0).unwrap()
    };
    let is_rows = |name: &str| matches!(name, "x" | "logits" | "weights");
    let only = |rows: bool| -> Vec<Params> {
        parts
            .iter()
            .map(|p| p.grads.iter().filter(|(n, _)| is_rows(n) == rows).map(|(n, t)| (n.clone(), t.clone())).collect())
            .collect()
    };
    let params = only(false);
    let mut grads = support::job::join_params(&params.iter().collect::<Vec<_>>()).unwrap();
    for name in only(true)[0].keys() {
        grads.insert(name.clone(), rows(&|p: &Part| p.grads[name].clone()));
    }
    Outcome {
        y: rows(&|p| p.y.clone()),
        logits: rows(&|p| p.logits.clone()),
        ids: parts.iter().flat_map(|p| p.ids.clone()).collect(),
        weights: rows(&|p| p.weights.clone()),
        aux: parts.iter().map(|p| p.aux).collect(),
        load: parts.iter().map(|p| p.load.clone()).collect(),
        grads,
    }
}

/// A core tensor as candle's, F64.
pub fn framework(t: &CoreTensor) -> Tensor {
    Tensor::from_vec(t.to_f64(), t.dims(), &Device::Cpu).unwrap()
}

/// candle's tensor as a core tensor of some floating type.
pub fn core(t: &Tensor, dtype: DType) -> CoreTensor {
    let values = support::compare::values(t).unwrap();
    let dims = t.dims();
    match dtype {
        DType::F64 => CoreTensor::from_vec(values, dims),
        DType::F32 => CoreTensor::from_vec(values.iter().map(|&v| v as f32).collect::<Vec<_>>(), dims),
        DType::BF16 => CoreTensor::from_vec(values.iter().map(|&v| half::bf16::from_f64(v)).collect::<Vec<_>>(), dims),
        DType::F16 => CoreTensor::from_vec(values.iter().map(|&v| half::f16::from_f64(v)).collect::<Vec<_>>(), dims),
        other => panic!("{other} is no floating type"),
    }
    .unwrap()
}

fn rank_rows(t: &Tensor, split: &[usize], rank: usize, dtype: DType) -> CoreTensor {
    core(&t.narrow(0, split[..rank].iter().sum(), split[rank]).unwrap(), dtype)
}

/// A rank's share of a whole block's parameters.
pub fn shard(params: &Params, rank: usize, ranks: usize, dtype: DType) -> BlockParams {
    let share = |kind: ParamKind| {
        let t = params.get(kind.name())?;
        let local = t.dims()[0] / ranks;
        Some(match kind.is_replicated() {
            true => core(t, dtype),
            false => core(&t.narrow(0, rank * local, local).unwrap(), dtype),
        })
    };
    BlockParams::new(PerParam::from_fn(share)).unwrap()
}
