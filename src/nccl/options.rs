//! What a communicator's collectives may take of a GPU.

use crate::compare::ComparedField;
use crate::error::{Error, Result};

/// Most CTAs that NCCL's collectives are made for.
const MOST_CTAS: usize = 64;

/// Options of a communicator, the same on all of its ranks. NCCL's variables `NCCL_MIN_CTAS` and `NCCL_MAX_CTAS` go
/// before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NcclOptions {
    /// Fewest CTAs (thread blocks; one a channel, each on an SM) of a collective, at most 64; 0: as the library chooses.
    pub min_ctas: usize,
    /// Most CTAs of a collective, at most 64; 0: as the library chooses, and 64 beside `min_ctas`. Fewer leave SMs to
    /// kernels that run beside it, and make it slower.
    pub max_ctas: usize,
}

impl NcclOptions {
    /// Refuses numbers that NCCL would refuse, or change without a word.
    pub(super) fn check(&self, call: &'static str) -> Result<()> {
        let Self { min_ctas, max_ctas } = *self;
        for (name, found) in [("min_ctas", min_ctas), ("max_ctas", max_ctas)] {
            if found > MOST_CTAS {
                return Err(Error::invalid(call, name, format!("0..={MOST_CTAS}"), found));
            }
        }
        if max_ctas > 0 && min_ctas > max_ctas {
            return Err(Error::invalid(call, "min_ctas", format!("at most {max_ctas} (max_ctas)"), min_ctas));
        }
        Ok(())
    }

    /// Bounds as NCCL takes them: it refuses the lower one alone. `None`: as the library chooses.
    pub(super) fn bounds(&self) -> [Option<i32>; 2] {
        let Self { min_ctas, max_ctas } = *self;
        let max_ctas = if min_ctas > 0 && max_ctas == 0 { MOST_CTAS } else { max_ctas };
        [min_ctas, max_ctas].map(|ctas| i32::try_from(ctas).ok().filter(|ctas| *ctas > 0))
    }

    /// Fields as the ranks compare them.
    pub(super) fn fields(&self) -> [ComparedField; 2] {
        [("min_ctas", self.min_ctas), ("max_ctas", self.max_ctas)]
            .map(|(name, value)| ComparedField::number(name, value as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::compare_fields;

    #[test]
    fn bounds_are_checked_and_are_such_as_nccl_takes() {
        let of = |min_ctas, max_ctas| NcclOptions { min_ctas, max_ctas };
        assert_eq!(of(0, 0).bounds(), [None, None]);
        assert_eq!(of(0, 8).bounds(), [None, Some(8)]);
        assert_eq!(of(4, 8).bounds(), [Some(4), Some(8)]);
        assert_eq!(of(4, 0).bounds(), [Some(4), Some(64)]);
        for good in [of(0, 0), of(64, 64), of(64, 0), of(0, 1)] {
            assert!(good.check("a test").is_ok(), "{good:?}");
        }
        for (name, bad) in [("min_ctas", of(65, 0)), ("max_ctas", of(0, 65)), ("min_ctas", of(9, 8))] {
            let error = bad.check("a test");
            assert!(matches!(&error, Err(Error::Invalid { name: found, .. }) if found == name), "{error:?}");
        }
    }

    #[test]
    fn options_that_differ_between_ranks_are_named() {
        let own = NcclOptions { min_ctas: 2, max_ctas: 8 }.fields();
        assert!(compare_fields("a test", 0, &own, &[2, 8, 2, 8]).is_ok());
        match compare_fields("a test", 1, &own, &[2, 8, 2, 8, 2, 16]) {
            Err(Error::ConfigMismatch { field, rank: 1, value, peer: 2, peer_value, .. }) => {
                assert_eq!([&field[..], &value, &peer_value], ["max_ctas", "8", "16"]);
            }
            other => panic!("{other:?}"),
        }
        assert!(
            compare_fields("a test", 0, &own, &[2, 8, 0, 0]).is_err_and(|error| error.to_string().contains("min_ctas"))
        );
    }
}
