//! Which gradients travel together where they are summed over ranks.

use crate::error::{Error, Result};
pub(crate) use crate::etp::NO_LAYER;
use crate::fnv1a::fnv1a;

/// A gradient that is summed, in f32 or f64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summand {
    /// Elements.
    pub(crate) count: usize,
    /// Whether they are summed in f64.
    pub(crate) double: bool,
}

impl Summand {
    fn bytes(self) -> usize {
        self.count * if self.double { size_of::<f64>() } else { size_of::<f32>() }
    }
}

/// A hash of variables' sizes and types, in the order in which they are summed.
pub(crate) fn variables_hash(variables: impl Iterator<Item = String>) -> u64 {
    fnv1a(variables.collect::<Vec<_>>().join(";"))
}

/// Refuses variables of which another rank has others; `all` has every rank's hash. So each rank gets an error.
pub(crate) fn check_variables(call: &'static str, own: u64, all: impl IntoIterator<Item = u64>) -> Result<()> {
    match all.into_iter().position(|theirs| theirs != own) {
        None => Ok(()),
        Some(peer) => Err(other_variables(call, "variables", &format!("rank {peer}"))),
    }
}

/// The error for variables that are not a peer's.
pub(crate) fn other_variables(call: &'static str, name: &str, peer: &str) -> Error {
    let expected = format!("those of {peer}, of its names, sizes and types, in its order");
    Error::invalid(call, name, expected, "others, or in another order")
}

/// The parameters in order, cut where the sums' type changes or a bucket is full.
pub(crate) fn buckets<T>(of: &[T], bucket_bytes: usize, summand: impl Fn(&T) -> Summand) -> Vec<&[T]> {
    let mut bytes = 0;
    let together = |before: &T, next: &T| {
        let (before, next) = (summand(before), summand(next));
        bytes += before.bytes();
        let fits = before.double == next.double && bytes + next.bytes() <= bucket_bytes;
        if !fits {
            bytes = 0;
        }
        fits
    };
    of.chunk_by(together).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_where_the_type_changes_or_a_bucket_is_full() {
        let of = |count, double| Summand { count, double };
        let all = [of(2, false), of(1, false), of(1, false), of(1, true), of(9, false), of(0, false)];
        let lengths = |bytes| buckets(&all, bytes, |s| *s).into_iter().map(<[Summand]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(12), [2, 1, 1, 1, 1], "a bucket of three f32");
        assert_eq!(lengths(1 << 20), [3, 1, 2]);
        assert_eq!(lengths(0), [1; 6], "what does not fit travels alone");
    }
}
