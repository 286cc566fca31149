//! The end of a step: gradients that are whole, summed over replicas, and given.

use std::sync::MutexGuard;

use crate::comm::{Communicator, refusal};
use crate::compare::gather_numbers;
use crate::error::{Error, Result};
use crate::tensor::TensorRef;

use crate::etp::buffers::stream_pair::StreamPair;
use crate::etp::chain::microbatches::{COUNTS, compare_counts, same_count, sum_tag};
use crate::etp::chain::{Chain, ChainState};
use crate::etp::collective::sum_over_replicas;
use crate::etp::{ShardDevice, WeightId};

const CALL: &str = "Chain::finish";

impl<D: ShardDevice> Chain<D> {
    /// Ends the accumulation: adds what is under way, sums main gradients over the replicas where there are any, calls
    /// `enqueue` with each weight's gradient (`[S, C]`, accumulator type, padding zeros) in the order of registration,
    /// and starts the next step's from zero. Weights that have had no gradient yet are left out. All ranks come here
    /// after as many backward passes, which they compare first, those of the chain and then the replicas; not in a
    /// capture, whose runs nobody counts, and not behind a [`last_backward`](Self::last_backward), where they have.
    /// `replicas` is none where the chain has a communicator of its own ([`with_replicas`](Self::with_replicas)).
    ///
    /// # Errors
    /// On every rank of the chain, and on every replica, before any sum: another number of backward passes on one of
    /// them, and what fails on one of them here. After errors of collectives of the chain every rank
    /// [recovers](Self::recover); with other numbers between replicas alone nothing is lost, and the ranks that are
    /// behind can go on. Errors of `enqueue`, after which all gradients are there still: a second call gives them all,
    /// and sums over the replicas what the first has not; a communicator of another size than
    /// [`EtpOptions::replicas`](crate::etp::EtpOptions::replicas).
    ///
    /// With a communicator of the chain's own all ranks of the chain and of the replicas meet behind the sums, before any
    /// is given: what fails on one of them before is an error on all. Where no sum has failed (one rank alone refuses:
    /// a communicator that is given as well, say), all have them still, and a second call of all of them gives them; an
    /// error of `enqueue` is the rank's own, as is its second call. After a sum that fails, or a last backward that has
    /// not ended, all of them [recover](Self::recover). [`Error::NotCapturable`] in a capture.
    pub fn finish(
        &self,
        replicas: Option<&mut dyn Communicator<D>>,
        mut enqueue: impl FnMut(WeightId, TensorRef<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let own_thread = self.lock().replicas.is_some();
        let mut inner = match own_thread {
            true => self.sum_on_own_thread(replicas.is_some())?,
            false => self.sum_with(replicas)?,
        };
        for (i, weight) in inner.weights.iter().enumerate() {
            let Some(main) = &weight.main else { continue };
            enqueue(WeightId(i), main.sums.view())?;
        }
        // All have been given, and the optimizer's step follows.
        inner.epoch += 1;
        inner.end_step();
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

    /// Main gradients with all that is in them, over the replicas of a communicator that the caller has.
    fn sum_with(&self, replicas: Option<&mut dyn Communicator<D>>) -> Result<MutexGuard<'_, ChainState<D>>> {
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
            same_count(CALL, microbatches, &gather_numbers(&device, &mut **comm, COUNTS, &[microbatches])?)?;
        }
        inner.compared = true;
        if let Some(comm) = replicas {
            self.sum_here(&mut inner, comm)?;
        }
        Ok(inner)
    }

    /// The same on the chain's own thread, where sums may have begun; `given`: the caller has a communicator, too.
    fn sum_on_own_thread(&self, given: bool) -> Result<MutexGuard<'_, ChainState<D>>> {
        let mut inner = self.lock_outside_capture(CALL)?;
        if inner.replicas.as_ref().is_some_and(|replicas| replicas.failed) {
            return Err(inner.order_error("(chain)", "Chain::recover", "a sum over replicas that failed"));
        }
        let none = "none, as the chain has a communicator of them (Chain::with_replicas)";
        let given = if given { Err(Error::invalid(CALL, "replicas", none, "one")) } else { Ok(()) };
        if let Err(error) = given.and(inner.check_last_backward()) {
            self.decline_sums(&mut inner, &error);
            return Err(error);
        }
        let whole = inner.finish_main_gradients(self);
        if inner.compared {
            if let Err(error) = whole {
                return Err(inner.meet(Err(error.clone())).err().unwrap_or(error));
            }
        } else {
            self.compare_numbers(&inner, whole)?;
        }
        inner.compared = true;
        inner.begin_sums(self.options.reduction);
        let summed = inner.finish_sums();
        inner.meet(summed)?;
        Ok(inner)
    }

    /// Compares the numbers of backward passes, behind main gradients that are `whole`, in the chain and with its
    /// replicas, on the chain's own thread.
    fn compare_numbers(&self, inner: &ChainState<D>, whole: Result<()>) -> Result<()> {
        let counted = self.compare_in_chain(inner, whole);
        let Some(replicas) = &inner.replicas else { return counted };
        if let Err(error) = counted {
            // They are on their way to the same comparison.
            drop(replicas.thread.refuse(COUNTS, error.clone()));
            return Err(error);
        }
        compare_counts(CALL, &replicas.thread, COUNTS, inner.microbatches)
    }

    /// In place of `finish`, where this rank cannot come to it, and sums are the chain's own: the others are told, in
    /// the comparison, or behind it in the meeting that follows the sums, in which this rank has its part, so that all
    /// have them for another call.
    fn decline_sums(&self, inner: &mut ChainState<D>, reason: &Error) {
        if !inner.compared {
            if self.ranks() > 1 {
                drop(inner.gathers.refuse(COUNTS, reason.clone()));
            }
            inner.replicas.iter().for_each(|replicas| drop(replicas.thread.refuse(COUNTS, reason.clone())));
            return;
        }
        if inner.replicas.as_ref().is_some_and(|replicas| replicas.failed) {
            // It has failed on the others too.
            return;
        }
        let whole = inner.finish_main_gradients(self);
        if whole.is_ok() {
            inner.begin_sums(self.options.reduction);
        }
        // It is this rank's own reason that the others get.
        let _ = inner.meet(whole.and(Err(reason.clone())));
    }

    /// For a rank that does not come to [`finish`](Self::finish), as the step has failed before it: its replicas, which
    /// wait there, get the reason, each a typed error. Not in a capture.
    pub fn refuse_finish(&self, replicas: &mut dyn Communicator<D>, reason: &Error) {
        if self.capture_number().is_none() {
            refusal::refuse(replicas, COUNTS, reason);
        }
    }

    /// The weights that have gradients, which [`finish`](Self::finish) gives, with their names and the sizes of a shard.
    #[cfg(feature = "candle")]
    pub(crate) fn weights_with_gradients(&self) -> Vec<(WeightId, String, [usize; 2])> {
        let inner = self.lock();
        let mut given: Vec<bool> = inner.weights.iter().map(|weight| weight.main.is_some()).collect();
        // On their way to a main gradient that there may not be yet, and in a sum over replicas.
        inner.pending_reductions.iter().for_each(|pending| given[pending.weight] = true);
        let sums = inner.replicas.iter().flat_map(|replicas| &replicas.pending);
        sums.for_each(|pending| given[pending.weight] = true);
        let weights = inner.weights.iter().zip(given).enumerate().filter(|(_, (_, given))| *given);
        weights.map(|(i, (weight, _))| (WeightId(i), weight.spec.name.clone(), weight.shards.shard_dims())).collect()
    }

    /// In place of [`finish`](Self::finish), where this rank cannot come to it: the other ranks of the chain and the
    /// replicas, which wait for it there, get the reason. Nobody is waited for here. All keep their gradients, and call
    /// again; those that were given theirs already are not told. Not in a capture.
    #[cfg(any(feature = "candle", feature = "burn"))]
    pub(crate) fn refuse_to_finish(&self, replicas: Option<&mut dyn Communicator<D>>, reason: &Error) {
        if self.capture_number().is_some() {
            return;
        }
        let mut inner = self.lock();
        if inner.replicas.is_some() {
            return self.decline_sums(&mut inner, reason);
        }
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
        self.compare_in_chain(&inner, whole).map(|()| inner.microbatches)
    }

    /// Compares the numbers of backward passes in the chain, behind main gradients that are `whole`.
    fn compare_in_chain(&self, inner: &ChainState<D>, whole: Result<()>) -> Result<()> {
        if self.ranks() == 1 || inner.capture.is_some() || inner.compared {
            return whole;
        }
        if let Err(error) = whole {
            // The other ranks are on their way to the same comparison.
            drop(inner.gathers.refuse(COUNTS, error.clone()));
            return Err(error);
        }
        compare_counts(CALL, &inner.gathers, COUNTS, inner.microbatches)
    }

    fn sum_here(&self, inner: &mut ChainState<D>, comm: &mut dyn Communicator<D>) -> Result<()> {
        let streams = StreamPair::new(&self.device, comm.device());
        for (i, weight) in inner.weights.iter_mut().enumerate() {
            let Some(main) = weight.main.as_mut().filter(|main| !main.summed) else { continue };
            let tag = sum_tag(weight.spec.layer, i);
            sum_over_replicas(&streams, comm, (tag, self.options.reduction), &mut main.sums)?;
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
