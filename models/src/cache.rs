//! What a decoder keeps of the tokens so far.

use candle_core::{Result, Tensor};

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

    /// A recurrent layer's state.
    pub fn state(&self) -> Option<&(Tensor, Tensor)> {
        self.0.as_ref()
    }

    /// Replaces it.
    pub fn set_state(&mut self, state: (Tensor, Tensor)) {
        self.0 = Some(state);
    }
}
