//! How `config.json` and `hf_quant_config.json` say that weights are quantized, held against how they are.
//!
//! Only what is said is compared: many checkpoints say it in one of both files, or nowhere. Experts that are not
//! quantized never contradict: both files may leave them out by patterns.

use std::path::Path;

use serde_json::Value;

use super::fields::{Fields, short};
use super::json::{MAX_CONFIG, parse_value, read_limited};
use super::stored::{Form, Fp8Blocks};
use crate::error::{CheckpointError, CheckpointResult};
use crate::quant::{MXFP4_BLOCK, NVFP4_BLOCK};

/// Largest group that a file may name.
const MAX_GROUP: usize = 1 << 20;
/// Most rows or columns of a block that a file may name.
const MAX_BLOCK: usize = 1 << 16;

/// One statement, and where it stands.
#[derive(Debug, Clone)]
struct Declaration<T> {
    path: String,
    field: &'static str,
    value: T,
}

/// Declarations of the files.
#[derive(Debug, Clone, Default)]
pub(super) struct Declared {
    methods: Vec<Declaration<String>>,
    algorithms: Vec<Declaration<String>>,
    /// Sizes, of which one must be right: groups of layers may differ.
    groups: Vec<Declaration<Vec<usize>>>,
    /// Blocks of fp8, by which their scales are read.
    pub fp8_blocks: Fp8Blocks,
}

impl Declared {
    /// Of a `quantization_config`.
    pub fn of_config(path: &str, object: Option<&Value>) -> CheckpointResult<Self> {
        let mut declared = Self::default();
        let Some(object) = object else { return Ok(declared) };
        if !object.is_object() {
            return Err(Fields::new(path, object, None).error("quantization_config", "an object", short(object)));
        }
        declared.add(path, object)?;
        Ok(declared)
    }

    /// Adds what a `hf_quant_config.json` says.
    pub fn add_file(&mut self, path: &Path) -> CheckpointResult<()> {
        let json = parse_value(&read_limited(path, MAX_CONFIG)?, path)?;
        match json.get("quantization") {
            Some(object) => self.add(&path.display().to_string(), object),
            None => Ok(()),
        }
    }

    fn add(&mut self, path: &str, object: &Value) -> CheckpointResult<()> {
        let fields = Fields::new(path, object, None);
        let declaration = |field, value: &str| Declaration { path: path.to_string(), field, value: value.to_string() };
        self.methods.extend(fields.word("quant_method")?.map(|word| declaration("quant_method", word)));
        self.algorithms.extend(fields.word("quant_algo")?.map(|word| declaration("quant_algo", word)));
        let group = |fields: &Fields<'_>| fields.size_or(&["group_size"], MAX_GROUP);
        // -1 is compressed-tensors' and GPTQ's for none.
        let none = |object: &Value| object.get("group_size").and_then(Value::as_i64) == Some(-1);
        let mut sizes = Vec::new();
        if !none(object) {
            sizes.extend(group(&fields)?);
        }
        self.add_block(&fields, "weight_block_size")?;
        let layers = object.get("config_groups").and_then(Value::as_object);
        for weights in layers.into_iter().flat_map(|map| map.values()).filter_map(|group| group.get("weights")) {
            if weights.is_object() {
                let fields = Fields::new(path, weights, None);
                self.add_block(&fields, "block_structure")?;
                if !none(weights) {
                    sizes.extend(group(&fields)?);
                }
            }
        }
        if !sizes.is_empty() {
            self.groups.push(Declaration { path: path.to_string(), field: "group_size", value: sizes });
        }
        Ok(())
    }

    /// Adds rows and columns of a block: two integers, or, as older files have it, a text like `128x128`.
    fn add_block(&mut self, fields: &Fields<'_>, key: &str) -> CheckpointResult<()> {
        let Some(value) = fields.get(key) else { return Ok(()) };
        let sizes = match value.as_str() {
            Some(text) => text.split('x').map(|size| size.parse().ok()).collect(),
            None => fields.list(key, MAX_BLOCK)?,
        };
        let refuse = |expected: String| {
            let found = sizes.as_ref().filter(|sizes| sizes.len() == 2);
            Err(fields.error(key, expected, found.map_or_else(|| short(value), |sizes| format!("{sizes:?}"))))
        };
        let size = match sizes.as_deref() {
            Some(&[rows, columns]) => [rows, columns],
            _ => return refuse("two integers".to_string()),
        };
        if size.iter().any(|size| !(1..=MAX_BLOCK).contains(size)) {
            return refuse(format!("two integers in 1..={MAX_BLOCK}"));
        }
        if !self.fp8_blocks.add(size) {
            return refuse(format!("at most {} sizes of blocks", Fp8Blocks::MOST));
        }
        Ok(())
    }

    /// Refuses what is not so of a block's experts.
    pub fn check(&self, block: &str, form: Form) -> CheckpointResult<()> {
        let refuse = |path: &str, field: &str, expected: String, found: String| {
            Err(CheckpointError::Declaration {
                path: path.to_string(),
                field: field.to_string(),
                expected: format!("{expected}, as the experts of {block}* are {form:?}"),
                found,
            })
        };
        // Methods whose tensors have the names and types of the form; words that the algorithm's name holds; the group.
        let (methods, words, size): (&[&str], &[&str], Option<usize>) = match form {
            Form::Plain(_) => return Ok(()),
            Form::Fp8Block | Form::Fp8Scaled => {
                (&["fp8", "fbgemm_fp8", "modelopt", "compressed-tensors", "quark"], &["FP8"], None)
            }
            Form::Mxfp4 => (&["mxfp4", "modelopt", "quark"], &["MXFP4"], Some(MXFP4_BLOCK)),
            Form::Mxfp4CompressedTensors => (&["compressed-tensors"], &["MXFP4"], Some(MXFP4_BLOCK)),
            Form::Nvfp4ModelOpt => (&["modelopt", "modelopt_fp4", "nvfp4"], &["NVFP4"], Some(NVFP4_BLOCK)),
            Form::Nvfp4CompressedTensors => (&["compressed-tensors"], &["NVFP4"], Some(NVFP4_BLOCK)),
        };
        for Declaration { path, field, value } in &self.methods {
            let method = value.to_ascii_lowercase();
            if !methods.contains(&method.as_str()) && method != "modelopt_mixed" {
                return refuse(path, field, methods.join(" or "), format!("{value:?}"));
            }
        }
        for Declaration { path, field, value } in &self.algorithms {
            let name = value.to_ascii_uppercase();
            // NVFP4's names may hold FP8 too: that of the activations.
            let other = words == ["FP8"] && (name.contains("NVFP4") || name.contains("MXFP4"));
            if !name.contains("MIXED") && (other || !words.iter().any(|word| name.contains(word))) {
                return refuse(path, field, format!("a name with {}", words.join(" or ")), format!("{value:?}"));
            }
        }
        if let Some(size) = size {
            for Declaration { path, field, value } in &self.groups {
                if !value.contains(&size) {
                    let found = value.iter().take(8).map(usize::to_string).collect::<Vec<_>>().join(", ");
                    return refuse(path, field, size.to_string(), found);
                }
            }
        }
        Ok(())
    }
}
