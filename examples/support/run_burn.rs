//! One step of `moebius::burn::ExpertParallelMoE`.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moebius::burn::{DeviceGroup, EpGroup, ExpertParallelMoE, MoeBackend, NativeBackend};
use moebius::checkpoint::Block;
use moebius::cpu::ThreadComm;

use super::dense::Params;
use super::job::{AnyError, Clock, Job, Outcome, RankOutcome, enter, on_threads, share};

/// Runs a job through burn's autograd.
///
/// # Errors
/// The first rank's error.
pub fn run(job: &Job) -> Result<Outcome, AnyError> {
    on_threads(job, one_rank)
}

/// Runs a job of one rank on the first GPU.
///
/// # Errors
/// Several ranks; no GPU; the rank's error.
#[cfg(feature = "burn-cuda")]
pub fn run_on_gpu(job: &Job) -> Result<Outcome, AnyError> {
    use moebius::ep::GroupConfig;

    type Gpu = burn::backend::Cuda<f32, i32>;
    if job.split.len() != 1 {
        return Err(format!("--device cuda: one GPU is one rank; give --ranks 1 instead of {}", job.split.len()).into());
    }
    let mut clock = Clock::start();
    let block = job.load(0, 1)?;
    clock.lap("load");
    let config = GroupConfig::new(block.config.router.num_experts, job.split[0].max(1));
    let group = DeviceGroup::single::<Gpu>(config, &Default::default())?;
    super::job::join(vec![step::<Gpu>(job, 0, (block, group), clock)?])
}

fn one_rank(job: &Job, rank: usize, comm: ThreadComm) -> Result<RankOutcome, AnyError> {
    let mut clock = Clock::start();
    let (block, group) = enter(job, rank, comm, &mut clock)?;
    step::<Flex>(job, rank, (block, EpGroup::new(group).into()), clock)
}

fn step<Bk: MoeBackend + NativeBackend>(
    job: &Job,
    rank: usize,
    (block, group): (Block, DeviceGroup),
    mut clock: Clock,
) -> Result<RankOutcome, AnyError> {
    let device = Default::default();
    let moe = ExpertParallelMoE::<Autodiff<Bk>>::from_block(block, job.layer as u32, group, &device)?;
    let rows = |t| from_candle::<Autodiff<Bk>>(&share(t, &job.split, rank, candle_core::DType::F64)?, job.dtype);
    let (x, dy) = (rows(&job.x)?.require_grad(), rows(&job.dy)?);
    clock.lap("build");
    let sync = || Bk::sync(&device).map_err(|e| format!("{e:?}"));
    let out = moe.forward_full(x.clone(), None)?;
    sync()?;
    clock.lap("forward");
    let gradients = (out.y.clone() * dy).sum().backward();
    sync()?;
    clock.lap("backward");
    let mut collect = Collect::<Autodiff<Bk>> { gradients: &gradients, path: Vec::new(), found: Ok(Params::new()) };
    moe.visit(&mut collect);
    let ids = out.ids.into_data().convert::<i64>().into_vec::<i64>().map_err(|e| format!("{e:?}"))?;
    let top_k = moe.layer().config().router.top_k;
    Ok(RankOutcome {
        y: to_candle(out.y.inner())?,
        dx: to_candle(x.grad(&gradients).ok_or("x has no gradient")?)?,
        grads: collect.found?,
        ids: ids.chunks(top_k).map(|row| row.iter().map(|&id| id as usize).collect()).collect(),
        tokens_per_expert: out.load.get()?.tokens_per_expert.clone(),
        times: clock.laps,
    })
}

/// Gradients of a module's parameters by path, zeros where there is none.
struct Collect<'a, A: AutodiffBackend> {
    gradients: &'a A::Gradients,
    path: Vec<String>,
    found: Result<Params, AnyError>,
}

impl<A: AutodiffBackend> ModuleVisitor<A> for Collect<'_, A> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let gradient = param.grad(self.gradients).unwrap_or_else(|| param.val().inner().zeros_like());
        match (&mut self.found, to_candle(gradient)) {
            (Ok(found), Ok(gradient)) => {
                found.insert(self.path.join("."), gradient);
            }
            (found @ Ok(_), Err(e)) => *found = Err(e),
            (Err(_), _) => {}
        }
    }
}

/// The examples compare results as candle tensors in F64.
fn to_candle<Bk: Backend, const D: usize>(t: Tensor<Bk, D>) -> Result<candle_core::Tensor, AnyError> {
    let dims = t.dims();
    let values = t.into_data().convert::<f64>().into_vec::<f64>().map_err(|e| format!("{e:?}"))?;
    Ok(candle_core::Tensor::from_vec(values, &dims[..], &candle_core::Device::Cpu)?)
}

fn from_candle<Bk: Backend>(t: &candle_core::Tensor, dtype: moebius::DType) -> Result<Tensor<Bk, 2>, AnyError> {
    let (rows, columns) = t.dims2()?;
    let data = TensorData::new(t.flatten_all()?.to_vec1::<f64>()?, [rows, columns]);
    let dtype = match dtype {
        moebius::DType::F64 => DType::F64,
        moebius::DType::F32 => DType::F32,
        moebius::DType::F16 => DType::F16,
        moebius::DType::BF16 => DType::BF16,
        other => return Err(format!("{other} is no floating type").into()),
    };
    Ok(Tensor::from_data(data.convert_dtype(dtype), (&Default::default(), dtype)))
}
