//! Which dispatcher is the quickest here: each that every rank can have is timed once, as the group is formed.
//!
//! All ranks run the same steps of the same candidates in the same order. A rank's time of a candidate is the median of
//! samples, each between two points where its device is idle; a candidate's time is that of its slowest rank. The ranks
//! gather their times and decide from the same numbers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Op, Tag};
use crate::compare::gather_numbers;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::splitmix64::{GAMMA, mix};
use crate::tensor::Tensor;

use super::dispatcher_state::DispatcherState;
use super::heuristics::{MARGIN, SAMPLES, STEPS, WARM_UP};
use super::packing::byte_rows_mut;
use super::select::{self, SelectedDispatcher, automatic, of_kind};
use super::{
    DispatchGrads, DispatchInputs, DispatchShape, DispatchSpec, DispatcherKind, Handle, LibraryDispatchers, Received,
    TokenDispatcher,
};

const CALL: &str = "Group::new";
/// Of the collectives beside the candidates' own.
const TAG: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
/// Candidates behind those of a device's table, which names the ones worth having where nothing is timed.
const OTHERS: [DispatcherKind; 4] =
    [DispatcherKind::NvLink, DispatcherKind::NcclEp, DispatcherKind::AllGather, DispatcherKind::AllToAll];
/// Bytes of random numbers that a rank's tokens repeat.
const PIECE: usize = 1 << 20;

/// The quickest of the dispatchers that every rank can have, the same on all ranks.
///
/// # Errors
/// What fails on one rank fails on all: a candidate's own errors, [`Error::Peer`](crate::Error::Peer) for another rank's.
pub(super) fn quickest<D: LibraryDispatchers>(
    core: DispatcherState<D>,
    shape: &DispatchShape,
    source: &'static str,
) -> Result<SelectedDispatcher<D>> {
    let rank = core.rank();
    timed(core, shape, source).map_err(|error| error.of_call(CALL, rank))
}

fn timed<D: LibraryDispatchers>(
    core: DispatcherState<D>,
    shape: &DispatchShape,
    source: &'static str,
) -> Result<SelectedDispatcher<D>> {
    let (device, config, rank) = (core.device.clone(), core.config.clone(), core.rank());
    let state = |comm| DispatcherState::new(device.clone(), comm, config.clone());
    let mut comm = core.comm;
    let sample = Sample::new(&device, shape, config.num_experts, rank);
    let mut sample = refuse_on_error(&mut *comm, TAG, sample)?;
    let (mut times, mut left_out) = (Vec::new(), String::new());
    let all = candidates(D::preferred_dispatchers(&config, comm.size()));
    for kind in select::candidates(&all, config.in_k_order) {
        let mut dispatcher = match of_kind(kind, state(comm), source)? {
            Ok(dispatcher) => dispatcher,
            Err(refused) => {
                let (core, reason) = *refused;
                comm = core.comm;
                left_out.push_str(&format!("; {kind} cannot be had: {reason}"));
                continue;
            }
        };
        let fits = dispatcher.check_shape(shape);
        let carried = gather_numbers(&device, dispatcher.communicator(), TAG, &[u64::from(fits.is_ok())])?;
        if carried.contains(&0) {
            let reason = fits.err().map_or_else(|| "another rank's reason".to_string(), |error| error.to_string());
            left_out.push_str(&format!("; {kind} cannot carry the shape: {reason}"));
        } else {
            let own = sample.time(&mut *dispatcher, &device)?;
            let all = gather_numbers(&device, dispatcher.communicator(), TAG, &[own])?;
            times.push(CandidateTime { kind, nanos: all.into_iter().max().unwrap_or(own) });
        }
        comm = dispatcher.into_communicator()?;
    }
    let Some(kind) = least(&times) else { return automatic(state(comm), source) };
    let listed: Vec<String> = times.iter().map(ToString::to_string).collect();
    match of_kind(kind, state(comm), source)? {
        Ok(dispatcher) => Ok((dispatcher, format!("timed, ms: {}{left_out}", listed.join(", ")))),
        Err(refused) => Err(refused.1),
    }
}

/// The device's preferred dispatchers, and the others behind them; low latency aside, which is never timed.
fn candidates(preferred: &[DispatcherKind]) -> Vec<DispatcherKind> {
    let others = OTHERS.into_iter().filter(|kind| !preferred.contains(kind));
    preferred.iter().copied().filter(|kind| *kind != DispatcherKind::NvLinkLowLatency).chain(others).collect()
}

/// A candidate's time for a step, that of its slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CandidateTime {
    kind: DispatcherKind,
    nanos: u64,
}

impl fmt::Display for CandidateTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:.3}", self.kind, self.nanos as f64 / 1e6)
    }
}

/// The first that takes at most a margin longer than the quickest.
fn least(times: &[CandidateTime]) -> Option<DispatcherKind> {
    let least = times.iter().map(|time| time.nanos).min()?;
    let most = least.saturating_add(least / 100 * MARGIN);
    times.iter().find(|time| time.nanos <= most).map(|time| time.kind)
}

/// A rank's side of the steps, the same for every candidate.
struct Sample<D: Kernels> {
    spec: DispatchSpec,
    /// `I32 [T, K]`.
    ids: Tensor<D>,
    /// `[T, H]`, which stand for the gradient of the output too.
    tokens: Tensor<D>,
    /// `[T, K]`, accumulator type.
    weights: Tensor<D>,
    /// `[T, H]`.
    out: Tensor<D>,
    /// `[T, K]`, accumulator type.
    d_weights: Tensor<D>,
    /// `[N, H]`, in place of what experts would have computed.
    rows: Option<Arc<Tensor<D>>>,
}

impl<D: Kernels> Sample<D> {
    fn new(device: &D, shape: &DispatchShape, experts: usize, rank: usize) -> Result<Self> {
        let DispatchShape { tokens: t, hidden, top_k, dtype, capacity, backward } = *shape;
        let mut random = Random(rank as u64);
        let mut ids = Tensor::empty(device, DType::I32, &[t, top_k])?;
        device.upload(&random.choices(t, top_k, experts), ids.view_mut())?;
        let mut tokens = Tensor::empty(device, dtype, &[t, hidden])?;
        let row = hidden * dtype.size();
        let piece = random.values((PIECE / row).clamp(1, t) * hidden, dtype);
        let rows = piece.len() / row;
        for first in (0..t).step_by(rows) {
            let count = rows.min(t - first);
            let part = byte_rows_mut(tokens.view_mut(), first..first + count)?;
            device.upload(&piece[..count * row], part)?;
        }
        let acc = dtype.accumulator();
        let reporting = D::REPORTING;
        Ok(Self {
            spec: DispatchSpec { capacity, backward, reporting, ..DispatchSpec::new(0, top_k) },
            ids,
            tokens,
            weights: Tensor::zeros(device, acc, &[t, top_k])?,
            out: Tensor::empty(device, dtype, &[t, hidden])?,
            d_weights: Tensor::empty(device, acc, &[t, top_k])?,
            rows: None,
        })
    }

    /// Nanoseconds of a step.
    fn time(&mut self, dispatcher: &mut dyn TokenDispatcher<D>, device: &D) -> Result<u64> {
        for _ in 0..WARM_UP {
            self.step(dispatcher, device)?;
        }
        let mut samples = [Duration::ZERO; SAMPLES];
        for sample in &mut samples {
            // Where the device runs behind the host, this waits for it too.
            dispatcher.communicator().barrier(TAG)?;
            let start = Instant::now();
            for _ in 0..STEPS {
                self.step(dispatcher, device)?;
            }
            let ended = device.check();
            *sample = start.elapsed();
            refuse_on_error(dispatcher.communicator(), TAG, ended)?;
        }
        let checked = dispatcher.check();
        refuse_on_error(dispatcher.communicator(), TAG, checked)?;
        samples.sort_unstable();
        Ok(u64::try_from(samples[SAMPLES / 2].as_nanos()).unwrap_or(u64::MAX) / STEPS as u64)
    }

    /// The collectives of a layer's step, without its experts.
    fn step(&mut self, dispatcher: &mut dyn TokenDispatcher<D>, device: &D) -> Result<()> {
        let handle = dispatcher.prepare(self.ids.view(), None, &self.spec)?;
        let inputs = DispatchInputs { tokens: self.tokens.view(), weights: Some(self.weights.view()), scales: None };
        let Received { rows: received, weights, .. } = dispatcher.dispatch_rows(&handle, inputs)?;
        drop(received);
        let rows = self.returning(dispatcher, device, &handle);
        let rows = refuse_on_error(dispatcher.communicator(), TAG, rows)?;
        dispatcher.combine(&handle, rows.view(), self.out.view_mut())?;
        drop(rows);
        if !self.spec.backward {
            return Ok(());
        }
        drop(dispatcher.combine_bwd_rows(&handle, self.tokens.view())?);
        let rows = self.returning(dispatcher, device, &handle);
        let rows = refuse_on_error(dispatcher.communicator(), TAG, rows)?;
        let grads = DispatchGrads {
            rows: rows.view(),
            weights: weights.as_ref().map(Tensor::view),
            d_tokens: self.out.view_mut(),
            d_weights: Some(self.d_weights.view_mut()),
        };
        dispatcher.dispatch_bwd(&handle, grads)
    }

    /// The rows that return: where the dispatcher reads them best, or zeros.
    fn returning(
        &mut self,
        dispatcher: &mut dyn TokenDispatcher<D>,
        device: &D,
        handle: &Handle<D>,
    ) -> Result<Arc<Tensor<D>>> {
        let (dtype, dims) = (self.tokens.dtype(), [handle.rows(), self.tokens.dims()[1]]);
        if let Some(placed) = dispatcher.place_for_return(handle, dtype, dims[1])? {
            return Ok(Arc::new(placed));
        }
        match &self.rows {
            Some(rows) if rows.dims() == dims => Ok(Arc::clone(rows)),
            _ => Ok(Arc::clone(self.rows.insert(Arc::new(Tensor::zeros(device, dtype, &dims)?)))),
        }
    }
}

/// Random numbers of a seed, by SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// Bytes of `tokens` times `k` choices among `experts`, i32, those of a token different from each other: each the
    /// beginning of a shuffle (Fisher and Yates), which may begin with any order.
    fn choices(&mut self, tokens: usize, k: usize, experts: usize) -> Vec<u8> {
        let mut order: Vec<i32> = (0..experts as i32).collect();
        let mut bytes = Vec::with_capacity(tokens * k * 4);
        for _ in 0..tokens {
            for i in 0..k {
                order.swap(i, i + (self.next() % (experts - i) as u64) as usize);
            }
            bytes.extend(order[..k].iter().flat_map(|id| id.to_ne_bytes()));
        }
        bytes
    }

    /// Bytes of numbers in −1..1.
    fn values(&mut self, count: usize, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count * dtype.size());
        for _ in 0..count {
            let value = (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match dtype {
                DType::F64 => bytes.extend(f64::from(value).to_ne_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(value).to_ne_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(value).to_ne_bytes()),
                _ => bytes.extend(value.to_ne_bytes()),
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink};

    fn times(list: &[(DispatcherKind, u64)]) -> Vec<CandidateTime> {
        list.iter().map(|&(kind, nanos)| CandidateTime { kind, nanos }).collect()
    }

    #[test]
    fn near_ties_go_to_the_table() {
        assert_eq!(least(&times(&[(AllGather, 102_000), (NcclEp, 100_000)])), Some(AllGather));
        assert_eq!(least(&times(&[(AllGather, 102_001), (NcclEp, 100_000)])), Some(NcclEp));
        assert_eq!(least(&times(&[(AllGather, 100_000), (NcclEp, 99_999)])), Some(AllGather));
        assert_eq!(least(&times(&[(NcclEp, 7), (AllToAll, u64::MAX)])), Some(NcclEp));
        assert_eq!(least(&times(&[(NcclEp, u64::MAX), (AllToAll, u64::MAX)])), Some(NcclEp));
        assert_eq!(least(&[]), None);
    }

    #[test]
    fn every_kind_between_ranks_with_a_backward_is_a_candidate_once() {
        assert_eq!(candidates(&[AllToAll]), [AllToAll, NvLink, NcclEp, AllGather]);
        assert_eq!(candidates(&[NcclEp, AllGather]), [NcclEp, AllGather, NvLink, AllToAll]);
    }

    #[test]
    fn a_tokens_choices_are_different_experts() {
        for (k, experts) in [(1, 1), (2, 3), (8, 8), (8, 128)] {
            let bytes = Random(3).choices(50, k, experts);
            let ids: Vec<i32> = bytes.as_chunks().0.iter().map(|b| i32::from_ne_bytes(*b)).collect();
            assert_eq!(ids.len(), 50 * k);
            for token in ids.chunks(k) {
                let mut sorted = token.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert!(sorted.len() == k && sorted.iter().all(|id| (0..experts as i32).contains(id)), "{token:?}");
            }
        }
    }
}
