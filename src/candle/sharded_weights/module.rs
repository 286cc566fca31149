//! A computation with sharded weights, and its place in candle's graph.

use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Module, Result, Shape, Tensor};

use crate::cpu::Cpu;
use crate::error::Error;

use crate::candle::device::CandleDevice;
use crate::candle::precomputed::Precomputed;
use crate::candle::sharded_functions::{LinearFunction, ShardedFunction};

use super::tensor::ShardedTensor;

/// A computation with weights that are sharded, as a candle module: [`ShardedWeights`](super::ShardedWeights) makes it.
#[derive(Clone)]
pub struct ShardedModule<D: CandleDevice = Cpu> {
    pub(super) weights: Arc<Vec<Arc<ShardedTensor<D>>>>,
    pub(super) function: Arc<dyn ShardedFunction>,
}

impl<D: CandleDevice> Debug for ShardedModule<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.weights.iter().map(|weight| weight.name.as_str()).collect();
        write!(f, "ShardedModule{names:?}")
    }
}

impl<D: CandleDevice> ShardedModule<D> {
    /// Another computation with the same weights, which are gathered once more for it.
    pub fn with(&self, function: impl ShardedFunction + 'static) -> Self {
        Self { weights: Arc::clone(&self.weights), function: Arc::new(function) }
    }

    /// The output layer that shares an embedding's weight: y = x·Wᵀ.
    pub fn tied_output(&self) -> Self {
        self.with(LinearFunction)
    }

    /// The whole weights of a backward: the chain goes back the way that forward came.
    fn gather_back(&self) -> crate::Result<Vec<Tensor>> {
        let whole = self.weights.iter().rev().map(|weight| weight.gather(true));
        let mut whole = whole.collect::<crate::Result<Vec<_>>>()?;
        whole.reverse();
        Ok(whole)
    }

    fn gradient(&self, x: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let whole = self.gather_back()?;
        let gradient = gradient.contiguous()?;
        let (d_x, of_weights) = self.function.backward(&x.detach(), &whole, &gradient, x.track_op())?;
        drop(whole);
        if of_weights.len() != self.weights.len() {
            let expected = format!("one of each of {} weights", self.weights.len());
            return Err(Error::invalid("ShardedFunction::backward", "gradients", expected, of_weights.len()).into());
        }
        match &d_x {
            Some(d_x) => Error::check_shape("ShardedFunction::backward", "gradient of x", x.dims(), d_x.dims())?,
            None if x.track_op() => {
                let expected = "one, as x tracks gradients";
                return Err(Error::invalid("ShardedFunction::backward", "gradient of x", expected, "none").into());
            }
            None => {}
        }
        for (weight, gradient) in self.weights.iter().zip(of_weights).rev() {
            if weight.shard.is_variable() {
                weight.submit(&gradient)?;
            }
        }
        Ok(d_x)
    }
}

impl<D: CandleDevice> Module for ShardedModule<D> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let trained = self.weights.iter().find(|weight| weight.shard.is_variable());
        let backward = trained.is_some() || x.track_op();
        let whole = self.weights.iter().map(|weight| weight.gather(backward)).collect::<crate::Result<Vec<_>>>()?;
        let y = self.function.forward(&x.detach(), &whole)?;
        drop(whole);
        if y.track_op() {
            let expected = "one of x and the weights alone";
            let found = "one that another variable's gradient would have to go through";
            return Err(Error::invalid("ShardedModule::forward", "function", expected, found).into());
        }
        let y = y.detach();
        // candle tracks what hangs from a variable.
        let from = match trained {
            Some(weight) => &weight.shard,
            None if x.track_op() => x,
            None => return Ok(y),
        };
        x.apply_op2(from, ShardedFunctionOp { module: self.clone(), value: Precomputed::copy_of(&y)? })
    }
}

/// The computation's place in candle's graph: its inputs are x and a variable that makes candle track it.
struct ShardedFunctionOp<D: CandleDevice> {
    module: ShardedModule<D>,
    value: Precomputed,
}

impl<D: CandleDevice> CustomOp2 for ShardedFunctionOp<D> {
    fn name(&self) -> &'static str {
        "moebius-sharded"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.value.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.value.on_cuda()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.module.gradient(x, gradient)?.filter(|_| x.track_op()), None))
    }
}
