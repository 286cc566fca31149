//! A configuration of each family: its keys, how its tensors are named, and what is to be read of it.

use super::tensors::*;
use super::*;

fn sum(epsilon: f64) -> Option<Renorm> {
    Some(Renorm { p: 1.0, epsilon, floor: 0.0 })
}

/// Keys that most families share, and those of one.
fn keys(model_type: &str, own: Value) -> Value {
    let mut config = json!({"model_type": model_type, "hidden_size": H, "num_hidden_layers": 3, "hidden_act": "silu",
        "num_experts_per_tok": 2, "moe_intermediate_size": I, "intermediate_size": 77});
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

fn nested(outer: &str, text: Value) -> Value {
    json!({"model_type": outer, "text_config": text, "vision_config": {"hidden_size": 9}})
}

const PROJ: Style = Style::Each("gate_proj", "up_proj", "down_proj");
const W123: Style = Style::Each("w1", "w3", "w2");
const MODEL: &str = "model.layers.";
const LANGUAGE: &str = "model.language_model.layers.";
const CORRECTION: Option<(&str, &[usize])> = Some(("gate.e_score_correction_bias", &[E]));

fn qwen_like(config: Value, root: &'static str, check: fn(&MoeConfig)) -> Case {
    Case {
        config,
        root,
        block: "mlp",
        router: "gate.weight",
        bias: None,
        style: PROJ,
        shared: None,
        layers: &[0, 1, 2],
        check,
    }
}

fn mixtral_like(config: Value, check: fn(&MoeConfig)) -> Case {
    Case { block: "block_sparse_moe", style: W123, ..qwen_like(config, MODEL, check) }
}

fn v3_like(model_type: &str, own: Value, check: fn(&MoeConfig)) -> Case {
    let mut config = keys(model_type, own);
    let base = json!({"n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 1});
    for (key, value) in base.as_object().unwrap() {
        config.as_object_mut().unwrap().entry(key).or_insert(value.clone());
    }
    Case {
        bias: CORRECTION,
        shared: Some(("mlp.shared_experts", I)),
        layers: &[1, 2],
        ..qwen_like(config, MODEL, check)
    }
}

pub(super) fn softmax_cases() -> Vec<Case> {
    let qwen35 = json!({"num_experts": E, "shared_expert_intermediate_size": S});
    let shared: fn(&MoeConfig) = |c| {
        assert_eq!((c.router.score, c.router.renorm), (Score::Softmax, sum(0.0)));
        assert_eq!(c.shared, Some(SharedConfig { intermediate: S, gated: true, bias: false }));
    };
    vec![
        mixtral_like(keys("minimax", json!({"num_local_experts": E, "intermediate_size": I})), |c| {
            assert_eq!((c.router.score, c.router.renorm), (Score::Softmax, sum(0.0)));
        }),
        Case {
            shared: Some(("mlp.shared_expert", S)),
            layers: &[1],
            ..qwen_like(
                keys(
                    "qwen3_next",
                    json!({"num_experts": E, "shared_expert_intermediate_size": S,
                    "mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": true}),
                ),
                MODEL,
                shared,
            )
        },
        Case {
            style: Style::Fused,
            shared: Some(("mlp.shared_expert", S)),
            ..qwen_like(nested("qwen3_5_moe", keys("qwen3_5_moe_text", qwen35.clone())), LANGUAGE, shared)
        },
        Case { shared: Some(("mlp.shared_expert", S)), ..qwen_like(keys("qwen3_5_moe_text", qwen35), MODEL, shared) },
        Case {
            style: Style::FusedInOut,
            ..qwen_like(nested("qwen3_vl_moe", keys("qwen3_vl_moe_text", json!({"num_experts": E}))), LANGUAGE, |c| {
                assert_eq!((c.router.renorm, c.shared), (sum(0.0), None));
            })
        },
        // The gate's weight is not among the experts' in width: `intermediate_size` counts here.
        Case {
            router: "gate.wg.weight",
            shared: Some(("mlp.shared_mlp", I)),
            ..qwen_like(
                keys(
                    "hunyuan_v1_moe",
                    json!({"num_experts": E, "moe_topk": [1, 2, 1], "intermediate_size": I,
                    "moe_intermediate_size": null, "num_experts_per_tok": null, "num_shared_expert": [1, 1, 1]}),
                ),
                MODEL,
                |c| {
                    assert_eq!((c.router.score, c.router.renorm), (Score::Softmax, sum(0.0)));
                    assert!(c.router.top_k == 1 || c.router.top_k == 2);
                },
            )
        },
        Case {
            root: "transformer.blocks.",
            block: "ffn",
            router: "router.layer.weight",
            style: Style::Stacked,
            ..qwen_like(
                json!({"model_type": "dbrx", "d_model": H, "n_layers": 3, "ffn_config": {"ffn_hidden_size": I, "hidden_size": 6144,
                    "moe_num_experts": E, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"},
                    "moe_normalize_expert_weights": 2.0}}),
                MODEL,
                |c| assert_eq!(c.router.renorm, Some(Renorm { p: 2.0, epsilon: 0.0, floor: 0.0 })),
            )
        },
        Case {
            block: "feed_forward",
            router: "router.weight",
            layers: &[1],
            ..qwen_like(
                keys(
                    "jamba",
                    json!({"num_experts": E, "intermediate_size": I, "expert_layer_period": 2,
                    "expert_layer_offset": 1}),
                ),
                MODEL,
                |c| assert_eq!((c.router.score, c.router.renorm), (Score::Softmax, None)),
            )
        },
        Case {
            bias: Some(("moe_statics.e_score_correction_bias", &[1, E])),
            shared: Some(("mlp.shared_experts", 2 * I)),
            layers: &[1],
            ..qwen_like(
                keys(
                    "ernie4_5_moe",
                    json!({"moe_num_experts": E, "moe_k": 2, "num_experts_per_tok": null,
                    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                    "moe_layer_interval": 2, "moe_norm_min": 1e-9, "use_bias": true}),
                ),
                MODEL,
                |c| {
                    assert_eq!(c.router.renorm, Some(Renorm { p: 1.0, epsilon: 0.0, floor: 1e-9 }));
                    assert!(c.router.selection_bias && c.router.score == Score::Softmax);
                    assert!(c.shared.is_some_and(|shared| shared.bias));
                },
            )
        },
        Case {
            shared: Some(("mlp.shared_experts", 2 * I)),
            layers: &[1, 2],
            ..qwen_like(
                keys(
                    "deepseek_v2",
                    json!({"n_routed_experts": E, "n_shared_experts": 2, "first_k_dense_replace": 1,
                    "moe_layer_freq": 1, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
                    "norm_topk_prob": false, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
                    "mlp_bias": true}),
                ),
                MODEL,
                |c| {
                    let groups = GroupLimit { groups: 2, keep: 1, rank_by: GroupScore::Max };
                    assert_eq!((c.router.groups, c.router.scale, c.router.renorm), (Some(groups), 16.0, None));
                    assert_eq!(c.shared, Some(SharedConfig { intermediate: 2 * I, gated: false, bias: true }));
                },
            )
        },
    ]
}

pub(super) fn sigmoid_cases() -> Vec<Case> {
    let v3: fn(&MoeConfig) = |c| {
        assert_eq!((c.router.score, c.router.renorm), (Score::Sigmoid, sum(1e-20)));
        assert!(c.router.selection_bias && c.router.groups.is_none());
    };
    let grouped: fn(&MoeConfig) = |c| {
        let groups = GroupLimit { groups: 2, keep: 1, rank_by: GroupScore::Top2Sum };
        assert_eq!((c.router.groups, c.router.scale), (Some(groups), 2.827));
    };
    let kimi = json!({"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.827, "topk_method": "noaux_tc"});
    let mut kimi_k25 = v3_like("kimi_k2", kimi.clone(), grouped);
    kimi_k25.config = nested("kimi_k25", kimi_k25.config);
    kimi_k25.root = "language_model.model.layers.";
    vec![
        Case {
            bias: Some(("e_score_correction_bias", &[E])),
            ..mixtral_like(
                keys(
                    "minimax_m2",
                    json!({"num_local_experts": E, "intermediate_size": I,
                "scoring_func": "sigmoid"}),
                ),
                |c| {
                    assert_eq!((c.router.score, c.router.renorm), (Score::Sigmoid, sum(0.0)));
                },
            )
        },
        v3_like("deepseek_v32", kimi.clone(), grouped),
        v3_like("kimi_k2", kimi, grouped),
        kimi_k25,
        v3_like("glm4_moe", json!({"n_group": 1, "topk_group": 1, "norm_topk_prob": true}), v3),
        v3_like("glm4_moe_lite", json!({"mlp_layer_types": ["dense", "sparse", "sparse"]}), v3),
        v3_like("glm_moe_dsa", json!({}), v3),
        v3_like("dots1", json!({"norm_topk_prob": false}), |c| assert_eq!(c.router.renorm, None)),
        Case {
            shared: None,
            ..v3_like(
                "mimo_v2_flash",
                json!({"moe_layer_freq": [0, 1, 1], "n_shared_experts": null, "routed_scaling_factor": null,
                    "first_k_dense_replace": null}),
                |c| assert_eq!((c.router.scale, c.shared), (1.0, None)),
            )
        },
        Case {
            bias: CORRECTION,
            shared: Some(("block_sparse_moe.shared_experts", I)),
            layers: &[1, 2],
            ..mixtral_like(
                keys(
                    "kimi_linear",
                    json!({"num_experts": E, "num_experts_per_token": 2, "num_experts_per_tok": null,
                    "moe_renormalize": true, "num_expert_group": 2, "topk_group": 1, "num_shared_experts": 1,
                    "routed_scaling_factor": 2.827, "first_k_dense_replace": 1}),
                ),
                grouped,
            )
        },
        Case {
            router: "router.gate.weight",
            bias: Some(("expert_bias", &[E])),
            shared: Some(("mlp.shared_mlp", I)),
            layers: &[1, 2],
            ..qwen_like(
                keys(
                    "hy_v3",
                    json!({"num_experts": E, "num_shared_experts": 1, "first_k_dense_replace": 1,
                    "router_scaling_factor": 3.0}),
                ),
                MODEL,
                |c| assert_eq!((c.router.renorm, c.router.scale), (sum(1e-20), 3.0)),
            )
        },
        Case {
            block: "feed_forward",
            bias: Some(("expert_bias", &[E])),
            layers: &[1, 2],
            ..mixtral_like(
                keys(
                    "lfm2_moe",
                    json!({"num_experts": E, "num_dense_layers": 1, "use_expert_bias": true,
                    "norm_topk_prob": true, "routed_scaling_factor": 1.5}),
                ),
                |c| assert_eq!((c.router.renorm, c.router.scale), (sum(1e-6), 1.5)),
            )
        },
        Case {
            root: "backbone.layers.",
            block: "mixer",
            style: Style::UpDown,
            shared: Some(("mixer.shared_experts", S)),
            layers: &[2],
            ..v3_like(
                "nemotron_h",
                json!({"hybrid_override_pattern": "M*E", "mlp_hidden_act": "relu2", "hidden_act": null,
                    "moe_shared_expert_intermediate_size": S, "routed_scaling_factor": 2.5}),
                |c| assert_eq!((c.activation, c.router.scale), (Activation::Relu2, 2.5)),
            )
        },
    ]
}

pub(super) fn topk_cases() -> Vec<Case> {
    let llama = json!({"num_local_experts": E, "intermediate_size": I, "interleave_moe_layer_step": 2});
    vec![
        Case {
            router: "router.layer.weight",
            style: Style::FusedNames("input_linear.weight", "output_linear.weight"),
            shared: Some(("shared_mlp", S)),
            ..mixtral_like(
                keys(
                    "granitemoeshared",
                    json!({"num_local_experts": E, "intermediate_size": I,
                    "shared_intermediate_size": S}),
                ),
                |c| {
                    assert_eq!((c.router.score, c.router.renorm), (Score::TopkSoftmax, None));
                    assert_eq!(c.shared, Some(SharedConfig { intermediate: S, gated: false, bias: false }));
                },
            )
        },
        Case {
            root: "language_model.model.layers.",
            block: "feed_forward",
            router: "router.weight",
            style: Style::FusedInOut,
            shared: Some(("feed_forward.shared_expert", I)),
            layers: &[1],
            ..qwen_like(nested("llama4", keys("llama4_text", llama)), MODEL, |c| {
                assert_eq!((c.router.score, c.weight_at), (Score::TopkSigmoid, WeightAt::Input));
            })
        },
    ]
}
