//! Keys that `config.json` may leave out.

use serde_json::Value;

/// By `model_type`: keys and their values where the file has none, as the configuration classes of transformers 5.17 have
/// them: those that change what is computed without an error.
const DEFAULTS: &[(&str, &[(&str, &str)])] = &[
    (
        "deepseek_v3",
        &[("routed_scaling_factor", "2.5"), ("first_k_dense_replace", "3"), ("n_group", "8"), ("topk_group", "4")],
    ),
    ("ernie4_5_moe", &[("moe_layer_start_index", "1"), ("moe_num_shared_experts", "2")]),
    ("glm4_moe", &[("first_k_dense_replace", "1")]),
    ("gpt_oss", &[("sliding_window", "128")]),
    ("llama4", &[("attention_chunk_size", "8192")]),
    ("llama4_text", &[("attention_chunk_size", "8192")]),
    ("qwen2_moe", &[("sliding_window", "4096")]),
    ("qwen3_moe", &[("sliding_window", "4096")]),
];

/// Puts them into the text model's configuration; a key that is null stays so.
pub(super) fn fill(root: &mut Value) {
    let outer = root.get("model_type").cloned();
    let has_text = root.get("text_config").is_some_and(Value::is_object);
    let text = if has_text { root.get_mut("text_config") } else { Some(root) };
    let Some(text) = text.and_then(Value::as_object_mut) else { return };
    let Some(model_type) = text.get("model_type").cloned().or(outer) else { return };
    for (_, keys) in DEFAULTS.iter().filter(|(word, _)| model_type == *word) {
        for (key, value) in *keys {
            if let (false, Ok(value)) = (text.contains_key(*key), serde_json::from_str(value)) {
                text.insert(key.to_string(), value);
            }
        }
    }
}
