//! Numbers that were measured or weighed, and that nothing else determines: how sums over ranks are made. None changes
//! what is computed.

/// Longest row that a block of the kernel adds at a time, in elements.
pub(super) const ROW_ELEMENTS: usize = 2048;

/// Bytes of a buffer up to which every rank adds all of it: one exchange instead of two.
pub(super) const ONE_EXCHANGE_BYTES: usize = 1 << 16;

/// Sizes whose maps are kept.
pub(super) const MOST_MAPS: usize = 64;
