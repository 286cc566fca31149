//! Numbers by which dispatchers are timed and compared. None of them changes what a dispatcher computes.

/// Steps before the first that counts: libraries compile kernels in the first, plan on the host in it, and make their
/// buffers when they first know the size of a row, which is in the second at the latest.
pub(super) const WARM_UP: usize = 3;

/// Samples of a candidate, an odd number, of which a rank takes the median: a few may be disturbed.
pub(super) const SAMPLES: usize = 9;

/// Steps of a sample, between two points where the device is idle. A layer's step is followed by other work, so that the
/// host's calls of one step are hidden behind the step before; of a sample only those of the first are not.
pub(super) const STEPS: usize = 4;

/// Hundredths of the quickest candidate's time that one may take longer: the first such in the table is taken.
/// Candidates closer than this are not told apart, so that repeated runs agree; what that costs stays below the 3 % by
/// which `Auto` may be slower than the best choice. Weighed, not measured.
pub(super) const MARGIN: u64 = 2;
