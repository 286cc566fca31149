//! Reading a checkpoint into candle.

use std::collections::HashSet;
use std::fmt::Display;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Linear;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, HostExperts, LoadAs, Parameters};
use moebius::checkpoint::{self, Checkpoint, Form};
use moebius::cpu::{Cpu, HostBuffer};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::ConfigFile;
use crate::error::{Error, Result};
use crate::random::RandomWeights;

/// The call that loads, in errors.
pub(crate) const CALL: &str = "Model::load";

/// How to load a decoder.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Convert to this floating type; `None`: as stored. A CPU has f64, f32, bf16 and f16, a GPU all of them but f64: there
    /// the option is refused as the model is loaded, and so are tensors that are stored in it.
    pub dtype: Option<DType>,
    /// Whether parameters are variables; forward then uses operations that have a gradient (slower than the fused ones
    /// of inference).
    pub parameters: Parameters,
    /// In which form the routed experts' weights are held.
    pub experts: ExpertWeights,
    /// Let the folder's files be links that leave it, as those of the Hugging Face cache are; off by default, as a folder
    /// from a stranger could name any file. It counts where a folder is given, [`Model::load`](crate::Model::load); an
    /// opened checkpoint has its own `moebius::checkpoint::OpenOptions`.
    pub follow_links: bool,
    /// Routed experts stay in memory of the host, page-locked where the device is a GPU, and come to it a layer ahead of
    /// their use, in the form that [`experts`](Self::experts) says: a model larger than the GPU runs, as fast as the host
    /// link brings all of its experts once a forward (`moebius::candle::HostExperts`). They are frozen, and so is all else:
    /// such a model is for inference, one forward at a time. The same on all ranks.
    pub experts_on_host: bool,
    /// Weights are random and depend on this seed; nothing is read but `config.json`. Matrices are uniform with variance
    /// 1 / fan-in, vectors ones, biases zeros, all in [`dtype`](Self::dtype), else in the type that `config.json` names,
    /// else in f32. Another kind of device has other values. A tensor that the host has no memory for is an error that names
    /// it and the keys of its sizes.
    pub random: Option<u64>,
}

impl LoadOptions {
    /// The type in this crate's terms.
    fn moe_dtype(&self) -> Result<Option<moebius::DType>> {
        Ok(match self.dtype {
            None => None,
            Some(DType::F32) => Some(moebius::DType::F32),
            Some(DType::BF16) => Some(moebius::DType::BF16),
            Some(DType::F16) => Some(moebius::DType::F16),
            Some(DType::F64) => Some(moebius::DType::F64),
            Some(other) => {
                let problem = format!("option dtype: expected f64, f32, bf16 or f16, found {other:?}");
                return Err(Error::Usage { call: CALL, problem });
            }
        })
    }
}

/// How far a model has been loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Layers that this rank has its part of.
    pub loaded: usize,
    /// All layers.
    pub layers: usize,
}

/// Is told of a model's layers while it is loaded.
pub type ProgressFn<'a> = dyn FnMut(LoadProgress) + 'a;

/// In which form the routed experts' weights are held. Quantized ones are frozen; gradients flow through them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertWeights {
    /// In a floating type; quantized weights are de-quantized, so that they train where parameters are trainable: 4 bits
    /// become 16 or 32. The default; what is loaded to generate on a GPU had better stay [`AsStored`](Self::AsStored).
    #[default]
    Dequantized,
    /// NVFP4, MXFP4 and fp8 in blocks of 128x128 as they are stored, and multiplied so; weights that are not quantized as
    /// they are. Other forms (fp8 with a scale a tensor or a row, NVFP4 of matrices whose rows are inputs, as Llama-4's)
    /// are de-quantized: [`Model::dequantized_experts`](crate::Model::dequantized_experts) says of which layers.
    AsStored,
    /// In NVFP4, quantized on their device with an amax an expert, whatever they are stored in; as they are stored if
    /// that is NVFP4, a row an output.
    Nvfp4,
}

/// Loads a rank's parameters by name, and remembers those that train.
pub(crate) struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    group: &'a DeviceGroup,
    options: LoadOptions,
    dtype: Option<moebius::DType>,
    /// The first matrix that was read, and its type.
    matrix_type: Option<(String, moebius::DType)>,
    random: Option<RandomWeights<'a>>,
    /// Where the experts are, if on the host.
    host: Option<HostExperts>,
    vars: Vec<(String, Var)>,
    /// Names of the tensors outside the experts that were read.
    read: HashSet<String>,
    /// Layers whose experts could not stay as they are stored.
    dequantized: Vec<(usize, Form)>,
    watch: &'a mut ProgressFn<'a>,
}

impl<'a> Loader<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        group: &'a DeviceGroup,
        options: LoadOptions,
        watch: &'a mut ProgressFn<'a>,
    ) -> Result<Self> {
        let dtype = options.moe_dtype()?;
        if options.experts == ExpertWeights::Nvfp4 && dtype == Some(moebius::DType::F64) {
            let problem = "option dtype: expected f32, bf16 or f16 beside ExpertWeights::Nvfp4, found f64".to_string();
            return Err(Error::Usage { call: CALL, problem });
        }
        let named = || match checkpoint.model_dtype() {
            Some(moebius::DType::BF16) => DType::BF16,
            Some(moebius::DType::F16) => DType::F16,
            Some(moebius::DType::F64) => DType::F64,
            _ => DType::F32,
        };
        let random = options.random.map(|seed| RandomWeights {
            seed,
            parameters: options.parameters,
            dtype: options.dtype.unwrap_or_else(named),
            config: checkpoint.config(),
        });
        let on_gpu = !group.device().is_cpu();
        match &random {
            Some(random) if dtype.is_none() => check_type("config.json's type", random.dtype == DType::F64, on_gpu)?,
            _ => check_type("option dtype", dtype == Some(moebius::DType::F64), on_gpu)?,
        }
        let host = match (options.experts_on_host, options.parameters) {
            (false, _) => None,
            (true, Parameters::Frozen) => Some(HostExperts::new(group)?),
            (true, Parameters::Trainable) => {
                let problem = "option experts_on_host: expected Parameters::Frozen beside it".to_string();
                return Err(Error::Usage { call: CALL, problem });
            }
        };
        let (vars, read, dequantized) = (Vec::new(), HashSet::new(), Vec::new());
        let matrix_type = None;
        Ok(Self { checkpoint, group, options, dtype, matrix_type, random, host, vars, read, dequantized, watch })
    }

    /// Tells that so many layers of all are there.
    pub fn loaded(&mut self, loaded: usize, layers: usize) {
        (self.watch)(LoadProgress { loaded, layers });
    }

    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// The configuration's file, for errors.
    pub fn file(&self) -> ConfigFile {
        ConfigFile(self.checkpoint.dir().join("config.json").display().to_string())
    }

    /// The configuration of the text model, which multimodal wrappers keep in an object of its own.
    pub fn config<T: DeserializeOwned>(&self) -> Result<T> {
        let root = self.checkpoint.config();
        let text = root.get("text_config").filter(|text| text.is_object()).unwrap_or(root);
        T::deserialize(text).or_else(|e| {
            let expected = format!("a configuration of {}", self.checkpoint.family());
            let found = e.to_string();
            let found = match key_of_error::<T>(text, &found) {
                Some(key) => format!("{found} in {key}"),
                None => found,
            };
            self.file().refuse("(file)", expected, found)
        })
    }

    /// Prefix of the model's own tensors: that of a layer without `layers.0.`.
    pub fn root(&self) -> String {
        let layer = self.checkpoint.layer_prefix(0);
        let parts: Vec<&str> = layer.trim_end_matches('.').split('.').collect();
        parts[..parts.len().saturating_sub(2)].iter().map(|part| format!("{part}.")).collect()
    }

    /// A tensor of this shape, on the group's device.
    pub fn get(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        if let Some(random) = &self.random {
            let tensor = random.tensor(name, dims, self.group.device())?;
            if tensor.is_variable() {
                self.vars.push((name.into(), Var::from_tensor(&tensor)?));
            }
            return Ok(tensor);
        }
        let mut loaded = self.checkpoint.tensor(name, self.dtype)?;
        if !loaded.dtype().is_float() {
            // No weight: the error says so.
            loaded = self.checkpoint.tensor(name, Some(moebius::DType::F32))?;
        }
        check_type(format_args!("tensor {name}"), loaded.dtype() == moebius::DType::F64, self.on_gpu())?;
        if dims.len() == 2 {
            self.compare_type(name, loaded.dtype())?;
        }
        let tensor = to_candle(loaded)?;
        self.read.insert(name.into());
        if tensor.dims() != dims {
            return Err(Error::Shape {
                call: CALL,
                tensor: name.into(),
                expected: format!("{dims:?}"),
                found: tensor.dims().to_vec(),
            });
        }
        let tensor = tensor.to_device(self.group.device())?;
        if !self.is_trainable() {
            return Ok(tensor);
        }
        let var = Var::from_tensor(&tensor)?;
        let tensor = var.as_tensor().clone();
        self.vars.push((name.into(), var));
        Ok(tensor)
    }

    /// Refuses matrices of several types, whose products would fail in the first forward: as where some of them were
    /// quantized, and `config.json` does not name a type.
    fn compare_type(&mut self, name: &str, found: moebius::DType) -> Result<()> {
        let (first, expected) = self.matrix_type.get_or_insert_with(|| (name.into(), found));
        if *expected == found {
            return Ok(());
        }
        let problem = format!(
            "tensor {name}: expected {expected}, the type of {first}, found {found} (LoadOptions::dtype converts all)"
        );
        Err(Error::Usage { call: CALL, problem })
    }

    /// Refuses a checkpoint with a tensor in one of the first `layers` layers, or a bias of the output projection, that
    /// was not read: a bias or a norm that `config.json` says is not there would make other logits without a word. Blocks
    /// of experts are checked where they are loaded.
    pub fn check_all_read(&self, layers: usize) -> Result<()> {
        if self.random.is_some() {
            return Ok(());
        }
        let first = self.checkpoint.layer_prefix(0);
        let root = first.strip_suffix("0.").unwrap_or(&first);
        let mut blocks = HashSet::new();
        for &layer in self.checkpoint.moe_layers() {
            blocks.insert(self.checkpoint.block_prefix(layer)?);
            // Granite's shared expert.
            blocks.insert(format!("{}shared_mlp.", self.checkpoint.layer_prefix(layer)));
        }
        let in_layer = |name: &str| {
            let (layer, part) = name.strip_prefix(root)?.split_once('.')?;
            let block = part.split_once('.').map_or(part, |(block, _)| block);
            let of_block = blocks.contains(&format!("{root}{layer}.{block}."));
            Some(layer.parse::<usize>().ok()? < layers && !of_block)
        };
        let missed = |name: &&str| {
            let inside = in_layer(name).unwrap_or(name.ends_with("lm_head.bias"));
            inside && !self.read.contains(*name) && !self.belongs_to_read(name)
        };
        match self.checkpoint.names().filter(missed).min() {
            None => Ok(()),
            Some(name) => Err(Error::Unread { call: CALL, path: self.file().0, tensor: name.into() }),
        }
    }

    /// Whether a tensor is a part of a quantized one that was read, a scale or a zero point of values that are computed in
    /// a floating type here, or frequencies that follow from the configuration.
    fn belongs_to_read(&self, name: &str) -> bool {
        let (stem, last) = name.rsplit_once('.').unwrap_or(("", name));
        let of_cache = ["q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point"];
        let of_weight = ["weight", "input_", "output_"].iter().any(|start| last.starts_with(start));
        let is_read = || self.read.contains(&format!("{stem}.weight"));
        last == "inv_freq" || of_cache.contains(&last) || of_weight && is_read()
    }

    fn on_gpu(&self) -> bool {
        !self.group.device().is_cpu()
    }

    /// Whether parameters become variables.
    pub fn is_trainable(&self) -> bool {
        self.options.parameters == Parameters::Trainable
    }

    /// Matrix product with a weight `[out, in]`, and a bias where there is one.
    pub fn linear(&mut self, prefix: &str, dims: [usize; 2], bias: bool) -> Result<Linear> {
        let weight = self.get(&format!("{prefix}.weight"), &dims)?;
        let bias = if bias { Some(self.get(&format!("{prefix}.bias"), &dims[..1])?) } else { None };
        Ok(Linear::new(weight, bias))
    }

    /// This rank's experts of a layer; `None` where the layer is dense.
    pub fn experts(&mut self, layer: usize) -> Result<Option<ExpertParallelMoE>> {
        if !self.checkpoint.moe_layers().contains(&layer) {
            return Ok(None);
        }
        let kept = self.options.experts;
        let finish = |moe: ExpertParallelMoE| -> Result<Option<ExpertParallelMoE>> {
            let moe = match kept {
                ExpertWeights::Nvfp4 => moe.to_nvfp4()?,
                ExpertWeights::Dequantized | ExpertWeights::AsStored => moe,
            };
            Ok(Some(match &self.host {
                Some(host) => host.place(&moe)?,
                None => moe,
            }))
        };
        if let Some(random) = &self.random {
            return finish(random.experts(self.checkpoint, layer, self.group)?);
        }
        let options = checkpoint::LoadOptions { rank: self.group.rank(), ranks: self.group.ranks(), dtype: self.dtype };
        let parameters = self.options.parameters;
        let form = self.checkpoint.block_form(layer)?;
        let stays_f64 = self.dtype.is_none() && form == Form::Plain(moebius::DType::F64);
        check_type(format_args!("experts of layer {layer}"), stays_f64, self.on_gpu())?;
        let wanted = match kept {
            ExpertWeights::Dequantized => false,
            ExpertWeights::AsStored => form.is_quantized(),
            ExpertWeights::Nvfp4 => matches!(form, Form::Nvfp4ModelOpt | Form::Nvfp4CompressedTensors),
        };
        let as_stored = wanted && self.checkpoint.keeps_quantized(layer)?;
        if kept == ExpertWeights::AsStored && wanted && !as_stored {
            self.dequantized.push((layer, form));
        }
        if let Some(host) = self.host.as_ref().filter(|_| as_stored || kept != ExpertWeights::Nvfp4) {
            let load = self.options.dtype.into_iter().fold(LoadAs::new(parameters), LoadAs::dtype);
            let load = if as_stored { load.quantized() } else { load };
            return Ok(Some(host.load(self.checkpoint, layer, load)?));
        }
        if as_stored {
            let block = self.checkpoint.load_quantized(layer, options)?;
            return Ok(Some(ExpertParallelMoE::from_quantized(block, layer as u32, self.group, parameters)?));
        }
        let block = self.checkpoint.load_block(layer, options)?;
        finish(ExpertParallelMoE::from_block(block, layer as u32, self.group, parameters)?)
    }

    /// The experts that are on the host, once all layers are loaded.
    pub fn take_host_experts(&mut self) -> Option<HostExperts> {
        self.host.take()
    }

    /// The layers that are de-quantized though their form was asked for, with what they are stored in.
    pub fn take_dequantized(&mut self) -> Vec<(usize, Form)> {
        std::mem::take(&mut self.dequantized)
    }

    pub fn into_vars(self) -> Vec<(String, Var)> {
        self.vars
    }
}

/// Refuses f64 on a GPU: the experts' kernels there have none of it, which a model would else find in its first forward.
/// `what` says whose type it is.
fn check_type(what: impl Display, is_f64: bool, on_gpu: bool) -> Result<()> {
    if !(is_f64 && on_gpu) {
        return Ok(());
    }
    let problem = format!("{what}: expected f32, bf16 or f16 on a GPU, found f64 (LoadOptions::dtype converts)");
    Err(Error::Usage { call: CALL, problem })
}

/// Most keys of a file in which the one that an error is of is looked for, each by reading the file without it.
const MOST_KEYS: usize = 1024;

/// The key that an error is of: without it there is none, or another. Flattened fields keep no path of their own. An
/// absent key is named by the error itself.
fn key_of_error<T: DeserializeOwned>(config: &Value, error: &str) -> Option<String> {
    let object = config.as_object().filter(|object| object.len() <= MOST_KEYS)?;
    if error.starts_with("missing field") {
        return None;
    }
    let is_of = |key: &&String| {
        let mut without = object.clone();
        without.remove(*key);
        T::deserialize(Value::Object(without)).err().is_none_or(|other| other.to_string() != error)
    };
    object.keys().find(is_of).cloned()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_of_the_key_without_which_there_is_another() {
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "read alone")]
        struct Keys {
            first: u32,
            second: u32,
            #[serde(default)]
            third: bool,
        }
        let key = |text: &str| {
            let config: Value = serde_json::from_str(text).expect("JSON");
            let error = serde_json::from_value::<Keys>(config.clone()).expect_err("a mistake").to_string();
            key_of_error::<Keys>(&config, &error)
        };
        assert_eq!(key(r#"{"first": 1, "second": 2, "third": 3}"#).as_deref(), Some("third"));
        assert_eq!(key(r#"{"first": "1", "second": 2}"#).as_deref(), Some("first"));
        // The error names the absent one, and no other.
        assert_eq!(key(r#"{"first": 1}"#), None);
        let many = (0..2 * MOST_KEYS).map(|n| format!(r#""a{n}": 0, "#)).collect::<String>();
        assert_eq!(key(&format!(r#"{{{many}"first": 1, "second": 2, "third": 3}}"#)), None);
    }

    /// A group's device alone says where it is; the rule needs no GPU.
    #[test]
    fn f64_is_refused_on_a_gpu_alone() {
        for what in ["option dtype", "tensor model.norm.weight"] {
            for (is_f64, on_gpu) in [(false, false), (false, true), (true, false)] {
                check_type(what, is_f64, on_gpu).expect("a type that the device has");
            }
            let error = check_type(what, true, true).expect_err("f64 on a GPU");
            assert!(matches!(&error, Error::Usage { call: CALL, .. }), "{error:?}");
            let message = error.to_string();
            assert!(message.contains(what) && message.contains("on a GPU, found f64"), "{message}");
        }
    }
}
