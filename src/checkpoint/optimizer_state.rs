//! An optimizer's state as it lies on disk: its tensors, and a folder that holds one.

use std::path::Path;

use safetensors::Dtype;
use serde_json::Value;

use super::OpenOptions;
use super::folder::{CONFIG, Folder, read_one_version};
use super::json::{MAX_CONFIG, config_error, parse_value, read_limited};
use super::reader::{Files, TensorEntry};
use super::stored::on_disk;
use crate::dtype::DType;
use crate::error::{CheckpointError, Error, Result};
use crate::optim::{AdamW, Counts, StateKind, StepDevice};

/// `model_type` of a state.
pub(super) const KIND: &str = "moebius_adamw";
pub(super) const VERSION: u64 = 1;

/// A tensor of a state.
#[derive(Debug, Clone)]
pub(super) struct StateItem {
    pub(super) param: usize,
    pub(super) kind: StateKind,
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) dtype: DType,
}

/// The tensors of an optimizer's state.
pub(super) fn state_items<D: StepDevice>(optimizer: &AdamW<D>) -> Vec<StateItem> {
    let specs = optimizer.specs().iter().enumerate();
    let of = specs.flat_map(|(param, spec)| {
        StateKind::ALL.into_iter().filter_map(move |kind| {
            let dtype = optimizer.state_tensor(param, kind)?.dtype();
            let name = format!("{}.{}", spec.name, kind.name());
            Some(StateItem { param, kind, name, dims: spec.shard.dims().to_vec(), dtype })
        })
    });
    of.collect()
}

/// An identity in errors.
pub(super) fn identity_text(identity: Option<&str>) -> String {
    identity.map_or_else(|| "none".to_string(), |identity| format!("{identity:?}"))
}

/// A state that was saved.
pub(super) struct Saved {
    pub(super) files: Files,
    pub(super) counts: Counts,
    pub(super) path: String,
    pub(super) identity: Option<String>,
}

impl Saved {
    pub(super) fn open(dir: &Path) -> Result<Self> {
        read_one_version(dir, OpenOptions::default(), |folder| Self::read(dir, folder))
    }

    fn read(dir: &Path, folder: &Folder) -> Result<Self> {
        let path = folder.require(CONFIG)?;
        let config = parse_value(&read_limited(&path, MAX_CONFIG)?, &path)?;
        let field = |key: &str, expected: &str, found: Option<&Value>| {
            let found = found.map_or_else(|| "nothing".to_string(), Value::to_string);
            Error::from(config_error(&path, key, expected, found))
        };
        if config.get("model_type").and_then(Value::as_str) != Some(KIND) {
            return Err(field("model_type", &format!("\"{KIND}\""), config.get("model_type")));
        }
        if config.get("version").and_then(Value::as_u64) != Some(VERSION) {
            return Err(field("version", &VERSION.to_string(), config.get("version")));
        }
        let count = |key: &str| {
            let value = config.get(key).and_then(Value::as_u64).filter(|n| *n < 1 << 53);
            value.ok_or_else(|| field(key, "a count below 2^53", config.get(key)))
        };
        let scale = config.get("loss_scale").and_then(Value::as_str).and_then(|text| text.parse::<f64>().ok());
        let scale = scale.filter(|s| s.is_finite() && *s > 0.0);
        let scale = scale.ok_or_else(|| field("loss_scale", "a positive number, as text", config.get("loss_scale")))?;
        let (good, steps, skipped) = (count("good_steps")?, count("steps")?, count("skipped")?);
        let scaled = match config.get("loss_scaling") {
            Some(Value::Bool(scaled)) => *scaled,
            // States of before it was written.
            None => scale != 1.0 || good > 0,
            other => return Err(field("loss_scaling", "true or false", other)),
        };
        let files = Files::open(folder)?;
        let identity = match config.get("identity") {
            None | Some(Value::Null) => None,
            Some(Value::String(identity)) => Some(identity.clone()),
            other => return Err(field("identity", "a text", other)),
        };
        let (counts, path) = (Counts { scaled, scale, good, steps, skipped }, dir.display().to_string());
        Ok(Self { files, counts, path, identity })
    }

    /// Refuses the state of another model, where the optimizer says whose it is.
    pub(super) fn check_identity(&self, own: Option<&str>) -> Result<()> {
        match own.filter(|own| self.identity.as_deref() != Some(own)) {
            None => Ok(()),
            Some(own) => {
                let path = Path::new(&self.path).join(CONFIG);
                let found = identity_text(self.identity.as_deref());
                Err(config_error(&path, "identity", format!("{own:?}, the optimizer's"), found).into())
            }
        }
    }

    /// Refuses the state of another step than a model's.
    pub(super) fn check_steps(&self, steps: Option<u64>) -> Result<()> {
        match steps.filter(|steps| *steps != self.counts.steps) {
            None => Ok(()),
            Some(steps) => {
                let path = Path::new(&self.path).join(CONFIG);
                Err(config_error(&path, "steps", format!("{steps}, as the model has taken"), self.counts.steps).into())
            }
        }
    }

    /// Refuses the state of other parameters; the tensors to read.
    pub(super) fn check<D: StepDevice>(&self, optimizer: &AdamW<D>) -> Result<Vec<StateItem>> {
        let items = state_items(optimizer);
        for item in &items {
            let Some(entry) = self.files.get(&item.name) else {
                let expected = format!("{} {:?}", item.dtype, item.dims);
                let (path, tensor) = (self.path.clone(), item.name.clone());
                return Err(CheckpointError::Missing { path, tensor, expected }.into());
            };
            let widens = item.kind != StateKind::Main && entry.dtype == Dtype::BF16 && item.dtype == DType::F32;
            if entry.shape != item.dims || (entry.dtype != on_disk(item.dtype) && !widens) {
                return Err(self.misfit(item, entry));
            }
        }
        let known: std::collections::HashSet<&str> = items.iter().map(|item| item.name.as_str()).collect();
        match self.files.iter().find(|(name, _)| !known.contains(name)) {
            None => Ok(items),
            Some((name, entry)) => Err(CheckpointError::Unexpected {
                path: self.path.clone(),
                tensor: name.to_string(),
                found: format!("{:?} {:?}", entry.dtype, entry.shape),
                family: "this optimizer's state".to_string(),
            }
            .into()),
        }
    }

    /// The error of element `index` of a tensor.
    pub(super) fn refused_element(&self, item: &StateItem, index: usize, found: f32) -> Error {
        let mut rest = index;
        let mut place: Vec<usize> = Vec::new();
        for dim in item.dims.iter().rev() {
            place.insert(0, rest % dim);
            rest /= dim;
        }
        let from = if item.kind == StateKind::Second { " from 0 on" } else { "" };
        CheckpointError::Tensor {
            path: self.path.clone(),
            tensor: item.name.clone(),
            expected: format!("finite numbers{from}"),
            found: format!("{found} at {place:?}"),
        }
        .into()
    }

    fn misfit(&self, item: &StateItem, entry: &TensorEntry) -> Error {
        CheckpointError::Tensor {
            path: self.path.clone(),
            tensor: item.name.clone(),
            expected: format!("{:?} {:?}", on_disk(item.dtype), item.dims),
            found: format!("{:?} {:?}", entry.dtype, entry.shape),
        }
        .into()
    }
}
