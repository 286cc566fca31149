//! State that a chain keeps: shards and their sources, buffers, states, counts.

pub(in crate::etp) mod buffer_cache;
pub(in crate::etp) mod collective_state;
pub(in crate::etp) mod report;
pub(in crate::etp) mod shards;
pub(in crate::etp) mod source;
