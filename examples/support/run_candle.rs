//! One step of `moebius::candle::ExpertParallelMoE`.

use candle_core::{DType, Device, Tensor, Var};
use moebius::candle::{DeviceGroup, ExpertParallelMoE};
use moebius::checkpoint::{Block, Checkpoint, LoadOptions};
use moebius::ep::GroupConfig;
use moebius::layer::Mode;

use super::device::{Seat, seats};
use super::job::{AnyError, Clock, Job, Outcome, RankOutcome, candle_dtype, join, on_ranks, share};

/// Runs a job through candle's autograd, ranks as threads on the CPU.
///
/// # Errors
/// The first rank's error.
pub fn run(job: &Job) -> Result<Outcome, AnyError> {
    run_on(job, &vec![Device::Cpu; job.split.len()])
}

/// Runs a job on devices of candle's, one a rank.
///
/// # Errors
/// The first rank's error; devices that cannot reach each other.
pub fn run_on(job: &Job, devices: &[Device]) -> Result<Outcome, AnyError> {
    join(on_ranks(seats(devices, job.timeout)?, |rank, seat| one_rank(job, rank, seat))?)
}

fn one_rank(job: &Job, rank: usize, seat: Seat) -> Result<RankOutcome, AnyError> {
    let mut clock = Clock::start();
    let options = LoadOptions { rank, ranks: job.split.len(), dtype: Some(job.dtype) };
    let block = Checkpoint::open(&job.dir)?.load_block(job.layer, options)?;
    clock.lap("load");
    let most = job.split.iter().copied().max().unwrap_or(0);
    let group = seat.join(GroupConfig::new(block.config.router.num_experts, most))?;
    step(job, rank, (block, group), clock)
}

fn step(
    job: &Job,
    rank: usize,
    (block, group): (Block, DeviceGroup),
    mut clock: Clock,
) -> Result<RankOutcome, AnyError> {
    let moe = ExpertParallelMoE::from_block(block, job.layer as u32, &group, true)?;
    let dtype = candle_dtype(job.dtype)?;
    let own = |t: &Tensor| share(t, &job.split, rank, dtype)?.to_device(group.device());
    let (x, dy) = (Var::from_tensor(&own(&job.x)?)?, own(&job.dy)?);
    clock.lap("build");
    let out = moe.forward_full(&x, Mode::default())?;
    group.device().synchronize()?;
    clock.lap("forward");
    let grads = (&out.y * &dy)?.sum_all()?.backward()?;
    group.device().synchronize()?;
    clock.lap("backward");
    let host = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
    let gradient = |t: &Tensor| -> candle_core::Result<Tensor> {
        match grads.get(t) {
            Some(g) => host(g),
            None => host(t)?.zeros_like(),
        }
    };
    let ids: Vec<Vec<i64>> = out.ids.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec2()?;
    Ok(RankOutcome {
        y: host(&out.y.detach())?,
        dx: gradient(&x)?,
        grads: moe
            .params()
            .into_iter()
            .map(|(n, t)| Ok((n.to_string(), gradient(t)?)))
            .collect::<candle_core::Result<_>>()?,
        ids: ids.into_iter().map(|row| row.into_iter().map(|id| id as usize).collect()).collect(),
        tokens_per_expert: out.load.get()?.tokens_per_expert.clone(),
        times: clock.laps,
    })
}
