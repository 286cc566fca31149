//! Two layers of Qwen3-30B-A3B in bf16 on one GPU, against candle-transformers' decoder on the same weights: prefill of
//! 4096 tokens, and decoding of 64 sequences. One JSON line a measurement: the median of several, by turns, and the
//! ratio of the two.
//!
//! ```text
//! cargo bench --features cuda --bench gpu     # candle-transformers with its loop over the experts
//! cargo bench --features fused --bench gpu    # … with its fused kernels
//! ```
//!
//! Both give hidden states: the projection to the vocabulary is the same product in either. Beside the times are the
//! relative differences of both from the same weights in f32: of 128 experts some are near ties, and a token whose
//! choice hangs on a rounding differs by an expert, so that neither decoder is near the other in bf16. In f32, where
//! near ties are rare, the two are compared with each other.

#[path = "support/checkpoint.rs"]
mod checkpoint;
#[path = "../examples/support/output.rs"]
mod output;

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe;
use checkpoint::{QWEN3, Sizes};
use moebius::candle::DeviceGroup;
use moebius::checkpoint::Checkpoint;
use moebius::ep::GroupConfig;
use moebius_models::{Cache, LoadOptions, Model};
use output::say;

/// Qwen3-30B-A3B's, but for its 48 layers and its 151936 tokens: the projection to them is left out.
const SIZES: Sizes = Sizes { layers: 2, vocabulary: 1024, positions: PREFILL, ..QWEN3 };

const WORKLOAD: &str = "qwen3-30b-a3b, 2 layers";

/// Tokens of the prefill.
const PREFILL: usize = 4096;
/// Sequences that decode together, and how long they are already.
const SEQUENCES: usize = 64;
const CONTEXT: usize = 128;
/// Most tokens that candle-transformers' fused kernels take in a call: they sort the choices in 48 KiB of shared
/// memory, so longer prompts go in pieces.
const FUSED_MOST: usize = 1024;
const WARM_UP: usize = 2;
const REPEATS: usize = 7;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The decoders, and ours in f32.
struct Decoders {
    ours: Model,
    theirs: qwen3_moe::Model,
    reference: Model,
}

fn load(dir: &Path, device: &Device) -> Result<Decoders> {
    let weights = SIZES.weights(DType::BF16, device)?;
    std::fs::write(dir.join("config.json"), SIZES.config(DType::BF16).to_string())?;
    let on_host = weights.iter().map(|(name, t)| Ok((name.clone(), t.to_device(&Device::Cpu)?)));
    let on_host = on_host.collect::<candle_core::Result<HashMap<_, _>>>()?;
    candle_core::safetensors::save(&on_host, dir.join("model.safetensors"))?;
    drop(on_host);
    let group = DeviceGroup::single(GroupConfig::new(SIZES.experts, SEQUENCES * CONTEXT), device)?;
    let ours = |dtype| {
        let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
        Model::load_on(&Checkpoint::open(dir)?, &group, options).map_err(Box::<dyn Error>::from)
    };
    let (ours, reference) = (ours(DType::BF16)?, ours(DType::F32)?);
    let config: qwen3_moe::Config = serde_json::from_value(SIZES.config(DType::BF16))?;
    if !cfg!(feature = "fused") {
        // Their fused kernels have no f32.
        agree(&reference, &config, &weights, device)?;
    }
    let theirs = qwen3_moe::Model::new(&config, VarBuilder::from_tensors(weights, DType::BF16, device))?;
    Ok(Decoders { ours, theirs, reference })
}

/// Compares the decoders in f32.
fn agree(
    reference: &Model,
    config: &qwen3_moe::Config,
    weights: &HashMap<String, Tensor>,
    device: &Device,
) -> Result<()> {
    let wide = weights.iter().map(|(name, t)| Ok((name.clone(), t.to_dtype(DType::F32)?)));
    let wide = wide.collect::<candle_core::Result<HashMap<_, _>>>()?;
    let mut theirs = qwen3_moe::Model::new(config, VarBuilder::from_tensors(wide, DType::F32, device))?;
    let ids = ids(1, PREFILL, device)?;
    let error = relative(&reference.hidden(&ids)?, &theirs.forward(&ids, 0)?)?;
    say(format_args!("{{\"workload\":\"{WORKLOAD}\",\"phase\":\"f32 prefill {PREFILL}\",\"differ\":{error:.1e}}}"));
    // Rounding gives 1e-6; each token of the 4096 whose choice is a near tie gives 0.1 / √4096 more. A few may.
    if error <= 5e-3 { Ok(()) } else { Err(format!("in f32 the two decoders differ by {error:e}").into()) }
}

fn ids(sequences: usize, tokens: usize, device: &Device) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> =
        (0..(sequences * tokens) as u32).map(|i| i.wrapping_mul(7919) % SIZES.vocabulary as u32).collect();
    Tensor::from_vec(ids, (sequences, tokens), device)
}

/// Hidden states of `ids` by candle-transformers' decoder, in as few calls as it takes.
fn theirs(model: &mut qwen3_moe::Model, ids: &Tensor) -> Result<Tensor> {
    let (sequences, tokens) = ids.dims2()?;
    if !cfg!(feature = "fused") {
        return Ok(model.forward(ids, 0)?);
    }
    let step = FUSED_MOST / sequences;
    let piece = |start: usize| -> candle_core::Result<Tensor> {
        let ids = ids.narrow(1, start, step.min(tokens - start))?.contiguous()?;
        model.forward(&ids, start)
    };
    let pieces = (0..tokens).step_by(step).map(piece).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&pieces, 1)?)
}

/// Milliseconds of a call and all the work that it enqueues.
fn time(device: &Device, call: impl FnOnce() -> Result<Tensor>) -> Result<(f64, Tensor)> {
    device.synchronize()?;
    let start = Instant::now();
    let out = call()?;
    device.synchronize()?;
    Ok((start.elapsed().as_secs_f64() * 1e3, out))
}

/// ‖a − b‖ / ‖b‖.
fn relative(a: &Tensor, b: &Tensor) -> candle_core::Result<f64> {
    let norm = |t: Tensor| t.sqr()?.sum_all()?.to_scalar::<f32>().map(f64::from);
    let (a, b) = (a.to_dtype(DType::F32)?, b.to_dtype(DType::F32)?);
    Ok((norm((a - &b)?)? / norm(b)?).sqrt())
}

/// Times of one phase, by turns, and the last outputs.
#[derive(Default)]
struct Turns {
    times: Vec<(f64, f64)>,
    errors: (f64, f64),
}

impl Turns {
    fn take(&mut self, turn: usize, ours: (f64, Tensor), theirs: (f64, Tensor), expected: &Tensor) -> Result<()> {
        if turn >= WARM_UP {
            self.times.push((ours.0, theirs.0));
        }
        self.errors = (relative(&ours.1, expected)?, relative(&theirs.1, expected)?);
        Ok(())
    }

    /// Prints a line; fails where ours is the worse decoder.
    fn report(&self, phase: &str) -> Result<()> {
        let theirs = if cfg!(feature = "fused") { "candle-transformers, fused" } else { "candle-transformers" };
        let of = |pick: &dyn Fn(&(f64, f64)) -> f64| {
            let mut values: Vec<f64> = self.times.iter().map(pick).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let (a, b, ratio) = (of(&|t| t.0), of(&|t| t.1), of(&|t| t.1 / t.0));
        let (error, their_error) = self.errors;
        say(format_args!(
            "{{\"workload\":\"{WORKLOAD}\",\"phase\":\"{phase}\",\"moebius_ms\":{a:.3},\"against\":\
             \"{theirs}\",\"their_ms\":{b:.3},\"ratio\":{ratio:.2},\"error\":{error:.1e},\"their_error\":{their_error:.1e}}}"
        ));
        match error <= 1.05 * their_error {
            true => Ok(()),
            false => Err(format!("{phase}: off by {error:e}, candle-transformers by {their_error:e}").into()),
        }
    }
}

fn prefill(d: &Decoders, device: &Device) -> Result<()> {
    let ids = ids(1, PREFILL, device)?;
    let expected = d.reference.hidden(&ids)?;
    let mut turns = Turns::default();
    for turn in 0..WARM_UP + REPEATS {
        let ours = time(device, || Ok(d.ours.hidden(&ids)?))?;
        // A clone shares the weights and starts with an empty cache, which cannot be cleared otherwise.
        let mut model = d.theirs.clone();
        let theirs = time(device, || theirs(&mut model, &ids))?;
        turns.take(turn, ours, theirs, &expected)?;
    }
    turns.report(&format!("prefill {PREFILL}"))
}

fn decode(d: &Decoders, device: &Device) -> Result<()> {
    let start = ids(SEQUENCES, CONTEXT, device)?;
    let (mut cache, mut their, mut reference): (Cache, _, Cache) =
        (d.ours.cache(), d.theirs.clone(), d.reference.cache());
    d.ours.decode_hidden(&start, &mut cache)?;
    theirs(&mut their, &start)?;
    d.reference.decode_hidden(&start, &mut reference)?;
    let next = ids(SEQUENCES, 1, device)?;
    let mut turns = Turns::default();
    for turn in 0..WARM_UP + REPEATS {
        let expected = d.reference.decode_hidden(&next, &mut reference)?;
        let ours = time(device, || Ok(d.ours.decode_hidden(&next, &mut cache)?))?;
        let theirs = time(device, || Ok(their.forward(&next, CONTEXT + turn)?))?;
        turns.take(turn, ours, theirs, &expected)?;
    }
    turns.report(&format!("decode {SEQUENCES} sequences of {CONTEXT}"))
}

fn main() -> Result<()> {
    let device = match Device::new_cuda_with_stream(0) {
        Ok(device) => device,
        Err(e) => {
            say(format_args!("skipped: no GPU ({})", e.to_string().lines().next().unwrap_or_default()));
            return Ok(());
        }
    };
    let dir = tempfile::tempdir()?;
    let decoders = load(dir.path(), &device)?;
    prefill(&decoders, &device)?;
    decode(&decoders, &device)
}
