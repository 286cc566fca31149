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
