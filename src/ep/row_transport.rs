//! The dispatcher's calls over two movements: tokens out to the experts' ranks, and slots back to their tokens.

use std::fmt;

use crate::comm::{Communicator, Op};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Arrivals, Kernels, RouteAndPlan, RowSource};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::dispatcher_state::{DispatcherState, TransportRules};
use super::packing::{ReceivedRows, RowMover, byte_rows_mut, entries};
use super::{
    ArrivingRows, DispatchGrads, DispatchInputs, DispatchOutputs, DispatchShape, DispatchSpec, DispatcherKind, Handle,
    ProductOfRows, Received, RowOrder, Stats, TokenDispatcher, WorkBesideRows,
};

use super::check_tensors::{check_float, check_grads, check_inputs, check_outputs, check_slots, check_tokens};

/// One call over one handle.
#[derive(Debug)]
pub(crate) struct HandleCall<'a, D: Kernels> {
    pub call: &'static str,
    pub op: Op,
    pub handle: &'a Handle<D>,
}

impl<D: Kernels> HandleCall<'_, D> {
    /// Passes on what this rank makes of rows for a movement, or of those that have come and are to go back. The others hear of
    /// an error where they meet this rank next. Behind a step's last movement nobody is told: the others may be in a
    /// collective of another communicator next, where a refusal in this one would wait for them.
    pub fn refuse_own_error<T>(&self, core: &mut DispatcherState<D>, result: Result<T>) -> Result<T> {
        core.refuse_own_error(DispatcherState::tag(self.handle, self.op), result)
    }
}

/// Arguments of the way back of rows, from slots to tokens.
#[derive(Debug)]
pub(crate) struct ReturnRows<'a, D: Kernels> {
    /// `[N, H]`.
    pub rows: TensorRef<'a, D>,
    /// Whether weights travel too; the same on all ranks.
    pub with_weights: bool,
    /// `[N]`; zeros where absent.
    pub weights: Option<TensorRef<'a, D>>,
    /// `[T, H]`.
    pub out: TensorMut<'a, D>,
    /// `[T, K]`.
    pub out_weights: Option<TensorMut<'a, D>>,
}

/// How rows travel. Arguments have been checked; each movement is one collective unless said otherwise. What fails on this
/// rank alone before rows have come, such as memory that it has not got, a movement tells the others itself.
pub(crate) trait RowTransport<D: Kernels>: fmt::Debug + Send {
    const KIND: DispatcherKind;
    const ROW_ORDER: RowOrder;
    /// Most choices K of a token.
    const MOST_CHOICES: usize = usize::MAX;
    /// Whether nothing comes back but sums of a forward.
    const FORWARD_ONLY: bool = false;
    fn core(&mut self) -> &mut DispatcherState<D>;
    /// Gives back what it has made of the communicator (collective where there is any).
    ///
    /// # Errors
    /// A collective's.
    fn into_core(self: Box<Self>) -> Result<DispatcherState<D>>;
    /// What it needs of a routing beside the plan (collective where it asks the other ranks).
    ///
    /// # Errors
    /// A collective's; no memory, which the others are told.
    fn complete(&mut self, handle: &mut Handle<D>) -> Result<()> {
        let _ = handle;
        Ok(())
    }
    /// Tells, once, of ranks that calls have gone on without.
    fn check_late(&mut self) -> Result<()> {
        Ok(())
    }
    /// Tokens to the ranks of their experts, in the order that the plan's `row_map` and `weight_map` index.
    fn send(&mut self, step: &HandleCall<'_, D>, inputs: &DispatchInputs<'_, D>) -> Result<ReceivedRows<D>>;
    /// Whether products of some rows may run while they travel; the same on all ranks.
    fn may_overlap_products(&self) -> bool {
        false
    }
    /// Whether those of rows of so many bytes do, over such a handle; the same on all ranks.
    fn overlaps_products(&self, handle: &Handle<D>, row_bytes: usize) -> bool {
        let _ = (handle, row_bytes);
        false
    }
    /// The same as [`send`](Self::send), and `product` of these rows, which is enqueued behind it, waits in its kernel for
    /// what it is told, and starts while they come.
    fn send_with_product(
        &mut self,
        step: &HandleCall<'_, D>,
        inputs: &DispatchInputs<'_, D>,
        product: &mut ProductOfReceived<'_, D>,
    ) -> Result<ReceivedRows<D>> {
        let received = self.send(step, inputs)?;
        product(&received, None);
        Ok(received)
    }
    /// What of a rank's own work can run while rows travel over such a handle; the same on all ranks.
    fn overlaps(&self, handle: &Handle<D>) -> WorkBesideRows {
        let _ = handle;
        WorkBesideRows::None
    }
    /// The same as [`send`](Self::send), and `work`, which is enqueued behind it, may run meanwhile, and is told how many SMs
    /// that takes.
    fn send_beside(
        &mut self,
        step: &HandleCall<'_, D>,
        inputs: &DispatchInputs<'_, D>,
        work: &mut dyn FnMut(usize),
    ) -> Result<ReceivedRows<D>> {
        let received = self.send(step, inputs)?;
        work(0);
        Ok(received)
    }
    /// Refuses rows that a forward's way back does not take.
    fn check_combine(&self, call: &'static str, expert_out: TensorRef<'_, D>) -> Result<()> {
        let _ = (call, expert_out);
        Ok(())
    }
    /// Sums of the tokens' slots, and each slot's weight to its choice.
    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()>;
    /// The same, and `work`, which is enqueued behind it, runs meanwhile, and is told how many SMs that takes.
    fn return_sums_with_products(
        &mut self,
        step: &HandleCall<'_, D>,
        back: ReturnRows<'_, D>,
        work: &mut dyn FnMut(usize),
    ) -> Result<()> {
        self.return_sums(step, back)?;
        work(0);
        Ok(())
    }
}

/// A product of rows, and what it waits for where they are still coming.
pub(crate) type ProductOfReceived<'p, D> = dyn FnMut(&ReceivedRows<D>, Option<Arrivals<'_, D>>) + 'p;

/// Whether rows of so many choices can travel, and, where asked for, their gradients.
///
/// # Errors
/// [`Error::Invalid`]: more than [`RowTransport::MOST_CHOICES`]; backward of a transport for forward alone.
fn check_steps<D: Kernels, C: RowTransport<D>>(call: &'static str, top_k: usize, backward: bool) -> Result<()> {
    if backward && C::FORWARD_ONLY {
        let expected = format!("false ({} is for forward only)", C::KIND);
        return Err(Error::invalid(call, "spec.backward", expected, "true"));
    }
    if top_k > C::MOST_CHOICES {
        let expected = format!("at most {} ({}; another dispatcher takes more)", C::MOST_CHOICES, C::KIND);
        return Err(Error::invalid(call, "spec.top_k", expected, top_k));
    }
    Ok(())
}

/// A rank's checks and the exchange's error, each in its place.
fn checked<D: Kernels, C: RowTransport<D>>(
    row_transport: &mut C,
    step: &HandleCall<'_, D>,
    arguments: Result<()>,
) -> Result<()> {
    let core = row_transport.core();
    let all = core.check_handle(step.call, step.handle).and(arguments);
    core.check_in_step(DispatcherState::tag(step.handle, step.op), all)
}

fn send_rows<D: Kernels, C: RowTransport<D>>(
    row_transport: &mut C,
    step: &HandleCall<'_, D>,
    inputs: &DispatchInputs<'_, D>,
) -> Result<ReceivedRows<D>> {
    let result = row_transport.send(step, inputs);
    result.map_err(|e| row_transport.core().as_peer_error(step.call, e))
}

/// As [`send_rows`], with a product that starts while they come.
fn send_with_product<D: Kernels, C: RowTransport<D>>(
    row_transport: &mut C,
    step: &HandleCall<'_, D>,
    inputs: &DispatchInputs<'_, D>,
    product: &mut ProductOfRows<'_, D>,
) -> Result<ReceivedRows<D>> {
    let handle = step.handle;
    let result = row_transport.send_with_product(step, inputs, &mut |received, arrivals| {
        let base = match &received.rows {
            Some(rows) => rows.view(),
            None => inputs.tokens.borrow(),
        };
        let arrivals = arrivals.as_ref().map(Arrivals::borrow);
        let rows = RowSource { arrivals, ..RowSource::mapped(base, handle.row_map()) };
        let weights = received.weights.as_ref().map(Tensor::view);
        product(ArrivingRows { rows, weights, weight_map: handle.plan.weight_map.view() });
    });
    result.map_err(|e| row_transport.core().as_peer_error(step.call, e))
}

/// Rows that have come, with their weights in slot order.
fn with_slot_weights<D: Kernels>(
    core: &mut DispatcherState<D>,
    step: &HandleCall<'_, D>,
    received: ReceivedRows<D>,
    inputs: &DispatchInputs<'_, D>,
) -> Result<Received<D>> {
    let gathered = slot_weights(core, step.handle, weights_of(&received, inputs));
    let weights = step.refuse_own_error(core, gathered)?;
    Ok(Received { rows: received.rows, weights, scales: received.scales, map: None })
}

fn slot_weights<D: Kernels>(
    core: &DispatcherState<D>,
    handle: &Handle<D>,
    source: Result<Option<TensorRef<'_, D>>>,
) -> Result<Option<Tensor<D>>> {
    let Some(source) = source? else { return Ok(None) };
    let mut slots = Tensor::empty(&core.device, source.dtype(), &[handle.rows()])?;
    RowMover::of(&core.device, handle).gather(source, handle.plan.weight_map.view(), slots.view_mut())?;
    Ok(Some(slots))
}

fn return_rows<D: Kernels, C: RowTransport<D>>(
    row_transport: &mut C,
    step: &HandleCall<'_, D>,
    back: ReturnRows<'_, D>,
) -> Result<()> {
    let result = row_transport.return_sums(step, back);
    result.map_err(|e| row_transport.core().as_peer_error(step.call, e))
}

impl<D: Kernels, C: RowTransport<D>> TokenDispatcher<D> for C {
    fn prepare(
        &mut self,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>> {
        let accepted = check_steps::<D, C>("prepare", spec.top_k, spec.backward);
        let accepted = accepted.and_then(|()| self.core().check_patience("prepare", spec));
        let rules = TransportRules { row_order: C::ROW_ORDER, accepted };
        let mut handle = self.core().prepare(rules, ids, weights, spec)?;
        let completed = self.complete(&mut handle);
        completed.map_err(|e| self.core().as_peer_error("prepare", e))?;
        Ok(handle)
    }

    fn route_and_prepare(&mut self, call: RouteAndPlan<'_, D>) -> Result<Option<(Handle<D>, Tensor<D>)>> {
        match C::ROW_ORDER {
            RowOrder::Local => self.core().route_and_plan(call),
            _ => Ok(None),
        }
    }

    fn dispatch(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        outputs: DispatchOutputs<'_, D>,
    ) -> Result<()> {
        let step = HandleCall { call: "dispatch", op: Op::Dispatch, handle };
        let arguments =
            check_inputs(step.call, handle, &inputs).and_then(|()| check_outputs(step.call, handle, &inputs, &outputs));
        checked(self, &step, arguments)?;
        let received = send_rows(self, &step, &inputs)?;
        let core = self.core();
        let end = written(handle);
        let fill = |source: Option<TensorRef<'_, D>>, map: TensorRef<'_, D>, out: Option<TensorMut<'_, D>>| match (
            source, out,
        ) {
            (Some(source), Some(out)) => {
                RowMover::of(&core.device, handle).gather(source, entries(map, 0..end)?, byte_rows_mut(out, 0..end)?)
            }
            _ => Ok(()),
        };
        let rows = received.rows.as_ref().map_or(inputs.tokens.borrow(), Tensor::view);
        let scales = received.scales.as_ref().map(Tensor::view).or(inputs.scales.as_ref().map(TensorRef::borrow));
        let filled = fill(Some(rows), handle.row_map(), Some(outputs.tokens))
            .and_then(|()| fill(weights_of(&received, &inputs)?, handle.plan.weight_map.view(), outputs.weights))
            .and_then(|()| fill(scales, handle.row_map(), outputs.scales));
        step.refuse_own_error(core, filled)
    }

    fn dispatch_rows(&mut self, handle: &Handle<D>, inputs: DispatchInputs<'_, D>) -> Result<Received<D>> {
        let step = HandleCall { call: "dispatch_rows", op: Op::Dispatch, handle };
        checked(self, &step, check_inputs(step.call, handle, &inputs))?;
        let received = send_rows(self, &step, &inputs)?;
        with_slot_weights(self.core(), &step, received, &inputs)
    }

    fn overlaps(&self, handle: &Handle<D>) -> WorkBesideRows {
        RowTransport::overlaps(self, handle)
    }

    fn dispatch_rows_overlapped(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        work: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Received<D>> {
        let step = HandleCall { call: "dispatch_rows", op: Op::Dispatch, handle };
        checked(self, &step, check_inputs(step.call, handle, &inputs))?;
        let mut done = Ok(());
        let received = self.send_beside(&step, &inputs, &mut |sms| done = work(sms));
        let received = received.map_err(|e| self.core().as_peer_error(step.call, e))?;
        let received = with_slot_weights(self.core(), &step, received, &inputs)?;
        done.map(|()| received)
    }

    fn may_overlap_products(&self) -> bool {
        RowTransport::may_overlap_products(self)
    }

    fn overlaps_products(&self, handle: &Handle<D>, dtype: DType, width: usize) -> bool {
        RowTransport::overlaps_products(self, handle, width * dtype.size())
    }

    fn dispatch_rows_with_product(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        product: &mut ProductOfRows<'_, D>,
    ) -> Result<Received<D>> {
        let step = HandleCall { call: "dispatch_rows", op: Op::Dispatch, handle };
        checked(self, &step, check_inputs(step.call, handle, &inputs))?;
        let received = send_with_product(self, &step, &inputs, product)?;
        with_slot_weights(self.core(), &step, received, &inputs)
    }

    fn combine(&mut self, handle: &Handle<D>, expert_out: TensorRef<'_, D>, mut out: TensorMut<'_, D>) -> Result<()> {
        let step = HandleCall { call: "combine", op: Op::Combine, handle };
        let arguments = check_slots(step.call, "expert_out", handle, expert_out)
            .and_then(|()| check_tokens(step.call, "out", handle, expert_out, &out))
            .and_then(|()| self.check_combine(step.call, expert_out));
        checked(self, &step, arguments)?;
        let (rows, out) = (expert_out.borrow(), out.reborrow());
        let back = ReturnRows { rows, with_weights: false, weights: None, out, out_weights: None };
        return_rows(self, &step, back)
    }

    fn combine_bwd(
        &mut self,
        handle: &Handle<D>,
        grad: TensorRef<'_, D>,
        grad_expert_out: TensorMut<'_, D>,
    ) -> Result<()> {
        let step = HandleCall { call: "combine_bwd", op: Op::CombineBwd, handle };
        let inputs = DispatchInputs { tokens: grad.borrow(), weights: None, scales: None };
        let arguments = check_float(step.call, "grad", grad)
            .and_then(|()| check_inputs(step.call, handle, &inputs))
            .and_then(|()| Error::check_dtype(step.call, "grad_expert_out", grad.dtype(), grad_expert_out.dtype()))
            .and_then(|()| {
                let expected = [handle.rows(), grad.row_bytes() / grad.dtype().size()];
                Error::check_shape(step.call, "grad_expert_out", &expected, grad_expert_out.dims())
            });
        agreed(self, &step)?;
        checked(self, &step, arguments)?;
        let received = send_rows(self, &step, &inputs)?;
        let core = self.core();
        let end = written(handle);
        let rows = received.rows.as_ref().map_or(grad.borrow(), Tensor::view);
        let mover = RowMover::of(&core.device, handle);
        let gathered = byte_rows_mut(grad_expert_out, 0..end)
            .and_then(|out| mover.gather(rows, entries(handle.row_map(), 0..end)?, out));
        step.refuse_own_error(core, gathered)
    }

    fn combine_bwd_rows(&mut self, handle: &Handle<D>, grad: TensorRef<'_, D>) -> Result<Received<D>> {
        let step = HandleCall { call: "combine_bwd_rows", op: Op::CombineBwd, handle };
        let inputs = DispatchInputs { tokens: grad.borrow(), weights: None, scales: None };
        let arguments = check_float(step.call, "grad", grad).and_then(|()| check_inputs(step.call, handle, &inputs));
        agreed(self, &step)?;
        checked(self, &step, arguments)?;
        let received = send_rows(self, &step, &inputs)?;
        Ok(Received { rows: received.rows, weights: None, scales: None, map: None })
    }

    fn combine_bwd_rows_with_product(
        &mut self,
        handle: &Handle<D>,
        grad: TensorRef<'_, D>,
        product: &mut ProductOfRows<'_, D>,
    ) -> Result<Received<D>> {
        let step = HandleCall { call: "combine_bwd_rows", op: Op::CombineBwd, handle };
        let inputs = DispatchInputs { tokens: grad.borrow(), weights: None, scales: None };
        let arguments = check_float(step.call, "grad", grad).and_then(|()| check_inputs(step.call, handle, &inputs));
        agreed(self, &step)?;
        checked(self, &step, arguments)?;
        let received = send_with_product(self, &step, &inputs, product)?;
        Ok(Received { rows: received.rows, weights: None, scales: None, map: None })
    }

    fn dispatch_bwd_with_products(
        &mut self,
        handle: &Handle<D>,
        grads: DispatchGrads<'_, D>,
        work: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let step = HandleCall { call: "dispatch_bwd", op: Op::DispatchBwd, handle };
        agreed(self, &step)?;
        checked(self, &step, check_grads(step.call, handle, &grads))?;
        let result = self.return_sums_with_products(&step, returned(grads), work);
        result.map_err(|e| self.core().as_peer_error(step.call, e))
    }

    fn dispatch_bwd(&mut self, handle: &Handle<D>, grads: DispatchGrads<'_, D>) -> Result<()> {
        let step = HandleCall { call: "dispatch_bwd", op: Op::DispatchBwd, handle };
        agreed(self, &step)?;
        let arguments = check_grads(step.call, handle, &grads);
        checked(self, &step, arguments)?;
        return_rows(self, &step, returned(grads))
    }

    fn check(&mut self) -> Result<()> {
        self.core().take_deferred().and_then(|()| self.check_late())
    }

    fn communicator(&mut self) -> &mut dyn Communicator<D> {
        &mut *self.core().comm
    }

    fn into_communicator(self: Box<Self>) -> Result<Box<dyn Communicator<D>>> {
        Ok(self.into_core()?.comm)
    }

    fn check_shape(&self, shape: &DispatchShape) -> Result<()> {
        check_steps::<D, C>("check_shape", shape.top_k, shape.backward)
    }

    fn kind(&self) -> DispatcherKind {
        C::KIND
    }
}

fn returned<D: Kernels>(grads: DispatchGrads<'_, D>) -> ReturnRows<'_, D> {
    let DispatchGrads { rows, weights, d_tokens, d_weights } = grads;
    ReturnRows { rows, with_weights: true, weights, out: d_tokens, out_weights: d_weights }
}

/// Rows that dispatch writes: to the last segment's end, or all where only the device knows that.
pub(crate) fn written<D: Kernels>(handle: &Handle<D>) -> usize {
    handle.plan.stats.known().map_or(handle.rows(), Stats::segment_end)
}

/// Refuses a backward that was not agreed on. All ranks know, so nobody waits; a handle of another group is
/// [`checked`]'s to report.
fn agreed<D: Kernels, C: RowTransport<D>>(row_transport: &mut C, step: &HandleCall<'_, D>) -> Result<()> {
    match row_transport.core().check_handle(step.call, step.handle) {
        Ok(()) => step.handle.check_backward(step.call),
        Err(_) => Ok(()),
    }
}

/// Weights in the order that `weight_map` indexes.
fn weights_of<'a, D: Kernels>(
    received: &'a ReceivedRows<D>,
    inputs: &'a DispatchInputs<'_, D>,
) -> Result<Option<TensorRef<'a, D>>> {
    match &received.weights {
        Some(list) => Ok(Some(list.view())),
        None => inputs.weights.as_ref().map(|w| w.borrow().reshape(&[w.count()])).transpose(),
    }
}
