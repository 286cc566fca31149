//! Gradients out: reduce-scatters that end one step late, and the main gradients that they add to.

use std::fmt;
use std::sync::Arc;

use crate::comm::{Op, Tag};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::etp::buffers::cache::{Buffer, BufferId, BufferKey, BufferUsage};
use crate::etp::buffers::stream_pair::TransferBuffer;
use crate::etp::chain::collective_state::{CollectiveState, MainGradient, PendingReduction};
use crate::etp::chain::{Chain, ChainState};
use crate::etp::collective::Collective;
use crate::etp::{CALL, Reduction, ShardDevice, Shards, Shares, WeightId};

/// Room for the gradient of a whole weight, until it is [submitted](Chain::submit).
pub struct GradientBuffer<'a, D: ShardDevice> {
    chain: &'a Chain<D>,
    id: WeightId,
    shards: Arc<Shards>,
    buffer: Option<Buffer<D>>,
}

impl<D: ShardDevice> fmt::Debug for GradientBuffer<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GradientBuffer<{:?} {:?}>", self.id, self.shards.dims())
    }
}

impl<D: ShardDevice> GradientBuffer<'_, D> {
    /// The memory, of the weight's sizes and type; its content is unspecified.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn view_mut(&mut self) -> Result<TensorMut<'_, D>> {
        let missing = || Error::invalid(CALL, "gradient buffer", "memory", "none");
        let tensor = &mut self.buffer.as_mut().ok_or_else(missing)?.tensor;
        let dtype = tensor.dtype();
        let bytes = self.shards.dims().iter().product::<usize>() * dtype.size();
        TensorMut::new(D::slice_mut(tensor.view_mut().into_data(), 0..bytes), dtype, self.shards.dims())
    }
}

impl<D: ShardDevice> Drop for GradientBuffer<'_, D> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.chain.lock().cache.put(buffer);
        }
    }
}

impl<D: ShardDevice> Chain<D> {
    /// Room for a weight's gradient on this rank's tokens. Where the collective threads' communicators have memory of
    /// their own (`Chain::uses_copy_engines`), ranks ask for a size's first in the same order: it is allocated by all
    /// together.
    ///
    /// # Errors
    /// Room that was asked for before and not submitted; no forward before; a [`finish`](Self::finish) over replicas that
    /// failed and was not repeated, or a sum that has begun ([`last_backward`](Self::last_backward)); the collective's,
    /// where an earlier gradient has to leave first.
    pub fn gradient_buffer(&self, id: WeightId) -> Result<GradientBuffer<'_, D>> {
        let mut inner = self.enter(CALL)?;
        let weight = inner.weight(id)?;
        let shards = Arc::clone(&weight.shards);
        let Some(buffer_id) = weight.gradient else {
            return Err(inner.order_error(&weight.spec.name, "a forward before its gradient", "none"));
        };
        if !inner.cache.is_free(buffer_id) {
            // The order of a backward keeps its buffers apart; another order waits here.
            inner.finish_reductions(self)?;
        }
        inner.check_not_summed(id)?;
        let mut buffer = inner.take_for_reduction(buffer_id)?;
        drop(inner);
        let bytes = buffer.tensor.bytes();
        let padding = shards.padding() * buffer.tensor.view().row_bytes();
        let tail = D::slice_mut(buffer.tensor.view_mut().into_data(), bytes - padding..bytes);
        let zeroed = self.device.zero(tail);
        let gradient_buffer = GradientBuffer { chain: self, id, shards, buffer: Some(buffer) };
        zeroed.map(|()| gradient_buffer)
    }

    /// Hands a gradient in: its reduce-scatter starts, and the one before it reaches its main gradient. Every rank
    /// submits the same weights in the same order, one gradient for each backward.
    ///
    /// # Errors
    /// Those of the reduce-scatter before it, and of this one where nothing runs ahead.
    pub fn submit(&self, mut gradient_buffer: GradientBuffer<'_, D>) -> Result<()> {
        let mut inner = self.enter("Chain::submit")?;
        if !std::ptr::eq(gradient_buffer.chain, self) {
            let own = inner.order_error("(chain)", "a gradient buffer of this chain", "another chain's");
            // The gradient buffer's own chain takes it back without this one's lock.
            drop(inner);
            drop(gradient_buffer);
            return Err(own);
        }
        let Some(gradient) = gradient_buffer.buffer.take() else { return Ok(()) };
        // An earlier one that this would wait behind in any case, or that has its buffer, ends here.
        // Where nobody waits, a layer's are under way together.
        let most = if D::ENQUEUES { 2 } else { 1 };
        while inner.pending_reductions.len() >= most
            || !inner.has_free_buffer(gradient_buffer.id.0, self.options.reduction)
        {
            if let Err(error) = inner.finish_oldest_reduction(self) {
                return Err(inner.refuse_reduction(gradient_buffer.id.0, gradient, error));
            }
        }
        // Between a capture's passes nothing may be left under way.
        let ahead = self.options.prefetch && (inner.active.is_some() || inner.capture.is_none());
        let state = if ahead { CollectiveState::AsyncWait } else { CollectiveState::DataReadySync };
        inner.reduce(gradient_buffer.id.0, gradient, (self.options.reduction, state))?;
        if ahead { Ok(()) } else { inner.finish_reductions(self) }
    }
}

impl<D: ShardDevice> ChainState<D> {
    fn reduce(&mut self, index: usize, gradient: Buffer<D>, (how, state): (Reduction, CollectiveState)) -> Result<()> {
        let key = self.reduced_key(index, how);
        let weight = &mut self.weights[index];
        if let Err(error) = weight.reduce.transition(state, &weight.spec.name) {
            self.cache.put(gradient);
            return Err(error);
        }
        let (bytes, from) = (gradient.tensor.bytes(), gradient.buffer_id());
        let buffer_id = self.cache.reserve(key);
        let into = match self.take_for_reduction(buffer_id) {
            Ok(into) => into,
            Err(error) => {
                self.weights[index].reduce.reset();
                return Err(self.refuse_reduction(index, gradient, error));
            }
        };
        let tag = self.next_reduction(index);
        self.traffic.reductions += 1;
        self.traffic.reduced_bytes += bytes as u64;
        let [gradient, into] = [gradient, into].map(|buffer| TransferBuffer::new(buffer, &self.reductions().streams));
        let pending = self.reductions().enqueue(Collective::Reduce { tag, how, gradient, into });
        let (cache, last) = ([from, buffer_id], self.in_last_backward());
        self.pending_reductions.push_back(PendingReduction { weight: index, pending, cache, last });
        Ok(())
    }

    fn next_reduction(&mut self, index: usize) -> Tag {
        self.reduced += 1;
        let sequence = self.reduced << 32 | index as u64;
        Tag { layer: self.weights[index].spec.layer, op: Op::GradReduce, sequence }
    }

    /// In place of a reduction that this rank cannot give: the others, which wait in it, are told in its turn. That is
    /// not waited for, as they may wait for this rank elsewhere.
    fn refuse_reduction(&mut self, index: usize, gradient: Buffer<D>, error: Error) -> Error {
        self.cache.put(gradient);
        let tag = self.next_reduction(index);
        drop(self.reductions().refuse(tag, error.clone()));
        error
    }

    fn take_for_reduction(&mut self, buffer_id: BufferId) -> Result<Buffer<D>> {
        let thread = self.apart.as_ref().unwrap_or(&self.gathers);
        thread.take(&mut self.cache, buffer_id)
    }

    /// Whether a weight's reduction has a buffer to fill, or none is under way that would give one back.
    fn has_free_buffer(&mut self, index: usize, how: Reduction) -> bool {
        let key = self.reduced_key(index, how);
        let buffer_id = self.cache.reserve(key);
        self.pending_reductions.is_empty() || self.cache.is_free(buffer_id)
    }

    fn reduced_key(&self, index: usize, how: Reduction) -> BufferKey {
        let weight = &self.weights[index];
        let [rows, width] = weight.shards.shard_dims();
        let dims = match how {
            Reduction::Native => [rows, width],
            // This rank's own is added where it lies.
            Reduction::Pairwise => [rows * (weight.shards.ranks() - 1), width],
        };
        BufferKey { dims: dims.to_vec(), dtype: weight.spec.dtype, usage: BufferUsage::Reduced, parity: 0 }
    }

    /// Waits for the gradients under way, and adds them; the first error, if there is one.
    pub fn finish_reductions(&mut self, chain: &Chain<D>) -> Result<()> {
        let mut outcome = Ok(());
        while !self.pending_reductions.is_empty() {
            let finished = self.finish_oldest_reduction(chain);
            outcome = outcome.and(finished);
        }
        outcome
    }

    /// The same of the oldest.
    fn finish_oldest_reduction(&mut self, chain: &Chain<D>) -> Result<()> {
        let Some(pending_reductions) = self.pending_reductions.pop_front() else { return Ok(()) };
        let (index, last) = (pending_reductions.weight, pending_reductions.last);
        let landed = self.finish_reduction(pending_reductions);
        let weight = &mut self.weights[index];
        let added = landed.and_then(|[gradient, reduced]| {
            let moved = match weight.reduce.state() {
                CollectiveState::AsyncWait => weight.reduce.transition(CollectiveState::DataReady, &weight.spec.name),
                _ => Ok(()),
            };
            let (gradient_view, reduced_view) = (gradient.tensor.view(), reduced.tensor.view());
            let added = moved.and_then(|()| add(chain, weight, self.capturable, gradient_view, reduced_view));
            [gradient, reduced].into_iter().for_each(|buffer| self.cache.put(buffer));
            added
        });
        self.weights[index].reduce.reset();
        if last && added.is_ok() {
            self.count_gradient(index, chain.options.reduction);
        }
        added
    }

    fn put_all(&mut self, buffers: [Buffer<D>; 2]) {
        buffers.into_iter().for_each(|buffer| self.cache.put(buffer));
    }

    /// The buffers of a reduction that has ended: a gradient, and what has come of the others.
    fn finish_reduction(&mut self, pending_reductions: PendingReduction<D>) -> Result<[Buffer<D>; 2]> {
        let (mut buffers, outcome) = self.reductions().receive(pending_reductions.pending);
        let (reduced, gradient) = (buffers.pop(), buffers.pop());
        let (Some(reduced), Some(gradient)) = (reduced, gradient) else {
            pending_reductions.cache.into_iter().for_each(|buffer_id| self.cache.forget(buffer_id));
            return Err(outcome.err().unwrap_or_else(|| Error::invalid(CALL, "reduction", "buffers", "none")));
        };
        match outcome {
            Ok(()) => Ok([gradient, reduced]),
            Err(error) => {
                self.put_all([gradient, reduced]);
                Err(error)
            }
        }
    }

    /// Forgets the gradients under way and the main gradients.
    pub fn give_up_gradients(&mut self, chain: &Chain<D>) {
        while let Some(pending_reductions) = self.pending_reductions.pop_front() {
            let index = pending_reductions.weight;
            if let Ok(buffers) = self.finish_reduction(pending_reductions) {
                self.put_all(buffers);
            }
            self.weights[index].reduce.reset();
        }
        for weight in &mut self.weights {
            let main = weight.main.take().filter(|_| self.capturable);
            weight.main = main.and_then(|mut main| {
                main.summed = false;
                let zeroed = chain.device.zero(main.sums.view_mut().into_data());
                zeroed.is_ok().then_some(main)
            });
        }
    }
}

/// Adds what has come of a weight's gradient to its main gradient.
fn add<'a, D: ShardDevice>(
    chain: &Chain<D>,
    weight: &mut crate::etp::chain::ChainWeight<D>,
    capturable: bool,
    gradient: TensorRef<'a, D>,
    reduced: TensorRef<'a, D>,
) -> Result<()> {
    let (shards, dtype) = (&weight.shards, weight.spec.dtype);
    let MainGradient { sums, first, .. } = match &mut weight.main {
        Some(main) => main,
        empty => {
            if chain.capture_number().is_some() {
                return Err(Error::not_capturable(CALL, "allocate a main gradient, as a first use does"));
            }
            let dims = shards.shard_dims();
            let make = if capturable { Tensor::zeros } else { Tensor::empty };
            let sums = make(&chain.device, dtype.accumulator(), &dims)?;
            empty.insert(MainGradient { sums, first: !capturable, summed: false })
        }
    };
    let shares = match chain.options.reduction {
        Reduction::Pairwise => {
            let [rows, bytes] = [shards.shard_dims()[0], shards.shard_dims()[0] * gradient.row_bytes()];
            let own = D::slice(gradient.data(), chain.rank() * bytes..(chain.rank() + 1) * bytes);
            let own = TensorRef::new(own, dtype, &[rows, shards.shard_dims()[1]])?;
            Shares { own, rank: chain.rank(), others: reduced, scale: chain.factor(), first: *first }
        }
        Reduction::Native => Shares::together(reduced, sums.view().count(), chain.factor(), *first)?,
    };
    chain.device.add_shares(shares, sums.view_mut())?;
    *first = false;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::dtype::DType;
    use crate::error::CommError;
    use crate::etp::test_ranks::ranks;
    use crate::etp::{EtpOptions, Phase, Shard, ShardSource, WeightSpec};
    use crate::weights::WeightSource;

    /// A rank that has no room for the others' shares refuses in the reduction's turn, and the next passes work.
    #[test]
    fn a_rank_without_memory_for_shares_tells_the_others() {
        let found = ranks(2, |comms| {
            let options = EtpOptions { pad: 0, reduction: Reduction::Pairwise, ..EtpOptions::default() };
            let chain = Chain::new(Cpu::new(), comms, options).unwrap();
            let shard = Shard::new(Tensor::zeros(&Cpu::new(), DType::F32, &[2, 16]).unwrap());
            let spec = WeightSpec::new("w", 0, &[4, 16], DType::F32);
            let id = chain.add(spec, Arc::new(shard) as Arc<dyn ShardSource<Cpu>>).unwrap();
            let pass = |phase| {
                chain.begin(phase)?;
                drop(chain.source(id)?.acquire()?);
                if phase == Phase::Backward {
                    chain.submit(chain.gradient_buffer(id)?)?;
                }
                chain.end()
            };
            pass(Phase::Forward).unwrap();
            let held = (chain.rank() == 1).then(|| {
                let mut inner = chain.lock();
                let key = inner.reduced_key(id.0, Reduction::Pairwise);
                let buffer_id = inner.cache.reserve(key);
                inner.cache.take(buffer_id).unwrap()
            });
            let reduced = pass(Phase::Backward).and_then(|()| chain.drain());
            held.into_iter().for_each(|buffer| chain.lock().cache.put(buffer));
            chain.recover(None).unwrap();
            pass(Phase::Forward).and_then(|()| pass(Phase::Backward)).unwrap();
            chain.drain().unwrap();
            reduced
        });
        let [refused, own] = <[_; 2]>::try_from(found).unwrap();
        assert!(matches!(refused, Err(Error::Comm(CommError::Refused { peer: 1, .. }))), "{refused:?}");
        assert!(own.as_ref().is_err_and(|e| e.to_string().contains("in use")), "{own:?}");
    }
}
