//! The families of checkpoints: per family one entry of a table with its routing formula and its names.
//!
//! Names are those of the published checkpoints. Sources: Hugging Face transformers 5.17 (`modeling_*.py`,
//! `conversion_mapping.py`) and the models' own repositories.

/// Everything that tells one family from another.
#[derive(Debug)]
pub(super) struct Family {
    /// Values of `model_type`, the usual one first.
    pub types: &'static [&'static str],
    /// Routing formula.
    pub formula: Formula,
    /// Layers that have a block.
    pub layers: LayerRule,
    /// Key of the experts' inner size.
    pub width: &'static str,
    /// Name of the block in its layer; the published one first, then that of models re-saved by transformers 5.
    pub blocks: &'static [&'static str],
    /// Names of the router in the block.
    pub routers: &'static [&'static str],
    /// The router is published and computed in F32 whatever the model's type.
    pub router_f32: bool,
    /// The selection bias, where the formula has one.
    pub selection_bias: &'static [SelectionBias],
    /// How the routed experts lie on disk, the published form first.
    pub experts: &'static [DiskExperts],
    /// The shared expert.
    pub shared: Option<DiskSharedExpert>,
    /// Between up and down.
    pub activation: Act,
}

/// Which routing formula, with the keys it reads.
#[derive(Debug, Clone, Copy)]
pub(super) enum Formula {
    /// Softmax over all experts, then top-k.
    Softmax(Normalize),
    /// DBRX: as `Softmax`, renormalized by the norm `moe_normalize_expert_weights`.
    SoftmaxPower,
    /// DeepSeek-V2: softmax, groups ranked by their maximum, scaled.
    SoftmaxGrouped,
    /// Ernie: softmax, chosen with a bias, renormalized with a floor.
    SoftmaxBiased,
    /// Top-k of the logits, softmax over those; with a bias on the logits or without.
    TopkSoftmax { logit_bias: bool },
    /// Top-k of the logits, sigmoid of those, applied to the experts' input.
    TopkSigmoid,
    /// Sigmoid, chosen with a bias, groups ranked by the sum of two.
    Sigmoid { normalize: Normalize, epsilon: f64, scale: Option<&'static str> },
    /// PhiMoE's.
    SparseMixer,
}

/// Whether chosen weights are divided by their sum.
#[derive(Debug, Clone, Copy)]
pub(super) enum Normalize {
    Always,
    Never,
    /// As a key says, with the default of the family's configuration class.
    Key(&'static str, bool),
}

/// Which layers have a block.
#[derive(Debug, Clone, Copy)]
pub(super) enum LayerRule {
    All,
    /// `mlp_only_layers` and `decoder_sparse_step`.
    Step,
    /// `first_k_dense_replace` and `moe_layer_freq`.
    FirstDense,
    /// `moe_layers` or `interleave_moe_layer_step`.
    Interleave,
    /// `moe_layer_start_index`, `moe_layer_end_index`, `moe_layer_interval`.
    Range,
    /// `expert_layer_period` and `expert_layer_offset`.
    Period,
    /// `num_dense_layers`.
    NumDense,
    /// `hybrid_override_pattern` or `layers_block_type`.
    Pattern,
}

/// A selection bias on disk.
#[derive(Debug)]
pub(super) struct SelectionBias {
    /// Name in the block.
    pub name: &'static str,
    /// Its shape is `[1, E]`.
    pub row: bool,
    /// Key that says whether there is one; always if `None`.
    pub key: Option<&'static str>,
}

/// How the routed experts of a block lie on disk. Names are relative to the block.
#[derive(Debug)]
pub(super) enum DiskExperts {
    /// `experts.{i}.{name}.weight`, each (out, in).
    Each { gate: &'static str, up: &'static str, down: &'static str },
    /// One tensor for all experts.
    Fused {
        /// `[E, G·I, H]`, or `[E, H, G·I]`.
        up: &'static str,
        down: &'static str,
        /// (in, out) rather than (out, in).
        transposed: bool,
        /// Gate rows are the even ones rather than the first half.
        interleaved: bool,
    },
    /// DBRX: `[E·I, H]` each, down not transposed.
    Stacked { gate: &'static str, up: &'static str, down: &'static str },
}

/// A shared expert on disk.
#[derive(Debug)]
pub(super) struct DiskSharedExpert {
    /// Name in the block, or with `in_layer` in the layer.
    pub name: &'static str,
    pub in_layer: bool,
    /// `input_linear` and `output_linear` rather than `gate_proj`, `up_proj`, `down_proj`.
    pub linear: bool,
    /// Name of its gate `[1, H]` in the block.
    pub gate: Option<&'static str>,
    /// Key that says whether its matrices have biases; never if `None`.
    pub bias: Option<&'static str>,
    pub width: SharedWidth,
}

/// Inner size of a shared expert. A size of 0, and a key that is absent where that is allowed, mean none.
#[derive(Debug, Clone, Copy)]
pub(super) enum SharedWidth {
    /// A key that must be there.
    Key(&'static str),
    /// A key that may be absent.
    Optional(&'static str),
    /// `count · moe_intermediate_size`; none without the key.
    Count(&'static str),
    /// As a routed expert, times the key where it is there.
    Routed(Option<&'static str>),
}

/// Activation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    /// silu-GLU; the key, if any, must say so.
    Silu(&'static str),
    /// gpt-oss.
    Clamped,
    /// relu², no gate.
    Relu2(&'static str),
}

/// Keys of the number of experts, the first present counts.
pub(super) const EXPERTS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
/// Keys of the number of experts a token.
pub(super) const TOP_K: &[&str] =
    &["num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "experts_per_token"];
/// Prefixes of a layer's number.
pub(super) const ROOTS: &[&str] = &[
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "transformer.blocks.",
    "backbone.layers.",
];

const PROJ: DiskExperts = DiskExperts::Each { gate: "gate_proj", up: "up_proj", down: "down_proj" };
const W123: DiskExperts = DiskExperts::Each { gate: "w1", up: "w3", down: "w2" };
/// The form that transformers 5 holds in memory and writes with `save_original_format=False`.
const FUSED: DiskExperts =
    DiskExperts::Fused { up: "experts.gate_up_proj", down: "experts.down_proj", transposed: false, interleaved: false };
const FUSED_T: DiskExperts =
    DiskExperts::Fused { up: "experts.gate_up_proj", down: "experts.down_proj", transposed: true, interleaved: false };
const SILU: Act = Act::Silu("hidden_act");
const NORM: Formula = Formula::Softmax(Normalize::Always);
const NOAUX: Formula = Formula::Sigmoid {
    normalize: Normalize::Key("norm_topk_prob", true),
    epsilon: 1e-20,
    scale: Some("routed_scaling_factor"),
};
const GATED_SHARED: Option<DiskSharedExpert> = Some(DiskSharedExpert {
    name: "shared_expert",
    in_layer: false,
    linear: false,
    gate: Some("shared_expert_gate.weight"),
    bias: None,
    width: SharedWidth::Key("shared_expert_intermediate_size"),
});
const N_SHARED: Option<DiskSharedExpert> = shared("shared_experts", SharedWidth::Count("n_shared_experts"));

const fn bias(name: &'static str) -> SelectionBias {
    SelectionBias { name, row: false, key: None }
}

const fn shared(name: &'static str, width: SharedWidth) -> Option<DiskSharedExpert> {
    Some(DiskSharedExpert { name, in_layer: false, linear: false, gate: None, bias: None, width })
}

/// With biases where `key` says so.
const fn biased(name: &'static str, width: SharedWidth, key: &'static str) -> Option<DiskSharedExpert> {
    Some(DiskSharedExpert { name, in_layer: false, linear: false, gate: None, bias: Some(key), width })
}

/// Mixtral, from which the others differ.
const BASE: Family = Family {
    types: &["mixtral"],
    formula: NORM,
    layers: LayerRule::All,
    width: "intermediate_size",
    blocks: &["block_sparse_moe", "mlp"],
    routers: &["gate.weight"],
    router_f32: false,
    selection_bias: &[],
    experts: &[W123, FUSED],
    shared: None,
    activation: SILU,
};
/// Qwen3-MoE, likewise.
const QWEN: Family = Family {
    types: &["qwen3_moe"],
    formula: Formula::Softmax(Normalize::Key("norm_topk_prob", false)),
    layers: LayerRule::Step,
    width: "moe_intermediate_size",
    blocks: &["mlp"],
    experts: &[PROJ, FUSED],
    ..BASE
};

/// The known families.
pub(super) static FAMILIES: &[Family] = &[
    BASE,
    Family { types: &["minimax"], ..BASE },
    Family {
        types: &["minimax_m2"],
        formula: Formula::Sigmoid { normalize: Normalize::Always, epsilon: 0.0, scale: None },
        selection_bias: &[bias("e_score_correction_bias"), bias("gate.e_score_correction_bias")],
        ..BASE
    },
    Family { types: &["phimoe"], formula: Formula::SparseMixer, routers: &["gate.weight", "router.weight"], ..BASE },
    QWEN,
    Family { types: &["qwen2_moe"], shared: GATED_SHARED, ..QWEN },
    Family {
        types: &["qwen3_next"],
        formula: Formula::Softmax(Normalize::Key("norm_topk_prob", true)),
        shared: GATED_SHARED,
        ..QWEN
    },
    Family {
        types: &["qwen3_5_moe", "qwen3_5_moe_text"],
        formula: NORM,
        layers: LayerRule::All,
        experts: &[FUSED, PROJ],
        shared: GATED_SHARED,
        ..QWEN
    },
    Family { types: &["qwen3_vl_moe", "qwen3_vl_moe_text"], formula: NORM, experts: &[FUSED_T, PROJ], ..QWEN },
    Family {
        types: &["deepseek_v2"],
        formula: Formula::SoftmaxGrouped,
        layers: LayerRule::FirstDense,
        shared: biased("shared_experts", SharedWidth::Count("n_shared_experts"), "mlp_bias"),
        ..QWEN
    },
    Family {
        types: &[
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "kimi_k25",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "dots1",
            "mimo_v2_flash",
        ],
        formula: NOAUX,
        layers: LayerRule::FirstDense,
        selection_bias: &[bias("gate.e_score_correction_bias")],
        shared: N_SHARED,
        ..QWEN
    },
    Family {
        types: &["kimi_linear"],
        formula: Formula::Sigmoid {
            normalize: Normalize::Key("moe_renormalize", true),
            epsilon: 1e-20,
            scale: Some("routed_scaling_factor"),
        },
        layers: LayerRule::FirstDense,
        width: "moe_intermediate_size",
        selection_bias: &[bias("gate.e_score_correction_bias")],
        shared: shared("shared_experts", SharedWidth::Count("num_shared_experts")),
        ..BASE
    },
    Family {
        types: &["hy_v3"],
        formula: Formula::Sigmoid {
            normalize: Normalize::Always,
            epsilon: 1e-20,
            scale: Some("router_scaling_factor"),
        },
        layers: LayerRule::FirstDense,
        routers: &["router.gate.weight", "gate.weight"],
        selection_bias: &[bias("expert_bias"), bias("e_score_correction_bias")],
        shared: shared("shared_mlp", SharedWidth::Count("num_shared_experts")),
        ..QWEN
    },
    Family {
        types: &["lfm2_moe"],
        formula: Formula::Sigmoid {
            normalize: Normalize::Key("norm_topk_prob", true),
            epsilon: 1e-6,
            scale: Some("routed_scaling_factor"),
        },
        layers: LayerRule::NumDense,
        width: "moe_intermediate_size",
        blocks: &["feed_forward"],
        selection_bias: &[SelectionBias { name: "expert_bias", row: false, key: Some("use_expert_bias") }],
        ..BASE
    },
    Family {
        types: &["nemotron_h"],
        formula: NOAUX,
        layers: LayerRule::Pattern,
        blocks: &["mixer"],
        selection_bias: &[bias("gate.e_score_correction_bias")],
        experts: &[
            PROJ,
            DiskExperts::Fused {
                up: "experts.up_proj",
                down: "experts.down_proj",
                transposed: false,
                interleaved: false,
            },
        ],
        shared: shared("shared_experts", SharedWidth::Optional("moe_shared_expert_intermediate_size")),
        activation: Act::Relu2("mlp_hidden_act"),
        ..QWEN
    },
    Family { types: &["olmoe"], layers: LayerRule::All, width: "intermediate_size", ..QWEN },
    Family {
        types: &["granitemoe", "granitemoeshared", "granitemoehybrid"],
        formula: Formula::TopkSoftmax { logit_bias: false },
        routers: &["router.layer.weight"],
        blocks: &["block_sparse_moe"],
        experts: &[
            DiskExperts::Fused {
                up: "input_linear.weight",
                down: "output_linear.weight",
                transposed: false,
                interleaved: false,
            },
            FUSED,
        ],
        shared: Some(DiskSharedExpert {
            name: "shared_mlp",
            in_layer: true,
            linear: true,
            gate: None,
            bias: None,
            width: SharedWidth::Optional("shared_intermediate_size"),
        }),
        ..BASE
    },
    Family {
        types: &["gpt_oss"],
        formula: Formula::TopkSoftmax { logit_bias: true },
        blocks: &["mlp"],
        routers: &["router.weight"],
        experts: &[DiskExperts::Fused {
            up: "experts.gate_up_proj",
            down: "experts.down_proj",
            transposed: true,
            interleaved: true,
        }],
        activation: Act::Clamped,
        ..BASE
    },
    Family {
        types: &["llama4", "llama4_text"],
        formula: Formula::TopkSigmoid,
        layers: LayerRule::Interleave,
        blocks: &["feed_forward"],
        routers: &["router.weight"],
        experts: &[FUSED_T, PROJ],
        shared: shared("shared_expert", SharedWidth::Routed(None)),
        ..BASE
    },
    Family {
        types: &["ernie4_5_moe"],
        formula: Formula::SoftmaxBiased,
        layers: LayerRule::Range,
        router_f32: true,
        selection_bias: &[SelectionBias { name: "moe_statics.e_score_correction_bias", row: true, key: None }],
        shared: biased("shared_experts", SharedWidth::Count("moe_num_shared_experts"), "use_bias"),
        ..QWEN
    },
    Family {
        types: &["hunyuan_v1_moe"],
        formula: NORM,
        layers: LayerRule::All,
        width: "intermediate_size",
        routers: &["gate.wg.weight"],
        router_f32: true,
        shared: shared("shared_mlp", SharedWidth::Routed(Some("num_shared_expert"))),
        ..QWEN
    },
    Family {
        types: &["dbrx"],
        formula: Formula::SoftmaxPower,
        width: "ffn_hidden_size",
        blocks: &["ffn"],
        routers: &["router.layer.weight"],
        experts: &[
            DiskExperts::Stacked { gate: "experts.mlp.w1", up: "experts.mlp.v1", down: "experts.mlp.w2" },
            FUSED,
        ],
        activation: Act::Silu("ffn_act_fn"),
        ..BASE
    },
    Family {
        types: &["jamba"],
        formula: Formula::Softmax(Normalize::Never),
        layers: LayerRule::Period,
        width: "intermediate_size",
        blocks: &["feed_forward"],
        routers: &["router.weight"],
        ..QWEN
    },
];

/// Families that are known to be none of these, and what the layer lacks for them.
pub(super) static REFUSED: &[(&[&str], &str)] = &[
    (
        &["ernie4_5_vl_moe", "ernie4_5_vl_moe_text"],
        "two groups of experts in a block, one for text and one for images, each with a router and a selection bias",
    ),
    (&["deepseek_v4"], "scores by sqrt(softplus) (scoring_func)"),
];

/// The feature that the layer lacks for a `model_type`, where that is known.
pub(super) fn lacking(model_type: &str) -> Option<&'static str> {
    REFUSED.iter().find(|(types, _)| types.contains(&model_type)).map(|(_, lacking)| *lacking)
}

/// The family of a `model_type`.
pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.types.contains(&model_type))
}
