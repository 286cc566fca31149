//! Decoding on a GPU: kernels and captured steps against forwards of whole sequences. Counts as ignored without a GPU.

mod host_experts;
#[cfg(feature = "nccl")]
#[path = "../support/lost_rank.rs"]
mod lost_rank;
#[cfg(feature = "nccl")]
mod over_gpus;
mod steps;

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

use host_experts::{experts_on_host, highest_reserved, memory_of_experts_on_host};
#[cfg(feature = "nccl")]
use over_gpus::two_gpus;
use steps::{Case, captured_again, greedy, resized, steps, texts};

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
