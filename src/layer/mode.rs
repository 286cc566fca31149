//! Purpose of a call.

/// Purpose of a call of forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mode {
    /// Backward will follow: keep a context.
    pub backward: bool,
    /// The layer trains: apply the router's jitter with this seed and step.
    pub noise: Option<Noise>,
}

/// Seed and step of a router's jitter; the same on all ranks, which a forward with jitter compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// The run's seed.
    pub seed: u64,
    /// Training step.
    pub step: u64,
}
