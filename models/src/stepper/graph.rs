//! The CUDA graph of a step.

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
