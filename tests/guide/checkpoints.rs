//! The pieces of `docs/checkpoints.md`.

use candle_core::{Device, Module, Tensor};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, Parameters};
use moebius::checkpoint::{Checkpoint, SaveOptions};
use moebius::ep::{EpGroup, Group, GroupConfig};

use super::Result;

fn one_rank(device: Device, x: Tensor) -> Result<()> {
    let checkpoint = Checkpoint::open("Qwen3-30B-A3B")?;                              // once, for all layers
    let group = DeviceGroup::single(&checkpoint.block_config(0)?, &device)?;
    let moe = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, Parameters::Trainable)?;
    let y = moe.detached().forward(&x)?;                                              // keeps nothing for a backward
    let block = moe.to_block()?;
    checkpoint.save("out", &[block.params.at_layer(0)])?;
    Ok(())
}

#[cfg(feature = "nccl")]
fn ranks(on: (Device, moebius::cuda::Cuda), comm: moebius::nccl::NcclComm, checkpoint: Checkpoint, x: Tensor) -> Result<()> {
    let (device, cuda) = on; // …
    let config = GroupConfig::of(&checkpoint.block_config(0)?, 4096);       // at most 4096 tokens a rank and call
    let group = EpGroup::new(Group::new(cuda, Box::new(comm), config)?);    // see "Several GPUs"
    let on_device = DeviceGroup::new(group.clone(), &device)?;
    let moe = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &on_device, Parameters::Trainable)?;
    let y = moe.detached().forward(&x)?;                                    // on every rank
    let block = moe.to_block()?;                                            // this rank's experts
    checkpoint.save_over_ranks("out", &[block.params.at_layer(0)], &mut group.lock(), SaveOptions::default())?;
    Ok(())
}
