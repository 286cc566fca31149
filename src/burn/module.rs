//! The module.

use std::sync::Arc;

use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Int, Shape, Tensor};

use crate::adapter::{ErasedLayerShards, ErasedQuantizedExperts, LastForward, TrainingState};
use crate::comm::Op;
use crate::error::{Error, Result};
use crate::layer::{AuxValue, Layer, Noise, ParamKind, PerParam};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::backend::{Details, LayerCall, MoeBackend, Operands, Outputs, primitive, tensor_of};
use super::group::DeviceGroup;
use super::layer_calls::LayerCalls;
use super::shard_param::FloatParam;

/// A Mixture-of-Experts layer over the ranks of a group. Made by
/// [`ExpertParallelMoEConfig::init`](super::ExpertParallelMoEConfig::init), [`from_block`](Self::from_block) or
/// [`from_checkpoint`](Self::from_checkpoint).
///
/// The parameters are this rank's: router and shared expert whole, and L = E / R routed experts. G is 2 with a gate,
/// 1 without; gate rows come first. Their paths in a record are [`ParamKind::name`]'s.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct ExpertParallelMoE<B: Backend> {
    /// Chooses experts.
    pub router: Router<B>,
    /// This rank's routed experts.
    pub experts: Experts<B>,
    /// The expert that every token visits.
    pub shared: Option<SharedExpert<B>>,
    #[module(skip)]
    pub(super) layer: Arc<Layer>,
    #[module(skip)]
    pub(super) group: DeviceGroup,
    /// The experts' chain, where their parameters are shards.
    #[module(skip)]
    pub(super) sharded: Option<ErasedLayerShards>,
    /// The experts' weights, where they stay quantized: their parameters are placeholders.
    #[module(skip)]
    pub(super) quantized: Option<ErasedQuantizedExperts>,
    #[module(skip)]
    pub(super) training: Arc<TrainingState>,
    #[module(skip)]
    pub(super) calls: Arc<LayerCalls>,
}

impl<B: Backend> ModuleDisplay for ExpertParallelMoE<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let config = self.layer.config();
        let content = content
            .add("hidden", &config.hidden)
            .add("intermediate", &config.intermediate)
            .add("experts", &config.router.num_experts)
            .add("top_k", &config.router.top_k);
        let content = match &config.shared {
            Some(shared) => content.add("shared", &shared.intermediate),
            None => content,
        };
        let content = match self.group.ranks() {
            1 => content,
            ranks => content.add("rank", &self.group.rank()).add("ranks", &ranks),
        };
        content.optional()
    }
}

/// Parameters of the router.
#[derive(Module, Debug)]
pub struct Router<B: Backend> {
    /// `[E, H]`.
    pub weight: Param<Tensor<B, 2>>,
    /// `[E]`, added to the logits.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// `[E]`, added to the scores for choosing only; has no gradient.
    pub selection_bias: Option<Param<Tensor<B, 1>>>,
}

/// Parameters of a rank's routed experts.
#[derive(Module, Debug)]
pub struct Experts<B: Backend> {
    /// `[L, G·I, H]`; where experts are [sharded](ExpertParallelMoE::into_sharded) `[1, S, C]`, this rank's shard. Other
    /// parameters have these sizes unless [all](ExpertParallelMoE::into_all_sharded) is sharded.
    pub up: Param<Tensor<B, 3>>,
    /// `[L, G·I]`.
    pub up_bias: Option<Param<Tensor<B, 2>>>,
    /// `[L, H, I]`; its shard as that of `up`.
    pub down: Param<Tensor<B, 3>>,
    /// `[L, H]`.
    pub down_bias: Option<Param<Tensor<B, 2>>>,
}

/// Parameters of the shared expert, of inner size S.
#[derive(Module, Debug)]
pub struct SharedExpert<B: Backend> {
    /// `[G·S, H]`.
    pub up: Param<Tensor<B, 2>>,
    /// `[G·S]`.
    pub up_bias: Option<Param<Tensor<B, 1>>>,
    /// `[H, S]`.
    pub down: Param<Tensor<B, 2>>,
    /// `[H]`.
    pub down_bias: Option<Param<Tensor<B, 1>>>,
    /// `[1, H]`.
    pub gate: Option<Param<Tensor<B, 2>>>,
}

/// Result of a forward.
#[derive(Debug, Clone)]
pub struct MoeOutput<B: Backend, const D: usize> {
    /// Same shape and type as the input.
    pub y: Tensor<B, D>,
    /// Auxiliary losses' sum, `[1]` in f32 (f64 for f64 tokens), which carries gradients: add it to the loss.
    pub aux: Tensor<B, 1>,
    /// The losses apart, for the host.
    pub losses: Lazy<AuxValue>,
    /// Router logits `[T, E]`, f32 (f64 for f64 tokens), detached.
    pub logits: Tensor<B, 2>,
    /// Chosen experts `[T, K]`, i32, before any drop.
    pub ids: Tensor<B, 2, Int>,
    /// Routing weights `[T, K]`, f32 (f64 for f64 tokens), detached.
    pub weights: Tensor<B, 2>,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

/// y, figures for the host, and the tensors that a call has asked for.
type ForwardParts<B, const D: usize> = (Tensor<B, D>, LastForward, Option<Details<B>>);

impl<B: Backend> ExpertParallelMoE<B> {
    /// The layer that the module runs.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// This rank's group.
    pub fn group(&self) -> &DeviceGroup {
        &self.group
    }

    pub(super) fn param(&self, kind: ParamKind) -> Option<FloatTensor<B>> {
        let (router, experts, shared) = (&self.router, &self.experts, self.shared.as_ref());
        match kind {
            ParamKind::Router => Some(value(&router.weight)),
            ParamKind::RouterBias => router.bias.as_ref().map(value),
            ParamKind::SelectionBias => router.selection_bias.as_ref().map(value),
            ParamKind::Up => Some(value(&experts.up)),
            ParamKind::UpBias => experts.up_bias.as_ref().map(value),
            ParamKind::Down => Some(value(&experts.down)),
            ParamKind::DownBias => experts.down_bias.as_ref().map(value),
            ParamKind::SharedUp => shared.map(|s| value(&s.up)),
            ParamKind::SharedUpBias => shared.and_then(|s| s.up_bias.as_ref()).map(value),
            ParamKind::SharedDown => shared.map(|s| value(&s.down)),
            ParamKind::SharedDownBias => shared.and_then(|s| s.down_bias.as_ref()).map(value),
            ParamKind::SharedGate => shared.and_then(|s| s.gate.as_ref()).map(value),
        }
    }

    /// Meets the other ranks' forward of this layer as a failure: for a model that fails before it, where they would
    /// wait. They get the reason at once; between threads the group stays usable.
    pub fn refuse_forward(&self, reason: &str) {
        self.group.erased().refuse(self.layer.number(), Op::Prepare, reason);
    }

    /// The same for the other ranks' backward of this layer: for a model that fails behind its forward, before or in a
    /// backward that has not come to it.
    pub fn refuse_backward(&self, reason: &str) {
        self.group.erased().refuse(self.layer.number(), Op::CombineBwd, reason);
    }

    /// The same parameters under another layer: other dispatch options, auxiliary losses or the like.
    pub fn with_layer(mut self, layer: Layer) -> Self {
        self.layer = Arc::new(layer);
        self
    }
}

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// A parameter, whatever the number of its dimensions.
    pub(super) fn float_param(&self, kind: ParamKind) -> Option<&dyn FloatParam<B>> {
        let (router, experts, shared) = (&self.router, &self.experts, self.shared.as_ref());
        fn any<B: MoeBackend, const D: usize>(param: &Param<Tensor<B, D>>) -> &dyn FloatParam<B> {
            param
        }
        match kind {
            ParamKind::Router => Some(&router.weight),
            ParamKind::RouterBias => router.bias.as_ref().map(any),
            ParamKind::SelectionBias => router.selection_bias.as_ref().map(any),
            ParamKind::Up => Some(&experts.up),
            ParamKind::UpBias => experts.up_bias.as_ref().map(any),
            ParamKind::Down => Some(&experts.down),
            ParamKind::DownBias => experts.down_bias.as_ref().map(any),
            ParamKind::SharedUp => shared.map(|s| any(&s.up)),
            ParamKind::SharedUpBias => shared.and_then(|s| s.up_bias.as_ref()).map(any),
            ParamKind::SharedDown => shared.map(|s| any(&s.down)),
            ParamKind::SharedDownBias => shared.and_then(|s| s.down_bias.as_ref()).map(any),
            ParamKind::SharedGate => shared.and_then(|s| s.gate.as_ref()).map(any),
        }
    }

    /// The same, to be changed.
    pub(super) fn float_param_mut(&mut self, kind: ParamKind) -> Option<&mut dyn FloatParam<B>> {
        let (router, experts, shared) = (&mut self.router, &mut self.experts, self.shared.as_mut());
        fn any<B: MoeBackend, const D: usize>(param: &mut Param<Tensor<B, D>>) -> &mut dyn FloatParam<B> {
            param
        }
        match kind {
            ParamKind::Router => Some(&mut router.weight),
            ParamKind::RouterBias => router.bias.as_mut().map(any),
            ParamKind::SelectionBias => router.selection_bias.as_mut().map(any),
            ParamKind::Up => Some(&mut experts.up),
            ParamKind::UpBias => experts.up_bias.as_mut().map(any),
            ParamKind::Down => Some(&mut experts.down),
            ParamKind::DownBias => experts.down_bias.as_mut().map(any),
            ParamKind::SharedUp => shared.map(|s| any(&mut s.up)),
            ParamKind::SharedUpBias => shared.and_then(|s| s.up_bias.as_mut()).map(any),
            ParamKind::SharedDown => shared.map(|s| any(&mut s.down)),
            ParamKind::SharedDownBias => shared.and_then(|s| s.down_bias.as_mut()).map(any),
            ParamKind::SharedGate => shared.and_then(|s| s.gate.as_mut()).map(any),
        }
    }

    /// Output for `[T, H]` or `[B, S, H]` (any leading dimensions); the number of tokens may differ between ranks and
    /// be 0. A collective of all ranks. Applies no jitter; leaves auxiliary losses out.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Result<Tensor<B, D>> {
        self.run_and_store_figures(x, self.call())
    }

    /// As [`forward`](Self::forward), with everything that the layer knows; `noise`: seed and step of the router's
    /// jitter, where it is to be applied. Nothing is kept for backward where nothing tracks gradients.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    pub fn forward_full<const D: usize>(&self, x: Tensor<B, D>, noise: Option<Noise>) -> Result<MoeOutput<B, D>> {
        let (y, LastForward { losses, load }, details) =
            self.run(x, LayerCall { noise, details: true, ..self.call() })?;
        let Some(Details { aux, logits, ids, weights }) = details else {
            return Err(Error::invalid("ExpertParallelMoE::forward", "routing", "a forward's", "none"));
        };
        let ids = Tensor::from_primitive(ids);
        Ok(MoeOutput {
            y,
            aux: tensor_of(aux),
            losses,
            logits: tensor_of(logits),
            ids,
            weights: tensor_of(weights),
            load,
        })
    }

    /// A call of the module, as [`LayerCall::new`] makes it.
    pub(super) fn call(&self) -> LayerCall {
        let (experts, quantized, calls) = (self.sharded.clone(), self.quantized.clone(), Arc::clone(&self.calls));
        LayerCall { experts, quantized, calls, ..LayerCall::new(&self.layer, &self.group) }
    }

    /// y of a forward, whose figures are kept.
    pub(super) fn run_and_store_figures<const D: usize>(
        &self,
        x: Tensor<B, D>,
        call: LayerCall,
    ) -> Result<Tensor<B, D>> {
        let (y, figures, _) = self.run(x, call)?;
        self.training.store(figures);
        Ok(y)
    }

    /// A forward: y, figures for the host, and what the call asks for.
    fn run<const D: usize>(&self, x: Tensor<B, D>, call: LayerCall) -> Result<ForwardParts<B, D>> {
        let dims: [usize; D] = x.dims();
        let Some((&hidden, leading)) = dims.split_last() else {
            return Err(Error::invalid("ExpertParallelMoE::forward", "tensor x", "[.., H]", "a scalar"));
        };
        // Not `Tensor::reshape`, which reads a 0 as "as before".
        let reshaped = |t, dims: Vec<usize>| if D == 2 { t } else { B::float_reshape(t, Shape::from(dims)) };
        let x = reshaped(primitive(x), vec![leading.iter().product(), hidden]);
        let params = PerParam::from_fn(|kind| self.param(kind));
        let Outputs { y, losses, load, details } = B::moe_forward(&call, Operands { x, params })?;
        Ok((tensor_of(reshaped(y, dims.to_vec())), LastForward { losses, load }, details))
    }
}

impl<B: Backend> ExpertParallelMoE<B> {
    /// The parameters of the routed experts: those that each rank has of its own.
    pub fn expert_ids(&self) -> Vec<ParamId> {
        let Experts { up, down, .. } = &self.experts;
        [up.id, down.id].into_iter().chain(self.expert_bias_ids()).collect()
    }

    /// Those of them that are biases, which stay whole where experts are [sharded](Self::into_sharded), and are shards
    /// where [all](Self::into_all_sharded) is: the gradients of whole ones are to be summed over the ranks that hold the
    /// same experts.
    pub fn expert_bias_ids(&self) -> Vec<ParamId> {
        let Experts { up_bias, down_bias, .. } = &self.experts;
        [up_bias, down_bias].into_iter().flatten().map(|bias| bias.id).collect()
    }
}

fn value<B: Backend, const D: usize>(param: &Param<Tensor<B, D>>) -> FloatTensor<B> {
    primitive(param.val())
}
