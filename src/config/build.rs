//! Configurations in one expression: every setter takes the value of the field of its name.
//!
//! ```
//! use moebius::MoeConfig;
//! use moebius::config::{AuxConfig, Score, SharedConfig};
//!
//! let config = MoeConfig::new(64, 32, 8, 2) // hidden, intermediate, experts, top-k
//!     .with_router(|router| router.with_score(Score::Sigmoid).with_selection_bias(true))
//!     .with_shared(SharedConfig { intermediate: 32, gated: false })
//!     .with_aux(AuxConfig::default().with_balance(0.01).with_z(0.001));
//! config.validate()?;
//! # Ok::<(), moebius::Error>(())
//! ```

use super::{
    Activation, AuxConfig, BalanceKind, ExpertCapacity, GroupLimit, MoeConfig, Payload, Renorm, RouterConfig, Score,
    SharedConfig, WeightAt,
};

impl MoeConfig {
    /// Changes [`router`](Self::router).
    pub fn with_router(mut self, change: impl FnOnce(RouterConfig) -> RouterConfig) -> Self {
        self.router = change(self.router);
        self
    }

    /// Sets [`activation`](Self::activation).
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// Sets [`weight_at`](Self::weight_at).
    pub fn with_weight_at(self, weight_at: WeightAt) -> Self {
        Self { weight_at, ..self }
    }

    /// Sets [`expert_bias`](Self::expert_bias).
    pub fn with_expert_bias(self, expert_bias: bool) -> Self {
        Self { expert_bias, ..self }
    }

    /// Sets [`shared`](Self::shared); `None` takes the shared expert away.
    pub fn with_shared(self, shared: impl Into<Option<SharedConfig>>) -> Self {
        Self { shared: shared.into(), ..self }
    }

    /// Sets [`aux`](Self::aux).
    pub fn with_aux(self, aux: AuxConfig) -> Self {
        Self { aux, ..self }
    }

    /// Sets [`recompute`](Self::recompute).
    pub fn with_recompute(self, recompute: bool) -> Self {
        Self { recompute, ..self }
    }

    /// Sets [`payload`](Self::payload).
    pub fn with_payload(self, payload: Payload) -> Self {
        Self { payload, ..self }
    }
}

impl RouterConfig {
    /// Sets [`score`](Self::score).
    pub fn with_score(self, score: Score) -> Self {
        Self { score, ..self }
    }

    /// Sets [`logit_bias`](Self::logit_bias).
    pub fn with_logit_bias(self, logit_bias: bool) -> Self {
        Self { logit_bias, ..self }
    }

    /// Sets [`selection_bias`](Self::selection_bias).
    pub fn with_selection_bias(self, selection_bias: bool) -> Self {
        Self { selection_bias, ..self }
    }

    /// Sets [`groups`](Self::groups); `None` chooses among all experts.
    pub fn with_groups(self, groups: impl Into<Option<GroupLimit>>) -> Self {
        Self { groups: groups.into(), ..self }
    }

    /// Sets [`renorm`](Self::renorm); `None` leaves the weights as they are.
    pub fn with_renorm(self, renorm: impl Into<Option<Renorm>>) -> Self {
        Self { renorm: renorm.into(), ..self }
    }

    /// Sets [`scale`](Self::scale).
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Sets [`jitter`](Self::jitter).
    pub fn with_jitter(self, jitter: f64) -> Self {
        Self { jitter, ..self }
    }

    /// Sets [`expert_capacity`](Self::expert_capacity); `None` drops nothing.
    pub fn with_expert_capacity(self, capacity: impl Into<Option<ExpertCapacity>>) -> Self {
        Self { expert_capacity: capacity.into(), ..self }
    }
}

impl AuxConfig {
    /// Sets the coefficient [`balance`](Self::balance).
    pub fn with_balance(self, balance: f64) -> Self {
        Self { balance, ..self }
    }

    /// Sets [`balance_kind`](Self::balance_kind).
    pub fn with_balance_kind(self, balance_kind: BalanceKind) -> Self {
        Self { balance_kind, ..self }
    }

    /// Sets the coefficient [`z`](Self::z).
    pub fn with_z(self, z: f64) -> Self {
        Self { z, ..self }
    }

    /// Sets [`over_ranks`](Self::over_ranks).
    pub fn with_over_ranks(self, over_ranks: bool) -> Self {
        Self { over_ranks, ..self }
    }
}
