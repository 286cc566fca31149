//! One rank of several that a launcher has started as processes, one GPU each.

use std::sync::mpsc::Sender;

use moebius::ranks::Identity;

use crate::results::Outcome;
use crate::{AnyError, Job, Piece};

/// Runs this rank's part of the job; rank 0 has what came of all of it.
///
/// # Errors
/// A GPU that cannot be used; ranks that do not find each other in time; the job's. The other ranks are told.
#[cfg(feature = "nccl")]
pub fn run(job: &Job<'_>, me: &Identity, sender: Sender<Piece>) -> Result<Option<Outcome>, AnyError> {
    let member = join(job, me)?;
    let cuda = member.device.clone();
    let (outcome, mut between) = job.rank(member, sender)?;
    let outcomes = crate::results::exchange(&cuda, &mut *between, &outcome)?;
    if me.rank > 0 {
        return Ok(None);
    }
    crate::results::merge(outcomes.into_iter().map(Ok).collect(), job.requests.len()).map(Some)
}

/// As above.
///
/// # Errors
/// Always: this build has no NCCL.
#[cfg(not(feature = "nccl"))]
pub fn run(_: &Job<'_>, _: &Identity, _: Sender<Piece>) -> Result<Option<Outcome>, AnyError> {
    Err(crate::ranks::NO_NCCL.into())
}

#[cfg(feature = "nccl")]
fn join(job: &Job<'_>, me: &Identity) -> Result<crate::Member<moebius::cuda::Cuda>, AnyError> {
    use moebius::candle::{DeviceGroup, EpGroup};
    use moebius::comm::{Op, Tag};
    use moebius::ep::Group;

    let (device, mut experts) = crate::ranks::join(me, std::time::Duration::from_secs(job.options.timeout))?;
    let cuda = experts.cuda().clone();
    let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
    let between = experts.split(tag, Some(0), me.rank)?.ok_or("a rank without a part of the world")?;
    let group = Group::new(cuda.clone(), Box::new(experts), job.group_config(me.world)?)?;
    let group = DeviceGroup::new(EpGroup::new(group), &device)?;
    Ok(crate::Member { rank: me.rank, ranks: me.world, group, device: cuda, between: Box::new(between) })
}
