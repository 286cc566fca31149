//! Numbers that were measured or weighed, and that nothing else determines: how much the adapters do at a time. None
//! changes what is computed.

/// Bytes of sums that one collective takes, unless told otherwise: far more than a collective's latency costs, and
/// little beside a model.
pub const BUCKET_BYTES: usize = 64 << 20;

/// Variables of an optimizer that are viewed at once: as many as one launch of the GPU's takes (`ADAMW_JOBS` of
/// `kernels/common/params.h`), and few enough for a thread's stack.
#[cfg(feature = "candle")]
pub(crate) const VARIABLES_AT_ONCE: usize = 48;
