//! A model whose dense weights are shards too, and the same model of whole weights.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Module, Result as CandleResult, Tensor, Var};
use candle_nn::{Init, Optimizer, VarBuilder};
use moebius::candle::{
    AdamW, AdamWParam, EpGroup, ExpertParallelMoE, GradientType, NewWeight, ShardedModule, ShardedWeights, WeightVar,
    finish_sharded,
};
use moebius::comm::{Communicator, Op, Tag};
use moebius::config::SharedConfig;
use moebius::cpu::Cpu;
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase, Reduction, Shards};
use moebius::layer::{Layer, ParamKind};
use moebius::optim::{AdamWOptions, GroupOptions};
use moebius::{MoeConfig, TensorMut, TensorRef};

use super::random::Random;
use super::test_ranks::MINUTE;
use super::world::mesh;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;

pub const WORLD: usize = 4;
pub const VOCABULARY: usize = 24;
pub const H: usize = 8;
pub const EXPERTS: usize = 4;
pub const STEPS: usize = 3;

/// Names and sizes of the weights.
pub fn sizes() -> Vec<(String, Vec<usize>)> {
    let around = [
        ("embed.weight", vec![VOCABULARY, H]),
        ("proj.weight", vec![H, H]),
        ("proj.bias", vec![H]),
        ("norm.weight", vec![H]),
        ("head.weight", vec![VOCABULARY, H]),
    ];
    let config = config();
    let layer = ParamKind::ALL.into_iter();
    let layer = layer.filter_map(|kind| Some((format!("moe.{}", kind.name()), kind.dims(&config, EXPERTS)?)));
    around.map(|(name, dims)| (name.to_string(), dims)).into_iter().chain(layer).collect()
}

pub fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(super::devices::seed::seed(seed));
    (0..count).map(|_| (0.5 * random.normal()) as f32).collect()
}

pub fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The whole weights.
pub fn whole() -> HashMap<String, Tensor> {
    let of = |(i, (name, dims)): (usize, (String, Vec<usize>))| {
        let values = values(i as u64, dims.iter().product());
        (name, Tensor::from_vec(values, dims, &Device::Cpu).unwrap())
    };
    sizes().into_iter().enumerate().map(of).collect()
}

/// A rank's shard of a weight.
pub fn shard(chain: &Chain<Cpu>, name: &str, whole: &Tensor) -> Result<Tensor, Failure> {
    let expert = ["moe.experts.up", "moe.experts.down"].contains(&name);
    let cut = chain.shards(&if expert { whole.dims().to_vec() } else { Shards::lines(whole.dims()).to_vec() })?;
    let whole = moebius::Tensor::<Cpu>::from_vec(flat(whole), cut.dims())?;
    let own = cut.cut(&Cpu::new(), whole.view(), chain.rank())?;
    Ok(Tensor::from_slice(own.as_slice::<f32>()?, own.dims(), &Device::Cpu)?)
}

pub fn builder(tensors: HashMap<String, Tensor>) -> VarBuilder<'static> {
    let var = |(name, t): (String, Tensor)| (name, Var::from_tensor(&t).unwrap().into_inner());
    VarBuilder::from_tensors(tensors.into_iter().map(var).collect(), DType::F32, &Device::Cpu)
}

pub fn norm(x: &Tensor, weights: &[Tensor]) -> CandleResult<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
    x.broadcast_div(&scale)?.broadcast_mul(&weights[0])
}

pub fn ids(step: usize, rank: usize) -> (Tensor, Tensor) {
    let tokens = 3 + rank;
    let of = |shift: usize| -> Vec<u32> {
        (0..tokens).map(|t| ((t * 7 + rank * 5 + step * 3 + shift) % VOCABULARY) as u32).collect()
    };
    let tensor = |values| Tensor::from_vec(values, tokens, &Device::Cpu).unwrap();
    (tensor(of(0)), tensor(of(4)))
}

/// A layer with whatever can be sharded.
pub fn config() -> MoeConfig {
    let mut config = MoeConfig::new(H, 6, EXPERTS, 2);
    config.shared = Some(SharedConfig { intermediate: 4, gated: true, bias: false });
    config.router.logit_bias = true;
    config.expert_bias = true;
    config.aux.balance = 0.1;
    config
}

/// The model around whatever its layers are.
pub struct Model<'a> {
    embed: &'a dyn Module,
    proj: &'a dyn Module,
    norm: &'a dyn Module,
    moe: &'a ExpertParallelMoE,
    head: &'a dyn Module,
}

impl Model<'_> {
    pub fn loss(&self, (ids, targets): (Tensor, Tensor)) -> CandleResult<Tensor> {
        let x = self.norm.forward(&self.embed.forward(&ids)?)?;
        let x = (&x + self.proj.forward(&x)?.silu()?)?;
        let out = self.moe.forward_full(&x, None)?;
        candle_nn::loss::cross_entropy(&self.head.forward(&out.y)?, &targets)? + out.aux
    }
}

/// Losses and weights at the end, of this rank's tokens.
pub type Trained = (Vec<u32>, HashMap<String, Vec<u32>>);

/// ((0 + 1) + (2 + 3)) of the ranks' values.
pub fn sum_over(comm: &mut dyn Communicator<Cpu>, own: &[f32]) -> Result<Vec<f32>, Failure> {
    let mut all = vec![0f32; own.len() * WORLD];
    let dims = [all.len()];
    let recv = TensorMut::<Cpu>::from_slice(&mut all, &dims)?;
    comm.all_gather(Tag { layer: 0, op: Op::User, sequence: 0 }, TensorRef::from_slice(own, &[own.len()])?, recv)?;
    let parts: Vec<&[f32]> = all.chunks(own.len()).collect();
    Ok((0..own.len()).map(|at| (parts[0][at] + parts[1][at]) + (parts[2][at] + parts[3][at])).collect())
}

pub fn adam_options(max_norm: Option<f64>) -> AdamWOptions {
    AdamWOptions { group: GroupOptions { lr: 0.01, ..GroupOptions::default() }, max_norm, ..AdamWOptions::default() }
}

/// The model of whole weights, with candle's own layers.
pub struct Whole {
    embed: candle_nn::Embedding,
    proj: candle_nn::Linear,
    norm: candle_nn::Func<'static>,
    moe: ExpertParallelMoE,
    head: candle_nn::Linear,
}

impl Whole {
    pub fn new(vb: VarBuilder<'static>) -> Result<Self, Failure> {
        let norm_weight = vb.pp("norm").get(H, "weight")?;
        Ok(Self {
            embed: candle_nn::embedding(VOCABULARY, H, vb.pp("embed"))?,
            proj: candle_nn::linear(H, H, vb.pp("proj"))?,
            norm: candle_nn::func(move |x| norm(x, std::slice::from_ref(&norm_weight))),
            moe: ExpertParallelMoE::new(Layer::new(config(), 0)?, EpGroup::single(&config())?, vb.pp("moe"))?,
            head: candle_nn::linear_no_bias(H, VOCABULARY, vb.pp("head"))?,
        })
    }

    pub fn model(&self) -> Model<'_> {
        Model { embed: &self.embed, proj: &self.proj, norm: &self.norm, moe: &self.moe, head: &self.head }
    }

    /// Its variables by the weights' names.
    pub fn vars(&self) -> Vec<(String, Tensor)> {
        let of = |kind: ParamKind| Some((format!("moe.{}", kind.name()), self.moe.param(kind)?.clone()));
        let around = [
            ("embed.weight", Some(self.embed.embeddings())),
            ("proj.weight", Some(self.proj.weight())),
            ("proj.bias", self.proj.bias()),
            ("head.weight", Some(self.head.weight())),
        ];
        let around = around.into_iter().filter_map(|(name, t)| Some((name.to_string(), t?.clone())));
        around.chain(ParamKind::ALL.into_iter().filter_map(of)).filter(|(_, t)| t.is_variable()).collect()
    }
}

/// It trained on each of the ranks.
pub fn train_whole(rank: usize, comm: &mut dyn Communicator<Cpu>) -> Result<Trained, Failure> {
    let vb = builder(whole());
    let whole = Whole::new(vb.clone())?;
    let model = whole.model();
    let vars = sizes().into_iter().map(|(name, dims)| {
        let var = Var::from_tensor(&vb.get(dims, &name)?)?;
        Ok((name, var))
    });
    let vars = vars.collect::<CandleResult<Vec<_>>>()?;
    let params = vars.iter().map(|(name, var)| AdamWParam::new(name, var)).collect();
    let options = adam_options(None);
    let mut adam = AdamW::with_groups(params, options, &[options.group])?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(ids(step, rank))?;
        losses.push(loss.to_scalar::<f32>()?.to_bits());
        let mut gradients = loss.backward()?;
        for (_, var) in &vars {
            let sum = sum_over(comm, &flat(gradients.get(var).unwrap()))?;
            gradients.insert(var, Tensor::from_vec(sum, var.dims(), &Device::Cpu)?);
        }
        adam.step(&gradients)?;
    }
    Ok((losses, vars.iter().map(|(name, var)| (name.to_string(), bits(&flat(var)))).collect()))
}

/// The sharded model, as a user writes it.
pub struct Sharded {
    pub weights: ShardedWeights<'static>,
    pub embed: ShardedModule,
    pub proj: ShardedModule,
    pub norm: ShardedModule,
    pub moe: ExpertParallelMoE,
    pub head: ShardedModule,
}

impl Sharded {
    pub fn new(chain: &Arc<Chain<Cpu>>, vb: VarBuilder<'static>) -> CandleResult<Self> {
        let weights = ShardedWeights::new(chain, vb);
        let embed = weights.pp("embed").embedding(VOCABULARY, H)?;
        let norm = weights.pp("norm").function(&[NewWeight::new("weight", &[H], Init::Const(1.0))], norm)?;
        let proj = weights.pp("proj").linear(H, H)?;
        let (layer, group) = (Layer::new(config(), 0)?, EpGroup::single(&config())?);
        let moe = ExpertParallelMoE::all_sharded(layer, group, chain, Payload::Plain, &weights.pp("moe"))?;
        let head = weights.pp("head").linear_no_bias(H, VOCABULARY)?;
        Ok(Self { weights, embed, proj, norm, moe, head })
    }

    pub fn model(&self) -> Model<'_> {
        Model { embed: &self.embed, proj: &self.proj, norm: &self.norm, moe: &self.moe, head: &self.head }
    }

    /// A variable by its weight's name.
    pub fn var(&self, name: &str) -> Option<Var> {
        let all = self.optimizer_params().ok()?;
        all.iter().find(|param| param.name() == name).map(|param| param.var().clone())
    }

    pub fn shards(&self) -> Vec<WeightVar> {
        self.weights.shards().into_iter().chain(self.moe.shards()).collect()
    }

    pub fn optimizer_params(&self) -> CandleResult<Vec<AdamWParam>> {
        Ok(self.weights.optimizer_params().into_iter().chain(self.moe.optimizer_params("moe")?).collect())
    }

    pub fn step(
        &self,
        of: (Tensor, Tensor),
        replicas: Option<&mut dyn Communicator<Cpu>>,
    ) -> CandleResult<(Tensor, GradStore)> {
        let chain = self.weights.chain();
        chain.begin(Phase::Forward)?;
        let loss = self.model().loss(of)?;
        chain.end()?;
        chain.begin(Phase::Backward)?;
        let mut gradients = loss.backward()?;
        chain.end()?;
        finish_sharded(chain, replicas, &self.shards(), &mut gradients, GradientType::AsSummed)?;
        Ok((loss, gradients))
    }
}

/// Place of one of the ranks: chains of `n`, beside each other as replicas.
pub struct Rank {
    pub w: usize,
    pub chain: Arc<Chain<Cpu>>,
    pub replicas: Option<Box<dyn Communicator<Cpu>>>,
    /// The chain's ranks, for an optimizer.
    pub beside: Box<dyn Communicator<Cpu>>,
    pub world: Box<dyn Communicator<Cpu>>,
}

pub fn ranks<R: Send>(
    n: usize,
    options: EtpOptions,
    run: impl Fn(Rank) -> Result<R, Failure> + Sync,
) -> Vec<Result<R, Failure>> {
    let chains = || mesh(&Cpu::new(), (WORLD, ""), |w| (w / n, w % n), MINUTE).into_iter();
    let replicas = mesh(&Cpu::new(), (WORLD, ""), |w| (w % n, w / n), MINUTE).into_iter();
    let world = mesh(&Cpu::new(), (WORLD, ""), |w| (0, w), MINUTE).into_iter();
    let comms = chains().zip(chains()).zip(chains()).zip(replicas).zip(world);
    thread::scope(|scope| {
        let threads = comms.enumerate().map(|(w, ((((gather, reduce), beside), replicas), world))| {
            let run = &run;
            scope.spawn(move || {
                let options = EtpOptions { replicas: WORLD / n, ..options };
                let chain = Arc::new(Chain::new(Cpu::poisoning(), Comms { gather, reduce }, options)?);
                let replicas = (n < WORLD).then_some(replicas);
                run(Rank { w, chain, replicas, beside, world })
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

pub const PAIRS: EtpOptions = EtpOptions {
    pad: 16,
    prefetch: true,
    ahead: 1,
    in_turn: false,
    reduction: Reduction::Pairwise,
    scale: moebius::etp::Scale::Sum,
    replicas: 1,
    seed: 0,
};

pub fn train_sharded(n: usize, options: EtpOptions, max_norm: Option<f64>) -> Vec<Trained> {
    let results = ranks(n, options, |rank| {
        let Rank { w, chain, mut replicas, beside, .. } = rank;
        let sharded = Sharded::new(&chain, shards_of(&chain)?)?;
        let options = adam_options(max_norm);
        let params = sharded.optimizer_params()?;
        let mut adam = AdamW::over_ranks(&Cpu::new(), beside, params, options, &[options.group])?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let replicas = replicas.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<Cpu>);
            let (loss, gradients) = sharded.step(ids(step, w), replicas)?;
            losses.push(loss.to_scalar::<f32>()?.to_bits());
            adam.step(&gradients)?;
        }
        let mut found = HashMap::new();
        for param in sharded.optimizer_params()? {
            let WeightVar { id, .. } =
                sharded.shards().into_iter().find(|of| of.var.id() == param.var().id()).ok_or("no id")?;
            found.insert(param.name().to_string(), bits(chain.whole(id)?.as_slice::<f32>()?));
        }
        Ok((losses, found))
    });
    results.into_iter().map(|r| r.unwrap_or_else(|e| panic!("{n} ranks a chain: {e}"))).collect()
}

pub fn shards_of(chain: &Chain<Cpu>) -> Result<VarBuilder<'static>, Failure> {
    let shards: Result<HashMap<_, _>, Failure> = whole()
        .into_iter()
        .map(|(name, t)| {
            let shard = shard(chain, &name, &t)?;
            Ok((name, shard))
        })
        .collect();
    Ok(builder(shards?))
}
