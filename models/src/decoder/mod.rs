//! The decoder that all families are: an embedding, layers of a mixer (attention, or a recurrence) and a feed-forward
//! block, each behind a norm and beside the residual stream, a last norm, and a projection to the vocabulary.

mod spec;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::Linear;
use moebius::candle::{ExpertParallelMoE, HostExperts};
use moebius::ep::Capacity;
use moebius::layer::DispatchOptions;

use crate::cache::{Cache, DecoderIdentity, LayerCache};
use crate::chunk_masks::ChunkMaskCache;
use crate::error::Result;
use crate::mlp::Mlp;
use crate::norm::Norm;
use crate::ops::{Head, MaskCache, linear};
use crate::rotary::{Angles, Rotary};
use crate::static_cache::{StaticCache, StaticShape, StepPosition};

pub(crate) use spec::{DecoderSpec, Names, Scales};

/// A place in a forward where a [`Tap`] sees a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Point {
    /// The input of a layer's experts, `[T, H]`: the tokens behind the norm.
    MoeInput {
        /// The layer.
        layer: usize,
    },
    /// Their output, before the residual.
    MoeOutput {
        /// The layer.
        layer: usize,
    },
    /// The experts that a layer's tokens chose, `[T, K]`, U32. What a tap gives in its place is not used.
    Choices {
        /// The layer.
        layer: usize,
    },
}

/// Sees tensors of a forward and may put others in their places, of the same shape and type.
pub type Tap<'a> = dyn FnMut(Point, Tensor) -> CandleResult<Tensor> + 'a;

/// The tokens of a call, and where they stand in their sequences.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    pub sequences: usize,
    /// Tokens of each.
    pub len: usize,
    /// Tokens before them.
    pub past: usize,
    /// Angles of the tokens.
    pub angles: Angles,
    /// Angles depend on the sequence's length.
    pub late_rotation: bool,
    pub masks: MaskCache,
    /// Those of recurrent layers' chunks, of all forwards.
    pub chunk_masks: &'a ChunkMaskCache,
    /// Where the token stands in a static cache, if this is a step of one token a sequence over one.
    pub position: Option<StepPosition>,
    rotary: &'a Rotary,
    dtype: DType,
    device: &'a Device,
}

impl Step<'_> {
    /// Angles of the last `len` positions.
    pub fn key_angles(&self, len: usize) -> CandleResult<Angles> {
        let end = self.past + self.len;
        match len == self.len {
            true => self.angles.last(len),
            false => self.rotary.angles(end - len..end, self.dtype, self.device),
        }
    }
}

/// Mixes tokens of a sequence.
pub(crate) trait Mixer: Debug + Send + Sync {
    /// `x` is `[B·S, H]`, as is the result.
    fn forward(&self, x: &Tensor, step: &Step<'_>, cache: Option<&mut LayerCache>) -> Result<Tensor>;

    /// An empty cache of memory that stays.
    fn static_cache(&self, shape: &StaticShape<'_>) -> CandleResult<LayerCache>;
}

/// The caches of a forward's layers.
#[derive(Debug)]
pub(crate) struct ForwardCaches<'a> {
    pub layers: &'a mut [LayerCache],
    /// Tokens that they hold.
    pub past: usize,
    /// As in [`Step`].
    pub position: Option<StepPosition>,
    /// Most tokens that a rank brings, where the experts' rows are to have room for any choices of so many.
    pub most_tokens: Option<usize>,
}

/// The feed-forward block of a layer.
#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Experts(Box<ExpertParallelMoE>),
}

/// A layer.
#[derive(Debug)]
struct Layer {
    input_norm: Norm,
    mixer: Box<dyn Mixer>,
    post_norm: Norm,
    feed_forward: FeedForward,
}

/// The residual stream from block to block, `[T, H]`, and the last one's output, which the next norm adds.
struct Residual {
    x: Tensor,
    pending: Option<Tensor>,
}

impl Residual {
    fn normed(&mut self, norm: &Norm) -> CandleResult<Tensor> {
        let Some(y) = self.pending.take() else { return norm.forward(&self.x) };
        let [x, normed] = norm.of_sum(&self.x, &y)?;
        self.x = x;
        Ok(normed)
    }
}

/// A rank's copy of a decoder: all of it but for the experts, of which the rank holds its E / R.
#[derive(Debug)]
pub(crate) struct DecoderStack {
    /// Of its caches too.
    identity: Arc<DecoderIdentity>,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Norm,
    head: Linear,
    rotary: Rotary,
    scales: Scales,
    /// Where the layers' experts are, if on the host.
    host: Option<HostExperts>,
    chunk_masks: ChunkMaskCache,
}

/// A layer in a forward.
#[derive(Debug, Clone, Copy)]
struct LayerCall {
    number: usize,
    /// As in [`ForwardCaches`].
    most_tokens: Option<usize>,
}

/// Rows of a rank's experts that any choices of at most `most` tokens a rank fit in.
pub(crate) fn rows_for(moe: &ExpertParallelMoE, most: usize) -> usize {
    let (layer, group) = (moe.layer(), moe.group());
    let padding = group.local_experts() * (layer.dispatch().alignment - 1);
    group.ranks().saturating_mul(most).saturating_mul(layer.config().router.top_k).saturating_add(padding)
}

/// The module with [room for](rows_for) `most` tokens of every rank, so that nothing waits for their number.
fn with_room(moe: &ExpertParallelMoE, most: usize) -> ExpertParallelMoE {
    let layer = moe.layer().clone();
    let (capacity, max_tokens) = (Capacity::Static(rows_for(moe, most)), Some(most));
    let dispatch = DispatchOptions { capacity, max_tokens, ..layer.dispatch() };
    moe.clone().with_layer(layer.with_dispatch(dispatch))
}

/// How far a rank has come in a forward.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ForwardProgress {
    /// Layers whose collectives, if any, are behind it, or some fewer without any.
    layers: usize,
    /// Within a layer with experts, which tells the other ranks of its errors itself.
    inside: bool,
}

impl DecoderStack {
    pub fn vocabulary(&self) -> usize {
        self.embedding.dims()[0]
    }

    pub fn hidden_size(&self) -> usize {
        self.embedding.dims()[1]
    }

    pub fn device(&self) -> &Device {
        self.embedding.device()
    }

    /// The type of hidden states.
    pub fn dtype(&self) -> DType {
        self.embedding.dtype()
    }

    pub fn context(&self) -> usize {
        self.rotary.context()
    }

    pub fn cache(&self) -> Cache {
        Cache::new(&self.identity, self.layers.len())
    }

    /// Whether a cache is one of this decoder's.
    pub fn made(&self, cache: &Cache) -> bool {
        Arc::ptr_eq(&self.identity, &cache.decoder)
    }

    /// A cache of memory that stays; `None` where angles depend on the sequence's length.
    pub fn static_cache(&self, sequences: usize, capacity: usize) -> CandleResult<Option<StaticCache>> {
        if self.rotary.depends_on_length() {
            return Ok(None);
        }
        let (dtype, device) = (self.embedding.dtype(), self.device());
        let shape = StaticShape { sequences, capacity, dtype, device };
        // A GPU has no memory of no bytes, and no sequence has no keys.
        let layers = self.layers.iter().filter(|_| sequences > 0);
        let layers = layers.map(|layer| layer.mixer.static_cache(&shape)).collect::<CandleResult<_>>()?;
        StaticCache::new(&shape, self.rotary.angles(0..capacity, dtype, device)?, layers).map(Some)
    }

    /// Leaves these of a static cache's sequences, in this order, in memory for `capacity` positions, which are no fewer
    /// than before. A layer at a time, so that one layer alone is there twice. After an error the cache is of no use.
    pub fn resize(&self, cache: &mut StaticCache, rows: &[usize], capacity: usize) -> CandleResult<()> {
        let (dtype, device, held) = (self.embedding.dtype(), self.device(), cache.sequences);
        let shape = StaticShape { sequences: rows.len(), capacity, dtype, device };
        if rows.is_empty() {
            cache.layers.clear();
        }
        for (layer, old) in self.layers.iter().zip(&mut cache.layers) {
            let new = layer.mixer.static_cache(&shape)?;
            new.take_sequences(old, rows, held)?;
            *old = new;
        }
        let (len, layers) = (cache.len, cache.layers.clone());
        *cache = StaticCache::new(&shape, self.rotary.angles(0..capacity, dtype, device)?, layers)?;
        cache.count(len)
    }

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    pub fn moe(&self, layer: usize) -> Option<&ExpertParallelMoE> {
        match &self.layers.get(layer)?.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(moe) => Some(moe),
        }
    }

    /// The experts that are on the host.
    pub fn host_experts(&self) -> Option<&HostExperts> {
        self.host.as_ref()
    }

    /// Tells the ranks that are in a later layer with experts, or will be, that this one is not coming.
    pub fn refuse(&self, at: ForwardProgress, reason: &str) {
        if let Some(moe) = (at.layers..self.layers.len()).find_map(|layer| self.moe(layer))
            && !at.inside
        {
            moe.refuse_forward(reason);
        }
    }

    /// Hidden states `[B, S, H]` behind the last norm, of `ids [B, S]` that have been checked.
    pub fn hidden(
        &self,
        ids: &Tensor,
        cache: Option<ForwardCaches<'_>>,
        tap: &mut Option<&mut Tap<'_>>,
        at: &mut ForwardProgress,
    ) -> Result<Tensor> {
        let layers = || self.hidden_of_layers(ids, cache, tap, at);
        match &self.host {
            Some(host) => host.forward(layers),
            None => layers(),
        }
    }

    fn hidden_of_layers(
        &self,
        ids: &Tensor,
        cache: Option<ForwardCaches<'_>>,
        tap: &mut Option<&mut Tap<'_>>,
        at: &mut ForwardProgress,
    ) -> Result<Tensor> {
        let (sequences, len) = ids.dims2()?;
        let late_rotation = cache.is_some() && self.rotary.depends_on_length();
        let (mut layers, past, position, most_tokens) = match cache {
            None => (None, 0, None, None),
            Some(ForwardCaches { layers, past, position, most_tokens }) => (Some(layers), past, position, most_tokens),
        };
        // A GPU starts no kernel of no element.
        let nowhere = sequences * len == 0 && !self.device().is_cpu();
        let mut x = match nowhere {
            true => self.embedding.narrow(0, 0, 0)?,
            false => self.embedding.index_select(&ids.flatten_all()?, 0)?,
        };
        if self.scales.embedding != 1.0 && !nowhere {
            x = (x * self.scales.embedding)?;
        }
        let (dtype, device) = (x.dtype(), self.device());
        let mut x = Residual { x, pending: None };
        let step = Step {
            sequences,
            len,
            past,
            angles: match &position {
                Some(position) => position.angles.clone(),
                None => self.rotary.angles(past..past + len, dtype, device)?,
            },
            late_rotation,
            masks: MaskCache::default(),
            chunk_masks: &self.chunk_masks,
            position,
            rotary: &self.rotary,
            dtype,
            device,
        };
        for (number, layer) in self.layers.iter().enumerate() {
            if sequences * len > 0 {
                let cache = layers.as_mut().map(|layers| &mut layers[number]);
                let y = layer.mixer.forward(&x.normed(&layer.input_norm)?, &step, cache)?;
                self.add(&mut x, y)?;
            }
            let call = LayerCall { number, most_tokens };
            self.feed_forward(call, &mut x, tap, at)?;
        }
        let hidden = if sequences * len > 0 { x.normed(&self.norm)? } else { x.x };
        Ok(hidden.reshape((sequences, len, self.hidden_size()))?)
    }

    /// Hands `x` what a block adds to it.
    fn add(&self, x: &mut Residual, y: Tensor) -> CandleResult<()> {
        let y = if self.scales.residual == 1.0 { y } else { (y * self.scales.residual)? };
        x.pending = Some(y);
        Ok(())
    }

    fn feed_forward(
        &self,
        LayerCall { number, most_tokens }: LayerCall,
        x: &mut Residual,
        tap: &mut Option<&mut Tap<'_>>,
        at: &mut ForwardProgress,
    ) -> Result<()> {
        let layer = &self.layers[number];
        // A rank without tokens still takes part in the experts' collectives, backward too. Candle's norms and softmax
        // refuse empty tensors, and its sum `x + y` of empty tensors is `x`, without a way back to y.
        let empty = x.x.elem_count() == 0;
        match &layer.feed_forward {
            FeedForward::Dense(_) if empty => {}
            FeedForward::Dense(mlp) => {
                let y = mlp.forward(&x.normed(&layer.post_norm)?)?;
                self.add(x, y)?;
            }
            FeedForward::Experts(moe) => {
                let mut h = if empty { x.x.clone() } else { x.normed(&layer.post_norm)? };
                if let Some(tap) = tap {
                    h = tap(Point::MoeInput { layer: number }, h)?;
                }
                at.inside = true;
                let output = match most_tokens {
                    Some(most) => with_room(moe, most).forward_full(&h, None)?,
                    None => moe.forward_full(&h, None)?,
                };
                #[cfg(feature = "cuda")]
                for made in [&output.y, &output.aux, &output.logits, &output.ids, &output.weights] {
                    crate::ops::release_late(made);
                }
                *at = ForwardProgress { layers: number + 1, inside: false };
                let mut y = output.y;
                if let Some(tap) = tap {
                    tap(Point::Choices { layer: number }, output.ids)?;
                    y = tap(Point::MoeOutput { layer: number }, y)?;
                }
                if empty {
                    x.x = y;
                } else {
                    self.add(x, y)?;
                }
            }
        }
        at.layers = number + 1;
        Ok(())
    }

    /// The layer from hidden states to logits.
    pub fn head(&self) -> Head {
        let bias = self.head.bias().cloned();
        Head { weight: self.head.weight().clone(), bias, scale: self.scales.logits }
    }

    /// Logits `[T, V]` of hidden states `[T, H]`.
    pub fn logits(&self, hidden: &Tensor) -> CandleResult<Tensor> {
        let logits = linear(&self.head, hidden)?;
        if self.scales.logits == 1.0 { Ok(logits) } else { logits * self.scales.logits }
    }
}
