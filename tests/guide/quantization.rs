//! The pieces of `docs/quantization.md`.

fn nvfp4(device: candle_core::Device, x: candle_core::Tensor) -> super::Result<()> {
    use candle_core::{Device, Module, Tensor};
    use moebius::candle::{DeviceGroup, ExpertParallelMoE, LoadAs, Parameters};
    use moebius::checkpoint::Checkpoint;
    use moebius::config::Payload;
    use moebius::layer::Layer;

    Checkpoint::open("Qwen3-30B-A3B")?.save_nvfp4("Qwen3-30B-A3B-NVFP4")?;  // once: routed experts in NVFP4
    let checkpoint = Checkpoint::open("Qwen3-30B-A3B-NVFP4")?;
    let group = DeviceGroup::single(&checkpoint.block_config(0)?, &device)?;
    let load = LoadAs::new(Parameters::Frozen).quantized();                 // routed experts stay in NVFP4
    let moe = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, load)?;
    let config = moe.layer().config().clone().with_payload(Payload::Nvfp4); // tokens travel in NVFP4
    let moe = moe.with_layer(Layer::new(config, 0)?);                       // the same parameters, layer 0
    let y = moe.forward(&x)?;
    Ok(())
}
