//! How a token is chosen, as a caller or a folder's `generation_config.json` says it.

use std::path::Path;

use crate::generate::error::{Error, Result};
use crate::generate::folder;

/// How a token is chosen from logits. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0: greedy, the token of the largest logit.
    pub temperature: f32,
    /// So many tokens of the largest logits are left, and what equals the last of them; 0: all.
    pub top_k: usize,
    /// The fewest tokens of the largest logits with this probability together are left, in `0.0..=1.0`; 1: all.
    pub top_p: f32,
    /// Tokens with at least this share of the largest probability are left, in `0.0..=1.0`; 0: all.
    pub min_p: f32,
    /// Logits of ids that are in prompt or text already are divided by it where they are above zero, else multiplied;
    /// 1: not at all. It works with greedy choice too.
    pub repetition_penalty: f32,
    /// Seed of a sequence's random numbers: the same seed, prompt and logits give the same tokens, whatever else is in
    /// the batch. (A batch may round logits differently; what a decoder says of that is its own affair.)
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// The sampling of a folder's `generation_config.json`, with transformers' defaults where it samples and does not
    /// say: temperature 1, `top_k` 50. Greedy where it does not sample, or there is no such file. The seed is 0: who wants
    /// other texts for the same prompt sets one.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Parameter`].
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        Self::read(dir.as_ref(), false)
    }

    /// The same as if the file said that it samples, which is what transformers does where a caller asks it to.
    ///
    /// # Errors
    /// As [`from_folder`](Self::from_folder).
    pub fn drawing_from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        Self::read(dir.as_ref(), true)
    }

    fn read(dir: &Path, draws: bool) -> Result<Self> {
        const FILE: &str = "generation_config.json";
        let file = folder::json(dir, FILE)?;
        let number = |name: &str, default: f64| match file.get(name) {
            None | Some(serde_json::Value::Null) => Ok(default),
            Some(value) => value
                .as_f64()
                .ok_or_else(|| folder::problem(dir, FILE, &format!("{name}: expected a number, found {value}"))),
        };
        let wrong = |name: &str, expected: &str| {
            folder::problem(dir, FILE, &format!("{name}: expected {expected}, found {}", file[name]))
        };
        if !file.is_object() && !file.is_null() {
            return Err(folder::problem(dir, FILE, "expected an object"));
        }
        if !matches!(file["do_sample"], serde_json::Value::Null | serde_json::Value::Bool(_)) {
            return Err(wrong("do_sample", "true or false"));
        }
        let mut this = Self { repetition_penalty: number("repetition_penalty", 1.0)? as f32, ..Self::default() };
        if draws || file["do_sample"] == true {
            this.temperature = number("temperature", 1.0)? as f32;
            let top_k = number("top_k", 50.0)?;
            if !(0.0..=f64::from(u32::MAX)).contains(&top_k) || top_k.fract() != 0.0 {
                return Err(wrong("top_k", "a whole number from 0 on"));
            }
            this.top_k = top_k as usize;
            this.top_p = number("top_p", 1.0)? as f32;
            this.min_p = number("min_p", 0.0)? as f32;
        }
        this.check().map_err(|e| folder::problem(dir, FILE, &e.to_string()))?;
        Ok(this)
    }

    /// Refuses values outside their ranges.
    ///
    /// # Errors
    /// [`Error::Parameter`], naming the first.
    pub fn check(&self) -> Result<()> {
        let finite = |name, expected, value: f32, ok: bool| match ok && value.is_finite() {
            true => Ok(()),
            false => Err(Error::Parameter { name, expected, found: value.to_string() }),
        };
        let probability = "a number of 0 to 1";
        finite("temperature", "0, or a finite number above 0", self.temperature, self.temperature >= 0.0)?;
        finite("top_p", probability, self.top_p, (0.0..=1.0).contains(&self.top_p))?;
        finite("min_p", probability, self.min_p, (0.0..=1.0).contains(&self.min_p))?;
        let penalty = self.repetition_penalty;
        finite("repetition_penalty", "a number above 0", penalty, penalty > 0.0)
    }
}
