//! A model as a decoder that generates.

use candle_core::Tensor;

use super::decoder::{CacheKind, CacheRequest, Decoder, StepPlan};
use crate::error::{Error, Result};
use crate::{Cache, Model, Stepper};

/// Least positions that a static cache begins with, where a text may have as many. Weighed, not measured.
const LEAST_ROOM: usize = 1024;

/// A model's cache for generation, of either [kind](CacheKind).
///
/// A static one has room for at most twice the tokens held, 1024 at least, and moves to one of twice the room when that
/// is full, so that a bound on a text's length which it does not come near takes no memory. Sequences that have ended
/// stay in it until no more than half of its sequences go on; these then move to a smaller one. Either way the next step
/// is captured anew.
#[derive(Debug)]
pub struct ModelCache<'m>(Held<'m>);

#[derive(Debug)]
enum Held<'m> {
    Growing(Cache),
    Static {
        stepper: Box<Stepper<'m>>,
        /// Most positions that it is asked for.
        most_positions: usize,
        /// That of the next step.
        plan: Option<StepPlan>,
    },
}

impl ModelCache<'_> {
    /// The kind, which is not the one asked for where the model has none of that.
    pub fn kind(&self) -> CacheKind {
        match self.0 {
            Held::Growing(_) => CacheKind::Growing,
            Held::Static { .. } => CacheKind::Static,
        }
    }

    /// Whether steps are replayed from a CUDA graph.
    pub fn is_captured(&self) -> bool {
        matches!(&self.0, Held::Static { stepper, .. } if stepper.is_captured())
    }
}

/// Positions of a static cache that holds so many tokens, and may be asked to hold `most_positions`.
fn room(tokens: usize, most_positions: usize) -> usize {
    tokens.saturating_mul(2).max(LEAST_ROOM).min(most_positions)
}

/// Static caches where the model has one: rotations do not change with the sequence's length.
impl Decoder for Model {
    type Cache<'d> = ModelCache<'d>;

    fn vocabulary(&self) -> usize {
        Model::vocabulary(self)
    }

    fn context(&self) -> usize {
        Model::context(self)
    }

    fn cache(&self, request: CacheRequest) -> Result<ModelCache<'_>> {
        let CacheRequest { sequences, prompt_tokens, max_tokens: most_positions, kind } = request;
        // A trainable model's step says that it cannot.
        if kind == CacheKind::Static && !self.is_trainable() {
            let stepper = self.try_stepper(sequences, room(prompt_tokens, most_positions))?;
            if let Some(stepper) = stepper.map(Box::new) {
                return Ok(ModelCache(Held::Static { stepper, most_positions, plan: None }));
            }
        }
        Ok(ModelCache(Held::Growing(Model::cache(self))))
    }

    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut ModelCache<'d>) -> Result<Tensor> {
        match &mut cache.0 {
            Held::Growing(cache) => last_logits(self, tokens, self.decode_hidden(tokens, cache)?),
            Held::Static { stepper, most_positions, plan } => {
                let most_positions = *most_positions;
                let own = plan_of(stepper, tokens.dims2()?.1);
                let plan = match plan.take() {
                    Some(plan) => plan.join(own),
                    None => self.agree(own)?,
                };
                self.run_or_refuse(|_| prepare(stepper, tokens, most_positions))?;
                if plan.runs_eagerly {
                    return stepper.feed(tokens);
                }
                if plan.needs_capture || stepper.most_over_ranks() < Some(plan.sequences) {
                    stepper.capture_over_ranks(plan.sequences.max(1))?;
                }
                stepper.step().cloned()
            }
        }
    }

    fn captures<'d>(&'d self, cache: &ModelCache<'d>) -> usize {
        match &cache.0 {
            Held::Growing(_) => 0,
            Held::Static { stepper, .. } => stepper.captures(),
        }
    }

    fn plan<'d>(&'d self, tokens: usize, cache: &ModelCache<'d>) -> StepPlan {
        match &cache.0 {
            Held::Growing(_) => StepPlan::EAGER,
            Held::Static { stepper, .. } => plan_of(stepper, tokens),
        }
    }

    /// Nobody is asked here, as [`OverRanks`](super::OverRanks) does: where there are others, who may have other plans, a
    /// step is run as a prompt is.
    fn agree(&self, own: StepPlan) -> Result<StepPlan> {
        Ok(StepPlan { runs_eagerly: own.runs_eagerly || self.ranks() > 1, ..own })
    }

    fn set_plan<'d>(&'d self, next: StepPlan, cache: &mut ModelCache<'d>) {
        if let Held::Static { plan, .. } = &mut cache.0 {
            *plan = Some(next);
        }
    }

    fn likeliest<'d>(&'d self, cache: &ModelCache<'d>) -> Result<Option<Vec<u32>>> {
        match &cache.0 {
            Held::Growing(_) => Ok(None),
            Held::Static { stepper, .. } => stepper.next_ids().map(Some),
        }
    }

    fn check<'d>(&'d self, cache: &ModelCache<'d>) -> Result<()> {
        match &cache.0 {
            Held::Growing(_) => Ok(()),
            Held::Static { stepper, .. } => stepper.check_replays(),
        }
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut ModelCache<'d>) -> Result<bool> {
        match &mut cache.0 {
            Held::Growing(cache) => cache.keep_sequences(rows)?,
            Held::Static { stepper, .. } if rows.len() > stepper.sequences() / 2 => return Ok(false),
            Held::Static { stepper, .. } => stepper.resize(rows, stepper.capacity())?,
        }
        Ok(true)
    }
}

/// The plan of a step by so many tokens.
fn plan_of(stepper: &Stepper<'_>, tokens: usize) -> StepPlan {
    let (sequences, most_sequences) = (stepper.sequences(), stepper.most_over_ranks());
    let is_prompt = sequences > 0 && (stepper.is_empty() || tokens != 1);
    let is_full = sequences > 0 && stepper.len() + tokens > stepper.capacity();
    let runs_eagerly = is_prompt || most_sequences.is_some() && stepper.capture_error().is_some();
    StepPlan { goes_on: true, runs_eagerly, needs_capture: is_full || most_sequences.is_none(), sequences }
}

/// Makes room for a step's tokens and hands over those of a step of one.
fn prepare(stepper: &mut Stepper<'_>, tokens: &Tensor, most_positions: usize) -> Result<()> {
    let new = tokens.dims2()?.1;
    let len = stepper.len() + new;
    if len > stepper.capacity() && stepper.sequences() == 0 {
        stepper.clear()?;
    } else if len > stepper.capacity() && len <= most_positions {
        let rows: Vec<usize> = (0..stepper.sequences()).collect();
        stepper.resize(&rows, room(len, most_positions))?;
    }
    if new == 1 && !stepper.is_empty() && stepper.sequences() > 0 {
        stepper.set_next_ids(&tokens.flatten_all()?.to_vec1()?)?;
    }
    Ok(())
}

/// Logits `[B, V]` of the last of each sequence's `tokens [B, S]`, from the hidden states of all.
pub(super) fn last_logits(model: &Model, tokens: &Tensor, hidden: Tensor) -> Result<Tensor> {
    let (b, s) = tokens.dims2()?;
    if b == 0 {
        return model.no_logits();
    }
    let last = s.checked_sub(1).ok_or_else(|| Error::Shape {
        call: "Decoder::step",
        tensor: "tokens".into(),
        expected: "[B, S] with S > 0".into(),
        found: vec![b, s],
    })?;
    Ok(model.logits(&hidden.narrow(1, last, 1)?)?.squeeze(1)?)
}
