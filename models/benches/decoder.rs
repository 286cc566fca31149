//! The one-layer Qwen3-MoE decoder's forward against candle-transformers' on the same weights.

#[path = "support/checkpoint.rs"]
mod checkpoint;
#[path = "../examples/support/output.rs"]
mod output;
#[path = "support/pair.rs"]
mod pair;

use std::error::Error;
use std::hint::black_box;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::qwen3_moe;
use criterion::Criterion;
use moebius::candle::EpGroup;
use moebius::checkpoint::Checkpoint;
use moebius::ep::GroupConfig;
use moebius_models::{LoadOptions, Model};

use checkpoint::Sizes;
use output::say;
use pair::{Case, Subject, compare};

const TOKENS: usize = 2048;
const HIDDEN: usize = 1024;
const INNER: usize = 512;
const EXPERTS: usize = 32;
const TOP_K: usize = 4;
const HEADS: usize = 16;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const VOCABULARY: usize = 1024;
const SIZES: Sizes = Sizes {
    layers: 1,
    hidden: HIDDEN,
    inner: INNER,
    experts: EXPERTS,
    top_k: TOP_K,
    heads: HEADS,
    kv_heads: KV_HEADS,
    head_dim: HEAD_DIM,
    vocabulary: VOCABULARY,
    positions: TOKENS,
};

/// Experts' three products, attention's four projections, and its two products under the diagonal.
const FLOPS: f64 = (2 * TOKENS * TOP_K * 3 * HIDDEN * INNER
    + 2 * TOKENS * HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    + 2 * TOKENS * TOKENS * HEADS * HEAD_DIM) as f64;

fn load(dir: &Path) -> Result<(Model, qwen3_moe::Model), Box<dyn Error>> {
    let (weights, config) = (SIZES.weights(DType::F32, &Device::Cpu)?, SIZES.config(DType::F32));
    std::fs::write(dir.join("config.json"), config.to_string())?;
    candle_core::safetensors::save(&weights, dir.join("model.safetensors"))?;
    let group = EpGroup::single(GroupConfig::new(EXPERTS, TOKENS))?;
    let ours = Model::load_on(&Checkpoint::open(dir)?, &group, LoadOptions::default())?;
    let config: qwen3_moe::Config = serde_json::from_value(config)?;
    let theirs = qwen3_moe::Model::new(&config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
    Ok((ours, theirs))
}

fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let (ours, theirs) = load(dir.path())?;
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect();
    let ids = Tensor::from_vec(ids, (1, TOKENS), &Device::Cpu)?;

    // A faster wrong answer is none. A token whose choice of experts hangs on a rounding may differ.
    let (a, b) = (ours.hidden(&ids)?, theirs.clone().forward(&ids, 0)?);
    let error = ((a - &b)?.sqr()?.sum_all()?.to_scalar::<f32>()? / b.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt();
    if error.is_nan() || error >= 1e-2 {
        return Err(format!("the two decoders differ by {error:e}").into());
    }

    let mut c = Criterion::default().configure_from_args();
    let mut run_ours = || drop(black_box(ours.hidden(&ids).expect("a forward")));
    // A clone shares the weights and starts with an empty cache, which cannot be cleared otherwise.
    let mut run_theirs = || drop(black_box(theirs.clone().forward(&ids, 0).expect("a forward")));
    let row = compare(
        &mut c,
        Case { name: "decoder forward", flops: FLOPS, bar: 1.5 },
        Subject { name: "moebius", run: &mut run_ours },
        Subject { name: "candle-transformers", run: &mut run_theirs },
    );
    say(format_args!("\none layer, one sequence of {TOKENS}, H={HIDDEN}, I={INNER}, E={EXPERTS}, K={TOP_K}, f32, R=1"));
    say(format_args!("outputs differ by {error:.1e} (relative)\n\n{}", pair::HEADER));
    row.into_iter().for_each(|row| say(format_args!("{row}")));
    c.final_summary();
    Ok(())
}
