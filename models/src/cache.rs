//! What a decoder keeps of the tokens so far.

use candle_core::{Result, Tensor};

use crate::error::Error;

/// What the layers keep of the tokens so far, for decoding: keys and values, or a recurrent state. Its memory grows
/// with the tokens, in layers with a window or chunks up to that. A clone goes on by itself.
#[derive(Debug, Clone)]
pub struct Cache {
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) len: usize,
    /// Sequences that it holds, once it holds any.
    pub(crate) sequences: Option<usize>,
}

impl Cache {
    pub(crate) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerCache::default(); layers], len: 0, sequences: None }
    }

    /// Tokens held of each sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True where no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Leaves these of the sequences, in this order: where some of a batch have ended, the others go on without them.
    ///
    /// # Errors
    /// A sequence that is not held; candle's, after which the cache must be cleared.
    pub fn keep_sequences(&mut self, rows: &[usize]) -> crate::Result<()> {
        let held = self.sequences.unwrap_or(0);
        if let Some(row) = rows.iter().find(|row| **row >= held) {
            let problem = format!("sequence {row}: the cache holds {held}");
            return Err(Error::Usage { call: "Cache::keep_sequences", problem });
        }
        for layer in &mut self.layers {
            layer.keep_sequences(rows, held)?;
        }
        self.sequences = Some(rows.len());
        Ok(())
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        *self = Self::new(self.layers.len());
    }
}

/// Two tensors of one layer; tensors are never written once they are here.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerCache(Option<(Tensor, Tensor)>);

impl LayerCache {
    /// What is held and `k` and `v` behind it, along dimension 2.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let both = match &self.0 {
            None => (k.contiguous()?, v.contiguous()?),
            Some((old_k, old_v)) => (Tensor::cat(&[old_k, k], 2)?, Tensor::cat(&[old_v, v], 2)?),
        };
        self.0 = Some(both.clone());
        Ok(both)
    }

    /// Keeps the last `len` positions alone.
    pub fn keep(&mut self, len: usize) -> Result<()> {
        if let Some((k, v)) = &self.0
            && k.dim(2)? > len
        {
            // Copies, so that the memory of the others is free.
            let last = |t: &Tensor| t.narrow(2, t.dim(2)? - len, len)?.force_contiguous();
            self.0 = if len == 0 { None } else { Some((last(k)?, last(v)?)) };
        }
        Ok(())
    }

    /// Leaves these of the sequences held. A tensor has one of them an entry of its first dimension, or a head of one.
    pub fn keep_sequences(&mut self, rows: &[usize], held: usize) -> Result<()> {
        let Some((k, v)) = &self.0 else { return Ok(()) };
        let keep = |t: &Tensor| {
            let heads = t.dim(0)? / held;
            let rows: Vec<u32> = rows.iter().flat_map(|row| row * heads..(row + 1) * heads).map(|i| i as u32).collect();
            t.index_select(&Tensor::new(rows, t.device())?, 0)
        };
        self.0 = if rows.is_empty() { None } else { Some((keep(k)?, keep(v)?)) };
        Ok(())
    }

    /// A recurrent layer's state.
    pub fn state(&self) -> Option<&(Tensor, Tensor)> {
        self.0.as_ref()
    }

    /// Replaces it.
    pub fn set_state(&mut self, state: (Tensor, Tensor)) {
        self.0 = Some(state);
    }
}
