//! Prepare of several ranks on the GPU (`kernels/routing_records.cu`, `all_to_all_plan.cu`): this rank's record, and
//! the plan from all ranks'.

mod all_to_all;
mod plan;
mod stats_layout;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::routing_record::{self, HEADER_WORDS, RecordSizes, RecordStatus, RoutingRecord};
use crate::plan::{DispatchSpec, RecordIds, deferred_errors};
use crate::tensor::TensorRef;

use super::device::Cuda;
use super::heuristics::RECORD_BLOCKS;
use super::launch::Grid;
use super::params;
use super::plan::COUNTS;

#[cfg(feature = "nccl")]
pub(super) use all_to_all::empty_zones;
pub(super) use plan::plan;
#[cfg(feature = "nccl")]
pub(super) use plan::{PlanDescription, PlanSizes, RowMaps, empty_slot_maps};

// Kernels write and read what the host does.
const _: () =
    assert!(HEADER_WORDS == params::HEADER_WORDS as usize && routing_record::HEADER == params::HEADER_BYTES as usize);
const _: () = assert!(
    routing_record::FIRST_FIELD == params::FIELD as usize && routing_record::PENDING == params::PENDING as usize
);
const _: () = assert!(routing_record::BAD_LAYER == params::BAD_LAYER as usize);
const _: () = assert!(deferred_errors::ERRORS_WORDS == params::ERRORS_WORDS as usize);
const _: () =
    assert!(deferred_errors::RECORDS == params::ERRORS_RECORDS && deferred_errors::CAPACITY == params::ERRORS_CAPACITY);

const _: () = assert!(deferred_errors::LAYER == params::ERRORS_LAYER as usize);

const CALL: &str = "prepare";

/// Whether blocks have room to count so many experts' choices; records of these specs carry no weights.
pub(super) fn plans(spec: &DispatchSpec, experts: usize) -> bool {
    !routing_record::needs_weights(spec) && experts <= COUNTS
}

fn sizes(max_tokens: usize, spec: &DispatchSpec) -> RecordSizes {
    RecordSizes { max_tokens, top_k: spec.top_k, weights: false }
}

pub(super) fn record(device: &Cuda, call: RecordIds<'_, Cuda>) -> Result<()> {
    let RecordIds { rank, num_experts, max_tokens, spec, ids, errors, out } = call;
    Error::check_shape(CALL, "record", &[sizes(max_tokens, spec).bytes()], out.dims())?;
    let choices = ids.count();
    check_errors(errors.as_ref().dims(), 1)?;
    let own = OwnRecord { rank, num_experts, max_tokens, spec, ids };
    let (record, errors) = (out.into_data().ptr, errors.into_data().ptr);
    let p = params::WriteRecordParams { record, errors, ..own.params()? };
    let blocks = choices.div_ceil(params::PLAN_THREADS as usize).clamp(1, RECORD_BLOCKS);
    let grid = Grid::new(blocks, params::PLAN_THREADS);
    // SAFETY: the record has room for a header and `max_tokens` tokens' ids, of which there are no more; `errors` has
    // its words; the kernel checks the ids.
    unsafe { device.launch(CALL, &device.kernels().routing_records.record_ids, grid, &p) }
}

/// A rank's record that a kernel writes.
pub(super) struct OwnRecord<'a> {
    pub(super) rank: usize,
    pub(super) num_experts: usize,
    pub(super) max_tokens: usize,
    pub(super) spec: &'a DispatchSpec,
    pub(super) ids: TensorRef<'a, Cuda>,
}

impl OwnRecord<'_> {
    /// What the kernel is told, but for where the record and errors go.
    pub(super) fn params(self) -> Result<params::WriteRecordParams> {
        let Self { rank, num_experts, max_tokens, spec, ids } = self;
        let wide = match ids.dtype() {
            DType::I64 => 1,
            DType::I32 => 0,
            other => return Err(Error::invalid(CALL, "tensor topk_ids", "i32 or i64", other)),
        };
        Error::check_shape(CALL, "topk_ids", &[ids.rows().min(max_tokens), spec.top_k], ids.dims())?;
        let own = RoutingRecord {
            fields: routing_record::fields(spec),
            backward: spec.backward,
            tokens: ids.rows(),
            ..RoutingRecord::failed(RecordStatus::Ready)
        };
        let mut header = [0; HEADER_WORDS];
        let bytes = own.encode(RecordSizes { max_tokens: 0, ..sizes(max_tokens, spec) })?;
        header.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, word)| *to = i64::from_le_bytes(*word));
        Ok(params::WriteRecordParams {
            ids: ids.data().ptr,
            wide,
            choices: ids.count() as i64,
            top_k: spec.top_k as i64,
            experts: num_experts as i64,
            rank: rank as i64,
            header,
            ..Default::default()
        })
    }
}

fn check_errors(dims: &[usize], ranks: usize) -> Result<()> {
    match dims {
        [bytes] if *bytes >= deferred_errors::bytes(ranks) => Ok(()),
        dims => {
            Err(Error::invalid(CALL, "errors", format!("{} bytes", deferred_errors::bytes(ranks)), format!("{dims:?}")))
        }
    }
}
