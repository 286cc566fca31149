//! Windows that rows arrive in and leave from: peers write and read them where the layer's kernels do, so nothing is
//! staged.
//!
//! All ranks must use the same window in the same call, so which one it is comes from counts of the collectives that
//! took place, never from what is free. That a window is free when its turn comes again is checked. Why nobody writes
//! what another still reads: rows of a call are read before the collective behind it, and a rank whose next call but
//! one is under way has passed that; so two turns are enough, on either way.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::comm::{Op, SymmetricMemory, Tag};
use crate::cuda::Cuda;
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::reports::gather_reports;
use crate::ep::{Capacity, Handle};
use crate::error::Result;
use crate::tensor::{Tensor, TensorRef};

use super::collective::nccl;
use super::state::{Algorithm, NcclEp};
use super::steps::DispatcherCall;
use super::window_pool::{CountedWindow, WindowDirection, WindowPool};

/// Turns of the way back.
const OUTGOING: usize = 2;

/// Part of a window as a tensor.
fn window_tensor(cuda: &Cuda, from: &CountedWindow, at: usize, dtype: DType, dims: [usize; 2]) -> Result<Tensor<Cuda>> {
    let bytes = dims[0] * dims[1] * dtype.size();
    crate::comm::Span { offset: at, bytes }.check("window_tensor", "rows", from.window.bytes())?;
    // SAFETY: the window outlives its buffers (see `end`), and its turns are what the head of this file says.
    let buffer = unsafe { cuda.borrowed(from.window.base() + at as u64, bytes, &from.buffers) };
    Tensor::from_buffer(buffer, dtype, &dims)
}

impl NcclEp {
    /// The static capacity of a handle whose rows go through windows.
    fn windowed(&self, handle: &Handle<Cuda>) -> Option<usize> {
        let spec = handle.spec();
        match (self.core.config.windows, self.mode, spec.capacity) {
            (1.., Algorithm::HighThroughput, Capacity::Static(_)) => self.fixed(spec),
            _ => None,
        }
    }

    /// Windows of at least so many bytes (collective where there are none yet).
    fn windows_of(&mut self, handle: &Handle<Cuda>, bytes: usize) -> Result<()> {
        if self.windows.bytes >= bytes {
            return Ok(());
        }
        self.core.device.not_captured("dispatch", "allocate windows")?;
        let counts = [self.core.config.windows.max(2), OUTGOING];
        let tag = DispatcherState::tag(handle, Op::Init);
        let mut made: [Vec<CountedWindow>; 2] = Default::default();
        let comm = nccl(&mut self.core)?;
        for (ring, count) in made.iter_mut().zip(counts) {
            for _ in 0..count {
                ring.push(CountedWindow { window: comm.allocate(tag, bytes)?, buffers: Arc::default() });
            }
        }
        let [incoming, outgoing] = made;
        let smaller = std::mem::take(&mut self.windows);
        self.windows.copies = smaller.copies;
        (self.windows.incoming.windows, self.windows.outgoing.windows, self.windows.bytes) =
            (incoming, outgoing, bytes);
        self.windows.all().for_each(|w| self.places.add(WindowPool::place(w)));
        // Their tensors may be alive: they stay until the dispatcher goes.
        self.outgrown.push(smaller);
        Ok(())
    }

    /// Rows and scales for a dispatch to bring, in the window whose turn it is; `None`: not through windows. What only
    /// this rank finds wrong is told.
    pub(super) fn incoming(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        dtype: DType,
        width: usize,
        scale: usize,
    ) -> Result<Option<(Tensor<Cuda>, Tensor<Cuda>)>> {
        self.windows.pending = None;
        let Some(rows) = self.windowed(handle) else { return Ok(None) };
        let bytes = rows * width * dtype.size();
        self.windows_of(handle, (bytes + rows * scale).max(rows * handle.spec().returning_bytes()))?;
        let device = &self.core.device;
        let window_rows = self.windows.incoming.free(step.call).and_then(|window| {
            let tokens = window_tensor(device, window, 0, dtype, [rows, width])?;
            Ok((tokens, window_tensor(device, window, bytes, DType::U8, [rows, scale])?))
        });
        let window_rows = self.refuse_own_error_of(step, handle, window_rows)?;
        self.windows.pending = Some(WindowDirection::Incoming);
        Ok(Some(window_rows))
    }

    /// Memory that the rows of the next way back had better be written to.
    pub(super) fn outgoing(&mut self, handle: &Handle<Cuda>, row: (DType, usize)) -> Result<Option<Tensor<Cuda>>> {
        let (Some(rows), bytes) = (self.windowed(handle), self.windows.bytes) else { return Ok(None) };
        match self.windows.outgoing.free("combine") {
            Ok(window) if rows * row.1 * row.0.size() <= bytes => {
                Ok(Some(window_tensor(&self.core.device, window, 0, row.0, [rows, row.1])?))
            }
            // The rows are copied then, or it is told there.
            _ => Ok(None),
        }
    }

    /// The rows of a way back in the window whose turn it is; `None`: they lie there, or do not go through windows.
    /// An error that only this rank finds is told.
    pub(super) fn left(
        &mut self,
        step: DispatcherCall,
        handle: &Handle<Cuda>,
        rows: TensorRef<'_, Cuda>,
    ) -> Result<Option<Tensor<Cuda>>> {
        self.windows.pending = None;
        let Some(count) = self.windowed(handle) else { return Ok(None) };
        self.windows_of(handle, count * rows.row_bytes())?;
        let here = self.windows.outgoing.current().is_some_and(|w| w.window.base() == rows.data().address());
        let copied = match here {
            true => None,
            false => {
                let copied = self.copied_in(step.call, count, rows);
                let copied = self.refuse_own_error_of(step, handle, copied)?;
                self.windows.copies += 1;
                Some(copied)
            }
        };
        self.windows.pending = Some(WindowDirection::Outgoing);
        Ok(copied)
    }

    /// A copy of rows in the window whose turn it is.
    fn copied_in(&self, call: &'static str, count: usize, rows: TensorRef<'_, Cuda>) -> Result<Tensor<Cuda>> {
        let window = self.windows.outgoing.free(call)?;
        let width = rows.row_bytes() / rows.dtype().size();
        let mut to = window_tensor(&self.core.device, window, 0, rows.dtype(), [count, width])?;
        self.core.device.copy(rows.data(), to.view_mut().into_data())?;
        Ok(to)
    }

    /// Counts a dispatch into plain memory, which was copied.
    pub(super) fn copied_out(&mut self) {
        self.windows.copies += 1;
    }

    /// Gives the windows back, if no rank has a tensor in one; else they stay until the process ends.
    pub(super) fn end_windows(&mut self) {
        let mut all: Vec<WindowPool> = std::mem::take(&mut self.outgrown);
        all.push(std::mem::take(&mut self.windows));
        let count: usize = all.iter().map(|w| w.all().count()).sum();
        if count == 0 {
            return;
        }
        let busy = all.iter().flat_map(WindowPool::all).any(|w| w.buffers.load(Ordering::Acquire) > 0);
        let ranks = gather_reports(&mut self.core, if busy { "busy" } else { "" });
        if !ranks.is_ok_and(|ranks| ranks.iter().all(String::is_empty)) {
            tracing::warn!(windows = count, "windows stay, as tensors lie in them or a rank is gone");
            return;
        }
        let Some(comm) = self.core.comm.native() else { return };
        let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
        for w in all.into_iter().flat_map(|w| w.incoming.windows.into_iter().chain(w.outgoing.windows)) {
            if let Err(error) = comm.release(tag, w.window) {
                tracing::warn!(%error, "a window was not released");
                return;
            }
        }
    }
}
