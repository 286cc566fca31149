//! `rope_parameters` of a `config.json`: of all layers, or of each type of layers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::config::ConfigFile;
use crate::error::Result;

/// Types of layers in `layer_types`, and how errors name the parameters of one.
const LAYER_TYPES: [(&str, &str); 4] = [
    ("full_attention", "rope_parameters.full_attention"),
    ("sliding_attention", "rope_parameters.sliding_attention"),
    ("chunked_attention", "rope_parameters.chunked_attention"),
    (RECURRENT, "rope_parameters.linear_attention"),
];

/// Layers without attention, which rotate nothing.
const RECURRENT: &str = "linear_attention";

/// `rope_parameters`, or `rope_scaling`, as it stands in `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(crate) struct RopeParameters {
    pub rope_theta: Option<f64>,
    pub rope_type: Option<String>,
    /// The `rope_type` of older versions.
    #[serde(rename = "type")]
    pub old_type: Option<String>,
    pub partial_rotary_factor: Option<f64>,
    pub factor: Option<f64>,
    pub original_max_position_embeddings: Option<usize>,
    /// Hunyuan's.
    pub alpha: Option<f64>,
    pub attention_factor: Option<f64>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: Option<bool>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub short_factor: Option<Vec<f64>>,
    pub long_factor: Option<Vec<f64>>,
    /// PhiMoE's alone, in the place of `attention_factor`.
    pub short_mscale: Option<f64>,
    pub long_mscale: Option<f64>,
    /// Everything else: parameters of the layers of one type under its name, and what no rotation here reads.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl RopeParameters {
    /// The parameters of all layers that rotate, whether they stand by themselves or by type of layers. `layer_types`: each
    /// layer's type, where the configuration lists them; parameters of a type that no layer has are of no layer. An absent
    /// `rope_theta` or `partial_rotary_factor` of a type is that beside the types.
    ///
    /// # Errors
    /// Layers of two types that rotate otherwise, which no family here has; a type without parameters; others that stand
    /// beside the types; no `layer_types`.
    pub fn of_layers(&self, file: &ConfigFile, layer_types: Option<&[String]>) -> Result<Self> {
        if !self.is_by_type(layer_types) {
            return Ok(self.clone());
        }
        let is_type = |name: &str| is_layer_type(name, layer_types);
        if let Some((name, _)) = self.other.iter().find(|(name, value)| value.is_object() && !is_type(name)) {
            let known = LAYER_TYPES.map(|(word, _)| word).join(", ");
            return file.refuse("rope_parameters", format!("objects under types of layers ({known})"), name);
        }
        let (rope_theta, partial_rotary_factor) = (self.rope_theta, self.partial_rotary_factor);
        let beside = Self { rope_theta, partial_rotary_factor, other: self.other.clone(), ..Self::default() };
        if beside != *self {
            let expected = "rope_theta and partial_rotary_factor alone beside the parameters of types of layers";
            return file.refuse("rope_parameters", expected, "others");
        }
        let Some(types) = layer_types else {
            // transformers leaves such parameters out where its class has no types of layers.
            return file.refuse(
                "layer_types",
                "each layer's type, as rope_parameters are by type of layers",
                "nothing",
            );
        };
        let mut of_all: Option<(&str, Self)> = None;
        for name in types.iter().map(String::as_str).filter(|name| *name != RECURRENT) {
            let own = self.of_type(file, name)?;
            match &of_all {
                Some((first, parameters)) if *parameters != own => {
                    let expected = format!("the rotation of {first}, as the layers of this family rotate alike");
                    return file.refuse(field(name), expected, self.other[name].to_string());
                }
                Some(_) => {}
                None => of_all = Some((name, own)),
            }
        }
        Ok(of_all.map_or(beside, |(_, parameters)| parameters))
    }

    /// Whether parameters stand by type of layers. Then no other key of `config.json` completes them.
    pub fn is_by_type(&self, layer_types: Option<&[String]>) -> bool {
        self.other.iter().any(|(name, value)| value.is_object() || is_layer_type(name, layer_types))
    }

    /// The parameters of one type of layers.
    fn of_type(&self, file: &ConfigFile, name: &str) -> Result<Self> {
        let Some(entry) = self.other.get(name).filter(|entry| !entry.is_null()) else {
            return file.refuse(field(name), "the parameters of these layers", "nothing");
        };
        let own = match Self::deserialize(entry) {
            Ok(own) => own,
            Err(error) => return file.refuse(field(name), "parameters of a rotation", error),
        };
        if own.other.values().any(Value::is_object) {
            return file.refuse(field(name), "parameters of a rotation", "an object in it");
        }
        Ok(Self {
            rope_theta: own.rope_theta.or(self.rope_theta),
            partial_rotary_factor: own.partial_rotary_factor.or(self.partial_rotary_factor),
            rope_type: Some(own.kind().into()),
            old_type: None,
            ..own
        })
    }

    /// The same of heads that are rotated whole.
    pub fn without_partial_rotary_factor(&self) -> Self {
        let mut other = self.other.clone();
        for entry in other.values_mut().filter_map(Value::as_object_mut) {
            entry.remove("partial_rotary_factor");
        }
        Self { partial_rotary_factor: None, other, ..self.clone() }
    }

    pub(super) fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.old_type.as_deref()).unwrap_or("default")
    }
}

/// Whether this is a type of layers: one that `config.json` lists, or one that all know.
fn is_layer_type(name: &str, layer_types: Option<&[String]>) -> bool {
    let listed = layer_types.is_some_and(|types| types.iter().any(|word| word == name));
    listed || LAYER_TYPES.iter().any(|(word, _)| *word == name)
}

/// How errors name the parameters of a type of layers.
fn field(name: &str) -> &'static str {
    LAYER_TYPES.iter().find(|(word, _)| *word == name).map_or("rope_parameters", |(_, field)| field)
}
