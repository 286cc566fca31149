//! The parameters by role, so that adapters can list, name and shape them without knowing what they are for.

use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::{Gradients, GradientsMut, Inputs, Layer, Params, Wanted};

/// One parameter of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ParamKind {
    Router,
    RouterBias,
    SelectionBias,
    Up,
    UpBias,
    Down,
    DownBias,
    SharedUp,
    SharedDown,
    SharedGate,
}

impl ParamKind {
    /// Every role, in the order in which adapters list parameters.
    pub const ALL: [ParamKind; 10] = [
        ParamKind::Router,
        ParamKind::RouterBias,
        ParamKind::SelectionBias,
        ParamKind::Up,
        ParamKind::UpBias,
        ParamKind::Down,
        ParamKind::DownBias,
        ParamKind::SharedUp,
        ParamKind::SharedDown,
        ParamKind::SharedGate,
    ];

    /// Dotted name in a host framework's parameter tree.
    pub const fn name(self) -> &'static str {
        match self {
            ParamKind::Router => "router.weight",
            ParamKind::RouterBias => "router.bias",
            ParamKind::SelectionBias => "router.selection_bias",
            ParamKind::Up => "experts.up",
            ParamKind::UpBias => "experts.up_bias",
            ParamKind::Down => "experts.down",
            ParamKind::DownBias => "experts.down_bias",
            ParamKind::SharedUp => "shared.up",
            ParamKind::SharedDown => "shared.down",
            ParamKind::SharedGate => "shared.gate",
        }
    }

    /// Sizes for `local` experts on this rank; `None` where the configuration has no such parameter.
    pub fn dims(self, config: &MoeConfig, local: usize) -> Option<Vec<usize>> {
        let (e, h, i, n) = (config.router.num_experts, config.hidden, config.intermediate, config.up_rows());
        let shared = config.shared;
        match self {
            ParamKind::Router => Some(vec![e, h]),
            ParamKind::RouterBias => config.router.logit_bias.then(|| vec![e]),
            ParamKind::SelectionBias => config.router.selection_bias.then(|| vec![e]),
            ParamKind::Up => Some(vec![local, n, h]),
            ParamKind::UpBias => config.expert_bias.then(|| vec![local, n]),
            ParamKind::Down => Some(vec![local, h, i]),
            ParamKind::DownBias => config.expert_bias.then(|| vec![local, h]),
            ParamKind::SharedUp => {
                shared.map(|s| vec![config.activation.gate_factor().saturating_mul(s.intermediate), h])
            }
            ParamKind::SharedDown => shared.map(|s| vec![h, s.intermediate]),
            ParamKind::SharedGate => shared.filter(|s| s.gated).map(|_| vec![1, h]),
        }
    }

    /// Inputs that one output of this weight sums over; `None` for biases.
    pub fn fan_in(self, config: &MoeConfig) -> Option<usize> {
        match self {
            ParamKind::Router | ParamKind::Up | ParamKind::SharedUp | ParamKind::SharedGate => Some(config.hidden),
            ParamKind::Down => Some(config.intermediate),
            ParamKind::SharedDown => config.shared.map(|s| s.intermediate),
            ParamKind::RouterBias | ParamKind::SelectionBias | ParamKind::UpBias | ParamKind::DownBias => None,
        }
    }

    /// True of what may be of any floating type; all others are of the tokens'.
    pub(super) const fn any_float(self) -> bool {
        matches!(self, ParamKind::Router | ParamKind::RouterBias | ParamKind::SelectionBias | ParamKind::SharedGate)
    }

    /// True where every rank holds the same values (and gradients are to be summed over the ranks).
    pub const fn is_replicated(self) -> bool {
        !matches!(self, ParamKind::Up | ParamKind::UpBias | ParamKind::Down | ParamKind::DownBias)
    }
}

impl<'a, D: Kernels> Params<'a, D> {
    /// A parameter that is a tensor: any but `up` and `down`, where the configuration has it.
    pub(super) fn tensor(&self, role: ParamKind) -> Option<TensorRef<'a, D>> {
        match role {
            ParamKind::Router => Some(self.router),
            ParamKind::RouterBias => self.router_bias,
            ParamKind::SelectionBias => self.selection_bias,
            ParamKind::UpBias => self.up_bias,
            ParamKind::DownBias => self.down_bias,
            ParamKind::SharedUp => self.shared_up,
            ParamKind::SharedDown => self.shared_down,
            ParamKind::SharedGate => self.shared_gate,
            ParamKind::Up | ParamKind::Down => None,
        }
    }
}

impl<D: Kernels> Gradients<D> {
    /// Takes a parameter's gradient out. The selection bias has none.
    pub fn take(&mut self, role: ParamKind) -> Option<Tensor<D>> {
        match role {
            ParamKind::Router => self.router.take(),
            ParamKind::RouterBias => self.router_bias.take(),
            ParamKind::SelectionBias => None,
            ParamKind::Up => self.up.take(),
            ParamKind::UpBias => self.up_bias.take(),
            ParamKind::Down => self.down.take(),
            ParamKind::DownBias => self.down_bias.take(),
            ParamKind::SharedUp => self.shared_up.take(),
            ParamKind::SharedDown => self.shared_down.take(),
            ParamKind::SharedGate => self.shared_gate.take(),
        }
    }

    /// Room for the gradients that are wanted, and none yet for those of logits and routing weights, nor for those of
    /// `elsewhere`, which are made in other memory.
    pub(super) fn empty(
        layer: &Layer,
        group: &Group<D>,
        inputs: &Inputs<'_, '_, D>,
        (wanted, elsewhere): (Wanted, &[ParamKind]),
    ) -> Result<Self> {
        let device = group.device();
        let like = |t: TensorRef<'_, D>| Tensor::empty(device, t.dtype(), t.dims());
        let of = |role: ParamKind| {
            let wanted = match role {
                ParamKind::Router | ParamKind::RouterBias => wanted.router,
                ParamKind::SelectionBias => false,
                ParamKind::Up | ParamKind::UpBias | ParamKind::Down | ParamKind::DownBias => wanted.experts,
                ParamKind::SharedUp | ParamKind::SharedDown | ParamKind::SharedGate => wanted.shared,
            };
            let wanted = wanted && !elsewhere.contains(&role);
            let dims = role.dims(layer.config(), group.local_experts()).filter(|_| wanted);
            // Its parameter's; that of `up` and `down` is the tokens'.
            let dtype = inputs.params.tensor(role).map_or(inputs.x.dtype(), |t| t.dtype());
            dims.map(|dims| Tensor::empty(device, dtype, &dims)).transpose()
        };
        let none = || Tensor::empty(device, inputs.x.dtype().accumulator(), &[0, 0]);
        Ok(Self {
            x: if wanted.x { Some(like(inputs.x.borrow())?) } else { None },
            router: of(ParamKind::Router)?,
            router_bias: of(ParamKind::RouterBias)?,
            up: of(ParamKind::Up)?,
            up_bias: of(ParamKind::UpBias)?,
            down: of(ParamKind::Down)?,
            down_bias: of(ParamKind::DownBias)?,
            shared_up: of(ParamKind::SharedUp)?,
            shared_down: of(ParamKind::SharedDown)?,
            shared_gate: of(ParamKind::SharedGate)?,
            logits: none()?,
            weights: none()?,
        })
    }

    /// Borrows them to be overwritten.
    pub(super) fn view_mut(&mut self) -> GradientsMut<'_, D> {
        fn of<D: Kernels>(t: &mut Option<Tensor<D>>) -> Option<TensorMut<'_, D>> {
            t.as_mut().map(Tensor::view_mut)
        }
        GradientsMut {
            x: of(&mut self.x),
            router: of(&mut self.router),
            router_bias: of(&mut self.router_bias),
            up: of(&mut self.up),
            up_bias: of(&mut self.up_bias),
            down: of(&mut self.down),
            down_bias: of(&mut self.down_bias),
            shared_up: of(&mut self.shared_up),
            shared_down: of(&mut self.shared_down),
            shared_gate: of(&mut self.shared_gate),
            accumulate: false,
        }
    }
}

impl<'a, D: Kernels> GradientsMut<'a, D> {
    /// Memory for no gradient.
    pub fn none() -> Self {
        Self {
            x: None,
            router: None,
            router_bias: None,
            up: None,
            up_bias: None,
            down: None,
            down_bias: None,
            shared_up: None,
            shared_down: None,
            shared_gate: None,
            accumulate: false,
        }
    }

    /// Gives memory for a parameter's gradient. The selection bias has none.
    pub fn set(&mut self, role: ParamKind, memory: TensorMut<'a, D>) {
        let place = match role {
            ParamKind::Router => &mut self.router,
            ParamKind::RouterBias => &mut self.router_bias,
            ParamKind::SelectionBias => return,
            ParamKind::Up => &mut self.up,
            ParamKind::UpBias => &mut self.up_bias,
            ParamKind::Down => &mut self.down,
            ParamKind::DownBias => &mut self.down_bias,
            ParamKind::SharedUp => &mut self.shared_up,
            ParamKind::SharedDown => &mut self.shared_down,
            ParamKind::SharedGate => &mut self.shared_gate,
        };
        *place = Some(memory);
    }

    /// Memory for a parameter's gradient. The selection bias has none.
    pub fn get(&self, role: ParamKind) -> Option<&TensorMut<'a, D>> {
        match role {
            ParamKind::Router => self.router.as_ref(),
            ParamKind::RouterBias => self.router_bias.as_ref(),
            ParamKind::SelectionBias => None,
            ParamKind::Up => self.up.as_ref(),
            ParamKind::UpBias => self.up_bias.as_ref(),
            ParamKind::Down => self.down.as_ref(),
            ParamKind::DownBias => self.down_bias.as_ref(),
            ParamKind::SharedUp => self.shared_up.as_ref(),
            ParamKind::SharedDown => self.shared_down.as_ref(),
            ParamKind::SharedGate => self.shared_gate.as_ref(),
        }
    }
}

/// Views of plain parameters by role: what an adapter collects from its framework's tensors.
#[derive(Debug)]
pub struct ParamViews<'a, D: Kernels> {
    router: TensorRef<'a, D>,
    up: TensorRef<'a, D>,
    down: TensorRef<'a, D>,
    others: [Option<TensorRef<'a, D>>; 10],
}

impl<'a, D: Kernels> ParamViews<'a, D> {
    /// Asks for each role's view.
    ///
    /// # Errors
    /// No router, up or down.
    pub fn collect(mut view: impl FnMut(ParamKind) -> Result<Option<TensorRef<'a, D>>>) -> Result<Self> {
        let mut others = [None; 10];
        for (slot, role) in others.iter_mut().zip(ParamKind::ALL) {
            *slot = view(role)?;
        }
        let required = |role: ParamKind| {
            let missing =
                || Error::invalid("ParamViews::collect", format!("tensor {}", role.name()), "a tensor", "none");
            others[role as usize].ok_or_else(missing)
        };
        Ok(Self {
            router: required(ParamKind::Router)?,
            up: required(ParamKind::Up)?,
            down: required(ParamKind::Down)?,
            others,
        })
    }

    /// A parameter's view.
    pub fn get(&self, role: ParamKind) -> Option<TensorRef<'a, D>> {
        self.others[role as usize]
    }

    /// The parameters as a layer takes them.
    pub fn params(&self) -> Params<'_, D> {
        let of = |role: ParamKind| self.others[role as usize].as_ref().map(TensorRef::borrow);
        Params {
            router: self.router.borrow(),
            router_bias: of(ParamKind::RouterBias),
            selection_bias: of(ParamKind::SelectionBias),
            up: &self.up,
            up_bias: of(ParamKind::UpBias),
            down: &self.down,
            down_bias: of(ParamKind::DownBias),
            shared_up: of(ParamKind::SharedUp),
            shared_down: of(ParamKind::SharedDown),
            shared_gate: of(ParamKind::SharedGate),
        }
    }
}

impl crate::checkpoint::BlockParams {
    /// One parameter.
    pub fn get(&self, role: ParamKind) -> Option<&Tensor<Cpu>> {
        match role {
            ParamKind::Router => Some(&self.router),
            ParamKind::RouterBias => self.router_bias.as_ref(),
            ParamKind::SelectionBias => self.selection_bias.as_ref(),
            ParamKind::Up => Some(&self.up),
            ParamKind::UpBias => self.up_bias.as_ref(),
            ParamKind::Down => Some(&self.down),
            ParamKind::DownBias => self.down_bias.as_ref(),
            ParamKind::SharedUp => self.shared_up.as_ref(),
            ParamKind::SharedDown => self.shared_down.as_ref(),
            ParamKind::SharedGate => self.shared_gate.as_ref(),
        }
    }

    /// The parameters that are there, by role.
    pub fn into_params(self) -> impl Iterator<Item = (ParamKind, Tensor<Cpu>)> {
        let all = [
            Some(self.router),
            self.router_bias,
            self.selection_bias,
            Some(self.up),
            self.up_bias,
            Some(self.down),
            self.down_bias,
            self.shared_up,
            self.shared_down,
            self.shared_gate,
        ];
        ParamKind::ALL.into_iter().zip(all).filter_map(|(role, t)| Some((role, t?)))
    }

    /// Views for a layer.
    pub fn views(&self) -> Result<ParamViews<'_, Cpu>> {
        ParamViews::collect(|role| Ok(self.get(role).map(Tensor::view)))
    }
}
