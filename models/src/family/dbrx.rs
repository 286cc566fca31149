//! DBRX: names and keys of its own, one projection of queries, keys and values, bounded, and layer norms without biases.

use serde::Deserialize;

use crate::config::{Base, ConfigFile};
use crate::decoder::{DecoderSpec, DecoderStack, Names};
use crate::error::Result;
use crate::norm::{NormKind, NormSpec};
use crate::params::Loader;
use crate::rotary::RopeParameters;
use crate::self_attention::{Projection, SelfAttention};

/// ε of its norms, which its configuration does not have.
const EPS: f64 = 1e-5;

#[derive(Debug, Deserialize)]
struct Config {
    d_model: usize,
    n_heads: usize,
    n_layers: usize,
    max_seq_len: usize,
    vocab_size: usize,
    attn_config: Attention,
    #[serde(default)]
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    rope_scaling: Option<RopeParameters>,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Attention {
    #[serde(default)]
    clip_qkv: Option<f64>,
    #[serde(default)]
    kv_n_heads: Option<usize>,
    #[serde(default)]
    rope_theta: Option<f64>,
}

impl Config {
    /// Checks sizes by the names that they have here.
    fn check(&self, file: &ConfigFile) -> Result<()> {
        for (field, size) in [
            ("d_model", self.d_model),
            ("n_heads", self.n_heads),
            ("n_layers", self.n_layers),
            ("max_seq_len", self.max_seq_len),
            ("attn_config.kv_n_heads", self.attn_config.kv_n_heads.unwrap_or(1)),
        ] {
            file.size(field, size)?;
        }
        Ok(())
    }

    /// Under the names of the other families.
    fn base(&self) -> Base {
        Base {
            vocab_size: self.vocab_size,
            hidden_size: self.d_model,
            intermediate_size: None,
            num_hidden_layers: self.n_layers,
            num_attention_heads: self.n_heads,
            num_key_value_heads: Some(self.attn_config.kv_n_heads.unwrap_or(1)),
            head_dim: None,
            max_position_embeddings: self.max_seq_len,
            rms_norm_eps: EPS,
            tie_word_embeddings: self.tie_word_embeddings,
            hidden_act: None,
            rope_theta: self.rope_theta.or(self.attn_config.rope_theta),
            rope_parameters: self.rope_parameters.clone(),
            rope_scaling: self.rope_scaling.clone(),
            partial_rotary_factor: None,
            original_max_position_embeddings: None,
            layer_types: None,
        }
    }
}

pub(super) fn load(p: &mut Loader<'_>) -> Result<DecoderStack> {
    let (config, file) = (p.config::<Config>()?, p.file());
    config.check(&file)?;
    let base = config.base();
    base.check(&file)?;
    let heads = base.heads(&file)?;
    let clip = config.attn_config.clip_qkv.map(|bound| file.positive("attn_config.clip_qkv", bound)).transpose()?;
    let rotary = base.rotary(&file, heads.dim, 1e4)?;
    let names = Names {
        embedding: "wte",
        norm: "norm_f",
        input_norm: "norm_attn_norm.norm_1",
        post_norm: "norm_attn_norm.norm_2",
        dense: "ffn",
    };
    let frame = DecoderSpec {
        norm: NormSpec { kind: NormKind::Layer { bias: false }, eps: EPS },
        names,
        ..DecoderSpec::of(&base)
    };
    frame.load(p, rotary, |p, prefix, _| {
        let prefix = format!("{prefix}norm_attn_norm.attn");
        let rows = (heads.queries + 2 * heads.keys) * heads.dim;
        let qkv = p.linear(&format!("{prefix}.Wqkv"), [rows, heads.hidden], false)?;
        let output = p.linear(&format!("{prefix}.out_proj"), [heads.hidden, heads.queries * heads.dim], false)?;
        Ok(Box::new(SelfAttention { clip, ..SelfAttention::of(heads, Projection::Fused(qkv), output) }))
    })
}
