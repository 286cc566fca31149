//! The dispatcher's calls for low latency.
//!
//! Rows travel by rank, each with its choices and weights and, behind these, its token's number, so that they can be brought
//! into the order that slots have everywhere. The library's handles are lent and used again: making one may be a
//! collective, and cannot be recorded. Whether one is made follows from the layer's handles that are alive, so ranks must
//! drop these in the same order.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::comm::{Op, Tag};
use crate::cuda::Cuda;
use crate::cuda::arrivals::{self, Arrived, Sorted, Starts};
use crate::device::Device;
use crate::dtype::DType;
use crate::ep::carrier::written;
use crate::ep::view::{byte_rows_mut, entries, gather, gather_elements, reduce};
use crate::ep::{Capacity, DispatchInputs, DispatchOutputs, DispatchSpec, Handle, Received};
use crate::error::{Error, Result};
use crate::nccl::NcclComm;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::calls::{Rows, Step, kept, row_bytes};
use super::dispatcher::{NcclEp, Routed, around};
use super::low_handle::{Arrival, Departure, SentBack};
use super::routing::Behind;
use super::{EpError, Layout, LowLatencyGroup, LowLatencyHandle, LowLatencyOptions};

/// How much longer than the communicator a kernel waits for a rank: the watchdog's error comes first, and then the kernel
/// ends by itself.
const LONGER: Duration = Duration::from_secs(1);

/// Handles that nobody uses now.
#[derive(Debug, Default)]
struct Handles {
    free: Vec<LowLatencyHandle>,
    /// Graphs use them, at any time.
    recorded: Vec<LowLatencyHandle>,
}

type Pool = Arc<Mutex<Handles>>;

fn lock(pool: &Pool) -> MutexGuard<'_, Handles> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group of the library's, and its handles.
#[derive(Debug)]
pub(super) struct Low {
    group: LowLatencyGroup,
    pool: Pool,
}

impl Low {
    /// Most bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.group.options().max_row_bytes
    }
}

/// A handle on loan.
pub(super) struct LowRouted {
    handle: Option<LowLatencyHandle>,
    pool: Pool,
    /// A graph that is being recorded will use it.
    recorded: bool,
    bytes: usize,
    /// Slots of each row that the last dispatch brought.
    back: Option<Tensor<Cuda>>,
}

impl fmt::Debug for LowRouted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LowRouted {{ handle: {:?} }}", self.handle)
    }
}

impl LowRouted {
    pub(super) fn row_bytes(&self) -> Option<usize> {
        Some(self.bytes)
    }
}

impl Drop for LowRouted {
    fn drop(&mut self) {
        let mut pool = lock(&self.pool);
        match self.recorded {
            true => pool.recorded.extend(self.handle.take()),
            // One whose call has not ended is none to lend.
            false => pool.free.extend(self.handle.take().filter(|handle| !handle.is_torn())),
        }
    }
}

/// The handle and what is kept beside it.
fn low<'r>(
    call: &'static str,
    routed: &'r mut Routed,
) -> Result<(&'r mut LowLatencyHandle, &'r mut Option<Tensor<Cuda>>)> {
    match routed {
        Routed::Low(LowRouted { handle: Some(handle), back, .. }) => Ok((handle, back)),
        _ => Err(Error::invalid(call, "handle", "one for low latency", "another")),
    }
}

impl NcclEp {
    /// Choices of a token as they travel: one more carries its number.
    fn wide(spec: &DispatchSpec) -> usize {
        spec.top_k + 1
    }

    fn low_options(&mut self, row_bytes: usize) -> LowLatencyOptions {
        let (num_experts, max_tokens) = (self.core.config.num_experts, self.max_tokens());
        let comm = self.core.comm.as_any().and_then(|comm| comm.downcast_ref::<NcclComm>());
        let patience = comm.map(|comm| comm.timeout() + LONGER);
        LowLatencyOptions { num_experts, max_tokens, max_row_bytes: row_bytes.next_multiple_of(16), patience }
    }

    /// What low latency would not do.
    pub(super) fn low_rules(&self, spec: &DispatchSpec) -> Result<()> {
        if spec.backward {
            return Err(EpError::LowLatency { what: "there is no backward" }.into());
        }
        let options = LowLatencyOptions {
            num_experts: self.core.config.num_experts,
            max_tokens: self.max_tokens(),
            max_row_bytes: 16,
            patience: None,
        };
        let processors = self.core.device.processors();
        options.check(self.core.ranks(), processors)?;
        options.check_top_k(Self::wide(spec), processors).map_err(|error| match error {
            // In terms of the caller's choices: one more travels.
            EpError::Argument { .. } => {
                let what = "so large a top_k: one choice more than a token has travels, and the library takes no more";
                EpError::LowLatency { what }.into()
            }
            other => other.into(),
        })
    }

    /// What rows must be.
    pub(super) fn check_low_row(&self, dtype: DType, (row, scale): (usize, usize)) -> Result<()> {
        let options = LowLatencyOptions {
            num_experts: self.core.config.num_experts,
            max_tokens: self.max_tokens(),
            max_row_bytes: row + scale,
            patience: None,
        };
        options.check_sent((dtype, row), scale)?;
        // Numbers come back, and are added.
        match dtype {
            DType::U8 => Ok(()),
            _ => Ok(options.check_added(dtype, row / dtype.size(), self.core.device.processors())?),
        }
    }

    /// The group for rows of so many bytes; a new one is compared over the ranks first.
    fn low_group(&mut self, spec: &DispatchSpec, row_bytes: usize) -> Result<(LowLatencyGroup, Pool)> {
        if let Some(low) = self.low.iter().rev().find(|low| low.row_bytes() >= row_bytes) {
            return Ok((low.group.clone(), Arc::clone(&low.pool)));
        }
        self.core.device.not_captured("prepare", "create an EP group")?;
        let options = self.low_options(row_bytes);
        let checked = options.check(self.core.ranks(), self.core.device.processors());
        self.compare(spec, (options.max_row_bytes, spec.top_k), checked)?;
        let (library, on) = (self.library.clone(), (self.core.device.clone(), self.shared.clone()));
        let tag = Tag { layer: spec.layer, op: Op::Init, sequence: self.low.len() as u64 };
        let named = ("nccl_ep_ll_group", DType::U8, row_bytes);
        let group = around(&mut self.core, named, tag, || LowLatencyGroup::on(&library, on, options))?;
        let (made, pool) = (group.clone(), Pool::default());
        self.low.push(Low { group, pool: Arc::clone(&pool) });
        Ok((made, pool))
    }

    /// The library's handle of a routing.
    pub(super) fn route_low(
        &mut self,
        spec: &DispatchSpec,
        (tag, row_bytes): (Tag, usize),
        ids: TensorRef<'_, Cuda>,
    ) -> Result<Routed> {
        let (group, pool) = self.low_group(spec, row_bytes)?;
        let packed = arrivals::packed_ids(&self.core.device, ids)?;
        let wide = Self::wide(spec);
        let free = {
            let free = &mut lock(&pool).free;
            free.iter().position(|handle| handle.top_k() == wide).map(|at| free.swap_remove(at))
        };
        let mut handle = match free {
            Some(handle) => handle,
            None => {
                self.core.device.not_captured("prepare", "create an EP handle")?;
                // The library may move its buffers: nothing that uses them may be under way on any rank.
                self.core.comm.barrier(tag)?;
                around(&mut self.core, ("nccl_ep_ll_handle", DType::U8, row_bytes), tag, || {
                    LowLatencyHandle::new(&group, Layout::RankMajor, wide)
                })?
            }
        };
        handle.update(packed)?;
        let bytes = group.options().max_row_bytes;
        let recorded = self.core.device.is_capturing()?;
        Ok(Routed::Low(LowRouted { handle: Some(handle), pool, recorded, bytes, back: None }))
    }

    /// Zones from the loads alone: nothing waits, and nothing else is exchanged.
    pub(super) fn low_behind(
        &mut self,
        spec: &DispatchSpec,
        at: (Tag, usize),
        (ids, loads): (&Tensor<Cuda>, &Tensor<Cuda>),
    ) -> Result<Behind> {
        let (experts, ranks) = (self.core.config.num_experts, self.core.ranks());
        let (local, alignment) = (experts / ranks, spec.alignment.max(1));
        let Starts { starts, total } =
            arrivals::starts(&self.core.device, loads, (self.core.rank() * local, local, alignment))?;
        let rows = match spec.capacity {
            Capacity::Static(rows) => rows,
            Capacity::Eager => {
                // As many as the step may need at most.
                let choices = ranks * self.max_tokens() * spec.top_k.min(local);
                choices + choices.min(local) * (alignment - 1)
            }
        };
        let routed = self.route_low(spec, at, ids.view()).map_err(|e| self.core.explain("prepare", e))?;
        Ok(Behind { routed, padded: None, starts, total, rows })
    }

    /// Rows as they arrive, and what says which slot is whose.
    pub(super) fn send_low(
        &mut self,
        step: Step,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        beside: Option<&mut dyn FnMut() -> Result<()>>,
    ) -> Result<Received<Cuda>> {
        let (device, stream) = (self.core.device.clone(), self.core.stream.clone());
        let (spec, ranks) = (*handle.spec(), self.core.ranks());
        let (n, wide, tokens) = (ranks * self.max_tokens(), Self::wide(&spec), &inputs.tokens);
        let width = tokens.row_bytes() / tokens.dtype().size();
        let weights = inputs.weights.as_ref().map(TensorRef::borrow);
        let packed = arrivals::packed_weights(&device, weights, (handle.tokens(), spec.top_k))?;
        let mut rows = self.empty(tokens.dtype(), &[n, width])?;
        let mut counts = self.empty(DType::I32, &[ranks])?;
        let (mut all, mut ids) = (self.empty(DType::F32, &[n, wide])?, self.empty(DType::I32, &[n, wide])?);
        let mut scales = inputs.scales.as_ref().map(|s| self.empty(s.dtype(), &[n, s.row_bytes()])).transpose()?;
        let moved = Rows { dtype: tokens.dtype(), bytes: row_bytes(inputs) };
        // Its error is told when the collective, which the others are in, has ended.
        let mut own = Ok(());
        self.collective(step, (handle, moved), |routed| {
            let from = Departure {
                tokens: tokens.borrow(),
                weights: Some(packed.view()),
                scales: inputs.scales.as_ref().map(TensorRef::borrow),
            };
            let to = Arrival {
                rows: rows.view_mut(),
                counts: counts.view_mut(),
                weights: Some(all.view_mut()),
                ids: Some(ids.view_mut()),
                scales: scales.as_mut().map(Tensor::view_mut),
            };
            let (library, _) = low(step.0, routed)?;
            match beside {
                None => library.dispatch(from, to),
                Some(beside) => library.dispatch_while(from, to, || {
                    own = beside();
                    Ok(())
                }),
            }
        })?;
        own?;
        let arrived = Arrived {
            ids: &ids,
            weights: &all,
            counts: &counts,
            experts: self.core.config.num_experts / ranks,
            alignment: spec.alignment,
            slots: handle.rows(),
        };
        let Sorted { row_map, weight_map, weights, return_map } = arrivals::sorted(&device, &arrived)?;
        let mut of_slots = inputs.weights.as_ref().map(|_| self.empty(DType::F32, &[handle.rows()])).transpose()?;
        if let Some(out) = &mut of_slots {
            let elements = weights.view().reshape(&[n * spec.top_k])?;
            gather_elements(&device, &stream, elements, weight_map.view(), out.view_mut())?;
        }
        self.keep_low(step.0, handle, return_map)?;
        Ok(Received { rows: Some(rows), weights: of_slots, scales, map: Some(row_map) })
    }

    /// The way back of what a dispatch brought.
    fn keep_low(&self, call: &'static str, handle: &Handle<Cuda>, map: Tensor<Cuda>) -> Result<()> {
        let mut guard = kept(call, handle)?;
        let (_, back) = low(call, &mut guard)?;
        *back = Some(map);
        Ok(())
    }

    /// The same, into slots.
    pub(super) fn send_low_into(
        &mut self,
        step: Step,
        handle: &Handle<Cuda>,
        inputs: &DispatchInputs<'_, Cuda>,
        outputs: DispatchOutputs<'_, Cuda>,
    ) -> Result<()> {
        let (device, stream) = (self.core.device.clone(), self.core.stream.clone());
        let Received { rows, weights, scales, map } = self.send_low(step, handle, inputs, None)?;
        let Some(map) = &map else { return Ok(()) };
        let end = written(handle);
        for (from, to) in [(&rows, Some(outputs.tokens)), (&scales, outputs.scales)] {
            if let (Some(from), Some(to)) = (from, to) {
                gather(&device, &stream, from.view(), entries(map.view(), 0..end)?, byte_rows_mut(to, 0..end)?)?;
            }
        }
        match (&weights, outputs.weights) {
            (Some(from), Some(to)) => device.copy(from.view().data(), to.into_data()),
            _ => Ok(()),
        }
    }

    /// Sums of this rank's experts for each row that came, back to where it is from.
    pub(super) fn return_low(
        &mut self,
        step: Step,
        handle: &Handle<Cuda>,
        (expert_out, mut out): (TensorRef<'_, Cuda>, TensorMut<'_, Cuda>),
    ) -> Result<()> {
        let (device, stream) = (self.core.device.clone(), self.core.stream.clone());
        let n = self.core.ranks() * self.max_tokens();
        let mut sums = self.empty(expert_out.dtype(), &[n, expert_out.row_bytes() / expert_out.dtype().size()])?;
        let (moved, tag) = (Rows::of(expert_out), crate::ep::core::Core::tag(handle, step.1));
        let reduced = {
            let guard = kept(step.0, handle)?;
            match &*guard {
                // A handle for wider rows would be another, which has dispatched nothing.
                Routed::Low(LowRouted { bytes, .. }) if *bytes < moved.bytes => {
                    Err(Error::invalid(step.0, "tensor expert_out", "rows no wider than were dispatched", moved.bytes))
                }
                Routed::Low(LowRouted { back: Some(back), .. }) => {
                    reduce(&device, &stream, expert_out, back.view(), sums.view_mut())
                }
                _ => Err(Error::invalid(step.0, "handle", "one whose rows were dispatched", "a new one")),
            }
        };
        self.core.agree(tag, reduced)?;
        self.collective(step, (handle, moved), |routed| {
            let (library, _) = low(step.0, routed)?;
            library.combine(SentBack { rows: sums.view(), weights: None, out: out.reborrow() })
        })
    }
}
