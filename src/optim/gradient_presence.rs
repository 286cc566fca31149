//! Which parameters have gradients in a step: the same ones on all ranks that hold the same rows.

use std::fmt::Write;

use crate::comm::{Communicator, Tag};
use crate::compare::gather_numbers;
use crate::error::{Error, Result};
use crate::etp::StreamPair;
use crate::tensor::TensorRef;

use super::norm::RankRows;
use super::{ParamSpec, StepDevice};

/// Parameters in a number that travels.
const BITS: usize = u64::BITS as usize;

/// The gradients of a step, as this rank has them.
pub(super) struct GradientPresence<'s, 'a, D: StepDevice> {
    pub(super) specs: &'s [ParamSpec],
    pub(super) rank_rows: &'s RankRows,
    /// One a parameter.
    pub(super) gradients: &'s [Option<TensorRef<'a, D>>],
}

impl<D: StepDevice> GradientPresence<'_, '_, D> {
    /// Compares over the ranks, each of which gets the same error. The host waits for the other ranks and for what the
    /// communicator's stream has been given: so an optimizer asks in its first step alone. Whether this was one to compare:
    /// in a capture, and where no rank holds any parameter, nothing is.
    pub(super) fn compare(&self, comm: &mut dyn Communicator<D>, streams: &StreamPair<D>, tag: Tag) -> Result<bool> {
        if self.rank_rows.len() == 1 || streams.compute.capture_number().is_some() {
            return Ok(false);
        }
        let has: Vec<bool> = self.gradients.iter().map(Option::is_some).collect();
        let bits = |part: &[bool]| part.iter().rev().fold(0, |bits: u64, has| bits << 1 | u64::from(*has));
        let own: Vec<u64> = has.chunks(BITS).map(bits).collect();
        if own.is_empty() {
            return Ok(false);
        }
        let all = gather_numbers(&streams.transfer, comm, tag, &own)?;
        check(self.specs, self.rank_rows, |rank, p| all[rank * own.len() + p / BITS] >> (p % BITS) & 1 != 0)?;
        Ok(true)
    }
}

/// Refuses a parameter of whose holders of the same rows some have a gradient and others not.
fn check(specs: &[ParamSpec], rank_rows: &RankRows, has: impl Fn(usize, usize) -> bool) -> Result<()> {
    for (p, spec) in specs.iter().enumerate() {
        for (rank, rows) in rank_rows.iter().map(|parts| &parts[p]).enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let other = (0..rank).find(|other| rank_rows[*other][p] == *rows && has(*other, p) != has(rank, p));
            let Some(other) = other else { continue };
            let [with, without] = if has(rank, p) { [rank, other] } else { [other, rank] };
            let mut found = format!("one on rank {with}, none on rank {without}");
            if *rows != (0..spec.shard.all_rows()) {
                let _ = write!(found, ", of rows {rows:?}");
            }
            let expected = "one on all ranks that hold the same rows, or on none";
            return Err(Error::invalid("AdamW", format!("gradient of {}", spec.name), expected, found));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::optim::ParamShard;

    #[test]
    fn ranks_with_the_same_rows_are_compared() {
        let spec = |name: &str| ParamSpec {
            name: name.to_string(),
            shard: ParamShard::whole(&[4, 2]),
            dtype: DType::F32,
            group: 0,
        };
        let specs = [spec("router"), spec("experts")];
        // All ranks hold the router; two pairs of ranks a half of the experts each.
        let rank_rows: RankRows = (0..4).map(|rank| vec![0..4, rank % 2 * 2..rank % 2 * 2 + 2]).collect();
        let found = |has: [[bool; 2]; 4]| check(&specs, &rank_rows, |rank, p| has[rank][p]).map_err(|e| e.to_string());
        assert_eq!(found([[true; 2]; 4]), Ok(()));
        assert_eq!(found([[false; 2]; 4]), Ok(()));
        // Other rows may be without.
        assert_eq!(found([[true, true], [true, false], [true, true], [true, false]]), Ok(()));
        let error = found([[true, true], [true, true], [false, true], [true, true]]).unwrap_err();
        assert!(error.contains("gradient of router") && error.contains("one on rank 0, none on rank 2"), "{error}");
        let error = found([[true, true], [true, false], [true, true], [true, true]]).unwrap_err();
        assert!(error.contains("gradient of experts") && error.contains("one on rank 3, none on rank 1"), "{error}");
        assert!(error.contains("rows 2..4"), "{error}");
    }
}
