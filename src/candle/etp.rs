//! Sharded weights whose shards are candle's variables.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::comm::Communicator;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::Result;
use crate::etp::{Chain, ShardSource, WeightId};
use crate::tensor::TensorRef;

use super::error::framework;
use super::host::{Host, copy_of, into_candle, with_views};

/// A variable `[S, C]` as a rank's shard: a gather reads what the optimizer has left in it.
#[derive(Debug, Clone)]
pub struct VarShard<D: Host = Cpu> {
    device: D,
    shard: Tensor,
}

impl VarShard {
    /// Shares a variable on the CPU.
    pub fn new(var: &Var) -> Self {
        Self::on(&Cpu::new(), var)
    }
}

impl<D: Host> VarShard<D> {
    /// Shares a variable on candle's device of this one. A tensor that is no variable is a frozen shard.
    pub fn on(device: &D, shard: &Tensor) -> Self {
        Self { device: device.clone(), shard: shard.clone() }
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

impl<D: Host> ShardSource<D> for VarShard<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        with_views(&self.device, "VarShard", &[("shard", &self.shard)], |views| visit(views[0].borrow()))
    }
}

/// [`Chain::finish`] into candle's gradients: each shard's gradient, in its variable's type, where the optimizer looks
/// for it. Weights without a variable in `vars` are frozen: their gradients are dropped.
///
/// # Errors
/// As [`Chain::finish`]; a variable of another shape than its shard.
pub fn finish_sharded<D: Host>(
    chain: &Chain<D>,
    replicas: Option<&mut dyn Communicator<D>>,
    vars: &[(WeightId, Var)],
    gradients: &mut GradStore,
) -> Result<()> {
    finish(chain, replicas, vars, &mut |var, gradient| {
        let gradient = gradient.to_dtype(var.dtype()).map_err(framework(CALL))?;
        gradients.insert(var, gradient);
        Ok(())
    })
}

/// [`finish_sharded`] with gradients as the chain has added them up, in f32 for f32, bf16 and f16: for
/// [`AdamW`](super::AdamW), which takes them so. candle-nn's optimizers want the variable's type.
///
/// # Errors
/// As [`finish_sharded`].
pub fn finish_sharded_in_f32<D: Host>(
    chain: &Chain<D>,
    replicas: Option<&mut dyn Communicator<D>>,
    vars: &[(WeightId, Var)],
    gradients: &mut GradStore,
) -> Result<()> {
    finish(chain, replicas, vars, &mut |var, gradient| {
        gradients.insert(var, gradient);
        Ok(())
    })
}

const CALL: &str = "finish_sharded";

/// Gives each variable its gradient, in the accumulator type.
fn finish<D: Host>(
    chain: &Chain<D>,
    replicas: Option<&mut dyn Communicator<D>>,
    vars: &[(WeightId, Var)],
    give: &mut dyn FnMut(&Var, Tensor) -> Result<()>,
) -> Result<()> {
    chain.finish(replicas, |id, gradient| {
        let Some((_, var)) = vars.iter().find(|(other, _)| *other == id) else { return Ok(()) };
        crate::Error::check_shape(CALL, "variable", gradient.dims(), var.dims())?;
        give(var, into_candle(copy_of(chain.device(), gradient)?, gradient.dims(), var.device())?)
    })
}
