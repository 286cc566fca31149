//! The pieces of `docs/training.md`.

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
    adam.load_at(dir.join("optimizer"), steps)?; // jitter: moe.with_noise, of moe.noise() at the save
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
