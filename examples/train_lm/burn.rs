//! A rank's training in burn, on its CPU back end or on its CUDA back end. Every module of a rank is made on
//! that rank's thread, so that ranks share no leaf, and there is one backward a step: more, burn's graph lock does not
//! allow between threads.

use std::collections::BTreeMap;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param as BurnParam, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use moebius::burn::{
    CoreDevice, DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, MoeBackend, NativeBackend, ReduceOptions,
    reduce_gradients,
};
use moebius::comm::Tag;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{EpGroup, Group};
use moebius::metrics::Load;

use crate::Failure;
use crate::corpus::Corpus;
use crate::device::Place;
use crate::lm::{Param, Settings, Step, VOCABULARY};
use crate::rank_results;
use crate::ranks::{self, Check, Peer, Report, TIMEOUT, Values, Worker, group_config, moe_config};

/// A decoder of pre-norm attention and expert layers over bytes, with learned positions. Parameters' paths are their
/// names.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: BurnParam<Tensor<B, 2>>,
    positions: BurnParam<Tensor<B, 2>>,
    layers: Vec<DecoderLayer<B>>,
    norm: BurnParam<Tensor<B, 1>>,
    head: BurnParam<Tensor<B, 2>>,
}

#[derive(Module, Debug)]
struct DecoderLayer<B: Backend> {
    attention_norm: BurnParam<Tensor<B, 1>>,
    qkv: BurnParam<Tensor<B, 2>>,
    out: BurnParam<Tensor<B, 2>>,
    moe_norm: BurnParam<Tensor<B, 1>>,
    moe: ExpertParallelMoE<B>,
}

/// Loss of some sequences, and how they were routed.
struct Loss<B: Backend> {
    /// Sum over positions of the cross-entropy of the next byte.
    sum: Tensor<B, 1>,
    /// Sum over layers of the auxiliary losses.
    aux: Tensor<B, 1>,
    load: Vec<moebius::Lazy<Load>>,
    /// Choices `[T, K]` by layer.
    ids: Vec<Tensor<B, 2, Int>>,
}

impl<B: MoeBackend> Model<B> {
    /// A model of zeros, but for what the layers start from.
    fn new(settings: &Settings, group: &DeviceGroup, device: &B::Device) -> Result<Self, Failure> {
        let h = settings.hidden;
        let matrix = |rows, columns| BurnParam::from_tensor(Tensor::zeros([rows, columns], device));
        let vector = || BurnParam::from_tensor(Tensor::zeros([h], device));
        let config = ExpertParallelMoEConfig::from(&moe_config(settings));
        let layer = |number| -> Result<_, Failure> {
            Ok(DecoderLayer {
                attention_norm: vector(),
                qkv: matrix(3 * h, h),
                out: matrix(h, h),
                moe_norm: vector(),
                moe: config.clone().with_number(Some(number as u32)).init_on(group, device)?,
            })
        };
        Ok(Self {
            embedding: matrix(VOCABULARY, h),
            positions: matrix(settings.context, h),
            layers: (0..settings.layers).map(layer).collect::<Result<_, _>>()?,
            norm: vector(),
            head: matrix(VOCABULARY, h),
        })
    }

    fn loss(&self, settings: &Settings, bytes: &[u8], rows: usize) -> Result<Loss<B>, Failure> {
        let (s, h, device) = (settings.context, settings.hidden, self.embedding.device());
        let ids: Vec<i32> = bytes.iter().map(|b| i32::from(*b)).collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, s + 1]), &device);
        let input = ids.clone().slice([0..rows, 0..s]).reshape([rows * s]);
        let next = ids.slice([0..rows, 1..s + 1]).reshape([rows * s, 1]);
        let x = self.embedding.val().select(0, input).reshape([rows, s, h]);
        let mut x = (x + self.positions.val().unsqueeze::<3>()).reshape([rows * s, h]);
        let (mut aux, mut load, mut ids) = (Tensor::zeros([1], &device), Vec::new(), Vec::new());
        for layer in &self.layers {
            x = x.clone() + layer.attention(settings, x, rows);
            let out = layer.moe.forward_full(norm(x.clone(), &layer.moe_norm), None)?;
            x = x + out.y;
            aux = aux + out.aux;
            load.push(out.load);
            ids.push(out.ids);
        }
        let logits = norm(x, &self.norm).matmul(self.head.val().transpose());
        let sum = log_softmax(logits, 1).gather(1, next).sum().neg();
        Ok(Loss { sum, aux, load, ids })
    }
}

impl<B: Backend> DecoderLayer<B> {
    fn attention(&self, settings: &Settings, x: Tensor<B, 2>, rows: usize) -> Tensor<B, 2> {
        let (s, h, heads) = (settings.context, settings.hidden, settings.heads);
        let qkv = norm(x, &self.attention_norm).matmul(self.qkv.val().transpose());
        let qkv = qkv.reshape([rows, s, 3, heads, h / heads]).permute([2, 0, 3, 1, 4]);
        let part = |i: usize| {
            qkv.clone().slice([i..i + 1, 0..rows, 0..heads, 0..s, 0..h / heads]).reshape([rows, heads, s, h / heads])
        };
        let scores = part(0).matmul(part(1).transpose()).mul_scalar(((h / heads) as f32).powf(-0.5));
        // True where it masks: above the diagonal.
        let above = Tensor::<B, 2, burn::tensor::Bool>::tril_mask([s, s], 0, &scores.device());
        let p = softmax(scores.mask_fill(above.unsqueeze::<4>().expand([rows, heads, s, s]), f32::NEG_INFINITY), 3);
        p.matmul(part(2)).swap_dims(1, 2).reshape([rows * s, h]).matmul(self.out.val().transpose())
    }
}

fn norm<B: Backend>(x: Tensor<B, 2>, weight: &BurnParam<Tensor<B, 1>>) -> Tensor<B, 2> {
    let mean = x.clone().powi_scalar(2).mean_dim(1);
    x / (mean + 1e-6).sqrt() * weight.val().unsqueeze::<2>()
}

/// Names of the parameters on the way through a module.
#[derive(Default)]
struct Path(Vec<String>);

impl Path {
    fn name(&self) -> String {
        self.0.join(".")
    }
}

/// Gives every parameter its first values.
struct Fill<'a> {
    path: Path,
    params: &'a [Param],
    rank: usize,
    ranks: usize,
    missing: Vec<String>,
}

impl<B: Backend> ModuleMapper<B> for Fill<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.0.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.0.pop();
    }
    fn map_float<const D: usize>(&mut self, param: BurnParam<Tensor<B, D>>) -> BurnParam<Tensor<B, D>> {
        let name = self.path.name();
        let Some(first) = self.params.iter().find(|p| p.name == name) else {
            self.missing.push(name);
            return param;
        };
        let (dims, values) = first.share(self.rank, self.ranks);
        let values = values.to_vec();
        param.map(|old| Tensor::from_data(TensorData::new(values, dims), &old.device()).require_grad())
    }
}

/// Copies weights and gradients for the twin.
struct Snapshot<'a> {
    path: Path,
    gradients: &'a GradientsParams,
    params: BTreeMap<String, Values>,
}

impl<A: AutodiffBackend> ModuleVisitor<A> for Snapshot<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.0.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.0.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &BurnParam<Tensor<A, D>>) {
        let flat = |t: Tensor<A::InnerBackend, D>| t.into_data().iter::<f32>().collect::<Vec<_>>();
        let gradient = self.gradients.get::<A::InnerBackend, D>(param.id).map(flat).unwrap_or_default();
        self.params.insert(self.path.name(), Values { weight: flat(param.val().inner()), gradient });
    }
}

/// A rank, on a back end.
pub struct Rank<Bk: MoeBackend + NativeBackend> {
    settings: Settings,
    group: DeviceGroup,
    /// Taken while the optimizer has it.
    model: Option<Model<Autodiff<Bk>>>,
    optimizer: OptimizerAdaptor<AdamW, Model<Autodiff<Bk>>, Autodiff<Bk>>,
}

impl<Bk: MoeBackend + NativeBackend> Rank<Bk> {
    /// Joins with its group, on the rank's thread.
    pub fn new(
        settings: &Settings,
        params: &[Param],
        (group, device): (DeviceGroup, &Bk::Device),
    ) -> Result<Self, Failure> {
        let (rank, ranks) = (group.rank(), group.ranks());
        let mut fill = Fill { path: Path::default(), params, rank, ranks, missing: Vec::new() };
        let model = Model::<Autodiff<Bk>>::new(settings, &group, device)?.map(&mut fill);
        if !fill.missing.is_empty() {
            return Err(format!("no first values for {:?}", fill.missing).into());
        }
        // As candle's AdamW has them.
        let optimizer = AdamWConfig::new().with_weight_decay(0.01).with_epsilon(1e-8).init();
        Ok(Self { settings: settings.clone(), group, model: Some(model), optimizer })
    }
}

impl<Bk: MoeBackend + NativeBackend> Worker for Rank<Bk> {
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let model = self.model.take().ok_or("an earlier step failed")?;
        let Loss { sum, aux, load, ids } = model.loss(&self.settings, bytes, rows)?;
        let mean = sum.div_scalar((self.settings.batch * self.settings.context) as f32);
        let loss = mean.clone().inner();
        // burn's backward returns nothing: a collective's error unwinds, and ends this rank's thread.
        let mut gradients = GradientsParams::from_grads((mean + aux).backward(), &model);
        let own: Vec<ParamId> = model.layers.iter().flat_map(|layer| layer.moe.expert_ids()).collect();
        reduce_gradients(&self.group, &model, ReduceOptions::except(&own), &mut gradients)?;
        let check = check.then(|| {
            let mut snapshot = Snapshot { path: Path::default(), gradients: &gradients, params: BTreeMap::new() };
            model.visit(&mut snapshot);
            Check {
                params: snapshot.params,
                ids: ids.into_iter().map(rows_of).collect(),
                tokens: vec![Vec::new(); self.settings.layers],
            }
        });
        self.model = Some(self.optimizer.step(self.settings.learning_rate_at(step), model, gradients));
        // Read last: on a GPU the host has nothing left to enqueue.
        let loss = loss.into_data().iter::<f64>().sum();
        let load = load.iter().map(|load| Ok(load.get()?.tokens_per_expert.clone())).collect::<moebius::Result<_>>()?;
        Ok(Report { loss, load, norm: None, scale: None, cost: None, check })
    }

    fn save(&mut self, _: &std::path::Path, _: usize) -> Result<(), Failure> {
        Err("the state of a run in burn is not saved".into())
    }
}

fn rows_of<B: Backend>(ids: Tensor<B, 2, Int>) -> Vec<Vec<u32>> {
    let k = ids.dims()[1];
    let flat: Vec<u32> = ids.into_data().iter::<i64>().map(|id| id as u32).collect();
    flat.chunks(k).map(<[u32]>::to_vec).collect()
}

impl<Bk: NativeBackend> Peer for Rank<Bk> {
    fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let group = self.group.on::<CoreDevice<Bk>>().ok_or("a group of another device")?;
        let mut group = group.lock();
        let device = group.device().clone();
        rank_results::gather_over(&device, group.dispatcher().communicator(), tag, own)
    }
}

/// Trains, with `on_step` after each step.
pub fn train(
    settings: &Settings,
    (place, check_every): (Place, usize),
    corpus: &Corpus,
    on_step: impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match place {
        Place::Cpu => {
            let comms = ThreadWorld::create(settings.mesh.ranks, TIMEOUT);
            let make = |params: &[_], comm, _: usize| {
                let group = EpGroup::new(Group::new(Cpu::new(), Box::new(comm), group_config(settings))?);
                Rank::<Flex>::new(settings, params, (group.into(), &Default::default()))
            };
            ranks::train(settings, (comms, check_every), corpus, make, on_step)
        }
        #[cfg(feature = "burn-cuda")]
        Place::Cuda => {
            let endpoints = gpus::endpoints(settings)?;
            let make = |params: &[_], (device, group): gpus::Endpoint, _: usize| {
                Rank::<gpus::Gpu>::new(settings, params, (group, &device))
            };
            ranks::train(settings, (endpoints, check_every), corpus, make, on_step)
        }
        #[cfg(not(feature = "burn-cuda"))]
        Place::Cuda => Err("this build has no burn on CUDA".into()),
    }
}

#[cfg(feature = "burn-cuda")]
mod gpus {
    use burn::backend::cuda::CudaDevice;
    use moebius::burn::DeviceGroup;

    use crate::Failure;
    use crate::lm::Settings;
    use crate::ranks::group_config;

    pub type Gpu = burn::backend::Cuda<f32, i32>;
    pub type Endpoint = (CudaDevice, DeviceGroup);

    /// Each rank's GPU and group. The groups are made first: burn panics where there is no GPU.
    pub fn endpoints(settings: &Settings) -> Result<Vec<Endpoint>, Failure> {
        if settings.mesh.ranks == 1 {
            let device = CudaDevice::new(0);
            let group = DeviceGroup::single::<Gpu>(group_config(settings), &device)?;
            return Ok(vec![(device, group)]);
        }
        over_nccl(settings)
    }

    #[cfg(feature = "nccl")]
    fn over_nccl(settings: &Settings) -> Result<Vec<Endpoint>, Failure> {
        use moebius::nccl::{NcclComm, NcclLibrary};
        let devices = || (0..settings.mesh.ranks).map(CudaDevice::new);
        let gpus = devices().map(|device| moebius::burn::cuda(&device)).collect::<moebius::Result<Vec<_>>>()?;
        let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, crate::ranks::TIMEOUT)?;
        // A group is made by all its ranks at once.
        std::thread::scope(|scope| {
            let make = |(device, comm)| scope.spawn(move || Ok((device, group(settings, comm)?)));
            let threads: Vec<_> = devices().zip(comms).map(make).collect();
            let joined = |thread: std::thread::ScopedJoinHandle<'_, Result<Endpoint, Failure>>| {
                thread.join().unwrap_or_else(|_| Err("a rank's thread has ended".into()))
            };
            threads.into_iter().map(joined).collect()
        })
    }

    #[cfg(not(feature = "nccl"))]
    fn over_nccl(_: &Settings) -> Result<Vec<Endpoint>, Failure> {
        Err("several GPUs want a build with --features nccl".into())
    }

    #[cfg(feature = "nccl")]
    fn group(settings: &Settings, comm: moebius::nccl::NcclComm) -> Result<DeviceGroup, Failure> {
        let cuda = comm.cuda().clone();
        Ok(moebius::ep::Group::new(cuda, Box::new(comm), group_config(settings))?.into())
    }

    /// This process, as one rank of several, on the GPU of its number on its host.
    #[cfg(feature = "nccl")]
    pub struct Process {
        identity: moebius::ranks::Identity,
        comm: moebius::nccl::NcclComm,
    }

    #[cfg(feature = "nccl")]
    impl Process {
        /// Joins the ranks that the launcher's environment tells of.
        pub fn join() -> Result<Self, Failure> {
            use moebius::nccl::{NcclComm, NcclLibrary};
            use moebius::ranks::{Bootstrap, Identity};
            let identity = Identity::from_env()?;
            let cuda = moebius::burn::cuda(&CudaDevice::new(identity.local_rank))?;
            let job = Bootstrap::from_env(crate::ranks::TIMEOUT)?;
            let comm = NcclComm::join(&NcclLibrary::open()?, &job, &cuda)?;
            Ok(Self { identity, comm })
        }

        pub fn rank(&self) -> usize {
            self.identity.rank
        }

        pub fn world(&self) -> usize {
            self.identity.world
        }

        /// The rank's worker.
        pub fn worker(self, settings: &Settings, params: &[crate::lm::Param]) -> Result<super::Rank<Gpu>, Failure> {
            let device = CudaDevice::new(self.identity.local_rank);
            super::Rank::new(settings, params, (group(settings, self.comm)?, &device))
        }
    }
}

#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
pub use gpus::Process;
