//! Where a kernel has met a segment or a map that does not fit: its call, the operand, and the rank and layer, in the bits
//! below what the fault is of (`raise_map` and `raise_segment` in `kernels/common/common.cuh`).

use super::params;

/// A call whose kernels follow segments and maps, by the number that kernels know it by. 0 is no call: kernels that were
/// given no site raise nothing that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MappedCall {
    Up = 1,
    Down,
    DownBwd,
    UpDgrad,
    Wgrad,
    GatherRows,
    ReduceRows,
}

impl MappedCall {
    const ALL: [Self; 7] =
        [Self::Up, Self::Down, Self::DownBwd, Self::UpDgrad, Self::Wgrad, Self::GatherRows, Self::ReduceRows];

    /// Its name in errors.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::DownBwd => "down_bwd",
            Self::UpDgrad => "up_dgrad",
            Self::Wgrad => "wgrad",
            Self::GatherRows => "gather_rows",
            Self::ReduceRows => "reduce_rows",
        }
    }

    /// Names of its operands' maps: of the first, of the second.
    const fn maps(self) -> [&'static str; 2] {
        match self {
            Self::Up | Self::Down => ["rows.map", "weight.map"],
            Self::DownBwd => ["grad.map", "weight.map"],
            Self::UpDgrad => ["d_pre.map", "input_weight.rows.map"],
            Self::Wgrad => ["left.map", "right.map"],
            Self::GatherRows | Self::ReduceRows => ["map", "map"],
        }
    }
}

// Every call has a number that the bits of a site hold.
const _: () = assert!(MappedCall::ALL.len() < 1 << params::SITE_CALL_BITS);
/// Bits of a site below the call's number.
const CALL_AT: u32 = params::ORIGIN_BITS + params::SITE_OPERAND_BITS;

/// A call and the operand that it is behind, as a fault's detail has them, for the rank and layer of this number.
pub(super) fn site(call: MappedCall, origin: i64, operand: params::Operand) -> i64 {
    (call as i64) << CALL_AT | operand << params::ORIGIN_BITS | origin
}

/// A fault's detail taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FaultSite {
    pub(super) call: MappedCall,
    /// Name of the operand's map.
    pub(super) map: &'static str,
    /// Number of the rank and layer.
    pub(super) origin: u64,
    /// Number of the segment, or of the map's entry.
    pub(super) entry: u64,
}

impl FaultSite {
    /// `None` of a detail that no call's site is in.
    pub(super) fn of(detail: u64) -> Option<Self> {
        let bits = |from: u32, count: u32| detail >> from & ((1 << count) - 1);
        let call = bits(CALL_AT, params::SITE_CALL_BITS);
        let call = MappedCall::ALL.into_iter().find(|known| *known as u64 == call)?;
        let map = *call.maps().get(bits(params::ORIGIN_BITS, params::SITE_OPERAND_BITS) as usize)?;
        Some(Self { call, map, origin: bits(0, params::ORIGIN_BITS), entry: detail >> params::SITE_BITS })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_come_apart() {
        let most = (1 << params::ORIGIN_BITS) - 1;
        for call in MappedCall::ALL {
            for (operand, map) in (0..).zip(call.maps()) {
                for (entry, origin) in [(0, 0), (7, 5), (u64::from(u32::MAX), most)] {
                    let detail = entry << params::SITE_BITS | site(call, origin as i64, operand) as u64;
                    assert!(detail < 1 << params::FAULT_DETAIL_BITS);
                    assert_eq!(FaultSite::of(detail), Some(FaultSite { call, map, origin, entry }));
                }
            }
        }
        assert_eq!(params::SITE_BITS, CALL_AT + params::SITE_CALL_BITS);
    }

    /// No call is told in place of another: neither of a site that nobody gave, nor of an operand that there is not.
    #[test]
    fn what_names_no_call_has_no_site() {
        assert_eq!(FaultSite::of(5 << params::SITE_BITS), None);
        let operand = MappedCall::Up.maps().len() as i64;
        assert_eq!(FaultSite::of(site(MappedCall::Up, 1, operand) as u64), None);
    }
}
