//! Parts of a module that training needs beside its forward: jitter, the auxiliary losses behind y, balance, and
//! gradients of parameters that all ranks hold.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Module, Result, Tensor, Var};

use crate::adapter::{LastForward, REDUCE_GRADIENTS, TrainingState, moved_selection_bias};
use crate::comm::Op;
use crate::error::Error;
use crate::layer::{AuxValue, Noise, ParamKind};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::module::ExpertParallelMoE;
use super::reduce::of_layer;

impl ExpertParallelMoE {
    /// Seed of the router's jitter, and the step that the next training forward counts from (0 and 0 without this).
    /// Each [`forward_t`](Self::forward_t) that trains takes one step; a run that goes on from a checkpoint sets its
    /// own.
    pub fn with_noise(mut self, noise: Noise) -> Self {
        self.training = Arc::new(TrainingState::new(noise, self.training.aux_scale()));
        self
    }

    /// Seed of the jitter, and the step that the next training forward takes: what a run keeps that is to go on from here
    /// ([`with_noise`](Self::with_noise)). All ranks have the same step. One that has not come to a training forward of the
    /// others ([`refuse_forward`](Self::refuse_forward)) is a step behind them: to go on, every rank is given the same one.
    pub fn noise(&self) -> Noise {
        self.training.noise()
    }

    /// Factor of the auxiliary losses' gradient in [`forward_t`](Self::forward_t), 1 without this: what the
    /// loss is multiplied by before its backward, as by a loss scaler or for gradients that add up over microbatches.
    pub fn with_aux_scale(mut self, aux_scale: f64) -> Self {
        self.training = Arc::new(TrainingState::new(self.training.noise(), aux_scale));
        self
    }

    /// [`Module::forward`]; where it trains, the router's jitter is applied ([`with_noise`](Self::with_noise)), and the
    /// auxiliary losses' gradient comes with y's: y's value is as it is, and a backward through it adds the gradient of
    /// the losses, as if they had been added to the loss. Their value is [`last_aux`](Self::last_aux)'s.
    ///
    /// A method beside `ModuleT`'s, which candle has for every `Module` and which does not train: code that is generic
    /// over `ModuleT` wants `candle_nn::func_t(move |x, train| moe.forward_t(x, train))`.
    ///
    /// # Errors
    /// As [`forward_full`](Self::forward_full). In a capture, a router with jitter, whose every replay would have the same.
    pub fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train {
            return self.forward(x);
        }
        if self.layer.config().router.jitter > 0.0 && self.group.in_capture() {
            let operation = "the jitter of the router, whose steps the host counts: forward_full(x, None) has none";
            return Err(Error::not_capturable("ExpertParallelMoE::forward_t", operation).into());
        }
        let out = self.pass(x, Some(self.training.next_noise()), Some(self.training.aux_scale()))?;
        self.store_figures(out.last_forward());
        Ok(out.y)
    }

    /// Keeps a forward's figures; a captured one's would be memory of the graph, outside of it.
    pub(super) fn store_figures(&self, last: LastForward) {
        match self.group.in_capture() {
            true => self.training.forget(),
            false => self.training.store(last),
        }
    }

    /// Auxiliary losses of the last [`forward_t`](Self::forward_t) or [`forward`](Module::forward) of this module or a
    /// clone of it, coefficients included.
    ///
    /// # Errors
    /// No forward yet, or the last was captured.
    pub fn last_aux(&self) -> Result<Lazy<AuxValue>> {
        Ok(self.training.last("ExpertParallelMoE::last_aux")?.losses)
    }

    /// Load of the experts over all ranks in that forward.
    ///
    /// # Errors
    /// No forward yet, or the last was captured.
    pub fn last_load(&self) -> Result<Lazy<Load>> {
        Ok(self.training.last("ExpertParallelMoE::last_load")?.load)
    }

    /// Moves the selection bias towards an even load, in place:
    /// [`update_selection_bias`](crate::balance::update_selection_bias) with the load of all ranks
    /// ([`last_load`](Self::last_load), [`MoeOutput::load`](super::MoeOutput::load)) and a step `u`. Call it after each
    /// training step, on every rank.
    ///
    /// # Errors
    /// A router without a selection bias, or one that is no variable; what the formula refuses.
    pub fn update_selection_bias(&self, load: &Load, u: f32) -> Result<()> {
        const CALL: &str = "ExpertParallelMoE::update_selection_bias";
        let bias = self.param(ParamKind::SelectionBias);
        if bias.is_some_and(|bias| !bias.is_variable()) {
            let name = ParamKind::SelectionBias.name();
            return Err(Error::invalid(CALL, name, "a variable", "a constant").into());
        }
        let values = bias.map(|bias| bias.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()).transpose()?;
        let values = moved_selection_bias(CALL, values, load, u)?;
        let Some(bias) = bias else { return Ok(()) };
        let values = Tensor::from_vec(values, bias.dims(), bias.device())?.to_dtype(bias.dtype())?;
        Var::from_tensor(bias)?.set(&values)
    }

    /// Sums the gradients of the variables that every rank holds (router, shared expert) over the ranks, as
    /// [`reduce_gradients`](super::reduce_gradients) does for others; an absent gradient counts as zeros.
    /// Call it on every rank before the optimizer's step. Nothing to do for one rank, nor of shards, which
    /// [`finish_sharded`](super::finish_sharded) sums. Ranks first compare variables and gradients, for which the host waits
    /// once a call but in a capture: [`GradientReducer`](super::GradientReducer) sums many layers without these waits.
    ///
    /// # Errors
    /// Over several ranks, on every rank, a parameter that is computed and has no gradient of its own: its variables are to
    /// be given to [`reduce_gradients`](super::reduce_gradients), on every rank. Else as those of that function.
    pub fn reduce_gradients(&self, gradients: &mut GradStore) -> Result<()> {
        let whole = self.trainable().filter(|(kind, _)| kind.is_replicated() && !self.is_shard(*kind));
        let (variables, computed): (Vec<_>, Vec<_>) = whole.partition(|(_, t)| t.is_variable());
        if let Some((kind, _)) = computed.first().filter(|_| self.group.ranks() > 1) {
            let name = format!("layer {}, {}", self.layer.number(), kind.name());
            let expected = "a variable, or its variables given to `candle::reduce_gradients`";
            let error = Error::invalid(REDUCE_GRADIENTS, name, expected, "a computed parameter");
            // The others may be in the first collective.
            self.group.erased().refuse(self.layer.number(), Op::GradReduce, &error.to_string());
            return Err(error.into());
        }
        let of: Vec<_> = variables.into_iter().map(|(_, t)| t).collect();
        Ok(of_layer(&self.group, self.layer.number(), &of, gradients)?)
    }
}

impl Module for ExpertParallelMoE {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let out = self.pass(x, None, None)?;
        self.store_figures(out.last_forward());
        Ok(out.y)
    }
}
