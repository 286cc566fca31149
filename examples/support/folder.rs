//! A checkpoint folder as the reference comparisons see it: its type, its tolerances, its golden.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use moebius::DType as MoebiusDType;

use super::dense::Params;
use super::names;

/// A folder to compare against.
#[derive(Debug, Clone)]
pub struct Folder {
    /// Where it is.
    pub dir: PathBuf,
    /// The family, as `config.json` spells it.
    pub model_type: String,
    /// The type to compute in.
    pub dtype: MoebiusDType,
    /// Outputs and gradients of a reference, F64 (I64 for ids), where the folder has them.
    pub golden: Option<Params>,
}

impl Folder {
    /// Reads `config.json` and, where there is one, `golden.safetensors`.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = names::config_json(dir)?;
        let text = config.get("text_config").unwrap_or(&config);
        let field = |name: &str| text.get(name).or_else(|| config.get(name)).filter(|v| !v.is_null());
        let quantized = field("quantization_config").is_some() || dir.join("hf_quant_config.json").exists();
        let stored = field("dtype").or_else(|| field("torch_dtype")).and_then(|v| v.as_str());
        let dtype = match stored {
            // Quantized weights are de-quantized to f32, and their goldens computed in it.
            _ if quantized => MoebiusDType::F32,
            Some("bfloat16") => MoebiusDType::BF16,
            Some("float16") => MoebiusDType::F16,
            _ => MoebiusDType::F32,
        };
        let file = dir.join("golden.safetensors");
        let golden = if file.exists() { Some(read(&file)?) } else { None };
        Ok(Self { dir: dir.to_path_buf(), model_type: names::model_type(dir)?, dtype, golden })
    }

    /// Largest relative error ‖a − b‖/‖b‖ of a forward result. f32: some ten roundings of 6e-8, averaged over sums of
    /// tens of terms; bf16: two or three roundings of 2e-3 (inner activations, output, the golden's own).
    pub fn forward_tolerance(&self) -> f64 {
        if self.dtype == MoebiusDType::F32 { 2e-6 } else { 1e-2 }
    }

    /// The same of a gradient, which passes through twice as many sums.
    pub fn backward_tolerance(&self) -> f64 {
        if self.dtype == MoebiusDType::F32 { 1e-5 } else { 1e-2 }
    }
}

fn read(file: &Path) -> Result<Params> {
    let tensors = candle_core::safetensors::load(file, &Device::Cpu)?;
    tensors
        .into_iter()
        .map(|(name, t)| Ok((name, if t.dtype() == DType::I64 { t } else { t.to_dtype(DType::F64)? })))
        .collect()
}

/// `[…, H]` as `[T, H]`.
pub fn tokens(t: &Tensor) -> Result<Tensor> {
    let hidden = t.dims().last().copied().unwrap_or(1);
    t.reshape(((), hidden))
}
