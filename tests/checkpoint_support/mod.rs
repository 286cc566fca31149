//! Plain, independent reading and writing of safetensors for the checkpoint tests.
#![allow(dead_code, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;

use moebius::checkpoint::BlockParams;
use moebius::cpu::Cpu;

/// A tensor's bytes as they lie on disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Raw {
    /// Lower-case name of the type.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// All tensors of a file.
pub fn raw(path: &Path) -> BTreeMap<String, Raw> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let convert = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = view.dtype().to_string().to_lowercase();
        (name, Raw { dtype, shape: view.shape().to_vec(), data: view.data().to_vec() })
    };
    file.tensors().into_iter().map(convert).collect()
}

/// Two blocks' parameters are the same bits.
pub fn assert_same(a: &BlockParams, b: &BlockParams, what: &str) {
    let same = |name: &str, a: Option<&moebius::Tensor<Cpu>>, b: Option<&moebius::Tensor<Cpu>>| match (a, b) {
        (None, None) => {}
        (Some(a), Some(b)) => {
            assert_eq!((a.dtype(), a.dims()), (b.dtype(), b.dims()), "{what}: {name}");
            assert!(a.as_bytes() == b.as_bytes(), "{what}: {name} differs");
        }
        _ => panic!("{what}: {name} is there on one side only"),
    };
    same("router", Some(&a.router), Some(&b.router));
    same("router_bias", a.router_bias.as_ref(), b.router_bias.as_ref());
    same("selection_bias", a.selection_bias.as_ref(), b.selection_bias.as_ref());
    same("up", Some(&a.up), Some(&b.up));
    same("up_bias", a.up_bias.as_ref(), b.up_bias.as_ref());
    same("down", Some(&a.down), Some(&b.down));
    same("down_bias", a.down_bias.as_ref(), b.down_bias.as_ref());
    same("shared_up", a.shared_up.as_ref(), b.shared_up.as_ref());
    same("shared_down", a.shared_down.as_ref(), b.shared_down.as_ref());
    same("shared_gate", a.shared_gate.as_ref(), b.shared_gate.as_ref());
}
