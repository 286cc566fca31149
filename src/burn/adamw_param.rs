//! Parameters of a module, as an optimizer is told of them.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use crate::error::Result;
use crate::optim::{ParamShard, ParamSpec};

use super::backend::{MoeBackend, core_dtype};

pub(super) const CALL: &str = "burn::AdamW";

/// A parameter of a module, as an optimizer is told of it.
#[derive(Debug, Clone)]
pub struct AdamWParam {
    name: String,
    id: ParamId,
    dtype: burn::tensor::DType,
    shard: ParamShard,
    group: usize,
}

impl AdamWParam {
    /// The trainable parameters of a module, each once, named by their paths (`moe.experts.up`), as ones that this rank
    /// has whole: the only rank, or all ranks hold them. What a layer has of its own,
    /// [`ExpertParallelMoE::place_shards`](super::ExpertParallelMoE::place_shards) puts right.
    pub fn of_module<B: AutodiffBackend + MoeBackend, M: Module<B>>(module: &M) -> Vec<Self> {
        let mut collect = CollectParams { path: Vec::new(), params: Vec::new() };
        module.visit(&mut collect);
        collect.params
    }

    /// The parameter is a part of one of these sizes; rows of padding may be behind it.
    pub fn with_shard(self, shard: ParamShard) -> Self {
        Self { shard, ..self }
    }

    /// Options are those of group `group`, 0 without this.
    pub fn in_group(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// The name: of its own among the optimizer's parameters, and that of its saved state.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameter's id.
    pub fn id(&self) -> ParamId {
        self.id
    }

    pub(super) fn set_shard(&mut self, shard: ParamShard) {
        self.shard = shard;
    }

    pub(super) fn spec(&self) -> Result<ParamSpec> {
        let dtype = core_dtype(CALL, &self.name, self.dtype)?;
        Ok(ParamSpec { name: self.name.clone(), shard: self.shard.clone(), dtype, group: self.group })
    }
}

/// Finds a module's trainable parameters.
struct CollectParams {
    path: Vec<String>,
    params: Vec<AdamWParam>,
}

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for CollectParams {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let known = self.params.iter().any(|other| other.id == param.id);
        if !known && param.is_require_grad() {
            let (name, id, dtype) = (self.path.join("."), param.id, param.dtype());
            let shard = ParamShard::whole(&param.dims());
            self.params.push(AdamWParam { name, id, dtype, shard, group: 0 });
        }
    }
}
