//! One step of `moebius::candle::ExpertParallelMoE`.

use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, Parameters};
use moebius::checkpoint::Block;
use moebius::comm::{Op, Tag};
use moebius::ep::GroupConfig;

use super::device::{Endpoint, endpoints};
use super::job::{AnyError, Clock, Job, Outcome, RankOutcome, candle_dtype, join, on_ranks, share};
use super::processes::Process;
use super::rank_results::{RankResults, gather};

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
    join(on_ranks(endpoints(devices, job.timeout)?, |rank, endpoint| one_rank(job, rank, endpoint))?)
}

/// Runs this process's part of a job; the outcome of all is rank 0's.
///
/// # Errors
/// This rank's error, or that another has left.
pub fn run_process(job: &Job, process: Process) -> Result<Option<Outcome>, AnyError> {
    let Process { rank, endpoint, .. } = process;
    let (own, group) = in_group(job, rank, endpoint)?;
    let tag = Tag { layer: job.layer as u32, op: Op::User, sequence: 0 };
    let gathered = gather(&group, tag, &packed(&own)?.pack()?)?;
    if rank > 0 {
        return Ok(None);
    }
    let parts = gathered.iter().map(|bytes| unpacked(&RankResults::unpack(bytes)?, &own.times));
    join(parts.collect::<Result<_, _>>()?).map(Some)
}

fn packed(own: &RankOutcome) -> Result<RankResults, AnyError> {
    let mut results = RankResults::default();
    let named = own.grads.iter().map(|(name, t)| (format!("gradient.{name}"), t));
    for (name, t) in [("y".to_string(), &own.y), ("dx".to_string(), &own.dx)].into_iter().chain(named) {
        results.put(name, t.dims(), t.flatten_all()?.to_vec1::<f64>()?);
    }
    let dims = [own.ids.len(), own.ids.first().map_or(0, Vec::len)];
    results.put("ids", &dims, own.ids.iter().flatten().map(|id| *id as f64));
    results.put("load", &[own.tokens_per_expert.len()], own.tokens_per_expert.iter().map(|n| *n as f64));
    results.put("times", &[own.times.len()], own.times.iter().map(|(_, time)| time.as_secs_f64()));
    Ok(results)
}

/// A rank's outcome; its stages are `stages`' own.
fn unpacked(results: &RankResults, stages: &[(&'static str, Duration)]) -> Result<RankOutcome, AnyError> {
    let tensor = |(dims, values): (&[usize], &[f64])| Tensor::from_slice(values, dims, &Device::Cpu);
    let whole = |values: &[f64]| values.iter().map(|n| *n as usize).collect::<Vec<usize>>();
    let grads =
        results.starting("gradient.").map(|(name, dims, values)| Ok((name.to_string(), tensor((dims, values))?)));
    let (dims, ids) = results.get("ids")?;
    let times =
        stages.iter().zip(results.get("times")?.1).map(|((name, _), time)| (*name, Duration::from_secs_f64(*time)));
    Ok(RankOutcome {
        y: tensor(results.get("y")?)?,
        dx: tensor(results.get("dx")?)?,
        grads: grads.collect::<candle_core::Result<_>>()?,
        ids: ids.chunks(dims[1].max(1)).map(whole).collect(),
        tokens_per_expert: whole(results.get("load")?.1),
        times: times.collect(),
    })
}

fn one_rank(job: &Job, rank: usize, endpoint: Endpoint) -> Result<RankOutcome, AnyError> {
    Ok(in_group(job, rank, endpoint)?.0)
}

fn in_group(job: &Job, rank: usize, endpoint: Endpoint) -> Result<(RankOutcome, DeviceGroup), AnyError> {
    let mut clock = Clock::start();
    let block = job.load(rank, job.split.len())?;
    clock.lap("load");
    let most = job.split.iter().copied().max().unwrap_or(0);
    let group = endpoint.join(GroupConfig::new(block.config.router.num_experts, most))?;
    Ok((step(job, rank, (block, group.clone()), clock)?, group))
}

fn step(
    job: &Job,
    rank: usize,
    (block, group): (Block, DeviceGroup),
    mut clock: Clock,
) -> Result<RankOutcome, AnyError> {
    let moe = ExpertParallelMoE::from_block(block, job.layer as u32, &group, Parameters::Trainable)?;
    let dtype = candle_dtype(job.dtype)?;
    let own = |t: &Tensor| share(t, &job.split, rank, dtype)?.to_device(group.device());
    let (x, dy) = (Var::from_tensor(&own(&job.x)?)?, own(&job.dy)?);
    clock.lap("build");
    let out = moe.forward_full(&x, None)?;
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
