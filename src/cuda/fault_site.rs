//! Where a kernel has met a segment or a map that does not fit: its call, the operand, and the rank and layer, in the bits
//! below what the fault is of (`raise_at` in `kernels/common/common.cuh`).

use super::params;

/// Calls by the number that kernels know them by, and the names of their operands' maps: of the first, of the second, of
/// the output.
const CALLS: [(&str, [&str; 3]); 1 << params::SITE_CALL_BITS] = [
    ("prepare", ["row_map", "weight_map", "return_map"]),
    ("up", ["rows.map", "weight.map", "out.map"]),
    ("down", ["rows.map", "weight.map", "out.map"]),
    ("down_bwd", ["grad.map", "weight.map", "d_pre.map"]),
    ("up_dgrad", ["d_pre.map", "input_weight.rows.map", "out.map"]),
    ("wgrad", ["left.map", "right.map", "out.map"]),
    ("gather_rows", ["map", "map", "map"]),
    ("reduce_rows", ["map", "map", "map"]),
];
/// Bits of a site below the call's number.
const CALL_AT: u32 = params::ORIGIN_BITS + params::SITE_OPERAND_BITS;

/// The number of a call whose operand is behind a map, for the rank and layer of this number.
pub(super) fn site(call: &str, origin: i64, operand: params::Operand) -> i64 {
    // What is not listed follows no map of its own: kernels check the plans that it made.
    let number = CALLS.iter().position(|(name, _)| *name == call).unwrap_or(0);
    (number as i64) << CALL_AT | operand << params::ORIGIN_BITS | origin
}

/// A fault's detail taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FaultSite {
    pub(super) call: &'static str,
    /// Name of the operand's map.
    pub(super) map: &'static str,
    /// Number of the rank and layer.
    pub(super) origin: u64,
    /// Number of the segment, or of the map's entry.
    pub(super) entry: u64,
}

impl FaultSite {
    pub(super) fn of(detail: u64) -> Self {
        let bits = |from: u32, count: u32| detail >> from & ((1 << count) - 1);
        let (call, maps) = CALLS[bits(CALL_AT, params::SITE_CALL_BITS) as usize];
        let operand = bits(params::ORIGIN_BITS, params::SITE_OPERAND_BITS) as usize;
        Self {
            call,
            map: maps.get(operand).copied().unwrap_or("map"),
            origin: bits(0, params::ORIGIN_BITS),
            entry: detail >> params::SITE_BITS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_come_apart() {
        let most = (1 << params::ORIGIN_BITS) - 1;
        for (call, maps) in CALLS {
            for (operand, map) in (0..).zip(maps) {
                for (entry, origin) in [(0, 0), (7, 5), (u64::from(u32::MAX), most)] {
                    let detail = entry << params::SITE_BITS | site(call, origin as i64, operand) as u64;
                    assert!(detail < 1 << params::FAULT_DETAIL_BITS);
                    assert_eq!(FaultSite::of(detail), FaultSite { call, map, origin, entry });
                }
            }
        }
        assert_eq!(params::SITE_BITS, CALL_AT + params::SITE_CALL_BITS);
    }
}
