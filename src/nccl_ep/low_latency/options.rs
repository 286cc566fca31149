//! Options of a group for low latency, and the rules for them.

use std::time::Duration;

use crate::dtype::DType;
use crate::nccl_ep::NcclEpError;
use crate::nccl_ep::rules::{MOST_CHOICES, MOST_TOKENS, NcclEpResult, SHARED, check_experts, check_sms};

const CALL: &str = "LowLatencyGroup::new";
/// Warps of a block of its kernels, and the most groups that they are divided into.
const WARPS: usize = 32;
const MOST_GROUPS: usize = 14;

/// Options of a group; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowLatencyOptions {
    /// Experts E over all ranks.
    pub num_experts: usize,
    /// Most tokens M of a rank in a call.
    pub max_tokens: usize,
    /// Most bytes of a row, with its scales.
    pub max_row_bytes: usize,
    /// A rank that is later than this in a call is skipped then and from then on, and reported. `None`: it is waited
    /// for about 100 s, and then the GPU traps. `NCCL_EP_TIMEOUT_MS` goes before this.
    pub timeout: Option<Duration>,
    /// SMs that its kernels take at most, one for every 14 experts or more; 0: all.
    pub max_sms: usize,
}

/// Groups that the warps of a block are divided into, for so many experts on so many SMs.
fn warp_groups(experts: usize, sms: usize) -> usize {
    experts.div_ceil(sms.max(1)).max(1)
}

impl LowLatencyOptions {
    /// SMs of `sms` that its kernels take.
    pub(in crate::nccl_ep) fn taken(&self, sms: usize) -> usize {
        if self.max_sms == 0 { sms } else { self.max_sms }
    }

    /// Checks options for which the library would end the process, or which it would find wrong too late.
    pub(in crate::nccl_ep) fn check(&self, ranks: usize, sms: usize) -> NcclEpResult<()> {
        let argument = |name, expected: String, found: usize| {
            Err(NcclEpError::Argument { call: CALL, name, expected, found: found.to_string() })
        };
        for (name, value) in [("num_experts", self.num_experts), ("max_row_bytes", self.max_row_bytes)] {
            if value == 0 {
                return argument(name, "at least 1".to_string(), 0);
            }
        }
        check_experts(self.num_experts, ranks)?;
        if !(1..=MOST_TOKENS).contains(&self.max_tokens) {
            return argument("max_tokens", format!("1..={MOST_TOKENS}"), self.max_tokens);
        }
        if !self.max_row_bytes.is_multiple_of(16) {
            return Err(NcclEpError::RowBytes { what: "max_row_bytes", bytes: self.max_row_bytes });
        }
        check_sms(CALL, self.max_sms, sms)?;
        let sms = self.taken(sms);
        match warp_groups(self.num_experts, sms) {
            1..=MOST_GROUPS => Ok(()),
            _ => {
                let most = MOST_GROUPS * sms;
                argument("num_experts", format!("at most {most} on {sms} SMs"), self.num_experts)
            }
        }
    }

    /// The rules for choices of a token: each has a warp, and one more directs them.
    pub(in crate::nccl_ep) fn check_top_k(&self, top_k: usize, sms: usize) -> NcclEpResult<()> {
        let groups = warp_groups(self.num_experts, self.taken(sms));
        let most = (groups * (WARPS / groups) - 1).min(MOST_CHOICES).min(self.num_experts);
        match (1..=most).contains(&top_k) {
            true => Ok(()),
            false => {
                let (expected, found) = (format!("1..={most}"), top_k.to_string());
                Err(NcclEpError::Argument { call: "LowLatencyHandle::new", name: "top_k", expected, found })
            }
        }
    }

    /// The rules for a row of so many bytes and its scales on their way out: opaque rows travel as 16-bit numbers, or
    /// with scales in words of 16 bytes; every lane of a warp has a word.
    pub(in crate::nccl_ep) fn check_sent(&self, (dtype, row): (DType, usize), scale: usize) -> NcclEpResult<()> {
        let lanes = WARPS * 16;
        match scale {
            0 if !row.is_multiple_of(lanes) => {
                let size = if dtype == DType::U8 { 1 } else { dtype.size() };
                return Err(NcclEpError::LowLatencyWidth {
                    lanes: lanes / size,
                    dtype: dtype.to_string(),
                    width: row / size,
                });
            }
            0 => {}
            _ if row.is_multiple_of(16) && scale.is_multiple_of(16) => {}
            _ => return Err(NcclEpError::RowBytes { what: "a row or its scales", bytes: row + scale }),
        }
        let most = self.max_row_bytes;
        match (1..=most).contains(&(row + scale)) && row > 0 {
            true => Ok(()),
            false => {
                let expected = format!("1..={most} bytes (the group's max_row_bytes)");
                let found = (row + scale).to_string();
                Err(NcclEpError::Argument { call: "dispatch", name: "row", expected, found })
            }
        }
    }

    /// The rules for a row of numbers that are added: whole steps of a warp, whole words of what travels beside it, and
    /// room on chip.
    pub(in crate::nccl_ep) fn check_added(&self, dtype: DType, width: usize, sms: usize) -> NcclEpResult<()> {
        if width == 0 || !width.is_multiple_of(ADDED) {
            return Err(NcclEpError::LowLatencyWidth { lanes: ADDED, dtype: dtype.to_string(), width });
        }
        let groups = warp_groups(self.num_experts, self.taken(sms));
        let fits =
            (2..=WARPS / groups).any(|warps| on_chip(width, dtype.size(), groups * warps).is_some_and(|n| n <= SHARED));
        match fits {
            true => Ok(()),
            false => Err(NcclEpError::SharedMemory { stages: STAGES, bytes: width * dtype.size(), limit: SHARED }),
        }
    }
}

/// Numbers that sums go by: two words of 16 bytes a lane, of 16-bit numbers, and 4 bytes for every 128 numbers, in
/// words of 16.
const ADDED: usize = 512;
/// Rows that a sum keeps on chip.
const STAGES: usize = 3;

/// Shared memory of the combine kernel with so many warps, as its headers count it; `None`: too few warps for a row.
fn on_chip(width: usize, element: usize, warps: usize) -> Option<usize> {
    let lanes = WARPS * 16 / element;
    let unrolls = if width.is_multiple_of(4 * lanes) { 4 } else { 2 };
    let padded = width.next_multiple_of(lanes * unrolls);
    let decode = padded / (2 * lanes);
    let groups = (warps / (decode + 1)).min(if element == 2 { 2 } else { 1 });
    let meta = width / 128 * 4;
    let send = warps * (STAGES * (WARPS * 16 * unrolls + 16) + meta);
    let receive = groups * (STAGES * (32 + width * element) + width * element + 3 * STAGES * meta);
    (groups > 0).then_some(send.max(receive))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMS: usize = 132;

    fn good() -> LowLatencyOptions {
        LowLatencyOptions { num_experts: 256, max_tokens: 128, max_row_bytes: 14_336, timeout: None, max_sms: 0 }
    }

    #[test]
    fn each_rule_has_its_own_error() {
        let check = |options: LowLatencyOptions| options.check(2, SMS);
        assert_eq!(check(good()), Ok(()));
        assert_eq!(good().check(1, SMS), Err(NcclEpError::Ranks { found: 1 }));
        assert_eq!(good().check(3, SMS), Err(NcclEpError::Experts { experts: 256, ranks: 3 }));
        let named = |options: LowLatencyOptions| match check(options) {
            Err(NcclEpError::Argument { name, .. }) => name,
            other => panic!("{options:?}: {other:?}"),
        };
        assert_eq!(named(LowLatencyOptions { max_tokens: 0, ..good() }), "max_tokens");
        assert_eq!(named(LowLatencyOptions { max_tokens: 8193, ..good() }), "max_tokens");
        assert_eq!(named(LowLatencyOptions { num_experts: 0, ..good() }), "num_experts");
        // 14 groups of warps in 132 blocks.
        assert_eq!(check(LowLatencyOptions { num_experts: 1848, ..good() }), Ok(()));
        assert_eq!(named(LowLatencyOptions { num_experts: 1850, ..good() }), "num_experts");
        // With fewer SMs fewer experts.
        let few = |max_sms| LowLatencyOptions { max_sms, num_experts: 256, ..good() };
        assert_eq!(check(few(19)), Ok(()));
        assert_eq!(named(few(18)), "num_experts");
        assert_eq!([check(few(SMS)).is_ok(), check(few(SMS + 1)).is_ok()], [true, false]);
        assert_eq!(named(few(SMS + 1)), "max_sms");
        let bytes = NcclEpError::RowBytes { what: "max_row_bytes", bytes: 24 };
        assert_eq!(check(LowLatencyOptions { max_row_bytes: 24, ..good() }), Err(bytes));
    }

    #[test]
    fn choices_have_a_warp_each_and_one_is_left() {
        let most = |experts: usize| {
            let options = LowLatencyOptions { num_experts: experts, ..good() };
            (1..=64).filter(|k| options.check_top_k(*k, SMS).is_ok()).count()
        };
        assert_eq!(most(8), 8);
        assert_eq!(most(64), 31);
        assert_eq!(most(256), 31);
        // 7 groups of 4 warps.
        assert_eq!(most(7 * 132), 27);
        let few = LowLatencyOptions { max_sms: 37, ..good() };
        assert!(few.check_top_k(27, SMS).is_ok() && few.check_top_k(28, SMS).is_err());
    }

    #[test]
    fn rows_are_whole_words_of_a_warp_and_fit_the_chip() {
        let added = |dtype, width| good().check_added(dtype, width, SMS);
        assert_eq!(added(DType::BF16, 7168), Ok(()));
        assert_eq!(added(DType::F32, 512), Ok(()));
        let dtype = DType::BF16.to_string();
        assert_eq!(added(DType::BF16, 256), Err(NcclEpError::LowLatencyWidth { lanes: 512, dtype, width: 256 }));
        assert!(matches!(added(DType::F32, 16_384), Err(NcclEpError::SharedMemory { .. })));
        let sent = |dtype, row, scale| good().check_sent((dtype, row), scale);
        assert_eq!(sent(DType::BF16, 512, 0), Ok(()));
        assert!(matches!(sent(DType::BF16, 256, 0), Err(NcclEpError::LowLatencyWidth { lanes: 256, width: 128, .. })));
        assert!(matches!(sent(DType::U8, 256, 0), Err(NcclEpError::LowLatencyWidth { lanes: 512, width: 256, .. })));
        assert_eq!(sent(DType::U8, 256, 32), Ok(()));
        assert!(matches!(sent(DType::U8, 256, 8), Err(NcclEpError::RowBytes { bytes: 264, .. })));
        assert!(matches!(sent(DType::BF16, 14_848, 0), Err(NcclEpError::Argument { name: "row", .. })));
    }
}
