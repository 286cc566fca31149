//! The pieces of `docs/nccl-ep.md`.

use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::ep::{DispatchShape, Group, GroupConfig};
use moebius::{DType, MoeConfig};

use super::Result;

fn quickest(layer: MoeConfig, device: Cpu, comm: Box<dyn Communicator<Cpu>>) -> Result<()> {
    let mut config = GroupConfig::of(&layer, 8192);
    config.measure = Some(DispatchShape::of(&layer, 8192, DType::BF16));  // forward and backward, an eager capacity
    let group = Group::new(device, comm, config)?;
    let kind = group.dispatcher_kind();  // store `kind.name()`; `name.parse()` reads it
    Ok(())
}
