//! The guide's pieces of programs: each stands here too, so that it compiles as it is shown. Lines with an ellipsis are
//! the reader's to fill.
#![allow(
    dead_code,
    unused_variables,
    unused_mut,
    unused_imports,
    unused_assignments,
    clippy::redundant_closure,
    reason = "shown, not run"
)]

use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Pieces of a page of the guide that are no tests of their own, in order, each a list of lines.
fn pieces(page: &'static str) -> Vec<Vec<&'static str>> {
    let (mut all, mut piece): (Vec<Vec<&str>>, Option<Vec<&str>>) = (Vec::new(), None);
    for line in page.lines().map(str::trim) {
        match (&mut piece, line) {
            (None, "```rust,ignore") => piece = Some(Vec::new()),
            (Some(_), "```") => all.extend(piece.take()),
            (Some(lines), line) if !line.is_empty() && !line.contains('…') => lines.push(line),
            _ => {}
        }
    }
    all
}

#[test]
fn every_piece_of_the_guide_compiles() {
    let own: Vec<&str> = include_str!("guide.rs").lines().map(str::trim).collect();
    let pages = [
        ("checkpoints", include_str!("../docs/checkpoints.md")),
        ("etp", include_str!("../docs/etp.md")),
        ("invariance", include_str!("../docs/invariance.md")),
        ("nccl", include_str!("../docs/nccl.md")),
        ("nccl-ep", include_str!("../docs/nccl-ep.md")),
        ("one-gpu", include_str!("../docs/one-gpu.md")),
        ("quantization", include_str!("../docs/quantization.md")),
        ("training", include_str!("../docs/training.md")),
    ];
    let mut found = 0;
    for (name, page) in pages {
        for piece in pieces(page) {
            let begins = (0..own.len()).filter(|at| own[*at] == piece[0]);
            let whole = |at: usize| {
                let mut lines = own[at..].iter();
                piece.iter().all(|line| lines.find(|own| !own.is_empty() && !own.contains('…')) == Some(line))
            };
            assert!(begins.into_iter().any(whole), "{name}.md: not in tests/guide.rs:\n{}", piece.join("\n"));
            found += 1;
        }
    }
    assert!(found >= 16, "{found} pieces");
}

#[rustfmt::skip]
mod training {
    use std::path::Path;
    use std::time::Duration;

    use candle_core::{DType, Device, Module, Tensor};
    use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
    use moebius::MoeConfig;
    use moebius::candle::{self, AdamWParam, DispatchCombine, EpGroup, ExpertParallelMoE};
    use moebius::candle::{GradientReducer, MainGradients, ReduceComms};
    use moebius::config::AuxConfig;
    use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
    use moebius::ep::{Group, GroupConfig, Reporting};
    use moebius::layer::{DispatchOptions, Layer};
    use moebius::metrics::Load;
    use moebius::optim::{AdamWOptions, GroupOptions};

    use super::Result;

    fn steps(vb: VarBuilder<'_>, batches: Vec<Tensor>, loss: fn(&Tensor) -> Result<Tensor>) -> Result<()> {
        let config = MoeConfig::new(16, 32, 8, 2) // hidden, intermediate, experts, top-k
            .with_router(|router| router.with_selection_bias(true).with_jitter(0.01))
            .with_aux(AuxConfig::default().with_balance(0.01).with_z(0.001));
        let moe = candle::moe(config, vb)?;
        let mut adam = AdamW::new(moe.vars(), ParamsAdamW::default())?;
        for x in batches {
            let y = moe.forward_t(&x, true)?; // with jitter; backward through y adds the auxiliary losses' gradient
            let mut gradients = loss(&y)?.backward()?;
            moe.reduce_gradients(&mut gradients)?; // over the ranks; nothing to do for one
            adam.step(&gradients)?;
            moe.update_selection_bias(moe.last_load()?.get()?, 0.001)?;
        }
        Ok(())
    }

    type Loss = fn(&ExpertParallelMoE, Tensor) -> Result<Tensor>;

    fn main_gradients(moe: ExpertParallelMoE, mut adam: AdamW, loss: Tensor, of: (Loss, Vec<Vec<Tensor>>)) -> Result<()> {
        let gradients = moebius::candle::backward(&loss)?; // one backward, as loss.backward()
        adam.step(&gradients)?;

        let (loss, batches) = of; // …
        let mut gradients = MainGradients::new(); // kept over the steps, with its memory
        for step in batches {
            for microbatch in step {
                gradients.backward(&loss(&moe, microbatch)?)?; // written by the first, added to by the others
            }
            moe.reduce_gradients(gradients.store_mut())?;
            adam.step(gradients.store())?;
            gradients.reset();
        }
        Ok(())
    }

    fn loads(moe: ExpertParallelMoE, mut gradients: MainGradients, loss: Loss, microbatches: Vec<Tensor>) -> Result<()> {
        let mut loads = Vec::new();
        for microbatch in microbatches {
            gradients.backward(&loss(&moe, microbatch)?)?; // its forward is moe.forward_t
            loads.push(moe.last_load()?); // this microbatch's, read below: nothing waits here
        }
        // … gradients reduced, the optimizer's step
        let mut sum = Load::new(vec![0; moe.layer().config().router.num_experts], 0);
        for load in &loads {
            let counts = &load.get()?.tokens_per_expert;
            sum.tokens_per_expert.iter_mut().zip(counts).for_each(|(sum, tokens)| *sum += tokens);
        }
        moe.update_selection_bias(&sum, 0.001)?;
        Ok(())
    }

    struct Reduced {
        moe: ExpertParallelMoE,
        others: Vec<candle_core::Var>,
        device: Cpu,
        sums: ThreadComm,
        replicas: ThreadComm,
        microbatches: (Vec<Tensor>, Tensor),
    }

    fn reduced(reduced: Reduced, mut gradients: MainGradients, mut adam: AdamW, loss: Loss) -> Result<()> {
        let Reduced { moe, others, device, sums, replicas, microbatches: (first, last) } = reduced;
        let comms = ReduceComms { group: Box::new(sums), replicas: Some(Box::new(replicas)) };
        let reducer = GradientReducer::new(&device, comms)?.with_layer(&moe).with_vars(&others);
        for microbatch in first {
            gradients.backward(&loss(&moe, microbatch)?)?; // communicates no gradient
        }
        gradients.backward_reduced(&loss(&moe, last)?, &reducer)?; // or backward, and then gradients.reduce(&reducer)
        adam.step(gradients.store())?;
        gradients.reset();
        Ok(())
    }

    /// `dir` is there, the same for all ranks.
    fn save(vars: &VarMap, adam: &mut candle::AdamW, rank: usize, dir: &Path) -> candle_core::Result<()> {
        vars.save(dir.join(format!("{rank}.safetensors")))?; // what this rank holds
        adam.save(dir.join("optimizer")) // every rank calls it
    }

    /// `saved`: the number of ranks that saved; `steps`: those that the model has taken.
    fn load(vars: &VarMap, adam: &mut candle::AdamW, ranks: [usize; 3], dir: &Path, steps: u64) -> candle_core::Result<()> {
        let [saved, rank, ranks] = ranks;
        let files = (0..saved).map(|r| candle_core::safetensors::load(dir.join(format!("{r}.safetensors")), &Device::Cpu));
        let files = files.collect::<candle_core::Result<Vec<_>>>()?;
        for (name, var) in vars.data().lock().unwrap().iter() {
            let mut parts = files.iter().map(|file| file[name].clone());
            let value = if name.contains("experts.") {
                let all = Tensor::cat(&parts.collect::<Vec<_>>(), 0)?; // E experts, of which each rank has E/R
                let own = all.dim(0)? / ranks;
                all.narrow(0, rank * own, own)?
            } else {
                parts.next().expect("a rank")
            };
            var.set(&value.to_device(var.device())?)?;
        }
        adam.read_params()?;
        adam.load_at(dir.join("optimizer"), steps)?; // and moe.with_noise(Noise { seed, step: steps })
        Ok(())
    }

    struct Optimized {
        vars: candle_nn::VarMap,
        moe: ExpertParallelMoE,
        norm: candle_core::Var,
        device: Cpu,
        comm: Box<dyn moebius::comm::Communicator<Cpu>>,
        loss: Tensor,
        gradients: candle_core::backprop::GradStore,
    }

    fn optimizer(Optimized { vars, moe, norm, device, comm, loss, mut gradients }: Optimized) -> Result<()> {
        let group = GroupOptions { lr: 3e-4, weight_decay: 0.1, ..Default::default() };
        let options = AdamWOptions { group, max_norm: Some(1.0), ..Default::default() };
        let mut adam = candle::AdamW::of_var_map(&vars, options)?;    // one rank, one group; an Optimizer of candle-nn
        adam.backward_step(&loss)?;

        let mut params = moe.optimizer_params("layers.0.moe")?;       // several ranks: experts, shards, replicated parameters
        params.push(AdamWParam::new("norm.weight", &norm).in_group(1));    // group 1: without weight decay
        let groups = [group, GroupOptions { weight_decay: 0.0, ..group }];
        let mut adam = candle::AdamW::over_ranks(&device, comm, params, options, &groups)?;
        moe.reduce_gradients(&mut gradients)?;                        // where experts are shards: see there
        adam.step(&gradients)?;
        adam.save("run/optimizer")?;                                  // another run: adam.load("run/optimizer")?
        Ok(())
    }

    fn own_experts(group: candle::DeviceGroup, router: candle_nn::Linear, experts: Vec<candle_nn::Linear>, x: Tensor) -> Result<Tensor> {
        let moe = DispatchCombine::new(MoeConfig::new(64, 32, 8, 2), &group)?; // one rank or several
        let routed = moe.route(&router.forward(&x)?, None)?; // the router's formula over logits `[T, E]`, or your own ids and weights
        let received = moe.dispatch(&x, &routed.ids, &routed.weights)?;
        let outputs = received.map_experts(|e, rows, weights| { // this rank's experts, each with its rows
            experts[e].forward(rows)?.broadcast_mul(&weights.unsqueeze(1)?)
        })?;
        let y = received.combine(&outputs)?;
        Ok(y)
    }

    fn options(config: MoeConfig, group: candle::DeviceGroup, vb: VarBuilder<'_>) -> Result<()> {
        let options = DispatchOptions { reporting: Some(Reporting::Immediate), ..DispatchOptions::default() };
        let layer = Layer::new(config, 0)?.with_dispatch(options); // number 0, the same on all ranks
        let moe = ExpertParallelMoE::new(layer, &group, vb)?;

        let layer = moe.layer().clone().with_dispatch(options); // of a module that is there, from a checkpoint say
        let moe = moe.with_layer(layer);
        Ok(())
    }

    #[cfg(feature = "burn")]
    mod from_burn {
        use burn::backend::{Autodiff, Flex};
        use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
        use burn::tensor::Tensor;
        use moebius::MoeConfig;
        use moebius::burn::{ExpertParallelMoE, ExpertParallelMoEConfig};
        use moebius::config::AuxConfig;

        type B = Autodiff<Flex>;

        fn steps(device: burn::backend::flex::FlexDevice, batches: Vec<Tensor<B, 2>>, loss: fn(Tensor<B, 2>) -> Tensor<B, 1>) -> moebius::Result<()> { // …
            let config = MoeConfig::new(16, 32, 8, 2)
                .with_router(|router| router.with_selection_bias(true).with_jitter(0.01))
                .with_aux(AuxConfig::default().with_balance(0.01).with_z(0.001));
            let mut moe = ExpertParallelMoEConfig::new(config).init::<B>(&device)?;
            let mut adam = AdamWConfig::new().init::<B, ExpertParallelMoE<B>>();
            for x in batches {
                let y = moe.forward_t(x, true)?; // with jitter; backward through y adds the auxiliary losses' gradient
                let mut gradients = GradientsParams::from_grads(loss(y).backward(), &moe);
                moe.reduce_gradients(&mut gradients)?; // over the ranks; nothing to do for one
                moe = adam.step(1e-3, moe, gradients);
                moe.update_selection_bias(moe.last_load()?.get()?, 0.001)?;
            }
            Ok(())
        }

        #[derive(burn::module::Module, Debug)]
        struct Model<B: burn::tensor::backend::Backend> {
            moe: ExpertParallelMoE<B>,
        }

        struct Reduced {
            device: moebius::cpu::Cpu,
            sums: moebius::cpu::ThreadComm,
            replicas: moebius::cpu::ThreadComm,
            steps: Vec<(Vec<Tensor<B, 2>>, Tensor<B, 2>)>,
        }

        fn reduced(reduced: Reduced, mut model: Model<B>, loss: fn(&Model<B>, Tensor<B, 2>) -> moebius::Result<Tensor<B, 1>>) -> moebius::Result<()> {
            use moebius::burn::{GradientReducer, ReduceComms};

            let Reduced { device, sums, replicas, steps } = reduced;
            let mut adam = AdamWConfig::new().init::<B, Model<B>>();
            let comms = ReduceComms { group: Box::new(sums), replicas: Some(Box::new(replicas)) };
            let mut reducer = GradientReducer::<B>::new(&device, comms)?.with_layer(&model.moe);
            for (first, last) in steps {
                for microbatch in first {
                    reducer.backward(loss(&model, microbatch)?, &model)?; // communicates no gradient
                }
                let gradients = reducer.backward_reduced(loss(&model, last)?, &model)?; // or backward, and then reduce(&model)
                model = adam.step(1e-3, model, gradients);
            }
            Ok(())
        }

        fn main_gradients(mut moe: ExpertParallelMoE<B>, options: moebius::optim::AdamWOptions, batches: Vec<Vec<Tensor<B, 2>>>, loss: fn(&ExpertParallelMoE<B>, Tensor<B, 2>) -> moebius::Result<Tensor<B, 1>>) -> moebius::Result<()> {
            use moebius::burn::{AdamW, GradientReducer};
            use moebius::cpu::Cpu;

            let reducer = GradientReducer::<B>::alone(&Cpu::new())?.with_layer(&moe); // several ranks: new(&device, comms)?
            let mut reducer = reducer.with_main_gradients_in_f32();
            let mut adam = AdamW::<B>::new(&Cpu::new(), &moe, options)?;
            for step in batches {
                for x in step {
                    reducer.backward(loss(&moe, x)?, &moe)?;
                }
                let gradients = reducer.reduce(&moe)?;
                moe = adam.step(moe, gradients)?;
            }
            Ok(())
        }
    }

    fn ranks() {
        fn rank(comm: ThreadComm) -> candle_core::Result<()> {
            let config = MoeConfig::new(16, 32, 8, 2);
            let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::of(&config, 64))?; // at most 64 tokens a rank
            let group = EpGroup::new(group);                                                   // one for all layers
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
            let moe = ExpertParallelMoE::new(config, &group, vb)?;
            Ok(()) // …
        }
        let ranks = ThreadWorld::create(2, Duration::from_secs(60)).into_iter();
        let ranks: Vec<_> = ranks.map(|comm| std::thread::spawn(|| rank(comm))).collect();
    }
}

#[rustfmt::skip]
mod checkpoints {
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
}

#[rustfmt::skip]
mod quantization {
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
}

#[rustfmt::skip]
mod etp {
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
}

#[cfg(feature = "cuda")]
#[rustfmt::skip]
mod one_gpu {
    mod program {
        use candle_core::{DType, Device, Module, Tensor};
        use candle_nn::{VarBuilder, VarMap};
        use moebius::{MoeConfig, candle};

        fn main() -> Result<(), Box<dyn std::error::Error>> {
            let device = Device::new_cuda_with_stream(0)?;
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::BF16, &device);
            let moe = candle::moe(MoeConfig::new(2048, 768, 128, 8), vb.pp("moe"))?; // hidden, intermediate, experts, top-k
            let x = Tensor::ones((512, 2048), DType::BF16, &device)?;
            let y = (moe.forward(&x)? + x)?;
            let _gradients = y.sqr()?.mean_all()?.backward()?;
            Ok(())
        }
    }

    fn two_layers(config: moebius::MoeConfig, vars: candle_nn::VarMap) -> super::Result<()> {
        use candle_core::{DType, Device}; // …
        use candle_nn::VarBuilder; // …
        use moebius::candle::{DeviceGroup, ExpertParallelMoE};

        let device = Device::new_cuda_with_stream(0)?;
        let vb = VarBuilder::from_varmap(&vars, DType::BF16, &device);
        let group = DeviceGroup::single(&config, &device)?;
        let first = ExpertParallelMoE::new(config.clone(), &group, vb.pp("layers.0.moe"))?;
        let second = ExpertParallelMoE::new(config, &group, vb.pp("layers.1.moe"))?;
        Ok(())
    }

    #[cfg(feature = "burn-cuda")]
    fn from_burn(config: moebius::MoeConfig) -> super::Result<()> {
        use burn::backend::{Autodiff, Cuda};
        use moebius::burn::{DeviceGroup, ExpertParallelMoEConfig};

        let device = Default::default(); // the first GPU
        let group = DeviceGroup::single::<Autodiff<Cuda>>(&config, &device)?; // its layers share one workspace
        let moe = ExpertParallelMoEConfig::new(config).init_on::<Autodiff<Cuda>>(&group, &device)?;
        Ok(())
    }

    fn alone() -> super::Result<()> {
        use moebius::cuda::Cuda;
        use moebius::ep::GroupConfig;
        use moebius::layer::{Layer, Mode, Params, PerParam};
        use moebius::{DType, MoeConfig, Tensor};

        let cuda = Cuda::new(0)?;
        let config = MoeConfig::new(2048, 768, 128, 8); // hidden, intermediate, experts, top-k
        let layer = Layer::new(config.clone(), 0)?;
        let tensor = |dims: &[usize]| Tensor::zeros(&cuda, DType::BF16, dims); // Kernels::upload writes values
        let (x, router) = (tensor(&[512, 2048])?, tensor(&[128, 2048])?);
        let (up, down) = (tensor(&[128, 2 * 768, 2048])?, tensor(&[128, 2048, 768])?); // up: gate rows first
        let params = Params { router: router.view(), up: &up.view(), down: &down.view(), others: PerParam::none() };

        let mut group = cuda.group(GroupConfig::of(&config, 16384))?; // the layer's experts, most tokens a call
        let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
        Ok(())
    }

    fn graph(cuda: moebius::cuda::Cuda, mut x: moebius::Tensor<moebius::cuda::Cuda>, next_batch: &[u8],
        step: impl FnMut() -> moebius::Result<()>) -> super::Result<()> {
        use moebius::kernels::Kernels; // …
        let mut step = step; // …
        let mut graph = cuda.capture(|| step())?; // owns or holds everything it touches
        cuda.upload(next_batch, x.view_mut())?;
        graph.replay()?;
        Ok(())
    }

    fn captured(moe: moebius::candle::ExpertParallelMoE, x: candle_core::Tensor, next: candle_core::Tensor) -> super::Result<()> {
        use candle_core::Module; // …
        use moebius::candle; // …
        let device = candle::device_for_capture(0)?;
        let capture = candle::Capture::new(&device)?.group(moe.group())?;
        // SAFETY: nothing replaces x or a weight of the layer while the step lives.
        let mut step = unsafe { capture.run(|| Ok(vec![(moe.forward(&x)? + &x)?])) }?;
        x.slice_set(&next, 0, 0)?; // an input changes in place
        step.replay()?;
        println!("{}", step.outputs()[0]);
        Ok(())
    }

    fn invariant() -> super::Result<()> {
        use moebius::cuda::Cuda; // …
        use moebius::ep::{EpGroup, GroupConfig}; // …
        let cuda = Cuda::new(0)?.batch_invariant(); // from candle: moebius::candle::cuda(&device)?.batch_invariant()
        let group = EpGroup::new(cuda.group(GroupConfig::one_rank(128))?);
        Ok(())
    }
}

#[cfg(feature = "nccl")]
#[rustfmt::skip]
mod nccl {
    mod threads {
        use std::{thread, time::Duration};
        use candle_core::{DType, Device, Module, Tensor};
        use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
        use moebius::MoeConfig;
        use moebius::candle::{self, DeviceGroup, EpGroup, ExpertParallelMoE};
        use moebius::ep::{Group, GroupConfig};
        use moebius::nccl::{NcclComm, NcclLibrary};

        type Failure = Box<dyn std::error::Error + Send + Sync>;

        fn rank(device: Device, comm: NcclComm) -> Result<(), Failure> {
            let config = MoeConfig::new(2048, 768, 128, 8); // hidden, intermediate, experts, top-k
            let cuda = comm.cuda().clone();
            let group = Group::new(cuda, Box::new(comm), GroupConfig::of(&config, 4096))?; // at most 4096 tokens a rank
            let group = DeviceGroup::new(EpGroup::new(group), &device)?;
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::BF16, &device);
            let moe = ExpertParallelMoE::new(config, group, vb)?; // this rank's experts
            let x = Tensor::ones((512, 2048), DType::BF16, &device)?;
            let mut gradients = (moe.forward(&x)? + x)?.sqr()?.mean_all()?.backward()?;
            moe.reduce_gradients(&mut gradients)?; // the router's, which all ranks hold
            SGD::new(moe.vars(), 0.1)?.step(&gradients)?;
            Ok(())
        }

        fn main() -> Result<(), Failure> {
            let devices = (0..2).map(Device::new_cuda_with_stream).collect::<Result<Vec<_>, _>>()?;
            let gpus = devices.iter().map(candle::cuda).collect::<Result<Vec<_>, _>>()?;
            let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, Duration::from_secs(60))?;
            let ranks = devices.into_iter().zip(comms).map(|(device, comm)| thread::spawn(|| rank(device, comm)));
            for rank in ranks.collect::<Vec<_>>() {
                rank.join().expect("a rank panicked")?;
            }
            Ok(())
        }
    }

    fn budgets() -> super::Result<()> {
        use std::time::Duration; // …
        use moebius::cuda::Cuda; // …
        use moebius::nccl::{NcclComm, NcclLibrary, NcclOptions, NcclWorld}; // …
        use moebius::ranks::Bootstrap; // …
        let (timeout, library) = (Duration::from_secs(120), NcclLibrary::open()?); // …
        let (gpus, cuda, job) = (vec![Cuda::new(0)?], Cuda::new(0)?, Bootstrap::from_env(timeout)?); // …
        let options = NcclOptions { max_ctas: 8, ..NcclOptions::default() };  // 0, the default: as NCCL chooses
        let world = NcclWorld::with_options(&library, &gpus, options, timeout)?;
        let tag = moebius::comm::Tag { layer: 0, op: moebius::comm::Op::User, sequence: 0 }; // …
        let mut comm = NcclComm::join_with(&library, &job, &cuda, options)?;  // processes
        let own = comm.with_bounds(tag, NcclOptions { max_ctas: 4, ..options })?;  // of either, on all ranks
        Ok(())
    }

    fn processes() -> super::Result<()> {
        use moebius::comm::{Op, Tag}; // …
        use std::time::Duration; // …
        use moebius::cuda::Cuda; // …
        use moebius::nccl::{NcclComm, NcclLibrary}; // …
        use moebius::ranks::{Axis, Bootstrap, Identity, Mesh}; // …
        let me = Identity::from_env()?;
        let job = Bootstrap::from_env(Duration::from_secs(120))?;
        let cuda = Cuda::new(me.local_rank)?;
        let mut world = NcclComm::join(&NcclLibrary::open()?, &job, &cuda)?;
        let mesh = Mesh::new(me.world, &[Axis::Data.of_size(2), Axis::Expert.of_size(me.world / 2)])?;
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };   // names the call in errors
        let experts = world.group(tag, &mesh, Axis::Expert)?; // ncclCommSplit
        Ok(())
    }
}

#[rustfmt::skip]
mod nccl_ep {
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
}
