//! Texts and captured steps over two GPUs.

use super::*;

/// The small model's greedy tokens over two GPUs, whose ranks are threads and have every second prompt, against one
/// GPU's: by both kinds of cache, with one prompt too, which leaves the second rank without any. In f32. In a group with
/// room for the rows of any choices steps are captured.
fn over_two_gpus(prompts: usize, has_room: bool, dispatcher: DispatcherKind) -> Result<()> {
    use moebius::candle::{DeviceGroup, EpGroup};
    use moebius::checkpoint::Checkpoint;
    use moebius::comm::{Op, Tag};
    use moebius::nccl::NcclComm;
    use moebius_models::generate::OverRanks;

    let checkpoint = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/small"))?;
    let options = LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() };
    let prompt = |i: usize| (0..3 + 4 * i as u32).map(|at| (at * 131 + 17 * i as u32) % 2048).collect();
    let requests: Vec<Request> = (0..prompts).map(|i| Request::new(prompt(i), 40 - 9 * i)).collect();
    let devices = (0..2).map(moebius::candle::device_for_capture).collect::<candle_core::Result<Vec<_>>>()?;
    let alone = Model::load_on(&checkpoint, DeviceGroup::single(GroupConfig::one_rank(8), &devices[0])?, options)?;
    let expected = generate(&alone, CacheKind::Growing, &requests)?;
    drop(alone);
    let rank = |rank: usize, device: &Device, mut comm: NcclComm| -> Result<Vec<Vec<Vec<u32>>>> {
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
        let cuda = comm.cuda().clone();
        let between = comm.split(tag, Some(0), rank)?.ok_or("no part of the world")?;
        let max_rows = if has_room { 512 } else { 0 };
        let config = GroupConfig { max_rows, dispatcher, ..GroupConfig::new(8, 256) };
        let group = Group::new(cuda.clone(), Box::new(comm), config)?;
        let model = Model::load_on(&checkpoint, DeviceGroup::new(EpGroup::new(group), device)?, options)?;
        captured_over_ranks(&model, (prompts + 1 - rank) / 2, has_room)?;
        let own: Vec<Request> = requests.iter().skip(rank).step_by(2).cloned().collect();
        let decoder = OverRanks::on(&model, cuda, Box::new(between));
        let run = |kind| -> Result<Vec<Vec<u32>>> {
            let generator = Generator::new(&decoder, None)?.cache(kind);
            let (outputs, _) = generator.run(&own, |_| ControlFlow::Continue(()))?;
            Ok(outputs.into_iter().map(|output| output.tokens).collect())
        };
        [CacheKind::Static, CacheKind::Growing].into_iter().map(run).collect()
    };
    for (rank, kinds) in on_gpus(&devices, rank)?.into_iter().enumerate() {
        for tokens in kinds {
            let own: Vec<_> = expected.iter().skip(rank).step_by(2).cloned().collect();
            if tokens != own {
                return Err(format!("rank {rank}: {tokens:?}, expected {own:?}").into());
            }
        }
    }
    Ok(())
}

/// What `rank` gives on each of these GPUs, whose ranks are threads.
fn on_gpus<T: Send>(
    devices: &[Device],
    rank: impl Fn(usize, &Device, moebius::nccl::NcclComm) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    use moebius::nccl::{NcclComm, NcclLibrary};

    let gpus = devices.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
    let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, std::time::Duration::from_secs(120))?;
    let rank = &rank;
    let got = std::thread::scope(|scope| {
        let places = devices.iter().zip(comms).enumerate();
        let threads: Vec<_> = places
            .map(|(i, (device, comm))| scope.spawn(move || rank(i, device, comm).map_err(|e| format!("rank {i}: {e}"))))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(result) => result,
            Err(_) => Err("a rank panicked".to_string()),
        };
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    got.into_iter().map(|result| result.map_err(Into::into)).collect()
}

/// The loss of a rank without sequences, and of one whose sequences are of one token, is a 0 from which backward reaches
/// every layer with experts, where the other rank waits. The other's is that of one GPU.
fn loss_without_tokens(dtype: DType, dispatcher: DispatcherKind) -> Result<()> {
    use moebius::candle::{DeviceGroup, EpGroup, Parameters};
    use moebius::checkpoint::Checkpoint;
    use moebius::nccl::NcclComm;

    let checkpoint = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/small"))?;
    let options = LoadOptions { dtype: Some(dtype), parameters: Parameters::Trainable, ..LoadOptions::default() };
    let ids = Tensor::from_vec((0..10u32).map(|i| 37 * i % 2048).collect(), (2, 5), &Device::Cpu)?;
    let devices = (0..2).map(moebius::candle::device_for_capture).collect::<candle_core::Result<Vec<_>>>()?;
    let alone = Model::load_on(&checkpoint, DeviceGroup::single(GroupConfig::one_rank(8), &devices[0])?, options)?;
    let expected = alone.loss(&ids)?.sum.to_scalar::<f32>()?;
    drop(alone);
    let rank = |rank: usize, device: &Device, comm: NcclComm| -> Result<Vec<f32>> {
        let config = GroupConfig { dispatcher, ..GroupConfig::new(8, 256) };
        let group = Group::new(comm.cuda().clone(), Box::new(comm), config)?;
        let model = Model::load_on(&checkpoint, DeviceGroup::new(EpGroup::new(group), device)?, options)?;
        let mut sums = Vec::new();
        for none in [[0, 5], [2, 1]] {
            let none = Tensor::zeros(&none, DType::U32, &Device::Cpu)?;
            let loss = model.loss(if rank == 0 { &ids } else { &none })?;
            let gradients = moebius::candle::backward(&loss.mean()?)?;
            for moe in (0..model.num_layers()).filter_map(|layer| model.moe(layer)) {
                if moe.vars().iter().any(|var| gradients.get(var).is_none()) {
                    return Err(format!("{none:?}: an expert without a gradient").into());
                }
            }
            sums.push(loss.sum.to_scalar::<f32>()?);
        }
        Ok(sums)
    };
    let sums = on_gpus(&devices, rank)?;
    // As in the steps: bf16 rounds on the way through the layers, on both sides.
    let tolerance = if dtype == DType::F32 { F32 } else { 2e-2 };
    let differs = |sum: &f32| {
        let error = f64::from((sum - expected).abs() / expected);
        error.is_nan() || error > tolerance
    };
    match &sums[..] {
        [own, none] if own.iter().any(differs) || none.iter().any(|sum| *sum != 0.0) => {
            Err(format!("losses {own:?}, expected {expected}; {none:?} of no tokens, expected 0").into())
        }
        _ => Ok(()),
    }
}

/// Steps of `own` sequences on this rank, and two at most on any, of the tokens that a cache which grows finds likeliest:
/// its logits but for f32's rounding. Captured where `captured`.
fn captured_over_ranks(model: &Model, own: usize, captured: bool) -> Result<()> {
    const STEPS: usize = 6;
    let mut cache = model.cache();
    // None on the CPU: a GPU has no memory of no bytes.
    let last_logits = |hidden: Tensor| -> Result<Option<Tensor>> {
        let last = hidden.dim(1)? - 1;
        Ok(if own == 0 { None } else { Some(model.logits(&hidden.narrow(1, last, 1)?)?.squeeze(1)?) })
    };
    let prompt = match own {
        0 => Tensor::zeros((0, 1), DType::U32, &Device::Cpu)?,
        own => Tensor::from_vec((0..own as u32 * 3).map(|i| 37 * i % 2048).collect(), (own, 3), &Device::Cpu)?,
    };
    let mut expected = vec![last_logits(model.decode_hidden(&prompt, &mut cache)?)?];
    for at in 0..STEPS {
        let next = match &expected[at] {
            None => prompt.clone(),
            Some(logits) => logits.argmax(candle_core::D::Minus1)?.reshape((own, 1))?.to_device(&Device::Cpu)?,
        };
        expected.push(last_logits(model.decode_hidden(&next, &mut cache)?)?);
    }
    let mut stepper = model.stepper(own, 3 + STEPS)?;
    // All ranks again, with other graphs.
    for round in 0..2 {
        stepper.feed(&prompt)?;
        if stepper.capture_over_ranks(2)? != captured {
            return Err(format!("room for the rows: {}", !captured).into());
        }
        for expected in &expected[1..] {
            let logits = stepper.step()?;
            if let Some(expected) = expected {
                let error = relative(logits, expected)?;
                if error.is_nan() || error > F32 {
                    return Err(format!("round {round}: logits differ by {error:e}").into());
                }
            }
            if stepper.is_captured() != captured {
                return Err(format!("captured: {}", !captured).into());
            }
        }
        stepper.clear()?;
    }
    Ok(())
}

/// What two GPUs are for: by the dispatcher that a group takes, and over NVLink, with low latency too, which need GPUs that
/// have the kernels.
pub(super) fn two_gpus(gpu: bool) -> Vec<Trial> {
    use lost_rank::{Lost, lost_in_a_replay};

    let two = gpu && Device::new_cuda_with_stream(1).is_ok();
    let mut trials = Vec::new();
    let mut more = |name: String, run: Box<dyn Fn() -> Result<()> + Send>| {
        let run = move || run().map_err(|e| e.to_string().into());
        trials.push(Trial::test(name, run).with_ignored_flag(!two));
    };
    let low_latency = DispatcherKind::NvLinkLowLatency;
    let kinds = [
        (DispatcherKind::AllGather, ", all-gather"),
        (DispatcherKind::NvLink, ", NVLink"),
        (low_latency, ", low latency"),
    ];
    for (dispatcher, over) in kinds {
        for (prompts, has_room) in [(1, false), (4, false), (1, true), (4, true)] {
            let captured = if has_room { ", captured" } else { "" };
            let run = move || over_two_gpus(prompts, has_room, dispatcher);
            more(format!("{prompts} prompts over two GPUs{captured}{over}"), Box::new(run));
        }
        let ways = [(Lost::Leaves, "leaves"), (Lost::StaysAway, "stays away from"), (Lost::ComesLate, "is late to")];
        for (how, what) in ways {
            let run = move || lost_in_a_replay(how, dispatcher);
            more(format!("a rank {what} a captured step, over two GPUs{over}"), Box::new(run));
        }
    }
    for (dtype, dispatcher) in [
        (DType::F32, DispatcherKind::AllGather),
        (DType::BF16, DispatcherKind::AllGather),
        (DType::BF16, DispatcherKind::NvLink),
    ] {
        let run = move || loss_without_tokens(dtype, dispatcher);
        more(format!("a loss without tokens over two GPUs, {dtype:?}, {dispatcher:?}"), Box::new(run));
    }
    let run = move || lost_in_a_replay(Lost::IsGoneOnWithout, low_latency);
    more("captured steps go on without a rank, over two GPUs".into(), Box::new(run));
    trials
}
