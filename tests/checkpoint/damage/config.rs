//! Configurations, and what they declare.

use super::*;

#[test]
fn configurations() {
    let huge = 1u64 << 40;
    let set = |family: &'static str, key: &'static str, value: Value| (family, key, value);
    let cases: Vec<((&str, &str, Value), Kind, &str)> = vec![
        (set("qwen3_moe", "model_type", json!("gpt2")), Kind::UnknownFamily, "qwen3_moe"),
        (set("qwen3_moe", "model_type", json!("x".repeat(1 << 20))), Kind::UnknownFamily, "xxx"),
        (set("qwen3_moe", "model_type", json!("ernie4_5_vl_moe")), Kind::UnsupportedFamily, "one for images"),
        (set("qwen3_moe", "model_type", json!("deepseek_v4")), Kind::UnsupportedFamily, "sqrt(softplus)"),
        (set("qwen3_moe", "model_type", json!(null)), Kind::Config, "model_type"),
        (set("qwen3_moe", "model_type", json!(3)), Kind::Config, "model_type"),
        (set("qwen3_moe", "num_local_experts", json!(0)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(65537)), Kind::Config, "65536"),
        (set("qwen3_moe", "num_local_experts", json!(huge)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(null)), Kind::Config, "num_experts"),
        (set("qwen3_moe", "num_local_experts", json!("8")), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_local_experts", json!(8.5)), Kind::Config, "num_local_experts"),
        (set("qwen3_moe", "num_experts_per_tok", json!(9)), Kind::Config, "num_experts_per_tok"),
        (set("qwen3_moe", "num_experts_per_tok", json!(0)), Kind::Config, "num_experts_per_tok"),
        (set("qwen3_moe", "num_experts_per_tok", json!([3])), Kind::Config, "layer 1"),
        (set("qwen3_moe", "hidden_size", json!(huge)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "hidden_size", json!(-64)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "hidden_size", json!(u64::MAX)), Kind::Config, "hidden_size"),
        (set("qwen3_moe", "moe_intermediate_size", json!(huge)), Kind::Config, "moe_intermediate_size"),
        (set("qwen3_moe", "moe_intermediate_size", json!(null)), Kind::Config, "moe_intermediate_size"),
        (set("qwen3_moe", "num_hidden_layers", json!(huge)), Kind::Config, "num_hidden_layers"),
        (set("qwen3_moe", "num_hidden_layers", json!(0)), Kind::Config, "num_hidden_layers"),
        (set("qwen3_moe", "decoder_sparse_step", json!(0)), Kind::Config, "decoder_sparse_step"),
        (set("qwen3_moe", "mlp_only_layers", json!({})), Kind::Config, "mlp_only_layers"),
        (set("qwen3_moe", "norm_topk_prob", json!(1)), Kind::Config, "norm_topk_prob"),
        (set("qwen3_moe", "hidden_act", json!("gelu")), Kind::Config, "gelu"),
        (
            set("qwen3_moe", "quantization_config", json!({"weight_block_size": [0, 128]})),
            Kind::Config,
            "weight_block_size",
        ),
        (set("qwen3_moe", "mlp_layer_types", json!(["sparse"])), Kind::Config, "mlp_layer_types"),
        // Sizes that the tensors do not have.
        (set("qwen3_moe", "num_local_experts", json!(16)), Kind::Tensor, "mlp.gate.weight"),
        (set("qwen3_moe", "hidden_size", json!(1 << 20)), Kind::Tensor, "[8, 1048576]"),
        (set("qwen3_moe", "moe_intermediate_size", json!(1 << 22)), Kind::Tensor, "4194304"),
        (set("qwen3_moe", "decoder_sparse_step", json!(3)), Kind::Invalid, "moe_layers"),
        (set("qwen2_moe", "shared_expert_intermediate_size", json!(null)), Kind::Config, "shared_expert"),
        (set("qwen2_moe", "shared_expert_intermediate_size", json!(0)), Kind::Unexpected, "shared_expert"),
        (set("deepseek_v3", "n_group", json!(3)), Kind::Config, "groups"),
        (set("deepseek_v3", "n_group", json!(16)), Kind::Config, "n_group"),
        (set("deepseek_v3", "topk_group", json!(5)), Kind::Config, "topk_group"),
        (set("deepseek_v3", "scoring_func", json!("softmax")), Kind::Config, "sigmoid"),
        (set("deepseek_v3", "topk_method", json!("greedy")), Kind::Config, "noaux_tc"),
        (set("deepseek_v3", "routed_scaling_factor", json!("big")), Kind::Config, "routed_scaling_factor"),
        (set("deepseek_v3", "n_shared_experts", json!(1 << 22)), Kind::Config, "n_shared_experts"),
        (set("deepseek_v3", "moe_layer_freq", json!(0)), Kind::Config, "moe_layer_freq"),
        (set("deepseek_v2", "topk_method", json!("noaux_tc")), Kind::Config, "topk_method"),
        (set("llama4_top2", "moe_layers", json!([1, 7])), Kind::Config, "moe_layers"),
        (set("phimoe", "num_experts_per_tok", json!(3)), Kind::Config, "top_k"),
        (set("gpt_oss", "swiglu_limit", json!(-1.0)), Kind::Config, "limit"),
        (set("gpt_oss", "hidden_act", json!("gelu")), Kind::Config, "expected silu or swish, found \"gelu\""),
        (set("qwen3_moe", "hidden_act", json!({})), Kind::Config, "field hidden_act: expected a string"),
        (set("qwen3_moe", "hidden_act", json!({"name": "silu"})), Kind::Config, "field hidden_act"),
        (set("qwen3_moe", "hidden_act", json!(["silu"])), Kind::Config, "field hidden_act"),
        (set("qwen3_moe", "quantization_config", json!("fp8")), Kind::Config, "expected an object"),
        (set("qwen3_moe", "quantization_config", json!({"quant_method": 3})), Kind::Config, "quant_method"),
    ];
    for ((family, key, value), expected, words) in cases {
        let dir = copy(family);
        let mut changed = config(family);
        changed[key] = value.clone();
        fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
        refuse(&format!("{family}: {key} = {}", clip(&value)), dir.path(), expected, words);
    }
    // Wrappers keep the text model's keys, this one among them, in an object of their own.
    let dir = copy("qwen3_moe");
    let mut text = config("qwen3_moe");
    text["quantization_config"] = json!({"weight_block_size": [0, 128]});
    fs::write(dir.path().join("config.json"), json!({"model_type": "a_wrapper", "text_config": text}).to_string())
        .unwrap();
    refuse("a text model's own blocks", dir.path(), Kind::Config, "weight_block_size");
    // A wrapper of a family that is known by its text model's.
    let wrapper = json!({"model_type": "ernie4_5_vl_moe", "text_config": config("ernie4_5_moe")});
    fs::write(dir.path().join("config.json"), wrapper.to_string()).unwrap();
    refuse("a wrapper", dir.path(), Kind::UnsupportedFamily, "ernie4_5_vl_moe");
    for (what, text, expected) in [
        ("no JSON", "{".to_string(), Kind::Config),
        ("an array", "[]".to_string(), Kind::Config),
        ("a number", "3".to_string(), Kind::Config),
        ("deep nesting", "[".repeat(100_000), Kind::Config),
        ("5 MiB", " ".repeat(5 << 20), Kind::TooLarge),
        ("many values", format!("[{}{{}}]", "{},".repeat(70_000)), Kind::Config),
        ("nesting beyond the limit", format!("{{\"a\":{}{}}}", "[".repeat(40), "]".repeat(40)), Kind::Config),
        ("a long key", format!("{{\"{}\":1}}", "k".repeat(2000)), Kind::Config),
    ] {
        let dir = copy("qwen3_moe");
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse(what, dir.path(), expected, "config.json");
    }
    for (text, kind) in [("[1, 2]", "a list"), ("3", "a number"), ("\"a\"", "a string"), ("null", "null")] {
        let dir = copy("qwen3_moe");
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse(text, dir.path(), Kind::Config, &format!("expected an object, found {kind}"));
    }
    let dir = copy("qwen3_moe");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    refuse("no configuration", dir.path(), Kind::Io, "config.json: No such file or directory");
}

/// A key that comes twice is an error wherever it stands, as in a header and an index; the last one does not win.
#[test]
fn keys_that_come_twice() {
    for (from, to) in [
        ("{", r#"{"model_type": "mixtral","#),
        ("{", r#"{"x": [{"a": 1, "b": {"hidden\u005fsize": 1, "hidden_size": 2}}],"#),
    ] {
        let dir = copy("qwen3_moe");
        let text = config("qwen3_moe").to_string().replacen(from, to, 1);
        fs::write(dir.path().join("config.json"), text).unwrap();
        refuse("a key twice", dir.path(), Kind::Config, "comes twice");
    }
}

/// The files' declarations of quantization are held against the tensors.
#[test]
fn declarations_that_are_not_so() {
    let nvfp4 = "qwen3_moe_nvfp4_modelopt";
    let at = |family: &'static str, path: &'static str, value: Value, words: &'static str| (family, path, value, words);
    for (family, path, value, words) in [
        at(nvfp4, "/quant_algo", json!("FP8"), "field quant_algo: expected a name with NVFP4"),
        at(nvfp4, "/quant_method", json!("awq"), "found \"awq\""),
        at(nvfp4, "/group_size", json!(32), ""),
        at(nvfp4, "/config_groups/group_0/weights/group_size", json!(32), "field group_size: expected 16"),
        at("qwen3_moe_nvfp4_ct", "/quant_method", json!("modelopt"), "expected compressed-tensors"),
        at("qwen3_moe_nvfp4_ct", "/config_groups/group_0/weights/group_size", json!(128), "found 128"),
        at("gpt_oss_mxfp4", "/quant_method", json!("fp8"), "expected mxfp4"),
        at("deepseek_v3_fp8", "/quant_method", json!("mxfp4"), "expected fp8"),
        at("deepseek_v3_fp8", "/quant_algo", json!("NVFP4"), "a name with FP8"),
    ] {
        let dir = copy(family);
        let mut changed = config(family);
        let quantized = &mut changed["quantization_config"];
        match quantized.pointer_mut(path) {
            Some(place) => *place = value,
            None => quantized[&path[1..]] = value,
        }
        if path == "/group_size" {
            // One statement among several that agree: groups of layers may differ, so this alone is no contradiction.
            quantized.as_object_mut().unwrap().remove("config_groups");
        }
        fs::write(dir.path().join("config.json"), changed.to_string()).unwrap();
        refuse(&format!("{family}: {path}"), dir.path(), Kind::Declaration, words);
    }
    for (change, expected) in [
        (json!({"quantization": {"quant_algo": "FP8"}}), Some(Kind::Declaration)),
        (json!({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}), Some(Kind::Declaration)),
        (json!({"quantization": {"quant_algo": 4}}), Some(Kind::Config)),
        (json!({"quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}), None),
        (json!({"quantization": {"quant_algo": "MIXED_PRECISION"}}), None),
    ] {
        let dir = copy(nvfp4);
        fs::write(dir.path().join("hf_quant_config.json"), change.to_string()).unwrap();
        match expected {
            Some(kind) => refuse(&change.to_string(), dir.path(), kind, "hf_quant_config.json"),
            None => attempt(dir.path()).unwrap(),
        }
    }
}
