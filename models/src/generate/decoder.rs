//! The trait of decoders that generate.

use std::cell::{Cell, RefCell};

use candle_core::{DType, Device, Tensor};
use moebius::comm::{Communicator, Op, ReduceOp, Tag};
use moebius::cpu::{Cpu, HostBuffer};

use crate::error::{Error, Result};
use crate::{Cache, Model};

/// A decoder, a step at a time.
pub trait Decoder {
    /// Keys and values, or whatever a decoder remembers, of several sequences of one length.
    type Cache;

    /// Rows of the embedding, which are the logits of a position.
    fn vocabulary(&self) -> usize;

    /// Most tokens of a sequence.
    fn context(&self) -> usize;

    /// Where ids are expected.
    fn device(&self) -> &Device;

    /// An empty cache for `sequences` sequences, which may be none.
    ///
    /// # Errors
    /// The decoder's own.
    fn cache(&self, sequences: usize) -> Result<Self::Cache>;

    /// Continues each sequence of the cache by S tokens: `tokens` (U32, `[B, S]`, B as the cache has) to the logits of
    /// the last of them, `[B, V]`, of any floating type. Collective where ranks share the decoder's experts: each calls
    /// with sequences of its own, without any (`[0, 1]`) too. After an error the cache is of no use; ranks that wait in
    /// this step's collectives have one as well, the others get it from [`refuse`](Self::refuse).
    ///
    /// # Errors
    /// The decoder's own.
    fn step(&self, tokens: &Tensor, cache: &mut Self::Cache) -> Result<Tensor>;

    /// Leaves these rows of the cache, in this order, and says whether it did. A decoder that cannot goes on with
    /// sequences that have ended.
    ///
    /// # Errors
    /// The decoder's own.
    fn keep(&self, rows: &[usize], cache: &mut Self::Cache) -> Result<bool> {
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
    type Cache = D::Cache;

    fn vocabulary(&self) -> usize {
        (**self).vocabulary()
    }

    fn context(&self) -> usize {
        (**self).context()
    }

    fn device(&self) -> &Device {
        (**self).device()
    }

    fn cache(&self, sequences: usize) -> Result<Self::Cache> {
        (**self).cache(sequences)
    }

    fn step(&self, tokens: &Tensor, cache: &mut Self::Cache) -> Result<Tensor> {
        (**self).step(tokens, cache)
    }

    fn keep(&self, rows: &[usize], cache: &mut Self::Cache) -> Result<bool> {
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
pub struct OverRanks<D> {
    decoder: D,
    ranks: RefCell<Box<dyn Communicator<Cpu>>>,
    calls: Cell<u64>,
}

impl<D> OverRanks<D> {
    /// `ranks` connects the same ranks as the decoder's own group, and is another communicator.
    pub fn new(decoder: D, ranks: Box<dyn Communicator<Cpu>>) -> Self {
        Self { decoder, ranks: RefCell::new(ranks), calls: Cell::new(0) }
    }

    fn tag(&self) -> Tag {
        Tag { layer: 0, op: Op::User, sequence: self.calls.replace(self.calls.get() + 1) }
    }
}

impl<D: std::fmt::Debug> std::fmt::Debug for OverRanks<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OverRanks").field("decoder", &self.decoder).field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl<D: Decoder> Decoder for OverRanks<D> {
    type Cache = D::Cache;

    fn vocabulary(&self) -> usize {
        self.decoder.vocabulary()
    }

    fn context(&self) -> usize {
        self.decoder.context()
    }

    fn device(&self) -> &Device {
        self.decoder.device()
    }

    fn cache(&self, sequences: usize) -> Result<Self::Cache> {
        self.decoder.cache(sequences)
    }

    fn step(&self, tokens: &Tensor, cache: &mut Self::Cache) -> Result<Tensor> {
        self.decoder.step(tokens, cache)
    }

    fn keep(&self, rows: &[usize], cache: &mut Self::Cache) -> Result<bool> {
        self.decoder.keep(rows, cache)
    }

    fn any(&self, goes_on: bool) -> Result<bool> {
        let own = HostBuffer::F32(vec![if goes_on { 1.0 } else { 0.0 }]);
        let mut most = moebius::Tensor::<Cpu>::from_buffer(own, moebius::DType::F32, &[1])?;
        self.ranks.borrow_mut().all_reduce(self.tag(), ReduceOp::Max, most.view_mut())?;
        Ok(matches!(most.into_buffer(), HostBuffer::F32(most) if most[0] > 0.0))
    }

    fn refuse(&self, reason: &str) {
        // A meeting that fails is one that the other ranks have failed in as well.
        let _ = self.ranks.borrow_mut().refuse(self.tag(), reason);
    }
}

impl Decoder for Model {
    type Cache = Cache;

    fn vocabulary(&self) -> usize {
        Model::vocabulary(self)
    }

    fn context(&self) -> usize {
        Model::context(self)
    }

    fn device(&self) -> &Device {
        Model::device(self)
    }

    fn cache(&self, _: usize) -> Result<Cache> {
        Ok(Model::cache(self))
    }

    fn step(&self, tokens: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        last_logits(self, tokens, self.decode_hidden(tokens, cache)?)
    }

    fn keep(&self, rows: &[usize], cache: &mut Cache) -> Result<bool> {
        cache.keep_sequences(rows)?;
        Ok(true)
    }
}

/// Logits `[B, V]` of the last of each sequence's `tokens [B, S]`, from the hidden states of all.
pub(super) fn last_logits(model: &Model, tokens: &Tensor, hidden: Tensor) -> Result<Tensor> {
    let (b, s) = tokens.dims2()?;
    if b == 0 {
        return Ok(Tensor::zeros((0, model.vocabulary()), DType::F32, tokens.device())?);
    }
    let last = s.checked_sub(1).ok_or_else(|| Error::Shape {
        call: "Decoder::step",
        tensor: "tokens".into(),
        expected: "[B, S] with S > 0".into(),
        found: vec![b, s],
    })?;
    Ok(model.logits(&hidden.narrow(1, last, 1)?)?.squeeze(1)?)
}
