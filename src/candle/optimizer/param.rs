//! The parameters of an optimizer: variables by name, with what this rank holds of each.

use std::sync::PoisonError;

use candle_core::{Result, Var};
use candle_nn::VarMap;

use crate::error::Error;
use crate::layer::ParamKind;
use crate::optim::{ParamShard, ParamSpec};

use crate::candle::module::ExpertParallelMoE;

pub(super) const CALL: &str = "candle::AdamW";

/// A variable, as an optimizer is told of it.
#[derive(Debug, Clone)]
pub struct AdamWParam {
    pub(super) name: String,
    pub(super) var: Var,
    shard: ParamShard,
    group: usize,
}

impl AdamWParam {
    /// A variable that this rank has whole: the only rank, or all ranks hold it. The name is its own among the
    /// optimizer's parameters, and that of its saved state.
    pub fn new(name: impl Into<String>, var: &Var) -> Self {
        Self { name: name.into(), var: var.clone(), shard: ParamShard::whole(var.dims()), group: 0 }
    }

    /// The variables of a map, by its names and in their order, as ones that this rank has whole; those of other than
    /// floating types are left out. Not for the experts of a layer over several ranks, of which each rank has others: a
    /// norm would count one rank's, and a save is refused. [`ExpertParallelMoE::optimizer_params`] has these.
    pub fn of_var_map(vars: &VarMap) -> Vec<Self> {
        let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let of_float = vars.iter().filter(|(_, var)| var.dtype().is_float());
        let mut params: Vec<Self> = of_float.map(|(name, var)| Self::new(name, var)).collect();
        params.sort_by(|a, b| a.name.cmp(&b.name));
        params
    }

    /// The variable holds a part of the parameter; rows of padding may be behind it.
    pub fn with_shard(self, shard: ParamShard) -> Self {
        Self { shard, ..self }
    }

    /// Options are those of group `group`, 0 without this.
    pub fn in_group(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The variable.
    pub fn var(&self) -> &Var {
        &self.var
    }

    pub(super) fn spec(&self) -> Result<ParamSpec> {
        use candle_core::DType as Theirs;
        let dtype = match self.var.dtype() {
            Theirs::F32 => crate::DType::F32,
            Theirs::F16 => crate::DType::F16,
            Theirs::BF16 => crate::DType::BF16,
            other => {
                let name = format!("parameter {}", self.name);
                return Err(Error::invalid(CALL, name, "f32, f16 or bf16", other.as_str()).into());
            }
        };
        Ok(ParamSpec { name: self.name.clone(), shard: self.shard.clone(), dtype, group: self.group })
    }
}

impl ExpertParallelMoE {
    /// The trainable parameters for [`AdamW::over_ranks`](super::AdamW::over_ranks), named `{prefix}.router.weight`,
    /// `{prefix}.experts.up`, …: experts are this rank's part of all experts, and shards their part of these. Router and
    /// shared expert of [`all_sharded`](Self::all_sharded) are among
    /// [`ShardedWeights::optimizer_params`](crate::candle::ShardedWeights::optimizer_params).
    ///
    /// # Errors
    /// A parameter that is computed, a cast for instance: the variables that it is computed of are to be named one by one.
    pub fn optimizer_params(&self, prefix: &str) -> Result<Vec<AdamWParam>> {
        let elsewhere = |kind: ParamKind| kind.is_replicated() && self.is_shard(kind);
        let params = self.trainable().filter(|(kind, _)| !elsewhere(*kind)).map(|(kind, t)| {
            let name = if prefix.is_empty() { kind.name().to_string() } else { format!("{prefix}.{}", kind.name()) };
            if !t.is_variable() {
                let expected = "a variable, or variables of its own given as `AdamWParam`s";
                let error = Error::invalid("optimizer_params", name, expected, "a computed parameter");
                return Err(error.into());
            }
            Ok(AdamWParam::new(name, &Var::from_tensor(t)?).with_shard(self.param_shard(kind)?))
        });
        params.collect()
    }
}
