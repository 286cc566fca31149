//! Sums of gradients over ranks, a bucket to a collective.

use crate::comm::refusal::{refuse_on_error, refuse_unless_entered};
use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::compare::gather_numbers;
use crate::error::{Error, Result};
use crate::etp::{ShardDevice, StreamPair};
use crate::tensor::TensorMut;

use super::buckets::{Summand, buckets, check_variables, variables_hash};

/// The name of the call in errors.
pub(crate) const REDUCE_GRADIENTS: &str = "reduce_gradients";

/// Parameters `P` of a framework whose gradients are summed.
pub(crate) struct GradientReduction<'a, P> {
    /// The tag's.
    pub(crate) layer: u32,
    pub(crate) params: &'a [P],
    pub(crate) summand: fn(&P) -> Summand,
    /// Sizes and types in words, which all ranks compare first: sums of others would be mixed. `None` for a layer's own
    /// parameters, which are the same on all ranks.
    pub(crate) described: Option<fn(&P) -> String>,
    pub(crate) bucket_bytes: usize,
}

/// Sums memory over the ranks, in place.
pub(crate) type AllReduce<'a, D> = dyn FnMut(TensorMut<'_, D>) -> Result<()> + 'a;

impl<P> GradientReduction<'_, P> {
    /// Runs `sum` for each bucket, which puts the bucket's gradients behind each other in memory of the framework's on
    /// `device`, has them summed, and takes the sums. What fails on this rank before that is told to the others, which are
    /// in the collective.
    pub(crate) fn run<D: ShardDevice>(
        self,
        comm: &mut dyn Communicator<D>,
        device: &D,
        mut sum: impl FnMut(&[P], &mut AllReduce<'_, D>) -> Result<()>,
    ) -> Result<()> {
        if comm.size() == 1 {
            return Ok(());
        }
        let tag = |sequence: usize| Tag { layer: self.layer, op: Op::GradReduce, sequence: sequence as u64 };
        let checked = check_device(comm, device);
        refuse_on_error(comm, tag(0), checked)?;
        // A capture repeats what ran before it.
        if let (Some(described), None) = (self.described, device.capture_number()) {
            let own = variables_hash(self.params.iter().map(described));
            let streams = StreamPair::new(device, comm.device());
            let all = gather_numbers(&streams.transfer, comm, tag(0), &[own])?;
            check_variables(REDUCE_GRADIENTS, own, all)?;
        }
        for (number, bucket) in buckets(self.params, self.bucket_bytes, self.summand).into_iter().enumerate() {
            refuse_unless_entered(comm, tag(number), |entry| {
                sum(bucket, &mut |values| {
                    let streams = StreamPair::new(device, entry.device());
                    streams.run_on_transfer(|| entry.enter().all_reduce(tag(number), ReduceOp::Sum, values))
                })
            })?;
        }
        Ok(())
    }
}

/// Refuses a communicator whose work cannot be put in order with the device's.
fn check_device<D: ShardDevice>(comm: &dyn Communicator<D>, device: &D) -> Result<()> {
    let refused = |expected: &str, found: &str| Err(Error::invalid(REDUCE_GRADIENTS, "communicator", expected, found));
    match comm.device() {
        None if D::ENQUEUES => refused("one that tells its device (Communicator::device)", "one that does not"),
        Some(own) if !own.shares_memory_with(device) => refused("one of the parameters' GPU", "one of another"),
        _ => Ok(()),
    }
}
