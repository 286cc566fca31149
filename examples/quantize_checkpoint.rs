//! Writes a checkpoint with its routed experts in NVFP4, and says what that costs.
//!
//! ```text
//! cargo run --release --example quantize_checkpoint -- tests/golden/qwen3_moe_bf16 /tmp/quantized
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use moebius::checkpoint::{Checkpoint, LoadOptions, QuantizedTensor};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, Mode};
use moebius::{DType, Result, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

/// Quantizes a checkpoint's routed experts to NVFP4, in the form that ModelOpt writes (weights only), and copies the rest.
///
/// Prints the relative error of every matrix, and how far the outputs of every block move on random tokens: the
/// router is not quantized, so the same experts are chosen, and the change is the experts' own.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder of a checkpoint in f32, bf16 or f16 whose experts are stored one by one.
    checkpoint: PathBuf,
    /// Folder to write; made if it is not there.
    out: PathBuf,
    /// Random tokens for each block.
    #[arg(short, long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// Seed of the tokens.
    #[arg(short, long, default_value_t = 0)]
    seed: u64,
    /// Print one line for each kind of matrix of a block, instead of one a matrix.
    #[arg(long)]
    summary: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let source = Checkpoint::open(&arguments.checkpoint)?;
    let matrices = source.save_nvfp4(&arguments.out)?;
    if arguments.summary {
        summary(&matrices)
    } else {
        each(&matrices)
    }
    let elements: usize = matrices.iter().map(|m| m.dims[0] * m.dims[1]).sum();
    // 16 codes are 8 bytes, their scale one.
    let bytes: usize = matrices.iter().map(|m| m.dims[0] * m.dims[1] / 16 * 9 + 4).sum();
    let per_weight = bytes as f64 * 8.0 / elements.max(1) as f64;
    println!("\n{} matrices, {elements} weights in {bytes} bytes: {per_weight:.3} bits each", matrices.len());

    let quantized = Checkpoint::open(&arguments.out)?;
    println!("\n{:<8} {:>12} {:>12}  on {} random tokens", "block", "relative", "max abs", arguments.tokens);
    for &layer in source.moe_layers() {
        let [exact, found] = [&source, &quantized].map(|checkpoint| outputs(checkpoint, layer, arguments));
        let (exact, found) = (exact?, found?);
        let difference = || exact.iter().zip(&found).map(|(a, b)| (a - b).abs());
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let relative = norm(&mut difference()) / norm(&mut exact.iter().copied());
        println!("{layer:<8} {relative:>12.4e} {:>12.4e}", difference().fold(0.0, f64::max));
    }
    Ok(())
}

fn each(matrices: &[QuantizedTensor]) {
    let width = matrices.iter().map(|m| m.name.len()).max().unwrap_or(0);
    println!("{:width$} {:>14} {:>12} {:>12}", "matrix", "shape", "amax", "relative");
    for QuantizedTensor { name, dims, amax, error } in matrices {
        println!("{name:width$} {:>14} {amax:>12.4e} {error:>12.4e}", format!("{}x{}", dims[0], dims[1]));
    }
}

fn summary(matrices: &[QuantizedTensor]) {
    // A block's matrices of a kind: names that differ in the expert only.
    let kind = |name: &str| match name.split_once(".experts.") {
        Some((block, rest)) => format!("{block}.experts.*.{}", rest.split_once('.').map_or(rest, |(_, kind)| kind)),
        None => name.to_string(),
    };
    let mut kinds: Vec<(String, Vec<f64>)> = Vec::new();
    for matrix in matrices {
        let kind = kind(&matrix.name);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, errors)) => errors.push(matrix.error),
            None => kinds.push((kind, vec![matrix.error])),
        }
    }
    let width = kinds.iter().map(|(kind, _)| kind.len()).max().unwrap_or(0);
    println!("{:width$} {:>8} {:>12} {:>12}", "matrices", "number", "mean", "largest");
    for (kind, errors) in kinds {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let largest = errors.iter().copied().fold(0.0, f64::max);
        println!("{kind:width$} {:>8} {mean:>12.4e} {largest:>12.4e}", errors.len());
    }
}

/// What a block makes of the random tokens, in f32.
fn outputs(checkpoint: &Checkpoint, layer: usize, arguments: &Arguments) -> Result<Vec<f64>> {
    let block = checkpoint.load_block(layer, LoadOptions { rank: 0, ranks: 1, dtype: Some(DType::F32) })?;
    let hidden = block.config.hidden;
    let rng = StdRng::seed_from_u64(arguments.seed ^ ((layer as u64) << 32));
    let tokens = arguments.tokens as usize;
    let values: Vec<f32> = rng.sample_iter(StandardNormal).take(tokens * hidden).collect();
    let x = Tensor::<Cpu>::from_vec(values, &[tokens, hidden])?;
    let config = GroupConfig::new(block.config.router.num_experts, tokens);
    let mut group = Group::single(config)?;
    let views = block.params.views()?;
    let mode = Mode { backward: false, noise: None };
    let forward = Layer::new(block.config, layer as u32)?.forward(&mut group, mode, x.view(), &views.params())?;
    Ok(forward.y.to_f64())
}
