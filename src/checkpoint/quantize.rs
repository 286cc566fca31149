//! Writes a checkpoint with its routed experts in NVFP4, in ModelOpt's form: codes, scales and a second-level scale a
//! matrix, no scales of activations (`W4A16_NVFP4`).

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use serde_json::{Value, json};

use super::family::DiskExperts;
use super::folder::{CONFIG, QUANTIZATION};
use super::nvfp4::{FORMAT, Nvfp4Item, Nvfp4Part, cast};
use super::open::Checkpoint;
use super::options::SaveOptions;
use super::rank_params::RankParams;
use super::save::NewTensor;
use super::stored::Form;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layer::ParamKind;
use crate::quant::{Amax, Codec, Matrix, NVFP4_BLOCK, amax_of_cast};
use crate::tensor::{Tensor, TensorMut};

const CALL: &str = "Checkpoint::save_nvfp4";
const ALGORITHM: &str = "W4A16_NVFP4";

/// A matrix that [`Checkpoint::save_nvfp4`] quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Its name on disk.
    pub name: String,
    /// Rows and columns.
    pub dims: [usize; 2],
    /// The largest magnitude of those that share its second-level scale.
    pub amax: f32,
    /// ‖de-quantized − original‖ / ‖original‖, 0 of a zero matrix.
    pub error: f64,
}

impl Checkpoint {
    pub(super) fn write_nvfp4(&self, dir: &Path, options: SaveOptions) -> Result<Vec<QuantizedTensor>> {
        self.check_target(dir, None)?;
        let mut tensors = Vec::new();
        for &layer in self.moe_layers() {
            for names in self.sharing(layer)? {
                self.measure_nvfp4(names, &mut tensors)?;
            }
        }
        let quantized: HashSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let rest: Vec<&str> =
            self.files.iter().map(|(name, _)| name).filter(|name| !quantized.contains(name)).collect();
        let (config, sidecar) = self.configs(&rest)?;
        let mut items: Vec<NewTensor<'_>> = rest.into_iter().map(NewTensor::Copy).collect();
        for QuantizedTensor { name, dims, amax, .. } in &tensors {
            items.extend(
                [Nvfp4Part::Codes, Nvfp4Part::Scales, Nvfp4Part::Second]
                    .map(|part| NewTensor::Nvfp4(Nvfp4Item { part, matrix: name.clone(), dims: *dims, amax: *amax })),
            );
        }
        let others = vec![(CONFIG, config), (QUANTIZATION, sidecar)];
        let plan = self.plan_files(items, others, options)?;
        self.write_plan(dir, &plan, &mut RankParams::none())?;
        drop(plan);
        Ok(tensors)
    }

    /// Names of the routed experts' matrices of a layer, in groups that share their second-level scale: gate and up
    /// of an expert, which inference engines multiply as one matrix; down alone.
    fn sharing(&self, layer: usize) -> Result<Vec<Vec<String>>> {
        let config = self.block(layer)?;
        let layout = self.layout(layer, config);
        let refuse =
            |expected: &str, found: String| Err(Error::invalid(CALL, format!("layer {layer}"), expected, found));
        if let DiskExperts::Fused { up, .. } | DiskExperts::Stacked { up, .. } = layout.experts {
            return refuse("a matrix an expert on disk", format!("all experts in {up}"));
        }
        match self.check_block(&layout, false)?.form {
            Form::Plain(DType::F32 | DType::BF16 | DType::F16) => {}
            form => return refuse("experts in f32, bf16 or f16", format!("{form:?}")),
        }
        let mut groups = Vec::new();
        for expert in 0..config.router.num_experts {
            let parts = layout.expert(expert);
            if let Some(part) = parts.iter().find(|part| !part.inn.is_multiple_of(NVFP4_BLOCK)) {
                return Err(Error::invalid(CALL, &part.name, "a multiple of 16 columns", part.inn));
            }
            let (down, up): (Vec<_>, Vec<_>) = parts.into_iter().partition(|part| part.kind == ParamKind::Down);
            groups.extend([up, down].map(|parts| parts.into_iter().map(|part| part.name).collect()));
        }
        Ok(groups)
    }

    /// The amax that matrices share, and the error of each under it.
    fn measure_nvfp4(&self, names: Vec<String>, tensors: &mut Vec<QuantizedTensor>) -> Result<()> {
        let cpu = Cpu::new();
        let weights = names.iter().map(|name| self.tensor(name, None)).collect::<Result<Vec<_>>>()?;
        let mut amaxes = vec![0f32; weights.len()];
        let calls = weights.iter().zip(&mut amaxes).map(|(weight, amax)| {
            let rows = Some(TensorMut::from_slice(std::slice::from_mut(amax), &[1])?);
            Ok(Amax { format: FORMAT, matrix: Matrix::new(weight.view())?, rows, columns: None })
        });
        cpu.multi_compute_amax(calls.collect::<Result<_>>()?)?;
        for (name, weight) in names.iter().zip(&weights) {
            // ModelOpt's formulas turn the whole matrix into NaN for one such value.
            if let Some([i, j]) = cpu.first_non_finite(Matrix::new(weight.view())?)? {
                return Err(Error::invalid(CALL, name, "finite weights", format!("NaN or infinity at [{i}, {j}]")));
            }
        }
        let amax = amax_of_cast(amaxes.into_iter().fold(0.0, f32::max));
        for (name, weight) in names.into_iter().zip(weights) {
            let dims = Matrix::new(weight.view())?.dims();
            let made = cast(&weight, amax)?;
            let mut back = Tensor::<Cpu>::empty(&cpu, DType::F32, &dims)?;
            cpu.dequantize(made.dequantize(FORMAT, back.view_mut()))?;
            let (mut difference, mut norm) = (0.0, 0.0);
            for (back, weight) in back.to_f64().into_iter().zip(weight.to_f64()) {
                difference += (back - weight).powi(2);
                norm += weight.powi(2);
            }
            let error = if norm == 0.0 { 0.0 } else { (difference / norm).sqrt() };
            tensors.push(QuantizedTensor { name, dims, amax, error });
        }
        Ok(())
    }

    /// `config.json` and `hf_quant_config.json`; `rest` is what is not quantized.
    fn configs(&self, rest: &[&str]) -> Result<(Vec<u8>, Vec<u8>)> {
        let matrix = |name: &&&str| self.files.get(name).is_some_and(|entry| entry.shape.len() == 2);
        let module = |name: &&str| Some(numbers_starred(name.strip_suffix(".weight")?));
        let ignore: BTreeSet<String> = rest.iter().filter(matrix).filter_map(module).collect();
        let producer = json!({ "name": env!("CARGO_PKG_NAME"), "version": env!("CARGO_PKG_VERSION") });
        let weights = json!({ "dynamic": false, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK });
        let mut config = self.config().clone();
        if let Some(map) = config.as_object_mut() {
            let quantization = json!({
                "config_groups": { "group_0": { "weights": weights, "targets": ["Linear"] } },
                "ignore": ignore,
                "quant_algo": ALGORITHM,
                "quant_method": "modelopt",
                "producer": producer,
            });
            map.insert("quantization_config".to_string(), quantization);
        }
        let sidecar = json!({
            "producer": producer,
            "quantization": {
                "quant_algo": ALGORITHM,
                "kv_cache_quant_algo": null,
                "group_size": NVFP4_BLOCK,
                "exclude_modules": ignore,
            },
        });
        let text = |value: &Value| {
            serde_json::to_vec_pretty(value).map_err(|e| Error::invalid(CALL, "config.json", "JSON to write", e))
        };
        Ok((text(&config)?, text(&sidecar)?))
    }
}

/// `model.layers.3.mlp.gate` as `model.layers.*.mlp.gate`.
fn numbers_starred(name: &str) -> String {
    let star = |part: &str| if part.parse::<usize>().is_ok() { "*".to_string() } else { part.to_string() };
    name.split('.').map(star).collect::<Vec<_>>().join(".")
}
