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

/// What a rank brings to a step, or, once the ranks have [agreed](Decoder::agree), all of them together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepPlan {
    /// A rank has sequences to continue.
    pub goes_on: bool,
    /// A rank has the step's operations run one after another, and so all ranks do: it reads a prompt, its cache grows, or
    /// its steps cannot be captured.
    pub runs_eagerly: bool,
    /// A rank has no graph of its steps that goes with those of the others: its cache is another than in the step before,
    /// or its memory has moved. All ranks capture anew.
    pub needs_capture: bool,
    /// Most sequences of a rank.
    pub sequences: usize,
}

impl StepPlan {
    /// A step whose operations run one after another.
    pub const EAGER: Self = Self { goes_on: true, runs_eagerly: true, needs_capture: false, sequences: 0 };

    /// That of `self` and another rank.
    pub fn join(self, other: Self) -> Self {
        Self {
            goes_on: self.goes_on | other.goes_on,
            runs_eagerly: self.runs_eagerly | other.runs_eagerly,
            needs_capture: self.needs_capture | other.needs_capture,
            sequences: self.sequences.max(other.sequences),
        }
    }

    fn to_numbers(self) -> [f32; 4] {
        let flag = |flag| if flag { 1.0 } else { 0.0 };
        [flag(self.goes_on), flag(self.runs_eagerly), flag(self.needs_capture), self.sequences as f32]
    }

    fn from_numbers([goes_on, runs_eagerly, needs_capture, sequences]: [f32; 4]) -> Self {
        let flag = |number| number != 0.0;
        let sequences = sequences as usize;
        Self { goes_on: flag(goes_on), runs_eagerly: flag(runs_eagerly), needs_capture: flag(needs_capture), sequences }
    }
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

    /// Whether what has been read of the last step, its logits, is worth anything: a step that is replayed over ranks may
    /// have lost one of them.
    ///
    /// # Errors
    /// How it was lost.
    fn check<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<()> {
        let _ = cache;
        Ok(())
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

    /// Steps over this cache that were captured for later ones to replay, or that a capture was tried for: their time says
    /// nothing of a step's.
    fn captures<'d>(&'d self, cache: &Self::Cache<'d>) -> usize {
        let _ = cache;
        0
    }

    /// This rank's plan of a step that continues each of the cache's sequences by `tokens` tokens.
    fn plan<'d>(&'d self, tokens: usize, cache: &Self::Cache<'d>) -> StepPlan {
        let _ = (tokens, cache);
        StepPlan::EAGER
    }

    /// The plan of all ranks. Collective, before each step.
    ///
    /// # Errors
    /// Another rank failed, or did not come in time.
    fn agree(&self, own: StepPlan) -> Result<StepPlan> {
        Ok(own)
    }

    /// Says what the ranks have agreed on for the next step.
    fn set_plan<'d>(&'d self, plan: StepPlan, cache: &mut Self::Cache<'d>) {
        let _ = (plan, cache);
    }

    /// Meets the other ranks' next [`agree`](Self::agree) as a failure, or their own `refuse`: called once, by each rank
    /// that fails outside `agree`.
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

    fn check<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<()> {
        (**self).check(cache)
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        (**self).keep(rows, cache)
    }

    fn captures<'d>(&'d self, cache: &Self::Cache<'d>) -> usize {
        (**self).captures(cache)
    }

    fn plan<'d>(&'d self, tokens: usize, cache: &Self::Cache<'d>) -> StepPlan {
        (**self).plan(tokens, cache)
    }

    fn agree(&self, own: StepPlan) -> Result<StepPlan> {
        (**self).agree(own)
    }

    fn set_plan<'d>(&'d self, plan: StepPlan, cache: &mut Self::Cache<'d>) {
        (**self).set_plan(plan, cache);
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

    fn check<'d>(&'d self, cache: &Self::Cache<'d>) -> Result<()> {
        self.decoder.check(cache)
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        self.decoder.keep(rows, cache)
    }

    fn captures<'d>(&'d self, cache: &Self::Cache<'d>) -> usize {
        self.decoder.captures(cache)
    }

    fn plan<'d>(&'d self, tokens: usize, cache: &Self::Cache<'d>) -> StepPlan {
        self.decoder.plan(tokens, cache)
    }

    fn agree(&self, own: StepPlan) -> Result<StepPlan> {
        let own = own.to_numbers();
        let (tag, mut ranks) = (self.tag(), self.ranks.borrow_mut());
        let numbers = moebius::Tensor::<K>::empty(&self.device, moebius::DType::F32, &[own.len()]);
        let numbers = numbers.and_then(|mut numbers| {
            self.device.upload(own.map(f32::to_ne_bytes).as_flattened(), numbers.view_mut())?;
            Ok(numbers)
        });
        // What fails beside the collective is this rank's alone: the others are told, in their next agreement where it is
        // behind this one.
        let mut all = numbers.inspect_err(|error| drop(ranks.refuse(tag, &error.to_string())))?;
        ranks.all_reduce(tag, ReduceOp::Max, all.view_mut())?;
        let bytes = self.device.download(all.view());
        let bytes = bytes.inspect_err(|error| drop(ranks.refuse(tag, &error.to_string())))?;
        let mut numbers = bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        Ok(StepPlan::from_numbers(std::array::from_fn(|_| numbers.next().unwrap_or(0.0))))
    }

    fn set_plan<'d>(&'d self, plan: StepPlan, cache: &mut Self::Cache<'d>) {
        self.decoder.set_plan(plan, cache);
    }

    fn refuse(&self, reason: &str) {
        // A meeting that fails is one that the other ranks have failed in as well.
        let _ = self.ranks.borrow_mut().refuse(self.tag(), reason);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moebius::cpu::ThreadWorld;

    use super::*;

    /// No rank's part of a plan is lost on its way.
    #[test]
    fn ranks_agree_on_the_plan_of_all() {
        let plan = |goes_on, runs_eagerly, needs_capture, sequences| StepPlan {
            goes_on,
            runs_eagerly,
            needs_capture,
            sequences,
        };
        let own = [
            plan(true, false, false, 1),
            plan(false, false, true, 0),
            plan(false, false, false, 7),
            plan(false, true, false, 3),
        ];
        for ranks in [1, 2, 3, 4] {
            let worlds = ThreadWorld::create(ranks, Duration::from_secs(60));
            let expected = own[..ranks].iter().copied().reduce(StepPlan::join);
            std::thread::scope(|scope| {
                for (rank, comm) in worlds.into_iter().enumerate() {
                    scope.spawn(move || {
                        let ranks = OverRanks::new(Nothing, Box::new(comm));
                        assert_eq!(ranks.agree(own[rank]).ok(), expected);
                    });
                }
            });
        }
    }

    struct Nothing;

    impl Decoder for Nothing {
        type Cache<'d> = ();

        fn vocabulary(&self) -> usize {
            0
        }

        fn context(&self) -> usize {
            0
        }

        fn cache(&self, _: CacheRequest) -> Result<()> {
            Ok(())
        }

        fn step(&self, tokens: &Tensor, (): &mut ()) -> Result<Tensor> {
            Ok(tokens.clone())
        }
    }
}
