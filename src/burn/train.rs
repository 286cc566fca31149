//! Parts of a module that training needs beside its forward: jitter, the auxiliary losses behind y, balance, and
//! gradients of parameters that all ranks hold.

use std::marker::PhantomData;
use std::sync::Arc;

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};

use crate::adapter::{TrainingState, moved_selection_bias};
use crate::error::Result;
use crate::layer::{AuxValue, Noise};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::backend::{LayerCall, MoeBackend};
use super::etp::ShardHolder;
use super::module::ExpertParallelMoE;
use super::reduce::{ModuleReduction, ReduceOptions, over_group};

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// [`forward`](Self::forward); where it trains, the router's jitter is applied ([`with_noise`](Self::with_noise)), and
    /// the auxiliary losses' gradient comes with y's: y's value is as it is, and a backward through it adds the gradient
    /// of the losses, as if they had been added to the loss. Their value is [`last_aux`](Self::last_aux)'s.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_t<const D: usize>(&self, x: Tensor<B, D>, train: bool) -> Result<Tensor<B, D>> {
        if !train {
            return self.forward(x);
        }
        let (noise, aux_scale) = (Some(self.training.next_noise()), self.training.aux_scale());
        self.run_and_store_figures(x, LayerCall { noise, aux_scale, ..self.call() })
    }
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// Seed of the router's jitter, and the step that the next training forward counts from (0 and 0 without this).
    /// Each [`forward_t`](Self::forward_t) that trains takes one step; a run that goes on from a checkpoint sets its
    /// own. Clones of a module count together.
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

    /// Auxiliary losses of the last [`forward_t`](Self::forward_t) or [`forward`](Self::forward) of this module or a
    /// clone of it (one that is [`valid`](burn::module::AutodiffModule::valid) is one too), coefficients included.
    ///
    /// # Errors
    /// No forward yet.
    pub fn last_aux(&self) -> Result<Lazy<AuxValue>> {
        Ok(self.training.last("ExpertParallelMoE::last_aux")?.losses)
    }

    /// Load of the experts over all ranks in that forward.
    ///
    /// # Errors
    /// No forward yet.
    pub fn last_load(&self) -> Result<Lazy<Load>> {
        Ok(self.training.last("ExpertParallelMoE::last_load")?.load)
    }

    /// Moves the selection bias towards an even load:
    /// [`update_selection_bias`](crate::balance::update_selection_bias) with the load of all ranks
    /// ([`last_load`](Self::last_load), [`MoeOutput::load`](super::MoeOutput::load)) and a step `u`. Call it after each
    /// training step, on every rank.
    ///
    /// # Errors
    /// A router without a selection bias; what the formula refuses.
    pub fn update_selection_bias(&mut self, load: &Load, u: f32) -> Result<()> {
        const CALL: &str = "ExpertParallelMoE::update_selection_bias";
        let bias = self.router.selection_bias.as_mut();
        let values = bias.as_ref().map(|bias| bias.val().into_data().iter::<f32>().collect());
        let values = moved_selection_bias(CALL, values, load, u)?;
        let Some(bias) = bias else { return Ok(()) };
        let (device, dtype) = (bias.device(), bias.dtype());
        let data = TensorData::new(values, bias.shape()).convert_dtype(dtype);
        *bias = Param::initialized(bias.id, Tensor::from_data(data, (&device, dtype)));
        Ok(())
    }
}

impl<B: AutodiffBackend + MoeBackend> ExpertParallelMoE<B> {
    /// Sums the gradients of the parameters that every rank holds whole (router, shared expert) over the ranks; an absent
    /// gradient counts as zeros. Call it on every rank before the optimizer's step. For
    /// more than one layer, and for what is around them, [`reduce_gradients`](super::reduce_gradients) takes a whole
    /// model at once.
    ///
    /// # Errors
    /// As [`reduce_gradients`](super::reduce_gradients).
    pub fn reduce_gradients(&self, gradients: &mut GradientsParams) -> Result<()> {
        let own = [self.expert_ids(), self.shard_ids()].concat();
        let options = ReduceOptions::except(&own);
        let reduction = ModuleReduction { layer: self.layer.number(), module: self, options, backend: PhantomData };
        over_group(&self.group, reduction, gradients)
    }
}
