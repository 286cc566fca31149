//! Shards that are sent in a quantized form.

pub(in crate::etp) mod amaxes;
pub(in crate::etp) mod shards;
