//! Sums over the replicas on a collective thread of their own: beside the step's last backward, each as soon as its main
//! gradient is whole.
//!
//! Ranks compare their numbers of backward passes before the last one ([`Chain::last_backward`]), as sums begin in it.
//! A main gradient is with the thread while it is summed. All replicas begin the same sums in the same order: those of
//! the last backward as its gradients arrive, the others in `finish`, in the order of registration.

use crate::comm::Communicator;
use crate::error::{Error, Result};

use crate::etp::buffers::stream_pair::TransferBuffer;
use crate::etp::chain::collective_state::{LastBackward, MainGradient, PendingSum, ReplicaSums};
use crate::etp::chain::microbatches::{END, LAST, compare_counts, other_passes, sum_tag};
use crate::etp::chain::{Chain, ChainState};
use crate::etp::collective::Collective;
use crate::etp::collective_thread::CollectiveThread;
use crate::etp::{Phase, Reduction, ShardDevice, WeightId};

const CALL: &str = "Chain::last_backward";

impl<D: ShardDevice> Chain<D> {
    /// The same chain with a communicator of the replicas of its own ([`EtpOptions::replicas`](crate::etp::EtpOptions)
    /// ranks), for sums over them alone, on a collective thread of its own; [`finish`](Self::finish) is given none then.
    /// On every rank of the chain and of the replicas. With it [`last_backward`](Self::last_backward) has sums begin
    /// beside the backward. On a GPU it is made with a `Cuda` of its own, as those of [`Comms`](crate::etp::Comms) are.
    /// Where there is one replica, nothing changes.
    ///
    /// # Errors
    /// A communicator of another size than [`EtpOptions::replicas`](crate::etp::EtpOptions::replicas), or of the
    /// computation's stream; one that the chain has already; on a GPU, one that does not tell its device; no thread.
    pub fn with_replicas(self, replicas: Box<dyn Communicator<D>>) -> Result<Self> {
        const CALL: &str = "Chain::with_replicas";
        if replicas.size() != self.options.replicas {
            return Err(Error::invalid(CALL, "replicas", self.options.replicas, replicas.size()));
        }
        let several = replicas.size() > 1;
        if several && replicas.device().is_some_and(|device| device.shares_stream_with(&self.device)) {
            let expected = "a communicator of a stream of its own (Cuda::with_new_stream)";
            return Err(Error::invalid(CALL, "replicas", expected, "one of the computation's stream"));
        }
        if self.lock().replicas.is_some() {
            return Err(Error::invalid(CALL, "replicas", "a chain without a communicator of them", "one with it"));
        }
        if several {
            let thread = CollectiveThread::start("replicas", &self.device, replicas)?;
            self.lock().replicas =
                Some(ReplicaSums { thread, last: None, pending: Vec::new(), failed: false, met: false });
        }
        Ok(self)
    }

    /// Says that the next backward pass is the step's last, on every rank of the chain and of its replicas
    /// ([`with_replicas`](Self::with_replicas)), between passes. All of them compare their numbers of backward passes
    /// here, and not in [`finish`](Self::finish) any more. In that pass, each weight's sum over the replicas begins as
    /// soon as its main gradient has the pass's gradients, as many as the last forward had uses of the weight, beside
    /// the rest of the backward; `finish` begins the other sums, waits for all and gives them. The sums are to the bit
    /// those that are made in `finish` alone, without this call.
    ///
    /// The host waits for the numbers, and with them for the gathers before: least where a step with one microbatch
    /// says it before its forward. Said again before that backward, it does nothing; nor does it without replicas
    /// ([`EtpOptions::replicas`](crate::etp::EtpOptions::replicas) of 1).
    ///
    /// From the first sum on, main gradients of the step are good for `finish` alone: a rank that fails in the last
    /// backward, or does not come to `finish`, calls [`recover`](Self::recover), which tells its replicas too, and every
    /// rank of the chain and of the replicas, each of which gets a typed error, does so: no gradient of the step is left
    /// on any of them.
    ///
    /// # Errors
    /// Another number of backward passes on another rank: on every rank of the chain and on its replicas, before any
    /// sum. Between replicas alone nothing is lost then: the ranks that are behind go on, and all say it again; in a
    /// chain every rank [recovers](Self::recover). A chain without a communicator of its replicas, which the other
    /// ranks are told; a pass that runs; a step whose last backward is over, and that [`finish`](Self::finish) has not
    /// ended; [`Error::NotCapturable`] in a capture; the collectives'.
    pub fn last_backward(&self) -> Result<()> {
        if self.options.replicas == 1 {
            return Ok(());
        }
        let mut inner = self.lock_outside_capture(CALL)?;
        if let Some(active) = inner.active {
            let found = format!("a {:?} pass that was not ended", active.phase);
            return Err(inner.order_error("(chain)", "no pass", &found));
        }
        if inner.compared {
            return Err(inner.order_error("(chain)", "Chain::finish, or Chain::recover", "Chain::last_backward"));
        }
        // The pass that comes is counted.
        let own = inner.microbatches + 1;
        let Some(replicas) = &inner.replicas else {
            let expected = "a chain with a communicator of them (Chain::with_replicas)";
            let error = Error::invalid(CALL, "replicas", expected, "one without");
            if self.ranks() > 1 {
                drop(inner.gathers.refuse(LAST, error.clone()));
            }
            return Err(error);
        };
        if replicas.last == Some(LastBackward::Announced) {
            return Ok(());
        }
        let in_chain = if self.ranks() > 1 { compare_counts(CALL, &inner.gathers, LAST, own) } else { Ok(()) };
        if let Err(error) = in_chain {
            drop(replicas.thread.refuse(LAST, error.clone()));
            return Err(error);
        }
        compare_counts(CALL, &replicas.thread, LAST, own)?;
        inner.set_last(Some(LastBackward::Announced));
        Ok(())
    }
}

impl<D: ShardDevice> ChainState<D> {
    fn last(&self) -> Option<&LastBackward> {
        self.replicas.as_ref()?.last.as_ref()
    }

    fn set_last(&mut self, last: Option<LastBackward>) {
        if let Some(replicas) = &mut self.replicas {
            replicas.last = last;
        }
    }

    /// The pass that begins is the step's last, if that was said.
    pub fn begin_last_backward(&mut self) -> Result<()> {
        match self.last() {
            None => Ok(()),
            Some(LastBackward::Announced) if self.capture.is_some() => Err(Error::not_capturable(
                "Chain::begin",
                "begin sums over replicas in a backward (Chain::last_backward)",
            )),
            Some(LastBackward::Announced) => {
                let mut remaining = vec![0; self.weights.len()];
                self.uses.iter().filter(|node| node.backward).for_each(|node| remaining[node.weight] += 1);
                self.set_last(Some(LastBackward::Begun { remaining, over: false }));
                Ok(())
            }
            Some(LastBackward::Begun { .. }) => {
                let expected = "Chain::finish, or Chain::recover";
                Err(self.order_error("(chain)", expected, "a backward behind the step's last (Chain::last_backward)"))
            }
        }
    }

    /// A backward pass has ended. Says whether it was the step's last.
    pub fn end_last_backward(&mut self) -> bool {
        match self.replicas.as_mut().and_then(|replicas| replicas.last.as_mut()) {
            Some(LastBackward::Begun { over, .. }) => {
                *over = true;
                true
            }
            _ => false,
        }
    }

    /// Whether gradients that are handed in are the last backward's.
    pub fn in_last_backward(&self) -> bool {
        let in_backward = self.active.is_some_and(|active| active.phase == Phase::Backward);
        in_backward && matches!(self.last(), Some(LastBackward::Begun { over: false, .. }))
    }

    /// A gradient of the last backward has reached its main gradient; behind the weight's last one, its sum over the
    /// replicas begins.
    pub fn count_gradient(&mut self, weight: usize, how: Reduction) {
        let last = self.replicas.as_mut().and_then(|replicas| replicas.last.as_mut());
        let Some(LastBackward::Begun { remaining, .. }) = last else { return };
        // None are left where the last forward had no backward of the weight: `finish` begins its sum.
        if let Some(remaining @ 1..) = remaining.get_mut(weight) {
            *remaining -= 1;
            if *remaining == 0 {
                self.begin_sum(weight, how);
            }
        }
    }

    /// Whether a weight's main gradient takes no more gradients before it is given.
    pub fn check_not_summed(&self, id: WeightId) -> Result<()> {
        let name = &self.weight(id)?.spec.name;
        if self.replicas.as_ref().is_some_and(|replicas| replicas.pending.iter().any(|sum| sum.weight == id.0)) {
            let found = "a gradient behind those that its sum over replicas has begun with (Chain::last_backward)";
            return Err(self.order_error(name, "Chain::finish, or Chain::recover", found));
        }
        match self.weights[id.0].main.as_ref().is_some_and(|main| main.summed) {
            true => {
                let expected = "Chain::finish again, or Chain::recover";
                Err(self.order_error(name, expected, "a gradient behind its sum over replicas"))
            }
            false => Ok(()),
        }
    }

    fn begin_sum(&mut self, index: usize, how: Reduction) {
        let (Some(replicas), weight) = (&mut self.replicas, &mut self.weights[index]) else { return };
        let Some(MainGradient { sums, .. }) = weight.main.take_if(|main| !main.summed) else { return };
        let (bytes, tag) = (sums.bytes(), sum_tag(weight.spec.layer, index));
        let sums = TransferBuffer::new(sums, &replicas.thread.streams);
        let pending = replicas.thread.enqueue(Collective::Sum { tag, how, sums });
        replicas.pending.push(PendingSum { weight: index, bytes, pending });
        self.traffic.sums += 1;
        self.traffic.sums_beside += u64::from(self.active.is_some());
    }

    /// Begins the sums over the replicas that have not begun.
    pub fn begin_sums(&mut self, how: Reduction) {
        (0..self.weights.len()).for_each(|weight| self.begin_sum(weight, how));
    }

    /// Waits for the sums that have begun; the first error, if there is one.
    pub fn finish_sums(&mut self) -> Result<()> {
        let Some(replicas) = &mut self.replicas else { return Ok(()) };
        let mut outcome = Ok(());
        for PendingSum { weight, pending, .. } in std::mem::take(&mut replicas.pending) {
            let (sums, summed) = replicas.thread.receive_sums(pending);
            replicas.failed |= summed.is_err();
            self.weights[weight].main = sums.map(|sums| MainGradient { sums, first: false, summed: summed.is_ok() });
            outcome = outcome.and(summed);
        }
        outcome
    }

    /// Gives up the sums that have begun.
    pub fn give_up_sums(&mut self) {
        // Their errors are the failure that this is the end of.
        let _ = self.finish_sums();
        if let Some(replicas) = &mut self.replicas {
            replicas.failed = false;
        }
    }

    /// Meets the replicas, and then the chain's other ranks, behind sums that are `summed` on this rank: when one rank
    /// returns, all have theirs. Of what fails on this rank the others hear.
    pub fn meet(&mut self, summed: Result<()>) -> Result<()> {
        let Some(replicas) = self.replicas.as_mut().filter(|replicas| !replicas.met) else { return summed };
        let among_replicas = match summed {
            Ok(()) => replicas.thread.meet(END),
            Err(error) => {
                drop(replicas.thread.refuse(END, error.clone()));
                Err(error)
            }
        };
        let (_, ranks) = self.gathers.rank;
        let met = match among_replicas {
            Ok(()) if ranks > 1 => self.gathers.meet(END).map_err(other_passes),
            Err(error) if ranks > 1 => {
                drop(self.gathers.refuse(END, error.clone()));
                Err(error)
            }
            alone => alone,
        };
        replicas.met = met.is_ok();
        met
    }

    /// The state of the step's last backward for `finish`: a pass that was announced and did not come is forgotten.
    pub fn check_last_backward(&mut self) -> Result<()> {
        match self.last() {
            Some(LastBackward::Begun { over: false, .. }) => {
                Err(self.order_error("(chain)", "the end of the step's last backward", "Chain::finish"))
            }
            Some(LastBackward::Announced) => {
                self.set_last(None);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The step is over.
    pub fn end_step(&mut self) {
        if let Some(replicas) = &mut self.replicas {
            (replicas.last, replicas.met) = (None, false);
        }
        (self.microbatches, self.compared) = (0, false);
    }
}
