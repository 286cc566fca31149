//! Sharded weights whose shards are candle's variables.

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};

use crate::comm::Communicator;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::Result;
use crate::etp::{Chain, ShardSource, WeightId};
use crate::tensor::TensorRef;

use super::host::{copy_of, framework, into_candle, with_views};

/// A variable `[S, C]` as a rank's shard: a gather reads what the optimiser has left in it.
#[derive(Debug, Clone)]
pub struct VarShard(Tensor);

impl VarShard {
    /// Shares the variable.
    pub fn new(var: &Var) -> Self {
        Self::of(var)
    }

    /// Of a tensor that may be no variable: frozen.
    pub(super) fn of(shard: &Tensor) -> Self {
        Self(shard.clone())
    }

    pub(super) fn dtype(&self) -> Result<DType> {
        let mut dtype = None;
        self.read(&mut |shard| {
            dtype = Some(shard.dtype());
            Ok(())
        })?;
        dtype.ok_or_else(|| crate::Error::invalid("VarShard", "shard", "a tensor", "none"))
    }
}

impl ShardSource<Cpu> for VarShard {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, Cpu>) -> Result<()>) -> Result<()> {
        with_views(&Cpu::new(), "VarShard", &[("shard", &self.0)], |views| visit(views[0].borrow()))
    }
}

/// [`Chain::finish`] into candle's gradients: each shard's gradient, in its variable's type, where the optimiser looks
/// for it. Weights without a variable in `vars` are frozen: their gradients are dropped.
///
/// # Errors
/// As [`Chain::finish`]; a variable of another shape than its shard.
pub fn finish_sharded(
    chain: &Chain<Cpu>,
    replicas: Option<&mut dyn Communicator<Cpu>>,
    vars: &[(WeightId, Var)],
    gradients: &mut GradStore,
) -> Result<()> {
    const CALL: &str = "finish_sharded";
    chain.finish(replicas, |id, gradient| {
        let Some((_, var)) = vars.iter().find(|(other, _)| *other == id) else { return Ok(()) };
        crate::Error::check_shape(CALL, "variable", gradient.dims(), var.dims())?;
        let own = into_candle(copy_of(&Cpu::new(), gradient)?, gradient.dims(), &Device::Cpu)?;
        let own = own.to_dtype(var.dtype()).map_err(framework(CALL))?;
        gradients.insert(var, own);
        Ok(())
    })
}
