//! Load of the experts, as data.

use crate::error::{Error, Result};

/// How evenly the tokens of one forward fell on the experts, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Tokens that chose each expert, `[E]`, before any drop.
    pub tokens_per_expert: Vec<usize>,
    /// Choices of this rank's tokens that a capacity dropped.
    pub dropped: usize,
}

impl Load {
    /// A load from its counts.
    pub fn new(tokens_per_expert: Vec<usize>, dropped: usize) -> Self {
        Self { tokens_per_expert, dropped }
    }

    /// Counts the choices in `ids` (any shape); negative ids are choices already dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first id that is not below `num_experts`.
    pub fn from_ids(ids: &[i32], num_experts: usize) -> Result<Self> {
        let mut load = Self::new(vec![0; num_experts], 0);
        for (i, &id) in ids.iter().enumerate() {
            match usize::try_from(id).map(|id| load.tokens_per_expert.get_mut(id)) {
                Err(_) => load.dropped += 1,
                Ok(Some(count)) => *count += 1,
                Ok(None) => {
                    return Err(Error::invalid(
                        "Load::from_ids",
                        format!("ids[{i}]"),
                        format!("less than {num_experts} (num_experts)"),
                        id,
                    ));
                }
            }
        }
        Ok(load)
    }

    /// Choices over all experts.
    pub fn total(&self) -> usize {
        self.tokens_per_expert.iter().fold(0, |total, tokens| total.saturating_add(*tokens))
    }

    /// max c / mean c, from 1 (even) to E (all on one expert). 1 without tokens.
    pub fn max_over_mean(&self) -> f64 {
        match (self.total(), self.tokens_per_expert.iter().max()) {
            (1.., Some(&max)) => max as f64 * self.tokens_per_expert.len() as f64 / self.total() as f64,
            _ => 1.0,
        }
    }

    /// −Σ q·log q / log E with q = c / Σ c, from 0 (all on one expert) to 1 (even). 1 without tokens and with a
    /// single expert, whose load cannot be uneven.
    pub fn entropy(&self) -> f64 {
        let (total, experts) = (self.total() as f64, self.tokens_per_expert.len());
        if total == 0.0 || experts < 2 {
            return 1.0;
        }
        let nats: f64 =
            (self.tokens_per_expert.iter().filter(|c| **c > 0)).map(|&c| c as f64 / total).map(|q| -q * q.ln()).sum();
        // Not above 1 by rounding, and not −0.
        (nats / (experts as f64).ln()).clamp(0.0, 1.0) + 0.0
    }
}
