//! The pieces of `docs/nccl.md`.

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
    use moebius::MoeConfig; // …
    use moebius::comm::{Op, Tag}; // …
    use std::time::Duration; // …
    use moebius::cuda::Cuda; // …
    use moebius::ep::{Group, GroupConfig}; // …
    use moebius::nccl::{NcclComm, NcclLibrary}; // …
    use moebius::ranks::{Axis, Bootstrap, Identity, Mesh}; // …
    let me = Identity::from_env()?;
    let job = Bootstrap::from_env(Duration::from_secs(120))?;
    let cuda = Cuda::new(me.local_rank)?;
    let mut world = NcclComm::join(&NcclLibrary::open()?, &job, &cuda)?;
    let mesh = Mesh::new(me.world, &[Axis::Expert.of_size(me.world)])?; // the experts are divided among all ranks
    let tag = Tag { layer: 0, op: Op::User, sequence: 0 };   // names the call in errors
    let experts = world.group(tag, &mesh, Axis::Expert)?; // ncclCommSplit
    let layer = MoeConfig::new(2048, 768, 128, 8); // hidden, intermediate, experts, top-k
    let group = Group::new(cuda, Box::new(experts), GroupConfig::of(&layer, 4096))?; // at most 4096 tokens a rank
    println!("rank {} of {}, over {}", group.rank(), group.ranks(), group.dispatcher_kind());
    Ok(())
}

fn told(layer: moebius::MoeConfig) {
    use moebius::ep::{DispatcherKind, GroupConfig, Overlap, ReturnFormat}; // …
    let config = GroupConfig {
        dispatcher: DispatcherKind::NvLink,  // one that cannot be had is an error; Auto, the default, chooses
        overlap: Overlap::Sms(16),           // products run while tokens travel on 16 SMs; Auto, the default, or Off
        max_sms: 64,                         // SMs that its kernels take at most; 0, the default: all
        windows: 3,                          // zones in which rows arrive and stay; 0, the default: 2
        return_format: ReturnFormat::Mxfp8,  // how a forward's sums return; Tokens, the default: in the tokens' type
        ..GroupConfig::of(&layer, 4096)
    };
}

fn served(cuda: moebius::cuda::Cuda, comm: Box<moebius::nccl::NcclComm>, layer: moebius::MoeConfig) -> super::Result<()> {
    use std::time::Duration; // …
    use moebius::Error; // …
    use moebius::comm::Communicator; // …
    use moebius::ep::{DispatcherKind, EpGroup, Group, GroupConfig}; // …
    let (ranks, sequences) = (comm.size(), 64); // …
    let (experts, top_k) = (layer.router.num_experts, layer.router.top_k); // …
    let served = GroupConfig {
        dispatcher: DispatcherKind::NvLinkLowLatency,  // to be named: patience is refused with Auto
        forward_only: true,                            // no step has a backward
        patience: Some(Duration::from_millis(100)),    // how long a step waits for a rank before it goes on without it
        max_rows: ranks * sequences * top_k,           // of captured steps with so many sequences a rank
        ..GroupConfig::new(experts, 3456 / top_k)      // tokens a rank brings to a call at most
    };
    let group = EpGroup::new(Group::new(cuda, comm, served)?);
    match group.lock().dispatcher().check() {          // between steps, on each rank
        Err(Error::LateRanks { late, .. }) => println!("went on without ranks {late:?}"),
        other => other?,
    }
    Ok(())
}
