//! The dispatcher's calls over the library's.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::comm::{Communicator, Op, ReduceOp, Tag};
use crate::cuda::Cuda;
use crate::cuda::plan::{self, Foreign};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::carrier::{check_float, check_grads, check_inputs, check_outputs, check_slots, check_tokens};
use crate::ep::core::Core;
use crate::ep::record;
use crate::ep::{
    Capacity, DispatchGrads, DispatchInputs, DispatchOutputs, DispatchSpec, Handle, Overflow, Plan, Received,
    Reporting, Stats, TokenDispatcher, Transport,
};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::lazy::Lazy;
use crate::nccl::{NcclComm, Shared};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::group::{check_domain, check_experts, check_gpu};
use super::handle::{Counters, Direction, HandleOptions, RowsBack, RowsOut};
use super::{EpError, EpLibrary, Group, GroupOptions};

/// Most bytes of a reason that ranks tell each other.
const REASON: usize = 512;

/// Dispatcher over NCCL EP, high throughput: rows arrive in the order of experts, and sums are made on the way back.
///
/// A spec's first prepare is compared over the ranks and planned on the host, as every one is that reports at once, drops,
/// or limits experts: the library gets what is kept, so it drops nothing. The others are planned by the library on the
/// GPUs; rows past a static capacity, which it drops, are an error that is reported later. Its order of slots inside a
/// zone is its own. A library's group is made for a capacity, a
/// number of choices and bytes of a row when they are first met, outside graphs, and lives as long as the dispatcher.
///
/// Every collective passes the communicator's meeting and watchdog: a rank that cannot take part tells the others
/// before they begin, where the ranks are threads; where they are processes it ends the communicator.
#[derive(Debug)]
pub struct NcclEp {
    // Before the communicator, which they are built on.
    groups: Vec<Group>,
    library: EpLibrary,
    shared: Shared,
    /// Layers and specs that all ranks have met with.
    agreed: Vec<(u32, record::Fields)>,
    core: Core<Cuda>,
}

/// What a handle of the layer keeps: the library's, made when the size of its rows is known.
type Kept = Mutex<Option<super::Handle>>;

/// The dispatcher, or the state it was to have and the reason why not; the same on all ranks.
type Possible = std::result::Result<NcclEp, Box<(Core<Cuda>, Error)>>;

impl NcclEp {
    /// Checks the library, the GPUs and the experts on every rank (one collective).
    ///
    /// # Errors
    /// The ranks could not be asked.
    pub(crate) fn new(mut core: Core<Cuda>) -> Result<Possible> {
        let found = examine(&mut core);
        let reason = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let refusals = told(&mut core, &reason)?;
        Ok(match found {
            Err(error) => Err(Box::new((core, error))),
            Ok((library, shared)) => match refusals.into_iter().enumerate().find(|(_, r)| !r.is_empty()) {
                None => Ok(Self { groups: Vec::new(), library, shared, agreed: Vec::new(), core }),
                Some((peer, reason)) => {
                    let error = Error::Peer { call: "Group::new", rank: core.rank(), peer, reason };
                    Err(Box::new((core, error)))
                }
            },
        })
    }

    /// What the library would not do.
    fn rules(&self, spec: &DispatchSpec) -> Result<()> {
        match spec.capacity {
            Capacity::Static(found) if !found.is_multiple_of(spec.alignment.max(1)) => {
                let expected = format!("a multiple of the alignment {}", spec.alignment);
                Err(EpError::Capacity { expected, found }.into())
            }
            _ => Ok(()),
        }
    }

    /// Most tokens of a rank, as the library takes them: by fours.
    fn max_tokens(&self) -> usize {
        self.core.config.max_tokens_per_rank.next_multiple_of(4)
    }

    /// The capacity of the library's group. It has none below the tokens of a rank: what the host has planned to fit there
    /// goes through a group that is open.
    fn fixed(&self, spec: &DispatchSpec) -> Option<usize> {
        match spec.capacity {
            Capacity::Static(rows) => Some(rows).filter(|rows| *rows >= self.max_tokens()),
            Capacity::Eager => None,
        }
    }

    /// Routing that the GPUs make among themselves: nothing waits for them, but for the number of rows where the capacity
    /// is open. For specs that all ranks have met with before, where what only the device sees is reported later; `None`
    /// where the host has to plan.
    fn prepare_behind(&mut self, ids: TensorRef<'_, Cuda>, spec: &DispatchSpec) -> Result<Option<Handle<Cuda>>> {
        const CALL: &str = "prepare";
        let open = spec.capacity == Capacity::Eager;
        let drops = !open && (spec.overflow == Overflow::Drop || self.fixed(spec).is_none());
        let Some(bytes) = self.groups.last().map(|g| g.options().max_row_bytes) else { return Ok(None) };
        if spec.reporting != Reporting::Deferred || spec.expert_capacity.is_some() || drops {
            return Ok(None);
        }
        let (device, experts) = (self.core.device.clone(), self.core.config.num_experts);
        let tag = Tag { layer: spec.layer, op: Op::Prepare, sequence: self.core.next() };
        let checked = self.core.check_call(ids, spec);
        let examined = checked.and_then(|()| plan::examined(&device, ids, (spec, experts)));
        let (kept_ids, mut loads) = match examined {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.core.agree(tag, Err(error))?;
                return Ok(None);
            }
        };
        self.core.comm.all_reduce(tag, ReduceOp::Sum, loads.view_mut()).map_err(|e| self.core.explain(CALL, e))?;
        let group = self.group(spec, bytes)?;
        let options = HandleOptions { top_k: spec.top_k, alignment: spec.alignment };
        let local = group.local_experts();
        let of = |size| Tensor::empty(&device, DType::I64, &[size]);
        let (mut padded, mut starts, mut total) = (of(local)?, of(local)?, of(1)?);
        let routed = around(&mut self.core, ("nccl_ep_update", bytes), tag, || {
            let mut routed = super::Handle::new(&group, options)?;
            let counters = Counters { counts: padded.view_mut(), offsets: starts.view_mut(), total: total.view_mut() };
            routed.update(kept_ids.view(), counters)?;
            Ok(routed)
        })
        .map_err(|e| self.core.explain(CALL, e))?;
        let rows = match spec.capacity {
            Capacity::Static(rows) => rows,
            Capacity::Eager => device.read(&self.core.stream, total.view())?.first().map_or(0, |n| *n as usize),
        };
        let from = Foreign { loads: &loads, starts: &starts, total: &total, rank: self.core.rank(), rows };
        let (zones, row_map) = plan::received(&device, &from)?;
        let tokens = kept_ids.view().rows();
        let stats = stats_later(&device, [loads, padded, total], rows);
        let plan = Plan {
            tokens,
            total_tokens: tokens,
            first_token: 0,
            zones: Arc::new(zones),
            stats,
            kept_ids,
            weight_map: of_slots(&device, &row_map)?,
            row_map,
            return_map: Tensor::empty(&device, DType::I32, &[0, spec.top_k])?,
            send_tokens: None,
            send_choices: None,
            return_slots: None,
            send_rows: Vec::new(),
            recv_rows: Vec::new(),
            slots_from: Vec::new(),
            slots_at: Vec::new(),
        };
        let mut handle = self.core.accept(spec, plan);
        handle.carried.0 = Some(Box::new(Kept::new(Some(routed))));
        Ok(Some(handle))
    }

    /// The group for rows of so many bytes; a new one is compared over the ranks first.
    fn group(&mut self, spec: &DispatchSpec, row_bytes: usize) -> Result<Group> {
        let capacity = self.fixed(spec);
        let fits =
            |o: &GroupOptions| o.capacity == capacity && o.max_row_bytes >= row_bytes && o.max_top_k >= spec.top_k;
        if let Some(group) = self.groups.iter().rev().find(|g| fits(g.options())) {
            return Ok(group.clone());
        }
        self.core.device.not_captured("prepare", "create an EP group")?;
        let known = |of: fn(&GroupOptions) -> usize| self.groups.iter().map(|g| of(g.options())).max().unwrap_or(0);
        let options = GroupOptions {
            num_experts: self.core.config.num_experts,
            max_tokens: self.max_tokens(),
            capacity,
            max_row_bytes: row_bytes.max(known(|o| o.max_row_bytes)),
            max_top_k: spec.top_k.max(known(|o| o.max_top_k)),
            trap: false,
        };
        self.compare(spec, &options)?;
        let (library, on) = (self.library.clone(), (self.core.device.clone(), self.shared.clone()));
        let tag = Tag { layer: spec.layer, op: Op::Init, sequence: self.groups.len() as u64 };
        let group = around(&mut self.core, ("nccl_ep_group", row_bytes), tag, || Group::on(&library, on, options))?;
        self.groups.push(group.clone());
        Ok(group)
    }

    /// Refuses options in which the ranks differ: the library does not look.
    fn compare(&mut self, spec: &DispatchSpec, options: &GroupOptions) -> Result<()> {
        let own = format!("{:?} bytes, top_k {}", options.max_row_bytes, options.max_top_k);
        let checked = options.check(self.core.ranks()).err().map(|e| e.to_string());
        let all = told(&mut self.core, checked.as_ref().unwrap_or(&own))?;
        options.check(self.core.ranks())?;
        match all.iter().position(|theirs| *theirs != own) {
            None => Ok(()),
            Some(peer) => Err(Error::ConfigMismatch {
                field: format!("rows of layer {}", spec.layer),
                rank: self.core.rank(),
                value: own,
                peer,
                peer_value: all[peer].clone(),
            }),
        }
    }

    /// The library's handle of this routing, for rows of so many bytes: made and told the routing where it is not yet.
    fn routed<'h>(
        &mut self,
        call: &'static str,
        handle: &'h Handle<Cuda>,
        row_bytes: usize,
    ) -> Result<MutexGuard<'h, Option<super::Handle>>> {
        let kept = handle.carried.0.as_ref().and_then(|kept| kept.downcast_ref::<Kept>());
        let Some(kept) = kept else {
            return Err(Error::invalid(call, "handle", "one that NCCL EP prepared", "another dispatcher's"));
        };
        let mut guard = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if guard.as_ref().is_some_and(|h| h.group().options().max_row_bytes >= row_bytes) {
            return Ok(guard);
        }
        let spec = handle.spec();
        let group = self.group(spec, row_bytes)?;
        let options = HandleOptions { top_k: spec.top_k, alignment: spec.alignment };
        let (device, ids) = (self.core.device.clone(), handle.kept_ids());
        let tag = Core::tag(handle, Op::Prepare);
        let routed = around(&mut self.core, ("nccl_ep_update", row_bytes), tag, || {
            let mut routed = super::Handle::new(&group, options)?;
            let of = |size| Tensor::empty(&device, DType::I64, &[size]);
            let local = group.local_experts();
            // The plan has these already.
            let (mut counts, mut offsets, mut total) = (of(local)?, of(local)?, of(1)?);
            let counters = Counters { counts: counts.view_mut(), offsets: offsets.view_mut(), total: total.view_mut() };
            routed.update(ids, counters)?;
            Ok(routed)
        })?;
        *guard = Some(routed);
        Ok(guard)
    }

    /// Passes this rank's checks before a collective, or tells the others that they failed.
    fn agree(&mut self, (call, op): Step, handle: &Handle<Cuda>, checked: Result<()>) -> Result<()> {
        let all = self.core.check_handle(call, handle).and(checked);
        self.core.agree(Core::tag(handle, op), all)
    }

    /// Refuses a backward that was not agreed on. All ranks know, so nobody waits; a handle of another group is
    /// [`agree`](Self::agree)'s to report.
    fn agreed_backward(&self, call: &'static str, handle: &Handle<Cuda>) -> Result<()> {
        match self.core.check_handle(call, handle) {
            Ok(()) => handle.check_backward(call),
            Err(_) => Ok(()),
        }
    }

    /// One call of the library's handle, as a collective.
    fn collective(
        &mut self,
        (call, op): Step,
        (handle, row_bytes): (&Handle<Cuda>, usize),
        calls: impl FnOnce(&mut super::Handle) -> Result<()>,
    ) -> Result<()> {
        let mut guard = self.routed(call, handle, row_bytes)?;
        let done = around(&mut self.core, (call, row_bytes), Core::tag(handle, op), || match guard.as_mut() {
            Some(routed) => calls(routed),
            None => Err(Error::invalid(call, "handle", "a routing", "none")),
        });
        done.map_err(|e| self.core.explain(call, e))
    }

    fn empty(&self, dtype: DType, dims: &[usize]) -> Result<Tensor<Cuda>> {
        Tensor::empty(&self.core.device, dtype, dims)
    }

    /// Forward, into slots.
    fn send(
        &mut self,
        step: Step,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        mut outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        // The library wants weights forward, whoever needs them.
        let zeros = match &inputs.weights {
            None => Some(Tensor::zeros(&self.core.device, DType::F32, &[handle.tokens(), handle.spec().top_k])?),
            Some(_) => None,
        };
        let mut unused = match &outputs.weights {
            None => Some(self.empty(DType::F32, &[handle.rows()])?),
            Some(_) => None,
        };
        let given = outputs.weights.as_mut().map(TensorMut::reborrow);
        let rows = RowsOut {
            tokens: inputs.tokens.borrow(),
            weights: inputs.weights.as_ref().map(TensorRef::borrow).or(zeros.as_ref().map(Tensor::view)),
            scales: inputs.scales.as_ref().map(TensorRef::borrow),
            out: outputs.tokens.reborrow(),
            out_weights: given.or(unused.as_mut().map(Tensor::view_mut)),
            out_scales: outputs.scales.as_mut().map(TensorMut::reborrow),
        };
        self.collective(step, (handle, row_bytes(inputs)), |routed| routed.dispatch(Direction::Forward, rows))
    }

    /// The output's gradient, into slots.
    fn send_grad(
        &mut self,
        step: Step,
        handle: &Handle<Cuda>,
        (grad, mut out): (TensorRef<'_, Cuda>, TensorMut<'_, Cuda>),
    ) -> Result<()> {
        let (tokens, out) = (grad.borrow(), out.reborrow());
        let rows = RowsOut { tokens, weights: None, scales: None, out, out_weights: None, out_scales: None };
        self.collective(step, (handle, grad.row_bytes()), |routed| routed.dispatch(Direction::Backward, rows))
    }
}

/// A call and what it is for.
type Step = (&'static str, Op);

/// Bytes of a token and its scales.
fn row_bytes(inputs: &DispatchInputs<'_, Cuda>) -> usize {
    inputs.tokens.row_bytes() + inputs.scales.as_ref().map_or(0, |s| s.row_bytes())
}

/// The library moves rows in 16-byte words, and sums numbers by 8.
fn check_words(dtype: DType, bytes: usize) -> Result<()> {
    let width = bytes / dtype.size();
    if bytes == 0 || !bytes.is_multiple_of(16) {
        return Err(EpError::RowBytes { what: "a row", bytes }.into());
    }
    match dtype == DType::U8 || width.is_multiple_of(8) {
        true => Ok(()),
        false => Err(EpError::Width { width }.into()),
    }
}

/// A collective of the library, met and watched as one of the communicator.
fn around<T>(
    core: &mut Core<Cuda>,
    named: (&'static str, usize),
    tag: Tag,
    calls: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match core.comm.as_any().and_then(|comm| comm.downcast_mut::<NcclComm>()) {
        Some(comm) => comm.around(named, tag, calls),
        None => Err(EpError::Communicator { found: "another".to_string() }.into()),
    }
}

/// A map of slots to themselves, for weights as for rows.
fn of_slots(device: &Cuda, row_map: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    let mut map = Tensor::empty(device, row_map.dtype(), row_map.dims())?;
    device.copy(row_map.view().data(), map.view_mut().into_data())?;
    Ok(map)
}

/// Counts as the library left them: choices of all experts, padded rows of this rank's, and their sum with nothing
/// dropped.
fn stats_later(device: &Cuda, [loads, padded, total]: [Tensor<Cuda>; 3], rows: usize) -> Lazy<Stats> {
    let device = device.clone();
    Lazy::later(move || {
        let whole = |t: &Tensor<Cuda>| -> Result<Vec<usize>> {
            Ok(device.read(&device.stream(), t.view())?.iter().map(|n| *n as usize).collect())
        };
        let needed_rows = whole(&total)?.first().copied().unwrap_or(0);
        let mut end = 0;
        let inside = |n: &usize| {
            let start = end;
            end = rows.min(end + n);
            end - start
        };
        let padded_counts = whole(&padded)?.iter().map(inside).collect();
        Ok(Stats { padded_counts, needed_rows, expert_load: whole(&loads)?, dropped: 0 })
    })
}

/// The library and the communicator, where this rank can have them.
fn examine(core: &mut Core<Cuda>) -> Result<(EpLibrary, Shared)> {
    check_experts(core.config.num_experts, core.ranks())?;
    super::group::check_tokens(core.config.max_tokens_per_rank.next_multiple_of(4))?;
    check_gpu(&core.device)?;
    let Some(comm) = core.comm.as_any().and_then(|comm| comm.downcast_mut::<NcclComm>()) else {
        return Err(EpError::Communicator { found: "another".to_string() }.into());
    };
    let shared = comm.shared();
    check_domain(&shared, core.config.num_experts)?;
    Ok((EpLibrary::open(comm.library())?, shared))
}

/// What every rank says.
fn told(core: &mut Core<Cuda>, text: &str) -> Result<Vec<String>> {
    let mut bytes = [0; REASON];
    let end = (0..=text.len().min(REASON)).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    let mut send = Tensor::empty(&core.device, DType::U8, &[REASON])?;
    core.device.upload(&core.stream, &bytes, send.view_mut())?;
    let mut recv = Tensor::empty(&core.device, DType::U8, &[core.ranks(), REASON])?;
    core.comm.all_gather(Tag { layer: 0, op: Op::Init, sequence: 0 }, send.view(), recv.view_mut())?;
    let all = core.device.download(&core.stream, recv.view())?;
    let one = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
    Ok(all.chunks_exact(REASON).map(one).collect())
}

impl TokenDispatcher<Cuda> for NcclEp {
    fn prepare(
        &mut self,
        ids: TensorRef<'_, Cuda>,
        weights: Option<TensorRef<'_, Cuda>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<Cuda>> {
        let known = (spec.layer, record::fields(spec));
        if self.agreed.contains(&known)
            && let Some(handle) = self.prepare_behind(ids, spec)?
        {
            return Ok(handle);
        }
        let rules = self.rules(spec);
        let mut handle = self.core.prepare((Transport::Slots, rules), ids, weights, spec)?;
        handle.carried.0 = Some(Box::new(Kept::default()));
        // The rows' size is the first dispatch's to know; from then on it is taken to stay.
        if let Some(bytes) = self.groups.last().map(|g| g.options().max_row_bytes) {
            drop(self.routed("prepare", &handle, bytes)?);
        }
        // All ranks have the same now, and each finds it again.
        if !self.agreed.contains(&known) {
            self.agreed.push(known);
        }
        Ok(handle)
    }

    fn dispatch(
        &mut self,
        handle: &Handle<Cuda>,
        inputs: DispatchInputs<'_, Cuda>,
        outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        const STEP: Step = ("dispatch", Op::Dispatch);
        let checked = check_inputs(STEP.0, handle, &inputs)
            .and_then(|()| check_outputs(STEP.0, handle, &inputs, &outputs))
            .and_then(|()| check_words(inputs.tokens.dtype(), row_bytes(&inputs)));
        self.agree(STEP, handle, checked)?;
        self.send(STEP, handle, &inputs, outputs)
    }

    fn dispatch_rows(&mut self, handle: &Handle<Cuda>, inputs: DispatchInputs<'_, Cuda>) -> Result<Received<Cuda>> {
        const STEP: Step = ("dispatch_rows", Op::Dispatch);
        let checked =
            check_inputs(STEP.0, handle, &inputs).and_then(|()| check_words(inputs.tokens.dtype(), row_bytes(&inputs)));
        self.agree(STEP, handle, checked)?;
        let (n, tokens) = (handle.rows(), inputs.tokens);
        let mut rows = self.empty(tokens.dtype(), &[n, tokens.row_bytes() / tokens.dtype().size()])?;
        let mut weights = inputs.weights.map(|w| self.empty(w.dtype(), &[n])).transpose()?;
        let mut scales = inputs.scales.map(|s| self.empty(s.dtype(), &[n, s.row_bytes()])).transpose()?;
        let outputs = DispatchOutputs {
            tokens: rows.view_mut(),
            weights: weights.as_mut().map(Tensor::view_mut),
            scales: scales.as_mut().map(Tensor::view_mut),
        };
        self.send(STEP, handle, &inputs, outputs)?;
        Ok(Received { rows: Some(rows), weights, scales })
    }

    fn combine(
        &mut self,
        handle: &Handle<Cuda>,
        expert_out: TensorRef<'_, Cuda>,
        mut out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        const STEP: Step = ("combine", Op::Combine);
        let bytes = expert_out.row_bytes();
        let checked = check_slots(STEP.0, "expert_out", handle, expert_out)
            .and_then(|()| check_tokens(STEP.0, "out", handle, expert_out, &out))
            .and_then(|()| check_words(expert_out.dtype(), bytes));
        self.agree(STEP, handle, checked)?;
        let rows = RowsBack { rows: expert_out.borrow(), weights: None, out: out.reborrow(), out_weights: None };
        self.collective(STEP, (handle, bytes), |routed| routed.combine(Direction::Forward, rows))
    }

    fn combine_bwd(
        &mut self,
        handle: &Handle<Cuda>,
        grad: TensorRef<'_, Cuda>,
        grad_expert_out: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        const STEP: Step = ("combine_bwd", Op::CombineBwd);
        self.agreed_backward(STEP.0, handle)?;
        let expected = [handle.rows(), grad.row_bytes() / grad.dtype().size()];
        let checked = check_grad(STEP.0, handle, grad)
            .and_then(|()| Error::check_dtype(STEP.0, "grad_expert_out", grad.dtype(), grad_expert_out.dtype()))
            .and_then(|()| Error::check_shape(STEP.0, "grad_expert_out", &expected, grad_expert_out.dims()));
        self.agree(STEP, handle, checked)?;
        self.send_grad(STEP, handle, (grad, grad_expert_out))
    }

    fn combine_bwd_rows(&mut self, handle: &Handle<Cuda>, grad: TensorRef<'_, Cuda>) -> Result<Received<Cuda>> {
        const STEP: Step = ("combine_bwd_rows", Op::CombineBwd);
        self.agreed_backward(STEP.0, handle)?;
        self.agree(STEP, handle, check_grad(STEP.0, handle, grad))?;
        let mut rows = self.empty(grad.dtype(), &[handle.rows(), grad.row_bytes() / grad.dtype().size()])?;
        self.send_grad(STEP, handle, (grad, rows.view_mut()))?;
        Ok(Received { rows: Some(rows), weights: None, scales: None })
    }

    fn dispatch_bwd(&mut self, handle: &Handle<Cuda>, grads: DispatchGrads<'_, Cuda>) -> Result<()> {
        const STEP: Step = ("dispatch_bwd", Op::DispatchBwd);
        self.agreed_backward(STEP.0, handle)?;
        let bytes = grads.rows.row_bytes();
        let checked = check_grads(STEP.0, handle, &grads).and_then(|()| check_words(grads.rows.dtype(), bytes));
        self.agree(STEP, handle, checked)?;
        let DispatchGrads { rows, weights, mut d_tokens, mut d_weights } = grads;
        let zeros = match weights {
            None => Some(Tensor::zeros(&self.core.device, DType::F32, &[handle.rows()])?),
            Some(_) => None,
        };
        let mut unused = match d_weights {
            None => Some(self.empty(DType::F32, &[handle.tokens(), handle.spec().top_k])?),
            Some(_) => None,
        };
        let given = d_weights.as_mut().map(TensorMut::reborrow);
        let rows = RowsBack {
            rows: rows.borrow(),
            weights: weights.as_ref().map(TensorRef::borrow).or(zeros.as_ref().map(Tensor::view)),
            out: d_tokens.reborrow(),
            out_weights: given.or(unused.as_mut().map(Tensor::view_mut)),
        };
        self.collective(STEP, (handle, bytes), |routed| routed.combine(Direction::Backward, rows))
    }

    fn check(&mut self) -> Result<()> {
        self.core.take_deferred()
    }

    fn communicator(&mut self) -> &mut dyn Communicator<Cuda> {
        &mut *self.core.comm
    }

    fn name(&self) -> &'static str {
        "nccl_ep"
    }
}

/// A gradient `[T, H]` of the output.
fn check_grad(call: &'static str, handle: &Handle<Cuda>, grad: TensorRef<'_, Cuda>) -> Result<()> {
    let inputs = DispatchInputs { tokens: grad.borrow(), weights: None, scales: None };
    check_float(call, "grad", grad)?;
    check_inputs(call, handle, &inputs)?;
    check_words(grad.dtype(), grad.row_bytes())
}

impl Drop for NcclEp {
    fn drop(&mut self) {
        if self.groups.is_empty() {
            return;
        }
        // Peers may still read what this rank's groups hold. Nothing can be reported from here.
        let _ = self.core.device.check();
        let _ = self.core.comm.barrier(Tag { layer: 0, op: Op::Init, sequence: 0 });
    }
}
