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
pub enum Role {
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

impl Role {
    /// Every role, in the order in which adapters list parameters.
    pub const ALL: [Role; 10] = [
        Role::Router,
        Role::RouterBias,
        Role::SelectionBias,
        Role::Up,
        Role::UpBias,
        Role::Down,
        Role::DownBias,
        Role::SharedUp,
        Role::SharedDown,
        Role::SharedGate,
    ];

    /// Dotted name in a host framework's parameter tree.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Router => "router.weight",
            Role::RouterBias => "router.bias",
            Role::SelectionBias => "router.selection_bias",
            Role::Up => "experts.up",
            Role::UpBias => "experts.up_bias",
            Role::Down => "experts.down",
            Role::DownBias => "experts.down_bias",
            Role::SharedUp => "shared.up",
            Role::SharedDown => "shared.down",
            Role::SharedGate => "shared.gate",
        }
    }

    /// Sizes for `local` experts on this rank; `None` where the configuration has no such parameter.
    pub fn dims(self, config: &MoeConfig, local: usize) -> Option<Vec<usize>> {
        let (e, h, i, n) = (config.router.num_experts, config.hidden, config.intermediate, config.up_rows());
        let shared = config.shared;
        match self {
            Role::Router => Some(vec![e, h]),
            Role::RouterBias => config.router.logit_bias.then(|| vec![e]),
            Role::SelectionBias => config.router.selection_bias.then(|| vec![e]),
            Role::Up => Some(vec![local, n, h]),
            Role::UpBias => config.expert_bias.then(|| vec![local, n]),
            Role::Down => Some(vec![local, h, i]),
            Role::DownBias => config.expert_bias.then(|| vec![local, h]),
            Role::SharedUp => shared.map(|s| vec![config.activation.gate_factor().saturating_mul(s.intermediate), h]),
            Role::SharedDown => shared.map(|s| vec![h, s.intermediate]),
            Role::SharedGate => shared.filter(|s| s.gated).map(|_| vec![1, h]),
        }
    }

    /// Inputs that one output of this weight sums over; `None` for biases.
    pub fn fan_in(self, config: &MoeConfig) -> Option<usize> {
        match self {
            Role::Router | Role::Up | Role::SharedUp | Role::SharedGate => Some(config.hidden),
            Role::Down => Some(config.intermediate),
            Role::SharedDown => config.shared.map(|s| s.intermediate),
            Role::RouterBias | Role::SelectionBias | Role::UpBias | Role::DownBias => None,
        }
    }

    /// True of what may be of any floating type; all others are of the tokens'.
    pub(super) const fn any_float(self) -> bool {
        matches!(self, Role::Router | Role::RouterBias | Role::SelectionBias | Role::SharedGate)
    }

    /// True where every rank holds the same values (and gradients are to be summed over the ranks).
    pub const fn is_replicated(self) -> bool {
        !matches!(self, Role::Up | Role::UpBias | Role::Down | Role::DownBias)
    }
}

impl<'a, D: Kernels> Params<'a, D> {
    /// A parameter that is a tensor: any but `up` and `down`, where the configuration has it.
    pub(super) fn tensor(&self, role: Role) -> Option<TensorRef<'a, D>> {
        match role {
            Role::Router => Some(self.router),
            Role::RouterBias => self.router_bias,
            Role::SelectionBias => self.selection_bias,
            Role::UpBias => self.up_bias,
            Role::DownBias => self.down_bias,
            Role::SharedUp => self.shared_up,
            Role::SharedDown => self.shared_down,
            Role::SharedGate => self.shared_gate,
            Role::Up | Role::Down => None,
        }
    }
}

impl<D: Kernels> Gradients<D> {
    /// Takes a parameter's gradient out. The selection bias has none.
    pub fn take(&mut self, role: Role) -> Option<Tensor<D>> {
        match role {
            Role::Router => self.router.take(),
            Role::RouterBias => self.router_bias.take(),
            Role::SelectionBias => None,
            Role::Up => self.up.take(),
            Role::UpBias => self.up_bias.take(),
            Role::Down => self.down.take(),
            Role::DownBias => self.down_bias.take(),
            Role::SharedUp => self.shared_up.take(),
            Role::SharedDown => self.shared_down.take(),
            Role::SharedGate => self.shared_gate.take(),
        }
    }

    /// Room for the gradients that are wanted, and none yet for those of logits and routing weights, nor for those of
    /// `elsewhere`, which are made in other memory.
    pub(super) fn empty(
        layer: &Layer,
        group: &Group<D>,
        inputs: &Inputs<'_, D>,
        (wanted, elsewhere): (Wanted, &[Role]),
    ) -> Result<Self> {
        let device = group.device();
        let like = |t: TensorRef<'_, D>| Tensor::empty(device, t.dtype(), t.dims());
        let of = |role: Role| {
            let wanted = match role {
                Role::Router | Role::RouterBias => wanted.router,
                Role::SelectionBias => false,
                Role::Up | Role::UpBias | Role::Down | Role::DownBias => wanted.experts,
                Role::SharedUp | Role::SharedDown | Role::SharedGate => wanted.shared,
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
            router: of(Role::Router)?,
            router_bias: of(Role::RouterBias)?,
            up: of(Role::Up)?,
            up_bias: of(Role::UpBias)?,
            down: of(Role::Down)?,
            down_bias: of(Role::DownBias)?,
            shared_up: of(Role::SharedUp)?,
            shared_down: of(Role::SharedDown)?,
            shared_gate: of(Role::SharedGate)?,
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
    pub fn set(&mut self, role: Role, memory: TensorMut<'a, D>) {
        let place = match role {
            Role::Router => &mut self.router,
            Role::RouterBias => &mut self.router_bias,
            Role::SelectionBias => return,
            Role::Up => &mut self.up,
            Role::UpBias => &mut self.up_bias,
            Role::Down => &mut self.down,
            Role::DownBias => &mut self.down_bias,
            Role::SharedUp => &mut self.shared_up,
            Role::SharedDown => &mut self.shared_down,
            Role::SharedGate => &mut self.shared_gate,
        };
        *place = Some(memory);
    }

    /// Memory for a parameter's gradient. The selection bias has none.
    pub fn get(&self, role: Role) -> Option<&TensorMut<'a, D>> {
        match role {
            Role::Router => self.router.as_ref(),
            Role::RouterBias => self.router_bias.as_ref(),
            Role::SelectionBias => None,
            Role::Up => self.up.as_ref(),
            Role::UpBias => self.up_bias.as_ref(),
            Role::Down => self.down.as_ref(),
            Role::DownBias => self.down_bias.as_ref(),
            Role::SharedUp => self.shared_up.as_ref(),
            Role::SharedDown => self.shared_down.as_ref(),
            Role::SharedGate => self.shared_gate.as_ref(),
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
    pub fn collect(mut view: impl FnMut(Role) -> Result<Option<TensorRef<'a, D>>>) -> Result<Self> {
        let mut others = [None; 10];
        for (slot, role) in others.iter_mut().zip(Role::ALL) {
            *slot = view(role)?;
        }
        let required = |role: Role| {
            let missing =
                || Error::invalid("ParamViews::collect", format!("tensor {}", role.name()), "a tensor", "none");
            others[role as usize].ok_or_else(missing)
        };
        Ok(Self { router: required(Role::Router)?, up: required(Role::Up)?, down: required(Role::Down)?, others })
    }

    /// A parameter's view.
    pub fn get(&self, role: Role) -> Option<TensorRef<'a, D>> {
        self.others[role as usize]
    }

    /// The parameters as a layer takes them.
    pub fn params(&self) -> Params<'_, D> {
        let of = |role: Role| self.others[role as usize].as_ref().map(TensorRef::borrow);
        Params {
            router: self.router.borrow(),
            router_bias: of(Role::RouterBias),
            selection_bias: of(Role::SelectionBias),
            up: &self.up,
            up_bias: of(Role::UpBias),
            down: &self.down,
            down_bias: of(Role::DownBias),
            shared_up: of(Role::SharedUp),
            shared_down: of(Role::SharedDown),
            shared_gate: of(Role::SharedGate),
        }
    }
}

impl crate::checkpoint::BlockParams {
    /// One parameter.
    pub fn get(&self, role: Role) -> Option<&Tensor<Cpu>> {
        match role {
            Role::Router => Some(&self.router),
            Role::RouterBias => self.router_bias.as_ref(),
            Role::SelectionBias => self.selection_bias.as_ref(),
            Role::Up => Some(&self.up),
            Role::UpBias => self.up_bias.as_ref(),
            Role::Down => Some(&self.down),
            Role::DownBias => self.down_bias.as_ref(),
            Role::SharedUp => self.shared_up.as_ref(),
            Role::SharedDown => self.shared_down.as_ref(),
            Role::SharedGate => self.shared_gate.as_ref(),
        }
    }

    /// The parameters that are there, by role.
    pub fn into_roles(self) -> impl Iterator<Item = (Role, Tensor<Cpu>)> {
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
        Role::ALL.into_iter().zip(all).filter_map(|(role, t)| Some((role, t?)))
    }

    /// Views for a layer.
    pub fn views(&self) -> Result<ParamViews<'_, Cpu>> {
        ParamViews::collect(|role| Ok(self.get(role).map(Tensor::view)))
    }
}
