//! Memory of a step by the length of its sequences, counted at the allocator.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use moebius::candle::Parameters;
use moebius_models::{LoadOptions, Model};

#[path = "support/counting_allocator.rs"]
mod counting_allocator;

use counting_allocator::most_bytes;

/// What is allocated is counted for the process: one test at a time.
static COUNTED: Mutex<()> = Mutex::new(());

/// A checkpoint of the repository of other sizes.
fn with_sizes(name: &str, sizes: &[(&str, usize)], to: &Path) {
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("weights");
    let config = std::fs::read(from.join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    for (key, size) in sizes {
        config[*key] = (*size).into();
    }
    std::fs::write(to.join("config.json"), config.to_string()).expect("a config");
}

/// Most bytes of a forward and backward of one sequence beside the model's.
fn of_step(model: &Model, tokens: usize) -> usize {
    let ids: Vec<u32> = (0..tokens as u32).map(|t| t * 31 % 97).collect();
    let ids = Tensor::from_vec(ids, (1, tokens), &Device::Cpu).expect("ids");
    let step = || {
        let loss = model.loss(&ids).expect("a loss").mean().expect("a mean");
        drop(loss.backward().expect("gradients"));
    };
    most_bytes(step).1
}

/// No matrix of all scores: twice the tokens take twice the memory, where scores would take four times as much. Half as much
/// again is room for what lists and pools grow by.
#[test]
fn memory_of_a_step_grows_as_its_tokens() {
    let _one = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    with_sizes("qwen3_moe", &[("max_position_embeddings", 4096)], folder.path());
    let options = LoadOptions { parameters: Parameters::Trainable, ..LoadOptions::default() };
    let model = Model::load(folder.path(), &Device::Cpu, options).expect("a model");
    of_step(&model, 64);
    let [short, long] = [2048, 4096].map(|tokens| of_step(&model, tokens));
    println!("Most bytes of a step: {short} for 2048 tokens, {long} for 4096");
    assert!(2 * long <= 5 * short, "{short} and {long}");
    // Scores of one layer's four heads alone.
    assert!(long < 4 * 4096 * 4096 * size_of::<f32>(), "{long}");
}

/// No logits of all tokens: a step takes less than three quarters of these alone, of a vocabulary beside which the rest of
/// the model is small. A block of 512 tokens has an eighth of them.
#[test]
fn a_step_never_has_the_logits_of_all_tokens() {
    const TOKENS: usize = 4096;
    const VOCABULARY: usize = 32768;
    let _one = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    with_sizes("qwen3_moe", &[("max_position_embeddings", TOKENS), ("vocab_size", VOCABULARY)], folder.path());
    let parameters = Parameters::Trainable;
    let options = LoadOptions { parameters, random: Some(1), dtype: Some(DType::F32), ..LoadOptions::default() };
    let model = Model::load(folder.path(), &Device::Cpu, options).expect("a model");
    assert_eq!(model.vocabulary(), VOCABULARY);
    of_step(&model, 64);
    let (most, logits) = (of_step(&model, TOKENS), TOKENS * VOCABULARY * size_of::<f32>());
    println!("Most bytes of a step: {most}, of which all logits would be {logits}");
    assert!(4 * most < 3 * logits, "{most} bytes, of which all logits would be {logits}");
}
