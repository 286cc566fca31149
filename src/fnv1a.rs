//! The hash of names and descriptions, which is the same in every build.

/// FNV-1a, of 64 bits.
pub(crate) fn fnv1a(of: impl AsRef<[u8]>) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    of.as_ref().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(
            [fnv1a(""), fnv1a("a"), fnv1a("foobar")],
            [0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c, 0x8594_4171_f739_67e8]
        );
    }
}
