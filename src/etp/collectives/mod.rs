//! Collectives beside the computation, on a thread and a stream of their own.

pub(in crate::etp) mod collective_thread;
pub(in crate::etp) mod in_place;
pub(in crate::etp) mod stream_pair;
