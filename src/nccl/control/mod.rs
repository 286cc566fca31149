//! Messages between ranks beside the collectives: what they call, what fails, and who has ended.

pub(in crate::nccl) mod call_count;
pub(in crate::nccl) mod call_descriptor;
pub(in crate::nccl) mod message;
pub(in crate::nccl) mod peer_events;
pub(in crate::nccl) mod plane;
pub(in crate::nccl) mod socket;
pub(in crate::nccl) mod watchdog;
