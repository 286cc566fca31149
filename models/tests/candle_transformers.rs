//! The example of the layer among candle-transformers' parts, against what the reference computed.

mod support;

#[path = "../examples/candle_transformers.rs"]
#[allow(dead_code, reason = "its main")]
mod example;

use candle_core::{Device, Tensor};
use moebius::candle::DeviceGroup;
use moebius::checkpoint::Checkpoint;
use support::{Golden, relative};

/// As `golden.rs` derives it for f32.
const F32: f64 = 5e-6;

#[test]
fn logits_at_once_and_token_by_token() {
    let golden = Golden::named("mixtral");
    let expected = &golden.tensors["logits"];
    let group =
        DeviceGroup::single(&golden.checkpoint.block_config(0).expect("a block"), &Device::Cpu).expect("a group");
    let load = || example::Mixtral::load(&golden.checkpoint, &group).expect("a model");
    let ids = golden.ids().to_dtype(candle_core::DType::U32).expect("ids");
    let logits = load().forward(&ids).expect("logits");
    let error = relative(&logits, expected);
    assert!(error <= F32, "{error:.1e}");
    let mut model = load();
    let step = |at| model.forward(&ids.narrow(1, at, 1).expect("a token")).expect("logits");
    let steps: Vec<Tensor> = (0..ids.dim(1).expect("tokens")).map(step).collect();
    let error = relative(&Tensor::cat(&steps, 1).expect("all tokens"), expected);
    assert!(error <= F32, "{error:.1e}");
}

/// A folder as it was published before transformers 5: the same model, whose rotations' base is a key of its own.
#[test]
fn a_configuration_of_before_transformers_5() {
    let golden = Golden::named("mixtral");
    let dir = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(golden.checkpoint.dir()).expect("the folder") {
        let path = entry.expect("a file").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("a copy");
    }
    let path = dir.path().join("config.json");
    let text = std::fs::read_to_string(&path).expect("config.json");
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).expect("an object");
    let scaling = config.remove("rope_parameters").expect("rope_parameters");
    config.insert("rope_theta".into(), scaling["rope_theta"].clone());
    std::fs::write(&path, serde_json::to_string(&config).expect("text")).expect("written");
    let checkpoint = Checkpoint::open(dir.path()).expect("the copy");
    let group = DeviceGroup::single(&checkpoint.block_config(0).expect("a block"), &Device::Cpu).expect("a group");
    let ids = golden.ids().to_dtype(candle_core::DType::U32).expect("ids");
    let logits = example::Mixtral::load(&checkpoint, &group).expect("a model").forward(&ids).expect("logits");
    assert!(relative(&logits, &golden.tensors["logits"]) <= F32);
}
