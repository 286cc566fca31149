//! When shards that are sent quantized are cast: in the computation's order, before the first gather of a state, and
//! behind one all-reduce of the amaxes of all of them.

use crate::comm::Tag;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use crate::etp::buffers::cache::{Buffer, BufferId, BufferKey, BufferUsage};
use crate::etp::buffers::stream_pair::TransferBuffer;
use crate::etp::chain::ChainState;
use crate::etp::chain::collective_state::JoinedAmaxes;
use crate::etp::collective::Collective;
use crate::etp::{CALL, ShardDevice};

impl<D: ShardDevice> ChainState<D> {
    /// Casts a weight's shard, if that has not been done in this state, on all ranks alike. The outer error is one of
    /// all ranks, which gather nothing then; the inner one is this rank's own, for the gather to tell.
    pub fn cast(&mut self, weight: usize, tag: Tag, epoch: u64) -> Result<Result<()>> {
        let Some(quantized) = self.weights[weight].quantized.clone() else { return Ok(Ok(())) };
        if quantized.is_of(epoch) {
            return Ok(Ok(()));
        }
        if quantized.joined() > 0 && self.amaxes.as_ref().is_none_or(|amaxes| amaxes.epoch != epoch) {
            self.join_amaxes(tag, epoch)?;
        }
        if self.cache.fixed && quantized.kept() == 0 {
            return Ok(Err(Error::not_capturable(CALL, "allocate a cast, as a first use does")));
        }
        let compute = self.gathers.streams.compute.clone();
        let amaxes =
            self.amaxes.as_mut().filter(|_| quantized.joined() > 0).map(|amaxes| amaxes.buffer.tensor.view_mut());
        Ok(quantized.cast(&compute, epoch, &*self.weights[weight].source, amaxes))
    }

    /// The amaxes, for a weight that has any.
    pub fn amaxes_of(&self, joined: usize) -> Option<TensorRef<'_, D>> {
        self.amaxes.as_ref().filter(|_| joined > 0).map(|amaxes| amaxes.buffer.tensor.view())
    }

    /// The largest of all ranks' amaxes, of every weight that has any.
    fn join_amaxes(&mut self, tag: Tag, epoch: u64) -> Result<()> {
        let dims = vec![self.quantized().map(|quantized| quantized.joined()).sum()];
        let key = BufferKey { dims, dtype: DType::F32, usage: BufferUsage::Amaxes, parity: 0 };
        if let Some(JoinedAmaxes { buffer, .. }) = self.amaxes.take() {
            self.cache.put(buffer);
        }
        let buffer_id = self.cache.reserve(key);
        // A rank that has no room for them, or whose own cannot be had, tells the others, which are in the all-reduce.
        let mut buffer = match self.cache.take(buffer_id) {
            Ok(buffer) => buffer,
            Err(error) => return self.gathers.refuse(tag, error).wait().outcome,
        };
        let after =
            self.own_amaxes(buffer.tensor.view_mut()).and_then(|()| self.gathers.streams.compute.record_event());
        let amaxes = TransferBuffer::new(buffer, &self.gathers.streams);
        let pending = self.gathers.enqueue_after(Collective::Join { tag, amaxes }, after);
        let (mut buffers, outcome) = self.gathers.receive(pending);
        match (buffers.pop(), outcome) {
            (Some(buffer), Ok(())) => {
                self.amaxes = Some(JoinedAmaxes { epoch, buffer });
                Ok(())
            }
            (buffer, outcome) => Err(self.lost(buffer, Some(buffer_id), outcome)),
        }
    }

    fn own_amaxes(&self, mut all: TensorMut<'_, D>) -> Result<()> {
        let compute = &self.gathers.streams.compute;
        compute.zero(all.reborrow().into_data())?;
        let weights = self.weights.iter().filter_map(|weight| Some((weight, weight.quantized.as_ref()?)));
        for (weight, quantized) in weights.filter(|(_, quantized)| quantized.joined() > 0) {
            quantized.own_amaxes(compute, &*weight.source, all.reborrow())?;
        }
        Ok(())
    }

    /// Takes back what a failed collective has left of its buffer.
    pub fn lost(&mut self, buffer: Option<Buffer<D>>, buffer_id: Option<BufferId>, outcome: Result<()>) -> Error {
        match (buffer, buffer_id) {
            (Some(buffer), _) => self.cache.put(buffer),
            (None, Some(buffer_id)) => self.cache.forget(buffer_id),
            (None, None) => {}
        }
        outcome.err().unwrap_or_else(|| Error::invalid(CALL, "collective", "its buffer", "none"))
    }
}
