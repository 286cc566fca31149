//! A decoder's state of the tokens so far.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::error::Error;
use crate::static_cache::StaticLayerCache;

/// The layers' state of the tokens so far, for decoding: keys and values, or a recurrent state. Its memory grows
/// with the tokens, in layers with a window or chunks up to that. A clone goes on by itself.
#[derive(Debug, Clone)]
pub struct Cache {
    /// The decoder's own, whose state this is.
    pub(crate) decoder: Arc<DecoderIdentity>,
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) len: usize,
    /// Sequences that it holds, once it holds any.
    pub(crate) sequences: Option<usize>,
}

impl Cache {
    pub(crate) fn new(decoder: &Arc<DecoderIdentity>, layers: usize) -> Self {
        Self { decoder: Arc::clone(decoder), layers: vec![LayerCache::default(); layers], len: 0, sequences: None }
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
        // A cache without tokens takes any number.
        self.sequences = self.sequences.map(|_| rows.len());
        Ok(())
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        *self = Self::new(&self.decoder, self.layers.len());
    }
}

/// What tells one loaded decoder from all others.
#[derive(Debug, Default)]
pub(crate) struct DecoderIdentity;

/// The state of one layer.
#[derive(Debug, Clone)]
pub(crate) enum LayerCache {
    /// Two tensors, which are never written once they are here.
    Growing(Option<(Tensor, Tensor)>),
    /// A recurrent layer's two tensors in memory that stays.
    State(Tensor, Tensor),
    /// Keys and values in memory that stays.
    Static(StaticLayerCache),
}

impl Default for LayerCache {
    fn default() -> Self {
        Self::Growing(None)
    }
}

impl LayerCache {
    /// The keys and values held, with `k` and `v` behind them, along dimension 2.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let both = match self {
            Self::Growing(Some((old_k, old_v))) => (Tensor::cat(&[&*old_k, k], 2)?, Tensor::cat(&[&*old_v, v], 2)?),
            _ => (k.contiguous()?, v.contiguous()?),
        };
        *self = Self::Growing(Some(both.clone()));
        Ok(both)
    }

    /// Keeps the last `len` positions alone.
    pub fn keep(&mut self, len: usize) -> Result<()> {
        if let Self::Growing(Some((k, v))) = self
            && k.dim(2)? > len
        {
            // Copies, so that the memory of the others is free.
            let last = |t: &Tensor| t.narrow(2, t.dim(2)? - len, len)?.force_contiguous();
            *self = Self::Growing(if len == 0 { None } else { Some((last(k)?, last(v)?)) });
        }
        Ok(())
    }

    /// Leaves these of the sequences held.
    pub fn keep_sequences(&mut self, rows: &[usize], held: usize) -> Result<()> {
        let Self::Growing(Some((k, v))) = self else { return Ok(()) };
        let keep = |t: &Tensor| sequences_of(t, rows, held);
        *self = Self::Growing(if rows.is_empty() { None } else { Some((keep(k)?, keep(v)?)) });
        Ok(())
    }

    /// Writes these of the sequences held by `old` into this layer's memory, which stays, has room for as many, and no
    /// fewer positions.
    pub fn take_sequences(&self, old: &Self, rows: &[usize], held: usize) -> Result<()> {
        let pairs: Vec<(&Tensor, &Tensor)> = match (self, old) {
            (Self::State(a, b), Self::State(old_a, old_b)) => vec![(a, old_a), (b, old_b)],
            (Self::Static(new), Self::Static(old)) => new.tensors.iter().zip(&old.tensors).collect(),
            _ => return Err(candle_core::Error::msg("a static cache of another model")),
        };
        // Positions that wrap do so at a layer's window or chunk, whatever the capacity: each stays in its place.
        let along = if matches!(self, Self::Static(_)) { 2 } else { 0 };
        for (new, old) in pairs.into_iter().filter(|(new, _)| new.elem_count() > 0) {
            new.slice_set(&sequences_of(old, rows, held)?, along, 0)?;
        }
        Ok(())
    }

    /// A recurrent layer's state.
    pub fn state(&self) -> Option<(&Tensor, &Tensor)> {
        match self {
            Self::Growing(Some((a, b))) | Self::State(a, b) => Some((a, b)),
            Self::Growing(None) | Self::Static(_) => None,
        }
    }

    /// Replaces it; in its memory where that stays.
    pub fn set_state(&mut self, a: Tensor, b: Tensor) -> Result<()> {
        if let Self::State(held_a, held_b) = self {
            write(held_a, &a)?;
            return write(held_b, &b);
        }
        *self = Self::Growing(Some((a, b)));
        Ok(())
    }
}

/// These of `held` sequences. A tensor has one of them an entry of its first dimension, or a head of one.
fn sequences_of(t: &Tensor, rows: &[usize], held: usize) -> Result<Tensor> {
    let heads = t.dim(0)? / held;
    let rows: Vec<u32> = rows.iter().flat_map(|row| row * heads..(row + 1) * heads).map(|i| i as u32).collect();
    // What a layer holds may be a part of a larger tensor.
    t.contiguous()?.index_select(&Tensor::new(rows, t.device())?, 0)
}

/// Overwrites all of a tensor.
pub(crate) fn write(to: &Tensor, from: &Tensor) -> Result<()> {
    if to.elem_count() == 0 { Ok(()) } else { to.slice_set(&from.contiguous()?, 0, 0) }
}
