//! Sharded weights whose shards are candle's variables.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::adapter::TypedSource;
use crate::comm::Communicator;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::etp::{Chain, ShardSource, WeightId};
use crate::tensor::TensorRef;

use super::device::{CandleDevice, copy_of, into_candle, with_views};
use super::error::framework;

/// A variable `[S, C]` as a rank's shard: a gather reads what the optimizer has left in it.
#[derive(Debug, Clone)]
pub struct VarShard<D: CandleDevice = Cpu> {
    device: D,
    shard: Tensor,
}

impl VarShard {
    /// Shares a variable on the CPU.
    pub fn new(var: &Var) -> Self {
        Self::on(&Cpu::new(), var)
    }
}

impl<D: CandleDevice> VarShard<D> {
    /// Shares a variable on candle's device of this one. A tensor that is no variable is a frozen shard.
    pub fn on(device: &D, shard: &Tensor) -> Self {
        Self { device: device.clone(), shard: shard.clone() }
    }

    pub(super) fn into_shard(self) -> Result<TypedSource<D>> {
        let mut dtype = None;
        self.read(&mut |shard| {
            dtype = Some(shard.dtype());
            Ok(())
        })?;
        let dtype = dtype.ok_or_else(|| crate::Error::invalid("VarShard", "shard", "a tensor", "none"))?;
        Ok(TypedSource { dtype, source: Arc::new(self) })
    }
}

impl<D: CandleDevice> ShardSource<D> for VarShard<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        with_views(&self.device, "VarShard", &[("shard", &self.shard)], |views| visit(views[0].borrow()))
    }
}

/// A variable that is a shard of a chain's weight.
#[derive(Debug, Clone)]
pub struct WeightVar {
    /// The weight.
    pub id: WeightId,
    /// The shard.
    pub var: Var,
}

/// Element type in which candle's optimizers want the gradients of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientType {
    /// The variable's: candle-nn's optimizers.
    InVariableType,
    /// As the chain has added them up, f32 for f32, bf16 and f16: [`AdamW`](super::AdamW), which takes them so.
    AsSummed,
}

/// [`Chain::finish`] into candle's gradients: each shard's gradient, where the optimizer looks for it. `vars` are all
/// shards of the chain that are trained, those of several modules in one call. `replicas` is none where the chain has a
/// communicator of its own ([`Chain::with_replicas`]), whose sums begin beside backward behind a
/// [`Chain::last_backward`].
///
/// # Errors
/// As [`Chain::finish`]; a weight with a gradient and without a variable among `vars`, or a variable of another shape than
/// its shard: on every rank, before any sum, and all call again.
pub fn finish_sharded<D: CandleDevice>(
    chain: &Chain<D>,
    replicas: Option<&mut dyn Communicator<D>>,
    vars: &[WeightVar],
    gradients: &mut GradStore,
    of: GradientType,
) -> Result<()> {
    const CALL: &str = "finish_sharded";
    let variable = |id: WeightId| vars.iter().find(|of| of.id == id);
    let checked = chain.weights_with_gradients().into_iter().try_for_each(|(id, name, dims)| match variable(id) {
        Some(of) => crate::Error::check_shape(CALL, &name, &dims, of.var.dims()),
        None => {
            let expected = "its variable, as one call takes all shards of a chain";
            Err(crate::Error::invalid(CALL, name, expected, "none of this weight"))
        }
    });
    if let Err(error) = checked {
        chain.refuse_to_finish(replicas, &error);
        return Err(error);
    }
    chain.finish(replicas, |id, gradient| {
        let Some(WeightVar { var, .. }) = variable(id) else { return Ok(()) };
        let summed = into_candle(copy_of(chain.device(), gradient)?, gradient.dims(), var.device())?;
        let gradient = match of {
            GradientType::InVariableType => summed.to_dtype(var.dtype()).map_err(framework(CALL))?,
            GradientType::AsSummed => summed,
        };
        gradients.insert(var, gradient);
        Ok(())
    })
}
