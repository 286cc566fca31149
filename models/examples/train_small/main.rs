//! Trains the small model that `generate` runs without arguments: a tokenizer, and a decoder of the Qwen3-MoE family,
//! from texts. A folder that holds something is refused before any work, unless `--force` is given.
//!
//! ```text
//! cargo run --release -p moebius-models --example train_small -- --out small docs/*.md README.md
//! ```

#[path = "../support/output.rs"]
mod output;
mod prose;

use std::collections::HashSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::optim::Optimizer;
use clap::Parser;
use moebius::candle::{AdamW, AdamWParam, MainGradients, Parameters};
use moebius::checkpoint::{Checkpoint, RankModel, RankPart, RankTensor, SaveOptions};
use moebius::comm::Solo;
use moebius::cpu::Cpu;
use moebius::optim::{AdamWOptions, GroupOptions, ParamShard};
use moebius_models::{LoadOptions, Model};
use output::{conclude, refuse_full_folder, say};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, PostProcessorWrapper, TokenizerBuilder, TokenizerImpl};

type AnyError = Box<dyn Error + Send + Sync>;
type ByteTokenizer = TokenizerImpl<BPE, NormalizerWrapper, ByteLevel, PostProcessorWrapper, ByteLevel>;

/// The token behind each text.
const END: &str = "<|end|>";
const HIDDEN: usize = 160;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const HEAD: usize = 32;
const EXPERTS: usize = 8;
const INTERMEDIATE: usize = 64;
const CONTEXT: usize = 256;

/// Trains a small tokenizer and model from texts, and leaves them as a folder that `generate` takes.
#[derive(Debug, Parser)]
struct Options {
    /// Texts to train on
    #[arg(required = true)]
    texts: Vec<PathBuf>,
    /// Folder for the model; made if it is not there
    #[arg(long)]
    out: PathBuf,
    /// Write into a folder that holds something; files of the model's names are replaced, other files stay
    #[arg(short, long)]
    force: bool,
    /// Training steps
    #[arg(long, default_value_t = 2500)]
    steps: usize,
    /// Sequences of a step
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Tokens that the tokenizer knows
    #[arg(long, default_value_t = 2048)]
    vocabulary: usize,
    /// Largest learning rate, after the first twentieth of the steps
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    /// Seed of the first weights and of the batches
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    conclude(run(&Options::parse()).map(|()| true))
}

fn run(options: &Options) -> Result<(), AnyError> {
    refuse_full_folder(&options.out, options.force)?;
    // Every 25th paragraph is held out: what the model never sees tells learning from memory.
    let (mut texts, mut held_out, mut seen, mut count) = (Vec::new(), Vec::new(), HashSet::new(), 0);
    for path in &options.texts {
        let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let (mut kept, mut apart) = (String::new(), String::new());
        for paragraph in prose::paragraphs(path, &text, &mut seen) {
            count += 1;
            let place = if count % 25 == 0 { &mut apart } else { &mut kept };
            place.push_str(&paragraph);
            place.push('\n');
        }
        texts.push(kept);
        held_out.push(apart);
    }
    texts.retain(|text| !text.is_empty());
    held_out.retain(|text| !text.is_empty());
    fs::create_dir_all(&options.out).map_err(|error| format!("{}: {error}", options.out.display()))?;
    let tokenizer = tokenizer(options, &texts)?;
    let encode = |texts: &[String]| -> Result<Vec<u32>, AnyError> {
        let mut ids = Vec::new();
        for text in texts {
            ids.extend_from_slice(tokenizer.encode(format!("{text}{END}"), false)?.get_ids());
        }
        Ok(ids)
    };
    let (ids, held_out) = (encode(&texts)?, encode(&held_out)?);
    let bytes = texts.iter().map(String::len).sum::<usize>();
    say(format_args!("{bytes} bytes of text, {} tokens; held out {} tokens", ids.len(), held_out.len()));
    if ids.len() <= options.length {
        return Err(format!("expected a text of more than {} tokens", options.length).into());
    }
    let first = tempfile::tempdir()?;
    initialize(options, first.path())?;
    let checkpoint = Checkpoint::open(first.path())?;
    let load = LoadOptions { dtype: Some(DType::F32), parameters: Parameters::Trainable, ..LoadOptions::default() };
    let model = Model::load(first.path(), &Device::Cpu, load)?;
    train(options, &model, &ids, &held_out)?;
    let trained = tempfile::tempdir()?;
    save(&model, &checkpoint, trained.path())?;
    // The folder is written at the end: a training that is broken off leaves it as it was.
    tokenizer.save(options.out.join("tokenizer.json"), false)?;
    halve(trained.path(), &options.out)
}

/// Trains a byte-level tokenizer.
fn tokenizer(options: &Options, texts: &[String]) -> Result<ByteTokenizer, AnyError> {
    let end = AddedToken::from(END, true);
    let mut trainer = BpeTrainer::builder()
        .vocab_size(options.vocabulary)
        .show_progress(false)
        .special_tokens(vec![end])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let level = ByteLevel::new(false, false, true);
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(Some(level))
        .with_post_processor(None)
        .with_decoder(Some(level))
        .build()?;
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str))?;
    Ok(tokenizer)
}

/// Writes a checkpoint of first weights.
fn initialize(options: &Options, dir: &Path) -> Result<(), AnyError> {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "float32",
        "vocab_size": options.vocabulary, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": INTERMEDIATE, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": true, "attention_bias": false, "use_sliding_window": false, "eos_token_id": 0,
    });
    fs::write(dir.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let mut rng = StdRng::seed_from_u64(options.seed);
    let mut tensors = std::collections::HashMap::new();
    let mut add = |name: String, dims: &[usize], deviation: f64| -> Result<(), AnyError> {
        let count = dims.iter().product::<usize>();
        let values = (0..count).map(|_| (StandardNormal.sample(&mut rng), deviation));
        let values: Vec<f32> = values.map(|(x, deviation): (f64, f64)| (x * deviation) as f32).collect();
        let values = if deviation == 0.0 { vec![1.0; count] } else { values };
        tensors.insert(name, Tensor::from_vec(values, dims, &Device::Cpu)?);
        Ok(())
    };
    // Of unit variance through each product; what a branch adds to the stream is smaller by the number of branches.
    let of = |fan_in: usize| (fan_in as f64).powf(-0.5);
    let branch = |fan_in: usize| of(fan_in) * (2.0 * LAYERS as f64).powf(-0.5);
    add("model.embed_tokens.weight".into(), &[options.vocabulary, HIDDEN], 0.02)?;
    add("model.norm.weight".into(), &[HIDDEN], 0.0)?;
    for layer in 0..LAYERS {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let (queries, keys) = (HEADS * HEAD, KEY_HEADS * HEAD);
        add(name("input_layernorm"), &[HIDDEN], 0.0)?;
        add(name("post_attention_layernorm"), &[HIDDEN], 0.0)?;
        add(name("self_attn.q_proj"), &[queries, HIDDEN], of(HIDDEN))?;
        add(name("self_attn.k_proj"), &[keys, HIDDEN], of(HIDDEN))?;
        add(name("self_attn.v_proj"), &[keys, HIDDEN], of(HIDDEN))?;
        add(name("self_attn.o_proj"), &[HIDDEN, queries], branch(queries))?;
        add(name("self_attn.q_norm"), &[HEAD], 0.0)?;
        add(name("self_attn.k_norm"), &[HEAD], 0.0)?;
        add(name("mlp.gate"), &[EXPERTS, HIDDEN], of(HIDDEN))?;
        for expert in 0..EXPERTS {
            let name = |part: &str| name(&format!("mlp.experts.{expert}.{part}_proj"));
            add(name("gate"), &[INTERMEDIATE, HIDDEN], of(HIDDEN))?;
            add(name("up"), &[INTERMEDIATE, HIDDEN], of(HIDDEN))?;
            add(name("down"), &[HIDDEN, INTERMEDIATE], branch(INTERMEDIATE))?;
        }
    }
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors"))?;
    Ok(())
}

fn train(options: &Options, model: &Model, ids: &[u32], held_out: &[u32]) -> Result<(), AnyError> {
    let mut params: Vec<_> = model.vars().iter().map(|(name, var)| AdamWParam::new(name.clone(), var)).collect();
    for layer in 0..model.num_layers() {
        if let Some(moe) = model.moe(layer) {
            params.extend(moe.optimizer_params(&format!("model.layers.{layer}.mlp"))?);
        }
    }
    let group = GroupOptions { lr: options.learning_rate, weight_decay: 0.1, ..Default::default() };
    let adam = AdamWOptions { group, max_norm: Some(1.0), ..Default::default() };
    let mut adam = AdamW::with_groups(params, adam, &[group])?;
    let mut gradients = MainGradients::new();
    let mut rng = StdRng::seed_from_u64(options.seed + 1);
    let (start, mut mean) = (Instant::now(), 0.0);
    for step in 0..options.steps {
        let mut batch = Vec::with_capacity(options.batch * options.length);
        for _ in 0..options.batch {
            let from = rng.random_range(0..ids.len() - options.length);
            batch.extend_from_slice(&ids[from..from + options.length]);
        }
        let batch = Tensor::from_vec(batch, (options.batch, options.length), &Device::Cpu)?;
        let loss = model.loss(&batch)?.mean()?;
        gradients.backward(&loss)?;
        // Up in the first twentieth, then down to a twentieth by a cosine.
        let part = (step + 1) as f64 / options.steps as f64;
        let down = 0.525 + 0.475 * (std::f64::consts::PI * part).cos();
        adam.set_learning_rate(options.learning_rate * down * (part * 20.0).min(1.0));
        adam.step(gradients.store())?;
        gradients.reset();
        let loss = f64::from(loss.to_scalar::<f32>()?);
        mean = if step == 0 { loss } else { 0.98 * mean + 0.02 * loss };
        if (step + 1) % 100 == 0 {
            say(format_args!("step {}: loss {mean:.3} nats a token, {:.0} s", step + 1, start.elapsed().as_secs_f64()));
        }
        let shown = (step + 1) % 250 == 0 || step + 1 == options.steps;
        if shown && held_out.len() > options.length {
            say(format_args!("step {}: held out {:.3}", step + 1, mean_loss(options, model, held_out)?));
        }
    }
    Ok(())
}

/// The mean loss of a text in sequences of the length trained with; a rest is left out.
fn mean_loss(options: &Options, model: &Model, ids: &[u32]) -> Result<f64, AnyError> {
    let (mut sum, mut count) = (0.0, 0);
    for sequence in ids.chunks_exact(options.length) {
        let loss = model.loss(&Tensor::from_slice(sequence, (1, options.length), &Device::Cpu)?)?;
        sum += f64::from(loss.sum.to_scalar::<f32>()?);
        count += loss.count;
    }
    Ok(sum / count.max(1) as f64)
}

/// Writes the model as a checkpoint of f32.
fn save(model: &Model, checkpoint: &Checkpoint, dir: &Path) -> Result<(), AnyError> {
    let blocks = (0..model.num_layers()).filter_map(|layer| model.moe(layer).map(|moe| moe.to_parts()));
    let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
    let tensors = model.vars().iter().map(|(name, var)| -> Result<RankTensor<'static>, AnyError> {
        let values: Vec<u8> = var.flatten_all()?.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect();
        let read = move |range: std::ops::Range<usize>| Ok(values[range.start * 4..range.end * 4].to_vec());
        let part = RankPart::new(moebius::DType::F32, ParamShard::whole(var.dims()), read);
        Ok(RankTensor { name: name.clone(), dims: var.dims().to_vec(), part })
    });
    let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    let model = RankModel { blocks: &blocks, tensors: &tensors };
    let cpu = Cpu::new();
    checkpoint.save_parts(dir, model, &cpu, &mut Solo::new(cpu), SaveOptions::default())?;
    Ok(())
}

/// Writes a checkpoint in bf16.
fn halve(from: &Path, to: &Path) -> Result<(), AnyError> {
    let tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu)?;
    let tensors = tensors.into_iter().map(|(name, t)| Ok((name, t.to_dtype(DType::BF16)?)));
    let tensors = tensors.collect::<Result<std::collections::HashMap<_, _>, AnyError>>()?;
    candle_core::safetensors::save(&tensors, to.join("model.safetensors"))?;
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(from.join("config.json"))?)?;
    config["dtype"] = "bfloat16".into();
    fs::write(to.join("config.json"), serde_json::to_string_pretty(&config)?)?;
    let settings = json!({"eos_token": END, "clean_up_tokenization_spaces": false});
    fs::write(to.join("tokenizer_config.json"), serde_json::to_string_pretty(&settings)?)?;
    let sampling = json!({"do_sample": true, "temperature": 0.5, "top_p": 0.9, "eos_token_id": 0});
    fs::write(to.join("generation_config.json"), serde_json::to_string_pretty(&sampling)?)?;
    Ok(())
}
