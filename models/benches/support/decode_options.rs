//! The command line of `decode`.

use clap::{Parser, ValueEnum};

/// Measures a decoder with random weights.
#[derive(Debug, Clone, Parser)]
pub struct Options {
    /// The model's sizes; without it the published ones on a GPU, and tiny ones on a CPU
    #[arg(long, value_enum)]
    pub shape: Option<Shape>,
    /// In which form the experts are held
    #[arg(long, value_enum, default_value_t = Experts::Bf16)]
    pub experts: Experts,
    /// Experts stay in memory of the host and come a layer ahead
    #[arg(long)]
    pub experts_on_host: bool,
    /// Layers, where not all
    #[arg(long)]
    pub layers: Option<usize>,
    /// Phases to measure; all without it
    #[arg(long, value_enum)]
    pub phase: Vec<Phase>,
    /// Tokens in the cache before a step
    #[arg(long)]
    pub past: Option<usize>,
    /// Tokens of the prefill
    #[arg(long)]
    pub prefill: Option<usize>,
    /// Sequences of `decode-64`, if not 64
    #[arg(long)]
    pub sequences: Option<usize>,
    /// Of the weights
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Steps that count
    #[arg(long)]
    pub steps: Option<usize>,
    /// Threads that share the experts, a GPU each
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// The commit that lines name, where git cannot be asked
    #[arg(long)]
    pub commit: Option<String>,
    /// On the CPU, where there is a GPU too
    #[arg(long)]
    pub cpu: bool,
    /// An option that `cargo bench` gives
    #[arg(long, hide = true)]
    pub bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    #[value(name = "qwen3-30b-a3b")]
    Qwen3,
    Tiny,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Experts {
    /// As all other weights (in f32 on a CPU)
    Bf16,
    Nvfp4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Phase {
    #[value(name = "decode-1")]
    One,
    #[value(name = "decode-64")]
    Many,
    #[value(name = "eager-1")]
    EagerOne,
    #[value(name = "eager-64")]
    EagerMany,
    Prefill,
    #[value(name = "candle-1")]
    CandleOne,
    #[value(name = "candle-64")]
    CandleMany,
    #[value(name = "candle-prefill")]
    CandlePrefill,
}
