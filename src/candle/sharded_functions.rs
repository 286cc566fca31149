//! Computations with gathered weights, and their gradients.

use candle_core::{Result, Tensor, Var};

/// Gradients of x and of each weight.
pub type FunctionGradients = (Option<Tensor>, Vec<Tensor>);

/// A computation with whole weights, which are there while it runs: y of x, forward and backward. Whatever else it takes
/// (masks, positions) is its own. A closure `Fn(&Tensor, &[Tensor]) -> Result<Tensor>` is one.
pub trait ShardedFunction: Send + Sync {
    /// y. Nothing tracks gradients here.
    ///
    /// # Errors
    /// candle's.
    fn forward(&self, x: &Tensor, weights: &[Tensor]) -> Result<Tensor>;

    /// Gradients of x, where it is `wanted`, and of each weight, given y's. Without an implementation of its own,
    /// forward runs again, and candle's autograd goes back from there.
    ///
    /// # Errors
    /// candle's.
    fn backward(&self, x: &Tensor, weights: &[Tensor], gradient: &Tensor, wanted: bool) -> Result<FunctionGradients> {
        let x = if wanted { Var::from_tensor(x)?.into_inner() } else { x.clone() };
        let weights = weights.iter().map(|w| Ok(Var::from_tensor(w)?.into_inner())).collect::<Result<Vec<_>>>()?;
        let y = self.forward(&x, &weights)?;
        let mut gradients = (y * gradient)?.sum_all()?.backward()?;
        let mut of = |t: &Tensor| gradients.remove(t).map_or_else(|| t.zeros_like(), Ok);
        let of_weights = weights.iter().map(&mut of).collect::<Result<_>>()?;
        Ok((if wanted { Some(of(&x)?) } else { None }, of_weights))
    }
}

impl<F: Fn(&Tensor, &[Tensor]) -> Result<Tensor> + Send + Sync> ShardedFunction for F {
    fn forward(&self, x: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
        self(x, weights)
    }
}

/// y = x·Wᵀ, and + b where there are two weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearFunction;

/// x or a gradient as rows.
fn rows(t: &Tensor) -> Result<Tensor> {
    let width = t.dim(candle_core::D::Minus1)?;
    t.reshape(((), width))
}

impl ShardedFunction for LinearFunction {
    fn forward(&self, x: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        let y = rows(x)?.matmul(&weights[0].t()?)?;
        let y = if let Some(bias) = weights.get(1) { y.broadcast_add(bias)? } else { y };
        if let Some(width) = dims.last_mut() {
            *width = weights[0].dim(0)?;
        }
        y.reshape(dims)
    }

    fn backward(&self, x: &Tensor, weights: &[Tensor], gradient: &Tensor, wanted: bool) -> Result<FunctionGradients> {
        let (flat, gradient) = (rows(x)?, rows(gradient)?);
        let d_x = if wanted { Some(gradient.matmul(&weights[0])?.reshape(x.dims())?) } else { None };
        let mut of_weights = vec![gradient.t()?.matmul(&flat)?];
        if weights.len() > 1 {
            of_weights.push(gradient.sum(0)?);
        }
        Ok((d_x, of_weights))
    }
}

/// Rows of W by ids.
#[derive(Debug, Clone, Copy)]
pub(super) struct EmbeddingFunction;

impl ShardedFunction for EmbeddingFunction {
    fn forward(&self, ids: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
        let mut dims = ids.dims().to_vec();
        dims.push(weights[0].dim(1)?);
        weights[0].index_select(&ids.flatten_all()?, 0)?.reshape(dims)
    }

    fn backward(&self, ids: &Tensor, weights: &[Tensor], gradient: &Tensor, _: bool) -> Result<FunctionGradients> {
        let gradient = weights[0].zeros_like()?.index_add(&ids.flatten_all()?, &rows(gradient)?, 0)?;
        Ok((None, vec![gradient]))
    }
}
