//! The module itself.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Shape, Tensor, Var};

use crate::checkpoint::{Block, Checkpoint, LoadOptions};
use crate::comm::{Op, Tag};
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::ep::EpGroup;
use crate::layer::{Forward, Layer, Mode, Role};
use crate::lazy::Lazy;
use crate::metrics::Load;

use super::op::{Emit, Join, Output, State, Step, contiguous, views_of};
use super::tensors::{copy_of, copy_to_candle, into_candle, into_storage, with_views};

const CALL: &str = "ExpertParallelMoE";

/// A Mixture-of-Experts layer over the ranks of a group, as a candle module. See the [module](super) for use.
#[derive(Debug, Clone)]
pub struct ExpertParallelMoE {
    layer: Layer,
    group: EpGroup,
    params: Vec<(Role, Tensor)>,
}

/// What a forward gives.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// Same shape and dtype as the input.
    pub y: Tensor,
    /// Auxiliary losses' sum, a scalar (f64 for f64 tokens, else f32) that carries gradients: add it to the loss.
    pub aux: Tensor,
    /// Router logits `[T, E]`, detached.
    pub logits: Tensor,
    /// Chosen experts `[T, K]`, I32, detached.
    pub ids: Tensor,
    /// Routing weights `[T, K]`, detached.
    pub weights: Tensor,
    /// Load of the experts over all ranks.
    pub load: Lazy<Load>,
}

impl ExpertParallelMoE {
    /// From variables named as [`Role::name`] says (`router.weight`, `experts.up`, …), with this rank's experts only.
    /// Missing ones are initialised: weights uniform in ±1/√fan-in, biases zero.
    ///
    /// Over several ranks this is a collective: the parameters that all ranks hold (router, shared expert) become
    /// rank 0's, so that every rank starts from the same router.
    ///
    /// # Errors
    /// A variable of another shape; a collective's error.
    pub fn new(layer: Layer, group: EpGroup, vb: candle_nn::VarBuilder<'_>) -> Result<Self> {
        let params = Role::ALL
            .into_iter()
            .filter_map(|role| {
                let dims = role.dims(layer.config(), group.local_experts())?;
                let init = match role.fan_in(layer.config()) {
                    Some(n) => {
                        let bound = 1.0 / (n as f64).sqrt();
                        candle_nn::Init::Uniform { lo: -bound, up: bound }
                    }
                    None => candle_nn::Init::Const(0.0),
                };
                Some(vb.get_with_hints(dims, role.name(), init).map(|t| (role, t)))
            })
            .collect::<Result<_>>();
        let params = params.inspect_err(|e| {
            // The other ranks are in the collectives below: they are told, and the group stays usable.
            let tag = Tag { layer: layer.number(), op: Op::Weights, sequence: 0 };
            let _ = group.lock().dispatcher().communicator().refuse(tag, &e.to_string());
        })?;
        let moe = Self { layer, group, params };
        if moe.group.ranks() > 1 {
            moe.replicate()?;
        }
        Ok(moe)
    }

    /// Gives every rank rank 0's replicated parameters. All ranks take part, whatever their parameters are; constants
    /// stay as they are.
    fn replicate(&self) -> Result<()> {
        for (_, t) in self.params.iter().filter(|(role, _)| role.is_replicated()) {
            let mut values = with_views(CALL, &[&t.contiguous()?], |views| copy_of(views[0]))?;
            let tag = Tag { layer: self.layer.number(), op: Op::Weights, sequence: 0 };
            self.group.lock().dispatcher().communicator().broadcast(tag, 0, values.view_mut())?;
            if t.is_variable() {
                Var::from_tensor(t)?.set(&into_candle(values, t.dims())?)?;
            }
        }
        Ok(())
    }

    /// From a loaded block. `number` names the layer in tags and errors. Tensors become variables if `trainable`
    /// (the selection bias does not: it has no gradient).
    ///
    /// # Errors
    /// A configuration that does not hold together.
    pub fn from_block(block: Block, number: u32, group: EpGroup, trainable: bool) -> Result<Self> {
        let layer = Layer::new(block.config, number)?;
        let of = |(role, t): (Role, crate::Tensor<Cpu>)| {
            let dims = t.dims().to_vec();
            let t = into_candle(t, &dims)?;
            match trainable && role != Role::SelectionBias {
                true => Ok((role, Var::from_tensor(&t)?.into_inner())),
                false => Ok((role, t)),
            }
        };
        let params = block.params.into_roles().map(of).collect::<Result<_>>()?;
        Ok(Self { layer, group, params })
    }

    /// From layer `layer` of a checkpoint folder: reads this rank's experts only.
    ///
    /// # Errors
    /// What [`Checkpoint::open`] and [`Checkpoint::load_block`] find.
    pub fn from_checkpoint(dir: impl AsRef<Path>, layer: usize, group: EpGroup, trainable: bool) -> Result<Self> {
        let options = LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype: None };
        let block = Checkpoint::open(dir).and_then(|c| c.load_block(layer, options))?;
        Self::from_block(block, layer as u32, group, trainable)
    }

    /// The layer with other dispatch options, auxiliary losses or the like.
    pub fn with_layer(mut self, layer: Layer) -> Self {
        self.layer = layer;
        self
    }

    /// The layer.
    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// The group.
    pub fn group(&self) -> &EpGroup {
        &self.group
    }

    /// Parameters with their names.
    pub fn params(&self) -> Vec<(&'static str, &Tensor)> {
        self.params.iter().map(|(role, t)| (role.name(), t)).collect()
    }

    /// One parameter.
    pub fn param(&self, role: Role) -> Option<&Tensor> {
        self.params.iter().find(|(r, _)| *r == role).map(|(_, t)| t)
    }

    /// Trainable parameters, for an optimiser.
    pub fn vars(&self) -> Vec<Var> {
        let trainable = self.params.iter().filter(|(role, t)| t.is_variable() && *role != Role::SelectionBias);
        trainable.filter_map(|(_, t)| Var::from_tensor(t).ok()).collect()
    }

    /// Forward over `[T, H]` or `[…, H]`. `mode.backward` is set here, from whether x or a parameter tracks gradients;
    /// where none does, nothing is kept.
    ///
    /// # Errors
    /// What [`Layer::forward`] finds, with its text.
    pub fn forward_full(&self, x: &Tensor, mode: Mode) -> Result<MoeOutput> {
        let hidden = self.layer.config().hidden;
        let flat = match x.dims() {
            [.., h] if *h == hidden => x.reshape((x.elem_count() / hidden, hidden))?.contiguous()?,
            // The layer refuses it, on every rank.
            _ => x.contiguous()?,
        };
        let tracks = x.track_op() || self.params.iter().any(|(_, t)| t.track_op());
        let forward = self.run(&flat, Mode { backward: tracks, ..mode })?;
        self.output(x, flat, forward)
    }

    fn run(&self, x: &Tensor, mode: Mode) -> crate::Result<Forward<Cpu>> {
        let params = contiguous(&self.params)?;
        let tensors: Vec<_> = std::iter::once(x).chain(params.iter().map(|(_, t)| t)).collect();
        let mut called = false;
        let result = with_views(CALL, &tensors, |views| {
            let weights = views_of(&params, &views[1..])?;
            called = true;
            self.layer.forward(&mut self.group.lock(), mode, views[0].borrow(), &weights.params())
        });
        // What candle's tensors alone make impossible is told to the other ranks, which are in forward.
        result.map_err(|e| if called { e } else { self.layer.refuse_forward(&mut self.group.lock(), e) })
    }

    fn output(&self, x: &Tensor, flat: Tensor, forward: Forward<Cpu>) -> Result<MoeOutput> {
        let Forward { y, aux, routing, context } = forward;
        let total = aux.get()?.total();
        let aux = match y.dtype() {
            DType::F64 => crate::Tensor::from_vec(vec![total], &[]),
            _ => crate::Tensor::from_vec(vec![total as f32], &[]),
        };
        let aux = aux?;
        let (y, aux) = match context {
            None => (into_candle(y, x.dims())?, into_candle(aux, &[])?),
            Some(context) => {
                let step = Arc::new(Step {
                    layer: self.layer.clone(),
                    group: self.group.clone(),
                    x: flat.clone(),
                    params: self.params.clone(),
                    state: Mutex::new(State::Ready { context: Box::new(context), d_y: None, d_aux: None }),
                });
                let mut token = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
                token = token.apply_op2(&flat, Join { step: step.clone(), input: None })?;
                for (i, (_, t)) in self.params.iter().enumerate() {
                    token = token.apply_op2(t, Join { step: step.clone(), input: Some(i) })?;
                }
                let emit = |output, value: crate::Tensor<Cpu>, shape: &Shape| {
                    let value = Mutex::new(Some((into_storage(value)?, shape.clone())));
                    token.apply_op1(Emit { step: step.clone(), output, value })
                };
                (emit(Output::Y, y, x.shape())?, emit(Output::Aux, aux, &Shape::from(()))?)
            }
        };
        Ok(MoeOutput {
            y,
            aux,
            logits: copy_to_candle(&routing.logits)?,
            ids: copy_to_candle(&routing.ids)?,
            weights: copy_to_candle(&routing.weights)?,
            load: routing.load,
        })
    }
}

impl candle_core::Module for ExpertParallelMoE {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_full(x, Mode::default())?.y)
    }
}
