//! The dispatcher's calls over the library's.

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Op, Solo, Tag};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::ep::check_tensors::{check_grads, check_inputs, check_outputs, check_slots, check_tokens};
use crate::ep::dispatcher_state::TransportRules;
use crate::ep::{
    DispatchGrads, DispatchInputs, DispatchOutputs, DispatchShape, DispatchSpec, DispatcherKind, Handle, Received,
    RowOrder, TokenDispatcher, WorkBesideRows,
};
use crate::error::{Error, Result};
use crate::nccl_ep::high_throughput::{CombineArgs, PassDirection};
use crate::plan::routing_record;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::library_handle::LibraryHandle;
use super::state::{Algorithm, NcclEp};
use super::steps::{DispatcherCall, RowFormat, high_of};

impl TokenDispatcher<Cuda> for NcclEp {
    fn prepare(
        &mut self,
        ids: TensorRef<'_, Cuda>,
        weights: Option<TensorRef<'_, Cuda>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<Cuda>> {
        let known = (spec.layer, routing_record::fields(spec));
        if self.agreed.contains(&known)
            && let Some(handle) = self.prepare_on_device(ids, weights, spec)?
        {
            return Ok(handle);
        }
        let (accepted, number) = (self.rules(spec), self.core.next());
        let prepared = self.core.prepare(TransportRules { row_order: RowOrder::Slots, accepted }, ids, weights, spec);
        // All ranks have the same now, and each finds it again, whatever it fails at from here on.
        if self.core.has_compared(number) && !self.agreed.contains(&known) {
            self.agreed.push(known);
        }
        let mut handle = prepared?;
        self.attach_routing(&mut handle, LibraryHandle::default());
        // The rows' size is the first dispatch's to know; from then on it is taken to stay.
        if let Some(bytes) = self.known_row() {
            let routed = self.route(&handle, bytes).map_err(|e| self.core.as_peer_error("prepare", e))?;
            self.attach_routing(&mut handle, routed);
        }
        Ok(handle)
    }

    fn dispatch(
        &mut self,
        handle: &Handle<Cuda>,
        inputs: DispatchInputs<'_, Cuda>,
        outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        const CALL: DispatcherCall = DispatcherCall { call: "dispatch", op: Op::Dispatch };
        let checked = check_inputs(CALL.call, handle, &inputs)
            .and_then(|()| check_outputs(CALL.call, handle, &inputs, &outputs))
            .and_then(|()| self.check_sent(&inputs));
        self.check_or_refuse(CALL, handle, checked)?;
        if self.mode == Algorithm::LowLatency {
            return self.send_low_into(CALL, handle, &inputs, outputs);
        }
        let scale = inputs.scales.as_ref().map_or(0, TensorRef::row_bytes);
        let Some((mut rows, mut scales)) = self.window_rows(CALL, handle, RowFormat::of(inputs.tokens), scale)? else {
            return self.send(CALL, handle, &inputs, outputs);
        };
        let DispatchOutputs { tokens, mut weights, scales: out_scales } = outputs;
        let into = DispatchOutputs {
            tokens: rows.view_mut(),
            weights: weights.as_mut().map(TensorMut::reborrow),
            scales: out_scales.is_some().then(|| scales.view_mut()),
        };
        self.send(CALL, handle, &inputs, into)?;
        self.copied(handle, &rows, tokens)?;
        out_scales.map_or(Ok(()), |out| self.copied(handle, &scales, out))
    }

    fn dispatch_rows_overlapped(
        &mut self,
        handle: &Handle<Cuda>,
        inputs: DispatchInputs<'_, Cuda>,
        work: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Received<Cuda>> {
        const CALL: DispatcherCall = DispatcherCall { call: "dispatch_rows", op: Op::Dispatch };
        if self.mode == Algorithm::HighThroughput {
            let received = self.dispatch_rows(handle, inputs)?;
            return work(0).map(|()| received);
        }
        let checked = check_inputs(CALL.call, handle, &inputs).and_then(|()| self.check_sent(&inputs));
        self.check_or_refuse(CALL, handle, checked)?;
        self.send_low(CALL, handle, &inputs, Some(&mut || work(0)))
    }

    fn place_for_return(&mut self, handle: &Handle<Cuda>, dtype: DType, width: usize) -> Result<Option<Tensor<Cuda>>> {
        self.outgoing(handle, (dtype, width))
    }

    fn copies(&self) -> u64 {
        self.windows.copies()
    }

    fn overlaps(&self, _: &Handle<Cuda>) -> WorkBesideRows {
        match self.mode {
            Algorithm::LowLatency => WorkBesideRows::Any,
            _ => WorkBesideRows::None,
        }
    }

    fn dispatch_rows(&mut self, handle: &Handle<Cuda>, inputs: DispatchInputs<'_, Cuda>) -> Result<Received<Cuda>> {
        const CALL: DispatcherCall = DispatcherCall { call: "dispatch_rows", op: Op::Dispatch };
        let checked = check_inputs(CALL.call, handle, &inputs).and_then(|()| self.check_sent(&inputs));
        self.check_or_refuse(CALL, handle, checked)?;
        if self.mode == Algorithm::LowLatency {
            return self.send_low(CALL, handle, &inputs, None);
        }
        let (n, tokens) = (handle.rows(), inputs.tokens);
        let scale = inputs.scales.as_ref().map_or(0, TensorRef::row_bytes);
        let (mut rows, mut scales) = match self.window_rows(CALL, handle, RowFormat::of(tokens), scale)? {
            Some((rows, scales)) => (rows, inputs.scales.is_some().then_some(scales)),
            None => {
                let dims = [n, tokens.row_bytes() / tokens.dtype().size()];
                let rows = self.empty_for(CALL, handle, tokens.dtype(), &dims)?;
                let scales = inputs.scales.map(|s| self.empty_for(CALL, handle, s.dtype(), &[n, s.row_bytes()]));
                (rows, scales.transpose()?)
            }
        };
        let mut weights = inputs.weights.map(|w| self.empty_for(CALL, handle, w.dtype(), &[n])).transpose()?;
        let outputs = DispatchOutputs {
            tokens: rows.view_mut(),
            weights: weights.as_mut().map(Tensor::view_mut),
            scales: scales.as_mut().map(Tensor::view_mut),
        };
        self.send(CALL, handle, &inputs, outputs)?;
        Ok(Received { rows: Some(rows), weights, scales, map: None })
    }

    fn combine(
        &mut self,
        handle: &Handle<Cuda>,
        expert_out: TensorRef<'_, Cuda>,
        mut out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        const CALL: DispatcherCall = DispatcherCall { call: "combine", op: Op::Combine };
        let bytes = expert_out.row_bytes();
        let checked = check_slots(CALL.call, "expert_out", handle, expert_out)
            .and_then(|()| check_tokens(CALL.call, "out", handle, expert_out, &out))
            .and_then(|()| self.check_words(expert_out.dtype(), bytes, 0));
        self.check_or_refuse(CALL, handle, checked)?;
        if self.mode == Algorithm::LowLatency {
            return self.return_low(CALL, handle, expert_out, out.reborrow());
        }
        let left = self.left(CALL, handle, expert_out)?;
        let rows = left.as_ref().map_or(expert_out.borrow(), Tensor::view);
        let rows = CombineArgs { rows, weights: None, out: out.reborrow(), out_weights: None };
        self.collective(CALL, handle, RowFormat::of(expert_out), |routed| {
            high_of(routed)?.combine(PassDirection::Forward, rows)
        })
    }

    fn combine_bwd(
        &mut self,
        handle: &Handle<Cuda>,
        grad: TensorRef<'_, Cuda>,
        grad_expert_out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        const CALL: DispatcherCall = DispatcherCall { call: "combine_bwd", op: Op::CombineBwd };
        self.agreed_backward(CALL.call, handle)?;
        let expected = [handle.rows(), grad.row_bytes() / grad.dtype().size()];
        let checked = self
            .check_grad(CALL.call, handle, grad)
            .and_then(|()| Error::check_dtype(CALL.call, "grad_expert_out", grad.dtype(), grad_expert_out.dtype()))
            .and_then(|()| Error::check_shape(CALL.call, "grad_expert_out", &expected, grad_expert_out.dims()));
        self.check_or_refuse(CALL, handle, checked)?;
        let Some((mut rows, _)) = self.window_rows(CALL, handle, RowFormat::of(grad), 0)? else {
            return self.send_grad(CALL, handle, grad, grad_expert_out);
        };
        self.send_grad(CALL, handle, grad, rows.view_mut())?;
        self.copied(handle, &rows, grad_expert_out)
    }

    fn combine_bwd_rows(&mut self, handle: &Handle<Cuda>, grad: TensorRef<'_, Cuda>) -> Result<Received<Cuda>> {
        const CALL: DispatcherCall = DispatcherCall { call: "combine_bwd_rows", op: Op::CombineBwd };
        self.agreed_backward(CALL.call, handle)?;
        let checked = self.check_grad(CALL.call, handle, grad);
        self.check_or_refuse(CALL, handle, checked)?;
        let mut rows = match self.window_rows(CALL, handle, RowFormat::of(grad), 0)? {
            Some((rows, _)) => rows,
            None => {
                let dims = [handle.rows(), grad.row_bytes() / grad.dtype().size()];
                self.empty_for(CALL, handle, grad.dtype(), &dims)?
            }
        };
        self.send_grad(CALL, handle, grad, rows.view_mut())?;
        Ok(Received { rows: Some(rows), weights: None, scales: None, map: None })
    }

    fn dispatch_bwd(&mut self, handle: &Handle<Cuda>, grads: DispatchGrads<'_, Cuda>) -> Result<()> {
        const CALL: DispatcherCall = DispatcherCall { call: "dispatch_bwd", op: Op::DispatchBwd };
        self.agreed_backward(CALL.call, handle)?;
        let bytes = grads.rows.row_bytes();
        let checked =
            check_grads(CALL.call, handle, &grads).and_then(|()| self.check_words(grads.rows.dtype(), bytes, 0));
        self.check_or_refuse(CALL, handle, checked)?;
        let DispatchGrads { rows, weights, mut d_tokens, mut d_weights } = grads;
        let zeros = self.zeros_unless(weights.is_some(), CALL, handle, &[handle.rows()])?;
        let mut unused = match d_weights {
            None => Some(self.empty_for(CALL, handle, DType::F32, &[handle.tokens(), handle.spec().top_k])?),
            Some(_) => None,
        };
        let (moved, given) = (RowFormat::of(rows), d_weights.as_mut().map(TensorMut::reborrow));
        let left = self.left(CALL, handle, rows)?;
        let rows = CombineArgs {
            rows: left.as_ref().map_or(rows.borrow(), Tensor::view),
            weights: weights.as_ref().map(TensorRef::borrow).or(zeros.as_ref().map(Tensor::view)),
            out: d_tokens.reborrow(),
            out_weights: given.or(unused.as_mut().map(Tensor::view_mut)),
        };
        self.collective(CALL, handle, moved, |routed| high_of(routed)?.combine(PassDirection::Backward, rows))
    }

    fn check(&mut self) -> Result<()> {
        self.core.take_deferred().and_then(|()| self.late())
    }

    fn communicator(&mut self) -> &mut dyn Communicator<Cuda> {
        &mut *self.core.comm
    }

    fn into_communicator(mut self: Box<Self>) -> Result<Box<dyn Communicator<Cuda>>> {
        let ended = self.end();
        // What is dropped is left with a communicator that nobody else is in.
        let alone = Box::new(Solo::new(self.core.device.clone()));
        let comm = std::mem::replace(&mut self.core.comm, alone);
        ended.map(|()| comm)
    }

    fn check_shape(&self, shape: &DispatchShape) -> Result<()> {
        let DispatchShape { hidden, top_k, dtype, capacity, backward, .. } = *shape;
        let spec = DispatchSpec { capacity, backward, returns: Some((dtype, hidden)), ..DispatchSpec::new(0, top_k) };
        self.rules(&spec)?;
        match self.mode {
            Algorithm::HighThroughput => Ok(self.options(&spec, hidden * dtype.size()).check(self.core.ranks())?),
            Algorithm::LowLatency => Ok(()),
        }
    }

    fn kind(&self) -> DispatcherKind {
        match self.mode {
            Algorithm::HighThroughput => DispatcherKind::NcclEp,
            Algorithm::LowLatency => DispatcherKind::NcclEpLowLatency,
        }
    }
}

impl NcclEp {
    /// Ends the library's groups and gives the windows back (collective, where there are any).
    fn end(&mut self) -> Result<()> {
        if self.groups.is_empty() && self.low.is_empty() && self.windows.is_empty() {
            return Ok(());
        }
        // Peers may still read what this rank's groups hold.
        let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
        let checked = refuse_on_error(&mut *self.core.comm, tag, self.core.device.check());
        let met = if checked.is_ok() { self.core.comm.barrier(tag) } else { Ok(()) };
        self.places.clear();
        self.end_windows();
        self.routings.clear();
        self.groups.clear();
        self.low.clear();
        checked.and(met)
    }
}

impl Drop for NcclEp {
    fn drop(&mut self) {
        // Nothing can be reported from here.
        let _ = self.end();
    }
}
