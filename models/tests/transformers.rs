//! Structures that the golden checkpoints lack, against candle-transformers: dense layers between those with experts,
//! biases in attention, tied embeddings, sequences of more than one block of queries.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe;
use moebius::candle::{DeviceGroup, Parameters};
use moebius::checkpoint::Checkpoint;
use moebius::ep::GroupConfig;
use moebius_models::{LoadOptions, Model};
use serde_json::{Value, json};

#[path = "support/seed.rs"]
mod seed;

const HIDDEN: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const INNER: usize = 24;
const EXPERTS: usize = 4;
const DENSE_INNER: usize = 40;
const VOCABULARY: usize = 50;
const LAYERS: usize = 3;
const TOKENS: usize = 150;

/// f32, three layers; sums of at most 150 terms in other orders: as in the golden test.
const TOLERANCE: f64 = 2e-6;

/// Layers 0 and 2 are dense.
fn config(tied: bool) -> Value {
    json!({
        "model_type": "qwen3_moe", "torch_dtype": "float32", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": DENSE_INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM, "attention_bias": true, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256, "sliding_window": null, "max_window_layers": LAYERS,
        "tie_word_embeddings": tied, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "use_sliding_window": false,
        "hidden_act": "silu", "decoder_sparse_step": 2, "mlp_only_layers": [], "moe_intermediate_size": INNER,
        "num_experts_per_tok": 2, "num_experts": EXPERTS, "norm_topk_prob": true
    })
}

/// Values from a seeded sequence, well spread.
struct Weights(HashMap<String, Tensor>, u32);

impl Weights {
    fn add(&mut self, name: &str, dims: &[usize], scale: f32) -> Result<()> {
        let next = || {
            // Numerical Recipes' linear congruential generator; its upper bits are good enough here.
            self.1 = self.1.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((self.1 >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
        };
        let values: Vec<f32> = std::iter::repeat_with(next).take(dims.iter().product()).collect();
        self.0.insert(name.into(), Tensor::from_vec(values, dims, &Device::Cpu)?);
        Ok(())
    }

    fn linear(&mut self, prefix: &str, out: usize, inputs: usize, bias: bool) -> Result<()> {
        self.add(&format!("{prefix}.weight"), &[out, inputs], (3.0 / inputs as f32).sqrt())?;
        if bias { self.add(&format!("{prefix}.bias"), &[out], 0.5) } else { Ok(()) }
    }

    fn mlp(&mut self, prefix: &str, inner: usize) -> Result<()> {
        self.linear(&format!("{prefix}.gate_proj"), inner, HIDDEN, false)?;
        self.linear(&format!("{prefix}.up_proj"), inner, HIDDEN, false)?;
        self.linear(&format!("{prefix}.down_proj"), HIDDEN, inner, false)
    }
}

fn weights(tied: bool) -> Result<HashMap<String, Tensor>> {
    let mut w = Weights(HashMap::new(), seed::seed(1) as u32);
    w.add("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], 1.0)?;
    w.add("model.norm.weight", &[HIDDEN], 1.0)?;
    if !tied {
        w.linear("lm_head", VOCABULARY, HIDDEN, false)?;
    }
    for l in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{l}.{part}");
        w.add(&name("input_layernorm.weight"), &[HIDDEN], 1.0)?;
        w.add(&name("post_attention_layernorm.weight"), &[HIDDEN], 1.0)?;
        w.add(&name("self_attn.q_norm.weight"), &[HEAD_DIM], 1.0)?;
        w.add(&name("self_attn.k_norm.weight"), &[HEAD_DIM], 1.0)?;
        w.linear(&name("self_attn.q_proj"), HEADS * HEAD_DIM, HIDDEN, true)?;
        w.linear(&name("self_attn.k_proj"), KV_HEADS * HEAD_DIM, HIDDEN, true)?;
        w.linear(&name("self_attn.v_proj"), KV_HEADS * HEAD_DIM, HIDDEN, true)?;
        w.linear(&name("self_attn.o_proj"), HIDDEN, HEADS * HEAD_DIM, true)?;
        if l == 1 {
            w.linear(&name("mlp.gate"), EXPERTS, HIDDEN, false)?;
            for e in 0..EXPERTS {
                w.mlp(&name(&format!("mlp.experts.{e}")), INNER)?;
            }
        } else {
            w.mlp(&name("mlp"), DENSE_INNER)?;
        }
    }
    Ok(w.0)
}

fn ours(dir: &Path, device: &Device, options: LoadOptions) -> Model {
    let group = DeviceGroup::single(GroupConfig::new(EXPERTS, TOKENS), device).expect("a group");
    Model::load_on(&Checkpoint::open(dir).expect("a checkpoint"), &group, options).expect("a model")
}

fn train() -> LoadOptions {
    LoadOptions { parameters: Parameters::Trainable, ..LoadOptions::default() }
}

/// Writes a checkpoint.
fn write(dir: &Path, tied: bool) -> Result<HashMap<String, Tensor>> {
    let weights = weights(tied)?;
    std::fs::write(dir.join("config.json"), config(tied).to_string())?;
    candle_core::safetensors::save(&weights, dir.join("model.safetensors"))?;
    Ok(weights)
}

fn ids(device: &Device) -> Result<Tensor> {
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * i % VOCABULARY as u32).collect();
    Tensor::from_vec(ids, (1, TOKENS), device)
}

/// Logits of the whole sequence, given in two pieces: blocks of queries begin elsewhere.
fn pieces(model: &Model, ids: &Tensor) -> Tensor {
    let mut cache = model.cache();
    let part = |start: usize, len: usize| ids.narrow(1, start, len).expect("tokens");
    let first = model.decode(&part(0, 70), &mut cache).expect("logits");
    let second = model.decode(&part(70, TOKENS - 70), &mut cache).expect("logits");
    Tensor::cat(&[first, second], 1).expect("logits")
}

fn relative(a: &Tensor, b: &Tensor) -> Result<f64> {
    let norm = |t: &Tensor| t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt);
    Ok(norm(&(a - b)?)? / norm(b)?)
}

#[test]
fn last_logits_equal_those_of_candle_transformers() -> Result<()> {
    for tied in [false, true] {
        let dir = tempfile::tempdir()?;
        let weights = write(dir.path(), tied)?;
        let config: qwen3_moe::Config = serde_json::from_value(config(tied)).expect("their config");
        let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let mut theirs = qwen3_moe::ModelForCausalLM::new(&config, vb)?;
        let ids = ids(&Device::Cpu)?;
        let expected = theirs.forward(&ids, 0)?;

        let on = |options| ours(dir.path(), &Device::Cpu, options);
        let (inference, training) = (on(LoadOptions::default()), on(train()));
        assert!(inference.moe(0).is_none() && inference.moe(1).is_some() && inference.moe(2).is_none());
        let last = |logits: Tensor| logits.narrow(1, logits.dim(1)? - 1, 1);
        for (how, logits) in [
            ("inference", inference.forward(&ids).expect("logits")),
            ("training", training.forward(&ids).expect("logits")),
            ("pieces", pieces(&inference, &ids)),
        ] {
            let error = relative(&last(logits)?, &expected)?;
            println!("tied {tied}, {how}: {error:.1e}");
            assert!(error <= TOLERANCE, "tied {tied}, {how}: logits differ by {error:e}");
        }
    }
    Ok(())
}

/// The decoder on a GPU against the decoder on the CPU: logits, and gradients where it trains.
#[cfg(feature = "cuda")]
#[test]
fn a_gpu_gives_what_the_cpu_gives() -> Result<()> {
    let device = match Device::new_cuda_with_stream(0) {
        Ok(device) => device,
        Err(e) => {
            println!("skipped: no GPU ({e})");
            assert!(std::env::var_os("MOEBIUS_NEEDS_GPU").is_none(), "{e}");
            return Ok(());
        }
    };
    let dir = tempfile::tempdir()?;
    write(dir.path(), false)?;
    let host = |t: Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
    // f32 sums in another order: 1e-5. bf16: three layers of some ten roundings of 2^-9 each, which add up by their
    // squares: 2^-9 * sqrt(30).
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 1.1e-2)] {
        let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
        let expected = host(ours(dir.path(), &Device::Cpu, options).forward(&ids(&Device::Cpu)?).expect("logits"))?;
        let model = ours(dir.path(), &device, options);
        let ids = ids(&device)?;
        for (how, logits) in [("whole", model.forward(&ids).expect("logits")), ("pieces", pieces(&model, &ids))] {
            let error = relative(&host(logits)?, &expected)?;
            println!("{dtype:?}, {how}: {error:.1e}");
            assert!(error <= bound, "{dtype:?}, {how}: logits differ by {error:e}");
        }
    }
    let gradients = |device: &Device| -> Result<Vec<(String, Tensor)>> {
        let model = ours(dir.path(), device, train());
        let logits = model.forward(&ids(device)?).expect("logits");
        let gradients = logits.sqr()?.mean_all()?.backward()?;
        let moe = model.moe(1).expect("experts");
        let own = model.vars().iter().map(|(name, var)| (name.clone(), var.as_tensor()));
        let all = own.chain(moe.params().into_iter().map(|(name, t)| (name.to_string(), t)));
        all.map(|(name, t)| Ok((name, host(gradients.get(t).expect("a gradient").clone())?))).collect()
    };
    for ((name, expected), (_, found)) in gradients(&Device::Cpu)?.iter().zip(gradients(&device)?) {
        // A key's bias shifts all scores of a query alike, which softmax undoes: its gradient is rounding alone.
        if name.ends_with("k_proj.bias") {
            continue;
        }
        let error = relative(&found, expected)?;
        assert!(error <= 5e-5, "gradient of {name} differs by {error:e}");
    }
    Ok(())
}
