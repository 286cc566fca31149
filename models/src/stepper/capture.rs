//! A step's capture, where it can be: over one rank by itself, over several when all ask for it; and what replays have
//! lost.

use candle_core::Tensor;
use moebius::candle::DeviceGroup;
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, GroupConfig};

use super::Stepper;
#[cfg(feature = "cuda")]
use super::graph;
use crate::decoder::{ForwardProgress, rows_for};
use crate::error::{Error, Result};

impl Stepper<'_> {
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

    /// Steps that were captured, or that a capture was tried for.
    pub(crate) fn captures(&self) -> usize {
        self.captures
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
    pub(super) fn settle_replays(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.graph.is_some() {
            self.model.device().synchronize()?;
        }
        self.check_replays()
    }

    #[cfg(not(feature = "cuda"))]
    pub(super) fn run(&mut self, at: &mut ForwardProgress) -> Result<Tensor> {
        self.work().run(at)
    }

    #[cfg(feature = "cuda")]
    pub(super) fn run(&mut self, at: &mut ForwardProgress) -> Result<Tensor> {
        if let Some(graph) = &mut self.graph {
            return graph.replay();
        }
        if self.eager {
            return self.work().run(at);
        }
        // One that cannot be captured is not tried again.
        self.eager = true;
        let outcome = graph::Graph::capture(self.model, || self.work(), at)?;
        self.captures += usize::from(!matches!(outcome, graph::CaptureOutcome::NotTried));
        match outcome {
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
