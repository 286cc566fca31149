//! The parameters of a layer by name, so that adapters can list and shape them without knowing what they are for.

use crate::config::{MoeConfig, SharedConfig};

/// One parameter of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// The router's weight, `[E, H]`.
    Router,
    /// Added to the router's logits, `[E]`.
    RouterBias,
    /// Added to the scores for choosing only, `[E]`; has no gradient.
    SelectionBias,
    /// Routed experts' first weights, `[L, G·I, H]`, gate rows first.
    Up,
    /// `[L, G·I]`.
    UpBias,
    /// Routed experts' second weights, `[L, H, I]`.
    Down,
    /// `[L, H]`.
    DownBias,
    /// The shared expert's first weight, `[G·S, H]`, S its inner size.
    SharedUp,
    /// `[G·S]`.
    SharedUpBias,
    /// The shared expert's second weight, `[H, S]`.
    SharedDown,
    /// `[H]`.
    SharedDownBias,
    /// The gate of the shared expert's output, `[1, H]`.
    SharedGate,
}

impl ParamKind {
    /// Every kind, in the order in which adapters list parameters.
    pub const ALL: [ParamKind; 12] = [
        ParamKind::Router,
        ParamKind::RouterBias,
        ParamKind::SelectionBias,
        ParamKind::Up,
        ParamKind::UpBias,
        ParamKind::Down,
        ParamKind::DownBias,
        ParamKind::SharedUp,
        ParamKind::SharedUpBias,
        ParamKind::SharedDown,
        ParamKind::SharedDownBias,
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
            ParamKind::SharedUpBias => "shared.up_bias",
            ParamKind::SharedDown => "shared.down",
            ParamKind::SharedDownBias => "shared.down_bias",
            ParamKind::SharedGate => "shared.gate",
        }
    }

    /// Sizes for `local` experts on this rank; `None` where the configuration has no such parameter.
    pub fn dims(self, config: &MoeConfig, local: usize) -> Option<Vec<usize>> {
        let (e, h, i, n) = (config.router.num_experts, config.hidden, config.intermediate, config.up_rows());
        let shared = config.shared;
        let shared_rows = |s: SharedConfig| config.activation.gate_factor().saturating_mul(s.intermediate);
        match self {
            ParamKind::Router => Some(vec![e, h]),
            ParamKind::RouterBias => config.router.logit_bias.then(|| vec![e]),
            ParamKind::SelectionBias => config.router.selection_bias.then(|| vec![e]),
            ParamKind::Up => Some(vec![local, n, h]),
            ParamKind::UpBias => config.expert_bias.then(|| vec![local, n]),
            ParamKind::Down => Some(vec![local, h, i]),
            ParamKind::DownBias => config.expert_bias.then(|| vec![local, h]),
            ParamKind::SharedUp => shared.map(|s| vec![shared_rows(s), h]),
            ParamKind::SharedUpBias => shared.filter(|s| s.bias).map(|s| vec![shared_rows(s)]),
            ParamKind::SharedDown => shared.map(|s| vec![h, s.intermediate]),
            ParamKind::SharedDownBias => shared.filter(|s| s.bias).map(|_| vec![h]),
            ParamKind::SharedGate => shared.filter(|s| s.gated).map(|_| vec![1, h]),
        }
    }

    /// Inputs that one output of this weight sums over; `None` for biases.
    pub fn fan_in(self, config: &MoeConfig) -> Option<usize> {
        match self {
            ParamKind::Router | ParamKind::Up | ParamKind::SharedUp | ParamKind::SharedGate => Some(config.hidden),
            ParamKind::Down => Some(config.intermediate),
            ParamKind::SharedDown => config.shared.map(|s| s.intermediate),
            ParamKind::RouterBias
            | ParamKind::SelectionBias
            | ParamKind::UpBias
            | ParamKind::DownBias
            | ParamKind::SharedUpBias
            | ParamKind::SharedDownBias => None,
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
