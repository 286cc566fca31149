//! The expert layer inside a decoder put together from the parts of candle-transformers and candle-nn: Mixtral, greedy.
//! Linear layers, embedding, norms, rotation, cache and sampling are theirs; the block of experts is one
//! [`ExpertParallelMoE`] a layer, in the place where candle-transformers' own decoders have a loop over experts.
//!
//! ```text
//! cargo run --release -p moebius-models --example candle_transformers -- tests/golden/mixtral 5 17 3
//! ```
//!
//! It infers. candle-nn's fused norm, rotation and softmax have no backward, and `loss.backward()` ends at them without a
//! word: to train, take `RmsNorm::forward_diff`, `rope_slow` and `candle_nn::ops::softmax`, or a decoder of
//! `moebius-models`.
//!
//! Several ranks, each with its part of the sequences, take a group of several: an
//! [`EpGroup`](moebius::candle::EpGroup) in place of [`DeviceGroup::single`].

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::kv_cache::KvCache;
use candle_nn::ops::softmax_last_dim;
use candle_nn::rotary_emb::rope;
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::models::with_tracing::{Embedding, Linear, RmsNorm, linear_no_bias};
use candle_transformers::utils::{build_additive_causal_mask, repeat_kv};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, LoadAs, Parameters};
use moebius::checkpoint::Checkpoint;
use serde::Deserialize;

/// Tokens by which a cache grows.
const CACHE_TOKENS: usize = 512;

/// The decoder's part of `config.json`; the expert layer reads its own part.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    hidden_size: usize,
    max_position_embeddings: usize,
    num_attention_heads: usize,
    num_hidden_layers: usize,
    num_key_value_heads: usize,
    rms_norm_eps: f64,
    /// transformers 5 writes `rope_parameters`, what was published before `rope_theta`.
    #[serde(default)]
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    rope_theta: Option<f32>,
    vocab_size: usize,
}

impl Config {
    fn rope_theta(&self) -> Result<f32> {
        let written = self.rope_parameters.as_ref().map(|p| p.rope_theta).or(self.rope_theta);
        written.ok_or_else(|| candle_core::Error::Msg("config.json has neither rope_theta nor rope_parameters".into()))
    }
}

/// `rope_parameters`.
#[derive(Debug, Clone, Deserialize)]
struct RopeParameters {
    rope_theta: f32,
}

/// Cosines and sines `[positions, D / 2]` of all positions.
#[derive(Debug)]
struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    fn new(config: &Config, device: &Device) -> Result<Self> {
        let (width, positions) = (config.hidden_size / config.num_attention_heads, config.max_position_embeddings);
        let base = config.rope_theta()?;
        let frequencies: Vec<f32> = (0..width).step_by(2).map(|i| base.powf(-(i as f32) / width as f32)).collect();
        let frequencies = Tensor::from_vec(frequencies, (1, width / 2), device)?;
        let angles = Tensor::arange(0f32, positions as f32, device)?.reshape((positions, 1))?.matmul(&frequencies)?;
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }

    /// Of the positions from `past` on.
    fn apply(&self, x: &Tensor, past: usize) -> Result<Tensor> {
        let tokens = x.dim(2)?;
        rope(&x.contiguous()?, &self.cos.narrow(0, past, tokens)?, &self.sin.narrow(0, past, tokens)?)
    }
}

/// Attention with groups of queries.
#[derive(Debug)]
struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    kv_heads: usize,
    cache: KvCache,
}

impl Attention {
    fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Self> {
        let (hidden, heads, kv_heads) = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads);
        let kv = hidden / heads * kv_heads;
        Ok(Self {
            q: linear_no_bias(hidden, hidden, vb.pp("q_proj"))?,
            k: linear_no_bias(hidden, kv, vb.pp("k_proj"))?,
            v: linear_no_bias(hidden, kv, vb.pp("v_proj"))?,
            o: linear_no_bias(hidden, hidden, vb.pp("o_proj"))?,
            heads,
            kv_heads,
            // It grows by as many, so it does not begin with all that the model could take.
            cache: KvCache::new(2, CACHE_TOKENS.min(config.max_position_embeddings)),
        })
    }

    /// `[B, S, H]` to the same; the tokens before are in the cache.
    fn forward(&mut self, x: &Tensor, mask: &Tensor, rotation: &Rotation) -> Result<Tensor> {
        let (rows, tokens, hidden) = x.dims3()?;
        let past = self.cache.current_seq_len();
        let split = |x: Tensor, heads| x.reshape((rows, tokens, heads, hidden / self.heads))?.transpose(1, 2);
        let q = rotation.apply(&split(self.q.forward(x)?, self.heads)?, past)?;
        let k = rotation.apply(&split(self.k.forward(x)?, self.kv_heads)?, past)?;
        let v = split(self.v.forward(x)?, self.kv_heads)?.contiguous()?;
        let (k, v) = self.cache.append(&k, &v)?;
        let [k, v] = [k, v].map(|t| repeat_kv(t, self.heads / self.kv_heads));
        let scores = (q.matmul(&k?.t()?)? * ((hidden / self.heads) as f64).powf(-0.5))?;
        let weights = softmax_last_dim(&scores.broadcast_add(mask)?)?;
        self.o.forward(&weights.matmul(&v?)?.transpose(1, 2)?.reshape((rows, tokens, hidden))?)
    }
}

/// A layer of the decoder.
#[derive(Debug)]
struct DecoderLayer {
    attention_norm: RmsNorm,
    attention: Attention,
    experts_norm: RmsNorm,
    /// In the place of candle-transformers' own block of experts: `Module`, `[B, S, H]` to the same.
    experts: ExpertParallelMoE,
}

/// The decoder.
#[derive(Debug)]
pub struct Mixtral {
    embedding: Embedding,
    rotation: Rotation,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    head: Linear,
}

impl Mixtral {
    /// Reads a published folder, opened once: of each layer's experts this rank's alone.
    pub fn load(checkpoint: &Checkpoint, group: &DeviceGroup) -> std::result::Result<Self, Box<dyn Error>> {
        let (config, device): (Config, _) = (serde_json::from_value(checkpoint.config().clone())?, group.device());
        let folder = checkpoint.dir();
        let files: Vec<PathBuf> =
            std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        let is_weights = |path: &&PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("model") && name.ends_with(".safetensors")
        };
        let files: Vec<&PathBuf> = files.iter().filter(is_weights).collect();
        // SAFETY: nobody writes to the files meanwhile. Of what they hold, only the tensors asked for below are read.
        let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, device) }?;
        let model = vb.pp("model");
        let layer = |number: usize| -> Result<DecoderLayer> {
            let vb = model.pp("layers").pp(number);
            let norm = |name| RmsNorm::new(config.hidden_size, config.rms_norm_eps, vb.pp(name));
            Ok(DecoderLayer {
                attention_norm: norm("input_layernorm")?,
                attention: Attention::new(&config, vb.pp("self_attn"))?,
                experts_norm: norm("post_attention_layernorm")?,
                experts: ExpertParallelMoE::from_checkpoint(
                    checkpoint,
                    number,
                    group,
                    LoadAs::new(Parameters::Frozen).dtype(DType::F32),
                )?,
            })
        };
        Ok(Self {
            embedding: Embedding::new(config.vocab_size, config.hidden_size, model.pp("embed_tokens"))?,
            rotation: Rotation::new(&config, device)?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: RmsNorm::new(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?,
            head: linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?,
        })
    }

    /// Logits `[B, S, V]` of `ids [B, S]`, which follow what went before.
    pub fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let past = self.layers[0].attention.cache.current_seq_len();
        let mask = build_additive_causal_mask(ids.dim(1)?, past, None, ids.device(), DType::F32)?;
        let mut x = self.embedding.forward(ids)?;
        for layer in &mut self.layers {
            let attended = layer.attention.forward(&layer.attention_norm.forward(&x)?, &mask, &self.rotation)?;
            x = (x + attended)?;
            x = (&x + layer.experts.forward(&layer.experts_norm.forward(&x)?)?)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    const NEW_TOKENS: usize = 8;
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: candle_transformers FOLDER ID …")?;
    let mut ids = arguments.map(|id| id.parse()).collect::<std::result::Result<Vec<u32>, _>>()?;
    let device = Device::Cpu;
    let checkpoint = Checkpoint::open(folder)?;
    let group = DeviceGroup::single(&checkpoint.block_config(0)?, &device)?; // one for all layers
    let mut model = Mixtral::load(&checkpoint, &group)?;
    let mut sampler = LogitsProcessor::new(0, None, None);
    let mut input = ids.clone();
    for _ in 0..NEW_TOKENS {
        let logits = model.forward(&Tensor::new(&input[..], &device)?.unsqueeze(0)?)?;
        let last = logits.narrow(D::Minus2, logits.dim(D::Minus2)? - 1, 1)?.flatten_all()?;
        input = vec![sampler.sample(&last)?];
        ids.extend(&input);
    }
    // A reader that is gone is no error worth a panic.
    let _ = writeln!(std::io::stdout(), "{ids:?}");
    Ok(())
}
