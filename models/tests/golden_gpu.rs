//! The decoders on a GPU against what Hugging Face transformers computed: every folder of `golden.rs`, by one rank. Counts
//! as ignored without a GPU.

#[path = "support/checks.rs"]
mod checks;
mod support;

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use libtest_mimic::{Arguments, Trial};
use moebius::candle::{DeviceGroup, Parameters};
use moebius::checkpoint::{Checkpoint, LoadOptions as BlockOptions};
use moebius_models::{Error, ExpertWeights, LoadOptions, Model};

use checks::{
    block_gradient_errors, block_gradients, can_step, choices, decoding, replicated_gradient_errors,
    replicated_gradients, resizing, sorted, stepping,
};
use support::{BF16, F32_ELSEWHERE, Golden, Rotation, relative, say, scalar};

/// f32: sums as on a CPU ([`support::F32`]) in yet another order, exponentials and roots by approximations of 2 units of
/// the last place, 2.4e-7, some ten of which a token passes through: four times a CPU's.
const F32: f64 = F32_ELSEWHERE;
/// Gradients go through the same chain twice and sum over tokens, as on a CPU: four times a forward's.
const F32_GRADIENT: f64 = 4.0 * F32;

fn tolerance(golden: &Golden) -> f64 {
    if golden.bf16 { BF16 } else { F32 }
}

fn gradient_tolerance(golden: &Golden) -> f64 {
    if golden.bf16 { BF16 } else { F32_GRADIENT }
}

/// One device without capture and one with.
struct Devices {
    plain: Device,
    capturing: Device,
}

fn load(golden: &Golden, device: &Device, options: LoadOptions) -> Model {
    let block = golden.checkpoint.block_config(golden.layer()).expect("a block");
    let group = DeviceGroup::single(&block, device).expect("a group");
    Model::load_on(&golden.checkpoint, group, options).unwrap_or_else(|e| panic!("{}: {e}", golden.name))
}

/// Fails with all of the errors beyond `tolerance`, and prints the worst.
fn hold(golden: &Golden, what: &str, errors: &[(String, f64)], tolerance: f64) {
    let wrong: Vec<_> = errors.iter().filter(|(_, error)| error.is_nan() || *error > tolerance).collect();
    let worst = errors.iter().map(|(_, error)| *error).fold(0.0, f64::max);
    say(&format!("{:26} {what} {worst:.1e}", golden.name));
    assert!(wrong.is_empty(), "{}, {what}: {wrong:?} > {tolerance:.0e}", golden.name);
}

/// Errors of logits and mean loss of all sequences.
fn forward_errors(golden: &Golden, model: &Model) -> Vec<(String, f64)> {
    let logits = relative(&model.forward(golden.ids()).expect("logits"), &golden.tensors["logits"]);
    let loss = model.loss(golden.ids()).expect("a loss");
    let expected = scalar(&golden.tensors["loss"]);
    let loss = (scalar(&loss.sum) / loss.count as f64 - expected).abs() / expected;
    vec![("logits".to_string(), logits), ("loss".to_string(), loss)]
}

/// Inference has fused operations, training has others.
fn logits_and_loss(golden: &Golden, device: &Device) {
    let model = load(golden, device, golden.options());
    let mut errors = forward_errors(golden, &model);
    if let Some(expected) = golden.tensors.get("topk_ids") {
        assert_eq!(choices(golden, &model), sorted(expected), "{}: other choices", golden.name);
    }
    let trainable = LoadOptions { parameters: Parameters::Trainable, ..golden.options() };
    let by_training = forward_errors(golden, &load(golden, device, trainable));
    errors.extend(by_training.into_iter().map(|(name, error)| (format!("{name} of a trainable model"), error)));
    hold(golden, "logits and loss", &errors, tolerance(golden));
}

fn decode(golden: &Golden, device: &Device) {
    let model = load(golden, device, golden.options());
    decoding(golden, &model, &golden.row(0), tolerance(golden));
    // A batch of all sequences.
    decoding(golden, &model, golden.ids(), tolerance(golden));
}

/// Steps over a static cache, one operation after another.
fn steps(golden: &Golden, devices: &Devices) {
    let model = load(golden, &devices.plain, golden.options());
    assert_eq!(stepping(golden, &model, &golden.row(0), tolerance(golden)), 0, "captured where nothing can be");
    resizing(golden, &model, tolerance(golden), false);
}

/// The same, replayed.
fn captured_steps(golden: &Golden, devices: &Devices) {
    let model = load(golden, &devices.capturing, golden.options());
    assert_eq!(stepping(golden, &model, &golden.row(0), tolerance(golden)), 2, "{}: not captured", golden.name);
    resizing(golden, &model, tolerance(golden), true);
}

fn gradients(golden: &Golden, device: &Device) {
    let options = LoadOptions { parameters: Parameters::Trainable, ..golden.options() };
    let model = load(golden, device, options);
    let mut errors = replicated_gradient_errors(golden, &[replicated_gradients(golden, &model, golden.ids())]);
    if golden.tensors.contains_key("grad_moe_output") {
        let block = block_gradients(golden, &model, golden.ids()).expect("gradients");
        errors.extend(block_gradient_errors(golden, &[block]));
    }
    hold(golden, "gradients", &errors, gradient_tolerance(golden));
}

/// In 16 bits a token may choose another expert than in f32, so logits have no common bound there: as on a CPU.
fn in_16_bits(golden: &Golden, device: &Device) {
    for dtype in [DType::BF16, DType::F16] {
        let model = load(golden, device, LoadOptions { dtype: Some(dtype), ..LoadOptions::default() });
        let logits = model.forward(golden.ids()).expect("logits");
        assert_eq!(logits.dtype(), dtype);
        let error = relative(&logits, &golden.tensors["logits"]);
        say(&format!("{:26} logits in {dtype:?} {error:.1e}", golden.name));
        assert!(golden.elsewhere || error < 0.5, "{} in {dtype:?}: logits differ by {error:e}", golden.name);
    }
}

/// Experts that are multiplied as they are stored.
fn as_stored(golden: &Golden, devices: &Devices) {
    let options = LoadOptions { experts: ExpertWeights::AsStored, ..golden.options() };
    let model = load(golden, &devices.capturing, options);
    assert!(model.moe(golden.layer()).expect("experts").quantized().is_some(), "{}", golden.name);
    hold(golden, "experts as stored", &forward_errors(golden, &model), tolerance(golden));
    if can_step(golden) {
        assert_eq!(stepping(golden, &model, &golden.row(0), tolerance(golden)), 2, "{}: not captured", golden.name);
    }
}

/// The experts' kernels have no f64, which is told as a model is loaded: where it is asked for, and where the first
/// forward would find it.
fn f64_is_refused(devices: &Devices) {
    let golden = Golden::named("qwen3_moe");
    let block = golden.checkpoint.block_config(golden.layer()).expect("a block");
    let refused = |checkpoint: &Checkpoint, options, what: &str| {
        let group = DeviceGroup::single(&block, &devices.plain).expect("a group");
        let error = Model::load_on(checkpoint, group, options).expect_err(what);
        let named = matches!(&error, Error::Usage { problem, .. } if problem.contains(what) && problem.contains("f64"));
        assert!(named, "{what}: {error:?}");
    };
    let wide = LoadOptions { dtype: Some(DType::F64), ..LoadOptions::default() };
    refused(&golden.checkpoint, wide, "option dtype");
    refused(&golden.checkpoint, LoadOptions { random: Some(1), ..wide }, "option dtype");
    let dir = tempfile::tempdir().expect("a folder");
    let from = golden.checkpoint.dir();
    let weights = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).expect("weights");
    let in_f64 = |part: &str| -> HashMap<String, Tensor> {
        let dtype = |name: &str, t: &Tensor| if name.contains(part) { DType::F64 } else { t.dtype() };
        weights.iter().map(|(name, t)| (name.clone(), t.to_dtype(dtype(name, t)).expect("a type"))).collect()
    };
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).expect("a config");
    for (part, what) in [("", "model.embed_tokens.weight"), (".mlp.", "experts of layer 0")] {
        candle_core::safetensors::save(&in_f64(part), dir.path().join("model.safetensors")).expect("weights");
        let checkpoint = Checkpoint::open(dir.path()).expect("a checkpoint");
        refused(&checkpoint, LoadOptions::default(), what);
        let group = DeviceGroup::single(&block, &devices.plain).expect("a group");
        let model = Model::load_on(&checkpoint, group, golden.options()).expect("f32 of f64");
        hold(&golden, "logits of weights in f64", &forward_errors(&golden, &model), tolerance(&golden));
    }
}

/// Whether a folder's experts are in a form that products read.
fn keeps_quantized(golden: &Golden) -> bool {
    let form = golden.checkpoint.block_form(golden.layer()).expect("a form");
    let one = BlockOptions { rank: 0, ranks: 1, dtype: None };
    form.is_quantized() && golden.checkpoint.load_quantized(golden.layer(), one).is_ok()
}

fn has_gradients(golden: &Golden) -> bool {
    golden.tensors.keys().any(|name| name == "grad_moe_output" || name.starts_with("whole_grad."))
}

type Check = fn(&Golden, &Devices);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let found = || {
        let capturing = moebius::candle::device_for_capture(0)?;
        Ok(Devices { plain: Device::new_cuda_with_stream(0)?, capturing })
    };
    let devices: candle_core::Result<Devices> = found();
    if let (Err(e), Some(_)) = (&devices, std::env::var_os("MOEBIUS_NEEDS_GPU")) {
        eprintln!("{e}");
        return ExitCode::FAILURE;
    }
    let devices = devices.ok().map(Arc::new);
    let mut trials = Vec::new();
    for golden in Golden::all() {
        let golden = Arc::new(golden);
        let steps_of: [(bool, &str, Check); 2] =
            [(can_step(&golden), "steps", steps), (can_step(&golden), "captured steps", captured_steps)];
        let others: [(bool, &str, Check); 5] = [
            (true, "logits and loss", |golden, devices| logits_and_loss(golden, &devices.plain)),
            (golden.rotation() != Rotation::OfEveryLength, "decoding", |golden, devices| {
                decode(golden, &devices.plain)
            }),
            (has_gradients(&golden), "gradients", |golden, devices| gradients(golden, &devices.plain)),
            (true, "16 bits", |golden, devices| in_16_bits(golden, &devices.plain)),
            (keeps_quantized(&golden), "experts as stored", as_stored),
        ];
        for (_, name, check) in steps_of.into_iter().chain(others).filter(|(fits, ..)| *fits) {
            let (golden, devices, there) = (golden.clone(), devices.clone(), devices.is_some());
            let title = format!("{}: {name}", golden.name);
            let run = move || {
                let devices = devices.ok_or("no GPU")?;
                check(&golden, &devices);
                Ok(())
            };
            trials.push(Trial::test(title, run).with_ignored_flag(!there));
        }
    }
    let (there, one) = (devices.is_some(), devices.clone());
    let run = move || {
        f64_is_refused(&*one.ok_or("no GPU")?);
        Ok(())
    };
    trials.push(Trial::test("f64 is refused", run).with_ignored_flag(!there));
    // One at a time: a capture ends where another thread works on the same GPU.
    libtest_mimic::run(&Arguments { test_threads: Some(1), ..arguments }, trials).exit_code()
}
