//! One step of `moebius::candle::ExpertParallelMoE`.

use candle_core::{DType, Tensor, Var};
use moebius::candle::{EpGroup, ExpertParallelMoE};
use moebius::comm::ThreadComm;
use moebius::layer::Mode;

use super::job::{AnyError, Clock, Job, Outcome, RankOutcome, candle_dtype, enter, on_threads, share};

/// Runs a job through candle's autograd.
///
/// # Errors
/// The first rank's error.
pub fn run(job: &Job) -> Result<Outcome, AnyError> {
    on_threads(job, one_rank)
}

fn one_rank(job: &Job, rank: usize, comm: ThreadComm) -> Result<RankOutcome, AnyError> {
    let mut clock = Clock::start();
    let (block, group) = enter(job, rank, comm, &mut clock)?;
    let moe = ExpertParallelMoE::from_block(block, job.layer as u32, EpGroup::new(group), true)?;
    let dtype = candle_dtype(job.dtype)?;
    let (x, dy) =
        (Var::from_tensor(&share(&job.x, &job.split, rank, dtype)?)?, share(&job.dy, &job.split, rank, dtype)?);
    clock.lap("build");
    let out = moe.forward_full(&x, Mode::default())?;
    clock.lap("forward");
    let grads = (&out.y * &dy)?.sum_all()?.backward()?;
    clock.lap("backward");
    let gradient = |t: &Tensor| -> candle_core::Result<Tensor> {
        match grads.get(t) {
            Some(g) => g.to_dtype(DType::F64),
            None => t.zeros_like()?.to_dtype(DType::F64),
        }
    };
    let ids: Vec<Vec<i64>> = out.ids.to_dtype(DType::I64)?.to_vec2()?;
    Ok(RankOutcome {
        y: out.y.detach().to_dtype(DType::F64)?,
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
