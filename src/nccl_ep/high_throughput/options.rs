//! Options of a group for high throughput, and the rules for them.

use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::rules::{MOST_CHOICES, NcclEpResult, SHARED, check_experts, check_tokens};

const CALL: &str = "HighThroughputGroup::new";
/// Rows that its kernels keep in shared memory, unless a variable says otherwise.
const STAGES: usize = 12;
const STAGE_VARIABLES: [&str; 2] = ["NCCL_EP_DISPATCH_NUM_STAGES", "NCCL_EP_COMBINE_NUM_STAGES_G2S"];

/// Options of a group; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HighThroughputOptions {
    /// Experts E over all ranks.
    pub num_experts: usize,
    /// Most tokens of a rank in a call; a multiple of 4, at most 8192.
    pub max_tokens: usize,
    /// Rows that every receive buffer has, for calls that wait for nothing and can be captured; `None`: as many as the
    /// step needs, which dispatch waits for.
    pub capacity: Option<usize>,
    /// Most bytes of a row, with its scales; a multiple of 16.
    pub max_row_bytes: usize,
    /// Most choices of a token, at most 32.
    pub max_top_k: usize,
    /// A row past the capacity ends the process with a message, instead of being dropped.
    pub trap: bool,
    /// SMs that its kernels take at most; 0: as the library chooses.
    pub max_sms: usize,
}

impl HighThroughputOptions {
    /// Whether the rows that a block has in flight fit its shared memory; `set` reads a variable.
    fn check_shared(&self, set: impl Fn(&str) -> Option<usize>) -> NcclEpResult<()> {
        let stages = STAGE_VARIABLES.map(|name| set(name).unwrap_or(STAGES)).into_iter().max().unwrap_or(STAGES);
        match stages.saturating_mul(self.max_row_bytes) <= SHARED {
            true => Ok(()),
            false => Err(NcclEpError::SharedMemory { stages, bytes: self.max_row_bytes, limit: SHARED }),
        }
    }

    /// Checks options for which the library would end the process, or which it would find wrong too late.
    pub(in crate::nccl_ep) fn check(&self, ranks: usize) -> NcclEpResult<()> {
        let positive = [
            ("num_experts", self.num_experts),
            ("max_tokens", self.max_tokens),
            ("max_row_bytes", self.max_row_bytes),
            ("max_top_k", self.max_top_k),
        ];
        if let Some((name, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            let (expected, found) = ("at least 1".to_string(), "0".to_string());
            return Err(NcclEpError::Argument { call: CALL, name, expected, found });
        }
        check_experts(self.num_experts, ranks)?;
        if self.max_top_k > self.num_experts {
            let (expected, found) = (format!("at most {} (num_experts)", self.num_experts), self.max_top_k.to_string());
            return Err(NcclEpError::Argument { call: CALL, name: "max_top_k", expected, found });
        }
        if !self.max_row_bytes.is_multiple_of(16) {
            return Err(NcclEpError::RowBytes { what: "max_row_bytes", bytes: self.max_row_bytes });
        }
        check_tokens(CALL, self.max_tokens)?;
        if self.max_top_k > MOST_CHOICES {
            let (expected, found) = (format!("at most {MOST_CHOICES}"), self.max_top_k.to_string());
            return Err(NcclEpError::Argument { call: CALL, name: "max_top_k", expected, found });
        }
        self.check_shared(|name| std::env::var(name).ok().and_then(|v| v.trim().parse().ok()))?;
        match self.capacity {
            Some(found) if found < self.max_tokens => {
                let expected = format!("at least {} rows (max_tokens)", self.max_tokens);
                Err(NcclEpError::Capacity { expected, found })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> HighThroughputOptions {
        HighThroughputOptions {
            num_experts: 8,
            max_tokens: 32,
            capacity: Some(64),
            max_row_bytes: 14_336,
            max_top_k: 2,
            trap: false,
            max_sms: 0,
        }
    }

    #[test]
    fn each_rule_has_its_own_error() {
        assert_eq!(good().check(2), Ok(()));
        assert_eq!(good().check(1), Err(NcclEpError::Ranks { found: 1 }));
        assert_eq!(good().check(3), Err(NcclEpError::Experts { experts: 8, ranks: 3 }));
        let bytes = NcclEpError::RowBytes { what: "max_row_bytes", bytes: 24 };
        assert_eq!(HighThroughputOptions { max_row_bytes: 24, ..good() }.check(2), Err(bytes));
        let named = |options: HighThroughputOptions| match options.check(2) {
            Err(NcclEpError::Argument { name, .. }) => name,
            other => panic!("{options:?}: {other:?}"),
        };
        assert_eq!(named(HighThroughputOptions { max_tokens: 30, ..good() }), "max_tokens");
        assert_eq!(named(HighThroughputOptions { max_tokens: 8196, capacity: None, ..good() }), "max_tokens");
        assert_eq!(named(HighThroughputOptions { max_tokens: 0, ..good() }), "max_tokens");
        assert_eq!(named(HighThroughputOptions { max_top_k: 9, ..good() }), "max_top_k");
        assert_eq!(named(HighThroughputOptions { num_experts: 64, max_top_k: 33, ..good() }), "max_top_k");
        let small = NcclEpError::Capacity { expected: "at least 32 rows (max_tokens)".into(), found: 28 };
        assert_eq!(HighThroughputOptions { capacity: Some(28), ..good() }.check(2), Err(small));
    }

    #[test]
    fn rows_in_flight_must_fit_unless_a_variable_lowers_their_number() {
        let long = HighThroughputOptions { max_row_bytes: 28_672, ..good() };
        let error = NcclEpError::SharedMemory { stages: 12, bytes: 28_672, limit: SHARED };
        assert_eq!(long.check_shared(|_| None), Err(error));
        assert_eq!(long.check_shared(|_| Some(6)), Ok(()));
        // One of the two kernels still has too many.
        let one = |name: &str| (name == STAGE_VARIABLES[0]).then_some(6);
        assert!(long.check_shared(one).is_err());
    }
}
