//! Keys and values in memory that stays where it is, and where a step of one token stands in it, in the device's memory:
//! what a step that is captured once can be replayed on.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

use crate::cache::{LayerCache, write};
use crate::host_memory::has_host_memory;
use crate::ops::{CacheAttentionOptions, CacheMask, wide};
use crate::rotary::Angles;

/// Which tokens a layer's cache positions hold: that of position p of its sequence lies at cache position p mod
/// `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CachePositions {
    pub count: usize,
    /// A position sees those from the last multiple of `count` on, else the last `count`.
    pub restarts: bool,
}

impl CachePositions {
    /// Those of a layer in a cache of `capacity` positions.
    pub fn new(capacity: usize, window: Option<usize>, chunk: Option<usize>) -> Self {
        match (window, chunk) {
            (_, Some(chunk)) if chunk < capacity => Self { count: chunk, restarts: true },
            (window, _) => Self { count: capacity.min(window.unwrap_or(capacity)), restarts: false },
        }
    }

    /// Cache positions, from the first on, with what a position sees once it is there itself.
    fn filled(self, position: usize) -> usize {
        if self.restarts { position % self.count + 1 } else { self.count.min(position + 1) }
    }

    /// First position that one at `position` sees.
    fn low(self, position: usize) -> usize {
        position + 1 - self.filled(position)
    }
}

/// Sizes of a static cache, for its layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StaticShape<'a> {
    pub sequences: usize,
    pub capacity: usize,
    pub dtype: DType,
    pub device: &'a Device,
}

impl StaticShape<'_> {
    /// Zeros; an error where the host has no memory for this one tensor, for which candle would end the process.
    pub fn zeros(&self, dims: &[usize]) -> Result<Tensor> {
        if self.device.is_cpu() {
            let bytes = dims.iter().fold(self.dtype.size_in_bytes(), |bytes, dim| bytes.saturating_mul(*dim));
            if !has_host_memory(bytes) {
                let name = "keys and values".to_string();
                return Err(moebius::Error::OutOfMemory { call: "Stepper", name, bytes }.into());
            }
        }
        Tensor::zeros(dims, self.dtype, self.device)
    }

    /// A layer's keys and values, of `heads` heads with so many entries each.
    pub fn layer(&self, positions: CachePositions, heads: usize, dims: &[usize]) -> Result<StaticLayerCache> {
        let of = |dim: &usize| self.zeros(&[self.sequences, heads, positions.count, *dim]);
        Ok(StaticLayerCache { positions, tensors: dims.iter().map(of).collect::<Result<_>>()?, table: None })
    }
}

/// A layer's keys and values in memory that stays. A clone shares it.
#[derive(Debug, Clone)]
pub(crate) struct StaticLayerCache {
    pub positions: CachePositions,
    /// `[B, heads, cache positions, D]` each.
    pub tensors: Vec<Tensor>,
    /// A number of the layer's for each position, `[capacity]`.
    pub table: Option<Tensor>,
}

impl StaticLayerCache {
    /// Runs of cache positions of the positions `from..to`, which are at most as many: the first of each and how many.
    fn runs(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
        let (count, mut from, mut runs) = (self.positions.count, from, Vec::new());
        while from < to {
            let first = from % count;
            let len = (count - first).min(to - from);
            runs.push((first, len));
            from += len;
        }
        runs
    }

    /// The positions before that the token at `past` sees, and `new` behind it, of each tensor along dimension 2.
    pub fn with_past(&self, past: usize, new: &[Tensor]) -> Result<Vec<Tensor>> {
        let runs = self.runs(self.positions.low(past), past);
        let of = |(held, new): (&Tensor, &Tensor)| -> Result<Tensor> {
            if runs.is_empty() {
                return new.contiguous();
            }
            let mut parts: Vec<Tensor> =
                runs.iter().map(|(first, len)| held.narrow(2, *first, *len)).collect::<Result<_>>()?;
            parts.push(new.clone());
            Tensor::cat(&parts, 2)
        };
        self.tensors.iter().zip(new).map(of).collect()
    }

    /// Puts tokens from position `past` on at their cache positions.
    pub fn put(&self, past: usize, new: &[Tensor]) -> Result<()> {
        for (held, new) in self.tensors.iter().zip(new) {
            let len = new.dim(2)?;
            // Of more tokens than cache positions the last.
            let skipped = len.saturating_sub(self.positions.count);
            let mut at = skipped;
            for (first, run) in self.runs(past + skipped, past + len) {
                held.slice_set(&new.narrow(2, at, run)?.contiguous()?, 2, first)?;
                at += run;
            }
        }
        Ok(())
    }

    /// Puts one token a sequence at its cache position.
    pub fn put_at(&self, position: &StepPosition, new: &[Tensor]) -> Result<()> {
        for (held, new) in self.tensors.iter().zip(new) {
            held.scatter_set(&position.index(self.positions, new.dims())?, &new.contiguous()?, 2)?;
        }
        Ok(())
    }

    fn clear(&self) -> Result<()> {
        self.tensors.iter().filter(|t| t.elem_count() > 0).try_for_each(Tensor::zero_set)
    }
}

/// Cache positions of a kind of layer, by position.
#[derive(Debug, Clone)]
struct CachePositionTable {
    positions: CachePositions,
    /// U32 `[capacity]`: the position's cache position, and how many it sees.
    cache_position: Tensor,
    filled: Tensor,
    /// U32 `[count]`: 0, 1, …
    numbers: Tensor,
    /// `[count]`: zeros, and −∞.
    seen: Tensor,
    unseen: Tensor,
}

/// The position of a cache in the device's memory, and what follows from it, by position. A clone shares the memory.
#[derive(Debug, Clone)]
pub(crate) struct PositionTables {
    /// U32 `[1]`
    position: Tensor,
    one: Tensor,
    angles: Angles,
    tables: Vec<CachePositionTable>,
}

impl PositionTables {
    /// `angles`: of all positions.
    fn new(shape: &StaticShape<'_>, angles: Angles, kinds: &[CachePositions]) -> Result<Self> {
        let StaticShape { capacity, device, .. } = *shape;
        let table = |positions: &CachePositions| -> Result<CachePositionTable> {
            let of = |value: &dyn Fn(usize) -> usize| {
                Tensor::from_iter((0..capacity).map(|p| value(p) as u32), &Device::Cpu)?.to_device(device)
            };
            let (seen, count) = (wide(shape.dtype), positions.count);
            Ok(CachePositionTable {
                positions: *positions,
                cache_position: of(&|p| p % count)?,
                filled: of(&|p| positions.filled(p))?,
                numbers: Tensor::arange(0, count as u32, device)?,
                seen: Tensor::zeros(count, seen, device)?,
                unseen: Tensor::full(f32::NEG_INFINITY, count, device)?.to_dtype(seen)?,
            })
        };
        Ok(Self {
            position: Tensor::zeros(1, DType::U32, device)?,
            one: Tensor::ones(1, DType::U32, device)?,
            angles,
            tables: kinds.iter().map(table).collect::<Result<_>>()?,
        })
    }

    /// Where the next token stands.
    pub fn step_position(&self) -> Result<StepPosition> {
        let at = |t: &Tensor| t.index_select(&self.position, 0);
        let of = |table: &CachePositionTable| -> Result<StepCachePosition> {
            let filled = at(&table.filled)?;
            let (numbers, seen, unseen) = (table.numbers.clone(), table.seen.clone(), table.unseen.clone());
            let mask = CacheMask { numbers, seen, unseen, filled, made: OnceLock::new() };
            Ok(StepCachePosition { positions: table.positions, cache_position: at(&table.cache_position)?, mask })
        };
        Ok(StepPosition {
            position: self.position.clone(),
            angles: self.angles.at(&self.position)?,
            cache_positions: self.tables.iter().map(of).collect::<Result<_>>()?,
            indices: Mutex::default(),
        })
    }

    /// Counts a token.
    pub fn advance(&self) -> Result<()> {
        write(&self.position, &(&self.position + &self.one)?)
    }

    fn set(&self, position: usize) -> Result<()> {
        write(&self.position, &Tensor::new(&[position as u32], self.position.device())?)
    }
}

/// Where the token of a step stands, in the device's memory.
#[derive(Debug)]
pub(crate) struct StepPosition {
    /// U32 `[1]`
    position: Tensor,
    pub angles: Angles,
    /// One for each kind of layer.
    cache_positions: Vec<StepCachePosition>,
    /// Places of entries in layers' tensors, which layers share.
    indices: Mutex<HashMap<(CachePositions, Vec<usize>), Tensor>>,
}

#[derive(Debug)]
struct StepCachePosition {
    positions: CachePositions,
    cache_position: Tensor,
    mask: CacheMask,
}

impl StepPosition {
    fn of(&self, positions: CachePositions) -> Result<&StepCachePosition> {
        let unknown = || candle_core::Error::msg("a static cache of another model");
        self.cache_positions.iter().find(|of| of.positions == positions).ok_or_else(unknown)
    }

    /// The cache positions of a layer that the token sees, and how scores are made.
    pub fn options<'a>(
        &'a self,
        positions: CachePositions,
        sinks: Option<&'a Tensor>,
        scale: f64,
    ) -> Result<CacheAttentionOptions<'a>> {
        let StepCachePosition { mask, .. } = self.of(positions)?;
        Ok(CacheAttentionOptions { mask, filled: &mask.filled, sinks, scale })
    }

    /// The token's cache position, U32 `[1]`.
    pub fn cache_position(&self, positions: CachePositions) -> Result<&Tensor> {
        Ok(&self.of(positions)?.cache_position)
    }

    /// The same for each entry, `[B, heads, 1, D]`.
    fn index(&self, positions: CachePositions, dims: &[usize]) -> Result<Tensor> {
        let mut known = self.indices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = known.get(&(positions, dims.to_vec())) {
            return Ok(index.clone());
        }
        let index = self.cache_position(positions)?;
        let index = index.reshape(vec![1; dims.len()])?.broadcast_as(dims)?.contiguous()?;
        known.insert((positions, dims.to_vec()), index.clone());
        Ok(index)
    }

    /// A table's number for the token, `[1]`.
    pub fn number(&self, table: &Tensor) -> Result<Tensor> {
        table.index_select(&self.position, 0)
    }
}

/// Keys, values and states of a fixed number of sequences, with room for a fixed number of tokens each, in memory that
/// stays where it is.
#[derive(Debug)]
pub(crate) struct StaticCache {
    pub layers: Vec<LayerCache>,
    pub positions: PositionTables,
    pub len: usize,
    pub capacity: usize,
    pub sequences: usize,
}

impl StaticCache {
    pub fn new(shape: &StaticShape<'_>, angles: Angles, layers: Vec<LayerCache>) -> Result<Self> {
        let mut kinds: Vec<CachePositions> = Vec::new();
        for layer in &layers {
            if let LayerCache::Static(cache) = layer
                && !kinds.contains(&cache.positions)
            {
                kinds.push(cache.positions);
            }
        }
        let positions = PositionTables::new(shape, angles, &kinds)?;
        Ok(Self { layers, positions, len: 0, capacity: shape.capacity, sequences: shape.sequences })
    }

    /// Counts tokens that came with their positions known to the host.
    pub fn count(&mut self, tokens: usize) -> Result<()> {
        self.len += tokens;
        self.positions.set(self.len)
    }

    /// Forgets all tokens; the memory stays. Zeros, so that what an error has left there is not multiplied by zero.
    pub fn clear(&mut self) -> Result<()> {
        for layer in &self.layers {
            match layer {
                LayerCache::Growing(_) => {}
                LayerCache::State(a, b) => {
                    [a, b].into_iter().filter(|t| t.elem_count() > 0).try_for_each(Tensor::zero_set)?
                }
                LayerCache::Static(cache) => cache.clear()?,
            }
        }
        self.len = 0;
        self.positions.set(0)
    }
}
