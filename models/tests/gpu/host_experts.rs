//! Experts on the host, and memory.

use super::*;

/// What the driver has had reserved grows with a tensor.
pub(super) fn highest_reserved() -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let cuda = moebius::candle::cuda(&device)?;
    let before = cuda.highest_reserved()?;
    let bytes = 64 << 20;
    let tensors = (0..=before as usize / bytes).map(|_| Tensor::zeros(bytes, DType::U8, &device));
    let tensors = tensors.collect::<candle_core::Result<Vec<_>>>()?;
    let (held, after) = ((tensors.len() * bytes) as u64, cuda.highest_reserved()?);
    if after >= held && after > before { Ok(()) } else { Err(format!("{before}, then {after} with {held}").into()) }
}

fn bits(t: &Tensor) -> Result<Vec<u32>> {
    let values = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Logits of a prefill, of steps behind it, and of steps over a static cache.
fn decoded(model: &Model, ids: &Tensor) -> Result<Vec<Vec<u32>>> {
    const FIRST: usize = 70;
    const STEPS: usize = 5;
    let mut cache = model.cache();
    let mut all = vec![bits(&model.decode(&ids.narrow(1, 0, FIRST)?, &mut cache)?)?];
    let mut stepper = model.stepper(SEQUENCES, FIRST + STEPS)?;
    all.push(bits(&stepper.feed(&ids.narrow(1, 0, FIRST)?)?)?);
    for at in FIRST..FIRST + STEPS {
        let next = ids.narrow(1, at, 1)?;
        all.push(bits(&model.decode(&next, &mut cache)?)?);
        stepper.set_next_ids(&next.flatten_all()?.to_vec1::<u32>()?)?;
        all.push(bits(stepper.step()?)?);
    }
    if stepper.is_captured() {
        return Err("captured, on a device that does not".into());
    }
    Ok(all)
}

/// Experts on the host against the same on the GPU: the same bits, also behind a forward that failed.
pub(super) fn experts_on_host(config: &Value, options: LoadOptions) -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    let at_hand = load(config, &device, options)?;
    let model = load(config, &device, LoadOptions { experts_on_host: true, ..options })?;
    let ids: Vec<u32> = (0..(SEQUENCES * TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) % 512).collect();
    let ids = Tensor::from_vec(ids, (SEQUENCES, TOKENS), &Device::Cpu)?;
    let expected = bits(&at_hand.forward(&ids)?)?;
    for pass in 0..3 {
        if bits(&model.forward(&ids)?)? != expected {
            return Err(format!("forward {pass} has other logits").into());
        }
    }
    let mut fail = |point: Point, t: Tensor| match point {
        Point::MoeInput { layer: 1 } => Err(candle_core::Error::Msg("out of luck".into())),
        _ => Ok(t),
    };
    let failed = model.forward_tapped(&ids, &mut fail).err();
    if !failed.is_some_and(|error| error.to_string().contains("out of luck")) {
        return Err("a forward that does not fail as its tap".into());
    }
    if bits(&model.forward(&ids)?)? != expected || decoded(&model, &ids)? != decoded(&at_hand, &ids)? {
        return Err("other logits behind a forward that failed".into());
    }
    // On a device that captures, steps run one after another all the same.
    let capturing =
        load(config, &moebius::candle::device_for_capture(0)?, LoadOptions { experts_on_host: true, ..options })?;
    match decoded(&capturing, &ids)? == decoded(&at_hand, &ids)? {
        true => Ok(()),
        false => Err("other logits on a device that captures".into()),
    }
}

/// Of eight layers' experts the GPU has two layers', and the host all of them, page-locked until the model is dropped.
pub(super) fn memory_of_experts_on_host() -> Result<()> {
    const LAYERS: usize = 8;
    let mut config = config("qwen3_moe", 64, [4, 2], json!({}));
    for (field, value) in [
        ("hidden_size", 1024),
        ("moe_intermediate_size", 512),
        ("num_hidden_layers", LAYERS),
        ("num_experts", 32),
        ("num_experts_per_tok", 4),
    ] {
        config[field] = value.into();
    }
    let device = Device::new_cuda_with_stream(0)?;
    let cuda = moebius::candle::cuda(&device)?;
    let free = || -> Result<usize> {
        device.synchronize()?;
        Ok(cuda.free_memory()?)
    };
    let before = free()?;
    let options = LoadOptions { dtype: Some(DType::BF16), experts_on_host: true, ..LoadOptions::default() };
    let model = load(&config, &device, options)?;
    let ids = Tensor::ones((1, 64), DType::U32, &device)?;
    for _forward in 0..3 {
        model.hidden(&ids)?;
    }
    let taken = before.saturating_sub(free()?);
    let host = model.host_experts().ok_or("no experts on the host")?;
    let chain = host.on::<moebius::cuda::Cuda>().ok_or("no chain on the GPU")?;
    let experts = LAYERS * 32 * 3 * 1024 * 512 * 2;
    let (locked, gathered) = (chain.device().memory().page_locked, chain.memory().gathered);
    println!("experts {experts}, page-locked {locked}, gathered {gathered}, taken of the GPU {taken} bytes");
    if (host.bytes(), locked) != (experts, experts) || gathered * LAYERS > 2 * experts {
        return Err(format!("{} bytes on the host, {locked} locked, {gathered} gathered", host.bytes()).into());
    }
    // A quarter for two layers' experts, the rest of the model beside it.
    if taken > experts / 2 {
        return Err(format!("{taken} bytes of the GPU for a model whose experts have {experts}").into());
    }
    let kept = chain.device().clone();
    drop(model);
    match kept.memory().page_locked {
        0 => Ok(()),
        left => Err(format!("{left} bytes are locked behind the model's end").into()),
    }
}
