//! The part of `config.json` that families share; each family's own part stands in its file, and the experts' part is
//! [`moebius::checkpoint::Checkpoint::block_config`].

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::rotary::{RopeParameters, Rotary, RotaryConfig};

/// Bound on every size, far above published models, so that products of two of them cannot overflow.
const MAX_SIZE: usize = 1 << 28;

/// Sizes and constants of a decoder under the names that most families use.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Base {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Inner size of the dense layers; of the experts in families without dense layers.
    #[serde(default)]
    pub intermediate_size: Option<usize>,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// As many as query heads where absent.
    #[serde(default)]
    pub num_key_value_heads: Option<usize>,
    /// H / query heads where absent.
    #[serde(default)]
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    #[serde(default)]
    pub tie_word_embeddings: Option<bool>,
    #[serde(default)]
    pub hidden_act: Option<String>,
    #[serde(default)]
    pub rope_theta: Option<f64>,
    /// transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`.
    #[serde(default)]
    pub rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    pub rope_scaling: Option<RopeParameters>,
    #[serde(default)]
    pub partial_rotary_factor: Option<f64>,
    #[serde(default)]
    pub original_max_position_embeddings: Option<usize>,
    /// Each layer's kind of attention, of families whose layers differ in it.
    #[serde(default)]
    pub layer_types: Option<Vec<String>>,
}

/// Heads of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Heads {
    /// Hidden size H.
    pub hidden: usize,
    /// Query heads.
    pub queries: usize,
    /// Key and value heads; a divisor of the query heads.
    pub keys: usize,
    /// Size of a head D.
    pub dim: usize,
}

/// Makes errors of one file.
#[derive(Debug, Clone)]
pub(crate) struct ConfigFile(pub String);

impl ConfigFile {
    pub fn refuse<T>(&self, field: &'static str, expected: impl ToString, found: impl ToString) -> Result<T> {
        Err(Error::Config { path: self.0.clone(), field, expected: expected.to_string(), found: found.to_string() })
    }

    /// A size of at least 1 that leaves room for products.
    pub fn size(&self, field: &'static str, size: usize) -> Result<usize> {
        if size == 0 || size > MAX_SIZE { self.refuse(field, "1..=2^28", size) } else { Ok(size) }
    }

    /// A finite number above 0.
    pub fn positive(&self, field: &'static str, number: f64) -> Result<f64> {
        if number.is_finite() && number > 0.0 { Ok(number) } else { self.refuse(field, "a finite number > 0", number) }
    }

    /// A window or chunk of attention: `None`, and transformers' 0, mean that there is none.
    pub fn span(&self, field: &'static str, span: Option<usize>) -> Result<Option<usize>> {
        span.filter(|n| *n > 0).map(|n| self.size(field, n)).transpose()
    }

    /// Each layer's kind of attention, of the words in `known`, where the configuration lists it.
    pub fn layer_types<'a>(
        &self,
        list: Option<&'a [String]>,
        layers: usize,
        known: [&str; 2],
    ) -> Result<Option<&'a [String]>> {
        let Some(list) = list else { return Ok(None) };
        let list = self.per_layer("layer_types", list, layers)?;
        match list[..layers].iter().find(|word| !known.contains(&word.as_str())) {
            Some(word) => self.refuse("layer_types", format!("{:?} or {:?}", known[0], known[1]), format!("{word:?}")),
            None => Ok(Some(list)),
        }
    }

    /// A list of one entry a layer.
    pub fn per_layer<'a, T>(&self, field: &'static str, list: &'a [T], layers: usize) -> Result<&'a [T]> {
        if list.len() < layers { self.refuse(field, format!("{layers} entries"), list.len()) } else { Ok(list) }
    }
}

impl Base {
    /// Checks what every family needs.
    pub fn check(&self, file: &ConfigFile) -> Result<()> {
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            file.size(field, size)?;
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return file.refuse("rms_norm_eps", "a finite number >= 0", self.rms_norm_eps);
        }
        match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => Ok(()),
            Some(other) => file.refuse("hidden_act", "\"silu\"", format!("{other:?}")),
        }
    }

    /// The heads.
    pub fn heads(&self, file: &ConfigFile) -> Result<Heads> {
        let queries = self.num_attention_heads;
        let keys = file.size("num_key_value_heads", self.num_key_value_heads.unwrap_or(queries))?;
        let dim = file.size("head_dim", self.head_dim.unwrap_or(self.hidden_size / queries))?;
        if !queries.is_multiple_of(keys) {
            return file.refuse("num_key_value_heads", "a divisor of num_attention_heads", keys);
        }
        file.size("num_attention_heads times head_dim", queries.saturating_mul(dim))?;
        Ok(Heads { hidden: self.hidden_size, queries, keys, dim })
    }

    /// The rotary embedding of heads of `head_dim`, whole or in part as the configuration says; `theta`: the family's
    /// base where the configuration has none.
    pub fn rotary(&self, file: &ConfigFile, head_dim: usize, theta: f64) -> Result<Rotary> {
        Rotary::new(file, self.rotary_config(file, head_dim, theta)?)
    }

    /// Its sizes and parameters.
    pub fn rotary_config(&self, file: &ConfigFile, head_dim: usize, theta: f64) -> Result<RotaryConfig> {
        // A scaling that was added to a saved configuration counts, as in transformers, but not one without a key.
        let scaling = self.rope_scaling.as_ref().filter(|scaling| **scaling != RopeParameters::default());
        let types = self.layer_types.as_deref().map(|types| &types[..types.len().min(self.num_hidden_layers)]);
        let given = scaling.or(self.rope_parameters.as_ref());
        let parameters = given.map(|r| r.of_layers(file, types)).transpose()?.unwrap_or_default();
        let part = parameters.partial_rotary_factor.or(self.partial_rotary_factor).unwrap_or(1.0);
        if !(part > 0.0 && part <= 1.0) {
            return file.refuse("partial_rotary_factor", "a number in (0, 1]", part);
        }
        let dim = (head_dim as f64 * part) as usize;
        if dim == 0 || !dim.is_multiple_of(2) {
            return file.refuse("head_dim", "an even number of rotated entries", dim);
        }
        // The scaling takes the place of all `rope_parameters`, in transformers of their base too, which nobody means.
        let beside = scaling.and(self.rope_parameters.as_ref()).map(|r| r.of_layers(file, types)).transpose()?;
        let beside = beside.and_then(|r| r.rope_theta);
        let theta = self.rope_theta.unwrap_or(theta);
        if let (None, Some(beside)) = (parameters.rope_theta, beside.filter(|beside| *beside != theta)) {
            let expected =
                format!("a base, as rope_parameters has another ({beside}) than transformers takes ({theta})");
            return file.refuse("rope_scaling.rope_theta", expected, "nothing");
        }
        let theta = file.positive("rope_theta", parameters.rope_theta.unwrap_or(theta))?;
        let of_all_types =
            self.original_max_position_embeddings.filter(|_| !given.is_some_and(|r| r.is_by_type(types)));
        let original = of_all_types.or(parameters.original_max_position_embeddings);
        let max_positions = self.max_position_embeddings;
        Ok(RotaryConfig { parameters, dim, theta, max_positions, original })
    }
}
