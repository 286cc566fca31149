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
    let waits = call.waits();
    let PlanRecords { rank, ranks, num_experts, max_tokens, tokens, spec, transport, records, heard } = call;
    let (sizes, kept, k) = (sizes(max_tokens, spec), heard.into_data(), spec.top_k);
    let bytes = records.data();
    Error::check_shape(CALL, "records", &[ranks, sizes.bytes()], records.dims())?;
    let records: Vec<Record> = bytes.chunks_exact(sizes.bytes()).map(|b| Record::decode(b, sizes)).collect();
    let troubled = record::problem(&records, rank, num_experts).is_some();
    // Who waits is told at once.
    if !heard::any(kept) && (record::masked(&records).is_some() || (troubled && !waits)) {
        heard::keep_headers(kept, bytes);
    }

    let all: Vec<usize> = records.iter().map(|r| r.tokens).collect();
    let room = if waits { all.iter().copied().max().unwrap_or(0) } else { max_tokens };
    // Rows of each rank.
    let split = if transport == Transport::AllRows { vec![room; ranks] } else { all.clone() };
    let real = |id: &i32| if usize::try_from(*id).is_ok_and(|e| e < num_experts) { *id } else { -1 };
    let padded = |(r, rows): (&Record, &usize)| {
        r.ids.iter().map(real).chain(std::iter::repeat(-1)).take(rows * k).collect::<Vec<i32>>()
    };
    let ids = records.iter().zip(&split).flat_map(padded).collect();
    let ids = Tensor::from_vec(ids, &[split.iter().sum(), k])?;
    let request = PlanRequest {
        rank,
        ranks,
        num_experts,
        ids: ids.view(),
        weights: None,
        tokens: &split,
        spec: &DispatchSpec { overflow: Overflow::Drop, ..*spec },
        transport,
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
    if let Some((rank, needed, capacity)) = overflow.filter(|_| !waits && !heard::any(kept)) {
        heard::keep_capacity(kept, [rank, needed, capacity]);
    }

    let own = plan.kept_ids.view().as_slice::<i32>()?[..tokens * k].to_vec();
    plan.kept_ids = Tensor::from_vec(own, &[tokens, k])?;
    plan.tokens = tokens;
    let ranks = |is: fn(&Record) -> bool| {
        records.iter().enumerate().filter(|(_, r)| is(r)).map(|(rank, _)| rank).collect::<Vec<usize>>()
    };
    let known = waits.then(|| Known {
        tokens: all,
        absent: ranks(|r| !r.backward),
        pending: ranks(|r| r.pending),
        troubled,
        overflow: overflow.map(|(rank, needed, _)| (rank, needed)),
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
