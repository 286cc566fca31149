//! Computations with gathered dense weights on a back end's memory, and their gradients.

use std::sync::Arc;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive};

use crate::adapter::FrameworkDevice;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::etp::Chain;
use crate::kernels::Kernels;
use crate::weights::WeightSource;

use super::backend::{Named, NativeMemory, ResultSpec, between, core_dtype};
use super::dense_call::{DenseCall, DenseFunction, DenseInput, DenseWeight};

const CALL: &str = "ShardedDense";

/// Rows or ids of a back end.
pub(super) type Input<B> = DenseInput<FloatTensor<B>, IntTensor<B>>;

fn chain<B: NativeMemory>(call: &DenseCall) -> Result<&Arc<Chain<B::Core>>> {
    let other = || Error::invalid(CALL, "chain", "one of the back end's device", "another's");
    B::Core::downcast(&call.chain).ok_or_else(other)
}

/// A whole weight (collective), where `like` lies.
fn gather<B: NativeMemory>(
    call: &DenseCall,
    weight: &DenseWeight,
    like: &FloatTensor<B>,
    backward: bool,
) -> Result<FloatTensor<B>> {
    let chain = chain::<B>(call)?;
    let (core, source) = (chain.device(), chain.source(weight.id)?.with_backward(backward));
    let dtype = core_dtype(CALL, &weight.name, like.dtype())?;
    let mut whole = B::output(core, like, ResultSpec { dtype, dims: &weight.dims })?;
    between::<B, _>(
        core,
        |_| (),
        || {
            let guard = source.acquire()?;
            core.wait(guard.ready.as_ref())?;
            core.copy(guard.tensor()?.data(), B::view_mut(&mut whole)?.into_data())
        },
    )?;
    B::float(whole)
}

/// Hands a whole weight's gradient in.
fn submit<B: NativeMemory>(call: &DenseCall, weight: &DenseWeight, gradient: FloatTensor<B>) -> Result<()> {
    let (chain, gradient) = (chain::<B>(call)?, B::contiguous(gradient));
    let core = chain.device();
    let view = B::view(core, Named { name: &weight.name, tensor: &gradient })?;
    between::<B, _>(
        core,
        |_| (),
        || {
            Error::check_shape(CALL, &weight.name, &weight.dims, view.dims())?;
            let mut buffer = chain.gradient_buffer(weight.id)?;
            let into = buffer.view_mut()?;
            Error::check_dtype(CALL, &weight.name, into.dtype(), view.dtype())?;
            core.copy(view.data(), into.into_data())?;
            chain.submit(buffer)
        },
    )
}

/// Refuses rows of another width than the weights'.
fn check<B: NativeMemory>(call: &DenseCall, input: &Input<B>) -> Result<()> {
    let DenseInput::Rows(x) = input else { return Ok(()) };
    let (dims, width) = (x.shape().to_vec(), call.weights.first().and_then(|weight| weight.dims.last()));
    match (&dims[..], width) {
        ([_, .., own], Some(width)) if own == width => Ok(()),
        (_, width) => {
            let expected = format!("two dimensions or more, the last of {}", width.copied().unwrap_or(0));
            Err(Error::invalid(CALL, "x", expected, format!("{dims:?}")))
        }
    }
}

/// Rows of any sizes as a matrix.
fn matrix<B: NativeMemory>(rows: &FloatTensor<B>, width: usize) -> Tensor<B, 2> {
    let count = rows.shape().num_elements().checked_div(width).unwrap_or(0);
    tensor(B::float_reshape(rows.clone(), Shape::new([count, width])))
}

/// y of an input and this rank's `shards`; `backward`: one follows.
pub(super) fn run_forward<B: NativeMemory>(
    call: &DenseCall,
    input: &Input<B>,
    shards: &[FloatTensor<B>],
    backward: bool,
) -> Result<FloatTensor<B>> {
    check::<B>(call, input)?;
    let whole = call.weights.iter().zip(shards).map(|(weight, like)| gather::<B>(call, weight, like, backward));
    let whole = whole.collect::<Result<Vec<_>>>()?;
    let (first, second) = parts(call, whole)?;
    match (call.function, input) {
        (DenseFunction::Linear, DenseInput::Rows(x)) => {
            Ok(B::linear(x.clone(), B::float_swap_dims(first, 0, 1), second))
        }
        (DenseFunction::Embedding, DenseInput::Ids(ids)) => Ok(B::embedding(first, ids.clone())),
        (DenseFunction::RmsNorm { epsilon }, DenseInput::Rows(x)) => {
            // As burn's module computes it.
            let (shape, gamma) = (x.shape(), tensor::<B, 1>(first));
            let x = matrix::<B>(x, gamma.dims()[0]);
            let dtype = x.dtype();
            let scale = (x.clone().cast(DType::F32).square().mean_dim(1) + epsilon).sqrt();
            Ok(B::float_reshape(primitive((x / scale.cast(dtype)) * gamma.unsqueeze()), shape))
        }
        _ => Err(unfit()),
    }
}

/// Who wants gradients.
#[derive(Debug, Clone)]
pub(super) struct DenseGradientMask {
    pub(super) x: bool,
    /// Of each weight.
    pub(super) weights: Vec<bool>,
}

/// The gradient of x, where it is wanted; those of the weights go to the chain. Weights are gathered again, the way back.
pub(super) fn run_backward<B: NativeMemory>(
    call: &DenseCall,
    input: &Input<B>,
    shards: &[FloatTensor<B>],
    gradient: FloatTensor<B>,
    wanted: &DenseGradientMask,
) -> Result<Option<FloatTensor<B>>> {
    let back = call.weights.iter().zip(shards).rev().map(|(weight, like)| gather::<B>(call, weight, like, true));
    let mut whole = back.collect::<Result<Vec<_>>>()?;
    whole.reverse();
    let (first, _) = parts(call, whole)?;
    let wants = |at: usize| wanted.weights.get(at).copied().unwrap_or(false);
    let (d_x, of_first, of_second) = match (call.function, input) {
        (DenseFunction::Linear, DenseInput::Rows(x)) => (
            wanted.x.then(|| B::linear_x_backward(B::float_swap_dims(first, 0, 1), gradient.clone())),
            wants(0).then(|| B::float_swap_dims(B::linear_weight_backward(x.clone(), gradient.clone()), 0, 1)),
            wants(1).then(|| B::linear_bias_backward(gradient)),
        ),
        (DenseFunction::Embedding, DenseInput::Ids(ids)) => {
            (None, wants(0).then(|| B::embedding_backward(first, gradient, ids.clone())), None)
        }
        (DenseFunction::RmsNorm { epsilon }, DenseInput::Rows(x)) => {
            let (shape, gamma) = (x.shape(), tensor::<B, 1>(first));
            let [width] = gamma.dims();
            let (x, gradient) = (matrix::<B>(x, width), matrix::<B>(&gradient, width));
            let dtype = x.dtype();
            let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
            let (x, gradient, gamma) = (x.cast(wide), gradient.cast(wide), gamma.cast(wide));
            let inverse = (x.clone().square().mean_dim(1) + epsilon).sqrt().recip();
            let rows = x * inverse.clone();
            let of_gamma = wants(0).then(|| (gradient.clone() * rows.clone()).sum_dim(0).reshape([width]));
            let d_x = wanted.x.then(|| {
                let d_rows = gradient * gamma.unsqueeze();
                let along = (d_rows.clone() * rows.clone()).mean_dim(1);
                (d_rows - rows * along) * inverse
            });
            let own = |t: Tensor<B, 2>| B::float_reshape(primitive(t.cast(dtype)), shape.clone());
            (d_x.map(own), of_gamma.map(|t: Tensor<B, 1>| primitive(t.cast(dtype))), None)
        }
        _ => return Err(unfit()),
    };
    for (weight, gradient) in call.weights.iter().zip([of_first, of_second]).rev() {
        if let Some(gradient) = gradient {
            submit::<B>(call, weight, gradient)?;
        }
    }
    Ok(d_x)
}

fn parts<T>(call: &DenseCall, whole: Vec<T>) -> Result<(T, Option<T>)> {
    let mut whole = whole.into_iter();
    let missing = || Error::invalid(CALL, "weights", "one at least", call.weights.len());
    Ok((whole.next().ok_or_else(missing)?, whole.next()))
}

fn unfit() -> Error {
    Error::invalid(CALL, "input", "ids for an embedding, rows for all else", "the other")
}

fn tensor<B: NativeMemory, const D: usize>(native: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(native))
}

fn primitive<B: NativeMemory, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}
