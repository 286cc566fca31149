//! Checks of a movement's rows, weights and gradients, before anything is sent.

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{TensorMut, TensorRef};

use super::{DispatchGrads, DispatchInputs, DispatchOutputs, Handle};

pub(crate) fn check_float<D: Kernels>(call: &'static str, name: &str, t: TensorRef<'_, D>) -> Result<()> {
    match t.dtype().is_float() {
        true => Ok(()),
        false => Err(Error::invalid(call, format!("tensor {name}"), "a floating dtype", t.dtype())),
    }
}

/// `[T, H]` tokens, `[T, K]` weights, `[T, bytes]` scales. Opaque rows and scales travel as 16-byte words on devices,
/// so they must be whole ones here too; floating rows may have any size.
pub(crate) fn check_inputs<D: Kernels>(
    call: &'static str,
    handle: &Handle<D>,
    inputs: &DispatchInputs<'_, D>,
) -> Result<()> {
    let words = |name: &str, t: TensorRef<'_, D>| {
        let row = t.row_bytes();
        match row > 0 && row.is_multiple_of(16) {
            true => Ok(()),
            false => Err(Error::invalid(call, format!("tensor {name}"), "rows of a multiple of 16 bytes", row)),
        }
    };
    let tokens = inputs.tokens;
    match tokens.dims() {
        [t, _] if *t == handle.tokens() => {}
        dims => {
            let expected = format!("[{}, H]", handle.tokens());
            return Err(Error::invalid(call, "tensor tokens", expected, format!("{dims:?}")));
        }
    }
    if tokens.dtype() == crate::DType::U8 {
        words("tokens", tokens)?;
    } else {
        check_float(call, "tokens", tokens)?;
    }
    if let Some(w) = &inputs.weights {
        Error::check_dtype(call, "weights", tokens.dtype().accumulator(), w.dtype())?;
        Error::check_shape(call, "weights", &[handle.tokens(), handle.spec().top_k], w.dims())?;
    }
    if let Some(s) = &inputs.scales {
        Error::check_dtype(call, "scales", crate::DType::U8, s.dtype())?;
        Error::check_shape(call, "scales", &[handle.tokens(), s.row_bytes()], s.dims())?;
        words("scales", *s)?;
    }
    Ok(())
}

pub(crate) fn check_outputs<D: Kernels>(
    call: &'static str,
    handle: &Handle<D>,
    inputs: &DispatchInputs<'_, D>,
    outputs: &DispatchOutputs<'_, D>,
) -> Result<()> {
    let n = handle.rows();
    let tokens = &inputs.tokens;
    Error::check_dtype(call, "recv tokens", tokens.dtype(), outputs.tokens.dtype())?;
    let width = tokens.row_bytes() / tokens.dtype().size();
    Error::check_shape(call, "recv tokens", &[n, width], outputs.tokens.dims())?;
    if let Some(out) = &outputs.weights {
        let given = inputs.weights.as_ref().ok_or_else(|| Error::invalid(call, "tensor weights", "weights", "none"))?;
        Error::check_dtype(call, "recv weights", given.dtype(), out.dtype())?;
        Error::check_shape(call, "recv weights", &[n], out.dims())?;
    }
    if let Some(out) = &outputs.scales {
        let given = inputs.scales.as_ref().ok_or_else(|| Error::invalid(call, "tensor scales", "scales", "none"))?;
        Error::check_dtype(call, "recv scales", given.dtype(), out.dtype())?;
        Error::check_shape(call, "recv scales", &[n, given.row_bytes()], out.dims())?;
    }
    Ok(())
}

/// A floating `[N, H]`.
pub(crate) fn check_slots<D: Kernels>(
    call: &'static str,
    name: &str,
    handle: &Handle<D>,
    t: TensorRef<'_, D>,
) -> Result<()> {
    check_float(call, name, t)?;
    match t.dims() {
        [n, _] if *n == handle.rows() => Ok(()),
        dims => {
            let expected = format!("[{}, H]", handle.rows());
            Err(Error::invalid(call, format!("tensor {name}"), expected, format!("{dims:?}")))
        }
    }
}

/// `[T, H]` of the slots' H and dtype.
pub(crate) fn check_tokens<D: Kernels>(
    call: &'static str,
    name: &str,
    handle: &Handle<D>,
    slots: TensorRef<'_, D>,
    t: &TensorMut<'_, D>,
) -> Result<()> {
    Error::check_dtype(call, name, slots.dtype(), t.dtype())?;
    let width = slots.row_bytes() / slots.dtype().size();
    Error::check_shape(call, name, &[handle.tokens(), width], t.dims())
}

pub(crate) fn check_grads<D: Kernels>(
    call: &'static str,
    handle: &Handle<D>,
    grads: &DispatchGrads<'_, D>,
) -> Result<()> {
    check_slots(call, "grad rows", handle, grads.rows)?;
    check_tokens(call, "d_tokens", handle, grads.rows, &grads.d_tokens)?;
    let acc = grads.rows.dtype().accumulator();
    if let Some(w) = &grads.weights {
        Error::check_dtype(call, "grad weights", acc, w.dtype())?;
        Error::check_shape(call, "grad weights", &[handle.rows()], w.dims())?;
    }
    if let Some(w) = &grads.d_weights {
        Error::check_dtype(call, "d_weights", acc, w.dtype())?;
        Error::check_shape(call, "d_weights", &[handle.tokens(), handle.spec().top_k], w.dims())?;
    }
    Ok(())
}
