//! Qwen3-MoE (Hugging Face `model_type` `qwen3_moe`).

use candle_core::{DType, Module, Tensor, Var};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::{Embedding, Linear};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, Parameters};
use moebius::checkpoint::{self, Checkpoint};

use crate::attention::{Attention, Mask};
use crate::blocks::{Mlp, Norm, linear};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::params::{LoadOptions, Params};
use crate::rotary::{Angles, Rotary};

/// One rank's copy of a Qwen3-MoE decoder: all of it but for the experts, of which the rank holds its E / R.
#[derive(Debug)]
pub struct Qwen3Moe {
    config: Config,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: Norm,
    lm_head: Linear,
    rotary: Rotary,
    vars: Vec<(String, Var)>,
    trainable: bool,
}

#[derive(Debug)]
struct DecoderLayer {
    input_norm: Norm,
    attention: Attention,
    post_attention_norm: Norm,
    feed_forward: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Experts(Box<ExpertParallelMoE>),
}

impl FeedForward {
    fn forward(&self, h: &Tensor, at: &mut Progress) -> Result<Tensor> {
        at.inside = matches!(self, FeedForward::Experts(_));
        let y = match self {
            FeedForward::Dense(mlp) => mlp.forward(h)?,
            FeedForward::Experts(moe) => moe.forward_full(h, None)?.y,
        };
        *at = Progress { layers: at.layers + 1, inside: false };
        Ok(y)
    }
}

/// How far a rank has come in a forward.
#[derive(Debug, Clone, Copy)]
struct Progress {
    /// Layers whose collectives, if any, are behind it, or some fewer without any.
    layers: usize,
    /// Within a layer with experts, which tells the other ranks of its errors itself.
    inside: bool,
}

/// Keys and values of the tokens so far, for decoding.
#[derive(Debug, Clone)]
pub struct Cache {
    layers: Vec<ConcatKvCache>,
    len: usize,
}

impl Cache {
    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True where no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.layers.iter_mut().for_each(ConcatKvCache::reset);
        self.len = 0;
    }
}

impl Qwen3Moe {
    /// Loads this rank's part of a checkpoint to the group's device. No collective; every rank loads for itself.
    ///
    /// # Errors
    /// A configuration that this decoder does not do, missing or mis-shaped tensors.
    pub fn load(checkpoint: &Checkpoint, group: impl Into<DeviceGroup>, options: LoadOptions) -> Result<Self> {
        let config = Config::of(checkpoint)?;
        let group = &group.into();
        let mut p = Params::new(checkpoint, options, group.device().clone());
        let (vocab, hidden, eps) = (config.vocab_size, config.hidden_size, config.rms_norm_eps);
        let embeddings = p.get("model.embed_tokens.weight", &[vocab, hidden])?;
        // Not reserved ahead: the number of layers is the checkpoint's claim until its tensors are there.
        let mut layers = Vec::new();
        for number in 0..config.num_hidden_layers {
            layers.push(DecoderLayer::load(&mut p, number, &config, group)?);
        }
        let norm = Norm::load(&mut p, "model.norm", hidden, eps)?;
        let lm_head = if config.tie_word_embeddings {
            Linear::new(embeddings.clone(), None)
        } else {
            linear(&mut p, "lm_head", [vocab, hidden], false)?
        };
        Ok(Self {
            embedding: Embedding::new(embeddings, hidden),
            layers,
            norm,
            lm_head,
            rotary: Rotary::new(config.head_dim(), config.rope_theta(), group.device())?,
            vars: p.into_vars(),
            trainable: options.trainable,
            config,
        })
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Logits `[B, S, V]` of `ids` (U32 or I64, `[B, S]`). Collective: every rank calls with sequences of its own, of
    /// any number and length, none included.
    ///
    /// # Errors
    /// Mis-shaped ids, sequences longer than the configuration allows, and what the layer reports.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.logits(self.run(ids, None)?)
    }

    /// Hidden states that [`forward`](Self::forward) projects to logits, after the last norm: `[B, S, H]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.run(ids, None)
    }

    /// An empty cache for [`decode`](Self::decode).
    pub fn cache(&self) -> Cache {
        // Dimension 2 of [B, heads, S, D] grows.
        Cache { layers: vec![ConcatKvCache::new(2); self.layers.len()], len: 0 }
    }

    /// Logits `[B, S, V]` of `ids` as continuation of what the cache holds, and keeps them there. Collective.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); a trainable model, because a cache cuts the gradient's way. After an error the
    /// cache must be cleared.
    pub fn decode(&self, ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.logits(self.decode_hidden(ids, cache)?)
    }

    /// Hidden states that [`decode`](Self::decode) projects to logits, after the last norm: `[B, S, H]`.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_hidden(&self, ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.run(ids, Some(cache))
    }

    /// Replicated parameters with their names on disk, where the model is trainable. Their gradients are this
    /// rank's share: sum them over the ranks.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }

    /// The experts of a layer, with parameters of their own; `None` for dense layers.
    pub fn moe(&self, layer: usize) -> Option<&ExpertParallelMoE> {
        match &self.layers.get(layer)?.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(moe) => Some(moe),
        }
    }

    /// Runs all layers. A failure on one rank is told to the others, which go on to the next layer with experts and
    /// would wait there.
    fn run(&self, ids: &Tensor, cache: Option<&mut Cache>) -> Result<Tensor> {
        let mut at = Progress { layers: 0, inside: false };
        self.through(ids, cache, &mut at).inspect_err(|error| {
            let next = self.layers.iter().skip(at.layers).find_map(|layer| match &layer.feed_forward {
                FeedForward::Dense(_) => None,
                FeedForward::Experts(moe) => Some(moe),
            });
            if let Some(moe) = next.filter(|_| !at.inside) {
                moe.refuse_forward(&error.to_string());
            }
        })
    }

    fn through(&self, ids: &Tensor, cache: Option<&mut Cache>, at: &mut Progress) -> Result<Tensor> {
        const CALL: &str = "Qwen3Moe::forward";
        if let Some(cache) = &cache {
            const CALL: &str = "Qwen3Moe::decode";
            if self.trainable {
                let problem = "the model was loaded as trainable; load another".into();
                return Err(Error::Usage { call: CALL, problem });
            }
            if cache.layers.len() != self.layers.len() {
                let problem = format!("the cache has {} layers, the model {}", cache.layers.len(), self.layers.len());
                return Err(Error::Usage { call: CALL, problem });
            }
        }
        let &[b, s] = ids.dims() else {
            return Err(Error::Shape {
                call: CALL,
                tensor: "ids".into(),
                expected: "[B, S]".into(),
                found: ids.dims().to_vec(),
            });
        };
        let past = cache.as_ref().map_or(0, |c| c.len);
        if past + s > self.config.max_position_embeddings {
            let problem = format!(
                "sequences of {past} cached and {s} new tokens; max_position_embeddings is {}",
                self.config.max_position_embeddings
            );
            return Err(Error::Usage { call: CALL, problem });
        }
        let ids = ids.to_dtype(DType::U32)?.flatten_all()?;
        let mut x = self.embedding.forward(&ids)?;
        let angles = self.rotary.angles(past, s, x.dtype())?;
        let mask = Mask::new(s, x.dtype(), x.device())?;
        let mut caches = cache.map(|c| {
            c.len += s;
            c.layers.iter_mut()
        });
        for layer in &self.layers {
            x = layer.forward(&x, (b, s), (&angles, &mask), caches.as_mut().and_then(Iterator::next), at)?;
        }
        if b * s > 0 {
            x = self.norm.forward(&x)?;
        }
        Ok(x.reshape((b, s, self.config.hidden_size))?)
    }

    fn logits(&self, hidden: Tensor) -> Result<Tensor> {
        let (b, s, h) = hidden.dims3()?;
        Ok(self.lm_head.forward(&hidden.reshape((b * s, h))?)?.reshape((b, s, self.config.vocab_size))?)
    }
}

impl DecoderLayer {
    fn load(p: &mut Params<'_>, number: usize, config: &Config, group: &DeviceGroup) -> Result<Self> {
        let prefix = format!("model.layers.{number}");
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let feed_forward = if p.checkpoint().moe_layers().contains(&number) {
            let options =
                checkpoint::LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: p.options().moe_dtype()? };
            let block = p.checkpoint().load_block(number, options)?;
            let trainable = if p.trainable() { Parameters::Trainable } else { Parameters::Frozen };
            let moe = ExpertParallelMoE::from_block(block, number as u32, group, trainable)?;
            FeedForward::Experts(Box::new(moe))
        } else {
            FeedForward::Dense(Mlp::load(p, &format!("{prefix}.mlp"), hidden, config.intermediate_size)?)
        };
        Ok(Self {
            input_norm: Norm::load(p, &format!("{prefix}.input_layernorm"), hidden, eps)?,
            attention: Attention::load(p, &format!("{prefix}.self_attn"), config)?,
            post_attention_norm: Norm::load(p, &format!("{prefix}.post_attention_layernorm"), hidden, eps)?,
            feed_forward,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        (b, s): (usize, usize),
        positions: (&Angles, &Mask),
        cache: Option<&mut ConcatKvCache>,
        at: &mut Progress,
    ) -> Result<Tensor> {
        if b * s == 0 {
            // A rank without tokens still takes part in the experts' collectives, backward too. Candle's norms and
            // softmax refuse empty tensors, and its sum `x + y` of empty tensors is `x`, without a way back to y.
            return match &self.feed_forward {
                FeedForward::Dense(_) => Ok(x.clone()),
                FeedForward::Experts(_) => self.feed_forward.forward(x, at),
            };
        }
        let x = (x + self.attention.forward(&self.input_norm.forward(x)?, (b, s), positions, cache)?)?;
        let h = self.post_attention_norm.forward(&x)?;
        Ok((x + self.feed_forward.forward(&h, at)?)?)
    }
}
