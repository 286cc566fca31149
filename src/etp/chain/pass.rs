//! Passes over the model: their beginning and end, the order that the first one shows, and what is done about those
//! that failed.

use std::fmt::Display;

use crate::comm::{Op, Tag};
#[cfg(feature = "burn")]
use crate::error::Error;
use crate::error::{CommError, Result};

use crate::etp::buffers::cache::BufferUsage;
use crate::etp::chain::collective_state::ActivePass;
use crate::etp::chain::schedule::{WeightUse, arrival_parities, gather_parities, gradient_parities, schedule};
use crate::etp::chain::{Chain, ChainState, UseState};
use crate::etp::collective::Collective;
use crate::etp::collective_thread::PendingCollective;
use crate::etp::{NO_LAYER, Phase, ShardDevice};

impl<D: ShardDevice> Chain<D> {
    /// Says, on every rank before the same pass, that shards have changed otherwise than after
    /// [`finish`](Self::finish), so that those which are sent quantized are cast anew. Said within a pass, it counts
    /// from the next.
    pub fn invalidate_casts(&self) {
        self.lock().epoch += 1;
    }

    /// Begins a pass over the model, and with prefetch its first gathers: shards stay as they are from here to its end.
    /// The first forward sets the order of uses: every gather of it is waited for.
    ///
    /// # Errors
    /// A pass that was not ended (after an error: [`recover`](Self::recover)); a backward before any forward, or behind
    /// the step's last ([`last_backward`](Self::last_backward)), which is in no capture.
    pub fn begin(&self, phase: Phase) -> Result<()> {
        let mut inner = self.enter("Chain::begin")?;
        if let Some(active) = inner.active {
            let found = format!("a {:?} pass that was not ended", active.phase);
            return Err(inner.order_error("(chain)", "no pass", &found));
        }
        if phase == Phase::Backward && !inner.has_order() {
            return Err(inner.order_error("(chain)", "a forward before a backward", "none"));
        }
        let capture = inner.capture.is_some();
        let anew = match phase {
            // Shards may have changed each time that a capture runs, and their casts with it.
            Phase::Forward => inner.capturable,
            Phase::Backward => inner.unknown && !capture,
        };
        if phase == Phase::Backward && std::mem::take(&mut inner.other_backward) {
            inner.steps[phase as usize] = schedule(&inner.weight_uses(), phase);
        }
        if phase == Phase::Backward {
            inner.begin_last_backward()?;
        }
        inner.epoch += u64::from(anew);
        inner.unknown = capture;
        inner.passes += 1;
        inner.serial += 1;
        let (number, serial, epoch) = (inner.passes, inner.serial, inner.epoch);
        let active = ActivePass { phase, cursor: 0, number, serial, epoch };
        inner.active = Some(active);
        if self.options.prefetch {
            // The computation before the first use hides them.
            inner.run_ahead(0, self.options.ahead, active);
        }
        Ok(())
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// No pass; weights that the pass has not used.
    pub fn end(&self) -> Result<()> {
        let mut inner = self.enter("Chain::end")?;
        let Some(active) = inner.active else { return Err(inner.order_error("(chain)", "a pass", "none")) };
        if !inner.has_order() {
            inner.set_order(self.options.ahead);
        }
        let expected = inner.steps[active.phase as usize].len();
        if active.cursor != expected {
            let found = format!("{} of {expected} weights used", active.cursor);
            return Err(inner.order_error("(chain)", "all weights of the first forward used", &found));
        }
        inner.active = None;
        if active.phase == Phase::Backward {
            inner.microbatches += 1;
            inner.compared = inner.end_last_backward();
        }
        // A capture ends with nothing under way.
        if inner.capture.is_some() { inner.finish_reductions(self) } else { Ok(()) }
    }

    /// Whether a pass runs.
    #[cfg(feature = "burn")]
    pub(crate) fn in_pass(&self) -> bool {
        self.lock().active.is_some()
    }

    /// In place of a pass's first gather, where this rank cannot begin the pass: the others, which gather for it, are
    /// told. Nobody waits for them here; every rank then [recovers](Self::recover).
    #[cfg(feature = "burn")]
    pub(crate) fn refuse_pass(&self, error: &Error) {
        if self.capture_number().is_some() {
            return;
        }
        let inner = self.lock();
        let tag = Tag { layer: 0, op: Op::Weights, sequence: (inner.passes + 1) << 32 };
        drop(inner.gathers.refuse(tag, error.clone()));
    }

    /// Forgets the order of the first forward, for a model that has changed; the next forward gives a new one.
    ///
    /// # Errors
    /// A pass that runs.
    pub fn reset_order(&self) -> Result<()> {
        let mut inner = self.lock_outside_capture("Chain::reset_order")?;
        if inner.active.is_some() {
            return Err(inner.order_error("(chain)", "no pass", "one that runs"));
        }
        inner.finish_reductions(self)?;
        inner.clear_order();
        Ok(())
    }

    /// Waits for what is under way: gathers are given up and repeated where they are needed, gradients reach their main
    /// gradient, sums over replicas that have begun end. All ranks drain at the same point.
    ///
    /// # Errors
    /// Those of the collectives.
    pub fn drain(&self) -> Result<()> {
        let mut inner = self.enter("Chain::drain")?;
        let gathers = inner.drop_gathers();
        let reductions = inner.finish_reductions(self);
        gathers.and(reductions).and(inner.finish_sums())
    }

    /// After a failed step, on every rank (collective): gives up the pass, all that is under way and the main
    /// gradients. Ranks that wait in a collective of the step are told `reason`, by reference: `Some(&error)`, of a text
    /// `Some(&"text")`. The chain works on afterwards, unless
    /// a rank is lost, or the ranks are processes over NCCL: there a refusal ends the communicators, and the chain with
    /// them. A chain with a communicator of its replicas ([`with_replicas`](Self::with_replicas)) meets them too: those
    /// that wait in [`last_backward`](Self::last_backward), in a sum or in [`finish`](Self::finish) are told `reason`,
    /// each gets a typed error there, and recovers as well.
    ///
    /// # Errors
    /// [`CommError::Poisoned`] with what went wrong: communicators have ended, with a rank that is lost or whose GPU
    /// failed within a collective, and so has the chain. A new one is made over new ones, of the shards that the ranks
    /// keep.
    pub fn recover(&self, reason: Option<&dyn Display>) -> Result<()> {
        Self::recover_all(&[self], reason)
    }

    /// The same of all chains of a model, which may be of different ranks: experts and dense weights, where tokens are
    /// sent. A rank in one chain's [`recover`](Self::recover) would wait there for a peer that is in another's
    /// collective, and that waits for this one. Each rank calls it with all of its chains, in any order.
    ///
    /// # Errors
    /// As [`recover`](Self::recover), of the first chain that has ended; the others have recovered.
    pub fn recover_all(chains: &[&Self], reason: Option<&dyn Display>) -> Result<()> {
        let mut once: Vec<&Self> = Vec::new();
        for chain in chains {
            if !once.iter().any(|other| std::ptr::eq(*other, *chain)) {
                drop(chain.lock_to_abandon("Chain::recover")?);
                once.push(chain);
            }
        }
        // All before any waiting, or one collective thread could wait for a rank that waits for another.
        let waiting: Vec<_> = once.iter().map(|chain| chain.begin_recovery(reason)).collect();
        let outcomes = once.into_iter().zip(waiting).map(|(chain, waiting)| chain.end_recovery(waiting));
        outcomes.fold(Ok(()), Result::and)
    }

    /// Meets the other ranks on all collective threads.
    fn begin_recovery(&self, reason: Option<&dyn Display>) -> Vec<PendingCollective<D>> {
        let inner = self.lock();
        let collective = |op| {
            let tag = Tag { layer: 0, op, sequence: u64::MAX };
            Collective::Recover { tag, reason: reason.map(ToString::to_string) }
        };
        let reductions = inner.apart.as_ref().map(|thread| thread.enqueue(collective(Op::GradReduce)));
        let sums = inner.replicas.as_ref().map(|replicas| replicas.thread.enqueue(collective(Op::GradReduce)));
        [Some(inner.gathers.enqueue(collective(Op::Weights))), reductions, sums].into_iter().flatten().collect()
    }

    fn end_recovery(&self, waiting: Vec<PendingCollective<D>>) -> Result<()> {
        let mut inner = self.lock();
        // Their errors are the failure that this is the end of.
        let _ = inner.drop_gathers();
        inner.give_up_sums();
        inner.give_up_gradients(self);
        inner.active = None;
        (inner.passes, inner.reduced) = (0, 0);
        inner.end_step();
        // Some ranks may have cast what others have not.
        inner.epoch += 1;
        if !inner.has_order() {
            inner.clear_order();
        }
        let outcomes = waiting.into_iter().map(|pending| pending.wait().outcome);
        outcomes.fold(Ok(()), Result::and).map_err(|failure| {
            let reason = format!("{failure}; a new chain over new communicators is needed");
            let tag = Tag { layer: 0, op: Op::Weights, sequence: u64::MAX };
            CommError::Poisoned { operation: "Chain::recover", tag, rank: self.rank(), reason }.into()
        })
    }
}

impl<D: ShardDevice> ChainState<D> {
    /// The uses of the last forward.
    fn weight_uses(&self) -> Vec<WeightUse> {
        let of = |node: &UseState<D>| {
            let spec = &self.weights[node.weight].spec;
            let layer = Some(spec.layer).filter(|layer| *layer != NO_LAYER);
            let (recompute, resident) = (spec.recompute, spec.resident);
            WeightUse { weight: node.weight, layer, recompute, resident, backward: node.backward }
        };
        self.uses.iter().map(of).collect()
    }

    /// Makes what the first forward met the order.
    fn set_order(&mut self, ahead: usize) {
        let uses = self.weight_uses();
        let same = |a: usize, b: usize| {
            let key = |i: usize| self.read_key(uses[i].weight, 0);
            key(a) == key(b)
        };
        let same_arrived_key = |a: usize, b: usize| {
            let key = |i: usize| self.arrived_key(uses[i].weight, 0);
            key(a) == key(b)
        };
        let arrivals = arrival_parities(&uses, ahead, same_arrived_key);
        // A weight that arrives quantized needs no memory in its own type before its turn.
        let quantized = self.weights.iter().all(|weight| weight.quantized.is_some());
        let ahead = if quantized { 1 } else { ahead };
        let (gather, gradient) = (gather_parities(&uses, ahead, same), gradient_parities(&uses, D::ENQUEUES, same));
        for (i, node) in uses.iter().enumerate() {
            let key = self.read_key(node.weight, gather[i]);
            self.uses[i].buffer_id = self.cache.reserve(key);
            let key = self.arrived_key(node.weight, arrivals[i]);
            self.uses[i].arrived = key.map(|key| self.cache.reserve(key));
            let key = self.key(node.weight, BufferUsage::Gradient, gradient[i]);
            let buffer_id = self.cache.reserve(key);
            // A weight that is used twice has one gradient buffer.
            self.weights[node.weight].gradient.get_or_insert(buffer_id);
        }
        self.steps = [Phase::Forward, Phase::Backward].map(|phase| schedule(&uses, phase));
        self.other_backward = false;
    }

    fn clear_order(&mut self) {
        self.uses.clear();
        self.steps = [Vec::new(), Vec::new()];
        self.weights.iter_mut().for_each(|weight| weight.gradient = None);
    }
}
