//! A Qwen3-MoE checkpoint of random weights, as both decoders of a bench load it.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};

/// Sizes of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub inner: usize,
    pub experts: usize,
    pub top_k: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocabulary: usize,
    /// Longest sequence.
    pub positions: usize,
}

/// Qwen3-30B-A3B's.
#[allow(dead_code, reason = "a bench takes the sizes that it needs")]
pub const QWEN3: Sizes = Sizes {
    layers: 48,
    hidden: 2048,
    inner: 768,
    experts: 128,
    top_k: 8,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    vocabulary: 151_936,
    positions: 40_960,
};

impl Sizes {
    /// Content of `config.json`.
    pub fn config(&self, dtype: DType) -> serde_json::Value {
        serde_json::json!({
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "torch_dtype": if dtype == DType::BF16 { "bfloat16" } else { "float32" },
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
            "attention_bias": false,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            "sliding_window": null,
            "max_window_layers": self.layers,
            "tie_word_embeddings": false,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": false,
            "hidden_act": "silu",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.inner,
            "num_experts_per_tok": self.top_k,
            "num_experts": self.experts,
            "norm_topk_prob": true
        })
    }

    /// Weights by name, so that rows keep their size; candle's generator starts from a seed of its own.
    pub fn weights(&self, dtype: DType, device: &Device) -> candle_core::Result<HashMap<String, Tensor>> {
        let draw = |dims: &[usize]| match dims {
            [n] => Tensor::ones(*n, DType::F32, device),
            _ => Tensor::randn(0f32, (dims[1] as f32).powf(-0.5), dims, device),
        };
        let named = |(name, dims): (String, Vec<usize>)| Ok((format!("{name}.weight"), draw(&dims)?.to_dtype(dtype)?));
        self.matrices().into_iter().map(named).collect()
    }

    /// Names and shapes.
    fn matrices(&self) -> Vec<(String, Vec<usize>)> {
        let Self { hidden, inner, head_dim, .. } = *self;
        let (queries, keys) = (self.heads * head_dim, self.kv_heads * head_dim);
        let mut all = vec![
            ("model.embed_tokens".to_string(), vec![self.vocabulary, hidden]),
            ("model.norm".to_string(), vec![hidden]),
            ("lm_head".to_string(), vec![self.vocabulary, hidden]),
        ];
        for layer in (0..self.layers).map(|l| format!("model.layers.{l}")) {
            let mut add = |name: &str, dims: &[usize]| all.push((format!("{layer}.{name}"), dims.to_vec()));
            add("input_layernorm", &[hidden]);
            add("post_attention_layernorm", &[hidden]);
            add("self_attn.q_proj", &[queries, hidden]);
            add("self_attn.k_proj", &[keys, hidden]);
            add("self_attn.v_proj", &[keys, hidden]);
            add("self_attn.o_proj", &[hidden, queries]);
            add("self_attn.q_norm", &[head_dim]);
            add("self_attn.k_norm", &[head_dim]);
            add("mlp.gate", &[self.experts, hidden]);
            for e in 0..self.experts {
                add(&format!("mlp.experts.{e}.gate_proj"), &[inner, hidden]);
                add(&format!("mlp.experts.{e}.up_proj"), &[inner, hidden]);
                add(&format!("mlp.experts.{e}.down_proj"), &[hidden, inner]);
            }
        }
        all
    }
}
