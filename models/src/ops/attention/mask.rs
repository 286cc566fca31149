//! Which keys a query sees.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor};

/// Which keys a query sees, of those at its position and before, and how their scores are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOptions<'a> {
    /// Position of the first query.
    pub first: usize,
    /// The last so many positions, its own included.
    pub window: Option<usize>,
    /// Those of its own chunk of so many positions.
    pub chunk: Option<usize>,
    /// A logit for each head `[heads]` that takes part in the softmax and has no value.
    pub sinks: Option<&'a Tensor>,
    /// Factor of the scores.
    pub scale: f64,
    /// The masks of this forward.
    pub masks: &'a MaskCache,
}

/// The masks of a forward, which its layers share.
#[derive(Debug, Clone, Default)]
pub(crate) struct MaskCache(Arc<Mutex<HashMap<Block, Tensor>>>);

/// A block of queries and the keys before its last one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Block {
    window: Option<usize>,
    chunk: Option<usize>,
    /// Position of the first query.
    first: usize,
    rows: usize,
    /// Position of the first key; the last is that of the last query.
    low: usize,
}

impl AttentionOptions<'_> {
    /// First position that a query at `position` sees.
    pub fn low(&self, position: usize) -> usize {
        let window = self.window.map_or(0, |n| (position + 1).saturating_sub(n));
        window.max(self.chunk.map_or(0, |n| position / n * n))
    }

    /// Keys of the last positions that a later query can see, of `len` positions so far.
    pub fn kept(&self, len: usize) -> usize {
        len - self.low(len).min(len)
    }
}

impl MaskCache {
    /// `[rows, keys]` of the queries from position `first` on and the keys from `low` on: −∞ where a query does not see a
    /// key, else 0, in the type of `like`.
    pub(super) fn get(
        &self,
        options: &AttentionOptions<'_>,
        [first, rows, low]: [usize; 3],
        like: &Tensor,
    ) -> Result<Tensor> {
        let block = Block { window: options.window, chunk: options.chunk, first, rows, low };
        // Without chunks a mask depends on distances alone.
        let key = match options.chunk {
            None => Block { first: first - low, low: 0, ..block },
            _ => block,
        };
        let known = |key| self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        if let Some(mask) = known(&key) {
            return Ok(mask);
        }
        let end = first + rows;
        let mut values = Vec::with_capacity(rows * (end - low));
        for query in first..end {
            let lowest = options.low(query);
            values.extend((low..end).map(|key| if (lowest..=query).contains(&key) { 0.0 } else { f32::NEG_INFINITY }));
        }
        let mask = Tensor::from_vec(values, (rows, end - low), like.device())?.to_dtype(like.dtype())?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, mask.clone());
        Ok(mask)
    }
}
