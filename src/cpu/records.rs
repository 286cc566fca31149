//! Prepare from records, as devices do it whose host does not wait.

use crate::ep::heard;
use crate::ep::record::{self, Record, Sizes, Status};
use crate::ep::{Capacity, DispatchSpec, Gathered, Known, Overflow, PlanRecords, PlanRequest, RecordIds, Transport};
use crate::error::{Error, Result};
use crate::lazy::Lazy;
use crate::tensor::Tensor;

use super::{Cpu, plan};

const CALL: &str = "prepare";

/// Records of these carry no weights.
pub(super) fn plans(spec: &DispatchSpec) -> bool {
    !record::needs_weights(spec)
}

fn sizes(max_tokens: usize, spec: &DispatchSpec) -> Sizes {
    Sizes { max_tokens, top_k: spec.top_k, weights: false }
}

pub(super) fn record(call: RecordIds<'_, Cpu>) -> Result<()> {
    let RecordIds { rank, num_experts, max_tokens, spec, ids, heard, out } = call;
    let (clean, bad) = record::clean((ids.data(), ids.dtype()), (rank, spec.top_k, num_experts))?;
    let record = Record {
        status: bad.map_or(Status::Ready, Status::Deferred),
        fields: record::fields(spec),
        backward: spec.backward,
        pending: heard::any(heard.as_ref().data()),
        tokens: ids.rows(),
        ids: clean,
        weights: Vec::new(),
    };
    let bytes = record.encode(sizes(max_tokens, spec));
    Error::check_shape(CALL, "record", &[bytes.len()], out.dims())?;
    out.into_data().copy_from_slice(&bytes);
    Ok(())
}

pub(super) fn plan(call: PlanRecords<'_, Cpu>) -> Result<Gathered<Cpu>> {
    let PlanRecords { rank, ranks, num_experts, max_tokens, tokens, spec, records, heard } = call;
    let (sizes, kept, k) = (sizes(max_tokens, spec), heard.into_data(), spec.top_k);
    let bytes = records.data();
    Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
    let records: Vec<Record> = bytes.chunks_exact(sizes.bytes()).map(|b| Record::decode(b, sizes)).collect();
    let waits = spec.capacity == Capacity::Eager;
    let troubled = record::problem(&records, rank, num_experts).is_some();
    // Who waits is told at once.
    if !heard::any(kept) && (record::masked(&records).is_some() || (troubled && !waits)) {
        heard::keep_headers(kept, bytes);
    }

    let most = records.iter().map(|r| r.tokens).max().unwrap_or(0);
    let room = if waits { most } else { max_tokens };
    let real = |id: &i32| if usize::try_from(*id).is_ok_and(|e| e < num_experts) { *id } else { -1 };
    let padded = |r: &Record| r.ids.iter().map(real).chain(std::iter::repeat(-1)).take(room * k).collect::<Vec<i32>>();
    let ids = Tensor::from_vec(records.iter().flat_map(padded).collect(), &[ranks * room, k])?;
    let request = PlanRequest {
        rank,
        ranks,
        num_experts,
        ids: ids.view(),
        weights: None,
        tokens: &vec![room; ranks],
        spec: &DispatchSpec { overflow: Overflow::Drop, ..*spec },
        transport: Transport::AllRows,
    };
    let choices = records.iter().map(|r| r.tokens * k).sum();
    let (mut plan, needed) = plan::plan_of(request, choices)?;
    if let (Capacity::Static(capacity), Overflow::Error) = (spec.capacity, spec.overflow)
        && let Some(rank) = needed.iter().position(|n| *n > capacity)
        && !heard::any(kept)
    {
        heard::keep_capacity(kept, [rank, needed[rank], capacity]);
    }

    let own = plan.kept_ids.view().as_slice::<i32>()?[..tokens * k].to_vec();
    plan.kept_ids = Tensor::from_vec(own, &[tokens, k])?;
    plan.tokens = tokens;
    let all = || records.iter().enumerate();
    let known = waits.then(|| Known {
        tokens: records.iter().map(|r| r.tokens).collect(),
        absent: all().filter(|(_, r)| !r.backward).map(|(r, _)| r).collect(),
        pending: all().filter(|(_, r)| r.pending).map(|(r, _)| r).collect(),
        troubled,
    });
    (plan.total_tokens, plan.first_token) = match &known {
        Some(known) => (known.tokens.iter().sum(), known.tokens[..rank].iter().sum()),
        None => {
            // Nobody has waited for them.
            let stats = plan.stats.get()?.clone();
            plan.stats = Lazy::later(move || Ok(stats.clone()));
            (tokens, 0)
        }
    };
    Ok(Gathered { plan, room, known })
}
