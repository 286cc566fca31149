//! Multimodal wrappers: the text model's configuration lies in an object, its tensors behind a prefix.

mod support;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use moebius_models::{LoadOptions, Model};
use serde_json::json;

use support::{Golden, relative, shipped};

/// f32, as for the folder that the wrapper is made of.
const F32: f64 = 5e-6;

#[test]
fn a_wrapper_has_the_logits_of_its_text_model() {
    for (name, model_type, model, head) in [
        ("llama4", "llama4", "language_model.model.", "language_model.lm_head."),
        ("qwen3_5_moe", "qwen3_5_moe", "model.language_model.", "lm_head."),
        ("deepseek_v3", "kimi_k25", "language_model.model.", "language_model.lm_head."),
    ] {
        let golden = Golden::named(name);
        let dir = tempfile::tempdir().expect("a folder");
        let text = golden.checkpoint.config();
        let config = json!({"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 8}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a config");
        let tensors = candle_core::safetensors::load(shipped().join(name).join("model.safetensors"), &Device::Cpu);
        let renamed = tensors.expect("weights").into_iter().map(|(name, tensor)| {
            let renamed = match (name.strip_prefix("model."), name.strip_prefix("lm_head.")) {
                (Some(rest), _) => format!("{model}{rest}"),
                (None, Some(rest)) => format!("{head}{rest}"),
                (None, None) => name,
            };
            (renamed, tensor)
        });
        let mut renamed: HashMap<String, Tensor> = renamed.collect();
        let tower = Tensor::zeros((4, 8), DType::F32, &Device::Cpu).expect("a tensor");
        renamed.insert("vision_tower.patch_embed.weight".into(), tower);
        candle_core::safetensors::save(&renamed, dir.path().join("model.safetensors")).expect("weights");
        let model = Model::load(dir.path(), &Device::Cpu, LoadOptions::default())
            .unwrap_or_else(|e| panic!("{name} in a wrapper: {e}"));
        let error = relative(&model.forward(golden.ids()).expect("logits"), &golden.tensors["logits"]);
        assert!(error <= F32, "{name} in a wrapper: logits differ by {error:e}");
    }
}
