//! Decoding on a GPU: kernels and captured steps against forwards of whole sequences. Counts as ignored without a GPU.

#[cfg(feature = "nccl")]
#[path = "support/lost_rank.rs"]
mod lost_rank;

use std::error::Error;
use std::ops::ControlFlow;
use std::process::ExitCode;

use candle_core::{DType, Device, Tensor};
use libtest_mimic::{Arguments, Trial};
#[cfg(feature = "nccl")]
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius_models::generate::{CacheKind, CacheRequest, Decoder, Generator, Request, Sampling};
use moebius_models::{ExpertWeights, LoadOptions, Model, Point};
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const TOKENS: usize = 150;
const SEQUENCES: usize = 3;

/// Few layers, and experts that every token takes all of: none hangs on a rounding.
fn config(family: &str, head_dim: usize, heads: [usize; 2], more: Value) -> Value {
    let mut config = json!({
        "model_type": family, "torch_dtype": "bfloat16", "vocab_size": 512, "hidden_size": 128,
        "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu"
    });
    if let (Some(config), Some(more)) = (config.as_object_mut(), more.as_object()) {
        config.extend(more.clone());
    }
    config
}

fn load(config: &Value, device: &Device, options: LoadOptions) -> Result<Model> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("config.json"), config.to_string())?;
    Ok(Model::load(dir.path(), device, LoadOptions { random: Some(7), ..options })?)
}

/// ‖a − b‖ / ‖b‖.
fn relative(a: &Tensor, b: &Tensor) -> Result<f64> {
    let norm = |t: &Tensor| -> Result<f64> { Ok(t.sqr()?.sum_all()?.to_scalar::<f32>()?.into()) };
    let (a, b) = (a.to_dtype(DType::F32)?, b.to_dtype(DType::F32)?);
    Ok((norm(&(a - &b)?)? / norm(&b)?).sqrt())
}

/// Of logits in f32, whose attention and products sum in another order in each kernel.
const F32: f64 = 1e-4;

/// How steps are run, and how far from a forward they may be.
#[derive(Clone, Copy)]
struct Case {
    options: LoadOptions,
    captured: bool,
    tolerance: f64,
}

/// Steps over a static cache against a forward of all tokens.
fn steps(config: &Value, Case { options, captured, tolerance }: Case) -> Result<()> {
    let device = match captured {
        true => moebius::candle::device_for_capture(0)?,
        false => Device::new_cuda_with_stream(0)?,
    };
    let model = load(config, &device, options)?;
    let ids: Vec<u32> = (0..(SEQUENCES * TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) % 512).collect();
    let ids = Tensor::from_vec(ids, (SEQUENCES, TOKENS), &Device::Cpu)?;
    let expected = model.forward(&ids)?;
    for first in [1, 70] {
        let mut stepper = model.stepper(SEQUENCES, TOKENS)?;
        for round in 0..2 {
            stepper.feed(&ids.narrow(1, 0, first)?)?;
            for at in first..TOKENS {
                stepper.set_next_ids(&ids.narrow(1, at, 1)?.flatten_all()?.to_vec1::<u32>()?)?;
                let logits = stepper.step()?.copy()?;
                let error = relative(&logits, &expected.narrow(1, at, 1)?.squeeze(1)?)?;
                if error.is_nan() || error > tolerance {
                    return Err(format!("round {round}, token {at}: logits differ by {error:e}").into());
                }
                for (row, id) in logits.to_dtype(DType::F32)?.to_vec2::<f32>()?.iter().zip(stepper.next_ids()?) {
                    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    // Of equal ones, which 16 bits make common, the kernel takes the first.
                    let first = row.iter().position(|logit| *logit == most);
                    if row[id as usize] != most || logits.dtype() != DType::F32 && first != Some(id as usize) {
                        return Err(format!("token {at}: the next id is {id}, the likeliest {first:?}").into());
                    }
                }
            }
            if stepper.is_captured() != captured {
                return Err("captured or not, other than asked".into());
            }
            stepper.clear()?;
        }
    }
    Ok(())
}

/// A captured stepper that is resized: sequences change places and get more room, then some leave, and steps are captured
/// again over the new memory. Against a forward of all tokens, in f32.
fn resized(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() })?;
    let ids: Vec<u32> = (0..(SEQUENCES * TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) % 512).collect();
    let ids = Tensor::from_vec(ids, (SEQUENCES, TOKENS), &Device::Cpu)?;
    let (expected, rows) = (model.forward(&ids)?, ids.to_vec2::<u32>()?);
    // Behind so many tokens, the stepper's sequences that stay, and room for so many tokens. More than windows and the
    // block of a cache's attention lie between.
    let changes = [(50, vec![2, 0, 1], 60), (60, vec![1, 2], 130), (130, vec![1], TOKENS)];
    let mut stepper = model.stepper(SEQUENCES, 50)?;
    stepper.feed(&ids.narrow(1, 0, 45)?)?;
    let mut held: Vec<usize> = (0..SEQUENCES).collect();
    let id = |row: usize, at: usize| rows[row][at];
    for at in 45..TOKENS {
        if let Some((_, keep, capacity)) = changes.iter().find(|(when, ..)| *when == at) {
            stepper.resize(keep, *capacity)?;
            held = keep.iter().map(|row| held[*row]).collect();
            if stepper.is_captured() {
                return Err(format!("token {at}: a graph over memory that went").into());
            }
        }
        stepper.set_next_ids(&held.iter().map(|row| id(*row, at)).collect::<Vec<_>>())?;
        let logits = stepper.step()?.copy()?;
        if !stepper.is_captured() {
            return Err(format!("token {at}: not captured: {:?}", stepper.capture_error()).into());
        }
        for (i, row) in held.iter().enumerate() {
            let error = relative(&logits.get(i)?, &expected.get(*row)?.get(at)?)?;
            if error.is_nan() || error > F32 {
                return Err(format!("sequence {row}, token {at}: logits differ by {error:e}").into());
            }
        }
    }
    Ok(())
}

/// Prompts of several lengths, whose texts end one after another, so that the rows that go on move to a smaller cache;
/// the later ones are sampled where `sampled`.
fn requests(sampled: bool) -> Vec<Request> {
    let of = |i: usize| {
        let len = [7, 3, 12, 5, 9][i];
        let prompt = (0..len).map(|at| (at * 131 + 17 * i as u32) % 512).collect();
        let mut request = Request::new(prompt, 4 + 9 * i);
        if sampled && i > 1 {
            request.sampling = Sampling { temperature: 0.8, top_k: 50, seed: i as u64, ..request.sampling };
        }
        request
    };
    (0..5).map(of).collect()
}

fn generate(model: &Model, kind: CacheKind, requests: &[Request]) -> Result<Vec<Vec<u32>>> {
    let (outputs, _) = Generator::new(model, None)?.cache(kind).run(requests, |_| ControlFlow::Continue(()))?;
    Ok(outputs.into_iter().map(|output| output.tokens).collect())
}

/// Texts over a replayed static cache against those over a cache that grows, in f32.
fn texts(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() })?;
    for requests in [requests(false), requests(true)] {
        let [fixed, growing] = [CacheKind::Static, CacheKind::Growing].map(|kind| generate(&model, kind, &requests));
        if fixed? != growing? {
            return Err("the texts differ".into());
        }
    }
    Ok(())
}

/// Greedy tokens in bf16: each has the largest logit of a forward of all tokens before it, or one as near to it as two
/// ways to round are apart.
fn greedy(config: &Value, tolerance: f64) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() })?;
    let requests = requests(false);
    for (request, tokens) in requests.iter().zip(generate(&model, CacheKind::Static, &requests)?) {
        let all: Vec<u32> = request.prompt.iter().chain(&tokens).copied().collect();
        let ids = Tensor::from_slice(&all, (1, all.len()), &Device::Cpu)?;
        let logits = model.forward(&ids)?.squeeze(0)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        for (at, token) in (request.prompt.len()..).zip(tokens) {
            let row = &logits[at - 1];
            let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            // `tolerance` is of the row's norm; an entry's error is at most the whole row's.
            let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let behind = most - f64::from(row[token as usize]);
            if behind.is_nan() || behind > 2.0 * tolerance * norm {
                return Err(format!("token {at}: {behind} behind the likeliest").into());
            }
        }
    }
    Ok(())
}

/// A model's static cache is captured with the first step of a token, and again where rows leave.
fn captured_again(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() })?;
    let request = CacheRequest { sequences: 4, prompt_tokens: 3, max_tokens: 20, kind: CacheKind::Static };
    let mut cache = Decoder::cache(&model, request)?;
    let ids = |rows: usize, len: usize| Tensor::ones((rows, len), DType::U32, &Device::Cpu);
    model.step(&ids(4, 3)?, &mut cache)?;
    let mut captured = vec![!cache.is_captured()];
    model.step(&ids(4, 1)?, &mut cache)?;
    captured.push(cache.is_captured());
    let moved = model.keep(&[2], &mut cache)?;
    captured.push(!cache.is_captured());
    let logits = model.step(&ids(1, 1)?, &mut cache)?;
    captured.push(cache.is_captured());
    match (moved, &captured[..], logits.dims()) {
        (true, [true, true, true, true], [1, 512]) => Ok(()),
        found => Err(format!("{found:?}").into()),
    }
}

/// The small model's greedy tokens over two GPUs, whose ranks are threads and have every second prompt, against one
/// GPU's: by both kinds of cache, with one prompt too, which leaves the second rank without any. In f32. In a group with
/// room for the rows of any choices steps are captured.
#[cfg(feature = "nccl")]
fn over_two_gpus(prompts: usize, has_room: bool, dispatcher: DispatcherKind) -> Result<()> {
    use moebius::candle::{DeviceGroup, EpGroup};
    use moebius::checkpoint::Checkpoint;
    use moebius::comm::{Op, Tag};
    use moebius::nccl::{NcclComm, NcclLibrary};
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
    for (rank, kinds) in got.into_iter().enumerate() {
        for tokens in kinds? {
            let own: Vec<_> = expected.iter().skip(rank).step_by(2).cloned().collect();
            if tokens != own {
                return Err(format!("rank {rank}: {tokens:?}, expected {own:?}").into());
            }
        }
    }
    Ok(())
}

/// Steps of `own` sequences on this rank, and two at most on any, of the tokens that a cache which grows finds likeliest:
/// its logits but for f32's rounding. Captured where `captured`.
#[cfg(feature = "nccl")]
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
#[cfg(feature = "nccl")]
fn two_gpus(gpu: bool) -> Vec<Trial> {
    use lost_rank::{Lost, lost_in_a_replay};

    let two = gpu && Device::new_cuda_with_stream(1).is_ok();
    let mut trials = Vec::new();
    let mut more = |name: String, run: Box<dyn Fn() -> Result<()> + Send>| {
        let run = move || run().map_err(|e| e.to_string().into());
        trials.push(Trial::test(name, run).with_ignored_flag(!two));
    };
    let low_latency = DispatcherKind::NvLinkLowLatency;
    let kinds = [(DispatcherKind::Auto, ""), (DispatcherKind::NvLink, ", NVLink"), (low_latency, ", low latency")];
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
    let run = move || lost_in_a_replay(Lost::IsGoneOnWithout, low_latency);
    more("captured steps go on without a rank, over two GPUs".into(), Box::new(run));
    trials
}

/// What the driver has had reserved grows with a tensor.
fn highest_reserved() -> Result<()> {
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
fn experts_on_host(config: &Value, options: LoadOptions) -> Result<()> {
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
fn memory_of_experts_on_host() -> Result<()> {
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

fn main() -> ExitCode {
    let gpu = Device::new_cuda_with_stream(0).is_ok();
    let window = json!({ "sliding_window": 40, "intermediate_size": 64 });
    let sinks = json!({ "sliding_window": 33, "intermediate_size": 64, "rope_theta": 1.5e5 });
    let shapes = [
        ("qwen3_moe, heads of 128 in groups of 8", config("qwen3_moe", 128, [8, 1], json!({}))),
        ("qwen3_moe, heads of 64 in groups of 3", config("qwen3_moe", 64, [6, 2], json!({}))),
        ("qwen3_moe, heads of 256 alone", config("qwen3_moe", 256, [2, 2], json!({}))),
        ("qwen3_moe, heads of 32", config("qwen3_moe", 32, [4, 2], json!({}))),
        ("mixtral, a window", config("mixtral", 64, [4, 2], window)),
        ("gpt_oss, sinks and windows", config("gpt_oss", 64, [8, 2], sinks)),
    ];
    let in_type = |dtype| LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    // bf16 rounds some twenty times on the way through two layers, by up to 2⁻⁹ each, on both sides: 2 · √20 · 2e-3.
    let (bf16, f32) = (2e-2, F32);
    let mut trials = Vec::new();
    let mut add = |name: String, config: &Value, case: Case| {
        let config = config.clone();
        let run = move || steps(&config, case).map_err(|e| e.to_string().into());
        trials.push(Trial::test(name, run).with_ignored_flag(!gpu));
    };
    for (name, config) in &shapes {
        for (kind, dtype, captured, tolerance) in [
            ("bf16", DType::BF16, false, bf16),
            ("bf16, captured", DType::BF16, true, bf16),
            ("f32, captured", DType::F32, true, f32),
        ] {
            let case = Case { options: in_type(dtype), captured, tolerance };
            add(format!("steps of {name}, {kind}"), config, case);
        }
    }
    let nvfp4 = LoadOptions { experts: ExpertWeights::Nvfp4, ..in_type(DType::BF16) };
    let case = Case { options: nvfp4, captured: true, tolerance: bf16 };
    add("steps with experts in NVFP4, captured".to_string(), &shapes[0].1, case);
    let mut more = |name: String, run: Box<dyn FnOnce() -> Result<()> + Send>| {
        let run = move || run().map_err(|e| e.to_string().into());
        trials.push(Trial::test(name, run).with_ignored_flag(!gpu));
    };
    for (name, config) in &shapes {
        let [first, second, third, fourth] = [(); 4].map(|()| config.clone());
        more(format!("texts of {name}, f32"), Box::new(move || texts(&first)));
        more(format!("greedy tokens of {name}, bf16"), Box::new(move || greedy(&second, bf16)));
        more(format!("captures of {name}, as rows leave"), Box::new(move || captured_again(&third)));
        more(format!("resized steps of {name}, f32"), Box::new(move || resized(&fourth)));
    }
    more("the most memory reserved".to_string(), Box::new(highest_reserved));
    #[cfg(feature = "nccl")]
    trials.extend(two_gpus(gpu));
    let mut on_host = |name: &str, config: &Value, options: LoadOptions| {
        let config = config.clone();
        let run = move || experts_on_host(&config, options).map_err(|e| e.to_string().into());
        trials.push(Trial::test(format!("experts on the host of {name}"), run).with_ignored_flag(!gpu));
    };
    on_host("qwen3_moe, bf16", &shapes[0].1, in_type(DType::BF16));
    on_host("qwen3_moe, f32", &shapes[0].1, in_type(DType::F32));
    on_host("qwen3_moe, NVFP4", &shapes[0].1, nvfp4);
    on_host("gpt_oss, bf16", &shapes[5].1, in_type(DType::BF16));
    on_host("gpt_oss, NVFP4", &shapes[5].1, nvfp4);
    let memory = || memory_of_experts_on_host().map_err(|e| e.to_string().into());
    trials.push(Trial::test("memory of experts on the host", memory).with_ignored_flag(!gpu));
    // One at a time: a capture ends where another thread makes a device of the same GPU.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit_code()
}
