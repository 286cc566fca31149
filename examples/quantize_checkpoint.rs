//! Writes a checkpoint with its routed experts in NVFP4, and says what that costs.
//!
//! ```text
//! cargo run --release --example quantize_checkpoint -- tests/golden/qwen3_moe_bf16 /tmp/quantized
//! ```

#[path = "support/output.rs"]
mod output;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use moebius::checkpoint::{Checkpoint, LoadOptions, OpenOptions, QuantizedTensor, SaveOptions};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, Mode};
use moebius::{DType, Tensor};
use output::{conclude, refuse_full_folder, say};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

/// Quantizes a checkpoint's routed experts to NVFP4, in the form that ModelOpt writes (weights only), and copies the
/// rest.
///
/// Prints the relative error of every matrix, and how far the outputs of every block move on random tokens: the
/// router is not quantized, so the same experts are chosen, and the change is the experts' own.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder of a checkpoint in f32, bf16 or f16 whose experts are stored one by one.
    checkpoint: PathBuf,
    /// Folder to write; made if it is not there. Never the checkpoint's own.
    out: PathBuf,
    /// Write into a folder that holds something; a checkpoint in it is replaced, other files stay.
    #[arg(short, long)]
    force: bool,
    /// Let the checkpoint's files be links out of its folder (the Hugging Face cache is made of such).
    #[arg(long)]
    follow_links: bool,
    /// Most bytes of tensors in a file; more become several, with an index.
    #[arg(long, value_name = "BYTES", default_value_t = SaveOptions::default().max_shard_bytes)]
    max_shard_bytes: u64,
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
    conclude(run(&Arguments::parse()).map(|()| true))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut open = OpenOptions::default();
    open.follow_links = arguments.follow_links;
    let source = Checkpoint::open_with(&arguments.checkpoint, open)?;
    refuse_full_folder(&arguments.out, arguments.force)?;
    let mut save = SaveOptions::default();
    save.max_shard_bytes = arguments.max_shard_bytes;
    let matrices = source.save_nvfp4_with(&arguments.out, save)?;
    if arguments.summary {
        summary(&matrices)
    } else {
        each(&matrices)
    }
    let elements: usize = matrices.iter().map(|m| m.dims[0] * m.dims[1]).sum();
    // 16 codes are 8 bytes, their scale one.
    let bytes: usize = matrices.iter().map(|m| m.dims[0] * m.dims[1] / 16 * 9 + 4).sum();
    let per_weight = bytes as f64 * 8.0 / elements.max(1) as f64;
    say(format_args!("\n{} matrices, {elements} weights in {bytes} bytes: {per_weight:.3} bits each", matrices.len()));

    let quantized = Checkpoint::open(&arguments.out)?;
    say(format_args!("\n{:<8} {:>12} {:>12}  on {} random tokens", "block", "relative", "max abs", arguments.tokens));
    for &layer in source.moe_layers() {
        let [exact, found] = [&source, &quantized].map(|checkpoint| outputs(checkpoint, layer, arguments));
        let (exact, found) = (exact?, found?);
        let difference = || exact.iter().zip(&found).map(|(a, b)| (a - b).abs());
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let relative = norm(&mut difference()) / norm(&mut exact.iter().copied());
        say(format_args!("{layer:<8} {relative:>12.4e} {:>12.4e}", difference().fold(0.0, f64::max)));
    }
    Ok(())
}

fn each(matrices: &[QuantizedTensor]) {
    let width = matrices.iter().map(|m| m.name.len()).max().unwrap_or(0);
    say(format_args!("{:width$} {:>14} {:>12} {:>12}", "matrix", "shape", "amax", "relative"));
    for QuantizedTensor { name, dims, amax, error } in matrices {
        say(format_args!("{name:width$} {:>14} {amax:>12.4e} {error:>12.4e}", format!("{}x{}", dims[0], dims[1])));
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
    say(format_args!("{:width$} {:>8} {:>12} {:>12}", "matrices", "number", "mean", "largest"));
    for (kind, errors) in kinds {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let largest = errors.iter().copied().fold(0.0, f64::max);
        say(format_args!("{kind:width$} {:>8} {mean:>12.4e} {largest:>12.4e}", errors.len()));
    }
}

/// Outputs of a block for the random tokens, in f32.
fn outputs(checkpoint: &Checkpoint, layer: usize, arguments: &Arguments) -> moebius::Result<Vec<f64>> {
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
