//! The record of a rank in prepare, of a size that all ranks know: it tells the others the rank's choices.
//!
//! ```text
//! HEADER bytes                      numbers, and text: the reason where the rank failed, else its layer's values
//! 1 byte, only with weights         so that a size tells whether there are any
//! max_tokens · K · 4                ids, i32
//! max_tokens · K · 8                weights as f64, where an expert capacity keeps by probability
//! ```

use crate::config::{CapacityOrder, FieldValues, Fingerprint};
use crate::dtype::DType;
use crate::error::{Error, IdProblem, Result};
use crate::host_memory;

use super::{Capacity, DispatchSpec, Origin, Overflow, Reporting};

const CALL: &str = "prepare";

/// Words of a header: kind, tokens, backward, length of the text; of a bad id rank, token, k, id, first column + 1;
/// the spec's numbers; whether an error of an earlier call has not been asked for.
pub(crate) const HEADER_WORDS: usize = 26;
/// Bytes of the text.
const TEXT: usize = FieldValues::BYTES;
/// Bytes before the ids.
pub(crate) const HEADER: usize = HEADER_WORDS * 8 + TEXT;
/// Word of the spec's first number.
pub(crate) const FIRST_FIELD: usize = 9;
const _: () = assert!(BAD_LAYER < HEADER_WORDS);
/// Word that says that a rank still holds an error of an earlier call.
pub(crate) const PENDING: usize = FIRST_FIELD + FIELDS.len();
/// Layer of a bad id, behind whether an error is pending.
pub(crate) const BAD_LAYER: usize = PENDING + 1;

/// Numbers of a spec that all ranks must agree on; `backward` is each rank's own. `layer` is in the tag too, which
/// ranks that are processes do not compare unless asked to.
pub(crate) const FIELDS: [&str; 14] = [
    "spec.layer",
    "spec.top_k",
    "spec.alignment",
    "spec.capacity",
    "spec.overflow",
    "spec.reporting",
    "spec.expert_capacity.factor",
    "spec.expert_capacity.order",
    "spec.expert_capacity.renormalize",
    FORMULA,
    FORMULA,
    FORMULA,
    FORMULA,
    FORMULA,
];
/// The layer's configuration, of which fields have names of their own.
const FORMULA: &str = "spec.formula";
/// Where that begins among the fields.
const FORMULA_AT: usize = FIELDS.len() - Fingerprint::WORDS;

/// An id that is out of range or doubled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadId {
    pub rank: usize,
    pub layer: u32,
    pub token: usize,
    pub k: usize,
    pub id: i64,
    /// The column that has the same id, for a duplicate.
    pub first: Option<usize>,
}

impl BadId {
    pub fn error(self, num_experts: usize) -> Error {
        let problem = match self.first {
            Some(first) => IdProblem::Duplicate { first },
            None => IdProblem::OutOfRange { num_experts },
        };
        let Self { rank, layer, token, k, id, .. } = self;
        Error::ExpertId { call: CALL, rank, layer, token, k, id, problem }
    }
}

/// How a rank stands before the exchange.
#[derive(Debug, Clone)]
pub(crate) enum RecordStatus {
    Ready,
    /// Ready, with a bad id masked and to be reported later.
    Deferred(BadId),
    /// The call fails for a bad id.
    BadId(BadId),
    /// The call fails for something else.
    Failed(String),
}

/// One rank's part of prepare.
#[derive(Debug, Clone)]
pub(crate) struct RoutingRecord {
    pub status: RecordStatus,
    pub fields: SpecFields,
    /// Of the layer's configuration, where they travel: a kernel that writes a record sends none.
    pub values: FieldValues,
    pub backward: bool,
    /// An error of an earlier call has not been asked for.
    pub pending: bool,
    pub tokens: usize,
    /// `[tokens, K]`.
    pub ids: Vec<i32>,
    /// `[tokens, K]` or empty.
    pub weights: Vec<f64>,
}

/// Sizes that make a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordSizes {
    pub max_tokens: usize,
    pub top_k: usize,
    pub weights: bool,
}

impl RecordSizes {
    pub fn bytes(self) -> usize {
        let choices = self.max_tokens.saturating_mul(self.top_k);
        let extra = if self.weights { 1 + choices.saturating_mul(8) } else { 0 };
        HEADER.saturating_add(choices.saturating_mul(4)).saturating_add(extra)
    }

    fn ids_at(self) -> usize {
        HEADER + usize::from(self.weights)
    }

    fn weights_at(self) -> usize {
        self.ids_at() + self.max_tokens * self.top_k * 4
    }
}

/// Whether prepare exchanges weights.
pub(crate) fn needs_weights(spec: &DispatchSpec) -> bool {
    spec.expert_capacity.is_some_and(|c| c.order == CapacityOrder::Probability)
}

/// The numbers of a spec, for comparison.
pub(crate) type SpecFields = [u64; FIELDS.len()];

pub(crate) fn fields(spec: &DispatchSpec) -> SpecFields {
    let capacity = match spec.capacity {
        Capacity::Eager => 0,
        Capacity::Static(rows) => (rows as u64).saturating_add(1),
    };
    let expert = spec.expert_capacity.as_ref();
    let [whole, first, second, third, fourth] = spec.formula.words();
    [
        u64::from(spec.layer),
        spec.top_k as u64,
        spec.alignment as u64,
        capacity,
        u64::from(spec.overflow == Overflow::Drop),
        u64::from(spec.reporting == Reporting::Deferred),
        expert.map_or(0, |c| c.factor.to_bits()),
        u64::from(needs_weights(spec)),
        u64::from(expert.is_some_and(|c| c.renormalize)),
        whole,
        first,
        second,
        third,
        fourth,
    ]
}

/// A field's value as a person would write it.
fn show(field: &str, value: u64) -> String {
    match (field, value) {
        ("spec.capacity", 0) => "eager".to_string(),
        ("spec.capacity", n) => format!("static {}", n - 1),
        ("spec.overflow", n) => if n == 0 { "error" } else { "drop" }.to_string(),
        ("spec.reporting", n) => if n == 0 { "immediate" } else { "deferred" }.to_string(),
        ("spec.expert_capacity.factor", 0) => "none".to_string(),
        ("spec.expert_capacity.factor", bits) => f64::from_bits(bits).to_string(),
        ("spec.expert_capacity.order", n) => if n == 0 { "position or none" } else { "probability" }.to_string(),
        (_, n) => n.to_string(),
    }
}

/// The failure that the ranks' records call for, as an error of `rank`; each names its own problem first.
pub(crate) fn problem(records: &[RoutingRecord], rank: usize, num_experts: usize) -> Option<Error> {
    let failure = |(peer, r): (usize, &RoutingRecord)| match &r.status {
        RecordStatus::BadId(bad) => Some(bad.error(num_experts)),
        RecordStatus::Failed(reason) => Some(Error::Peer { call: CALL, rank, peer, reason: reason.clone() }),
        RecordStatus::Ready | RecordStatus::Deferred(_) => None,
    };
    let own = std::iter::once((rank, &records[rank]));
    own.chain(records.iter().enumerate()).find_map(failure).or_else(|| disagreement(records, rank))
}

/// The first id that a rank has masked.
pub(crate) fn masked(records: &[RoutingRecord]) -> Option<BadId> {
    records.iter().find_map(|r| match r.status {
        RecordStatus::Deferred(bad) => Some(bad),
        _ => None,
    })
}

/// The first field in which the ranks differ, as an error of `rank`.
fn disagreement(records: &[RoutingRecord], rank: usize) -> Option<Error> {
    let own = &records[rank].fields;
    (0..FIELDS.len()).find_map(|i| {
        let peer = records.iter().position(|r| r.fields[i] != own[i])?;
        if FIELDS[i] == FORMULA {
            return Some(formulas(records, rank, peer));
        }
        Some(Error::ConfigMismatch {
            call: CALL,
            field: FIELDS[i].to_string(),
            rank,
            value: show(FIELDS[i], own[i]),
            peer,
            peer_value: show(FIELDS[i], records[peer].fields[i]),
        })
    })
}

/// The fields in which two ranks' layers differ, and each one's values.
fn formulas(records: &[RoutingRecord], rank: usize, peer: usize) -> Error {
    let two = [rank, peer].map(|rank| (&records[rank].fields[FORMULA_AT..], &records[rank].values));
    let (field, [value, peer_value]) = Fingerprint::difference(two, FORMULA);
    Error::ConfigMismatch { call: CALL, field, rank, value, peer, peer_value }
}

impl RoutingRecord {
    /// A record that says only that this rank failed.
    pub fn failed(status: RecordStatus) -> Self {
        let (ids, weights) = (Vec::new(), Vec::new());
        let (fields, values) = ([0; FIELDS.len()], FieldValues::default());
        Self { status, fields, values, backward: false, pending: false, tokens: 0, ids, weights }
    }

    /// # Errors
    /// [`Error::OutOfMemory`]: the size is the group's and not this call's.
    pub fn encode(&self, sizes: RecordSizes) -> Result<Vec<u8>> {
        let mut bytes = host_memory::zeroed(CALL, "a routing record", sizes.bytes())?;
        let (kind, bad, text) = match &self.status {
            RecordStatus::Ready => (0, None, self.values.text()),
            RecordStatus::Deferred(bad) => (1, Some(*bad), self.values.text()),
            RecordStatus::BadId(bad) => (2, Some(*bad), self.values.text()),
            RecordStatus::Failed(reason) => (3, None, reason.as_str()),
        };
        // Whole characters, as many as fit.
        let text = &text[..text.floor_char_boundary(TEXT)];
        let reported = bad.unwrap_or(BadId { rank: 0, layer: 0, token: 0, k: 0, id: 0, first: None });
        let mut words = vec![kind, self.tokens as u64, u64::from(self.backward), text.len() as u64];
        let first = reported.first.map_or(0, |f| f as u64 + 1);
        words.extend([reported.rank as u64, reported.token as u64, reported.k as u64, reported.id as u64, first]);
        words.extend(self.fields);
        words.push(u64::from(self.pending));
        // A kernel that masks an id of these itself leaves the layer alone; an earlier call's error is another layer's.
        words.push(bad.map_or(self.fields[0], |bad| u64::from(bad.layer)));
        put(&mut bytes[..HEADER_WORDS * 8], words.iter().map(|w| w.to_le_bytes()));
        bytes[HEADER_WORDS * 8..HEADER_WORDS * 8 + text.len()].copy_from_slice(text.as_bytes());
        put(&mut bytes[sizes.ids_at()..], self.ids.iter().map(|v| v.to_le_bytes()));
        if sizes.weights {
            put(&mut bytes[sizes.weights_at()..], self.weights.iter().map(|v| v.to_le_bytes()));
        }
        Ok(bytes)
    }

    pub fn decode(bytes: &[u8], sizes: RecordSizes) -> Self {
        let words: Vec<u64> = get(bytes, HEADER_WORDS, u64::from_le_bytes);
        let bad = BadId {
            rank: words[4] as usize,
            layer: words[BAD_LAYER] as u32,
            token: words[5] as usize,
            k: words[6] as usize,
            id: words[7] as i64,
            first: words[8].checked_sub(1).map(|f| f as usize),
        };
        let text = String::from_utf8_lossy(&bytes[HEADER_WORDS * 8..HEADER_WORDS * 8 + (words[3] as usize).min(TEXT)]);
        let values = if words[0] <= 2 { FieldValues::from_text(&text) } else { FieldValues::default() };
        let status = match words[0] {
            0 => RecordStatus::Ready,
            1 => RecordStatus::Deferred(bad),
            2 => RecordStatus::BadId(bad),
            _ => RecordStatus::Failed(text.into_owned()),
        };
        let tokens = (words[1] as usize).min(sizes.max_tokens);
        let mut fields = [0; FIELDS.len()];
        fields.copy_from_slice(&words[FIRST_FIELD..PENDING]);
        let choices = tokens * sizes.top_k;
        // A header alone has neither.
        let bytes_from = |at: usize| bytes.get(at..).unwrap_or_default();
        let weights = match sizes.weights {
            true => get(bytes_from(sizes.weights_at()), choices, f64::from_le_bytes),
            false => Vec::new(),
        };
        let ids = get(bytes_from(sizes.ids_at()), choices, i32::from_le_bytes);
        Self { status, fields, values, backward: words[2] != 0, pending: words[PENDING] != 0, tokens, ids, weights }
    }
}

/// Ids as i32, bad entries masked, and the first of these.
pub(crate) fn mask_bad_ids(
    bytes: &[u8],
    dtype: DType,
    Origin { rank, layer }: Origin,
    k: usize,
    num_experts: usize,
) -> Result<(Vec<i32>, Option<BadId>)> {
    let wide: Vec<i64> = match dtype {
        DType::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_ne_bytes(*b)).collect(),
        DType::I32 => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_ne_bytes(*b))).collect(),
        other => return Err(Error::invalid(CALL, "tensor topk_ids", "i32 or i64", other)),
    };
    // Choice that named each expert last: doubled if of the same token.
    let mut named = vec![usize::MAX; num_experts];
    let mut bad = None;
    let mut kept = Vec::with_capacity(wide.len());
    for (i, &id) in wide.iter().enumerate() {
        let (token, column) = (i / k, i % k);
        let problem = |first| BadId { rank, layer, token, k: column, id, first };
        let mut expert = -1;
        match usize::try_from(id) {
            Ok(e) if e < num_experts => {
                let last = std::mem::replace(&mut named[e], i);
                if last != usize::MAX && last / k == token {
                    bad = bad.or(Some(problem(Some(last % k))));
                } else {
                    expert = e as i32;
                }
            }
            _ if id == -1 => {}
            _ => bad = bad.or(Some(problem(None))),
        }
        kept.push(expert);
    }
    Ok((kept, bad))
}

fn put<const N: usize>(bytes: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    bytes.chunks_exact_mut(N).zip(values).for_each(|(to, from)| to.copy_from_slice(&from));
}

fn get<T, const N: usize>(bytes: &[u8], count: usize, of: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().take(count).map(|c| of(*c)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each field alone, the layer as well: ranks that are processes have nothing else that compares it.
    #[test]
    fn every_field_is_compared() {
        let good = DispatchSpec::new(3, 2);
        let record =
            |spec: &DispatchSpec| RoutingRecord { fields: fields(spec), ..RoutingRecord::failed(RecordStatus::Ready) };
        let sizes = RecordSizes { max_tokens: 0, top_k: 2, weights: false };
        for (i, field) in FIELDS.into_iter().enumerate() {
            let mut records = vec![record(&good); 3];
            records[2].fields[i] = records[2].fields[i].wrapping_add(1);
            let encoded = |r: &RoutingRecord| r.encode(sizes).expect("a header's bytes");
            let records: Vec<RoutingRecord> =
                records.iter().map(|r| RoutingRecord::decode(&encoded(r), sizes)).collect();
            for (rank, other) in [(0, 2), (1, 2), (2, 0)] {
                match problem(&records, rank, 8) {
                    Some(Error::ConfigMismatch { field: named, rank: own, peer, .. }) => {
                        // Of a layer's configuration a field is named that a digest's first bits are of.
                        assert!(named == field || i > FORMULA_AT, "{named} in place of {field}");
                        assert_eq!((own, peer), (rank, other));
                    }
                    found => panic!("{field}: {found:?}"),
                }
            }
        }
        let other = DispatchSpec::new(4, 2);
        let text = problem(&[record(&good), record(&other)], 0, 8).map(|e| e.to_string()).unwrap_or_default();
        assert!(
            text.starts_with("prepare: ") && text.contains("spec.layer") && text.contains('3') && text.contains('4'),
            "{text}"
        );
        assert!(problem(&[record(&good), record(&good)], 0, 8).is_none());
    }
}
