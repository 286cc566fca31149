//! Decoding over memory that stays, a token a sequence at a time, replayed from a CUDA graph where there is one.

use std::fmt;

use candle_core::{DType, Device, Tensor};
use moebius::candle::DeviceGroup;
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, GroupConfig};

use crate::Model;
use crate::cache::{LayerCache, write};
use crate::decoder::{ForwardCaches, ForwardProgress, rows_for};
use crate::error::{Error, Result};
use crate::ops::argmax;
use crate::static_cache::{PositionTables, StaticCache};

const CALL: &str = "Stepper";

/// Decodes a fixed number of sequences with room for a fixed number of tokens each: keys and values lie in memory that
/// is allocated once, and a step copies none of them. On a device of `moebius::candle::device_for_capture` the first step
/// is captured into a CUDA graph that later ones replay, so that the host has next to nothing to do; elsewhere steps run
/// one operation after another, as do those that cannot be captured, among them those with experts on the host. Where
/// several ranks share the experts, [`capture_over_ranks`](Self::capture_over_ranks) has their steps captured.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use moebius_models::{LoadOptions, Model};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/small");
/// let model = Model::load(folder, &Device::Cpu, LoadOptions::default())?;
/// let mut stepper = model.stepper(1, 32)?; // one sequence of at most 32 tokens
/// stepper.feed(&Tensor::new(&[[3u32, 14, 15]], &Device::Cpu)?)?;
/// for _token in 0..5 {
///     println!("{:?}", stepper.next_ids()?); // the likeliest token, unless `set_next_ids` has given another
///     stepper.step()?;
/// }
/// assert_eq!(stepper.len(), 8);
/// # Ok(()) }
/// ```
///
/// Collective where ranks share the experts; a rank without sequences takes part with 0.
pub struct Stepper<'m> {
    /// Before what it reads and writes.
    #[cfg(feature = "cuda")]
    graph: Option<Box<graph::Graph<'m>>>,
    /// A capture has been tried.
    #[cfg(feature = "cuda")]
    eager: bool,
    model: &'m Model,
    cache: StaticCache,
    /// U32 `[B, 1]`: the tokens of the next step.
    next: Tensor,
    logits: Option<Tensor>,
    /// Most sequences of a rank, where every step of the ranks has room for so many.
    most: Option<usize>,
    /// Why the last capture failed; none is tried again.
    uncaptured: Option<String>,
    /// An error has left the cache as it may be.
    broken: bool,
}

impl fmt::Debug for Stepper<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StaticCache { len, capacity, sequences, .. } = self.cache;
        f.debug_struct("Stepper")
            .field("sequences", &sequences)
            .field("len", &len)
            .field("capacity", &capacity)
            .finish_non_exhaustive()
    }
}

/// A step's operations on memory that stays.
struct Work<'m> {
    model: &'m Model,
    layers: Vec<LayerCache>,
    positions: PositionTables,
    next: Tensor,
    /// As in [`ForwardCaches`].
    most_tokens: Option<usize>,
    /// Of a step that is captured.
    #[cfg(feature = "cuda")]
    memory: Option<crate::ops::CapturedResults>,
}

impl Work<'_> {
    /// Runs a step of `next`: its logits `[B, V]`; `next` becomes the likeliest tokens behind it.
    fn run(&mut self, at: &mut ForwardProgress) -> Result<Tensor> {
        let caches = ForwardCaches {
            layers: &mut self.layers,
            past: 0,
            position: Some(self.positions.step_position()?),
            most_tokens: self.most_tokens,
        };
        let hidden = || self.model.decoder().hidden(&self.next, Some(caches), &mut None, at);
        #[cfg(feature = "cuda")]
        let hidden = match &mut self.memory {
            Some(memory) => memory.run(hidden)?,
            None => hidden()?,
        };
        #[cfg(not(feature = "cuda"))]
        let hidden = hidden()?;
        if self.next.elem_count() == 0 {
            return self.model.no_logits();
        }
        let (sequences, _, hidden_size) = hidden.dims3()?;
        let logits = self.model.decoder().logits(&hidden.reshape((sequences, hidden_size))?)?;
        write(&self.next, &argmax(&logits)?)?;
        self.positions.advance()?;
        Ok(logits)
    }
}

impl Model {
    /// A decoder of `sequences` sequences of at most `capacity` tokens each.
    ///
    /// # Errors
    /// No room for any token, or for more than [`context`](Self::context); more than 2^20 sequences; a trainable model; one
    /// whose rotations change with the sequence's length (dynamic and longrope scaling), whose keys a cache cannot hold once
    /// and for all: see [`decode`](Self::decode). candle's, where there is no memory.
    pub fn stepper(&self, sequences: usize, capacity: usize) -> Result<Stepper<'_>> {
        let problem = "rotations change with the sequence's length; decode with a cache that grows";
        self.try_stepper(sequences, capacity)?
            .ok_or_else(|| Error::Usage { call: "Model::stepper", problem: problem.into() })
    }

    /// As [`stepper`](Self::stepper); `None` where rotations change with the sequence's length.
    pub(crate) fn try_stepper(&self, sequences: usize, capacity: usize) -> Result<Option<Stepper<'_>>> {
        let fail = |problem: String| Err(Error::Usage { call: "Model::stepper", problem });
        if self.is_trainable() {
            return fail("the model was loaded as trainable; load another".into());
        }
        if capacity == 0 || capacity > self.context() {
            return fail(format!("room for {capacity} tokens; expected 1..={}", self.context()));
        }
        if sequences > MAX_SEQUENCES {
            return fail(format!("{sequences} sequences; expected at most {MAX_SEQUENCES}"));
        }
        let Some(cache) = self.decoder().static_cache(sequences, capacity)? else { return Ok(None) };
        Ok(Some(Stepper {
            #[cfg(feature = "cuda")]
            graph: None,
            #[cfg(feature = "cuda")]
            eager: false,
            model: self,
            cache,
            next: first_ids(self, sequences)?,
            logits: None,
            most: None,
            uncaptured: None,
            broken: false,
        }))
    }
}

/// Sequences of a decoder. What is larger is a mistake, and candle ends the process where a CPU has no memory.
const MAX_SEQUENCES: usize = 1 << 20;

/// Zeros `[B, 1]`; none on the CPU, as a GPU has no memory of no bytes.
fn first_ids(model: &Model, sequences: usize) -> Result<Tensor> {
    let device = if sequences == 0 { &Device::Cpu } else { model.device() };
    Ok(Tensor::zeros((sequences, 1), DType::U32, device)?)
}

impl<'m> Stepper<'m> {
    /// Tokens held of each sequence.
    pub fn len(&self) -> usize {
        self.cache.len
    }

    /// True where no token is held.
    pub fn is_empty(&self) -> bool {
        self.cache.len == 0
    }

    /// Most tokens of a sequence.
    pub fn capacity(&self) -> usize {
        self.cache.capacity
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.cache.sequences
    }

    /// Whether steps are replayed from a graph.
    pub fn is_captured(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.graph.is_some() {
            return true;
        }
        false
    }

    /// Why a step could not be captured, where that was tried: later ones run one operation after another.
    pub fn capture_error(&self) -> Option<&str> {
        self.uncaptured.as_deref()
    }

    /// Forgets all tokens; memory and graph stay.
    ///
    /// # Errors
    /// candle's.
    pub fn clear(&mut self) -> Result<()> {
        self.cache.clear()?;
        self.broken = false;
        Ok(())
    }

    /// Has the next step of several ranks captured, and later ones replayed; whether that can be. `sequences` is the most
    /// that any rank has. Every rank calls this ahead of the same step and steps whenever the others do from then on,
    /// until all call it again, as they do once a rank has another stepper, has [resized](Self::resize) its own, or has
    /// [cleared](Self::clear) it behind an error. A rank that is to [feed](Self::feed) has all feed, if only one token.
    ///
    /// The ranks then have room for the experts' rows of `sequences` tokens each, however these choose. Their group needs
    /// a place for so many ([`GroupConfig::max_rows`]: the ranks times `sequences` times top-k), and tokens travel by
    /// all-gather or over NVLink, with low latency or without; otherwise steps run as before. A group with
    /// [`GroupConfig::patience`] replays on without a rank that is gone, and its dispatcher's `check` tells of that. A capture
    /// that [fails](Self::capture_error) on one rank alone leaves it with steps that run one operation after another: have
    /// all ranks feed then.
    ///
    /// # Errors
    /// Fewer sequences than this rank has; a rank that was lost in a replayed step before.
    pub fn capture_over_ranks(&mut self, sequences: usize) -> Result<bool> {
        let model = self.model;
        model.run_or_refuse(|_| {
            if sequences >= self.sequences().max(1) {
                return Ok(());
            }
            let problem = format!("{sequences} sequences at most on any rank; this one has {}", self.sequences());
            Err(Error::Usage { call: "Stepper::capture_over_ranks", problem })
        })?;
        let Some(moe) = model.first_moe().filter(|moe| moe.group().ranks() > 1 && model.host_experts().is_none())
        else {
            return Ok(false);
        };
        // Whose prepare waits for nothing. A CPU's steps are not captured, over whatever dispatcher.
        let waits_for_nothing = [DispatcherKind::AllGather, DispatcherKind::NvLink, DispatcherKind::NvLinkLowLatency];
        let captured = waits_for_nothing.contains(&moe.group().dispatcher_kind()) || model.device().is_cpu();
        let has_room = has_room(moe.group(), sequences, rows_for(moe, sequences));
        self.settle_replays()?;
        self.most = (captured && has_room).then_some(sequences);
        #[cfg(feature = "cuda")]
        {
            self.graph = None;
            self.eager = self.most.is_none() || self.uncaptured.is_some();
        }
        Ok(self.most.is_some())
    }

    /// Most sequences of a rank that steps have [room](Self::capture_over_ranks) for.
    pub(crate) fn most_over_ranks(&self) -> Option<usize> {
        self.most
    }

    /// Leaves these of the sequences, in this order and each with its tokens, with room for `capacity` tokens each: for a
    /// batch some of which have ended, or whose texts become longer. What is held is copied to new memory, a layer at a
    /// time, and the next step is captured anew. No collective.
    ///
    /// # Errors
    /// A sequence that is not held; less room than before, or for more than [`Model::context`]; a rank that was lost in a
    /// step before, as [`next_ids`](Self::next_ids) has it; candle's, after which the stepper is of no use.
    pub fn resize(&mut self, rows: &[usize], capacity: usize) -> Result<()> {
        let fail = |problem: String| Err(Error::Usage { call: "Stepper::resize", problem });
        let (held, least, most) = (self.sequences(), self.capacity(), self.model.context());
        if let Some(row) = rows.iter().find(|row| **row >= held) {
            return fail(format!("sequence {row}: there are {held}"));
        }
        if !(least..=most).contains(&capacity) {
            return fail(format!("room for {capacity} tokens; expected {least}..={most}"));
        }
        self.settle_replays()?;
        self.most = None;
        // A graph reads and writes the memory that goes. What could not be captured is not tried again.
        #[cfg(feature = "cuda")]
        {
            self.eager &= self.graph.take().is_none();
        }
        self.logits = None;
        let broken = std::mem::replace(&mut self.broken, true);
        self.model.decoder().resize(&mut self.cache, rows, capacity)?;
        self.next = match rows {
            [] => first_ids(self.model, 0)?,
            rows => {
                let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
                self.next.index_select(&Tensor::new(rows, self.model.device())?, 0)?
            }
        };
        self.broken = broken;
        Ok(())
    }

    /// Continues each sequence by `ids` (integers, `[B, S]`): logits `[B, V]` of the last of them. The likeliest tokens
    /// behind them become [`next_ids`](Self::next_ids).
    ///
    /// # Errors
    /// As [`Model::decode`]; more tokens than there is room for. After an error the stepper must be cleared.
    pub fn feed(&mut self, ids: &Tensor) -> Result<Tensor> {
        let (model, past) = (self.model, self.cache.len);
        let logits = model.run_or_refuse(|at| {
            let ids = model.checked("Stepper::feed", ids, past, |found| self.check(found, ids.dim(1)?))?;
            let len = ids.dim(1)?;
            self.broken = true;
            let caches = ForwardCaches { layers: &mut self.cache.layers, past, position: None, most_tokens: None };
            let hidden = model.decoder().hidden(&ids, Some(caches), &mut None, at)?;
            if ids.elem_count() == 0 {
                self.cache.count(len)?;
                return model.no_logits();
            }
            let last = hidden.narrow(1, len - 1, 1)?.squeeze(1)?.contiguous()?;
            let logits = model.decoder().logits(&last)?;
            write(&self.next, &argmax(&logits)?)?;
            self.cache.count(len)?;
            Ok(logits)
        })?;
        self.broken = false;
        Ok(logits)
    }

    fn check(&self, sequences: usize, tokens: usize) -> Result<()> {
        let fail = |problem: String| Err(Error::Usage { call: CALL, problem });
        let StaticCache { len, capacity, sequences: held, .. } = self.cache;
        if self.broken {
            return fail("an error has left it as it was; clear it".into());
        }
        if sequences != held {
            return fail(format!("it has {held} sequences, the call has {sequences}"));
        }
        if len + tokens > capacity {
            return fail(format!("sequences of {len} held and {tokens} new tokens; there is room for {capacity}"));
        }
        Ok(())
    }

    /// Tokens of the next step, one a sequence. Waits for the device.
    ///
    /// # Errors
    /// A rank that was lost in a replayed step, whose tokens are worth nothing; candle's.
    pub fn next_ids(&self) -> Result<Vec<u32>> {
        let ids = self.next.flatten_all()?.to_vec1()?;
        self.check_replays()?;
        Ok(ids)
    }

    /// Whether replayed steps have lost a rank: logits that have been read are then worth nothing. Waits for nothing.
    ///
    /// # Errors
    /// How the rank was lost: it is gone, has failed, or did not come within the communicator's timeout.
    pub fn check_replays(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(graph) = &self.graph {
            graph.check()?;
        }
        Ok(())
    }

    /// Waits for the replays of a graph that is about to go, whose failure nobody could ask for behind it.
    fn settle_replays(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.graph.is_some() {
            self.model.device().synchronize()?;
        }
        self.check_replays()
    }

    /// Chooses the tokens of the next step, one a sequence.
    ///
    /// # Errors
    /// Another number of them; ids outside the vocabulary.
    pub fn set_next_ids(&mut self, ids: &[u32]) -> Result<()> {
        const CALL: &str = "Stepper::set_next_ids";
        let vocabulary = self.model.vocabulary();
        if ids.len() != self.sequences() {
            let (expected, found) = (self.sequences(), ids.len());
            return Err(Error::Usage { call: CALL, problem: format!("{expected} sequences, {found} ids") });
        }
        if let Some(row) = ids.iter().position(|id| *id as usize >= vocabulary) {
            return Err(Error::TokenId { call: CALL, row, position: 0, id: i64::from(ids[row]), vocabulary });
        }
        Ok(write(&self.next, &Tensor::from_slice(ids, (ids.len(), 1), self.model.device())?)?)
    }

    /// Continues each sequence by [`next_ids`](Self::next_ids): logits `[B, V]`, which the next step overwrites. The
    /// likeliest tokens become the next ids. Does not wait for the device where a graph is replayed.
    ///
    /// # Errors
    /// No room for another token; what the layers report; a rank that was lost in a step before, where steps are replayed.
    /// After an error the stepper must be cleared; behind a lost rank that does not help, and ranks form a group anew.
    pub fn step(&mut self) -> Result<&Tensor> {
        // Told to nobody: the other ranks replay, or have been told of it themselves, and meet no refusal.
        self.check_replays()?;
        let model = self.model;
        let logits = model.run_or_refuse(|at| {
            self.check(self.sequences(), 1)?;
            self.broken = true;
            self.run(at)
        })?;
        self.broken = false;
        self.cache.len += 1;
        Ok(self.logits.insert(logits))
    }

    fn work(&self) -> Work<'m> {
        let StaticCache { layers, positions, .. } = &self.cache;
        Work {
            model: self.model,
            layers: layers.clone(),
            positions: positions.clone(),
            next: self.next.clone(),
            most_tokens: self.most,
            #[cfg(feature = "cuda")]
            memory: None,
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn run(&mut self, at: &mut ForwardProgress) -> Result<Tensor> {
        self.work().run(at)
    }

    #[cfg(feature = "cuda")]
    fn run(&mut self, at: &mut ForwardProgress) -> Result<Tensor> {
        if let Some(graph) = &mut self.graph {
            return graph.replay();
        }
        if self.eager {
            return self.work().run(at);
        }
        // One that cannot be captured is not tried again.
        self.eager = true;
        match graph::Graph::capture(self.model, || self.work(), at)? {
            graph::CaptureOutcome::NotTried => self.work().run(at),
            graph::CaptureOutcome::Failed { logits, why } => {
                self.uncaptured = Some(why);
                Ok(logits)
            }
            graph::CaptureOutcome::Captured(graph) => Ok(self.graph.insert(graph).logits()),
        }
    }
}

/// Whether a group has room for so many tokens a rank, and for a static capacity of so many rows.
fn has_room(group: &DeviceGroup, tokens: usize, rows: usize) -> bool {
    let fits = |config: &GroupConfig| tokens <= config.max_tokens_per_rank && rows <= config.max_rows;
    #[cfg(feature = "cuda")]
    if let Some(group) = group.on::<moebius::cuda::Cuda>() {
        return fits(group.lock().config());
    }
    group.on::<Cpu>().is_some_and(|group| fits(group.lock().config()))
}

#[cfg(feature = "cuda")]
mod graph {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use candle_core::{Result as CandleResult, Tensor};
    use moebius::candle::{Capture, CapturedStep};

    use super::Work;
    use crate::Model;
    use crate::decoder::ForwardProgress;
    use crate::error::Result;
    use crate::ops::CapturedResults;

    /// Whether a model's device can capture a step, of several ranks one with
    /// [room](super::Stepper::capture_over_ranks) for all.
    fn can_capture(model: &Model, has_room: bool) -> bool {
        let alone = model.ranks() == 1;
        // A graph would have to wait for gathers that it has no part in.
        let on_gpu = model.host_experts().is_none();
        (alone || has_room) && on_gpu && model.device().as_cuda_device().is_ok_and(|device| !device.is_event_tracking())
    }

    type Calls<'m> = Box<dyn FnMut() -> CandleResult<Vec<Tensor>> + 'm>;

    /// A captured step.
    pub(super) struct Graph<'m> {
        step: CapturedStep<Calls<'m>>,
        /// Those of a rank without sequences, whose step makes none.
        empty_logits: Option<Tensor>,
    }

    /// What came of capturing a step.
    pub(super) enum CaptureOutcome<'m> {
        /// It [cannot be](can_capture), and has not run.
        NotTried,
        /// It has run, to these logits, but could not be captured, and why.
        Failed { logits: Tensor, why: String },
        /// It has run and is captured.
        Captured(Box<Graph<'m>>),
    }

    impl<'m> Graph<'m> {
        /// Runs a step and captures it, where that can be; `at` is how far its last run has come.
        pub(super) fn capture(
            model: &'m Model,
            work: impl FnOnce() -> Work<'m>,
            at: &mut ForwardProgress,
        ) -> Result<CaptureOutcome<'m>> {
            let mut work = Work { memory: Some(CapturedResults::default()), ..work() };
            if !can_capture(model, work.most_tokens.is_some()) {
                return Ok(CaptureOutcome::NotTried);
            }
            let mut capture = Capture::new(model.device())?;
            if let Some(moe) = model.first_moe() {
                capture = capture.group(moe.group())?;
            }
            let empty = work.next.elem_count() == 0;
            // The first run's, which a capture that fails leaves.
            let ran = Rc::new(RefCell::new(None));
            let reached = Rc::new(Cell::new(ForwardProgress::default()));
            let (first, progress) = (Rc::clone(&ran), Rc::clone(&reached));
            let calls: Calls<'m> = Box::new(move || {
                let mut at = ForwardProgress::default();
                let logits = work.run(&mut at);
                progress.set(at);
                let logits = logits.map_err(candle_core::Error::wrap)?;
                first.borrow_mut().get_or_insert_with(|| logits.clone());
                Ok(if empty { Vec::new() } else { vec![logits] })
            });
            // SAFETY: the calls own the cache's memory and the ids', which are written in place alone, and borrow the
            // model, none of whose tensors can be replaced through a shared reference.
            let captured = unsafe { capture.run(calls) };
            *at = reached.get();
            match (captured, ran.take()) {
                (Ok(step), first) => {
                    Ok(CaptureOutcome::Captured(Box::new(Self { step, empty_logits: first.filter(|_| empty) })))
                }
                (Err(error), Some(logits)) => Ok(CaptureOutcome::Failed { logits, why: error.to_string() }),
                (Err(error), None) => Err(error.into()),
            }
        }

        pub(super) fn replay(&mut self) -> Result<Tensor> {
            self.step.replay()?;
            Ok(self.logits())
        }

        /// Whether replays have lost a rank.
        pub(super) fn check(&self) -> Result<()> {
            Ok(self.step.check()?)
        }

        pub(super) fn logits(&self) -> Tensor {
            self.empty_logits.clone().unwrap_or_else(|| self.step.outputs()[0].clone())
        }
    }
}
