//! Code that the dispatcher's calls share: their checks, the collective around them, and rows on both ways.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use crate::comm::Op;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::check_tensors::{check_float, check_inputs};
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::row_transport::written;
use crate::ep::{DispatchInputs, DispatchOutputs, Handle};
use crate::error::{Error, Result};
use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::high_throughput::{self, DispatchArgs, PassDirection};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::collective::around;
use super::library_handle::{LibraryHandle, SharedLibraryHandle};
use super::state::{Algorithm, NcclEp};

impl NcclEp {
    /// Passes this rank's checks before a collective, or tells the others that they failed.
    pub(super) fn check_or_refuse(
        &mut self,
        DispatcherCall { call, op }: DispatcherCall,
        handle: &Handle<Cuda>,
        checked: Result<()>,
    ) -> Result<()> {
        let all = self.core.check_handle(call, handle).and(checked);
        self.core.check_or_refuse(DispatcherState::tag(handle, op), all)
    }

    /// Refuses a backward that was not agreed on. All ranks know, so nobody waits; a handle of another group is
    /// [`check_or_refuse`](Self::check_or_refuse)'s to report.
    pub(super) fn agreed_backward(&self, call: &'static str, handle: &Handle<Cuda>) -> Result<()> {
        match self.core.check_handle(call, handle) {
            Ok(()) => handle.check_backward(call),
            Err(_) => Ok(()),
        }
    }

    /// Gives a new handle its routing.
    pub(super) fn attach_routing(&mut self, handle: &mut Handle<Cuda>, routed: LibraryHandle) {
        let routing = Arc::new(SharedLibraryHandle::new(routed));
        self.routings.retain(|_, routing| routing.strong_count() > 0);
        self.routings.insert(handle.sequence(), Arc::downgrade(&routing));
        handle.keep_alive(routing);
    }

    /// The dispatcher's data of a handle's routing.
    pub(super) fn routing_of(&self, call: &'static str, handle: &Handle<Cuda>) -> Result<Arc<SharedLibraryHandle>> {
        // A group has one dispatcher, and numbers its handles.
        self.core.check_handle(call, handle)?;
        let routing = self.routings.get(&handle.sequence()).and_then(Weak::upgrade);
        routing.ok_or_else(|| Error::invalid(call, "handle", "one that NCCL EP prepared", "one without a routing"))
    }

    /// One call of the library's handle, as a collective.
    pub(super) fn collective(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        rows: RowFormat,
        calls: impl FnOnce(&mut LibraryHandle) -> Result<()>,
    ) -> Result<()> {
        let done = self.collective_of(step, handle, rows, calls);
        self.windows.finish_collective(done.is_ok());
        done
    }

    fn collective_of(
        &mut self,
        DispatcherCall { call, op }: DispatcherCall,
        handle: &Handle<Cuda>,
        rows: RowFormat,
        calls: impl FnOnce(&mut LibraryHandle) -> Result<()>,
    ) -> Result<()> {
        let (named, tag) = ((call, rows.dtype, rows.bytes), DispatcherState::tag(handle, op));
        let routing = self.routing_of(call, handle)?;
        let mut guard = open(&routing);
        let row_bytes = rows.bytes.max(handle.spec().returning_bytes());
        if guard.row_bytes().is_none_or(|most| most < row_bytes) {
            // The ranks' calls are compared before what they bring about, by what brings it about: `returns`, which
            // may, is in no record.
            around(&mut self.core, (call, rows.dtype, row_bytes), tag, || Ok(()))
                .map_err(|e| self.core.as_peer_error(call, e))?;
            let routed = self.route(handle, row_bytes);
            *guard = routed.map_err(|e| self.core.as_peer_error(call, e))?;
        }
        let done = around(&mut self.core, named, tag, || calls(&mut guard));
        done.map_err(|e| self.core.as_peer_error(call, e))
    }

    /// The library moves rows in 16-byte words, and sums numbers by 8.
    pub(super) fn check_words(&self, dtype: DType, row: usize, scale: usize) -> Result<()> {
        if self.mode == Algorithm::LowLatency {
            return self.check_low_row(dtype, row, scale);
        }
        let (bytes, width) = (row + scale, (row + scale) / dtype.size());
        if bytes == 0 || !bytes.is_multiple_of(16) {
            return Err(NcclEpError::RowBytes { what: "a row", bytes }.into());
        }
        match dtype == DType::U8 || width.is_multiple_of(8) {
            true => Ok(()),
            false => Err(NcclEpError::Width { width }.into()),
        }
    }

    /// A gradient `[T, H]` of the output.
    pub(super) fn check_grad(
        &self,
        call: &'static str,
        handle: &Handle<Cuda>,
        grad: TensorRef<'_, Cuda>,
    ) -> Result<()> {
        let inputs = DispatchInputs { tokens: grad.borrow(), weights: None, scales: None };
        check_float(call, "grad", grad)?;
        check_inputs(call, handle, &inputs)?;
        self.check_sent(&inputs)
    }

    /// Rows and scales of a dispatch.
    pub(super) fn check_sent(&self, inputs: &DispatchInputs<'_, Cuda>) -> Result<()> {
        let scale = inputs.scales.as_ref().map_or(0, TensorRef::row_bytes);
        self.check_words(inputs.tokens.dtype(), inputs.tokens.row_bytes(), scale)
    }

    pub(super) fn empty(&self, dtype: DType, dims: &[usize]) -> Result<Tensor<Cuda>> {
        Tensor::empty(&self.core.device, dtype, dims)
    }

    /// Refuses with an error that this rank alone has found between its checks and the collective, memory that it has
    /// not for instance: the others, which are on their way there, are told of an error.
    pub(super) fn refuse_own_error_of<T>(
        &mut self,
        DispatcherCall { op, .. }: DispatcherCall,
        handle: &Handle<Cuda>,
        found: Result<T>,
    ) -> Result<T> {
        self.core.check_or_refuse(DispatcherState::tag(handle, op), found)
    }

    /// Memory for a collective; see [`refuse_own_error_of`](Self::refuse_own_error_of).
    pub(super) fn empty_for(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Tensor<Cuda>> {
        let memory = self.empty(dtype, dims);
        self.refuse_own_error_of(step, handle, memory)
    }

    /// The same where there is none that a caller has given, of zeros.
    pub(super) fn zeros_unless(
        &mut self,
        given: bool,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        dims: &[usize],
    ) -> Result<Option<Tensor<Cuda>>> {
        let zeros = (!given).then(|| Tensor::zeros(&self.core.device, DType::F32, dims)).transpose();
        self.refuse_own_error_of(step, handle, zeros)
    }

    /// Rows of a window, where the handle's arrive in one.
    pub(super) fn window_rows(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        row: RowFormat,
        scale: usize,
    ) -> Result<Option<(Tensor<Cuda>, Tensor<Cuda>)>> {
        self.incoming(step, handle, row.dtype, row.bytes / row.dtype.size(), scale)
    }

    /// Rows of a window to where the caller wants them.
    pub(super) fn copied(&mut self, handle: &Handle<Cuda>, from: &Tensor<Cuda>, to: TensorMut<'_, Cuda>) -> Result<()> {
        let end = written(handle) * from.view().row_bytes();
        self.copied_out();
        let to = Cuda::slice_mut(to.into_data(), 0..end);
        self.core.device.copy(Cuda::slice(from.view().data(), 0..end), to)
    }

    /// Forward, into slots.
    pub(super) fn send(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        mut outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        // The library wants weights forward, whoever needs them.
        let of_tokens = [handle.tokens(), handle.spec().top_k];
        let zeros = self.zeros_unless(inputs.weights.is_some(), step, handle, &of_tokens)?;
        let mut unused = match &outputs.weights {
            None => Some(self.empty_for(step, handle, DType::F32, &[handle.rows()])?),
            Some(_) => None,
        };
        let given = outputs.weights.as_mut().map(TensorMut::reborrow);
        let rows = DispatchArgs {
            tokens: inputs.tokens.borrow(),
            weights: inputs.weights.as_ref().map(TensorRef::borrow).or(zeros.as_ref().map(Tensor::view)),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
            out: outputs.tokens.reborrow(),
            out_weights: given.or(unused.as_mut().map(Tensor::view_mut)),
            out_scales: outputs.scales.as_mut().map(TensorMut::reborrow),
        };
        let moved = RowFormat { dtype: inputs.tokens.dtype(), bytes: row_bytes(inputs) };
        self.collective(step, handle, moved, |routed| high_of(routed)?.dispatch(PassDirection::Forward, rows))
    }

    /// The output's gradient, into slots.
    pub(super) fn send_grad(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        grad: TensorRef<'_, Cuda>,
        mut out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        let (tokens, out) = (grad.borrow(), out.reborrow());
        let rows = DispatchArgs { tokens, weights: None, scales: None, out, out_weights: None, out_scales: None };
        self.collective(step, handle, RowFormat::of(grad), |routed| {
            high_of(routed)?.dispatch(PassDirection::Backward, rows)
        })
    }
}

/// The handle for high throughput.
pub(super) fn high_of(routed: &mut LibraryHandle) -> Result<&mut high_throughput::HighThroughputHandle> {
    match routed {
        LibraryHandle::HighThroughput(handle) => Ok(handle),
        _ => Err(Error::invalid("dispatch", "handle", "one for high throughput", "another")),
    }
}

/// A call and what it is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct DispatcherCall {
    pub(super) call: &'static str,
    pub(super) op: Op,
}

/// Rows that a call moves; the same on all ranks.
#[derive(Clone, Copy)]
pub(super) struct RowFormat {
    pub(super) dtype: DType,
    /// Of a row and its scales.
    pub(super) bytes: usize,
}

impl RowFormat {
    pub(super) fn of(t: TensorRef<'_, Cuda>) -> Self {
        Self { dtype: t.dtype(), bytes: t.row_bytes() }
    }
}

/// Locks a handle's data, to be read or written.
pub(super) fn open(routing: &SharedLibraryHandle) -> MutexGuard<'_, LibraryHandle> {
    routing.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of a token and its scales.
pub(super) fn row_bytes(inputs: &DispatchInputs<'_, Cuda>) -> usize {
    inputs.tokens.row_bytes() + inputs.scales.as_ref().map_or(0, |s| s.row_bytes())
}
