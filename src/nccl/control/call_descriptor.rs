//! A collective as one process tells the others of it, in a message's text, little-endian, unused bytes zero:
//!
//! ```text
//! layer 4 | step 1 | dtype 1 | detail 1 | 0 | sequence 8 | bytes 8 | root or place 8 | call 32 | reason 96    = 160 bytes
//! ```
//!
//! Sizes that differ from rank to rank (`all_to_all_v`) are left out: they follow from what prepare has exchanged.

use crate::comm::agree::{CollectiveCall, Detail};
use crate::comm::{Op, ReduceOp, Tag};
use crate::dtype::DType;

/// Bytes of a message that depend on its kind: a reason, or a call.
pub(in crate::nccl) const TEXT: usize = 160;

/// One rank's side of a collective, as far as it is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nccl) struct CallDescriptor {
    /// The call's name, as much of it as fits.
    operation: String,
    tag: Tag,
    dtype: DType,
    detail: DetailCode,
    bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DetailCode {
    Plain,
    Sum,
    Max,
    Root(u64),
    Place(u64),
    Beside(u64),
    Refusal(String),
}

/// As they are declared, all of them.
const STEPS: [Op; 12] = [
    Op::Init,
    Op::Count,
    Op::Prepare,
    Op::Dispatch,
    Op::Combine,
    Op::CombineBwd,
    Op::DispatchBwd,
    Op::Aux,
    Op::GradReduce,
    Op::GradNorm,
    Op::Weights,
    Op::User,
];
const DTYPES: [DType; 7] = [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8];
const _: () = assert!(Op::User as usize + 1 == STEPS.len() && DType::U8 as usize + 1 == DTYPES.len());
/// Calls of this crate's communicators, for errors that name what a peer has called.
const CALLS: [&str; 11] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all_v",
    "exchange_blocks",
    "broadcast",
    "barrier",
    "refuse",
    "allocate",
    "release",
    "dispatch",
];
/// Name there of any other call.
const OTHER: &str = "another call";
const NAME: std::ops::Range<usize> = 32..64;

impl CallDescriptor {
    pub(in crate::nccl) fn of(call: &CollectiveCall) -> Self {
        let mut name = [0; NAME.end - NAME.start];
        put(&mut name, call.operation);
        let (detail, bytes) = match &call.detail {
            Detail::Plain => (DetailCode::Plain, call.bytes as u64),
            Detail::Reduce(ReduceOp::Sum) => (DetailCode::Sum, call.bytes as u64),
            Detail::Reduce(ReduceOp::Max) => (DetailCode::Max, call.bytes as u64),
            Detail::Root(root) => (DetailCode::Root(*root as u64), call.bytes as u64),
            Detail::Place(place) => (DetailCode::Place(*place), call.bytes as u64),
            Detail::Beside(parts) => (DetailCode::Beside(*parts), call.bytes as u64),
            Detail::Pieces { .. } => (DetailCode::Plain, 0),
            Detail::Refusal(reason) => {
                let mut text = [0; TEXT - NAME.end];
                put(&mut text, reason);
                (DetailCode::Refusal(get(&text).unwrap_or_default()), 0)
            }
        };
        let operation = get(&name).unwrap_or_default();
        Self { operation, tag: call.tag, dtype: call.dtype, detail, bytes }
    }

    /// Whether both are the same call for the same purpose, whatever their sizes.
    pub(in crate::nccl) fn is_same_call(&self, other: &Self) -> bool {
        (&self.operation, self.tag) == (&other.operation, other.tag)
    }

    /// For comparison with the other ranks', on the rank that calls `own`.
    pub(in crate::nccl) fn call(&self, own: &'static str) -> CollectiveCall {
        let operation = [own].iter().chain(&CALLS).find(|name| self.is(name)).copied().unwrap_or(OTHER);
        let detail = match &self.detail {
            DetailCode::Plain => Detail::Plain,
            DetailCode::Sum => Detail::Reduce(ReduceOp::Sum),
            DetailCode::Max => Detail::Reduce(ReduceOp::Max),
            DetailCode::Root(root) => Detail::Root(*root as usize),
            DetailCode::Place(place) => Detail::Place(*place),
            DetailCode::Beside(parts) => Detail::Beside(*parts),
            DetailCode::Refusal(reason) => Detail::Refusal(reason.clone()),
        };
        CollectiveCall { operation, tag: self.tag, dtype: self.dtype, detail, bytes: self.bytes as usize }
    }

    /// Why the rank fails in the others' call, where it does.
    pub(in crate::nccl) fn refusal(&self) -> Option<&str> {
        match &self.detail {
            DetailCode::Refusal(reason) => Some(reason),
            _ => None,
        }
    }

    /// Whether this is what a call is told as.
    fn is(&self, name: &str) -> bool {
        let mut bytes = [0; NAME.end - NAME.start];
        put(&mut bytes, name);
        get(&bytes).is_some_and(|name| name == self.operation)
    }

    pub(in crate::nccl) fn encode(&self) -> [u8; TEXT] {
        let mut bytes = [0; TEXT];
        let (code, number, reason) = match &self.detail {
            DetailCode::Plain => (0, 0, ""),
            DetailCode::Sum => (1, 0, ""),
            DetailCode::Max => (2, 0, ""),
            DetailCode::Root(root) => (3, *root, ""),
            DetailCode::Refusal(reason) => (4, 0, &reason[..]),
            DetailCode::Place(place) => (5, *place, ""),
            DetailCode::Beside(parts) => (6, *parts, ""),
        };
        bytes[..4].copy_from_slice(&self.tag.layer.to_le_bytes());
        bytes[4] = self.tag.op as u8;
        bytes[5] = self.dtype as u8;
        bytes[6] = code;
        for (at, word) in [(8, self.tag.sequence), (16, self.bytes), (24, number)] {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        put(&mut bytes[NAME], &self.operation);
        put(&mut bytes[NAME.end..], reason);
        bytes
    }

    /// The call in the bytes, if they describe one; whether it is the one form of that is the caller's to see.
    pub(in crate::nccl) fn parse(bytes: &[u8; TEXT]) -> Option<Self> {
        let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let detail = match bytes[6] {
            0 => DetailCode::Plain,
            1 => DetailCode::Sum,
            2 => DetailCode::Max,
            3 => DetailCode::Root(word(24)),
            4 => DetailCode::Refusal(get(&bytes[NAME.end..])?),
            5 => DetailCode::Place(word(24)),
            6 => DetailCode::Beside(word(24)),
            _ => return None,
        };
        let (op, dtype) = (*STEPS.get(usize::from(bytes[4]))?, *DTYPES.get(usize::from(bytes[5]))?);
        let tag = Tag { layer: word(0) as u32, op, sequence: word(8) };
        Some(Self { operation: get(&bytes[NAME])?, tag, dtype, detail, bytes: word(16) })
    }
}

/// As much of a text as fits: whole characters, none of them zero.
pub(in crate::nccl) fn put(bytes: &mut [u8], text: &str) {
    let zero = text.find('\0').unwrap_or(text.len());
    let end = (0..=bytes.len().min(zero)).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
}

/// A text up to its zeros.
pub(in crate::nccl) fn get(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Some(str::from_utf8(&bytes[..end]).ok()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: &'static str, detail: Detail) -> CollectiveCall {
        let tag = Tag { layer: 0x0102_0304, op: Op::CombineBwd, sequence: u64::MAX - 1 };
        CollectiveCall { operation, tag, dtype: DType::BF16, detail, bytes: 1 << 40 }
    }

    #[test]
    fn calls_return() {
        let details = [
            Detail::Plain,
            Detail::Reduce(ReduceOp::Sum),
            Detail::Reduce(ReduceOp::Max),
            Detail::Root(7),
            Detail::Place(1 << 50),
            Detail::Beside(32 << 32 | 224),
            Detail::Refusal("no room".into()),
        ];
        for detail in details {
            let descriptor = CallDescriptor::of(&call("all_reduce", detail.clone()));
            assert_eq!(CallDescriptor::parse(&descriptor.encode()), Some(descriptor.clone()));
            let decoded = descriptor.call("barrier");
            assert_eq!((decoded.operation, &decoded.detail, decoded.dtype), ("all_reduce", &detail, DType::BF16));
            assert_eq!(decoded.tag, call("", Detail::Plain).tag);
        }
        // Each rank's own sizes are not told.
        let descriptor = CallDescriptor::of(&call("all_to_all_v", Detail::Pieces { send: vec![1], recv: vec![2] }));
        assert_eq!((&descriptor.detail, descriptor.bytes), (&DetailCode::Plain, 0));
    }

    #[test]
    fn names_that_are_not_known_differ_from_ones_own() {
        let descriptor = CallDescriptor::of(&call("a library's call with a name that is too long", Detail::Plain));
        assert_eq!(descriptor.call("all_gather").operation, OTHER);
        assert_eq!(descriptor.call("a library's call with a name that is too long").operation.len(), 45);
        assert_eq!(CallDescriptor::of(&call("other", Detail::Plain)).call("othe").operation, OTHER);
        assert_eq!(CallDescriptor::of(&call("othe", Detail::Plain)).call("other").operation, OTHER);
    }

    #[test]
    fn every_step_and_dtype_has_a_number() {
        for op in STEPS {
            for dtype in DTYPES {
                let descriptor = CallDescriptor {
                    dtype,
                    tag: Tag { layer: 0, op, sequence: 0 },
                    ..CallDescriptor::of(&call("x", Detail::Plain))
                };
                assert_eq!(CallDescriptor::parse(&descriptor.encode()), Some(descriptor));
            }
        }
    }
}
