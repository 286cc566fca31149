//! Sums of a step's gradients over ranks, those of layers begun while backward still runs. Every rank begins the same
//! sums in the same order.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::error::{Error, Result};
use crate::etp::ShardDevice;
use crate::tensor::Tensor;

use super::buckets::{NO_LAYER, Summand, buckets};
use super::gradient_sums::{GradientSum, GradientSums, PendingSum, SumAgreement, SumDescription};

/// A parameter of a framework whose gradient is summed.
pub(crate) trait ReducedParam: Clone {
    /// The same for all values of one parameter, and for no other.
    type Key: Eq + Hash;

    fn key(&self) -> Self::Key;

    /// What its sum takes.
    fn summand(&self) -> Summand;
}

/// A framework's gradients, summed over a step's microbatches.
pub(crate) trait StepGradients<D: ShardDevice> {
    type Param: ReducedParam;
    /// A parameter's sum, as the framework holds it.
    type Sum;

    /// A bucket's gradients one behind the other, of the accumulator type, in memory of the device: what is
    /// summed.
    fn flat(&self, device: &D, bucket: &[Self::Param]) -> Result<Tensor<D>>;

    /// A bucket's sums by parameter; `None` for one that no rank has a gradient of.
    fn split(&self, device: &D, bucket: &[Self::Param], sums: Tensor<D>) -> Result<Vec<Option<Self::Sum>>>;

    /// Puts a sum in its gradients' place.
    fn set(&mut self, param: &Self::Param, sum: Self::Sum);

    /// Forgets all gradients: some are sums, the others not.
    fn reset(&mut self);
}

/// Parameters whose sum has begun.
#[derive(Debug)]
struct PendingBucket<D: ShardDevice, P> {
    bucket: Vec<P>,
    sum: PendingSum<D>,
}

impl<D: ShardDevice, P: Clone> PendingBucket<D, P> {
    /// Begins the sum of a bucket's gradients.
    fn begin(sums: &GradientSums<D>, bucket: &[P], sum: GradientSum<D>) -> Self {
        Self { bucket: bucket.to_vec(), sum: sums.begin(sum) }
    }
}

/// Sums that have begun beside a backward.
#[derive(Debug)]
pub(crate) struct PendingBuckets<D: ShardDevice, P> {
    /// Of what all ranks of the group hold.
    replicated: Vec<PendingBucket<D, P>>,
    /// Of experts, over the replicas.
    experts: Vec<PendingBucket<D, P>>,
}

impl<D: ShardDevice, P> Default for PendingBuckets<D, P> {
    fn default() -> Self {
        Self { replicated: Vec::new(), experts: Vec::new() }
    }
}

impl<D: ShardDevice, P> PendingBuckets<D, P> {
    fn len(&self) -> usize {
        self.replicated.len() + self.experts.len()
    }

    /// Their parameters.
    #[cfg(feature = "burn")]
    pub(crate) fn params(&self) -> impl Iterator<Item = &P> {
        params(&self.replicated).chain(self.experts())
    }

    /// The experts among them.
    pub(crate) fn experts(&self) -> impl Iterator<Item = &P> {
        params(&self.experts)
    }
}

fn params<D: ShardDevice, P>(begun: &[PendingBucket<D, P>]) -> impl Iterator<Item = &P> {
    begun.iter().flat_map(|begun| &begun.bucket)
}

fn tag(layer: u32, number: usize) -> Tag {
    Tag { layer, op: Op::GradReduce, sequence: number as u64 }
}

/// Compares what a reduction sums with all other ranks': the microbatches, and, where they are the same on all ranks, the
/// calls of layers, by which sums may begin beside backward. Says whether these are.
///
/// # Errors
/// On every rank: what differs from another rank's, where each finds so by itself, and none is told; a communicator's,
/// behind which all ranks have met.
pub(crate) fn agree<D: ShardDevice>(sums: &GradientSums<D>, own: SumDescription) -> Result<bool> {
    match sums.agree(tag(NO_LAYER, 0), own) {
        Ok(SumAgreement::Same { same_calls }) => Ok(same_calls),
        Ok(SumAgreement::Differs(error)) => Err(error),
        Err(error) => Err(fail(sums, error)),
    }
}

/// Ends a reduction that has failed, on every rank; gives its error.
pub(crate) fn fail<D: ShardDevice>(sums: &GradientSums<D>, error: Error) -> Error {
    // It is the one to report, whatever becomes of the meeting.
    let _ = sums.recover(&error.to_string());
    error
}

/// The error for a variable, of these dimensions, whose sum has begun before all of its gradient was there.
pub(crate) fn summed_in_part(call: &'static str, dims: &[usize], late: &str) -> Error {
    let expected = format!("one that only layers use, or that `{late}` names");
    Error::invalid(call, "variable", expected, format!("one of {dims:?} that another operation uses"))
}

/// Sums that begin beside a backward, each as soon as the layers' calls have made its gradients whole.
#[derive(Debug)]
pub(crate) struct EarlySums<D: ShardDevice, P: ReducedParam> {
    sums: Arc<GradientSums<D>>,
    /// Calls of layers that are still to run, by the parameter that they use, where its sum begins beside backward.
    remaining: HashMap<P::Key, usize>,
    begun: PendingBuckets<D, P>,
    bucket_bytes: usize,
}

/// Whose gradients a sum takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SumOf {
    /// What all ranks of the group hold, a layer's.
    Replicated,
    /// A layer's experts, over the replicas.
    Experts,
}

impl<D: ShardDevice, P: ReducedParam> EarlySums<D, P> {
    pub(crate) fn new(sums: &Arc<GradientSums<D>>, remaining: HashMap<P::Key, usize>, bucket_bytes: usize) -> Self {
        Self { sums: Arc::clone(sums), remaining, begun: PendingBuckets::default(), bucket_bytes }
    }

    /// Whether a parameter's sum begins beside backward.
    #[cfg(feature = "candle")]
    pub(crate) fn has(&self, param: &P::Key) -> bool {
        self.remaining.contains_key(param)
    }

    /// A call of a layer has given its part of such a parameter's gradient. Says whether it was the last.
    pub(crate) fn count_call(&mut self, param: &P::Key) -> bool {
        let Some(remaining) = self.remaining.get_mut(param) else { return false };
        *remaining = remaining.saturating_sub(1);
        *remaining == 0
    }

    /// Begins the sums of a layer's parameters, whose gradients `flat` gives, a bucket at a time.
    pub(crate) fn begin(
        &mut self,
        layer: u32,
        of: SumOf,
        params: &[P],
        mut flat: impl FnMut(&D, &[P]) -> Result<Tensor<D>>,
    ) -> Result<()> {
        for bucket in buckets(params, self.bucket_bytes, P::summand) {
            let values = flat(self.sums.device(), bucket)?;
            let tag = tag(layer, self.begun.len());
            let sum = GradientSum { tag, over_group: of == SumOf::Replicated, values };
            let bucket = PendingBucket::begin(&self.sums, bucket, sum);
            match of {
                SumOf::Replicated => self.begun.replicated.push(bucket),
                SumOf::Experts => self.begun.experts.push(bucket),
            }
        }
        Ok(())
    }

    /// What has begun.
    pub(crate) fn take(&mut self) -> PendingBuckets<D, P> {
        std::mem::take(&mut self.begun)
    }

    /// The same, to be looked at.
    #[cfg(feature = "candle")]
    pub(crate) fn begun(&self) -> &PendingBuckets<D, P> {
        &self.begun
    }
}

/// A step's parameters whose gradients are summed, the same in the same order on every rank.
#[derive(Debug)]
pub(crate) struct StepReduction<'a, D: ShardDevice, P> {
    pub(crate) sums: &'a GradientSums<D>,
    /// What all ranks of the group hold.
    pub(crate) replicated: &'a [P],
    /// What the replicas hold.
    pub(crate) experts: &'a [P],
    /// Bytes of sums that one collective takes.
    pub(crate) bucket_bytes: usize,
}

impl<D: ShardDevice, P: ReducedParam> StepReduction<'_, D, P> {
    /// Sums what has not begun to be summed, and takes all sums.
    ///
    /// # Errors
    /// On every rank: a communicator's, another rank's. All ranks have met behind it. The gradients are as they were, or,
    /// where the experts' sums were being taken, reset, on all of them.
    pub(crate) fn run<G: StepGradients<D, Param = P>>(
        &self,
        gradients: &mut G,
        begun: PendingBuckets<D, P>,
    ) -> Result<()> {
        let mut next = begun.len();
        let mut next_tag = || {
            next += 1;
            tag(NO_LAYER, next - 1)
        };
        let replicated = self.replicated_sums(gradients, &mut next_tag, begun.replicated);
        let replicated = replicated.map_err(|error| fail(self.sums, error))?;
        if self.sums.has_replicas() {
            let experts = self.sum_experts(gradients, &mut next_tag, begun.experts);
            experts.map_err(|error| {
                gradients.reset();
                fail(self.sums, error)
            })?;
        }
        for (param, sum) in replicated {
            gradients.set(&param, sum);
        }
        Ok(())
    }

    /// The sums of what all ranks of the group hold, which every rank has when one returns them.
    fn replicated_sums<G: StepGradients<D, Param = P>>(
        &self,
        gradients: &G,
        next_tag: &mut impl FnMut() -> Tag,
        begun: Vec<PendingBucket<D, P>>,
    ) -> Result<Vec<(P, G::Sum)>> {
        let others = others(self.replicated, &begun);
        let mut all = begun;
        for bucket in buckets(&others, self.bucket_bytes, P::summand) {
            all.push(self.begin(gradients, next_tag(), SumOf::Replicated, bucket)?);
        }
        let mut split = Vec::new();
        for begun in all {
            split.extend(self.finish(gradients, begun)?);
        }
        self.sums.compare(next_tag())?;
        Ok(split)
    }

    /// Takes the experts' sums over the replicas that have begun, and sums the other experts' gradients a bucket at a
    /// time: each sum takes its gradients' place. When one rank returns, every rank has them.
    fn sum_experts<G: StepGradients<D, Param = P>>(
        &self,
        gradients: &mut G,
        next_tag: &mut impl FnMut() -> Tag,
        begun: Vec<PendingBucket<D, P>>,
    ) -> Result<()> {
        let others = others(self.experts, &begun);
        for begun in begun {
            self.take(gradients, begun)?;
        }
        for bucket in buckets(&others, self.bucket_bytes, P::summand) {
            let begun = self.begin(gradients, next_tag(), SumOf::Experts, bucket)?;
            self.take(gradients, begun)?;
        }
        self.sums.compare(next_tag())
    }

    fn begin<G: StepGradients<D, Param = P>>(
        &self,
        gradients: &G,
        tag: Tag,
        of: SumOf,
        bucket: &[P],
    ) -> Result<PendingBucket<D, P>> {
        let values = gradients.flat(self.sums.device(), bucket)?;
        let sum = GradientSum { tag, over_group: of == SumOf::Replicated, values };
        Ok(PendingBucket::begin(self.sums, bucket, sum))
    }

    /// Waits for a bucket's sums: each parameter that any rank has a gradient of, with its sum.
    fn finish<G: StepGradients<D, Param = P>>(
        &self,
        gradients: &G,
        begun: PendingBucket<D, P>,
    ) -> Result<Vec<(P, G::Sum)>> {
        let sums = self.sums.finish(begun.sum)?;
        let split = gradients.split(self.sums.device(), &begun.bucket, sums)?;
        Ok(begun.bucket.into_iter().zip(split).filter_map(|(param, sum)| Some((param, sum?))).collect())
    }

    fn take<G: StepGradients<D, Param = P>>(&self, gradients: &mut G, begun: PendingBucket<D, P>) -> Result<()> {
        for (param, sum) in self.finish(gradients, begun)? {
            gradients.set(&param, sum);
        }
        Ok(())
    }
}

/// The parameters whose sums have not begun.
fn others<D: ShardDevice, P: ReducedParam>(all: &[P], begun: &[PendingBucket<D, P>]) -> Vec<P> {
    let early: HashSet<P::Key> = params(begun).map(P::key).collect();
    all.iter().filter(|param| !early.contains(&param.key())).cloned().collect()
}
