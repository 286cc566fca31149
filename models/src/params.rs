//! Reading replicated parameters from a checkpoint into candle.

use candle_core::{DType, Device, Tensor, Var};
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, HostBuffer};

use crate::error::{Error, Result};

/// How to load a decoder.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Convert to this floating type; `None`: as stored.
    pub dtype: Option<DType>,
    /// Parameters become variables, and forward uses operations that have a gradient (slower than the fused ones
    /// of inference).
    pub trainable: bool,
}

impl LoadOptions {
    /// The type in this crate's terms.
    pub(crate) fn moe_dtype(&self) -> Result<Option<moebius::DType>> {
        Ok(match self.dtype {
            None => None,
            Some(DType::F32) => Some(moebius::DType::F32),
            Some(DType::BF16) => Some(moebius::DType::BF16),
            Some(DType::F16) => Some(moebius::DType::F16),
            Some(DType::F64) => Some(moebius::DType::F64),
            Some(other) => {
                let problem = format!("option dtype: expected f64, f32, bf16 or f16, found {other:?}");
                return Err(Error::Usage { call: "Qwen3Moe::load", problem });
            }
        })
    }
}

/// Loads tensors by name, and remembers those that train.
#[derive(Debug)]
pub(crate) struct Params<'a> {
    checkpoint: &'a Checkpoint,
    options: LoadOptions,
    device: Device,
    vars: Vec<(String, Var)>,
}

impl<'a> Params<'a> {
    pub fn new(checkpoint: &'a Checkpoint, options: LoadOptions, device: Device) -> Self {
        Self { checkpoint, options, device, vars: Vec::new() }
    }

    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    pub fn options(&self) -> LoadOptions {
        self.options
    }

    pub fn trainable(&self) -> bool {
        self.options.trainable
    }

    pub fn get(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let tensor = to_candle(self.checkpoint.tensor(name, self.options.moe_dtype()?)?)?;
        if tensor.dims() != dims {
            return Err(Error::Shape {
                call: "Qwen3Moe::load",
                tensor: name.into(),
                expected: format!("{dims:?}"),
                found: tensor.dims().to_vec(),
            });
        }
        let tensor = tensor.to_device(&self.device)?;
        if !self.options.trainable {
            return Ok(tensor);
        }
        let var = Var::from_tensor(&tensor)?;
        let tensor = var.as_tensor().clone();
        self.vars.push((name.into(), var));
        Ok(tensor)
    }

    pub fn into_vars(self) -> Vec<(String, Var)> {
        self.vars
    }
}

/// Hands a host tensor's memory to candle.
fn to_candle(tensor: moebius::Tensor<Cpu>) -> Result<Tensor> {
    let dims = tensor.dims().to_vec();
    let device = &Device::Cpu;
    Ok(match tensor.into_buffer() {
        HostBuffer::F64(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::F32(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::F16(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::BF16(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::I64(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::I32(v) => Tensor::from_vec(v, dims, device)?,
        HostBuffer::U8(v) => Tensor::from_vec(v, dims, device)?,
    })
}
