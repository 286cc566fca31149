//! Configurations in one expression: every setter takes the value of the field of its name.
//!
//! ```
//! use moebius::MoeConfig;
//! use moebius::config::{AuxConfig, Score, SharedConfig};
//!
//! let config = MoeConfig::new(64, 32, 8, 2) // hidden, intermediate, experts, top-k
//!     .with_router(|router| router.with_score(Score::Sigmoid).with_selection_bias(true))
//!     .with_shared(SharedConfig { intermediate: 32, gated: false, bias: false })
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Serialize;
    use serde_json::Value;

    use super::super::{CapacityOrder, GroupScore};
    use super::*;

    fn fields(config: &impl Serialize) -> serde_json::Map<String, Value> {
        match serde_json::to_value(config) {
            Ok(Value::Object(fields)) => fields,
            other => panic!("{other:?}"),
        }
    }

    /// Every setter puts its value into the field of its name and changes no other; all fields but those that `new`
    /// takes have one.
    fn each_sets_its_own<C: Serialize>(before: &C, taken: &[&str], set: Vec<(&str, C, Value)>) {
        let before = fields(before);
        let mut named: BTreeSet<&str> = taken.iter().copied().collect();
        for (name, after, value) in set {
            let mut expected = before.clone();
            let old = expected.insert(name.to_string(), value.clone());
            assert!(old.is_some_and(|old| old != value), "{name}: no field of this name, or {value} is its default");
            assert_eq!(fields(&after), expected, "{name}");
            assert!(named.insert(name), "{name} twice");
        }
        assert_eq!(named, before.keys().map(String::as_str).collect(), "fields and setters");
    }

    /// A setter's field, its result, and what it was given.
    macro_rules! set {
        ($config:ident, $field:ident, $with:ident, $value:expr) => {
            (stringify!($field), $config.clone().$with($value), serde_json::to_value($value).unwrap())
        };
    }

    #[test]
    fn setters_of_the_layer() {
        let c = MoeConfig::new(64, 32, 8, 2);
        let router = c.router.clone().with_scale(2.5);
        let set = vec![
            ("router", c.clone().with_router(|router| router.with_scale(2.5)), serde_json::to_value(router).unwrap()),
            set!(c, activation, with_activation, Activation::Relu2),
            set!(c, weight_at, with_weight_at, WeightAt::Input),
            set!(c, expert_bias, with_expert_bias, true),
            set!(c, shared, with_shared, SharedConfig { intermediate: 16, gated: true, bias: false }),
            set!(c, aux, with_aux, AuxConfig::default().with_z(0.5)),
            set!(c, recompute, with_recompute, true),
            set!(c, payload, with_payload, Payload::Mxfp8),
        ];
        each_sets_its_own(&c, &["hidden", "intermediate"], set);
        let shared = c.clone().with_shared(SharedConfig { intermediate: 16, gated: true, bias: false });
        assert_eq!(shared.with_shared(None), c);
    }

    #[test]
    fn setters_of_the_router() {
        let c = RouterConfig::new(8, 2);
        let groups = GroupLimit { groups: 4, keep: 2, rank_by: GroupScore::Max };
        let capacity = ExpertCapacity { factor: 1.5, order: CapacityOrder::Probability, renormalize: true };
        let set = vec![
            set!(c, score, with_score, Score::Sigmoid),
            set!(c, logit_bias, with_logit_bias, true),
            set!(c, selection_bias, with_selection_bias, true),
            set!(c, groups, with_groups, groups),
            set!(c, renorm, with_renorm, Renorm { p: 2.0, epsilon: 0.25, floor: 0.125 }),
            set!(c, scale, with_scale, 2.5),
            set!(c, jitter, with_jitter, 0.25),
            set!(c, expert_capacity, with_expert_capacity, capacity),
        ];
        each_sets_its_own(&c, &["num_experts", "top_k"], set);
        assert_eq!(c.clone().with_groups(groups).with_groups(None), c);
        assert_eq!(c.clone().with_expert_capacity(capacity).with_expert_capacity(None), c);
        assert_eq!(c.with_renorm(None).renorm, None);
    }

    #[test]
    fn setters_of_the_losses() {
        let c = AuxConfig::default();
        let set = vec![
            set!(c, balance, with_balance, 0.25),
            set!(c, balance_kind, with_balance_kind, BalanceKind::HuggingFace),
            set!(c, z, with_z, 0.5),
            set!(c, over_ranks, with_over_ranks, true),
        ];
        each_sets_its_own(&c, &[], set);
    }
}
