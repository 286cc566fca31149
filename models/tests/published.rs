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

/// Parameters of the rotation under the types of layers are those of the layers, and not ignored; of two bases, and of none
/// where it should be, those that transformers 5.17 takes.
#[test]
fn rope_parameters_by_type_of_layer() {
    let golden = Golden::named("gpt_oss");
    let logits = |change: &dyn Fn(&mut Value)| logits(&golden, "gpt_oss", change);
    let expected = logits(&|_| {});
    let flat = golden.checkpoint.config()["rope_parameters"].clone();
    let without = |key: &str| {
        let mut parameters = flat.clone();
        parameters.as_object_mut().expect("an object").remove(key);
        parameters
    };
    let both = json!({"full_attention": flat, "sliding_attention": flat});
    let beside = json!({"full_attention": without("rope_theta"), "sliding_attention": flat,
        "rope_theta": flat["rope_theta"], "chunked_attention": {"rope_type": "default"}});
    // A key outside completes and replaces none of them.
    let original = flat["original_max_position_embeddings"].as_u64().expect("a yarn rotation");
    let with_original = logits(&|c| {
        c["rope_parameters"] = both.clone();
        c["original_max_position_embeddings"] = json!(2 * original);
    });
    assert_eq!(relative(&with_original, &expected), EXACT);
    for parameters in [both, beside] {
        assert_eq!(relative(&logits(&|c| c["rope_parameters"] = parameters.clone()), &expected), EXACT);
    }
    let other = logits(&|c| c["rope_parameters"]["rope_theta"] = json!(1e4));
    assert!(relative(&other, &expected) > 1e-3, "another base rotates alike");
    let of_types = |theta: f64| {
        let mut parameters = flat.clone();
        parameters["rope_theta"] = json!(theta);
        json!({"full_attention": parameters, "sliding_attention": parameters})
    };
    assert_eq!(relative(&logits(&|c| c["rope_parameters"] = of_types(1e4)), &other), EXACT);
    // The inner one counts before the one outside, which counts where the inner one is absent.
    assert_eq!(relative(&logits(&|c| c["rope_theta"] = json!(1e4)), &expected), EXACT);
    let outside = logits(&|c| {
        (c["rope_theta"], c["rope_parameters"]) = (json!(1e4), without("rope_theta"));
    });
    assert_eq!(relative(&outside, &other), EXACT);
    let scaled = |theta: Option<f64>| {
        logits(&|c| {
            (c["rope_theta"], c["rope_scaling"]) = (json!(1e4), without("rope_theta"));
            theta.into_iter().for_each(|theta| c["rope_scaling"]["rope_theta"] = json!(theta));
            c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1e4});
        })
    };
    assert_eq!(relative(&scaled(Some(1.5e5)), &expected), EXACT);
    assert_eq!(relative(&scaled(None), &other), EXACT);
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
