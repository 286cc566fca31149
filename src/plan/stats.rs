//! Counts of one prepare.

/// Counts of one prepare, as this rank sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Padded rows per local expert after dropping; a multiple of the alignment but where a static capacity that is
    /// none cuts a segment.
    pub padded_counts: Vec<usize>,
    /// Padded rows that this rank would receive with nothing dropped for capacity.
    pub needed_rows: usize,
    /// Tokens that chose each expert, over all ranks, before dropping for capacity.
    pub expert_load: Vec<usize>,
    /// Choices of this rank's tokens that were dropped by a capacity.
    pub dropped: usize,
}

impl Stats {
    /// End of the last segment: rows from here on hold nothing.
    pub fn segment_end(&self) -> usize {
        self.padded_counts.iter().sum()
    }
}
