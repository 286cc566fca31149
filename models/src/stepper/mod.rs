//! Decoding over memory that stays, a token a sequence at a time, replayed from a CUDA graph where there is one.

mod capture;
#[cfg(feature = "cuda")]
mod graph;

use std::fmt;

use candle_core::{DType, Device, Tensor};

use crate::Model;
use crate::cache::{LayerCache, write};
use crate::decoder::{ForwardCaches, ForwardProgress};
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
    /// Steps that were captured, or that a capture was tried for.
    captures: usize,
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
    /// whose rotations change with the sequence's length (dynamic and longrope scaling, and `phimoe` whatever its scaling), whose
    /// keys a cache cannot hold once and for all: see [`decode`](Self::decode). No memory.
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
            captures: 0,
            broken: false,
        }))
    }
}

/// Sequences of a decoder. What is larger is a mistake.
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

    /// Forgets all tokens; memory and graph stay.
    ///
    /// # Errors
    /// candle's.
    pub fn clear(&mut self) -> Result<()> {
        self.cache.clear()?;
        self.broken = false;
        Ok(())
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
}
