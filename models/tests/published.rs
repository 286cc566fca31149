//! Published configurations that no golden folder has: their logits are those of the folder that says the same in other
//! words.

mod support;

use candle_core::Device;
use moebius_models::{LoadOptions, Model};
use serde_json::{Value, json};

use support::{Golden, relative, shipped};

/// The same sums in the same order.
const EXACT: f64 = 0.0;

/// Logits of a shipped folder's weights and ids under a changed configuration.
fn logits(golden: &Golden, name: &str, change: impl FnOnce(&mut Value)) -> candle_core::Tensor {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = golden.checkpoint.config().clone();
    change(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a config");
    let weights = shipped().join(name).join("model.safetensors");
    std::fs::copy(weights, dir.path().join("model.safetensors")).expect("weights");
    let model = Model::load(dir.path(), &Device::Cpu, LoadOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    model.forward(golden.ids()).expect("logits")
}

/// Kimi K2 is DeepSeek-V3's decoder under a name of its own.
#[test]
fn kimi_k2() {
    let golden = Golden::named("deepseek_v3");
    let expected = logits(&golden, "deepseek_v3", |_| {});
    let found = logits(&golden, "deepseek_v3", |config| config["model_type"] = "kimi_k2".into());
    assert_eq!(relative(&found, &expected), EXACT);
}

/// MiniMax's `rotary_dim`, entries of a head that are rotated, which transformers has as a part.
#[test]
fn rotary_dim_of_minimax_m2() {
    let golden = Golden::named("minimax_m2");
    let whole = logits(&golden, "minimax_m2", |_| {});
    let part = logits(&golden, "minimax_m2", |config| config["rope_parameters"]["partial_rotary_factor"] = json!(0.5));
    let published = logits(&golden, "minimax_m2", |config| {
        let rotated = config["head_dim"].as_u64().expect("a size") / 2;
        config["rotary_dim"] = rotated.into();
    });
    assert_eq!(relative(&published, &part), EXACT);
    assert!(relative(&published, &whole) > 1e-3, "half a head rotates as a whole one");
}
