//! Sums of gradients over ranks, a bucket to a collective, behind a comparison of what is summed.

use crate::comm::refusal::{refuse_on_error, refuse_unless_entered};
use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::compare::gather_numbers;
use crate::error::{Error, Result};
use crate::etp::{ShardDevice, StreamPair};
use crate::fnv1a::fnv1a;
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
    /// Sizes and types in words, which all ranks compare first: sums of others would be mixed.
    pub(crate) described: fn(&P) -> String,
    pub(crate) bucket_bytes: usize,
}

/// Sums memory over the ranks, in place.
pub(crate) type AllReduce<'a, D> = dyn FnMut(TensorMut<'_, D>) -> Result<()> + 'a;

/// The type of a gradient, by a framework's number from 1 on; 0 for one that is absent.
pub(crate) type TypeNumber = u8;

const ABSENT: TypeNumber = 0;

/// The number of the type of a gradient that is there, by its place among a framework's.
pub(crate) fn number_of_type<T: PartialEq>(types: &[T; 4], of: &T, name: impl Fn(&T) -> String) -> Result<TypeNumber> {
    match types.iter().position(|dtype| dtype == of) {
        Some(number) => Ok(number as TypeNumber + 1),
        None => Err(Error::invalid(REDUCE_GRADIENTS, "gradient", "f16, bf16, f32 or f64", name(of))),
    }
}

/// The type of this number, among a framework's; none of a gradient that no rank has.
pub(crate) fn type_of_number<T: Copy>(types: &[T; 4], number: TypeNumber) -> Option<T> {
    types.get(usize::from(number).checked_sub(1)?).copied()
}

impl<P> GradientReduction<'_, P> {
    /// Runs `sum` for each bucket, which puts the bucket's gradients behind each other in memory of the framework's on
    /// `device`, has them summed, and takes the sums; it gets the type of each on the ranks that have it. This rank's are
    /// of the types `own`, which are compared before anything is summed. What fails here before that is told to the
    /// others, which are in the collective.
    ///
    /// # Errors
    /// On every rank, with all gradients as they were: other parameters or buckets on another rank; a gradient of which
    /// ranks have other types; what `own` failed with. In a capture, where nothing is compared, an absent gradient.
    pub(crate) fn run<D: ShardDevice>(
        self,
        comm: &mut dyn Communicator<D>,
        device: &D,
        own: Result<Vec<TypeNumber>>,
        mut sum: impl FnMut(&[P], &[TypeNumber], &mut AllReduce<'_, D>) -> Result<()>,
    ) -> Result<()> {
        if comm.size() == 1 {
            return Ok(());
        }
        let own = check_device(comm, device).and(own).and_then(|own| {
            match device.capture_number().is_some() && own.contains(&ABSENT) {
                true => Err(Error::not_capturable(REDUCE_GRADIENTS, "the sum of a gradient that is absent")),
                false => Ok(own),
            }
        });
        let mut types = refuse_on_error(comm, self.tag(0), own)?;
        // A capture repeats what ran before it.
        if device.capture_number().is_none() && !self.compare(comm, device, types_hash(&types))? {
            types = self.join_types(comm, device, &types)?;
        }
        self.sum_buckets(comm, device, |bucket, start, all_reduce| {
            sum(bucket, &types[start..start + bucket.len()], all_reduce)
        })
    }

    fn tag(&self, sequence: usize) -> Tag {
        Tag { layer: self.layer, op: Op::GradReduce, sequence: sequence as u64 }
    }

    /// Compares what is summed with all other ranks, and a hash of the gradients' types with it. Says whether that is the
    /// same on all, for which the host waits.
    fn compare<D: ShardDevice>(&self, comm: &mut dyn Communicator<D>, device: &D, types: u64) -> Result<bool> {
        let variables = variables_hash(self.params.iter().map(self.described));
        let bytes = self.bucket_bytes as u64;
        let streams = StreamPair::new(device, comm.device());
        let all = gather_numbers(&streams.transfer, comm, self.tag(0), &[variables, bytes, types])?;
        let all: &[[u64; 3]] = all.as_chunks().0;
        check_variables(REDUCE_GRADIENTS, variables, all.iter().map(|theirs| theirs[0]))?;
        if let Some((peer, theirs)) = all.iter().enumerate().find(|(_, theirs)| theirs[1] != bytes) {
            let expected = format!("{}, as on rank {peer}", theirs[1]);
            return Err(Error::invalid(REDUCE_GRADIENTS, "bucket_bytes", expected, bytes.to_string()));
        }
        Ok(all.iter().all(|theirs| theirs[2] == types))
    }

    /// The types of the gradients on the ranks that have them, of this rank's, which are not the same on all.
    fn join_types<D: ShardDevice>(
        &self,
        comm: &mut dyn Communicator<D>,
        device: &D,
        own: &[TypeNumber],
    ) -> Result<Vec<TypeNumber>> {
        let mut bytes = own.to_vec();
        bytes.resize(own.len().next_multiple_of(size_of::<u64>()), ABSENT);
        let numbers: Vec<u64> = bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number)).collect();
        let streams = StreamPair::new(device, comm.device());
        let all = gather_numbers(&streams.transfer, comm, self.tag(0), &numbers)?;
        let all: Vec<u8> = all.into_iter().flat_map(u64::to_le_bytes).collect();
        let join = |(at, param): (usize, &P)| {
            let of_ranks = all.iter().skip(at).step_by(bytes.len()).enumerate();
            let present: Vec<_> = of_ranks.filter(|(_, of)| **of != ABSENT).collect();
            let Some((rank, first)) = present.first() else { return Ok(ABSENT) };
            let (ranks, others) = (present.len(), present.iter().filter(|(_, of)| of != first).count());
            if others == 0 {
                return Ok(**first);
            }
            let name = format!("gradient of a variable of {}", (self.described)(param));
            let found = format!("another than rank {rank}'s on {others} of the {ranks} ranks that have it");
            Err(Error::invalid(REDUCE_GRADIENTS, name, "of the same type on all ranks", found))
        };
        self.params.iter().enumerate().map(join).collect()
    }

    /// Runs `sum` for each bucket, with the number of its first parameter.
    fn sum_buckets<D: ShardDevice>(
        &self,
        comm: &mut dyn Communicator<D>,
        device: &D,
        mut sum: impl FnMut(&[P], usize, &mut AllReduce<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let mut start = 0;
        for (number, bucket) in buckets(self.params, self.bucket_bytes, self.summand).into_iter().enumerate() {
            refuse_unless_entered(comm, self.tag(number), |entry| {
                sum(bucket, start, &mut |values| {
                    let streams = StreamPair::new(device, entry.device());
                    streams.run_on_transfer(|| entry.enter().all_reduce(self.tag(number), ReduceOp::Sum, values))
                })
            })?;
            start += bucket.len();
        }
        Ok(())
    }
}

fn types_hash(types: &[TypeNumber]) -> u64 {
    fnv1a(types)
}

/// Refuses a communicator whose work cannot be put in order with the device's, and a capture that does not know the device:
/// the host's wait for a comparison would end it.
fn check_device<D: ShardDevice>(comm: &dyn Communicator<D>, device: &D) -> Result<()> {
    let refused = |expected: &str, found: &str| Err(Error::invalid(REDUCE_GRADIENTS, "communicator", expected, found));
    match comm.device() {
        None if D::ENQUEUES => refused("one that tells its device (Communicator::device)", "one that does not"),
        Some(own) if !own.shares_memory_with(device) => refused("one of the parameters' GPU", "one of another"),
        _ => device.check_not_captured_elsewhere(REDUCE_GRADIENTS),
    }
}
