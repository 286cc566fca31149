//! Random weights, made where they are used: for training from the beginning, and for measuring a model whose checkpoint
//! is not at hand.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, Parameters};
use moebius::checkpoint::Checkpoint;
use moebius::layer::{Layer, ParamKind};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::Value;

use crate::config_entries::config_entries;
use crate::error::{Error, Result};
use crate::host_memory::has_host_memory;
use crate::params::CALL;

/// Bytes of an entry while it is drawn, beside those that it is kept in.
const DRAWN_BYTES: usize = size_of::<f64>();

/// Makes weights by name: matrices uniform with variance 1 / fan-in, vectors ones, biases zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomWeights<'a> {
    pub seed: u64,
    pub parameters: Parameters,
    pub dtype: DType,
    /// `config.json`, whose sizes the weights have.
    pub config: &'a Value,
}

impl RandomWeights<'_> {
    /// A tensor whose values depend on seed, name and sizes, and on the kind of device.
    pub fn tensor(&self, name: &str, dims: &[usize], device: &Device) -> Result<Tensor> {
        self.tensor_as(name, dims, (self.dtype, device))
    }

    fn tensor_as(&self, name: &str, dims: &[usize], (dtype, device): (DType, &Device)) -> Result<Tensor> {
        self.check_memory(name, dims, (dtype, device))?;
        let t = match dims {
            [_] | [] if name.ends_with("bias") => Tensor::zeros(dims, dtype, device)?,
            [_] | [] => Tensor::ones(dims, dtype, device)?,
            [.., fan_in] => {
                let bound = (3.0 / *fan_in as f64).sqrt();
                uniform(self.seed_of(name), bound, dims, device)?.to_dtype(dtype)?
            }
        };
        self.param(t)
    }

    /// Refuses a tensor that the host has no memory for, with the sizes of `config.json` that it comes from: an allocation
    /// that fails would end the process. A GPU's memory is its allocator's to refuse.
    fn check_memory(&self, name: &str, dims: &[usize], (dtype, device): (DType, &Device)) -> Result<()> {
        let bytes = dims.iter().try_fold(DRAWN_BYTES + dtype.size_in_bytes(), |bytes, size| bytes.checked_mul(*size));
        if bytes.is_some_and(|bytes| !device.is_cpu() || has_host_memory(bytes)) {
            return Ok(());
        }
        let bytes = bytes.map_or("more bytes than can be counted".to_string(), |bytes| format!("{bytes} bytes"));
        let sizes = self.sizes_of(dims);
        let problem =
            format!("option random: tensor {name} of {dims:?}: no memory for {bytes}; config.json has {sizes}");
        Err(Error::Usage { call: CALL, problem })
    }

    /// The largest sizes of the configuration that a tensor's are multiples of.
    fn sizes_of(&self, dims: &[usize]) -> String {
        let divides = |size: &usize| *size > 1 && dims.iter().any(|dim| dim.is_multiple_of(*size));
        let number = |(key, text): (String, String)| Some((text.parse().ok().filter(divides)?, key));
        let mut sizes: Vec<(usize, String)> = config_entries(self.config).into_iter().filter_map(number).collect();
        sizes.sort_by(|a, b| b.cmp(a));
        sizes.truncate(3);
        let named: Vec<String> = sizes.into_iter().map(|(size, key)| format!("{key} {size}")).collect();
        named.join(", ")
    }

    /// A variable where the model trains.
    fn param(&self, t: Tensor) -> Result<Tensor> {
        match self.parameters {
            Parameters::Trainable => Ok(Var::from_tensor(&t)?.into_inner()),
            Parameters::Frozen => Ok(t),
        }
    }

    /// This rank's experts of a layer.
    pub fn experts(&self, checkpoint: &Checkpoint, layer: usize, group: &DeviceGroup) -> Result<ExpertParallelMoE> {
        let config = checkpoint.block_config(layer)?;
        let mut tensors = HashMap::new();
        for kind in ParamKind::ALL {
            let Some(dims) = kind.dims(&config, group.local_experts()) else { continue };
            let rank = if kind.is_replicated() { 0 } else { group.rank() };
            let name = format!("{}{} of rank {rank}", checkpoint.layer_prefix(layer), kind.name());
            let bias = kind.fan_in(&config).is_none();
            let dtype = if kind == ParamKind::SelectionBias { crate::ops::wide(self.dtype) } else { self.dtype };
            let t = match bias {
                true => {
                    self.check_memory(&name, &dims, (dtype, group.device()))?;
                    self.param(Tensor::zeros(dims, dtype, group.device())?)?
                }
                false => self.tensor_as(&name, &dims, (dtype, group.device()))?,
            };
            tensors.insert(kind.name().to_string(), t);
        }
        let vb = VarBuilder::from_tensors(tensors, self.dtype, group.device());
        Ok(ExpertParallelMoE::new(Layer::new(config, layer as u32)?, group, vb)?)
    }

    /// FNV-1a, which, unlike the standard library's hashers, is fixed.
    fn seed_of(&self, name: &str) -> u64 {
        let start = 0xcbf2_9ce4_8422_2325 ^ self.seed;
        name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

/// Values in ±bound: candle's generator of a GPU; on the CPU, whose generator in candle has no seed, one of our own.
fn uniform(seed: u64, bound: f64, dims: &[usize], device: &Device) -> Result<Tensor> {
    if !device.is_cpu() {
        device.set_seed(seed)?;
        return Ok(Tensor::rand(-bound as f32, bound as f32, dims, device)?);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let unit = |bits: u64| (bits >> 11) as f64 * (0.5f64).powi(53);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| bound * (2.0 * unit(rng.next_u64()) - 1.0)).collect();
    Ok(Tensor::from_vec(values, dims, device)?)
}
