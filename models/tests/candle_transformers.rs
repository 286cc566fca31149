//! The example of the layer among candle-transformers' parts, against what the reference computed.

mod support;

#[path = "../examples/candle_transformers.rs"]
#[allow(dead_code, reason = "its main")]
mod example;

use candle_core::{Device, Tensor};
use moebius::candle::DeviceGroup;
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
