//! The end of a step: gradients that are whole, summed over replicas, and given.

use crate::comm::{Communicator, Op, ReduceOp, Tag, refusal};
use crate::compare::gather_numbers;
use crate::error::{CommError, Error, Result};
use crate::tensor::{Tensor, TensorRef};

use crate::etp::buffers::stream_pair::StreamPair;
use crate::etp::chain::{Chain, ChainState};
use crate::etp::{Reduction, ShardDevice, Shares, WeightId};

const CALL: &str = "Chain::finish";

/// Tag of the collective in which ranks compare their numbers of microbatches.
const COUNTS: Tag = Tag { layer: 0, op: Op::GradReduce, sequence: u64::MAX - 1 };

/// Tag of a weight's sum over replicas.
fn sum_tag(layer: u32, weight: usize) -> Tag {
    Tag { layer, op: Op::GradReduce, sequence: u64::MAX - 2 - weight as u64 }
}

impl<D: ShardDevice> Chain<D> {
    /// Ends the accumulation: adds what is under way, sums main gradients over the replicas where there are any, calls
    /// `enqueue` with each weight's gradient (`[S, C]`, accumulator type, padding zeros) in the order of registration,
    /// and starts the next step's from zero. Weights that have had no gradient yet are left out. All ranks come here
    /// after as many backward passes, which they compare first, those of the chain and then the replicas; not in a
    /// capture, whose runs nobody counts.
    ///
    /// # Errors
    /// On every rank of the chain, and on every replica, before any sum: another number of backward passes on one of
    /// them, and what fails on one of them here. After errors of collectives of the chain every rank
    /// [recovers](Self::recover); with other numbers between replicas alone nothing is lost, and the ranks that are
    /// behind can go on. Errors of `enqueue`, after which all gradients are there still: a second call gives them all,
    /// and sums over the replicas what the first has not; a communicator of another size than
    /// [`EtpOptions::replicas`](crate::etp::EtpOptions::replicas).
    pub fn finish(
        &self,
        replicas: Option<&mut dyn Communicator<D>>,
        mut enqueue: impl FnMut(WeightId, TensorRef<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let size = replicas.as_ref().map_or(1, |comm| comm.size());
        let counted = self.count_microbatches(size);
        let mut replicas = replicas.filter(|comm| comm.size() > 1);
        let microbatches = match (counted, &mut replicas) {
            (Err(error), Some(comm)) => {
                self.refuse_finish(&mut **comm, &error);
                return Err(error);
            }
            (counted, _) => counted?,
        };
        let mut inner = self.lock();
        if let (Some(comm), None, false) = (&mut replicas, inner.capture, inner.compared) {
            let device = StreamPair::new(&self.device, comm.device()).transfer.clone();
            same_count(microbatches, &gather_numbers(&device, &mut **comm, COUNTS, &[microbatches])?)?;
        }
        inner.compared = true;
        if let Some(comm) = replicas {
            self.sum_over_replicas(&mut inner, comm)?;
        }
        for (i, weight) in inner.weights.iter().enumerate() {
            let Some(main) = &weight.main else { continue };
            enqueue(WeightId(i), main.sums.view())?;
        }
        // All have been given, and the optimizer's step follows.
        inner.epoch += 1;
        (inner.microbatches, inner.compared) = (0, false);
        let capturable = inner.capturable;
        for main in inner.weights.iter_mut().filter_map(|weight| weight.main.as_mut()) {
            main.summed = false;
            match capturable {
                true => self.device.zero(main.sums.view_mut().into_data())?,
                false => main.first = true,
            }
        }
        Ok(())
    }

    /// For a rank that does not come to [`finish`](Self::finish), as the step has failed before it: its replicas, which
    /// wait there, get the reason, each a typed error. Not in a capture.
    pub fn refuse_finish(&self, replicas: &mut dyn Communicator<D>, reason: &Error) {
        if self.capture_number().is_none() {
            refusal::refuse(replicas, COUNTS, reason);
        }
    }

    /// In place of [`finish`](Self::finish), where this rank cannot come to it: the other ranks of the chain and the
    /// replicas, which wait for it there, get the reason. Nobody is waited for here. All keep their gradients, and call
    /// again; those that were given theirs already are not told. Not in a capture.
    #[cfg(feature = "burn")]
    pub(crate) fn refuse_to_finish(&self, replicas: Option<&mut dyn Communicator<D>>, reason: &Error) {
        if self.capture_number().is_some() {
            return;
        }
        let inner = self.lock();
        // Behind the comparison the chain's other ranks meet this one no more, and the replicas only in sums.
        if self.ranks() > 1 && !inner.compared {
            drop(inner.gathers.refuse(COUNTS, reason.clone()));
        }
        let mut mains = inner.weights.iter().filter_map(|weight| weight.main.as_ref());
        let expected = !inner.compared || mains.any(|main| !main.summed);
        drop(inner);
        if let Some(comm) = replicas.filter(|comm| comm.size() > 1 && expected) {
            self.refuse_finish(comm, reason);
        }
    }

    /// The steps before any sum over replicas: main gradients that are whole, on all ranks of the chain, after as many
    /// backward passes, whose number it gives.
    fn count_microbatches(&self, replicas: usize) -> Result<u64> {
        let mut inner = self.enter(CALL)?;
        let whole = match replicas == self.options.replicas {
            true => inner.finish_main_gradients(self),
            false => Err(Error::invalid(CALL, "replicas", self.options.replicas, replicas)),
        };
        if self.ranks() == 1 || inner.capture.is_some() || inner.compared {
            return whole.map(|()| inner.microbatches);
        }
        if let Err(error) = whole {
            // The other ranks are on their way to the same comparison.
            drop(inner.gathers.refuse(COUNTS, error.clone()));
            return Err(error);
        }
        let own = inner.microbatches;
        let all = inner.gathers.compare(COUNTS, own).map_err(other_passes)?;
        same_count(own, &all).map(|()| own)
    }

    fn sum_over_replicas(&self, inner: &mut ChainState<D>, comm: &mut dyn Communicator<D>) -> Result<()> {
        let streams = StreamPair::new(&self.device, comm.device());
        for (i, weight) in inner.weights.iter_mut().enumerate() {
            let Some(main) = weight.main.as_mut().filter(|main| !main.summed) else { continue };
            let (tag, sums) = (sum_tag(weight.spec.layer, i), &mut main.sums);
            match self.options.reduction {
                Reduction::Native => {
                    streams.run_on_transfer(|| comm.all_reduce(tag, ReduceOp::Sum, sums.view_mut()))?;
                }
                Reduction::Pairwise => {
                    let dims = [comm.size() * sums.view().rows(), sums.dims()[1]];
                    let memory = Tensor::empty(&self.device, sums.dtype(), &dims);
                    let mut shares = refusal::refuse_on_error(comm, tag, memory)?;
                    streams.run_on_transfer(|| comm.all_gather(tag, sums.view(), shares.view_mut()))?;
                    let shares = Shares::together(shares.view(), sums.view().count(), 1.0, true)?;
                    self.device.add_shares(shares, sums.view_mut())?;
                }
            }
            main.summed = true;
        }
        Ok(())
    }
}

impl<D: ShardDevice> ChainState<D> {
    /// Main gradients with all that is under way in them; zeros where nothing has come since they were last given.
    fn finish_main_gradients(&mut self, chain: &Chain<D>) -> Result<()> {
        self.finish_reductions(chain)?;
        let mains = self.weights.iter_mut().filter_map(|weight| weight.main.as_mut());
        mains.filter(|main| main.first && !main.summed).try_for_each(|main| {
            // No gradient since the last time.
            chain.device.zero(main.sums.view_mut().into_data())
        })
    }
}

/// Refuses numbers of microbatches of which one is not this rank's.
fn same_count(own: u64, all: &[u64]) -> Result<()> {
    match all.iter().enumerate().find(|(_, other)| **other != own) {
        None => Ok(()),
        Some((peer, other)) => Err(Error::invalid(CALL, "microbatches", format!("{other}, as on rank {peer}"), own)),
    }
}

/// The error of ranks of which one ends the step while another begins one more pass: one of them is in the comparison,
/// the other in a gather.
pub(super) fn other_passes(error: Error) -> Error {
    match error {
        Error::Comm(CommError::TagMismatch { tag, peer, peer_tag, .. }) if (tag == COUNTS) != (peer_tag == COUNTS) => {
            let [ends, goes_on] = ["the end of the step", "a further pass"];
            let [own, theirs] = if tag == COUNTS { [ends, goes_on] } else { [goes_on, ends] };
            Error::invalid(CALL, "microbatches", format!("as many as on rank {peer}, which is in {theirs}"), own)
        }
        error => error,
    }
}
