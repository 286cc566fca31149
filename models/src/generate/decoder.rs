//! The trait of decoders that generate.

use std::cell::{Cell, RefCell};

use candle_core::Tensor;
use moebius::comm::{Communicator, Op, ReduceOp, Tag};
use moebius::cpu::Cpu;
use moebius::kernels::Kernels;

use crate::error::Result;

/// Which memory a cache's keys and values are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheKind {
    /// Memory that is allocated ahead and stays, so that a step copies none of it and, on a GPU, can be replayed from a
    /// graph; where a decoder has no such cache, one that grows.
    #[default]
    Static,
    /// Memory that grows with the tokens.
    Growing,
}

/// What a cache is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRequest {
    /// Number of sequences, which may be none.
    pub sequences: usize,
    /// Tokens of the longest prompt: so many come for certain, where there are sequences.
    pub prompt_tokens: usize,
    /// Most tokens of a sequence; at most the decoder's context.
    pub max_tokens: usize,
    /// The kind that is preferred.
    pub kind: CacheKind,
}

/// A decoder, a step at a time.
pub trait Decoder {
    /// Keys and values, or whatever a decoder remembers, of several sequences of one length.
    type Cache<'d>
    where
        Self: 'd;

    /// Rows of the embedding, which are the logits of a position.
    fn vocabulary(&self) -> usize;

    /// Most tokens of a sequence.
    fn context(&self) -> usize;

    /// An empty cache.
    ///
    /// # Errors
    /// The decoder's own.
    fn cache(&self, request: CacheRequest) -> Result<Self::Cache<'_>>;

    /// Continues each sequence of the cache by S tokens: `tokens` (U32, `[B, S]` on the CPU, B as the cache has) to the
    /// logits of the last of them, `[B, V]`, of any floating type. Collective where ranks share the decoder's experts:
    /// each calls with sequences of its own, without any (`[0, 1]`) too. After an error the cache is of no use; ranks
    /// that wait in this step's collectives have one as well, the others get it from [`refuse`](Self::refuse).
    ///
    /// # Errors
    /// The decoder's own.
    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> Result<Tensor>;

    /// The tokens of the last step's largest logits, one a sequence, of equal ones the first; `None` where the decoder
    /// has not found them by itself, and the logits say.
    ///
    /// # Errors
    /// The decoder's own.
    fn likeliest<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<Option<Vec<u32>>> {
        let _ = cache;
        Ok(None)
    }

    /// Leaves these rows of the cache, in this order, and says whether it did. A decoder that cannot, or had rather not
    /// for so few, goes on with sequences that have ended.
    ///
    /// # Errors
    /// The decoder's own.
    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        let _ = (rows, cache);
        Ok(false)
    }

    /// Whether any rank goes on, this one if `goes_on`. Collective, before each step.
    ///
    /// # Errors
    /// Another rank failed, or did not come in time.
    fn any(&self, goes_on: bool) -> Result<bool> {
        Ok(goes_on)
    }

    /// Meets the other ranks' next [`any`](Self::any) as a failure, or their own `refuse`: called once, by each rank that
    /// fails outside `any`.
    fn refuse(&self, reason: &str) {
        let _ = reason;
    }
}

impl<D: Decoder> Decoder for &D {
    type Cache<'d>
        = D::Cache<'d>
    where
        Self: 'd;

    fn vocabulary(&self) -> usize {
        (**self).vocabulary()
    }

    fn context(&self) -> usize {
        (**self).context()
    }

    fn cache(&self, request: CacheRequest) -> Result<Self::Cache<'_>> {
        (**self).cache(request)
    }

    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> Result<Tensor> {
        (**self).step(tokens, cache)
    }

    fn likeliest<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<Option<Vec<u32>>> {
        (**self).likeliest(cache)
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        (**self).keep(rows, cache)
    }

    fn any(&self, goes_on: bool) -> Result<bool> {
        (**self).any(goes_on)
    }

    fn refuse(&self, reason: &str) {
        (**self).refuse(reason);
    }
}

/// One rank's decoder of several that share their experts, each with sequences of its own. A rank whose sequences have
/// ended steps on without any until all ranks' have.
pub struct OverRanks<D, K: Kernels = Cpu> {
    decoder: D,
    device: K,
    ranks: RefCell<Box<dyn Communicator<K>>>,
    calls: Cell<u64>,
}

impl<D> OverRanks<D> {
    /// Ranks that are threads. `ranks` connects the same ranks as the decoder's own group, and is another communicator.
    pub fn new(decoder: D, ranks: Box<dyn Communicator<Cpu>>) -> Self {
        Self::on(decoder, Cpu::new(), ranks)
    }
}

impl<D, K: Kernels> OverRanks<D, K> {
    /// The same with a communicator of any device, whose work is in the order of `device`'s.
    pub fn on(decoder: D, device: K, ranks: Box<dyn Communicator<K>>) -> Self {
        Self { decoder, device, ranks: RefCell::new(ranks), calls: Cell::new(0) }
    }

    /// The communicator, for what the ranks ask each other once all have ended.
    pub fn into_communicator(self) -> Box<dyn Communicator<K>> {
        self.ranks.into_inner()
    }

    fn tag(&self) -> Tag {
        Tag { layer: 0, op: Op::User, sequence: self.calls.replace(self.calls.get() + 1) }
    }
}

impl<D: std::fmt::Debug, K: Kernels> std::fmt::Debug for OverRanks<D, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OverRanks").field("decoder", &self.decoder).field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl<D: Decoder, K: Kernels> Decoder for OverRanks<D, K> {
    type Cache<'d>
        = D::Cache<'d>
    where
        Self: 'd;

    fn vocabulary(&self) -> usize {
        self.decoder.vocabulary()
    }

    fn context(&self) -> usize {
        self.decoder.context()
    }

    fn cache(&self, request: CacheRequest) -> Result<Self::Cache<'_>> {
        self.decoder.cache(request)
    }

    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> Result<Tensor> {
        self.decoder.step(tokens, cache)
    }

    fn likeliest<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<Option<Vec<u32>>> {
        self.decoder.likeliest(cache)
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        self.decoder.keep(rows, cache)
    }

    fn any(&self, goes_on: bool) -> Result<bool> {
        let own: f32 = if goes_on { 1.0 } else { 0.0 };
        let mut most = moebius::Tensor::<K>::empty(&self.device, moebius::DType::F32, &[1])?;
        self.device.upload(&own.to_ne_bytes(), most.view_mut())?;
        self.ranks.borrow_mut().all_reduce(self.tag(), ReduceOp::Max, most.view_mut())?;
        Ok(self.device.download(most.view())? != 0f32.to_ne_bytes())
    }

    fn refuse(&self, reason: &str) {
        // A meeting that fails is one that the other ranks have failed in as well.
        let _ = self.ranks.borrow_mut().refuse(self.tag(), reason);
    }
}
