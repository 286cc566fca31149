//! Families without a shipped folder: small synthetic ones whose every element says where it belongs.

use moebius::checkpoint::Checkpoint;
use moebius::config::{Activation, GroupLimit, GroupScore, MoeConfig, Renorm, Score, SharedConfig, WeightAt};
use serde_json::{Value, json};

use crate::support::*;

const E: usize = 4;
const H: usize = 6;
const I: usize = 5;
const S: usize = 3;

/// Value of an element, as a number that F32 holds exactly.
fn element(kind: usize, expert: usize, row: usize, column: usize) -> f32 {
    (((kind * 8 + expert) * 32 + row) * 32 + column) as f32
}

const GATE: usize = 1;
const UP: usize = 2;
const DOWN: usize = 3;
const ROUTER: usize = 4;
const BIAS: usize = 5;
const SHARED_GATE: usize = 6;
const SHARED_UP: usize = 7;
const SHARED_DOWN: usize = 8;
const SHARED_SCALE: usize = 9;
const SHARED_BIASES: [usize; 3] = [10, 11, 12];

fn matrix(kind: usize, expert: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| element(kind, expert, i / columns, i % columns)).collect()
}

fn flipped(kind: usize, expert: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| element(kind, expert, i % rows, i / rows)).collect()
}

/// How the routed experts are written.
enum Style {
    Each(&'static str, &'static str, &'static str),
    Fused,
    FusedNames(&'static str, &'static str),
    FusedInOut,
    Stacked,
    UpDown,
}

struct Case {
    config: Value,
    /// Everything before the layer's number.
    root: &'static str,
    block: &'static str,
    router: &'static str,
    bias: Option<(&'static str, &'static [usize])>,
    style: Style,
    /// Name in the layer and inner size.
    shared: Option<(&'static str, usize)>,
    layers: &'static [usize],
    check: fn(&MoeConfig),
}

impl Case {
    /// The shared expert's matrices have biases.
    fn biased(&self) -> bool {
        ["use_bias", "mlp_bias"].iter().any(|key| self.config[*key] == true)
    }
}

fn tensors(case: &Case) -> Tensors {
    let mut tensors = Tensors::new();
    for layer in case.layers {
        let layer = format!("{}{layer}", case.root);
        let block = format!("{layer}.{}", case.block);
        let mut put = |name: String, shape: &[usize], values: Vec<f32>| {
            tensors.insert(name, Raw::f32(shape, values));
        };
        put(format!("{block}.{}", case.router), &[E, H], matrix(ROUTER, 0, E, H));
        if let Some((name, shape)) = case.bias {
            put(format!("{block}.{name}"), shape, matrix(BIAS, 0, E, 1));
        }
        if let Some((name, s)) = case.shared {
            let name = format!("{layer}.{name}");
            if name.ends_with("shared_mlp") && case.block == "block_sparse_moe" {
                let up = [matrix(SHARED_GATE, 0, s, H), matrix(SHARED_UP, 0, s, H)].concat();
                put(format!("{name}.input_linear.weight"), &[2 * s, H], up);
                put(format!("{name}.output_linear.weight"), &[H, s], matrix(SHARED_DOWN, 0, H, s));
            } else {
                if !matches!(case.style, Style::UpDown) {
                    put(format!("{name}.gate_proj.weight"), &[s, H], matrix(SHARED_GATE, 0, s, H));
                }
                put(format!("{name}.up_proj.weight"), &[s, H], matrix(SHARED_UP, 0, s, H));
                put(format!("{name}.down_proj.weight"), &[H, s], matrix(SHARED_DOWN, 0, H, s));
                let [gate, up, down] = SHARED_BIASES;
                for (part, kind, rows) in [("gate_proj", gate, s), ("up_proj", up, s), ("down_proj", down, H)] {
                    if case.biased() {
                        put(format!("{name}.{part}.bias"), &[rows], matrix(kind, 0, rows, 1));
                    }
                }
            }
            if name.ends_with("shared_expert") && case.block == "mlp" {
                put(format!("{name}_gate.weight"), &[1, H], matrix(SHARED_SCALE, 0, 1, H));
            }
        }
        let all = |one: &dyn Fn(usize) -> Vec<f32>| (0..E).flat_map(one).collect::<Vec<f32>>();
        let gate_up = |e| [matrix(GATE, e, I, H), matrix(UP, e, I, H)].concat();
        match case.style {
            Style::Each(gate, up, down) => {
                for e in 0..E {
                    let name = |name: &str| format!("{block}.experts.{e}.{name}.weight");
                    put(name(gate), &[I, H], matrix(GATE, e, I, H));
                    put(name(up), &[I, H], matrix(UP, e, I, H));
                    put(name(down), &[H, I], matrix(DOWN, e, H, I));
                }
            }
            Style::UpDown => {
                for e in 0..E {
                    let name = |name: &str| format!("{block}.experts.{e}.{name}.weight");
                    put(name("up_proj"), &[I, H], matrix(UP, e, I, H));
                    put(name("down_proj"), &[H, I], matrix(DOWN, e, H, I));
                }
            }
            Style::Fused | Style::FusedNames(..) => {
                let (up, down) = match case.style {
                    Style::FusedNames(up, down) => (up, down),
                    _ => ("experts.gate_up_proj", "experts.down_proj"),
                };
                put(format!("{block}.{up}"), &[E, 2 * I, H], all(&gate_up));
                put(format!("{block}.{down}"), &[E, H, I], all(&|e| matrix(DOWN, e, H, I)));
            }
            Style::FusedInOut => {
                let up = |e: usize| {
                    let (gate, up) = (flipped(GATE, e, I, H), flipped(UP, e, I, H));
                    gate.chunks(I).zip(up.chunks(I)).flat_map(|(g, u)| [g, u].concat()).collect()
                };
                put(format!("{block}.experts.gate_up_proj"), &[E, H, 2 * I], all(&up));
                put(format!("{block}.experts.down_proj"), &[E, I, H], all(&|e| flipped(DOWN, e, H, I)));
            }
            Style::Stacked => {
                put(format!("{block}.experts.mlp.w1"), &[E * I, H], all(&|e| matrix(GATE, e, I, H)));
                put(format!("{block}.experts.mlp.v1"), &[E * I, H], all(&|e| matrix(UP, e, I, H)));
                put(format!("{block}.experts.mlp.w2"), &[E * I, H], all(&|e| flipped(DOWN, e, H, I)));
            }
        }
    }
    tensors
}

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

fn softmax_cases() -> Vec<Case> {
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

fn sigmoid_cases() -> Vec<Case> {
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

fn topk_cases() -> Vec<Case> {
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

/// Every element of every parameter is the one that its name on disk says.
#[test]
fn names_map_to_positions() {
    let cases: Vec<Case> = softmax_cases().into_iter().chain(sigmoid_cases()).chain(topk_cases()).collect();
    assert_eq!(cases.len(), 25);
    for case in &cases {
        let tensors = tensors(case);
        let dir = folder(&case.config, &tensors);
        let what = case.config.to_string();
        let checkpoint = Checkpoint::open(dir.path()).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(checkpoint.moe_layers(), case.layers, "{what}");
        assert_eq!(checkpoint.num_layers(), 3);
        for &layer in case.layers {
            let block = checkpoint.load_block(layer, options(1, 2, None)).unwrap_or_else(|e| panic!("{what}: {e}"));
            (case.check)(&block.config);
            assert_eq!(block.config.weight_at == WeightAt::Input, block.config.router.score == Score::TopkSigmoid);
            let p = &block.params;
            let gates = block.config.activation.gate_factor();
            let up = |e| match gates {
                2 => [matrix(GATE, e, I, H), matrix(UP, e, I, H)].concat(),
                _ => matrix(UP, e, I, H),
            };
            // Rank 1 of 2 has experts 2 and 3.
            assert_eq!(p.up.dims(), [2, gates * I, H], "{what}");
            assert_eq!(p.up.as_slice::<f32>().unwrap(), [up(2), up(3)].concat(), "{what}: up");
            let down = [matrix(DOWN, 2, H, I), matrix(DOWN, 3, H, I)].concat();
            assert_eq!(p.down.as_slice::<f32>().unwrap(), down, "{what}: down");
            assert_eq!(p.router.as_slice::<f32>().unwrap(), matrix(ROUTER, 0, E, H), "{what}: router");
            let bias =
                p.others.selection_bias.as_ref().map(|t| (t.dims().to_vec(), t.as_slice::<f32>().unwrap().to_vec()));
            assert_eq!(bias, case.bias.map(|_| (vec![E], matrix(BIAS, 0, E, 1))), "{what}: bias");
            let shared = p.others.shared_up.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec());
            let expected = case.shared.map(|(_, s)| match gates {
                2 => [matrix(SHARED_GATE, 0, s, H), matrix(SHARED_UP, 0, s, H)].concat(),
                _ => matrix(SHARED_UP, 0, s, H),
            });
            assert_eq!(shared, expected, "{what}: shared up");
            let shared = p.others.shared_down.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec());
            assert_eq!(shared, case.shared.map(|(_, s)| matrix(SHARED_DOWN, 0, H, s)), "{what}: shared down");
            let [gate, up, down] = SHARED_BIASES;
            let biases = [&p.others.shared_up_bias, &p.others.shared_down_bias]
                .map(|t| t.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec()));
            let expected = case
                .shared
                .filter(|_| case.biased())
                .map(|(_, s)| [[matrix(gate, 0, s, 1), matrix(up, 0, s, 1)].concat(), matrix(down, 0, H, 1)]);
            assert_eq!(biases, expected.map_or([None, None], |biases| biases.map(Some)), "{what}: shared biases");
            assert_eq!(p.others.shared_gate.is_some(), block.config.shared.is_some_and(|s| s.gated), "{what}");
            if let Some(gate) = &p.others.shared_gate {
                assert_eq!(gate.as_slice::<f32>().unwrap(), matrix(SHARED_SCALE, 0, 1, H), "{what}: shared gate");
            }
            // And back.
            let whole = checkpoint.load_block(layer, options(0, 1, None)).unwrap().params;
            let back = checkpoint.disk_tensors(layer, &whole, 0, 1).unwrap();
            let prefix = checkpoint.layer_prefix(layer);
            assert!(back.iter().map(|(name, _)| name).eq(tensors.keys().filter(|n| n.starts_with(&prefix))), "{what}");
            assert!(back.iter().all(|(name, tensor)| tensor.as_bytes() == tensors[name].data), "{what}");
        }
    }
}

/// The golden suite's own reading of names gives what lies on disk, in every family: it could not compare otherwise.
#[test]
fn golden_suite_knows_the_names() {
    use crate::reference::{compare, dense::Params, names};
    for case in softmax_cases().into_iter().chain(sigmoid_cases()).chain(topk_cases()) {
        let tensors = tensors(&case);
        let dir = folder(&case.config, &tensors);
        let model_type = names::model_type(dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let layer = case.layers[0];
        let block = checkpoint.load_block(layer, options(0, 1, None)).unwrap();
        let framework = |t: &moebius::Tensor<moebius::cpu::Cpu>| {
            candle_core::Tensor::from_vec(t.to_f64(), t.dims(), &candle_core::Device::Cpu).unwrap()
        };
        let params: Params =
            block.params.into_params().map(|(kind, t)| (kind.name().to_string(), framework(&t))).collect();
        let prefix = format!("{}{layer}.", case.root);
        for (name, raw) in tensors.iter().filter(|(name, _)| name.starts_with(&prefix)) {
            let found =
                names::on_disk(name, &model_type, &params).unwrap_or_else(|e| panic!("{model_type}: {name}: {e}"));
            let found = found.unwrap_or_else(|| panic!("{model_type}: {name} is not known"));
            assert_eq!(found.dims(), raw.shape, "{model_type}: {name}");
            let expected: Vec<f64> = raw.values().into_iter().map(f64::from).collect();
            assert_eq!(compare::values(&found).unwrap(), expected, "{model_type}: {name}");
        }
    }
}

/// The known list names every family that is documented and no other, and each of them opens.
#[test]
fn known_families() {
    let known: Vec<&str> = Checkpoint::families().collect();
    let guide = include_str!("../../docs/checkpoints.md");
    let table = guide.split("| family (`model_type`)").nth(1).unwrap().split("\n\n").next().unwrap();
    let rows = table.lines().skip(2).map(|row| row.split('|').nth(1).unwrap());
    let mut documented: Vec<&str> = rows.flat_map(|row| row.split(',')).map(str::trim).collect();
    documented.sort_unstable();
    // Text models of wrappers have the wrappers' names.
    let mut named: Vec<&str> = known.iter().copied().filter(|family| !family.ends_with("_text")).collect();
    named.sort_unstable();
    assert_eq!(documented, named, "the table of docs/checkpoints.md");
    for family in [
        "mixtral",
        "minimax_m2",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "olmoe",
        "granitemoe",
        "gpt_oss",
        "llama4",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "dbrx",
        "jamba",
    ] {
        assert!(known.contains(&family), "{family}");
    }
    let mut unique = known.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), known.len(), "a model_type names one family");
}

/// gpt-oss, whose gate and up rows alternate: the layer has them one after the other, biases too.
#[test]
fn gpt_oss_rows_are_separated() {
    let tensors = raw(&fixture("gpt_oss").join("model.safetensors"));
    let checkpoint = Checkpoint::open(fixture("gpt_oss")).unwrap();
    let block = checkpoint.load_block(1, options(1, 2, None)).unwrap();
    let (h, i) = (block.config.hidden, block.config.intermediate);
    assert!(block.config.expert_bias && block.config.router.logit_bias);
    let disk = |name: &str| tensors[&format!("model.layers.1.mlp.{name}")].values();
    let (up, down) = (disk("experts.gate_up_proj"), disk("experts.down_proj"));
    let (up_bias, down_bias) = (disk("experts.gate_up_proj_bias"), disk("experts.down_proj_bias"));
    let local = block.config.router.num_experts / 2;
    let p = &block.params;
    for (n, found) in p.up.as_slice::<f32>().unwrap().iter().enumerate() {
        let (e, row, column) = (local + n / (2 * i * h), n / h % (2 * i), n % h);
        // Gate rows are the even ones on disk, up rows the odd ones; disk is (in, out).
        let out = if row < i { 2 * row } else { 2 * (row - i) + 1 };
        assert_eq!(*found, up[(e * h + column) * 2 * i + out], "up[{n}]");
        assert_eq!(p.others.up_bias.as_ref().unwrap().as_slice::<f32>().unwrap()[n / h], up_bias[e * 2 * i + out]);
    }
    for (n, found) in p.down.as_slice::<f32>().unwrap().iter().enumerate() {
        let (e, row, column) = (local + n / (h * i), n / i % h, n % i);
        assert_eq!(*found, down[(e * i + column) * h + row], "down[{n}]");
    }
    assert_eq!(p.others.down_bias.as_ref().unwrap().as_slice::<f32>().unwrap(), &down_bias[local * h..]);
    assert_eq!(p.others.router_bias.as_ref().unwrap().as_slice::<f32>().unwrap(), disk("router.bias"));
}
