//! Prepare from records, as devices do it whose host does not wait.

use crate::error::{Error, Result};
use crate::host_memory;
use crate::kernels::Origin;
use crate::lazy::Lazy;
use crate::plan::deferred_errors::{self, SmallCapacity};
use crate::plan::routing_record::{self, RecordSizes, RecordStatus, RoutingRecord};
use crate::plan::{
    Capacity, DevicePlan, DispatchSpec, HostCounts, HostPlanRequest, Overflow, PlanFor, PlanRecords, RecordIds,
    RowOrder,
};
use crate::tensor::Tensor;

use super::{Cpu, plan};

const CALL: &str = "prepare";

/// Records of these carry no weights.
pub(super) fn plans(spec: &DispatchSpec) -> bool {
    !routing_record::needs_weights(spec)
}

fn sizes(max_tokens: usize, spec: &DispatchSpec) -> RecordSizes {
    RecordSizes { max_tokens, top_k: spec.top_k, weights: false }
}

pub(super) fn record(call: RecordIds<'_, Cpu>) -> Result<()> {
    let RecordIds { rank, num_experts, max_tokens, spec, ids, errors, out } = call;
    let origin = Origin { rank, layer: spec.layer };
    let (kept, bad) = routing_record::mask_bad_ids(ids.data(), ids.dtype(), origin, spec.top_k, num_experts)?;
    let record = RoutingRecord {
        status: bad.map_or(RecordStatus::Ready, RecordStatus::Deferred),
        fields: routing_record::fields(spec),
        values: *spec.formula.values(),
        backward: spec.backward,
        pending: deferred_errors::any(errors.as_ref().data()),
        tokens: ids.rows(),
        ids: kept,
        weights: Vec::new(),
    };
    let bytes = record.encode(sizes(max_tokens, spec))?;
    Error::check_shape(CALL, "record", &[bytes.len()], out.dims())?;
    out.into_data().copy_from_slice(&bytes);
    Ok(())
}

pub(super) fn plan(call: PlanRecords<'_, Cpu>) -> Result<DevicePlan<Cpu>> {
    let PlanRecords { of, records, errors } = call;
    let PlanFor { rank, ranks, num_experts, max_tokens, tokens, spec, row_order } = of;
    let waits = of.waits();
    let (sizes, kept, k) = (sizes(max_tokens, spec), errors.into_data(), spec.top_k);
    let bytes = records.data();
    Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
    let records: Vec<RoutingRecord> =
        bytes.chunks_exact(sizes.bytes()).map(|b| RoutingRecord::decode(b, sizes)).collect();
    let failed = routing_record::problem(&records, rank, num_experts).is_some();
    // Who waits is told at once.
    if !deferred_errors::any(kept) && (routing_record::masked(&records).is_some() || (failed && !waits)) {
        deferred_errors::store_headers(kept, bytes);
    }

    let all: Vec<usize> = records.iter().map(|r| r.tokens).collect();
    let padded_tokens = if waits { all.iter().copied().max().unwrap_or(0) } else { max_tokens };
    // Rows of each rank.
    let split = if row_order == RowOrder::AllRows { vec![padded_tokens; ranks] } else { all.clone() };
    let real = |id: &i32| if usize::try_from(*id).is_ok_and(|e| e < num_experts) { *id } else { -1 };
    let rows: usize = split.iter().sum();
    let mut ids = host_memory::reserved(CALL, "ids of all ranks", rows.saturating_mul(k))?;
    for (r, rows) in records.iter().zip(&split) {
        ids.extend(r.ids.iter().map(real).chain(std::iter::repeat(-1)).take(rows * k));
    }
    let request = HostPlanRequest {
        rank,
        ranks,
        num_experts,
        ids: &ids,
        weights: None,
        tokens: &split,
        spec: &DispatchSpec { overflow: Overflow::Drop, ..*spec },
        row_order,
    };
    let choices = records.iter().map(|r| r.tokens * k).sum();
    let (mut plan, needed) = plan::plan_of(request, choices)?;
    let overflow = match (spec.capacity, spec.overflow) {
        (Capacity::Static(capacity), Overflow::Error) => {
            let rank = needed.iter().position(|n| *n > capacity);
            rank.map(|rank| (rank, needed[rank], capacity))
        }
        _ => None,
    };
    if let Some((rank, needed, capacity)) = overflow.filter(|_| !waits && !deferred_errors::any(kept)) {
        deferred_errors::store_capacity(kept, SmallCapacity { rank, layer: spec.layer, needed, capacity });
    }

    let own = plan.kept_ids.view().as_slice::<i32>()?[..tokens * k].to_vec();
    plan.kept_ids = Tensor::from_vec(own, &[tokens, k])?;
    plan.tokens = tokens;
    let ranks = |is: fn(&RoutingRecord) -> bool| {
        records.iter().enumerate().filter(|(_, r)| is(r)).map(|(rank, _)| rank).collect::<Vec<usize>>()
    };
    let counts = waits.then(|| HostCounts {
        tokens: all,
        absent: ranks(|r| !r.backward),
        pending: ranks(|r| r.pending),
        failed,
        overflow: overflow.map(|(rank, needed, _)| (rank, needed)),
    });
    (plan.total_tokens, plan.first_token) = match &counts {
        Some(counts) => (counts.tokens.iter().sum(), counts.tokens[..rank].iter().sum()),
        None => {
            // Nobody has waited for them.
            let stats = plan.stats.get()?.clone();
            plan.stats = Lazy::from_fn(move || Ok(stats.clone()));
            (tokens, 0)
        }
    };
    Ok(DevicePlan { plan, padded_tokens, counts })
}
