//! The parts of a family's decoder, and how it is loaded.

use std::sync::Arc;

use candle_nn::Linear;

use crate::chunk_masks::ChunkMaskCache;
use crate::config::Base;
use crate::error::Result;
use crate::mlp::Mlp;
use crate::norm::{Norm, NormSpec};
use crate::params::Loader;
use crate::rotary::Rotary;

use super::{DecoderStack, FeedForward, Layer, Mixer};

/// Factors of a decoder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    pub embedding: f64,
    /// Of what a block adds to the residual stream.
    pub residual: f64,
    pub logits: f64,
}

/// Names of a decoder's own tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    /// In the model.
    pub embedding: &'static str,
    pub norm: &'static str,
    /// In a layer.
    pub input_norm: &'static str,
    pub post_norm: &'static str,
    pub dense: &'static str,
}

/// The parts of a family's decoder around its mixers.
#[derive(Debug, Clone)]
pub(crate) struct DecoderSpec {
    pub norm: NormSpec,
    pub names: Names,
    pub scales: Scales,
    /// The output projection is the embedding.
    pub tied: bool,
    pub head_bias: bool,
    /// Dense feed-forward blocks have biases.
    pub dense_bias: bool,
    /// Inner size of the dense blocks.
    pub dense: Option<usize>,
    /// Vocabulary, H, layers.
    pub sizes: [usize; 3],
}

impl DecoderSpec {
    /// The frame that most families have.
    pub fn of(base: &Base) -> Self {
        Self {
            norm: NormSpec::rms(base.rms_norm_eps),
            names: Names {
                embedding: "embed_tokens",
                norm: "norm",
                input_norm: "input_layernorm",
                post_norm: "post_attention_layernorm",
                dense: "mlp",
            },
            scales: Scales { embedding: 1.0, residual: 1.0, logits: 1.0 },
            tied: base.tie_word_embeddings.unwrap_or(false),
            head_bias: false,
            dense_bias: false,
            dense: base.intermediate_size,
            sizes: [base.vocab_size, base.hidden_size, base.num_hidden_layers],
        }
    }

    /// Loads a decoder; `mixer` loads that of a layer, from its prefix and number.
    pub fn load(
        &self,
        p: &mut Loader<'_>,
        rotary: Rotary,
        mut mixer: impl FnMut(&mut Loader<'_>, &str, usize) -> Result<Box<dyn Mixer>>,
    ) -> Result<DecoderStack> {
        let [vocabulary, hidden, count] = self.sizes;
        let (root, names) = (p.root(), self.names);
        let embedding = p.get(&format!("{root}{}.weight", names.embedding), &[vocabulary, hidden])?;
        // Not reserved ahead: the number of layers is the checkpoint's claim until its tensors are there.
        let mut layers = Vec::new();
        for number in 0..count {
            p.loaded(number, count);
            let prefix = p.checkpoint().layer_prefix(number);
            let input_norm = Norm::load(p, &format!("{prefix}{}", names.input_norm), hidden, self.norm)?;
            let mixer = mixer(p, &prefix, number)?;
            let post_norm = Norm::load(p, &format!("{prefix}{}", names.post_norm), hidden, self.norm)?;
            let feed_forward = match (p.experts(number)?, self.dense) {
                (Some(moe), _) => FeedForward::Experts(Box::new(moe)),
                (None, Some(inner)) => {
                    let inner = p.file().size("intermediate_size", inner)?;
                    let name = format!("{prefix}{}", names.dense);
                    FeedForward::Dense(Mlp::load(p, &name, [hidden, inner], self.dense_bias)?)
                }
                (None, None) => return p.file().refuse("intermediate_size", "a size", "nothing"),
            };
            layers.push(Layer { input_norm, mixer, post_norm, feed_forward });
        }
        let norm = Norm::load(p, &format!("{root}{}", names.norm), hidden, self.norm)?;
        let names = ["lm_head", "language_model.lm_head"];
        let there = |name: &&str| ["weight", "bias"].iter().any(|part| p.checkpoint().has(&format!("{name}.{part}")));
        let name = names.into_iter().find(there).unwrap_or(names[0]);
        let head = match self.tied {
            true => {
                let bias = match self.head_bias {
                    true => Some(p.get(&format!("{name}.bias"), &[vocabulary])?),
                    false => None,
                };
                Linear::new(embedding.clone(), bias)
            }
            false => p.linear(name, [vocabulary, hidden], self.head_bias)?,
        };
        p.check_all_read(count)?;
        p.loaded(count, count);
        let host = p.take_host_experts();
        Ok(DecoderStack {
            identity: Arc::default(),
            embedding,
            layers,
            norm,
            head,
            rotary,
            scales: self.scales,
            host,
            chunk_masks: ChunkMaskCache::default(),
        })
    }
}
