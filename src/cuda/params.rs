//! Descriptions that kernels take by value (`kernels/common/params.h`), and what types and activations are called in
//! them.

use crate::config::Activation;
use crate::dtype::DType;
use crate::error::{Error, Result};

pub(super) use super::bindings::*;

/// Number of a type that kernels compute in.
pub(super) fn type_code(call: &'static str, tensor: &str, dtype: DType) -> Result<i64> {
    match dtype {
        DType::F32 => Ok(TYPE_F32),
        DType::F16 => Ok(TYPE_F16),
        DType::BF16 => Ok(TYPE_BF16),
        other => Err(Error::invalid(call, format!("tensor {tensor}"), "f32, f16 or bf16 (on CUDA)", other)),
    }
}

/// Number, alpha and limit of an activation.
pub(super) fn activation_code(activation: Activation) -> (i64, f64, f64) {
    match activation {
        Activation::SiluGlu => (ACT_SILU, 0.0, 0.0),
        Activation::GeluGlu => (ACT_GELU, 0.0, 0.0),
        Activation::ClampedGlu { alpha, limit } => (ACT_CLAMPED, alpha, limit),
        Activation::Relu2 => (ACT_RELU2, 0.0, 0.0),
    }
}
