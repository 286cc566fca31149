//! The dispatcher's calls over the library's.

use std::sync::Mutex;

use crate::comm::{Communicator, Op, Tag};
use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::ep::carrier::{check_grads, check_inputs, check_outputs, check_slots, check_tokens};
use crate::ep::core::Core;
use crate::ep::record;
use crate::ep::{
    DispatchGrads, DispatchInputs, DispatchOutputs, DispatchSpec, DispatcherKind, Handle, Received, TokenDispatcher,
    Transport,
};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::nccl::{NcclComm, Shared};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::calls::{Rows, Step, high};
use super::group::{check_domain, check_experts, check_gpu};
use super::handle::{Direction, RowsBack};
use super::low::{Low, LowRouted};
use super::tensor::Places;
use super::windows::Windows;
use super::{EpError, EpLibrary, Group};

/// Most bytes of a reason that ranks tell each other.
const REASON: usize = 512;

/// Dispatcher over NCCL EP, high throughput: rows arrive in the order of experts, and sums are made on the way back.
///
/// A spec's first prepare is compared over the ranks and planned on the host, as every one is that reports at once, drops,
/// or limits experts: the library gets what is kept, so it drops nothing. The others are planned by the library on the
/// GPUs; rows past a static capacity, which it drops, are an error that is reported later. Its order of slots inside a
/// zone is its own. A library's group is made for a capacity, a number of choices and bytes of a row when they are first
/// met, outside graphs, and lives as long as the dispatcher.
///
/// Every collective passes the communicator's meeting and watchdog: a rank that cannot take part tells the others
/// before they begin, where the ranks are threads; where they are processes it ends the communicator.
///
/// For low latency ([`DispatcherKind::NcclEpLowLatency`]) the same, but: no backward; rows travel by rank, are brought
/// into the order of slots here, and each rank adds its experts' outputs before they return.
#[derive(Debug)]
pub struct NcclEp {
    // Before the communicator, which they are built on.
    pub(super) groups: Vec<Group>,
    pub(super) low: Vec<Low>,
    pub(super) windows: Windows,
    /// Windows for smaller rows.
    pub(super) outgrown: Vec<Windows>,
    pub(super) places: Places,
    pub(super) mode: Mode,
    pub(super) library: EpLibrary,
    pub(super) shared: Shared,
    /// Layers and specs that all ranks have met with.
    agreed: Vec<(u32, record::Fields)>,
    pub(super) core: Core<Cuda>,
}

/// Which of the library's algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Any number of tokens, forward and backward.
    HighThroughput,
    /// Few tokens, forward.
    LowLatency,
}

/// A library's handle, made when the size of its rows is known.
#[derive(Debug, Default)]
pub(super) enum Routed {
    #[default]
    Not,
    High(super::Handle),
    Low(LowRouted),
}

impl Routed {
    /// Most bytes of a row, if there is a handle.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        match self {
            Routed::Not => None,
            Routed::High(handle) => Some(handle.group().options().max_row_bytes),
            Routed::Low(routed) => routed.row_bytes(),
        }
    }
}

/// What a handle of the layer keeps.
pub(super) type Kept = Mutex<Routed>;

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
                None => {
                    let mode = mode(&core);
                    Ok(Self {
                        groups: Vec::new(),
                        low: Vec::new(),
                        windows: Windows::default(),
                        outgrown: Vec::new(),
                        places: Places::default(),
                        mode,
                        library,
                        shared,
                        agreed: Vec::new(),
                        core,
                    })
                }
                Some((peer, reason)) => {
                    let error = Error::Peer { call: "Group::new", rank: core.rank(), peer, reason };
                    Err(Box::new((core, error)))
                }
            },
        })
    }
}

/// A collective of the library, met and watched as one of the communicator.
pub(super) fn around<T>(
    core: &mut Core<Cuda>,
    named: (&'static str, DType, usize),
    tag: Tag,
    calls: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match core.comm.as_any().and_then(|comm| comm.downcast_mut::<NcclComm>()) {
        Some(comm) => comm.around(named, tag, calls),
        None => Err(EpError::Communicator { found: "another".to_string() }.into()),
    }
}

/// What the group's configuration asks for.
fn mode(core: &Core<Cuda>) -> Mode {
    match core.config.dispatcher {
        DispatcherKind::NcclEpLowLatency => Mode::LowLatency,
        _ => Mode::HighThroughput,
    }
}

/// The library and the communicator, where this rank can have them.
fn examine(core: &mut Core<Cuda>) -> Result<(EpLibrary, Shared)> {
    check_experts(core.config.num_experts, core.ranks())?;
    super::group::check_tokens(core.config.max_tokens_per_rank.next_multiple_of(4))?;
    let high = mode(core) == Mode::HighThroughput;
    check_gpu(&core.device)?;
    let Some(comm) = core.comm.as_any().and_then(|comm| comm.downcast_mut::<NcclComm>()) else {
        return Err(EpError::Communicator { found: "another".to_string() }.into());
    };
    let shared = comm.shared();
    if high {
        check_domain(&shared, core.config.num_experts)?;
    }
    Ok((EpLibrary::open(comm.library())?, shared))
}

/// What every rank says.
pub(super) fn told(core: &mut Core<Cuda>, text: &str) -> Result<Vec<String>> {
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
        // What a prepare with records has deferred is for another one to return.
        if self.agreed.contains(&known)
            && !self.core.has_deferred()
            && let Some(handle) = self.prepare_behind(ids, spec)?
        {
            return Ok(handle);
        }
        let rules = self.rules(spec);
        let mut handle = self.core.prepare((Transport::Slots, rules), ids, weights, spec)?;
        handle.carried.0 = Some(Box::new(Kept::default()));
        // The rows' size is the first dispatch's to know; from then on it is taken to stay.
        if let Some(bytes) = self.known_row() {
            let routed = self.route(&handle, bytes).map_err(|e| self.core.explain("prepare", e))?;
            handle.carried.0 = Some(Box::new(Kept::new(routed)));
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
            .and_then(|()| self.check_sent(&inputs));
        self.agree(STEP, handle, checked)?;
        if self.mode == Mode::LowLatency {
            return self.send_low_into(STEP, handle, &inputs, outputs);
        }
        let scale = inputs.scales.as_ref().map_or(0, TensorRef::row_bytes);
        let Some((mut rows, mut scales)) = self.lent(STEP, handle, Rows::of(inputs.tokens), scale)? else {
            return self.send(STEP, handle, &inputs, outputs);
        };
        let DispatchOutputs { tokens, mut weights, scales: out_scales } = outputs;
        let into = DispatchOutputs {
            tokens: rows.view_mut(),
            weights: weights.as_mut().map(TensorMut::reborrow),
            scales: out_scales.is_some().then(|| scales.view_mut()),
        };
        self.send(STEP, handle, &inputs, into)?;
        self.copied(handle, &rows, tokens)?;
        out_scales.map_or(Ok(()), |out| self.copied(handle, &scales, out))
    }

    fn dispatch_rows_beside(
        &mut self,
        handle: &Handle<Cuda>,
        inputs: DispatchInputs<'_, Cuda>,
        beside: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Received<Cuda>> {
        const STEP: Step = ("dispatch_rows", Op::Dispatch);
        if self.mode == Mode::HighThroughput {
            let received = self.dispatch_rows(handle, inputs)?;
            return beside().map(|()| received);
        }
        let checked = check_inputs(STEP.0, handle, &inputs).and_then(|()| self.check_sent(&inputs));
        self.agree(STEP, handle, checked)?;
        self.send_low(STEP, handle, &inputs, Some(beside))
    }

    fn place_for_return(&mut self, handle: &Handle<Cuda>, dtype: DType, width: usize) -> Result<Option<Tensor<Cuda>>> {
        self.leaving(handle, (dtype, width))
    }

    fn copies(&self) -> u64 {
        self.windows.copies()
    }

    fn overlaps(&self) -> bool {
        self.mode == Mode::LowLatency
    }

    fn dispatch_rows(&mut self, handle: &Handle<Cuda>, inputs: DispatchInputs<'_, Cuda>) -> Result<Received<Cuda>> {
        const STEP: Step = ("dispatch_rows", Op::Dispatch);
        let checked = check_inputs(STEP.0, handle, &inputs).and_then(|()| self.check_sent(&inputs));
        self.agree(STEP, handle, checked)?;
        if self.mode == Mode::LowLatency {
            return self.send_low(STEP, handle, &inputs, None);
        }
        let (n, tokens) = (handle.rows(), inputs.tokens);
        let scale = inputs.scales.as_ref().map_or(0, TensorRef::row_bytes);
        let (mut rows, mut scales) = match self.lent(STEP, handle, Rows::of(tokens), scale)? {
            Some((rows, scales)) => (rows, inputs.scales.is_some().then_some(scales)),
            None => {
                let rows = self.empty(tokens.dtype(), &[n, tokens.row_bytes() / tokens.dtype().size()])?;
                (rows, inputs.scales.map(|s| self.empty(s.dtype(), &[n, s.row_bytes()])).transpose()?)
            }
        };
        let mut weights = inputs.weights.map(|w| self.empty(w.dtype(), &[n])).transpose()?;
        let outputs = DispatchOutputs {
            tokens: rows.view_mut(),
            weights: weights.as_mut().map(Tensor::view_mut),
            scales: scales.as_mut().map(Tensor::view_mut),
        };
        self.send(STEP, handle, &inputs, outputs)?;
        Ok(Received { rows: Some(rows), weights, scales, map: None })
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
            .and_then(|()| self.check_words(expert_out.dtype(), (bytes, 0)));
        self.agree(STEP, handle, checked)?;
        if self.mode == Mode::LowLatency {
            return self.return_low(STEP, handle, (expert_out, out.reborrow()));
        }
        let left = self.returning(STEP, handle, expert_out)?;
        let rows = left.as_ref().map_or(expert_out.borrow(), Tensor::view);
        let rows = RowsBack { rows, weights: None, out: out.reborrow(), out_weights: None };
        self.collective(STEP, (handle, Rows::of(expert_out)), |routed| high(routed)?.combine(Direction::Forward, rows))
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
        let checked = self
            .check_grad(STEP.0, handle, grad)
            .and_then(|()| Error::check_dtype(STEP.0, "grad_expert_out", grad.dtype(), grad_expert_out.dtype()))
            .and_then(|()| Error::check_shape(STEP.0, "grad_expert_out", &expected, grad_expert_out.dims()));
        self.agree(STEP, handle, checked)?;
        let Some((mut rows, _)) = self.lent(STEP, handle, Rows::of(grad), 0)? else {
            return self.send_grad(STEP, handle, (grad, grad_expert_out));
        };
        self.send_grad(STEP, handle, (grad, rows.view_mut()))?;
        self.copied(handle, &rows, grad_expert_out)
    }

    fn combine_bwd_rows(&mut self, handle: &Handle<Cuda>, grad: TensorRef<'_, Cuda>) -> Result<Received<Cuda>> {
        const STEP: Step = ("combine_bwd_rows", Op::CombineBwd);
        self.agreed_backward(STEP.0, handle)?;
        let checked = self.check_grad(STEP.0, handle, grad);
        self.agree(STEP, handle, checked)?;
        let mut rows = match self.lent(STEP, handle, Rows::of(grad), 0)? {
            Some((rows, _)) => rows,
            None => self.empty(grad.dtype(), &[handle.rows(), grad.row_bytes() / grad.dtype().size()])?,
        };
        self.send_grad(STEP, handle, (grad, rows.view_mut()))?;
        Ok(Received { rows: Some(rows), weights: None, scales: None, map: None })
    }

    fn dispatch_bwd(&mut self, handle: &Handle<Cuda>, grads: DispatchGrads<'_, Cuda>) -> Result<()> {
        const STEP: Step = ("dispatch_bwd", Op::DispatchBwd);
        self.agreed_backward(STEP.0, handle)?;
        let bytes = grads.rows.row_bytes();
        let checked =
            check_grads(STEP.0, handle, &grads).and_then(|()| self.check_words(grads.rows.dtype(), (bytes, 0)));
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
        let (moved, given) = (Rows::of(rows), d_weights.as_mut().map(TensorMut::reborrow));
        let left = self.returning(STEP, handle, rows)?;
        let rows = RowsBack {
            rows: left.as_ref().map_or(rows.borrow(), Tensor::view),
            weights: weights.as_ref().map(TensorRef::borrow).or(zeros.as_ref().map(Tensor::view)),
            out: d_tokens.reborrow(),
            out_weights: given.or(unused.as_mut().map(Tensor::view_mut)),
        };
        self.collective(STEP, (handle, moved), |routed| high(routed)?.combine(Direction::Backward, rows))
    }

    fn check(&mut self) -> Result<()> {
        self.core.take_deferred()
    }

    fn communicator(&mut self) -> &mut dyn Communicator<Cuda> {
        &mut *self.core.comm
    }

    fn name(&self) -> &'static str {
        match self.mode {
            Mode::HighThroughput => "nccl_ep",
            Mode::LowLatency => "nccl_ep_ll",
        }
    }
}

impl Drop for NcclEp {
    fn drop(&mut self) {
        if self.groups.is_empty() && self.low.is_empty() && self.windows.is_empty() {
            return;
        }
        // Peers may still read what this rank's groups hold. Nothing can be reported from here.
        let _ = self.core.device.check();
        let _ = self.core.comm.barrier(Tag { layer: 0, op: Op::Init, sequence: 0 });
        self.places.clear();
        self.end_windows();
    }
}
