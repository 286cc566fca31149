//! The pieces of `docs/etp.md`.

use std::sync::Arc;

use candle_core::{Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder};
use moebius::MoeConfig;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, GradientReducer, MainGradients, ReduceComms};
use moebius::candle::{GradientType, finish_sharded};
use moebius::comm::{Communicator, Solo};
use moebius::cpu::Cpu;
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase};

use super::Result;

struct Parts<'a> {
    config: MoeConfig,
    group: DeviceGroup,
    chain: Arc<Chain<Cpu>>,
    vb: VarBuilder<'a>,
    params: ParamsAdamW,
    x: Tensor,
    model: fn(&Tensor) -> Result<Tensor>,
    others: Vec<Var>,
    ep_ranks: Box<dyn Communicator<Cpu>>,
    same_experts: Box<dyn Communicator<Cpu>>,
    same_shards: Option<&'a mut dyn Communicator<Cpu>>,
}

fn cpu_chain() -> Result<Arc<Chain<Cpu>>> {
    let (gather, reduce) = (Solo::new(Cpu::new()), Solo::new(Cpu::new())); // one rank on the CPU
    let comms = Comms::<Cpu> { gather: Box::new(gather), reduce: Box::new(reduce) };
    let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
    Ok(chain)
}

fn step(parts: Parts<'_>) -> Result<()> {
    let Parts { config, group, chain, vb, params, x, model, others, ep_ranks, same_experts, same_shards } = parts;
    let cpu = Cpu::new();
    let moe = ExpertParallelMoE::sharded(config, &group, &chain, Payload::Plain, vb)?;
    let mut adam = AdamW::new([moe.vars(), others.clone()].concat(), params)?;
    let comms = ReduceComms { group: ep_ranks, replicas: Some(same_experts) };
    let reducer = GradientReducer::new(&cpu, comms)?.with_layer(&moe).with_vars(&others);
    let mut gradients = MainGradients::new();
    chain.begin(Phase::Forward)?;   let loss = model(&x)?;          chain.end()?;
    chain.begin(Phase::Backward)?;  gradients.backward(&loss)?;     chain.end()?;
    gradients.reduce(&reducer)?;
    let sums = gradients.store_mut();
    finish_sharded(&chain, same_shards, &moe.shards(), sums, GradientType::InVariableType)?;
    adam.step(gradients.store())?;
    gradients.reset();
    Ok(())
}

struct BesideBackward<'a> {
    comms: Comms<Cpu>,
    options: EtpOptions,
    same_shards: Box<dyn Communicator<Cpu>>,
    config: MoeConfig,
    group: DeviceGroup,
    vb: VarBuilder<'a>,
    microbatches: Vec<Tensor>,
    model: fn(&Tensor) -> Result<Tensor>,
}

fn beside_backward(parts: BesideBackward<'_>) -> Result<()> {
    let BesideBackward { comms, options, same_shards, config, group, vb, microbatches, model } = parts;
    let (cpu, mut gradients) = (Cpu::new(), MainGradients::new());
    let chain = Arc::new(Chain::new(cpu, comms, options)?.with_replicas(same_shards)?); // of options.replicas ranks
    let moe = ExpertParallelMoE::sharded(config, &group, &chain, Payload::Plain, vb)?; // …
    for (number, x) in microbatches.iter().enumerate() {
        if number + 1 == microbatches.len() {
            chain.last_backward()?; // the next backward pass is the step's last
        }
        chain.begin(Phase::Forward)?;   let loss = model(x)?;           chain.end()?;
        chain.begin(Phase::Backward)?;  gradients.backward(&loss)?;     chain.end()?;
    }
    finish_sharded(&chain, None, &moe.shards(), gradients.store_mut(), GradientType::AsSummed)?;
    Ok(())
}

#[cfg(feature = "burn")]
mod from_burn {
    use burn::backend::{Autodiff, Flex};
    use burn::optim::adaptor::OptimizerAdaptor;
    use burn::optim::{AdamW, GradientsParams, Optimizer};
    use burn::tensor::Tensor;
    use moebius::Result;
    use moebius::burn::{ExpertParallelMoE, ReduceOptions, ShardedParams, reduce_gradients_over};
    use moebius::comm::Communicator;
    use moebius::cpu::Cpu;
    use moebius::etp::{Payload, Phase};

    type Moe = ExpertParallelMoE<Autodiff<Flex>>;

    struct Parts<'a> {
        moe: Moe,
        shards: ShardedParams<Flex>,
        adam: OptimizerAdaptor<AdamW, Moe, Autodiff<Flex>>,
        device: Cpu,
        model: fn(&Moe) -> Result<Tensor<Autodiff<Flex>, 1>>,
        world: &'a mut dyn Communicator<Cpu>,
        same_experts: &'a mut dyn Communicator<Cpu>,
        same_shards: Option<&'a mut dyn Communicator<Cpu>>,
    }

    fn step(Parts { moe, shards, mut adam, device, model, world, same_experts, same_shards }: Parts<'_>) -> Result<()> {
        let mut moe = moe.into_sharded(&shards, Payload::Plain)?;
        shards.begin(Phase::Forward, [&moe])?;   let loss = model(&moe)?;      shards.end()?;
        shards.begin(Phase::Backward, [&moe])?;  let all = loss.backward();    shards.end()?;
        let mut gradients = GradientsParams::from_grads(all, &moe);
        let (experts, biases) = (moe.expert_ids(), moe.expert_bias_ids());
        reduce_gradients_over(world, &device, &moe, ReduceOptions::except(&experts), &mut gradients)?;
        reduce_gradients_over(same_experts, &device, &moe, ReduceOptions::only(&biases), &mut gradients)?;
        shards.finish(same_shards, [&moe], &mut gradients)?;
        moe = adam.step(1e-3, moe, gradients);
        Ok(())
    }
}

#[cfg(feature = "burn")]
mod dense_from_burn {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{EmbeddingConfig, LinearConfig};
    use burn::tensor::{Int, Tensor};
    use moebius::Result;
    use moebius::burn::{ExpertParallelMoE, ShardHolder, ShardedParams};
    use moebius::etp::{Payload, Phase};

    type B = Autodiff<Flex>;

    struct Parts {
        experts: ShardedParams<Flex>,
        dense: ShardedParams<Flex>,
        moe: ExpertParallelMoE<B>,
        sizes: [usize; 2],
        ids: Tensor<B, 2, Int>,
        loss: fn(Tensor<B, 3>) -> Tensor<B, 1>,
    }

    fn step(parts: Parts) -> Result<Tensor<B, 1>> {
        let Parts { experts, dense, moe, sizes: [vocabulary, hidden], ids, loss } = parts;
        let device = Default::default();
        let embed = dense.embedding("embed", EmbeddingConfig::new(vocabulary, hidden).init(&device))?;
        let moe = moe.into_all_sharded(&experts, Payload::Plain, &dense)?;
        let head = dense.linear("head", LinearConfig::new(hidden, vocabulary).init(&device))?;
        let all: [&dyn ShardHolder<Backend = B>; 3] = [&embed, &moe, &head];
        experts.begin(Phase::Forward, [&moe])?;
        dense.begin(Phase::Forward, all)?;
        let loss = loss(head.forward(moe.forward(embed.embed(ids)?)?)?);
        experts.end()?;
        dense.end()?;
        Ok(loss)
    }
}

mod dense {
    use std::sync::Arc;

    use candle_core::backprop::GradStore;
    use candle_core::{Device, Tensor};
    use candle_nn::{Init, Optimizer, VarBuilder};
    use moebius::MoeConfig;
    use moebius::candle::{AdamW, DeviceGroup, ExpertParallelMoE, GradientType, NewWeight, Parameters};
    use moebius::candle::{ShardedIn, ShardedWeights, finish_sharded};
    use moebius::checkpoint::{Checkpoint, RankModel, SaveOptions};
    use moebius::comm::Communicator;
    use moebius::cpu::Cpu;
    use moebius::etp::{Chain, Payload};
    use moebius::optim::AdamWOptions;

    use super::super::Result;

    struct Parts<'a> {
        config: MoeConfig,
        group: DeviceGroup,
        chain: Arc<Chain<Cpu>>,
        experts: Arc<Chain<Cpu>>,
        vb: VarBuilder<'a>,
        comm: Box<dyn Communicator<Cpu>>,
        world: Box<dyn Communicator<Cpu>>,
        replicas: Option<&'a mut dyn Communicator<Cpu>>,
        gradients: GradStore,
        checkpoint: Checkpoint,
        sizes: [usize; 2],
    }

    fn rms_norm(x: &Tensor, weights: &[Tensor]) -> candle_core::Result<Tensor> {
        candle_nn::ops::rms_norm_slow(x, &weights[0], 1e-6)
    }

    fn train(Parts { config, group, chain, experts, vb, comm, replicas, mut gradients, sizes: [vocabulary, hidden], .. }: Parts<'_>) -> Result<()> {
        let (cpu, options) = (Cpu::new(), AdamWOptions::default());
        let weights = ShardedWeights::new(&chain, vb);                      // a chain of all ranks
        let embed = weights.pp("embed").embedding(vocabulary, hidden)?;
        let norm = weights.pp("norm").function(&[NewWeight::new("weight", &[hidden], Init::Const(1.0))], rms_norm)?;
        let moe = ExpertParallelMoE::all_sharded(config, &group, &experts, Payload::Plain, &weights.pp("moe"))?;
        let output = embed.tied_output(); // …
        let params = [weights.optimizer_params(), moe.optimizer_params("moe")?].concat();
        let mut adam = AdamW::over_ranks(&cpu, comm, params, options, &[options.group])?;
        // passes of both chains around forward and backward, then
        finish_sharded(&chain, None, &weights.shards(), &mut gradients, GradientType::AsSummed)?;
        finish_sharded(&experts, replicas, &moe.shards(), &mut gradients, GradientType::AsSummed)?;
        adam.step(&gradients)?;
        Ok(())
    }

    fn stored(Parts { group, chain, experts, checkpoint, mut world, sizes: [vocabulary, hidden], .. }: Parts<'_>) -> Result<()> {
        let (cpu, device) = (Cpu::new(), Device::Cpu);
        let weights = ShardedWeights::from_checkpoint(&chain, &checkpoint, &device, Parameters::Trainable, None)?;
        let embed = weights.pp("model.embed_tokens").embedding(vocabulary, hidden)?;
        let layer = weights.pp("model.layers.0.mlp");                      // names for the optimizer
        let shards = ShardedIn { chain: &experts, payload: Payload::Plain, weights: Some(&layer) };
        let moe = ExpertParallelMoE::from_checkpoint_sharded(&checkpoint, 0, &group, shards, Parameters::Trainable)?;
        // … train …
        let (blocks, tensors) = ([moe.to_parts()?], weights.to_parts()?);
        let model = RankModel { blocks: &blocks, tensors: &tensors };
        checkpoint.save_parts("out", model, &cpu, &mut *world, SaveOptions::default())?;
        Ok(())
    }
}

#[cfg(feature = "nccl")]
fn on_gpus(gpus: Vec<moebius::cuda::Cuda>, library: moebius::nccl::NcclLibrary, timeout: std::time::Duration) -> moebius::Result<()> {
    use moebius::cuda::Cuda;
    use moebius::nccl::NcclComm;
    use moebius::Result;

    let streams = || gpus.iter().map(Cuda::with_new_stream).collect::<Result<Vec<_>>>();
    let gathers = NcclComm::threads(&library, &streams()?, timeout)?;     // processes: NcclComm::split_on, one a rank
    let reductions = NcclComm::threads(&library, &streams()?, timeout)?;
    let cuda = &gpus[0]; for (gather, reduce) in gathers.into_iter().zip(reductions) { // …
    // on each rank's thread
    let comms = Comms { gather: Box::new(gather), reduce: Box::new(reduce) };
    let chain = Chain::new(cuda.clone(), comms, EtpOptions::default())?;
    } // …
    Ok(())
}
