//! Memory of gathered weights and gradients, and its way between the streams that work on it.

pub(in crate::etp) mod cache;
pub(in crate::etp) mod stream_pair;
