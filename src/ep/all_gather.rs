//! Every rank gets all tokens; sums over slots are made where the experts are and reduce-scattered.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::dispatcher_state::DispatcherState;
use super::packing::{
    MessageTypes, ReceivedRows, RowMover, RowParts, byte_rows, entries, flat, part_mut, total, unpack,
};
use super::row_transport::{HandleCall, ReturnRows, RowTransport};
use super::{DispatchInputs, DispatcherKind, Handle, RowOrder};

/// Dispatcher over any communicator, best where most tokens visit most ranks. Every call is one collective, but
/// dispatch_bwd, which is two: the tokens' gradients and the weights' have different dtypes.
///
/// A token's outputs are summed per rank in the tokens' dtype, then over ranks in the accumulator type: results
/// differ from the other dispatchers' by rounding.
#[derive(Debug)]
pub struct AllGather<D: Kernels> {
    pub(super) core: DispatcherState<D>,
}

/// Rows that every rank contributes: the most tokens that any has in this step, or may have.
fn padded_tokens<D: Kernels>(handle: &Handle<D>) -> usize {
    handle.tokens.iter().copied().max().unwrap_or(0)
}

impl<D: Kernels> AllGather<D> {
    /// This rank's message, padded to the size that all have.
    fn pack(
        &self,
        inputs: &DispatchInputs<'_, D>,
        parts: RowParts,
        padded_tokens: usize,
        k: usize,
    ) -> Result<Tensor<D>> {
        let device = &self.core.device;
        let messages = parts.messages(&[padded_tokens], &[padded_tokens * k]);
        let mut buffer = Tensor::empty(device, DType::U8, &[total(&messages)])?;
        let mut put = |t: &TensorRef<'_, D>, at: usize| {
            let from = flat(t.borrow())?;
            device.copy(from.data(), part_mut(buffer.view_mut(), at, 1, from.count())?.into_data())
        };
        for m in &messages {
            put(&inputs.tokens, m.start)?;
            inputs.weights.as_ref().map_or(Ok(()), |w| put(w, m.weights))?;
            inputs.scales.as_ref().map_or(Ok(()), |s| put(s, m.scales))?;
        }
        Ok(buffer)
    }

    /// Sums `partial [R, padded_tokens, width]` over ranks into this rank's rows.
    fn scatter(&mut self, step: &HandleCall<'_, D>, partial: &Tensor<D>, out: TensorMut<'_, D>) -> Result<()> {
        let tag = DispatcherState::tag(step.handle, step.op);
        let (padded_tokens, width) = (partial.dims()[1], partial.dims()[2]);
        if out.rows() == padded_tokens {
            return self.core.comm.reduce_scatter(tag, partial.view(), out);
        }
        let sums = Tensor::empty(&self.core.device, partial.dtype(), &[padded_tokens, width]);
        let mut sums = step.refuse_own_error(&mut self.core, sums)?;
        self.core.comm.reduce_scatter(tag, partial.view(), sums.view_mut())?;
        self.core.device.copy(byte_rows(sums.view(), 0..out.rows())?.data(), out.into_data())
    }

    /// Room for all ranks' tokens, filled by [`fill`](Self::fill).
    fn partial(
        &self,
        handle: &Handle<D>,
        (dtype, dims): (DType, &[usize]),
        fill: impl Fn(TensorRef<'_, D>, TensorMut<'_, D>) -> Result<()>,
    ) -> Result<Tensor<D>> {
        let mut partial = Tensor::empty(&self.core.device, dtype, dims)?;
        self.fill(handle, &mut partial, fill)?;
        Ok(partial)
    }

    /// Runs `fill` on each rank's block of `partial [R, padded_tokens, width]` with its tokens' part of the return map, and
    /// zeroes the rows that no token has.
    fn fill(
        &self,
        handle: &Handle<D>,
        partial: &mut Tensor<D>,
        fill: impl Fn(TensorRef<'_, D>, TensorMut<'_, D>) -> Result<()>,
    ) -> Result<()> {
        let (padded_tokens, width, dtype) = (partial.dims()[1], partial.dims()[2], partial.dtype());
        let (k, row) = (handle.spec().top_k, width * dtype.size());
        if handle.tokens.iter().all(|t| *t == padded_tokens) {
            let rows = handle.tokens.len() * padded_tokens;
            return fill(handle.plan.return_map.view(), partial.view_mut().reshape(&[rows, width])?);
        }
        let mut first = 0;
        for (r, &tokens) in handle.tokens.iter().enumerate() {
            let map = entries(handle.plan.return_map.view(), first * k..(first + tokens) * k)?.reshape(&[tokens, k])?;
            let block = part_mut(partial.view_mut(), r * padded_tokens * row, tokens, row)?;
            fill(map, TensorMut::new(block.into_data(), dtype, &[tokens, width])?)?;
            let tail = part_mut(partial.view_mut(), (r * padded_tokens + tokens) * row, padded_tokens - tokens, row)?;
            self.core.device.zero(tail.into_data())?;
            first += tokens;
        }
        Ok(())
    }
}

impl<D: Kernels> RowTransport<D> for AllGather<D> {
    const KIND: DispatcherKind = DispatcherKind::AllGather;
    const ROW_ORDER: RowOrder = RowOrder::AllRows;

    fn core(&mut self) -> &mut DispatcherState<D> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<D>> {
        Ok(self.core)
    }

    fn send(&mut self, step: &HandleCall<'_, D>, inputs: &DispatchInputs<'_, D>) -> Result<ReceivedRows<D>> {
        let handle = step.handle;
        let tag = DispatcherState::tag(handle, step.op);
        let (padded_tokens, k, parts) = (padded_tokens(handle), handle.spec().top_k, RowParts::of(inputs));
        let (ranks, dtype) = (self.core.ranks(), inputs.tokens.dtype());
        let width = parts.row / dtype.size();
        if parts.rows_only() && handle.tokens.iter().all(|t| *t == padded_tokens) {
            let shorter = inputs.tokens.rows() < padded_tokens;
            let padded = shorter.then(|| self.pack(inputs, parts, padded_tokens, k)).transpose();
            let rows = Tensor::empty(&self.core.device, dtype, &[ranks * padded_tokens, width]);
            let buffers = padded.and_then(|padded| Ok((padded, rows?)));
            let (padded, mut rows) = step.refuse_own_error(&mut self.core, buffers)?;
            let own = match &padded {
                Some(bytes) => TensorRef::new(bytes.view().data(), dtype, &[padded_tokens, width])?,
                None => inputs.tokens.borrow(),
            };
            self.core.comm.all_gather(tag, own, rows.view_mut())?;
            return Ok(ReceivedRows { rows: Some(rows), weights: None, scales: None });
        }
        let messages = parts.messages(&vec![padded_tokens; ranks], &vec![padded_tokens * k; ranks]);
        let packed = self.pack(inputs, parts, padded_tokens, k);
        let buffer = Tensor::empty(&self.core.device, DType::U8, &[total(&messages)]);
        let buffers = packed.and_then(|packed| Ok((packed, buffer?)));
        let (packed, mut buffer) = step.refuse_own_error(&mut self.core, buffers)?;
        self.core.comm.all_gather(tag, packed.view(), buffer.view_mut())?;
        let choices: Vec<usize> = handle.tokens.iter().map(|t| t * k).collect();
        let weight_dtype = inputs.weights.map_or(dtype.accumulator(), |w| w.dtype());
        let content = MessageTypes { dtype, width, weight_dtype };
        let received = (&handle.tokens[..], &choices[..]);
        let unpacked = unpack(&self.core.device, buffer.view(), &messages, received, parts, content);
        step.refuse_own_error(&mut self.core, unpacked)
    }

    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()> {
        let handle = step.handle;
        let (ranks, padded_tokens, k) = (self.core.ranks(), padded_tokens(handle), handle.spec().top_k);
        let dtype = back.rows.dtype();
        let width = back.rows.row_bytes() / dtype.size();
        let partial = self.partial(handle, (dtype, &[ranks, padded_tokens, width]), |map, out| {
            RowMover::of(&self.core.device, handle).reduce(back.rows.borrow(), map, out)
        });
        let partial = step.refuse_own_error(&mut self.core, partial)?;
        self.scatter(step, &partial, back.out)?;
        if !back.with_weights {
            return Ok(());
        }
        drop(partial);
        let acc = dtype.accumulator();
        let partial = self.partial(handle, (acc, &[ranks, padded_tokens, k]), |map, out| {
            let device = &self.core.device;
            match &back.weights {
                Some(w) => RowMover::of(device, handle).gather_elements(w.borrow(), map, out),
                None => device.zero(out.into_data()),
            }
        });
        let unused = match &back.out_weights {
            Some(_) => Ok(None),
            None => Tensor::empty(&self.core.device, acc, &[handle.tokens(), k]).map(Some),
        };
        let buffers = partial.and_then(|partial| Ok((partial, unused?)));
        let (partial, mut unused) = step.refuse_own_error(&mut self.core, buffers)?;
        match (back.out_weights, &mut unused) {
            (Some(out), _) => self.scatter(step, &partial, out),
            (None, Some(unused)) => self.scatter(step, &partial, unused.view_mut()),
            (None, None) => Ok(()),
        }
    }
}
